// The kernels of convolution and pooling, as tables.
#pragma once

#include <cstdint>

#include "common/levels.hpp"
#include "quantize/kernels.hpp"

// A convolution or pooling: (n, c, h, w) with a kernel of (kh, kw) -> (n, o, ho, wo).
struct Conv {
    int64_t n, c, h, w, o, groups, kh, kw, sh, sw, ph, pw, dh, dw, ho, wo;

    Conv with_channels(int64_t count) const {
        Conv s = *this;
        s.c = count;
        return s;
    }
};

struct ConvKernels {
    // `bias`, one per output channel, may be null.
    void (*conv)(const Conv&, const float* x, const float* w, const float* bias, float* y);
    void (*grad_x)(const Conv&, const float* g, const float* w, float* gx);
    void (*grad_w)(const Conv&, const float* g, const float* x, float* gw);
};

struct PoolKernels {
    void (*max_pool)(const Conv&, const float* x, float* y, int32_t* index);
    // False if an index lies outside the image.
    bool (*max_pool_grad)(const Conv&, const float* g, const int32_t* index, float* gx);
};

// How patches are quantized: in blocks of `tile_length`, columnwise for the forward product and
// rowwise for the weight gradient, `padded` values a column or row. `per_tensor`: one scale for
// all.
struct PatchQuant {
    QuantPlan plan;
    QuantStream stream;
    int64_t tile_length, padded;
    bool per_tensor;
};

// Convolutions whose patches are quantized first; see quantized_conv.cpp. The three `counts` are of
// values that were saturated, flushed, and changed by rebasing.
struct QuantConvKernels {
    void (*conv)(const Conv&, const PatchQuant&, const float* x, const float* w, const float* bias,
                 float* y, int64_t* counts);
    // `first`, which may be null, quantizes the patches before, along their taps; gw is then of the
    // taps' padded length.
    void (*grad_w)(const Conv&, const PatchQuant&, const PatchQuant* first, const float* g,
                   const float* x, float* gw, int64_t* counts);
};

// The gradient of the images where the patches' quantizer clips; see clipped_conv.cpp.
struct ClippedConvKernels {
    void (*grad_x)(const Conv&, const PatchQuant&, const float* g, const float* w, const float* x,
                   float* gx);
};

// A matrix of (taps, pixels) without a copy of it: row t begins at x + offset[t].
struct TapRows {
    const float* x;
    const int64_t* offset;
    int64_t taps, pixels;
};

// Magnitudes of bfloat16 values as bits, the least but zero and the largest; `exact`: the floats
// they come from are those values times `factor`, NVFP4's within a relative 2^-21.
struct Bf16Extent {
    uint32_t least = 0x10000, most = 0;
    bool exact = true;
    float factor = 1;
};

// Products of bfloat16 values times a factor of each side, two terms of a sum at a time; see
// bf16_pairs.cpp.
struct PairKernels {
    // Words of two taps, from what `pack_weights` in lowered_images.hpp packs.
    Bf16Extent (*pack_weights)(int64_t groups, int64_t o, int64_t taps, const float* packed,
                               uint32_t* words);
    // out (o, pixels) = bias + weights times m, of 64 pixels at most. False, and nothing is
    // written, if m's values are not bfloat16 times `factor` or a sum might leave float32's normal
    // range.
    bool (*multiply)(int64_t o, const TapRows& m, float factor, const uint32_t* words,
                     const Bf16Extent&, const float* bias, float* out, int64_t out_stride);
    Bf16Extent (*to_bf16)(int64_t count, const float* from, uint16_t* to);
    // out (o, taps) += g (o, pixels) times m, transposed; else false, likewise. Up to 32 values
    // after a row's part of g are read.
    bool (*correlate)(int64_t o, const TapRows& m, float factor, const uint16_t* g,
                      int64_t g_stride, const Bf16Extent&, float* out, int64_t out_stride);
    // The factor of which the first values are bfloat16 multiples; zero if there is none.
    float (*factor)(int64_t count, const float* x);
};

extern const PairKernels* pair_kernels;  // null where they are not faster than float32
void use_pair_kernels(bool use);         // called when the level of the products changes

EXTENSOR_KERNELS(ConvKernels, conv_kernels)
EXTENSOR_KERNELS(PoolKernels, pool_kernels)
EXTENSOR_KERNELS(QuantConvKernels, quant_conv_kernels)
EXTENSOR_KERNELS(ClippedConvKernels, clipped_conv_kernels)
