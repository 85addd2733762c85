// Affine quantizers: a number is level * scale + minimum, where levels are whole and a group of numbers shares the rest.
#pragma once
#ifdef BLOCKS_AT_ONCE
#error "include affine.h first: its kernels have registers of their own"
#endif
#define BLOCKS_AT_ONCE 4
#include "exact.h"
#include "strips.h"

// What a group shares. Levels have up to 8 bits and scales up to 11 significant ones: their product is exact.
struct Affine {
  vf32 scale, minimum, inverse;

  // Where the scale is 0, so are all levels. Other scales must be 2^-126 or more, to encode with.
  static METHOD Affine make(vf32 scale, vf32 minimum) {
    return {scale, minimum, select((vm32)(scale == splatf(0.f)), splatf(0.f), splatf(1.f) / scale)};
  }
  // The level of a number, plus ROUNDER: the product is rounded once, to a whole number.
  METHOD vf32 raise(vf32 x) const { return fused(x - minimum, inverse, splatf(ROUNDER)); }
  METHOD vf32 raise_within(vf32 x, float bottom, float top) const {
    return smaller(larger(raise(x), splatf(ROUNDER + bottom)), splatf(ROUNDER + top));
  }
  METHOD vf32 number(vf32 level) const { return product_sum(level, scale, minimum); }
  // Where numbers from `low` to `high` have levels from `bottom` to `top` without being held there.
  METHOD vm32 plain(vf32 low, vf32 high, float bottom, float top) const {
    return (raise(low) >= splatf(ROUNDER + bottom)) & (raise(high) <= splatf(ROUNDER + top));
  }
};

// Of a level plus ROUNDER. `zero` is the code of level 0.
FN vu32 code_of(vf32 raised, u32 zero) { return as_bits(raised) - (ROUNDER_BITS - zero); }
FN vf32 level_of(vu32 code, u32 zero) { return int_to_float(code - zero); }
template <class E>
FN vf32 restored(const Affine& affine, vf32 raised) {
  return E::nearest(affine.number(raised - ROUNDER));
}
FN Pack<vu32> no_codes() {
  Pack<vu32> codes;
  for (int i = 0; i < PACK; ++i) codes.v[i] = splat(0);
  return codes;
}
// Codes of a row, counting what they do to it. `affine_of(i)`: the Affine of a lane's i-th channel, which is plain.
template <class E, class Of>
FN Pack<vu32> quantize(const Strip<E>& strip, const typename Strip<E>::Loaded& row, Of affine_of, u32 zero, StripLoss& loss) {
  auto numbers = strip.values(row);
  Pack<vu32> codes;
  for (int i = 0; i < PACK; ++i) {
    Affine affine = affine_of(i);
    vf32 x = E::number(numbers.v[i]), raised = affine.raise(x);
    codes.v[i] = code_of(raised, zero);
    loss.add(i, x, restored<E>(affine, raised) - x);
  }
  return codes;
}
// The same of the i-th channel alone, for levels from `bottom` to `top`, whatever its Affine; it may be idle.
template <class E>
FN vu32 quantize_within(const Strip<E>& strip, int i, vf32 x, const Affine& affine, float bottom, float top, u32 zero,
                        StripLoss& loss) {
  vf32 raised = affine.raise_within(x, bottom, top);
  loss.add(i, x, select(strip.idle(i), splatf(0.f), restored<E>(affine, raised) - x));
  return code_of(raised, zero);
}
// Rows that an encoder has under way, if it may be so many of 16-bit numbers: as many as there are registers for.
template <class E>
FN constexpr u32 rows_at_once(u32 of_halves) {
  return PACK == 1 ? 1 : of_halves * 2 / sizeof(typename E::raw);
}

// ------------------------------------------------------------------------------------------- groups of a token's channels
// A *form* says what quantizers of this kind do not have in common:
//
//   E, BITS, LOW      the plane's type; bits of a code; how many of these the entropy coder leaves alone
//   plane, codes      the plane; where the codes are: words, symbols, symbol_tokens, low
//   width(), groups() channels that share a scale, and how many such groups a token has
//   zero()            the code of level 0
//   shared()          what its groups share. at<ONE>(token, i): the Affine of group i of the tokens from this one on, lane by
//                     lane; ONE: the same in all lanes
//   store(...)        makes the Affines of neighbouring groups from the extremes of a tile's rows and stores them
//   AT_ONCE           how many, where they share a strip and side_by_side(), asked if it is more than one, allows it

