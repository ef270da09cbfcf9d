// Decodes kvq layers in a CUDA device's memory to an engine's pages; compiled after
// rans_kernels.cu. codecs/kvq_kernels.py checks each layer's head, launches the kernels and
// documents the arguments. Data after a head is untrusted: counts are clamped to the head's, and
// faults are recorded in `status`, one word of bits per layer.
//
// Numbers are computed as in codecs/kvq_tiles.py and codecs/rope.py, each operation rounded
// separately (the intrinsics prevent fusing), so that all backends agree.

static const u32 CHANNELS = 128;
static const u32 MODELS = 64;
static const u32 SYMBOLS = 128;
static const int ZERO = 64;
static const u32 ESCAPE = 0;
static const u32 HEAD_BYTES = 24;
static const u32 BAD_STEPS = 2, BAD_MEANS = 4;

#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#define FULL_HOUSE 4  // resident blocks of 512 threads per multiprocessor
#else
#define FULL_HOUSE 2
#endif

// The arrays of a layer's body, in stored order.
struct Body {
    const float* steps;
    const u32 *counts, *escapes, *states;
    const u16* means;
    const u8* models;
    const u16* words;
    const short* values;
};

__device__ static Body body_of(const u8* layer, u64 pairs, u64 tiles, u64 words) {
    Body body;
    body.steps = (const float*)(layer + HEAD_BYTES) + pairs;
    body.counts = (const u32*)(body.steps + tiles);
    body.escapes = body.counts + tiles;
    body.states = body.escapes + tiles;
    body.means = (const u16*)(body.states + tiles * LANES);
    body.models = (const u8*)(body.means + tiles * CHANNELS);
    body.words = (const u16*)(body.models + tiles * CHANNELS);
    body.values = (const short*)(body.words + words);
    return body;
}

// --- floats

__device__ static float power_of_two(int exponent) {
    return __uint_as_float((u32)(127 + exponent) << 23);
}

__device__ static float half_value(u16 half) {  // finite
    const u32 size = half & 0x7FFFu;
    const u32 sign = (u32)(half & 0x8000u) << 16;
    if (size < 0x400u) return __uint_as_float(sign | __float_as_uint(size * power_of_two(-24)));
    return __uint_as_float(sign | ((size << 13) + ((127u - 15u) << 23)));
}

struct AsBfloat16 {
    typedef u16 Word;
    __device__ static Word at(const u16* halves, u64 i) { return halves[i]; }
    __device__ static Word of(float value) {
        const u32 bits = __float_as_uint(value);
        return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    }
};

struct AsFloat16 {
    typedef u16 Word;
    __device__ static Word at(const u16* halves, u64 i) { return halves[i]; }
    __device__ static Word of(float value) {
        const float largest = 65504.0f;
        if (value > largest) value = largest;
        if (value < -largest) value = -largest;
        const u32 bits = __float_as_uint(value), size = bits & 0x7FFFFFFFu;
        const u32 sign = bits >> 16 & 0x8000u;
        if (size < (127u - 14u) << 23)  // exact, then rounded to a whole number
            return sign | (u32)__float2int_rn(__fmul_rn(__uint_as_float(size), power_of_two(24)));
        const u32 wide = size - ((127u - 15u) << 23);
        return sign | (wide + 0xFFFu + (wide >> 13 & 1u)) >> 13;
    }
};

struct AsFloat32 {
    typedef u32 Word;
    __device__ static Word at(const u16* halves, u64 i) {  // at an even address
        return halves[2 * i] | (u32)halves[2 * i + 1] << 16;
    }
    __device__ static Word of(float value) { return __float_as_uint(value); }
};

// --- kernels

// One warp per layer: the start of each tile's words and escapes, and a check of their sums.
extern "C" __global__ void kvq_open(
    const u8* memory, const u64* bases, const u64* pairs, const u64* words, const u64* values,
    u32 tiles, u32 layers, u64* word_starts, u64* value_starts, u32* status
) {
    const u32 lane = lane_of(), warps = gridDim.x * blockDim.x / LANES;
    for (u32 layer = (blockIdx.x * blockDim.x + threadIdx.x) / LANES; layer < layers; layer += warps) {
        const Body body = body_of(memory + bases[layer], pairs[layer], tiles, words[layer]);
        u64 word = 0, value = 0;
        bool is_right = true;
        for (u32 at = 0; at < tiles; at += LANES) {
            const bool is_tile = at + lane < tiles;
            const u32 tile = is_tile ? at + lane : 0;
            const u64 count = is_tile ? body.counts[tile] : 0;
            const u64 escapes = is_tile ? body.escapes[tile] : 0;
            const u64 counts_to_here = sum_to_here(count), escapes_to_here = sum_to_here(escapes);
            if (is_tile) {
                word_starts[(u64)layer * tiles + tile] = word + counts_to_here - count;
                value_starts[(u64)layer * tiles + tile] = value + escapes_to_here - escapes;
                const u32 bits = __float_as_uint(body.steps[tile]);
                is_right &= bits - 1 < 0x7F7FFFFFu;  // positive and finite
            }
            word += __shfl_sync(EVERY_LANE, counts_to_here, LANES - 1);
            value += __shfl_sync(EVERY_LANE, escapes_to_here, LANES - 1);
        }
        if (!is_right) atomicOr(status + layer, BAD_STEPS);
        if (!lane && (word != words[layer] || value != values[layer]))
            atomicOr(status + layer, BAD_COUNTS);
    }
}

