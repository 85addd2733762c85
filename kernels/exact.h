// Tokens that a quantizer must not touch, since a number of theirs is NaN, infinite or too large: they are kept as rows, as
// are all tokens from `coded` on. And what a lossy codec did to the others.
#pragma once
#include "bits.h"
#include "rans.h"

constexpr u32 EXACT_TILE = 32;

struct ExactTokens {
  u64 masks;  // u32 per tile of 32 tokens: those of the first `coded` tokens that are kept; 0 if none is
  u64 rows;   // [row_count][channels], of the plane's type
  u32 coded, row_count;
};

// A tile of a block: its tokens start..stop, of which start..coded_stop are quantized but for those in `kept`.
struct ExactTile {
  u32 start, stop, coded_stop, kept, first_row;
  bool last;

  // Before the encoder knows what is kept.
  static METHOD ExactTile unread(const Plane& plane, const ExactTokens& exact, u32 tile) {
    ExactTile t;
    t.start = tile * EXACT_TILE;
    t.stop = t.start + EXACT_TILE < plane.tokens ? t.start + EXACT_TILE : plane.tokens;
    t.coded_stop = t.stop < exact.coded ? t.stop : exact.coded < t.start ? t.start : exact.coded;
    t.last = t.stop == plane.tokens;
    t.kept = t.first_row = 0;
    return t;
  }
  static METHOD ExactTile make(const Plane& plane, const ExactTokens& exact, u32 tile) {
    ExactTile t = unread(plane, exact, tile);
    const u32* masks = (const u32*)exact.masks;
    t.kept = masks && t.start < exact.coded ? masks[tile] : 0;
    t.first_row = t.start < exact.coded ? 0 : t.start - exact.coded;
    if (masks)
      for (u32 i = 0; i < tile && i * EXACT_TILE < exact.coded; ++i) t.first_row += bits_set(masks[i]);
    return t;
  }
  METHOD u32 index() const { return start / EXACT_TILE; }
  METHOD u32 tokens() const { return stop - start; }
  METHOD u32 coded() const { return coded_stop - start; }
  METHOD bool keeps(u32 i) const { return i >= coded() || (kept >> i & 1); }
  // The row of token `start + i`, which is kept.
  METHOD u32 row_of(u32 i) const {
    u32 before = i < coded() ? i : coded();
    return first_row + bits_set(kept & (before < 32 ? (1u << before) - 1u : ~0u)) + (i - before);
  }
  // A decoder's status: whether masks and rows fit together.
  METHOD u32 misfit(const ExactTokens& exact) const {
    u32 rows = bits_set(kept) + tokens() - coded();
    bool stray = coded() < 32 && kept >> coded() != 0;
    return stray || first_row + rows > exact.row_count || (last && first_row + rows != exact.row_count) ? BAD_ROWS : OK;
  }
};

// The mask of tokens of a tile with magnitudes from `limit` on (bits of the type). `running`: scratch [32][32].
template <class E>
FN u32 find_unfit(const Plane& plane, const ExactTile& tile, u32 limit, typename E::raw* running) {
  typedef typename E::vraw vraw;
  for (u32 g = 0; g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 i = 0; i < tile.coded(); ++i) {
      u32 t = tile.start + i;
      vraw x = column.whole ? column.template load<true>(t) : column.template load<false>(t);
      vraw magnitude = x & E::narrowed(splat(E::ABS));
      if (g) magnitude = maximum(magnitude, load_lanes(running + i * LANES));
      store_lanes(running + i * LANES, magnitude);
    }
  }
  u32 mask = 0;
  for (u32 i = 0; i < tile.coded(); ++i)
    if (largest(load_lanes(running + i * LANES)) >= limit) mask |= 1u << i;
  return mask;
}

// An encoder's tile, its unfit tokens found and written down.
template <class E>
FN ExactTile mark_unfit(const Plane& plane, const ExactTokens& exact, u32 tile, u32 limit, typename E::raw* running) {
  ExactTile t = ExactTile::unread(plane, exact, tile);
  t.kept = find_unfit<E>(plane, t, limit, running);
  store_uniform((u32*)exact.masks + tile, t.kept);
  return t;
}

// Copies the kept tokens of a tile from the rows, for one column.
template <class E, bool WHOLE>
FN void restore_rows(const ExactTokens& exact, const ExactTile& tile, u32 channels, u32 group, const Column<E>& column) {
  const typename E::raw* rows = (const typename E::raw*)exact.rows + (u64)group * LANES;
  for (u32 i = 0; i < tile.tokens(); ++i) {
    if (!tile.keeps(i)) continue;
    const typename E::raw* row = rows + (u64)tile.row_of(i) * channels;
    column.template store<WHOLE>(tile.start + i, WHOLE ? load_lanes(row) : load_some(row, column.active));
  }
}

// Squared error, energy and largest error, lane by lane.
struct LossSums {
  vf32 squared, energy, worst;

  static METHOD LossSums make() { return {splatf(0.f), splatf(0.f), splatf(0.f)}; }
  METHOD void add(vf32 x, vf32 restored) {
    vf32 difference = restored - x;
    squared = squared + difference * difference;
    energy = energy + x * x;
    worst = maximum(worst, absolute(difference));
  }
  // A kept token has energy, where it is a number, and no error.
  METHOD void add_kept(vf32 x) {
    energy = energy + select((vm32)(absolute(x) < as_float(splat(0x7f800000))), x * x, splatf(0.f));
  }
  METHOD void store(float* sums) const {
    float all[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
    for (u32 i = 0; i < 3; ++i) store_uniform(sums + i, all[i]);
  }
};
