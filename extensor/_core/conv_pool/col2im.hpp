// Gradients of patches summed back to the pixels of their image, for conv.cpp and clipped_conv.cpp.
#pragma once

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

// Part of a row of windows: `length` gradients for each kernel column, `stride` floats apart.
struct WindowRow {
    const float* from;
    int64_t stride, length;
    int64_t column;  // of the first window's first pixel, in the image's row
};

// Adds them to an image's row. Every pixel takes its gradients in the kernel's order, in a
// register: a load that follows a store of part of its bytes would wait for it.
inline void add_windows(const LoweredImages& p, const WindowRow& row, float* image) {
    if (p.sw != 1) {
        for (int64_t j = 0; j < p.kw; ++j) {
            const int64_t column = row.column + j * p.dw;
            const float* from = row.from + j * row.stride;
            for (int64_t k = 0, at = column; k < row.length; ++k, at += p.sw)
                if (at >= 0 && at < p.w) image[at] += from[k];
        }
        return;
    }
    const int64_t last = least(p.w, row.column + (p.kw - 1) * p.dw + row.length);
    for (int64_t x = most(0, row.column); x < last; x += VL) {
        const int lanes = static_cast<int>(least(VL, last - x));
        vf sum = load_part(image + x, lanes);
        for (int64_t j = 0; j < p.kw; ++j) {
            const int64_t k = x - row.column - j * p.dw;  // the window that lane 0 belongs to
            const int64_t begin = most(0, -k), end = least(lanes, row.length - k);
            if (begin >= end) continue;
            const float* from = row.from + j * row.stride + k;
            sum += load_between(from, static_cast<int>(begin), static_cast<int>(end));
        }
        store_part(image + x, sum, lanes);
    }
}

// Adds gradients of `count` patches from pixel `first` on, (taps, count), to an image's.
inline void add_patches(const LoweredImages& p, int64_t first, int64_t count, const float* patches,
                        float* image) {
    for (int64_t at = 0, length; at < count; at += length) {
        const int64_t y = (first + at) / p.wo, x = (first + at) % p.wo;
        length = least(count - at, p.wo - x);
        WindowRow row = {patches + at, count, length, x * p.sw - p.pw};
        for (int64_t c = 0; c < p.c; ++c) {
            for (int64_t i = 0; i < p.kh; ++i, row.from += p.kw * count) {
                const int64_t line = y * p.sh - p.ph + i * p.dh;
                if (line >= 0 && line < p.h) add_windows(p, row, image + (c * p.h + line) * p.w);
            }
        }
    }
}

}  // namespace EXTENSOR_ISA