// Where codes are.
struct CodeMemory {
  u64 words, symbols, low;
  u32 symbol_tokens;
};

template <class Form>
FN u32 channels_of(const Form& form) {
  return form.plane.heads * form.plane.head_dim;
}
template <class Form>
FN float bottom_level(const Form& form) {
  return -(float)form.zero();
}
template <class Form>
FN float top_level(const Form& form) {
  return (float)((1u << Form::BITS) - 1) - (float)form.zero();
}

// The codes of a strip: packed; or without their lowest bits one a byte, those apart.
template <class Form, bool PACKED>
struct StripCodes {
  enum : u32 { LOW = PACKED ? 0 : Form::LOW };
  typedef CodeRows<Form::BITS, PACKED> Rows;
  Rows rows;
  LowBits<LOW ? LOW : 1> low;

  static METHOD StripCodes make(const Form& form, u32 strip) {
    u32 channels = channels_of(form);
    return {Rows::make(PACKED ? form.codes.words : form.codes.symbols, form.codes.symbol_tokens, channels, strip),
            LowBits<LOW ? LOW : 1>::make(form.codes.low, channels, strip)};
  }
  // Of the token whose codes are loaded.
  METHOD Pack<vu32> codes(u32 token, const typename Rows::Loaded& loaded) const {
    Pack<vu32> codes = Rows::codes(loaded);
    for (int i = 0; i < PACK && LOW; ++i) codes.v[i] = codes.v[i] << (u32)LOW;
    if (LOW) low.load(token, codes);
    return codes;
  }
  // Codes of a token, whose row is at p.
  METHOD void store(u32 token, u8* p, Pack<vu32> codes) const {
    if (LOW) low.store(token, codes);
    for (int i = 0; i < PACK && LOW; ++i) codes.v[i] = codes.v[i] >> (u32)LOW;
    rows.store(p, codes);
  }
};

// The groups of a strip: from the first one on so many, and those of the channels of a lane.
template <class E>
struct StripGroups {
  const Strip<E>& strip;
  u32 stop, width, first, count;
  vu32 own;  // of a lane's first channel; in a whole strip of all its channels

  static METHOD StripGroups make(const Strip<E>& strip, u32 start, u32 stop, u32 width) {
    StripGroups groups = {strip, stop, width, start / width, (stop - 1) / width - start / width + 1, {}};
    groups.own = groups.of(0);
    return groups;
  }
  METHOD vu32 of(int i) const {
    if (count == 1) return splat(first);
    vu32 channel = strip.channel(i);
    return divide_by(select(channel < stop, channel, splat(stop - 1)), width);
  }
};

// The Affines of a strip's groups for the rows of a tile.
#if defined(__CUDACC__) || defined(KVZIP_EMULATED)
struct RowAffines {
  enum : u32 { GROUPS = 4 };
  struct alignas(16) Row {
    Affine affine;
    u32 unused;  // so that one access moves all
  };
  Row of[LANES][GROUPS];  // in a warp's shared memory

  METHOD void set(u32 group, const Affine& of_rows) { of[lane()][group] = {of_rows, 0}; }
  METHOD Affine at(u32 row, vu32 group, u32) const {
    Row found = of[row][group];
    return found.affine;
  }
};
#else
struct RowAffines {
  enum : u32 { GROUPS = 4 };
  Affine of[GROUPS];  // a row in each lane

  METHOD void set(u32 group, const Affine& of_rows) { of[group] = of_rows; }
  METHOD Affine at(u32 row, vu32 group, u32 count) const {
    Affine found = of_row(0, row);
    for (u32 g = 1; g < count; ++g) {
      Affine other = of_row(g, row);
      vm32 own = group == g;
      found = {select(own, other.scale, found.scale), select(own, other.minimum, found.minimum),
               select(own, other.inverse, found.inverse)};
    }
    return found;
  }
  METHOD Affine of_row(u32 group, u32 row) const {
    const Affine& rows = of[group];
    return {splatf(rows.scale[row]), splatf(rows.minimum[row]), splatf(rows.inverse[row])};
  }
};
#endif

