// Decodes packed codes to float32, bfloat16 or float16: (grid value * block scale) * tensor scale
// in float32, rounded once where the result is narrower.

#include "common/cache_lines.hpp"
#include "quantize/quantize.hpp"

#if EXTENSOR_LANES == 16
#include "quantize/dequantize_avx512.hpp"
#endif

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kStreamedBytes = 1
                                   << 23;  // bytes of results that no cache holds for their reader

// Codes, one in each lane, to the values of their grid.
struct Decoder {
    float table[256];
    int bits;
#if EXTENSOR_LANES == 16
    // Eight-bit floats are float16 numbers after a shift, up to a power of two. Codes without a
    // finite value are not; the table has them.
    bool narrow_float;
    __m128i shift;
    uint32_t max_code;
    float factor;
#endif

    explicit Decoder(const Element& e) : bits(e.bits) {
        decode_table(e, table);
#if EXTENSOR_LANES == 16
        narrow_float = e.is_float && e.bits == 8;
        shift = _mm_cvtsi32_si128(10 - e.mantissa_bits);
        max_code = static_cast<uint32_t>(e.max_code);
        factor = narrow_float ? power_of_two(14 + e.min_exponent) : 1.0f;
#endif
    }

    INLINE vf lookup(vu codes) const {
#if EXTENSOR_LANES == 16
        const __m512i at = reinterpret_cast<__m512i>(codes);
        if (bits == 4) return _mm512_permutexvar_ps(at, _mm512_loadu_ps(table));
        if (bits == 6) {
            const auto half = [&](const float* t) {
                return _mm512_permutex2var_ps(_mm512_loadu_ps(t), at, _mm512_loadu_ps(t + 16));
            };
            return _mm512_mask_mov_ps(
                half(table), _mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), half(table + 32));
        }
        return _mm512_i32gather_ps(at, table, 4);
#else
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = table[codes[i]];
        return v;
#endif
    }

    // VL codes, `at` of them into the row; at is a multiple of VL.
    template <int Bits>
    INLINE vf run(const uint8_t* codes, int64_t at) const {
        const uint8_t* from = codes + at * Bits / 8;
#if EXTENSOR_LANES == 16
        if constexpr (Bits == 4) {
            int64_t eight;
            std::memcpy(&eight, from, 8);
            const __m512i w = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(eight));
            // The low four bits of a lane count.
            return _mm512_permutexvar_ps(_mm512_or_si512(w, _mm512_slli_epi64(w, 28)),
                                         _mm512_loadu_ps(table));
        }
        if constexpr (Bits == 6) {
            // Twelve bytes: three for each four lanes.
            const __m128i three =
                _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
            const __m128i fours = _mm_shuffle_epi8(_mm_maskz_loadu_epi8(0xFFF, from), three);
            const __m512i lanes = _mm512_permutexvar_epi32(
                _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                _mm512_castsi128_si512(fours));
            const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 6, 12, 18));
            const __m512i code =
                _mm512_and_si512(_mm512_srlv_epi32(lanes, places), _mm512_set1_epi32(63));
            return lookup(reinterpret_cast<vu>(code));
        }
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        if (narrow_float) {
            const __m256i w = _mm256_cvtepu8_epi16(bytes);
            const __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x7F));
            if (!_mm256_cmpgt_epu16_mask(magnitude,
                                         _mm256_set1_epi16(static_cast<short>(max_code)))) {
                const __m256i half = _mm256_ternarylogic_epi32(
                    _mm256_sll_epi16(magnitude, shift), _mm256_slli_epi16(w, 8),
                    _mm256_set1_epi16(static_cast<short>(0x8000)), 0xF8);
                return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(factor));
            }
        }
        return lookup(reinterpret_cast<vu>(_mm512_cvtepu8_epi32(bytes)));
#else
        vu c;
        for (int i = 0; i < VL; ++i) {
            const int byte = i * Bits / 8, start = i * Bits % 8;
            uint32_t word = from[byte];
            if (start + Bits > 8) word |= static_cast<uint32_t>(from[byte + 1]) << 8;
            c[i] = word >> start & ((1u << Bits) - 1);
        }
        return lookup(c);
