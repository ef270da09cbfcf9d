/* The loops of kvq: quantisation and dequantisation of tiles of up to 256 tokens, 128 channels.
 *
 * Each float operation is the reference's (codecs/kvq_tiles.py), rounded separately; sums are
 * in double and in a fixed order.
 */
#include "loops.h"

enum {
    WIDTH = 128, SYMBOLS = 128, ZERO = 64, ESCAPE = 0, MAX_QUOTIENT = 63, PADDING_MODEL = 0,
    SHAPES = 2, SCALES = 32, EDGES = SCALES - 1, REACH = 2, KINDS = 4, PLAIN = 2,
    SCALES_OF_TWO = 4, LARGEST_BITS = 0x7E800000, /* of 2^126 */
};

#define TOLERANCE (0.5f + 0x1p-8f)
#define LEAST_STEP 0x1p-60f
#define LARGEST_MEAN 65504.0f

/* A block's words, u16 (bfloat16) or u32 (float32's bits), as (heads, tokens, dim). */
typedef struct {
    const void *words;
    int64_t item_bytes, heads, tokens, dim;
    const anyfloat *cosine, *sine; /* (tokens, pairs), if keys are rotated */
    int64_t pairs;
} block;

/* The family of models: costs u16 (64, 128), edges f64 (31,), reach i16 (64,). */
typedef struct {
    const any16 *costs;
    const double *edges;
    const anyi16 *reach;
} family;

/* The result of quantising n tiles; see Tiles in codecs/kvq_tiles.py. values holds at most
 * values_limit quotients. */
