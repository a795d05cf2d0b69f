// Packed weights in float32 and, where they are bfloat16 times one factor and the CPU
// multiplies those faster, in pairs: for conv.cpp, quantized_conv.cpp and clipped_conv.cpp.
#pragma once

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kFewOutputs = 8;  // fewer do not repay the packing of pairs

// What `pack_weights` packed for `o` outputs of each group.
struct PackedWeights {
    int64_t o, taps;
    const float* floats;
    uint32_t* words = nullptr;  // of pairs, or null
    Bf16Extent extent;
    float factor = 1;                           // of what they are multiplied by
    const PairKernels* kernels = pair_kernels;  // another thread may change the level meanwhile

    // `pairs`: what they are multiplied by may be multiples of one factor.
    PackedWeights(int64_t groups, int64_t o, int64_t taps, const float* floats, bool pairs = true)
        : o(o), taps(taps), floats(floats) {
        if (!pairs || !kernels || VL != 16 || o < kFewOutputs) return;
        words = threads::scratch_of<uint32_t>(kPairWords, groups * o * ceil_div(taps, 2));
        extent = kernels->pack_weights(groups, o, taps, floats, words);
        if (!extent.exact) words = nullptr;
    }

    // For products with parts of an array.
    void find_factor(int64_t count, const float* x) {
        if (words) factor = kernels->factor(count, x);
        if (factor == 0) words = nullptr;
    }

    // Rows of `count` pixels, `stride` floats apart in an array up to `end`. Copied where whole
    // vectors end beyond it, or where all outputs read them, which want them close together.
    TapRows rows(const float* from, int64_t stride, int64_t count, const float* end,
                 int64_t* offset, float* copy) const {
        const bool in_place = words && from + (taps - 1) * stride + round_up(count, VL) <= end;
        for (int64_t t = 0; t < taps; ++t) {
            offset[t] = t * (in_place ? stride : count);
            if (!in_place)
                std::memcpy(copy + t * count, from + t * stride, static_cast<size_t>(count) * 4);
        }
        return {in_place ? from : copy, offset, taps, count};
    }

    // out (o, pixels) = bias + a group's weights times m, as `multiply` in lowered_images.hpp.
    void multiply(int64_t group, const TapRows& m, const float* bias, float* out,
                  int64_t out_stride) const {
        multiply(group, m, factor, bias, out, out_stride);
    }

    // The same of values that are multiples of `of`.
    void multiply(int64_t group, const TapRows& m, float of, const float* bias, float* out,
                  int64_t out_stride) const {
        const float* own = floats + group * o * taps;
        if (!words) return EXTENSOR_ISA::multiply(o, m, own, bias, out, out_stride);
        constexpr int64_t kColumns = TV * VL;
        for (int64_t first = 0; first < m.pixels; first += kColumns) {
            TapRows part = {m.x + first, m.offset, m.taps, least(kColumns, m.pixels - first)};
            if (kernels->multiply(o, part, of, words + group * o * ceil_div(taps, 2), extent, bias,
                                  out + first, out_stride))
                continue;
            part.pixels = m.pixels - first;  // other columns are probably no bfloat16 either
            return EXTENSOR_ISA::multiply(o, part, own, bias, out + first, out_stride);
        }
    }
};

}  // namespace EXTENSOR_ISA