// A warp's scratch memory.
struct AffineScratch {
  RowExtremes extremes;
  RowAffines affines;
};

// Notes the extremes of N rows, of a whole strip, or with LONG of a group of so many channels that begins with it.
template <bool LONG, u32 N, class E>
FN void note_rows(const Strip<E>& strip, u32 token, u32 row, u32 channels, RowExtremes* extremes) {
  typename Strip<E>::Loaded rows[N];
  Extremes<E> found[N];
  strip.load(token, rows);
  for (u32 r = 0; r < N; ++r) found[r] = Extremes<E>::of(rows[r]);
  for (u32 d = STRIP; LONG && d < channels; d += STRIP) {
    // The last ones of a group again, where they are no strip of their own.
    for (u32 r = 0; r < N; ++r) rows[r] = strip.load_row(token + r, d + STRIP < channels ? d : channels - STRIP);
    for (u32 r = 0; r < N; ++r) found[r].add(rows[r]);
  }
  for (u32 r = 0; r < N; ++r) extremes->put(row + r, found[r]);
}
template <bool LONG, class E>
FN void note_whole(const Strip<E>& strip, const ExactTile& tile, u32 channels, RowExtremes* extremes) {
  constexpr u32 AT_ONCE = rows_at_once<E>(LONG ? 2 : 8);
  u32 i = 0;
  for (; i + AT_ONCE <= tile.coded(); i += AT_ONCE) note_rows<LONG, AT_ONCE>(strip, tile.start + i, i, channels, extremes);
  for (; i < tile.coded(); ++i) note_rows<LONG, 1>(strip, tile.start + i, i, channels, extremes);
}
// Notes the extremes of a tile's rows in `count` channels from `start` on: of one group, or of no more than a strip.
template <class Form>
FN void note_extremes(const Form& form, const ExactTile& tile, u32 start, u32 count, RowExtremes* extremes) {
  typedef typename Form::E E;
  Strip<E> strip = Strip<E>::at(form.plane, start, count < STRIP ? count : STRIP);
  if (strip.whole && count % PACK == 0)
    return count <= STRIP ? note_whole<false>(strip, tile, count, extremes) : note_whole<true>(strip, tile, count, extremes);
  for (u32 d = 0; d < count; d += LANES) {
    // Lanes without a channel have the first one.
    vu32 own = lane_ids() + d;
    Column<E> column = Column<E>::of_channels(form.plane, select(own < count, own, splat(0)) + start, LANES);
    for (u32 i = 0; i < tile.coded(); ++i)
      extremes->template put<E>(i, column.template load<false>(tile.start + i), d != 0);
  }
}

// Finds and stores what N groups from `group` on share, whose extremes so many lanes from `noted` on have; `kept`: the first
// group whose Affines are kept in `scratch`. Returns whether those of all rows are plain.
template <u32 N, class Form>
FN bool share(const Form& form, const ExactTile& tile, u32 group, u32 kept, u32 noted, u32 lanes, AffineScratch* scratch) {
  vf32 low[N], high[N];
  Affine of_rows[N];
  for (u32 n = 0; n < N; ++n)
    scratch->extremes.get<typename Form::E>(tile.coded(), noted + n * lanes, lanes, low[n], high[n]);
  form.store(tile, group, low, high, of_rows);
  vm32 plain = of_rows[0].plain(low[0], high[0], bottom_level(form), top_level(form));
  for (u32 n = 1; n < N; ++n) plain = plain & of_rows[n].plain(low[n], high[n], bottom_level(form), top_level(form));
  for (u32 n = 0; n < N && group - kept + N <= RowAffines::GROUPS; ++n) scratch->affines.set(group - kept + n, of_rows[n]);
  return all(plain | (vm32)(lane_ids() >= tile.coded()));
}
// Finds and stores what the groups from channel `start` to `stop` share. Returns whether all is plain; `affines` are those of
// the first groups.
template <class Form>
FN bool find_groups(const Form& form, const ExactTile& tile, u32 start, u32 stop, AffineScratch* scratch) {
  typedef typename Form::E E;
  bool plain = true;
  u32 width = form.width(), first_width = start + width < stop ? width : stop - start;
  bool together = RowExtremes::together(width) && Strip<E>::at(form.plane, start, first_width).whole;
  u32 step = together ? STRIP : width;
  for (u32 c = start; c < stop; c += step) {
    u32 count = step < stop - c ? step : stop - c;
    note_extremes(form, tile, c, count, &scratch->extremes);
    warp_sync();
    u32 group = c / width, past = group + (count + width - 1) / width, first = start / width;
    // Lanes without channels have noted what the last group has.
    if constexpr (Form::AT_ONCE > 1)
      for (u32 lanes = width / PACK; together && form.side_by_side() && group + Form::AT_ONCE <= past; group += Form::AT_ONCE)
        plain &= share<Form::AT_ONCE>(form, tile, group, first, (group - c / width) * lanes, lanes, scratch);
    for (u32 lanes = together ? width / PACK : LANES; group < past; ++group)
      plain &= share<1>(form, tile, group, first, (group - c / width) * lanes, lanes, scratch);
    warp_sync();
  }
  return plain;
}

