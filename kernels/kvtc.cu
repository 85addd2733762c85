// kvtc: transform coding. Keys are un-rotated, planes scaled, a basis applied between the kernels (a matrix product of
// its own), numbers rounded to multiples of one step, columns of integers coded by rANS with the discretized normal
// distribution that their moments choose. docs/format.md is normative.
//
// A *coefficient row* holds a token's scaled numbers: without a basis the channels of one plane, with one its
// components.
#include "kvtc.h"
#include "loss.h"
#include "turned.h"

constexpr u32 KVTC_RUN = 4 * KVTC_TILE;  // tokens of a strip that a warp has at once

// A plane of a batch, on either side of the transform.
struct KvtcPlane {
  Plane rows;    // the plane's part of the block's coefficient rows, as a plane of floats
  u64 scales;    // float [tokens]: what a number is multiplied by
  u64 cosines;   // float [tokens][head_dim], 0 without rotation: see `Angles`
  u64 sines;     // float [tokens][head_dim]
  u64 partners;  // u32 [head_dim]
  u64 exact;     // u32 [tiles]: mask of tokens that are kept exact
  float length, largest;  // a number's magnitude times the length may be as large as that

  METHOD bool too_large(vf32 magnitudes) const { return ballot(magnitudes * length > splatf(largest)) != 0; }
  METHOD Angles angles() const { return {(const float*)cosines, (const float*)sines, (const u32*)partners}; }
};

// What a warp has: a run of tokens of a strip. There are as many warps as 32 channels take: where a strip is wider, the last
// ones have none.
struct KvtcRun {
  u32 strip, start, tokens;

  static METHOD KvtcRun make(const Plane& plane, u32 warp, u32 groups) {
    u32 strip = warp % groups, start = warp / groups * KVTC_RUN, left = start < plane.tokens ? plane.tokens - start : 0;
    if (strip * STRIP >= plane.heads * plane.head_dim) left = 0;
    return {strip, start, left < KVTC_RUN ? left : KVTC_RUN};
  }
  METHOD const u32* exact(const KvtcPlane& side) const { return (const u32*)side.exact + start / KVTC_TILE; }
};

// ------------------------------------------------------------------------------------------- what a block is like

// One warp a tile of a plane: the mask of tokens with NaN or Inf, and the tokens' mean squares (of finite tokens).
template <class E>
FN void kvtc_tokens_tile(const Plane& plane, u32 tile, float* sums, u32* unfit, float* squares) {
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  u32 start = tile * KVTC_TILE, tokens = plane.tokens - start < KVTC_TILE ? plane.tokens - start : KVTC_TILE;
  for (u32 g = 0; g < groups; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 first = 0; first < tokens; first += ROWS) {
      typename E::vraw loaded[ROWS];
      for (u32 r = 0; r < ROWS; ++r) {
        u32 t = start + (first + r < tokens ? first + r : first);
        loaded[r] = column.whole ? column.template load<true>(t) : column.template load<false>(t);
      }
      for (u32 r = 0; r < ROWS && first + r < tokens; ++r) {
        u32* own = (u32*)sums + (first + r) * LANES;
        vf32 x = E::to_float(loaded[r]), sum = x * x;
        store_u32(own, as_bits(g ? as_float(load_u32(own)) + sum : sum));
      }
    }
  }
  vu32 result = splat(0);
  for (u32 t = 0; t < tokens; ++t) {
    float sum = first_lane(warp_sum(as_float(load_u32((const u32*)sums + t * LANES))));
    result = with_lane(result, t, scalar_as_bits(sum));
  }
  vf32 mean = as_float(result) / (float)channels;
  // A sum of squares that overflows counts as unfit, too.
  store_uniform(unfit, ballot((result & 0x7fffffffu) >= 0x7f800000u));
  store_u32((u32*)squares, as_bits(mean));
}

