// Images lowered for convolution (im2col along the width alone), and the register tiles that
// multiply them, for conv.cpp and quantized_conv.cpp.
//
// A convolution is an implicit GEMM. `LoweredImages` holds, per channel and kernel column, the
// padded rows cut to the output's width, of one image or of several side by side (as MEC does,
// arXiv 1706.06873). The values that one kernel element (a tap) meets are then one contiguous run
// at a fixed offset, for any padding, dilation and stride, and lanes run over the output pixels
// without gaps. A tap's pixels come in the order (row, image, column).
#pragma once

#include <utility>

#include "common/simd.hpp"
#include "common/threads.hpp"
#include "conv_pool/kernels.hpp"

namespace EXTENSOR_ISA {

// Register tiles: outputs x vectors of pixels (TO, TV), outputs x taps (WO, WT).
constexpr int TO = 6, TV = VL == 16 ? 4 : 2;
constexpr int WO = VL == 16 ? 6 : 3, WT = VL == 16 ? 4 : 3;

// Weights and rows in pairs of bfloat16. The slots are those of matrix products, which convolutions
// do not call.
constexpr threads::Slot kPairWords = threads::Slot::packed_a, kPairRows = threads::Slot::packed_b;

// Cuts `total` into the fewest parts of at most `limit`, as even as can be.
struct Split {
    int64_t total, parts;
    Split(int64_t total, int64_t limit) : total(total), parts(most(ceil_div(total, limit), 1)) {}
    int64_t start(int64_t part) const { return total * part / parts; }
    int64_t size(int64_t part) const { return start(part + 1) - start(part); }
};

// `images` images of (c, h, w), of whose windows (kh, kw) there are (ho, wo). Negative padding
// crops.
struct LoweredImages {
    int64_t images, c, h, w, kh, kw, sh, sw, ph, pw, dh, dw, ho, wo;
    int64_t hp, wp, rows, width, pixels, taps;

    LoweredImages(int64_t images, const Conv& s)
        : images(images),
          c(s.c),
          h(s.h),
          w(s.w),
          kh(s.kh),
          kw(s.kw),
          sh(s.sh),
          sw(s.sw),
          ph(s.ph),
          pw(s.pw),
          dh(s.dh),
          dw(s.dw),
          ho(s.ho),
          wo(s.wo) {
        hp = (ho - 1) * sh + (kh - 1) * dh + 1;
        wp = (wo - 1) * sw + (kw - 1) * dw + 1;
        rows = sh == 1 ? ho + (kh - 1) * dh : kh * ho;  // a stride needs rows per kernel row
        taps = c * kh * kw;
        set_images(images);
    }

    void set_images(int64_t count) {
        images = count;
        width = images * wo;
        pixels = ho * width;
    }

    int64_t padded_floats() const { return images * hp * wp + 6 * VL + wo; }
    int64_t channel_floats() const { return kw * rows * width; }
    int64_t lowered_floats() const { return c * channel_floats() + TV * VL + VL; }

    // Where the run of kernel element t starts, for every t in (c, kh, kw) order.
    void offsets(int64_t* out) const {
        for (int64_t i = 0; i < c; ++i)
            for (int64_t y = 0; y < kh; ++y)
                for (int64_t x = 0; x < kw; ++x)
                    *out++ = ((i * kw + x) * rows + y * (sh == 1 ? dh : ho)) * width;
    }

    // Images of `src` are `stride` floats apart; `padded` is scratch.
    void fill(const float* src, int64_t stride, float* padded, float* lowered) const {
        for (int64_t i = 0; i < c; ++i, src += h * w) {
            for (int64_t n = 0; n < images; ++n) pad(src + n * stride, padded + n * hp * wp);
            for (int64_t x = 0; x < kw; ++x, lowered += rows * width) {
                if (sw != 1)
                    copy_strided(padded + x * dw, lowered);
                else if (wo <= VL)
                    copy_rows<1>(padded + x * dw, lowered);
                else if (wo <= 2 * VL)
                    copy_rows<2>(padded + x * dw, lowered);
                else
                    copy_rows<0>(padded + x * dw, lowered);
            }
        }
    }

private:
    void pad(const float* src, float* to) const {
        const int64_t left = most(0, pw), count = least(w + pw, wp) - left;
        const int64_t top = most(0, ph), bottom = least(h + ph, hp);
        if (left > 0 || left + count < wp || top > 0 || bottom < hp)
            std::memset(to, 0, static_cast<size_t>(hp * wp) * 4);
        if (count <= 0) return;
        for (int64_t y = top; y < bottom; ++y)
            std::memcpy(to + y * wp + left, src + (y - ph) * w + left - pw,
                        static_cast<size_t>(count) * 4);
    }

