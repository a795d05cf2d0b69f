// Products of two blocked matrices, and of float32 rows with a blocked matrix.
//
// These kernels exist in more variants than the others (dot-product instructions come and go between
// CPUs), so they have levels of their own: see gemm_bind.cpp.
#pragma once

#include <cstdint>

// A matrix of (rows, k) blocked along k, as QuantArray stores it.
struct BlockedMatrix {
    const uint8_t* codes;  // `row_bytes` a row, packed
    const void* scales;    // bytes, or float32; one per tile
    const int8_t* zero_points;  // one per tile, or null
    int element, scale;         // index into kElements; a Scale
    float tensor_scale;
    int64_t rows, row_bytes, tile_rows, tile_length;
};

// out (a.rows, b.rows) = a b^T.
struct BlockGemm {
    BlockedMatrix a, b;
    int64_t k;
    int64_t step;  // elements along k that share both scales, a multiple of 4, at most kMaxStep
    float* out;
};

// out (m, w.rows) = x w^T for x (m, k), m at most kMaxRows.
struct WeightGemm {
    BlockedMatrix w;
    const float* x;
    int64_t m, k;
    float* out;
};

// out (m, n) = a b^T of float32 values that are bfloat16 times a factor (see ValueRange). `by_rows`:
// stored as (rows, k), else (k, rows).
struct ValueGemm {
    const float *a, *b;
    float a_factor, b_factor;
    bool a_by_rows, b_by_rows;
    int64_t m, n, k;
    float* out;
};

// Values as bfloat16 times one factor: 1 where they are bfloat16; else the largest magnitude over one
// of a few numbers where every value is then within a relative 2^-21 of a bfloat16 times it; else 0. The
// least and largest exponent of the bfloat16 not zero (the least: of infinities and NaN too; the
// largest: of finite ones). -127: subnormal.
struct ValueRange {
    float factor;
    int low, high;
};

// Longest run of exact integer sums: with zero points they and their parts stay in int32.
constexpr int64_t kMaxStep = 8192;
constexpr int64_t kMaxRows = 32;

// On tiles of bfloat16 and int8, where there are any.
struct TileKernels {
    void (*codes)(const BlockGemm&);  // values exact in bf16, `step` unused, no zero points
    void (*values)(const ValueGemm&);
    ValueRange (*range)(const float* x, int64_t count);
    void (*integer)(const BlockGemm&);  // small integers, one float32 scale a row, `step` unused
};

struct GemmKernels {
    void (*integer)(const BlockGemm&);   // both elements are small integers times a power of two
    void (*floating)(const BlockGemm&);  // any elements, `step` unused, no zero points
    void (*weights)(const WeightGemm&);
};

#define EXTENSOR_DECLARE_GEMM(level) \
    namespace level {                \
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
#ifdef EXTENSOR_AMX
namespace amx {
extern const TileKernels tile_kernels;
}
#endif
#endif
