// Convolution and its gradients on float32 NCHW arrays, as implicit GEMMs (lowered_images.hpp).
//
// The order of additions depends on shapes, and on whether values are bfloat16 times one factor
// (packed_weights.hpp), never on threads. The compiler may fuse multiply and add in this file: its
// sums are compared within a bound, not by bytes.

#include "conv_pool/col2im.hpp"
#include "conv_pool/packed_weights.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

// How many images to lower side by side, so that there are `pixels` pixels at least.
int64_t side_by_side(int64_t n, int64_t one, int64_t pixels) {
    return most(1, least(n, ceil_div(pixels, most(one, 1))));
}

// Where an output pixel goes: steps in floats from image to image, channel to channel, and so on.
struct OutputLayout {
    float* at;
    int64_t image, channel, row, column;
};

void scatter(const LoweredImages& p, int64_t o, const float* from, const OutputLayout& to) {
    for (int64_t i = 0; i < o; ++i) {
        for (int64_t y = 0; y < p.ho; ++y) {
            for (int64_t n = 0; n < p.images; ++n, from += p.wo) {
                float* row = to.at + n * to.image + i * to.channel + y * to.row;
                if (to.column == 1)
                    std::memcpy(row, from, static_cast<size_t>(p.wo) * 4);
                else
                    for (int64_t x = 0; x < p.wo; ++x) row[x * to.column] = from[x];
            }
        }
    }
}

// The correlation of every image and group of x (n, groups, c, h, w), as `p` says for one image,
// with o kernels a group; `bias` has groups * o values, or is null.
void correlate(const LoweredImages& p, int64_t n, int64_t groups, int64_t o, const float* x,
               const Weights& w, const float* bias, const OutputLayout& y) {
    const int64_t image = p.c * p.h * p.w, batched = side_by_side(n, p.ho * p.wo, TV * VL);
    const Split batches(n, batched);
    int64_t* offset = scratch_of<int64_t>(Slot::offsets, 2 * p.taps);
    float* packed = scratch_of<float>(Slot::weights, groups * o * (p.taps + 1));
    float* starts = packed + groups * o * p.taps;
    for (int64_t i = 0; i < groups * o; ++i) starts[i] = bias ? bias[i] : 0.0f;
    pack_weights(p, groups, o, w, packed);
    PackedWeights weights(groups, o, p.taps, packed);
    weights.find_factor(n * groups * image, x);
    // `batches` has parts of two sizes at most, and offsets depend on the size.
    auto sized = [&](int64_t count) {
        LoweredImages q = p;
        q.set_images(count);
        return q;
    };
    const int64_t small = batches.total / batches.parts;
    sized(small).offsets(offset);
    sized(small + 1).offsets(offset + p.taps);

    threads::run(
        batches.parts * groups, n * groups * o * p.taps * p.ho * p.wo / VL, [&](int64_t task) {
            const int64_t batch = task / groups, g = task % groups;
            const LoweredImages q = sized(batches.size(batch));
            float* lowered = scratch_of<float>(Slot::lowered, q.lowered_floats());
            float* padded = scratch_of<float>(Slot::padded, q.padded_floats());
            const int64_t first = batches.start(batch);
            q.fill(x + (first * groups + g) * image, groups * image, padded, lowered);
            OutputLayout to = y;
            to.at += first * y.image + g * o * y.channel;
            const bool direct = q.images == 1 && y.column == 1 && y.row == q.wo;
            float* out = direct ? to.at : scratch_of<float>(Slot::partial, o * q.pixels);
            const int64_t stride = direct ? y.channel : q.pixels;
            weights.multiply(g, {lowered, offset + (q.images - small) * p.taps, q.taps, q.pixels},
                             starts + g * o, out, stride);
            if (!direct) scatter(q, o, out, to);
        });
}

void conv(const Conv& s, const float* x, const float* w, const float* bias, float* y) {
    const LoweredImages p(1, s.with_channels(s.c / s.groups));
    const int64_t pixels = s.ho * s.wo, outs = s.o / s.groups;
    correlate(p, s.n, s.groups, outs, x, {w, outs * p.taps, p.taps, s.kh * s.kw, s.kw, 1}, bias,
              {y, s.o * pixels, pixels, s.wo, 1});
}

