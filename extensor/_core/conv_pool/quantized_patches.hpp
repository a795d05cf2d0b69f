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

// The largest magnitude of all patches.
inline uint32_t patch_maximum(const Conv& s, const LoweredImages& p, const PatchQuant& q,
                              const float* x) {
    uint32_t* each = scratch_of<uint32_t>(Slot::conv_maxima, s.n * s.groups);
    threads::run(s.n * s.groups, s.n * s.groups * p.taps * p.pixels / VL, [&](int64_t task) {
        float* lowered = scratch_of<float>(Slot::conv_lowered, p.lowered_floats());
        float* padded = scratch_of<float>(Slot::conv_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::conv_offsets, 2 * p.taps);
        p.offsets(offset);
        p.fill(x + task * p.c * s.h * s.w, 0, padded, lowered);
        each[task] = 0;
        for (int64_t t = 0; t < p.taps; ++t) {
            uint32_t top;
            quant_kernels.row_maxima(q.plan, {lowered + offset[t], 1, 0, p.pixels, needs_whole(q)},
                                     &top);
            each[task] = top > each[task] ? top : each[task];
        }
    });
    return largest(each, s.n * s.groups);
}

}  // namespace EXTENSOR_ISA
