// The decoder of codecs/rans.py for CUDA: one warp per tile, one thread per lane. Compiled before,
// and with, the source of a codec's kernels. For any stream, even an invalid one, no word after
// its last is read and every loop ends; a state may be any u32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static const u32 LANES = 32;
static const u32 EVERY_LANE = 0xFFFFFFFFu;
static const u32 PROBABILITY_BITS = 12;
static const u32 SLOTS = 1u << PROBABILITY_BITS;
static const u32 MIN_STATE = 1u << 16;
static const u32 BUCKETS = 128;
static const u32 BUCKET_BITS = 5;  // slots of a bucket

// Faults found by decoding; codecs/kvq_kernels.py has their names.
static const u32 BAD_COUNTS = 1, BAD_MODELS = 8, BAD_STREAM = 16, BAD_ESCAPES = 32;

struct Stream {
    const u8* words;  // u16 at any address
    u32 count, used, state;
};

__device__ static u32 stream_word(const Stream& stream, u32 at) {
    if (at >= stream.count) return 0;
    const u8* word = stream.words + 2 * (u64)at;
    if ((u64)word % 2) return word[0] | (u32)word[1] << 8;
    return *(const u16*)word;
}

__device__ static u32 lane_of() { return threadIdx.x % LANES; }

__device__ static u32 lanes_below() { return (1u << lane_of()) - 1; }

// Inclusive prefix sum over the lanes.
__device__ static u64 sum_to_here(u64 value) {
    for (u32 distance = 1; distance < LANES; distance *= 2) {
        const u64 before = __shfl_up_sync(EVERY_LANE, value, distance);
        if (lane_of() >= distance) value += before;
    }
    return value;
}

// Decodes the lane's next symbol. `entries` has start | frequency << 16 of each symbol of a model,
// of sum 4096; `buckets` the symbol of each 32nd slot, from which the search starts.
__device__ static u32 next_symbol(Stream& stream, const u32* entries, const u8* buckets) {
    const u32 slot = stream.state & (SLOTS - 1);
    u32 symbol = buckets[slot >> BUCKET_BITS];
    u32 entry = entries[symbol];
    while (slot - (entry & 0xFFFFu) >= entry >> 16) entry = entries[++symbol];
    stream.state = (entry >> 16) * (stream.state >> PROBABILITY_BITS) + slot - (entry & 0xFFFFu);
    const bool needs = stream.state < MIN_STATE;
    const u32 all = __ballot_sync(EVERY_LANE, needs);
    if (needs) {  // lanes take the words in lane order
        const u32 at = stream.used + __popc(all & lanes_below());
        stream.state = stream.state << 16 | stream_word(stream, at);
    }
    stream.used += __popc(all);
    return symbol;
}

// Whether all lanes ended as required; every lane returns the result.
__device__ static bool ends_well(const Stream& stream) {
    const bool is_whole = stream.state == MIN_STATE && stream.used == stream.count;
    return __ballot_sync(EVERY_LANE, is_whole) == EVERY_LANE;
}
