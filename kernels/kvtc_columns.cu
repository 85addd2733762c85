// kvtc's columns: integers of a few bits, far outliers included, coded exactly.
//
// A column has a deviation (64 of them, 12 an octave, up to 3.8 symbols), a mean in sixteenths of a symbol, and if it is
// wider, raw low bits. A symbol is a value's place in a window of 8, 16 or 32 around the mean; the outermost two are
// escapes, behind which 8 raw bits say how far beyond the value lies. Raw bits are symbols of equal frequencies. A column
// that never changes has its constant in place of a mean, and costs nothing more.
#include "bits.h"
#include "kvtc.h"
#include "rans.h"

constexpr u32 WIDEST = 52;           // the first of the 12 deviations that columns with raw low bits have
constexpr u32 CONSTANT = 255;        // scale code
constexpr u32 SCALE_CODE_BITS = 8;
constexpr u32 ESCAPE_BITS = 8;
constexpr u32 WINDOW_TABLES = 1024;  // of an alphabet: 64 deviations x 16 means
constexpr u32 HISTOGRAM_ROWS = 40;
static_assert(HISTOGRAM_ROWS <= COUNTED_ROWS, "there is room for them");
constexpr u32 COLUMN_WORDS = 1 + SCALE_CODE_BITS + 32;  // the most that a group's parameters take
constexpr u32 LARGEST_LOW_BITS = 15;

struct KvtcBlock {
  u64 rows;      // float [tokens][stride]: coefficients, replaced by what they decode to
  u64 exact;     // u32 [tiles]: mask of tokens that are kept exact
  u64 columns;   // u32: parameters, group by group
  u64 states;    // u32 [groups][STATE_WORDS]
  u64 words;     // u16
  u64 riders;    // u16 [groups][32]
  u32 tokens, row_stride, width, groups;
  u32 column_word_count, word_count;
  float step, inverse_step;
};

// Which block and group a warp has.
struct KvtcWarp {
  u32 block, group;
};

// alphabet 0, 1, 2: 8, 16, 32 symbols
FN u32 alphabet_size(u32 alphabet) { return 8u << alphabet; }

// The value that symbol 0 stands for.
FN vu32 window_start(vu32 mean, u32 alphabet) { return shift_right_signed(mean, splat(4)) - (alphabet_size(alphabet) /
2 - 1); }

struct ColumnCode {
  vu32 low_bits, deviation, mean, constant;  // constant: 1 or 0
  u32 alphabet;

  METHOD vu32 scale_code() const {
    vu32 wide = (TABLE_SIDE - 12) + low_bits * 12u + deviation - WIDEST;
    return select(constant != 0u, splat(CONSTANT), select(low_bits != 0u, wide, deviation));
  }
  METHOD vu32 table() const { return alphabet * WINDOW_TABLES + deviation * 16u + (mean & 15u); }
};

FN vm32 is_true(vu32 x) { return x != 0u; }

// ------------------------------------------------------------------------------------------- encoding

// The columns of a group in the coefficient rows.
struct KvtcColumns {
  ColumnRows rows;
  u32 active;
  float step, inverse_step;

  static METHOD KvtcColumns make(const KvtcBlock& block, u32 group) {
    u32 left = block.width - group * LANES, active = left < LANES ? left : LANES;
    u64 first = block.rows + group * LANES * sizeof(float);
    return {ColumnRows::make(first, block.row_stride, active, block.exact), active, block.step, block.inverse_step};
  }
  METHOD vf32 load(u32 token) const { return rows.load(token); }
  // The nearest multiples of the step, as integers, and the floats that these stand for.
  METHOD vu32 integers(vf32 row) const { return round_to_int(row * inverse_step); }
  METHOD void store(u32 token, vu32 integers) const { rows.store(token, int_to_float(integers) * step); }
  METHOD vu32 zero_if_idle(vu32 x) const { return select((vm32)(lane_ids() < active), x, splat(0)); }
};

FN vf32 floor_float(vf32 x) {
  vf32 nearest = int_to_float(round_to_int(x));
  return nearest - select(nearest > x, splatf(1.f), splatf(0.f));
}