template <class Form, bool PACKED>
FN void encode_row(const Form& form, const ExactTile& tile, const Strip<typename Form::E>& strip,
                   const StripCodes<Form, PACKED>& codes, const StripGroups<typename Form::E>& groups, u32 row,
                   StripLoss& loss) {
  typedef typename Form::E E;
  u32 token = tile.start + row;
  auto numbers = strip.values(strip.template load<false>(token));
  Pack<vu32> found = no_codes();
  for (int i = 0; i < PACK; ++i) {
    vf32 x = E::to_float(numbers.v[i]);
    if (tile.keeps(row)) {
      loss.add_kept(i, x);
    } else {
      Affine affine = form.shared().template at<false>(token, i ? groups.of(i) : groups.own);
      found.v[i] = quantize_within(strip, i, x, affine, bottom_level(form), top_level(form), form.zero(), loss);
    }
  }
  if (row < tile.coded()) codes.store(token, codes.rows.row(token), found);
}

// `plain`: whether no row has to be looked after by itself. `shared`: whether the affines are those of the strip's groups.
template <class Form, bool PACKED>
FN void encode_strip(const Form& form, const ExactTile& tile, u32 start, u32 stop, bool plain, bool shared,
                     RowAffines* affines, TileLoss& loss) {
  typedef typename Form::E E;
  constexpr u32 AT_ONCE = rows_at_once<E>(Form::LOW ? 2 : 4);
  Strip<E> strip = Strip<E>::at(form.plane, start, stop - start);
  auto codes = StripCodes<Form, PACKED>::make(form, start);
  auto groups = StripGroups<E>::make(strip, start, stop, form.width());
  plain = plain && strip.whole && groups.count <= RowAffines::GROUPS;
  if (!shared && plain) {
    for (u32 g = 0; g < groups.count; ++g)
      affines->set(g, form.shared().template at<false>(tile.start, lane_ids() * form.groups() + (groups.first + g)));
    warp_sync();
  }
  vu32 own = groups.own - groups.first;
  StripLoss sums = StripLoss::zero();
  for (u32 i = 0; !plain && i < tile.tokens(); ++i) encode_row(form, tile, strip, codes, groups, i, sums);
  const u8* from = strip.row(tile.start);
  u8* p = codes.rows.row(tile.start);
#pragma clang loop unroll(disable)
  for (u32 i = 0; plain && i < EXACT_TILE; i += AT_ONCE) {
    typename Strip<E>::Loaded rows[AT_ONCE];
    from = strip.load(from, rows);
    for (u32 r = 0; r < AT_ONCE; ++r, p += codes.rows.stride) {
      Affine affine = affines->at(i + r, own, groups.count);
      Pack<vu32> found = quantize(strip, rows[r], [&](int) { return affine; }, form.zero(), sums);
      codes.store(tile.start + i + r, p, found);
    }
  }
  loss.add(strip, sums);
  warp_sync();
}

