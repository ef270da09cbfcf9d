// Kernels for frames in a CUDA device's memory: checksums, and copies of rows between a frame and
// an engine's pages. Compiled at run time; codecs/frame_kernels.py launches them and documents the
// arguments. Tests also compile this file for the CPU, where threads run one by one: no thread may
// wait for another.
//
// The checksum is XXH3_64 with seed 0 (Yann Collet, xxHash 0.8, the specification's "XXH3").
// Its long form adds the sixteen 64-byte stripes of a 1 KiB block to eight accumulators and
// scrambles them after each block. A block's sums do not depend on earlier blocks, so all blocks
// are summed in parallel (sum_blocks, which reads the memory). Only one addition and one scramble
// per block are sequential (chain_blocks, on a sixteenth of the data), with a thread for each
// accumulator; finish_segments computes the checksum from them.
// Rows copied to pages in words of 16 bytes are summed in the same pass (scatter_and_sum).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) u128 {
    u64 low, high;
};

static const u32 BLOCK_BYTES = 1024;
static const u32 STRIPE_BYTES = 64;
static const u32 STRIPES = 16;
static const u32 LANES = 8;
static const u32 SHORT_BYTES = 240;

static const u64 P32_1 = 0x9E3779B1ULL;
static const u64 P32_2 = 0x85EBCA77ULL;
static const u64 P32_3 = 0xC2B2AE3DULL;
static const u64 P64_1 = 0x9E3779B185EBCA87ULL;
static const u64 P64_2 = 0xC2B2AE3D27D4EB4FULL;
static const u64 P64_3 = 0x165667B19E3779F9ULL;
static const u64 P64_4 = 0x85EBCA77C2B2AE63ULL;
static const u64 P64_5 = 0x27D4EB2F165667C5ULL;
static const u64 MIX_1 = 0x165667919E3779F9ULL;
static const u64 MIX_2 = 0x9FB21C651E98DF25ULL;

alignas(16) __device__ const u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// --- words and mixing

__device__ static u64 word(const u8* p) {  // at any address
    u64 value = 0;
    for (u32 i = 0; i < 8; ++i) value |= (u64)p[i] << (8 * i);
    return value;
}

__device__ static u64 half_word(const u8* p) {
    return (u64)p[0] | (u64)p[1] << 8 | (u64)p[2] << 16 | (u64)p[3] << 24;
}

__device__ static u64 secret_word(u32 index) { return ((const u64*)SECRET)[index]; }

__device__ static u64 rotated(u64 value, u32 bits) { return value << bits | value >> (64 - bits); }

__device__ static u64 reversed(u64 value) {
    u64 out = 0;
    for (u32 i = 0; i < 8; ++i) out |= (value >> (8 * i) & 0xFF) << (56 - 8 * i);
    return out;
}

__device__ static u64 folded(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ static u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 37) * MIX_1;
    return hash ^ hash >> 32;
}

__device__ static u64 avalanche_64(u64 hash) {
    hash = (hash ^ hash >> 33) * P64_2;
    hash = (hash ^ hash >> 29) * P64_3;
    return hash ^ hash >> 32;
}

__device__ static u64 mixed_16(const u8* p, const u8* secret) {
    return folded(word(p) ^ word(secret), word(p + 8) ^ word(secret + 8));
}

// --- short inputs

__device__ static u64 hash_up_to_16(const u8* p, u64 size) {
    if (size > 8) {
        u64 low = word(p) ^ word(SECRET + 24) ^ word(SECRET + 32);
        u64 high = word(p + size - 8) ^ word(SECRET + 40) ^ word(SECRET + 48);
        return avalanche(size + reversed(low) + high + folded(low, high));
    }
    if (size >= 4) {
        u64 hash = half_word(p + size - 4) + (half_word(p) << 32);
        hash ^= word(SECRET + 8) ^ word(SECRET + 16);
        hash ^= rotated(hash, 49) ^ rotated(hash, 24);
        hash *= MIX_2;
        hash ^= (hash >> 35) + size;
        hash *= MIX_2;
        return hash ^ hash >> 28;
    }
    if (size) {
        u64 all = (u64)p[0] << 16 | (u64)p[size >> 1] << 24 | (u64)p[size - 1] | size << 8;
        return avalanche_64(all ^ half_word(SECRET) ^ half_word(SECRET + 4));
    }
    return avalanche_64(word(SECRET + 56) ^ word(SECRET + 64));
}

__device__ static u64 hash_up_to_128(const u8* p, u64 size) {
    u64 sum = size * P64_1;
    for (u32 i = 0; i <= (size - 1) / 32; ++i) {
        sum += mixed_16(p + 16 * i, SECRET + 32 * i);
        sum += mixed_16(p + size - 16 * (i + 1), SECRET + 32 * i + 16);
    }
    return avalanche(sum);
}

