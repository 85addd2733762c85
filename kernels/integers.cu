// Integers of 4 or 8 bits with a scale per token and head. Symmetric: (code - half) * scale. Asymmetric: code * scale +
// minimum. A scale is the smallest bfloat16 that reaches the largest number: 16 bits whose range is that of float32. A
// minimum is one of the numbers themselves.
//
// Codes are packed along channels; or they are split for the entropy coder: symbols of up to 5 bits, one a byte, and low
// bits as they are. One warp takes a tile of 32 tokens.
#include "exact.h"

struct IntegerBlock {
  ExactTokens exact;
  u64 words;    // u32 [tokens][channels * BITS / 32, rounded up]
  u64 symbols;  // u8 [groups][symbol_tokens][32], in place of words,
  u64 low;      // and u32 [tokens][groups][LOW]
  u64 scales;   // bf16 [tokens][heads]
  u64 minima;   // [tokens][heads], of the plane's type; asymmetric only
  u32 symbol_tokens, reserved;
};

FN vu32 gather_raw(const u32* table, vu32 index) { return gather_u32(table, index); }
FN vu16 gather_raw(const u16* table, vu32 index) { return gather_u16(table, index); }

template <class E_, u32 BITS_>
struct IntegerForm {
  typedef E_ E;
  enum : u32 { BITS = BITS_, HALF = 1 << (BITS_ - 1), LOW = BITS_ > 5 ? BITS_ - 5 : 0 };
  bool symmetric, packed;
  METHOD u32 levels() const { return symmetric ? HALF - 1 : (1u << BITS) - 1; }
};

// What the numbers of a token and head share, lane by lane.
struct IntegerGroup {
  vf32 scale, minimum;
  u32 zero;  // the code of `minimum`

  METHOD vu32 encode(vf32 x) const {
    vf32 step = select((vm32)(scale == splatf(0.f)), splatf(1.f), scale);
    vf32 level = select((vm32)(scale == splatf(0.f)), splatf(0.f), (x - minimum) / step);
    return round_to_int(level) + zero;
  }
  METHOD vf32 decode(vu32 code) const { return int_to_float(code - zero) * scale + minimum; }
};

// How the lanes of a column find their groups. ONE_HEAD: all of one head.
template <class Form, bool ONE_HEAD>
struct IntegerGroups {
  typedef typename Form::E E;
  Form form;
  const u16* scales;
  const typename E::raw* minima;
  u32 heads;
  vu32 head;

  static METHOD IntegerGroups make(const Form& form, const Plane& plane, const IntegerBlock& block, u32 group) {
    u32 first = group * LANES, last = plane.heads * plane.head_dim - 1;
    IntegerGroups g;
    g.form = form;
    g.heads = plane.heads;
    u32 start = ONE_HEAD ? first / plane.head_dim : 0;
    g.scales = (const u16*)block.scales + start;
    g.minima = (const typename E::raw*)block.minima + start;
    if (!ONE_HEAD) {
      vu32 channel = lane_ids() + first;
      g.head = divide_by(select(channel < last, channel, splat(last)), plane.head_dim);
    }
    return g;
  }
  METHOD IntegerGroup at(u32 token) const {
    u64 row = (u64)token * heads;
    vu32 scale = ONE_HEAD ? splat(scales[row]) : widen(gather_u16(scales + row, head));
    IntegerGroup group = {as_float(scale << 16), splatf(0.f), form.symmetric ? (u32)Form::HALF : 0u};
    if (!form.symmetric)
      group.minimum = ONE_HEAD ? splatf(scalar_to_float(E{}, minima[row])) : E::to_float(gather_raw(minima + row, head));
    return group;
  }
};

FN bool has_one_head(const Plane& plane, u32 group) {
  u32 first = group * LANES, last = first + LANES - 1, channels = plane.heads * plane.head_dim;
  return first / plane.head_dim == (last < channels ? last : channels - 1) / plane.head_dim;
}

// ------------------------------------------------------------------------------------------- encoding

