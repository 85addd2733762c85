// 8-bit floats (Micikevicius et al., arXiv:2209.05433): encode, decode, and the maxima from which scales are made.
//
// One warp takes a tile of tokens of one plane. Encoded bytes lie token-major, [tokens][channels]. A scale belongs to a
// token, a head or the whole block: it is found at scales[token * token_step + head * head_step], steps of 0 or 1.
#include "loss.h"

struct Fp8Block {
  u64 bytes;   // u8 [tokens][channels]
  u64 scales;  // float
  u32 token_step, head_step;
};

constexpr u32 FP8_TILE = 32;

// What a number becomes: its code, and the magnitude that the code stands for.
struct Fp8Code {
  vu32 code;
  vf32 magnitude;
};

// A format with MANTISSA bits after the point, exponents from SMALLEST (of normal numbers, as float32 bits) on. Numbers
// are rounded to the nearest code, ties to even. Those above LIMIT become LARGEST, or OVERFLOW without saturation.
template <u32 MANTISSA, u32 BIAS, u32 SMALLEST, u32 LIMIT, u32 LARGEST, u32 OVERFLOW>
struct Fp8Format {
  // The largest number, as float32 bits.
  enum : u32 { TOP = (LARGEST + (BIAS << MANTISSA)) << (23 - MANTISSA) };

  // |x| up to LIMIT. The code is in the lowest byte, and something above it.
  static METHOD Fp8Code round(vf32 x) {
    // Adding 1.5 * 2^(e + SHIFT), where x has the exponent e or less, rounds x to MANTISSA bits of that exponent and leaves
    // them as an integer in the sum's lowest bits. Numbers below the smallest normal one take its exponent. The code is that
    // integer, and 2^MANTISSA for each exponent above the smallest one: so much more there is in the sum's own exponent.
    // OFFSET is such that the lowest byte of both together counts from 0.
    constexpr u32 SHIFT = 23 - MANTISSA, RAISE = (SHIFT << 23) + 0x400000;
    constexpr u32 OFFSET = (0u - ((SMALLEST + RAISE) >> SHIFT)) & 0xffu;
    static_assert(OFFSET % 2 == 0, "else ties would go to odd codes");
    vf32 adder = as_float((as_bits(x) & 0x7f800000u) + (RAISE + OFFSET));
    adder = larger(adder, as_float(splat(SMALLEST + RAISE + OFFSET)));
    vf32 sum = magnitude_of(x) + adder;
    return {as_bits(sum) + (as_bits(sum) >> SHIFT), sum - adder};
  }
  // Any x whose sign is clear.
  static METHOD Fp8Code encode(vf32 x, bool saturate) {
    Fp8Code rounded = round(x);
    vu32 bits = as_bits(x);
    vm32 beyond = bits > LIMIT;
    vu32 code = select(beyond, splat(saturate ? LARGEST : OVERFLOW), rounded.code);
    code = select(bits > 0x7f800000u, splat(0x7f), code);
    // Where there are no infinities, the code beyond is that of NaN.
    constexpr u32 LOST = OVERFLOW == 0x7f ? 0x7fc00000 : 0x7f800000;
    return {code, select(beyond, as_float(splat(saturate ? (u32)TOP : LOST)), rounded.magnitude)};
  }
};

// LIMIT is the midpoint between the largest number and what would be the next: 464 rounds down to the even 448, while
// 61440 rounds up to 65536.
struct E4m3 : Fp8Format<3, 120, 0x3c800000, 0x43e80000, 0x7e, 0x7f> {
  static METHOD vf32 decode(vu32 b) {
    vu32 magnitude = b & 0x7fu, bits = as_bits(short_float<3, 120>(magnitude));
    bits = select(magnitude == 0x7fu, splat(0x7fc00000), bits);
    return as_float(bits | (b & 0x80u) << 24);
  }
};

struct E5m2 : Fp8Format<2, 112, 0x38800000, 0x476fffff, 0x7b, 0x7c> {
  static METHOD vf32 decode(vu32 b) { return half_to_float(narrow(b << 8)); }
};

