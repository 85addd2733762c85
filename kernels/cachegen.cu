// CacheGen (Liu et al., SIGCOMM 2024, arXiv:2310.07240) as LMCache quantizes it, with rANS in place of its coder.
//
// A token's channels are scaled by the largest magnitude among them, its entry of the *max tensor*, and rounded to 2M + 1
// symbols. Symbols beyond the coder's 32 are split: a coded part, and `raw_bits` low bits stored as they are. Tokens that must
// not change, the attention sink and those with NaN or Inf, are kept exact: the first one rides in the start states of the
// streams (16-bit types), the others lie in `rows`.
#include "cachegen.h"
#include "strips.h"

struct CacheGenBlock {
  u64 token_words;  // u32: the token section
  u64 tables;       // u32 [groups][12]: the lanes' table indexes, one word a bit
  u64 states;       // u32 [groups][STATE_WORDS]
  u64 words;        // u16: the streams
  u64 raw;          // u32 [coded tokens][groups][raw_bits]
  u64 rows;         // [exact tokens][channels]
  u32 token_word_count, word_count, raw_rows, row_count;
  u32 levels;       // M
  u32 raw_bits, family, symbols;
};

// ------------------------------------------------------------------------------------------- encoding

// The scales of 32 tokens from their largest magnitudes.
FN void store_scales(TokenScale* scales, vf32 tops, float levels) {
  auto store = [](float* first, vf32 v) { store_strided((u32*)first, as_bits(v), sizeof(TokenScale) / sizeof(float), TILE); };
  vm32 zero = tops == splatf(0.f);
  store(&scales->factor, select(zero, tops, levels / tops));
  store(&scales->offset, select(zero, tops, splatf(levels)));
  store(&scales->step, tops / levels);
  store(&scales->top, tops);
}

// The largest magnitudes of N rows in each lane, `running` for the strips so far.
template <bool WHOLE, u32 N, class E>
FN void note_tops(const Strip<E>& strip, u32 token, bool more, typename E::raw* running) {
  const typename E::vraw unsign = E::narrowed(splat(E::ABS));
  typename Strip<E>::Loaded rows[N];
  if constexpr (WHOLE)
    strip.load(token, rows);
  else
    rows[0] = strip.template load<false>(token);
  for (u32 r = 0; r < N; ++r, running += LANES) {
    auto numbers = strip.values(rows[r]);
    typename E::vraw top = numbers.v[0] & unsign;
    for (int i = 1; i < PACK; ++i) top = maximum(top, numbers.v[i] & unsign);
    if (more) top = maximum(top, load_lanes(running));
    store_lanes(running, top);
  }
}

// One warp a tile: the largest magnitude of every token, from which follow the tile's part of the token section (written to
// its slot of TILE_WORDS, `count` words), the tokens' scales, and the mask of exact tokens: the `sinks` oldest, those with NaN
// or Inf, and those too small to divide by.
template <class E>
FN void cachegen_tile(const Plane& plane, u32 tile, u32 sinks, u32 levels, typename E::raw* running, u32* slot, u32* count,
                      TokenScale* scales, u32* exact) {
  u32 start = tile * TILE, tokens = plane.tokens - start < TILE ? plane.tokens - start : TILE;
  for (u32 s = 0; s * STRIP < plane.heads * plane.head_dim; ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
    u32 t = 0;
    if (strip.whole)
      for (; t + ROWS <= tokens; t += ROWS) note_tops<true, ROWS>(strip, start + t, s != 0, running + t * LANES);
    for (; t < tokens; ++t) note_tops<false, 1>(strip, start + t, s != 0, running + t * LANES);
  }
  vu32 entries = splat(0);
  for (u32 t = 0; t < tokens; ++t) entries = with_lane(entries, t, largest(load_lanes(running + t * LANES)));

  vu32 token = lane_ids() + start;
  u32 present = tokens == TILE ? ~0u : (1u << tokens) - 1u;
  u32 unfit = ballot(token < sinks) | ballot(entries >= (u32)E::INFINITE) |
              (ballot(entries < (u32)E::TINY) & ballot(entries != 0u));
  u32 mask = unfit & present, coded = present & ~mask;
  vu32 is_coded = bit_of_lane(coded);
  u32 base = coded ? smallest(select(is_coded != 0u, entries, splat(~0u))) : 0;
  vu32 above = select(is_coded != 0u, entries - base, splat(0));
  u32 width = bit_width(largest(above));

  u32 flag = mask ? EXACT_FLAG : 0;
  if (TileHead<E>::WORDS == 1) {
    store_uniform(slot, flag | width << 16 | base);
  } else {
    store_uniform(slot, flag | width << 16);
    store_uniform(slot + 1, base);
  }
  u32 used = TileHead<E>::WORDS;
  if (mask) store_uniform(slot + used++, mask);
  store_bits(slot + used, above, width);
  store_uniform(count, used + width);
  store_uniform(exact, mask);
  store_scales(scales, E::to_float(E::narrowed(entries)), (float)levels);
}

