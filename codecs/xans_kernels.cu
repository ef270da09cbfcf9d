// Tiles of xans: one warp decodes a tile's stream by its own table. Behind exponent_kernels.cu.

static const u32 WINDOW = 24;
static const u32 MAX_FIRST = 255 - WINDOW;
static const u32 ESCAPE = WINDOW + 1;  // as a place in a tile's table: zero, the window, this
static const u32 GROUP = 64;

struct OfXans {
    static const u32 ESCAPE_BYTES = 1;
    __device__ static Sizes of(const u8* record, u32 items) {
        const u32 words = word_at(record + 40), escapes = word_at(record + 44);
        const bool is_short = words <= (u64)items + GROUP && escapes <= items;
        return {2 * (u64)words, escapes, is_short && !(escapes == items && words)};
    }
};

// Lay out a tile's table of 26 symbols: frequencies of twelve bits, two in three bytes.
__device__ static bool read_table(const u8* record, u32* entries, u8* buckets) {
    const u32 lane = lane_of();
    u32 frequency = 0;
    if (lane <= ESCAPE) {
        const u8* three = record + 1 + lane / 2 * 3;
        frequency = lane % 2 ? three[1] >> 4 | (u32)three[2] << 4 : three[0] | (three[1] & 15u) << 8;
    }
    const u32 end = sum_to_here(frequency);
    const bool is_right = record[0] >= 1 && record[0] <= MAX_FIRST;
    if (__shfl_sync(EVERY_LANE, end, LANES - 1) != SLOTS || !is_right) return false;
    __syncwarp();
    entries[lane] = (end - frequency) | frequency << 16;
    __syncwarp();
    for (u32 bucket = lane; bucket < BUCKETS; bucket += LANES) {
        u32 symbol = 0;
        while ((bucket << BUCKET_BITS) - (entries[symbol] & 0xFFFFu) >= entries[symbol] >> 16) ++symbol;
        buckets[bucket] = symbol;
    }
    __syncwarp();
    return true;
}

// The place of one element of each group of 64, and its row in the pages.
template <class Word> struct Cursor {
    u32 item, column, row;
    Word* out;

    __device__ Cursor(const Room& room, const Tile& tile, u32 dim, u32 first)
        : item(first), column(first % dim), row(tile.first_row + first / dim), out(0) {
        if (item < tile.items) out = (Word*)room.row(row);
    }

    __device__ void advance(const Room& room, const Tile& tile, u32 dim) {
        item += GROUP;
        column += GROUP;
        if (column < dim) return;
        row += column / dim;
        column %= dim;
        if (item < tile.items) out = (Word*)room.row(row);
    }
};

template <class Word>
__device__ static void put(
    const Cursor<Word>& at, const Tile& tile, const Planes& planes, u32 symbol, u32 first,
    const u8* escape
) {
    if (at.item >= tile.items) return;
    u32 exponent = symbol ? first + symbol - 1 : 0;
    if (symbol == ESCAPE) exponent = escape ? *escape : 0;
    join(planes, at.item, exponent, at.out[at.column]);
}

// A tile's stream to its rows; returns how many escapes it had, of which `count` are stored.
template <class Word>
__device__ static u32 decode_tile(
    Stream& stream, const u32* table, const u8* buckets, const Tile& tile, const Planes& planes,
    const Room& room, u32 dim, u32 first, const u8* values, u32 count
) {
    const u32 lane = lane_of(), below = lanes_below();
    Cursor<Word> even(room, tile, dim, 2 * lane), odd(room, tile, dim, 2 * lane + 1);
    u32 escapes = 0;
    for (u32 group = 0; group < tile.items; group += GROUP) {
        const u32 one = next_symbol(stream, table, buckets);
        const u32 other = next_symbol(stream, table, buckets);
        const u32 ones = __ballot_sync(EVERY_LANE, one == ESCAPE && even.item < tile.items);
        const u32 others = __ballot_sync(EVERY_LANE, other == ESCAPE && odd.item < tile.items);
        const u32 at = escapes + __popc(ones & below) + __popc(others & below);
        const u32 next = at + (ones >> lane & 1u);
        put(even, tile, planes, one, first, at < count ? values + at : 0);
        put(odd, tile, planes, other, first, next < count ? values + next : 0);
        escapes += __popc(ones) + __popc(others);
        even.advance(room, tile, dim);
        odd.advance(room, tile, dim);
    }
    return escapes;
}

template <class Word>
__device__ static u32 decode_xans(
    const u8* layer, const Cut& cut, u32 number, const u64* starts, const u64* escape_starts,
    const Room& room, u32* entries, u8* buckets
) {
    const u32 lane = lane_of();
    const Tile tile = tile_of(cut, number);
    const Planes planes = planes_of(layer, cut, tile);
    const u8* record = layer + number * (u64)cut.record_bytes;
    const u8* payload = layer + cut.payload();
    const u8* values = payload + starts[cut.tiles] + escape_starts[number];
    const u32 count = word_at(record + 44);
    if (count == tile.items) {
        for (u32 at = lane; at < tile.items; at += LANES) {
            Word* out = (Word*)room.row(tile.first_row + at / cut.dim);
            join(planes, at, values[at], out[at % cut.dim]);
        }
        return 0;
    }
    if (!read_table(record, entries, buckets)) return BAD_MODELS;
    Stream stream;
    stream.words = payload + starts[number];
    stream.count = word_at(record + 40);
    stream.used = 0;
    stream.state = word_at(record + 48 + 4 * lane);
    const u32 escapes = decode_tile<Word>(
        stream, entries, buckets, tile, planes, room, cut.dim, record[0], values, count
    );
    return (ends_well(stream) ? 0 : BAD_STREAM) | (escapes == count ? 0 : BAD_ESCAPES);
}

OPEN(xans_open, OfXans)

#define DECODE_XANS(NAME, WORD)                                                                 \
    DECODE(NAME,                                                                                \
        __shared__ u32 entries[WARPS * LANES];                                                  \
        __shared__ u8 buckets[WARPS * BUCKETS];,                                                \
        blockIdx.x * warps + warp, gridDim.x * warps,                                           \
        const u32 faults = decode_xans<WORD>(                                                   \
            data, cut, number, starts + row, escape_starts + row, room, entries + warp * LANES, \
            buckets + warp * BUCKETS);                                                          \
        if (faults && !lane_of()) atomicOr(status + layer, faults);)

DECODE_XANS(xans_bfloat16, u16)
DECODE_XANS(xans_float32, u32)
