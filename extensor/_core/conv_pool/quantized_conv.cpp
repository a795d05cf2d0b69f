// Convolution and its weight gradient with quantized patches; im2col never exists as a whole.
//
// The patches of a group are a matrix of (taps, N * Ho * Wo) values. Blocks run columnwise where
// the product contracts over taps (forward), rowwise where it contracts over pixels (weight
// gradient). A task gathers a part of the matrix that fits the cache, lets the quantizer round it,
// and multiplies. What scales need of the whole matrix, or of whole rows of it, a first pass finds;
// random bits are numbered as in the whole matrix.

#include <array>

#include "conv_pool/packed_weights.hpp"
#include "conv_pool/quantized_patches.hpp"

namespace EXTENSOR_ISA {
namespace {

// What was saturated, flushed and changed by rebasing.
using Lost = std::array<int64_t, 3>;

void add_counts(const Lost* each, int64_t tasks, int64_t* counts) {
    for (int i = 0; i < 3; ++i) counts[i] = 0;
    for (int64_t task = 0; task < tasks; ++task)
        for (int i = 0; i < 3; ++i) counts[i] += each[task][i];
}

QuantPlan not_rebased(const QuantPlan& plan) {
    QuantPlan plain = plan;
    plain.rebased = false;
    return plain;
}

// ---- rebased tiles ----

constexpr int64_t kSide = 128;

// A word for each rebased tile of a group's (taps, pixels).
struct RebasedTiles {
    int64_t down, across;

    RebasedTiles(int64_t taps, int64_t pixels)
        : down(ceil_div(taps, kSide)), across(ceil_div(pixels, kSide)) {}

    int64_t count() const { return down * across; }

