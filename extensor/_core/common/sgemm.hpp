// The register tiles of float32 matrix products and the packing that feeds them, for
// matmul/sgemm.cpp and nn/attention.cpp.
//
// Every element of C is one chain of multiply-adds in the order of k that starts from zero, the
// bias or what C held. It depends on the operands alone, not on tiles, blocks or threads. With K
// terms, |error| <= gamma_(K + 1) (|bias| + sum |a| |b|) (Higham, Accuracy and Stability, 3.1).
#pragma once

#include <cstring>
#include <utility>

#include "common/elementwise.hpp"
#include "common/lanes.hpp"
#include "common/vector_math.hpp"

namespace EXTENSOR_ISA {

// A tile of C is up to kTileRows x kPanel: the accumulators, a row of B and a splat of A fit the
// registers of the level (32, 16 and 16 of them).
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kPanel = 2 * VL;  // columns

// The left operand, m x k. `row_major`: element (i, k) at [i * ld + k]. Otherwise it is transposed,
// at [k * ld + i]; or packed, `step` floats apart for every tile of rows and ld = kTileRows inside.
struct Left {
    const float* at;
    int64_t ld, step;
    bool row_major;

    INLINE const float* tile(int64_t index, int64_t row) const {
        return at + (step ? index * step : row_major ? row * ld : row);
    }
};

// The right operand, k x n, in panels of kPanel columns (BLIS's micro-panels): row k of panel p at
// [p * step + k * ld], readable to the end of a vector.
struct Right {
    const float* at;
    int64_t ld, step;
};

// Where results go: rows of C, `ld` floats apart. Each starts from the bias (a row, or null: zero)
// or, with `add`, from what C holds.
struct Output {
    float* c;
    int64_t ld;
    const float* bias = nullptr;
    bool add = false;

    INLINE Output at(int64_t row, int64_t column) const {
        return {c + row * ld + column, ld, bias ? bias + column : nullptr, add};
    }
};

// Rows i = 0 .. R - 1 and V vectors of columns, the last `columns - (V - 1) VL` wide.
template <int R, int V, bool RowMajor>
void tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t columns,
          const Output& output) {
    const Output out = output;  // a copy, which stores of vectors cannot change
    vf sums[R][V];
    for (int i = 0; i < R; ++i) {
        for (int v = 0; v < V; ++v) {
            const float* start = out.add ? out.c + i * out.ld : out.bias;
            sums[i][v] = start ? load_at(start, v * VL, columns) : splat(0.0f);
        }
    }
    for (int64_t step = 0; step < k; ++step, b += ldb, a += RowMajor ? 1 : lda) {
        vf row[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) row[v] = load(b + v * VL);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const vf value = splat(RowMajor ? a[i * lda] : a[i]);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) sums[i][v] = multiply_add(value, row[v], sums[i][v]);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < V; ++v) store_at(out.c + i * out.ld, sums[i][v], v * VL, columns);
}

using Tile = void (*)(int64_t, const float*, int64_t, const float*, int64_t, int64_t,
                      const Output&);

template <int V, bool RowMajor, int... R>
Tile choose(int rows, std::integer_sequence<int, R...>) {
    static constexpr Tile tiles[] = {tile<R + 1, V, RowMajor>...};
    return tiles[rows - 1];
}

inline Tile choose(int rows, int64_t columns, bool row_major) {
    constexpr std::make_integer_sequence<int, kTileRows> all{};
    if (columns > VL) return row_major ? choose<2, true>(rows, all) : choose<2, false>(rows, all);
    return row_major ? choose<1, true>(rows, all) : choose<1, false>(rows, all);
}

INLINE int64_t tile_count(int64_t rows) { return ceil_div(rows, kTileRows); }
INLINE int64_t panel_count(int64_t columns) { return ceil_div(columns, kPanel); }
// Where tile t of `count` begins: tiles differ by one row at most.
INLINE int64_t tile_row(int64_t rows, int64_t count, int64_t t) { return rows * t / count; }

// C (m x n) = A B, + bias, or C += A B.
inline void multiply(int64_t m, int64_t n, int64_t k, Left a, Right b, const Output& out) {
    const int64_t tiles = tile_count(m);
    for (int64_t j = 0; j < n; j += kPanel, b.at += b.step) {
        const int64_t columns = least(kPanel, n - j);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = tile_row(m, tiles, t), end = tile_row(m, tiles, t + 1);
            choose(static_cast<int>(end - row), columns, a.row_major)(
                k, a.tile(t, row), a.ld, b.at, b.ld, columns, out.at(row, j));
        }
    }
}

// `rows_here` (VL at most) rows of k floats, ld apart, become k rows of VL floats, `to_ld` apart,
// padded with zeros.
inline void pack_transposed(const float* from, int64_t ld, int64_t rows_here, int64_t k, float* to,
                            int64_t to_ld) {
    for (int64_t begin = 0; begin < k; begin += VL) {
        vf v[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i)
            v[i] = i < rows_here ? load_at(from + i * ld, begin, k) : splat(0.0f);
        transpose(v);
        const int count = static_cast<int>(least(VL, k - begin));
        for (int i = 0; i < count; ++i) store(to + (begin + i) * to_ld, v[i]);
    }
}

constexpr int64_t packed_right(int64_t n, int64_t k) {
    return (n + kPanel - 1) / kPanel * kPanel * k;
}

// Packs panel `p` of B (k x n), element (k, j) at [k * ld + j], or [j * ld + k] if `transposed`.
inline void pack_panel(const float* b, int64_t ld, bool transposed, int64_t n, int64_t k, int64_t p,
                       float* to) {
    const int64_t first = p * kPanel, columns = least(kPanel, n - first);
    if (transposed) {
        for (int64_t j = 0; j < kPanel; j += VL) {
            const int64_t rows_here = most(0, least(VL, columns - j));
            pack_transposed(b + (first + j) * ld, ld, rows_here, k, to + j, kPanel);
        }
        return;
    }
    for (int64_t row = 0; row < k; ++row, b += ld)
        for (int64_t j = 0; j < kPanel; j += VL)
            store(to + row * kPanel + j,
                  j < columns ? load_at(b + first, j, columns) : splat(0.0f));
}

// Packs all panels of B; `to` holds packed_right(n, k) floats.
inline Right pack_right(const float* b, int64_t ld, bool transposed, int64_t n, int64_t k,
                        float* to) {
    for (int64_t p = 0; p < panel_count(n); ++p)
        pack_panel(b, ld, transposed, n, k, p, to + p * k * kPanel);
    return {to, kPanel, k * kPanel};
}

constexpr int64_t packed_left(int64_t m, int64_t k) {
    return (m + kTileRows - 1) / kTileRows * kTileRows * k + VL;  // whole vectors are written
}

// Packs A (m x k); `to` holds packed_left(m, k) floats.
inline Left pack_left(Left a, int64_t m, int64_t k, float* to) {
    const int64_t tiles = tile_count(m), step = kTileRows * k;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = tile_row(m, tiles, t), rows = tile_row(m, tiles, t + 1) - row;
        const float* from = a.tile(t, row);
        if (a.row_major) {
            for (int64_t i = 0; i < rows; i += VL)
                pack_transposed(from + i * a.ld, a.ld, least(VL, rows - i), k, to + t * step + i,
                                kTileRows);
        } else {
            for (int64_t i = 0; i < k; ++i, from += a.ld)
                store(to + t * step + i * kTileRows, load_at(from, 0, rows));
        }
    }
    return {to, kTileRows, step, false};
}

}  // namespace EXTENSOR_ISA
