// What a lossy codec did to the numbers of a tile: squared error, energy and the largest error.
#pragma once
#include "warp.h"

// Of one strip, for each channel of a lane.
struct StripLoss {
  Pack<vf32> squared, energy;
  vf32 worst;

  static METHOD StripLoss zero() {
    StripLoss loss;
    for (int i = 0; i < PACK; ++i) loss.squared.v[i] = loss.energy.v[i] = splatf(0.f);
    loss.worst = splatf(0.f);
    return loss;
  }
  METHOD void add(int i, vf32 x, vf32 difference) {
    squared.v[i] = fused(difference, difference, squared.v[i]);
    energy.v[i] = fused(x, x, energy.v[i]);
    worst = larger(worst, magnitude_of(difference));
  }
  // What is kept as it is has energy, where it is a number, and no error.
  METHOD void add_kept(int i, vf32 x) {
    energy.v[i] = energy.v[i] + select((vm32)(magnitude_of(x) < infinity()), x * x, splatf(0.f));
  }
  // Whether no sum has met a NaN or an infinity.
  METHOD bool finite() const {
    vf32 sum = splatf(0.f);
    for (int i = 0; i < PACK; ++i) sum = sum + (squared.v[i] + energy.v[i]);
    return all(sum < infinity());
  }
};

// `squared` and `energy` of all lanes, in the first one.
FN void store_loss(float* sums, vf32 squared, vf32 energy, vf32 worst) {
  store_uniform(sums, first_lane(squared));
  store_uniform(sums + 1, first_lane(energy));
  store_uniform(sums + 2, first_lane(warp_max(worst)));
}

struct TileLoss {
  StripSum squared, energy;
  vf32 worst;

  static METHOD TileLoss zero() { return {StripSum::zero(), StripSum::zero(), splatf(0.f)}; }
  template <class E>
  METHOD void add(const Strip<E>& strip, StripLoss loss) {
    for (int i = 0; i < PACK; ++i) {
      loss.squared.v[i] = strip.zero_if_idle(loss.squared.v[i], i);
      loss.energy.v[i] = strip.zero_if_idle(loss.energy.v[i], i);
    }
    squared.add(loss.squared);
    energy.add(loss.energy);
    worst = larger(worst, strip.zero_if_idle(loss.worst, 0));
  }
  METHOD void store(float* sums) const { store_loss(sums, squared.sum(), energy.sum(), worst); }
};