// The kernel elements that reach pixel `phase` of every `stride`: they are first, first + step,
// ...; output phase + stride * q reads g at base + q - element_number * dilation.
struct Phase {
    int64_t first = 0, step = 1, count = 0, base = 0, dilation = 1;

    Phase(int64_t phase, int64_t stride, int64_t pad, int64_t kernel, int64_t d) {
        int64_t common = stride;
        for (int64_t rest = d; rest;) {
            const int64_t next = common % rest;
            common = rest, rest = next;
        }
        step = stride / common, dilation = d / common;
        for (first = 0; first < kernel && (phase + pad - first * d) % stride != 0;) ++first;
        if (first == kernel) return;
        count = ceil_div(kernel - first, step);
        base = (phase + pad - first * d) / stride;
    }
};

constexpr int64_t kColumns = TV * VL;
constexpr int64_t kAddition = 24;  // multiply-adds that cost as much as adding a value to a pixel

// Whether the gradient of the patches, summed back to the pixels, takes fewer operations than a
// correlation, which multiplies zeros where a window leaves the image: long sums, few windows.
bool is_shorter_by_patches(const Conv& s) {
    const int64_t outs = s.o / s.groups;
    return s.ho * s.wo * s.sh * s.sw * (outs + kAddition) < s.h * s.w * outs;
}

void grad_x_by_patches(const Conv& s, const float* g, const float* w, float* gx) {
    const int64_t outs = s.o / s.groups, ins = s.c / s.groups;
    const LoweredImages p(1, s.with_channels(ins));
    LoweredImages outputs = p;  // of the product: its sums run over the output channels
    outputs.c = outputs.taps = outs, outputs.kh = outputs.kw = 1;
    float* packed = scratch_of<float>(Slot::weights, s.o * p.taps + p.taps);
    float* zeros = packed + s.o * p.taps;
    std::memset(zeros, 0, static_cast<size_t>(p.taps) * 4);
    pack_weights(outputs, s.groups, p.taps, {w, outs * p.taps, 1, p.taps, 0, 0}, packed);
    PackedWeights weights(s.groups, p.taps, outs, packed);
    weights.find_factor(s.n * s.o * p.pixels, g);

    threads::run(s.n * s.groups, s.n * s.o * p.taps * p.pixels / VL, [&](int64_t task) {
        const int64_t group = task % s.groups;
        float* values = scratch_of<float>(Slot::partial, p.taps * kColumns + kColumns);
        float* gradients = scratch_of<float>(Slot::lowered, outs * kColumns + kColumns);
        int64_t* rows = scratch_of<int64_t>(Slot::offsets, outs);
        const float* from = g + task * outs * p.pixels;
        float* image = gx + task * ins * s.h * s.w;
        std::memset(image, 0, static_cast<size_t>(ins * s.h * s.w) * 4);
        for (int64_t first = 0; first < p.pixels; first += kColumns) {
            const int64_t count = least(kColumns, p.pixels - first);
            const TapRows m = weights.rows(from + first, p.pixels, count, g + s.n * s.o * p.pixels,
                                           rows, gradients);
            weights.multiply(group, m, zeros, values, count);
            add_patches(p, first, count, values, image);
        }
    });
}

// Pixels of one phase of the stride are a correlation of g with some of the kernel's elements,
// flipped.
void conv_grad_x(const Conv& s, const float* g, const float* w, float* gx) {
    if (is_shorter_by_patches(s)) return grad_x_by_patches(s, g, w, gx);
    const int64_t outs = s.o / s.groups, ins = s.c / s.groups, kernel = s.kh * s.kw;
    if (s.sh > 1 || s.sw > 1) std::memset(gx, 0, static_cast<size_t>(s.n * s.c * s.h * s.w) * 4);
    for (int64_t y = 0; y < least(s.sh, s.h); ++y) {
        const Phase vertical(y, s.sh, s.ph, s.kh, s.dh);
        for (int64_t x = 0; x < least(s.sw, s.w); ++x) {
            const Phase horizontal(x, s.sw, s.pw, s.kw, s.dw);
            if (!vertical.count || !horizontal.count) continue;
            Conv part = s.with_channels(outs);
            part.h = s.ho, part.w = s.wo;
            part.ho = ceil_div(s.h - y, s.sh), part.wo = ceil_div(s.w - x, s.sw);
            part.kh = vertical.count, part.kw = horizontal.count, part.sh = part.sw = 1;
            part.dh = vertical.dilation, part.dw = horizontal.dilation;
            part.ph = (part.kh - 1) * part.dh - vertical.base;
            part.pw = (part.kw - 1) * part.dw - horizontal.base;
            const LoweredImages p(1, part);
            const float* last = w + (vertical.first + (part.kh - 1) * vertical.step) * s.kw +
                                horizontal.first + (part.kw - 1) * horizontal.step;
            correlate(p, s.n, s.groups, ins, g,
                      {last, outs * ins * kernel, kernel, ins * kernel, -vertical.step * s.kw,
                       -horizontal.step},
                      nullptr, {gx + y * s.w + x, s.c * s.h * s.w, s.h * s.w, s.sh * s.w, s.sw});
        }
    }
}

