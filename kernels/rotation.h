// The rotation of TurboQuant (arXiv:2504.19874): random signs, then Hadamard transforms.
//
// A row is one token of one head. It lies in R registers: number 32 r + l is in lane l of register r; lanes beyond its
// `length` are idle and hold 0. A length that is no power of two is rotated in blocks that are: the butterfly of distance d
// joins the numbers of every aligned run of 2d that lies wholly in the row, so that 80 is rotated as 64 and 16.
#pragma once
#include "loss.h"

// `function<E, R>(plane, length, ...)` with as many registers R as the plane's rows need, 8 at most: 256 numbers. The usual
// lengths are constants: nothing is left there of what asks how much of a register is in use.
#define FOR_ROW_SIZE(function, E, plane, ...)                 \
  if ((plane).head_dim == 2 * LANES)                          \
    function<E, 2>(plane, 2 * LANES, __VA_ARGS__);            \
  else if ((plane).head_dim == 3 * LANES)                     \
    function<E, 3>(plane, 3 * LANES, __VA_ARGS__);            \
  else if ((plane).head_dim == 4 * LANES)                     \
    function<E, 4>(plane, 4 * LANES, __VA_ARGS__);            \
  else if (ODD_ROWS_OF_4 && (plane).head_dim < 4 * LANES)     \
    function<E, 4>(plane, (plane).head_dim, __VA_ARGS__);     \
  else                                                        \
    function<E, 8>(plane, (plane).head_dim, __VA_ARGS__)

// A GPU has too few registers for all versions in one kernel.
#if defined(__CUDACC__) || defined(KVZIP_EMULATED)
enum : bool { ODD_ROWS_OF_4 = false };
#else
enum : bool { ODD_ROWS_OF_4 = true };
#endif

FN u32 registers_of(u32 length) { return (length + LANES - 1) / LANES; }
// Lanes of register r that have a number.
FN u32 active_lanes(u32 length, u32 r) {
  u32 first = r * LANES, left = length > first ? length - first : 0;
  return left < LANES ? left : LANES;
}
template <class V>
FN V zero_if_idle(V v, u32 active) {
  return active == LANES ? v : select(lane_ids() < active, v, V{});
}

// A row in memory, register r by `load(r)`: loaded at once and kept, unless rows are long.
template <int R, class Load>
struct Registers {
  typedef decltype(Load()(0)) Value;
  enum : bool { KEPT = R <= 4 };
  Load load;
  Value kept[KEPT ? R : 1];

  static METHOD Registers make(const Load& load, u32 length) {
    Registers loaded;
    loaded.load = load;
#pragma unroll
    for (int r = 0; KEPT && r < R; ++r) loaded.kept[r] = active_lanes(length, r) ? load(r) : Value{};
    return loaded;
  }
  METHOD Value at(int r) const {
    if constexpr (KEPT) return kept[r];
    return load(r);
  }
};

struct Floats {
  const float* row;
  METHOD vf32 operator()(int r) const { return as_float(load_u32((const u32*)row + r * LANES)); }
};
// What a row is multiplied with before and after the butterflies: float [2][32 * registers], 0 in idle lanes.
template <int R>
struct Rotation {
  Registers<R, Floats> signs, scales;  // 1 / sqrt(size of the block)

  static METHOD Rotation make(u64 address, u32 length) {
    Floats signs = {(const float*)address}, scales = {signs.row + registers_of(length) * LANES};
    return {Registers<R, Floats>::make(signs, length), Registers<R, Floats>::make(scales, length)};
  }
};

// The length anew for each row where rows are long: with all that follows from it in registers there are not enough.
template <int R>
FN u32 in_this_row(u32 length) {
  return R > 4 ? forgotten(length) : length;
}

template <int D>
FN vf32 butterfly(vf32 v, u32 active) {
  vf32 sum = product_sum(v, select((lane_ids() & (u32)D) != 0u, splatf(-1.f), splatf(1.f)), shuffle_xor<D>(v));
  return active == LANES ? sum : select((lane_ids() | (u32)(2 * D - 1)) < active, sum, v);
}

