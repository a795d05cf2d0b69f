// Packed codes back to float32, bfloat16 or float16: (grid value * block scale) * tensor scale in
// float32, rounded once where the result is narrower.

#include "floats.hpp"
#include "quant.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kPast = 1 << 23;  // bytes of results that no cache holds for their reader

// Codes, one in each lane, to the values of their grid.
struct Decoder {
    float table[256];
    int bits;
#if EXTENSOR_LANES == 16
    // Eight-bit floats are float16 numbers after a shift, up to a power of two; codes without a
    // finite value are not, and come from the table.
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
        return _mm512_i32gather_ps(at, table, 4);
#else
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = table[codes[i]];
        return v;
#endif
    }

    // VL codes of four or eight bits, `at` of them into the row; at is a multiple of VL.
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
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        if (narrow_float) {
            const __m256i w = _mm256_cvtepu8_epi16(bytes);
            const __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x7F));
            if (!_mm256_cmpgt_epu16_mask(magnitude, _mm256_set1_epi16(static_cast<short>(max_code)))) {
                const __m256i half =
                    _mm256_ternarylogic_epi32(_mm256_sll_epi16(magnitude, shift), _mm256_slli_epi16(w, 8),
                                              _mm256_set1_epi16(static_cast<short>(0x8000)), 0xF8);
                return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(factor));
            }
        }
        return lookup(reinterpret_cast<vu>(_mm512_cvtepu8_epi32(bytes)));
#else
        vu c;
        for (int i = 0; i < VL; ++i)
            c[i] = Bits == 4 ? from[i / 2] >> (i % 2 * 4) & 15u : from[i];
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
    if (bits == 4) return bytes(rows + index / 2 * stride) >> static_cast<uint32_t>(index % 2 * 4) & 15u;
    // Four codes in three bytes.
    const int64_t first = index * 6 / 8, start = index * 6 % 8;
    vu code = bytes(rows + first * stride) >> static_cast<uint32_t>(start);
    if (start > 2)
        code |= bytes(rows + (first + 1) * stride) << static_cast<uint32_t>(8 - start);
    return code & 63u;
}

// Past the caches, where asked for and the place is aligned; `finish_stores` before others read.
INLINE void store_past(float* to, vf v, [[maybe_unused]] bool past) {
#if EXTENSOR_LANES == 16
    if (past && reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, v);
#endif
    store(to, v);
}

template <class Half>
INLINE void store_past(Half* to, vf v, bool) {
    store_upto(to, v, VL);
}

// Two vectors that follow one another: halves fill a line of memory together.
template <class T>
INLINE void store_pair(T* to, vf a, vf b, [[maybe_unused]] bool past) {
#if EXTENSOR_LANES == 16
    if constexpr (sizeof(T) == 2) {
        if (past && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
            const __m256i low = reinterpret_cast<__m256i>(narrow(a, T{}));
            const __m256i high = reinterpret_cast<__m256i>(narrow(b, T{}));
            return _mm512_stream_si512(reinterpret_cast<__m512i*>(to),
                                       _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        }
    }
#endif
    store_past(to, a, past);
    store_past(to + VL, b, past);
}

INLINE void finish_stores() {
#if EXTENSOR_LANES == 16
    _mm_sfence();
#endif
}

struct Reader {
    const QuantPlan& plan;
    const DequantJob& job;
    Decoder decoder;
    float ue4m3[256];
    int64_t tiles, packed;
    bool past;

    Reader(const QuantPlan& plan, const DequantJob& job)
        : plan(plan), job(job), decoder(kElements[plan.element]),
          tiles(ceil_div(job.length, job.tile_length)),
          packed(ceil_div(tiles * job.tile_length * decoder.bits, 8)) {
        decode_table(kElements[kScaleElement], ue4m3);
        const int64_t size = job.type == FloatType::float32 ? 4 : 2;
        past = size * job.outer * job.rows * job.length * job.inner >= kPast;
    }

    float scale(int64_t at) const { return scale_value(plan.scale, job.scales, at, ue4m3); }
    float point(int64_t at) const { return job.zero_points ? job.zero_points[at] : 0.0f; }
};

// Whole tiles of Tile values, a multiple of two vectors or one: codes from the `at`-th on.
template <int Bits, class T>
INLINE void decode_run(const Reader& r, const uint8_t* codes, int64_t at, int64_t count, float scale,
                       float point, T* out) {
    const float tensor_scale = r.job.tensor_scale;
    int64_t i = 0;
    for (; i + 2 * VL <= count; i += 2 * VL)
        store_pair(out + i, (r.decoder.template run<Bits>(codes, at + i) - point) * scale * tensor_scale,
                   (r.decoder.template run<Bits>(codes, at + i + VL) - point) * scale * tensor_scale,
                   r.past);
    for (; i < count; i += VL)
        store_past(out + i, (r.decoder.template run<Bits>(codes, at + i) - point) * scale * tensor_scale,
                   r.past);
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
        // Two tiles of one vector each, so that they fill a line together.
        if (tile == VL && bits == 4 && !job.zero_points && t + 2 <= last && i + 2 * VL <= job.length) {
            store_pair(out + i, r.decoder.template run<4>(codes, i) * r.scale(scales + t) * tensor_scale,
                       r.decoder.template run<4>(codes, i + VL) * r.scale(scales + t + 1) * tensor_scale,
                       r.past);
            ++t;
            continue;
        }
        const float scale = r.scale(scales + t), point = r.point(scales + t);
        const int64_t end = least(i + tile, job.length), whole = (end - i) / VL * VL;
        if (bits != 6 && tile % VL == 0) {
            bits == 4 ? decode_run<4>(r, codes, i, whole, scale, point, out + i)
                      : decode_run<8>(r, codes, i, whole, scale, point, out + i);
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

// Tiles first .. last down the columns of an image.
template <class T>
void decode_columns(const Reader& r, int64_t image, int64_t first, int64_t last) {
    const DequantJob& job = r.job;
    const int64_t inner = job.inner, groups = ceil_div(inner, job.tile_rows);
    const uint8_t* codes = job.codes + image * r.packed * inner;
    T* out = static_cast<T*>(job.values) + image * job.length * inner;
    float* scales = scratch_of<float>(Slot::planes, 2 * (inner + VL));
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
    // Tasks of whole tiles down the length: independent for rows and columns alike.
    const int64_t step = most(1, 4 * kPiece / most(1, job.tile_length * job.inner));
    const int64_t parts = ceil_div(r.tiles, step);
    const int64_t together = parts > 1 ? 1 : most(1, 4 * kPiece / (job.length * job.inner));
    threads::run(ceil_div(rows, together) * parts, 8 * rows * job.length * job.inner, [&](int64_t task) {
        const int64_t begin = task / parts * together, first = task % parts * step;
        const int64_t last = least(first + step, r.tiles);
        for (int64_t row = begin; row < least(begin + together, rows); ++row)
            columns ? decode_columns<T>(r, row, first, last) : decode_row<T>(r, row, first, last);
        if (r.past) finish_stores();
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
