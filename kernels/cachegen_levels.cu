// Quality levels on top of CacheGen: refinements of its symbols, each by three.
//
// A quantizer of 3M steps to a side cuts every cell of one of M steps in three: the cells nest, so that the coarse symbol and a
// digit of -1, 0 or 1 say the fine one (a successive refinement, Equitz and Cover 1991, at no loss). Digits are packed five
// tokens a byte, u8 [tokens / 5][groups * 32], the first token the lowest digit in base three. What the coarse symbol was is
// seen in the decoded number: rounding to its type moves it by far less than half a step.
#include "cachegen.h"

constexpr u32 DIGITS = 5;  // 3^5 = 243
constexpr u32 MAX_REFINEMENTS = 2;

struct Refinements {
  u64 digits[MAX_REFINEMENTS];
  u32 levels;  // M of the coarsest
  u32 count;
};

// Steps from the middle, of level M, as a signed number.
FN vu32 steps_from_middle(vf32 x, float levels, float top) { return round_to_int(x * (levels / top)); }

// One warp a group of 32 channels of a block. `errors` as elsewhere, of the finest level.
template <class E, bool WHOLE>
FN void refine_encode(const Plane& plane, const Refinements& to, u32 group, u32 groups, const Column<E>& column,
                      const float* maxima, const u32* exact, float* errors) {
  vf32 squared = splatf(0.f), energy = splatf(0.f), worst = splatf(0.f);
  for (u32 row = 0; row * DIGITS < plane.tokens; ++row) {
    u32 first = row * DIGITS, stop = first + DIGITS < plane.tokens ? first + DIGITS : plane.tokens, weight = 1;
    vu32 packed[MAX_REFINEMENTS] = {splat(0), splat(0)};
    for (u32 t = first; t < stop; ++t, weight *= 3) {
      vf32 x = E::to_float(column.template load<WHOLE>(t));
      if (in_mask(exact, t)) {
        energy = energy + select(absolute(x) < infinity(), x * x, splatf(0.f));
        continue;
      }
      float top = maxima[t], levels = (float)to.levels;
      vf32 restored = splatf(0.f);
      if (top != 0.f) {
        // The coarse symbol as its own encoder rounds it.
        vu32 k = round_to_int(x * (levels / top) + levels) - to.levels;
#pragma unroll
        for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
          if (i >= to.count) break;
          levels *= 3.f;
          vu32 digit = steps_from_middle(x, levels, top) - k * 3u + 1u;
          digit = select(digit > 0x80000000u, splat(0), select(digit > 2u, splat(2), digit));
          k = k * 3u + digit - 1u;
          packed[i] = packed[i] + digit * weight;
        }
        restored = E::to_float(E::from_float(int_to_float(k) / levels * top));
      }
      vf32 difference = restored - x;
      squared = squared + difference * difference;
      energy = energy + x * x;
      worst = maximum(worst, absolute(difference));
    }
#pragma unroll
    for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
      if (i >= to.count) break;
      vu32 digits = select(column.idle(), splat(0), packed[i]);
      store_u8((u8*)to.digits[i] + ((u64)row * groups + group) * LANES, narrow(digits));
    }
  }
  float sums[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
  for (u32 i = 0; i < 3; ++i) store_uniform(errors + i, sums[i]);
}

#define CACHEGEN_REFINE_ENCODE(suffix, E)                                                                               \
  KERNEL(cachegen_refine_encode_##suffix, const Plane* planes, const Refinements* to, const float* maxima,              \
         const u32* exact, float* errors, u32 groups, u32 tiles) {                                                      \
    FOR_EACH_WARP(warp) {                                                                                               \
      u32 block = warp / groups, group = warp % groups;                                                                 \
      Column<E> column = Column<E>::make(planes[block], group);                                                         \
      const float* tops = maxima + (u64)block * tiles * TILE;                                                           \
      const u32* masks = exact + (u64)block * tiles;                                                                    \
      if (column.whole)                                                                                                 \
        refine_encode<E, true>(planes[block], to[block], group, groups, column, tops, masks, errors + (u64)warp * 3);   \
      else                                                                                                              \
        refine_encode<E, false>(planes[block], to[block], group, groups, column, tops, masks, errors + (u64)warp * 3);  \
    }                                                                                                                   \
  }
FOR_ELEMENT_TYPES(CACHEGEN_REFINE_ENCODE)

// Refines a decoded plane in place by the `count` refinements that are there.
template <class E, bool WHOLE>
FN void refine(const Plane& plane, const Refinements& by, u32 group, u32 groups, const Column<E>& column,
               const float* maxima, const u32* exact) {
  for (u32 row = 0; row * DIGITS < plane.tokens; ++row) {
    u32 first = row * DIGITS, stop = first + DIGITS < plane.tokens ? first + DIGITS : plane.tokens;
    vu32 packed[MAX_REFINEMENTS] = {splat(0), splat(0)};
#pragma unroll
    for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
      if (i >= by.count) break;
      packed[i] = widen(load_u8((const u8*)by.digits[i] + ((u64)row * groups + group) * LANES));
    }
    for (u32 t = first; t < stop; ++t) {
      float top = maxima[t], levels = (float)by.levels;
      bool kept = in_mask(exact, t) || top == 0.f;
      vu32 k = splat(0);
      if (!kept) k = steps_from_middle(E::to_float(column.template load<WHOLE>(t)), levels, top);
#pragma unroll
      for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
        if (i >= by.count) break;
        vu32 rest = packed[i] * 171u >> 9;  // a third of a byte
        levels *= 3.f;
        k = k * 3u + (packed[i] - rest * 3u) - 1u;
        packed[i] = rest;
      }
      if (!kept) column.template store<WHOLE>(t, E::from_float(int_to_float(k) / levels * top));
    }
  }
}

#define CACHEGEN_REFINE(suffix, E)                                                                                     \
  KERNEL(cachegen_refine_##suffix, const Plane* planes, const Refinements* by, const float* maxima, const u32* exact,  \
         u32 groups, u32 tiles) {                                                                                      \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 block = warp / groups, group = warp % groups;                                                                \
      Column<E> column = Column<E>::make(planes[block], group);                                                        \
      const float* tops = maxima + (u64)block * tiles * TILE;                                                          \
      const u32* masks = exact + (u64)block * tiles;                                                                   \
      if (column.whole)                                                                                                \
        refine<E, true>(planes[block], by[block], group, groups, column, tops, masks);                                 \
      else                                                                                                             \
        refine<E, false>(planes[block], by[block], group, groups, column, tops, masks);                                \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_REFINE)