// Scale and minimum of every head of one token.
template <class Form>
FN void integer_scales(const Form& form, const Plane& plane, const IntegerBlock& block, u32 token, bool kept) {
  typedef typename Form::E E;
  for (u32 h = 0; h < plane.heads; ++h) {
    const typename E::raw* run =
        (const typename E::raw*)(plane.data + (i64)token * plane.token_stride + (i64)h * plane.head_stride);
    vf32 low = as_float(splat(0x7f7fffff)), high = as_float(splat(0xff7fffff));
    for (u32 d = 0; d < plane.head_dim; d += LANES) {
      u32 active = plane.head_dim - d < LANES ? plane.head_dim - d : LANES;
      vf32 x = E::to_float(active == LANES ? load_lanes(run + d) : load_some(run + d, active));
      vm32 used = lane_ids() < active;
      low = select((vm32)(used & (x < low)), x, low);
      high = select((vm32)(used & (x > high)), x, high);
    }
    high = warp_max(high);
    low = splatf(0.f) - warp_max(splatf(0.f) - low);
    vf32 largest = maximum(absolute(low), absolute(high));
    vf32 exact = (form.symmetric ? largest : high - low) / (float)form.levels();
    u32 scale = kept ? 0 : (first_lane(as_bits(exact)) + 0xffffu) >> 16;
    store_uniform((u16*)block.scales + (u64)token * plane.heads + h, (u16)scale);
    if (!form.symmetric) {
      vu32 bits = widen(E::from_float(low));
      store_uniform((typename E::raw*)block.minima + (u64)token * plane.heads + h,
                    (typename E::raw)(kept ? 0 : first_lane(bits)));
    }
  }
}

template <class Form>
FN void integer_store(const Form& form, const IntegerBlock& block, u32 channels, u32 group, u32 active, u32 token, vu32 code) {
  u32 groups = (channels + LANES - 1) / LANES;
  u64 row_words = (channels * Form::BITS + 31) / 32;
  if (form.packed) {
    u32 count = (active * Form::BITS + 31) / 32;
    return pack_lanes<Form::BITS>((u32*)block.words + token * row_words + group * Form::BITS, code, count);
  }
  u8* symbols = (u8*)block.symbols + ((u64)group * block.symbol_tokens + token) * LANES;
  store_u8(symbols, narrow(code >> (u32)Form::LOW));
  if (Form::LOW) store_bits((u32*)block.low + ((u64)token * groups + group) * Form::LOW, code, Form::LOW);
}

template <class Form>
FN vu32 integer_load(const Form& form, const IntegerBlock& block, u32 channels, u32 group, u32 token) {
  u32 groups = (channels + LANES - 1) / LANES;
  u64 row_words = (channels * Form::BITS + 31) / 32;
  if (form.packed)
    return unpack_lanes<Form::BITS>((const u32*)block.words + token * row_words + group * Form::BITS);
  const u8* symbols = (const u8*)block.symbols + ((u64)group * block.symbol_tokens + token) * LANES;
  vu32 code = widen(load_u8(symbols)) << (u32)Form::LOW;
  if (Form::LOW) code = code | load_bits((const u32*)block.low + ((u64)token * groups + group) * Form::LOW, Form::LOW);
  return code;
}

template <class Form, bool ONE_HEAD, bool WHOLE>
FN void integer_encode_column(const Form& form, const Plane& plane, const IntegerBlock& block, const ExactTile& tile,
                              u32 group, const Column<typename Form::E>& column, LossSums& loss) {
  typedef typename Form::E E;
  IntegerGroups<Form, ONE_HEAD> groups = IntegerGroups<Form, ONE_HEAD>::make(form, plane, block, group);
  for (u32 i = 0; i < tile.tokens(); ++i) {
    u32 token = tile.start + i;
    vf32 x = E::to_float(column.template load<WHOLE>(token));
    vu32 code = splat(0);
    if (tile.keeps(i)) {
      loss.add_kept(x);
    } else {
      IntegerGroup shared = groups.at(token);
      code = select(column.idle(), splat(0), shared.encode(x));
      loss.add(x, select(column.idle(), x, E::to_float(E::from_float(shared.decode(code)))));
    }
    integer_store(form, block, plane.heads * plane.head_dim, group, column.active, token, code);
  }
}

