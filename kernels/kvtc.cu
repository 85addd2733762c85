// kvtc: transform coding. Keys are un-rotated, planes scaled, a basis applied between the kernels (a matrix product of
// its own), numbers rounded to multiples of one step, columns of integers coded by rANS with the discretized normal
// distribution that their moments choose. docs/format.md is normative.
//
// A *coefficient row* holds a token's scaled numbers: without a basis the channels of one plane, with one its
// components.
#include "bits.h"

constexpr u32 KVTC_TILE = 32;

// A plane of a batch, on either side of the transform.
struct KvtcPlane {
  u64 scales;      // float [tokens]: what a number is multiplied by
  u64 cosines;     // float [tokens][head_dim], 0 without rotation: x[d] * cosine[d] + x[partner[d]] * sine[d]
  u64 sines;       // float [tokens][head_dim]
  u64 partners;    // u32 [head_dim]
  u64 rows;        // float: the plane's first number in the block's coefficient rows
  u64 exact;       // u32 [tiles]: mask of tokens that are kept exact
  u32 row_stride;  // in floats
  u32 reserved;
};

// ------------------------------------------------------------------------------------------- what a block is like

// One warp a tile of a plane: the mask of tokens with NaN or Inf, and the tokens' mean squares (of finite tokens).
template <class E>
FN void kvtc_tokens_tile(const Plane& plane, u32 tile, float* sums, u32* unfit, float* squares) {
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  u32 start = tile * KVTC_TILE, tokens = plane.tokens - start < KVTC_TILE ? plane.tokens - start : KVTC_TILE;
  for (u32 g = 0; g < groups; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 t = 0; t < tokens; ++t) {
      vf32 x = E::to_float(column.whole ? column.template load<true>(start + t) : column.template load<false>(start +
      t)); vf32 sum = x * x;
      if (g) sum = as_float(load_u32((const u32*)sums + t * LANES)) + sum;
      store_u32((u32*)sums + t * LANES, as_bits(sum));
    }
  }
  vu32 result = splat(0);
  for (u32 t = 0; t < tokens; ++t) {
    float sum = first_lane(warp_sum(as_float(load_u32((const u32*)sums + t * LANES))));
    result = with_lane(result, t, scalar_as_bits(sum));
  }
  vf32 mean = as_float(result) / (float)channels;
  // A sum of squares that overflows counts as unfit, too.
  store_uniform(unfit, ballot((result & 0x7fffffffu) >= 0x7f800000u));
  store_u32((u32*)squares, as_bits(mean));
}