    // body(part, number) for the parts of tiles that lie in some rows and columns of the matrix,
    // which are `columns` apart in `x`, and in `values` after them.
    template <class Body>
    void visit(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* x,
               float* values, Body body) const {
        for (int64_t r = 0, height; r < rows; r += height) {
            height = least(rows - r, kSide - (row + r) % kSide);
            for (int64_t c = 0, width; c < columns; c += width) {
                width = least(columns - c, kSide - (column + c) % kSide);
                const int64_t at = r * columns + c;
                body(RebasePart{x + at, FloatType::float32, values + at, height, width, columns},
                     (row + r) / kSide * across + (column + c) / kSide);
            }
        }
    }
};

void raise(uint32_t& word, uint32_t to) { word = to > word ? to : word; }

// Rounds quantized patches to their tiles' scales.
void rebase(const QuantPlan& plan, const RebasedTiles& tiles, const uint32_t* maxima, int64_t row,
            int64_t rows, int64_t column, int64_t columns, float* values, Lost& lost) {
    tiles.visit(row, rows, column, columns, values, values,
                [&](const RebasePart& part, int64_t number) {
                    const RebaseCounts c = quant_kernels.rebase_values(plan, maxima[number], part);
                    lost[1] += c.flushed, lost[2] += c.changed;
                });
}

// ---- forward ----

// The maxima of the rebased tiles of each group.
const uint32_t* rebased_maxima(const Conv& s, const LoweredImages& p, const PatchQuant& q,
                               const RebasedTiles& tiles, const float* x) {
    // Images share tiles: each has words of its own for those that it touches.
    const int64_t local = p.pixels / kSide + 2, mine = tiles.down * local;
    const int64_t total = s.groups * tiles.count(), each = s.n * s.groups * mine;
    uint32_t* maxima = scratch_of<uint32_t>(Slot::conv_maxima, total + each);
    std::memset(maxima, 0, static_cast<size_t>(total + each) * 4);
    threads::run(s.n * s.groups, s.n * s.groups * p.taps * p.pixels, [&](int64_t task) {
        const int64_t start = task / s.groups * p.pixels;
        uint32_t* words = maxima + total + task * mine;
        visit_image(s, p, task, x, [&](float* patches, int64_t first, int64_t count) {
            tiles.visit(
                0, p.taps, start + first, count, patches, patches,
                [&](const RebasePart& part, int64_t number) {
                    const int64_t to =
                        number / tiles.across * local + number % tiles.across - start / kSide;
                    raise(words[to], quant_kernels.rebase_maximum(part, q.tile_length, false));
                });
        });
    });
    for (int64_t task = 0; task < s.n * s.groups; ++task) {
        const int64_t first = task / s.groups * p.pixels / kSide;
        const uint32_t* words = maxima + total + task * mine;
        for (int64_t i = 0; i < mine; ++i)
            if (first + i % local < tiles.across)
                raise(maxima[(task % s.groups * tiles.down + i / local) * tiles.across + first +
                             i % local],
                      words[i]);
    }
    return maxima;
}

// w is (groups, o, padded taps) of values; counts: see `Lost`.
void conv(const Conv& s, const PatchQuant& q, const float* x, const float* w, const float* bias,
          float* y, int64_t* counts) {
    const int64_t ins = s.c / s.groups, outs = s.o / s.groups;
    const LoweredImages p(1, s.with_channels(ins));
    LoweredImages coded = p;  // of the product: a transform may have padded the taps
    coded.c = coded.taps = q.padded, coded.kh = coded.kw = 1;
    float* packed = scratch_of<float>(Slot::conv_weights, s.o * (q.padded + 1));
    float* starts = packed + s.o * q.padded;
    for (int64_t i = 0; i < s.o; ++i) starts[i] = bias ? bias[i] : 0.0f;
    pack_weights(coded, s.groups, outs, {w, outs * q.padded, q.padded, 1, 0, 0}, packed);
    const PackedWeights weights(s.groups, outs, q.padded, packed, has_factor(q.plan));
    Lost* each = scratch_of<Lost>(Slot::conv_counts, s.n * s.groups);
    const QuantPlan plan = not_rebased(q.plan);
    const RebasedTiles tiles(p.taps, s.n * p.pixels);
    const uint32_t* maxima = q.plan.rebased ? rebased_maxima(s, p, q, tiles, x) : nullptr;
    uint32_t known[kColumns];
    known[0] = needs_whole(q) || q.per_tensor ? patch_maximum(s, q, x) : 0;
    for (int64_t i = 1; i < kColumns; ++i) known[i] = known[0];

    threads::run(s.n * s.groups, s.n * s.o * p.taps * p.pixels, [&](int64_t task) {
        const int64_t n = task / s.groups, g = task % s.groups;
        int64_t* dense = scratch_of<int64_t>(Slot::conv_rows, q.padded);
        float* values = scratch_of<float>(Slot::conv_values, q.padded * kColumns + kColumns);
        Lost& lost = each[task] = {};
        float* out = y + (n * s.o + g * outs) * p.pixels;
        visit_image(s, p, task, x, [&](float* patches, int64_t first, int64_t count) {
            QuantJob job = patch_job(patches, values, 1, p.taps, count, q.tile_length);
            job.padded = q.padded;
            if (q.per_tensor) job.known = known, job.tile_length = q.padded;
            if (needs_whole(q)) job.whole = known;
            quant_kernels.quantize(plan, {}, job);
            lost[0] += job.saturated, lost[1] += job.flushed;
            if (maxima)
                rebase(plan, tiles, maxima + g * tiles.count(), 0, p.taps, n * p.pixels + first,
                       count, values, lost);
            for (int64_t t = 0; t < q.padded; ++t) dense[t] = t * count;
            weights.multiply(g, {values, dense, q.padded, count}, job.tensor_scale,
                             starts + g * outs, out + first, p.pixels);
        });
    });
    add_counts(each, s.n * s.groups, counts);
}

// ---- weight gradient ----

constexpr int64_t kChunkFloats = 1 << 15;  // floats of patches that a task quantizes at a time
constexpr int64_t kLeastColumns = 512, kTasks = 16;

// The rows of a group's patches that belong to some channels, at a run of pixels.
struct PatchChunk {
    const float* patches;  // (taps, count)
    int64_t row;           // the first, counted through all groups
    int64_t taps, first, count;
};

// How the matrices of patches are cut. A task takes some channels of one group and a run of pixels,
// `columns` at a time, which hold whole blocks and whole transforms. With a `first` quantizer,
// along the taps, it takes all channels, and the rows are those that it gives.
struct PatchCut {
    const Conv& s;
    const PatchQuant* first;
    uint32_t whole = 0;                          // the statistic of the first's whole array
    int64_t kernel, taps, pixels, all, columns;  // rows of a group; pixels of an image, of all
    Split chunks;
    int64_t parts, steps;
    Split runs;

