// Tiles of xpack, both ways: one block a tile. Behind exponent_kernels.cu.

static const u32 AS_IT_IS = 0xFFFFFFFFu;
static const u32 CODES = 16;

struct OfXpack {
    static const u32 ESCAPE_BYTES = 3;
    __device__ static Sizes of(const u8* record, u32 items) {
        const u32 escapes = word_at(record + CODES);
        if (escapes == AS_IT_IS) return {items, 0, true};
        return {(items + 1) / 2, escapes, escapes <= items};
    }
};

static const u32 UNIT = 8;

__device__ static u32 code_at(const u8* packed, u32 item) {
    return packed[item / 2] >> (item % 2 * 4) & 15u;
}

struct alignas(16) Quad {
    u32 words[4];
};

// Eight elements of one row, all addresses multiples of four, of `out` sixteen.
__device__ static void join_unit(const Planes& planes, u32 at, u32 codes, const u8* low, u16* out) {
    const u32* rest = (const u32*)(planes.first + at);
    Quad quad;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 two = rest[i / 2] >> (i % 2 * 16), both = codes >> (8 * i);
        quad.words[i] = upper_half(two & 0xFFu, low[both & 15u])
            | upper_half(two >> 8 & 0xFFu, low[both >> 4 & 15u]) << 16;
    }
    *(Quad*)out = quad;
}

__device__ static void join_unit(const Planes& planes, u32 at, u32 codes, const u8* low, u32* out) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u8* place = planes.first + at + 4 * half;
        const u32 rest = *(const u32*)place, high = *(const u32*)(place + planes.stride);
        const u32 last = *(const u32*)(place + 2 * planes.stride);
        Quad quad;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 shift = 8 * i, code = codes >> (16 * half + 4 * i) & 15u;
            quad.words[i] = upper_half(rest >> shift & 0xFFu, low[code]) << 16
                | (high >> shift & 0xFFu) << 8 | (last >> shift & 0xFFu);
        }
        ((Quad*)out)[half] = quad;
    }
}

// One block a tile; `low` is its sixteen exponents, in shared memory.
template <class Word>
__device__ static void unpack(
    const u8* packed, bool is_packed, const Tile& tile, const Planes& planes, const Room& room,
    u32 dim, const u8* low, bool in_units
) {
    const u64 addresses = (u64)packed | (u64)planes.first | planes.stride;
    if (in_units && is_packed && addresses % 4 == 0) {
        for (u32 unit = threadIdx.x; unit < tile.items / UNIT; unit += blockDim.x) {
            const u32 item = unit * UNIT, row = item / dim;
            Word* out = (Word*)room.row(tile.first_row + row) + (item - row * dim);
            join_unit(planes, item, ((const u32*)packed)[unit], low, out);
        }
        return;
    }
    for (u32 item = threadIdx.x; item < tile.items; item += blockDim.x) {
        const u32 row = item / dim;
        const u32 exponent = is_packed ? low[code_at(packed, item)] : packed[item];
        Word* out = (Word*)room.row(tile.first_row + row);
        join(planes, item, exponent, out[item - row * dim]);
    }
}

// One warp: the escapes in their order, of several at one place the last. Returns faults.
template <class Word>
__device__ static u32 patch(
    const u8* places, const u8* values, u32 count, const Tile& tile, const Planes& planes,
    const Room& room, u32 dim
) {
    u32 faults = 0;
    for (u32 at = 0; at < count; at += LANES) {
        const u32 mine = at + lane_of();
        const bool is_there = mine < count;
        const u32 place = is_there ? places[2 * mine] | (u32)places[2 * mine + 1] << 8 : 0x10000u;
        const u32 same = __match_any_sync(EVERY_LANE, place);
        const bool is_last = !(same & ~lanes_below() & ~(1u << lane_of()));
        if (is_there && place >= tile.items) faults = BAD_ESCAPES;
        if (is_there && place < tile.items && is_last) {
            const u32 row = place / dim;
            Word* out = (Word*)room.row(tile.first_row + row);
            join(planes, place, values[mine], out[place - row * dim]);
        }
        __syncwarp();
    }
    return faults;
}

