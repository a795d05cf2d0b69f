// The kernels of gradient reduction, as a table. Lengths are multiples of kReductionBlock; the
// generic methods (extensor/backends/generic/reduction.py) define every bit.
#pragma once

#include <cstdint>

#include "common/levels.hpp"
#include "quantize/kernels.hpp"

constexpr int kReductionBlock = 32;
constexpr int kNonfinite = 255;  // the anchor or exponent of a block with NaN or infinity

// One rank's integers under block exponents.
struct MxintJob {
    int64_t n;
    const float* x;
    const uint8_t* exponents;
    const QuantStream* stream;  // null: to nearest even
    uint32_t first_block;       // its number in the stream
    float* residual;            // x minus what the codes say, or null
};

struct ReductionKernels {
    // The bits of each block's greatest magnitude.
    void (*block_max)(int64_t n, const float* x, uint32_t* out);
    // The sum of each block's squares; n may be any number.
    void (*block_square_sums)(int64_t n, const float* x, double* out);
    void (*fixed_point)(int64_t n, const float* x, const uint8_t* anchors, int64_t* out);
    // `limbs`, (3, n), are raised from the anchors `before` to `after`.
    void (*add_limbs)(int64_t n, const float* x, const uint8_t* before, const uint8_t* after,
                      int32_t* limbs);
    void (*limb_total)(int64_t n, const int32_t* limbs, const uint8_t* before, const uint8_t* after,
                       int64_t* out);
    void (*fixed_point_mean)(int64_t n, const int64_t* total, const uint8_t* anchors,
                             double divisor, float* out);
    void (*mxint8)(const MxintJob&, int8_t* codes);
    void (*mxint16)(const MxintJob&, int16_t* codes);
    // codes (ranks, n), exponents (ranks, n / 32)
    void (*mxint8_mean)(int64_t n, int64_t ranks, const int8_t* codes, const uint8_t* exponents,
                        double divisor, float* out);
    void (*mxint16_mean)(int64_t n, int64_t ranks, const int16_t* codes, const uint8_t* exponents,
                         double divisor, float* out);
};

EXTENSOR_KERNELS(ReductionKernels, reduction_kernels)
