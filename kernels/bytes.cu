// Bytes of any kind: order-0 rANS. A byte's *class* is its position modulo the number of classes (1, 2, 4 or 8), as the bytes
// of a number differ in kind; each class has a table of all 256 bytes. Blocks are cut in strips, one warp each; byte i of a
// strip is coded in lane i mod 32.
#include "bits.h"
#include "rans.h"

struct BytesBlock {
  u64 bytes;
  u64 tables;  // encoders RansEntry [classes * 256 + 1], the last for lanes without a byte; decoders u32 [classes][4096]
  u64 states;  // u32 [strips][STATE_WORDS]
  u64 words;   // u16: the streams
  u32 count, word_count, classes, reserved;
};

constexpr u32 STRIP_BYTES = 1 << 16;

struct ByteStrip {
  u8* bytes;
  u32 rows, rest;  // full rows of 32 bytes, bytes behind them

  static METHOD ByteStrip make(const BytesBlock& block, u32 strip) {
    u64 start = (u64)strip * STRIP_BYTES;
    u32 count = block.count - start < STRIP_BYTES ? (u32)(block.count - start) : STRIP_BYTES;
    return {(u8*)block.bytes + start, count / LANES, count % LANES};
  }
  static METHOD bool exists(const BytesBlock& block, u32 strip) { return (u64)strip * STRIP_BYTES < block.count; }
};

FN vu32 class_of_lane(const BytesBlock& block) { return lane_ids() & (block.classes - 1u); }

KERNEL(bytes_encode, const BytesBlock* blocks, u16* words, u32 strips, u32 word_capacity) {
  FOR_EACH_WARP(warp) {
    const BytesBlock& block = blocks[warp / strips];
    if (!ByteStrip::exists(block, warp % strips)) continue;
    ByteStrip strip = ByteStrip::make(block, warp % strips);
    const RansEntry* entries = (const RansEntry*)block.tables;
    vu32 start = class_of_lane(block) * 256u;
    u16* words_end = words + ((u64)warp + 1) * word_capacity;
    RansEncoder encoder = RansEncoder::make(words_end, splat(0));
    if (strip.rest) {
      vu32 byte = widen(load_some(strip.bytes + strip.rows * LANES, strip.rest));
      vu32 index = select((vm32)(lane_ids() < strip.rest), start + byte, splat(block.classes * 256));
      encoder.put(RansSymbol::gather(entries, index));
    }
    auto load = [&](u64 row) { return load_u8(strip.bytes + row * LANES); };
    in_turn<BACKWARDS, 4>(strip.rows, load, [&](u32, vu16 bytes) {
      encoder.put(RansSymbol::gather(entries, start + widen(bytes)));
    });
    u32* states = (u32*)block.states + (u64)(warp % strips) * STATE_WORDS;
    store_uniform(states, (u32)(words_end - encoder.position));
    store_u32(states + 1, encoder.x);
  }
}

// An entry of a decoder's table: the byte, its frequency less 1 from bit 8 on, the slot's offset in it from bit 20 on.
FN vu16 next_byte(RansDecoder& decoder, const u32* slots, vu32 start) {
  vu32 entry = gather_u32(slots, start + (decoder.x & (RANS_SCALE - 1)));
  decoder.advance((entry >> 8 & (RANS_SCALE - 1)) + 1u, entry >> 20);
  return narrow(entry & 0xffu);
}

// `FLIGHTS` neighbouring full strips of one block at once, or one strip.
template <int FLIGHTS>
FN u32 bytes_decode_strips(const BytesBlock& block, u32 first) {
  const u32* slots = (const u32*)block.tables;
  vu32 start = class_of_lane(block) * RANS_SCALE;
  RansDecoder decoders[FLIGHTS];
  ByteStrip strips[FLIGHTS];
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fits;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, first + f, fits);
    if (!fits) return BAD_STREAM;
    strips[f] = ByteStrip::make(block, first + f);
  }
  // Only the last strip of a block is shorter.
  for (u32 row = 0; row < strips[FLIGHTS - 1].rows; ++row)
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) store_u8(strips[f].bytes + row * LANES, next_byte(decoders[f], slots, start));
  for (int f = 0; f < FLIGHTS; ++f) {
    for (u32 row = strips[FLIGHTS - 1].rows; row < strips[f].rows; ++row)
      store_u8(strips[f].bytes + row * LANES, next_byte(decoders[f], slots, start));
    if (strips[f].rest) {
      vm32 used = (vm32)(lane_ids() < strips[f].rest);
      vu32 entry = gather_u32(slots, start + (decoders[f].x & (RANS_SCALE - 1)));
      vu32 slot = decoders[f].x & (RANS_SCALE - 1);
      decoders[f].advance(select(used, (entry >> 8 & (RANS_SCALE - 1)) + 1u, splat(RANS_SCALE)),
                          select(used, entry >> 20, slot));
      store_some(strips[f].bytes + strips[f].rows * LANES, narrow(entry & 0xffu), strips[f].rest);
    }
    if (!decoders[f].finished()) return BAD_STREAM;
  }
  return OK;
}

KERNEL(bytes_decode, const BytesBlock* blocks, u32* status, u32 strips) {
  FOR_EACH_FLIGHT(warp, flight, strips) {
    const BytesBlock& block = blocks[warp / strips];
    u32 strip = warp % strips, found = OK;
    if (flight == FLIGHT && ByteStrip::exists(block, strip + FLIGHT - 1))
      found = bytes_decode_strips<FLIGHT>(block, strip);
    else
      for (int f = 0; f < flight && found == OK; ++f)
        if (ByteStrip::exists(block, strip + f)) found = bytes_decode_strips<1>(block, strip + f);
    for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);
  }
}