    PatchCut(const Conv& s, int64_t block, int64_t padded, const PatchQuant* first)
        : s(s),
          first(first),
          kernel(s.kh * s.kw),
          taps(first ? first->padded : s.c / s.groups * kernel),
          pixels(s.ho * s.wo),
          all(s.n * pixels),
          columns(least(ceil_div(first ? least(kLeastColumns, most(1, kChunkFloats / taps))
                                       : kLeastColumns,
                                 block),
                        ceil_div(padded, block)) *
                  block),
          chunks(s.c / s.groups,
                 first ? s.c / s.groups : most(1, kChunkFloats / (columns * kernel))),
          parts(chunks.parts * s.groups),
          steps(ceil_div(all, columns)),
          runs(steps, ceil_div(steps, most(1, ceil_div(kTasks, parts)))) {}

    int64_t tasks() const { return parts * runs.parts; }
    int64_t run_of(int64_t task) const { return task / parts; }
    int64_t group(int64_t task) const { return task % parts / chunks.parts; }
    int64_t part(int64_t task) const { return task % parts; }
    int64_t channel(int64_t task) const { return chunks.start(task % chunks.parts); }
    int64_t channels(int64_t task) const { return chunks.size(task % chunks.parts); }

    // body(chunk) for all chunks of a task.
    template <class Body>
    void visit(int64_t task, const float* x, Body body) const {
        const int64_t c0 = channel(task), ins = s.c / s.groups;
        const LoweredImages p(1, s.with_channels(channels(task)));
        float* lowered = scratch_of<float>(Slot::conv_lowered, p.lowered_floats());
        float* padded = scratch_of<float>(Slot::conv_padded, p.padded_floats());
        int64_t* offset = scratch_of<int64_t>(Slot::conv_offsets, 2 * p.taps);
        float* patches = scratch_of<float>(Slot::conv_patches, p.taps * columns);
        p.offsets(offset);
        int64_t held = -1;  // the image in `lowered`
        const int64_t end = least(all, runs.start(run_of(task) + 1) * columns);
        for (int64_t first = runs.start(run_of(task)) * columns; first < end; first += columns) {
            const int64_t count = least(columns, end - first);
            for (int64_t at = 0; at < count;) {
                const int64_t n = (first + at) / pixels, pixel = (first + at) % pixels;
                const int64_t length = least(count - at, pixels - pixel);
                if (n != held)
                    p.fill(x + ((n * s.groups + group(task)) * ins + c0) * s.h * s.w, 0, padded,
                           lowered);
                held = n;
                for (int64_t t = 0; t < p.taps; ++t)
                    std::memcpy(patches + t * count + at, lowered + offset[t] + pixel,
                                static_cast<size_t>(length) * 4);
                at += length;
            }
            if (this->first)
                body(PatchChunk{requantized(patches, p.taps, count), group(task) * taps, taps,
                                first, count});
            else
                body(PatchChunk{patches, group(task) * taps + c0 * kernel, p.taps, first, count});
        }
    }

private:
    // What the first quantizer makes of (rows, count) patches.
    const float* requantized(const float* patches, int64_t rows, int64_t count) const {
        float* values = scratch_of<float>(Slot::conv_first, taps * columns + VL);
        QuantJob job = patch_job(patches, values, 1, rows, count, first->tile_length);
        job.padded = taps;
        if (needs_whole(*first)) job.whole = &whole;
        quant_kernels.quantize(first->plan, {}, job);
        return values;
    }
};

// The largest magnitude of each row of patches, or of all in each place.
const uint32_t* patch_maxima(const PatchCut& cut, const PatchQuant& q, const float* x) {
    const int64_t rows = cut.s.groups * cut.taps, count = rows * cut.runs.parts;
    uint32_t* maxima = scratch_of<uint32_t>(Slot::conv_maxima, count);
    std::memset(maxima, 0, static_cast<size_t>(count) * 4);
    threads::run(cut.tasks(), rows * cut.all, [&](int64_t task) {
        uint32_t* found = scratch_of<uint32_t>(Slot::conv_values, cut.taps);
        cut.visit(task, x, [&](const PatchChunk& p) {
            quant_kernels.row_maxima(q.plan, {p.patches, p.taps, p.count, p.count, needs_whole(q)},
                                     found);
            uint32_t* to = maxima + cut.run_of(task) * rows + p.row;
            for (int64_t t = 0; t < p.taps; ++t) to[t] = found[t] > to[t] ? found[t] : to[t];
        });
    });
    for (int64_t r = 1; r < cut.runs.parts; ++r)
        for (int64_t t = 0; t < rows; ++t)
            maxima[t] = maxima[r * rows + t] > maxima[t] ? maxima[r * rows + t] : maxima[t];
    if (!q.per_tensor && !needs_whole(q)) return maxima;
    const uint32_t top = largest(maxima, rows);
    for (int64_t t = 0; t < rows; ++t) maxima[t] = top;
    return maxima;
}

// The maxima of the rebased tiles of each group.
const uint32_t* rebased_maxima(const PatchCut& cut, const PatchQuant& q, const RebasedTiles& tiles,
                               const float* x) {
    // Channels share tiles: each part of them has words of its own.
    const int64_t words = cut.parts * tiles.count(), chunks = cut.chunks.parts;
    uint32_t* maxima = scratch_of<uint32_t>(Slot::conv_maxima, words);
    std::memset(maxima, 0, static_cast<size_t>(words) * 4);
    threads::run(cut.tasks(), cut.s.groups * cut.taps * cut.all, [&](int64_t task) {
        uint32_t* mine = maxima + cut.part(task) * tiles.count();
        cut.visit(task, x, [&](const PatchChunk& p) {
            tiles.visit(p.row - cut.group(task) * cut.taps, p.taps, p.first, p.count, p.patches,
                        nullptr, [&](const RebasePart& part, int64_t number) {
                            raise(mine[number],
                                  quant_kernels.rebase_maximum(part, q.tile_length, true));
                        });
        });
    });
    for (int64_t g = 0; g < cut.s.groups; ++g)
        for (int64_t c = 0; c < chunks; ++c)
            for (int64_t i = 0; i < tiles.count(); ++i)
                raise(maxima[g * tiles.count() + i], maxima[(g * chunks + c) * tiles.count() + i]);
    return maxima;
}

// The gradients as bfloat16, where they are exactly that and the CPU multiplies those faster.
struct PairedGradients {
    uint16_t* values = nullptr;
    Bf16Extent extent;
    const PairKernels* kernels = pair_kernels;  // another thread may change the level meanwhile

