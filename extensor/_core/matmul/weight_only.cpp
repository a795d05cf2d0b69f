// float32 rows times a block-scaled matrix of 4- or 8-bit codes (weight-only GEMM), reading every
// code once.
//
// Lanes hold partial sums. Four-bit codes: a vector of words holds eight codes a lane, so x is
// interleaved to match, and a lane's eight products share a scale. Eight-bit codes: consecutive
// elements. Sums of one block's grid values are scaled once. The order of additions depends on the
// shapes and the level, not on the threads.

#include "matmul/weight_only.hpp"

#if EXTENSOR_LANES == 16
#include "matmul/one_row_avx512.hpp"
#endif

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

constexpr int R = 4;  // rows of weights at a time
constexpr int64_t kTaskRows = 64;
constexpr int64_t kSlice = 8192;    // floats of x that stay in L1
constexpr int64_t kExpanded = 256;  // eight-bit codes expanded at a time
constexpr int64_t kCacheLine = 64;  // bytes
constexpr int64_t kFewRows = 4;     // of x; with more, decoding once for all is faster (measured)

using PartFunction = void (*)(const Weights&, const ScaleLanes&, const Part&);  // R rows by M of x

// Codes of a row. Beyond the last row these are the last row's, whose results are not stored.
INLINE const uint8_t* codes_of(const BlockedMatrix& w, int64_t row) {
    return w.codes + least(row, w.rows - 1) * w.row_bytes;
}

// ---- four bits ----

template <int M, Offset Kind>
void codes4_rows(const Weights& s, const ScaleLanes& scale_lanes, const Part& p) {
    const Table16 table(s.table);
    const int64_t row_bytes = s.g.w.row_bytes, k = p.end - p.start;
    const int64_t whole = k / kChunk, chunks = ceil_div(k, kChunk);
    alignas(64) uint8_t tail[R][4 * VL] = {};
    const uint8_t* codes[R];
    vf total[R][M];
    for (int r = 0; r < R; ++r) {
        codes[r] = codes_of(s.g.w, p.row + r) + p.start / 2;
        if (chunks > whole) {
            const int64_t left = k - whole * kChunk;
            std::memcpy(tail[r], codes[r] + whole * 4 * VL, static_cast<size_t>((left + 1) / 2));
        }
        for (int m = 0; m < M; ++m) total[r][m] = p.total[r * p.total_stride + m];
    }
    const float* x = s.x + p.first * s.x_stride + p.start;
    const float* sums = s.sums + p.first * s.sum_stride + p.start / 8;
    const float *scale = p.scale, *zero = p.zero;
    int64_t seen =
        (p.start - p.tile * s.g.w.tile_length) / kChunk;  // chunks so far under this scale
    for (int64_t c = 0; c < chunks; ++c, x += kChunk, sums += VL) {
        vu words[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const uint8_t* from = codes[r] + c * 4 * VL;
            __builtin_prefetch(from + R * row_bytes);
            words[r] = load(reinterpret_cast<const uint32_t*>(c < whole ? from : tail[r]));
        }
        vf part[R][M] = {};
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
            const vf factor = scale_lanes(scale + r * p.scale_stride);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                if constexpr (Kind != Offset::none) {
                    const vf offset = scale_lanes(zero + r * p.scale_stride);
                    const vf sum = load(sums + m * s.sum_stride);
                    if constexpr (Kind == Offset::zero)
                        part[r][m] -= offset * sum;
                    else
                        total[r][m] = multiply_add(offset, sum, total[r][m]);
                }
                total[r][m] = multiply_add(part[r][m], factor, total[r][m]);
            }
        }
        const bool next = !scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale;
        const int64_t step = next ? scale_lanes.step : 0;
        scale += step, zero += Kind == Offset::none ? 0 : step, seen = next ? 0 : seen;
    }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) p.total[r * p.total_stride + m] = total[r][m];
}

// ---- eight bits ----