#define CACHEGEN_TILES(suffix, E)                                                                                      \
  KERNEL(cachegen_tiles_##suffix, const Plane* planes, const u32* sinks, const u32* levels, u32* slots, u32* counts,   \
         TokenScale* scales, u32* exact, u32 tiles) {                                                                  \
    WARP_SHARED(E::raw, running, TILE* LANES);                                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 block = warp / tiles, tile = warp % tiles;                                                                   \
      if (tile * TILE < planes[block].tokens)                                                                          \
        cachegen_tile<E>(planes[block], tile, sinks[block], levels[block], running, slots + (u64)warp * TILE_WORDS,    \
                         counts + warp, scales + (u64)warp * TILE, exact + warp);                                      \
      else                                                                                                             \
        store_uniform(counts + warp, 0u), store_uniform(exact + warp, 0u);                                             \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_TILES)

constexpr u32 SAMPLE_ROWS = 512;  // tokens whose symbols are counted to choose tables

// What the groups of a block encode with; each group has its own part of symbols, words, histogram and tables.
struct CacheGenScratch {
  const TokenScale* scales;  // of the block's tokens
  const u32* exact;          // of its tiles
  u8* symbols;               // [tokens][32]
  u64 symbol_capacity;       // of a group
  u16* words_end;            // the streams are written backwards from here
  u32 word_capacity;
  RansSymbols* coding;       // of each group
  float* errors;             // squared error, energy, largest error
};

// Quantizes a group, token after token: symbols, raw bits, histogram, errors and rider. RAW: whether there may be raw bits.
template <class E, bool WHOLE, bool RAW>
struct CacheGenQuantizer {
  typedef typename E::vraw vraw;
  enum : u32 { AHEAD = 16 };  // how much sooner a token is asked for than it is loaded
  Column<E> column;         // at the next token
  const TokenScale* scale;  // of it
  u8* symbols;              // of the next row
  u32* raw;                 // of the next row
  u16* histogram;
  u32 raw_bits, raw_stride;
  u32 rows, stride, next_counted;  // rows coded, of which each `stride`-th is counted
  float middle;
  vu32 rider;
  bool riding;
  GroupLoss loss;