// Decodes the symbols of a tile u8 (tokens, 128), and the number of escapes before each token.
__device__ static u32 decode_tile(
    Stream& stream, const u32* entries, const u8* buckets, const u32* models, u32 tokens,
    u8* symbols, u32* firsts
) {
    const u32 lane = lane_of();
    u32 escapes = 0;
    for (u32 token = 0; token < tokens; ++token) {
        if (!lane) firsts[token] = escapes;
#pragma unroll
        for (u32 pair = 0; pair < CHANNELS / 64; ++pair) {
            u32 found[2];
#pragma unroll
            for (u32 odd = 0; odd < 2; ++odd) {
                const u32 model = models[2 * pair + odd];
                found[odd] = next_symbol(stream, entries + model * SYMBOLS, buckets + model * BUCKETS);
                escapes += __popc(__ballot_sync(EVERY_LANE, found[odd] == ESCAPE));
            }
            ((u16*)(symbols + (u64)token * CHANNELS + 64 * pair))[lane] = found[0] | found[1] << 8;
        }
    }
    return escapes;
}

// Grid: (any, rows). A row is one block of tokens of one layer: row_tiles tiles, one warp each.
extern "C" __global__ void __launch_bounds__(512, FULL_HOUSE) kvq_symbols(
    const u8* memory, const u64* bases, const u64* pairs, const u64* words, const u64* word_starts,
    const u64* row_layers, const u64* row_blocks, const u32* table, const u8* bucket_table,
    u32 tiles, u32 row_tiles, u32 tokens, u32 block_tokens, u8* symbols, u32* firsts, u32* status
) {
    __shared__ u32 entries[MODELS * SYMBOLS];
    __shared__ u8 buckets[MODELS * BUCKETS];
    for (u32 i = threadIdx.x; i < MODELS * SYMBOLS; i += blockDim.x) entries[i] = table[i];
    for (u32 i = threadIdx.x; i < MODELS * BUCKETS; i += blockDim.x) buckets[i] = bucket_table[i];
    __syncthreads();
    const u32 lane = lane_of(), warps = blockDim.x / LANES;
    const u32 layer = row_layers[blockIdx.y], block = row_blocks[blockIdx.y];
    const Body body = body_of(memory + bases[layer], pairs[layer], tiles, words[layer]);
    const u32 mine = min(block_tokens, tokens - block * block_tokens);
    for (u32 at = blockIdx.x * warps + threadIdx.x / LANES; at < row_tiles; at += gridDim.x * warps) {
        const u32 tile = block * row_tiles + at;
        const u64 start = min(word_starts[(u64)layer * tiles + tile], words[layer]);
        Stream stream;
        stream.words = (const u8*)(body.words + start);
        stream.count = min((u64)body.counts[tile], words[layer] - start);
        stream.used = 0;
        stream.state = body.states[(u64)tile * LANES + lane];
        u32 models[CHANNELS / LANES], faults = 0;
#pragma unroll
        for (u32 step = 0; step < CHANNELS / LANES; ++step) {
            const u64 channel = (u64)tile * CHANNELS + step / 2 * 64 + 2 * lane + step % 2;
            models[step] = body.models[channel];
            if (models[step] >= MODELS) faults |= BAD_MODELS;
            models[step] %= MODELS;
            if ((body.means[channel] & 0x7C00u) == 0x7C00u) faults |= BAD_MEANS;
        }
        const u64 place = ((u64)blockIdx.y * row_tiles + at) * block_tokens;
        const u32 escapes = decode_tile(
            stream, entries, buckets, models, mine, symbols + place * CHANNELS, firsts + place
        );
        if (!ends_well(stream)) faults |= BAD_STREAM;
        if (escapes != body.escapes[tile]) faults |= BAD_ESCAPES;
        if (faults) atomicOr(status + layer, faults);
    }
}

// One part of one block of tokens.
struct Part {
    Body body;
    const u64* value_starts;  // of the block's tiles
    const u8* symbols;
    const u32* firsts;
    u64 values;
    u32 first_tile, tile, block_tokens;  // of the layer, of the row
};

