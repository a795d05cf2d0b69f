// What every kernel has: integer types named by their width, and a quick reciprocal. Several
// headers of a program include this file.

#ifndef COMMON_TYPES
#define COMMON_TYPES

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A function of the device that is always inlined.
#define DEVICE __device__ __forceinline__

// 1 / v, off by 2^-23 of it at most; 0 where it is below 2^-126.
DEVICE float reciprocal(float v) {
#ifdef __CUDA_ARCH__
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
    return out;
#else
    return 1.0f / v;
#endif
}

#endif