#define KVTC_TOKENS(suffix, E)                                                                                         \
  KERNEL(kvtc_tokens_##suffix, const Plane* planes, u32* unfit, float* squares, u32 tiles) {                           \
    WARP_SHARED(float, sums, KVTC_TILE* LANES);                                                                        \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 plane = warp / tiles, tile = warp % tiles;                                                                   \
      if (tile * KVTC_TILE < planes[plane].tokens)                                                                     \
        kvtc_tokens_tile<E>(planes[plane], tile, sums, unfit + warp, squares + (u64)warp * KVTC_TILE);                 \
      else                                                                                                             \
        store_uniform(unfit + warp, 0u);                                                                               \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(KVTC_TOKENS)

// One warp a group of a key plane: the channels' variances over the tokens that are not exact.
template <class E>
FN void kvtc_variance(const Plane& plane, const KvtcPlane& side, u32 group, float* variances) {
  typedef typename TurnedColumn<E>::Loaded Loaded;
  TurnedColumn<E> keys = TurnedColumn<E>::make(plane, side.angles(), group);
  const u32* exact = (const u32*)side.exact;
  vf32 sum = splatf(0.f), squares = splatf(0.f);
  u32 count = 0;
  auto as_is = [](vf32 x) { return x; };
  auto load = [&](u32 t) { return keys.load(t); };
  inexact_in_turn<FORWARDS, 8>(plane.tokens, exact, load, [&](u32 t, const Loaded& loaded) {
    sum = sum + keys.numbers(t, loaded, as_is);
    ++count;
  });
  float n = count ? (float)count : 1.f;
  vf32 mean = sum / n;
  inexact_in_turn<FORWARDS, 8>(plane.tokens, exact, load, [&](u32 t, const Loaded& loaded) {
    vf32 d = keys.numbers(t, loaded, as_is) - mean;
    squares = squares + d * d;
  });
  store_u32((u32*)variances, as_bits(squares / n));
}

#define KVTC_VARIANCE(suffix, E)                                                                                    \
  KERNEL(kvtc_variance_##suffix, const Plane* planes, const KvtcPlane* sides, float* variances, u32 groups) {       \
    FOR_EACH_WARP(warp)                                                                                             \
    kvtc_variance<E>(planes[warp / groups], sides[warp / groups], warp % groups, variances + (u64)warp * LANES);    \
  }
FOR_ELEMENT_TYPES(KVTC_VARIANCE)

// ------------------------------------------------------------------------------------------- planes to rows and back

// Numbers and what they are multiplied by.
template <class Loaded>
struct Scaled {
  Loaded numbers;
  float scale;
};
FN Pack<vu32> bits_of(const Pack<vf32>& x) {
  Pack<vu32> bits;
  for (int i = 0; i < PACK; ++i) bits.v[i] = as_bits(x.v[i]);
  return bits;
}

// Un-rotate, scale, into the coefficient rows; zeros for exact tokens. The largest magnitude of each lane.
template <Turn T, class E>
FN vf32 kvtc_forward_run(const KvtcPlane& side, const KvtcRun& run, const TurnedStrip<E>& turned, const Strip<Fp32>& rows) {
  typedef Scaled<typename TurnedStrip<E>::Loaded> Loaded;
  constexpr bool WHOLE = T != ODD;
  vf32 top = splatf(0.f);
  const float* scales = (const float*)side.scales + run.start;
  auto load = [&](u32 t) { return Loaded{turned.template load<T>(run.start + t), scales[t]}; };
  inexact_in_turn<FORWARDS, T == ODD ? 1 : 2>(run.tokens, run.exact(side), load, [&](u32 t, const Loaded& loaded) {
    Pack<vf32> z = turned.template numbers<T>(run.start + t, loaded.numbers, [](vf32 x) { return x; });
    for (int i = 0; i < PACK; ++i) {
      z.v[i] = z.v[i] * loaded.scale;
      top = larger(top, magnitude_of(z.v[i]));
    }
    rows.template store<WHOLE>(run.start + t, Strip<Fp32>::loaded(bits_of(z)));
  });
  exact_in_turn(run.tokens, run.exact(side), [&](u32 t) {
    rows.template store<WHOLE>(run.start + t, Strip<Fp32>::loaded(bits_of({})));
  });
  return top;
}

// The masks of a run's tokens with numbers that are too large, found in the rows.
FN void mark_large(const KvtcPlane& side, const KvtcRun& run, const Strip<Fp32>& rows, u32* large) {
  for (u32 first = 0; first < run.tokens; first += KVTC_TILE) {
    u32 mask = 0;
    for (u32 t = first; t < run.tokens && t < first + KVTC_TILE; ++t) {
      auto row = Strip<Fp32>::values(rows.template load<false>(run.start + t));
      vf32 top = splatf(0.f);
      for (int i = 0; i < PACK; ++i) top = larger(top, magnitude_of(as_float(row.v[i])));
      if (side.too_large(top)) mask |= 1u << t % KVTC_TILE;
    }
    store_uniform(large + first / KVTC_TILE, mask);
  }
}

template <class E>
FN void kvtc_forward(const Plane& plane, const KvtcPlane& side, const KvtcRun& run, u32* large) {
  for (u32 i = 0; i < KVTC_RUN / KVTC_TILE; ++i) store_uniform(large + i, 0u);
  if (run.tokens == 0) return;
  Strip<Fp32> rows = Strip<Fp32>::make(side.rows, run.strip);
  TurnedStrip<E> turned = TurnedStrip<E>::make(plane, side.angles(), run.strip, rows.whole);
  vf32 top;
#define FORWARD(T) top = kvtc_forward_run<T>(side, run, turned, rows)
  FOR_TURN(turned.turn, FORWARD)
#undef FORWARD
  if (side.too_large(top)) mark_large(side, run, rows, large);
}

// One warp a KvtcRun. `large`: u32 [planes][runs][groups][KVTC_RUN / KVTC_TILE].
#define KVTC_FORWARD(suffix, E)                                                                                        \
  KERNEL(kvtc_forward_##suffix, const Plane* planes, const KvtcPlane* sides, u32* large, u32 groups, u32 runs) {        \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / (groups * runs)];                                                             \
      KvtcRun run = KvtcRun::make(plane, warp % (groups * runs), groups);                                              \
      kvtc_forward<E>(plane, sides[warp / (groups * runs)], run, large + (u64)warp * (KVTC_RUN / KVTC_TILE));          \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(KVTC_FORWARD)

// The numbers that coefficient rows stand for.
template <Turn T>
FN Pack<vf32> restored(const TurnedStrip<Fp32>& rows, u32 token, const Scaled<TurnedStrip<Fp32>::Loaded>& loaded) {
  return rows.numbers<T>(token, loaded.numbers, [&](vf32 x) { return x * loaded.scale; });
}

template <Turn T, class E>
FN void kvtc_inverse_run(const KvtcPlane& side, const KvtcRun& run, const TurnedStrip<Fp32>& rows, const Strip<E>& strip) {
  typedef Scaled<TurnedStrip<Fp32>::Loaded> Loaded;
  const float* scales = (const float*)side.scales + run.start;
  auto load = [&](u32 t) { return Loaded{rows.load<T>(run.start + t), scales[t]}; };
  inexact_in_turn<FORWARDS, T == ODD ? 1 : 2>(run.tokens, run.exact(side), load, [&](u32 t, const Loaded& loaded) {
    Pack<vf32> x = restored<T>(rows, run.start + t, loaded);
    Pack<typename E::vraw> numbers;
    for (int i = 0; i < PACK; ++i) numbers.v[i] = E::from_float(x.v[i]);
    strip.template store<T != ODD>(run.start + t, Strip<E>::loaded(numbers));
  });
}

template <class E>
FN void kvtc_inverse(const Plane& plane, const KvtcPlane& side, const KvtcRun& run) {
  if (run.tokens == 0) return;
  Strip<E> strip = Strip<E>::make(plane, run.strip);
  TurnedStrip<Fp32> rows = TurnedStrip<Fp32>::make(side.rows, side.angles(), run.strip, strip.whole);
#define INVERSE(T) kvtc_inverse_run<T>(side, run, rows, strip)
  FOR_TURN(rows.turn, INVERSE)
#undef INVERSE
}

// A token in the plane and in the coefficient rows.
template <class E>
struct KvtcBoth {
  typename Strip<E>::Loaded plane;
  Scaled<TurnedStrip<Fp32>::Loaded> row;
};

// What the inverse would make, beside the plane as it is.
template <Turn T, class E>
FN StripLoss kvtc_errors_run(const KvtcPlane& side, const KvtcRun& run, const TurnedStrip<Fp32>& rows, const Strip<E>& strip) {
  constexpr bool WHOLE = T != ODD;
  StripLoss loss = StripLoss::zero();
  const float* scales = (const float*)side.scales + run.start;
  auto load = [&](u32 t) {
    return KvtcBoth<E>{strip.template load<WHOLE>(run.start + t), {rows.load<T>(run.start + t), scales[t]}};
  };
  inexact_in_turn<FORWARDS, T == STRAIGHT ? 2 : 1>(run.tokens, run.exact(side), load, [&](u32 t, const KvtcBoth<E>& loaded) {
    auto numbers = Strip<E>::values(loaded.plane);
    Pack<vf32> found = restored<T>(rows, run.start + t, loaded.row);
    for (int i = 0; i < PACK; ++i) {
      vf32 x = E::number(numbers.v[i]);
      loss.add(i, x, E::nearest(found.v[i]) - x);
    }
  });
  exact_in_turn(run.tokens, run.exact(side), [&](u32 t) {
    auto numbers = Strip<E>::values(strip.template load<WHOLE>(run.start + t));
    for (int i = 0; i < PACK; ++i) loss.add_kept(i, E::to_float(numbers.v[i]));
  });
  return loss;
}

// Of 128 channels on either side of warp.h, so that sums are the same: a warp takes several strips where they are narrower.
template <class E>
FN void kvtc_errors(const Plane& plane, const KvtcPlane& side, KvtcRun run, float* errors) {
  constexpr u32 TOGETHER = 4 / PACK;
  TileLoss loss = TileLoss::zero();
  if (run.strip % TOGETHER) run.tokens = 0;
  for (u32 i = 0; i < TOGETHER; ++i, ++run.strip) {
    if (!run.tokens || run.strip * STRIP >= plane.heads * plane.head_dim) break;
    Strip<E> strip = Strip<E>::make(plane, run.strip);
    TurnedStrip<Fp32> rows = TurnedStrip<Fp32>::make(side.rows, side.angles(), run.strip, strip.whole);
#define ERRORS(T) loss.add(strip, kvtc_errors_run<T>(side, run, rows, strip))
    FOR_TURN(rows.turn, ERRORS)
#undef ERRORS
  }
  loss.store(errors);
}

// One warp a KvtcRun. Errors: squared error, energy, largest error; 0 of warps that have none.
#define KVTC_INVERSE(suffix, E)                                                                                        \
  KERNEL(kvtc_inverse_##suffix, const Plane* planes, const KvtcPlane* sides, u32 groups, u32 runs) {                   \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / (groups * runs)];                                                             \
      kvtc_inverse<E>(plane, sides[warp / (groups * runs)], KvtcRun::make(plane, warp % (groups * runs), groups));     \
    }                                                                                                                  \
  }                                                                                                                    \
  KERNEL(kvtc_errors_##suffix, const Plane* planes, const KvtcPlane* sides, float* errors, u32 groups, u32 runs) {     \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / (groups * runs)];                                                             \
      KvtcRun run = KvtcRun::make(plane, warp % (groups * runs), groups);                                              \
      kvtc_errors<E>(plane, sides[warp / (groups * runs)], run, errors + (u64)warp * 3);                               \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(KVTC_INVERSE)
