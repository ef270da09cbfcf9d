/* Byte planes of words, the dictionary coder of planes, and quantisation by groups.
 *
 * docs/format.md specifies the layouts.
 */
#include "loops.h"

/* --- planes: exponent, sign and mantissa separated */

void LOOP(split_bfloat16)(const any16 *restrict words, uint8_t *restrict exponent,
                          uint8_t *restrict rest, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        exponent[k] = (uint8_t)(words[k] >> 7);
        rest[k] = (uint8_t)((words[k] >> 8 & 0x80) | (words[k] & 0x7F));
    }
}

void LOOP(join_bfloat16)(any16 *restrict words, const uint8_t *restrict exponent,
                         const uint8_t *restrict rest, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        words[k] = (uint16_t)((rest[k] & 0x80) << 8 | exponent[k] << 7 | (rest[k] & 0x7F));
}

void LOOP(split_float16)(const any16 *restrict words, uint8_t *restrict high,
                         uint8_t *restrict low, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        high[k] = (uint8_t)(words[k] >> 8);
        low[k] = (uint8_t)words[k];
    }
}

void LOOP(join_float16)(any16 *restrict words, const uint8_t *restrict high,
                        const uint8_t *restrict low, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        words[k] = (uint16_t)(high[k] << 8 | low[k]);
}

void LOOP(split_float32)(const any32 *restrict words, uint8_t *restrict exponent,
                         uint8_t *restrict rest, uint8_t *restrict high, uint8_t *restrict low,
                         int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        exponent[k] = (uint8_t)(words[k] >> 23);
        rest[k] = (uint8_t)((words[k] >> 24 & 0x80) | (words[k] >> 16 & 0x7F));
        high[k] = (uint8_t)(words[k] >> 8);
        low[k] = (uint8_t)words[k];
    }
}

void LOOP(join_float32)(any32 *restrict words, const uint8_t *restrict exponent,
                        const uint8_t *restrict rest, const uint8_t *restrict high,
                        const uint8_t *restrict low, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        uint32_t top = (uint32_t)(rest[k] & 0x80) << 8 | (uint32_t)exponent[k] << 7
                       | (rest[k] & 0x7Fu);
        words[k] = top << 16 | (uint32_t)high[k] << 8 | low[k];
    }
}

/* --- sieve: two bits name one of three values, or pass the byte on to the next pass */

enum { PASSES = 5, VALUES = 3, SIFTED = 64, BITS_BYTES = 16 };

INLINE uint8_t *sift_group(const uint8_t *source, const uint8_t *kept, uint8_t *bits,
                           uint8_t *left, int64_t items)
{
    uint64_t low = 0, high = 0;
#if defined(__AVX512BW__) && defined(__AVX512VBMI2__)
    if (items == SIFTED) {
        __m512i found = _mm512_loadu_si512(source);
        __mmask64 first = _mm512_cmpeq_epi8_mask(found, _mm512_set1_epi8((char)kept[0]));
        __mmask64 second = _mm512_cmpeq_epi8_mask(found, _mm512_set1_epi8((char)kept[1]));
        __mmask64 third = _mm512_cmpeq_epi8_mask(found, _mm512_set1_epi8((char)kept[2]));
        __mmask64 none = ~(first | second | third);
        low = second | none;
        high = third | none;
        _mm512_storeu_si512(left, _mm512_maskz_compress_epi8(none, found));
        memcpy(bits, &low, sizeof low);
        memcpy(bits + 8, &high, sizeof high);
        return left + __builtin_popcountll(none);
    }
#endif
    for (int64_t k = 0; k < items; k++) {
        uint8_t value = source[k];
        uint64_t none = (value != kept[0]) & (value != kept[1]) & (value != kept[2]);
        low |= ((value == kept[1]) | none) << k;
        high |= ((value == kept[2]) | none) << k;
        *left = value; /* kept only if it is none of the three */
        left += none;
    }
    memcpy(bits, &low, sizeof low);
    memcpy(bits + 8, &high, sizeof high);
    return left;
}

/* Writes the passes of data u8 (size,) and the bytes that remain after the last to out; scratch
 * has twice size + 64 bytes. Fills counts i64 (5,) with the bytes that remain after each pass.
 * Returns whether out, of capacity bytes, was long enough. */
