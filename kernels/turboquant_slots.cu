// TurboQuant as LMCache stores it: rotated keys as indices of a codebook, values on a uniform grid per row, packed.
//
// Every operation rounds as LMCache's float32 kernels do, so that the packed bytes are LMCache's own. One warp takes a tile.
#include "rotation.h"

struct SlotBlock {
  u64 indices;   // u8 [tokens][heads][ceil(head_dim * bits / 8)]
  u64 scalars;   // fp16: keys [tokens][heads] norms, values [tokens][heads][2] scale and zero
  u64 rotation;  // float [2][32 * registers]: keys only
  u64 codebook;  // struct Codebook: keys only
  u32 bits, reserved;
};

struct Codebook {
  float levels[16], midpoints[16];
  u32 squares_high[16], squares_low[16];  // of the levels, in 2^-24, and the rest in 2^-44
};

FN u32 packed_bytes(u32 length, u32 bits) { return (length * bits + 7) / 8; }

template <int R>
FN void store_indices(u8* row, const vu32* indices, u32 length, u32 bits) {
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    u32 active = active_lanes(length, r);
    vu32 v = select(lane_ids() < active, indices[r], splat(0));
    if (bits == 3)
      store_packed<3>(row + r * 12, v, active);
    else
      store_packed<4>(row + r * 16, v, active);
  }
}
template <int R>
FN void load_indices(vu32* indices, const u8* row, u32 length, u32 bits) {
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    u32 active = active_lanes(length, r);
    indices[r] = bits == 3 ? load_packed<3>(row + r * 12, active) : load_packed<4>(row + r * 16, active);
  }
}
FN void store_half(u16* p, vu16 half) { store_some(p, half, 1); }

// A NaN is always the same: which one arithmetic gives is a processor's own affair.
FN vu16 half_of(vf32 x) { return float_to_half(select((as_bits(x) & 0x7fffffffu) > 0x7f800000u, as_float(splat(0x7fc00000)), x)); }
// As LMCache casts, by way of fp16.
template <class E>
FN typename E::vraw from_half(vf32 x) {
  return E::from_float(half_to_float(float_to_half(x)));
}

// ------------------------------------------------------------------------------------------- keys

// The length of a vector of levels, the exact one rounded once: sums of float32 would depend on their order.
template <int R>
FN float code_length(const vu32* indices, const Codebook& codebook, u32 length) {
  vu32 high = splat(0), low = splat(0);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    vm32 active = lane_ids() < active_lanes(length, r);
    high = high + select(active, as_bits(lookup_16((const float*)codebook.squares_high, indices[r])), splat(0));
    low = low + select(active, as_bits(lookup_16((const float*)codebook.squares_low, indices[r])), splat(0));
  }
  u64 squares = ((u64)first_lane(warp_sum(high)) << 20) + first_lane(warp_sum(low));
  return (float)scalar_square_root((double)squares) * 0x1p-22f;
}

// Levels of the indices, made a vector of length `norm`, rotated back; not yet cast.
template <int R>
FN void restore_key(vf32* x, const vu32* indices, float norm, const Rotation& rotation, const Codebook& codebook,
                    u32 length) {
  float own = code_length<R>(indices, codebook, length);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    vf32 level = select(lane_ids() < active_lanes(length, r), lookup_16(codebook.levels, indices[r]), splatf(0.f));
    x[r] = half_to_float(float_to_half(level / own * norm));
  }
  hadamard<R>(x, length);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r)
    // A sum of 0 has no sign, whatever it is multiplied with.
    if (active_lanes(length, r))
      x[r] = x[r] * load_floats(rotation.scales + r * LANES) * load_floats(rotation.signs + r * LANES) + 0.f;
}

template <class E, int R>
FN void encode_keys(const Plane& plane, const SlotBlock& block, const RowTile& tile, u32* exact, float* sums) {
  u32 length = plane.head_dim, bytes = packed_bytes(length, block.bits);
  Rotation rotation = Rotation::make(block.rotation, length);
  const Codebook& codebook = *(const Codebook*)block.codebook;
  RowErrors errors = RowErrors::make();
  for (u32 t = tile.start; t < tile.stop; ++t) {
    u64 row = (u64)t * plane.heads + tile.head;
    vf32 x[R], y[R], squares = splatf(0.f);
    load_row<E, R>(x, plane, t, tile.head);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) squares = squares + x[r] * x[r];
    vf32 norm = square_root(warp_sum(squares));
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      y[r] = active_lanes(length, r) ? x[r] / (norm + 1e-8f) * load_floats(rotation.signs + r * LANES) : splatf(0.f);
    hadamard<R>(y, length);
    vu32 indices[R];
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      indices[r] = splat(0);
      if (!active_lanes(length, r)) continue;
      y[r] = y[r] * load_floats(rotation.scales + r * LANES);
      for (u32 i = 0; i + 1 < 1u << block.bits; ++i)
        indices[r] = indices[r] + select(y[r] >= codebook.midpoints[i], splat(1), splat(0));
    }
    store_indices<R>((u8*)block.indices + row * bytes, indices, length, block.bits);
    vu16 half = half_of(norm);
    store_half((u16*)block.scalars + row, half);

    restore_key<R>(y, indices, first_lane(half_to_float(half)), rotation, codebook, length);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) y[r] = E::to_float(from_half<E>(y[r]));
    load_row<E, R>(x, plane, t, tile.head);  // again: so many registers are not there to keep it
    errors.add<R>(x, y, t - tile.start);
  }
  store_uniform(exact, errors.exact);
  errors.store(sums);
}

