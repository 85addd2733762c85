// What quantizers read and write beside the numbers of a strip: codes, and numbers that channels or groups of channels share.
// On both sides of warp.h.
#pragma once
#include "bits.h"

#if defined(__CUDACC__) || defined(KVZIP_EMULATED)

// ------------------------------------------------------------------------------------------- numbers
// The words of packs: smaller and larger numbers, and those nearest to floats. There must be no NaN.
FN u32 smaller_word(Bf16, u32 a, u32 b) { return min_bf16x2(a, b); }
FN u32 smaller_word(Fp16, u32 a, u32 b) { return min_f16x2(a, b); }
FN u32 smaller_word(Fp32, u32 a, u32 b) { return as_bits(smaller(as_float(a), as_float(b))); }
FN u32 larger_word(Bf16, u32 a, u32 b) { return max_bf16x2(a, b); }
FN u32 larger_word(Fp16, u32 a, u32 b) { return max_f16x2(a, b); }
FN u32 larger_word(Fp32, u32 a, u32 b) { return as_bits(larger(as_float(a), as_float(b))); }
FN u32 nearest_word(Bf16, const float* x) { return cvt_bf16x2_f32(x[1], x[0]); }
FN u32 nearest_word(Fp16, const float* x) { return cvt_f16x2_f32(x[1], x[0]); }
FN u32 nearest_word(Fp32, const float* x) { return as_bits(*x); }

// A row of the numbers nearest to floats.
template <class E>
FN typename Strip<E>::Loaded nearest_row(const Pack<vf32>& x) {
  typedef typename Strip<E>::Loaded Loaded;
  Loaded row;
  for (u32 i = 0; i < Loaded::COUNT; ++i) row.words[i] = nearest_word(E(), x.v + i * Loaded::PER_WORD);
  return row;
}

// The smallest and the largest numbers of rows. Which of two zeros is the smaller one is left open.
template <class E>
struct Extremes {
  typedef typename Strip<E>::Loaded Loaded;
  Loaded smallest, largest;

  static METHOD Extremes of(const Loaded& row) { return {row, row}; }
  METHOD void add(const Loaded& row) {
    for (u32 i = 0; i < Loaded::COUNT; ++i) {
      smallest.words[i] = smaller_word(E(), smallest.words[i], row.words[i]);
      largest.words[i] = larger_word(E(), largest.words[i], row.words[i]);
    }
  }
  METHOD Pack<vf32> low() const { return floats(smallest); }
  METHOD Pack<vf32> high() const { return floats(largest); }
  static METHOD Pack<vf32> floats(const Loaded& row) {
    Pack<vf32> x;
    for (int i = 0; i < PACK; ++i) x.v[i] = E::number(row.get(i));
    return x;
  }
};

// The extremes of the rows of a tile, in a warp's shared memory: of each lane, until a lane asks for those of its own row.
struct RowExtremes {
  struct alignas(8) Span {
    u32 low, high;
  };
  struct alignas(16) Two {
    Span one, other;
  };
  struct alignas(16) Spans {
    Span of_lane[LANES + 2];  // two more, so that all lanes read those of their rows at once
  };
  Spans of[LANES];

  // A group of so many channels may share a strip with others if it has whole lanes of it.
  static METHOD bool together(u32 width) { return STRIP % width == 0 && width % PACK == 0; }

