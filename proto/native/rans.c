/* Interleaved rANS, 32 lanes over one stream of 16-bit words; see codecs/rans.py for the layout.
 *
 * A tile is symbols u8 (tokens * channels); a lane codes two channels of each group of 64. With
 * enough registers two tiles are coded together, which hides the latency of the gathers.
 */
#include "loops.h"

enum { CODER_LANES = 32, GROUP = 64, SLOTS = 4096, MIN_STATE = 1 << 16, MAX_SYMBOLS = 256 };

/* One batch: rows has the start of each channel's row in the table, in lane order. */
typedef struct {
    uint8_t *symbols;
    const any32 *rows;
    const void *table;
    any32 *states;
    int64_t size, channels;
} batch;

/* A tile's position in its words, and the last one that has the words of a whole group ahead. */
typedef struct {
    int64_t at, limit;
} place;

static any32 *rows_of(const uint8_t *models, int64_t tiles, int64_t channels, uint32_t entries)
{
    any32 *rows = malloc((size_t)(tiles * channels + 1) * sizeof *rows);
    if (rows == NULL)
        return NULL;
    for (int64_t first = 0; first < tiles * channels; first += GROUP)
        for (int lane = 0; lane < CODER_LANES; lane++)
            for (int parity = 0; parity < 2; parity++)
                rows[first + parity * CODER_LANES + lane] =
                    models[first + 2 * lane + parity] * entries;
    return rows;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

enum { TOGETHER = 2, HALF = 16 };

INLINE __m512i decode_step(const batch *b, const any16 *words, anyi64 *at, __m512i *state,
                           const any32 *row)
{
    const __m512i least = _mm512_set1_epi32(MIN_STATE);
    __m512i x = *state;
    __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(SLOTS - 1));
    __m512i index = _mm512_add_epi32(slot, _mm512_loadu_si512(row));
    __m512i entry = _mm512_i32gather_epi32(index, b->table, 4);
    __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xFFF));
    x = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, 12));
    x = _mm512_add_epi32(x, _mm512_srli_epi32(entry, 20));
    __mmask16 needs = _mm512_cmplt_epu32_mask(x, least);
    __m256i next = _mm256_loadu_si256((const __m256i *)(words + *at));
    __m512i fresh = _mm512_maskz_expand_epi32(needs, _mm512_cvtepu16_epi32(next));
    *state = _mm512_mask_or_epi32(x, needs, _mm512_slli_epi32(x, 16), fresh);
    *at += __builtin_popcount(needs);
    return entry;
}

INLINE void decode_group(const batch *b, const any16 *words, anyi64 *at, __m512i *states,
                         int64_t tile, int64_t base, int64_t column)
{
    const any32 *rows = b->rows + tile * b->channels + column;
    uint8_t *symbols = b->symbols + tile * b->size + base;
    __m512i found[2][2];
    for (int parity = 0; parity < 2; parity++)
        for (int half = 0; half < 2; half++)
            found[half][parity] = decode_step(b, words, at, states + half,
                                              rows + CODER_LANES * parity + HALF * half);
    const __m512i byte = _mm512_set1_epi32(0xFF);
    for (int half = 0; half < 2; half++) {
        __m512i even = _mm512_and_si512(found[half][0], byte);
        __m512i odd = _mm512_slli_epi32(_mm512_and_si512(found[half][1], byte), 8);
        __m256i pairs = _mm512_cvtepi32_epi16(_mm512_or_si512(even, odd));
        _mm256_storeu_si256((__m256i *)(symbols + 2 * HALF * half), pairs);
    }
}