// The parameters of 32 columns, chosen by moments and the exact cost of the nearest nine tables of each alphabet.
FN ColumnCode choose_columns(const KvtcBlock& block, const KvtcColumns& columns, u16* histogram, const u16* costs,
                             const float* thresholds) {
  const u32* exact = (const u32*)block.exact;
  ColumnCode code;
  u32 count = 0, start = 0;
  while (start < block.tokens && in_mask(exact, start)) ++start;
  vu32 first = start < block.tokens ? columns.integers(columns.load(start)) : splat(0), changes = splat(0);
  vf32 sum = splatf(0.f), squares = splatf(0.f);
  auto load = [&](u32 t) { return columns.load(t); };
  inexact_in_turn<FORWARDS, 8>(block.tokens, exact, load, [&](u32, vf32 row) {
    vu32 difference = columns.integers(row) - first;
    vf32 d = int_to_float(difference);
    changes = changes | difference;
    sum = sum + d;
    squares = squares + d * d;
    ++count;
  });
  first = columns.zero_if_idle(first);
  changes = columns.zero_if_idle(changes);
  float n = count ? (float)count : 1.f;
  vf32 offset = sum / n;
  vf32 variance = squares / n - offset * offset;
  vf32 mean = int_to_float(first) + offset;
  code.constant = select(changes == 0u, splat(1), splat(0));
  code.low_bits = splat(0);
  vf32 shrink = splatf(1.f);
  for (u32 i = 0; i < LARGEST_LOW_BITS; ++i) {
    vm32 wide = variance >= splatf(14.44f);
    variance = select(wide, variance * 0.25f, variance);
    shrink = select(wide, shrink * 0.5f, shrink);
    code.low_bits = code.low_bits + select(wide, splat(1), splat(0));
  }
  code.low_bits = columns.zero_if_idle(code.low_bits);
  vu32 deviation = splat(0);
  for (u32 i = 0; i + 1 < TABLE_SIDE; ++i)
    deviation = deviation + select(variance >= thresholds[i], splat(1), splat(0));
  vu32 center = round_to_int(floor_float(mean * shrink * 16.f - (1.f - shrink) * 8.f + 0.5f));

  // Counts of symbols from the start of the lowest window on.
  vu32 base = window_start(center - 1u, 2);
  for (u32 i = 0; i < HISTOGRAM_ROWS; ++i) store_u16(histogram + i * LANES, splat16(0));
  inexact_in_turn<FORWARDS, 8>(block.tokens, exact, load, [&](u32, vf32 row) {
    vu32 place = shift_right_signed(columns.integers(row), code.low_bits) - base;
    place = select(place >= 0x80000000u, splat(0), select(place < HISTOGRAM_ROWS, place, splat(HISTOGRAM_ROWS - 1)));
    count_row_u16(histogram, narrow(place));
  });
  warp_sync();

  vu32 narrowest = select(code.low_bits != 0u, splat(WIDEST), splat(0));
  u32 least = ~0u;
  for (u32 alphabet = 0; alphabet < 3; ++alphabet) {
    u32 size = alphabet_size(alphabet);
    vu32 best_cost = splat(~0u), best_deviation = deviation, best_mean = center;
    for (u32 i = 0; i < 9; ++i) {
      vu32 d = deviation + i / 3;  // one more than the candidate
      d = select(d < narrowest + 1u, narrowest, select(d > TABLE_SIDE, splat(TABLE_SIDE - 1), d - 1u));
      vu32 m = center + i % 3 - 1u;
      vu32 table = (alphabet * WINDOW_TABLES + d * 16u + (m & 15u)) * MAX_SYMBOLS;
      vu32 shift = window_start(m, alphabet) - base, cost = splat(0);
      for (u32 row = 0; row < HISTOGRAM_ROWS; ++row) {
        vu32 symbol = row - shift;
        symbol = select(symbol >= 0x80000000u, splat(0), select(symbol < size, symbol, splat(size - 1)));
        cost = cost + widen(load_u16(histogram + row * LANES)) * widen(gather_u16(costs, table + symbol));
      }
      vm32 better = cost < best_cost;
      best_cost = select(better, cost, best_cost);
      best_deviation = select(better, d, best_deviation);
      best_mean = select(better, m, best_mean);
    }
    u32 total = first_lane(warp_sum(select(is_true(code.constant), splat(0), best_cost)));
    if (total < least) {
      least = total;
      code.alphabet = alphabet;
      code.deviation = best_deviation;
      code.mean = best_mean;
    }
  }
  code.mean = select(is_true(code.constant), first, code.mean);
  return code;
}

// What lies before the symbols in a stream, and tells integers apart that have the same.
template <int N>
struct KvtcRest {
  vu32 few, more;  // raw low bits: up to 12, and those beyond
  u32 most;
  vm32 still;

