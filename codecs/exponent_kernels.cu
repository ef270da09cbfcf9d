// What the kernels of xans and xpack share: layers from stored bytes in a CUDA device's memory to
// an engine's pages. Compiled behind rans_kernels.cu, before xans_kernels.cu and xpack_kernels.cu.
// codecs/exponent_kernels.py launches them, having checked that records and planes are there, and
// says what the arguments are; *_open checks that what the records count is what lies behind
// them, and nothing is read of a layer where it is not.

static const u32 WARPS = 16;  // of a block, at most

// A component: every layer of it is cut alike.
struct Cut {
    u32 tiles, part_rows, tile_rows, tokens, dim, item_bytes, record_bytes;

    __device__ u32 part_tiles() const { return (part_rows + tile_rows - 1) / tile_rows; }
    __device__ u64 items() const { return (u64)(tiles / part_tiles()) * part_rows * dim; }
    __device__ u64 payload() const { return tiles * (u64)record_bytes + (item_bytes - 1) * items(); }
};

struct Tile {
    u32 part, first_row, items;
    u64 before;  // elements of the layer before it
};

__device__ static Tile tile_of(const Cut& cut, u32 number) {
    Tile tile;
    tile.part = number / cut.part_tiles();
    tile.first_row = number % cut.part_tiles() * cut.tile_rows;
    tile.items = min(cut.tile_rows, cut.part_rows - tile.first_row) * cut.dim;
    tile.before = ((u64)tile.part * cut.part_rows + tile.first_row) * cut.dim;
    return tile;
}

__device__ static u32 word_at(const u8* place) {  // at any address
    return place[0] | (u32)place[1] << 8 | (u32)place[2] << 16 | (u32)place[3] << 24;
}

// Where a part's rows go. The pages are as in frame_kernels.cu.
struct Room {
    u8* start;
    const u64* blocks;
    u32 first_token, tokens, page_tokens;
    u64 page_stride, token_stride, head_stride;

    __device__ u8* row(u32 number) const {
        const u32 head = number / tokens, slot = first_token + number - head * tokens;
        const u32 page = slot / page_tokens;
        return start + blocks[page] * page_stride + (slot - page * page_tokens) * token_stride
            + head * head_stride;
    }
};

// The planes behind the first, from a tile's first element on.
struct Planes {
    const u8* first;
    u64 stride;
};

__device__ static Planes planes_of(const u8* layer, const Cut& cut, const Tile& tile) {
    return {layer + cut.tiles * (u64)cut.record_bytes + tile.before, cut.items()};
}

__device__ static u32 upper_half(u32 rest, u32 exponent) {
    return (rest & 0x80u) << 8 | exponent << 7 | (rest & 0x7Fu);
}

__device__ static void join(const Planes& planes, u64 at, u32 exponent, u16& out) {
    out = upper_half(planes.first[at], exponent);
}

__device__ static void join(const Planes& planes, u64 at, u32 exponent, u32& out) {
    const u8* place = planes.first + at;
    out = upper_half(place[0], exponent) << 16 | (u32)place[planes.stride] << 8
        | place[2 * planes.stride];
}

// --- where tiles begin

struct Sizes {
    u64 bytes, escapes;
    bool is_right;
};

// One warp a layer: the bytes and the escapes before each tile, and of all of them at the end.
template <class Format>
__device__ static void open_layers(
    const u8* memory, const u64* bases, const u64* payload_bytes, const Cut& cut, u32 layers,
    u64* starts, u64* escape_starts, u32* status
) {
    const u32 lane = lane_of(), warps = gridDim.x * blockDim.x / LANES;
    for (u32 layer = (blockIdx.x * blockDim.x + threadIdx.x) / LANES; layer < layers; layer += warps) {
        u64 bytes = 0, escapes = 0;
        bool is_right = true;
        const u64 row = layer * (cut.tiles + 1ULL);
        for (u32 at = 0; at < cut.tiles; at += LANES) {
            Sizes mine = {0, 0, true};
            if (at + lane < cut.tiles) {
                const u8* record = memory + bases[layer] + (at + lane) * (u64)cut.record_bytes;
                mine = Format::of(record, tile_of(cut, at + lane).items);
                is_right &= mine.is_right;
            }
            const u64 bytes_to_here = sum_to_here(mine.bytes);
            const u64 escapes_to_here = sum_to_here(mine.escapes);
            if (at + lane < cut.tiles) {
                starts[row + at + lane] = bytes + bytes_to_here - mine.bytes;
                escape_starts[row + at + lane] = escapes + escapes_to_here - mine.escapes;
            }
            bytes += __shfl_sync(EVERY_LANE, bytes_to_here, LANES - 1);
            escapes += __shfl_sync(EVERY_LANE, escapes_to_here, LANES - 1);
        }
        if (!lane) starts[row + cut.tiles] = bytes, escape_starts[row + cut.tiles] = escapes;
        is_right &= bytes + Format::ESCAPE_BYTES * escapes == payload_bytes[layer];
        if (!is_right) atomicOr(status + layer, BAD_COUNTS);
    }
}

// --- kernels

#define OPEN(NAME, FORMAT)                                                                      \
    extern "C" __global__ void NAME(                                                            \
        const u8* memory, const u64* bases, const u64* payload_bytes, u32 tiles, u32 part_rows, \
        u32 tile_rows, u32 tokens, u32 dim, u32 item_bytes, u32 record_bytes, u32 layers,       \
        u64* starts, u64* escape_starts, u32* status                                            \
    ) {                                                                                         \
        const Cut cut = {tiles, part_rows, tile_rows, tokens, dim, item_bytes, record_bytes};   \
        open_layers<FORMAT>(                                                                    \
            memory, bases, payload_bytes, cut, layers, starts, escape_starts, status);          \
    }

// Grid: (any, layers). BODY decodes tile `number` in `room`.
#define DECODE(NAME, SHARED, FIRST, STEP, BODY)                                                 \
    extern "C" __global__ void __launch_bounds__(512) NAME(                                     \
        const u8* memory, const u64* bases, const u64* starts, const u64* escape_starts,        \
        u32* status, const u64* pages, const u64* first_tokens, const u64* blocks,              \
        u32 tiles, u32 part_rows, u32 tile_rows, u32 tokens, u32 dim, u32 item_bytes,           \
        u32 record_bytes, u32 parts, u32 in_units, u32 page_tokens, u64 page_stride,            \
        u64 token_stride, u64 head_stride                                                       \
    ) {                                                                                         \
        SHARED                                                                                  \
        const Cut cut = {tiles, part_rows, tile_rows, tokens, dim, item_bytes, record_bytes};   \
        const u32 layer = blockIdx.y, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;   \
        if (status[layer] & BAD_COUNTS) return;                                                 \
        const u8* data = memory + bases[layer];                                                 \
        const u64 row = layer * (tiles + 1ULL);                                                 \
        for (u32 number = FIRST; number < tiles; number += STEP) {                              \
            const u32 part = number / cut.part_tiles();                                         \
            const Room room = {                                                                 \
                (u8*)pages[layer * parts + part], blocks, (u32)first_tokens[layer], tokens,     \
                page_tokens, page_stride, token_stride, head_stride,                            \
            };                                                                                  \
            BODY                                                                                \
        }                                                                                       \
    }
