// 8-bit floats (Micikevicius et al., arXiv:2209.05433): encode, decode, and the maxima from which scales are made.
//
// One warp takes a tile of tokens of one plane. Encoded bytes lie token-major, [tokens][channels]. A scale belongs to a
// token, a head, both or the whole block: it is found at scales[token * token_step + head * head_step].
#include "warp.h"

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
  static METHOD Fp8Code encode(vf32 x, bool saturate) {
    constexpr u32 SHIFT = 23 - MANTISSA;
    // Adding this to a subnormal rounds it to a multiple of the smallest step, which then are the sum's lowest bits.
    vf32 step_adder = as_float(splat(SMALLEST + (SHIFT << 23)));
    vu32 u = as_bits(x), bits = u & 0x7fffffffu;
    vu32 rounded = (bits + ((1u << (SHIFT - 1)) - 1u) + (bits >> SHIFT & 1u)) & ~((1u << SHIFT) - 1u);
    vf32 sum = as_float(bits) + step_adder;
    vm32 subnormal = bits < SMALLEST, beyond = bits > LIMIT;
    vu32 code = select(subnormal, as_bits(sum) - as_bits(step_adder), (rounded >> SHIFT) - (BIAS << MANTISSA));
    code = select(beyond, splat(saturate ? LARGEST : OVERFLOW), code);
    code = select(bits > 0x7f800000u, splat(0x7f), code);
    vf32 magnitude = select(subnormal, sum - step_adder, as_float(rounded));
    u32 largest = ((LARGEST + (BIAS << MANTISSA)) << SHIFT);
    magnitude = select(beyond, as_float(splat(saturate ? largest : 0x7f800000u)), magnitude);
    return {code | (u >> 24 & 0x80u), magnitude};
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

// How the channels of a strip find their scales. All of one head share a number; else each has its own.
enum Scaling { UNSCALED, UNIFORM, PER_CHANNEL };

template <Scaling S>
struct Scales {
  const float* scales;
  u32 token_step;
  Pack<vu32> offsets;

  static METHOD Scales make(const Plane& plane, const Fp8Block& block, u32 strip) {
    Scales s;
    u32 first = strip * (LANES * PACK), last = plane.heads * plane.head_dim - 1;
    s.token_step = block.token_step;
    s.scales = (const float*)block.scales + (S == UNIFORM ? first / plane.head_dim * block.head_step : 0);
    for (int i = 0; S == PER_CHANNEL && i < PACK; ++i) {
      vu32 channel = lane_ids() * (u32)PACK + (first + i);
      s.offsets.v[i] = divide_by(select(channel < last, channel, splat(last)), plane.head_dim) * block.head_step;
    }
    return s;
  }
  METHOD vf32 at(u32 token, int i) const {
    if (S == UNSCALED) return splatf(1.f);
    const float* p = scales + (u64)token * token_step;
    return S == PER_CHANNEL ? gather_f32(p, offsets.v[i]) : splatf(*p);
  }
};

FN Scaling scaling_of(const Plane& plane, const Fp8Block& block, u32 strip) {
  if (!block.scales) return UNSCALED;
  u32 first = strip * (LANES * PACK), last = first + LANES * PACK - 1, channels = plane.heads * plane.head_dim;
  last = last < channels ? last : channels - 1;
  if (PACK > 1) return PER_CHANNEL;  // a GPU gathers as fast; fewer versions leave it more registers
  return block.head_step == 0 || first / plane.head_dim == last / plane.head_dim ? UNIFORM : PER_CHANNEL;
}

// Squared error, energy and largest error of a tile.
struct Fp8Errors {
  StripSum squared, energy;
  vf32 worst;
};

template <class E, class F, Scaling S, bool WHOLE>
FN void fp8_encode_strip(const Plane& plane, const Fp8Block& block, u32 index, u32 start, u32 stop, bool saturate,
                         const Strip<E>& strip, Fp8Errors& errors) {
  u32 channels = plane.heads * plane.head_dim;
  Scales<S> scales = Scales<S>::make(plane, block, index);
  u8* out = (u8*)block.bytes + (u64)index * (LANES * PACK);
  Pack<vf32> squared, energy;
  for (int i = 0; i < PACK; ++i) squared.v[i] = energy.v[i] = splatf(0.f);
  vf32 worst = splatf(0.f);
  constexpr u32 AT_ONCE = WHOLE ? (S == UNSCALED ? ROWS : (ROWS + 1) / 2) : 1;
  for (u32 first = start; first < stop; first += AT_ONCE) {
    typename Strip<E>::Loaded rows[AT_ONCE];
    for (u32 r = 0; r < AT_ONCE; ++r) rows[r] = strip.template load<WHOLE>(first + r < stop ? first + r : first);
    for (u32 r = 0; r < AT_ONCE && first + r < stop; ++r) {
      u32 t = first + r;
      Pack<typename E::vraw> bits = strip.values(rows[r]);
      Pack<vu32> codes;
      for (int i = 0; i < PACK; ++i) {
        vf32 x = E::to_float(bits.v[i]), magnitude = absolute(x), scale = scales.at(t, i);
        Fp8Code coded = F::encode(S == UNSCALED ? x : unless_nan(x / scale, x), saturate);
        codes.v[i] = coded.code;
        // Every element type holds an unscaled code exactly.
        vf32 restored = S == UNSCALED ? coded.magnitude : E::to_float(E::from_float(coded.magnitude * scale));
        vf32 difference = absolute(restored - magnitude);
        // NaN and infinities have no error to speak of.
        vm32 finite = difference < as_float(splat(0x7f800000));
        difference = select(finite, difference, splatf(0.f));
        magnitude = select(finite, magnitude, splatf(0.f));
        squared.v[i] = squared.v[i] + difference * difference;
        energy.v[i] = energy.v[i] + magnitude * magnitude;
        worst = maximum(worst, difference);
      }
      strip.template store_bytes<WHOLE>(out + (u64)t * channels, codes);
    }
  }
  errors.squared.add(squared);
  errors.energy.add(energy);
  errors.worst = maximum(errors.worst, warp_max(worst));
}

template <class E, class F, Scaling S, bool WHOLE>
FN void fp8_decode_strip(const Plane& plane, const Fp8Block& block, u32 index, u32 start, u32 stop,
                         const Strip<E>& strip) {
  u32 channels = plane.heads * plane.head_dim;
  Scales<S> scales = Scales<S>::make(plane, block, index);
  const u8* in = (const u8*)block.bytes + (u64)index * (LANES * PACK);
  constexpr u32 AT_ONCE = WHOLE ? (S == UNSCALED ? ROWS : (ROWS + 1) / 2) : 1;
  for (u32 first = start; first < stop; first += AT_ONCE) {
    typename Strip<E>::LoadedBytes rows[AT_ONCE];
    for (u32 r = 0; r < AT_ONCE; ++r)
      rows[r] = strip.template load_bytes<WHOLE>(in + (u64)(first + r < stop ? first + r : first) * channels);
    for (u32 r = 0; r < AT_ONCE && first + r < stop; ++r) {
      u32 t = first + r;
      Pack<vu32> codes = strip.bytes(rows[r]);
      Pack<typename E::vraw> values;
      for (int i = 0; i < PACK; ++i) {
        vf32 x = F::decode(codes.v[i]);
        values.v[i] = S == UNSCALED ? E::from_exact(x) : E::from_float(unless_nan(x * scales.at(t, i), x));
      }
      strip.template store<WHOLE>(t, values);
    }
  }
}

// The forms that a strip may take, as template arguments of `code`.
#define FP8_DISPATCH(whole, scaling, code)                \
  if (whole)                                              \
    switch (scaling) {                                    \
      case UNSCALED: code(UNSCALED, true); break;         \
      case UNIFORM:                                       \
        if constexpr (PACK == 1) code(UNIFORM, true);     \
        break;                                            \
      default: code(PER_CHANNEL, true);                   \
    }                                                     \
  else                                                    \
    switch (scaling) {                                    \
      case UNSCALED: code(UNSCALED, false); break;        \
      default: code(PER_CHANNEL, false);                  \
    }

FN u32 strips_of(const Plane& plane) { return (plane.heads * plane.head_dim + LANES * PACK - 1) / (LANES * PACK); }

template <class E, class F>
FN void fp8_encode_tile(const Plane& plane, const Fp8Block& block, u32 tile, bool saturate, float* sums) {
  u32 start = tile * FP8_TILE, stop = start + FP8_TILE < plane.tokens ? start + FP8_TILE : plane.tokens;
  Fp8Errors errors = {StripSum::zero(), StripSum::zero(), splatf(0.f)};
  for (u32 s = 0; s < strips_of(plane); ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
#define ENCODE(S, WHOLE) fp8_encode_strip<E, F, S, WHOLE>(plane, block, s, start, stop, saturate, strip, errors)
    FP8_DISPATCH(strip.whole_with((const void*)block.bytes), scaling_of(plane, block, s), ENCODE)
  }
  store_uniform(sums, first_lane(errors.squared.sum()));
  store_uniform(sums + 1, first_lane(errors.energy.sum()));
  store_uniform(sums + 2, first_lane(errors.worst));
}

template <class E, class F>
FN void fp8_decode_tile(const Plane& plane, const Fp8Block& block, u32 tile) {
  u32 start = tile * FP8_TILE, stop = start + FP8_TILE < plane.tokens ? start + FP8_TILE : plane.tokens;
  for (u32 s = 0; s < strips_of(plane); ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
#define DECODE(S, WHOLE) fp8_decode_strip<E, F, S, WHOLE>(plane, block, s, start, stop, strip)
    FP8_DISPATCH(strip.whole_with((const void*)block.bytes), scaling_of(plane, block, s), DECODE)
  }
}

// One warp a tile, `tiles` of each block. Errors: squared error, energy, largest error of each tile.
#define FP8_KERNELS(suffix, E, format, F)                                                                              \
  KERNEL(fp8_encode_##format##_##suffix, const Plane* planes, const Fp8Block* blocks, float* errors, u32 tiles,        \
         u32 saturate) {                                                                                               \
    FOR_EACH_WARP(warp)                                                                                                \
    fp8_encode_tile<E, F>(planes[warp / tiles], blocks[warp / tiles], warp % tiles, saturate, errors + (u64)warp * 3); \
  }                                                                                                                    \
  KERNEL(fp8_decode_##format##_##suffix, const Plane* planes, const Fp8Block* blocks, u32 tiles) {                     \
    FOR_EACH_WARP(warp) fp8_decode_tile<E, F>(planes[warp / tiles], blocks[warp / tiles], warp % tiles);               \
  }
#define FP8_FORMATS(suffix, E) FP8_KERNELS(suffix, E, e4m3fn, E4m3) FP8_KERNELS(suffix, E, e5m2, E5m2)
FOR_ELEMENT_TYPES(FP8_FORMATS)

// The largest finite magnitude of every token and head: float [blocks][tiles * FP8_TILE][heads]. One warp a tile.
template <class E>
FN void head_maxima_tile(const Plane& plane, u32 tile, float* maxima) {
  u32 start = tile * FP8_TILE, stop = start + FP8_TILE < plane.tokens ? start + FP8_TILE : plane.tokens;
  for (u32 t = start; t < stop; ++t)
    for (u32 h = 0; h < plane.heads; ++h) {
      const typename E::raw* run =
          (const typename E::raw*)(plane.data + (i64)t * plane.token_stride + (i64)h * plane.head_stride);
      vf32 top = splatf(0.f);
      for (u32 d = 0; d < plane.head_dim; d += LANES) {
        u32 active = plane.head_dim - d < LANES ? plane.head_dim - d : LANES;
        vu32 magnitude = widen(active == LANES ? load_lanes(run + d) : load_some(run + d, active)) & (u32)E::ABS;
        magnitude = select(magnitude < (u32)E::INFINITE, magnitude, splat(0));
        top = maximum(top, E::to_float(E::narrowed(magnitude)));
      }
      store_uniform(maxima + (u64)t * plane.heads + h, first_lane(warp_max(top)));
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
