// Rows of small integers through rANS: what a codec makes of the numbers of each token and head.
//
// A group is 32 channels of a head, one per lane; the last of a head may have idle lanes. One warp codes a group: its symbols
// lie one token after the other.
// A symbol of more than the coder's 32 is split: the coded part, and `raw_bits` low bits stored as they are. Each channel
// carries 16 bits of payload in the start state of its stream. The channels of a warp share a table where that is cheaper.
#include "rans.h"

struct TunedSymbols {
  u64 symbols;  // u8 [groups][pitch][32]: `tokens` of the pitch are used
  u64 riders;   // u16 [groups][32]
  u64 tables;   // u32 [groups]: the index of the table that all lanes share, or OWN_TABLES
  u64 own;      // u32 [12] for each group of own tables: the lanes' indexes, one word a bit; of every group when encoding
  u64 states;   // u32 [groups][STATE_WORDS]
  u64 words;    // u16: the streams
  u64 raw;      // u32 [groups][tokens][raw_bits]
  u32 tokens, pitch, head_dim, raw_bits;
  u32 alphabet, word_count, own_count, reserved;

  METHOD u8* symbols_of(u32 group) const { return (u8*)symbols + (u64)group * pitch * LANES; }
  METHOD u32* raw_of(u32 group) const { return (u32*)raw + (u64)group * tokens * raw_bits; }
  METHOD u32 active(u32 group) const {
    u32 first = group % ((head_dim + LANES - 1) / LANES) * LANES;
    return head_dim - first < LANES ? head_dim - first : LANES;
  }
};

constexpr u32 OWN_TABLES = 1u << 31;

// What the counted symbols of all lanes that are not idle cost under the lanes' tables, in 1/256 bits.
FN u32 total_cost(const u16* histogram, vu32 table, u32 alphabet, const u16* costs, vm32 idle) {
  vu32 cost = splat(0);
  for (u32 s = 0; s < alphabet; ++s)
    cost = cost + widen(load_u16(histogram + s * LANES)) * widen(gather_u16(costs + s, table * MAX_SYMBOLS));
  return first_lane(warp_sum(select(idle, splat(0), cost)));
}

// The table for all lanes together: that of their mean histogram, which `shared` has room for.
FN vu32 choose_shared(const u16* histogram, u16* shared, u32 active, u32 alphabet, const u16* costs,
                      const u32* variances, vm32 idle) {
  u32 rows = 0;
  for (u32 s = 0; s < alphabet; ++s) {
    vu32 count = warp_sum(select(idle, splat(0), widen(load_u16(histogram + s * LANES))));
    u32 mean = (first_lane(count) + active / 2) / active;
    store_u16(shared + s * LANES, splat16(mean));
    rows += mean;
  }
  warp_sync();
  return choose_tables(shared, rows, alphabet, costs, variances);
}

struct TunedTables {
  const u16 *family, *costs;
  const u32* variances;
};

// Counts a group's symbols, puts their low bits away, chooses its tables and loads them.
template <int N>
FN void prepare_group(const TunedSymbols& block, u32 group, const TunedTables& tables, u16* histogram, u16* cumulative) {
  u32 step = (block.tokens + 1023) / 1024, counted = 0, active = block.active(group);
  const u8* symbols = block.symbols_of(group);
  vm32 idle = lane_ids() >= active;
  for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
  for (u32 t = 0; t < block.tokens; ++t) {
    vu32 symbol = select(idle, splat(0), widen(load_u8(symbols + t * LANES)));
    if (block.raw_bits) store_bits(block.raw_of(group) + t * block.raw_bits, symbol, block.raw_bits);
    if (t % step) continue;
    count_row_u16(histogram, narrow(symbol >> block.raw_bits));
    ++counted;
  }
  warp_sync();

  u32 alphabet = block.alphabet;
  vu32 table = choose_tables(histogram, counted, alphabet, tables.costs, tables.variances);
  vu32 shared = choose_shared(histogram, cumulative, active, alphabet, tables.costs, tables.variances, idle);
  i32 more = (i32)total_cost(histogram, shared, alphabet, tables.costs, idle) -
             (i32)total_cost(histogram, table, alphabet, tables.costs, idle);
  bool shares = more <= (i32)(TABLE_BITS * LANES * 256 / step);
  if (shares) table = shared;
  store_uniform((u32*)block.tables + group, shares ? first_lane(shared) : OWN_TABLES);
  store_bits((u32*)block.own + (u64)group * TABLE_BITS, table, TABLE_BITS);
  load_tables<N>(cumulative, tables.family, table, idle);
}

