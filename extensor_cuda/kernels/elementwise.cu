// Values one by one: x Phi(x) with the normal distribution function Phi, and its gradient; relu's
// gradient; rounding to bfloat16. No headers, no macros; compiled with --fmad=false.

typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 256, kEach = 4;

__device__ __forceinline__ float density(float x) {
    return __fmul_rn(expf(__fmul_rn(__fmul_rn(x, x), -0.5f)), 0.3989422804014327f);  // 1 / sqrt(2 pi)
}

extern "C" __global__ void __launch_bounds__(kThreads)
gelu(const float* __restrict__ x, float* __restrict__ y, float* __restrict__ phi, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const i64 i = first + k * kThreads;
        if (i >= count) return;
        const float below = normcdff(x[i]);
        phi[i] = below;
        y[i] = __fmul_rn(x[i], below);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
gelu_grad(const float* __restrict__ g, const float* __restrict__ x, const float* __restrict__ phi,
          float* __restrict__ gx, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const i64 i = first + k * kThreads;
        if (i >= count) return;
        gx[i] = __fmul_rn(__fadd_rn(__fmul_rn(density(x[i]), x[i]), phi[i]), g[i]);
    }
}

// g where relu's output is positive, else 0.
extern "C" __global__ void __launch_bounds__(kThreads)
relu_grad(const float* __restrict__ g, const float* __restrict__ out, float* __restrict__ gx, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const i64 i = first + k * kThreads;
        if (i >= count) return;
        gx[i] = out[i] > 0 ? g[i] : 0.0f;
    }
}

// The nearest bfloat16, ties to even, as float32; NaN becomes the quiet one of its sign.
extern "C" __global__ void __launch_bounds__(kThreads)
bfloat16_values(const float* __restrict__ x, float* __restrict__ out, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const i64 i = first + k * kThreads;
        if (i >= count) return;
        const u32 bits = __float_as_uint(x[i]);
        const u32 near = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        out[i] = __uint_as_float(nan ? (bits & 0x80000000u) | 0x7FC00000u : near);
    }
}
