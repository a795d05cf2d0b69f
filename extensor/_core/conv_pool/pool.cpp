// Max pooling of float32 NCHW arrays and its gradient.

#include "common/simd.hpp"
#include "common/threads.hpp"
#include "conv_pool/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

// The later value wins if it is larger, or NaN where there was none yet.
INLINE bool wins(float value, float best) {
    return value > best || (value != value && best == best);
}

// Padding never wins: kernel elements outside the image are left out. The caller makes sure that
// every window holds an element of the image.
void pool_one(const Conv& s, const float* channel, int64_t y, int64_t x, float* out,
              int32_t* index) {
    int64_t at = -1;
    float best = 0;
    for (int64_t i = 0; i < s.kh; ++i) {
        const int64_t row = y * s.sh - s.ph + i * s.dh;
        if (row < 0 || row >= s.h) continue;
        for (int64_t j = 0; j < s.kw; ++j) {
            const int64_t column = x * s.sw - s.pw + j * s.dw;
            if (column < 0 || column >= s.w) continue;
            const float value = channel[row * s.w + column];
            if (at < 0 || wins(value, best)) best = value, at = row * s.w + column;
        }
    }
    *out = best;
    *index = static_cast<int32_t>(at);
}

INLINE void keep_larger(vf value, vi position, vf& best, vi& index) {
    const vi wins = (value > best) | ((value != value) & (best == best));
    best = wins ? value : best;
    index = wins ? position : index;
}

// 2 x 2 with stride 2: VL outputs at a time. A vector may reach beyond the end of its row, into
// what the next row will overwrite, but not beyond the end of the task's channels.
void pool_2x2(const Conv& s, const float* x, int64_t channels, float* y, int32_t* index) {
    const float* end = x + channels * s.h * s.w;
    float* y_end = y + channels * s.ho * s.wo;
    vi lane;
    for (int i = 0; i < VL; ++i) lane[i] = 2 * i;
    for (int64_t channel = 0; channel < channels; ++channel, x += s.h * s.w) {
        for (int64_t row = 0; row < s.ho; ++row, y += s.wo, index += s.wo) {
            const float* top = x + 2 * row * s.w;
            const int32_t first = static_cast<int32_t>(2 * row * s.w);
            for (int64_t i = 0; i < s.wo; i += VL) {
                if (top + s.w + 2 * (i + VL) > end || y + i + VL > y_end) {
                    for (; i < s.wo; ++i) pool_one(s, x, row, i, y + i, index + i);
                    break;
                }
                vf best, b, c, d;
                deinterleave(top + 2 * i, best, b);
                deinterleave(top + s.w + 2 * i, c, d);
                const vi at = lane + (first + static_cast<int32_t>(2 * i));
                vi where = at;
                keep_larger(b, at + 1, best, where);
                keep_larger(c, at + static_cast<int32_t>(s.w), best, where);
                keep_larger(d, at + static_cast<int32_t>(s.w + 1), best, where);
                store(y + i, best);
                store(index + i, where);
            }
        }
    }
}

constexpr int64_t kTaskChannels = 32;  // channels of one task

void max_pool(const Conv& s, const float* x, float* y, int32_t* index) {
    const int64_t channels = s.n * s.c, in = s.h * s.w, out = s.ho * s.wo;
    const bool is_2x2 = s.kh == 2 && s.kw == 2 && s.sh == 2 && s.sw == 2 && s.ph == 0 &&
                        s.pw == 0 && s.dh == 1 && s.dw == 1;
    threads::run(ceil_div(channels, kTaskChannels), channels * in, [&](int64_t task) {
        const int64_t first = task * kTaskChannels, count = least(kTaskChannels, channels - first);
        if (is_2x2) return pool_2x2(s, x + first * in, count, y + first * out, index + first * out);
        for (int64_t p = first; p < first + count; ++p)
            for (int64_t i = 0; i < s.ho; ++i)
                for (int64_t j = 0; j < s.wo; ++j) {
                    const int64_t at = p * out + i * s.wo + j;
                    pool_one(s, x + p * in, i, j, y + at, index + at);
                }
    });
}

bool max_pool_grad(const Conv& s, const float* g, const int32_t* index, float* gx) {
    const int64_t channels = s.n * s.c, in = s.h * s.w, out = s.ho * s.wo;
    const int64_t tasks = ceil_div(channels, kTaskChannels);
    bool* outside = scratch_of<bool>(Slot::partial, tasks + 1);
    threads::run(tasks, channels * in, [&](int64_t task) {
        const int64_t first = task * kTaskChannels, last = least(first + kTaskChannels, channels);
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

}  // namespace

extern const PoolKernels pool_kernels;
const PoolKernels pool_kernels = {max_pool, max_pool_grad};

}  // namespace EXTENSOR_ISA
