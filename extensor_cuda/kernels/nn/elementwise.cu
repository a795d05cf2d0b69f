// Elementwise sums, casts, ReLU, GELU x Phi(x) and their gradients, and rounding to bfloat16.
// Computed in float32 and rounded once. A thread has two vectors of 8 values.
//
// Macros: NN_A, NN_B and NN_OUT, the dtypes of the arrays and the result (0: float32, 1: bfloat16);
// NN_STORED: the second array is 8-bit codes in flat blocks, rounded to NN_B as they are decoded,
// with decode.cuh's macros and CODEC_BLOCK.
// Compiled with --fmad=false. Limits: elementwise.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"

constexpr int kThreads = 256, kGroups = 2;
constexpr i64 kStep = kThreads * kVector, kPart = kStep * kGroups;  // as in elementwise.py

// out[i] = op(a[i], b[i]). If b is a, it is read once.
template <bool kTwo, class Op>
DEVICE void each(const ElementType<NN_A>::Raw* __restrict__ a,
    const ElementType<NN_B>::Raw* __restrict__ b, ElementType<NN_OUT>::Raw* __restrict__ out,
    i64 count, Op op) {
    const i64 first = blockIdx.x * kPart + threadIdx.x * kVector;
    const bool aligned =
        !((reinterpret_cast<u64>(a) | reinterpret_cast<u64>(b) | reinterpret_cast<u64>(out)) & 15);
    if (aligned && first + (kGroups - 1) * kStep + kVector <= count) {
        FloatVector x[kGroups], y[kGroups];
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
            x[k] = ElementType<NN_A>::load(a + first + k * kStep);
            y[k] = kTwo ? ElementType<NN_B>::load(b + first + k * kStep) : x[k];
        }
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[k].v[i] = op(x[k].v[i], y[k].v[i]);
            ElementType<NN_OUT>::store(out + first + k * kStep, x[k]);
        }
        return;
    }
    for (int k = 0; k < kGroups; ++k)
        for (int i = 0; i < kVector; ++i) {
            const i64 at = first + k * kStep + i;
            if (at >= count) break;
            const float x = ElementType<NN_A>::wide(a[at]);
            out[at] = ElementType<NN_OUT>::narrow(op(x, kTwo ? ElementType<NN_B>::wide(b[at]) : x));
        }
}

// The first values of a vector of which `left` are there; zeros.
DEVICE FloatVector some(const ElementType<NN_A>::Raw* from, i64 left) {
    FloatVector v = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        if (i < left) v.v[i] = ElementType<NN_A>::wide(from[i]);
    return v;
}

#define COMMON_FULL_PRECISION (NN_OUT == 0)
#include "common/activation.cuh"