template <int M, bool Zero, Code8 Kind>
void codes8_rows(const Weights& s, const ScaleLanes&, const Part& p) {
    constexpr bool kWide = Kind != Code8::integer;
    const int64_t tile = s.g.w.tile_length, row_bytes = s.g.w.row_bytes;
    // The end of a row, zero-padded; used wherever a vector might reach beyond it.
    alignas(64) uint8_t last[R][kExpanded + VL];
    alignas(64) Wide wide[R][kWide ? kExpanded + VL : 1];
    const uint8_t* from[R];
    MaxCode largest[R];
    vf total[R][M];
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) total[r][m] = p.total[r * p.total_stride + m];
    int64_t t = p.tile;
    for (int64_t start = p.start; start < p.end; start += kExpanded) {
        const int64_t count = least(kExpanded, p.end - start);
        for (int r = 0; r < R; ++r) {
            from[r] = codes_of(s.g.w, p.row + r) + start;
            if (count < kExpanded || (!kWide && tile % VL)) {
                std::memset(last[r], 0, sizeof last[r]);
                std::memcpy(last[r], from[r], static_cast<size_t>(count));
                from[r] = last[r];
            }
            for (int64_t at = 0; kWide && at < count; at += kCacheLine) {
                __builtin_prefetch(from[r] + at + R * row_bytes, 0, 2);
                if (Kind == Code8::e4m3) largest[r].add(from[r] + at);
                expand<Kind>(from[r] + at, s.table, wide[r] + at);
            }
        }
        const float* x = s.x + p.first * s.x_stride + start;
        for (int64_t i = 0; i < count;) {
            const int64_t tile_end = (t + 1) * tile - start, end = least(count, tile_end);
            vf part[R][M] = {};
            const auto add = [&](int64_t n) {  // of n lanes
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    vf w;
                    if constexpr (kWide)
                        w = load_wide(wide[r] + i);
                    else
                        w = load_signed(from[r] + i);
                    if constexpr (Zero) w -= p.zero[r * p.scale_stride + t - p.tile];
                    if (n < VL) w = first_lanes(w, n);
#pragma GCC unroll 8
                    for (int m = 0; m < M; ++m)
                        part[r][m] = multiply_add(w, load(x + m * s.x_stride + i), part[r][m]);
                }
            };
            if (end - i == 32) {  // an MX block, without the loop
#pragma GCC unroll 8
                for (int v = 0; v < 32 / VL; ++v, i += VL) add(VL);
            }
            for (; i + VL <= end; i += VL) add(VL);
            if (i < end) add(end - i), i = end;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const vf factor = splat(p.scale[r * p.scale_stride + t - p.tile]);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m)
                    total[r][m] = multiply_add(part[r][m], factor, total[r][m]);
            }
            if (end == tile_end) ++t;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m)
            p.total[r * p.total_stride + m] =
                largest[r].is_nan() ? splat(__builtin_nanf("")) : total[r][m];
}

// ---- all ----

template <int M>
PartFunction pick(const Element& e, Offset offset) {
    if (e.bits == 4)
        return offset == Offset::none   ? codes4_rows<M, Offset::none>
               : offset == Offset::zero ? codes4_rows<M, Offset::zero>
                                        : codes4_rows<M, Offset::minimum>;
    if (!e.is_float)
        return offset == Offset::zero ? codes8_rows<M, true, Code8::integer>
                                      : codes8_rows<M, false, Code8::integer>;
    return e.mantissa_bits == 3 ? codes8_rows<M, false, Code8::e4m3>
                                : codes8_rows<M, false, Code8::e5m2>;
}

// Four-bit codes: lane l of chunk c holds elements 8 l .. 8 l + 7 of it.
void interleave(const float* x, int64_t k, float* to, float* sums) {
    for (int64_t start = 0; start < k; start += kChunk, to += kChunk, sums += VL) {
        const int64_t count = least(kChunk, k - start);
        for (int64_t i = 0; i < count; ++i) {
            const float value = x[start + i];
            to[i % 8 * VL + i / 8] = value;
            sums[i / 8] += value;
        }
    }
}