    int64_t source_row(int64_t r) const { return sh == 1 ? r : r / ho * dh + r % ho * sh; }

    // A row's last vector writes beyond it, where the next row follows, or unused memory.
    template <int V>
    void copy_rows(const float* padded, float* to) const {
        const int64_t vectors = V ? V : ceil_div(wo, VL);
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = padded + source_row(r) * wp;
            for (int64_t n = 0; n < images; ++n, from += hp * wp, to += wo)
                for (int64_t v = 0; v < vectors; ++v) store(to + v * VL, load(from + v * VL));
        }
    }

    void copy_strided(const float* padded, float* to) const {
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = padded + source_row(r) * wp;
            for (int64_t n = 0; n < images; ++n, from += hp * wp, to += wo) {
                if (sw == 2) {
                    for (int64_t k = 0; k < wo; k += VL) {
                        vf even, odd;
                        deinterleave(from + 2 * k, even, odd);
                        store(to + k, even);
                    }
                } else {
                    for (int64_t k = 0; k < wo; ++k) to[k] = from[k * sw];
                }
            }
        }
    }
};

// out[i][v] = start + sum over t of w[t][i] * x[offset[t] + v]; start is bias[i], or with Add what
// is there. The last vector has `tail` lanes.
template <int O, int V, bool Add>
void conv_tile(const float* x, const int64_t* offset, int64_t taps, const float* w,
               const float* bias, float* out, int64_t out_stride, int tail) {
    vf acc[O][V];
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const float* at = out + i * out_stride + v * VL;
            if (Add)
                acc[i][v] = v == V - 1 ? load_part(at, tail) : load(at);
            else
                acc[i][v] = splat(bias[i]);
        }
    }
    for (int64_t t = 0; t < taps; ++t, w += O) {
        const float* p = x + offset[t];
        vf xs[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) xs[v] = load(p + v * VL);
#pragma GCC unroll 8
        for (int i = 0; i < O; ++i) {
            const vf wi = splat(w[i]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[i][v] += wi * xs[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i, out += out_stride) {
#pragma GCC unroll 8
        for (int v = 0; v < V - 1; ++v) store(out + v * VL, acc[i][v]);
        store_part(out + (V - 1) * VL, acc[i][V - 1], tail);
    }
}

using ConvTile = void (*)(const float*, const int64_t*, int64_t, const float*, const float*, float*,
                          int64_t, int);

template <bool Add, int... I>
ConvTile conv_tile_for(int64_t o, int64_t v, std::integer_sequence<int, I...>) {
    static constexpr ConvTile tiles[] = {conv_tile<I / TV + 1, I % TV + 1, Add>...};
    return tiles[(o - 1) * TV + v - 1];
}

// Weights by steps in floats from group to group, output to output, and so on.
struct Weights {
    const float* at;
    int64_t group, output, channel, row, column;
};

// Packs weights in the order that `multiply` reads: group, tile of outputs, tap, output.
inline void pack_weights(const LoweredImages& p, int64_t groups, int64_t o, const Weights& w,
                         float* packed) {
    const Split outs(o, TO);
    threads::run(groups * outs.parts, groups * o * p.taps, [&](int64_t task) {
        const int64_t g = task / outs.parts, part = task % outs.parts;
        const int64_t first = outs.start(part), count = outs.size(part);
        float* to = packed + (g * o + first) * p.taps;
        const float* from = w.at + g * w.group + first * w.output;
        for (int64_t c = 0; c < p.c; ++c)
            for (int64_t y = 0; y < p.kh; ++y)
                for (int64_t x = 0; x < p.kw; ++x)
                    for (int64_t i = 0; i < count; ++i)
                        *to++ = from[c * w.channel + y * w.row + x * w.column + i * w.output];
    });
}

// out (o, pixels) = bias + weights (packed) times the runs at `offset`. The outer loops keep a
// block of taps of some pixels in the first-level cache while all outputs use it.
inline void multiply(int64_t o, const TapRows& m, const float* packed, const float* bias,
                     float* out, int64_t out_stride) {
    constexpr int64_t kTaps = 8192 / (TV * VL);  // 32 KiB
    const Split outs(o, TO), vectors(ceil_div(m.pixels, VL), TV), blocks(m.taps, kTaps);
    for (int64_t vp = 0; vp < vectors.parts; ++vp) {
        const int64_t first = vectors.start(vp) * VL;
        const int nv = static_cast<int>(vectors.size(vp));
        const int tail = static_cast<int>(least(VL, m.pixels - first - (nv - 1) * VL));
        for (int64_t b = 0; b < blocks.parts; ++b) {
            const int64_t t = blocks.start(b);
            for (int64_t op = 0; op < outs.parts; ++op) {
                const int64_t i = outs.start(op);
                const int no = static_cast<int>(outs.size(op));
                constexpr std::make_integer_sequence<int, TO * TV> all{};
                const ConvTile tile =
                    b ? conv_tile_for<true>(no, nv, all) : conv_tile_for<false>(no, nv, all);
                tile(m.x + first, m.offset + t, blocks.size(b), packed + i * m.taps + t * no,
                     bias + i, out + i * out_stride + first, out_stride, tail);
            }
        }
    }
}

// out[j] += the sum of the lanes of v[j], always in the same order.
template <int T>
INLINE void add_sums(const vf* v, float* out) {
#if defined(__AVX512F__)
    if constexpr (T == 4) {
        const __m512 ab =
            _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const __m512 cd =
            _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        const __m512 four =
            _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
        const __m256 two =
            _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
        const __m128 one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), one));
        return;
    }
