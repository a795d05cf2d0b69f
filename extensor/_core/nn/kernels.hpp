// The neural network kernels, as tables. Arrays are contiguous where no steps are given.
#pragma once

#include <cstdint>

#include "common/levels.hpp"

// g sigmoid(alpha g) u with g = min(gate, limit) and u = up within +-limit, plus `shift`.
struct GatedSilu {
    int64_t n;
    const float *gate, *up;
    float alpha, limit, shift;
};

struct ActivationKernels {
    void (*relu)(int64_t n, const float* x, float* y);
    void (*relu_grad)(int64_t n, const float* g, const float* y, float* gx);
    void (*gelu)(int64_t n, const float* x, float* y, float* phi);
    void (*gelu_grad)(int64_t n, const float* g, const float* x, const float* phi, float* gx);
    void (*add)(int64_t n, const float* a, const float* b, float* y);
    void (*gated_silu)(const GatedSilu&, float* y);
    void (*gated_silu_grad)(const GatedSilu&, const float* g, float* ggate, float* gup);
};

// Rows of n scores, and the label of each row in 0..n - 1.
struct CrossEntropy {
    int64_t rows, n;
    const float* x;
    const int64_t* labels;
    float smoothing;
};

struct SoftmaxKernels {
    void (*softmax)(int64_t rows, int64_t n, const float* x, float* y);
    void (*softmax_grad)(int64_t rows, int64_t n, const float* g, const float* y, float* gx);
    void (*log_softmax)(int64_t rows, int64_t n, const float* x, float* y);
    void (*log_softmax_grad)(int64_t rows, int64_t n, const float* g, const float* y, float* gx);
    // `saved` is (rows, 2): what the gradient reads.
    void (*cross_entropy)(const CrossEntropy&, float* losses, float* saved);
    // `step`: 0 where one weight is for all rows, else 1.
    void (*cross_entropy_grad)(const CrossEntropy&, const float* weight, int64_t step,
                               const float* saved, float* gx);
};

// Rows of n values. With `mean` (one per row) a LayerNorm, without it an RMSNorm. Forward writes
// `mean` and `rstd`.
struct RowNorm {
    int64_t rows, n;
    const float *x, *weight;
    float *mean, *rstd;
};

// Images (n, c, pixels). Forward writes `mean` and `variance`, one per channel.
struct BatchNorm {
    int64_t n, c, pixels;
    const float *x, *weight;
    float *mean, *variance;
    float eps;
};

// Gradients of a norm's input, weight and bias.
struct NormGrads {
    float *x, *weight, *bias;
};

struct NormKernels {
    // `bias` goes with a LayerNorm.
    void (*row_norm)(const RowNorm&, const float* bias, float eps, float* y);
    // `partial` holds kNormParts x 2 x n floats.
    void (*row_norm_grad)(const RowNorm&, const float* g, const NormGrads&, float* partial);
    void (*batch_norm)(const BatchNorm&, const float* bias, float* y);
    void (*batch_norm_grad)(const BatchNorm&, const float* g, const NormGrads&);
    void (*channel_sum)(int64_t n, int64_t c, int64_t pixels, const float* x, float* out);
};

constexpr int64_t kNormParts = 16;  // groups of rows; their sums are added in this order

// (outer, heads, rows, width) with steps in floats between the first three; the last is 1.
struct Heads {
    float* at;
    int64_t outer, head, row;
};

// Bytes (outer, heads, queries, keys) with steps between the first three; 0 hides a key.
struct AttentionMask {
    const uint8_t* at;
    int64_t outer, head, row;
};

// softmax(scale q k^T) v; see attention.cpp. `heads` is a multiple of `groups`, the heads of k, v.
struct Attention {
    int64_t outer, heads, groups, queries, keys, width, value_width;
    float scale;
    bool causal;
    Heads q, k, v, out;
    float* stats;         // (outer, heads, queries, 2): a row's largest score and 1 / sum
    Heads g, gq, gk, gv;  // of the gradient: the output's, written ones
    int64_t window;       // a query sees so many keys at most, up to its own; 0: all
    AttentionMask mask;   // `at` null: none
    const float* sinks;   // a score a head whose exponential joins the sums; null: none
};

struct AttentionKernels {
    void (*forward)(const Attention&);
    void (*gradient)(const Attention&);
};

// See rotary.cpp. The tables share their steps; y is contiguous.
struct Rotary {
    int64_t outer, heads, rows, width, half;
    bool interleaved;
    Heads x, cos;
    const float* sin;
    float* y;
};

struct RotaryKernels {
    void (*rotary)(const Rotary&);
};

EXTENSOR_KERNELS(RotaryKernels, rotary_kernels)
EXTENSOR_KERNELS(ActivationKernels, activation_kernels)
EXTENSOR_KERNELS(SoftmaxKernels, softmax_kernels)
EXTENSOR_KERNELS(NormKernels, norm_kernels)
EXTENSOR_KERNELS(AttentionKernels, attention_kernels)