template <class E, int R>
FN void decode_keys(const Plane& plane, const SlotBlock& block, const RowTile& tile) {
  u32 length = plane.head_dim, bytes = packed_bytes(length, block.bits);
  Rotation rotation = Rotation::make(block.rotation, length);
  for (u32 t = tile.start; t < tile.stop; ++t) {
    u64 row = (u64)t * plane.heads + tile.head;
    vu32 indices[R];
    vf32 x[R];
    load_indices<R>(indices, (const u8*)block.indices + row * bytes, length, block.bits);
    float norm = scalar_half_to_float(((const u16*)block.scalars)[row]);
    restore_key<R>(x, indices, norm, rotation, *(const Codebook*)block.codebook, length);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) store_piece(row_of<E>(plane, t, tile.head), from_half<E>(x[r]), length, r);
  }
}

// ------------------------------------------------------------------------------------------- values

template <class E, int R>
FN void encode_values(const Plane& plane, const SlotBlock& block, const RowTile& tile, u32* exact, float* sums) {
  u32 length = plane.head_dim, bytes = packed_bytes(length, block.bits);
  float top = (float)((1u << block.bits) - 1);
  vf32 infinity = as_float(splat(0x7f800000));
  RowErrors errors = RowErrors::make();
  for (u32 t = tile.start; t < tile.stop; ++t) {
    u64 row = (u64)t * plane.heads + tile.head;
    vf32 x[R], y[R], high = splatf(0.f) - infinity, low = high;
    load_row<E, R>(x, plane, t, tile.head);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      vm32 active = lane_ids() < active_lanes(length, r);
      high = maximum(high, select(active, x[r], splatf(0.f) - infinity));
      low = maximum(low, select(active, splatf(0.f) - x[r], splatf(0.f) - infinity));
    }
    vf32 zero = splatf(0.f) - warp_max(low);
    vf32 scale = maximum((warp_max(high) - zero) / top, splatf(1e-8f));
    vu16 half_scale = half_of(scale), half_zero = half_of(zero);
    float s = first_lane(half_to_float(half_scale)), z = first_lane(half_to_float(half_zero));
    vu32 indices[R];
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      // Comparisons send what is no number to 0.
      vf32 place = (x[r] - zero) / scale + 0.5f;
      place = select(place > 0.f, place, splatf(0.f));
      indices[r] = truncate(select(place < top, place, splatf(top)));
      y[r] = E::to_float(from_half<E>(int_to_float(indices[r]) * s + z));
      y[r] = select(lane_ids() < active_lanes(length, r), y[r], splatf(0.f));
    }
    store_indices<R>((u8*)block.indices + row * bytes, indices, length, block.bits);
    store_half((u16*)block.scalars + 2 * row, half_scale);
    store_half((u16*)block.scalars + 2 * row + 1, half_zero);
    errors.add<R>(x, y, t - tile.start);
  }
  store_uniform(exact, errors.exact);
  errors.store(sums);
}

template <class E, int R>
FN void decode_values(const Plane& plane, const SlotBlock& block, const RowTile& tile) {
  u32 length = plane.head_dim, bytes = packed_bytes(length, block.bits);
  for (u32 t = tile.start; t < tile.stop; ++t) {
    u64 row = (u64)t * plane.heads + tile.head;
    vu32 indices[R];
    load_indices<R>(indices, (const u8*)block.indices + row * bytes, length, block.bits);
    const u16* scalars = (const u16*)block.scalars + 2 * row;
    float scale = scalar_half_to_float(scalars[0]), zero = scalar_half_to_float(scalars[1]);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      store_piece(row_of<E>(plane, t, tile.head), from_half<E>(int_to_float(indices[r]) * scale + zero), length, r);
  }
}

// `exact`: a word per tile, the rows that no slot can hold. `sums`: squared error, energy, largest error of each tile.
#define SLOT_KERNELS(suffix, E, kind)                                                                                  \
  KERNEL(slots_encode_##kind##_##suffix, const Plane* planes, const SlotBlock* blocks, u32* exact, float* sums,        \
         u32 tiles) {                                                                                                  \
    FOR_EACH_WARP(warp) {                                                                                              \
      RowTile tile = RowTile::make(planes, warp, tiles);                                                               \
      FOR_ROW_SIZE(encode_##kind, E, planes[tile.block], blocks[tile.block], tile, exact + warp, sums + (u64)warp * 3); \
    }                                                                                                                  \
  }                                                                                                                    \
  KERNEL(slots_decode_##kind##_##suffix, const Plane* planes, const SlotBlock* blocks, u32 tiles) {                    \
    FOR_EACH_WARP(warp) {                                                                                              \
      RowTile tile = RowTile::make(planes, warp, tiles);                                                               \
      FOR_ROW_SIZE(decode_##kind, E, planes[tile.block], blocks[tile.block], tile);                                    \
    }                                                                                                                  \
  }
#define SLOT_KEYS(suffix, E) SLOT_KERNELS(suffix, E, keys)
#define SLOT_VALUES(suffix, E) SLOT_KERNELS(suffix, E, values)
FOR_ELEMENT_TYPES(SLOT_KEYS)
FOR_ELEMENT_TYPES(SLOT_VALUES)
