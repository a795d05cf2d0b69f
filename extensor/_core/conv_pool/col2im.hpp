// Gradients of patches summed back to the pixels of their image, for conv.cpp and clipped_conv.cpp.
#pragma once

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

// Part of a row of windows: `length` of them from row y and pixel x of the outputs, whose gradients
// for each tap lie at `from`, `stride` floats from tap to tap.
struct WindowRow {
    const float* from;
    int64_t stride, y, x, length;
};

// What one column of the kernel adds to VL pixels: floats at `from`, in some lanes.
struct KernelColumn {
    int64_t from;
    Lanes lanes;
};

// body(image's row, gradients of the kernel's first column) for each row of the kernel and channel.
// Rows of one channel may share a vector, and a load that follows a store of part of its bytes
// waits for it: they do not follow one another.
template <class Body>
INLINE void for_kernel_rows(const LoweredImages& p, const WindowRow& row, float* image, Body body) {
    const int64_t step = p.kw * row.stride;  // from row to row of the kernel
    for (int64_t i = 0; i < p.kh; ++i) {
        const int64_t y = row.y * p.sh - p.ph + i * p.dh;
        if (y < 0 || y >= p.h) continue;
        float* line = image + y * p.w;
        const float* from = row.from + i * step;
        for (int64_t c = 0; c < p.c; ++c, line += p.h * p.w, from += p.kh * step) body(line, from);
    }
}

// Adds what N columns of the kernel give to `lanes` pixels of a row from x on, in the kernel's
// order, in a register.
template <int N>
void add_columns(const LoweredImages& p, const WindowRow& row, const KernelColumn* columns,
                 int64_t x, int lanes, float* image) {
    KernelColumn each[N];
    for (int j = 0; j < N; ++j) each[j] = columns[j];
    for_kernel_rows(p, row, image, [&](float* line, const float* from) {
        vf sum = load_part(line + x, lanes);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sum += load_lanes(from + each[j].from, each[j].lanes);
        store_part(line + x, sum, lanes);
    });
}

template <int... I>
auto columns_adder(int count, std::integer_sequence<int, I...>) {
    static constexpr decltype(&add_columns<1>) adders[] = {add_columns<I + 1>...};
    return adders[count - 1];
}

// Adds a row's windows where they lie side by side: which lanes a column of the kernel reaches is
// the same for all channels.
inline void add_windows(const LoweredImages& p, const WindowRow& row, float* image) {
    constexpr int kMost = 8;
    const int64_t column = row.x - p.pw;
    const int64_t last = least(p.w, column + (p.kw - 1) * p.dw + row.length);
    for (int64_t x = most(0, column); x < last; x += VL) {
        const int lanes = static_cast<int>(least(VL, last - x));
        KernelColumn columns[kMost];
        int count = 0;
        for (int64_t j = 0; j < p.kw; ++j) {
            const int64_t k = x - column - j * p.dw;  // the window that lane 0 belongs to
            const int64_t begin = most(0, -k), end = least(lanes, row.length - k);
            if (begin < end)
                columns[count++] = {j * row.stride + k,
                                    lanes_between(static_cast<int>(begin), static_cast<int>(end))};
            if (!count || (count < kMost && j + 1 < p.kw)) continue;
            columns_adder(count, std::make_integer_sequence<int, kMost>{})(p, row, columns, x,
                                                                           lanes, image);
            count = 0;
        }
    }
}

// Adds gradients of `count` patches from pixel `first` on, (taps, count), to an image's.
inline void add_patches(const LoweredImages& p, int64_t first, int64_t count, const float* patches,
                        float* image) {
    for (int64_t at = 0, length; at < count; at += length) {
        const int64_t y = (first + at) / p.wo, x = (first + at) % p.wo;
        length = least(count - at, p.wo - x);
        const WindowRow row = {patches + at, count, y, x, length};
        if (p.sw == 1) {
            add_windows(p, row, image);
            continue;
        }
        for_kernel_rows(p, row, image, [&](float* line, const float* from) {
            for (int64_t j = 0; j < p.kw; ++j, from += count) {
                int64_t to = x * p.sw - p.pw + j * p.dw;
                for (int64_t k = 0; k < length; ++k, to += p.sw)
                    if (to >= 0 && to < p.w) line[to] += from[k];
            }
        });
    }
}

}  // namespace EXTENSOR_ISA
