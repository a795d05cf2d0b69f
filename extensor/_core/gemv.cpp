// float32 rows times a blocked matrix of 4- or 8-bit codes, reading every code once.
//
// Lanes hold partial sums. Four-bit codes: a vector of words holds eight codes a lane, so x is
// dealt out to match, and a lane's eight products share a scale. Eight-bit codes: consecutive
// elements. Sums of one block's grid values are scaled once; the order is fixed by the shapes and
// the level, not by the threads.

#include "decode.hpp"
#include "threads.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

constexpr int64_t kTaskRows = 64;
constexpr int64_t kChunk = 8 * VL;  // four-bit codes in one vector

INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// ---- four bits ----

struct Table16 {
#if defined(__AVX512F__)
    __m512 values;
    explicit Table16(const float* t) : values(_mm512_loadu_ps(t)) {}
    INLINE vf operator[](vu code) const {  // only the low four bits of each lane count
        return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), values);
    }
#elif defined(__AVX2__)
    __m256 low, high;
    explicit Table16(const float* t) : low(_mm256_loadu_ps(t)), high(_mm256_loadu_ps(t + 8)) {}
    INLINE vf operator[](vu code) const {
        const __m256i i = reinterpret_cast<__m256i>(code);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                upper);
    }
#else
    float values[16];
    explicit Table16(const float* t) { std::memcpy(values, t, sizeof values); }
    INLINE vf operator[](vu code) const {
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = values[code[i] & 15];
        return v;
    }
#endif
};

// Spreads a run of scales over the lanes of one vector: lane l takes number l * 8 / tile.
struct Spread {
    vi index;
    int64_t tile;
    bool broadcast;

    explicit Spread(int64_t tile) : index{}, tile(tile), broadcast(tile >= kChunk) {
        for (int i = 0; i < VL && !broadcast; ++i) index[i] = static_cast<int>(i * 8 / tile);
    }

    // `values` is readable for VL floats beyond its end.
    INLINE vf operator()(const float* values, int64_t chunk) const {
        const float* at = values + chunk * kChunk / tile;
        if (broadcast) return splat(*at);
#if defined(__AVX512F__)
        return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), load(at));
#elif defined(__AVX2__)
        return _mm256_permutevar8x32_ps(load(at), reinterpret_cast<__m256i>(index));
#else
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = at[index[i]];
        return v;
#endif
    }
};

struct Rows {
    const WeightGemm& g;
    ScaleReader scales;
    float table[256];
    float unit;        // folded into the scales
    int64_t tiles, room;
    const float* x;    // [m][chunk][...], zero-padded
    const float* sums; // with zero points: [m][chunk][lane] sums of x (four bits)
    int64_t x_stride, sum_stride;

    explicit Rows(const WeightGemm& g) : g(g), scales(g.w, g.k), unit(1) {
        decode_table(kElements[g.w.element], table);
        tiles = scales.tiles;
        room = tiles + 2 * VL;
    }

    // Scales of one row as floats times `unit`, and zeros in the room after them: lanes beyond the
    // end multiply their zeros by it, and what an earlier call left there may be NaN.
    void decode_scales(int64_t row, float* to) const {
        const BlockedMatrix& w = g.w;
        int64_t t = 0;
        for (int64_t i = tiles; i < room; ++i) to[i] = 0;
        const int64_t at = scales.at(row, 0);
        if (w.scale == static_cast<int>(Scale::float32)) {
            const float* from = static_cast<const float*>(w.scales) + at;
            for (; t < tiles; ++t) to[t] = from[t] * unit;
            return;
        }
        const uint8_t* from = static_cast<const uint8_t*>(w.scales) + at;
        if (w.scale == static_cast<int>(Scale::e8m0)) {
            typedef uint8_t octets __attribute__((vector_size(VL), aligned(1), may_alias));
            for (; t + VL <= tiles; t += VL) {
                const vu byte = __builtin_convertvector(
                    *reinterpret_cast<const octets*>(from + t), vu);
                vu bits = byte == 0u ? splat(0x400000u) : byte << 23;
                bits = byte == 255u ? splat(0x7FC00000u) : bits;
                store(to + t, reinterpret_cast<vf>(bits) * unit);
            }
            for (; t < tiles; ++t) {
                const uint32_t byte = from[t];
                const uint32_t special = byte == 0 ? 0x400000u : 0x7FC00000u;
                uint32_t bits = byte << 23;
                bits = byte == 0 || byte == 255 ? special : bits;
                to[t] = as_float(bits) * unit;
            }
            return;
        }
#if defined(__AVX512F__) || defined(__F16C__)
        for (; t + 8 <= tiles; t += 8) {
            const __m128i octets = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + t));
            const __m128i odd = _mm_subs_epu8(octets, _mm_set1_epi8(0x7E));  // NaN, or a sign
            if (_mm_cvtsi128_si64(odd)) {
                for (int i = 0; i < 8; ++i) to[t + i] = scales.ue4m3[from[t + i]] * unit;
                continue;
            }
            const __m128i halves = _mm_slli_epi16(_mm_cvtepu8_epi16(octets), 7);
            _mm256_storeu_ps(to + t, _mm256_mul_ps(_mm256_cvtph_ps(halves),
                                                   _mm256_set1_ps(256.0f * unit)));
        }