typedef struct {
    anyfloat *steps, *means;
    uint8_t *models, *symbols;
    any32 *escapes;
    anyi16 *values;
    anyfloat *errors;
    any32 *magnitudes;
    int64_t tiles, values_limit;
} tiles_out;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t gcd(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Rotates one token's head by its angles in place; sign -1 is the inverse. */
INLINE void rotate(anyfloat *restrict row, const anyfloat *restrict cosine,
                   const anyfloat *restrict sine, int64_t pairs, float sign)
{
    for (int64_t i = 0; i < pairs; i++) {
        float first = row[i], second = row[i + pairs], signed_sine = sine[i] * sign;
        row[i] = first * cosine[i] - second * signed_sine;
        row[i + pairs] = second * cosine[i] + first * signed_sine;
    }
}

INLINE int64_t escapes_in(const uint8_t *symbols, int64_t width)
{
    uint8_t count = 0; /* at most 128: eight bits keep the vectors full */
    for (int64_t c = 0; c < width; c++)
        count = (uint8_t)(count + (symbols[c] == ESCAPE));
    return count;
}

INLINE float half_of(float value)
{
    if (fabsf(value) < 0x1p-14f)
        return rintf(value * 0x1p24f) / 0x1p24f;
    uint32_t bits = bits_of(value);
    return float_of((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000u);
}

INLINE void widen_row(const block *b, int64_t head, int64_t token, any32 *restrict word,
                      any32 *restrict sizes)
{
    int64_t at = (head * b->tokens + token) * b->dim;
    if (b->item_bytes == 2) {
        const any16 *given = (const any16 *)b->words + at;
        for (int64_t i = 0; i < b->dim; i++)
            word[i] = (uint32_t)given[i] << 16;
    } else
        memcpy(word, (const any32 *)b->words + at, (size_t)b->dim * sizeof *word);
    for (int64_t i = 0; i < b->dim; i++) {
        uint32_t size = word[i] & 0x7FFFFFFF;
        sizes[i] = size > sizes[i] ? size : sizes[i];
    }
}

/* Heads are processed in groups that fill whole tiles, so that a group stays in the second-level
 * cache: x f32 (size, tokens, 128) and the largest magnitudes u32 (size,). row and sizes have
 * dim words each. */
typedef struct {
    anyfloat *x;
    any32 *largest;
    int64_t size, step_heads;
    any32 *row, *sizes;
} group;

static int begin_group(group *g, const block *b, int64_t tiles)
{
    g->step_heads = WIDTH / gcd(b->dim, WIDTH);
    g->size = smaller(tiles, g->step_heads * b->dim / WIDTH);
    g->x = calloc((size_t)(g->size * b->tokens * WIDTH + 1), sizeof *g->x);
    g->largest = malloc((size_t)(g->size + 1) * sizeof *g->largest);
    g->row = malloc((size_t)(2 * b->dim + 1) * sizeof *g->row);
    g->sizes = g->row == NULL ? NULL : g->row + b->dim;
    return g->x != NULL && g->largest != NULL && g->row != NULL;
}

static void end_group(group *g)
{
    free(g->x);
    free(g->largest);
    free(g->row);
}

/* Widens heads from *head* on into the group's tiles, rotation undone; returns their number. */
INLINE int64_t load_heads(const block *b, int64_t head, group *g)
{
    int64_t tokens = b->tokens, dim = b->dim;
    int64_t taken = smaller(g->size * WIDTH / dim, b->heads - head);
    anyfloat *row = (anyfloat *)g->row;
    memset(g->largest, 0, (size_t)g->size * sizeof *g->largest);
    if (head + g->step_heads > b->heads)
        memset(g->x, 0, (size_t)(g->size * tokens * WIDTH) * sizeof *g->x);
    for (int64_t index = 0; index < taken; index++) {
        memset(g->sizes, 0, (size_t)dim * sizeof *g->sizes);
        for (int64_t token = 0; token < tokens; token++) {
            widen_row(b, head + index, token, g->row, g->sizes);
            if (b->pairs)
                rotate(row, b->cosine + token * b->pairs, b->sine + token * b->pairs, b->pairs, -1);
            for (int64_t at = 0; at < dim;) {
                int64_t tile = (index * dim + at) / WIDTH, channel = (index * dim + at) % WIDTH;
                int64_t run = smaller(dim - at, WIDTH - channel);
                memcpy(g->x + (tile * tokens + token) * WIDTH + channel, row + at,
                       (size_t)run * sizeof *row);
                at += run;
            }
        }
        for (int64_t i = 0; i < dim; i++) {
            any32 *largest = g->largest + (index * dim + i) / WIDTH;
            *largest = g->sizes[i] > *largest ? g->sizes[i] : *largest;
        }
    }
    return taken;
}

/* Fills means and the sums of squares about them; returns 0 if a mean exceeds float16. */
INLINE int centre(const anyfloat *x, int64_t tokens, int64_t width, anyfloat *means, double *squares)
{
    double sums[WIDTH] = {0};
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t c = 0; c < width; c++)
            sums[c] += (double)x[token * WIDTH + c];
    for (int64_t c = 0; c < width; c++) {
        float mean = (float)(sums[c] / (double)tokens);
        if (fabsf(mean) > LARGEST_MEAN)
            return 0;
        means[c] = half_of(mean);
    }
    for (int64_t c = 0; c < width; c++)
        squares[c] = 0;
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t c = 0; c < width; c++) {
            double difference = (double)(x[token * WIDTH + c] - means[c]);
            squares[c] += difference * difference;
        }
    return 1;
}

INLINE float step_of(const double *squares, int64_t width, int64_t tokens, double ratio)
{
    double total = 0;
    for (int64_t c = 0; c < width; c++)
        total += squares[c];
    double deviation = sqrt(total / (double)(width * tokens));
    float step = deviation != 0 ? (float)(deviation * ratio) : 1.0f;
    return step > LEAST_STEP ? step : LEAST_STEP;
}

INLINE uint8_t symbol_of(int16_t q, int16_t reach)
{
    return (q > reach) | (q < -reach) ? ESCAPE : (uint8_t)(q + ZERO);
}

INLINE float largest_of(const anyfloat *errors)
{
    float most = 0;
    for (int64_t c = 0; c < WIDTH; c++)
        most = errors[c] > most ? errors[c] : most;
    return most;
}

