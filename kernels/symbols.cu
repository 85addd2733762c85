// rANS of symbols that lie one a byte: what a quantizer hands on where it does not code itself. One warp codes a group of 32
// channels, each with a table of the family, or all with one where that is cheaper and the format has room to say so.
#include "rans.h"

struct SymbolBlock {
  u64 symbols;  // u8 [groups][row_capacity][32], 0 in idle lanes
  u64 tables;   // u32 [groups]: the index of the table that all lanes share, or OWN_TABLES; 0 if all groups have own tables
  u64 own;      // u32 [12] for each group of own tables: the lanes' indexes, one word a bit; of every group when encoding
  u64 riders;   // u16 [groups][32]; 0 for none
  u64 states;   // u32 [groups][STATE_WORDS]
  u64 words;    // u16: the streams
  u32 rows, row_capacity;
  u32 channels;  // of a plane, or of each of several runs that start a group of their own
  u32 alphabet, counted_rows, word_count, own_count, reserved;

  METHOD u8* symbols_of(u32 group) const { return (u8*)symbols + (u64)group * row_capacity * LANES; }
  METHOD u32 active(u32 group) const {
    u32 first = group % ((channels + LANES - 1) / LANES) * LANES;
    return channels - first < LANES ? channels - first : LANES;
  }
};

constexpr u32 OWN_TABLES = 1u << 31;

struct SymbolTables {
  const u16 *family, *costs;
  const u32* variances;
};

// ------------------------------------------------------------------------------------------- encoding

// What the counted symbols of all lanes that are not idle cost under the lanes' tables, in 1/256 bits.
FN u32 total_cost(const u16* histogram, vu32 table, u32 alphabet, const u16* costs, vm32 idle) {
  vu32 cost = splat(0);
  for (u32 s = 0; s < alphabet; ++s)
    cost = cost + widen(load_u16(histogram + s * LANES)) * widen(gather_u16(costs + s, table * MAX_SYMBOLS));
  return first_lane(warp_sum(select(idle, splat(0), cost)));
}

// The table for all lanes together: that of their mean histogram, which `mean` has room for.
FN vu32 choose_shared(const u16* histogram, u16* mean, u32 active, u32 alphabet, const SymbolTables& tables) {
  vm32 idle = lane_ids() >= active;
  u32 rows = 0;
  for (u32 s = 0; s < alphabet; ++s) {
    vu32 count = warp_sum(select(idle, splat(0), widen(load_u16(histogram + s * LANES))));
    u32 rounded = (first_lane(count) + active / 2) / active;
    store_u16(mean + s * LANES, splat16(rounded));
    rows += rounded;
  }
  warp_sync();
  return choose_tables(mean, rows, alphabet, tables.costs, tables.variances);
}

// Counts a group's symbols, chooses its tables and loads them.
template <int N>
FN RansSymbols::Table<N> prepare_group(const SymbolBlock& block, u32 group, const SymbolTables& tables, RansSymbols* coding) {
  u32 stride = (block.rows + block.counted_rows - 1) / block.counted_rows;
  u32 counted = block.rows ? (block.rows - 1) / stride + 1 : 0;
  u32 active = block.active(group), alphabet = block.alphabet;
  const u8* symbols = block.symbols_of(group);
  u16 *histogram = coding->counts, *mean = histogram + MAX_SYMBOLS * LANES;
  vm32 idle = lane_ids() >= active;
  for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
  auto load = [=](u32 i) { return load_u8(symbols + (u64)i * stride * LANES); };
  in_turn<FORWARDS, 4>(counted, load, [&](u32, vu16 symbol) { count_row_u16(histogram, symbol); });
  warp_sync();

  vu32 table = choose_tables(histogram, counted, alphabet, tables.costs, tables.variances);
  if (block.tables) {
    vu32 shared = choose_shared(histogram, mean, active, alphabet, tables);
    i32 more = (i32)total_cost(histogram, shared, alphabet, tables.costs, idle) -
               (i32)total_cost(histogram, table, alphabet, tables.costs, idle);
    bool shares = more <= (i32)(TABLE_BITS * LANES * 256 / stride);
    if (shares) table = shared;
    store_uniform((u32*)block.tables + group, shares ? first_lane(shared) : OWN_TABLES);
  }
  store_bits((u32*)block.own + (u64)group * TABLE_BITS, table, TABLE_BITS);
  return coding->load<N>(tables.family, table, idle);
}

// A row of each of `FLIGHTS` groups.
template <int FLIGHTS>
struct SymbolRows {
  vu16 of[FLIGHTS];
};

