// The gradient that a clipping quantizer passes on: of blocks that run columnwise, see
// `clipped_gradient` in extensor/quant/reference.py, and what a mask lets through of rows.

#include "quantize/hadamard.hpp"
#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {
namespace {

// Sixteen gradients where their bits are set, zero elsewhere.
INLINE vf masked(const float* g, uint32_t bits, int count) {
#if EXTENSOR_LANES == 16
    const auto mask = static_cast<__mmask16>(bits & ((1u << count) - 1));
    return _mm512_maskz_loadu_ps(mask, g);
#else
    const vu set = (splat(bits) >> lane_numbers()) << 31;
    const vf values = load_part(g, count);
    return float_of(bits_of(values) & reinterpret_cast<vu>(reinterpret_cast<vi>(set) >> 31));
#endif
}

void transform_panel(float* x, int64_t rows, int size, const float* signs) {
    for (int64_t i = 0; i < rows; i += size) transform_rows(x + i * VL, size, VL, signs);
}

}  // namespace

void straight_through(const ClippedRows& job) {
    const int64_t step = job.hadamard ? job.hadamard : 128, bytes = ceil_div(job.padded, 8);
    float ones[128];
    for (float& one : ones) one = 1.0f;
    threads::run(job.rows, 8 * job.rows * job.padded, [&](int64_t row) {
        const float* g = job.g + row * job.padded;
        const uint8_t* mask = job.mask ? job.mask + row * bytes : nullptr;
        float* out = job.out + row * job.length;
        alignas(64) float values[128];
        for (int64_t start = 0; start < job.length; start += step) {
            const auto read = [&](int64_t i) {
                const int64_t at = start + i, left = least(VL, job.padded - at);
                if (left <= 0) return vf{};
                uint32_t bits = ~0u;
                if (mask) {  // of 16 values, as far as the row has them
                    bits = mask[at / 8];
                    if (at / 8 + 1 < bytes) bits |= static_cast<uint32_t>(mask[at / 8 + 1]) << 8;
                    bits >>= at % 8;
                }
                return masked(g + at, bits, static_cast<int>(left));
            };
            const int64_t count = least(step, job.length - start);
            if (!job.hadamard) {
                for (int64_t i = 0; i < count; i += VL)
                    store_upto(out + start + i, read(i), count - i);
                continue;
            }
            transform_run(job.hadamard, read, ones, values);
            for (int64_t i = 0; i < count; i += VL)
                store_upto(out + start + i, load(values + i) * load(job.signs + i), count - i);
        }
    });
}

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
