// What a float32 training step repeats: gelu, softmax and losses, LayerNorm and RMSNorm, Adam.
//
// Every output depends on shapes and values only, never on threads. Sums and functions are compared
// within the bounds of extensor.backends.cpu.nn, which hold with and without `madd` fusing;
// Adam is compared by bytes, so the compiler may not fuse by itself (CMakeLists.txt).

#include "floats.hpp"
#include "kernels.hpp"
#include "lines.hpp"
#include "stretches.hpp"
#include "vector_math.hpp"

namespace EXTENSOR_ISA {
namespace {

// Phi(-|x|) = e^(-x^2 / 2) t h(t), t = 1 / (1 + 0.3 |x|), where h is the Chebyshev interpolant of
// degree 9 of erfcx(|x| / sqrt 2) / (2 t) on 0 <= |x| <= 14.5, in powers of t - 0.6: relative error
// 0.1 * 2^-24. Beyond 14.5 Phi(-|x|) is zero in float32.
INLINE vf normal_tail(vf x, vf bell) {
    vf z = magnitude(x);
    z = z > splat(14.5f) ? splat(14.5f) : z;
    const vf t = splat(1.0f) / madd(z, splat(0.3f), splat(1.0f));
    const vf v = t - splat(0.6f);
    vf h = splat(-0.0209560241f);
    h = madd(h, v, splat(0.00109492213f));
    h = madd(h, v, splat(0.0443212927f));
    h = madd(h, v, splat(-0.00756290418f));
    h = madd(h, v, splat(-0.0910612389f));
    h = madd(h, v, splat(-0.0138189077f));
    h = madd(h, v, splat(0.225356595f));
    h = madd(h, v, splat(0.413744815f));
    h = madd(h, v, splat(0.405136739f));
    h = madd(h, v, splat(0.258572679f));
    return bell * (t * h);
}

// body(i) for the vectors of every stretch of n elements.
template <class F>
void each(int64_t n, int64_t work, F&& body) {
    stretches(n, work, [&](int64_t i, int64_t end) {
        for (; i < end; i += VL) body(i);
    });
}

void gelu(int64_t n, const float* x, float* y, float* phi) {
    each(n, 4, [=](int64_t i) {
        const vf v = take(x, i, n);
        const vf tail = normal_tail(v, exp_negative(v * v * splat(-0.5f)));
        const vf below = v < splat(0.0f) ? tail : splat(1.0f) - tail;
        put(y, v * below, i, n);
        put(phi, below, i, n);
    });
}

void gelu_grad(int64_t n, const float* g, const float* x, const float* phi, float* gx) {
    each(n, 4, [=](int64_t i) {
        const vf v = take(x, i, n);
        const vf bell = exp_negative(v * v * splat(-0.5f));
        const vf slope = madd(v * bell, splat(0.398942280f), take(phi, i, n));  // 1 / sqrt(2 pi)
        put(gx, take(g, i, n) * slope, i, n);
    });
}

// body(row) for every row of length n, several rows a task, and several tasks a thread.
template <class F>
void each_row(int64_t rows, int64_t n, int64_t work, F&& body) {
    const int64_t per_task = most(1, kStretch / 4 / n);
    threads::run(ceil_div(rows, per_task), rows * n * work, [&](int64_t task) {
        const int64_t end = least(rows, (task + 1) * per_task);
        for (int64_t row = task * per_task; row < end; ++row) body(row);
    });
}

// ---- rows of scores: a row is read from memory once, and from the caches after that ----

// `join` of at(i, left) over a row, in four chains that begin with `none`: the vector at i, of which
// the first `left` lanes are the row's, and the others must change nothing.
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
INLINE vf below(const float* x, int64_t left, vf top) { return first(left, load_upto(x, left), top) - top; }

// Passes over NaN, which the sum of exponentials shows.
INLINE vf largest(const float* x, int64_t n) {
    const vf none = splat(-__builtin_inff());
    return largest_lane(fold(
        n, none, [=](int64_t i, int64_t left) { return first(left, load_upto(x + i, left), none); },
        larger));
}

// A NaN or +inf, or nothing above -inf, makes a sum of NaN and so a row of NaN, as in numpy.
INLINE float exponentials(const float* x, int64_t n, vf top) {
    return total(n, [=](int64_t i, int64_t left) {
        return first(left, exp_score(below(x + i, left, top)), vf{});
    });
}

// A row of results; whole lines of it past the caches where asked for.
template <class At>
INLINE void write_row(float* out, int64_t n, [[maybe_unused]] bool past, At&& at) {
    int64_t i = 0;
#if EXTENSOR_LANES == 16
    if (past) {
        i = least(n, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % 64 / 4));
        if (i) store_part(out, at(0, i), static_cast<int>(i));
        for (; i + VL <= n; i += VL)
            store_line(out + i, reinterpret_cast<__m512i>(at(i, VL)), true);
        finish_lines();
    }
#endif
    for (; i + VL <= n; i += VL) store(out + i, at(i, VL));
    if (i < n) store_part(out + i, at(i, n - i), static_cast<int>(n - i));
}

void softmax(int64_t rows, int64_t n, const float* x, float* y) {
    const bool past = rows * n >= kPastCaches;
    each_row(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        float* out = y + row * n;
        float* held = past ? threads::scratch_of<float>(threads::Slot::padded, n) : out;
        const vf top = largest(in, n);
        const float sums = total(n, [=](int64_t i, int64_t left) {
            const vf e = exp_score(below(in + i, left, top));
            store_upto(held + i, e, left);
            return first(left, e, vf{});
        });
        const vf inverse = splat(1.0f / sums);
        write_row(out, n, past, [=](int64_t i, int64_t left) {
            return load_upto(held + i, left) * inverse;
        });
    });
}

