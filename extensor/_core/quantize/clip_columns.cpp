// The gradient that a clipping quantizer passes on, of blocks that run columnwise: see
// `clipped_gradient` in extensor/quant/reference.py.

#include "quantize/hadamard.hpp"
#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {
namespace {

void transform_panel(float* x, int64_t rows, int size, const float* signs) {
    for (int64_t i = 0; i < rows; i += size) transform_rows(x + i * VL, size, VL, signs);
}

}  // namespace

void clip_gradient(const QuantPlan& plan, QuantJob& job) {
    const Call call(plan, {}, job);
    const int64_t tile = job.tile_length, padded = job.padded;
    const float* x = static_cast<const float*>(job.x);
    float* panel = scratch_of<float>(Slot::values, 2 * padded * VL);
    float* gradient = panel + padded * VL;
    float ones[128];
    for (float& one : ones) one = 1.0f;
    for (int64_t j = 0; j < job.inner; j += VL) {
        const int64_t lanes = job.inner - j;
        for (int64_t i = 0; i < padded; ++i) {
            store(panel + i * VL, i < job.length ? load_upto(x + i * job.inner + j, lanes) : vf{});
            store(gradient + i * VL, load_upto(job.values + i * job.inner + j, lanes));
        }
        if (plan.hadamard) transform_panel(panel, padded, plan.hadamard, plan.signs);
        for (int64_t start = 0; start < padded; start += tile) {
            const int64_t rows = least(tile, padded - start);
            const float* block = panel + start * VL;
            vu statistic = {};
            for (int64_t i = 0; i < rows; ++i)
                statistic = larger(statistic, magnitude_bits(load(block + i * VL)));
            if (job.known)
                statistic = splat(job.known[0]);
            else if (chooses(plan))
                statistic = chosen_statistic(call, block, rows, VL, statistic,
                                             splat(static_cast<float>(rows)));
            const vf limit = splat(call.scaler.grid.top) * call.scaler.of(statistic).decode *
                             call.scaler.tensor_scale;
            for (int64_t i = 0; i < rows; ++i) {
                float* at = gradient + (start + i) * VL;
                const vi inside = float_of(magnitude_bits(load(block + i * VL))) <= limit;
                store(at, float_of(bits_of(load(at)) & reinterpret_cast<vu>(inside)));
            }
        }
        if (plan.hadamard) transform_panel(gradient, padded, plan.hadamard, ones);
        for (int64_t i = 0; i < padded; ++i) {
            vf g = load(gradient + i * VL);
            if (plan.hadamard) g = g * plan.signs[i % plan.hadamard];
            store_upto(job.values + i * job.inner + j, g, lanes);
        }
    }
}

}  // namespace EXTENSOR_ISA
