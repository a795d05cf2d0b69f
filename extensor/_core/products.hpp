// Float32 products and attention, as a table of function pointers per instruction set.
#pragma once

#include <cstdint>

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

// (outer, heads, rows, width) with steps in floats between the first three; the last is 1.
struct Heads {
    float* at;
    int64_t outer, head, row;
};

// softmax(scale q k^T) v; see attention.cpp. `heads` is a multiple of `groups`, the heads of k, v.
struct Attention {
    int64_t outer, heads, groups, queries, keys, width, value_width;
    float scale;
    bool causal;
    Heads q, k, v, out;
    float* stats;          // (outer, heads, queries, 2): a row's largest score and 1 / sum
    Heads g, gq, gk, gv;   // of the gradient: the output's, written ones
};

struct AttentionKernels {
    void (*forward)(const Attention&);
    void (*gradient)(const Attention&);
};

#define EXTENSOR_DECLARE_PRODUCTS(level)             \
    namespace level {                                \
    extern const ProductKernels product_kernels;     \
    extern const AttentionKernels attention_kernels; \
    }

EXTENSOR_DECLARE_PRODUCTS(scalar)
#ifdef EXTENSOR_X86
EXTENSOR_DECLARE_PRODUCTS(avx2)
EXTENSOR_DECLARE_PRODUCTS(avx512)
#endif
