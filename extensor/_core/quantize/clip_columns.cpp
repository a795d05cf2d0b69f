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
    const int64_t tile = job.tile_length, padded = job.padded, stride = job.inner;
    const int size = plan.hadamard;
    float* panel = scratch_of<float>(Slot::values, padded * VL);
    for (int64_t j = 0; j < stride; j += VL) {
        const int64_t lanes = stride - j;
        const float* x = static_cast<const float*>(job.x) + j;
        float* gradient = job.values + j;
        const auto value = [&](int64_t i) {
            return i < job.length ? load_upto(x + i * stride, lanes) : vf{};
        };
        if (!size)
            for (int64_t i = 0; i < padded; ++i) store(panel + i * VL, value(i));
        for (int64_t at = 0; size && at < padded; at += size)
            transform_rows(
                size, panel + at * VL, VL, [&](int i) { return value(at + i) * plan.signs[i]; },
                [&](int i, vf v) { store(panel + (at + i) * VL, v); });
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
            for (int64_t i = start; i < start + rows; ++i) {  // the panel's values become gradients
                float* at = panel + i * VL;
                const vi inside = float_of(magnitude_bits(load(at))) <= limit;
                const vf g = load_upto(gradient + i * stride, lanes);
                store(at, float_of(bits_of(g) & reinterpret_cast<vu>(inside)));
            }
        }
        if (!size)
            for (int64_t i = 0; i < padded; ++i)
                store_upto(gradient + i * stride, load(panel + i * VL), lanes);
        for (int64_t at = 0; size && at < padded; at += size)
            transform_rows(
                size, panel + at * VL, VL, [&](int i) { return load(panel + (at + i) * VL); },
                [&](int i, vf v) {
                    store_upto(gradient + (at + i) * stride, v * plan.signs[i], lanes);
                });
    }
}

}  // namespace EXTENSOR_ISA
