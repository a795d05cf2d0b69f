// What a convolution network's float32 training step repeats beside its convolutions.
//
// Compiled without contraction: relu, its gradient, bfloat16 and sgd give the bytes that numpy
// gives. Sums over images are added in double, in an order that depends on shapes only.

#include "kernels.hpp"
#include "stretches.hpp"

namespace EXTENSOR_ISA {
namespace {

void relu(int64_t n, const float* x, float* y) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) {
            const vf v = take(x, i, end);
            put(y, v <= splat(0.0f) ? vf{} : v, i, end);  // NaN stays
        }
    });
}

void relu_grad(int64_t n, const float* g, const float* y, float* gx) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL)
            put(gx, take(y, i, end) > splat(0.0f) ? take(g, i, end) : vf{}, i, end);
    });
}

void add(int64_t n, const float* a, const float* b, float* y) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) put(y, take(a, i, end) + take(b, i, end), i, end);
    });
}

// To nearest even as float32 bits, the lower half zero; a NaN becomes the quiet one of its sign.
INLINE vu bfloat16_bits(vu v) {
    const vu rounded = (v + 0x7FFFu + (v >> 16 & 1u)) & 0xFFFF0000u;
    const vu nan = (v & 0x80000000u) | 0x7FC00000u;
    return (v & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

void bfloat16_values(int64_t n, const float* x, float* y) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL)
            put(y, reinterpret_cast<vf>(bfloat16_bits(reinterpret_cast<vu>(take(x, i, end)))), i, end);
    });
}

typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint16_t vh_any __attribute__((vector_size(2 * VL), aligned(2), may_alias));

void to_bfloat16(int64_t n, const float* x, uint16_t* y) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) {
            const vu bits = bfloat16_bits(reinterpret_cast<vu>(take(x, i, end))) >> 16;
            const vh halves = __builtin_convertvector(bits, vh);
            if (i + VL <= end)
                *reinterpret_cast<vh_any*>(y + i) = halves;
            else
                for (int k = 0; i + k < end; ++k) y[i + k] = halves[k];
        }
    });
}

void from_bfloat16(int64_t n, const uint16_t* x, float* y) {
    stretches(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL) {
            vh halves = {};
            if (i + VL <= end)
                halves = *reinterpret_cast<const vh_any*>(x + i);
            else
                for (int k = 0; i + k < end; ++k) halves[k] = x[i + k];
            put(y, reinterpret_cast<vf>(__builtin_convertvector(halves, vu) << 16), i, end);
        }
    });
}

bool all_finite(int64_t n, const float* x) {
    const int64_t tasks = ceil_div(n, kStretch);
    bool* bad = threads::scratch_of<bool>(threads::Slot::partial, tasks);
    stretches(n, 1, [=](int64_t i, int64_t end) {
        vi any = {};
        const int64_t task = i / kStretch;
        for (; i < end; i += VL)
            any |= (reinterpret_cast<vi>(take(x, i, end)) & 0x7F800000) == 0x7F800000;
        int32_t found = 0;
        for (int k = 0; k < VL; ++k) found |= any[k];
        bad[task] = found != 0;
    });
    for (int64_t task = 0; task < tasks; ++task)
        if (bad[task]) return false;
    return true;
}

// ---- channels of (n, c, pixels) ----

// body(c) for every channel, several a task.
template <class F>
void channels(int64_t n, int64_t c, int64_t pixels, int64_t work, F&& body) {
    const int64_t per_task = most(1, kStretch / (n * pixels));
    threads::run(ceil_div(c, per_task), n * c * pixels * work, [&](int64_t task) {
        const int64_t end = least(c, (task + 1) * per_task);
        for (int64_t i = task * per_task; i < end; ++i) body(i);
    });
}

// A sum of many vectors: a few of them in float lanes, those sums in double.
struct Total {
    vf lanes = {};
    double sums = 0;
    int count = 0;

    INLINE void add(vf v) { lanes += v; }
    INLINE void end_of_run() {
        if (++count == 8) flush();
    }
    INLINE void flush() {
        sums += static_cast<double>(sum(lanes));
        lanes = vf{}, count = 0;
    }
};

// Lanes at or beyond n - i become zero.
INLINE vf within(vf v, int64_t i, int64_t n) {
    vi lane;
    for (int k = 0; k < VL; ++k) lane[k] = k;
    return reinterpret_cast<vf>(reinterpret_cast<vi>(v) & (lane < static_cast<int32_t>(least(VL, n - i))));
}

