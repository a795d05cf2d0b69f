// Quantizing and decoding float32 arrays, byte for byte as extensor/quant does it.
//
// Blocks run along rows (quant_rows.cpp) or down columns (quant_columns.cpp). Work goes through a
// cache-sized piece at a time: Hadamard transform, block maxima, scales, then codes or values. Only
// tiles of several rows, and scales that depend on the whole array, need the maxima of the whole
// array first; those that look at more than the maxima are in inside.cpp. Decoding: dequant.cpp.
//
// Compiled without contraction: every float operation here decides bits.

#include "inside.hpp"

namespace EXTENSOR_ISA {
namespace {

// Rows of whole tiles, one after the other, are one long row.
void flatten(const QuantPlan& plan, QuantJob& job) {
    if (job.inner != 1 || job.tile_rows != 1 || job.coded != job.length) return;
    if (job.length % job.tile_length || job.length * kElements[plan.element].bits % 8) return;
    job.length *= job.outer * job.rows;
    job.coded = job.length;
    job.outer = job.rows = 1;
}

void quantize(const QuantPlan& plan, const QuantStream& stream, QuantJob& job) {
    if (looks_inside(plan, job) && (plan.hadamard || job.type != FloatType::float32)) {
        QuantPlan plain = plan;
        plain.hadamard = 0;
        job.x = plain_values(plan, job);
        job.type = FloatType::float32;
        job.length = job.coded;
        return quantize(plain, stream, job);
    }
    flatten(plan, job);
    Call call(plan, stream, job);
    if (job.inner > 1) return quantize_columns(call);
    if (job.tile_rows == 1 || !quantize_panels(&call, nullptr)) quantize_rows(call);
}

void quantize_pair(const QuantPlan (&plans)[2], const QuantStream (&streams)[2], QuantJob (&jobs)[2]) {
    Call along(plans[0], streams[0], jobs[0]), down(plans[1], streams[1], jobs[1]);
    if (jobs[1].inner > 1 && quantize_panels(&along, &down)) return;
    for (int i = 0; i < 2; ++i) quantize(plans[i], streams[i], jobs[i]);
}

}  // namespace

extern const QuantKernels quant_kernels;
const QuantKernels quant_kernels = {quantize, quantize_pair, dequantize, split_outliers,
                                    join_outliers};

}  // namespace EXTENSOR_ISA