// A NaN goes through unchanged: what arithmetic makes of its sign and payload differs between processors.
FN vf32 unless_nan(vf32 result, vf32 x) { return select((vm32)(x == x), result, x); }

// What shares a scale: nothing, the channels of a token, or the tokens of a channel.
enum Scaling { UNSCALED, PER_TOKEN, PER_CHANNEL };

FN Scaling scaling_of(const Fp8Block& block) {
  return !block.scales ? UNSCALED : block.token_step ? PER_TOKEN : PER_CHANNEL;
}

// The scales of a strip's rows, which begin with token `start`. All channels that a lane has of a whole strip are of one head.
template <Scaling S, bool WHOLE>
struct Scales {
  enum : int { COUNT = WHOLE ? 1 : PACK };
  const float* of_rows;
  Divisor of_channels[COUNT];

  static METHOD Scales make(const Plane& plane, const Fp8Block& block, u32 strip, u32 start) {
    const float* scales = (const float*)block.scales;
    Scales s;
    s.of_rows = scales + start;
    if (S != PER_CHANNEL) return s;
    u32 first = strip * (LANES * PACK), past = first + LANES * PACK, channels = plane.heads * plane.head_dim;
    u32 last = (past < channels ? past : channels) - 1, head = first / plane.head_dim;
    bool one_head = block.head_step == 0 || head == last / plane.head_dim;
    for (int i = 0; i < COUNT; ++i) {
      vu32 channel = lane_ids() * (u32)PACK + (first + i);
      vf32 scale;
      if (one_head)
        scale = splatf(scales[head * block.head_step]);
      else
        scale = gather_f32(scales, divide_by(select(channel < last, channel, splat(last)), plane.head_dim));
      s.of_channels[i] = Divisor::make(scale);
    }
    return s;
  }
  METHOD vf32 at(u32 row, int i) const {
    return S == PER_TOKEN ? splatf(of_rows[row]) : of_channels[WHOLE ? 0 : i].value;
  }
};

// Encodes the rows of a strip and keeps count of what that does to them. Nearly all rows are plain: of finite numbers up to
// the format's largest, for which nothing else has to be looked for.
template <class E, class F, Scaling S, bool WHOLE>
struct Fp8Encoder {
  typedef typename Strip<E>::Loaded Loaded;
  const Strip<E>& strip;
  const Scales<S, WHOLE>& scales;
  RowDivisors* divisors;
  bool saturate;
  StripLoss loss;

  // Whether there may be plain rows: they divide by the scales' reciprocals.
  METHOD bool prepare(u32 rows) const {
    if (!WHOLE) return false;
    if (S == PER_TOKEN) return divisors->set(scales.of_rows, rows);
    return S == UNSCALED || all(scales.of_channels[0].exact());
  }
  METHOD void encode_plain(u32 row, const Loaded& loaded, u8* bytes) {
    Pack<typename E::vraw> numbers = strip.values(loaded);
    Pack<vu32> codes;
    Divisor scale;
    if (S != UNSCALED) scale = S == PER_TOKEN ? divisors->at(row) : scales.of_channels[0];
    for (int i = 0; i < PACK; ++i) {
      vf32 x = E::number(numbers.v[i]);
      Fp8Code coded = F::round(S == UNSCALED ? x : scale.divide(x));
      codes.v[i] = coded.code;
      // Every element type holds an unscaled code exactly.
      vf32 restored = S == UNSCALED ? coded.magnitude : E::nearest(coded.magnitude * scale.value);
      loss.add(i, x, restored - magnitude_of(x));
    }
    strip.template store_bytes<WHOLE>(bytes, strip.signed_bytes(codes, loaded));
  }
  METHOD void encode_any(u32 row, const Loaded& loaded, u8* bytes) {
    Pack<typename E::vraw> numbers = strip.values(loaded);
    Pack<vu32> codes;
    for (int i = 0; i < PACK; ++i) {
      vf32 x = absolute(E::to_float(numbers.v[i])), scale = S == UNSCALED ? splatf(1.f) : scales.at(row, i);
      Fp8Code coded = F::encode(S == UNSCALED ? x : x / scale, saturate);
      codes.v[i] = coded.code;
      vf32 restored = S == UNSCALED ? coded.magnitude : E::to_float(E::from_float(coded.magnitude * scale));
      // A NaN stays one. What becomes infinite or NaN, or no longer is infinite, has an infinite error.
      vf32 difference = absolute(restored - x);
      difference = select((vm32)(difference < infinity()), difference, infinity());
      difference = select((vm32)(restored == x) | (vm32)(x != x), splatf(0.f), difference);
      loss.add(i, select((vm32)(x < infinity()), x, splatf(0.f)), difference);
    }
    strip.template store_bytes<WHOLE>(bytes, strip.signed_bytes(codes, loaded));
  }
};

