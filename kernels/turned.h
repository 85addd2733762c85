// Numbers turned by the angles of their tokens, as RoPE does: of channel d with partner p in its head, x[d] * cosine[d] +
// x[p] * sine[d]. No number may be NaN. On both sides of warp.h.
#pragma once
#include "bits.h"
#include "kvtc.h"

struct Angles {
  const float* cosines;  // [tokens][head_dim], null where nothing turns
  const float* sines;    // [tokens][head_dim]
  const u32* partners;   // [head_dim]
};

// What a strip takes: its numbers as they are; turned, with partners that lie side by side, in order or crossed by pairs; or
// what any shape takes. The first two ask for whole strips, also where what they become is stored.
enum Turn { STRAIGHT, TURNED, ODD };
#define FOR_TURN(turn, code) \
  switch (turn) {            \
    case STRAIGHT:           \
      code(STRAIGHT);        \
      break;                 \
    case TURNED:             \
      code(TURNED);          \
      break;                 \
    default:                 \
      code(ODD);             \
  }

#if defined(__CUDACC__) || defined(KVZIP_EMULATED)

// 32 channels, one a lane, of any shape. Lanes beyond the last channel do what the last one's does.
template <class E>
struct TurnedColumn {
  typedef typename E::raw raw;
  const u8* own;
  const u8* partner;
  i64 token_stride;
  const float* cosines;  // of the lane's channel
  const float* sines;
  u32 head_dim;
  bool turns;

  static METHOD TurnedColumn make(const Plane& plane, const Angles& angles, u32 group) {
    u32 channel = group * LANES + lane(), last = plane.heads * plane.head_dim - 1;
    if (channel > last) channel = last;
    u32 head = channel / plane.head_dim, dim = channel % plane.head_dim;
    u64 start = plane.data + (u64)((i64)head * plane.head_stride);
    const u8* own = settled<const u8>(start + dim * sizeof(raw));
    TurnedColumn t = {own, own, plane.token_stride, angles.cosines, angles.sines, plane.head_dim, angles.cosines != nullptr};
    if (!t.turns) return t;
    t.partner = settled<const u8>(start + angles.partners[dim] * sizeof(raw));
    t.cosines = settled<const float>((u64)(angles.cosines + dim));
    t.sines = settled<const float>((u64)(angles.sines + dim));
    return t;
  }
  // A token's numbers, and their partners. Angles, which many planes share, lie in a cache.
  struct Loaded {
    typename E::vraw own, partner;
  };
  METHOD Loaded load(u32 token) const {
    const i64 row = (i64)token * token_stride;
    Loaded l = {*(const raw*)(own + row), 0};
    if (turns) l.partner = *(const raw*)(partner + row);
    return l;
  }
  // What is made of each number before it is turned, by `first`.
  template <class First>
  METHOD vf32 numbers(u32 token, const Loaded& l, First first) const {
    vf32 x = first(E::number(l.own));
    if (!turns) return x;
    u32 at = token * head_dim;
    return x * cosines[at] + first(E::number(l.partner)) * sines[at];
  }
};

template <class E>
struct TurnedStrip {
  typedef typename E::raw raw;
  typedef typename Strip<E>::Loaded Numbers;
  typedef Packed<u32> Floats;
  struct Loaded {
    Numbers own, partners;
  };
  Strip<E> strip;
  Angles angles;  // of a strip that is TURNED, from the lane's first channel on
  const u8* partners;
  u32 head_dim;
  bool crossed;
  Turn turn;

