// The matrix products: what one call reads and writes, and the tables of kernels.
//
// Dot-product instructions come and go between CPUs, so the block-scaled kernels exist in more
// variants than the others and have levels of their own: see matmul/bind.cpp.
#pragma once

#include <cstdint>

#include "common/dtypes.hpp"
#include "common/levels.hpp"

// A matrix of (rows, k) with block scales along k, as QuantArray stores it.
struct BlockedMatrix {
    const uint8_t* codes;       // `row_bytes` a row, packed
    const void* scales;         // bytes, or float32; one per tile
    const int8_t* zero_points;  // one per tile, or null
    int element;                // index into kElements
    Scale scale;
    float tensor_scale;
    int64_t rows, row_bytes, tile_rows, tile_length;
    // Weight-only products alone: a float minimum for each tile, or null; a float16 for every
    // `super_tiles` tiles of a row, or null, by which scales and minimums are multiplied.
    const void* minimums;
    const uint16_t *super_scales, *super_minimums;
    int64_t super_tiles;
};

// out (a.rows, b.rows) = a b^T.
struct BlockGemm {
    BlockedMatrix a, b;
    int64_t k;
    int64_t step;  // elements along k that share both scales, a multiple of 4, at most kMaxStep
    float* out;
};

// out (m, w.rows) = x w^T for x (m, k).
struct WeightGemm {
    BlockedMatrix w;
    const float* x;
    int64_t m, k;
    float* out;
};

// out (m, n) = a b^T of float32 values that are bfloat16 times a factor (see ValueRange).
// `by_rows`: stored as (rows, k), else (k, rows).
struct ValueGemm {
    const float *a, *b;
    float a_factor, b_factor;
    bool a_by_rows, b_by_rows;
    int64_t m, n, k;
    float* out;
};

// Float32 values as bfloat16 times one factor. The factor is 1 where they are bfloat16. Else it is
// the largest magnitude over one of a few numbers, if every value is then within a relative 2^-21
// of a bfloat16 times it. Else it is 0. `low` and `high`: the least and the largest exponent of the
// bfloat16 that are not zero (`low` counts infinities and NaN, `high` does not). -127: subnormal.
struct ValueRange {
    float factor;
    int low, high;
};

// Longest run of exact integer sums: with zero points they and their terms stay in int32.
constexpr int64_t kMaxStep = 8192;

// On tiles of bfloat16, where the CPU multiplies them fast: by AMX or VDPBF16PS. AMX multiplies
// int8 as well.
struct TileKernels {
    void (*codes)(const BlockGemm&);  // values exact in bf16, `step` unused, no zero points
    void (*values)(const ValueGemm&);
    ValueRange (*range)(const float* x, int64_t count);
    // Small integers, one float32 scale a row, `step` unused; null without AMX.
    void (*integer)(const BlockGemm&);
};

struct GemmKernels {
    void (*integer)(const BlockGemm&);   // small integers times a power of two
    void (*floating)(const BlockGemm&);  // any elements, `step` unused, no zero points
    void (*weights)(const WeightGemm&);
};

// Products of few rows of x with weights in one format; false for what it does not take.
using FewRows = bool (*)(const WeightGemm*, int count);

#define EXTENSOR_DECLARE_GEMM(level)       \
    namespace level {                      \
    extern const GemmKernels gemm_kernels; \
    }

EXTENSOR_DECLARE_GEMM(scalar)
#ifdef EXTENSOR_X86
EXTENSOR_DECLARE_GEMM(avx2)
#ifdef EXTENSOR_AVX_VNNI
EXTENSOR_DECLARE_GEMM(avx_vnni)
#endif
EXTENSOR_DECLARE_GEMM(avx512)
EXTENSOR_DECLARE_GEMM(avx512_vnni)
namespace avx512_vnni {
bool few_rows_on_bytes(const WeightGemm*, int count);  // where there is VBMI too: few_rows_vnni.cpp
}  // namespace avx512_vnni
#ifdef EXTENSOR_AVX512_BF16
namespace avx512_bf16 {
extern const TileKernels tile_kernels;
}
#endif
#ifdef EXTENSOR_AMX
namespace amx {
extern const TileKernels tile_kernels;
}
#endif
#endif

// ---- float32 matrices ----

// C (m x n) = A B + bias; see sgemm.cpp. `a_transposed`: A is stored k x m, likewise B n x k; rows
// of what is stored are lda, ldb and ldc floats apart. `bias` is a row of n or null.
struct Product {
    int64_t m, n, k;
    const float *a, *b, *bias;
    float* c;
    int64_t lda, ldb, ldc;
    bool a_transposed, b_transposed;
};

struct ProductKernels {
    void (*product)(const Product&);
    // `count` small products: number i on a + at_a[i] and b + at_b[i], into c + i m n.
    void (*batch)(const Product&, int64_t count, const int64_t* at_a, const int64_t* at_b);
};

EXTENSOR_KERNELS(ProductKernels, product_kernels)