  static METHOD CacheGenQuantizer make(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>& column,
                                       const CacheGenScratch& scratch) {
    u32 groups = (plane.heads * plane.head_dim + LANES - 1) / LANES;
    u32* raw = (u32*)block.raw + group * block.raw_bits;
    CacheGenQuantizer q = {column, scratch.scales, scratch.symbols, raw, scratch.coding->counts};
    q.raw_bits = block.raw_bits;
    q.raw_stride = groups * block.raw_bits;
    q.rows = q.next_counted = 0;
    q.stride = (plane.tokens + SAMPLE_ROWS - 1) / SAMPLE_ROWS;
    q.middle = raised_middle(block.levels);
    q.rider = splat(0);
    q.riding = false;
    q.loss = GroupLoss::zero();
    return q;
  }
  METHOD void run(u32 tokens, const u32* exact) {
    for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
    for (u32 start = 0; start < tokens; start += TILE) {
      u32 mask = exact[start / TILE], count = tokens - start < TILE ? tokens - start : TILE;
      for (u32 i = 0; i < count;) {
        if (mask >> i & 1)
          keep(), i += 1;
        else if (ROWS == 1 || (i + ROWS <= count && !(mask >> i & ((1u << ROWS) - 1u))))
          code<ROWS>(), i += ROWS;
        else
          code<1>(), i += 1;
      }
    }
    warp_sync();
  }
  METHOD vraw next() {
    vraw bits = column.template load<WHOLE>(0);
    column.ask_for(AHEAD);
    column.base += column.token_stride;
    return bits;
  }
  METHOD void keep() {
    vraw bits = next();
    if (!riding && sizeof(typename E::raw) == 2) rider = widen(bits);
    riding = true;
    loss.add_kept(E::to_float(bits));
    ++scale;
  }
  template <u32 N>
  METHOD void code() {
    vraw bits[N];
    for (u32 r = 0; r < N; ++r) bits[r] = next();
    for (u32 r = 0; r < N; ++r) code(E::number(bits[r]), scale[r]);
    scale += N;
  }
  METHOD void code(vf32 x, const TokenScale& scale) {
    static_assert((ROUNDER_BITS & 0xffffu) == 0, "a symbol has up to 16 bits");
    vf32 raised = scale.raise(x);
    loss.add(x, scale.template restored<E>(raised, middle) - x);
    vu32 symbol = as_bits(raised);
    vu16 coded = narrow(WHOLE ? symbol : select(column.idle(), splat(0), symbol)) >> (u16)(RAW ? raw_bits : 0);
    store_u8(symbols, coded);
    symbols += LANES;
    if (RAW && raw_bits) {
#pragma unroll 1
      for (u32 b = 0; b < raw_bits; ++b) store_bits(raw + b, symbol >> b, 1);
      raw += raw_stride;
    }
    if (rows++ != next_counted) return;
    next_counted += stride;
    count_row_u16(histogram, coded);
  }
  METHOD u32 counted() const { return (rows + stride - 1) / stride; }
};

// A row of each of `FLIGHTS` groups.
template <int FLIGHTS>
struct CacheGenSymbols {
  vu16 of[FLIGHTS];
};

// `FLIGHTS` neighbouring groups of one block: quantize, choose tables, code side by side with tables of N symbols.
template <class E, int N, int FLIGHTS, bool WHOLE>
FN void cachegen_encode_groups(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>* columns,
                               const CacheGenScratch& scratch, const u16* families, const u16* costs,
                               const u32* variances) {
  u64 family = (u64)block.family * TABLES;
  RansEncoder encoders[FLIGHTS];
  RansSymbols::Table<N> tables[FLIGHTS];
  CacheGenScratch parts[FLIGHTS];
  u32 rows = 0;
  for (int f = 0; f < FLIGHTS; ++f) {
    CacheGenScratch& part = parts[f] = scratch;
    part.symbols += f * scratch.symbol_capacity;
    part.words_end += f * scratch.word_capacity;
    part.coding += f;
    part.errors += f * 3;
    // More than half of the coder's symbols are in use where there are raw bits.
    auto quantizer = CacheGenQuantizer<E, WHOLE, N == MAX_SYMBOLS>::make(plane, block, group + f, columns[f], part);
    quantizer.run(plane.tokens, part.exact);
    quantizer.loss.store(part.errors);
    rows = quantizer.rows;
    vu32 table = choose_tables(part.coding->counts, quantizer.counted(), block.symbols, costs + family * MAX_SYMBOLS,
                               variances);
    tables[f] = part.coding->template load<N>(families + family * TABLE_STRIDE, table, columns[f].idle());
    store_bits((u32*)block.tables + (u64)(group + f) * TABLE_BITS, table, TABLE_BITS);
    encoders[f] = RansEncoder::make(part.words_end, quantizer.rider);
  }
  auto load = [&](u64 row) {
    CacheGenSymbols<FLIGHTS> symbols;
    for (int f = 0; f < FLIGHTS; ++f) symbols.of[f] = load_u8(parts[f].symbols + row * LANES);
    return symbols;
  };
  in_turn<BACKWARDS, 4>(rows, load, [&](u32, const CacheGenSymbols<FLIGHTS>& symbols) {
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) encoders[f].put(tables[f].find(widen(symbols.of[f])));
  });
  for (int f = 0; f < FLIGHTS; ++f) {
    u32* states = (u32*)block.states + (u64)(group + f) * STATE_WORDS;
    store_uniform(states, (u32)(parts[f].words_end - encoders[f].position));
    store_u32(states + 1, encoders[f].x);
  }
}