  static METHOD TurnedStrip make(const Plane& plane, const Angles& angles, u32 index, bool whole) {
    TurnedStrip t = {Strip<E>::make(plane, index), angles, nullptr, plane.head_dim, false, STRAIGHT};
    if (!whole || !t.strip.whole) t.turn = ODD;
    if (t.turn == ODD || !angles.cosines) return t;
    u32 own = t.strip.has(0) ? t.strip.first : index * STRIP + t.strip.active - PACK, dim = own % plane.head_dim;
    const u32* of = angles.partners + dim;
    bool in_order = of[0] % PACK == 0, crossed = true;
    for (u32 i = 0; i < PACK; ++i) {
      in_order = in_order && of[i] == of[0] + i;
      crossed = crossed && of[i] == dim + (i ^ 1u);
    }
    bool aligned = ((u64)angles.cosines | (u64)angles.sines) % sizeof(Floats) == 0;
    t.turn = aligned && all(in_order || crossed) ? TURNED : ODD;
    if (t.turn == ODD) return t;
    t.crossed = crossed;
    t.partners = settled<const u8>((u64)t.strip.address(own - dim + (crossed ? dim : of[0])));
    t.angles.cosines = settled<const float>((u64)(angles.cosines + dim));
    t.angles.sines = settled<const float>((u64)(angles.sines + dim));
    return t;
  }
  template <Turn T>
  METHOD Loaded load(u32 token) const {
    Loaded l = {};
    if (T != ODD) l.own = strip.load_row(token);
    if (T == TURNED) l.partners = *(const Numbers*)(partners + (i64)token * strip.token_stride);
    return l;
  }
  template <Turn T, class First>
  METHOD Pack<vf32> numbers(u32 token, const Loaded& l, First first) const {
    Pack<vf32> x;
    Numbers partner = uncrossed(l.partners);
    Floats cosines = {}, sines = {};
    if constexpr (T == TURNED) {
      cosines = *(const Floats*)(angles.cosines + token * head_dim);
      sines = *(const Floats*)(angles.sines + token * head_dim);
    }
#pragma unroll
    for (u32 i = 0; i < PACK; ++i) {
      x.v[i] = T == ODD ? odd_number(token, strip.first + i, first) : first(E::number(l.own.get(i)));
      if (T == TURNED)
        x.v[i] = x.v[i] * as_float(cosines.words[i]) + first(E::number(partner.get(i))) * as_float(sines.words[i]);
    }
    return x;
  }
  template <class First>
  METHOD vf32 odd_number(u32 token, u32 channel, First first) const {
    if (channel - strip.first + lane() * PACK >= strip.active) return 0.f;
    const i64 row = (i64)token * strip.token_stride;
    auto number = [&](u32 channel) { return first(E::number(*(const raw*)(strip.address(channel) + row))); };
    if (!angles.cosines) return number(channel);
    u32 dim = channel % head_dim, at = token * head_dim + dim;
    return number(channel) * angles.cosines[at] + number(channel - dim + angles.partners[dim]) * angles.sines[at];
  }
  METHOD Numbers uncrossed(const Numbers& numbers) const {
    Numbers found = numbers;
    for (u32 i = 0; i < Numbers::COUNT; ++i) {
      if constexpr (sizeof(raw) == 2)
        found.words[i] = __byte_perm(numbers.words[i], 0, crossed ? 0x1032 : 0x3210);
      else
        found.words[i] = crossed ? numbers.words[i ^ 1u] : numbers.words[i];
    }
    return found;
  }
};

#else

// A row's bytes, upwards. AVX2's four loads of 32 floats would else go where their numbers are used, in any order, in which
// processors do not see that rows follow each other: half as fast.
template <class V>
FN V load_upwards(const void* p) {
#if KVZIP_AVX2
  __m256i parts[sizeof(V) / sizeof(__m256i)];
  for (u32 i = 0; i < sizeof(V) / sizeof(__m256i); ++i) {
    parts[i] = _mm256_loadu_si256((const __m256i*)p + i);
    asm volatile("" : "+x"(parts[i]));
  }
  return load_as<V>(parts);
#else
  return load_as<V>(p);
#endif
}

template <class E>
struct TurnedColumn {
  Column<E> own, partner;
  Angles angles;
  vu32 dims;
  u32 head_dim;
  bool turns, joined;

