// Quantizes a matrix rowwise and columnwise in one reading. A tile is encoded rowwise from
// registers and columnwise through shared memory. Configured by the quantizer's macros
// (quantize.py).

constexpr int kChunkVectors = kChunk / kPerVector;

DEVICE i64 tiles_along(i64 columns) { return (columns + CODEC_BLOCK - 1) / CODEC_BLOCK; }

// Encodes a chunk of a row, of block `block`, shared with neighbouring lanes.
DEVICE void encode_rowwise(u32 (&raw)[sizeof(Raw) * kChunk / 4], i64 row, i64 start, i64 block,
    i64 rows, i64 columns, const Tensor& tensor, const Stream& stream, u8* codes, u8* scales,
    float* values, CODEC_MASK_PARAMETER Tally& tally) {
    const u32 part = static_cast<u32>(start / kChunk) % kParts;
    u32 codes_of[kWords];
    Chunk unpacked;
    Chunk& v = chunk_of(raw, unpacked);
    [[maybe_unused]] u32 inside;
    const Scale s = encode_chunk(v, tensor, static_cast<u32>(block), part, stream,
        CODEC_CLIP_ARGUMENTS(raw, inside) codes_of, tally);
#if CODEC_OUT == 1
    float* to = values + row * columns + start;
#if QUANT_WHOLE
#pragma unroll
    for (int k = 0; k < kChunk; k += 4)
        reinterpret_cast<float4*>(to)[k / 4] =
            float4{v[0][k], v[0][k + 1], v[0][k + 2], v[0][k + 3]};
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        if (row < rows && start + k < columns) to[k] = v[0][k];
#endif
#else
    if ((QUANT_NORM && QUANT_WHOLE) ||  // saves registers that quantize_both does not have
        (row < rows && start < tiles_along(columns) * CODEC_BLOCK)) {
        store_words(reinterpret_cast<u32*>(codes) + (block * kParts + part) * kWords, codes_of);
        if (part == 0) scales[block] = static_cast<u8>(s.stored);
#if CODEC_MASK
        store_clip_bits(mask, block * kParts + part, row, start, columns, inside);
#endif
    }
#endif
}

#if !QUANT_ONLY_ROWWISE
constexpr int kAcross = QUANT_CTA_ROWS / kChunk;  // chunks down a tile

// Encodes 16 rows of QUANT_THREAD_COLUMNS columns of a tile with rows kPitch values apart, at (top,
// left) of the matrix.
template <int kPitch>
DEVICE void encode_columnwise(const Raw* tile, int thread, i64 top, i64 left, i64 rows, i64 columns,
    const Tensor& tensor, const Stream& stream, u8* codes, u8* scales, float* values,
    Tally& tally) {
    constexpr int kLanes =
        32 / kAcross;  // neighbouring lanes; a column's chunks are this far apart
    const int below = thread % 32 / kLanes, group = thread / 32 * kLanes + thread % kLanes;
    const i64 column = left + group * QUANT_THREAD_COLUMNS, start = top + below * kChunk;
    u32 mine[kChunk][kPairs];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const Raw* from = tile + (below * kChunk + k) * kPitch + group * QUANT_THREAD_COLUMNS;
        if (kPairs == 2) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            mine[k][0] = two.x, mine[k][kPairs - 1] = two.y;
        } else {
            mine[k][0] = *reinterpret_cast<const u32*>(from);
        }
    }
    u32 amax[QUANT_THREAD_COLUMNS];
#if CODEC_BF16X2
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const u32 pair = pair_maximum<kChunk, kPairs>(&mine[0][p]);
        amax[2 * p] = across_lanes<kLanes>(low_float(pair)),
                 amax[2 * p + 1] = across_lanes<kLanes>(high_float(pair));
    }
#else
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(mine[k], c);
        amax[c] = across_lanes<kLanes>(chunk_maximum(v));
    }
#endif
    const u32 part = static_cast<u32>(below) % kParts;
    const i64 tiles_down = (rows + CODEC_BLOCK - 1) / CODEC_BLOCK, line = start / CODEC_BLOCK;
    const i64 block = line * columns + column;
    const i64 real = line < tiles_down ? columns - column : 0;
    Scale s[QUANT_THREAD_COLUMNS];
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) s[c] = block_scale(amax[c], tensor);
#if CODEC_BF16X2
    u32 codes_of[kPairs][4];
    encode_columns(mine, s, amax, codes_of, tally);
#else
    u32 codes_of[QUANT_THREAD_COLUMNS][kWords];
#if CODEC_OUT == 1
    float decoded[kChunk][QUANT_THREAD_COLUMNS];
#endif
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(mine[k], c);
        encode(v, s[c], is_far(amax[c], s[c]), tensor, static_cast<u32>(block + c), part, stream,
            codes_of[c], tally);
#if CODEC_OUT == 1
#pragma unroll
        for (int k = 0; k < kChunk; ++k) decoded[k][c] = v[k];
#endif
    }
#endif
#if CODEC_OUT == 1
    float* to = values + start * columns + column;
