// Gradients of patches summed back to the pixels of their image, for conv.cpp and clipped_conv.cpp.
#pragma once

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

// to[k * step] += from[k] for count values.
INLINE void add_run(const float* from, int64_t count, int64_t step, float* to) {
    if (step != 1) {
        for (int64_t k = 0; k < count; ++k) to[k * step] += from[k];
        return;
    }
    int64_t k = 0;
    for (; k + VL <= count; k += VL) store(to + k, load(to + k) + load(from + k));
    if (k == count) return;
    const int rest = static_cast<int>(count - k);
    store_part(to + k, load_part(to + k, rest) + load_part(from + k, rest), rest);
}

// Adds gradients of `count` patches from pixel `first` on, (taps, count), to an image's.
inline void add_patches(const LoweredImages& p, int64_t first, int64_t count, const float* patches,
                        float* image) {
    for (int64_t at = 0, length; at < count; at += length) {
        const int64_t y = (first + at) / p.wo, x = (first + at) % p.wo;
        length = least(count - at, p.wo - x);
        const float* from = patches + at;
        for (int64_t c = 0; c < p.c; ++c) {
            for (int64_t i = 0; i < p.kh; ++i) {
                const int64_t row = y * p.sh - p.ph + i * p.dh;
                if (row < 0 || row >= p.h) {
                    from += p.kw * count;
                    continue;
                }
                float* to = image + (c * p.h + row) * p.w;
                for (int64_t j = 0; j < p.kw; ++j, from += count) {
                    const int64_t column = x * p.sw - p.pw + j * p.dw;  // of the run's first patch
                    const int64_t begin = column < 0 ? ceil_div(-column, p.sw) : 0;
                    const int64_t end = least(length, ceil_div(p.w - column, p.sw));
                    if (begin < end)
                        add_run(from + begin, end - begin, p.sw, to + column + begin * p.sw);
                }
            }
        }
    }
}

}  // namespace EXTENSOR_ISA