#define KVTC_TOKENS(suffix, E)                                                                                         \
  KERNEL(kvtc_tokens_##suffix, const Plane* planes, u32* unfit, float* squares, u32 tiles) {                           \
    WARP_SHARED(float, sums, KVTC_TILE* LANES);                                                                        \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 plane = warp / tiles, tile = warp % tiles;                                                                   \
      if (tile * KVTC_TILE < planes[plane].tokens)                                                                     \
        kvtc_tokens_tile<E>(planes[plane], tile, sums, unfit + warp, squares + (u64)warp * KVTC_TILE);                 \
      else                                                                                                             \
        store_uniform(unfit + warp, 0u);                                                                               \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(KVTC_TOKENS)

// The numbers of a group of 32 channels, turned by the angles of the side.
template <class E>
struct Unrotated {
  Column<E> own, partner;
  const float* cosines;
  const float* sines;
  vu32 dims;
  u32 head_dim;
  bool turns, joined;

  static METHOD Unrotated make(const Plane& plane, const KvtcPlane& side, u32 group) {
    Unrotated u;
    u.own = Column<E>::make(plane, group);
    u.turns = side.cosines != 0;
    u.head_dim = plane.head_dim;
    u.cosines = (const float*)side.cosines;
    u.sines = (const float*)side.sines;
    if (u.turns) {
      u32 last = plane.heads * plane.head_dim - 1;
      vu32 channel = lane_ids() + group * LANES;
      channel = select(channel < last, channel, splat(last));
      vu32 head = divide_by(channel, plane.head_dim);
      u.dims = channel - head * plane.head_dim;
      vu32 partner = head * plane.head_dim + gather_u32((const u32*)side.partners, u.dims);
      u.partner = Column<E>::of_channels(plane, partner, u.own.active);
      u.joined = group * LANES % plane.head_dim + LANES <= plane.head_dim;
    }
    return u;
  }
  // What a token's numbers are made of, the last three only where they are turned.
  struct Loaded {
    typename E::vraw own, partner;
    vf32 cosine, sine;
  };
  METHOD Loaded load(u32 token) const {
    Loaded l;
    l.own = own.whole ? own.template load<true>(token) : own.template load<false>(token);
    if (!turns) return l;
    l.partner = partner.whole ? partner.template load<true>(token) : partner.template load<false>(token);
    l.cosine = gather_f32(cosines + (u64)token * head_dim, dims, joined);
    l.sine = gather_f32(sines + (u64)token * head_dim, dims, joined);
    return l;
  }
  METHOD vf32 numbers(const Loaded& l) const {
    vf32 x = E::to_float(l.own);
    return turns ? x * l.cosine + E::to_float(l.partner) * l.sine : x;
  }
};

// One warp a group of a key plane: the channels' variances over the tokens that are not exact.
template <class E>
FN void kvtc_variance(const Plane& plane, const KvtcPlane& side, u32 group, float* variances) {
  Unrotated<E> keys = Unrotated<E>::make(plane, side, group);
  const u32* exact = (const u32*)side.exact;
  vf32 sum = splatf(0.f), squares = splatf(0.f);
  u32 count = 0;
  auto load = [&](u32 t) { return keys.load(t); };
  in_turn<FORWARDS, 4>(plane.tokens, load, [&](u32 t, const typename Unrotated<E>::Loaded& loaded) {
    if (!in_mask(exact, t)) sum = sum + keys.numbers(loaded), ++count;
  });
  float n = count ? (float)count : 1.f;
  vf32 mean = sum / n;
  in_turn<FORWARDS, 4>(plane.tokens, load, [&](u32 t, const typename Unrotated<E>::Loaded& loaded) {
    if (in_mask(exact, t)) return;
    vf32 d = keys.numbers(loaded) - mean;
    squares = squares + d * d;
  });
  store_u32((u32*)variances, as_bits(squares / n));
}

#define KVTC_VARIANCE(suffix, E)                                                                                    \
  KERNEL(kvtc_variance_##suffix, const Plane* planes, const KvtcPlane* sides, float* variances, u32 groups) {       \
    FOR_EACH_WARP(warp)                                                                                             \
    kvtc_variance<E>(planes[warp / groups], sides[warp / groups], warp % groups, variances + (u64)warp * LANES);    \
  }
FOR_ELEMENT_TYPES(KVTC_VARIANCE)

// ------------------------------------------------------------------------------------------- planes to rows and back

// One warp a group: un-rotate, scale, into the coefficient rows; zeros for exact tokens. `peaks` gets the largest
// magnitude of each token in the group.
template <class E>
FN void kvtc_forward(const Plane& plane, const KvtcPlane& side, u32 group, float* peaks) {
  Unrotated<E> turned = Unrotated<E>::make(plane, side, group);
  const u32* exact = (const u32*)side.exact;
  const float* scales = (const float*)side.scales;
  float* rows = (float*)side.rows + group * LANES;
  auto load = [&](u32 t) { return turned.load(t); };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, const typename Unrotated<E>::Loaded& loaded) {
    vf32 z = splatf(0.f);
    if (!in_mask(exact, t)) z = turned.numbers(loaded) * scales[t];
    store_some((u32*)rows + (u64)t * side.row_stride, as_bits(z), turned.own.active);
    store_uniform(peaks + t, first_lane(warp_max(absolute(z))));
  });
}

#define KVTC_FORWARD(suffix, E)                                                                                     \
  KERNEL(kvtc_forward_##suffix, const Plane* planes, const KvtcPlane* sides, float* peaks, u32 groups, u32 tokens) { \
    FOR_EACH_WARP(warp)                                                                                             \
    kvtc_forward<E>(planes[warp / groups], sides[warp / groups], warp % groups, peaks + (u64)warp * tokens);        \
  }
FOR_ELEMENT_TYPES(KVTC_FORWARD)

// The numbers of a group as coefficient rows have them, scaled and rotated again.
struct Restored {
  const float* rows;
  const float* scales;
  const float* cosines;
  const float* sines;
  vu32 dims, partners;
  u32 row_stride, head_dim, active, first;
  bool turns, joined, adjoining;

