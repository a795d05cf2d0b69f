// a b^T of two block-scaled matrices of small integers, each row under one float32 scale, on AMX
// tiles of int8. The result has the same bits as that of block_gemm_int.cpp.
//
// TDPBSSD adds to each of 16 x 16 int32 sums the dot product of 64 int8: exact over a step of k.

#include "matmul/block_gemm_tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kTile = 64;  // along k, of one instruction
static_assert(kMaxStep % kTile == 0);

struct Integers {
    using Value = int8_t;
    static constexpr bool transposed = false;
    const BlockedMatrix& m;
    int64_t rows, k;
    int bits;
    bool plain;  // codes are the integers
    IntegerTable table;

    Integers(const BlockedMatrix& m, int64_t k)
        : m(m),
          rows(m.rows),
          k(k),
          bits(kElements[m.element].bits),
          plain(bits == 8 && !kElements[m.element].is_float),
          table(kElements[m.element]) {}

    void tile(int64_t row, int64_t start, int8_t* to) const {
        for (int64_t r = 0; r < 16; ++r) row_of(row + r, start, to + r * kTile);
    }

    void row_of(int64_t row, int64_t start, int8_t* to) const {
        const int64_t count = row < rows ? most(0, least(kTile, k - start)) : 0;
        const uint8_t* codes = m.codes + row * m.row_bytes;
        if (plain)
            std::memcpy(to, codes + start, static_cast<size_t>(count));
        else if (count)
            lookup_run(codes, start, count, bits, table.values, to);
        std::memset(to + count, 0, static_cast<size_t>(kTile - count));
    }
};

// One packed matrix and the scale of each row; with zero points also those, and the sums of the
// integers.
struct IntegerRows {
    Side<Integers> side;
    ScaleReader scales;
    bool zero;  // whether either matrix has zero points
    float* scale = nullptr;
    int32_t *zeros = nullptr, *sums = nullptr;  // [panel][32], [panel][run][32]
    int64_t runs;

    IntegerRows(const Integers& source, bool transposed, bool zero)
        : side(source, source.k, transposed),
          scales(source.m, source.k),
          zero(zero),
          runs(ceil_div(source.k, kMaxStep)) {}

    void allocate(int64_t panels) {
        side.allocate(panels);
        const Slot slot = side.transposed ? Slot::scales_b : Slot::scales_a;
        scale = scratch_of<float>(slot, panels * kHeight * (2 + runs));
        zeros = reinterpret_cast<int32_t*>(scale + panels * kHeight);
        sums = zeros + panels * kHeight;
    }

    void pack(int64_t panel, int64_t first) const {
        side.pack(panel, first);
        const Integers& from = side.source;
        for (int64_t r = 0; r < kHeight; ++r) {
            const int64_t row = first + r, at = panel * kHeight + r;
            const bool real = row < from.rows;
            scale[at] = real ? scales(row, 0) * from.table.unit : 0;
            if (!zero) continue;
            zeros[at] = real && from.m.zero_points ? from.m.zero_points[scales.at(row, 0)] : 0;
            for (int64_t run = 0; run < runs; ++run)
                sums[(panel * runs + run) * kHeight + r] = real ? sum(row, run * kMaxStep) : 0;
        }
    }

private:
    int32_t sum(int64_t row, int64_t start) const {
        int32_t total = 0;
        int8_t values[kTile];
        const int64_t end = least(side.source.k, start + kMaxStep);
        for (int64_t at = start; at < end; at += kTile) {
            side.source.row_of(row, at, values);
            for (const int8_t value : values) total += value;
        }
        return total;
    }
};

struct IntegerUpdate : TileUpdate {
    const float *a_scale, *b_scale;
    const int32_t *a_zero, *b_zero, *a_sum, *b_sum;
    int64_t count;  // of k
    bool zero;
};

void add(const IntegerUpdate& v) {
    alignas(64) int32_t sums[kHeight * NR];
    zero_sums();
    add_products<int8_t>(v);
    store_sums(sums, NR * 4);
    for (int64_t r = 0; r < kHeight; ++r) {
        // (a - za)(b - zb) = a b - za b - zb (a - za)
        const int32_t a_zero = v.zero ? v.a_zero[r] : 0;
        const int32_t a_rest = v.zero ? v.a_sum[r] - static_cast<int32_t>(v.count) * a_zero : 0;
        for (int64_t i = 0; i < NR; i += VL) {
            __m512i sum = _mm512_load_si512(sums + r * NR + i);
            if (v.zero) {
                const __m512i b_sum = _mm512_loadu_si512(v.b_sum + i);
                const __m512i b_zero = _mm512_loadu_si512(v.b_zero + i);
                sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(b_sum, _mm512_set1_epi32(a_zero)));
                sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(b_zero, _mm512_set1_epi32(a_rest)));
            }
            float* c = v.c + r * v.stride + i;
            const vf scale = load(v.b_scale + i) * splat(v.a_scale[r]);
            const vf term = reinterpret_cast<vf>(_mm512_cvtepi32_ps(sum)) * scale;
            store(c, (v.first ? vf{} : load(c)) + term);
        }
    }
}

}  // namespace

void amx_int8_product(const BlockGemm& g) {
    const Integers left(g.a, g.k), right(g.b, g.k);
    const bool zero = g.a.zero_points || g.b.zero_points;
    IntegerRows a(left, false, zero), b(right, true, zero);
    const int64_t run_bytes = least(kMaxStep, a.side.row_bytes());
    product<TileRegisters>(
        g, {kHeight, a.side.row_bytes(), kMaxStep, task_rows(run_bytes), kTaskPanels}, a, b,
        [&](const IntegerRows& b, int64_t pa, int64_t pb, int64_t start, int64_t rows,
            int64_t columns, float* out) {
            IntegerUpdate v{};
            static_cast<TileUpdate&>(v) = tile_update(a.side, b.side, pa, pb, start, kMaxStep);
            const int64_t run = start / kMaxStep;
            v.a_scale = a.scale + pa * kHeight, v.b_scale = b.scale + pb * kHeight;
            v.a_zero = a.zeros + pa * kHeight, v.b_zero = b.zeros + pb * kHeight;
            v.a_sum = a.sums + (pa * a.runs + run) * kHeight;
            v.b_sum = b.sums + (pb * b.runs + run) * kHeight;
            v.count = least(kMaxStep, g.k - start), v.zero = zero;
            on_output(v, out, g.b.rows, rows, columns, kHeight, add);
        });
}

}  // namespace EXTENSOR_ISA