void softmax_grad(int64_t rows, int64_t n, const float* g, const float* y, float* gx) {
    const bool past = rows * n >= kPastCaches;
    each_row(rows, n, 2, [=](int64_t row) {
        const float *grad = g + row * n, *p = y + row * n;
        const vf mean = splat(total(n, [=](int64_t i, int64_t left) {
            return load_upto(grad + i, left) * load_upto(p + i, left);
        }));
        write_row(gx + row * n, n, past, [=](int64_t i, int64_t left) {
            return load_upto(p + i, left) * (load_upto(grad + i, left) - mean);
        });
    });
}

void log_softmax(int64_t rows, int64_t n, const float* x, float* y) {
    const bool past = rows * n >= kPastCaches;
    each_row(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        const vf top = largest(in, n), log_sum = splat(__builtin_logf(exponentials(in, n, top)));
        write_row(y + row * n, n, past, [=](int64_t i, int64_t left) {
            return load_upto(in + i, left) - top - log_sum;
        });
    });
}

void log_softmax_grad(int64_t rows, int64_t n, const float* g, const float* y, float* gx) {
    const bool past = rows * n >= kPastCaches;
    each_row(rows, n, 4, [=](int64_t row) {
        const float *grad = g + row * n, *out = y + row * n;
        const vf sums = splat(total(
            n, [=](int64_t i, int64_t left) { return load_upto(grad + i, left); }));
        write_row(gx + row * n, n, past, [=](int64_t i, int64_t left) {
            return load_upto(grad + i, left) - exp_score(load_upto(out + i, left)) * sums;
        });
    });
}

// The target is 1 - smoothing at the label plus smoothing / n everywhere. `kept`: each row's largest
// score, and the sum of the exponentials below it.
void losses(int64_t rows, int64_t n, const float* x, const int64_t* labels, float smoothing,
            float* out, float* kept) {
    const float count = static_cast<float>(n);
    each_row(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        const vf top = largest(in, n);
        const float sums = exponentials(in, n, top), log_sum = __builtin_logf(sums);
        float loss = log_sum - (in[labels[row]] - top[0]);
        if (smoothing != 0.0f) {
            const float depths = total(n, [=](int64_t i, int64_t left) {
                return first(left, below(in + i, left, top), vf{});
            });
            loss = loss * (1.0f - smoothing) + (log_sum - depths / count) * smoothing;
        }
        out[row] = loss;
        kept[2 * row] = top[0];
        kept[2 * row + 1] = sums;
    });
}

// (softmax - target) times the weight of each row, `step` apart (0: one for all).
void losses_grad(int64_t rows, int64_t n, const float* weight, int64_t step, const float* x,
                 const int64_t* labels, const float* kept, float smoothing, float* gx) {
    const vf even = splat(smoothing / static_cast<float>(n));
    each_row(rows, n, 4, [=](int64_t row) {
        const float* in = x + row * n;
        const int64_t label = labels[row];
        const vf top = splat(kept[2 * row]), inverse = splat(1.0f / kept[2 * row + 1]);
        const vf factor = splat(weight[row * step]);
        write_row(gx + row * n, n, false, [=](int64_t i, int64_t left) {
            vf d = exp_score(below(in + i, left, top)) * inverse;
            if (label >= i && label < i + VL) d[label - i] -= 1.0f - smoothing;
            return (d - even) * factor;
        });
    });
}