  static METHOD KvtcRest make(const ColumnCode& code) {
    vu32 few = select(code.low_bits > 12u, splat(12), code.low_bits);
    return {few, code.low_bits - few, largest(code.low_bits), is_true(code.constant)};
  }
  // Puts it for the integers, and gives the symbols for places in the window or beyond.
  METHOD vu32 put(RansEncoder& encoder, vu32 integers, vu32 place) const {
    if (most > 12) encoder.put_bits(integers >> 12, more);
    if (most) encoder.put_bits(integers, few);
    vu32 below = select(place == 0u, splat(1), place >> 31);
    vu32 escapes = below | select(place >= N - 1u, splat(1), splat(0));
    escapes = select(still, splat(0), escapes);
    if (ballot(is_true(escapes)) == 0) return place;
    vu32 end = select(is_true(below), splat(0), splat(N - 1));
    encoder.put_bits(select(is_true(below), 0u - place, place - (N - 1u)), escapes * ESCAPE_BITS);
    return select(is_true(escapes), end, place);
  }
};

// The stream of a group, from the last token to the first, with symbols of an alphabet of N. Rows become what they decode to.
template <int N>
FN void kvtc_put_columns(const KvtcBlock& block, const KvtcColumns& columns, const ColumnCode& code, RansSymbols* symbols,
                         const u16* families, RansEncoder& encoder) {
  auto table = symbols->load<N>(families, code.table(), is_true(code.constant));
  auto rest = KvtcRest<N>::make(code);
  vu32 start = window_start(code.mean, code.alphabet);
  // Places that are symbols, with nothing before them: most are, where no column has low bits.
  u32 plain = rest.most ? 0 : N - 2;
  vm32 nothing = is_true(rest.most ? splat(0) : code.constant);
  auto load = [&](u32 t) { return columns.load(t); };
  inexact_in_turn<BACKWARDS, 4>(block.tokens, (const u32*)block.exact, load, [&](u32 t, vf32 row) {
    vu32 q = columns.integers(row), place = shift_right_signed(q, code.low_bits) - start;
    columns.store(t, q);
    place = select(rest.still, splat(0), place);
    if (!all(nothing | (vm32)(place - 1u < plain))) place = rest.put(encoder, q, place);
    encoder.put(table.find(place));
  });
}

KERNEL(kvtc_encode, const KvtcBlock* blocks, const KvtcWarp* which, const u16* families, const u16* costs,
       const float* thresholds, u32* slots, u32* counts, u16* words, u32 word_capacity) {
  WARP_SHARED(RansSymbols, symbols, 1);
  FOR_EACH_WARP(warp) {
    const KvtcBlock block = blocks[which[warp].block];
    u32 group = which[warp].group;
    KvtcColumns columns = KvtcColumns::make(block, group);
    ColumnCode code = choose_columns(block, columns, symbols->counts, costs, thresholds);
    vu32 magnitude = select(code.mean >= 0x80000000u, ~code.mean, code.mean);
    u32 width = bit_width(largest(magnitude)) + 1;
    u32* slot = slots + (u64)warp * COLUMN_WORDS;
    store_uniform(slot, code.alphabet | width << 8);
    store_bits(slot + 1, code.scale_code(), SCALE_CODE_BITS);
    store_bits(slot + 1 + SCALE_CODE_BITS, code.mean, width);
    store_uniform(counts + warp, 1 + SCALE_CODE_BITS + width);

    u16* end = words + ((u64)warp + 1) * word_capacity;
    vu32 rider = block.riders ? widen(load_u16((const u16*)block.riders + group * LANES)) : splat(0);
    RansEncoder encoder = RansEncoder::make(end, rider);
    if (code.alphabet == 0)
      kvtc_put_columns<8>(block, columns, code, symbols, families, encoder);
    else if (code.alphabet == 1)
      kvtc_put_columns<16>(block, columns, code, symbols, families, encoder);
    else
      kvtc_put_columns<32>(block, columns, code, symbols, families, encoder);
    u32* states = (u32*)block.states + (u64)group * STATE_WORDS;
    store_uniform(states, (u32)(end - encoder.position));
    store_u32(states + 1, encoder.x);
  }
}

// ------------------------------------------------------------------------------------------- decoding

// The parameters of a group, from a section that trusts nothing.
FN bool read_columns(const KvtcBlock& block, u32 group, ColumnCode& code) {
  const u32* words = (const u32*)block.columns;
  u32 at = 0, width = 0;
  for (u32 g = 0; g <= group; ++g) {
    if (at >= block.column_word_count) return false;
    width = words[at] >> 8 & 0xffu;
    if (width > 32 || 1 + SCALE_CODE_BITS + width > block.column_word_count - at) return false;
    if (g < group) at += 1 + SCALE_CODE_BITS + width;
  }
  code.alphabet = words[at] & 0xffu;
  if (code.alphabet > 2 || words[at] >> 16) return false;
  if (group + 1 == block.groups && at + 1 + SCALE_CODE_BITS + width != block.column_word_count) return false;
  vu32 scale = load_bits(words + at + 1, SCALE_CODE_BITS);
  vu32 mean = load_bits(words + at + 1 + SCALE_CODE_BITS, width);
  u32 unused = width ? 32 - width : 0;
  code.mean = shift_right_signed(mean << unused, splat(unused));
  code.constant = select(scale == CONSTANT, splat(1), splat(0));
  vu32 wide = select(scale < TABLE_SIDE, splat(0), scale - TABLE_SIDE);
  code.low_bits = select(scale < TABLE_SIDE, splat(0), divide_by(wide, 12) + 1u);
  code.low_bits = select(is_true(code.constant), splat(0), code.low_bits);
  code.deviation = select(scale < TABLE_SIDE, scale, wide - divide_by(wide, 12) * 12u + WIDEST);
  return ballot(code.low_bits > LARGEST_LOW_BITS) == 0;
}

