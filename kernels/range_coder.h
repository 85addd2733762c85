// The arithmetic coder of CacheGen, stream for stream LMCache's: 32-bit registers, 16-bit frequencies, one stream a lane.
//
// I. Witten, R. Neal, J. Cleary, "Arithmetic coding for data compression", CACM 30 (1987). They settle one bit at a time, and
// count the bits that hang on a carry. Here a symbol settles all its bits at once: the leading bits in which both ends of the
// interval agree, and the run of 0111.. against 1000.. behind them. Bits are written as they stand in the lower end, and a
// carry that still comes is added to what was written. The streams are the same.
#pragma once
#include "warp.h"

constexpr u32 RANGE_SYMBOLS = 32;
constexpr u32 RANGE_TABLE = RANGE_SYMBOLS + 1;  // cumulative frequencies, strictly rising, the first 0
constexpr u32 RANGE_TOP = 65535;                // stands for 65536, the end of the last symbol
constexpr u32 STREAM_TOKENS = 256;
// An interval never falls below 2^14, so a symbol settles 18 bits at most.
constexpr u32 STREAM_BYTES = STREAM_TOKENS * 18 / 8 + 8;

// Of every lane: low .. low + width, both ends included.
struct Interval {
  vu32 low;  // below 2^31 between symbols; bit 31 is a carry
  vu32 width;

  // floor((width + 1) * frequency / 65536), frequency < 65536.
  METHOD vu32 scaled(vu32 frequency) const {
    return (width >> 16) * frequency + (((width & 0xffffu) + 1u) * frequency >> 16);
  }
  METHOD vu32 take(vu32 from, vu32 to) {
    vu32 start = scaled(from);
    width = select(to == RANGE_TOP, width, scaled(to) - 1u) - start;
    low = low + start;
    return start;
  }
  // How many bits the interval has settled.
  METHOD vu32 settled() const {
    vu32 high = low + width;
    vu32 agreed = leading_zeros(low ^ high);
    vu32 hanging = ((low << agreed) & (~high << agreed)) << 1;
    return agreed + leading_zeros(~hanging);
  }
  METHOD void shift(vu32 bits) {
    low = (low << bits) & 0x7fffffffu;
    width = ((width + 1u) << bits) - 1u;
  }
};

struct RangeEncoder {
  Interval interval;
  u8* bytes;
  vu32 start, position;  // of the lane's stream and of its next byte, from `bytes`
  vu32 tail, held;       // bits that are not yet bytes, fewer than 16 between symbols, and their number

  // A stream begins with the bit that takes the first carry.
  static METHOD RangeEncoder make(u8* bytes) {
    vu32 start = lane_ids() * STREAM_BYTES;
    return {{splat(0), splat(~0u)}, bytes, start, start, splat(0), splat(1)};
  }
  // entries: [32][32] of from | to << 16 per symbol and lane.
  METHOD void put(const u32* entries, vu16 symbol) {
    vu32 entry = gather_row_u32(entries, symbol);
    interval.take(entry & 0xffffu, entry >> 16);
    vu32 bits = interval.settled();
    carry();
    if (!all(bits <= 16u)) {  // only frequencies below 4 get here
      append(select(bits > 16u, splat(16), splat(0)));
      bits = select(bits > 16u, bits - 16u, bits);
    }
    append(bits);
  }
  // The next bit beyond the quarter that starts at or after low says which; returns the lengths of the streams in bytes.
  METHOD vu32 finish() {
    interval.low = interval.low + (1u << 30);
    carry();
    append(splat(1));
    vu32 length = position - start + ((held + 7u) >> 3);
    put_halves(bytes, position, held > 0u, tail << (16u - held));
    return length;
  }
  METHOD void carry() {
    tail = tail + (interval.low >> 31);
    interval.low = interval.low & 0x7fffffffu;
    vu32 over = tail >> held;
    if (!all(over == 0u)) {
      increment_before(bytes, position, over != 0u);
      tail = tail & ~(over << held);
    }
  }
  METHOD void append(vu32 bits) {
    tail = (tail << bits) | (interval.low >> (31u - bits));
    held = held + bits;
    interval.shift(bits);
    vm32 full = held >= 16u;
    vu32 rest = held & 15u;
    put_halves(bytes, position, full, tail >> rest);
    held = rest;
    tail = tail & ((1u << rest) - 1u);
  }
};

struct RangeDecoder {
  Interval interval;
  vu32 offset;         // of the stream's value from the interval's low
  const u8* bytes;
  vu32 start, length;  // of the lane's stream in bytes
  vu32 position;       // in bits

  static METHOD RangeDecoder make(const u8* bytes, vu32 start, vu32 length) {
    RangeDecoder decoder = {{splat(0), splat(~0u)}, splat(0), bytes, start, length, splat(0)};
    decoder.offset = decoder.peek();
    decoder.position = splat(32);
    return decoder;
  }
  // The next 25 bits or more from the top; zeros past the end. May read 4 bytes past the end.
  METHOD vu32 peek() const {
    vu32 byte = position >> 3, end = length << 3;
    vu32 word = gather_big_endian(bytes, start + select(byte < length, byte, length)) << (position & 7u);
    vu32 left = select(position < end, end - position, splat(0));
    return select(left < 32u, word & ~(splat(~0u) >> (left & 31u)), word);
  }
  // cumulative: [33][32]. Any bytes decode to some symbols: the offset always lies in the interval.
  METHOD vu16 next(const u16* cumulative) {
    // The frequency below which the offset lies: a float's estimate, one too small at most.
    vf32 ratio = int_to_float(offset >> 2) * 65536.f / int_to_float((interval.width >> 2) + 1u);
    vu32 slot = round_to_int(ratio - 0.52f), above = slot + 1u;
    slot = select((above <= RANGE_TOP) & (interval.scaled(above) <= offset), above, slot);

    vu16 from, to;
    vu16 symbol = find_symbol<RANGE_SYMBOLS>(cumulative, narrow(slot), from, to);
    offset = offset - interval.take(widen(from), widen(to));
    vu32 bits = interval.settled();
    interval.shift(bits);
    offset = (offset << bits) | (peek() >> 1 >> (31u - bits));
    position = position + bits;
    return symbol;
  }
};
