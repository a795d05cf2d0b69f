// relu, gelu and their gradients, and the sum of two arrays.
//
// relu and add give the bytes that numpy gives. gelu is compared within a bound
// (extensor.backends), which holds with and without fused multiply-add.

#include "common/elementwise.hpp"
#include "common/vector_math.hpp"
#include "nn/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

void relu(int64_t n, const float* x, float* y) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) {
            const vf v = load_at(x, i, end);
            store_at(y, v <= splat(0.0f) ? vf{} : v, i, end);  // NaN stays
        }
    });
}

void relu_grad(int64_t n, const float* g, const float* y, float* gx) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL)
            store_at(gx, load_at(y, i, end) > splat(0.0f) ? load_at(g, i, end) : vf{}, i, end);
    });
}

void add(int64_t n, const float* a, const float* b, float* y) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) store_at(y, load_at(a, i, end) + load_at(b, i, end), i, end);
    });
}

// Phi(-|x|) = e^(-x^2 / 2) t h(t), t = 1 / (1 + 0.3 |x|), where h is the Chebyshev interpolant of
// degree 9 of erfcx(|x| / sqrt 2) / (2 t) on 0 <= |x| <= 14.5, in powers of t - 0.6: relative error
// 0.1 * 2^-24. Beyond 14.5 Phi(-|x|) is zero in float32.
INLINE vf normal_tail(vf x, vf bell) {
    vf z = magnitude(x);
    z = z > splat(14.5f) ? splat(14.5f) : z;
    const vf t = splat(1.0f) / multiply_add(z, splat(0.3f), splat(1.0f));
    const vf v = t - splat(0.6f);
    vf h = splat(-0.0209560241f);
    h = multiply_add(h, v, splat(0.00109492213f));
    h = multiply_add(h, v, splat(0.0443212927f));
    h = multiply_add(h, v, splat(-0.00756290418f));
    h = multiply_add(h, v, splat(-0.0910612389f));
    h = multiply_add(h, v, splat(-0.0138189077f));
    h = multiply_add(h, v, splat(0.225356595f));
    h = multiply_add(h, v, splat(0.413744815f));
    h = multiply_add(h, v, splat(0.405136739f));
    h = multiply_add(h, v, splat(0.258572679f));
    return bell * (t * h);
}

// body(i) for every vector of n elements.
template <class F>
void for_vectors(int64_t n, int64_t work, F&& body) {
    for_segments(n, work, [&](int64_t i, int64_t end) {
        for (; i < end; i += VL) body(i);
    });
}

void gelu(int64_t n, const float* x, float* y, float* phi) {
    for_vectors(n, 4, [=](int64_t i) {
        const vf v = load_at(x, i, n);
        const vf tail = normal_tail(v, exp_negative(v * v * splat(-0.5f)));
        const vf below = v < splat(0.0f) ? tail : splat(1.0f) - tail;
        store_at(y, v * below, i, n);
        store_at(phi, below, i, n);
    });
}

void gelu_grad(int64_t n, const float* g, const float* x, const float* phi, float* gx) {
    for_vectors(n, 4, [=](int64_t i) {
        const vf v = load_at(x, i, n);
        const vf bell = exp_negative(v * v * splat(-0.5f));
        const vf slope =
            multiply_add(v * bell, splat(0.398942280f), load_at(phi, i, n));  // 1 / sqrt(2 pi)
        store_at(gx, load_at(g, i, n) * slope, i, n);
    });
}

// 1 / (1 + e^-z), without overflow.
INLINE vf logistic(vf z) {
    const vf e = exp_negative(-magnitude(z));
    const vf share = splat(1.0f) / (splat(1.0f) + e);
    return z < splat(0.0f) ? e * share : share;
}

INLINE vf at_most(vf x, vf limit) { return x > limit ? limit : x; }  // NaN stays
INLINE vf within(vf x, vf limit) { return x < -limit ? -limit : at_most(x, limit); }

void gated_silu(const GatedSilu& s, float* y) {
    const vf alpha = splat(s.alpha), limit = splat(s.limit), shift = splat(s.shift);
    for_vectors(s.n, 4, [=](int64_t i) {
        const vf g = at_most(load_at(s.gate, i, s.n), limit);
        const vf u = within(load_at(s.up, i, s.n), limit) + shift;
        store_at(y, g * logistic(alpha * g) * u, i, s.n);
    });
}

// With s = sigmoid(alpha a): (a s)' = s + alpha a s (1 - s); zero beyond the limit.
void gated_silu_grad(const GatedSilu& s, const float* g, float* ggate, float* gup) {
    const vf alpha = splat(s.alpha), limit = splat(s.limit), shift = splat(s.shift);
    for_vectors(s.n, 4, [=](int64_t i) {
        const vf gate = load_at(s.gate, i, s.n), up = load_at(s.up, i, s.n);
        const vf a = at_most(gate, limit), u = within(up, limit) + shift;
        const vf share = logistic(alpha * a), grad = load_at(g, i, s.n);
        const vf silu = a * share;
        const vf slope = share + alpha * silu * (splat(1.0f) - share);
        store_at(ggate, gate > limit ? vf{} : grad * u * slope, i, s.n);
        store_at(gup, magnitude(up) > limit ? vf{} : grad * silu, i, s.n);
    });
}

}  // namespace

extern const ActivationKernels activation_kernels = {relu, relu_grad,  gelu,           gelu_grad,
                                                     add,  gated_silu, gated_silu_grad};

}  // namespace EXTENSOR_ISA