template <class Word>
__device__ static void decode_xpack(
    const u8* layer, const Cut& cut, u32 number, const u64* starts, const u64* escape_starts,
    const Room& room, u8* low, bool in_units, u32* status
) {
    const Tile tile = tile_of(cut, number);
    const Planes planes = planes_of(layer, cut, tile);
    const u8* record = layer + number * (u64)cut.record_bytes;
    const u8* payload = layer + cut.payload();
    const u32 stored = word_at(record + CODES);
    __syncthreads();
    if (threadIdx.x < CODES) low[threadIdx.x] = record[threadIdx.x];
    __syncthreads();
    const bool is_packed = stored != AS_IT_IS;
    unpack<Word>(payload + starts[number], is_packed, tile, planes, room, cut.dim, low, in_units);
    __syncthreads();
    if (!is_packed || threadIdx.x >= LANES) return;
    const u8* escaped = payload + starts[cut.tiles];
    const u8* values = escaped + 2 * escape_starts[cut.tiles] + escape_starts[number];
    const u8* places = escaped + 2 * escape_starts[number];
    const u32 faults = patch<Word>(places, values, stored, tile, planes, room, cut.dim);
    if (faults) atomicOr(status, faults);
}

OPEN(xpack_open, OfXpack)

#define DECODE_XPACK(NAME, WORD)                                                                \
    DECODE(NAME, __shared__ u8 low[CODES];, blockIdx.x, gridDim.x,                              \
        (void)warp; (void)warps;                                                                \
        decode_xpack<WORD>(                                                                     \
            data, cut, number, starts + row, escape_starts + row, room, low, in_units,          \
            status + layer);)

DECODE_XPACK(xpack_bfloat16, u16)
DECODE_XPACK(xpack_float32, u32)

// --- encoding

__device__ static u32 exponent_of(u16 word) { return word >> 7 & 0xFFu; }

__device__ static u32 exponent_of(u32 word) { return word >> 23 & 0xFFu; }

__device__ static void split(u8* first, u64 stride, u64 at, u16 word) {
    first[at] = (word >> 8 & 0x80u) | (word & 0x7Fu);
}

__device__ static void split(u8* first, u64 stride, u64 at, u32 word) {
    split(first, stride, at, (u16)(word >> 16));
    first[at + stride] = word >> 8;
    first[at + 2 * stride] = word;
}

template <class Word>
__device__ static Word element(const Room& room, const Tile& tile, u32 dim, u32 item) {
    const u32 row = item / dim;
    return ((const Word*)room.row(tile.first_row + row))[item - row * dim];
}

__device__ static void write_word(u8* place, u32 word) {
    for (u32 i = 0; i < 4; ++i) place[i] = word >> (8 * i);
}

// One block a tile: its record, from how often each exponent occurs. Of equally common exponents
// the lower one is taken, as codecs/xpack.py does.
template <class Word>
__device__ static void count_tile(
    const Tile& tile, const Room& room, u32 dim, u8* record, u32* counts, u8* is_common, u32* common
) {
    __syncthreads();
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) counts[e] = 0;
    if (!threadIdx.x) *common = 0;
    __syncthreads();
    for (u32 start = 0; start < tile.items; start += blockDim.x) {
        const u32 item = start + threadIdx.x;
        const bool is_there = item < tile.items;
        const u32 e = is_there ? exponent_of(element<Word>(room, tile, dim, item)) : 256;
        const u32 same = __match_any_sync(EVERY_LANE, e);  // few exponents: one addition for all
        if (is_there && !(same & lanes_below())) atomicAdd(counts + e, __popc(same));
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) {
        u32 rank = 0;
        for (u32 other = 0; other < 256; ++other)
            rank += counts[other] > counts[e] || (counts[other] == counts[e] && other < e);
        is_common[e] = rank < CODES;
        if (rank < CODES) atomicAdd(common, counts[e]);
    }
    __syncthreads();
    const u64 escapes = tile.items - *common;
    const bool is_packed = (tile.items + 1) / 2 + 3 * escapes < tile.items;
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) {
        u32 code = 0;
        for (u32 other = 0; other < e; ++other) code += is_common[other];
        if (is_common[e]) record[code] = is_packed ? e : 0;
    }
    if (!threadIdx.x) write_word(record + CODES, is_packed ? escapes : AS_IT_IS);
}