__device__ static u64 hash_up_to_240(const u8* p, u64 size) {
    u64 sum = size * P64_1;
    for (u32 i = 0; i < 8; ++i) sum += mixed_16(p + 16 * i, SECRET + 16 * i);
    sum = avalanche(sum);
    for (u32 i = 8; i < size / 16; ++i) sum += mixed_16(p + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(sum + mixed_16(p + size - 16, SECRET + 136 - 17));
}

// --- long inputs

__device__ static u64 full_blocks(u64 size) {
    return size > SHORT_BYTES ? (size - 1) / BLOCK_BYTES : 0;
}

__device__ static u64 product(u64 keyed) { return (keyed & 0xFFFFFFFFULL) * (keyed >> 32); }

// A thread's share of a block: two accumulators, 16 bytes of each stripe.
struct PairOfSums {
    u64 keys[STRIPES + 1];
    u64 even = 0, odd = 0;

    __device__ explicit PairOfSums(u32 pair) {
#pragma unroll
        for (u32 i = 0; i <= STRIPES; ++i) keys[i] = secret_word(2 * pair + i);
    }

    __device__ void add(u32 stripe, u128 value) {
        even += value.high + product(value.low ^ keys[stripe]);
        odd += value.low + product(value.high ^ keys[stripe + 1]);
    }
};

// Arguments of kernels. All frames of a launch have the same segments, rows and shapes;
// frames[2 * f] is the offset of frame f in memory, frames[2 * f + 1] the slot of its first token.
struct Segment {
    u64 offset, size, first_block, first_row; /* offset: in the frame; first_block: among its own */
};

// Grid: (any, frames x segments). Four threads per block of input, two accumulators each, 16 bytes
// per load.
extern "C" __global__ void sum_blocks(
    const u8* memory, const u64* frames, const Segment* segments, u64* sums, u32 segment_count,
    u32 frame_blocks
) {
    const u32 frame = blockIdx.y / segment_count;
    const Segment segment = segments[blockIdx.y % segment_count];
    const u64 blocks = full_blocks(segment.size);
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 groups = (u64)gridDim.x * blockDim.x / 4;
    const u32 pair = thread % 4;
    const u8* start = memory + frames[2 * frame] + segment.offset + 16 * pair;
    const u64 first_block = (u64)frame * frame_blocks + segment.first_block;
    PairOfSums mine(pair);
    for (u64 block = thread / 4; block < blocks; block += groups) {
        const u128* data = (const u128*)(start + block * BLOCK_BYTES);
        mine.even = mine.odd = 0;
#pragma unroll
        for (u32 stripe = 0; stripe < STRIPES; ++stripe) mine.add(stripe, data[4 * stripe]);
        u64* out = sums + (first_block + block) * LANES + 2 * pair;
        out[0] = mine.even;
        out[1] = mine.odd;
    }
}

__device__ static void add_stripe(u64* values, const u8* p, const u8* secret) {
    for (u32 lane = 0; lane < LANES; ++lane) {
        const u64 value = word(p + 8 * lane);
        values[lane ^ 1] += value;
        values[lane] += product(value ^ word(secret + 8 * lane));
    }
}

__device__ const u64 STARTS[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
static const u32 BLOCKS_AHEAD = 32;

// One thread per lane of a segment of all frames, *total* segments. The accumulator after all
// blocks replaces its first sum. BLOCKS_AHEAD sums are loaded at once.
extern "C" __global__ void chain_blocks(
    const Segment* segments, u64* sums, u32 segment_count, u32 frame_blocks, u32 total
) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 number = thread / LANES, lane = thread % LANES;
    if (number >= total) return;
    const Segment segment = segments[number % segment_count];
    const u64 blocks = full_blocks(segment.size);
    if (!blocks) return;
    const u64 frame = number / segment_count;
    u64* mine = sums + (frame * frame_blocks + segment.first_block) * LANES + lane;
    const u64 key = secret_word(128 / 8 + lane);
    u64 value = STARTS[lane];
    for (u64 block = 0; block < blocks; block += BLOCKS_AHEAD) {
        u64 next[BLOCKS_AHEAD];
#pragma unroll
        for (u32 i = 0; i < BLOCKS_AHEAD; ++i)
            next[i] = block + i < blocks ? mine[(block + i) * LANES] : 0;
#pragma unroll
        for (u32 i = 0; i < BLOCKS_AHEAD; ++i) {
            if (block + i >= blocks) break;
            value += next[i];
            value = (value ^ value >> 47 ^ key) * P32_1;
        }
    }
    mine[0] = value;
}

__device__ static u64 hash_of_long(const u8* p, u64 size, const u64* sums) {
    u64 values[LANES];
    for (u32 lane = 0; lane < LANES; ++lane)
        values[lane] = full_blocks(size) ? sums[lane] : STARTS[lane];
    const u8* rest = p + full_blocks(size) * BLOCK_BYTES;
    const u32 stripes = (p + size - 1 - rest) / STRIPE_BYTES;
    for (u32 i = 0; i < stripes; ++i) add_stripe(values, rest + i * STRIPE_BYTES, SECRET + 8 * i);
    add_stripe(values, p + size - STRIPE_BYTES, SECRET + 192 - 64 - 7);
    u64 hash = size * P64_1;
    for (u32 i = 0; i < LANES; i += 2) {
        const u8* key = SECRET + 11 + 8 * i;
        hash += folded(values[i] ^ word(key), values[i + 1] ^ word(key + 8));
    }
    return avalanche(hash);
}

// One thread per segment of all frames, *total* segments; after chain_blocks.
extern "C" __global__ void finish_segments(
    const u8* memory, const u64* frames, const Segment* segments, const u64* sums,
    u64* hashes, u32 segment_count, u32 frame_blocks, u32 total
) {
    const u32 number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= total) return;
    const Segment segment = segments[number % segment_count];
    const u64 frame = number / segment_count;
    const u8* p = memory + frames[2 * frame] + segment.offset;
    const u64 size = segment.size;
    u64 hash;
    if (size > SHORT_BYTES)
        hash = hash_of_long(p, size, sums + (frame * frame_blocks + segment.first_block) * LANES);
    else if (size > 128) hash = hash_up_to_240(p, size);
    else if (size > 16) hash = hash_up_to_128(p, size);
    else hash = hash_up_to_16(p, size);
    hashes[number] = hash;
}

