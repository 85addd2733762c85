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

// The slots of a tile, one after the other.
struct TileSlots {
  u8* indices;
  u16* scalars;
  u64 indices_pitch, scalars_pitch;
  u32 bits;

  // `count`: scalars of a slot.
  static METHOD TileSlots make(const Plane& plane, u32 length, const SlotBlock& block, const RowTile& tile, u32 count) {
    u64 first = (u64)tile.start * plane.heads + tile.head, bytes = (length * block.bits + 7) / 8;
    return {(u8*)block.indices + first * bytes, (u16*)block.scalars + first * count, plane.heads * bytes,
            (u64)plane.heads * count, block.bits};
  }
  METHOD void next() {
    indices += indices_pitch;
    scalars += scalars_pitch;
  }
  template <int R>
  METHOD void store(vu32* of_row, u32 length) const {
#pragma unroll
    for (int r = 0; r < R; ++r) of_row[r] = zero_if_idle(of_row[r], active_lanes(length, r));
    if (bits == 3)
      store_packed<3, R>(indices, of_row, length);
    else
      store_packed<4, R>(indices, of_row, length);
  }
  template <int R>
  METHOD void load(vu32* of_row, u32 length) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      u32 active = active_lanes(length, r);
      of_row[r] = bits == 3 ? load_packed<3>(indices + r * 12, active) : load_packed<4>(indices + r * 16, active);
    }
  }
};

FN void store_half(u16* p, vu16 half) { store_some(p, half, 1); }

// A NaN is always the same: which one arithmetic gives is a processor's own affair.
FN vu16 half_of(vf32 x) {
  return float_to_half(select((as_bits(x) & 0x7fffffffu) > 0x7f800000u, as_float(splat(0x7fc00000)), x));
}
// As LMCache casts, by way of fp16. Rows with NaN are kept exact: which one comes of it does not matter.
template <class E>
FN vf32 cast(vf32 x) {
  return E::nearest(nearest_half(x));
}

// ------------------------------------------------------------------------------------------- keys

// The codebook, an entry a lane.
struct Levels {
  Bounds midpoints;
  vf32 levels;
  vu32 squares_high, squares_low;

  static METHOD Levels make(u64 address, u32 bits) {
    const Codebook& codebook = *(const Codebook*)address;
    vu32 entry = lane_ids() & 15u;
    return {Bounds::make(codebook.midpoints, (1u << bits) - 1), gather_f32(codebook.levels, entry),
            as_bits(gather_f32((const float*)codebook.squares_high, entry)),
            as_bits(gather_f32((const float*)codebook.squares_low, entry))};
  }
  // The length of a vector of levels, the exact one rounded once: sums of float32 would depend on their order.
  template <int R>
  METHOD float length_of(const vu32* indices, u32 length) const {
    vu32 high = splat(0), low = splat(0);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      u32 active = active_lanes(length, r);
      high = high + zero_if_idle(lookup_16(squares_high, indices[r]), active);
      low = low + zero_if_idle(lookup_16(squares_low, indices[r]), active);
    }
    u64 squares = ((u64)uniform_sum(high) << 20) + uniform_sum(low);
    return (float)scalar_square_root((double)squares) * 0x1p-22f;
  }
};

// Levels of the indices, made a vector of length `norm`, rotated back; not yet cast.
template <int R>
FN void restore_key(vf32* x, const vu32* indices, vf32 norm, const Rotation<R>& rotation, const Levels& codebook,
                    u32 length) {
  vf32 levels = nearest_half(codebook.levels / codebook.length_of<R>(indices, length) * norm);
#pragma unroll
  for (int r = 0; r < R; ++r) x[r] = zero_if_idle(lookup_16(levels, indices[r]), active_lanes(length, r));
  hadamard<R>(x, length);
#pragma unroll
  for (int r = 0; r < R; ++r)
    // A sum of 0 has no sign, whatever it is multiplied with.
    if (active_lanes(length, r)) x[r] = product_sum(x[r] * rotation.scales.at(r), rotation.signs.at(r), splatf(0.f));
}

template <class E, int R>
FN void encode_keys(const Plane& plane, u32 length, const SlotBlock& block, const RowTile& tile, u32* exact, float* sums,
                    u32 index) {
  TileRows<E> rows = TileRows<E>::make(plane, length, tile);
  TileSlots slots = TileSlots::make(plane, length, block, tile, 1);
  Rotation<R> rotation = Rotation<R>::make(block.rotation, length);
  Levels codebook = Levels::make(block.codebook, block.bits);
  RowErrors errors = RowErrors::make();
  auto load = [&](u32 i) { return rows.template load<R>(i); };
  rows_in_turn<R>(tile.rows(), load, [&](u32 i, const Row<E, R>& x) {
    u32 length = in_this_row<R>(rows.length);
    vf32 y[R], squares = splatf(0.f);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      vf32 number = x.at(r);
      squares = squares + number * number;
    }
    vf32 norm = square_root(warp_sum(squares));
#pragma unroll
    for (int r = 0; r < R; ++r)
      y[r] = active_lanes(length, r) ? x.at(r) / (norm + 1e-8f) * rotation.signs.at(r) : splatf(0.f);
    hadamard<R>(y, length);
    vu32 indices[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
      indices[r] = active_lanes(length, r) ? codebook.midpoints.rank(y[r] * rotation.scales.at(r)) : splat(0);
    vu16 half = half_of(norm);
    slots.store<R>(indices, length);
    store_half(slots.scalars, half);
    slots.next();

    restore_key<R>(y, indices, half_number(half), rotation, codebook, length);
#pragma unroll
    for (int r = 0; r < R; ++r) y[r] = cast<E>(y[r]);
    errors.add<E, R>(x, y, i);
  });
  store_uniform(exact + index, errors.exact);
  errors.store(sums + (u64)index * 3);
}