template <class E, int FLIGHTS>
FN void cachegen_encode_any(const Plane& plane, const CacheGenBlock& block, u32 group, const CacheGenScratch& scratch,
                            const u16* families, const u16* costs, const u32* variances) {
  Column<E> columns[FLIGHTS];
  bool whole = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    columns[f] = Column<E>::make(plane, group + f);
    whole = whole && columns[f].whole;
  }
#define ENCODE(N, WHOLE) \
  cachegen_encode_groups<E, N, FLIGHTS, WHOLE>(plane, block, group, columns, scratch, families, costs, variances)
  if (whole && block.symbols <= 16)
    ENCODE(16, true);
  else if (whole)
    ENCODE(32, true);
  else if (block.symbols <= 16)
    ENCODE(16, false);
  else
    ENCODE(32, false);
#undef ENCODE
}

#define CACHEGEN_ENCODE(suffix, E)                                                                                     \
  KERNEL(cachegen_encode_##suffix, const Plane* planes, const CacheGenBlock* blocks, const TokenScale* scales,         \
         const u32* exact, const u16* families, const u16* costs, const u32* variances, u8* symbols, u16* words,       \
         float* errors, u32 groups, u32 tiles, u32 word_capacity) {                                                    \
    WARP_SHARED(RansSymbols, coding, FLIGHT);                                                                          \
    FOR_EACH_FLIGHT(warp, flight, groups) {                                                                            \
      u32 index = warp / groups, group = warp % groups;                                                                \
      const Plane plane = planes[index];                                                                               \
      const CacheGenBlock block = blocks[index];                                                                       \
      u64 symbol_capacity = (u64)tiles * TILE * LANES;                                                                 \
      CacheGenScratch scratch = {scales + (u64)index * tiles * TILE,                                                   \
                                 exact + (u64)index * tiles,                                                           \
                                 symbols + (u64)warp * symbol_capacity,                                                \
                                 symbol_capacity,                                                                      \
                                 words + ((u64)warp + 1) * word_capacity,                                              \
                                 word_capacity,                                                                        \
                                 coding,                                                                               \
                                 errors + (u64)warp * 3};                                                              \
      if (flight == FLIGHT)                                                                                            \
        cachegen_encode_any<E, FLIGHT>(plane, block, group, scratch, families, costs, variances);                      \
      else                                                                                                             \
        cachegen_encode_any<E, 1>(plane, block, group, scratch, families, costs, variances);                           \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_ENCODE)

// ------------------------------------------------------------------------------------------- decoding

// `FLIGHTS` neighbouring groups of one block at once.
template <class E, int N, int FLIGHTS, bool WHOLE>
FN u32 cachegen_decode_groups(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>* columns,
                              u16* cumulative, const u16* families) {
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  const u16* family = families + (u64)block.family * TABLES * TABLE_STRIDE;
  RansDecoder decoders[FLIGHTS];
  bool fits = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fit;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fit);
    fits = fits && fit;
    vu32 table = load_bits((const u32*)block.tables + (u64)(group + f) * TABLE_BITS, TABLE_BITS);
    load_tables<N>(cumulative + f * (N + 1) * LANES, family, table, columns[f].idle());
  }
  if (!fits) return BAD_STREAM;

  const u32* token_words = (const u32*)block.token_words;
  // Out of the block once: the compiler has to suppose that decoded values overwrite it.
  u32 middle = block.levels, raw_bits = block.raw_bits;
  Steps steps = Steps::make((float)middle);
  u32 at = 0, coded_rows = 0, exact_rows = 0, rider = ~0u;
  for (u32 start = 0; start < plane.tokens; start += TILE) {
    u32 stop = start + TILE < plane.tokens ? start + TILE : plane.tokens;
    Tile tile = read_tile<E>(token_words, block.token_word_count, at);
    if (!tile.fits) return BAD_TOKENS;
    u32 mask = tile.exact;
    vf32 maxima = E::to_float(E::narrowed(tile.entries));

    for (u32 t = start; t < stop; ++t) {
      if (mask >> (t - start) & 1) {
        if (rider == ~0u && sizeof(typename E::raw) == 2) {
          rider = t;
          continue;
        }
        if (exact_rows >= block.row_count) return BAD_ROWS;
        const typename E::raw* row = (const typename E::raw*)block.rows + (u64)exact_rows++ * channels;
        for (int f = 0; f < FLIGHTS; ++f)
          columns[f].template store<WHOLE>(t, load_some(row + (u64)(group + f) * LANES, columns[f].active));
        continue;
      }
      float top = lane_value(maxima, t - start);
#pragma clang loop unroll(full)
      for (int f = 0; f < FLIGHTS; ++f) {
        vu32 symbol = widen(decoders[f].template next<N>(cumulative + f * (N + 1) * LANES));
        if (raw_bits) {
          if (coded_rows >= block.raw_rows) return BAD_RAW;
          const u32* raw = (const u32*)block.raw + ((u64)coded_rows * groups + group + f) * raw_bits;
          symbol = symbol << raw_bits | load_bits(raw, raw_bits);
        }
        columns[f].template store<WHOLE>(t, E::from_number(steps.number(symbol - middle, top)));
      }
      ++coded_rows;
    }
  }
  if (at != block.token_word_count) return BAD_TOKENS;
  if (exact_rows != block.row_count) return BAD_ROWS;
  if (raw_bits && coded_rows != block.raw_rows) return BAD_RAW;
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    if (rider != ~0u) columns[f].template store<WHOLE>(rider, E::narrowed(widen(decoders[f].rider())));
  }
  return OK;
}

