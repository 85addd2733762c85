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

// Those of the finest M.
FN Steps finest_steps(const Refinements& refinements) {
  float levels = (float)refinements.levels;
  for (u32 i = 0; i < refinements.count; ++i) levels *= 3.f;
  return Steps::make(levels);
}

// Steps from the middle, of level M, as a signed number.
FN vu32 steps_from_middle(vf32 x, float levels, float top) { return round_to_int(x * (levels / top)); }

// One warp a group of 32 channels of a block. `errors` as elsewhere, of the finest level.
template <class E, bool WHOLE>
FN void refine_encode(const Plane& plane, const Refinements& to, u32 group, u32 groups, const Column<E>& column,
                      const TokenScale* scales, const u32* exact, float* errors) {
  Steps finest = finest_steps(to);
  GroupLoss loss = GroupLoss::zero();
  for (u32 row = 0; row * DIGITS < plane.tokens; ++row) {
    u32 first = row * DIGITS, stop = first + DIGITS < plane.tokens ? first + DIGITS : plane.tokens, weight = 1;
    vu32 packed[MAX_REFINEMENTS] = {splat(0), splat(0)};
    for (u32 t = first; t < stop; ++t, weight *= 3) {
      vf32 x = E::to_float(column.template load<WHOLE>(t));
      if (in_mask(exact, t)) {
        loss.add_kept(x);
        continue;
      }
      const TokenScale scale = scales[t];
      vf32 restored = splatf(0.f);
      if (scale.top != 0.f) {
        float levels = (float)to.levels;
        vu32 k = as_bits(scale.raise(x)) - (ROUNDER_BITS + to.levels);
#pragma unroll
        for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
          if (i >= to.count) break;
          levels *= 3.f;
          vu32 digit = steps_from_middle(x, levels, scale.top) - k * 3u + 1u;
          digit = select(digit > 0x80000000u, splat(0), select(digit > 2u, splat(2), digit));
          k = k * 3u + digit - 1u;
          packed[i] = packed[i] + digit * weight;
        }
        restored = E::nearest(finest.number(k, scale.top));
      }
      loss.add(x, restored - x);
    }
#pragma unroll
    for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
      if (i >= to.count) break;
      vu32 digits = select(column.idle(), splat(0), packed[i]);
      store_u8((u8*)to.digits[i] + ((u64)row * groups + group) * LANES, narrow(digits));
    }
  }
  loss.store(errors);
}

#define CACHEGEN_REFINE_ENCODE(suffix, E)                                                                                  \
  KERNEL(cachegen_refine_encode_##suffix, const Plane* planes, const Refinements* to, const TokenScale* scales,            \
         const u32* exact, float* errors, u32 groups, u32 tiles) {                                                         \
    FOR_EACH_WARP(warp) {                                                                                                  \
      u32 block = warp / groups, group = warp % groups;                                                                    \
      Column<E> column = Column<E>::make(planes[block], group);                                                            \
      const TokenScale* of_block = scales + (u64)block * tiles * TILE;                                                     \
      const u32* masks = exact + (u64)block * tiles;                                                                       \
      if (column.whole)                                                                                                    \
        refine_encode<E, true>(planes[block], to[block], group, groups, column, of_block, masks, errors + (u64)warp * 3);  \
      else                                                                                                                 \
        refine_encode<E, false>(planes[block], to[block], group, groups, column, of_block, masks, errors + (u64)warp * 3); \
    }                                                                                                                      \
  }
FOR_ELEMENT_TYPES(CACHEGEN_REFINE_ENCODE)

// Refines a decoded plane in place by the `count` refinements that are there.
template <class E, bool WHOLE>
FN void refine(const Plane& plane, const Refinements& by, u32 group, u32 groups, const Column<E>& column,
               const float* maxima, const u32* exact) {
  Steps finest = finest_steps(by);
  for (u32 row = 0; row * DIGITS < plane.tokens; ++row) {
    u32 first = row * DIGITS, stop = first + DIGITS < plane.tokens ? first + DIGITS : plane.tokens;
    vu32 packed[MAX_REFINEMENTS] = {splat(0), splat(0)};
#pragma unroll
    for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
      if (i >= by.count) break;
      packed[i] = widen(load_u8((const u8*)by.digits[i] + ((u64)row * groups + group) * LANES));
    }
    for (u32 t = first; t < stop; ++t) {
      float top = maxima[t];
      bool kept = in_mask(exact, t) || top == 0.f;
      vu32 k = splat(0);
      if (!kept) k = steps_from_middle(E::to_float(column.template load<WHOLE>(t)), (float)by.levels, top);
#pragma unroll
      for (u32 i = 0; i < MAX_REFINEMENTS; ++i) {
        if (i >= by.count) break;
        vu32 rest = packed[i] * 171u >> 9;  // a third of a byte
        k = k * 3u + (packed[i] - rest * 3u) - 1u;
        packed[i] = rest;
      }
      if (!kept) column.template store<WHOLE>(t, E::from_number(finest.number(k, top)));
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
