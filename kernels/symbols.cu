// rANS of symbols that lie one a byte: what a quantizer hands on where it does not code itself. A table of the family per
// channel, one warp per group of 32 channels.
#include "rans.h"

struct SymbolBlock {
  u64 symbols;  // u8 [groups][row_capacity][32]
  u64 tables;   // u32 [groups][12]: the lanes' table indexes, one word a bit
  u64 states;   // u32 [groups][STATE_WORDS]
  u64 words;    // u16: the streams
  u32 rows, row_capacity, channels, alphabet;
  u32 family, word_count;
};

constexpr u32 COUNTED_ROWS = 512;

FN vm32 idle_lanes(const SymbolBlock& block, u32 group) { return lane_ids() + group * LANES >= block.channels; }
FN u8* symbols_of(const SymbolBlock& block, u32 group) {
  return (u8*)block.symbols + (u64)group * block.row_capacity * LANES;
}

template <int N>
FN void symbols_encode_group(const SymbolBlock& block, u32 group, const u16* families, const u16* costs,
                             const u32* variances, u16* words_end, u16* histogram, u16* cumulative) {
  const u8* symbols = symbols_of(block, group);
  u32 stride = (block.rows + COUNTED_ROWS - 1) / COUNTED_ROWS, counted = 0;
  for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
  for (u32 row = 0; row < block.rows; row += stride, ++counted)
    count_row_u16(histogram, load_u8(symbols + (u64)row * LANES));
  warp_sync();
  u64 family = (u64)block.family * TABLES;
  vu32 table = choose_tables(histogram, counted, block.alphabet, costs + family * MAX_SYMBOLS, variances);
  load_tables<N>(cumulative, families + family * TABLE_STRIDE, table, idle_lanes(block, group));
  RansEncoder encoder = RansEncoder::make(words_end, splat(0));
  for (u32 row = block.rows; row--;) encoder.template put<N>(cumulative, load_u8(symbols + (u64)row * LANES));

  u32* states = (u32*)block.states + (u64)group * STATE_WORDS;
  store_uniform(states, (u32)(words_end - encoder.position));
  store_u32(states + 1, encoder.x);
  store_bits((u32*)block.tables + (u64)group * TABLE_BITS, table, TABLE_BITS);
}

KERNEL(symbols_encode, const SymbolBlock* blocks, const u16* families, const u16* costs, const u32* variances, u16* words,
       u32 groups, u32 word_capacity) {
  WARP_SHARED(u16, histogram, MAX_SYMBOLS* LANES);
  WARP_SHARED(u16, cumulative, (MAX_SYMBOLS + 1) * LANES);
  FOR_EACH_WARP(warp) {
    const SymbolBlock& block = blocks[warp / groups];
    u16* words_end = words + ((u64)warp + 1) * word_capacity;
    u32 group = warp % groups;
    if (block.alphabet <= 4)
      symbols_encode_group<4>(block, group, families, costs, variances, words_end, histogram, cumulative);
    else if (block.alphabet <= 16)
      symbols_encode_group<16>(block, group, families, costs, variances, words_end, histogram, cumulative);
    else
      symbols_encode_group<32>(block, group, families, costs, variances, words_end, histogram, cumulative);
  }
}

template <int N, int FLIGHTS>
FN u32 symbols_decode_groups(const SymbolBlock& block, u32 group, const u16* families, u16* cumulative) {
  const u16* family = families + (u64)block.family * TABLES * TABLE_STRIDE;
  RansDecoder decoders[FLIGHTS];
  u8* symbols[FLIGHTS];
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fits;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fits);
    if (!fits) return BAD_STREAM;
    vu32 table = load_bits((const u32*)block.tables + (u64)(group + f) * TABLE_BITS, TABLE_BITS);
    load_tables<N>(cumulative + f * (N + 1) * LANES, family, table, idle_lanes(block, group + f));
    symbols[f] = symbols_of(block, group + f);
  }
  for (u32 row = 0; row < block.rows; ++row)
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f)
      store_u8(symbols[f] + (u64)row * LANES, decoders[f].template next<N>(cumulative + f * (N + 1) * LANES));
  for (int f = 0; f < FLIGHTS; ++f)
    if (!decoders[f].finished()) return BAD_STREAM;
  return OK;
}

template <int FLIGHTS>
FN u32 symbols_decode_any(const SymbolBlock& block, u32 group, const u16* families, u16* cumulative) {
  if (block.alphabet <= 4) return symbols_decode_groups<4, FLIGHTS>(block, group, families, cumulative);
  if (block.alphabet <= 16) return symbols_decode_groups<16, FLIGHTS>(block, group, families, cumulative);
  return symbols_decode_groups<32, FLIGHTS>(block, group, families, cumulative);
}

KERNEL(symbols_decode, const SymbolBlock* blocks, const u16* families, u32* status, u32 groups) {
  WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);
  FOR_EACH_FLIGHT(warp, flight, groups) {
    const SymbolBlock& block = blocks[warp / groups];
    u32 found = flight == FLIGHT ? symbols_decode_any<FLIGHT>(block, warp % groups, families, cumulative)
                                 : symbols_decode_any<1>(block, warp % groups, families, cumulative);
    for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);
  }
}