/* Decodes *tiles* tiles from *first* on while all are within their limit; returns the next base. */
INLINE int64_t decode_some(const batch *b, const any16 *words, place *places, int64_t first,
                           int tiles, int64_t base)
{
    __m512i states[TOGETHER][2];
    int64_t at[TOGETHER];
    for (int k = 0; k < tiles; k++) {
        at[k] = places[first + k].at;
        for (int half = 0; half < 2; half++)
            states[k][half] =
                _mm512_loadu_si512(b->states + (first + k) * CODER_LANES + HALF * half);
    }
    int64_t column = base % b->channels;
    while (base < b->size) {
        int is_safe = 1;
        for (int k = 0; k < tiles; k++)
            is_safe &= at[k] <= places[first + k].limit;
        if (!is_safe)
            break;
        for (int k = 0; k < tiles; k++)
            decode_group(b, words, at + k, states[k], first + k, base, column);
        base += GROUP;
        column += GROUP;
        if (column == b->channels)
            column = 0;
    }
    for (int k = 0; k < tiles; k++) {
        places[first + k].at = at[k];
        for (int half = 0; half < 2; half++)
            _mm512_storeu_si512(b->states + (first + k) * CODER_LANES + HALF * half,
                                states[k][half]);
    }
    return base;
}

INLINE void encode_step(const batch *b, any16 *words, anyi64 *at, __m512i *state,
                        __m512i index, __mmask16 *missing)
{
    __m512i low = _mm512_i32gather_epi64(_mm512_castsi512_si256(index), b->table, 8);
    __m512i high = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(index, 1), b->table, 8);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                           30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                          31);
    __m512i entry = _mm512_permutex2var_epi32(low, even, high);
    __m512i reciprocal = _mm512_permutex2var_epi32(low, odd, high);
    const __m512i twelve = _mm512_set1_epi32(0xFFF);
    __m512i frequency = _mm512_and_si512(entry, twelve);
    __m512i start = _mm512_and_si512(_mm512_srli_epi32(entry, 12), twelve);
    *missing |= _mm512_testn_epi32_mask(frequency, frequency);
    __m512i x = *state;
    __mmask16 full = _mm512_cmpge_epu32_mask(x, _mm512_slli_epi32(frequency, 20));
    /* Sixteen words are written and the last *count* kept; 32 free words precede the first. */
    int count = __builtin_popcount(full);
    __m512i dense = _mm512_maskz_compress_epi32(full, x);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    dense = _mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(count)), dense);
    _mm256_storeu_si256((__m256i *)(words + *at - HALF), _mm512_cvtepi32_epi16(dense));
    *at -= count;
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    __m512i even_products = _mm512_srli_epi64(_mm512_mul_epu32(x, reciprocal), 32);
    __m512i odd_products = _mm512_mul_epu32(_mm512_srli_epi64(x, 32),
                                            _mm512_srli_epi64(reciprocal, 32));
    __m512i quotient = _mm512_mask_blend_epi32(0xAAAA, even_products, odd_products);
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, frequency));
    __mmask16 is_short = _mm512_cmpge_epu32_mask(rest, frequency); /* the quotient, by one */
    __m512i rounds = _mm512_sub_epi32(_mm512_set1_epi32(SLOTS), frequency);
    x = _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(quotient, rounds));
    *state = _mm512_mask_add_epi32(x, is_short, x, rounds);
}

INLINE void encode_group(const batch *b, any16 *words, anyi64 *at, __m512i *states,
                         int64_t tile, int64_t base, int64_t column, __mmask16 *missing)
{
    const any32 *rows = b->rows + tile * b->channels + column;
    const uint8_t *symbols = b->symbols + tile * b->size + base;
    for (int parity = 1; parity >= 0; parity--)
        for (int half = 1; half >= 0; half--) {
            __m256i two = _mm256_loadu_si256((const __m256i *)(symbols + 2 * HALF * half));
            __m512i pair = _mm512_cvtepu16_epi32(two);
            __m512i symbol = parity ? _mm512_srli_epi32(pair, 8)
                                    : _mm512_and_si512(pair, _mm512_set1_epi32(0xFF));
            const any32 *row = rows + CODER_LANES * parity + HALF * half;
            __m512i index = _mm512_add_epi32(symbol, _mm512_loadu_si512(row));
            encode_step(b, words, at, states + half, index, missing);
        }
}