// Grid: (any, frames). Reads *count* words of eight bytes from *before* bytes before each frame on;
// zeros past the end of memory.
extern "C" __global__ void read_words(
    const u8* memory, const u64* frames, u64* out, u64 memory_bytes, u32 before, u32 count
) {
    const u64 first = frames[2 * blockIdx.y] - before;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) {
        const u64 place = first + 8 * (u64)at;
        const bool is_there = place + 8 <= memory_bytes;
        out[(u64)blockIdx.y * count + at] = is_there ? *(const u64*)(memory + place) : 0;
    }
}

// --- rows of head_dim elements between a raw frame and an engine's pages
//
// A row of the table is one part of one layer: (kv_heads, tokens, head_dim), contiguous in the
// frame. Token t of a component whose first token is f lies in slot first_slot + f + t, in block
// slot / block_tokens of its block table. A SKIPPED block is neither read nor written. Adjacent
// threads take adjacent words of the frame.
struct Shape {
    u64 tokens, heads, row_bytes, first_token, block_tokens, block_stride, token_stride, head_stride;
};

struct Row {
    u64 page, offset, table, shape; /* address of the pages; offset in the frame; indexes */
};

static const u64 SKIPPED = ~0ULL;
static const u32 WORDS_AHEAD = 4;

// Grid: (any, frames x rows). A thread loads WORDS_AHEAD words at once.
#define MOVE_ROWS(NAME, WORD, FROM, TO)                                                         \
    extern "C" __global__ void NAME(                                                            \
        u8* memory, const u64* frames, const Row* rows, const Shape* shapes, const u64* blocks, \
        u32 row_count, u32 table_blocks                                                         \
    ) {                                                                                         \
        const u64* frame = frames + 2 * (blockIdx.y / row_count);                               \
        const Row row = rows[blockIdx.y % row_count];                                           \
        const Shape shape = shapes[row.shape];                                                  \
        const u64* table = blocks + row.table * table_blocks;                                   \
        WORD* packed = (WORD*)(memory + frame[0] + row.offset);                                 \
        const u32 tokens = shape.tokens, block_tokens = shape.block_tokens;                     \
        const u32 row_words = shape.row_bytes / sizeof(WORD);                                   \
        const u32 first_slot = frame[1] + shape.first_token;                                    \
        const u32 words = tokens * shape.heads * row_words; /* a frame has < 2^30 bytes */      \
        const u32 step = gridDim.x * blockDim.x;                                                \
        for (u32 begin = blockIdx.x * blockDim.x + threadIdx.x; begin < words;                  \
             begin += WORDS_AHEAD * step) {                                                     \
            WORD* targets[WORDS_AHEAD] = {};                                                    \
            WORD values[WORDS_AHEAD] = {};                                                      \
            _Pragma("unroll") for (u32 i = 0; i < WORDS_AHEAD; ++i) {                           \
                const u32 at = begin + i * step;                                                \
                if (at >= words) continue;                                                      \
                const u32 line = at / row_words, head = line / tokens;                          \
                const u32 slot = first_slot + line - head * tokens, block = slot / block_tokens;\
                const u64 id = table[block];                                                    \
                if (id == SKIPPED) continue;                                                    \
                u8* start = (u8*)row.page + id * shape.block_stride                             \
                    + (slot - block * block_tokens) * shape.token_stride                        \
                    + head * shape.head_stride;                                                 \
                WORD* place = (WORD*)start + (at - line * row_words);                           \
                values[i] = FROM;                                                               \
                targets[i] = &(TO);                                                             \
            }                                                                                   \
            _Pragma("unroll") for (u32 i = 0; i < WORDS_AHEAD; ++i)                             \
                if (targets[i]) *targets[i] = values[i];                                        \
        }                                                                                       \
    }