/* Scratch of one tile: quotients i16 (tokens, 128), histograms u16 (kinds, 128, 128), the
 * largest |q| of each kind and channel, -1 for kinds that do not occur. */
typedef struct {
    anyi16 *q;
    any16 *histogram;
    int16_t peaks[KINDS][WIDTH];
    int64_t kinds;
} work;

static int begin_work(work *w, int64_t tokens, int64_t kinds)
{
    w->kinds = kinds;
    w->q = malloc((size_t)(tokens * WIDTH + 1) * sizeof *w->q);
    w->histogram = malloc((size_t)(kinds * WIDTH * SYMBOLS) * sizeof *w->histogram);
    return w->q != NULL && w->histogram != NULL;
}

static void end_work(work *w)
{
    free(w->q);
    free(w->histogram);
}

INLINE void divide_row(const anyfloat *restrict x, const anyfloat *restrict means, int64_t width,
                       float inverse, float finer, float factor, float step, anyi16 *restrict q,
                       anyfloat *restrict errors, int with_factor)
{
    for (int64_t c = 0; c < width; c++) {
        float quotient = (x[c] - means[c]) * inverse;
        quotient = rintf(with_factor ? quotient * finer : quotient);
        float scaled = with_factor ? quotient * factor * step : quotient * step;
        float error = fabsf(x[c] - (scaled + means[c]));
        errors[c] = error > errors[c] ? error : errors[c];
        q[c] = (int16_t)(int32_t)quotient;
    }
}

/* Fills the scratch of a tile; returns the largest error. classes u8 (tokens,), or NULL. */
INLINE float divide(const anyfloat *x, const anyfloat *means, int64_t tokens, int64_t width, float step,
                    const uint8_t *classes, work *w)
{
    float inverse = 1.0f / step, errors[WIDTH] = {0};
    uint8_t symbols[WIDTH];
    memset(w->histogram, 0, (size_t)(w->kinds * WIDTH * SYMBOLS) * sizeof *w->histogram);
    memset(w->peaks, classes ? 0xFF : 0, sizeof w->peaks);
    for (int64_t token = 0; token < tokens; token++) {
        int64_t kind = classes ? classes[token] : 0;
        anyi16 *restrict q = w->q + token * WIDTH, *restrict peak = w->peaks[kind];
        if (classes) {
            float factor = ldexpf(1.0f, (int)kind - PLAIN);
            divide_row(x + token * WIDTH, means, width, inverse, 1.0f / factor, factor, step, q,
                       errors, 1);
        } else
            divide_row(x + token * WIDTH, means, width, inverse, 1, 1, step, q, errors, 0);
        for (int64_t c = 0; c < width; c++) {
            int16_t size = (int16_t)(q[c] < 0 ? -q[c] : q[c]);
            peak[c] = size > peak[c] ? size : peak[c];
            symbols[c] = symbol_of(q[c], MAX_QUOTIENT);
        }
        any16 *histogram = w->histogram + kind * WIDTH * SYMBOLS;
        for (int64_t c = 0; c < width; c++)
            histogram[c * SYMBOLS + symbols[c]]++;
    }
    return largest_of(errors);
}

INLINE int64_t moved(int64_t model, int64_t kind)
{
    int64_t scale = model / SHAPES + SCALES_OF_TWO * (PLAIN - kind);
    return SHAPES * smaller(larger(scale, 0), SCALES - 1) + model % SHAPES;
}

