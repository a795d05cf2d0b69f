// Convolution, pooling, im2col and col2im on float32 NCHW arrays.
//
// A convolution is an implicit GEMM. For one image, `Planes` holds a copy of the padded image per
// kernel column, cut to the output's width; then the values that one kernel element meets are one
// contiguous run at a fixed offset, for any padding, dilation and stride, and lanes run over the
// output pixels without gaps. The order of additions depends on shapes only, never on threads.
//
// This file may fuse multiply and add: its sums are compared within a bound, not by bytes.

#include "kernels.hpp"
#include "simd.hpp"
#include "threads.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

// Register tiles: outputs x vectors of pixels (forward), outputs x kernel elements (weights).
constexpr int TO = 6, TV = VL == 16 ? 4 : 2;
constexpr int WO = VL == 16 ? 6 : 3, WT = VL == 16 ? 4 : 3;

// One correlation per image and group: (c, h, w) -> (o, ho, wo) with o * c * kh * kw weights.
struct Planes {
    int64_t c, h, w, o, kh, kw, sh, sw, ph, pw, dh, dw, ho, wo;
    int64_t hp, wp, rows, pixels, taps;

    Planes(int64_t c, int64_t h, int64_t w, int64_t o, int64_t ho, int64_t wo, int64_t ph,
           int64_t pw, const Conv& s)
        : c(c), h(h), w(w), o(o), kh(s.kh), kw(s.kw), sh(s.sh), sw(s.sw), ph(ph), pw(pw), dh(s.dh),
          dw(s.dw), ho(ho), wo(wo) {
        hp = most(h + 2 * ph, (ho - 1) * sh + (kh - 1) * dh + 1);
        wp = most(w + 2 * pw, (wo - 1) * sw + (kw - 1) * dw + 1);
        rows = sh == 1 ? ho + (kh - 1) * dh : kh * ho;  // a stride breaks rows up by kernel row
        pixels = ho * wo;
        taps = c * kh * kw;
    }

    int64_t padded_floats() const { return c * hp * wp + 4 * VL + wo; }
    int64_t plane_floats() const { return c * kw * rows * wo + TV * VL + VL; }

    // Where the run of kernel element t starts, for every t in (c, kh, kw) order.
    void offsets(int64_t* out) const {
        for (int64_t i = 0; i < c; ++i)
            for (int64_t y = 0; y < kh; ++y)
                for (int64_t x = 0; x < kw; ++x)
                    *out++ = ((i * kw + x) * rows + y * (sh == 1 ? dh : ho)) * wo;
    }

    void pad(const float* src, float* padded) const {
        if (ph == 0 && pw == 0 && hp == h && wp == w) {
            std::memcpy(padded, src, static_cast<size_t>(c * h * w) * 4);
            return;
        }
        std::memset(padded, 0, static_cast<size_t>(c * hp * wp) * 4);
        for (int64_t i = 0; i < c; ++i)
            for (int64_t y = 0; y < h; ++y)
                std::memcpy(padded + (i * hp + y + ph) * wp + pw, src + (i * h + y) * w,
                            static_cast<size_t>(w) * 4);
    }

    void fill(const float* src, float* padded, float* planes) const {
        pad(src, padded);
        for (int64_t i = 0; i < c; ++i) {
            for (int64_t x = 0; x < kw; ++x, planes += rows * wo) {
                const float* corner = padded + i * hp * wp + x * dw;
                if (sh != 1 || sw != 1)
                    copy_strided(corner, planes);
                else if (wo <= VL)
                    copy_rows<1>(corner, planes);
                else if (wo <= 2 * VL)
                    copy_rows<2>(corner, planes);
                else
                    copy_rows<0>(corner, planes);
            }
        }
    }

    // A row's last vector writes past it: into the next row, which comes later, or the slack.
    template <int V>
    void copy_rows(const float* from, float* to) const {
        const int64_t vectors = V ? V : ceil_div(wo, VL);
        for (int64_t r = 0; r < rows; ++r, from += wp, to += wo)
            for (int64_t v = 0; v < vectors; ++v) store(to + v * VL, load(from + v * VL));
    }