#endif
    }
};

// The codes at `index` of `lanes` packed rows: a row's bytes lie `stride` apart, the rows one.
INLINE vu codes_at(const uint8_t* rows, int64_t stride, int64_t index, int bits, int64_t lanes) {
    typedef uint8_t vb __attribute__((vector_size(VL)));
    const auto bytes = [&](const uint8_t* from) {
        vb b = {};
        std::memcpy(&b, from, static_cast<size_t>(least(lanes, VL)));
        return __builtin_convertvector(b, vu);
    };
    if (bits == 8) return bytes(rows + index * stride);
    if (bits == 4)
        return bytes(rows + index / 2 * stride) >> static_cast<uint32_t>(index % 2 * 4) & 15u;
    // Four codes in three bytes.
    const int64_t first = index * 6 / 8, start = index * 6 % 8;
    vu code = bytes(rows + first * stride) >> static_cast<uint32_t>(start);
    if (start > 2) code |= bytes(rows + (first + 1) * stride) << static_cast<uint32_t>(8 - start);
    return code & 63u;
}

INLINE void store_streamed(float* to, vf v, [[maybe_unused]] bool streamed) {
#if EXTENSOR_LANES == 16
    store_cache_line(to, _mm512_castps_si512(reinterpret_cast<__m512>(v)), streamed);
#else
    store(to, v);
#endif
}

template <class Float16Bits>
INLINE void store_streamed(Float16Bits* to, vf v, bool) {
    store_upto(to, v, VL);
}

// Stores two vectors that follow one another; as 16-bit values they fill a cache line.
template <class T>
INLINE void store_two(T* to, vf a, vf b, bool streamed) {
#if EXTENSOR_LANES == 16
    if constexpr (sizeof(T) == 2)
        return store_cache_line(
            to, _mm512_inserti64x4(_mm512_castsi256_si512(rounded16<T>(a)), rounded16<T>(b), 1),
            streamed);
#endif
    store_streamed(to, a, streamed);
    store_streamed(to + VL, b, streamed);
}

struct Reader {
    const QuantPlan& plan;
    const DequantJob& job;
    Decoder decoder;
#if EXTENSOR_LANES == 16
    Fp8ToBf16 fp8;
    Fp4ToBf16 fp4;
    bool two_blocks;  // whether decode_two_blocks applies
#endif
    float ue4m3[256];
    int64_t tiles, packed;
    bool streamed;

    Reader(const QuantPlan& plan, const DequantJob& job)
        : plan(plan),
          job(job),
          decoder(kElements[plan.element]),
#if EXTENSOR_LANES == 16
          fp8(kElements[plan.element]),
          fp4(decoder.table),
          two_blocks(kElements[plan.element].is_float && plan.scale == Scale::ue4m3 &&
                     job.tensor_scale - job.tensor_scale == 0),
#endif
          tiles(ceil_div(job.length, job.tile_length)),
          packed(ceil_div(tiles * job.tile_length * decoder.bits, 8)) {
        decode_table(kElements[kScaleElement], ue4m3);
        const int64_t size = job.type == FloatType::float32 ? 4 : 2;
        streamed = size * job.outer * job.rows * job.length * job.inner >= kStreamedBytes;
    }

    float scale(int64_t at) const { return scale_value(plan.scale, job.scales, at, ue4m3); }
    float point(int64_t at) const { return job.zero_points ? job.zero_points[at] : 0.0f; }
};

// Whole tiles of Tile values, a multiple of two vectors or one: codes from the `at`-th on.
template <int Bits, class T>
void decode_run(const Reader& r, const uint8_t* codes, int64_t at, int64_t count, float scale,
                float point, T* out) {
    const float tensor_scale = r.job.tensor_scale;
    int64_t i = 0;
    for (; i + 2 * VL <= count; i += 2 * VL)
        store_two(out + i,
                  (r.decoder.template run<Bits>(codes, at + i) - point) * scale * tensor_scale,
                  (r.decoder.template run<Bits>(codes, at + i + VL) - point) * scale * tensor_scale,
                  r.streamed);
    for (; i < count; i += VL)
        store_streamed(out + i,
                       (r.decoder.template run<Bits>(codes, at + i) - point) * scale * tensor_scale,
                       r.streamed);
}