template <class E, int FLIGHTS>
FN u32 cachegen_decode_any(const Plane& plane, const CacheGenBlock& block, u32 group, u16* cumulative,
                           const u16* families) {
  Column<E> columns[FLIGHTS];
  bool whole = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    columns[f] = Column<E>::make(plane, group + f);
    whole = whole && columns[f].whole;
  }
  if (whole) {
    if (block.symbols <= 16)
      return cachegen_decode_groups<E, 16, FLIGHTS, true>(plane, block, group, columns, cumulative, families);
    return cachegen_decode_groups<E, 32, FLIGHTS, true>(plane, block, group, columns, cumulative, families);
  }
  if (block.symbols <= 16)
    return cachegen_decode_groups<E, 16, FLIGHTS, false>(plane, block, group, columns, cumulative, families);
  return cachegen_decode_groups<E, 32, FLIGHTS, false>(plane, block, group, columns, cumulative, families);
}

#define CACHEGEN_DECODE(suffix, E)                                                                                     \
  KERNEL(cachegen_decode_##suffix, const Plane* planes, const CacheGenBlock* blocks, const u16* families, u32* status, \
         u32 groups) {                                                                                                 \
    WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);                                                    \
    FOR_EACH_FLIGHT(warp, flight, groups) {                                                                            \
      u32 block = warp / groups, group = warp % groups, found;                                                         \
      if (flight == FLIGHT)                                                                                            \
        found = cachegen_decode_any<E, FLIGHT>(planes[block], blocks[block], group, cumulative, families);             \
      else                                                                                                             \
        found = cachegen_decode_any<E, 1>(planes[block], blocks[block], group, cumulative, families);                  \
      for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);                                        \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_DECODE)