constexpr int64_t kLongRun = 512;    // pixels; summing lanes costs as much as 4 vectors
constexpr int64_t kChunk = 1 << 16;  // lowered floats of a task, which reads them o / WO times
constexpr int64_t kTasks = 16;

// A task sums over one batch of images for some channels of one group. Where few channels leave few
// tasks there are several batches, whose sums are added in their order.
void conv_grad_w(const Conv& s, const float* g, const float* x, float* gw) {
    const int64_t ins = s.c / s.groups, outs = s.o / s.groups, kernel = s.kh * s.kw;
    const int64_t pixels = s.ho * s.wo, image = s.h * s.w, weights = s.o * ins * kernel;
    const int64_t batched = side_by_side(s.n, pixels, kLongRun);
    auto lowered_of = [&](int64_t images, int64_t c) {
        return LoweredImages(images, s.with_channels(c));
    };
    const Split chunks(ins, most(1, kChunk / lowered_of(batched, 1).channel_floats()));
    const int64_t parts = chunks.parts * s.groups;
    const Split batches(ceil_div(s.n, batched),
                        ceil_div(ceil_div(s.n, batched), most(1, ceil_div(kTasks, parts))));
    float* partial =
        batches.parts == 1 ? gw : scratch_of<float>(Slot::weights, batches.parts * weights);

    threads::run(parts * batches.parts, s.n * weights * pixels / VL, [&](int64_t task) {
        const int64_t batch = task / parts, group = task % parts / chunks.parts;
        const int64_t c0 = chunks.start(task % chunks.parts), c = chunks.size(task % chunks.parts);
        float* out = partial + batch * weights + group * outs * ins * kernel + c0 * kernel;
        const LoweredImages largest = lowered_of(batched, c);
        float* lowered = scratch_of<float>(Slot::lowered, largest.lowered_floats());
        float* padded = scratch_of<float>(Slot::padded, largest.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::offsets, largest.taps);
        float* gathered = scratch_of<float>(Slot::partial, outs * largest.pixels);
        for (int64_t o = 0; o < outs; ++o)
            std::memset(out + o * ins * kernel, 0, static_cast<size_t>(c * kernel) * 4);
        const int64_t end = least(s.n, batches.start(batch + 1) * batched);
        for (int64_t n = batches.start(batch) * batched; n < end; n += batched) {
            const LoweredImages p = lowered_of(least(batched, end - n), c);
            p.offsets(offset);
            p.fill(x + ((n * s.groups + group) * ins + c0) * image, s.c * image, padded, lowered);
            const float* grad = g + (n * s.o + group * outs) * pixels;
            if (p.images > 1) {  // into the order (row, image, column)
                float* to = gathered;
                for (int64_t o = 0; o < outs; ++o)
                    for (int64_t y = 0; y < s.ho; ++y)
                        for (int64_t i = 0; i < p.images; ++i, to += s.wo)
                            std::memcpy(to, grad + (i * s.o + o) * pixels + y * s.wo,
                                        static_cast<size_t>(s.wo) * 4);
                grad = gathered;
            }
            correlate_runs(outs, {lowered, offset, p.taps, p.pixels}, grad, p.pixels, out,
                           ins * kernel);
        }
    });
    if (batches.parts == 1) return;
    std::memset(gw, 0, static_cast<size_t>(weights) * 4);
    for (int64_t b = 0; b < batches.parts; ++b)
        for (int64_t i = 0; i < weights; ++i) gw[i] += partial[b * weights + i];
}

}  // namespace

extern const ConvKernels conv_kernels;
const ConvKernels conv_kernels = {conv, conv_grad_x, conv_grad_w};

}  // namespace EXTENSOR_ISA
