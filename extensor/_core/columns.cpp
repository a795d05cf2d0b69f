// im2col and its transpose on float32 NCHW arrays, byte for byte as the reference.

#include "kernels.hpp"
#include "simd.hpp"
#include "threads.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

// One padded image: of every size that the windows and the padding ask for.
struct Padded {
    int64_t hp, wp, pixels, taps;

    explicit Padded(const Conv& s)
        : hp(most(s.h + 2 * s.ph, (s.ho - 1) * s.sh + (s.kh - 1) * s.dh + 1)),
          wp(most(s.w + 2 * s.pw, (s.wo - 1) * s.sw + (s.kw - 1) * s.dw + 1)),
          pixels(s.ho * s.wo), taps(s.c * s.kh * s.kw) {}

    int64_t floats(const Conv& s) const { return s.c * hp * wp + 4 * VL; }

    void fill(const Conv& s, const float* src, float* padded) const {
        std::memset(padded, 0, static_cast<size_t>(s.c * hp * wp) * 4);
        for (int64_t i = 0; i < s.c; ++i)
            for (int64_t y = 0; y < s.h; ++y)
                std::memcpy(padded + (i * hp + y + s.ph) * wp + s.pw, src + (i * s.h + y) * s.w,
                            static_cast<size_t>(s.w) * 4);
    }
};

void im2col(const Conv& s, const float* x, float* columns) {
    const Padded p(s);
    const bool runs = s.dw == 1 && s.kw <= 8;
    threads::run(s.n, s.n * p.pixels * p.taps, [&](int64_t n) {
        float* padded = scratch_of<float>(Slot::padded, p.floats(s));
        p.fill(s, x + n * s.c * s.h * s.w, padded);
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
    const Padded p(s);
    const bool slide = s.sw == 1 && s.dw == 1 && s.kw <= VL;
    threads::run(s.n, s.n * p.pixels * p.taps, [&](int64_t n) {
        float* padded = scratch_of<float>(Slot::padded, p.floats(s));
        std::memset(padded, 0, static_cast<size_t>(p.floats(s)) * 4);
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

extern const ColumnKernels column_kernels;
const ColumnKernels column_kernels = {im2col, col2im};

}  // namespace EXTENSOR_ISA