struct GeluGrad {
    DEVICE float operator()(float g, float x) const {
        const float e = bell(x), density = __fmul_rn(e, 0.3989422804014327f);  // 1 / sqrt(2 pi)
        return __fmul_rn(__fadd_rn(__fmul_rn(density, x), normal_below(x, e)), g);
    }
};
struct ReluGrad {  // g where ReLU's output is positive, else 0
    DEVICE float operator()(float g, float out) const { return out > 0 ? g : 0.0f; }
};
struct Add {
    DEVICE float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct Same {
    DEVICE float operator()(float x, float) const { return x; }
};
struct Near {  // rounds to bfloat16, kept in the result's dtype
    DEVICE float operator()(float x, float) const {
        return ElementType<1>::wide(ElementType<1>::narrow(x));
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    gelu(const ElementType<NN_A>::Raw* __restrict__ x, ElementType<NN_OUT>::Raw* __restrict__ out,
        i64 count) {
    each<false>(x, reinterpret_cast<const ElementType<NN_B>::Raw*>(x), out, count, Gelu{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    relu(const ElementType<NN_A>::Raw* __restrict__ x, ElementType<NN_OUT>::Raw* __restrict__ out,
        i64 count) {
    each<false>(x, reinterpret_cast<const ElementType<NN_B>::Raw*>(x), out, count, Relu{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    cast(const ElementType<NN_A>::Raw* __restrict__ x, ElementType<NN_OUT>::Raw* __restrict__ out,
        i64 count) {
    each<false>(x, reinterpret_cast<const ElementType<NN_B>::Raw*>(x), out, count, Same{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    bfloat16_values(const ElementType<NN_A>::Raw* __restrict__ x,
        ElementType<NN_OUT>::Raw* __restrict__ out, i64 count) {
    each<false>(x, reinterpret_cast<const ElementType<NN_B>::Raw*>(x), out, count, Near{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 6) gelu_grad(
    const ElementType<NN_A>::Raw* __restrict__ a, const ElementType<NN_B>::Raw* __restrict__ b,
    ElementType<NN_OUT>::Raw* __restrict__ out, i64 count) {
    each<true>(a, b, out, count, GeluGrad{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 6) relu_grad(
    const ElementType<NN_A>::Raw* __restrict__ a, const ElementType<NN_B>::Raw* __restrict__ b,
    ElementType<NN_OUT>::Raw* __restrict__ out, i64 count) {
    each<true>(a, b, out, count, ReluGrad{});
}

// A byte for the eight values of a vector, the first in its highest bit.
extern "C" __global__ void __launch_bounds__(kThreads, 6)
    positive_bits(const ElementType<NN_A>::Raw* __restrict__ x, u8* __restrict__ bits, i64 count) {
    const i64 first = blockIdx.x * kPart + threadIdx.x * kVector;
    const bool whole = reinterpret_cast<u64>(x) % 16 == 0 && first + kStep + kVector <= count;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
        const i64 at = first + k * kStep;
        if (at >= count) return;
        const FloatVector v = whole ? ElementType<NN_A>::load(x + at) : some(x + at, count - at);
        u32 byte = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) byte |= (v.v[i] > 0 ? 128u : 0u) >> i;
        bits[at / kVector] = static_cast<u8>(byte);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 6)
    relu_grad_of_bits(const ElementType<NN_A>::Raw* __restrict__ g, const u8* __restrict__ bits,
        ElementType<NN_OUT>::Raw* __restrict__ out, i64 count) {
    const i64 first = blockIdx.x * kPart + threadIdx.x * kVector;
    const bool aligned = !((reinterpret_cast<u64>(g) | reinterpret_cast<u64>(out)) & 15);
    const bool whole = aligned && first + kStep + kVector <= count;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
        const i64 at = first + k * kStep;
        if (at >= count) return;
        FloatVector v = whole ? ElementType<NN_A>::load(g + at) : some(g + at, count - at);
        const u32 byte = bits[at / kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) v.v[i] = byte << i & 128u ? v.v[i] : 0.0f;
        if (whole) ElementType<NN_OUT>::store(out + at, v);
        else
            for (int i = 0; i < kVector; ++i)
                if (at + i < count) out[at + i] = ElementType<NN_OUT>::narrow(v.v[i]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 6) add(const ElementType<NN_A>::Raw* a,
    const ElementType<NN_B>::Raw* b, ElementType<NN_OUT>::Raw* __restrict__ out, i64 count) {
    each<true>(a, b, out, count, Add{});
}

#if NN_STORED
#include "codec/decode_e8m0.cuh"

// `count` is a multiple of kVector, and a block of it. `out` may be `g`.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    gelu_grad_of_stored(const ElementType<NN_A>::Raw* g, const u8* __restrict__ codes,
        const u8* __restrict__ scales, ElementType<NN_OUT>::Raw* out, i64 count) {
    const i64 first = blockIdx.x * kPart + threadIdx.x * kVector;
    FloatVector y[kGroups];
    uint2 words[kGroups];
    u32 scale[kGroups];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
        const i64 at = first + k * kStep;
        if (at >= count) continue;
        y[k] = ElementType<NN_A>::load(g + at);
        words[k] = *reinterpret_cast<const uint2*>(codes + at);
        scale[k] = scales[at / CODEC_BLOCK];
    }
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
        const i64 at = first + k * kStep;
        if (at >= count) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const u32 code = (i < 4 ? words[k].x : words[k].y) >> (8 * (i % 4)) & 255u;
            const float x = scaled_value(code, scale[k]);
            y[k].v[i] =
                GeluGrad{}(y[k].v[i], ElementType<NN_B>::wide(ElementType<NN_B>::narrow(x)));
        }
        ElementType<NN_OUT>::store(out + at, y[k]);
    }
}
#endif
