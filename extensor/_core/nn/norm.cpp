// LayerNorm, RMSNorm and BatchNorm with their gradients, and the sum of each channel of images.
//
// Every output depends on shapes and values only, never on threads. Sums over images are added in
// double.

#include "common/elementwise.hpp"
#include "common/vector_math.hpp"
#include "nn/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

void row_norm(const RowNorm& s, const float* bias, float eps, float* y) {
    const int64_t n = s.n;
    for_rows(s.rows, n, 2, [=](int64_t row) {
        const float* in = s.x + row * n;
        float* out = y + row * n;
        float centre = 0;
        if (s.mean) {
            vf total = {};
            for (int64_t i = 0; i < n; i += VL) total += load_at(in, i, n);
            centre = s.mean[row] = sum(total) / static_cast<float>(n);
        }
        const vf c = splat(centre);
        vf total = {};
        int64_t i = 0;
        for (; i + VL <= n; i += VL) {
            const vf d = load(in + i) - c;
            total = multiply_add(d, d, total);
        }
        float squares = sum(total);
        for (; i < n; ++i) squares += (in[i] - centre) * (in[i] - centre);
        const float inverse = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
        s.rstd[row] = inverse;
        const vf scale = splat(inverse);
        for (i = 0; i < n; i += VL) {
            const vf scaled = (load_at(in, i, n) - c) * scale * load_at(s.weight, i, n);
            store_at(out, bias ? scaled + load_at(bias, i, n) : scaled, i, n);
        }
    });
}

// With h = (x - mean) rstd and e = g weight: gx = rstd (e - mean(e) - h mean(e h)), in an RMSNorm
// without mean(e); gw = sum over rows of g h; gb = sum over rows of g.
void row_norm_grad(const RowNorm& s, const float* g, const NormGrads& grads, float* partial) {
    const int64_t rows = s.rows, n = s.n;
    const int64_t parts = least(rows, kNormParts);
    std::memset(partial, 0, static_cast<size_t>(parts * 2 * n) * 4);
    threads::run(parts, rows * n * 4, [=](int64_t part) {
        float *pw = partial + part * 2 * n, *pb = pw + n;
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            const float *in = s.x + row * n, *grad = g + row * n, *weight = s.weight;
            float* out = grads.x + row * n;
            const vf c = splat(s.mean ? s.mean[row] : 0.0f), scale = splat(s.rstd[row]);
            vf plain = {}, weighted = {};
            for (int64_t i = 0; i < n; i += VL) {
                const vf d = load_at(grad, i, n), e = d * load_at(weight, i, n);
                const vf h = (load_at(in, i, n) - c) * scale;
                plain += e;
                weighted = multiply_add(e, h, weighted);
                store_at(pw, multiply_add(d, h, load_at(pw, i, n)), i, n);
                store_at(pb, load_at(pb, i, n) + d, i, n);
            }
            const float count = static_cast<float>(n);
            const vf a = splat(s.mean ? sum(plain) / count : 0.0f),
                     b = splat(sum(weighted) / count);
            for (int64_t i = 0; i < n; i += VL) {
                const vf e = load_at(grad, i, n) * load_at(weight, i, n);
                const vf h = (load_at(in, i, n) - c) * scale;
                store_at(out, scale * (e - a - h * b), i, n);
            }
        }
    });
    for (int64_t i = 0; i < n; i += VL) {
        vf w = {}, b = {};
        for (int64_t part = 0; part < parts; ++part) {
            w += load_at(partial + part * 2 * n, i, n);
            b += load_at(partial + part * 2 * n + n, i, n);
        }
        store_at(grads.weight, w, i, n);
        store_at(grads.bias, b, i, n);
    }
}

// ---- channels of (n, c, pixels) ----

// body(c) for every channel, several a task.
template <class F>
void channels(int64_t n, int64_t c, int64_t pixels, int64_t work, F&& body) {
    const int64_t per_task = most(1, kSegment / (n * pixels));
    threads::run(ceil_div(c, per_task), n * c * pixels * work, [&](int64_t task) {
        const int64_t end = least(c, (task + 1) * per_task);
        for (int64_t i = task * per_task; i < end; ++i) body(i);
    });
}

