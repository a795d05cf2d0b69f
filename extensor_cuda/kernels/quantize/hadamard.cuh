// The Hadamard transform of extensor/quant/hadamard.py: signs, butterflies of strides 1, 2, 4 ...
// in that order, then one multiplication, without fused operations, because the order decides bits.
// Macros: CODEC_HADAMARD, CODEC_HADAMARD_FACTOR, CODEC_SIGNS_PER_STEP.

#if CODEC_HADAMARD
constexpr int kHadamardChunks = CODEC_HADAMARD / kChunk;  // chunks of one transform

// Signs of a transform's elements, one bit each, set where negative.
struct Signs {
    u32 words[4];
};

// CODEC_SIGNS_PER_STEP: drawn from a key, the step (a captured step reads it from `clock`) and the
// stream's number; else the numbers are the signs.
DEVICE Signs transform_signs([[maybe_unused]] const u32* clock, u32 a, u32 b, u32 c, u32 d) {
#if CODEC_SIGNS_PER_STEP
    Signs drawn;
    philox(0, 0, Stream{a, b, clock ? clock[0] : c, d}, drawn.words);
    return drawn;
#else
    return Signs{a, b, c, d};
#endif
}

// The strides within a chunk. `place`: the chunk's index within its transform.
DEVICE void hadamard_chunk(float (&v)[kChunk], const Signs& signs, u32 place) {
    const u32 word = place < 2   ? signs.words[0]
                     : place < 4 ? signs.words[1]
                     : place < 6 ? signs.words[2]
                                 : signs.words[3];
    const u32 mine = word >> (place % 2 * kChunk);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = float_of(bits_of(v[k]) ^ (mine >> k << 31));
#pragma unroll
    for (int stride = 1; stride < kChunk; stride *= 2) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            if (k & stride) continue;
            const float low = v[k], high = v[k + stride];
            v[k] = __fadd_rn(low, high);
            v[k + stride] = __fsub_rn(low, high);
        }
    }
}

DEVICE float butterfly(float mine, float other, bool high) {
    return high ? __fsub_rn(other, mine) : __fadd_rn(mine, other);
}

DEVICE void shrink(float (&v)[kChunk]) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = __fmul_rn(v[k], CODEC_HADAMARD_FACTOR);
}

// A whole transform of chunks in neighbouring lanes.
DEVICE void hadamard_lanes(float (&v)[kChunk], const Signs& signs, u32 place) {
    hadamard_chunk(v, signs, place);
#pragma unroll
    for (int lane = 1; lane < kHadamardChunks; lane *= 2) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            v[k] = butterfly(v[k], __shfl_xor_sync(~0u, v[k], lane), place & lane);
    }
    shrink(v);
}

// A whole transform of chunks in neighbouring warps, exchanged through shared memory.
DEVICE void hadamard_warps(float (&v)[kChunk], const Signs& signs, int warp, int lane) {
    const u32 place = static_cast<u32>(warp) % kHadamardChunks;
    hadamard_chunk(v, signs, place);
#if CODEC_HADAMARD > 16
    __shared__ float exchanged[kThreads / 32][kChunk][32];
#pragma unroll
    for (int step = 1; step < kHadamardChunks; step *= 2) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kChunk; ++k) exchanged[warp][k][lane] = v[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            v[k] = butterfly(v[k], exchanged[warp ^ step][k][lane], place & step);
    }
#endif
    shrink(v);
}
#endif
