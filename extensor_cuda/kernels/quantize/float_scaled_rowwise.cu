// Quantizes values rowwise under float scales to packed codes. `quantize_groups` has blocks of
// CODEC_BLOCK values on one or more lanes. `quantize_blocks` has one block (of a row, or a tile)
// per thread block, read once if it fits QUANT_KEPT_CHUNKS chunks a thread. `quantize_all` has one
// scale, whose magnitude `largest` found before.
//
// A thread has chunks of 16 values, one Philox call at 8 random bits. Rows and blocks are multiples
// of that, 16-byte aligned. Other layouts: float_scaled.cu. Macros: CODEC_THREADS,
// QUANT_KEPT_CHUNKS, QUANT_PATH (0: groups, 1: blocks, 2: all), and those of input.cuh, encode.cuh
// and float_scale.cuh.

#include "codec/input.cuh"
#include "codec/decode.cuh"
#include "codec/float_scale.cuh"
#include "codec/float_quotient.cuh"
#include "codec/encode.cuh"
#include "codec/counters.cuh"

constexpr int kRawWords = sizeof(Raw) * kChunk / 4, kWarps = kThreads / 32;

DEVICE void load_chunk(u32 (&raw)[kRawWords], const Raw* from, bool there) {
#pragma unroll
    for (int v = 0; v < kRawWords / 4; ++v) {
        const uint4 four =
            there ? __ldg(reinterpret_cast<const uint4*>(from) + v) : uint4{0, 0, 0, 0};
        raw[4 * v] = four.x, raw[4 * v + 1] = four.y, raw[4 * v + 2] = four.z,
                raw[4 * v + 3] = four.w;
    }
}

DEVICE void widen_chunk(const u32 (&raw)[kRawWords], float (&v)[kChunk]) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = element(raw, k);
}

DEVICE Most most_of_raw(const u32 (&raw)[kRawWords]) {
    float v[kChunk];
    widen_chunk(raw, v);
    return most_of(v);
}

// Encodes a chunk and stores its codes.
DEVICE void store_chunk(const u32 (&raw)[kRawWords], const Scale& s, bool far, u32 block, u32 part,
    const Stream& stream, u8* codes, i64 chunk, Tally& tally) {
    float v[kChunk];
    widen_chunk(raw, v);
    u32 packed[kWords];
    const Tensor tensor = {1, 1, 0, 1};
    encode(v, s, far, tensor, block, part, stream, packed, tally);
    store_words(reinterpret_cast<u32*>(codes) + chunk * kWords, packed);
}

DEVICE void store_scale(const Scale& s, Stored* scales, signed char* zeros, u32 block) {
    scales[block] = static_cast<Stored>(s.stored);
    if (CODEC_ZERO_POINTS) zeros[block] = static_cast<signed char>(s.zero);
}

#define QUANT_PARAMETERS                                                                          \
    const Raw *__restrict__ x, u8 *__restrict__ codes, Stored *__restrict__ scales,               \
        signed char *__restrict__ zeros, const Most *__restrict__ found,                          \
        u64 *__restrict__ counters, const u32 *__restrict__ clock, u32 key0, u32 key1, u32 high0, \
        u32 high1

