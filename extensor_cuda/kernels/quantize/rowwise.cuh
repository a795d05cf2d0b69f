// Quantizes a matrix rowwise: blocks run along rows, and a thread has QUANT_THREAD_CHUNKS chunks.
// Configured by the quantizer's macros (quantize.py).

#if QUANT_BESIDE
#define QUANT_BESIDE_PARAMETER Raw* __restrict__ beside,
#else
#define QUANT_BESIDE_PARAMETER
#endif

// Four-over-six to values: 3 blocks, which the compiler aims at, would spill a register on Hopper.
#if CODEC_RULE == 6 && CODEC_OUT == 1 && !CODEC_STOCHASTIC
#define QUANT_BOUNDS kThreads, 2
#else
#define QUANT_BOUNDS kThreads
#endif

// x (rows, length) -> codes, scales or values. QUANT_WHOLE: length is a multiple of the block, x is
// 16-byte aligned. QUANT_BESIDE: x is quantized, and its activation written beside, bfloat16 too.
extern "C" __global__ void __launch_bounds__(QUANT_BOUNDS) quantize_rows(const Raw* __restrict__ x,
    u8* __restrict__ codes, u8* __restrict__ scales, float* __restrict__ values,
    const Tensor* __restrict__ tensor_of, u32* __restrict__ maximum, u64* __restrict__ counters,
    CODEC_MASK_PARAMETER QUANT_BESIDE_PARAMETER const u32* __restrict__ clock, u32 key0, u32 key1,
    u32 high0, u32 high1, CODEC_SIGN_PARAMETERS i64 rows, i64 length) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
#if CODEC_HADAMARD
    const Signs signs = transform_signs(clock, sign0, sign1, sign2, sign3);
#endif
    const i64 coded = coded_length(length);
    const i64 per_row = (coded + CODEC_BLOCK - 1) / CODEC_BLOCK * kParts, total = rows * per_row;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * QUANT_THREAD_CHUNKS) + threadIdx.x;
#if CODEC_NEEDS_TENSOR && CODEC_OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    Tally tally = {0, 0};
    u32 raw[QUANT_THREAD_CHUNKS][sizeof(Raw) * kChunk / 4];
#pragma unroll
    for (int item = 0; item < QUANT_THREAD_CHUNKS; ++item) {
        const i64 chunk = first + item * kThreads;
#if QUANT_WHOLE
        const uint4* from = reinterpret_cast<const uint4*>(x + chunk * kChunk);
#pragma unroll
        for (int v = 0; v < kChunk / kPerVector; ++v) {
            const uint4 four = chunk < total ? __ldg(from + v) : uint4{0, 0, 0, 0};
            raw[item][4 * v] = four.x, raw[item][4 * v + 1] = four.y;
            raw[item][4 * v + 2] = four.z, raw[item][4 * v + 3] = four.w;
        }
#else
        const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
        const i64 left = chunk < total ? length - start : 0;
        const Raw* from = x + row * length + start;
#pragma unroll
        for (int k = 0; k < kChunk; k += 4 / sizeof(Raw)) {
            u32 word = k < left ? from[k] : 0;
            if (sizeof(Raw) == 2 && k + 1 < left) word |= static_cast<u32>(from[k + 1]) << 16;
            raw[item][k * sizeof(Raw) / 4] = word;
        }
#endif
#if QUANT_BESIDE
        u32 active[sizeof(Raw) * kChunk / 4];
#pragma unroll
        for (int k = 0; k < kChunk / 2; ++k) active[k] = raw[item][k];
        activate(active);
        uint4* to = reinterpret_cast<uint4*>(beside + chunk * kChunk);
#pragma unroll
        for (int v = 0; v < kChunk / kPerVector; ++v)
            if (chunk < total)
                to[v] =
                    uint4{active[4 * v], active[4 * v + 1], active[4 * v + 2], active[4 * v + 3]};
#else
        activate(raw[item]);
#endif
    }
    u32 most = 0;
#pragma unroll
    for (int item = 0; item < QUANT_THREAD_CHUNKS; ++item) {
        const i64 chunk = first + item * kThreads;
        const u32 block = static_cast<u32>(chunk / kParts), part = static_cast<u32>(chunk % kParts);
        Chunk unpacked;
        Chunk& v = chunk_of(raw[item], unpacked);
#if CODEC_HADAMARD
        hadamard_lanes(v[0], signs, static_cast<u32>(chunk % kHadamardChunks));
#endif
#if CODEC_OUT == 2
#if CODEC_UE4M3
        most = larger(most, finite_maximum(v[0]));
#else
        const u32 amax = across_lanes(chunk_maximum(v[0]));
        most = larger(most, amax < kExponent ? amax : 0);
#endif
#else
        u32 packed[kWords];
        [[maybe_unused]] u32 inside;
        const Scale s = encode_chunk(
            v, tensor, block, part, stream, CODEC_CLIP_ARGUMENTS(raw[item], inside) packed, tally);
        if (chunk < total) {
#if CODEC_OUT == 0
            store_words(reinterpret_cast<u32*>(codes) + chunk * kWords, packed);
            if (part == 0) scales[block] = static_cast<u8>(s.stored);
#if CODEC_MASK
            store_clip_bits(mask, chunk, chunk / per_row, chunk % per_row * kChunk, coded, inside);
#endif
#elif QUANT_WHOLE
            float4* to = reinterpret_cast<float4*>(values + chunk * kChunk);
#pragma unroll
            for (int k = 0; k < kChunk; k += 4)
                to[k / 4] = float4{v[0][k], v[0][k + 1], v[0][k + 2], v[0][k + 3]};
#else
            const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
#pragma unroll
            for (int k = 0; k < kChunk; ++k)
                if (start + k < coded) values[row * coded + start + k] = v[0][k];
#endif
        }
#endif
    }
#if CODEC_OUT == 2
    add_maximum(most, maximum);
#else
    add_counts(tally, counters);
#endif
}
