// The token section of CacheGen's blocks. It has, for each tile of 32 tokens: a head (smallest entry of the max tensor, width in
// bits, flag), the mask of exact tokens if the flag says so, and `width` words of bits: entry minus smallest, one token a lane.
#pragma once
#include "loss.h"
#include "rans.h"

constexpr u32 TILE = 32;
constexpr u32 TILE_WORDS = 3 + 32;
constexpr u32 EXACT_FLAG = 1u << 31;

// The head of a tile takes one word for 16-bit types (flag, width, smallest), two for float32 (flag and width; smallest).
template <class E>
struct TileHead {
  enum : u32 { WORDS = sizeof(typename E::raw) / 2 };
};

// One tile, taken from a section that trusts nothing; `fits` says whether it is whole.
struct Tile {
  vu32 entries;  // bits of the max tensor's entries, one token a lane
  u32 exact;     // mask of exact tokens
  bool fits;
};

template <class E>
FN Tile read_tile(const u32* words, u32 word_count, u32& at) {
  if (at + TileHead<E>::WORDS > word_count) return {splat(0), 0, false};
  u32 head = words[at], width = head >> 16 & 63u;
  u32 base = TileHead<E>::WORDS == 1 ? head & 0xffffu : words[at + 1];
  at += TileHead<E>::WORDS;
  u32 used = width + (head & EXACT_FLAG ? 1 : 0);
  if (width > 32 || used > word_count - at) return {splat(0), 0, false};
  Tile tile = {load_bits(words + at + used - width, width) + base, head & EXACT_FLAG ? words[at] : 0, true};
  at += used;
  return tile;
}

// What decoders make of steps from the middle, signed ones, where so many reach a token's largest magnitude.
struct Steps {
  Divisor levels;

  static METHOD Steps make(float levels) { return {Divisor::make(splatf(levels))}; }
  METHOD vf32 number(vu32 steps, float top) const { return levels.divide(int_to_float(steps)) * top; }
};

// What quantizes a token. Of one of zeros all is 0, and so are its symbols.
struct alignas(16) TokenScale {
  float factor, offset;  // x * factor + offset is what rounds to the symbol of x
  float step;            // from a symbol's number to the next one's
  float top;             // the largest magnitude

  // The symbol nearest to a number, plus ROUNDER.
  METHOD vf32 raise(vf32 x) const { return x * factor + offset + ROUNDER; }
  // What a raised symbol comes back as, `middle` being that of 0. The decoder divides by the levels first: a difference far
  // below the error that is measured.
  template <class E>
  METHOD vf32 restored(vf32 raised, float middle) const {
    return E::nearest((raised - middle) * step);
  }
};
// The symbol of 0, raised.
FN float raised_middle(u32 levels) { return ROUNDER + (float)levels; }

// What coding does to 32 channels, one a lane.
struct GroupLoss {
  StripLoss of_lane;

  static METHOD GroupLoss zero() { return {StripLoss::zero()}; }
  METHOD void add(vf32 x, vf32 difference) { of_lane.add(0, x, difference); }
  METHOD void add_kept(vf32 x) { of_lane.add_kept(0, x); }
  METHOD void store(float* sums) const {
    store_loss(sums, warp_sum(of_lane.squared.v[0]), warp_sum(of_lane.energy.v[0]), of_lane.worst);
  }
};
