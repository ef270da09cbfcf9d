/* Copy and read with XXH3 in one pass: each word is loaded once, stored and summed.
 *
 * XXH3 (64 bits, default secret, no seed) as in its specification, for inputs of whole units of
 * 1024 bytes: a unit is a block of sixteen stripes.
 */
#include "loops.h"

#include <unistd.h>

enum { UNIT = 1024, STRIPE = 64, STRIPES = UNIT / STRIPE, STEP_UNITS = 256 };
enum { SECRET_BYTES = 192 };

#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u
#define AVALANCHE 0x165667919E3779F9u

static const uint64_t STARTS[8] = {
    0xC2B2AE3Du, 0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
    0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u, 0x9E3779B1u,
};

static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
    0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
    0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
    0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65,
    0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef,
    0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc,
    0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8,
    0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3,
    0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda,
    0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47,
    0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,
    0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#if defined(__AVX512F__)
enum { LANES = 8 };
#elif defined(__AVX2__)
enum { LANES = 4 };
#else
enum { LANES = 2 };
#endif

/* A register of LANES words, and its operations. */
typedef uint64_t lanes __attribute__((vector_size(8 * LANES)));
INLINE lanes get(const void *at)
{
    lanes value;
    memcpy(&value, at, sizeof value);
    return value;
}
INLINE void put(void *at, lanes value) { memcpy(at, &value, sizeof value); }

/* product: of the low halves of words. crossed: neighbouring words swapped. put_past: stores past
 * the caches (non-temporal), at 16-byte boundaries. */
