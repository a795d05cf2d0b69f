// Convolution and its weight gradient with quantized patches; im2col never exists as a whole.
//
// The patches of a group are a matrix of (taps, N * Ho * Wo) values. Blocks run columnwise where
// the product contracts over taps (forward), rowwise where it contracts over pixels (weight
// gradient). A task gathers a part of the matrix that fits the cache, lets the quantizer round it,
// and multiplies. Rounding is to nearest: a block's values do not depend on where in the matrix it
// is.

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {

extern const QuantKernels quant_kernels;

namespace {

using threads::scratch_of;
using threads::Slot;

QuantJob patch_job(const float* x, float* values, int64_t rows, int64_t length, int64_t inner,
                   int64_t tile_length) {
    QuantJob job{};
    job.x = x, job.type = FloatType::float32, job.values = values;
    job.outer = 1, job.rows = rows, job.length = job.padded = length, job.inner = inner;
    job.tile_rows = 1, job.tile_length = tile_length;
    return job;
}

void add_counts(const int64_t* each, int64_t tasks, int64_t* counts) {
    counts[0] = counts[1] = 0;
    for (int64_t i = 0; i < tasks; ++i) counts[0] += each[2 * i], counts[1] += each[2 * i + 1];
}

// w is (groups, o, taps) of values; counts: saturated, flushed.
void conv(const Conv& s, const QuantPlan& plan, int64_t tile_length, const float* x, const float* w,
          const float* bias, float* y, int64_t* counts) {
    constexpr int64_t kColumns = TV * VL;
    const int64_t ins = s.c / s.groups, outs = s.o / s.groups, pixels = s.ho * s.wo;
    const LoweredImages p(1, s.with_channels(ins));
    float* packed = scratch_of<float>(Slot::conv_weights, s.o * (p.taps + 1));
    float* starts = packed + s.o * p.taps;
    for (int64_t i = 0; i < s.o; ++i) starts[i] = bias ? bias[i] : 0.0f;
    pack_weights(p, s.groups, outs, {w, outs * p.taps, p.taps, s.kh * s.kw, s.kw, 1}, packed);
    int64_t* each = scratch_of<int64_t>(Slot::conv_counts, 2 * s.n * s.groups);

    threads::run(s.n * s.groups, s.n * s.o * p.taps * pixels, [&](int64_t task) {
        const int64_t n = task / s.groups, g = task % s.groups;
        float* lowered = scratch_of<float>(Slot::conv_lowered, p.lowered_floats());
        float* padded = scratch_of<float>(Slot::conv_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::conv_offsets, 2 * p.taps);
        int64_t* dense = offset + p.taps;
        float* patches = scratch_of<float>(Slot::conv_patches, p.taps * kColumns + kColumns);
        float* values = scratch_of<float>(Slot::conv_values, p.taps * kColumns + kColumns);
        p.offsets(offset);
        p.fill(x + task * ins * s.h * s.w, 0, padded, lowered);
        each[2 * task] = each[2 * task + 1] = 0;
        float* out = y + (n * s.o + g * outs) * pixels;
        for (int64_t first = 0; first < pixels; first += kColumns) {
            const int64_t count = least(kColumns, pixels - first);
            for (int64_t t = 0; t < p.taps; ++t) {
                const float* from = lowered + offset[t] + first;
                float* to = patches + t * count;  // a whole tile; the next overwrites the excess
                for (int v = 0; v < TV; ++v) store(to + v * VL, load(from + v * VL));
                dense[t] = t * count;
            }
            QuantJob job = patch_job(patches, values, 1, p.taps, count, tile_length);
            quant_kernels.quantize(plan, {}, job);
            each[2 * task] += job.saturated, each[2 * task + 1] += job.flushed;
            multiply(outs, {values, dense, p.taps, count}, packed + g * outs * p.taps,
                     starts + g * outs, out + first, pixels);
        }
    });
    add_counts(each, s.n * s.groups, counts);
}

constexpr int64_t kChunkFloats = 1 << 15;  // floats of patches that a task quantizes at a time
constexpr int64_t kLeastColumns = 512, kTasks = 16;

// g is (groups, o, N * Ho * Wo) of values. A task takes some channels of one group and a run of
// pixels; the sums of several runs are added in their order.
void grad_w(const Conv& s, const QuantPlan& plan, int64_t tile_length, const float* g,
            const float* x, float* gw, int64_t* counts) {
    const int64_t ins = s.c / s.groups, outs = s.o / s.groups, kernel = s.kh * s.kw;
    const int64_t pixels = s.ho * s.wo, all = s.n * pixels, weights = s.o * ins * kernel;
    const int64_t columns =
        least(ceil_div(kLeastColumns, tile_length), ceil_div(all, tile_length)) * tile_length;
    const Split chunks(ins, most(1, kChunkFloats / (columns * kernel)));
    const int64_t parts = chunks.parts * s.groups, steps = ceil_div(all, columns);
    const Split runs(steps, ceil_div(steps, most(1, ceil_div(kTasks, parts))));
    float* partial =
        runs.parts == 1 ? gw : scratch_of<float>(Slot::conv_weights, runs.parts * weights);
    int64_t* each = scratch_of<int64_t>(Slot::conv_counts, 2 * parts * runs.parts);

    threads::run(parts * runs.parts, weights * all, [&](int64_t task) {
        const int64_t run = task / parts, group = task % parts / chunks.parts;
        const int64_t c0 = chunks.start(task % chunks.parts), c = chunks.size(task % chunks.parts);
        const LoweredImages p(1, s.with_channels(c));
        float* lowered = scratch_of<float>(Slot::conv_lowered, p.lowered_floats());
        float* padded = scratch_of<float>(Slot::conv_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::conv_offsets, 2 * p.taps);
        int64_t* dense = offset + p.taps;
        float* patches = scratch_of<float>(Slot::conv_patches, p.taps * columns);
        float* values = scratch_of<float>(Slot::conv_values, p.taps * columns + VL);
        float* out = partial + run * weights + (group * outs * ins + c0) * kernel;
        p.offsets(offset);
        for (int64_t o = 0; o < outs; ++o)
            std::memset(out + o * ins * kernel, 0, static_cast<size_t>(p.taps) * 4);
        each[2 * task] = each[2 * task + 1] = 0;
        int64_t held = -1;  // the image in `lowered`
        const int64_t end = least(all, runs.start(run + 1) * columns);
        for (int64_t first = runs.start(run) * columns; first < end; first += columns) {
            const int64_t count = least(columns, end - first);
            for (int64_t at = 0; at < count;) {
                const int64_t n = (first + at) / pixels, pixel = (first + at) % pixels;
                const int64_t length = least(count - at, pixels - pixel);
                if (n != held)
                    p.fill(x + ((n * s.groups + group) * ins + c0) * s.h * s.w, 0, padded, lowered);
                held = n;
                for (int64_t t = 0; t < p.taps; ++t)
                    std::memcpy(patches + t * count + at, lowered + offset[t] + pixel,
                                static_cast<size_t>(length) * 4);
                at += length;
            }
            QuantJob job = patch_job(patches, values, p.taps, count, 1, tile_length);
            quant_kernels.quantize(plan, {}, job);
            each[2 * task] += job.saturated, each[2 * task + 1] += job.flushed;
            for (int64_t t = 0; t < p.taps; ++t) dense[t] = t * count;
            correlate_runs(outs, {values, dense, p.taps, count}, g + group * outs * all + first,
                           all, out, ins * kernel);
        }
    });
    add_counts(each, parts * runs.parts, counts);
    if (runs.parts == 1) return;
    std::memset(gw, 0, static_cast<size_t>(weights) * 4);
    for (int64_t r = 0; r < runs.parts; ++r)
        for (int64_t i = 0; i < weights; ++i) gw[i] += partial[r * weights + i];
}

}  // namespace

extern const QuantConvKernels quant_conv_kernels;
const QuantConvKernels quant_conv_kernels = {conv, grad_w};

}  // namespace EXTENSOR_ISA
