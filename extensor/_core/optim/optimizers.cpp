// The steps of SGD, Adam and Lion, stochastic rounding to bfloat16, and whether all gradients are
// finite.
//
// One rounding an operation, in the generic method's order: the same bytes. Hence the compiler may
// not fuse multiply and add here (CMakeLists.txt).

#include "common/elementwise.hpp"
#include "optim/kernels.hpp"
#include "quantize/philox.hpp"

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

// factors: 1 - lr decay, beta1, 1 - beta1, beta2, 1 - beta2 and lr.
void lion(int64_t n, float* weight, const float* grad, float* mean, const float* factors) {
    const float keep = factors[0], keep1 = factors[1], take1 = factors[2];
    const float keep2 = factors[3], take2 = factors[4], rate = factors[5];
    threads::run(ceil_div(n, kSegment), n * 3, [=](int64_t task) {
        const int64_t end = least(n, (task + 1) * kSegment);
        float* __restrict w = weight, * __restrict m = mean;
        const float* __restrict d = grad;
        for (int64_t i = task * kSegment; i < end; ++i) {
            const float ahead = m[i] * keep1 + d[i] * take1;
            const float sign = ahead > 0 ? 1.0f : ahead < 0 ? -1.0f : ahead == 0 ? 0.0f : ahead;
            w[i] = w[i] * keep - sign * rate;
            m[i] = m[i] * keep2 + d[i] * take2;
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

// The 16 cut bits carry when they exceed the random ones. A block of Philox serves 8192 values, a
// call 8 of them, two values a word. NaN and infinity stay.
void stochastic_bfloat16(const QuantStream& stream, int64_t n, const float* x, uint16_t* out) {
    constexpr int kBlock = 8192, kGroup = 8 * VL;
    const Philox philox(stream);
    threads::run(ceil_div(n, kBlock), n * 8, [=, &philox](int64_t block) {
        const int64_t begin = block * kBlock, end = least(n, begin + kBlock);
        const PhiloxColumns draw(philox, vu{} + static_cast<uint32_t>(block));
        vu call;
        for (int k = 0; k < VL; ++k) call[k] = k;
        for (int64_t i = begin; i < end; i += kGroup, call += VL) {
            vu word[4];
            draw(call, word);
            uint32_t noise[kGroup];
            for (int k = 0; k < VL; ++k) {
                for (int r = 0; r < 4; ++r) {
                    noise[8 * k + 2 * r] = word[r][k] & 0xFFFFu;
                    noise[8 * k + 2 * r + 1] = word[r][k] >> 16;
                }
            }
            const int count = static_cast<int>(least(kGroup, end - i));
            for (int k = 0; k < count; ++k) {
                uint32_t bits;
                std::memcpy(&bits, x + i + k, 4);
                const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
                out[i + k] = static_cast<uint16_t>((bits + (finite ? noise[k] : 0u)) >> 16);
            }
        }
    });
}

}  // namespace

extern const OptimKernels optim_kernels = {sgd, adam, lion, all_finite, stochastic_bfloat16};

}  // namespace EXTENSOR_ISA
