// Quantizes and decodes arrays, byte for byte as extensor/quant does: the entry points.
//
// Blocks run rowwise (rowwise.cpp) or columnwise (columnwise.cpp). Work goes through a cache-sized
// chunk at a time: Hadamard transform, block maxima, scales, then codes or values. Only tiles of
// several rows, and scales that depend on the whole array, need the maxima of the whole array
// first. Scales that need more than the maxima are in searched_scales.cpp.
//
// Compiled without contraction: every float operation here decides bits.

#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {
namespace {

// Rows of whole tiles, one after the other, are one long row.
void flatten(const QuantPlan& plan, QuantJob& job) {
    if (job.inner != 1 || job.tile_rows != 1 || job.padded != job.length || job.pitch) return;
    if (job.length % job.tile_length || job.length * kElements[plan.element].bits % 8) return;
    job.length *= job.outer * job.rows;
    job.padded = job.length;
    job.outer = job.rows = 1;
}

QuantPlan not_rebased(const QuantPlan& plan) {
    QuantPlan plain = plan;
    plain.rebased = false;
    return plain;
}

// Rebases what `done`, a copy of `job`, has quantized, and takes its results.
void finish_rebased(const QuantPlan& plan, const QuantJob& done, QuantJob& job) {
    job.saturated = done.saturated, job.flushed = done.flushed;
    job.tensor_scale = done.tensor_scale;
    rebase(plan, job);
}

void quantize(const QuantPlan& plan, const QuantStream& stream, QuantJob& job) {
    if (plan.rebased) {
        QuantJob part = job;
        quantize(not_rebased(plan), stream, part);
        return finish_rebased(plan, part, job);
    }
    if (needs_more_than_amax(plan, job) && (plan.hadamard || job.type != FloatType::float32)) {
        QuantPlan plain = plan;
        plain.hadamard = 0;
        job.x = float32_values(plan, job);
        job.type = FloatType::float32;
        job.length = job.padded;
        return quantize(plain, stream, job);
    }
    flatten(plan, job);
    Call call(plan, stream, job);
    if (job.inner > 1) return quantize_columns(call);
    if (job.tile_rows == 1 || !quantize_column_tiles(&call, nullptr)) quantize_rows(call);
}

void quantize_rowwise_columnwise(const QuantPlan (&plans)[2], const QuantStream (&streams)[2],
                                 QuantJob (&jobs)[2]) {
    if (plans[0].rebased || plans[1].rebased) {
        const QuantPlan plain[2] = {not_rebased(plans[0]), not_rebased(plans[1])};
        QuantJob parts[2] = {jobs[0], jobs[1]};
        quantize_rowwise_columnwise(plain, streams, parts);
        for (int i = 0; i < 2; ++i)
            plans[i].rebased ? finish_rebased(plans[i], parts[i], jobs[i])
                             : void(jobs[i] = parts[i]);
        return;
    }
    Call rowwise(plans[0], streams[0], jobs[0]), columnwise(plans[1], streams[1], jobs[1]);
    if (jobs[1].inner > 1 && quantize_column_tiles(&rowwise, &columnwise)) return;
    for (int i = 0; i < 2; ++i) quantize(plans[i], streams[i], jobs[i]);
}

}  // namespace

extern const QuantKernels quant_kernels;
const QuantKernels quant_kernels = {quantize,         quantize_rowwise_columnwise,
                                    row_maxima,       rebase_maximum,
                                    rebase_values,    clip_gradient,
                                    straight_through, dequantize,
                                    split_outliers,   join_outliers};

}  // namespace EXTENSOR_ISA
