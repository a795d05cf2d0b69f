// The gradient of a convolution in its images where the patches' quantizer clips (Quartet): per
// chunk of patches, the product's gradient, masked where the patch was clipped, out of the
// transform's domain, and summed back to the pixels.

#include "conv_pool/col2im.hpp"
#include "conv_pool/packed_weights.hpp"
#include "conv_pool/quantized_patches.hpp"

namespace EXTENSOR_ISA {
namespace {

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
    PackedWeights weights(1, q.padded, s.o, packed);
    weights.find_factor(s.o * s.n * p.pixels, g);
    const uint32_t whole = needs_whole(q) || q.per_tensor ? patch_maximum(s, q, x) : 0;

    threads::run(s.n, s.n * s.o * q.padded * p.pixels, [&](int64_t n) {
        float* values = scratch_of<float>(Slot::conv_values, q.padded * kColumns + kColumns);
        float* gradients = scratch_of<float>(Slot::conv_gradients, s.o * kColumns + kColumns);
        int64_t* rows = scratch_of<int64_t>(Slot::conv_rows, s.o);
        float* image = gx + n * s.c * s.h * s.w;
        std::memset(image, 0, static_cast<size_t>(s.c * s.h * s.w) * 4);
        visit_image(s, p, n, x, [&](float* patches, int64_t first, int64_t count) {
            const TapRows m = weights.rows(g + n * p.pixels + first, s.n * p.pixels, count,
                                           g + s.o * s.n * p.pixels, rows, gradients);
            weights.multiply(0, m, zeros, values, count);
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