template <class Form>
FN void integer_encode_tile(const Form& form, const Plane& plane, const IntegerBlock& block, const ExactTile& tile,
                            LossSums& loss) {
  for (u32 i = 0; i < tile.tokens(); ++i) integer_scales(form, plane, block, tile.start + i, tile.keeps(i));
  warp_sync();
  for (u32 g = 0; g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {
    Column<typename Form::E> column = Column<typename Form::E>::make(plane, g);
    if (!has_one_head(plane, g))
      integer_encode_column<Form, false, false>(form, plane, block, tile, g, column, loss);
    else if (column.whole)
      integer_encode_column<Form, true, true>(form, plane, block, tile, g, column, loss);
    else
      integer_encode_column<Form, true, false>(form, plane, block, tile, g, column, loss);
  }
}

// ------------------------------------------------------------------------------------------- decoding

template <class Form, bool ONE_HEAD, bool WHOLE>
FN void integer_decode_column(const Form& form, const Plane& plane, const IntegerBlock& block, const ExactTile& tile,
                              u32 group, const Column<typename Form::E>& column) {
  typedef typename Form::E E;
  IntegerGroups<Form, ONE_HEAD> groups = IntegerGroups<Form, ONE_HEAD>::make(form, plane, block, group);
  for (u32 token = tile.start; token < tile.stop; ++token) {
    vu32 code = integer_load(form, block, plane.heads * plane.head_dim, group, token);
    column.template store<WHOLE>(token, E::from_float(groups.at(token).decode(code)));
  }
  restore_rows<E, WHOLE>(block.exact, tile, plane.heads * plane.head_dim, group, column);
}

template <class Form>
FN void integer_decode_tile(const Form& form, const Plane& plane, const IntegerBlock& block, const ExactTile& tile) {
  for (u32 g = 0; g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {
    Column<typename Form::E> column = Column<typename Form::E>::make(plane, g);
    if (!has_one_head(plane, g))
      integer_decode_column<Form, false, false>(form, plane, block, tile, g, column);
    else if (column.whole)
      integer_decode_column<Form, true, true>(form, plane, block, tile, g, column);
    else
      integer_decode_column<Form, true, false>(form, plane, block, tile, g, column);
  }
}

#define INTEGER_TILES(suffix, E, BITS)                                                                                 \
  KERNEL(integers_encode##BITS##_##suffix, const Plane* planes, const IntegerBlock* blocks, float* errors, u32 tiles,  \
         u32 limit, u32 symmetric, u32 packed) {                                                                       \
    WARP_SHARED(E::raw, running, EXACT_TILE* LANES);                                                                   \
    IntegerForm<E, BITS> form = {symmetric != 0, packed != 0};                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      const IntegerBlock& block = blocks[warp / tiles];                                                                \
      LossSums loss = LossSums::make();                                                                                \
      if (warp % tiles * EXACT_TILE < plane.tokens) {                                                                  \
        ExactTile tile = mark_unfit<E>(plane, block.exact, warp % tiles, limit, running);                              \
        integer_encode_tile(form, plane, block, tile, loss);                                                           \
      }                                                                                                                \
      loss.store(errors + (u64)warp * 3);                                                                              \
    }                                                                                                                  \
  }                                                                                                                    \
  KERNEL(integers_decode##BITS##_##suffix, const Plane* planes, const IntegerBlock* blocks, u32* status, u32 tiles,    \
         u32 symmetric, u32 packed) {                                                                                  \
    IntegerForm<E, BITS> form = {symmetric != 0, packed != 0};                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      const IntegerBlock& block = blocks[warp / tiles];                                                                \
      u32 found = OK;                                                                                                  \
      if (warp % tiles * EXACT_TILE < plane.tokens) {                                                                  \
        ExactTile tile = ExactTile::make(plane, block.exact, warp % tiles);                                            \
        found = tile.misfit(block.exact);                                                                              \
        if (found == OK) integer_decode_tile(form, plane, block, tile);                                                \
      }                                                                                                                \
      store_uniform(status + warp, found);                                                                             \
    }                                                                                                                  \
  }
#define INTEGER_KERNELS(suffix, E) INTEGER_TILES(suffix, E, 4) INTEGER_TILES(suffix, E, 8)
FOR_ELEMENT_TYPES(INTEGER_KERNELS)