  template <class E>
  METHOD void put(u32 row, const Extremes<E>& found) {
    Span span = {found.smallest.words[0], found.largest.words[0]};
    for (u32 i = 1; i < Strip<E>::Loaded::COUNT; ++i)
      span = joined(E(), span, {found.smallest.words[i], found.largest.words[i]});
    of[row].of_lane[lane()] = span;
  }
  // One number a lane, and with `more` those that the row has already.
  template <class E>
  METHOD void put(u32 row, typename E::vraw x, bool more) {
    u32 word = sizeof(typename E::raw) == 2 ? x | x << 16 : x;
    Span& own = of[row].of_lane[lane()];
    own = more ? joined(E(), own, {word, word}) : Span{word, word};
  }
  // Of row l, in lane l, what so many lanes from `first` on have put.
  template <class E>
  METHOD void get(u32 rows, u32 first, u32 lanes, vf32& low, vf32& high) const {
    const Span* own = of[lane() < rows ? lane() : rows - 1].of_lane + first;
    Span span = *own;
    u32 l = 0;
#pragma unroll 1
    for (; l + 8 <= lanes; l += 8)
      for (u32 i = 0; i < 8; i += 2) {
        Two two = *(const Two*)(own + l + i);
        span = joined(E(), joined(E(), span, two.one), two.other);
      }
#pragma unroll 1
    for (; l < lanes; ++l) span = joined(E(), span, own[l]);
    low = smaller(E::number(E::narrowed(span.low)), E::number(upper(E(), span.low)));
    high = larger(E::number(E::narrowed(span.high)), E::number(upper(E(), span.high)));
  }
  template <class E>
  static METHOD Span joined(E, const Span& a, const Span& b) {
    return {smaller_word(E(), a.low, b.low), larger_word(E(), a.high, b.high)};
  }
  template <class E>
  static METHOD u32 upper(E, u32 word) { return sizeof(typename E::raw) == 2 ? word >> 16 : word; }
};

// ------------------------------------------------------------------------------------------- codes
// Codes in rows, one for each token: BITS bits each along the channels, whole words a row; or one a byte, the rows of each 32
// channels one after the other. A lane's codes are one access. Idle lanes load the strip's first codes, idle channels store 0.
template <u32 BITS, bool PACKED>
struct CodeRows {
  enum : u32 { WIDTH = PACKED ? BITS : 8 };
  typedef u32 Loaded;
  u8* base;
  u32 stride, existing;
  bool stored;

  static METHOD CodeRows make(u64 start, u32 tokens, u32 channels, u32 strip) {
    u32 own = strip + lane() * PACK, words = (channels * BITS + 31) / 32, left = own < channels ? channels - own : 0;
    CodeRows c;
    c.stored = PACKED ? own * BITS / 32 < words : own / LANES * LANES < channels;
    if (!c.stored) own = strip;
    c.base = (u8*)start + (PACKED ? own * BITS / 8 : (u64)(own / LANES) * tokens * LANES + own % LANES);
    c.stride = PACKED ? forgotten(words * 4) : LANES;
    c.existing = left < PACK ? (1u << left * WIDTH) - 1u : ~0u;
    return c;
  }
  METHOD u8* row(u32 token) const { return base + (u64)token * stride; }
  METHOD Loaded load(const u8* p) const {
    return WIDTH * PACK == 8 ? *p : WIDTH * PACK == 16 ? *(const u16*)p : *(const u32*)p;
  }
  static METHOD Pack<vu32> codes(Loaded loaded) {
    Pack<vu32> codes;
    for (u32 i = 0; i < PACK; ++i) codes.v[i] = loaded >> i * WIDTH & ((1u << WIDTH) - 1u);
    return codes;
  }
  METHOD void store(u8* p, const Pack<vu32>& codes) const {
    u32 all = 0;
    for (u32 i = 0; i < PACK; ++i) all += codes.v[i] << i * WIDTH;
    all &= existing;
    if (!stored) return;
    if constexpr (WIDTH * PACK == 8)
      *p = (u8)all;
    else if constexpr (WIDTH * PACK == 16)
      *(u16*)p = (u16)all;
    else
      *(u32*)p = all;
  }
};

// The lowest BITS bits of codes, apart: a word a bit for each 32 channels and token.
template <u32 BITS>
struct LowBits {
  enum : u32 { SHARING = LANES / PACK };  // lanes that have bits of a word
  u32* base;
  u32 stride, existing;
  bool stored;

