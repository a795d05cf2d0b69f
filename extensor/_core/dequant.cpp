// Packed codes back to float32.

#include "quant.hpp"
#include "tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kPast = 1 << 21;  // decoded floats that no cache holds for their reader

// The code at `index` of a packed row whose bytes lie `stride` apart.
INLINE uint32_t unpack_one(const uint8_t* row, int64_t stride, int64_t index, int bits) {
    if (bits == 8) return row[index * stride];
    if (bits == 4) return row[index / 2 * stride] >> (index % 2 * 4) & 15u;
    const uint8_t* at = row + index / 4 * 3 * stride;
    switch (index % 4) {
        case 0: return at[0] & 63u;
        case 1: return (at[0] >> 6 | at[stride] << 2) & 63u;
        case 2: return (at[stride] >> 4 | at[2 * stride] << 4) & 63u;
        default: return at[2 * stride] >> 2;
    }
}

}  // namespace

void dequantize(const QuantPlan& plan, const DequantJob& job) {
    const Element& e = kElements[plan.element];
    float table[256], ue4m3[256];
    decode_table(e, table);
    decode_table(kElements[kScaleElement], ue4m3);
    const int64_t tiles = ceil_div(job.length, job.tile_length);
    const int64_t packed = ceil_div(tiles * job.tile_length * e.bits, 8);
    const bool columns = job.inner != 1;
    const int64_t rows = columns ? job.outer : job.outer * job.rows;
    const int64_t bands = ceil_div(job.rows, job.tile_rows);
    const int64_t groups = ceil_div(job.inner, job.tile_rows);
    const float tensor_scale = job.tensor_scale;
    const bool past = rows * job.length * job.inner >= kPast;
    // Tasks of whole tiles down the length: independent for rows and columns alike.
    const int64_t step = most(1, kPiece / most(1, job.tile_length * job.inner));
    const int64_t parts = ceil_div(tiles, step);
    threads::run(rows * parts, 8 * rows * job.length * job.inner, [&](int64_t task) {
        const int64_t row = task / parts, first = task % parts * step;
        const int64_t last = least(first + step, tiles);
        const uint8_t* codes = job.codes + row * packed * job.inner;
        float* out = job.values + row * job.length * job.inner;
        for (int64_t t = first; t < last; ++t) {
            const int64_t end = least((t + 1) * job.tile_length, job.length);
            if (!columns) {
                const int64_t image = row / job.rows, band = row % job.rows / job.tile_rows;
                const float scale =
                    scale_value(plan.scale, job.scales, (image * bands + band) * tiles + t, ue4m3);
                const float point =
                    job.zero_points ? job.zero_points[(image * bands + band) * tiles + t] : 0.0f;
                int64_t i = t * job.tile_length;
                const int64_t count = end - i;
                if (e.bits != 6 && !job.zero_points && job.tile_length % VL == 0 && count % VL == 0) {
                    if (e.bits == 4)
                        decode_tile<4>(codes, i, count, table, scale, tensor_scale, past, out + i);
                    else
                        decode_tile<8>(codes, i, count, table, scale, tensor_scale, past, out + i);
                    continue;
                }
                for (; i < end; ++i)
                    out[i] = (table[unpack_one(codes, 1, i, e.bits)] - point) * scale * tensor_scale;
                continue;
            }
            float* scales = scratch_of<float>(Slot::planes, 2 * job.inner);
            float* points = scales + job.inner;
            for (int64_t j = 0; j < job.inner; ++j) {
                const int64_t at = (row * tiles + t) * groups + j / job.tile_rows;
                scales[j] = scale_value(plan.scale, job.scales, at, ue4m3);
                points[j] = job.zero_points ? job.zero_points[at] : 0.0f;
            }
            for (int64_t i = t * job.tile_length; i < end; ++i)
                for (int64_t j = 0; j < job.inner; ++j)
                    out[i * job.inner + j] =
                        (table[unpack_one(codes + j, job.inner, i, e.bits)] - points[j]) *
                        scales[j] * tensor_scale;
        }
        if (past) finish_stores();
    });
}

}  // namespace EXTENSOR_ISA