/* Encodes *tiles* tiles backwards; returns whether each symbol had a slot. */
INLINE int encode_some(const batch *b, any16 *words, place *places, int64_t first, int tiles)
{
    __m512i states[TOGETHER][2];
    int64_t at[TOGETHER];
    __mmask16 missing = 0;
    for (int k = 0; k < tiles; k++) {
        at[k] = places[first + k].at;
        for (int half = 0; half < 2; half++)
            states[k][half] =
                _mm512_loadu_si512(b->states + (first + k) * CODER_LANES + HALF * half);
    }
    int64_t column = b->channels;
    for (int64_t base = b->size - GROUP; base >= 0; base -= GROUP) {
        column -= GROUP;
        for (int k = 0; k < tiles; k++)
            encode_group(b, words, at + k, states[k], first + k, base, column, &missing);
        if (column == 0)
            column = b->channels;
    }
    for (int k = 0; k < tiles; k++) {
        places[first + k].at = at[k];
        for (int half = 0; half < 2; half++)
            _mm512_storeu_si512(b->states + (first + k) * CODER_LANES + HALF * half,
                                states[k][half]);
    }
    return missing == 0;
}

#else

enum { TOGETHER = 1 };

INLINE int64_t decode_some(const batch *b, const any16 *words, place *places, int64_t first,
                           int tiles, int64_t base)
{
    (void)tiles;
    const any32 *restrict table = b->table, *restrict rows = b->rows + first * b->channels;
    const any16 *restrict next = words;
    uint8_t *restrict symbols = b->symbols + first * b->size;
    uint32_t states[CODER_LANES];
    memcpy(states, b->states + first * CODER_LANES, sizeof states);
    int64_t at = places[first].at, column = base % b->channels;
    while (base < b->size && at <= places[first].limit) {
        for (int parity = 0; parity < 2; parity++)
            for (int lane = 0; lane < CODER_LANES; lane++) {
                uint32_t x = states[lane];
                uint32_t entry = table[rows[column + parity * CODER_LANES + lane]
                                       + (x & (SLOTS - 1))];
                symbols[base + parity + 2 * lane] = (uint8_t)entry;
                x = ((entry >> 8) & 0xFFF) * (x >> 12) + (entry >> 20);
                uint32_t mask = 0u - (uint32_t)(x < MIN_STATE);
                states[lane] = x << (16 & mask) | (next[at] & mask);
                at -= (int32_t)mask;
            }
        base += GROUP;
        column += GROUP;
        if (column == b->channels)
            column = 0;
    }
    places[first].at = at;
    memcpy(b->states + first * CODER_LANES, states, sizeof states);
    return base;
}

INLINE int encode_some(const batch *b, any16 *words, place *places, int64_t first, int tiles)
{
    (void)tiles;
    const any64 *restrict table = b->table;
    const any32 *restrict rows = b->rows + first * b->channels;
    const uint8_t *restrict symbols = b->symbols + first * b->size;
    uint32_t states[CODER_LANES];
    memcpy(states, b->states + first * CODER_LANES, sizeof states);
    int64_t at = places[first].at, column = b->channels;
    int is_coded = 1;
    for (int64_t base = b->size - GROUP; base >= 0; base -= GROUP) {
        column -= GROUP;
        for (int parity = 1; parity >= 0; parity--)
            for (int lane = CODER_LANES - 1; lane >= 0; lane--) {
                uint64_t entry = table[rows[column + parity * CODER_LANES + lane]
                                       + (uint64_t)symbols[base + parity + 2 * lane]];
                uint64_t frequency = entry & 0xFFF, x = states[lane];
                is_coded &= frequency > 0;
                uint64_t full = x >= frequency << 20;
                words[at - 1] = (uint16_t)x; /* kept only if full */
                at -= (int64_t)full;
                x >>= full << 4;
                uint64_t quotient = (x * (entry >> 32)) >> 32;
                uint64_t one_more = x - quotient * frequency >= frequency;
                x += (quotient + one_more) * (SLOTS - frequency) + ((entry >> 12) & 0xFFF);
                states[lane] = (uint32_t)x;
            }
        if (column == 0)
            column = b->channels;
    }
    places[first].at = at;
    memcpy(b->states + first * CODER_LANES, states, sizeof states);
    return is_coded;
}

#endif

/* Encodes symbols u8 (tiles, size) by models u8 (tiles, channels) and table u64 (models, 256).
 * Fills states u32 (tiles, 32), which begin at 2^16, counts u32 (tiles,) and words, at most one
 * per symbol. Returns the number of words, or -1 for a symbol of frequency 0. */