int64_t LOOP(sieve_squeeze)(const uint8_t *data, int64_t size, const uint8_t *values,
                            uint8_t *scratch, uint8_t *out, int64_t capacity, anyi64 *counts)
{
    uint8_t *left = scratch, *other = scratch + size + SIFTED;
    const uint8_t *source = data;
    int64_t items = size, end = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        int64_t groups = (items + SIFTED - 1) / SIFTED;
        if (end + groups * BITS_BYTES > capacity)
            return 0;
        uint8_t *to = left;
        for (int64_t group = 0; group < groups; group++) {
            int64_t rest = items - group * SIFTED;
            to = sift_group(source + group * SIFTED, values + VALUES * pass,
                            out + end + group * BITS_BYTES, to, rest < SIFTED ? rest : SIFTED);
        }
        end += groups * BITS_BYTES;
        items = to - left;
        counts[pass] = items;
        source = left;
        left = other;
        other = (uint8_t *)source;
    }
    if (end + items > capacity)
        return 0;
    memcpy(out + end, source, (size_t)items);
    return 1;
}

/* Returns how many bytes of left the group needs; reads none at or past limit. */
INLINE int64_t restore_group(const uint8_t *bits, const uint8_t *kept, const uint8_t *left,
                             int64_t at, int64_t limit, uint8_t *out, int64_t items)
{
    uint64_t low = load64(bits), high = load64(bits + 8);
    int64_t wanted = 0;
#if defined(__AVX512BW__) && defined(__AVX512VBMI2__)
    if (items == SIFTED && at + SIFTED <= limit) {
        __m512i found = _mm512_mask_blend_epi8(low, _mm512_set1_epi8((char)kept[0]),
                                               _mm512_set1_epi8((char)kept[1]));
        found = _mm512_mask_blend_epi8(high, found, _mm512_set1_epi8((char)kept[2]));
        found = _mm512_mask_expand_epi8(found, low & high, _mm512_loadu_si512(left + at));
        _mm512_storeu_si512(out, found);
        return __builtin_popcountll(low & high);
    }
#endif
    for (int64_t k = 0; k < items; k++) {
        uint64_t kind = (low >> k & 1) | (high >> k & 1) << 1;
        if (kind < VALUES)
            out[k] = kept[kind];
        else {
            if (at + wanted < limit)
                out[k] = left[at + wanted];
            wanted++;
        }
    }
    return wanted;
}

/* Fills out u8 (size,) from body; counts i64 (5,) and scratch as above. The caller has checked
 * the length of body against counts. Returns whether each pass has as many bytes as its bits
 * need. */
int64_t LOOP(sieve_spread)(const uint8_t *body, int64_t length, const uint8_t *values,
                           const anyi64 *counts, uint8_t *scratch, uint8_t *out, int64_t size)
{
    uint8_t *one = scratch, *other = scratch + size + SIFTED;
    int64_t limit = counts[PASSES - 1], end = length - limit;
    const uint8_t *left = body + end;
    for (int pass = PASSES - 1; pass >= 0; pass--) {
        int64_t items = pass == 0 ? size : counts[pass - 1];
        int64_t groups = (items + SIFTED - 1) / SIFTED, used = 0;
        uint8_t *to = pass == 0 ? out : one;
        end -= groups * BITS_BYTES;
        for (int64_t group = 0; group < groups; group++) {
            int64_t rest = items - group * SIFTED;
            used += restore_group(body + end + group * BITS_BYTES, values + VALUES * pass, left,
                                  used, limit, to + group * SIFTED, rest < SIFTED ? rest : SIFTED);
        }
        if (used != limit)
            return 0;
        limit = items;
        left = to;
        one = other;
        other = to;
    }
    return 1;
}

/* --- grouped: scale and minimum per 64 tokens of a channel, or per 64 channels of a token */

enum { GROUPED = 64 };

INLINE int64_t groups_in(int64_t count) { return (count + GROUPED - 1) / GROUPED; }

/* values f32 (heads, tokens, dim); low and high f32 (heads, groups, dim) by token, else
 * (heads, tokens, groups). */
void LOOP(grouped_bounds)(const anyfloat *restrict values, anyfloat *restrict low,
                          anyfloat *restrict high, int64_t heads, int64_t tokens, int64_t dim,
                          int32_t by_token)
{
    for (int64_t row = 0; row < heads * tokens; row++) {
        int64_t head = row / tokens, token = row % tokens;
        const anyfloat *given = values + row * dim;
        if (by_token) {
            int64_t at = (head * groups_in(tokens) + token / GROUPED) * dim;
            anyfloat *restrict least = low + at, *restrict most = high + at;
            if (token % GROUPED == 0) {
                memcpy(least, given, (size_t)dim * sizeof *least);
                memcpy(most, given, (size_t)dim * sizeof *most);
            }
            for (int64_t c = 0; c < dim; c++) {
                least[c] = given[c] < least[c] ? given[c] : least[c];
                most[c] = given[c] > most[c] ? given[c] : most[c];
            }
            continue;
        }
        for (int64_t group = 0; group < groups_in(dim); group++) {
            int64_t stop = (group + 1) * GROUPED < dim ? (group + 1) * GROUPED : dim;
            float least = given[group * GROUPED], most = least;
            for (int64_t c = group * GROUPED; c < stop; c++) {
                least = given[c] < least ? given[c] : least;
                most = given[c] > most ? given[c] : most;
            }
            low[row * groups_in(dim) + group] = least;
            high[row * groups_in(dim) + group] = most;
        }
    }
}