// `FLIGHTS` neighbouring groups at once, with tables of N symbols.
template <int N, int FLIGHTS>
FN u32 kvtc_decode_groups(const KvtcBlock& block, u32 group, const ColumnCode* codes, u16* cumulative,
                          const u16* families) {
  const u32* exact = (const u32*)block.exact;
  RansDecoder decoders[FLIGHTS];
  vu32 starts[FLIGHTS], low_bits[FLIGHTS], live[FLIGHTS];
  u32 most_low_bits[FLIGHTS], last[FLIGHTS], active[FLIGHTS];
  bool fits = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fit;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f,
    fit); fits = fits && fit;
    load_tables<N>(cumulative + f * (N + 1) * LANES, families, codes[f].table(), is_true(codes[f].constant));
    vu32 constant = codes[f].constant;
    starts[f] = select(is_true(constant), codes[f].mean, window_start(codes[f].mean, codes[f].alphabet));
    low_bits[f] = codes[f].low_bits;
    live[f] = 1u - constant;
    most_low_bits[f] = largest(low_bits[f]);
    last[f] = alphabet_size(codes[f].alphabet) - 1;
    u32 left = block.width - (group + f) * LANES;
    active[f] = left < LANES ? left : LANES;
  }
  if (!fits) return BAD_STREAM;
  for (u32 t = 0; t < block.tokens; ++t) {
    if (in_mask(exact, t)) continue;
    u32* row = (u32*)block.rows + (u64)t * block.row_stride + group * LANES;
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) {
      RansDecoder& decoder = decoders[f];
      vu32 symbol = widen(decoder.template next<N>(cumulative + f * (N + 1) * LANES));
      vu32 below = select(symbol == 0u, live[f], splat(0)), above = select(symbol == last[f], live[f], splat(0));
      vu32 value = starts[f] + symbol;
      if (ballot((below | above) != 0u)) {
        vu32 beyond = decoder.bits((below | above) * ESCAPE_BITS);
        value = select(is_true(below), value - beyond, value + beyond);
      }
      if (most_low_bits[f]) {
        vu32 few = select(low_bits[f] > 12u, splat(12), low_bits[f]);
        vu32 low = decoder.bits(few);
        if (most_low_bits[f] > 12) low = low | decoder.bits(low_bits[f] - few) << few;
        value = value << low_bits[f] | low;
      }
      store_some(row + f * LANES, as_bits(int_to_float(value) * block.step), active[f]);
    }
  }
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    if (block.riders) store_u16((u16*)block.riders + (group + f) * LANES, decoders[f].rider());
  }
  return OK;
}

template <int FLIGHTS>
FN u32 kvtc_decode_any(const KvtcBlock& block, u32 group, u16* cumulative, const u16* families) {
  ColumnCode codes[FLIGHTS];
  u32 widest = 0;
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!read_columns(block, group + f, codes[f])) return BAD_TABLES;
    widest = codes[f].alphabet > widest ? codes[f].alphabet : widest;
  }
  if (widest == 0) return kvtc_decode_groups<8, FLIGHTS>(block, group, codes, cumulative, families);
  if (widest == 1) return kvtc_decode_groups<16, FLIGHTS>(block, group, codes, cumulative, families);
  return kvtc_decode_groups<32, FLIGHTS>(block, group, codes, cumulative, families);
}

KERNEL(kvtc_decode, const KvtcBlock* blocks, const KvtcWarp* which, const u16* families, u32* status) {
  WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);
  FOR_EACH_FLIGHT_WHERE(warp, flight, which[warp].block == which[warp + 1].block) {
    const KvtcBlock block = blocks[which[warp].block];
    u32 group = which[warp].group, found;
    if (flight == FLIGHT)
      found = kvtc_decode_any<FLIGHT>(block, group, cumulative, families);
    else
      found = kvtc_decode_any<1>(block, group, cumulative, families);
    for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);
  }
}