  static METHOD TurnedColumn make(const Plane& plane, const Angles& angles, u32 group) {
    TurnedColumn t;
    t.own = Column<E>::make(plane, group);
    t.angles = angles;
    t.turns = angles.cosines != nullptr;
    t.head_dim = plane.head_dim;
    if (t.turns) {
      u32 last = plane.heads * plane.head_dim - 1;
      vu32 channel = lane_ids() + group * LANES;
      channel = select(channel < last, channel, splat(last));
      vu32 head = divide_by(channel, plane.head_dim);
      t.dims = channel - head * plane.head_dim;
      t.partner = Column<E>::of_channels(plane, head * plane.head_dim + gather_u32(angles.partners, t.dims), t.own.active);
      t.joined = group * LANES % plane.head_dim + LANES <= plane.head_dim;
    }
    return t;
  }
  struct Loaded {
    typename E::vraw own, partner;
  };
  METHOD Loaded load(u32 token) const {
    Loaded l;
    l.own = own.whole ? own.template load<true>(token) : own.template load<false>(token);
    if (turns) l.partner = partner.whole ? partner.template load<true>(token) : partner.template load<false>(token);
    return l;
  }
  template <class First>
  METHOD vf32 numbers(u32 token, const Loaded& l, First first) const {
    vf32 x = first(E::number(l.own));
    if (!turns) return x;
    vf32 cosine = gather_f32(angles.cosines + (u64)token * head_dim, dims, joined);
    vf32 sine = gather_f32(angles.sines + (u64)token * head_dim, dims, joined);
    return x * cosine + first(E::number(l.partner)) * sine;
  }
};

template <class E>
struct TurnedStrip {
  typedef typename E::vraw vraw;
  typedef typename TurnedColumn<E>::Loaded Loaded;
  Strip<E> strip;
  TurnedColumn<E> odd;
  Angles angles;
  const u8* partners;
  u32 head_dim;
  bool crossed;
  Turn turn;

  static METHOD TurnedStrip make(const Plane& plane, const Angles& angles, u32 index, bool whole) {
    TurnedStrip t;
    t.strip = Strip<E>::make(plane, index);
    t.turn = whole && t.strip.whole ? STRAIGHT : ODD;
    t.head_dim = plane.head_dim;
    t.angles = angles;
    if (t.turn == STRAIGHT && angles.cosines) t.turn = t.find_partners(plane) ? TURNED : ODD;
    if (t.turn == ODD) t.odd = TurnedColumn<E>::make(plane, angles, index);
    return t;
  }
  METHOD bool find_partners(const Plane& plane) {
    u32 dim = strip.first % head_dim;
    if (dim + LANES > head_dim) return false;
    vu32 of = load_u32(angles.partners + dim);
    crossed = all((vm32)(of == (lane_ids() ^ 1u) + dim));
    if (!crossed && !all((vm32)(of == lane_ids() + of[0]))) return false;
    i64 apart = (i64)(crossed ? dim : of[0]) - dim;
    partners = strip.column.base + strip.column.offsets[0] + apart * (i64)sizeof(typename E::raw);
    angles.cosines += dim;
    angles.sines += dim;
    return true;
  }
  template <Turn T>
  METHOD Loaded load(u32 token) const {
    if constexpr (T == ODD) return odd.load(token);
    Loaded l;
    const i64 row = (i64)token * strip.column.token_stride;
    l.own = load_upwards<vraw>(strip.column.base + strip.column.offsets[0] + row);
    if constexpr (T == TURNED) l.partner = load_upwards<vraw>(partners + row);
    return l;
  }
  template <Turn T, class First>
  METHOD Pack<vf32> numbers(u32 token, const Loaded& l, First first) const {
    if constexpr (T == ODD) return {{odd.numbers(token, l, first)}};
    vf32 x = first(E::number(l.own));
    if constexpr (T == TURNED) {
      vraw partner = crossed ? shuffle_xor<1>(l.partner) : l.partner;
      vf32 cosines = load_as<vf32>(angles.cosines + (u64)token * head_dim);
      x = x * cosines + first(E::number(partner)) * load_as<vf32>(angles.sines + (u64)token * head_dim);
    }
    return {{x}};
  }
};

#endif