// The sum over all images of f(pointer to a run's vector, what is left of the run).
template <class F>
INLINE double channel_total(int64_t n, int64_t step, int64_t pixels, F&& f) {
    Total total;
    for (int64_t k = 0; k < n; ++k) {
        for (int64_t i = 0; i < pixels; i += VL) total.add(f(k * step + i, pixels - i));
        total.end_of_run();
    }
    total.flush();
    return total.sums;
}

void channel_sum(int64_t n, int64_t c, int64_t pixels, const float* x, float* out) {
    channels(n, c, pixels, 1, [=](int64_t j) {
        const float* from = x + j * pixels;
        out[j] = static_cast<float>(channel_total(
            n, c * pixels, pixels, [=](int64_t at, int64_t left) { return take(from + at, 0, left); }));
    });
}

void batch_norm(int64_t n, int64_t c, int64_t pixels, const float* x, const float* weight,
                const float* bias, float eps, float* y, float* mean, float* variance) {
    const double count = static_cast<double>(n * pixels);
    const int64_t step = c * pixels;
    channels(n, c, pixels, 4, [=](int64_t j) {
        const float* from = x + j * pixels;
        float* to = y + j * pixels;
        mean[j] = static_cast<float>(
            channel_total(n, step, pixels,
                          [=](int64_t at, int64_t left) { return take(from + at, 0, left); }) / count);
        const vf centre = splat(mean[j]);
        variance[j] = static_cast<float>(
            channel_total(n, step, pixels, [=](int64_t at, int64_t left) {
                const vf d = within(take(from + at, 0, left) - centre, 0, left);
                return d * d;
            }) / count);
        const vf scale = splat(weight[j] / __builtin_sqrtf(variance[j] + eps)), shift = splat(bias[j]);
        for (int64_t k = 0; k < n; ++k)
            for (int64_t i = 0; i < pixels; i += VL)
                put(to + k * step, (take(from + k * step, i, pixels) - centre) * scale + shift, i, pixels);
    });
}

// With d = x - mean and r = 1 / sqrt(variance + eps): gb = sum g, gw = r sum(g d), and
// gx = weight r (g - gb / count - d r gw / count).
void batch_norm_grad(int64_t n, int64_t c, int64_t pixels, const float* g, const float* x,
                     const float* weight, const float* mean, const float* variance, float eps,
                     float* gx, float* gw, float* gb) {
    const double count = static_cast<double>(n * pixels);
    const int64_t step = c * pixels;
    channels(n, c, pixels, 4, [=](int64_t j) {
        const float *grad = g + j * pixels, *from = x + j * pixels;
        float* to = gx + j * pixels;
        const float r = 1.0f / __builtin_sqrtf(variance[j] + eps);
        const vf centre = splat(mean[j]);
        Total plain, along;
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t i = 0; i < pixels; i += VL) {
                const vf d = take(grad + k * step, i, pixels);
                plain.add(d);
                along.add(within(d * (take(from + k * step, i, pixels) - centre), i, pixels));
            }
            plain.end_of_run(), along.end_of_run();
        }
        plain.flush(), along.flush();
        gb[j] = static_cast<float>(plain.sums);
        gw[j] = static_cast<float>(along.sums * static_cast<double>(r));
        const vf scale = splat(weight[j] * r), even = splat(static_cast<float>(plain.sums / count));
        const vf slope = splat(static_cast<float>(along.sums / count) * r * r);
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t i = 0; i < pixels; i += VL) {
                const vf d = take(from + k * step, i, pixels) - centre;
                put(to + k * step, (take(grad + k * step, i, pixels) - even - d * slope) * scale, i,
                    pixels);
            }
        }
    });
}

// One rounding an operation, in the generic method's order: the same bytes. `buffer` may be null.
void sgd(int64_t n, float* weight, const float* grad, float* buffer, float lr, float momentum,
         float decay, bool nesterov) {
    threads::run(ceil_div(n, kStretch), n * 2, [=](int64_t task) {
        const int64_t end = least(n, (task + 1) * kStretch);
        const vf rate = splat(lr), keep = splat(momentum), pull = splat(decay);
        for (int64_t i = task * kStretch; i < end; i += VL) {
            const vf w = take(weight, i, end);
            vf d = take(grad, i, end);
            if (decay != 0.0f) d = w * pull + d;
            if (buffer) {
                const vf b = take(buffer, i, end) * keep + d;
                put(buffer, b, i, end);
                d = nesterov ? b * keep + d : b;
            }
            put(weight, w - d * rate, i, end);
        }
    });
}

}  // namespace

extern const LayerKernels layer_kernels;
const LayerKernels layer_kernels = {relu, relu_grad, add, bfloat16_values, to_bfloat16,
                                    from_bfloat16, all_finite, channel_sum, batch_norm,
                                    batch_norm_grad, sgd};

}  // namespace EXTENSOR_ISA
