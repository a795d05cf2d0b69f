// Quantizes a matrix columnwise: a block's elements are in one column, and a thread has
// QUANT_THREAD_COLUMNS chunks. Configured by the quantizer's macros (quantize.py).

constexpr int kTileRows = kThreads / 32 * kChunk;  // positions of a thread block: 128
// Resident thread blocks per multiprocessor that the registers allow without spilling.
constexpr int kBlocks =
    CODEC_SEARCH ? (QUANT_TILE_ROWS == 1 && !CODEC_STOCHASTIC && CODEC_OUT != 1 ? 3 : 1)
    : (CODEC_IN == 0 && CODEC_STOCHASTIC) || CODEC_HADAMARD || CODEC_SEARCH_E8M0 || CODEC_OUT == 1
        ? 1
        : 2;

#if QUANT_TILE_ROWS > 1
constexpr int kLanes =
    QUANT_TILE_ROWS / QUANT_THREAD_COLUMNS;  // lanes of a tile's rows, which are neighbours
#endif

// Loads a thread's chunks, zeros outside x, as pairs of columns.
DEVICE void load_columns(u32 (&raw)[kChunk][kPairs], const Raw* from, [[maybe_unused]] i64 start,
    [[maybe_unused]] i64 length, i64 column, i64 inner) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
#if QUANT_WHOLE
        uint2 two = {0, 0};
        if (column < inner) {
            if (kPairs == 2) two = __ldg(reinterpret_cast<const uint2*>(from + k * inner));
            else two.x = __ldg(reinterpret_cast<const u32*>(from + k * inner));
        }
        raw[k][0] = two.x, raw[k][kPairs - 1] = kPairs == 2 ? two.y : two.x;
#else
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; c += 4 / sizeof(Raw)) {
            const bool real = start + k < length;
            u32 word = real && column + c < inner ? from[k * inner + c] : 0;
            if (sizeof(Raw) == 2 && real && column + c + 1 < inner)
                word |= static_cast<u32>(from[k * inner + c + 1]) << 16;
            raw[k][c * sizeof(Raw) / 4] = word;
        }
#endif
        activate(raw[k]);
    }
}

// Makes a chunk's maxima those of its blocks: over the warps that share a block, and over the rows
// of a tile.
DEVICE void reduce_maxima(
    u32 (&amax)[QUANT_THREAD_COLUMNS], [[maybe_unused]] int warp, [[maybe_unused]] int lane) {
#if CODEC_BLOCK > 16
    __shared__ u32 shared[kThreads / 32][QUANT_THREAD_COLUMNS][32];
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) shared[warp][c][lane] = amax[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
            amax[c] = larger(amax[c], shared[warp / kParts * kParts + p][c][lane]);
#endif
#if QUANT_TILE_ROWS > 1
#pragma unroll
    for (int c = 1; c < QUANT_THREAD_COLUMNS; ++c) amax[0] = larger(amax[0], amax[c]);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
        amax[0] = larger(amax[0], __shfl_xor_sync(~0u, amax[0], step));
#pragma unroll
    for (int c = 1; c < QUANT_THREAD_COLUMNS; ++c) amax[c] = amax[0];
#endif
}

// x (outer, length, inner) with blocks along `length`. A warp holds 16 rows of 32 *
// QUANT_THREAD_COLUMNS columns, and a block's warps exchange maxima. QUANT_WHOLE: length is a
// multiple of 128, inner of QUANT_THREAD_COLUMNS, x aligned to a thread's columns.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    quantize_columns(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
        float* __restrict__ values, const Tensor* __restrict__ tensor_of, u32* __restrict__ maximum,
        u64* __restrict__ counters, const u32* __restrict__ clock, u32 key0, u32 key1, u32 high0,
        u32 high1, CODEC_SIGN_PARAMETERS i64 outer, i64 length, i64 inner) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const i64 across = (inner + 32 * QUANT_THREAD_COLUMNS - 1) / (32 * QUANT_THREAD_COLUMNS);
#if CODEC_HADAMARD
    const Signs signs = transform_signs(clock, sign0, sign1, sign2, sign3);
#endif
    const i64 coded = coded_length(length);
    const i64 tiles = (coded + CODEC_BLOCK - 1) / CODEC_BLOCK,
              row_tiles = (tiles * CODEC_BLOCK + kTileRows - 1) / kTileRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 image = blockIdx.x / (across * row_tiles), rest = blockIdx.x % (across * row_tiles);
    const i64 column = (rest % across * 32 + lane) * QUANT_THREAD_COLUMNS;
    const i64 start = rest / across * kTileRows + warp * kChunk;  // first position of the chunk
    const i64 tile = start / CODEC_BLOCK;
#if CODEC_NEEDS_TENSOR && CODEC_OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    u32 raw[kChunk][kPairs];
    const Raw* from = x + (image * length + start) * inner + column;
    load_columns(raw, from, start, length, column, inner);
    Tally tally = {0, 0};
