// Patches of images a part at a time, as the quantizer takes them, and what scales need of all of
// them: for quantized_conv.cpp and clipped_conv.cpp.
#pragma once

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

extern const QuantKernels quant_kernels;

using threads::scratch_of;
using threads::Slot;

inline QuantJob patch_job(const float* x, float* values, int64_t rows, int64_t length,
                          int64_t inner, int64_t tile_length) {
    QuantJob job{};
    job.x = x, job.type = FloatType::float32, job.values = values;
    job.outer = 1, job.rows = rows, job.length = job.padded = length, job.inner = inner;
    job.tile_rows = 1, job.tile_length = tile_length;
    return job;
}

inline uint32_t largest(const uint32_t* words, int64_t count) {
    uint32_t top = 0;
    for (int64_t i = 0; i < count; ++i) top = words[i] > top ? words[i] : top;
    return top;
}

// Whether rounded patches are bfloat16 times one factor.
inline bool has_factor(const QuantPlan& plan) {
    return plan.scale == Scale::e8m0 || plan.scale == Scale::ue4m3;
}

// Scales that need the largest finite magnitude of all patches.
inline bool needs_whole(const PatchQuant& q) { return q.plan.scale == Scale::ue4m3; }

constexpr int64_t kColumns = TV * VL;

// body(patches, first, count) for the patches of one image and group, some columns at a time.
template <class Body>
void visit_image(const Conv& s, const LoweredImages& p, int64_t task, const float* x, Body body) {
    float* lowered = scratch_of<float>(Slot::conv_lowered, p.lowered_floats());
    float* padded = scratch_of<float>(Slot::conv_padded, p.padded_floats());
    int64_t* offset = scratch_of<int64_t>(Slot::conv_offsets, 2 * p.taps);
    float* patches = scratch_of<float>(Slot::conv_patches, p.taps * kColumns + kColumns);
    p.offsets(offset);
    p.fill(x + task * p.c * s.h * s.w, 0, padded, lowered);
    for (int64_t first = 0; first < p.pixels; first += kColumns) {
        const int64_t count = least(kColumns, p.pixels - first);
        for (int64_t t = 0; t < p.taps; ++t) {
            const float* from = lowered + offset[t] + first;
            float* to = patches + t * count;  // a whole tile; the next overwrites the excess
            for (int v = 0; v < TV; ++v) store(to + v * VL, load(from + v * VL));
        }
        body(patches, first, count);
    }
}

// Marks which of `size` rows or columns of an image any window reads; whether all.
inline bool mark_covered(uint8_t* covered, int64_t size, int64_t windows, int64_t stride,
                         int64_t pad, int64_t kernel, int64_t dilation) {
    std::memset(covered, 0, static_cast<size_t>(size));
    for (int64_t y = 0; y < windows; ++y) {
        for (int64_t i = 0; i < kernel; ++i) {
            const int64_t at = y * stride - pad + i * dilation;
            if (at >= 0 && at < size) covered[at] = 1;
        }
    }
    for (int64_t i = 0; i < size; ++i)
        if (!covered[i]) return false;
    return true;
}

// The largest magnitude of all patches: of the pixels that they hold, which a patch does not
// transform.
inline uint32_t patch_maximum(const Conv& s, const PatchQuant& q, const float* x) {
    uint8_t* rows = scratch_of<uint8_t>(Slot::conv_offsets, s.h + s.w);
    uint8_t* columns = rows + s.h;
    const bool all_rows = mark_covered(rows, s.h, s.ho, s.sh, s.ph, s.kh, s.dh);
    const bool all_columns = mark_covered(columns, s.w, s.wo, s.sw, s.pw, s.kw, s.dw);
    uint32_t* each = scratch_of<uint32_t>(Slot::conv_maxima, s.n);
    const int64_t size = s.c * s.h * s.w;
    threads::run(s.n, s.n * size / VL, [&](int64_t n) {
        const float* image = x + n * size;
        each[n] = 0;
        const auto raise = [&](const float* run, int64_t length) {
            uint32_t top;
            quant_kernels.row_maxima(q.plan, {run, 1, 0, length, needs_whole(q)}, &top);
            each[n] = top > each[n] ? top : each[n];
        };
        if (all_rows && all_columns) return raise(image, size);
        float* row = scratch_of<float>(Slot::conv_padded, s.w);
        for (int64_t r = 0; r < s.c * s.h; ++r) {
            if (!rows[r % s.h]) continue;
            for (int64_t j = 0; j < s.w; ++j) row[j] = columns[j] ? image[r * s.w + j] : 0.0f;
            raise(row, s.w);
        }
    });
    return largest(each, s.n);
}

}  // namespace EXTENSOR_ISA
