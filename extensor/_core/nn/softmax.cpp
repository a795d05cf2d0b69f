// softmax, log_softmax, cross-entropy and their gradients, on rows of scores.
//
// A row is read from memory once, and from the caches after that. Every output depends on shapes
// and values only, never on threads. Results are compared within the bounds of extensor.backends,
// which hold with and without fused multiply-add.

#include "common/cache_lines.hpp"
#include "common/elementwise.hpp"
#include "common/float_types.hpp"
#include "common/vector_math.hpp"
#include "nn/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

// Reduces a row by `join`, in four chains that begin with `none`. at(i, left) is the vector at i,
// of which the first `left` lanes are the row's; the others must change nothing.
template <class At, class Join>
INLINE vf fold(int64_t n, vf none, At&& at, Join&& join) {
    vf part[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) part[k] = join(part[k], at(i + k * VL, VL));
    }
    for (; i < n; i += VL) part[0] = join(part[0], at(i, n - i));
    return join(join(part[0], part[1]), join(part[2], part[3]));
}

template <class At>
INLINE float total(int64_t n, At&& at) {
    return sum(fold(n, vf{}, at, [](vf a, vf b) { return a + b; }));
}

// The first `left` lanes, the others `fill`.
INLINE vf first(int64_t left, vf v, vf fill) {
    return left >= VL ? v : lane_numbers() < splat(static_cast<uint32_t>(left)) ? v : fill;
}

// How far a row's scores are below its largest; zero beyond the row's end.
INLINE vf below(const float* x, int64_t left, vf top) {
    return first(left, load_upto(x, left), top) - top;
}

// The largest score. NaN does not count here; the sum of exponentials shows it.
INLINE vf largest(const float* x, int64_t n) {
    const vf none = splat(-__builtin_inff());
    return largest_lane(fold(
        n, none, [=](int64_t i, int64_t left) { return first(left, load_upto(x + i, left), none); },
        larger));
}

// The sum of exponentials. A NaN or +inf, or nothing above -inf, makes it NaN and so the row NaN,
// as in numpy.
INLINE float exponentials(const float* x, int64_t n, vf top) {
    return total(n, [=](int64_t i, int64_t left) {
        return first(left, exp_score(below(x + i, left, top)), vf{});
    });
}

// Writes a row of results; `streamed`: whole cache lines bypass the caches.
template <class At>
INLINE void write_row(float* out, int64_t n, [[maybe_unused]] bool streamed, At&& at) {
    int64_t i = 0;
#if EXTENSOR_LANES == 16
    if (streamed) {
        i = least(n, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % 64 / 4));
        if (i) store_part(out, at(0, i), static_cast<int>(i));
        for (; i + VL <= n; i += VL)
            store_cache_line(out + i, reinterpret_cast<__m512i>(at(i, VL)), true);
        finish_streaming();
    }
#endif
    for (; i + VL <= n; i += VL) store(out + i, at(i, VL));
    if (i < n) store_part(out + i, at(i, n - i), static_cast<int>(n - i));
}

void softmax(int64_t rows, int64_t n, const float* x, float* y) {
    const bool streamed = rows * n >= kStreamedValues;
    for_rows(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        float* out = y + row * n;
        float* held = streamed ? threads::scratch_of<float>(threads::Slot::values, n) : out;
        const vf top = largest(in, n);
        const float sums = total(n, [=](int64_t i, int64_t left) {
            const vf e = exp_score(below(in + i, left, top));
            store_upto(held + i, e, left);
            return first(left, e, vf{});
        });
        const vf inverse = splat(1.0f / sums);
        write_row(out, n, streamed,
                  [=](int64_t i, int64_t left) { return load_upto(held + i, left) * inverse; });
    });
}

void softmax_grad(int64_t rows, int64_t n, const float* g, const float* y, float* gx) {
    const bool streamed = rows * n >= kStreamedValues;
    for_rows(rows, n, 2, [=](int64_t row) {
        const float *grad = g + row * n, *p = y + row * n;
        const vf mean = splat(total(n, [=](int64_t i, int64_t left) {
            return load_upto(grad + i, left) * load_upto(p + i, left);
        }));
        write_row(gx + row * n, n, streamed, [=](int64_t i, int64_t left) {
            return load_upto(p + i, left) * (load_upto(grad + i, left) - mean);
        });
    });
}

void log_softmax(int64_t rows, int64_t n, const float* x, float* y) {
    const bool streamed = rows * n >= kStreamedValues;
    for_rows(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        const vf top = largest(in, n), log_sum = splat(__builtin_logf(exponentials(in, n, top)));
        write_row(y + row * n, n, streamed,
                  [=](int64_t i, int64_t left) { return load_upto(in + i, left) - top - log_sum; });
    });
}

void log_softmax_grad(int64_t rows, int64_t n, const float* g, const float* y, float* gx) {
    const bool streamed = rows * n >= kStreamedValues;
    for_rows(rows, n, 4, [=](int64_t row) {
        const float *grad = g + row * n, *out = y + row * n;
        const vf sums =
            splat(total(n, [=](int64_t i, int64_t left) { return load_upto(grad + i, left); }));
        write_row(gx + row * n, n, streamed, [=](int64_t i, int64_t left) {
            return load_upto(grad + i, left) - exp_score(load_upto(out + i, left)) * sums;
        });
    });
}

// The target is 1 - smoothing at the label plus smoothing / n everywhere. `saved`: each row's
// largest score, and the sum of the exponentials below it.
void cross_entropy(const CrossEntropy& s, float* losses, float* saved) {
    const int64_t n = s.n;
    const float count = static_cast<float>(n), smoothing = s.smoothing;
    for_rows(s.rows, n, 4, [=](int64_t row) {
        const float* in = s.x + row * n;
        const vf top = largest(in, n);
        const float sums = exponentials(in, n, top), log_sum = __builtin_logf(sums);
        float loss = log_sum - (in[s.labels[row]] - top[0]);
        if (smoothing != 0.0f) {
            const float depths = total(n, [=](int64_t i, int64_t left) {
                return first(left, below(in + i, left, top), vf{});
            });
            loss = loss * (1.0f - smoothing) + (log_sum - depths / count) * smoothing;
        }
        losses[row] = loss;
        saved[2 * row] = top[0];
        saved[2 * row + 1] = sums;
    });
}

// (softmax - target) times the weight of each row, `step` apart (0: one for all).
void cross_entropy_grad(const CrossEntropy& s, const float* weight, int64_t step,
                        const float* saved, float* gx) {
    const int64_t n = s.n;
    const float smoothing = s.smoothing;
    const vf even = splat(smoothing / static_cast<float>(n));
    for_rows(s.rows, n, 4, [=](int64_t row) {
        const float* in = s.x + row * n;
        const int64_t label = s.labels[row];
        const vf top = splat(saved[2 * row]), inverse = splat(1.0f / saved[2 * row + 1]);
        const vf factor = splat(weight[row * step]);
        write_row(gx + row * n, n, false, [=](int64_t i, int64_t left) {
            vf d = exp_score(below(in + i, left, top)) * inverse;
            if (label >= i && label < i + VL) d[label - i] -= 1.0f - smoothing;
            return (d - even) * factor;
        });
    });
}

}  // namespace

extern const SoftmaxKernels softmax_kernels = {softmax,          softmax_grad,  log_softmax,
                                               log_softmax_grad, cross_entropy, cross_entropy_grad};

}  // namespace EXTENSOR_ISA