  static METHOD LowBits make(u64 start, u32 channels, u32 strip) {
    u32 groups = (channels + LANES - 1) / LANES, own = strip + lane() * PACK, left = own < channels ? channels - own : 0;
    u32 group = own / LANES < groups ? own / LANES : groups - 1;
    return {(u32*)start + group * BITS, groups * BITS, left < PACK ? (1u << left) - 1u : (1u << PACK) - 1u,
            own / LANES < groups && lane() % SHARING == 0};
  }
  METHOD void load(u32 token, Pack<vu32>& codes) const {
    const u32* words = base + (u64)token * stride;
    for (u32 b = 0; b < BITS; ++b) {
      u32 word = words[b] >> lane() % SHARING * PACK;
      for (u32 i = 0; i < PACK; ++i) codes.v[i] |= (word >> i & 1u) << b;
    }
  }
  METHOD void store(u32 token, const Pack<vu32>& codes) const {
    u32* words = base + (u64)token * stride;
    for (u32 b = 0; b < BITS; ++b) {
      u32 word = 0;
      for (u32 i = 0; i < PACK; ++i) word |= (codes.v[i] >> b & 1u) << i;
      word = (word & existing) << lane() % SHARING * PACK;
      for (u32 d = 1; d < SHARING; d *= 2) word |= __shfl_xor_sync(~0u, word, d);
      if (stored) words[b] = word;
    }
  }
};

// The lowest BITS bits of a code move into a word at its top.
template <u32 BITS>
FN vu32 shift_in(vu32 word, vu32 code) {
  return __funnelshift_r(word, code, BITS);
}

// ------------------------------------------------------------------------------------------- shared numbers
// A number for each channel, at `row` that of the strip's first one. Those of a whole strip lie aligned to 8 bytes.
template <class E, class T>
FN Pack<vu32> load_channels(const Strip<E>& strip, bool whole, const T* row) {
  typedef Packed<T, 8> Channels;
  Pack<vu32> pack;
  row += strip.has(0) ? lane() * PACK : 0;
  if (whole) {
    Channels channels = *(const Channels*)row;
    for (int i = 0; i < PACK; ++i) pack.v[i] = channels.get(i);
  } else {
    for (int i = 0; i < PACK; ++i) pack.v[i] = strip.has(i) ? row[i] : 0;
  }
  return pack;
}
template <class E, class T>
FN void store_channels(const Strip<E>& strip, bool whole, T* row, const Pack<vu32>& pack) {
  typedef Packed<T, 8> Channels;
  row += lane() * PACK;
  if (whole && strip.has(0)) {
    Channels channels = {};
    for (int i = 0; i < PACK; ++i) channels.put(i, pack.v[i]);
    *(Channels*)row = channels;
  }
  for (int i = 0; i < PACK; ++i)
    if (!whole && strip.has(i)) row[i] = (T)pack.v[i];
}
template <class E>
FN bool aligned(const Strip<E>& strip, u64 addresses) { return strip.whole && addresses % 8 == 0; }

// table[index of the lane]. ONE: all lanes have the same.
template <bool ONE, class T>
FN vu32 load_shared(const T* table, vu32 index) {
  return table[index];
}
// Lane l's number to p[l * stride], of the first `count` lanes.
template <class T>
FN void store_strided(T* p, vu32 v, u32 stride, u32 count) {
  if (lane() < count) p[(u64)lane() * stride] = (T)v;
}

// N float16 numbers side by side, 1 or PACK of them; those are stored to where they lie aligned.
template <u32 N>
struct Halves {
  u32 words[(N + 1) / 2];

