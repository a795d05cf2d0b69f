// The steps of SGD and Adam, and whether all gradients are finite.
//
// One rounding an operation, in the generic method's order: the same bytes. Hence the compiler may
// not fuse multiply and add here (CMakeLists.txt).

#include "common/elementwise.hpp"
#include "optim/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

void sgd(const Sgd& s, int64_t n, float* weight, const float* grad, float* buffer) {
    threads::run(ceil_div(n, kSegment), n * 2, [=](int64_t task) {
        const int64_t end = least(n, (task + 1) * kSegment);
        const vf rate = splat(s.lr), keep = splat(s.momentum), pull = splat(s.decay);
        for (int64_t i = task * kSegment; i < end; i += VL) {
            const vf w = load_at(weight, i, end);
            vf d = load_at(grad, i, end);
            if (s.decay != 0.0f) d = w * pull + d;
            if (buffer) {
                const vf b = load_at(buffer, i, end) * keep + d;
                store_at(buffer, b, i, end);
                d = s.nesterov ? b * keep + d : b;
            }
            store_at(weight, w - d * rate, i, end);
        }
    });
}

// factors: 1 - lr decay, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps and
// lr / (1 - beta1^t).
void adam(int64_t n, float* weight, const float* grad, float* mean, float* square,
          const float* factors) {
    const float keep = factors[0], take1 = factors[1], keep2 = factors[2], take2 = factors[3];
    const float widen = factors[4], eps = factors[5], rate = factors[6];
    threads::run(ceil_div(n, kSegment), n * 4, [=](int64_t task) {
        const int64_t end = least(n, (task + 1) * kSegment);
        float* __restrict w = weight, * __restrict m = mean, * __restrict v = square;
        const float* __restrict d = grad;
        for (int64_t i = task * kSegment; i < end; ++i) {
            const float first = m[i] + (d[i] - m[i]) * take1;
            const float second = v[i] * keep2 + d[i] * d[i] * take2;
            m[i] = first;
            v[i] = second;
            w[i] = w[i] * keep - first / (__builtin_sqrtf(second) * widen + eps) * rate;
        }
    });
}

bool all_finite(int64_t n, const float* x) {
    const int64_t tasks = ceil_div(n, kSegment);
    bool* bad = threads::scratch_of<bool>(threads::Slot::partial, tasks);
    for_segments(n, 1, [=](int64_t i, int64_t end) {
        vi any = {};
        const int64_t task = i / kSegment;
        for (; i < end; i += VL)
            any |= (reinterpret_cast<vi>(load_at(x, i, end)) & 0x7F800000) == 0x7F800000;
        int32_t found = 0;
        for (int k = 0; k < VL; ++k) found |= any[k];
        bad[task] = found != 0;
    });
    for (int64_t task = 0; task < tasks; ++task)
        if (bad[task]) return false;
    return true;
}

}  // namespace

extern const OptimKernels optim_kernels = {sgd, adam, all_finite};

}  // namespace EXTENSOR_ISA