// In place, without the scales; its own inverse up to them.
template <int R>
FN void hadamard(vf32* v, u32 length) {
  length = in_this_row<R>(length);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    u32 active = active_lanes(length, r);
    if (active == 0) break;
    v[r] = butterfly<1>(v[r], active);
    v[r] = butterfly<2>(v[r], active);
    v[r] = butterfly<4>(v[r], active);
    v[r] = butterfly<8>(v[r], active);
    v[r] = butterfly<16>(v[r], active);
  }
#pragma unroll
  for (int m = 1; m < R; m *= 2)
#pragma unroll
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
  return load_some(row + r * LANES, active_lanes(length, r));
}
template <class T, class V>
FN void store_piece(T* row, V v, u32 length, u32 r) {
  store_some(row + r * LANES, v, active_lanes(length, r));
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

// A row of the plane.
template <class E>
struct Numbers {
  const typename E::raw* row;
  u32 length;
  METHOD typename E::vraw operator()(int r) const { return load_piece(row, length, r); }
};
template <class E, int R>
struct Row {
  Registers<R, Numbers<E>> numbers;
  METHOD vf32 at(int r) const { return E::to_float(numbers.at(r)); }
};

// The rows of a tile, their places known once: what a kernel stores might be a plane, as far as the compiler knows.
template <class E>
struct TileRows {
  typedef typename E::raw raw;
  u8* base;
  i64 token_stride;
  u32 length;

  static METHOD TileRows make(const Plane& plane, u32 length, const RowTile& tile) {
    u64 first = plane.data + (i64)tile.start * plane.token_stride + (i64)tile.head * plane.head_stride;
    return {(u8*)first, plane.token_stride, length};
  }
  METHOD raw* at(u32 row) const { return (raw*)(base + (i64)row * token_stride); }
  template <int R>
  METHOD Row<E, R> load(u32 row) const {
    return {Registers<R, Numbers<E>>::make({at(row), length}, length)};
  }
  METHOD void store(u32 row, int r, typename E::vraw v) const { store_piece(at(row), v, length, r); }
};

// A tile's rows in turn, the next one under way where there are registers for it.
template <int R, class Load, class Work>
FN void rows_in_turn(u32 rows, Load load, Work work) {
  if constexpr (R <= 4)
    in_turn<FORWARDS, 1>(rows, load, work);
  else
#pragma unroll 1
    for (u32 i = 0; i < rows; ++i) work(i, load(i));
}

// ------------------------------------------------------------------------------------------- errors
FN vu32 is_unfit(vf32 x) { return select((as_bits(x) & 0x7fffffffu) >= 0x7f800000u, splat(1), splat(0)); }

// Squared error, energy and largest error of a tile's rows. Rows that are not finite or do not come back finite must be
// kept exact: they have no errors, and their bits are set in `exact`. Of energy counts what is finite.
struct RowErrors {
  vf32 squared, energy, worst;
  u32 exact;

  static METHOD RowErrors make() { return {splatf(0.f), splatf(0.f), splatf(0.f), 0}; }
  template <class E, int R>
  METHOD void add(const Row<E, R>& x, const vf32* restored, u32 row) {
    vf32 row_squared = splatf(0.f), row_energy = splatf(0.f), row_worst = splatf(0.f);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      vf32 number = x.at(r), difference = restored[r] - number;
      row_squared = fused(difference, difference, row_squared);
      row_energy = fused(number, number, row_energy);
      row_worst = larger(row_worst, magnitude_of(difference));
    }
    // Squares may overflow where differences do not.
    if (!all(row_squared < infinity()) && any_unfit<E, R>(x, restored)) {
      keep<E, R>(x, row);
      return;
    }
    squared = squared + row_squared;
    energy = energy + row_energy;
    worst = larger(worst, row_worst);
  }
  template <class E, int R>
  METHOD void keep(const Row<E, R>& x, u32 row) {
    exact |= 1u << row;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      vf32 number = x.at(r), square = number * number;
      energy = energy + select(is_unfit(square) == 0u, square, splatf(0.f));
    }
  }
  template <class E, int R>
  static METHOD bool any_unfit(const Row<E, R>& x, const vf32* restored) {
    vu32 unfit = splat(0);
#pragma unroll
    for (int r = 0; r < R; ++r) unfit = unfit | is_unfit(restored[r] - x.at(r));
    return ballot(unfit != 0u) != 0;
  }
  METHOD void store(float* sums) const { store_loss(sums, warp_sum(squared), warp_sum(energy), worst); }
};