#endif
        for (; t < tiles; ++t) to[t] = scales.ue4m3[from[t]] * unit;
    }

    void decode_zeros(int64_t row, float* to) const {
        const int8_t* from = g.w.zero_points + scales.at(row, 0);
        for (int64_t t = 0; t < tiles; ++t) to[t] = from[t];
        for (int64_t t = tiles; t < room; ++t) to[t] = 0;
    }
};

template <int M, int R, bool Zero>
void nibble_rows(const Rows& s, int64_t row, float* scale, float* zero) {
    const Table16 table(s.table);
    const Spread spread(s.g.w.tile_length);
    const int64_t k = s.g.k, whole = k / kChunk, chunks = ceil_div(k, kChunk);
    alignas(64) uint8_t tail[R][4 * VL] = {};
    const uint8_t* codes[R];
    for (int r = 0; r < R; ++r) {
        codes[r] = s.g.w.codes + (row + r) * s.g.w.row_bytes;
        s.decode_scales(row + r, scale + r * s.room);
        if (Zero) s.decode_zeros(row + r, zero + r * s.room);
        if (chunks > whole) {
            const int64_t left = k - whole * kChunk;
            std::memcpy(tail[r], codes[r] + whole * 4 * VL, static_cast<size_t>((left + 1) / 2));
        }
    }
    vf total[R][M] = {};
    for (int64_t c = 0; c < chunks; ++c) {
        vu words[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            words[r] = load(reinterpret_cast<const uint32_t*>(c < whole ? codes[r] + c * 4 * VL
                                                                        : tail[r]));
        vf part[R][M] = {};
        const float* x = s.x + c * kChunk;
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const vf w = table[words[r] >> (4 * j)];
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m)
                    part[r][m] = multiply_add(w, load(x + m * s.x_stride + j * VL), part[r][m]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const vf factor = spread(scale + r * s.room, c);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                if constexpr (Zero)
                    part[r][m] -= spread(zero + r * s.room, c) *
                                  load(s.sums + m * s.sum_stride + c * VL);
                total[r][m] = multiply_add(part[r][m], factor, total[r][m]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M && m < s.g.m; ++m)
            s.g.out[m * s.g.w.rows + row + r] = sum(total[r][m]) * s.g.w.tensor_scale;
}

// ---- eight bits ----

enum class Octet { integer, e4m3, e5m2 };

// VL codes as floats, e4m3 divided by 256; `bad` collects codes that are NaN.
template <Octet Kind>
INLINE vf decode_octets(const uint8_t* from, [[maybe_unused]] const float* table,
                        [[maybe_unused]] vu& bad) {
#if defined(__AVX512F__)
    const __m128i octets = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (Kind == Octet::integer) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(octets));
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(octets), 8);
    if constexpr (Kind == Octet::e5m2) return _mm512_cvtph_ps(wide);
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F00));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F00));
    bad |= reinterpret_cast<vu>(_mm512_inserti64x4(_mm512_setzero_si512(), nan, 0));
    return _mm512_cvtph_ps(_mm256_or_si256(_mm256_srli_epi16(magnitude, 1),
                                           _mm256_andnot_si256(_mm256_set1_epi16(0x7FFF), wide)));
#elif defined(__AVX2__)
    const __m128i octets = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    if constexpr (Kind == Octet::integer) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(octets));
    const __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(octets), 8);
    if constexpr (Kind == Octet::e5m2) return _mm256_cvtph_ps(wide);
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F00));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F00));
    bad |= reinterpret_cast<vu>(_mm256_inserti128_si256(_mm256_setzero_si256(), nan, 0));
    return _mm256_cvtph_ps(_mm_or_si128(_mm_srli_epi16(magnitude, 1),
                                        _mm_andnot_si128(_mm_set1_epi16(0x7FFF), wide)));
#else
    vf v;
    for (int i = 0; i < VL; ++i)
        v[i] = Kind == Octet::integer ? static_cast<float>(static_cast<int8_t>(from[i]))
                                      : table[from[i]] * (Kind == Octet::e4m3 ? 0.00390625f : 1);
    return v;
#endif
}