#pragma unroll
    for (int k = 0; k < kChunk; ++k, to += columns) {
#if QUANT_WHOLE
        *reinterpret_cast<float2*>(to) =
            float2{decoded[k][0], decoded[k][1]};  // QUANT_THREAD_COLUMNS is 2
#else
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
            if (start + k < rows && column + c < columns) to[c] = decoded[k][c];
#endif
    }
#else
    const i64 byte_row = line * (CODEC_BLOCK * CODEC_BITS / 8) + part * (kWords * 4);
    store_column_bytes(codes_of, codes + byte_row * columns + column, columns, real);
    if (part == 0) {
#if QUANT_WHOLE
        u32 four = 0;
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) four |= s[c].stored << (8 * c);
        if (QUANT_THREAD_COLUMNS == 4) *reinterpret_cast<u32*>(scales + block) = four;
        else *reinterpret_cast<u16*>(scales + block) = static_cast<u16>(four);
#else
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
            if (c < real) scales[block + c] = static_cast<u8>(s[c].stored);
#endif
    }
#endif
}
#endif

#if QUANT_NORM
#include "quantize/norm.cuh"
#if QUANT_ONLY_ROWWISE
#include "quantize/norm_rowwise.cuh"
#else
#include "quantize/norm_rowwise_columnwise.cuh"
#endif
#else
constexpr int kWide =
    kThreads / kAcross * QUANT_THREAD_COLUMNS;  // columns of a tile; a row has at least 256 bytes
constexpr int kPerRow = kWide / kChunk;         // chunks of a row

// x (rows, columns) -> results rowwise, then columnwise: codes and scales, or decoded values
// (CODEC_OUT 1). QUANT_WHOLE: rows and columns are multiples of a tile's, x is 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads, QUANT_MIN_CTAS) quantize_both(
    const Raw* __restrict__ x, u8* __restrict__ codes0, u8* __restrict__ codes1,
    u8* __restrict__ scales0, u8* __restrict__ scales1, float* __restrict__ values0,
    float* __restrict__ values1, const Tensor* __restrict__ tensor_of, u64* __restrict__ counters,
    CODEC_MASK_PARAMETER const u32* __restrict__ clock, u32 key00, u32 key01, u32 high00,
    u32 high01, u32 key10, u32 key11, u32 high10, u32 high11, i64 rows, i64 columns) {
    __shared__ __align__(16) Raw tile[QUANT_CTA_ROWS * kWide];
    const i64 across = (columns + kWide - 1) / kWide;
    const i64 top = blockIdx.x / across * QUANT_CTA_ROWS, left = blockIdx.x % across * kWide;
#if CODEC_NEEDS_TENSOR
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif

    u32 raw[QUANT_THREAD_COLUMNS][sizeof(Raw) * kChunk / 4];
#pragma unroll
    for (int item = 0; item < QUANT_THREAD_COLUMNS; ++item) {
        const int chunk = item * kThreads + threadIdx.x;
        const i64 row = top + chunk / kPerRow, start = left + chunk % kPerRow * kChunk;
        const Raw* from = x + row * columns + start;
#if QUANT_WHOLE
#pragma unroll
        for (int v = 0; v < kChunkVectors; ++v) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + v);
            raw[item][4 * v] = four.x, raw[item][4 * v + 1] = four.y;
            raw[item][4 * v + 2] = four.z, raw[item][4 * v + 3] = four.w;
        }
#else
        const i64 real = row < rows ? columns - start : 0;
#pragma unroll
        for (int k = 0; k < kChunk; k += 4 / sizeof(Raw)) {
            u32 word = k < real ? from[k] : 0;
            if (sizeof(Raw) == 2 && k + 1 < real) word |= static_cast<u32>(from[k + 1]) << 16;
            raw[item][k * sizeof(Raw) / 4] = word;
        }
#endif
        activate(raw[item]);
    }
#pragma unroll
    for (int item = 0; item < QUANT_THREAD_COLUMNS; ++item) {
        uint4* to =
            reinterpret_cast<uint4*>(tile) + (item * kThreads + threadIdx.x) * kChunkVectors;
#pragma unroll
        for (int v = 0; v < kChunkVectors; ++v)
            to[v] = uint4{
                raw[item][4 * v], raw[item][4 * v + 1], raw[item][4 * v + 2], raw[item][4 * v + 3]};
    }
    __syncthreads();

    Tally tally = {0, 0};
    [[maybe_unused]] Stream stream = stream_of(clock, key00, key01, high00, high01);
#pragma unroll
    for (int item = 0; item < QUANT_THREAD_COLUMNS; ++item) {
        const int chunk = item * kThreads + threadIdx.x;
        const i64 row = top + chunk / kPerRow, start = left + chunk % kPerRow * kChunk;
        encode_rowwise(raw[item], row, start, row * tiles_along(columns) + start / CODEC_BLOCK,
            rows, columns, tensor, stream, codes0, scales0, values0, CODEC_MASK_ARGUMENT tally);
    }
    add_counts(tally, counters);

    tally = Tally{0, 0};
    stream = stream_of(clock, key10, key11, high10, high11);
    encode_columnwise<kWide>(tile, threadIdx.x, top, left, rows, columns, tensor, stream, codes1,
        scales1, values1, tally);
    add_counts(tally, counters + 2 * kSlots);
}
#endif