#endif
    for (int j = 0; j < T; ++j) out[j] += sum(v[j]);
}

// out[i][j] += sum over pixels of g[i][pixel] * x[offset[j] + pixel]
template <int O, int T>
void weight_tile(const float* g, int64_t g_stride, const float* x, const int64_t* offset,
                 int64_t pixels, float* out, int64_t out_stride) {
    vf acc[O][T] = {};
    const int64_t whole = pixels / VL * VL;
    const int rest = static_cast<int>(pixels - whole);
    for (int64_t k = 0; k < whole; k += VL) {
        vf gi[O];
#pragma GCC unroll 8
        for (int i = 0; i < O; ++i) gi[i] = load(g + i * g_stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < T; ++j) {
            const vf xj = load(x + offset[j] + k);
#pragma GCC unroll 8
            for (int i = 0; i < O; ++i) acc[i][j] += gi[i] * xj;
        }
    }
    if (rest) {
#pragma GCC unroll 8
        for (int j = 0; j < T; ++j) {
            const vf xj = load_part(x + offset[j] + whole, rest);
#pragma GCC unroll 8
            for (int i = 0; i < O; ++i) acc[i][j] += load_part(g + i * g_stride + whole, rest) * xj;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i) add_sums<T>(acc[i], out + i * out_stride);
}

using WeightTile = void (*)(const float*, int64_t, const float*, const int64_t*, int64_t, float*,
                            int64_t);

template <int... I>
WeightTile weight_tile_for(int64_t o, int64_t t, std::integer_sequence<int, I...>) {
    static constexpr WeightTile tiles[] = {weight_tile<I / WT + 1, I % WT + 1>...};
    return tiles[(o - 1) * WT + t - 1];
}

// out (o, taps) += g (o, pixels) times the runs at `offset`, transposed.
inline void correlate_runs(int64_t o, const TapRows& m, const float* g, int64_t g_stride,
                           float* out, int64_t out_stride) {
    constexpr int64_t kRun = 1024;  // pixels whose gradients stay in the first-level cache
    constexpr std::make_integer_sequence<int, WO * WT> all{};
    const Split outs(o, WO), kernels(m.taps, WT);
    for (int64_t first = 0; first < m.pixels; first += kRun) {
        for (int64_t op = 0; op < outs.parts; ++op) {
            const int64_t i = outs.start(op);
            for (int64_t tp = 0; tp < kernels.parts; ++tp) {
                const int64_t t = kernels.start(tp);
                weight_tile_for(outs.size(op), kernels.size(tp), all)(
                    g + i * g_stride + first, g_stride, m.x + first, m.offset + t,
                    least(kRun, m.pixels - first), out + i * out_stride + t, out_stride);
            }
        }
    }
}

}  // namespace EXTENSOR_ISA