// One block: the escapes of a tile by ascending places.
template <class Word>
__device__ static void list_escapes(
    const Tile& tile, const Room& room, u32 dim, const u8* codes, u32* of_warps, u8* places,
    u8* values
) {
    const u32 warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    u32 before = 0;
    for (u32 start = 0; start < tile.items; start += blockDim.x) {
        const u32 item = start + threadIdx.x;
        const u32 e = item < tile.items ? exponent_of(element<Word>(room, tile, dim, item)) : 0;
        const bool escapes = item < tile.items && codes[e] == CODES;
        const u32 all = __ballot_sync(EVERY_LANE, escapes);
        if (!lane_of()) of_warps[warp] = __popc(all);
        __syncthreads();
        u32 at = before + __popc(all & lanes_below());
        for (u32 i = 0; i < warps; ++i) {
            if (i < warp) at += of_warps[i];
            before += of_warps[i];
        }
        if (escapes) {
            places[2 * at] = item;
            places[2 * at + 1] = item >> 8;
            values[at] = e;
        }
        __syncthreads();
    }
}

template <class Word>
__device__ static void pack_tile(
    u8* layer, const Cut& cut, u32 number, const u8* record, const u64* starts,
    const u64* escape_starts, const Room& room, u8* codes, u32* of_warps
) {
    const Tile tile = tile_of(cut, number);
    u8* planes = layer + cut.tiles * (u64)cut.record_bytes + tile.before;
    u8* payload = layer + cut.payload();
    u8* packed = payload + starts[number];
    const u32 stored = word_at(record + CODES);
    __syncthreads();
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) codes[e] = CODES;
    __syncthreads();
    if (threadIdx.x < CODES) codes[record[threadIdx.x]] = threadIdx.x;
    if (threadIdx.x < cut.record_bytes)
        layer[number * (u64)cut.record_bytes + threadIdx.x] = record[threadIdx.x];
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < (tile.items + 1) / 2; pair += blockDim.x) {
        u32 both = 0;
        for (u32 item = 2 * pair; item < min(2 * pair + 2, tile.items); ++item) {
            const Word word = element<Word>(room, tile, cut.dim, item);
            split(planes, cut.items(), item, word);
            const u32 e = exponent_of(word);
            if (stored == AS_IT_IS) packed[item] = e;
            else both |= codes[e] % CODES << (item % 2 * 4);
        }
        if (stored != AS_IT_IS) packed[pair] = both;
    }
    if (stored == AS_IT_IS || !stored) return;
    u8* escaped = payload + starts[cut.tiles];
    list_escapes<Word>(
        tile, room, cut.dim, codes, of_warps, escaped + 2 * escape_starts[number],
        escaped + 2 * escape_starts[cut.tiles] + escape_starts[number]
    );
}

// Grid: (any, layers), a block a tile. GIVEN ends with a comma, or is nothing.
#define COMMA ,
#define ENCODE(NAME, GIVEN, SHARED, BODY)                                                       \
    extern "C" __global__ void __launch_bounds__(256, 4) NAME(                                     \
        GIVEN u8* records, const u64* pages, const u64* blocks, u32 first_token, u32 tiles,     \
        u32 part_rows, u32 tile_rows, u32 tokens, u32 dim, u32 item_bytes, u32 record_bytes,    \
        u32 parts, u32 page_tokens, u64 page_stride, u64 token_stride, u64 head_stride          \
    ) {                                                                                         \
        SHARED                                                                                  \
        const Cut cut = {tiles, part_rows, tile_rows, tokens, dim, item_bytes, record_bytes};   \
        const u32 layer = blockIdx.y;                                                           \
        for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {                    \
            u8* record = records + (layer * (u64)tiles + number) * record_bytes;                \
            const Room room = {                                                                 \
                (u8*)pages[layer * parts + number / cut.part_tiles()], blocks, first_token,     \
                tokens, page_tokens, page_stride, token_stride, head_stride,                    \
            };                                                                                  \
            BODY                                                                                \
        }                                                                                       \
    }

#define ENCODE_XPACK(TYPE, WORD)                                                                \
    ENCODE(xpack_count_##TYPE, ,                                                                \
        __shared__ u32 counts[256]; __shared__ u8 is_common[256]; __shared__ u32 common;,       \
        count_tile<WORD>(                                                                       \
            tile_of(cut, number), room, dim, record, counts, is_common, &common);)              \
    ENCODE(xpack_pack_##TYPE,                                                                   \
        u8* memory COMMA const u64* bases COMMA const u64* starts COMMA                         \
        const u64* escape_starts COMMA,                                                         \
        __shared__ u8 codes[256]; __shared__ u32 of_warps[WARPS];,                              \
        pack_tile<WORD>(                                                                        \
            memory + bases[layer], cut, number, record, starts + layer * (tiles + 1ULL),        \
            escape_starts + layer * (tiles + 1ULL), room, codes, of_warps);)

ENCODE_XPACK(bfloat16, u16)
ENCODE_XPACK(float32, u32)