  static METHOD Restored make(const Plane& plane, const KvtcPlane& side, u32 group) {
    Restored r;
    u32 last = plane.heads * plane.head_dim - 1, left = last + 1 - group * LANES;
    r.active = left < LANES ? left : LANES;
    r.first = group * LANES;
    r.rows = (const float*)side.rows;
    r.scales = (const float*)side.scales;
    r.row_stride = side.row_stride;
    r.turns = side.cosines != 0;
    r.cosines = (const float*)side.cosines;
    r.sines = (const float*)side.sines;
    r.head_dim = plane.head_dim;
    if (r.turns) {
      vu32 channel = lane_ids() + r.first;
      channel = select(channel < last, channel, splat(last));
      vu32 head = divide_by(channel, plane.head_dim);
      r.dims = channel - head * plane.head_dim;
      r.partners = head * plane.head_dim + gather_u32((const u32*)side.partners, r.dims);
      r.joined = r.first % plane.head_dim + LANES <= plane.head_dim;
      r.adjoining = ballot(r.partners != lane_ids() + first_lane(r.partners)) == 0;
    }
    return r;
  }
  // The last three only where numbers are turned.
  struct Loaded {
    float scale;
    vf32 own, partner, cosine, sine;
  };
  METHOD Loaded load(u32 token) const {
    const float* row = rows + (u64)token * row_stride;
    Loaded l;
    l.scale = scales[token];
    l.own = as_float(load_some((const u32*)row + first, active));
    if (!turns) return l;
    l.partner = gather_f32(row, partners, adjoining);
    l.cosine = gather_f32(cosines + (u64)token * head_dim, dims, joined);
    l.sine = gather_f32(sines + (u64)token * head_dim, dims, joined);
    return l;
  }
  METHOD vf32 numbers(const Loaded& l) const {
    vf32 x = l.own * l.scale;
    return turns ? x * l.cosine + l.partner * l.scale * l.sine : x;
  }
};

template <class E>
FN void kvtc_inverse(const Plane& plane, const KvtcPlane& side, u32 group) {
  Restored rows = Restored::make(plane, side, group);
  Column<E> column = Column<E>::make(plane, group);
  const u32* exact = (const u32*)side.exact;
  auto load = [&](u32 t) { return rows.load(t); };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, const Restored::Loaded& loaded) {
    if (in_mask(exact, t)) return;
    typename E::vraw x = E::from_float(rows.numbers(loaded));
    if (column.whole)
      column.template store<true>(t, x);
    else
      column.template store<false>(t, x);
  });
}

// A token in the plane and in the coefficient rows.
template <class E>
struct KvtcBoth {
  typename E::vraw plane;
  Restored::Loaded row;
};

// What the inverse would make, beside the plane as it is: squared error, energy, largest error of a group.
template <class E>
FN void kvtc_errors(const Plane& plane, const KvtcPlane& side, u32 group, float* errors) {
  Restored rows = Restored::make(plane, side, group);
  Column<E> column = Column<E>::make(plane, group);
  const u32* exact = (const u32*)side.exact;
  vf32 squared = splatf(0.f), energy = splatf(0.f), worst = splatf(0.f);
  auto load = [&](u32 t) {
    return KvtcBoth<E>{column.whole ? column.template load<true>(t) : column.template load<false>(t), rows.load(t)};
  };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, const KvtcBoth<E>& loaded) {
    vf32 x = E::to_float(loaded.plane);
    energy = energy + select(absolute(x) < infinity(), x * x, splatf(0.f));
    if (in_mask(exact, t)) return;
    vf32 difference = absolute(E::to_float(E::from_float(rows.numbers(loaded.row))) - x);
    difference = select(column.idle(), splatf(0.f), difference);
    squared = squared + difference * difference;
    worst = maximum(worst, difference);
  });
  float sums[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
  for (u32 i = 0; i < 3; ++i) store_uniform(errors + i, sums[i]);
}

#define KVTC_INVERSE(suffix, E)                                                                                   \
  KERNEL(kvtc_inverse_##suffix, const Plane* planes, const KvtcPlane* sides, u32 groups) {                        \
    FOR_EACH_WARP(warp) kvtc_inverse<E>(planes[warp / groups], sides[warp / groups], warp % groups);              \
  }                                                                                                               \
  KERNEL(kvtc_errors_##suffix, const Plane* planes, const KvtcPlane* sides, float* errors, u32 groups) {          \
    FOR_EACH_WARP(warp)                                                                                           \
    kvtc_errors<E>(planes[warp / groups], sides[warp / groups], warp % groups, errors + (u64)warp * 3);           \
  }
FOR_ELEMENT_TYPES(KVTC_INVERSE)