#if defined(__AVX512F__)
INLINE lanes product(lanes a, lanes b) { return (lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
INLINE lanes crossed(lanes a) { return (lanes)_mm512_shuffle_epi32((__m512i)a, (_MM_PERM_ENUM)0x4E); }
INLINE void put_past(uint8_t *at, lanes all)
{
    __m512i value = (__m512i)all;
    if (((uintptr_t)at & 63) == 0) {
        _mm512_stream_si512((__m512i *)at, value);
        return;
    }
    _mm_stream_si128((__m128i *)at, _mm512_castsi512_si128(value));
    _mm_stream_si128((__m128i *)(at + 16), _mm512_extracti32x4_epi32(value, 1));
    _mm_stream_si128((__m128i *)(at + 32), _mm512_extracti32x4_epi32(value, 2));
    _mm_stream_si128((__m128i *)(at + 48), _mm512_extracti32x4_epi32(value, 3));
}
#elif defined(__AVX2__)
INLINE lanes product(lanes a, lanes b) { return (lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
INLINE lanes crossed(lanes a) { return (lanes)_mm256_shuffle_epi32((__m256i)a, 0x4E); }
INLINE void put_past(uint8_t *at, lanes value)
{
    _mm_stream_si128((__m128i *)at, _mm256_castsi256_si128((__m256i)value));
    _mm_stream_si128((__m128i *)(at + 16), _mm256_extracti128_si256((__m256i)value, 1));
}
#elif defined(__SSE2__)
INLINE lanes product(lanes a, lanes b) { return (lanes)_mm_mul_epu32((__m128i)a, (__m128i)b); }
INLINE lanes crossed(lanes a) { return (lanes)_mm_shuffle_epi32((__m128i)a, 0x4E); }
INLINE void put_past(uint8_t *at, lanes value) { _mm_stream_si128((__m128i *)at, (__m128i)value); }
#else
INLINE lanes product(lanes a, lanes b) { return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF); }
INLINE lanes crossed(lanes a) { return (lanes){a[1], a[0]}; }
INLINE void put_past(uint8_t *at, lanes value) { put(at, value); }
#endif

/* Makes the value opaque to the compiler, so that it cannot load it again. */
#if defined(__AVX512F__)
#define HOLD(value) __asm__ volatile("" : "+v"(value))
#elif defined(__SSE2__)
#define HOLD(value) __asm__ volatile("" : "+x"(value))
#elif defined(__aarch64__)
#define HOLD(value) __asm__ volatile("" : "+w"(value))
#else
#define HOLD(value) __asm__ volatile("" : "+m"(value))
#endif

enum { REGISTERS = 8 / LANES };

typedef struct {
    lanes each[REGISTERS];
} sums;

enum store { NOWHERE, NEAR, PAST };

INLINE void begin(sums *s)
{
    for (int r = 0; r < REGISTERS; r++)
        s->each[r] = get(STARTS + r * LANES);
}

INLINE void add_unit(sums *s, const uint8_t *data, uint8_t *out, enum store how, int is_last)
{
    for (int stripe = 0; stripe < STRIPES; stripe++) {
        const uint8_t *key = SECRET + 8 * stripe;
        if (is_last && stripe == STRIPES - 1)
            key = SECRET + SECRET_BYTES - STRIPE - 7;
        for (int r = 0; r < REGISTERS; r++) {
            size_t at = (size_t)stripe * STRIPE + (size_t)r * LANES * 8;
            lanes value = get(data + at);
            /* With a concurrent writer, a second load could sum other bytes than were stored. */
            HOLD(value);
            if (how == NEAR)
                put(out + at, value);
            else if (how == PAST)
                put_past(out + at, value);
            lanes keyed = value ^ get(key + r * LANES * 8);
            s->each[r] += crossed(value) + product(keyed, keyed >> 32);
        }
    }
    if (is_last)
        return;
    const uint8_t *key = SECRET + SECRET_BYTES - STRIPE;
    for (int r = 0; r < REGISTERS; r++) {
        lanes found = s->each[r] ^ s->each[r] >> 47 ^ get(key + r * LANES * 8);
        lanes prime = (lanes){0} + PRIME32_1;
        s->each[r] = product(found, prime) + (product(found >> 32, prime) << 32);
    }
}

INLINE uint64_t digest(const sums *s, uint64_t size)
{
    uint64_t words[8];
    for (int r = 0; r < REGISTERS; r++)
        put(words + r * LANES, s->each[r]);
    uint64_t found = size * PRIME64_1;
    for (int lane = 0; lane < 8; lane += 2) {
        uint64_t one = words[lane] ^ load64(SECRET + 11 + 8 * lane);
        uint64_t other = words[lane + 1] ^ load64(SECRET + 19 + 8 * lane);
        unsigned __int128 both = (unsigned __int128)one * other;
        found += (uint64_t)both ^ (uint64_t)(both >> 64);
    }
    found = (found ^ (found >> 37)) * AVALANCHE;
    return found ^ (found >> 32);
}

/* A piece of a group: destination, source, number of units; size is the group's bytes in its last
 * piece, else 0. The group's sum is written to its last piece. */
typedef struct {
    uint64_t out, from, units, size, sum;
} piece;

INLINE void copy_units(sums *s, const piece *p, enum store how, int is_end)
{
    uint8_t *out = (uint8_t *)(uintptr_t)p->out;
    const uint8_t *data = (const uint8_t *)(uintptr_t)p->from;
    uint64_t units = p->units - (uint64_t)is_end;
    for (uint64_t k = 0; k < units; k++, out += UNIT, data += UNIT)
        add_unit(s, data, out, how, 0);
    if (is_end)
        add_unit(s, data, out, how, 1);
}

/* Copies a piece, past the caches if *is_past* and its destination is 16-byte aligned. */
INLINE void copy_piece(sums *s, const piece *p, int is_past)
{
    if (is_past && (p->out & 15) == 0)
        copy_units(s, p, PAST, p->size != 0);
    else
        copy_units(s, p, NEAR, p->size != 0);
}

/* Writes the sum of the group to *found* if *p* is its last piece; returns whether it is. */
INLINE int end_piece(sums *s, const piece *p, uint64_t *found)
{
    if (!p->size)
        return 0;
    *found = digest(s, p->size);
    begin(s);
    return 1;
}

/* Non-temporal stores are not ordered with others: finish them before the result is published. */
INLINE void fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Copies *count* pieces and sums each group. */
void LOOP(copy_summed)(piece *pieces, uint64_t count, int32_t is_past)
{
    sums s;
    begin(&s);
    for (piece *p = pieces; p < pieces + count; p++) {
        copy_piece(&s, p, is_past);
        end_piece(&s, p, &p->sum);
    }
    fence();
}

/* Copies the *count* parts of a raw *frame* from it, or to it if *is_encode*, and writes the sum
 * of each group to *found*. The pieces' ``from`` are offsets in the frame, *places* the addresses
 * of the parts: all chunks of a layout share the pieces. */
void LOOP(copy_frame)(const piece *pieces, uint64_t count, uint64_t frame, const uint64_t *places,
                      uint64_t *found, int32_t is_encode, int32_t is_past)
{
    sums s;
    begin(&s);
    for (uint64_t k = 0; k < count; k++) {
        piece p = pieces[k];
        uint64_t at = frame + p.from;
        p.out = is_encode ? at : places[k];
        p.from = is_encode ? places[k] : at;
        copy_piece(&s, &p, is_past);
        found += end_piece(&s, &p, found);
    }
    fence();
}

/* A piece for a block of a paged cache. If ``width`` is not 0 the block has it transposed: the
 * columns of ``tokens`` rows of ``width`` numbers of ``item`` bytes, one after another. */
typedef struct {
    piece flat;
    uint64_t tokens, width, item;
} block_piece;

INLINE void transpose_any(uint8_t *out, const uint8_t *from, size_t tokens, size_t width,
                          size_t item)
{
    for (size_t column = 0; column < width; column++)
        for (size_t token = 0; token < tokens; token++)
            memcpy(out + (column * tokens + token) * item,
                   from + (token * width + column) * item, item);
}

#if defined(__SSE2__)
/* Transpose by squares of 4 x 4 or 8 x 8 in registers. Non-temporal stores halve the time and need
 * 16-byte alignment. */
INLINE void transpose32(uint8_t *out, const uint8_t *from, size_t tokens, size_t width)
{
    for (size_t column = 0; column < width; column += 4)
        for (size_t token = 0; token < tokens; token += 4) {
            const uint8_t *at = from + (token * width + column) * 4;
            uint8_t *to = out + (column * tokens + token) * 4;
            __m128i a = _mm_loadu_si128((const __m128i *)at);
            __m128i b = _mm_loadu_si128((const __m128i *)(at + 4 * width));
            __m128i c = _mm_loadu_si128((const __m128i *)(at + 8 * width));
            __m128i d = _mm_loadu_si128((const __m128i *)(at + 12 * width));
            __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
            __m128i ba = _mm_unpackhi_epi32(a, b), dc = _mm_unpackhi_epi32(c, d);
            _mm_stream_si128((__m128i *)to, _mm_unpacklo_epi64(ab, cd));
            _mm_stream_si128((__m128i *)(to + 4 * tokens), _mm_unpackhi_epi64(ab, cd));
            _mm_stream_si128((__m128i *)(to + 8 * tokens), _mm_unpacklo_epi64(ba, dc));
            _mm_stream_si128((__m128i *)(to + 12 * tokens), _mm_unpackhi_epi64(ba, dc));
        }
}

INLINE void transpose16(uint8_t *out, const uint8_t *from, size_t tokens, size_t width)
{
    for (size_t column = 0; column < width; column += 8)
        for (size_t token = 0; token < tokens; token += 8) {
            const uint8_t *at = from + (token * width + column) * 2;
            uint8_t *to = out + (column * tokens + token) * 2;
            __m128i rows[8], pairs[8], fours[8];
            for (int k = 0; k < 8; k++)
                rows[k] = _mm_loadu_si128((const __m128i *)(at + (size_t)k * 2 * width));
            for (int k = 0; k < 4; k++) {
                pairs[k] = _mm_unpacklo_epi16(rows[2 * k], rows[2 * k + 1]);
                pairs[k + 4] = _mm_unpackhi_epi16(rows[2 * k], rows[2 * k + 1]);
            }
            for (int half = 0; half < 8; half += 4)
                for (int k = 0; k < 2; k++) {
                    fours[half + k] = _mm_unpacklo_epi32(pairs[half + 2 * k], pairs[half + 2 * k + 1]);
                    fours[half + 2 + k] = _mm_unpackhi_epi32(pairs[half + 2 * k], pairs[half + 2 * k + 1]);
                }
            for (int k = 0; k < 4; k++) {
                __m128i low = _mm_unpacklo_epi64(fours[2 * k], fours[2 * k + 1]);
                __m128i high = _mm_unpackhi_epi64(fours[2 * k], fours[2 * k + 1]);
                _mm_stream_si128((__m128i *)(to + (size_t)(2 * k) * 2 * tokens), low);
                _mm_stream_si128((__m128i *)(to + (size_t)(2 * k + 1) * 2 * tokens), high);
            }
        }
}
#endif

INLINE void transpose(const block_piece *p)
{
    uint8_t *out = (uint8_t *)(uintptr_t)p->flat.out;
    const uint8_t *from = (const uint8_t *)(uintptr_t)p->flat.from;
    size_t tokens = (size_t)p->tokens, width = (size_t)p->width;
#if defined(__SSE2__)
    int is_aligned = (p->flat.out & 15) == 0;
    if (is_aligned && p->item == 4 && tokens % 4 == 0 && width % 4 == 0) {
        transpose32(out, from, tokens, width);
        return;
    }
    if (is_aligned && p->item == 2 && tokens % 8 == 0 && width % 8 == 0) {
        transpose16(out, from, tokens, width);
        return;
    }
#endif
    switch (p->item) {
    case 1: transpose_any(out, from, tokens, width, 1); break;
    case 2: transpose_any(out, from, tokens, width, 2); break;
    default: transpose_any(out, from, tokens, width, 4);
    }
}

/* Copies *count* pieces into blocks and sums each group, as ``copy_summed`` does. A transposed
 * piece is read a second time, from the cache, for its sum: if its bytes changed in between, the
 * sum does not match. */
void LOOP(scatter_summed)(block_piece *pieces, uint64_t count)
{
    sums s;
    begin(&s);
    for (uint64_t k = 0; k < count; k++) {
        piece *p = &pieces[k].flat;
        if (pieces[k].width) {
            transpose(pieces + k);
            copy_units(&s, p, NOWHERE, p->size != 0);
        } else
            copy_piece(&s, p, 1);
        end_piece(&s, p, &p->sum);
    }
    fence();
}

/* Reads *count* pieces of the file *descriptor*, whose ``from`` are file offsets, step by step, and
 * sums each step while it is in cache. Returns how many pieces were read: all, or those before the
 * first that could not be read whole. */
uint64_t LOOP(read_summed)(piece *pieces, uint64_t count, int32_t descriptor)
{
    sums s;
    begin(&s);
    for (uint64_t k = 0; k < count; k++) {
        piece *p = pieces + k;
        uint8_t *out = (uint8_t *)(uintptr_t)p->out;
        uint64_t at = p->from, left = p->units;
        while (left) {
            uint64_t units = left < STEP_UNITS ? left : STEP_UNITS;
            size_t size = (size_t)units * UNIT;
            if (pread(descriptor, out, size, (off_t)at) != (ssize_t)size)
                return k;
            left -= units;
            at += size;
            int is_last = p->size != 0 && left == 0;
            uint64_t place = (uint64_t)(uintptr_t)out;
            piece step = {.out = place, .from = place, .units = units};
            copy_units(&s, &step, NOWHERE, is_last);
            out += size;
        }
        end_piece(&s, p, &p->sum);
    }
    return count;
}
