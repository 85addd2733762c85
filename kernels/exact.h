// Tokens that a quantizer must not touch, since a number of theirs is NaN, infinite or too large: they are kept as rows, as
// are all tokens from `coded` on. And what a lossy codec did to the others.
#pragma once
#include "bits.h"
#include "loss.h"
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
  // The bits of all that are kept, and of what is behind the tile.
  METHOD u32 all_kept() const { return kept | (coded() < EXACT_TILE ? ~0u << coded() : 0); }
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

// The mask of quantized tokens of a tile with magnitudes from `limit` on (bits of the type).
template <class E>
FN u32 find_unfit(const Plane& plane, const ExactTile& tile, u32 limit) {
  u32 mask = 0;
  for (u32 g = 0; g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 i = 0; i < tile.coded(); ++i)
      if (largest(column.template load<false>(tile.start + i) & E::narrowed(splat(E::ABS))) >= limit) mask |= 1u << i;
  }
  return mask;
}

// Encodes a tile: `encode(tile, loss)` does, and `sums` get the loss. Tokens with magnitudes from `limit` on (bits of the type)
// are kept.
template <class E, class Encode>
FN void encode_tile(const Plane& plane, const ExactTokens& exact, u32 index, u32 limit, float* sums, Encode encode) {
  TileLoss loss = TileLoss::zero();
  if (index * EXACT_TILE < plane.tokens) {
    ExactTile tile = ExactTile::unread(plane, exact, index);
    float bound = scalar_to_float(E(), limit);
    for (;;) {
      encode(tile, loss);
      // Numbers that are too large, or none, do not hide in a small energy: nearly always one look at them is enough.
      if (tile.kept || first_lane(loss.energy.sum()) < bound * bound) break;
      tile.kept = find_unfit<E>(plane, tile, limit);
      if (!tile.kept) break;
      loss = TileLoss::zero();
      warp_sync();
    }
    store_uniform((u32*)exact.masks + index, tile.kept);
  }
  loss.store(sums);
}

// Copies the kept tokens of a tile from the rows.
template <class E>
FN void restore_kept(const Plane& plane, const ExactTokens& exact, const ExactTile& tile) {
  if (!tile.kept && tile.coded() == tile.tokens()) return;
  warp_sync();  // other lanes have written there
  u32 channels = plane.heads * plane.head_dim;
  for (u32 g = 0; g < (channels + LANES - 1) / LANES; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    const typename E::raw* rows = (const typename E::raw*)exact.rows + (u64)g * LANES;
    for (u32 i = 0; i < tile.tokens(); ++i)
      if (tile.keeps(i))
        column.template store<false>(tile.start + i, load_some(rows + (u64)tile.row_of(i) * channels, column.active));
  }
}

// Decodes a tile: `decode(tile)` does, and returns a status. Returns the tile's.
template <class E, class Decode>
FN u32 decode_tile(const Plane& plane, const ExactTokens& exact, u32 index, Decode decode) {
  if (index * EXACT_TILE >= plane.tokens) return OK;
  ExactTile tile = ExactTile::make(plane, exact, index);
  u32 found = tile.misfit(exact);
  if (found == OK) found = decode(tile);
  if (found == OK) restore_kept<E>(plane, exact, tile);
  return found;
}

// Whether the magnitudes of `count` numbers of a type are all below `limit`, as bits of the type.
template <class E>
FN bool all_below(const typename E::raw* numbers, u32 count, u32 limit) {
  typename E::vraw top = E::narrowed(splat(0));
  for (u32 i = 0; i < count; i += LANES) {
    u32 left = count - i;
    top = maximum(top, load_some(numbers + i, left < LANES ? left : LANES) & E::narrowed(splat(E::ABS)));
  }
  return largest(top) < limit;
}
