// Quantizes a matrix in square tiles of one scale each; a thread has a chunk of a row. Configured
// by the quantizer's macros (quantize.py).

constexpr int kWarps =
    QUANT_TILE_ROWS / 16;  // warps of a tile's rows; each has 16 rows of two chunks

// x (images, rows, length) in tiles of (QUANT_TILE_ROWS, CODEC_BLOCK), numbered along the rows.
// QUANT_WHOLE: length is a multiple of 16, x is 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads, CODEC_SEARCH ? 2 : 1)
    quantize_tiles(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
        float* __restrict__ values, const Tensor* __restrict__ tensor_of, u32* __restrict__ maximum,
        u64* __restrict__ counters, const u32* __restrict__ clock, u32 key0, u32 key1, u32 high0,
        u32 high1, i64 images, i64 rows, i64 length) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const i64 across = (length + CODEC_BLOCK - 1) / CODEC_BLOCK, strips = (across * kParts + 1) / 2;
    const i64 bands = (rows + QUANT_TILE_ROWS - 1) / QUANT_TILE_ROWS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 place = static_cast<i64>(blockIdx.x) * (kThreads / 32 / kWarps) + warp / kWarps;
    const i64 band = place / strips, start = (place % strips * 2 + lane % 2) * kChunk;
    const int inner = warp % kWarps * 16 + lane / 2;  // row of the tile
    const i64 row = band % bands * QUANT_TILE_ROWS + inner, line = band / bands * rows + row;
    const bool inside = band < images * bands && start < across * CODEC_BLOCK;
    const bool real = inside && row < rows;
#if CODEC_NEEDS_TENSOR && CODEC_OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    float v[1][kChunk];
#if QUANT_WHOLE
    u32 raw[sizeof(Raw) * kChunk / 4];
    const uint4* from = reinterpret_cast<const uint4*>(x + line * length + start);
#pragma unroll
    for (int i = 0; i < kChunk / kPerVector; ++i) {
        const uint4 four = real && start < length ? __ldg(from + i) : uint4{0, 0, 0, 0};
        raw[4 * i] = four.x, raw[4 * i + 1] = four.y, raw[4 * i + 2] = four.z,
                raw[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[0][k] = element(raw, k);
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        v[0][k] = real && start + k < length ? widen(x[line * length + start + k]) : 0.0f;
#endif
    activate(v[0]);
    u32 amax = across_lanes(chunk_maximum(v[0]));
#pragma unroll
    for (int step = 2; step < 32; step *= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, step));
#if QUANT_TILE_ROWS > 16
    __shared__ u32 shared[kThreads / 32][2];
    if (lane < 2) shared[warp][lane] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
        amax = larger(amax, shared[warp / kWarps * kWarps + w][lane % 2]);
#endif
#if CODEC_OUT == 2
    add_maximum(CODEC_UE4M3 ? finite_maximum(v[0]) : amax < kExponent ? amax : 0, maximum);
#else
    Tally tally = {0, 0};
#if CODEC_SEARCH
    const Scale s = best_scale<1, QUANT_TILE_ROWS, 2>(v, lane % 2, amax, tensor);
#else
    const Scale s = block_scale(amax, tensor);
#endif
    const i64 block = band * across + start / CODEC_BLOCK;
    const u32 part = static_cast<u32>(inner * kParts + start % CODEC_BLOCK / kChunk);
    u32 packed[kWords];
    encode(v[0], s, is_far(amax, s), tensor, static_cast<u32>(block), part, stream, packed, tally);
    if (real) {
#if CODEC_OUT == 0
        store_words(
            reinterpret_cast<u32*>(codes) + (line * across * kParts + start / kChunk) * kWords,
            packed);
#else
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (start + k < length) values[line * length + start + k] = v[0][k];
#endif
    }
#if CODEC_OUT == 0
    if (inside && part == 0) scales[block] = static_cast<u8>(s.stored);
#endif
    add_counts(tally, counters);
#endif
}