// `FLIGHTS` neighbouring groups of one block at once. Their streams are written backwards from the ends of `words`.
template <int N, int FLIGHTS>
FN void encode_symbols(const SymbolBlock& block, u32 group, const SymbolTables& tables, u16* words, u32 word_capacity,
                       RansSymbols* coding) {
  RansEncoder encoders[FLIGHTS];
  RansSymbols::Table<N> found[FLIGHTS];
  const u8* symbols[FLIGHTS];
  for (int f = 0; f < FLIGHTS; ++f) {
    found[f] = prepare_group<N>(block, group + f, tables, coding + f);
    vu32 rider = splat(0);
    if (block.riders) rider = widen(load_u16((const u16*)block.riders + (group + f) * LANES));
    encoders[f] = RansEncoder::make(words + (f + 1) * (u64)word_capacity, rider);
    symbols[f] = block.symbols_of(group + f);
  }
  auto load = [&](u64 row) {
    SymbolRows<FLIGHTS> rows;
    for (int f = 0; f < FLIGHTS; ++f) rows.of[f] = load_u8(symbols[f] + row * LANES);
    return rows;
  };
  in_turn<BACKWARDS, 4>(block.rows, load, [&](u32, const SymbolRows<FLIGHTS>& rows) {
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) encoders[f].put(found[f].find(widen(rows.of[f])));
  });
  for (int f = 0; f < FLIGHTS; ++f) {
    u32* states = (u32*)block.states + (u64)(group + f) * STATE_WORDS;
    store_uniform(states, (u32)(words + (f + 1) * (u64)word_capacity - encoders[f].position));
    store_u32(states + 1, encoders[f].x);
  }
}

template <int FLIGHTS>
FN void encode_symbols_any(const SymbolBlock& block, u32 group, const SymbolTables& tables, u16* words, u32 word_capacity,
                           RansSymbols* coding) {
  if (block.alphabet <= 4)
    encode_symbols<4, FLIGHTS>(block, group, tables, words, word_capacity, coding);
  else if (block.alphabet <= 16)
    encode_symbols<16, FLIGHTS>(block, group, tables, words, word_capacity, coding);
  else
    encode_symbols<32, FLIGHTS>(block, group, tables, words, word_capacity, coding);
}

KERNEL(symbols_encode, const SymbolBlock* blocks, const u16* family, const u16* costs, const u32* variances, u16* words,
       u32 groups, u32 word_capacity) {
  WARP_SHARED(RansSymbols, coding, FLIGHT);
  SymbolTables tables = {family, costs, variances};
  FOR_EACH_FLIGHT(warp, flight, groups) {
    const SymbolBlock& block = blocks[warp / groups];
    u32 group = warp % groups;
    u16* mine = words + (u64)warp * word_capacity;
    if (flight == FLIGHT)
      encode_symbols_any<FLIGHT>(block, group, tables, mine, word_capacity, coding);
    else
      encode_symbols_any<1>(block, group, tables, mine, word_capacity, coding);
  }
}

// ------------------------------------------------------------------------------------------- decoding

// The lanes' tables of a group; false if there are too few.
FN bool read_tables(const SymbolBlock& block, u32 group, vu32& table) {
  const u32* tables = (const u32*)block.tables;
  u32 before = tables ? 0 : group;
  table = splat(0);
  if (tables) {
    table = splat(tables[group] & (TABLES - 1));
    if (tables[group] < OWN_TABLES) return true;
    for (u32 g = 0; g < group; ++g) before += tables[g] >> 31;
  }
  if ((u64)(before + 1) * TABLE_BITS > block.own_count) return false;
  table = load_bits((const u32*)block.own + (u64)before * TABLE_BITS, TABLE_BITS);
  return true;
}

// `FLIGHTS` neighbouring groups of one block at once.
template <int N, int FLIGHTS>
FN u32 decode_symbols(const SymbolBlock& block, u32 group, const u16* family, u16* cumulative) {
  RansDecoder decoders[FLIGHTS];
  u8* symbols[FLIGHTS];
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fits;
    vu32 table;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fits);
    if (!read_tables(block, group + f, table) || !fits) return BAD_STREAM;
    load_tables<N>(cumulative + f * (N + 1) * LANES, family, table, lane_ids() >= block.active(group + f));
    symbols[f] = block.symbols_of(group + f);
  }
  for (u32 row = 0; row < block.rows; ++row)
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f)
      store_u8(symbols[f] + (u64)row * LANES, decoders[f].template next<N>(cumulative + f * (N + 1) * LANES));
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    if (block.riders) store_u16((u16*)block.riders + (group + f) * LANES, decoders[f].rider());
  }
  return OK;
}

template <int FLIGHTS>
FN u32 decode_symbols_any(const SymbolBlock& block, u32 group, const u16* family, u16* cumulative) {
  if (block.alphabet <= 4) return decode_symbols<4, FLIGHTS>(block, group, family, cumulative);
  if (block.alphabet <= 16) return decode_symbols<16, FLIGHTS>(block, group, family, cumulative);
  return decode_symbols<32, FLIGHTS>(block, group, family, cumulative);
}

KERNEL(symbols_decode, const SymbolBlock* blocks, const u16* family, u32* status, u32 groups) {
  WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);
  FOR_EACH_FLIGHT(warp, flight, groups) {
    const SymbolBlock& block = blocks[warp / groups];
    u32 group = warp % groups;
    u32 found = flight == FLIGHT ? decode_symbols_any<FLIGHT>(block, group, family, cumulative)
                                 : decode_symbols_any<1>(block, group, family, cumulative);
    for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);
  }
}