#define MOVE_BOTH_WAYS(BYTES, WORD)                           \
    MOVE_ROWS(scatter_##BYTES, WORD, packed[at], *place)      \
    MOVE_ROWS(gather_##BYTES, WORD, *place, packed[at])

MOVE_BOTH_WAYS(16, u128)
MOVE_BOTH_WAYS(8, u64)
MOVE_BOTH_WAYS(4, u32)
MOVE_BOTH_WAYS(2, u16)
MOVE_BOTH_WAYS(1, u8)

// scatter_16 and sum_blocks in one pass over the memory.
// Grid: (any, frames x segments). A segment is a layer, part after part. Four threads per block of
// input; a thread loads STRIPES_AHEAD stripes before it stores any, so that no load waits for a
// store that might alias it.
static const u32 STRIPES_AHEAD = 8;

extern "C" __global__ void scatter_and_sum(
    const u8* memory, const u64* frames, const Segment* segments, u64* sums, u32 segment_count,
    u32 frame_blocks, const Row* rows, const Shape* shapes, const u64* blocks, u32 table_blocks
) {
    const u32 number = blockIdx.y / segment_count;
    const u64* frame = frames + 2 * number;
    const Segment segment = segments[blockIdx.y % segment_count];
    const Row* parts = rows + segment.first_row;
    const Shape shape = shapes[parts[0].shape];
    const u64* table = blocks + parts[0].table * table_blocks;
    const u64 first_block = (u64)number * frame_blocks + segment.first_block;
    const u64 full = full_blocks(segment.size);
    const u32 words = segment.size / 16; /* a frame has fewer than 2^30 bytes */
    const u32 tokens = shape.tokens, heads = shape.heads, row_words = shape.row_bytes / 16;
    const u32 block_tokens = shape.block_tokens;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x / 4 * (BLOCK_BYTES / 16);
    const u32 pair = thread % 4;
    const u32 first_slot = frame[1] + shape.first_token;
    const u128* data = (const u128*)(memory + frame[0] + segment.offset);
    PairOfSums mine(pair);
    for (u32 begin = thread / 4 * (BLOCK_BYTES / 16); begin < words; begin += step) {
        u32 at = begin + pair, row = at / row_words, column = at - row * row_words;
        u32 line = row / tokens, token = row - line * tokens;
        u128* place = 0;
        bool is_known = false;
        mine.even = mine.odd = 0;
        for (u32 stripe = 0; stripe < STRIPES; stripe += STRIPES_AHEAD) {
            u128 values[STRIPES_AHEAD];
#pragma unroll
            for (u32 i = 0; i < STRIPES_AHEAD; ++i)
                values[i] = at + 4 * i < words ? data[at + 4 * i] : u128{0, 0};
#pragma unroll
            for (u32 i = 0; i < STRIPES_AHEAD; ++i, at += 4) {
                mine.add(stripe + i, values[i]);
                if (at >= words) continue;
                if (!is_known) {
                    const u32 slot = first_slot + token, block = slot / block_tokens;
                    const u32 part = line / heads, head = line - part * heads;
                    const u64 id = table[block];
                    place = id == SKIPPED ? 0 : (u128*)(
                        (u8*)parts[part].page + id * shape.block_stride
                        + (slot - block * block_tokens) * shape.token_stride
                        + head * shape.head_stride
                    );
                    is_known = true;
                }
                if (place) place[column] = values[i];
                for (column += 4; column >= row_words; column -= row_words) {
                    is_known = false;
                    if (++token == tokens) token = 0, ++line;
                }
            }
        }
        const u64 block = begin / (BLOCK_BYTES / 16);
        if (block >= full) continue;
        u64* out = sums + (first_block + block) * LANES + 2 * pair;
        out[0] = mine.even;
        out[1] = mine.odd;
    }
}