// Decodes whole tiles to 16-bit values as far as the fast paths reach; returns how many.
template <class T>
INLINE int64_t decode_16bit([[maybe_unused]] const Reader& r, [[maybe_unused]] const uint8_t* codes,
                            [[maybe_unused]] int64_t scales, [[maybe_unused]] int64_t tiles,
                            [[maybe_unused]] T* out) {
    int64_t t = 0;
#if EXTENSOR_LANES == 16
    if constexpr (sizeof(T) == 2) {
        const int64_t tile = r.job.tile_length;
        const auto* bytes = static_cast<const uint8_t*>(r.job.scales) + scales;
        const auto values = [&](int64_t at) __attribute__((always_inline)) {
            const vf grid = load(r.decoder.table) - r.point(scales + at);
            return rounded16<T>(grid * r.scale(scales + at) * r.job.tensor_scale);
        };
        if (r.decoder.bits == 4 && tile == 16) {
            if constexpr (kFloatType<T> == FloatType::bfloat16)
                if (r.two_blocks)
                    t = decode_two_blocks(r.decoder.table, r.ue4m3, bytes, codes, tiles,
                                          r.job.tensor_scale, out, r.streamed);
            for (; t + 2 <= tiles; t += 2)
                store_cache_line(out + t * 16, pick(codes + t * 8, values(t), values(t + 1)),
                                 r.streamed);
        } else if (r.decoder.bits == 4 && tile % 32 == 0) {
            if (kFloatType<T> == FloatType::bfloat16 && r.plan.scale == Scale::e8m0 &&
                !r.job.zero_points && r.job.tensor_scale == 1) {
                for (; t < tiles && r.fp4.covers(bytes[t]); ++t) {
                    const __m512i mine = r.fp4.under(bytes[t]);
                    for (int64_t i = t * tile; i < (t + 1) * tile; i += 32)
                        store_cache_line(
                            out + i, _mm512_permutexvar_epi16(unpack_nibbles(codes + i / 2), mine),
                            r.streamed);
                }
            }
            for (; t < tiles; ++t) {
                const __m256i mine = values(t);
                for (int64_t i = t * tile; i < (t + 1) * tile; i += 32)
                    store_cache_line(out + i, pick(codes + i / 2, mine), r.streamed);
            }
        } else if (kFloatType<T> == FloatType::bfloat16 && r.plan.scale == Scale::e8m0 &&
                   tile % 32 == 0) {
            for (; t < tiles && r.fp8.covers(bytes[t]); ++t) {
                for (int64_t i = t * tile; i < (t + 1) * tile; i += 32) {
                    __m512i bits16;
                    if (!r.fp8.run(codes + i, bytes[t], bits16)) return t;
                    store_cache_line(out + i, bits16, r.streamed);
                }
            }
        }
    }
#endif
    return t;
}