// A sum of many vectors: eight runs of them in float lanes, these sums in double.
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
INLINE vf first_lanes(vf v, int64_t i, int64_t n) {
    vi lane;
    for (int k = 0; k < VL; ++k) lane[k] = k;
    return reinterpret_cast<vf>(reinterpret_cast<vi>(v) &
                                (lane < static_cast<int32_t>(least(VL, n - i))));
}

// The sum over all images of f(offset of a vector, values left in its image).
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
        out[j] =
            static_cast<float>(channel_total(n, c * pixels, pixels, [=](int64_t at, int64_t left) {
                return load_at(from + at, 0, left);
            }));
    });
}

void batch_norm(const BatchNorm& s, const float* bias, float* y) {
    const int64_t n = s.n, pixels = s.pixels, step = s.c * pixels;
    const double count = static_cast<double>(n * pixels);
    channels(n, s.c, pixels, 4, [=](int64_t j) {
        const float* from = s.x + j * pixels;
        float* to = y + j * pixels;
        s.mean[j] = static_cast<float>(
            channel_total(n, step, pixels,
                          [=](int64_t at, int64_t left) { return load_at(from + at, 0, left); }) /
            count);
        const vf centre = splat(s.mean[j]);
        s.variance[j] =
            static_cast<float>(channel_total(n, step, pixels,
                                             [=](int64_t at, int64_t left) {
                                                 const vf d = first_lanes(
                                                     load_at(from + at, 0, left) - centre, 0, left);
                                                 return d * d;
                                             }) /
                               count);
        const vf scale = splat(s.weight[j] / __builtin_sqrtf(s.variance[j] + s.eps));
        const vf shift = splat(bias[j]);
        for (int64_t k = 0; k < n; ++k)
            for (int64_t i = 0; i < pixels; i += VL)
                store_at(to + k * step,
                         (load_at(from + k * step, i, pixels) - centre) * scale + shift, i, pixels);
    });
}

// With d = x - mean and r = 1 / sqrt(variance + eps): gb = sum g, gw = r sum(g d), and
// gx = weight r (g - gb / count - d r gw / count).
void batch_norm_grad(const BatchNorm& s, const float* g, const NormGrads& grads) {
    const int64_t n = s.n, pixels = s.pixels, step = s.c * pixels;
    const double count = static_cast<double>(n * pixels);
    channels(n, s.c, pixels, 4, [=](int64_t j) {
        const float *grad = g + j * pixels, *from = s.x + j * pixels;
        float* to = grads.x + j * pixels;
        const float r = 1.0f / __builtin_sqrtf(s.variance[j] + s.eps);
        const vf centre = splat(s.mean[j]);
        Total plain, weighted;
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t i = 0; i < pixels; i += VL) {
                const vf d = load_at(grad + k * step, i, pixels);
                plain.add(d);
                weighted.add(
                    first_lanes(d * (load_at(from + k * step, i, pixels) - centre), i, pixels));
            }
            plain.end_of_run(), weighted.end_of_run();
        }
        plain.flush(), weighted.flush();
        grads.bias[j] = static_cast<float>(plain.sums);
        grads.weight[j] = static_cast<float>(weighted.sums * static_cast<double>(r));
        const vf scale = splat(s.weight[j] * r),
                 even = splat(static_cast<float>(plain.sums / count));
        const vf slope = splat(static_cast<float>(weighted.sums / count) * r * r);
        for (int64_t k = 0; k < n; ++k) {
            for (int64_t i = 0; i < pixels; i += VL) {
                const vf d = load_at(from + k * step, i, pixels) - centre;
                store_at(to + k * step,
                         (load_at(grad + k * step, i, pixels) - even - d * slope) * scale, i,
                         pixels);
            }
        }
    });
}

}  // namespace

extern const NormKernels norm_kernels = {row_norm, row_norm_grad, batch_norm, batch_norm_grad,
                                         channel_sum};

}  // namespace EXTENSOR_ISA