// `FLIGHTS` neighbouring groups of one block at once. Their streams are written backwards from the ends of `words`.
template <int N, int FLIGHTS>
FN void encode_tuned_symbols(const TunedSymbols& block, u32 group, const TunedTables& tables, u16* words, u32 word_capacity,
                       u16* histogram, u16* cumulative) {
  RansEncoder encoders[FLIGHTS];
  vm32 idle[FLIGHTS];
  for (int f = 0; f < FLIGHTS; ++f) {
    prepare_group<N>(block, group + f, tables, histogram, cumulative + f * (N + 1) * LANES);
    vu32 rider = widen(load_u16((const u16*)block.riders + (group + f) * LANES));
    encoders[f] = RansEncoder::make(words + (f + 1) * (u64)word_capacity, rider);
    idle[f] = lane_ids() >= block.active(group + f);
  }
  for (u32 t = block.tokens; t--;) {
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) {
      vu32 symbol = widen(load_u8(block.symbols_of(group + f) + t * LANES)) >> block.raw_bits;
      encoders[f].template put<N>(cumulative + f * (N + 1) * LANES, narrow(select(idle[f], splat(0), symbol)));
    }
  }
  for (int f = 0; f < FLIGHTS; ++f) {
    u32* states = (u32*)block.states + (u64)(group + f) * STATE_WORDS;
    store_uniform(states, (u32)(words + (f + 1) * (u64)word_capacity - encoders[f].position));
    store_u32(states + 1, encoders[f].x);
  }
}

template <int FLIGHTS>
FN void encode_tuned_symbols_any(const TunedSymbols& block, u32 group, const TunedTables& tables, u16* words,
                           u32 word_capacity, u16* histogram, u16* cumulative) {
  if (block.alphabet <= 16)
    encode_tuned_symbols<16, FLIGHTS>(block, group, tables, words, word_capacity, histogram, cumulative);
  else
    encode_tuned_symbols<32, FLIGHTS>(block, group, tables, words, word_capacity, histogram, cumulative);
}

KERNEL(tuned_symbols_encode, const TunedSymbols* blocks, const u16* family, const u16* costs, const u32* variances, u16* words,
       u32 groups, u32 word_capacity) {
  WARP_SHARED(u16, histogram, MAX_SYMBOLS* LANES);
  WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);
  TunedTables tables = {family, costs, variances};
  FOR_EACH_FLIGHT(warp, flight, groups) {
    const TunedSymbols& block = blocks[warp / groups];
    u32 group = warp % groups;
    u16* own = words + (u64)warp * word_capacity;
    if (flight == FLIGHT)
      encode_tuned_symbols_any<FLIGHT>(block, group, tables, own, word_capacity, histogram, cumulative);
    else
      encode_tuned_symbols_any<1>(block, group, tables, own, word_capacity, histogram, cumulative);
  }
}

// The lanes' tables of a group; false if there are too few.
FN bool read_tables(const TunedSymbols& block, u32 group, vu32& table) {
  const u32* tables = (const u32*)block.tables;
  u32 before = 0;
  for (u32 g = 0; g < group; ++g) before += tables[g] >> 31;
  table = splat(tables[group] & (TABLES - 1));
  if (tables[group] < OWN_TABLES) return true;
  if ((u64)(before + 1) * TABLE_BITS > block.own_count) return false;
  table = load_bits((const u32*)block.own + (u64)before * TABLE_BITS, TABLE_BITS);
  return true;
}

// `FLIGHTS` neighbouring groups of one block at once.
template <int N, int FLIGHTS>
FN u32 decode_tuned_symbols(const TunedSymbols& block, u32 group, const u16* family, u16* cumulative) {
  u32 raw_bits = block.raw_bits;
  RansDecoder decoders[FLIGHTS];
  bool fits = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fit;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fit);
    vu32 table;
    fits = read_tables(block, group + f, table) && fit && fits;
    load_tables<N>(cumulative + f * (N + 1) * LANES, family, table, lane_ids() >= block.active(group + f));
  }
  if (!fits) return BAD_STREAM;
  for (u32 t = 0; t < block.tokens; ++t) {
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) {
      vu16 symbol = decoders[f].template next<N>(cumulative + f * (N + 1) * LANES);
      if (raw_bits) {
        vu32 low = load_bits(block.raw_of(group + f) + t * raw_bits, raw_bits);
        symbol = narrow(widen(symbol) << raw_bits | low);
      }
      store_u8(block.symbols_of(group + f) + t * LANES, symbol);
    }
  }
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    store_u16((u16*)block.riders + (group + f) * LANES, decoders[f].rider());
  }
  return OK;
}

template <int FLIGHTS>
FN u32 decode_tuned_symbols_any(const TunedSymbols& block, u32 group, const u16* family, u16* cumulative) {
  return block.alphabet <= 16 ? decode_tuned_symbols<16, FLIGHTS>(block, group, family, cumulative)
                              : decode_tuned_symbols<32, FLIGHTS>(block, group, family, cumulative);
}

KERNEL(tuned_symbols_decode, const TunedSymbols* blocks, const u16* family, u32* status, u32 groups) {
  WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);
  FOR_EACH_FLIGHT(warp, flight, groups) {
    const TunedSymbols& block = blocks[warp / groups];
    u32 group = warp % groups;
    u32 found = flight == FLIGHT ? decode_tuned_symbols_any<FLIGHT>(block, group, family, cumulative)
                                 : decode_tuned_symbols_any<1>(block, group, family, cumulative);
    for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);
  }
}
