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

EXTENSOR_KERNELS(ConvKernels, conv_kernels)
EXTENSOR_KERNELS(PoolKernels, pool_kernels)
EXTENSOR_KERNELS(QuantConvKernels, quant_conv_kernels)
EXTENSOR_KERNELS(ClippedConvKernels, clipped_conv_kernels)