template <int M, int R, bool Zero, Octet Kind>
void octet_rows(const Rows& s, int64_t row, float* scale, float* zero) {
    const int64_t k = s.g.k, tile = s.g.w.tile_length;
    const uint8_t* codes[R];
    for (int r = 0; r < R; ++r) {
        codes[r] = s.g.w.codes + (row + r) * s.g.w.row_bytes;
        s.decode_scales(row + r, scale + r * s.room);
        if (Zero) s.decode_zeros(row + r, zero + r * s.room);
    }
    vf total[R][M] = {};
    vu bad[R] = {};
    for (int64_t t = 0; t < s.tiles; ++t) {
        vf part[R][M] = {};
        const int64_t end = least(k, (t + 1) * tile);
        int64_t i = t * tile;
        for (; i + VL <= end; i += VL) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                vf w = decode_octets<Kind>(codes[r] + i, s.table, bad[r]);
                if constexpr (Zero) w -= zero[r * s.room + t];
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m)
                    part[r][m] = multiply_add(w, load(s.x + m * s.x_stride + i), part[r][m]);
            }
        }
        if (i < end) {  // x is zero beyond k
            for (int r = 0; r < R; ++r) {
                uint8_t tail[VL] = {};
                std::memcpy(tail, codes[r] + i, static_cast<size_t>(end - i));
                vf w = decode_octets<Kind>(tail, s.table, bad[r]);
                if constexpr (Zero) w -= zero[r * s.room + t];
                for (int m = 0; m < M; ++m)
                    part[r][m] = multiply_add(w, load(s.x + m * s.x_stride + i), part[r][m]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
                total[r][m] = multiply_add(part[r][m], splat(scale[r * s.room + t]), total[r][m]);
    }
    for (int r = 0; r < R; ++r) {
        bool nan = false;
        for (int i = 0; i < VL; ++i) nan |= bad[r][i] != 0;
        for (int m = 0; m < M && m < s.g.m; ++m)
            s.g.out[m * s.g.w.rows + row + r] =
                nan ? __builtin_nanf("") : sum(total[r][m]) * s.g.w.tensor_scale;
    }
}

// ---- all ----

using RowsFunction = void (*)(const Rows&, int64_t row, float* scale, float* zero);

template <int M, int R>
RowsFunction pick(const Element& e, bool zero) {
    if (e.bits == 4) return zero ? nibble_rows<M, R, true> : nibble_rows<M, R, false>;
    if (!e.is_float)
        return zero ? octet_rows<M, R, true, Octet::integer> : octet_rows<M, R, false, Octet::integer>;
    return e.mantissa_bits == 3 ? octet_rows<M, R, false, Octet::e4m3>
                                : octet_rows<M, R, false, Octet::e5m2>;
}

template <int M, int R>
void run(const Rows& s) {
    const RowsFunction several = pick<M, R>(kElements[s.g.w.element], s.g.w.zero_points);
    const RowsFunction one = pick<M, 1>(kElements[s.g.w.element], s.g.w.zero_points);
    const int64_t n = s.g.w.rows;
    threads::run(ceil_div(n, kTaskRows), n * s.g.k, [&](int64_t task) {
        float* scale = scratch_of<float>(Slot::partial, 2 * R * s.room);
        float* zero = scale + R * s.room;
        const int64_t end = least(n, (task + 1) * kTaskRows);
        int64_t row = task * kTaskRows;
        for (; row + R <= end; row += R) several(s, row, scale, zero);
        for (; row < end; ++row) one(s, row, scale, zero);
    });
}

}  // namespace

void weight_product(const WeightGemm& g) {
    const Element& e = kElements[g.w.element];
    Rows s(g);
    if (e.bits == 8) s.unit = e.is_float ? (e.mantissa_bits == 3 ? 256.0f : 1.0f)
                                         : power_of_two(-e.mantissa_bits);
    const int64_t m = g.m > 4 ? 8 : g.m > 2 ? 4 : g.m, chunks = ceil_div(g.k, kChunk);
    s.x_stride = chunks * kChunk + VL, s.sum_stride = chunks * VL;
    float* x = scratch_of<float>(Slot::packed_a, m * (s.x_stride + s.sum_stride));
    float* sums = x + m * s.x_stride;
    std::memset(x, 0, static_cast<size_t>(m * (s.x_stride + s.sum_stride)) * 4);
    for (int64_t r = 0; r < g.m; ++r) {
        float* to = x + r * s.x_stride;
        if (e.bits == 8) {
            std::memcpy(to, g.x + r * g.k, static_cast<size_t>(g.k) * 4);
            continue;
        }
        for (int64_t i = 0; i < g.k; ++i) {
            const int64_t chunk = i / kChunk, lane = i % kChunk / 8;
            to[chunk * kChunk + i % 8 * VL + lane] = g.x[r * g.k + i];
            sums[r * s.sum_stride + chunk * VL + lane] += g.x[r * g.k + i];
        }
    }
    s.x = x, s.sums = sums;
    switch (m) {
        case 1: return run<1, 4>(s);
        case 2: return run<2, 4>(s);
        case 4: return run<4, 2>(s);
        default: return run<8, 1>(s);
    }
}

}  // namespace EXTENSOR_ISA
