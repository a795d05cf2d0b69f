// Packed codes back to float32.

#include "quant.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kPast = 1 << 21;  // decoded floats that no cache holds for their reader

// The values of VL codes from the `at`-th of a row on; at is a multiple of VL.
template <int Bits>
INLINE vf decode_vector(const uint8_t* codes, int64_t at, const float* table) {
    const uint8_t* from = codes + at * Bits / 8;
#if EXTENSOR_LANES == 16
    if constexpr (Bits == 4) {
        int64_t eight;
        std::memcpy(&eight, from, 8);
        __m512i w = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(eight));
        w = _mm512_or_si512(w, _mm512_slli_epi64(w, 28));  // the low four bits of a lane count
        return _mm512_permutexvar_ps(w, _mm512_loadu_ps(table));
    } else {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), table, 4);
    }
#else
    vf v;
    for (int i = 0; i < VL; ++i) {
        if constexpr (Bits == 4)
            v[i] = table[from[i / 2] >> (i % 2 * 4) & 15];
        else
            v[i] = table[from[i]];
    }
    return v;
#endif
}

// Past the caches, where asked for and the place is aligned; `finish_stores` before others read.
INLINE void store_past(float* to, vf v, [[maybe_unused]] bool past) {
#if EXTENSOR_LANES == 16
    if (past && reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, v);
#endif
    store(to, v);
}

INLINE void finish_stores() {
#if EXTENSOR_LANES == 16
    _mm_sfence();
#endif
}

// The values of one tile of `count` codes (a multiple of VL) from the `at`-th of a row on.
template <int Bits>
INLINE void decode_tile(const uint8_t* codes, int64_t at, int64_t count, const float* table,
                        float scale, float tensor_scale, bool past, float* out) {
    for (int64_t i = 0; i < count; i += VL)
        store_past(out + i, decode_vector<Bits>(codes, at + i, table) * scale * tensor_scale,
                   past);
}

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
