// Interleaved rANS: 32 streams side by side, lane = channel, one word stream a warp.
//
// J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540); F. Giesen, "Interleaved entropy coders" (arXiv:1402.3392).
// States are 32 bits in [2^16, 2^32), frequencies 12 bits, renormalization by 16-bit words. The encoder goes from the last
// token to the first, so that the decoder reads forwards. A lane starts at 2^16 plus 16 bits of payload, the *rider*; the
// decoder ends there, which checks the stream and gives the rider back.
//
// Tables come from a family (kvzip/coding/tables.py): 4096 discretized Gaussians, 64 deviations x 64 means.
#pragma once
#include "bits.h"

constexpr u32 RANS_BITS = 12;
constexpr u32 RANS_SCALE = 1 << RANS_BITS;
constexpr u32 RANS_START = 1 << 16;
constexpr u32 MAX_SYMBOLS = 32;
constexpr u32 COUNTED_ROWS = 2 * MAX_SYMBOLS;  // of the lanes' counts, that an encoder has room for
constexpr u32 TABLE_SIDE = 64;
constexpr u32 TABLE_BITS = 12;                 // a table's index: 6 bits of deviation, 6 bits of mean
constexpr u32 TABLES = 1 << TABLE_BITS;
constexpr u32 TABLE_STRIDE = MAX_SYMBOLS + 1;  // cumulative counts 0..4096; symbols beyond the alphabet have frequency 0
constexpr u32 STATE_WORDS = 1 + LANES;         // of a warp in the state section: number of words, then the lanes' states

// What a stream can be found to be. A warp reports the first thing wrong.
enum Status : u32 {
  OK = 0, BAD_TOKENS = 1, BAD_STREAM = 2, BAD_ROWS = 3, BAD_RAW = 4, BAD_VALUE = 5, BAD_TABLES = 6, BAD_ESCAPES = 7
};

// The lanes' tables side by side: [N + 1][32] cumulative counts. Idle lanes code symbol 0 at no cost.
template <int N>
FN void load_tables(u16* cumulative, const u16* family, vu32 index, vm32 idle) {
  vu32 start = index * TABLE_STRIDE;
  for (u32 s = 0; s <= N; ++s) {
    vu32 count = widen(gather_u16(family + s, start));
    store_u16(cumulative + s * LANES, narrow(select(idle, splat(s ? RANS_SCALE : 0), count)));
  }
  warp_sync();
}

// Per-lane numbers of few bits, as one word per bit.
FN vu32 load_bits(const u32* planes, u32 bits) {
  vu32 v = splat(0);
  for (u32 b = 0; b < bits; ++b) v = v | bit_of_lane(planes[b]) << b;
  return v;
}
FN void store_bits(u32* planes, vu32 v, u32 bits) {
  for (u32 b = 0; b < bits; ++b) {
    u32 word = ballot((v >> b & 1u) != 0u);
    store_uniform(planes + b, word);
  }
}

struct RansDecoder {
  const u16* position;
  const u16* end;
  vu32 x;

  // `words` of the block hold the streams of its warps one after the other; `states` has STATE_WORDS of each.
  static METHOD RansDecoder make(const u32* states, const u16* words, u32 word_count, u32 group, bool& fits) {
    u64 start = 0;
    for (u32 g = 0; g < group; ++g) start += states[(u64)g * STATE_WORDS];
    const u32* mine = states + (u64)group * STATE_WORDS;
    fits = start + mine[0] <= word_count;
    RansDecoder decoder;
    decoder.position = words + (fits ? start : 0);
    decoder.end = decoder.position + (fits ? mine[0] : 0);
    decoder.x = load_u32(mine + 1);
    return decoder;
  }
  // The next symbol of every lane. Hostile bytes cannot lead the reader astray: past the end it stays just past the end,
  // where the buffer's padding lies, and `finished` is false.
  template <int N>
  METHOD vu16 next(const u16* cumulative) {
    vu16 low, high, slot = narrow(x & (RANS_SCALE - 1));
    vu16 symbol = find_symbol<N>(cumulative, slot, low, high);
    advance(widen(high - low), widen(slot - low));
    return symbol;
  }
  // The step behind a symbol of that frequency, `offset` above its lower bound.
  METHOD void advance(vu32 frequency, vu32 offset) {
    x = frequency * (x >> RANS_BITS) + offset;
    x = pull_words(position, x < RANS_START, x);
    position = position > end ? end + 1 : position;
  }
  // Up to 12 raw bits per lane: a symbol of equal frequencies. Lanes with none stay as they are.
  METHOD vu32 bits(vu32 count) {
    vu32 slot = x & (RANS_SCALE - 1), frequency = splat(RANS_SCALE) >> count;
    vu32 value = slot >> (RANS_BITS - count);
    advance(frequency, slot & (frequency - 1u));
    return value;
  }
  METHOD bool finished() const { return position == end && ballot((x >> 16) != 1u) == 0; }
  METHOD vu16 rider() const { return narrow(x & 0xffffu); }
};

// A symbol in an encoder's table.
struct alignas(8) RansEntry {
  u32 interval;    // lower bound and frequency << 16
  u32 reciprocal;  // (2^32 - 1) / frequency, cut off
};

// RansSymbol: what an encoder needs of a symbol of each lane; `added_to` is the state that x < 2^20 * frequency becomes.
// RansSymbols: a warp's room for counts of symbols, until their tables are chosen, and then for these. `load` as `load_tables`.
#if defined(__CUDACC__) || defined(KVZIP_EMULATED)

struct RansSymbol {
  u32 low, frequency, reciprocal;