  static METHOD Halves nearest(const vf32 (&x)[N]) {
    Halves halves;
    for (u32 n = 0; n < N; n += 2) halves.words[n / 2] = cvt_f16x2_f32(n + 1 < N ? x[n + 1] : 0.f, x[n]);
    return halves;
  }
  METHOD vu32 bits(u32 n) const { return words[n / 2] >> n % 2 * 16 & 0xffffu; }
  METHOD vf32 number(u32 n) const { return half_number(bits(n)); }
  // Lane l's to p[l * stride], of the first `count` lanes; 0 where `zero` says so.
  METHOD void store_strided(u16* p, u32 stride, u32 count, vm32 zero) const {
    if (lane() >= count) return;
    p += (u64)lane() * stride;
    if constexpr (N == 1)
      *p = zero ? (u16)0 : (u16)words[0];
    else
      *(Packed<u16>*)p = zero ? Packed<u16>{} : Packed<u16>{{words[0], words[1]}};
  }
};

#else

// ------------------------------------------------------------------------------------------- numbers
template <class E>
FN typename Strip<E>::Loaded nearest_row(const Pack<vf32>& x) {
  return {{E::from_number(x.v[0])}};
}
template <class E>
struct Extremes {
  vf32 smallest, largest;

  static METHOD Extremes of(const typename Strip<E>::Loaded& row) {
    vf32 x = E::number(row.v[0]);
    return {x, x};
  }
  METHOD void add(const typename Strip<E>::Loaded& row) {
    vf32 x = E::number(row.v[0]);
    smallest = smaller(smallest, x);
    largest = larger(largest, x);
  }
  METHOD Pack<vf32> low() const { return {{smallest}}; }
  METHOD Pack<vf32> high() const { return {{largest}}; }
};
struct RowExtremes {
  float low_of[LANES], high_of[LANES];

  static METHOD bool together(u32) { return false; }
  template <class E>
  METHOD void put(u32 row, const Extremes<E>& found) {
    low_of[row] = __builtin_reduce_min(found.smallest);
    high_of[row] = __builtin_reduce_max(found.largest);
  }
  template <class E>
  METHOD void put(u32 row, typename E::vraw numbers, bool more) {
    float low = low_of[row], high = high_of[row];
    put(row, Extremes<E>::of({{numbers}}));
    if (more && low < low_of[row]) low_of[row] = low;
    if (more && high > high_of[row]) high_of[row] = high;
  }
  template <class E>
  METHOD void get(u32, u32, u32, vf32& low, vf32& high) const {
    low = load_as<vf32>(low_of);
    high = load_as<vf32>(high_of);
  }
};

// ------------------------------------------------------------------------------------------- codes
// One stream of bits along the lanes, least significant first: lane l has bits l * BITS and up of BITS words.
template <u32 BITS>
FN vu32 unpack_lanes(const u32* words) {
  static_assert(BITS == 2 || BITS == 4 || BITS == 8, "a number is a whole part of a byte");
  if constexpr (BITS == 8) {
    return widen(widen_bytes(load_as<vu8>(words)));
  } else {
    vu8x16 bytes;
    if constexpr (BITS == 4) {
      bytes = load_as<vu8x16>(words);
    } else {
      vu8x8 quarters = load_as<vu8x8>(words), low = quarters & (u8)15, high = quarters >> (u8)4;
      bytes = __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    }
    vu8x16 low = bytes & (u8)((1 << BITS) - 1), high = bytes >> (u8)BITS;
    vu8 all = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,  //
                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return widen(widen_bytes(all));
  }
}
// The mirror, into `count` words.
template <u32 BITS>
FN void pack_lanes(u32* words, vu32 x, u32 count) {
  vu8 bytes = narrow_bytes(narrow(x));
  if constexpr (BITS == 8) {
    __builtin_memcpy(words, &bytes, count * sizeof(u32));
  } else {
    vu8x16 pairs = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) |
                   __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31) << (u8)BITS;
    if constexpr (BITS == 2) {
      vu8x8 fours = __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14) |
                    __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7, 9, 11, 13, 15) << (u8)4;
      __builtin_memcpy(words, &fours, count * sizeof(u32));
    } else {
      __builtin_memcpy(words, &pairs, count * sizeof(u32));
    }
  }
}

template <u32 BITS, bool PACKED>
struct CodeRows {
  typedef vu32 Loaded;
  u8* base;
  u32 stride, active;