#define SLACK 0x1p-21f
#define HALF_STEP (0.5f + 0x1p-11f)

INLINE float code_of(float value, float wide, float centre, float least, float most)
{
    float step = rintf((value - centre) / (wide != 0 ? wide : 1.0f));
    step = step > least ? step : least;
    return step < most ? step : most;
}

INLINE int32_t is_off(float found, float value, float wide)
{
    return !(fabsf(found - value) <= fabsf(value) * SLACK + wide * HALF_STEP);
}

/* scales and minima f32 as low and high above; fills codes u8 and their values back f32, both
 * shaped like values. Returns how many numbers exceed the error bound. */
int64_t LOOP(grouped_quantise)(const anyfloat *restrict values, const anyfloat *restrict scales,
                               const anyfloat *restrict minima, uint8_t *restrict codes,
                               anyfloat *restrict back, int64_t heads, int64_t tokens, int64_t dim,
                               int32_t by_token, float least, float most)
{
    int64_t off = 0;
    for (int64_t row = 0; row < heads * tokens; row++) {
        int64_t head = row / tokens, token = row % tokens;
        const anyfloat *restrict given = values + row * dim;
        uint8_t *restrict coded = codes + row * dim;
        anyfloat *restrict found = back + row * dim;
        int32_t mine = 0;
        if (by_token) {
            int64_t at = (head * groups_in(tokens) + token / GROUPED) * dim;
            const anyfloat *restrict wide = scales + at, *restrict centre = minima + at;
            for (int64_t c = 0; c < dim; c++) {
                float step = code_of(given[c], wide[c], centre[c], least, most);
                coded[c] = (uint8_t)(int32_t)step;
                found[c] = step * wide[c] + centre[c];
                mine += is_off(found[c], given[c], wide[c]);
            }
        } else {
            for (int64_t group = 0; group < groups_in(dim); group++) {
                int64_t stop = (group + 1) * GROUPED < dim ? (group + 1) * GROUPED : dim;
                float wide = scales[row * groups_in(dim) + group];
                float centre = minima[row * groups_in(dim) + group];
                for (int64_t c = group * GROUPED; c < stop; c++) {
                    float step = code_of(given[c], wide, centre, least, most);
                    coded[c] = (uint8_t)(int32_t)step;
                    found[c] = step * wide + centre;
                    mine += is_off(found[c], given[c], wide);
                }
            }
        }
        off += mine;
    }
    return off;
}

/* The inverse: fills values f32 from codes, which are signed if is_signed. */
void LOOP(grouped_expand)(const uint8_t *restrict codes, const anyfloat *restrict scales,
                          const anyfloat *restrict minima, anyfloat *restrict values, int64_t heads,
                          int64_t tokens, int64_t dim, int32_t by_token, int32_t is_signed)
{
    int32_t flip = is_signed ? 128 : 0;
    for (int64_t row = 0; row < heads * tokens; row++) {
        int64_t head = row / tokens, token = row % tokens;
        const uint8_t *restrict coded = codes + row * dim;
        anyfloat *restrict found = values + row * dim;
        if (by_token) {
            int64_t at = (head * groups_in(tokens) + token / GROUPED) * dim;
            const anyfloat *restrict wide = scales + at, *restrict centre = minima + at;
            for (int64_t c = 0; c < dim; c++)
                found[c] = (float)((coded[c] ^ flip) - flip) * wide[c] + centre[c];
            continue;
        }
        for (int64_t group = 0; group < groups_in(dim); group++) {
            int64_t stop = (group + 1) * GROUPED < dim ? (group + 1) * GROUPED : dim;
            float wide = scales[row * groups_in(dim) + group];
            float centre = minima[row * groups_in(dim) + group];
            for (int64_t c = group * GROUPED; c < stop; c++)
                found[c] = (float)((coded[c] ^ flip) - flip) * wide + centre;
        }
    }
}
