// Tables, encoder and decoder of LMCache's CacheGen streams: one stream per channel and 256 tokens, one table per channel and
// block. Lane = channel; a warp has 32 channels. Channels beyond the last are idle: their symbols are 0, their streams empty.
#include "range_coder.h"
#include "rans.h"

struct RangeBlock {
  u64 symbols;     // u8 [tokens][groups * 32]
  u64 tables;      // u16 [groups][33][32]
  u64 lengths;     // u16 [streams][groups][32]: bytes of each stream
  u64 bytes;       // the streams, those of the same tokens side by side
  u64 byte_count;
  u32 tokens, channels;
};

// ------------------------------------------------------------------------------------------- tables

// One warp a group of 32 channels: how often each symbol occurs. counts: u16 [warp][32][32]; tokens < 65536.
KERNEL(range_count, const RangeBlock* blocks, u16* counts, u32 groups) {
  WARP_SHARED(u16, histogram, RANGE_SYMBOLS* LANES);
  FOR_EACH_WARP(warp) {
    const RangeBlock& block = blocks[warp / groups];
    const u8* symbols = (const u8*)block.symbols + warp % groups * LANES;
    u64 pitch = groups * LANES;
    for (u32 s = 0; s < RANGE_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
    auto load = [=](u32 t) { return load_u8(symbols + t * pitch); };
    in_turn<FORWARDS, 4>(block.tokens, load, [&](u32, vu16 symbol) { count_row_u16(histogram, symbol); });
    warp_sync();
    warp_copy(counts + (u64)warp * RANGE_SYMBOLS * LANES, histogram, RANGE_SYMBOLS * LANES);
  }
}

// tables: u16 [warp][33][32]. LMCache's: every symbol has its share of 65535 - 32, rounded down in the running sum, and one.
KERNEL(range_tables, const RangeBlock* blocks, const u16* counts, u16* tables, u32 groups) {
  FOR_EACH_WARP(warp) {
    u32 tokens = blocks[warp / groups].tokens;
    const u16* mine = counts + (u64)warp * RANGE_SYMBOLS * LANES;
    u16* table = tables + (u64)warp * RANGE_TABLE * LANES;
    vu32 below = splat(0);
    for (u32 s = 0; s <= RANGE_SYMBOLS; ++s) {
      store_u16(table + s * LANES, narrow(divide_by(below * (RANGE_TOP - RANGE_SYMBOLS), tokens) + s));
      if (s < RANGE_SYMBOLS) below = below + widen(load_u16(mine + s * LANES));
    }
    warp_sync();
  }
}

// Counts as they lie in a file: the widths in bits of the symbols' counts, one symbol a lane, then the counts, one word a bit.
// The last symbol's count is what is missing to the number of tokens.
constexpr u32 COUNT_WIDTH_BITS = 5;
constexpr u32 COUNT_WORDS = COUNT_WIDTH_BITS + 16 * RANGE_SYMBOLS;

FN vm32 idle_lanes(const RangeBlock& block, u32 group) { return lane_ids() + group * LANES >= block.channels; }

// slots: u32 [warp][COUNT_WORDS], of which `used` words each.
KERNEL(range_pack_counts, const RangeBlock* blocks, const u32* alphabets, const u16* counts, u32* slots, u32* used,
       u32 groups) {
  FOR_EACH_WARP(warp) {
    u32 alphabet = alphabets[warp / groups], at = COUNT_WIDTH_BITS;
    vm32 idle = idle_lanes(blocks[warp / groups], warp % groups);
    u32* slot = slots + (u64)warp * COUNT_WORDS;
    vu32 widths = splat(0);
    for (u32 s = 0; s + 1 < alphabet; ++s) {
      vu32 count = select(idle, splat(0), widen(load_u16(counts + ((u64)warp * RANGE_SYMBOLS + s) * LANES)));
      u32 width = bit_width(largest(count));
      widths = with_lane(widths, s, width);
      store_bits(slot + at, count, width);
      at += width;
    }
    store_bits(slot, widths, COUNT_WIDTH_BITS);
    store_uniform(used + warp, at);
  }
}

struct PackedCounts {
  u64 words;
  u32 word_count, alphabet;
};

FN u32 unpack_counts(const PackedCounts& packed, u32 group, u32 groups, u32 tokens, u16* counts) {
  const u32* words = (const u32*)packed.words;
  u32 at = 0, end = 0;
  vu32 widths = splat(0), missing = splat(tokens);
  for (u32 g = 0; g <= group; ++g) {
    at = end;
    if (packed.word_count - at < COUNT_WIDTH_BITS) return BAD_TABLES;
    widths = load_bits(words + at, COUNT_WIDTH_BITS);
    if (largest(widths) > 16) return BAD_TABLES;
    at += COUNT_WIDTH_BITS;
    u32 used = first_lane(warp_sum(widths));
    if (packed.word_count - at < used) return BAD_TABLES;
    end = at + used;
  }
  if (group + 1 == groups && end != packed.word_count) return BAD_TABLES;
  for (u32 s = 0; s + 1 < packed.alphabet; ++s) {
    u32 width = lane_value(widths, s);
    // The widths of symbols beyond the alphabet have a place in their sum: a hostile one cannot lead past the end.
    vu32 count = load_bits(words + at, width);
    at += width;
    if (ballot(count > missing)) return BAD_TABLES;
    missing = missing - count;
    store_u16(counts + s * LANES, narrow(count));
  }
  store_u16(counts + (packed.alphabet - 1) * LANES, narrow(missing));
  return OK;
}

// counts: u16 [warp][32][32]. Damaged ones become zeros: a table made of them is bad but harmless.
KERNEL(range_unpack_counts, const RangeBlock* blocks, const PackedCounts* packed, u16* counts, u32* status, u32 groups) {
  FOR_EACH_WARP(warp) {
    u32 block = warp / groups;
    u16* mine = counts + (u64)warp * RANGE_SYMBOLS * LANES;
    for (u32 s = 0; s < RANGE_SYMBOLS; ++s) store_u16(mine + s * LANES, splat16(0));
    u32 found = unpack_counts(packed[block], warp % groups, groups, blocks[block].tokens, mine);
    if (found != OK)
      for (u32 s = 0; s < RANGE_SYMBOLS; ++s) store_u16(mine + s * LANES, splat16(0));
    store_uniform(status + warp, found);
  }
}

// ------------------------------------------------------------------------------------------- streams
// One warp 32 channels and 256 tokens: warp = (block * streams + stream) * groups + group.

// Into slots, u8 [warp][32][STREAM_BYTES].
KERNEL(range_encode, const RangeBlock* blocks, u8* slots, u32 groups, u32 streams) {
  WARP_SHARED(u32, entries, RANGE_SYMBOLS* LANES);
  FOR_EACH_WARP(warp) {
    u32 group = warp % groups, stream = warp / groups % streams;
    const RangeBlock& block = blocks[warp / groups / streams];
    u32 first = stream * STREAM_TOKENS;
    if (first < block.tokens) {
      u32 count = block.tokens - first < STREAM_TOKENS ? block.tokens - first : STREAM_TOKENS;
      const u16* table = (const u16*)block.tables + (u64)group * RANGE_TABLE * LANES;
      for (u32 s = 0; s < RANGE_SYMBOLS; ++s)
        store_u32(entries + s * LANES, widen(load_u16(table + s * LANES)) | widen(load_u16(table + (s + 1) * LANES)) << 16);
      warp_sync();
      const u8* symbols = (const u8*)block.symbols + ((u64)first * groups + group) * LANES;
      RangeEncoder encoder = RangeEncoder::make(slots + (u64)warp * LANES * STREAM_BYTES);
      u64 pitch = groups * LANES;
      auto load = [=](u32 t) { return load_u8(symbols + t * pitch); };
      in_turn<FORWARDS>(count, load, [&](u32, vu16 symbol) { encoder.put(entries, symbol); });
      vu32 lengths = select(idle_lanes(block, group), splat(0), encoder.finish());
      store_u16((u16*)block.lengths + ((u64)stream * groups + group) * LANES, narrow(lengths));
      warp_sync();
    }
  }
}

// Puts a warp's streams one after the other at `targets[warp]`.
KERNEL(range_gather, const RangeBlock* blocks, const u8* slots, const u64* targets, u32 groups, u32 streams) {
  FOR_EACH_WARP(warp) {
    const RangeBlock& block = blocks[warp / groups / streams];
    u32 stream = warp / groups % streams;
    if (stream * STREAM_TOKENS < block.tokens) {
      vu32 lengths = widen(load_u16((const u16*)block.lengths + ((u64)stream * groups + warp % groups) * LANES));
      u8* target = (u8*)targets[warp];
      for (u32 l = 0; l < LANES; ++l) {
        u32 length = lane_value(lengths, l);
        warp_copy(target, slots + ((u64)warp * LANES + l) * STREAM_BYTES, length);
        target += length;
      }
    }
  }
}

FN u32 range_decode_streams(const RangeBlock& block, u32 group, u32 groups, u32 stream, u16* cumulative) {
  u32 first = stream * STREAM_TOKENS;
  u32 count = block.tokens - first < STREAM_TOKENS ? block.tokens - first : STREAM_TOKENS;
  u32 rows = (block.tokens + STREAM_TOKENS - 1) / STREAM_TOKENS * groups, row = stream * groups + group;
  const u16* all_lengths = (const u16*)block.lengths;
  vu32 before = splat(0);
  for (u32 r = 0; r < row; ++r) before = before + widen(load_u16(all_lengths + (u64)r * LANES));
  vu32 lengths = widen(load_u16(all_lengths + (u64)row * LANES));
  u64 start = first_lane(warp_sum(before)), end = start + first_lane(warp_sum(lengths));
  if (end > block.byte_count || (row + 1 == rows && end != block.byte_count)) return BAD_STREAM;

  const u16* table = (const u16*)block.tables + (u64)group * RANGE_TABLE * LANES;
  for (u32 s = 0; s < RANGE_TABLE; ++s) store_u16(cumulative + s * LANES, load_u16(table + s * LANES));
  warp_sync();
  RangeDecoder decoder = RangeDecoder::make((const u8*)block.bytes + start, warp_sum_before(lengths), lengths);
  u8* symbols = (u8*)block.symbols + ((u64)first * groups + group) * LANES;
  for (u32 t = 0; t < count; ++t) store_u8(symbols + (u64)t * groups * LANES, decoder.next(cumulative));
  return OK;
}

KERNEL(range_decode, const RangeBlock* blocks, u32* status, u32 groups, u32 streams) {
  WARP_SHARED(u16, cumulative, RANGE_TABLE* LANES);
  FOR_EACH_WARP(warp) {
    u32 stream = warp / groups % streams, found = OK;
    const RangeBlock& block = blocks[warp / groups / streams];
    if (stream * STREAM_TOKENS < block.tokens)
      found = range_decode_streams(block, warp % groups, groups, stream, cumulative);
    store_uniform(status + warp, found);
  }
}
