// The rotation of TurboQuant (arXiv:2504.19874): random signs, then Hadamard transforms.
//
// A row is one token of one head. It lies in R registers: number 32 r + l is in lane l of register r; lanes beyond its
// `length` are idle and hold 0. A length that is no power of two is rotated in blocks that are: the butterfly of distance d
// joins the numbers of every aligned run of 2d that lies wholly in the row, so that 80 is rotated as 64 and 16.
#pragma once
#include "warp.h"

// `function<E, R>(plane, ...)` with as many registers R as the plane's rows need, 8 at most: 256 numbers.
#define FOR_ROW_SIZE(function, E, plane, ...)  \
  if (registers_of((plane).head_dim) <= 4)     \
    function<E, 4>(plane, __VA_ARGS__);        \
  else                                         \
    function<E, 8>(plane, __VA_ARGS__)

// How far loops over registers are unrolled: on a GPU wholly, for its registers have no addresses; on a CPU long rows are loops.
template <int R>
struct Unrolled {
#if defined(__CUDACC__)
  enum : int { STEPS = R };
#else
  enum : int { STEPS = R <= 4 ? R : 1 };
#endif
};

// What a row is multiplied with before and after the butterflies: float [2][32 * registers], 0 in idle lanes.
struct Rotation {
  const float* signs;
  const float* scales;  // 1 / sqrt(size of the block)

  static METHOD Rotation make(u64 address, u32 length) {
    const float* p = (const float*)address;
    return {p, p + (length + LANES - 1) / LANES * LANES};
  }
};

FN vf32 load_floats(const float* p) { return as_float(load_u32((const u32*)p)); }
FN u32 registers_of(u32 length) { return (length + LANES - 1) / LANES; }
// Lanes of register r that have a number.
FN u32 active_lanes(u32 length, u32 r) {
  u32 first = r * LANES, left = length > first ? length - first : 0;
  return left < LANES ? left : LANES;
}

template <int D>
FN vf32 butterfly(vf32 v, u32 active) {
  vf32 sum = shuffle_xor<D>(v) + as_float(as_bits(v) ^ select((lane_ids() & (u32)D) != 0u, splat(1u << 31), splat(0)));
  return active == LANES ? sum : select((lane_ids() | (u32)(2 * D - 1)) < active, sum, v);
}

// In place, without the scales; its own inverse up to them.
template <int R>
FN void hadamard(vf32* v, u32 length) {
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    u32 active = active_lanes(length, r);
    if (active == 0) break;
    v[r] = butterfly<1>(v[r], active);
    v[r] = butterfly<2>(v[r], active);
    v[r] = butterfly<4>(v[r], active);
    v[r] = butterfly<8>(v[r], active);
    v[r] = butterfly<16>(v[r], active);
  }
#pragma unroll(Unrolled<R>::STEPS)
  for (int m = 1; m < R; m *= 2)
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      if (!(r & m) && r + m < R && ((r | (2 * m - 1)) + 1) * LANES <= length) {
        vf32 a = v[r], b = v[r + m];
        v[r] = a + b;
        v[r + m] = a - b;
      }
}

// ------------------------------------------------------------------------------------------- rows in memory
template <class T>
FN auto load_piece(const T* row, u32 length, u32 r) {
  u32 active = active_lanes(length, r);
  return active == LANES ? load_lanes(row + r * LANES) : load_some(row + r * LANES, active);
}
template <class T, class V>
FN void store_piece(T* row, V v, u32 length, u32 r) {
  u32 active = active_lanes(length, r);
  if (active == LANES)
    store_lanes(row + r * LANES, v);
  else
    store_some(row + r * LANES, v, active);
}

// The numbers of a token and head in a plane.
template <class E>
FN typename E::raw* row_of(const Plane& plane, u32 token, u32 head) {
  return (typename E::raw*)(plane.data + (i64)token * plane.token_stride + (i64)head * plane.head_stride);
}
template <class E, int R>
FN void load_row(vf32* v, const Plane& plane, u32 token, u32 head) {
  const typename E::raw* row = row_of<E>(plane, token, head);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) v[r] = E::to_float(load_piece(row, plane.head_dim, r));
}

// A tile is 32 tokens of one head: what a warp takes. `tiles` of each block, heads innermost.
constexpr u32 ROW_TILE = 32;
struct RowTile {
  u32 block, head, start, stop;

  static METHOD RowTile make(const Plane* planes, int warp, u32 tiles) {
    u32 heads = planes->heads, tile = (u32)warp / heads % tiles;
    RowTile t = {(u32)warp / heads / tiles, (u32)warp % heads, tile * ROW_TILE, tile * ROW_TILE + ROW_TILE};
    u32 tokens = planes[t.block].tokens;
    t.stop = t.stop < tokens ? t.stop : tokens;
    return t;
  }
  METHOD u32 rows() const { return stop > start ? stop - start : 0; }
};

// ------------------------------------------------------------------------------------------- errors
FN vu32 is_unfit(vf32 x) { return select((as_bits(x) & 0x7fffffffu) >= 0x7f800000u, splat(1), splat(0)); }

// Squared error, energy and largest error of a tile's rows. Rows that are not finite or do not come back finite must be
// kept exact: they have no errors, and their bits are set in `exact`. Of energy counts what is finite.
struct RowErrors {
  vf32 squared, energy, worst;
  u32 exact;

  static METHOD RowErrors make() { return {splatf(0.f), splatf(0.f), splatf(0.f), 0}; }
  template <int R>
  METHOD void add(const vf32* x, const vf32* restored, u32 row) {
    vf32 row_squared = splatf(0.f), row_energy = splatf(0.f), row_worst = splatf(0.f);
    vu32 unfit = splat(0);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      vf32 difference = restored[r] - x[r];
      unfit = unfit | is_unfit(difference);
      row_squared = row_squared + difference * difference;
      row_energy = row_energy + x[r] * x[r];
      row_worst = maximum(row_worst, absolute(difference));
    }
    if (ballot(unfit != 0u)) {
      keep<R>(x, row);
      return;
    }
    squared = squared + row_squared;
    energy = energy + row_energy;
    worst = maximum(worst, row_worst);
  }
  template <int R>
  METHOD void keep(const vf32* x, u32 row) {
    exact |= 1u << row;
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) energy = energy + select(is_unfit(x[r] * x[r]) == 0u, x[r] * x[r], splatf(0.f));
  }
  METHOD void store(float* sums) const {
    float all[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
    for (u32 i = 0; i < 3; ++i) store_uniform(sums + i, all[i]);
  }
};