__device__ static float number(const Part& part, u32 token, u32 channel) {
    const u32 tile = channel / CHANNELS, c = channel % CHANNELS;
    const u64 row = (u64)(part.tile + tile) * part.block_tokens + token;
    const u8* symbols = part.symbols + row * CHANNELS;
    int quotient = (int)symbols[c] - ZERO;
    if (symbols[c] == ESCAPE) {
        u64 at = part.value_starts[part.tile + tile] + part.firsts[row];
        for (u32 i = 0; i < c; ++i) at += symbols[i] == ESCAPE;
        quotient = at < part.values ? part.body.values[at] : 0;
    }
    const u64 place = part.first_tile + part.tile + tile;
    const float mean = half_value(part.body.means[place * CHANNELS + c]);
    return __fadd_rn(__fmul_rn((float)quotient, part.body.steps[place]), mean);
}

// Grid: (any, rows x parts). Adjacent threads take adjacent channels; of rotated keys, a thread
// takes a pair of channels. The pages are as in frame_kernels.cu. The first part of layers with
// `pairs` is rotated by the angles, f32 (tokens, pairs) from angle_starts on. The `exact` tokens of
// a layer, (parts, exact, heads, dim) at `exacts`, are copied before the coded ones.
#define KVQ_NUMBERS(NAME, FORMAT)                                                                 \
    extern "C" __global__ void NAME(                                                              \
        const u8* memory, const u64* bases, const u64* pairs, const u64* words,                   \
        const u64* values, const u64* value_starts, const u64* row_layers, const u64* row_blocks, \
        const u8* symbols, const u32* firsts, const u64* angle_starts, const float* cosines,      \
        const float* sines, const u64* pages, const u64* first_tokens, const u64* blocks,         \
        const u64* exacts, u32 exact,                                                             \
        u32 tiles, u32 row_tiles, u32 tokens, u32 block_tokens, u32 parts, u32 heads, u32 dim,    \
        u32 page_tokens, u64 page_stride, u64 token_stride, u64 head_stride                       \
    ) {                                                                                           \
        typedef FORMAT::Word Word;                                                                \
        const u32 row = blockIdx.y / parts, index = blockIdx.y % parts;                           \
        const u32 layer = row_layers[row], block = row_blocks[row];                               \
        Part part;                                                                                \
        part.body = body_of(memory + bases[layer], pairs[layer], tiles, words[layer]);            \
        part.first_tile = block * row_tiles;                                                      \
        part.tile = index * (row_tiles / parts);                                                  \
        part.value_starts = value_starts + (u64)layer * tiles + part.first_tile;                  \
        part.symbols = symbols + (u64)row * row_tiles * block_tokens * CHANNELS;                  \
        part.firsts = firsts + (u64)row * row_tiles * block_tokens;                               \
        part.values = values[layer];                                                              \
        part.block_tokens = block_tokens;                                                         \
        const u32 turned = index ? 0 : pairs[layer], units = dim - turned;                        \
        const u32 lead = block ? 0 : exact, first_in_chunk = exact - lead + block * block_tokens; \
        const u32 mine = lead + min(block_tokens, tokens - block * block_tokens);                 \
        const u16* copied = (const u16*)exacts[layer];                                            \
        u8* paged = (u8*)pages[layer * parts + index];                                            \
        for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < heads * mine * units;           \
             at += gridDim.x * blockDim.x) {                                                      \
            const u32 line = at / units, unit = at - line * units;                                \
            const u32 head = line / mine, place = line - head * mine;                             \
            const u32 slot = first_tokens[layer] + first_in_chunk + place;                        \
            const u32 page = slot / page_tokens, token = place - lead;                            \
            Word* out = (Word*)(paged + blocks[page] * page_stride                                \
                + (slot - page * page_tokens) * token_stride + head * head_stride);               \
            if (place < lead) {                                                                   \
                const u64 from = ((u64)(index * exact + place) * heads + head) * dim;             \
                out[unit] = FORMAT::at(copied, from + unit);                                      \
                out[unit + turned] = FORMAT::at(copied, from + unit + turned);                    \
                continue;                                                                         \
            }                                                                                     \
            if (unit >= turned) {                                                                 \
                const u32 channel = unit + turned;                                                \
                out[channel] = FORMAT::of(number(part, token, head * dim + channel));             \
                continue;                                                                         \
            }                                                                                     \
            const u32 coded = block * block_tokens + token;                                       \
            const u64 angle = angle_starts[layer] + (u64)coded * turned + unit;                   \
            const float first = number(part, token, head * dim + unit);                           \
            const float second = number(part, token, head * dim + unit + turned);                 \
            const float cosine = cosines[angle], sine = sines[angle];                             \
            out[unit] = FORMAT::of(                                                               \
                __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine)));                    \
            out[unit + turned] = FORMAT::of(                                                      \
                __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine)));                    \
        }                                                                                         \
    }

KVQ_NUMBERS(kvq_numbers_bfloat16, AsBfloat16)
KVQ_NUMBERS(kvq_numbers_float16, AsFloat16)
KVQ_NUMBERS(kvq_numbers_float32, AsFloat32)