  static METHOD RansSymbol of(RansEntry entry) { return {entry.interval & 0xffffu, entry.interval >> 16, entry.reciprocal}; }
  static METHOD RansSymbol gather(const RansEntry* entries, vu32 index) { return of(entries[index]); }
  METHOD vu32 added_to(vu32 x) const {
    // The quotient is right or one too small.
    u32 quotient = __umulhi(x, reciprocal), others = RANS_SCALE - frequency, sum = quotient * others + x;
    return (sum - quotient * RANS_SCALE >= frequency ? sum + others : sum) + low;
  }
};

// Both in the same memory: the less there is of it, the more warps a multiprocessor has room for.
union RansSymbols {
  typedef RansEntry Row[LANES];
  u16 counts[COUNTED_ROWS * LANES];
  Row entries[MAX_SYMBOLS];

  template <int N>
  struct Table {
    const Row* own;  // from the lane's entry on

    METHOD RansSymbol find(vu32 symbol) const { return RansSymbol::of(own[symbol][0]); }
  };
  template <int N>
  METHOD Table<N> load(const u16* family, vu32 index, vm32 idle) {
    const u16* cumulative = family + index * TABLE_STRIDE;
    Row* own = (Row*)&entries[0][lane()];
    warp_sync();
    for (u32 s = 0, low = 0; s < N; ++s) {
      u32 high = idle ? RANS_SCALE : cumulative[s + 1], frequency = high - low;
      own[s][0] = {low | frequency << 16, frequency ? ~0u / frequency : 0};
      low = high;
    }
    return {own};
  }
};

#else

struct RansSymbol {
  vu32 low, frequency;

  static METHOD RansSymbol gather(const RansEntry* entries, vu32 index) {
    vu32 interval = gather_u32(&entries->interval, index * (u32)(sizeof(RansEntry) / sizeof(u32)));
    return {interval & 0xffffu, interval >> 16};
  }
  METHOD vu32 added_to(vu32 x) const { return divide(x, frequency) * (RANS_SCALE - frequency) + x + low; }
};

struct RansSymbols {
  alignas(128) u16 counts[COUNTED_ROWS * LANES];
  alignas(128) u16 cumulative[(MAX_SYMBOLS + 1) * LANES];

  template <int N>
  struct Table {
    const u16* cumulative;

    METHOD RansSymbol find(vu32 symbol) const {
      vu16 low, high;
      interval_of_symbol<N>(cumulative, narrow(symbol), low, high);
      return {widen(low), widen(high - low)};
    }
  };
  template <int N>
  METHOD Table<N> load(const u16* family, vu32 index, vm32 idle) {
    load_tables<N>(cumulative, family, index, idle);
    return {cumulative};
  }
};

#endif

struct RansEncoder {
  u16* position;
  vu32 x;

  static METHOD RansEncoder make(u16* end, vu32 rider) {
    RansEncoder encoder;
    encoder.position = end;
    encoder.x = rider | RANS_START;
    return encoder;
  }
  METHOD void put(const RansSymbol& symbol) {
    x = symbol.added_to(push_words(position, (x >> 20) >= symbol.frequency, x));
  }
  // The mirror of the decoder's `bits`: the lowest `count` bits of the value.
  METHOD void put_bits(vu32 value, vu32 count) {
    vu32 frequency = splat(RANS_SCALE) >> count, shift = RANS_BITS - count;
    x = push_words(position, (x >> 20) >= frequency, x);
    value = value & ((splat(1) << count) - 1u);
    x = ((x >> shift) << RANS_BITS) + (value << shift) + (x & (frequency - 1u));
  }
};

// The table for the symbols counted in histogram [32][32]: from the integer moments, then the cheapest of its eight
// neighbours and itself (the first of equals). `costs` [TABLES][32] are 1/256 bits a symbol; `variances` [63] the thresholds
// between deviations, in 1/4096 of a squared symbol; rows <= 1024.
FN vu32 choose_tables(const u16* histogram, u32 rows, u32 symbols, const u16* costs, const u32* variances) {
  vu32 sum = splat(0), squares = splat(0);
  for (u32 s = 0; s < symbols; ++s) {
    vu32 count = widen(load_u16(histogram + s * LANES));
    sum = sum + count * s;
    squares = squares + count * (s * s);
  }
  u32 n = rows ? rows : 1, span = symbols > 1 ? symbols - 1 : 1;
  vu32 variance = divide_by(divide_by(squares * n - sum * sum, n) * 4096u, n);
  vu32 deviation = splat(0);
  for (u32 i = 0; i + 1 < TABLE_SIDE; ++i) deviation = deviation + select(variance >= variances[i], splat(1), splat(0));
  vu32 mean = divide_by(sum * (2 * (TABLE_SIDE - 1)) + n * span, 2 * n * span);

  vu32 best = splat(0), best_cost = splat(~0u);
  for (u32 i = 0; i < 9; ++i) {
    // One less than the neighbour's coordinates, held inside the square.
    vu32 d = deviation + i / 3, m = mean + i % 3;
    d = select(d < 1u, splat(0), select(d > TABLE_SIDE, splat(TABLE_SIDE - 1), d - 1u));
    m = select(m < 1u, splat(0), select(m > TABLE_SIDE, splat(TABLE_SIDE - 1), m - 1u));
    vu32 index = d * TABLE_SIDE + m, start = index * MAX_SYMBOLS, cost = splat(0);
    for (u32 s = 0; s < symbols; ++s)
      cost = cost + widen(load_u16(histogram + s * LANES)) * widen(gather_u16(costs + s, start));
    vm32 better = cost < best_cost;
    best = select(better, index, best);
    best_cost = select(better, cost, best_cost);
  }
  return best;
}
