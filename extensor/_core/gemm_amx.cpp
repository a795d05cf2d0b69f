// a b^T of two blocked matrices on AMX tiles of bfloat16, where every value is exactly a bfloat16.
//
// TDPBF16PS adds to each of 16 x 16 float32 sums the dot product of 32 values: the 16 even and the
// 16 odd terms each by fused multiply-add from zero in the order of k, the two sums together, that
// to the result (Intel SDM vol. 2B). It reads subnormals as zero and flushes them; the caller sees
// to it that none occur. Neither threads nor the blocking change the order, hence no bit.

#include "gemm_loops.hpp"

namespace EXTENSOR_ISA {
namespace {

static_assert(VL == 16);
constexpr int64_t kTile = 32;    // along k, of one instruction
constexpr int kHeight = 32;      // rows of a, and of b, in a panel: two tiles
constexpr int64_t kTileValues = 16 * kTile;
constexpr int64_t kRun = 512;    // along k, of one visit to the sums: b's panel stays in L1

// One side: [panel][k / 32][two tiles][16][32] values. In a tile of a a line is a row of the
// matrix; in a tile of b it is a pair along k, of sixteen rows one after another.
struct Side {
    const BlockedMatrix& m;
    ScaleReader scales;
    bool transposed;
    int64_t k, steps;
    int bits;
    float table[256];
    uint16_t* values = nullptr;

    Side(const BlockedMatrix& m, int64_t k, bool transposed)
        : m(m), scales(m, k), transposed(transposed), k(k), steps(ceil_div(k, kTile)),
          bits(kElements[m.element].bits) {
        decode_table(kElements[m.element], table);
    }

    int64_t panel_values() const { return steps * 2 * kTileValues; }

    void allocate(Slot slot, int64_t panels) {
        values = scratch_of<uint16_t>(slot, panels * panel_values());
    }

    void pack(int64_t panel, int64_t first) const {
        uint16_t* to = values + panel * panel_values();
        alignas(64) uint16_t lines[kTileValues];
        for (int64_t step = 0; step < steps; ++step) {
            for (int64_t half = 0; half < 2; ++half, to += kTileValues) {
                uint16_t* tile = transposed ? lines : to;
                for (int64_t r = 0; r < 16; ++r)
                    line(first + half * 16 + r, step * kTile, tile + r * kTile);
                if (transposed) transpose(lines, to);
            }
        }
    }

private:
    float scale(int64_t row, int64_t at) const {
        const float s = scales(row, at / m.tile_length);
        return s > 0 && s < 0x1p-126f ? 1 : s;  // only zeros have so small a scale here
    }

    // Values start .. start + 32 of a row; zeros where there are none.
    void line(int64_t row, int64_t start, uint16_t* to) const {
        const int64_t count = row < m.rows ? least(kTile, k - start) : 0;
        if (count == 0) {
            std::memset(to, 0, kTile * sizeof *to);
            return;
        }
        const uint8_t* codes = m.codes + row * m.row_bytes;
        alignas(64) uint8_t bytes[kTile] = {};
        if (bits == 4 && count == kTile) {
            const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + start / 2));
            const __m128i low = _mm_set1_epi8(15);
            const __m128i even = _mm_and_si128(packed, low);
            const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
            __m128i* out = reinterpret_cast<__m128i*>(bytes);
            _mm_store_si128(out, _mm_unpacklo_epi8(even, odd));
            _mm_store_si128(out + 1, _mm_unpackhi_epi8(even, odd));
        } else {
            unpack_run(codes, start, count, bits, bytes);
        }
        vf factor[2];
        const int64_t length = m.tile_length;
        if (length % kTile == 0 || length >= k) {
            factor[0] = factor[1] = splat(scale(row, start));
        } else if (length == 16) {
            factor[0] = splat(scale(row, start));
            factor[1] = count > 16 ? splat(scale(row, start + 16)) : factor[0];
        } else {
            float each[kTile] = {};
            for (int64_t i = 0; i < count; ++i) each[i] = scale(row, start + i);
            factor[0] = load(each), factor[1] = load(each + VL);
        }
        for (int half = 0; half < 2; ++half) {
            const __m512i index = _mm512_cvtepu8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + half * VL)));
            const __m512 value = bits == 4 ? _mm512_permutexvar_ps(index, _mm512_loadu_ps(table))
                                           : _mm512_i32gather_ps(index, table, 4);
            const __m512i scaled = _mm512_castps_si512(value * factor[half]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + half * VL),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(scaled, 16)));
        }
        // A code of zero beyond the row's end would still meet a NaN scale.
        if (count < kTile)
            std::memset(to + count, 0, static_cast<size_t>(kTile - count) * sizeof *to);
    }

    // Sixteen lines of sixteen pairs.
    static void transpose(const uint16_t* lines, uint16_t* to) {
        const __m512i line = _mm512_mullo_epi32(
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
            _mm512_set1_epi32(16));
        for (int64_t pair = 0; pair < 16; ++pair)
            _mm512_storeu_si512(to + pair * kTile,
                                _mm512_i32gather_epi32(line, lines + 2 * pair, 4));
    }
};

// The calling thread's tile registers: eight of 16 lines of 64 bytes.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};

struct Sums {
    const uint16_t *a, *b;
    int64_t steps;
    float* c;
    int64_t stride;
    bool first;
};

// 32 x 32 sums in tiles 0 to 3; a's tiles are 4 and 5, b's 6 and 7.
void add(const Sums& t) {
    const int64_t stride = t.stride * 4;
    float *c0 = t.c, *c1 = t.c + 16 * t.stride;
    if (t.first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c0, stride);
        _tile_loadd(1, c0 + 16, stride);
        _tile_loadd(2, c1, stride);
        _tile_loadd(3, c1 + 16, stride);
    }
    const uint16_t *a = t.a, *b = t.b;
    for (int64_t i = 0; i < t.steps; ++i, a += 2 * kTileValues, b += 2 * kTileValues) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kTileValues, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + kTileValues, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c0, stride);
    _tile_stored(1, c0 + 16, stride);
    _tile_stored(2, c1, stride);
    _tile_stored(3, c1 + 16, stride);
}

}  // namespace

void bf16(const BlockGemm& g) {
    static_assert(kHeight == NR && kHeight <= kTallest);
    Side a(g.a, g.k, false), b(g.b, g.k, true);
    product<Tiles>(
        g, kHeight, 2 * kTile * a.steps, kRun,
        [&](int64_t n) { a.allocate(Slot::packed_a, n); },
        [&](int64_t n) { b.allocate(Slot::packed_b, n); },
        [&](int64_t p, int64_t row) { a.pack(p, row); },
        [&](int64_t p, int64_t row) { b.pack(p, row); },
        [&](int64_t pa, int64_t pb, int64_t start, int64_t rows, int64_t columns, float* out) {
            const int64_t at = start / kTile;
            Sums t;
            t.a = a.values + pa * a.panel_values() + at * 2 * kTileValues;
            t.b = b.values + pb * b.panel_values() + at * 2 * kTileValues;
            t.steps = least(kRun / kTile, a.steps - at), t.first = start == 0;
            on_output(t, out, g.b.rows, rows, columns, kHeight, add);
        });
}

}  // namespace EXTENSOR_ISA