void pack_x(Weights& s, int64_t rows) {
    const WeightGemm& g = s.g;
    const int64_t chunks = ceil_div(g.k, kChunk);
    s.x_stride = chunks * kChunk + VL, s.sum_stride = chunks * VL;
    float* x = scratch_of<float>(Slot::packed_a, rows * (s.x_stride + s.sum_stride));
    float* sums = x + rows * s.x_stride;
    std::memset(x, 0, static_cast<size_t>(rows * (s.x_stride + s.sum_stride)) * 4);
    for (int64_t r = 0; r < g.m; ++r) {
        const float* from = g.x + r * g.k;
        float* to = x + r * s.x_stride;
        if (kElements[g.w.element].bits == 4)
            interleave(from, g.k, to, sums + r * s.sum_stride);
        else
            for (int64_t i = 0; i < g.k; ++i) to[i] = from[i] * s.x_unit;
    }
    s.x = x, s.sums = sums;
}

// Multiplies M rows of x at a time. x is cut into slices that fit the cache; enough rows of weights
// pass over one slice to make the change of slices cheap.
template <int M>
void run(Weights& s) {
    constexpr int64_t slice = kSlice / M;
    constexpr int64_t most_rows = R * M;
    const WeightGemm& g = s.g;
    const int64_t n = g.w.rows, m = round_up(g.m, M), tile = g.w.tile_length;
    pack_x(s, m);
    const Offset offset = offset_of(g.w);
    const ScaleLanes scale_lanes(tile);
    const PartFunction multiply = pick<M>(kElements[g.w.element], offset);
    const int64_t scale_stride = ceil_div(least(slice, g.k), tile) + 1 + VL;
    threads::run(ceil_div(n, kTaskRows), n * g.k, [&](int64_t task) {
        float* total = scratch_of<float>(Slot::partial, most_rows * (m * VL + 2 * scale_stride));
        float* scale = total + most_rows * m * VL;
        float* zeros = scale + most_rows * scale_stride;
        const int64_t end = least(n, (task + 1) * kTaskRows);
        for (int64_t row = task * kTaskRows; row < end; row += most_rows) {
            const int64_t rows = least(most_rows, end - row);
            std::memset(total, 0, static_cast<size_t>(most_rows * m * VL) * 4);
            for (int64_t start = 0; start < g.k; start += slice) {
                Part p{row,          0,
                       start,        least(start + slice, g.k),
                       start / tile, scale_stride,
                       scale,        zeros,
                       nullptr,      m};
                const int64_t tiles = ceil_div(p.end, tile) - p.tile;
                for (int64_t r = 0; r < rows; ++r) {
                    s.decode_scales(row + r, p.tile, tiles, scale + r * scale_stride);
                    if (offset != Offset::none)
                        s.decode_offsets(row + r, p.tile, tiles, zeros + r * scale_stride);
                }
                for (p.first = 0; p.first < g.m; p.first += M) {
                    for (int64_t r = 0; r < rows; r += R) {
                        p.row = row + r, p.scale = scale + r * scale_stride,
                        p.zero = zeros + r * scale_stride;
                        p.total = reinterpret_cast<vf*>(total) + r * m + p.first;
                        multiply(s, scale_lanes, p);
                    }
                }
            }
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t i = 0; i < g.m; ++i)
                    g.out[i * n + row + r] = sum(load(total + (r * m + i) * VL)) * g.w.tensor_scale;
        }
    });
}

// Whether lanes fit the blocks, and sums stay finite.
bool streams(const WeightGemm& g) {
    const int bits = kElements[g.w.element].bits;
    const int64_t tile = g.w.tile_length;
    if ((bits != 4 && bits != 8) || (bits == 8 && g.w.minimums)) return false;
    if (bits == 4 && tile != 16 && tile != 32 && tile != 64 && tile % 128 && tile < g.k)
        return false;
    return moderate(g);
}

}  // namespace

void weight_only_product(const WeightGemm& g) {
    if (g.m > kFewRows || !streams(g)) return weight_panel_product(g);
    Weights s(g);
#if EXTENSOR_LANES == 16
    if (g.k <= kSlice && takes_one_row(g)) {
        pack_x(s, 1);
        return one_row(s);
    }
#endif
    g.m > 2 ? run<4>(s) : run<1>(s);
}

}  // namespace EXTENSOR_ISA
