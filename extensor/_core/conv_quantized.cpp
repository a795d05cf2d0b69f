// Convolutions whose patches are quantized on the way: im2col never exists as a whole.
//
// The patches of a group are a matrix of (taps, N * Ho * Wo) values. Blocks run down it where the
// product contracts over taps (forward), and along it where it contracts over pixels (the gradient
// in the weights). A task gathers a piece of the matrix that fits the cache, has the quantizer
// round it to values, and multiplies. Nearest rounding only: then a block's values do not depend on
// where in the matrix it is.

#include "planes.hpp"

namespace EXTENSOR_ISA {

extern const QuantKernels quant_kernels;

namespace {

using threads::scratch_of;
using threads::Slot;

QuantJob piece(const float* x, float* values, int64_t rows, int64_t length, int64_t inner,
               int64_t tile_length) {
    QuantJob job{};
    job.x = x, job.type = FloatType::float32, job.values = values;
    job.outer = 1, job.rows = rows, job.length = job.coded = length, job.inner = inner;
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
    const Planes p{1, ins, s.h, s.w, s.ho, s.wo, s.ph, s.pw, s};
    float* packed = scratch_of<float>(Slot::tile_weights, s.o * (p.taps + 1));
    float* starts = packed + s.o * p.taps;
    for (int64_t i = 0; i < s.o; ++i) starts[i] = bias ? bias[i] : 0.0f;
    pack_weights(p, s.groups, outs, {w, outs * p.taps, p.taps, s.kh * s.kw, s.kw, 1}, packed);
    int64_t* each = scratch_of<int64_t>(Slot::tile_counts, 2 * s.n * s.groups);

    threads::run(s.n * s.groups, s.n * s.o * p.taps * pixels, [&](int64_t task) {
        const int64_t n = task / s.groups, g = task % s.groups;
        float* planes = scratch_of<float>(Slot::tile_planes, p.plane_floats());
        float* padded = scratch_of<float>(Slot::tile_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::tile_offsets, 2 * p.taps);
        int64_t* dense = offset + p.taps;
        float* patches = scratch_of<float>(Slot::tile_patches, p.taps * kColumns + kColumns);
        float* values = scratch_of<float>(Slot::tile_values, p.taps * kColumns + kColumns);
        p.offsets(offset);
        p.fill(x + task * ins * s.h * s.w, 0, padded, planes);
        each[2 * task] = each[2 * task + 1] = 0;
        float* out = y + (n * s.o + g * outs) * pixels;
        for (int64_t first = 0; first < pixels; first += kColumns) {
            const int64_t count = least(kColumns, pixels - first);
            for (int64_t t = 0; t < p.taps; ++t) {
                const float* from = planes + offset[t] + first;
                float* to = patches + t * count;  // a whole tile: what spills is overwritten next
                for (int v = 0; v < TV; ++v) store(to + v * VL, load(from + v * VL));
                dense[t] = t * count;
            }
            QuantJob job = piece(patches, values, 1, p.taps, count, tile_length);
            quant_kernels.quantize(plan, {}, job);
            each[2 * task] += job.saturated, each[2 * task + 1] += job.flushed;
            multiply(outs, p.taps, count, values, dense, packed + g * outs * p.taps,
                     starts + g * outs, out + first, pixels);
        }
    });
    add_counts(each, s.n * s.groups, counts);
}

constexpr int64_t kPiece = 1 << 15;  // floats of patches that a task quantizes at a time
constexpr int64_t kLeastColumns = 512, kTasks = 16;

// g is (groups, o, N * Ho * Wo) of values. A task takes some channels of one group and a run of
// pixels; the sums of several runs are added in their order.
void grad_w(const Conv& s, const QuantPlan& plan, int64_t tile_length, const float* g,
            const float* x, float* gw, int64_t* counts) {
    const int64_t ins = s.c / s.groups, outs = s.o / s.groups, kernel = s.kh * s.kw;
    const int64_t pixels = s.ho * s.wo, all = s.n * pixels, weights = s.o * ins * kernel;
    const int64_t columns = least(ceil_div(kLeastColumns, tile_length), ceil_div(all, tile_length)) *
                            tile_length;
    const Split chunks(ins, most(1, kPiece / (columns * kernel)));
    const int64_t parts = chunks.parts * s.groups, steps = ceil_div(all, columns);
    const Split runs(steps, ceil_div(steps, most(1, ceil_div(kTasks, parts))));
    float* partial = runs.parts == 1 ? gw : scratch_of<float>(Slot::tile_weights, runs.parts * weights);
    int64_t* each = scratch_of<int64_t>(Slot::tile_counts, 2 * parts * runs.parts);

    threads::run(parts * runs.parts, weights * all, [&](int64_t task) {
        const int64_t run = task / parts, group = task % parts / chunks.parts;
        const int64_t c0 = chunks.start(task % chunks.parts), c = chunks.size(task % chunks.parts);
        const Planes p{1, c, s.h, s.w, s.ho, s.wo, s.ph, s.pw, s};
        float* planes = scratch_of<float>(Slot::tile_planes, p.plane_floats());
        float* padded = scratch_of<float>(Slot::tile_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::tile_offsets, 2 * p.taps);
        int64_t* dense = offset + p.taps;
        float* patches = scratch_of<float>(Slot::tile_patches, p.taps * columns);
        float* values = scratch_of<float>(Slot::tile_values, p.taps * columns + VL);
        float* out = partial + run * weights + (group * outs * ins + c0) * kernel;
        p.offsets(offset);
        for (int64_t o = 0; o < outs; ++o)
            std::memset(out + o * ins * kernel, 0, static_cast<size_t>(p.taps) * 4);
        each[2 * task] = each[2 * task + 1] = 0;
        int64_t held = -1;  // the image in `planes`
        const int64_t end = least(all, runs.start(run + 1) * columns);
        for (int64_t first = runs.start(run) * columns; first < end; first += columns) {
            const int64_t count = least(columns, end - first);
            for (int64_t at = 0; at < count;) {
                const int64_t n = (first + at) / pixels, pixel = (first + at) % pixels;
                const int64_t length = least(count - at, pixels - pixel);
                if (n != held)
                    p.fill(x + ((n * s.groups + group) * ins + c0) * s.h * s.w, 0, padded, planes);
                held = n;
                for (int64_t t = 0; t < p.taps; ++t)
                    std::memcpy(patches + t * count + at, planes + offset[t] + pixel,
                                static_cast<size_t>(length) * 4);
                at += length;
            }
            QuantJob job = piece(patches, values, p.taps, count, 1, tile_length);
            quant_kernels.quantize(plan, {}, job);
            each[2 * task] += job.saturated, each[2 * task + 1] += job.flushed;
            for (int64_t t = 0; t < p.taps; ++t) dense[t] = t * count;
            correlate_runs(outs, p.taps, count, g + group * outs * all + first, all, values, dense,
                           out, ins * kernel);
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