template <class E, class F, Scaling S, bool WHOLE>
FN void fp8_encode_strip(const Plane& plane, const Fp8Block& block, u32 index, u32 start, u32 rows, bool saturate,
                         const Strip<E>& strip, RowDivisors* divisors, TileLoss& loss) {
  u32 channels = plane.heads * plane.head_dim;
  Scales<S, WHOLE> scales = Scales<S, WHOLE>::make(plane, block, index, start);
  Fp8Encoder<E, F, S, WHOLE> encoder = {strip, scales, divisors, saturate};
  constexpr u32 AT_ONCE = S == PER_TOKEN ? (ROWS + 1) / 2 : ROWS;
  for (bool plain = encoder.prepare(rows);; plain = false) {
    u8* bytes = (u8*)block.bytes + (u64)start * channels + (u64)index * (LANES * PACK);
    encoder.loss = StripLoss::zero();
    for (u32 row = 0; row < rows;) {
      u32 next = row + AT_ONCE;
      if (WHOLE && plain && next <= rows) {
        typename Strip<E>::Loaded loaded[AT_ONCE];
        strip.load(start + row, loaded);
        if (S != UNSCALED || strip.none_above(loaded, scalar_as_float(F::TOP))) {
          for (u32 r = 0; r < AT_ONCE; ++r, bytes += channels) encoder.encode_plain(row + r, loaded[r], bytes);
          row = next;
          continue;
        }
      }
#pragma unroll 1
      for (; row < rows && row < next; ++row, bytes += channels)
        encoder.encode_any(row, strip.template load<WHOLE>(start + row), bytes);
    }
    // Scales leave nothing above the largest number but what is not finite, which the sums show: then once more.
    if (S == UNSCALED || !WHOLE || !plain || encoder.loss.finite()) break;
  }
  loss.add(strip, encoder.loss);
}

template <class E, class F, Scaling S, bool WHOLE>
FN void fp8_decode_strip(const Plane& plane, const Fp8Block& block, u32 index, u32 start, u32 rows,
                         const Strip<E>& strip) {
  u32 channels = plane.heads * plane.head_dim;
  Scales<S, WHOLE> scales = Scales<S, WHOLE>::make(plane, block, index, start);
  const u8* in = (const u8*)block.bytes + (u64)start * channels + (u64)index * (LANES * PACK);
  constexpr u32 AT_ONCE = WHOLE ? (S == UNSCALED ? ROWS : (ROWS + 1) / 2) : 1;
  for (u32 first = 0; first < rows; first += AT_ONCE) {
    typename Strip<E>::LoadedBytes loaded[AT_ONCE];
    for (u32 r = 0; r < AT_ONCE; ++r)
      loaded[r] = strip.template load_bytes<WHOLE>(in + (u64)(first + r < rows ? first + r : first) * channels);
    for (u32 r = 0; r < AT_ONCE && first + r < rows; ++r) {
      Pack<vu32> codes = strip.bytes(loaded[r]);
      Pack<typename E::vraw> values;
      for (int i = 0; i < PACK; ++i) {
        vf32 x = F::decode(codes.v[i]);
        values.v[i] = S == UNSCALED ? E::from_exact(x) : E::from_float(unless_nan(x * scales.at(first + r, i), x));
      }
      strip.template store<WHOLE>(start + first + r, strip.loaded(values));
    }
  }
}