#if CODEC_HADAMARD || (CODEC_SEARCH && QUANT_TILE_ROWS > 1)
    float kept[QUANT_THREAD_COLUMNS][kChunk];  // as float, where needed more than once
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) kept[c][k] = element(raw[k], c);
#if CODEC_HADAMARD
        hadamard_warps(kept[c], signs, warp, lane);
#endif
    }
#define QUANT_VALUE(k, c) kept[c][k]
#else
#define QUANT_VALUE(k, c) element(raw[k], c)
#endif
    u32 amax[QUANT_THREAD_COLUMNS];
    u32 most = 0;
#if CODEC_BF16X2
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const u32 pair = pair_maximum<kChunk, kPairs>(&raw[0][p]);
        amax[2 * p] = low_float(pair), amax[2 * p + 1] = high_float(pair);
    }
#else
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = QUANT_VALUE(k, c);
        amax[c] = chunk_maximum(v);
        if (CODEC_OUT == 2 && CODEC_UE4M3) most = larger(most, finite_maximum(v));
    }
#endif
    reduce_maxima(amax, warp, lane);
#if CODEC_OUT == 2
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
        if (!CODEC_UE4M3) most = larger(most, amax[c] < kExponent ? amax[c] : 0);
    add_maximum(most, maximum);
#else
    const u32 part = static_cast<u32>(start % CODEC_BLOCK) / kChunk;
    const i64 blocks = (image * tiles + tile) * ((inner + QUANT_TILE_ROWS - 1) / QUANT_TILE_ROWS) +
                       column / QUANT_TILE_ROWS;
#if CODEC_SEARCH && QUANT_TILE_ROWS > 1
    const Scale s = best_scale<QUANT_THREAD_COLUMNS, QUANT_TILE_ROWS, 1>(
        kept, lane / kLanes * kLanes, amax[0], tensor);
#endif
    const bool inside = tile < tiles;  // otherwise the warp is beyond the last block
    [[maybe_unused]] u32 stored[QUANT_THREAD_COLUMNS];
#if CODEC_BF16X2
    Scale s[QUANT_THREAD_COLUMNS];
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
        s[c] = block_scale(amax[c], tensor), stored[c] = s[c].stored;
    u32 codes_of[kPairs][4];
    encode_columns(raw, s, amax, codes_of, tally);
#else
    u32 codes_of[QUANT_THREAD_COLUMNS][kWords];
#if CODEC_SEARCH_E8M0 || CODEC_EDEN
    __shared__ float sums[kThreads / 32][32];
#endif
#pragma unroll
    for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c) {
#if CODEC_SEARCH && QUANT_TILE_ROWS == 1
        // Unpacks one column at a time, to save registers.
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            asm volatile(""
                : "+r"(raw[k][c * sizeof(Raw) / 4])
                : "r"(c ? codes_of[c - 1][0] : amax[0]));
#endif
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = QUANT_VALUE(k, c);
        const u32 block = static_cast<u32>(QUANT_TILE_ROWS > 1 ? blocks : blocks + c);
#if CODEC_SEARCH && QUANT_TILE_ROWS == 1
        const Scale s = best_scale<1, 1, 1>(
            reinterpret_cast<const float (&)[1][kChunk]>(v), 0, amax[c], tensor);
#elif CODEC_SEARCH_E8M0
        const Scale s = searched_scale(v, amax[c], AcrossWarps{sums});
#elif CODEC_EDEN
        Scale s = block_scale(amax[c], tensor);
        correct_scale(s, v, amax[c], block, stream, TransformWarps{sums});
#elif !CODEC_SEARCH
        const Scale s = block_scale(amax[c], tensor);
#endif
        stored[c] = s.stored;
        const u32 place = QUANT_TILE_ROWS > 1
                              ? static_cast<u32>((column + c) % QUANT_TILE_ROWS) * kParts + part
                              : part;
        encode(v, s, is_far(amax[c], s), tensor, block, place, stream, codes_of[c], tally);
#if CODEC_OUT == 1
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (start + k < coded && column + c < inner)
                values[(image * coded + start + k) * inner + column + c] = v[k];
#endif
    }
#endif
#if CODEC_OUT == 0
    const i64 row = (image * tiles + tile) * (CODEC_BLOCK * CODEC_BITS / 8) + part * (kWords * 4);
    store_column_bytes(codes_of, codes + row * inner + column, inner, inside ? inner - column : 0);
    if (part == 0 && inside) {
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
            if (column + c < inner && (column + c) % QUANT_TILE_ROWS == 0)
                scales[QUANT_TILE_ROWS > 1 ? blocks : blocks + c] = static_cast<u8>(stored[c]);
    }
#endif
    add_counts(tally, counters);
#endif
}