int64_t LOOP(rans_encode)(uint8_t *symbols, const uint8_t *models, const any64 *table,
                          any32 *states, any32 *counts, any16 *words, int64_t tiles,
                          int64_t size, int64_t channels)
{
    int64_t capacity = size + CODER_LANES, end = 0;
    any32 *rows = rows_of(models, tiles, channels, MAX_SYMBOLS);
    any16 *scratch = malloc((size_t)(TOGETHER * capacity) * sizeof *scratch);
    place *places = malloc((size_t)(tiles + 1) * sizeof *places);
    batch b = {symbols, rows, table, states, size, channels};
    if (rows == NULL || scratch == NULL || places == NULL)
        end = NO_MEMORY;
    for (int64_t first = 0; end >= 0 && first < tiles; first += TOGETHER) {
        int64_t stop = first + TOGETHER < tiles ? first + TOGETHER : tiles;
        int is_coded = 1;
        for (int64_t tile = first; tile < stop; tile++)
            places[tile].at = (tile - first + 1) * capacity;
        if (TOGETHER > 1 && stop - first == TOGETHER)
            is_coded = encode_some(&b, scratch, places, first, TOGETHER);
        else
            for (int64_t tile = first; tile < stop; tile++)
                is_coded &= encode_some(&b, scratch, places, tile, 1);
        if (!is_coded) {
            end = -1;
            break;
        }
        for (int64_t tile = first; tile < stop; tile++) {
            int64_t count = (tile - first + 1) * capacity - places[tile].at;
            memcpy(words + end, scratch + places[tile].at, (size_t)count * sizeof *words);
            counts[tile] = (uint32_t)count;
            end += count;
        }
    }
    free(rows);
    free(scratch);
    free(places);
    return end;
}

/* Decodes the rest of a tile from its last words, zero-padded; returns whether it ends as begun. */
static int decode_end(const batch *b, const any16 *words, place *places, int64_t tile,
                      int64_t base)
{
    place *p = places + tile;
    int64_t left = p->limit + GROUP - p->at;
    if (base < b->size) {
        uint16_t padded[3 * GROUP] = {0};
        if (left < 0 || left > GROUP)
            return 0;
        if (left) /* there may be no words at all */
            memcpy(padded, words + p->at, (size_t)left * sizeof *words);
        p->at = 0;
        p->limit = 2 * GROUP;
        base = decode_some(b, padded, places, tile, 1, base);
        left -= p->at;
    }
    uint32_t off = 0;
    for (int lane = 0; lane < CODER_LANES; lane++)
        off |= b->states[tile * CODER_LANES + lane] ^ MIN_STATE;
    return left == 0 && off == 0 && base == b->size;
}

/* Decodes words, counts u32 (tiles,) of them per tile, into out u8 (tiles, size) by models u8
 * (tiles, channels) and table u32 (models, 4096). Overwrites states. Returns whether each lane
 * ended at 2^16 with all words of its tile used. */
int64_t LOOP(rans_decode)(any32 *states, const any32 *counts, const any16 *words,
                          const uint8_t *models, const any32 *table, uint8_t *out,
                          int64_t tiles, int64_t size, int64_t channels)
{
    any32 *rows = rows_of(models, tiles, channels, SLOTS);
    place *places = malloc((size_t)(tiles + 1) * sizeof *places);
    batch b = {out, rows, table, states, size, channels};
    int64_t is_right = rows == NULL || places == NULL ? NO_MEMORY : 1, end = 0;
    for (int64_t tile = 0; is_right > 0 && tile < tiles; tile++) {
        places[tile].at = end;
        end += counts[tile];
        places[tile].limit = end - GROUP;
    }
    for (int64_t first = 0; is_right > 0 && first < tiles; first += TOGETHER) {
        int64_t stop = first + TOGETHER < tiles ? first + TOGETHER : tiles, base = 0;
        if (TOGETHER > 1 && stop - first == TOGETHER)
            base = decode_some(&b, words, places, first, TOGETHER, base);
        for (int64_t tile = first; is_right > 0 && tile < stop; tile++) {
            int64_t behind = decode_some(&b, words, places, tile, 1, base);
            is_right = decode_end(&b, words, places, tile, behind);
        }
    }
    free(rows);
    free(places);
    return is_right;
}