template <class Form, bool PACKED>
FN void encode_groups(const Form& form, const ExactTile& tile, AffineScratch* scratch, TileLoss& loss) {
  // Groups and strips that end together, so that numbers are still near when they are read again.
  u32 channels = channels_of(form), width = form.width(), common = width & (0 - width);
  u64 together = (u64)(width / (common < STRIP ? common : STRIP)) * STRIP;
  u32 step = together < channels ? (u32)together : channels;
  bool shared = step <= STRIP || step <= width;
  for (u32 start = 0; start < channels; start += step) {
    u32 stop = step < channels - start ? start + step : channels;
    bool plain = tile.coded() && find_groups(form, tile, start, stop, scratch) && !tile.all_kept();
    for (u32 s = start; s < stop; s += STRIP) {
      u32 past = stop - s < STRIP ? stop : s + STRIP;
      encode_strip<Form, PACKED>(form, tile, s, past, plain, shared, &scratch->affines, loss);
    }
  }
}

template <class Form, bool PACKED, bool WHOLE, bool ONE>
FN void decode_strip(const Form& form, const ExactTile& tile, const Strip<typename Form::E>& strip,
                     const StripGroups<typename Form::E>& groups, u32 start) {
  typedef StripCodes<Form, PACKED> Codes;
  constexpr u32 AT_ONCE = WHOLE ? ROWS : 1, OWN = WHOLE ? 1 : PACK;
  auto codes = Codes::make(form, start);
  auto shared = form.shared();
#pragma clang loop unroll_count(4)
  for (u32 first = tile.start; first < tile.coded_stop; first += AT_ONCE) {
    typename Codes::Rows::Loaded loaded[AT_ONCE];
    Affine affines[AT_ONCE][OWN];
    for (u32 r = 0; r < AT_ONCE; ++r) {
      u32 token = first + r < tile.coded_stop ? first + r : first;
      loaded[r] = codes.rows.load(codes.rows.row(token));
      for (u32 i = 0; i < OWN; ++i) affines[r][i] = shared.template at<ONE>(token, i ? groups.of(i) : groups.own);
    }
    for (u32 r = 0; r < AT_ONCE && first + r < tile.coded_stop; ++r) {
      Pack<vu32> found = codes.codes(first + r, loaded[r]);
      Pack<vf32> x;
      for (u32 i = 0; i < PACK; ++i) x.v[i] = affines[r][i < OWN ? i : 0].number(level_of(found.v[i], form.zero()));
      strip.template store<WHOLE>(first + r, nearest_row<typename Form::E>(x));
    }
  }
}

template <class Form, bool PACKED>
FN void decode_groups(const Form& form, const ExactTile& tile) {
  u32 channels = channels_of(form);
  for (u32 start = 0; start < channels; start += STRIP) {
    u32 stop = channels - start < STRIP ? channels : start + STRIP;
    auto strip = Strip<typename Form::E>::at(form.plane, start, stop - start);
    auto groups = StripGroups<typename Form::E>::make(strip, start, stop, form.width());
    if (!strip.whole)
      decode_strip<Form, PACKED, false, false>(form, tile, strip, groups, start);
    else if (PACK == 1 && groups.count == 1)
      decode_strip<Form, PACKED, true, true>(form, tile, strip, groups, start);
    else
      decode_strip<Form, PACKED, true, false>(form, tile, strip, groups, start);
  }
}

// ------------------------------------------------------------------------------------------- tiles
// A *coder* has the plane and the block, and codes a tile, PACKED or not: encode(tile, scratch, loss), decode(tile);
// check(tile) is a decoder's status, before it decodes.

template <class Coder>
FN void encode_warp(const Coder& coder, u32 tile, u32 limit, bool packed, AffineScratch* scratch, float* sums) {
  auto encode = [&](const ExactTile& tile, TileLoss& loss) {
    packed ? coder.template encode<true>(tile, scratch, loss) : coder.template encode<false>(tile, scratch, loss);
  };
  encode_tile<typename Coder::E>(coder.plane, coder.block.exact, tile, limit, sums, encode);
}
template <class Coder>
FN u32 decode_warp(const Coder& coder, u32 tile, bool packed) {
  auto decode = [&](const ExactTile& tile) {
    u32 found = coder.check(tile);
    if (found == OK) packed ? coder.template decode<true>(tile) : coder.template decode<false>(tile);
    return found;
  };
  return decode_tile<typename Coder::E>(coder.plane, coder.block.exact, tile, decode);
}
