// What kvtc's kernels share: coefficient rows by 32 columns, and turns that leave exact tokens out. On both sides of warp.h.
#pragma once
#include "warp.h"

constexpr u32 KVTC_TILE = 32;  // tokens whose exact ones are a word of the masks; those behind the last count as exact

#if defined(__CUDACC__) || defined(KVZIP_EMULATED)

// 32 columns of rows of floats. Lanes beyond the `active` first always read the word at `idle`, and store nothing.
struct ColumnRows {
  u8* base;
  u32 stride;

  static METHOD ColumnRows make(u64 first, u32 row_stride, u32 active, u64 idle) {
    bool own = lane() < active;
    return {settled<u8>(own ? first + lane() * sizeof(float) : idle), own ? row_stride * (u32)sizeof(float) : 0};
  }
  METHOD vf32 load(u32 row) const { return *(const float*)(base + (u64)row * stride); }
  METHOD void store(u32 row, vf32 x) const {
    if (stride) *(float*)(base + (u64)row * stride) = x;
  }
};

// Tokens below `count` that are not exact, in turn: `work(token, load(token))`, with the next AHEAD under way meanwhile. Turns
// with exact tokens go one by one, and load what they need once more.
template <Order ORDER, u32 AHEAD, class Load, class Work>
FN void inexact_in_turn(u32 count, const u32* exact, Load load, Work work) {
  static_assert(KVTC_TILE % AHEAD == 0, "the tokens of a turn have one word of the masks");
  typedef decltype(load(0)) Loaded;
  const u32 turns = (count + AHEAD - 1) / AHEAD, whole = count / AHEAD;
  auto index_of = [=](u32 turn) { return ORDER == BACKWARDS ? turns - 1 - turn : turn; };
  auto place_of = [](u32 i) { return ORDER == BACKWARDS ? AHEAD - 1 - i : i; };
  auto begin = [&](u32 turn, Loaded(&rows)[AHEAD]) {
    if (whole == 0) return;
    u32 start = (index_of(turn) < whole ? index_of(turn) : whole - 1) * AHEAD;
    for (u32 i = 0; i < AHEAD; ++i) rows[i] = load(start + i);
  };
  Loaded loaded[AHEAD], under_way[AHEAD];
  begin(0, loaded);
#pragma unroll 1
  for (u32 turn = 0; turn < turns; ++turn) {
    u32 start = index_of(turn) * AHEAD, left_out = exact[start / KVTC_TILE] >> start % KVTC_TILE & ((1u << AHEAD) - 1);
    begin(turn + 1 < turns ? turn + 1 : turn, under_way);
    if (left_out == 0) {
#pragma unroll
      for (u32 i = 0; i < AHEAD; ++i) work(start + place_of(i), loaded[place_of(i)]);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < AHEAD; ++i)
        if (u32 token = start + place_of(i); !(left_out >> place_of(i) & 1u)) work(token, load(token));
    }
    for (u32 i = 0; i < AHEAD; ++i) loaded[i] = under_way[i];
  }
}

#else

struct ColumnRows {
  u8* base;
  u32 stride, active;

  static METHOD ColumnRows make(u64 first, u32 row_stride, u32 active, u64) {
    return {(u8*)first, row_stride * (u32)sizeof(float), active};
  }
  METHOD vf32 load(u32 row) const { return as_float(load_some((const u32*)(base + (u64)row * stride), active)); }
  METHOD void store(u32 row, vf32 x) const { store_some((u32*)(base + (u64)row * stride), as_bits(x), active); }
};

template <Order ORDER, u32 AHEAD, class Load, class Work>
FN void inexact_in_turn(u32 count, const u32* exact, Load load, Work work) {
  for (u32 turn = 0; turn < count; ++turn) {
    u32 token = ORDER == BACKWARDS ? count - 1 - turn : turn;
    if (in_mask(exact, token)) continue;
    [[clang::always_inline]] work(token, load(token));
  }
}

#endif

// The exact ones, which are few: `work(token)`.
template <class Work>
FN void exact_in_turn(u32 count, const u32* exact, Work work) {
  for (u32 first = 0; first < count; first += KVTC_TILE) {
    u32 left = exact[first / KVTC_TILE];
    for (u32 t = first; left && t < count; ++t, left >>= 1)
      if (left & 1) work(t);
  }
}