// The forms that a strip may take, as template arguments of `code`.
#define FP8_DISPATCH(scaling, whole, code)                        \
  switch (scaling) {                                              \
    case UNSCALED:                                                \
      whole ? code(UNSCALED, true) : code(UNSCALED, false);       \
      break;                                                      \
    case PER_TOKEN:                                               \
      whole ? code(PER_TOKEN, true) : code(PER_TOKEN, false);     \
      break;                                                      \
    default:                                                      \
      whole ? code(PER_CHANNEL, true) : code(PER_CHANNEL, false); \
  }

// How many tokens a tile has. Tiles are counted by the longest block: a shorter one has empty ones.
FN u32 rows_of(const Plane& plane, u32 start) {
  u32 left = start < plane.tokens ? plane.tokens - start : 0;
  return left < FP8_TILE ? left : FP8_TILE;
}

FN u32 strips_of(const Plane& plane) { return (plane.heads * plane.head_dim + LANES * PACK - 1) / (LANES * PACK); }

template <class E, class F>
FN void fp8_encode_tile(const Plane& plane, const Fp8Block& block, u32 tile, bool saturate, RowDivisors* divisors,
                        float* sums) {
  u32 start = tile * FP8_TILE, rows = rows_of(plane, start);
  TileLoss loss = TileLoss::zero();
  for (u32 s = 0; s < strips_of(plane); ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
#define ENCODE(S, WHOLE) \
  fp8_encode_strip<E, F, S, WHOLE>(plane, block, s, start, rows, saturate, strip, divisors, loss)
    FP8_DISPATCH(scaling_of(block), strip.whole_with((const void*)block.bytes), ENCODE)
  }
  loss.store(sums);
}

template <class E, class F>
FN void fp8_decode_tile(const Plane& plane, const Fp8Block& block, u32 tile) {
  u32 start = tile * FP8_TILE, rows = rows_of(plane, start);
  for (u32 s = 0; s < strips_of(plane); ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
#define DECODE(S, WHOLE) fp8_decode_strip<E, F, S, WHOLE>(plane, block, s, start, rows, strip)
    FP8_DISPATCH(scaling_of(block), strip.whole_with((const void*)block.bytes), DECODE)
  }
}

// One warp a tile, `tiles` of each block. Errors: squared error, energy, largest error of each tile.
#define FP8_KERNELS(suffix, E, format, F)                                                                              \
  KERNEL(fp8_encode_##format##_##suffix, const Plane* planes, const Fp8Block* blocks, float* errors, u32 tiles,        \
         u32 saturate) {                                                                                               \
    WARP_SHARED(RowDivisors, divisors, 1);                                                                             \
    FOR_EACH_WARP(warp)                                                                                                \
    fp8_encode_tile<E, F>(planes[warp / tiles], blocks[warp / tiles], warp % tiles, saturate, divisors,                \
                          errors + (u64)warp * 3);                                                                     \
  }                                                                                                                    \
  KERNEL(fp8_decode_##format##_##suffix, const Plane* planes, const Fp8Block* blocks, u32 tiles) {                     \
    FOR_EACH_WARP(warp) fp8_decode_tile<E, F>(planes[warp / tiles], blocks[warp / tiles], warp % tiles);               \
  }
#define FP8_FORMATS(suffix, E) FP8_KERNELS(suffix, E, e4m3fn, E4m3) FP8_KERNELS(suffix, E, e5m2, E5m2)
FOR_ELEMENT_TYPES(FP8_FORMATS)