    PairedGradients(const QuantPlan& plan, int64_t outs, int64_t count, const float* g) {
        if (!has_factor(plan) || !kernels || VL != 16 || outs < kFewOutputs) return;
        values = scratch_of<uint16_t>(kPairWords, count + 4 * VL);
        std::memset(values + count, 0, 8 * VL);
        extent = kernels->to_bf16(count, g, values);
    }

    // Of patches that are multiples of `factor`.
    bool correlate(int64_t outs, const TapRows& m, float factor, int64_t at, int64_t stride,
                   float* out, int64_t out_stride) const {
        return values && extent.exact &&
               kernels->correlate(outs, m, factor, values + at, stride, extent, out, out_stride);
    }
};

// g is (groups, o, padded) of values. The sums of several runs are added in their order.
void grad_w(const Conv& s, const PatchQuant& q, const PatchQuant* first, const float* g,
            const float* x, float* gw, int64_t* counts) {
    const int64_t outs = s.o / s.groups, kernel = s.kh * s.kw;
    const int64_t taps = first ? first->padded : s.c / s.groups * kernel;
    const int64_t weights = s.o * taps, size = most(1, q.plan.hadamard);
    const bool long_rows = q.per_tensor || q.tile_length > kLeastColumns;
    int64_t block = long_rows ? size : q.plan.rebased ? kSide : q.tile_length;
    while (block % size) block += q.tile_length;
    PatchCut cut(s, block, q.padded, first);
    if (first && needs_whole(*first)) cut.whole = patch_maximum(s, *first, x);
    const QuantPlan plan = not_rebased(q.plan);
    const RebasedTiles tiles(cut.taps, cut.all);
    const uint32_t* rebased = q.plan.rebased ? rebased_maxima(cut, q, tiles, x) : nullptr;
    const uint32_t* known = long_rows || needs_whole(q) ? patch_maxima(cut, q, x) : nullptr;
    float* partial =
        cut.runs.parts == 1 ? gw : scratch_of<float>(Slot::conv_weights, cut.runs.parts * weights);
    Lost* each = scratch_of<Lost>(Slot::conv_counts, cut.tasks());
    const PairedGradients pairs(plan, outs, s.o * q.padded, g);

    threads::run(cut.tasks(), weights * cut.all, [&](int64_t task) {
        const int64_t channels = first ? taps : cut.channels(task) * kernel,
                      group = cut.group(task);
        float* values = scratch_of<float>(Slot::conv_values, channels * cut.columns + VL);
        int64_t* dense = scratch_of<int64_t>(Slot::conv_rows, channels);
        float* out =
            partial + cut.run_of(task) * weights + group * outs * taps + cut.channel(task) * kernel;
        for (int64_t o = 0; o < outs; ++o)
            std::memset(out + o * taps, 0, static_cast<size_t>(channels) * 4);
        Lost& lost = each[task] = {};
        cut.visit(task, x, [&](const PatchChunk& p) {
            QuantJob job = patch_job(p.patches, values, p.taps, p.count, 1, q.tile_length);
            const int64_t length = job.padded = round_up(p.count, size);
            if (long_rows) job.known = known + p.row, job.tile_length = length;
            if (needs_whole(q)) job.whole = known;
            if (q.plan.stochastic || q.plan.eden) {
                job.pitch = ceil_div(q.padded, q.tile_length);
                job.first_block = p.row * job.pitch + p.first / q.tile_length;
            }
            quant_kernels.quantize(plan, q.stream, job);
            lost[0] += job.saturated, lost[1] += job.flushed;
            if (rebased)
                rebase(plan, tiles, rebased + group * tiles.count(), p.row - group * cut.taps,
                       p.taps, p.first, p.count, values, lost);
            for (int64_t t = 0; t < p.taps; ++t) dense[t] = t * length;
            const TapRows rows = {values, dense, p.taps, length};
            const int64_t at = group * outs * q.padded + p.first;
            if (!pairs.correlate(outs, rows, job.tensor_scale, at, q.padded, out, taps))
                correlate_runs(outs, rows, g + at, q.padded, out, taps);
        });
    });
    add_counts(each, cut.tasks(), counts);
    if (cut.runs.parts == 1) return;
    std::memset(gw, 0, static_cast<size_t>(weights) * 4);
    for (int64_t r = 0; r < cut.runs.parts; ++r)
        for (int64_t i = 0; i < weights; ++i) gw[i] += partial[r * weights + i];
}

}  // namespace

extern const QuantConvKernels quant_conv_kernels;
const QuantConvKernels quant_conv_kernels = {conv, grad_w};

}  // namespace EXTENSOR_ISA
