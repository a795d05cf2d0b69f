// Float32 matrix products on registers: a tile of C at a time, and the packing that feeds it.
//
// Every element of C is one chain of multiply-adds in the order of k, started by zero, the bias or
// what C held: it depends on the operands alone, not on tiles, blocks or threads. With K terms,
// |error| <= gamma_(K + 1) (|bias| + sum |a| |b|) (Higham, Accuracy and Stability, 3.1).
#pragma once

#include <cstring>
#include <utility>

#include "hadamard.hpp"
#include "stretches.hpp"
#include "vector_math.hpp"

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

// The left operand, m x k. `along`: element (i, k) at [i * ld + k]. Otherwise it is transposed, at
// [k * ld + i]; or packed, `step` floats apart for every tile of rows and ld = kTileRows inside.
struct Left {
    const float* at;
    int64_t ld, step;
    bool along;

    INLINE const float* tile(int64_t index, int64_t row) const {
        return at + (step ? index * step : along ? row * ld : row);
    }
};

// The right operand, k x n, by panels of kPanel columns: row k of panel p at [p * step + k * ld],
// readable to the end of a vector.
struct Right {
    const float* at;
    int64_t ld, step;
};

// Rows i = 0 .. R - 1 and V vectors of columns, the last `columns - (V - 1) VL` wide.
template <int R, int V, bool Along>
void tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
          int64_t ldc, int64_t columns, const float* bias, bool add) {
    vf sums[R][V];
    for (int i = 0; i < R; ++i) {
        for (int v = 0; v < V; ++v) {
            const float* start = add ? c + i * ldc : bias;
            sums[i][v] = start ? take(start, v * VL, columns) : splat(0.0f);
        }
    }
    for (int64_t step = 0; step < k; ++step, b += ldb, a += Along ? 1 : lda) {
        vf row[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) row[v] = load(b + v * VL);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const vf value = splat(Along ? a[i * lda] : a[i]);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) sums[i][v] = madd(value, row[v], sums[i][v]);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < V; ++v) put(c + i * ldc, sums[i][v], v * VL, columns);
}

using Tile = void (*)(int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t,
                      int64_t, const float*, bool);

template <int V, bool Along, int... R>
Tile choose(int rows, std::integer_sequence<int, R...>) {
    static constexpr Tile tiles[] = {tile<R + 1, V, Along>...};
    return tiles[rows - 1];
}

inline Tile choose(int rows, int64_t columns, bool along) {
    constexpr std::make_integer_sequence<int, kTileRows> all{};
    if (columns > VL) return along ? choose<2, true>(rows, all) : choose<2, false>(rows, all);
    return along ? choose<1, true>(rows, all) : choose<1, false>(rows, all);
}

INLINE int64_t tile_count(int64_t rows) { return ceil_div(rows, kTileRows); }
INLINE int64_t panel_count(int64_t columns) { return ceil_div(columns, kPanel); }
// Where tile t of `count` begins: tiles differ by one row at most.
INLINE int64_t tile_row(int64_t rows, int64_t count, int64_t t) { return rows * t / count; }

// C (m x n) = A B, + bias (a row, or null), or C += A B.
inline void multiply(int64_t m, int64_t n, int64_t k, Left a, Right b, float* c, int64_t ldc,
                     const float* bias, bool add) {
    const int64_t tiles = tile_count(m);
    for (int64_t j = 0; j < n; j += kPanel, b.at += b.step) {
        const int64_t columns = least(kPanel, n - j);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = tile_row(m, tiles, t), end = tile_row(m, tiles, t + 1);
            choose(static_cast<int>(end - row), columns, a.along)(
                k, a.tile(t, row), a.ld, b.at, b.ld, c + row * ldc + j, ldc, columns,
                bias ? bias + j : nullptr, add);
        }
    }
}

// `lines` (VL at most) runs of k floats, ld apart, become k rows of VL floats, `to_ld` apart, with
// zeros for what there is no line of. Of each row VL floats are written.
inline void pack_across(const float* from, int64_t ld, int64_t lines, int64_t k, float* to,
                        int64_t to_ld) {
    for (int64_t begin = 0; begin < k; begin += VL) {
        vf v[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i)
            v[i] = i < lines ? take(from + i * ld, begin, k) : splat(0.0f);
        transpose(v);
        const int count = static_cast<int>(least(VL, k - begin));
        for (int i = 0; i < count; ++i) store(to + (begin + i) * to_ld, v[i]);
    }
}

constexpr int64_t packed_right(int64_t n, int64_t k) { return (n + kPanel - 1) / kPanel * kPanel * k; }

// Packs panel `p` of B (k x n), element (k, j) at [k * ld + j], or [j * ld + k] if `transposed`.
inline void pack_panel(const float* b, int64_t ld, bool transposed, int64_t n, int64_t k,
                       int64_t p, float* to) {
    const int64_t first = p * kPanel, columns = least(kPanel, n - first);
    if (transposed) {
        for (int64_t j = 0; j < kPanel; j += VL) {
            const int64_t lines = most(0, least(VL, columns - j));
            pack_across(b + (first + j) * ld, ld, lines, k, to + j, kPanel);
        }
        return;
    }
    for (int64_t row = 0; row < k; ++row, b += ld)
        for (int64_t j = 0; j < kPanel; j += VL)
            store(to + row * kPanel + j, j < columns ? take(b + first, j, columns) : splat(0.0f));
}

// All of them, one after the other; `to` holds packed_right(n, k) floats.
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
        if (a.along) {
            for (int64_t i = 0; i < rows; i += VL)
                pack_across(from + i * a.ld, a.ld, least(VL, rows - i), k, to + t * step + i,
                            kTileRows);
        } else {
            for (int64_t i = 0; i < k; ++i, from += a.ld)
                store(to + t * step + i * kTileRows, take(from, 0, rows));
        }
    }
    return {to, kTileRows, step, false};
}

}  // namespace EXTENSOR_ISA