/* Returns channel *c*'s cheapest model of the five scales around its deviation, over all kinds. */
INLINE int64_t pick(const work *w, int64_t c, double spread, const family *f)
{
    int64_t scale = 0, best = 0, least = (int64_t)1 << 62;
    while (scale < EDGES && f->edges[scale] < spread)
        scale++;
    int64_t stop = SHAPES * smaller(SCALES, scale + REACH + 1);
    for (int64_t model = SHAPES * larger(0, scale - REACH); model < stop; model++) {
        int64_t cost = 0;
        for (int64_t kind = 0; kind < w->kinds; kind++) {
            int64_t peak = w->peaks[kind][c], first = 0, last = SYMBOLS;
            if (peak < 0)
                continue; /* no such token */
            if (peak <= MAX_QUOTIENT) { /* no larger symbol occurs */
                first = ZERO - peak;
                last = ZERO + peak + 1;
            }
            const any16 *counts = w->histogram + (kind * WIDTH + c) * SYMBOLS;
            int64_t row = w->kinds == 1 ? model : moved(model, kind);
            const any16 *costs = f->costs + row * SYMBOLS;
            uint32_t mine = 0; /* at most 256 tokens of 16 bits each */
            for (int64_t symbol = first; symbol < last; symbol++)
                mine += (uint32_t)counts[symbol] * costs[symbol];
            cost += mine;
        }
        best = cost < least ? model : best;
        least = smaller(cost, least);
    }
    return best;
}

static void move_all(const uint8_t *models, uint8_t kinds[KINDS][WIDTH])
{
    for (int64_t kind = 0; kind < KINDS; kind++)
        for (int64_t c = 0; c < WIDTH; c++)
            kinds[kind][c] = (uint8_t)moved(models[c], kind);
}

/* Fills a tile's symbols and appends its escapes; returns their number, or -1 if values is full. */
INLINE int64_t name_symbols(const work *w, const uint8_t *models, const uint8_t *classes,
                            const family *f, int64_t tokens, int64_t width, uint8_t *symbols,
                            anyi16 *values, int64_t capacity)
{
    int16_t reaches[KINDS][WIDTH];
    uint8_t kinds[KINDS][WIDTH];
    if (classes)
        move_all(models, kinds);
    else
        memcpy(kinds[0], models, WIDTH);
    for (int64_t kind = 0; kind < (classes ? KINDS : 1); kind++)
        for (int64_t c = 0; c < WIDTH; c++)
            reaches[kind][c] = f->reach[kinds[kind][c]];
    int64_t used = 0;
    for (int64_t token = 0; token < tokens; token++) {
        const anyi16 *restrict q = w->q + token * WIDTH;
        const anyi16 *restrict reach = reaches[classes ? classes[token] : 0];
        uint8_t *restrict named = symbols + token * WIDTH;
        for (int64_t c = 0; c < width; c++)
            named[c] = symbol_of(q[c], reach[c]);
        if (escapes_in(named, width))
            for (int64_t c = 0; c < width; c++)
                if (named[c] == ESCAPE) {
                    if (used >= capacity)
                        return -1;
                    values[used++] = q[c];
                }
        for (int64_t c = width; c < WIDTH; c++)
            named[c] = ZERO;
    }
    return used;
}

/* Quantises one tile; returns its escapes, or -1: not codable. */
INLINE int64_t quantise_tile(const block *b, const anyfloat *x, int64_t tile, double ratio,
                             const uint8_t *classes, float loosest, const family *f, work *w,
                             const tiles_out *out, int64_t used)
{
    int64_t tokens = b->tokens, width = smaller(WIDTH, b->heads * b->dim - tile * WIDTH);
    anyfloat *means = out->means + tile * WIDTH;
    uint8_t *models = out->models + tile * WIDTH;
    double squares[WIDTH];
    if (!centre(x, tokens, width, means, squares))
        return -1;
    float step = step_of(squares, width, tokens, ratio);
    float error = divide(x, means, tokens, width, step, classes, w);
    if (!(error <= step * loosest))
        return -1;
    double square = (double)step * (double)step;
    for (int64_t c = 0; c < width; c++)
        models[c] = (uint8_t)pick(w, c, squares[c] / (double)tokens / square, f);
    for (int64_t c = width; c < WIDTH; c++)
        models[c] = PADDING_MODEL;
    out->steps[tile] = step;
    out->errors[tile] = error;
    return name_symbols(w, models, classes, f, tokens, width,
                        out->symbols + tile * tokens * WIDTH, out->values + used,
                        out->values_limit - used);
}

