// The gradient that a clipping quantizer passes on: of blocks that run columnwise, see
// `clipped_gradient` in extensor/quant/reference.py, and what a mask lets through of rows.

#include "quantize/column_tiles.hpp"

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
    const int64_t tile = job.tile_length, stride = job.inner;
    const int size = plan.hadamard;
    int64_t unit = tile;  // whole blocks and whole transforms
    while (size && unit % size) unit += tile;
    float* panel = scratch_of<float>(Slot::values, unit * kTileColumns);
    for (int64_t start = 0; start < job.padded; start += unit) {
        const int64_t rows = least(unit, job.padded - start);
        const int64_t real = most(0, least(rows, job.length - start));
        for (int64_t j = 0; j < stride; j += kTileColumns) {
            const int64_t lanes = least(kTileColumns, stride - j), vectors = ceil_div(lanes, VL);
            const float* x = static_cast<const float*>(job.x) + start * stride + j;
            float* gradient = job.values + start * stride + j;
            size ? fill_transformed(plan, x, stride, real, rows, lanes, panel)
                 : fill_rows(x, stride, real, lanes, panel);
            if (!size)
                std::memset(panel + real * kTileColumns, 0,
                            static_cast<size_t>((rows - real) * kTileColumns) * 4);
            for (int64_t first = 0; first < rows; first += tile) {
                const int64_t count = least(tile, rows - first);
                float* block = panel + first * kTileColumns;
                vu m[4];
                column_maxima(block, count, vectors, m);
                if (job.known)
                    for (vu& v : m) v = splat(job.known[0]);
                else if (chooses(plan))
                    choose_statistics(call, block, count, kTileColumns, vectors,
                                      splat(static_cast<float>(count)), m);
                for (int64_t k = 0; k < vectors; ++k) {
                    const vf limit = splat(call.scaler.grid.top) * call.scaler.of(m[k]).decode *
                                     call.scaler.tensor_scale;
                    const int left = static_cast<int>(least(VL, lanes - k * VL));
                    const float* from = gradient + first * stride + k * VL;
                    float* at = block + k * VL;  // its values become gradients
                    for (int64_t i = 0; i < count; ++i, at += kTileColumns, from += stride) {
                        const vi inside = float_of(magnitude_bits(load(at))) <= limit;
                        store(at, float_of(bits_of(load_part(from, left)) &
                                           reinterpret_cast<vu>(inside)));
                    }
                }
            }
            for (int64_t k = 0; k < lanes; k += VL) {
                float *at = panel + k, *to = gradient + k;
                const int left = static_cast<int>(least(VL, lanes - k));
                for (int64_t i = 0; !size && i < rows; ++i)
                    store_part(to + i * stride, load(at + i * kTileColumns), left);
                for (int64_t i = 0; size && i < rows;
                     i += size, at += size * kTileColumns, to += size * stride)
                    transform_rows(
                        size, at, kTileColumns, [&](int r) { return load(at + r * kTileColumns); },
                        [&](int r, vf v) { store_part(to + r * stride, v * plan.signs[r], left); });
            }
        }
    }
}

}  // namespace EXTENSOR_ISA