// The largest finite magnitudes of N tokens' heads, the first one's at `p`: maxima[0], maxima[step]... Loads of all N are under
// way before one is looked at.
template <class E, u32 N>
FN void head_maxima_rows(const u8* p, i64 token_stride, u32 head_dim, float* maxima, u32 step) {
  typedef typename E::vraw vraw;
  const vraw zero = E::narrowed(splat(0)), unsign = E::narrowed(splat(E::ABS)), infinite = E::narrowed(splat(E::INFINITE));
  vraw top[N];
  for (u32 r = 0; r < N; ++r) top[r] = zero;
#pragma unroll 1
  for (u32 d = 0; d < head_dim; d += LANES, p += LANES * sizeof(typename E::raw)) {
    u32 active = head_dim - d < LANES ? head_dim - d : LANES;
    vraw loaded[N];
    for (u32 r = 0; r < N; ++r) loaded[r] = load_some((const typename E::raw*)(p + (i64)r * token_stride), active);
    for (u32 r = 0; r < N; ++r) {
      vraw magnitude = loaded[r] & unsign;
      top[r] = maximum(top[r], select(magnitude < infinite, magnitude, zero));
    }
  }
  for (u32 r = 0; r < N; ++r) store_uniform(maxima + (u64)r * step, scalar_to_float(E(), largest(top[r])));
}

// The largest finite magnitude of every token and head: float [blocks][tiles * FP8_TILE][heads]. One warp a tile.
template <class E>
FN void head_maxima_tile(const Plane& plane, u32 tile, float* maxima) {
  u32 start = tile * FP8_TILE, rows = rows_of(plane, start), heads = plane.heads, head_dim = plane.head_dim;
  i64 token_stride = plane.token_stride, head_stride = plane.head_stride;
  const u8* tokens = (const u8*)plane.data + (i64)start * token_stride;
  maxima += (u64)start * heads;
  for (u32 h = 0; h < heads; ++h, tokens += head_stride, ++maxima) {
    u32 row = 0;
    for (; row + ROWS <= rows; row += ROWS)
      head_maxima_rows<E, ROWS>(tokens + (i64)row * token_stride, token_stride, head_dim, maxima + (u64)row * heads, heads);
    for (; row < rows; ++row)
      head_maxima_rows<E, 1>(tokens + (i64)row * token_stride, token_stride, head_dim, maxima + (u64)row * heads, heads);
  }
}

#define HEAD_MAXIMA(suffix, E)                                                                                         \
  KERNEL(head_maxima_##suffix, const Plane* planes, float* maxima, u32 tiles) {                                        \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      head_maxima_tile<E>(plane, warp % tiles, maxima + (u64)(warp / tiles) * tiles * FP8_TILE * plane.heads);         \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(HEAD_MAXIMA)

// The scales of a block from those maxima: the largest of what shares one, over the format's largest number. One warp a block;
// `scales` has the address of each block's, [tokens or 1][heads or 1].
KERNEL(fp8_scales, const Plane* planes, const float* maxima, const u64* scales, u32 tiles, u32 per_token, u32 per_head,
       float largest) {
  FOR_EACH_WARP(warp) {
    u32 tokens = planes[warp].tokens, heads = planes[warp].heads;
    const float* tops = maxima + (u64)warp * tiles * FP8_TILE * heads;
    float* out = (float*)scales[warp];
    for (u32 row = 0; row < (per_token ? tokens : 1); ++row)
      for (u32 column = 0; column < (per_head ? heads : 1); ++column) {
        float top = 0.f;
        for (u32 t = per_token ? row : 0; t < (per_token ? row + 1 : tokens); ++t)
          for (u32 h = per_head ? column : 0; h < (per_head ? column + 1 : heads); ++h) {
            float other = tops[(u64)t * heads + h];
            top = other > top ? other : top;
          }
        float scale = top / largest;
        // A scale that is zero, or too small for a float to hold exactly, would divide nothing well.
        store_uniform(out++, scale < 7.88860905e-31f ? 1.f : scale);  // 2^-100
      }
  }
}