/* Quantises a block, by classes u8 (tokens,) if not NULL. Returns the number of escapes, or -1
 * if it cannot be coded within the error bound. */
int64_t LOOP(kvq_quantise)(const block *b, double ratio, const uint8_t *classes, const family *f,
                           const tiles_out *out)
{
    group g = {0};
    work w = {0};
    int64_t used = 0, tile = 0;
    float loosest = TOLERANCE;
    if (classes) {
        int most = 0;
        for (int64_t token = 0; token < b->tokens; token++)
            most = classes[token] > most ? classes[token] : most;
        loosest = ldexpf(1.0f, most - PLAIN) * TOLERANCE;
    }
    if (!begin_group(&g, b, out->tiles) || !begin_work(&w, b->tokens, classes ? KINDS : 1))
        used = NO_MEMORY;
    for (int64_t head = 0; used >= 0 && head < b->heads;) {
        head += load_heads(b, head, &g);
        int64_t count = smaller(g.size, out->tiles - tile);
        for (int64_t index = 0; used >= 0 && index < count; index++, tile++) {
            int64_t found = -1;
            if (g.largest[index] < LARGEST_BITS)
                found = quantise_tile(b, g.x + index * b->tokens * WIDTH, tile, ratio, classes,
                                      loosest, f, &w, out, used);
            if (found < 0) {
                used = -1;
                break;
            }
            out->magnitudes[tile] = g.largest[index];
            out->escapes[tile] = (uint32_t)found;
            used += found;
        }
    }
    end_group(&g);
    end_work(&w);
    return used;
}

/* Tiles to dequantise: steps f32 (n,), means f32 (n, 128), and either symbols with their escapes,
 * or quotients f32 (n, tokens, 128) with factors f32 (tokens,). */
typedef struct {
    const anyfloat *steps, *means;
    const uint8_t *symbols;
    const any32 *escapes;
    const anyi16 *values;
    int64_t tiles, values_count;
    const anyfloat *quotients, *factors;
} tiles_in;