// Tiles first .. last of a row, of which `length` values exist.
template <class T>
void decode_row(const Reader& r, int64_t row, int64_t first, int64_t last) {
    const DequantJob& job = r.job;
    const uint8_t* codes = job.codes + row * r.packed;
    T* out = static_cast<T*>(job.values) + row * job.length;
    const int64_t image = row / job.rows, band = row % job.rows / job.tile_rows;
    const int64_t bands = ceil_div(job.rows, job.tile_rows), bits = r.decoder.bits;
    const int64_t scales = (image * bands + band) * r.tiles, tile = job.tile_length;
    const float tensor_scale = job.tensor_scale;
    for (int64_t t = first; t < last; ++t) {
        int64_t i = t * tile;
        const int64_t whole_tiles = least(last, job.length / tile) - t;
        if (const int64_t done =
                decode_16bit(r, codes + i * bits / 8, scales + t, whole_tiles, out + i)) {
            t += done - 1;
            continue;
        }
        // Two tiles of one vector each fill a cache line together.
        if (sizeof(T) == 4 && tile == VL && bits == 4 && !job.zero_points && t + 2 <= last &&
            i + 2 * VL <= job.length) {
            store_two(
                out + i, r.decoder.template run<4>(codes, i) * r.scale(scales + t) * tensor_scale,
                r.decoder.template run<4>(codes, i + VL) * r.scale(scales + t + 1) * tensor_scale,
                r.streamed);
            ++t;
            continue;
        }
        const float scale = r.scale(scales + t), point = r.point(scales + t);
        const int64_t end = least(i + tile, job.length), whole = (end - i) / VL * VL;
        if (tile % VL == 0) {
            const auto run = bits == 4   ? decode_run<4, T>
                             : bits == 6 ? decode_run<6, T>
                                         : decode_run<8, T>;
            run(r, codes, i, whole, scale, point, out + i);
            i += whole;
        }
        for (; i < end; i += VL) {
            vu c = {};
            for (int64_t k = 0; k < least(VL, end - i); ++k)
                c[k] = codes_at(codes, 1, i + k, r.decoder.bits, 1)[0];
            store_upto(out + i, (r.decoder.lookup(c) - point) * scale * tensor_scale, end - i);
        }
    }
}

// Tiles first .. last of an image whose blocks run columnwise.
template <class T>
void decode_columns(const Reader& r, int64_t image, int64_t first, int64_t last) {
    const DequantJob& job = r.job;
    const int64_t inner = job.inner, groups = ceil_div(inner, job.tile_rows);
    const uint8_t* codes = job.codes + image * r.packed * inner;
    T* out = static_cast<T*>(job.values) + image * job.length * inner;
    float* scales = scratch_of<float>(Slot::scales, 2 * (inner + VL));
    float* points = scales + inner + VL;
    for (int64_t t = first; t < last; ++t) {
        for (int64_t j = 0; j < inner; ++j) {
            const int64_t at = (image * r.tiles + t) * groups + j / job.tile_rows;
            scales[j] = r.scale(at), points[j] = r.point(at);
        }
        const int64_t end = least((t + 1) * job.tile_length, job.length);
        for (int64_t i = t * job.tile_length; i < end; ++i) {
            for (int64_t j = 0; j < inner; j += VL) {
                const vu c = codes_at(codes + j, inner, i, r.decoder.bits, inner - j);
                const vf value = (r.decoder.lookup(c) - load(points + j)) * load(scales + j);
                store_upto(out + i * inner + j, value * job.tensor_scale, inner - j);
            }
        }
    }
}

template <class T>
void decode(const Reader& r) {
    const DequantJob& job = r.job;
    const bool columns = job.inner != 1;
    const int64_t rows = columns ? job.outer : job.outer * job.rows;
    // Tasks of whole tiles along the length: independent for rows and columns alike.
    const int64_t step = most(1, 4 * kChunkValues / most(1, job.tile_length * job.inner));
    const int64_t parts = ceil_div(r.tiles, step);
    const int64_t rows_per_task =
        parts > 1 ? 1 : most(1, 4 * kChunkValues / (job.length * job.inner));
    threads::run(ceil_div(rows, rows_per_task) * parts, 8 * rows * job.length * job.inner,
                 [&](int64_t task) {
                     const int64_t begin = task / parts * rows_per_task,
                                   first = task % parts * step;
                     const int64_t last = least(first + step, r.tiles);
                     for (int64_t row = begin; row < least(begin + rows_per_task, rows); ++row)
                         columns ? decode_columns<T>(r, row, first, last)
                                 : decode_row<T>(r, row, first, last);
                     if (r.streamed) finish_streaming();
                 });
}

}  // namespace

void dequantize(const QuantPlan& plan, const DequantJob& job) {
    const Reader reader(plan, job);
    switch (job.type) {
        case FloatType::float32: return decode<float>(reader);
        case FloatType::bfloat16: return decode<bfloat16>(reader);
        default: return decode<float16>(reader);
    }
}

}  // namespace EXTENSOR_ISA
