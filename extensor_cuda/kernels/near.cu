// Packed MXFP8 rows -> FP8 codes under one power of two per row, rounded where FP8's subnormals do not
// hold them, and how many that were. A block of threads has a row.
//
// With s the largest scale byte among a row's blocks that are neither zero nor NaN, a value is
// element 2^(t - s) 2^(s - 127). While the first product is a normal number of the element's format it
// has the same mantissa and is exact; below, it is rounded to nearest even, once. NaN blocks become
// NaN; NaN and infinite elements stay.
//
// No headers, no inline assembly; macros: MANTISSA, LEAST (exponent of the least normal number), FIRST
// (the first magnitude that is no number), BLOCK (16 to 128), TILE_ROWS.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 128, kChunk = 16, kNaN = 255, kMost = 60;
constexpr u32 kOnes = 0x01010101u, kMagnitudes = 0x7F7F7F7Fu, kTops = 0x80808080u;
constexpr u32 kNormal = 1u << MANTISSA;  // the magnitude of the least normal number

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

struct Changed {
    u32 values, flushed;
};

// Four codes times 2^-shift, shift above 0.
__device__ __forceinline__ u32 rebased(u32 word, int shift, float unit, Changed& changed) {
    const u32 magnitudes = word & kMagnitudes, least = kNormal * (shift + 1);
    // All four normal before and after: a subtraction in each byte, without borrows.
    if (least < FIRST && ((magnitudes + kOnes * (0x80u - least)) & kTops) == kTops &&
        !((magnitudes + kOnes * (0x80u - FIRST)) & kTops))
        return word - kOnes * (kNormal * shift);
    const float magic = power_of_two(23 + LEAST - MANTISSA);  // its last bit is the least number
    u32 out = word & kTops;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 code = magnitudes >> (8 * i) & 0x7Fu;
        u32 made = code;
        if (code >= least && code < FIRST) {
            made = code - kNormal * shift;
        } else if (code < FIRST) {
            const float value = __uint_as_float(code << (23 - MANTISSA)) * unit, sum = value + magic;
            made = __float_as_uint(sum) - __float_as_uint(magic);
            changed.values += sum - magic != value;
            changed.flushed += code && !made;
        }
        out |= made << (8 * i);
    }
    return out;
}

__device__ __forceinline__ u32 over_warp(u32 mine) {
    for (int step = 1; step < 32; step *= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, step);
    return mine;
}

// codes (rows, blocks BLOCK), scales (tiles of rows, blocks) -> out as codes, exponents (rows,), and
// counts (rows, 2): values changed, and those of them that are 0 now.
extern "C" __global__ void __launch_bounds__(kThreads)
near(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out,
     int* __restrict__ exponents, u32* __restrict__ counts, i64 blocks) {
    const i64 row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(codes + row * blocks * BLOCK);
    uint4* to = reinterpret_cast<uint4*>(out + row * blocks * BLOCK);
    scales += row / TILE_ROWS * blocks;
    const int chunks = static_cast<int>(blocks * (BLOCK / kChunk));
    __shared__ int top;
    __shared__ u32 values, flushed;
    if (threadIdx.x == 0) top = -1, values = 0, flushed = 0;
    __syncthreads();
    int mine = -1;
#pragma unroll 4
    for (int c = threadIdx.x; c < chunks; c += kThreads) {
        const uint4 four = from[c];
        const int scale = scales[c * kChunk / BLOCK];
        if (((four.x | four.y | four.z | four.w) & kMagnitudes) && scale != kNaN) mine = max(mine, scale);
    }
    if (mine >= 0) atomicMax(&top, mine);
    __syncthreads();
    const int anchor = top;
    Changed changed = {0, 0};
#pragma unroll 4
    for (int c = threadIdx.x; c < chunks; c += kThreads) {
        uint4 four = from[c];  // again, of the first-level cache
        const int scale = scales[c * kChunk / BLOCK];
        // Above the anchor lie only zero blocks. The largest value is below 2^16: 60 binades down all is 0.
        const int shift = min(max(anchor - scale, 0), kMost);
        if (scale == kNaN) {
            four = uint4{kMagnitudes, kMagnitudes, kMagnitudes, kMagnitudes};
        } else if (shift) {
            // A magnitude's bits, read as float32's, are the value times 2^(-126 - LEAST).
            const float unit = power_of_two(126 + LEAST - shift);
            four.x = rebased(four.x, shift, unit, changed);
            four.y = rebased(four.y, shift, unit, changed);
            four.z = rebased(four.z, shift, unit, changed);
            four.w = rebased(four.w, shift, unit, changed);
        }
        to[c] = four;
    }
    const u32 all = over_warp(changed.values), gone = over_warp(changed.flushed);
    if (threadIdx.x % 32 == 0 && all) {
        atomicAdd(&values, all);
        atomicAdd(&flushed, gone);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        exponents[row] = anchor < 0 ? 0 : anchor - 127;
        counts[2 * row] = values;
        counts[2 * row + 1] = flushed;
    }
}