  static METHOD CodeRows make(u64 start, u32 tokens, u32 channels, u32 strip) {
    u32 left = channels - strip;
    u64 offset = PACKED ? strip * BITS / 8 : (u64)strip * tokens;
    return {(u8*)start + offset, PACKED ? (channels * BITS + 31) / 32 * 4 : LANES, left < LANES ? left : LANES};
  }
  METHOD u8* row(u32 token) const { return base + (u64)token * stride; }
  METHOD Loaded load(const u8* p) const {
    return PACKED ? unpack_lanes<BITS>((const u32*)p) : widen(load_u8(p));
  }
  static METHOD Pack<vu32> codes(Loaded loaded) { return {{loaded}}; }
  METHOD void store(u8* p, const Pack<vu32>& codes) const {
    vu32 code = active == LANES ? codes.v[0] : select((vm32)(lane_ids() < active), codes.v[0], splat(0));
    if (PACKED)
      pack_lanes<BITS>((u32*)p, code, (active * BITS + 31) / 32);
    else
      store_u8(p, narrow(code));
  }
};
template <u32 BITS>
struct LowBits {
  u32* base;
  u32 stride, active;

  static METHOD LowBits make(u64 start, u32 channels, u32 strip) {
    u32 left = channels - strip;
    return {(u32*)start + strip / LANES * BITS, (channels + LANES - 1) / LANES * BITS, left < LANES ? left : LANES};
  }
  METHOD void load(u32 token, Pack<vu32>& codes) const {
    const u32* words = base + (u64)token * stride;
    for (u32 b = 0; b < BITS; ++b) codes.v[0] |= bit_of_lane(words[b]) << b;
  }
  METHOD void store(u32 token, const Pack<vu32>& codes) const {
    u32* words = base + (u64)token * stride;
    for (u32 b = 0; b < BITS; ++b)
      words[b] = ballot((vm32)((codes.v[0] >> b & 1u) != 0u)) & (active < LANES ? (1u << active) - 1u : ~0u);
  }
};
template <u32 BITS>
FN vu32 shift_in(vu32 word, vu32 code) {
  return word >> BITS | code << (32 - BITS);
}

// ------------------------------------------------------------------------------------------- shared numbers
template <class E, class T>
FN Pack<vu32> load_channels(const Strip<E>& strip, bool, const T* row) {
  return {{widen(load_some(row, strip.column.active))}};
}
template <class E, class T>
FN void store_channels(const Strip<E>& strip, bool, T* row, const Pack<vu32>& pack) {
  if constexpr (sizeof(T) == 2)
    store_some(row, narrow(pack.v[0]), strip.column.active);
  else
    store_some(row, pack.v[0], strip.column.active);
}
template <class E>
FN bool aligned(const Strip<E>& strip, u64) { return strip.whole; }

template <bool ONE>
FN vu16 load_shared(const u16* table, vu32 index) {
  return ONE ? splat16(table[first_lane(index)]) : gather_u16(table, index);
}
template <bool ONE>
FN vu32 load_shared(const u32* table, vu32 index) {
  return ONE ? splat(table[first_lane(index)]) : gather_u32(table, index);
}
template <class T, class V>
FN void store_strided(T* p, V v, u32 stride, u32 count) {
  for (u32 l = 0; l < count; ++l) p[(u64)l * stride] = (T)v[l];
}
template <u32 N>
struct Halves {
  vu16 halves;

  static METHOD Halves nearest(const vf32 (&x)[1]) { return {number_to_half(x[0])}; }
  METHOD vu32 bits(u32) const { return widen(halves); }
  METHOD vf32 number(u32) const { return half_number(halves); }
  METHOD void store_strided(u16* p, u32 stride, u32 count, vm32 zero) const {
    vu32 kept = select(zero, splat(0), bits(0));
    for (u32 l = 0; l < count; ++l) p[(u64)l * stride] = (u16)kept[l];
  }
};

#endif