#if QUANT_PATH == 1
// Arrays of (outer, rows, wide * across) chunks in blocks of (1, tile_rows, wide). Last blocks may
// be smaller.
extern "C" __global__ void __launch_bounds__(kThreads) quantize_blocks(
    QUANT_PARAMETERS, u32 rows, u32 columns, u32 tile_rows, u32 wide, u32 down, u32 across) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const u32 block = blockIdx.x, left = block % across * wide,
              top = block / across % down * tile_rows;
    const u32 width = smaller(wide, columns - left), count = smaller(tile_rows, rows - top) * width;
    const i64 corner = (static_cast<i64>(block / across / down) * rows + top) * columns + left;
    const auto place = [&](u32 chunk) {
        return corner + static_cast<i64>(chunk / width) * columns + chunk % width;
    };
    u32 raw[QUANT_KEPT_CHUNKS][kRawWords];
    Most most = {0, 0};
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i) {
        const u32 chunk = threadIdx.x + i * kThreads;
        load_chunk(raw[i], x + place(chunk) * kChunk, chunk < count);
    }
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i) join(most, most_of_raw(raw[i]));
    for (u32 chunk = threadIdx.x + QUANT_KEPT_CHUNKS * kThreads; chunk < count; chunk += kThreads) {
        u32 more[kRawWords];
        load_chunk(more, x + place(chunk) * kChunk, true);
        join(most, most_of_raw(more));
    }
    __shared__ Most of_warps[kWarps];
    most.high = __reduce_max_sync(~0u, most.high);
    if (CODEC_ZERO_POINTS) most.low = __reduce_max_sync(~0u, most.low);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) join(most, of_warps[w]);
    const Scale s = block_scale(most);
    const bool far = is_far(most, s);
    Tally tally = {0, 0};
    const auto store = [&](const u32(&values)[kRawWords], u32 chunk) {
        const u32 part = chunk / width * wide + chunk % width;  // as in a whole block
        store_chunk(values, s, far, block, part, stream, codes, place(chunk), tally);
    };
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i)
        if (threadIdx.x + i * kThreads < count) store(raw[i], threadIdx.x + i * kThreads);
    for (u32 chunk = threadIdx.x + QUANT_KEPT_CHUNKS * kThreads; chunk < count; chunk += kThreads) {
        u32 more[kRawWords];
        load_chunk(more, x + place(chunk) * kChunk, true);
        store(more, chunk);
    }
    if (threadIdx.x == 0) store_scale(s, scales, zeros, block);
    add_counts(tally, counters);
}
#else
// Loads this thread's chunks, kThreads apart, of `chunks` in all.
DEVICE void load_chunks(
    u32 (&raw)[QUANT_KEPT_CHUNKS][kRawWords], const Raw* x, i64 first, i64 chunks) {
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i)
        load_chunk(raw[i], x + (first + i * kThreads) * kChunk, first + i * kThreads < chunks);
}

#if QUANT_PATH == 0
// chunks: of the whole array. A block is on `kParts` neighbouring lanes.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_groups(QUANT_PARAMETERS, i64 chunks) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * QUANT_KEPT_CHUNKS) + threadIdx.x;
    Tally tally = {0, 0};
    u32 raw[QUANT_KEPT_CHUNKS][kRawWords];
    load_chunks(raw, x, first, chunks);
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i) {
        const i64 chunk = first + i * kThreads;
        Most most = most_of_raw(raw[i]);
        most.high = across_lanes(most.high);
        if (CODEC_ZERO_POINTS) most.low = across_lanes(most.low);
        const Scale s = block_scale(most);
        if (chunk >= chunks) continue;
        const u32 block = static_cast<u32>(chunk / kParts), part = static_cast<u32>(chunk % kParts);
        store_chunk(raw[i], s, is_far(most, s), block, part, stream, codes, chunk, tally);
        if (part == 0) store_scale(s, scales, zeros, block);
    }
    add_counts(tally, counters);
}
#else
// The largest magnitude of the array, which starts at 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    largest(const Raw* __restrict__ x, Most* __restrict__ found, i64 chunks) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * QUANT_KEPT_CHUNKS) + threadIdx.x;
    u32 raw[QUANT_KEPT_CHUNKS][kRawWords];
    Most most = {0, 0};
    load_chunks(raw, x, first, chunks);
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i) join(most, most_of_raw(raw[i]));
    add_maximum(most.high, &found->high);
    if (CODEC_ZERO_POINTS) add_maximum(most.low, &found->low);
}

extern "C" __global__ void __launch_bounds__(kThreads) quantize_all(QUANT_PARAMETERS, i64 chunks) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * QUANT_KEPT_CHUNKS) + threadIdx.x;
    Tally tally = {0, 0};
    u32 raw[QUANT_KEPT_CHUNKS][kRawWords];
    load_chunks(raw, x, first, chunks);
    const Most most = *found;
    const Scale s = block_scale(most);
    const bool far = is_far(most, s);
#pragma unroll
    for (int i = 0; i < QUANT_KEPT_CHUNKS; ++i) {
        const i64 chunk = first + i * kThreads;
        if (chunk < chunks)
            store_chunk(raw[i], s, far, 0, static_cast<u32>(chunk), stream, codes, chunk, tally);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) store_scale(s, scales, zeros, 0);
    add_counts(tally, counters);
}
#endif
#endif
