// a b^T of two block-scaled matrices of any elements, for those that are not small integers:
// decoded to float32 in packed panels, summed by multiply-add in the order of k, kRun elements at a
// time. Every level keeps the error bound, but not the same bits.

#include "matmul/block_gemm.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int MF = VL == 16 ? 12 : VL == 8 ? 6 : 2;  // rows of a tile
constexpr int64_t kRun = 256;                        // along k, that a tile adds up at a time

// [panel][k][width] values.
struct FloatSide {
    const BlockedMatrix& m;
    ScaleReader scales;
    int width;
    int64_t k;
    Slot slot;
    float table[256];
    float* values;

    FloatSide(const BlockedMatrix& m, int64_t k, int width, Slot slot)
        : m(m), scales(m, k), width(width), k(k), slot(slot) {
        decode_table(kElements[m.element], table);
    }

    void allocate(int64_t panels) { values = scratch_of<float>(slot, panels * k * width); }

    void pack(int64_t panel, int64_t first) const {
        constexpr int64_t kChunk = 64;
        float chunk[NR * kChunk];
        uint8_t codes[kChunk];
        const int bits = kElements[m.element].bits;
        float* to = values + panel * k * width;
        for (int64_t start = 0; start < k; start += kChunk) {
            const int64_t n = least(kChunk, k - start);
            for (int64_t r = 0; r < width; ++r) {
                float* row = chunk + r * kChunk;
                if (first + r >= m.rows) {
                    std::memset(row, 0, sizeof(float) * kChunk);
                    continue;
                }
                unpack_run(m.codes + (first + r) * m.row_bytes, start, n, bits, codes);
                for (int64_t i = 0; i < n;) {
                    const int64_t tile = (start + i) / m.tile_length;
                    const int64_t end = least(n, (tile + 1) * m.tile_length - start);
                    const float s = scales(first + r, tile);
                    for (; i < end; ++i) row[i] = table[codes[i]] * s;
                }
            }
            for (int64_t i = 0; i < n; ++i)
                for (int64_t r = 0; r < width; ++r) *to++ = chunk[r * kChunk + i];
        }
    }
};

struct FloatTile {
    const float *a, *b;
    int64_t k;
    float* c;
    int64_t stride;
    bool first;
};

void float_tile(const FloatTile& t) {
    vf total[MF][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MF; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) total[r][v] = vf{};
    const float *a = t.a, *b = t.b;
    for (int64_t i = 0; i < t.k; ++i, a += MF, b += NR) {
        const vf b0 = load(b), b1 = load(b + VL);
#pragma GCC unroll 16
        for (int r = 0; r < MF; ++r) {
            const vf x = splat(a[r]);
            total[r][0] = multiply_add(x, b0, total[r][0]);
            total[r][1] = multiply_add(x, b1, total[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MF; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
            float* c = t.c + r * t.stride + v * VL;
            store(c, t.first ? total[r][v] : load(c) + total[r][v]);
        }
    }
}

}  // namespace

void float_product(const BlockGemm& g) {
    FloatSide a(g.a, g.k, MF, Slot::packed_a), b(g.b, g.k, NR, Slot::packed_b);
    product(g, {MF, 4 * g.k, kRun}, a, b,
            [&](const FloatSide& b, int64_t pa, int64_t pb, int64_t start, int64_t rows,
                int64_t columns, float* out) {
                FloatTile t;
                t.a = a.values + (pa * g.k + start) * MF, t.b = b.values + (pb * g.k + start) * NR;
                t.k = least(kRun, g.k - start), t.first = start == 0;
                on_output(t, out, g.b.rows, rows, columns, MF, float_tile);
            });
}

}  // namespace EXTENSOR_ISA