    void copy_strided(const float* corner, float* to) const {
        for (int64_t r = 0; r < rows; ++r, to += wo) {
            const int64_t y = sh == 1 ? r : r / ho * dh + r % ho * sh;
            for (int64_t k = 0; k < wo; ++k) to[k] = corner[y * wp + k * sw];
        }
    }
};

// out[i][v] = sum over t of w[t][i] * planes[offset[t] + v]
template <int O, int V>
void conv_tile(const float* planes, const int64_t* offset, int64_t taps, const float* w, float* out,
               int64_t out_stride, int tail) {
    vf acc[O][V] = {};
    for (int64_t t = 0; t < taps; ++t, w += O) {
        const float* p = planes + offset[t];
        vf x[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) x[v] = load(p + v * VL);
#pragma GCC unroll 8
        for (int i = 0; i < O; ++i) {
            const vf wi = splat(w[i]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[i][v] += wi * x[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i, out += out_stride) {
#pragma GCC unroll 8
        for (int v = 0; v < V - 1; ++v) store(out + v * VL, acc[i][v]);
        if (tail == VL)
            store(out + (V - 1) * VL, acc[i][V - 1]);
        else
            store_part(out + (V - 1) * VL, acc[i][V - 1], tail);
    }
}

using ConvTile = void (*)(const float*, const int64_t*, int64_t, const float*, float*, int64_t, int);

template <int O>
ConvTile conv_tile_for(int v) {
    if constexpr (TV > 2) {
        if (v == 4) return conv_tile<O, 4>;
        if (v == 3) return conv_tile<O, 3>;
    }
    return v == 2 ? conv_tile<O, 2> : conv_tile<O, 1>;
}

ConvTile conv_tile_for(int o, int v) {
    switch (o) {
        case 1: return conv_tile_for<1>(v);
        case 2: return conv_tile_for<2>(v);
        case 3: return conv_tile_for<3>(v);
        case 4: return conv_tile_for<4>(v);
        case 5: return conv_tile_for<5>(v);
        default: return conv_tile_for<6>(v);
    }
}

// Cuts `total` into the fewest parts of at most `limit`, as even as can be.
struct Split {
    int64_t total, parts;
    Split(int64_t total, int64_t limit) : total(total), parts(most(ceil_div(total, limit), 1)) {}
    int64_t start(int64_t part) const { return total * part / parts; }
    int64_t size(int64_t part) const { return start(part + 1) - start(part); }
};

// `weight(group, out, tap)` reads one weight; x is (n, groups, c, h, w), y (n, groups, o, ho, wo).
template <class Weight>
void correlate(const Planes& p, int64_t n, int64_t groups, const float* x, float* y,
               Weight weight) {
    const Split outs(p.o, TO), vectors(ceil_div(p.pixels, VL), TV);
    int64_t* offset = scratch_of<int64_t>(Slot::offsets, p.taps);
    float* packed = scratch_of<float>(Slot::weights, groups * p.o * p.taps);
    p.offsets(offset);
    float* next = packed;
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t part = 0; part < outs.parts; ++part)
            for (int64_t t = 0; t < p.taps; ++t)
                for (int64_t i = 0; i < outs.size(part); ++i)
                    *next++ = weight(g, outs.start(part) + i, t);

    const int64_t work = n * groups * p.o * p.taps * p.pixels / VL;
    threads::run(n * groups, work, [&](int64_t task) {
        float* planes = scratch_of<float>(Slot::planes, p.plane_floats());
        float* padded = scratch_of<float>(Slot::padded, p.padded_floats());
        p.fill(x + task * p.c * p.h * p.w, padded, planes);
        const float* w = packed + task % groups * p.o * p.taps;
        float* image = y + task * p.o * p.pixels;
        for (int64_t vp = 0; vp < vectors.parts; ++vp) {
            const int64_t first = vectors.start(vp) * VL;
            const int nv = static_cast<int>(vectors.size(vp));
            const int tail = static_cast<int>(least(VL, p.pixels - first - (nv - 1) * VL));
            for (int64_t op = 0; op < outs.parts; ++op) {
                const int64_t o = outs.start(op);
                conv_tile_for(static_cast<int>(outs.size(op)), nv)(
                    planes + first, offset, p.taps, w + o * p.taps, image + o * p.pixels + first,
                    p.pixels, tail);
            }
        }
    });
}

Planes forward_planes(const Conv& s) {
    return {s.c / s.groups, s.h, s.w, s.o / s.groups, s.ho, s.wo, s.ph, s.pw, s};
}

void conv(const Conv& s, const float* x, const float* w, float* y) {
    const Planes p = forward_planes(s);
    correlate(p, s.n, s.groups, x, y, [&](int64_t g, int64_t o, int64_t t) {
        return w[(g * p.o + o) * p.taps + t];
    });
}

// Stride 1 only: the gradient is the correlation of g with the turned kernel.
void conv_grad_x(const Conv& s, const float* g, const float* w, float* gx) {
    const int64_t outs = s.o / s.groups, ins = s.c / s.groups, kernel = s.kh * s.kw;
    const Planes p{outs, s.ho, s.wo, ins, s.h, s.w, (s.kh - 1) * s.dh - s.ph,
                   (s.kw - 1) * s.dw - s.pw, s};
    correlate(p, s.n, s.groups, g, gx, [&](int64_t group, int64_t c, int64_t t) {
        const int64_t o = t / kernel, k = kernel - 1 - t % kernel;
        return w[((group * outs + o) * ins + c) * kernel + k];
    });
}

// acc[i][j] += sum over images and pixels of g[i][pixel] * planes[offset[j] + pixel]
template <int O, int T>
void weight_tile(const float* g, const float* planes, const int64_t* offset, int64_t images,
                 int64_t g_stride, int64_t plane_stride, int64_t pixels, float* out,
                 int64_t out_stride) {
    vf acc[O][T] = {};
    const int64_t whole = pixels / VL * VL;
    const int rest = static_cast<int>(pixels - whole);
    for (int64_t image = 0; image < images; ++image, g += g_stride, planes += plane_stride) {
        for (int64_t k = 0; k < whole; k += VL) {
            vf gi[O];
#pragma GCC unroll 8
            for (int i = 0; i < O; ++i) gi[i] = load(g + i * pixels + k);
#pragma GCC unroll 8
            for (int j = 0; j < T; ++j) {
                const vf x = load(planes + offset[j] + k);
#pragma GCC unroll 8
                for (int i = 0; i < O; ++i) acc[i][j] += gi[i] * x;
            }
        }
        if (rest) {
#pragma GCC unroll 8
            for (int j = 0; j < T; ++j) {
                const vf x = load_part(planes + offset[j] + whole, rest);
#pragma GCC unroll 8
                for (int i = 0; i < O; ++i)
                    acc[i][j] += load_part(g + i * pixels + whole, rest) * x;
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < T; ++j) out[i * out_stride + j] += sum(acc[i][j]);
}

using WeightTile = void (*)(const float*, const float*, const int64_t*, int64_t, int64_t, int64_t,
                            int64_t, float*, int64_t);

template <int O>
WeightTile weight_tile_for(int t) {
    if constexpr (WT > 3)
        if (t == 4) return weight_tile<O, 4>;
    return t == 3 ? weight_tile<O, 3> : t == 2 ? weight_tile<O, 2> : weight_tile<O, 1>;
}

WeightTile weight_tile_for(int o, int t) {
    if constexpr (WO > 3) {
        if (o == 6) return weight_tile_for<6>(t);
        if (o == 5) return weight_tile_for<5>(t);
        if (o == 4) return weight_tile_for<4>(t);
    }
    return o == 3 ? weight_tile_for<3>(t) : o == 2 ? weight_tile_for<2>(t) : weight_tile_for<1>(t);
}

void conv_grad_w(const Conv& s, const float* g, const float* x, float* gw) {
    const Planes p = forward_planes(s);
    const Split outs(p.o, WO), kernels(p.taps, WT);
    // Fixed batches of images, each with its own partial sum: the cut depends on shapes only.
    constexpr int64_t kImages = 8, kBatches = 32, kPartial = 1 << 23;
    const int64_t weights = s.o * p.taps, x_size = s.c * s.h * s.w, g_size = s.o * p.pixels;
    const int64_t most_batches = most(1, least(kBatches, kPartial / most(weights, 1)));
    const Split batches(s.n, most(kImages, ceil_div(s.n, most_batches)));
    int64_t* offset = scratch_of<int64_t>(Slot::offsets, p.taps);
    float* partial = scratch_of<float>(Slot::partial, batches.parts * weights);
    p.offsets(offset);
    std::memset(partial, 0, static_cast<size_t>(batches.parts * weights) * 4);

    threads::run(batches.parts, s.n * weights * p.pixels / VL, [&](int64_t batch) {
        float* planes = scratch_of<float>(Slot::planes, kImages * p.plane_floats());
        float* padded = scratch_of<float>(Slot::padded, p.padded_floats());
        float* out = partial + batch * weights;
        const int64_t end = batches.start(batch + 1);
        for (int64_t n0 = batches.start(batch); n0 < end; n0 += kImages) {
            const int64_t images = least(kImages, end - n0);
            for (int64_t group = 0; group < s.groups; ++group) {
                for (int64_t i = 0; i < images; ++i)
                    p.fill(x + (n0 + i) * x_size + group * p.c * s.h * s.w, padded,
                           planes + i * p.plane_floats());
                for (int64_t op = 0; op < outs.parts; ++op) {
                    const int64_t o = group * p.o + outs.start(op);
                    for (int64_t tp = 0; tp < kernels.parts; ++tp) {
                        const int64_t t = kernels.start(tp);
                        weight_tile_for(static_cast<int>(outs.size(op)),
                                        static_cast<int>(kernels.size(tp)))(
                            g + n0 * g_size + o * p.pixels, planes, offset + t, images, g_size,
                            p.plane_floats(), p.pixels, out + o * p.taps + t, p.taps);
                    }
                }
            }
        }
    });
    std::memset(gw, 0, static_cast<size_t>(weights) * 4);
    for (int64_t b = 0; b < batches.parts; ++b)
        for (int64_t i = 0; i < weights; ++i) gw[i] += partial[b * weights + i];
}

// ---- max pooling ----

// The later value wins if it is larger, or NaN where there was none yet.
INLINE bool wins(float value, float best) {
    return value > best || (value != value && best == best);
}

// Padding never wins: kernel elements outside the image are left out. The caller makes sure that
// every window holds an element of the image.
void pool_one(const Conv& s, const float* plane, int64_t y, int64_t x, float* out, int32_t* index) {
    int64_t at = -1;
    float best = 0;
    for (int64_t i = 0; i < s.kh; ++i) {
        const int64_t row = y * s.sh - s.ph + i * s.dh;
        if (row < 0 || row >= s.h) continue;
        for (int64_t j = 0; j < s.kw; ++j) {
            const int64_t column = x * s.sw - s.pw + j * s.dw;
            if (column < 0 || column >= s.w) continue;
            const float value = plane[row * s.w + column];
            if (at < 0 || wins(value, best)) best = value, at = row * s.w + column;
        }
    }
    *out = best;
    *index = static_cast<int32_t>(at);
}

// Lanes 0, 2, 4, ... and 1, 3, 5, ... of 2 * VL consecutive floats.
INLINE void split_pairs(const float* p, vf& even, vf& odd) {
    const vf a = load(p), b = load(p + VL);
#if EXTENSOR_LANES == 16
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif EXTENSOR_LANES == 8
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

INLINE void take(vf value, vi position, vf& best, vi& index) {
    const vi wins = (value > best) | ((value != value) & (best == best));
    best = wins ? value : best;
    index = wins ? position : index;
}

// 2 x 2 with stride 2: VL outputs at a time. A vector may run past the end of its row, into what
// the next row will overwrite; it may not run past the end of the planes at hand.
void pool_pairs(const Conv& s, const float* x, int64_t planes, float* y, int32_t* index) {
    const float* end = x + planes * s.h * s.w;
    float* y_end = y + planes * s.ho * s.wo;
    vi lane;
    for (int i = 0; i < VL; ++i) lane[i] = 2 * i;
    for (int64_t plane = 0; plane < planes; ++plane, x += s.h * s.w) {
        for (int64_t row = 0; row < s.ho; ++row, y += s.wo, index += s.wo) {
            const float* top = x + 2 * row * s.w;
            const int32_t first = static_cast<int32_t>(2 * row * s.w);
            for (int64_t i = 0; i < s.wo; i += VL) {
                if (top + s.w + 2 * (i + VL) > end || y + i + VL > y_end) {
                    for (; i < s.wo; ++i) pool_one(s, x, row, i, y + i, index + i);
                    break;
                }
                vf best, b, c, d;
                split_pairs(top + 2 * i, best, b);
                split_pairs(top + s.w + 2 * i, c, d);
                const vi at = lane + (first + static_cast<int32_t>(2 * i));
                vi where = at;
                take(b, at + 1, best, where);
                take(c, at + static_cast<int32_t>(s.w), best, where);
                take(d, at + static_cast<int32_t>(s.w + 1), best, where);
                store(y + i, best);
                store(index + i, where);
            }
        }
    }
}

constexpr int64_t kPlanes = 32;  // planes of one task

void max_pool(const Conv& s, const float* x, float* y, int32_t* index) {
    const int64_t planes = s.n * s.c, in = s.h * s.w, out = s.ho * s.wo;
    const bool pairs = s.kh == 2 && s.kw == 2 && s.sh == 2 && s.sw == 2 && s.ph == 0 &&
                       s.pw == 0 && s.dh == 1 && s.dw == 1;
    threads::run(ceil_div(planes, kPlanes), planes * in, [&](int64_t task) {
        const int64_t first = task * kPlanes, count = least(kPlanes, planes - first);
        if (pairs) return pool_pairs(s, x + first * in, count, y + first * out, index + first * out);
        for (int64_t p = first; p < first + count; ++p)
            for (int64_t i = 0; i < s.ho; ++i)
                for (int64_t j = 0; j < s.wo; ++j) {
                    const int64_t at = p * out + i * s.wo + j;
                    pool_one(s, x + p * in, i, j, y + at, index + at);
                }
    });
}

bool max_pool_grad(const Conv& s, const float* g, const int32_t* index, float* gx) {
    const int64_t planes = s.n * s.c, in = s.h * s.w, out = s.ho * s.wo;
    const int64_t tasks = ceil_div(planes, kPlanes);
    bool* outside = scratch_of<bool>(Slot::partial, tasks + 1);
    threads::run(tasks, planes * in, [&](int64_t task) {
        const int64_t first = task * kPlanes, last = least(first + kPlanes, planes);
        bool bad = false;
        std::memset(gx + first * in, 0, static_cast<size_t>((last - first) * in) * 4);
        for (int64_t p = first; p < last; ++p) {
            for (int64_t i = p * out; i < (p + 1) * out; ++i) {
                const int64_t at = index[i];
                if (at < 0 || at >= in)
                    bad = true;
                else
                    gx[p * in + at] += g[i];
            }
        }
        outside[task] = bad;
    });
    for (int64_t task = 0; task < tasks; ++task)
        if (outside[task]) return false;
    return true;
}

// ---- im2col and its transpose ----

Planes column_planes(const Conv& s) { return {s.c, s.h, s.w, 1, s.ho, s.wo, s.ph, s.pw, s}; }

void im2col(const Conv& s, const float* x, float* columns) {
    const Planes p = column_planes(s);
    const bool runs = s.dw == 1 && s.kw <= 8;
    threads::run(s.n, s.n * p.pixels * p.taps, [&](int64_t n) {
        float* padded = scratch_of<float>(Slot::padded, p.padded_floats());
        p.pad(x + n * s.c * s.h * s.w, padded);
        float* out = columns + n * p.pixels * p.taps;
        for (int64_t pixel = 0; pixel < p.pixels; ++pixel) {
            const float* corner = padded + pixel / s.wo * s.sh * p.wp + pixel % s.wo * s.sw;
            // A run of 8 floats may spill into the next run, but not into the next image.
            const bool spill = runs && pixel + 1 < p.pixels && p.taps >= 8;
            for (int64_t c = 0; c < s.c; ++c) {
                for (int64_t i = 0; i < s.kh; ++i, out += s.kw) {
                    const float* from = corner + (c * p.hp + i * s.dh) * p.wp;
                    if (spill)
                        std::memcpy(out, from, 32);
                    else
                        for (int64_t j = 0; j < s.kw; ++j) out[j] = from[j * s.dw];
                }
            }
        }
    });
}

// Lane 0 from `first`, the others from v, one lane down.
INLINE vf shift_in(vf first, vf v) {
#if EXTENSOR_LANES == 16
    return __builtin_shufflevector(first, v, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28,
                                   29, 30);
#elif EXTENSOR_LANES == 8
    return __builtin_shufflevector(first, v, 0, 8, 9, 10, 11, 12, 13, 14);
#else
    return __builtin_shufflevector(first, v, 0, 4, 5, 6);
#endif
}

// Adds one row of pixels' runs of kw values, the last pixel first; run i goes to row[i .. i + kw).
// The runs overlap: a vector slides along with them, so that no sum waits for memory.
void add_runs(const float* from, int64_t stride, int64_t pixels, int kw, float* row) {
    vf sum = load_part(row + pixels - 1, kw);
    for (int64_t i = pixels - 1;; --i) {
        sum += load_part(from + i * stride, kw);
        store_part(row + i, sum, kw);
        if (i == 0) break;
        sum = shift_in(splat(row[i - 1]), sum);
    }
}

// Pixels go backwards so that every sum adds in row-major kernel order, as the reference does.
void col2im(const Conv& s, const float* columns, float* x) {
    const Planes p = column_planes(s);
    const bool slide = s.sw == 1 && s.dw == 1 && s.kw <= VL;
    threads::run(s.n, s.n * p.pixels * p.taps, [&](int64_t n) {
        float* padded = scratch_of<float>(Slot::padded, p.padded_floats());
        std::memset(padded, 0, static_cast<size_t>(p.padded_floats()) * 4);
        for (int64_t y = s.ho - 1; y >= 0; --y) {
            const float* from = columns + (n * p.pixels + y * s.wo) * p.taps;
            for (int64_t c = 0; c < s.c; ++c) {
                for (int64_t i = 0; i < s.kh; ++i, from += s.kw) {
                    float* row = padded + (c * p.hp + y * s.sh + i * s.dh) * p.wp;
                    if (slide) {
                        add_runs(from, p.taps, s.wo, static_cast<int>(s.kw), row);
                        continue;
                    }
                    for (int64_t k = s.wo - 1; k >= 0; --k)
                        for (int64_t j = 0; j < s.kw; ++j)
                            row[k * s.sw + j * s.dw] += from[k * p.taps + j];
                }
            }
        }
        for (int64_t c = 0; c < s.c; ++c)
            for (int64_t y = 0; y < s.h; ++y)
                std::memcpy(x + ((n * s.c + c) * s.h + y) * s.w,
                            padded + (c * p.hp + y + s.ph) * p.wp + s.pw,
                            static_cast<size_t>(s.w) * 4);
    });
}

}  // namespace

extern const WindowKernels window_kernels;
const WindowKernels window_kernels = {
    conv, conv_grad_x, conv_grad_w, max_pool, max_pool_grad, im2col, col2im,
};

}  // namespace EXTENSOR_ISA
