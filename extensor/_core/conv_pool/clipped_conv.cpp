// The gradient of a convolution in its images where the patches' quantizer clips (Quartet): per
// chunk of patches, the product's gradient, masked where the patch was clipped, out of the
// transform's domain, and summed back to the pixels.

#include "conv_pool/quantized_patches.hpp"

namespace EXTENSOR_ISA {
namespace {

// Adds gradients of `count` patches from pixel `first` on, (taps, count), to an image's.
void add_patches(const LoweredImages& p, int64_t first, int64_t count, const float* patches,
                 float* image) {
    for (int64_t at = 0, length; at < count; at += length) {
        const int64_t y = (first + at) / p.wo, x = (first + at) % p.wo;
        length = least(count - at, p.wo - x);
        const float* from = patches + at;
        for (int64_t c = 0; c < p.c; ++c) {
            for (int64_t i = 0; i < p.kh; ++i) {
                const int64_t row = y * p.sh - p.ph + i * p.dh;
                const bool inside = row >= 0 && row < p.h;
                float* to = image + (c * p.h + row) * p.w;
                for (int64_t j = 0; j < p.kw; ++j, from += count) {
                    if (!inside) continue;
                    const int64_t column = x * p.sw - p.pw + j * p.dw;  // of the run's first patch
                    const int64_t begin = column < 0 ? ceil_div(-column, p.sw) : 0;
                    const int64_t end = least(length, ceil_div(p.w - column, p.sw));
                    for (int64_t k = begin; k < end; ++k) to[column + k * p.sw] += from[k];
                }
            }
        }
    }
}

// g is (o, n * pixels) and w (o, padded taps), of values; o with a transform's padding.
void grad_x(const Conv& s, const PatchQuant& q, const float* g, const float* w, const float* x,
            float* gx) {
    const LoweredImages p(1, s);
    LoweredImages outputs = p;  // of the product: its sums run over the output channels
    outputs.c = outputs.taps = s.o, outputs.kh = outputs.kw = 1;
    float* packed = scratch_of<float>(Slot::conv_weights, q.padded * (s.o + 1));
    float* zeros = packed + q.padded * s.o;
    std::memset(zeros, 0, static_cast<size_t>(q.padded) * 4);
    pack_weights(outputs, 1, q.padded, {w, 0, 1, q.padded, 0, 0}, packed);
    const uint32_t whole = needs_whole(q) || q.per_tensor ? patch_maximum(s, p, q, x) : 0;

    threads::run(s.n, s.n * s.o * q.padded * p.pixels, [&](int64_t n) {
        float* values = scratch_of<float>(Slot::conv_values, q.padded * kColumns + kColumns);
        float* gradients = scratch_of<float>(Slot::conv_gradients, s.o * kColumns + kColumns);
        int64_t* rows = scratch_of<int64_t>(Slot::conv_rows, s.o);
        float* image = gx + n * s.c * s.h * s.w;
        std::memset(image, 0, static_cast<size_t>(s.c * s.h * s.w) * 4);
        visit_image(s, p, n, x, [&](float* patches, int64_t first, int64_t count) {
            for (int64_t o = 0; o < s.o; ++o) {
                rows[o] = o * count;
                std::memcpy(gradients + o * count, g + (o * s.n + n) * p.pixels + first,
                            static_cast<size_t>(count) * 4);
            }
            multiply(q.padded, {gradients, rows, s.o, count}, packed, zeros, values, count);
            QuantJob job = patch_job(patches, values, 1, p.taps, count, q.tile_length);
            job.padded = q.padded;
            if (q.per_tensor) job.known = &whole, job.tile_length = q.padded;
            if (needs_whole(q)) job.whole = &whole;
            quant_kernels.clip_gradient(q.plan, job);
            add_patches(p, first, count, values, image);
        });
    });
}

}  // namespace

extern const ClippedConvKernels clipped_conv_kernels;
const ClippedConvKernels clipped_conv_kernels = {grad_x};

}  // namespace EXTENSOR_ISA
