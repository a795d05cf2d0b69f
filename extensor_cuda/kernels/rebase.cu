// Packed MXFP4 rows -> E5M2 codes under one power of two per row. A block of threads has a row.
//
// With s the largest scale byte among a row's blocks that are neither zero nor NaN, a value is
// e2m1 2^(t - s + TOP) 2^(s - 127 - TOP): the first two factors are exact in E5M2 while s - t is at
// most SPAN, and the last is the row's exponent. A wider row raises the flag. NaN blocks become NaN.
//
// No headers; BLOCK (16 to 128), TOP and SPAN are macros.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 128, kNaN = 255;

// The E5M2 codes of two values, exact by the window.
__device__ __forceinline__ u32 encode_pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Four 4-bit codes -> four bytes, by a table of magnitudes.
__device__ __forceinline__ u32 look_up(u32 codes, u32 low, u32 high) {
    const u32 sign = (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 |
                     (codes & 0x8000u) << 16;
    return __byte_perm(low, high, codes & 0x7777u) | sign;
}

extern "C" __global__ void __launch_bounds__(kThreads)
rebase(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out,
       int* __restrict__ exponents, u32* __restrict__ flag, i64 blocks) {
    const i64 row = blockIdx.x;
    const uint2* from = reinterpret_cast<const uint2*>(codes + row * blocks * (BLOCK / 2));
    uint4* to = reinterpret_cast<uint4*>(out + row * blocks * BLOCK);
    scales += row * blocks;
    __shared__ int top, bottom;
    if (threadIdx.x == 0) top = -1, bottom = kNaN;
    __syncthreads();
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            const uint2 words = from[b * (BLOCK / 16) + i];
            any |= words.x | words.y;
        }
        const int scale = scales[b];
        if ((any & 0x77777777u) && scale != kNaN) {
            atomicMax(&top, scale);
            atomicMin(&bottom, scale);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        exponents[row] = top < 0 ? 0 : top - 127 - TOP;
        if (top - bottom > SPAN) atomicOr(flag, 1u);
    }
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        const int scale = scales[b];
        // Beyond the window lie only zero blocks, or rows whose codes are not used.
        const int shift = max(min(scale - top + TOP, TOP), TOP - SPAN);
        const float unit = __uint_as_float(static_cast<u32>(shift + 127) << 23);
        u32 low = encode_pair(0.0f, 0.5f * unit) | encode_pair(unit, 1.5f * unit) << 16;
        u32 high = encode_pair(2.0f * unit, 3.0f * unit) |
                   encode_pair(4.0f * unit, 6.0f * unit) << 16;
        if (scale == kNaN) low = high = 0x7F7F7F7Fu;
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            const uint2 words = from[b * (BLOCK / 16) + i];
            to[b * (BLOCK / 16) + i] =
                uint4{look_up(words.x, low, high), look_up(words.x >> 16, low, high),
                      look_up(words.y, low, high), look_up(words.y >> 16, low, high)};
        }
    }
}