INLINE void store_row(const anyfloat *restrict row, void *out, int64_t at, int64_t dim,
                      int64_t item_bytes)
{
    if (item_bytes == 4) {
        memcpy((anyfloat *)out + at, row, (size_t)dim * sizeof *row);
        return;
    }
    any16 *restrict to = (any16 *)out + at;
    for (int64_t i = 0; i < dim; i++) {
        uint32_t bits = bits_of(row[i]);
        to[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

/* Writes escaped quotients into row, for the symbols from *channel* on. */
INLINE void patch(anyfloat *row, int64_t run, const uint8_t *symbols, int64_t channel,
                  const anyi16 *values)
{
    for (int64_t c = 0; c < channel; c++)
        values += symbols[c] == ESCAPE;
    for (int64_t c = 0; c < run; c++)
        if (symbols[channel + c] == ESCAPE)
            row[c] = (float)*values++;
}

/* Returns where the escapes of each tile and token begin, i32 (n, tokens + 1), or NULL without
 * memory. Sets is_right to whether they are as many as counted. */
static int32_t *escapes_by_row(const tiles_in *t, int64_t tokens, int *is_right)
{
    int32_t *firsts = malloc((size_t)(t->tiles * (tokens + 1) + 1) * sizeof *firsts);
    int64_t used = 0;
    *is_right = 1;
    for (int64_t tile = 0; firsts != NULL && tile < t->tiles; tile++) {
        int32_t *mine = firsts + tile * (tokens + 1);
        for (int64_t token = 0; token < tokens; token++) {
            mine[token] = (int32_t)used;
            used += escapes_in(t->symbols + (tile * tokens + token) * WIDTH, WIDTH);
        }
        mine[tokens] = (int32_t)used;
        if (used - mine[0] != t->escapes[tile])
            *is_right = 0;
    }
    *is_right &= used == t->values_count;
    return firsts;
}

/* Writes a block (heads, tokens, dim) of *item_bytes* words from tiles. Returns whether each tile
 * has as many escapes as counted. */
int64_t LOOP(kvq_dequantise)(const tiles_in *t, const block *b, void *out)
{
    int64_t tokens = b->tokens, dim = b->dim;
    int is_right = 1;
    int32_t *firsts = t->quotients == NULL ? escapes_by_row(t, tokens, &is_right) : NULL;
    anyfloat *row = malloc((size_t)(dim + 1) * sizeof *row);
    if (row == NULL || (t->quotients == NULL && firsts == NULL)) {
        free(row);
        free(firsts);
        return NO_MEMORY;
    }
    for (int64_t line = 0; is_right && line < b->heads * tokens; line++) {
        int64_t head = line / tokens, token = line % tokens;
        for (int64_t at = 0; at < dim;) {
            int64_t tile = (head * dim + at) / WIDTH, channel = (head * dim + at) % WIDTH;
            int64_t run = smaller(dim - at, WIDTH - channel), from = (tile * tokens + token) * WIDTH;
            anyfloat *restrict piece = row + at;
            const anyfloat *restrict means = t->means + tile * WIDTH + channel;
            float step = t->steps[tile];
            if (t->quotients) {
                const anyfloat *restrict q = t->quotients + from + channel;
                float factor = t->factors[token];
                for (int64_t c = 0; c < run; c++)
                    piece[c] = q[c] * factor * step + means[c];
            } else {
                const uint8_t *restrict symbols = t->symbols + from;
                const int32_t *mine = firsts + tile * (tokens + 1) + token;
                for (int64_t c = 0; c < run; c++)
                    piece[c] = (float)((int32_t)symbols[channel + c] - ZERO);
                if (mine[1] != mine[0])
                    patch(piece, run, symbols, channel, t->values + mine[0]);
                for (int64_t c = 0; c < run; c++)
                    piece[c] = piece[c] * step + means[c];
            }
            at += run;
        }
        if (b->pairs)
            rotate(row, b->cosine + token * b->pairs, b->sine + token * b->pairs, b->pairs, 1);
        store_row(row, out, line * dim, dim, b->item_bytes);
    }
    free(row);
    free(firsts);
    return is_right;
}

/* Fills out f32 (n, tokens, 128) with quotients; returns whether escapes match their counts. */
int64_t LOOP(kvq_quotients)(const tiles_in *t, int64_t tokens, anyfloat *out)
{
    int64_t used = 0;
    for (int64_t tile = 0; tile < t->tiles; tile++) {
        int64_t first = used;
        for (int64_t token = 0; token < tokens; token++) {
            const uint8_t *symbols = t->symbols + (tile * tokens + token) * WIDTH;
            anyfloat *restrict row = out + (tile * tokens + token) * WIDTH;
            int64_t count = escapes_in(symbols, WIDTH);
            if (used + count > t->values_count)
                return 0;
            for (int64_t c = 0; c < WIDTH; c++)
                row[c] = (float)((int32_t)symbols[c] - ZERO);
            if (count)
                patch(row, WIDTH, symbols, 0, t->values + used);
            used += count;
        }
        if (used - first != t->escapes[tile])
            return 0;
    }
    return used == t->values_count;
}

INLINE void contexts_of_row(const anyfloat *restrict q, const uint8_t *restrict row,
                            uint8_t *restrict out)
{
    for (int64_t c = 0; c < WIDTH; c++) {
        float size = fabsf(q[c]);
        out[c] = (uint8_t)(row[c] + (uint8_t)(int32_t)(size < 2 ? size : 2));
    }
}

/* Fills out u8 (n, tokens, 128) with rows u8 (n, 128) + min(|q|, 2). */
void LOOP(kvq_contexts)(const anyfloat *q, const uint8_t *rows, uint8_t *out, int64_t tiles,
                        int64_t tokens)
{
    for (int64_t line = 0; line < tiles * tokens; line++)
        contexts_of_row(q + line * WIDTH, rows + line / tokens * WIDTH, out + line * WIDTH);
}

/* Refines q f32 to the next level by thirds u8: 0 towards zero, 2 away from it. */
void LOOP(kvq_add)(anyfloat *restrict q, const uint8_t *restrict thirds, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float third = (float)((int32_t)thirds[i] - 1);
        q[i] = q[i] * 3.0f + (q[i] < 0 ? -third : third);
    }
}

/* The result of refining, by level: symbols and contexts u8 (levels, n, tokens, 128), errors f32
 * (levels, n); rows u8 (levels, n, 128) of contexts. */
typedef struct {
    const anyfloat *steps, *means;
    anyfloat *quotients;
    const uint8_t *rows;
    uint8_t *symbols, *contexts;
    anyfloat *errors;
    int64_t tiles, levels;
} refinement;

INLINE void third_of_row(const anyfloat *restrict x, const anyfloat *restrict means, float step,
                         const uint8_t *restrict row, anyfloat *restrict q,
                         uint8_t *restrict symbols, uint8_t *restrict contexts,
                         anyfloat *restrict errors)
{
    float inverse = 1.0f / step;
    contexts_of_row(q, row, contexts);
    for (int64_t c = 0; c < WIDTH; c++) {
        float whole = 3.0f * q[c];
        float third = rintf((x[c] - means[c]) * inverse) - whole;
        third = third < 1 ? third : 1;
        third = third > -1 ? third : -1;
        symbols[c] = (uint8_t)(int32_t)((q[c] < 0 ? -third : third) + 1.0f);
        float finer = whole + third;
        float error = fabsf(x[c] - (finer * step + means[c]));
        errors[c] = error > errors[c] ? error : errors[c];
        q[c] = finer;
    }
}

/* Refines a block's quotients level by level. Returns whether float32 was fine enough. */
int64_t LOOP(kvq_refine)(const block *b, const refinement *r)
{
    group g = {0};
    int64_t is_right = begin_group(&g, b, r->tiles) ? 1 : NO_MEMORY, tile = 0;
    for (int64_t head = 0; is_right > 0 && head < b->heads;) {
        head += load_heads(b, head, &g);
        int64_t count = smaller(g.size, r->tiles - tile);
        for (int64_t index = 0; is_right > 0 && index < count; index++, tile++) {
            float step = r->steps[tile];
            for (int64_t level = 0; is_right > 0 && level < r->levels; level++) {
                int64_t at = level * r->tiles + tile;
                float errors[WIDTH] = {0};
                step = step / 3.0f;
                for (int64_t token = 0; token < b->tokens; token++) {
                    int64_t from = at * b->tokens + token;
                    third_of_row(g.x + (index * b->tokens + token) * WIDTH,
                                 r->means + tile * WIDTH, step, r->rows + at * WIDTH,
                                 r->quotients + (tile * b->tokens + token) * WIDTH,
                                 r->symbols + from * WIDTH, r->contexts + from * WIDTH, errors);
                }
                r->errors[at] = largest_of(errors);
                is_right = r->errors[at] <= step * TOLERANCE;
            }
        }
    }
    end_group(&g);
    return is_right;
}

/* Fills out u8 (n, tokens, 128) with each number's model, from models u8 (n, 128) and classes. */
void LOOP(kvq_move)(const uint8_t *models, const uint8_t *classes, uint8_t *out, int64_t tiles,
                    int64_t tokens)
{
    uint8_t kinds[KINDS][WIDTH];
    for (int64_t tile = 0; tile < tiles; tile++) {
        move_all(models + tile * WIDTH, kinds);
        for (int64_t token = 0; token < tokens; token++)
            memcpy(out + (tile * tokens + token) * WIDTH, kinds[classes[token] & (KINDS - 1)],
                   WIDTH);
    }
}