template <class E, int R>
FN void decode_keys(const Plane& plane, u32 length, const SlotBlock& block, const RowTile& tile) {
  TileRows<E> rows = TileRows<E>::make(plane, length, tile);
  TileSlots slots = TileSlots::make(plane, length, block, tile, 1);
  Rotation<R> rotation = Rotation<R>::make(block.rotation, length);
  Levels codebook = Levels::make(block.codebook, block.bits);
  u32 count = tile.rows();
#pragma unroll 1
  for (u32 i = 0; i < count; ++i, slots.next()) {
    vu32 indices[R];
    vf32 x[R];
    slots.load<R>(indices, length);
    restore_key<R>(x, indices, splatf(scalar_half_to_float(slots.scalars[0])), rotation, codebook, length);
#pragma unroll
    for (int r = 0; r < R; ++r) rows.store(i, r, E::from_exact(cast<E>(x[r])));
  }
}

// ------------------------------------------------------------------------------------------- values

template <class E, int R>
FN void encode_values(const Plane& plane, u32 length, const SlotBlock& block, const RowTile& tile, u32* exact, float* sums,
                      u32 index) {
  TileRows<E> rows = TileRows<E>::make(plane, length, tile);
  TileSlots slots = TileSlots::make(plane, length, block, tile, 2);
  float top = (float)((1u << block.bits) - 1);
  RowErrors errors = RowErrors::make();
  auto load = [&](u32 i) { return rows.template load<R>(i); };
  rows_in_turn<R>(tile.rows(), load, [&](u32 i, const Row<E, R>& x) {
    vf32 y[R], high = splatf(0.f) - infinity(), low = high;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!active_lanes(length, r)) continue;
      vm32 active = lane_ids() < active_lanes(length, r);
      vf32 number = x.at(r);
      high = maximum(high, select(active, number, splatf(0.f) - infinity()));
      low = maximum(low, select(active, splatf(0.f) - number, splatf(0.f) - infinity()));
    }
    // Behind a NaN, whose row is kept exact, the slot has the same bytes whatever R is: those of four or eight registers, an
    // empty one of which forgets it.
    if (registers_of(length) < (length <= 4 * LANES ? 4u : 8u)) {
      high = maximum(high, splatf(0.f) - infinity());
      low = maximum(low, splatf(0.f) - infinity());
    }
    vf32 zero = splatf(0.f) - warp_max(low);
    vf32 scale = maximum((warp_max(high) - zero) / top, splatf(1e-8f));
    vu16 half_scale = half_of(scale), half_zero = half_of(zero);
    vf32 s = half_number(half_scale), z = half_number(half_zero);
    vu32 indices[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      // What is no number goes to 0.
      vf32 place = larger((x.at(r) - zero) / scale + 0.5f, splatf(0.f));
      indices[r] = truncate(smaller(place, splatf(top)));
      y[r] = zero_if_idle(cast<E>(int_to_float(indices[r]) * s + z), active_lanes(length, r));
    }
    slots.store<R>(indices, length);
    store_half(slots.scalars, half_scale);
    store_half(slots.scalars + 1, half_zero);
    slots.next();
    errors.add<E, R>(x, y, i);
  });
  store_uniform(exact + index, errors.exact);
  errors.store(sums + (u64)index * 3);
}

template <class E, int R>
FN void decode_values(const Plane& plane, u32 length, const SlotBlock& block, const RowTile& tile) {
  TileRows<E> rows = TileRows<E>::make(plane, length, tile);
  TileSlots slots = TileSlots::make(plane, length, block, tile, 2);
  u32 count = tile.rows();
#pragma unroll 1
  for (u32 i = 0; i < count; ++i, slots.next()) {
    vu32 indices[R];
    slots.load<R>(indices, length);
    float scale = scalar_half_to_float(slots.scalars[0]), zero = scalar_half_to_float(slots.scalars[1]);
#pragma unroll
    for (int r = 0; r < R; ++r) rows.store(i, r, E::from_exact(cast<E>(int_to_float(indices[r]) * scale + zero)));
  }
}

// `exact`: a word per tile, the rows that no slot can hold. `sums`: squared error, energy, largest error of each tile.
#define SLOT_KERNELS(suffix, E, kind)                                                                                  \
  KERNEL(slots_encode_##kind##_##suffix, const Plane* planes, const SlotBlock* blocks, u32* exact, float* sums,        \
         u32 tiles) {                                                                                                  \
    FOR_EACH_WARP(warp) {                                                                                              \
      RowTile tile = RowTile::make(planes, warp, tiles);                                                               \
      FOR_ROW_SIZE(encode_##kind, E, planes[tile.block], blocks[tile.block], tile, exact, sums, (u32)warp);            \
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
