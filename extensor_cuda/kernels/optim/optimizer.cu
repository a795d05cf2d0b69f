// One multi-tensor step of Adam, Lion or SGD with float32 weights and states, and whether gradients
// are finite. Others: optimizer_low_precision.cu. No macros; compiled with --fmad=false.

#include "optim/optimizer.cuh"
#include "optim/vectors.cuh"
#include "common/vector_types.cuh"

template <class Rule>
DEVICE void step(const Tensor* tensors, int number, const Pace& pace) {
    if (pace.bad && (*pace.bad | *pace.stop)) return;
    const Tensor t = tensor_of(tensors, number);
    const Rule rule(t, pace);
    const i64 begin = (static_cast<i64>(blockIdx.x) - t.start) * kPart;
    const i64 left = t.count - begin;
    const int count = left < kPart ? static_cast<int>(left) : kPart;
    float *weight = static_cast<float*>(t.weight) + begin,
          *first = static_cast<float*>(t.first) + (t.first ? begin : 0);
    float* second = static_cast<float*>(t.second) + (t.second ? begin : 0);
    const float* grad = static_cast<const float*>(t.grad) + begin;
    int done = 0;
    if (aligned(weight) && aligned(grad) && aligned(first) && aligned(second)) {
        done = count / 4 * 4;
#pragma unroll 2
        for (int i = threadIdx.x * 4; i < done; i += kThreads * 4) {
            float4 w = *reinterpret_cast<float4*>(weight + i), m = {}, s = {};
            const float4 g = __ldcs(reinterpret_cast<const float4*>(grad + i));
            if (first) m = *reinterpret_cast<float4*>(first + i);
            if (second) s = *reinterpret_cast<float4*>(second + i);
            rule(w.x, g.x, m.x, s.x), rule(w.y, g.y, m.y, s.y);
            rule(w.z, g.z, m.z, s.z), rule(w.w, g.w, m.w, s.w);
            *reinterpret_cast<float4*>(weight + i) = w;
            if (first) *reinterpret_cast<float4*>(first + i) = m;
            if (second) *reinterpret_cast<float4*>(second + i) = s;
        }
    }
    for (int i = done + threadIdx.x; i < count; i += kThreads) {
        float m = first ? first[i] : 0, s = second ? second[i] : 0;
        rule(weight[i], grad[i], m, s);
        if (first) first[i] = m;
        if (second) second[i] = s;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adam(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Adam>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

extern "C" __global__ void __launch_bounds__(kThreads)
    lion(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Lion>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sgd(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Descent>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

// A thread's largest magnitude of `count` values, as a float32's bits; NaN is the largest, unless
// only finite values count.
template <bool finite, class Element>
DEVICE u32 most_of(const Element* values, int count) {
    u32 most = 0;
    const int whole = aligned(values, 4 * sizeof(Element)) ? count / 4 * 4 : 0;
    const auto take = [&](int i, bool four) {
        float v[4];
        decode(load(values + i, four, count - i), v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 bits = bits_of(v[k]) & kMagnitude;
            most = max(most, finite && bits >= kExponent ? 0 : bits);
        }
    };
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < whole; i += kThreads * 4) take(i, true);
    for (int i = whole + threadIdx.x * 4; i < count; i += kThreads * 4) take(i, false);
    return most;
}

// A thread's largest magnitude of its block's part of a gradient.
template <bool finite>
DEVICE u32 most_of_part(const Tensor& t) {
    const i64 begin = (static_cast<i64>(blockIdx.x) - t.start) * kPart;
    const i64 left = t.count - begin;
    const int count = left < kPart ? static_cast<int>(left) : kPart;
    return t.narrow ? most_of<finite>(static_cast<const u16*>(t.grad) + begin, count)
                    : most_of<finite>(static_cast<const float*>(t.grad) + begin, count);
}

// Raises flags[i] if the gradient of tensor i holds NaN or infinity, and then flags[number] and
// *stop, which may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
    finite(const Tensor* tensors, int number, u32* flags, u32* stop) {
    const Tensor& t = tensor_of(tensors, number);
    if (__any_sync(~0u, most_of_part<false>(t) >= kExponent) && threadIdx.x % 32 == 0) {
        atomicOr(flags + (&t - tensors), 1u);
        atomicOr(flags + number, 1u);
        if (stop) atomicOr(stop, 1u);
    }
}

// Raises found[i] to the largest finite magnitude of tensor i, as a float32's bits.
extern "C" __global__ void __launch_bounds__(kThreads)
    largest(const Tensor* tensors, int number, u32* found) {
    const Tensor& t = tensor_of(tensors, number);
    const u32 most = __reduce_max_sync(~0u, most_of_part<true>(t));
    if (threadIdx.x % 32 == 0) atomicMax(found + (&t - tensors), most);
}

template <int kind>
DEVICE void scale_part(void* grad, i64 begin, int count, float by) {
    typedef ElementType<kind> Type;
    typename Type::Raw* g = static_cast<typename Type::Raw*>(grad) + begin;
    for (int i = threadIdx.x; i < count; i += kThreads)
        g[i] = Type::narrow(__fmul_rn(Type::wide(g[i]), by));
}

// Multiplies gradients by *factor, or by `value` where that is null.
extern "C" __global__ void __launch_bounds__(kThreads)
    scale(const Tensor* tensors, int number, const float* factor, float value) {
    const Tensor& t = tensor_of(tensors, number);
    const i64 begin = (static_cast<i64>(blockIdx.x) - t.start) * kPart, left = t.count - begin;
    const int count = left < kPart ? static_cast<int>(left) : kPart;
    const float by = factor ? *factor : value;
    if (t.narrow) scale_part<1>(const_cast<void*>(t.grad), begin, count, by);
    else scale_part<0>(const_cast<void*>(t.grad), begin, count, by);
}

// Sums over a block's threads in a fixed order, for the first thread.
DEVICE double block_sum(double mine) {
    __shared__ double sums[kThreads];
    sums[threadIdx.x] = mine;
    for (int half = kThreads / 2; half; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half)
            sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    return sums[0];
}

// A thread's sum of the squares of its values.
template <int kind>
DEVICE double squares_of(const void* grad, i64 begin, int count) {
    typedef ElementType<kind> Type;
    const typename Type::Raw* g = static_cast<const typename Type::Raw*>(grad) + begin;
    double mine = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const double v = static_cast<double>(Type::wide(g[i]));
        mine = __dadd_rn(mine, __dmul_rn(v, v));
    }
    return mine;
}

// Each block's sum of the squares of its part of a gradient.
extern "C" __global__ void __launch_bounds__(kThreads)
    squares(const Tensor* tensors, int number, double* partial) {
    const Tensor& t = tensor_of(tensors, number);
    const i64 begin = (static_cast<i64>(blockIdx.x) - t.start) * kPart, left = t.count - begin;
    const int count = left < kPart ? static_cast<int>(left) : kPart;
    const double sum = block_sum(
        t.narrow ? squares_of<1>(t.grad, begin, count) : squares_of<0>(t.grad, begin, count));
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Adds the blocks' sums in one block.
extern "C" __global__ void __launch_bounds__(kThreads)
    total(const double* partial, i64 count, double* out) {
    double mine = 0;
    for (i64 i = threadIdx.x; i < count; i += kThreads) mine = __dadd_rn(mine, partial[i]);
    const double sum = block_sum(mine);
    if (threadIdx.x == 0) *out = sum;
}