void norm(int64_t rows, int64_t n, const float* x, const float* weight, const float* bias,
          float eps, float* y, float* mean, float* rstd) {
    each_row(rows, n, 2, [=](int64_t row) {
        const float* in = x + row * n;
        float* out = y + row * n;
        float centre = 0;
        if (mean) {
            vf total = {};
            for (int64_t i = 0; i < n; i += VL) total += take(in, i, n);
            centre = mean[row] = sum(total) / static_cast<float>(n);
        }
        const vf c = splat(centre);
        vf total = {};
        int64_t i = 0;
        for (; i + VL <= n; i += VL) {
            const vf d = load(in + i) - c;
            total = madd(d, d, total);
        }
        float squares = sum(total);
        for (; i < n; ++i) squares += (in[i] - centre) * (in[i] - centre);
        const float inverse = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
        rstd[row] = inverse;
        const vf s = splat(inverse);
        for (i = 0; i < n; i += VL) {
            const vf scaled = (take(in, i, n) - c) * s * take(weight, i, n);
            put(out, bias ? scaled + take(bias, i, n) : scaled, i, n);
        }
    });
}

// With h = (x - mean) rstd and e = g weight: gx = rstd (e - mean(e) - h mean(e h)), in an RMSNorm
// without mean(e); gw = sum over rows of g h; gb = sum over rows of g.
void norm_grad(int64_t rows, int64_t n, const float* g, const float* x, const float* weight,
               const float* mean, const float* rstd, float* gx, float* gw, float* gb,
               float* partial) {
    const int64_t parts = least(rows, kNormParts);
    std::memset(partial, 0, static_cast<size_t>(parts * 2 * n) * 4);
    threads::run(parts, rows * n * 4, [=](int64_t part) {
        float *pw = partial + part * 2 * n, *pb = pw + n;
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            const float *in = x + row * n, *grad = g + row * n;
            float* out = gx + row * n;
            const vf c = splat(mean ? mean[row] : 0.0f), s = splat(rstd[row]);
            vf plain = {}, along = {};
            for (int64_t i = 0; i < n; i += VL) {
                const vf d = take(grad, i, n), e = d * take(weight, i, n);
                const vf h = (take(in, i, n) - c) * s;
                plain += e;
                along = madd(e, h, along);
                put(pw, madd(d, h, take(pw, i, n)), i, n);
                put(pb, take(pb, i, n) + d, i, n);
            }
            const float count = static_cast<float>(n);
            const vf a = splat(mean ? sum(plain) / count : 0.0f), b = splat(sum(along) / count);
            for (int64_t i = 0; i < n; i += VL) {
                const vf e = take(grad, i, n) * take(weight, i, n);
                const vf h = (take(in, i, n) - c) * s;
                put(out, s * (e - a - h * b), i, n);
            }
        }
    });
    for (int64_t i = 0; i < n; i += VL) {
        vf w = {}, b = {};
        for (int64_t part = 0; part < parts; ++part) {
            w += take(partial + part * 2 * n, i, n);
            b += take(partial + part * 2 * n + n, i, n);
        }
        put(gw, w, i, n);
        put(gb, b, i, n);
    }
}

// factors: 1 - lr decay, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps and
// lr / (1 - beta1^t). One rounding an operation, in the generic method's order: the same bytes.
void adam(int64_t n, float* weight, const float* grad, float* mean, float* square,
          const float* factors) {
    const float keep = factors[0], take1 = factors[1], keep2 = factors[2], take2 = factors[3];
    const float widen = factors[4], eps = factors[5], rate = factors[6];
    threads::run(ceil_div(n, kStretch), n * 4, [=](int64_t task) {
        const int64_t end = least(n, (task + 1) * kStretch);
        float *__restrict w = weight, *__restrict m = mean, *__restrict v = square;
        const float* __restrict d = grad;
        for (int64_t i = task * kStretch; i < end; ++i) {
            const float first = m[i] + (d[i] - m[i]) * take1;
            const float second = v[i] * keep2 + d[i] * d[i] * take2;
            m[i] = first;
            v[i] = second;
            w[i] = w[i] * keep - first / (__builtin_sqrtf(second) * widen + eps) * rate;
        }
    });
}

}  // namespace

extern const TrainKernels train_kernels = {gelu,        gelu_grad,        softmax, softmax_grad,
                                           log_softmax, log_softmax_grad, losses,  losses_grad,
                                           norm,        norm_grad,        adam};

}  // namespace EXTENSOR_ISA
