// The kernels that exist once per instruction set, as a table of function pointers per level.
#pragma once

#include <cstdint>

// A convolution or pooling: (n, c, h, w) with a kernel of (kh, kw) -> (n, o, ho, wo).
struct Conv {
    int64_t n, c, h, w, o, groups, kh, kw, sh, sw, ph, pw, dh, dw, ho, wo;
};

struct ConvKernels {
    // `bias`, one per output channel, may be null.
    void (*conv)(const Conv&, const float* x, const float* w, const float* bias, float* y);
    void (*grad_x)(const Conv&, const float* g, const float* w, float* gx);
    void (*grad_w)(const Conv&, const float* g, const float* x, float* gw);
};

struct PoolKernels {
    void (*max_pool)(const Conv&, const float* x, float* y, int32_t* index);
    // False if an index lies outside the image.
    bool (*max_pool_grad)(const Conv&, const float* g, const int32_t* index, float* gx);
};

enum class FloatType : int { float32, bfloat16, float16 };
enum class Scale : int { e8m0, ue4m3, float32, float16 };
enum class Rule : int { floor, rceil, ceil, even, one, amax, four_over_six, least_error };
enum class Ties : int { even, away, zero };
enum class Zeros : int { kept, zeros_positive, zeros_negative, codes_positive };
enum class Order : int { transformer_engine, torchao, model_optimizer };  // of NVFP4's operations
enum class Statistic : int { amax, percentile, running };

constexpr bool is_byte(Scale scale) { return scale == Scale::e8m0 || scale == Scale::ue4m3; }

// What a resolved QuantSpec says, as numbers.
struct QuantPlan {
    int element;  // index into kElements
    Scale scale;
    Rule rule;
    Ties ties;
    Zeros zeros;
    Order order;
    Statistic statistic;
    bool stochastic, symmetric, nv_tiny_saturates;
    int rbits;
    uint32_t mx_inf_byte, mx_least_byte, nv_zero_byte, nv_least_byte;
    double percentile;
    float decay;
    int window;  // -1: none
    float element_scale;
    int hadamard;  // size, or 0
    float signs[128];
};

// Random bits: the key and the two high counter words of a Stream.
struct QuantStream {
    uint32_t key0, key1, high0, high1;
};

// An array of (outer, length, inner), C order, blocked along `length` in tiles.
//
// With inner == 1 the array is read as (outer, rows, length) and a tile is tile_rows x tile_length
// on its last two axes; otherwise a tile is tile_length along `length` x tile_rows along `inner`,
// and tile_rows > 1 needs outer == 1. `coded` is `length` padded to the Hadamard size.
struct QuantJob {
    const void* x;
    FloatType type;  // of x
    int64_t outer, rows, length, inner, coded, tile_rows, tile_length;
    float* values;  // float32 of the coded shape, or null
    uint8_t* codes;  // packed along `length` in whole blocks, or null
    void* scales;    // uint8, float16 or float32, one per tile, or null
    int8_t* zero_points;    // one per tile where not symmetric, or null
    const float* previous;  // maxima of the tiles before, for a running statistic, or null
    float tensor_scale;               // out
    int64_t saturated, flushed;       // out
};

// Packed codes back to values; no Hadamard transform.
struct DequantJob {
    const uint8_t* codes;
    const void* scales;
    const int8_t* zero_points;  // or null
    float tensor_scale;
    int64_t outer, rows, length, inner, tile_rows, tile_length;
    void* values;
    FloatType type;  // of the values
};

// Convolutions of patches that are rounded to nearest, block by block, on the way; see
// conv_quantized.cpp. `counts` gets the saturated and the flushed values.
struct QuantConvKernels {
    void (*conv)(const Conv&, const QuantPlan&, int64_t tile_length, const float* x, const float* w,
                 const float* bias, float* y, int64_t* counts);
    void (*grad_w)(const Conv&, const QuantPlan&, int64_t tile_length, const float* g,
                   const float* x, float* gw, int64_t* counts);
};

// Rows of `length` values and what the outlier codec takes out of them: `kept` values each.
struct OutlierJob {
    const float* x;
    int64_t rows, length, kept;
    float *rest, *means, *values;
    int32_t* index;
};

struct QuantKernels {
    void (*quantize)(const QuantPlan&, const QuantStream&, QuantJob&);
    // One array along its rows (the first of each pair) and down its columns, in one reading where
    // that is covered.
    void (*quantize_pair)(const QuantPlan (&)[2], const QuantStream (&)[2], QuantJob (&)[2]);
    void (*dequantize)(const QuantPlan&, const DequantJob&);
    void (*split_outliers)(const OutlierJob&);
    // Adds what was taken out to `rest`. With x, how many of its values that are not zero became zero.
    int64_t (*join_outliers)(const OutlierJob&, const float* scales);
};

// What a float32 training step repeats; see train.cpp. Arrays are contiguous.
struct TrainKernels {
    void (*gelu)(int64_t n, const float* x, float* y, float* phi);
    void (*gelu_grad)(int64_t n, const float* g, const float* x, const float* phi, float* gx);
    void (*softmax)(int64_t rows, int64_t n, const float* x, float* y);
    void (*softmax_grad)(int64_t rows, int64_t n, const float* g, const float* y, float* gx);
    void (*log_softmax)(int64_t rows, int64_t n, const float* x, float* y);
    void (*log_softmax_grad)(int64_t rows, int64_t n, const float* g, const float* y, float* gx);
    // Cross-entropy; labels are in 0..n - 1, `kept` is (rows, 2).
    void (*losses)(int64_t rows, int64_t n, const float* x, const int64_t* labels, float smoothing,
                   float* out, float* kept);
    // `step`: 0 where one weight is for all rows, else 1.
    void (*losses_grad)(int64_t rows, int64_t n, const float* weight, int64_t step, const float* x,
                        const int64_t* labels, const float* kept, float smoothing, float* gx);
    // With `mean` (one per row) a LayerNorm, without it an RMSNorm; `bias` goes with `mean`.
    void (*norm)(int64_t rows, int64_t n, const float* x, const float* weight, const float* bias,
                 float eps, float* y, float* mean, float* rstd);
    // `partial` holds kNormParts x 2 x n floats.
    void (*norm_grad)(int64_t rows, int64_t n, const float* g, const float* x, const float* weight,
                      const float* mean, const float* rstd, float* gx, float* gw, float* gb,
                      float* partial);
    void (*adam)(int64_t n, float* weight, const float* grad, float* mean, float* square,
                 const float* factors);
};

// What a convolution network's float32 training step repeats; see layers.cpp. Arrays are contiguous,
// images (n, c, pixels).
struct LayerKernels {
    void (*relu)(int64_t n, const float* x, float* y);
    void (*relu_grad)(int64_t n, const float* g, const float* y, float* gx);
    void (*add)(int64_t n, const float* a, const float* b, float* y);
    void (*bfloat16_values)(int64_t n, const float* x, float* y);
    void (*to_bfloat16)(int64_t n, const float* x, uint16_t* y);
    void (*from_bfloat16)(int64_t n, const uint16_t* x, float* y);
    bool (*all_finite)(int64_t n, const float* x);
    void (*channel_sum)(int64_t n, int64_t c, int64_t pixels, const float* x, float* out);
    void (*batch_norm)(int64_t n, int64_t c, int64_t pixels, const float* x, const float* weight,
                       const float* bias, float eps, float* y, float* mean, float* variance);
    void (*batch_norm_grad)(int64_t n, int64_t c, int64_t pixels, const float* g, const float* x,
                            const float* weight, const float* mean, const float* variance,
                            float eps, float* gx, float* gw, float* gb);
    // `buffer`, written with the momentum, may be null.
    void (*sgd)(int64_t n, float* weight, const float* grad, float* buffer, float lr,
                float momentum, float decay, bool nesterov);
};

constexpr int64_t kNormParts = 16;  // stretches of rows whose sums are added in their order
constexpr int kAdamFactors = 7;     // see train.cpp

#define EXTENSOR_DECLARE_LEVEL(level)                 \
    namespace level {                                 \
    extern const ConvKernels conv_kernels;            \
    extern const PoolKernels pool_kernels;            \
    extern const QuantKernels quant_kernels;          \
    extern const QuantConvKernels quant_conv_kernels; \
    extern const TrainKernels train_kernels;          \
    extern const LayerKernels layer_kernels;          \
    }

EXTENSOR_DECLARE_LEVEL(scalar)
#ifdef EXTENSOR_X86
EXTENSOR_DECLARE_LEVEL(avx2)
EXTENSOR_DECLARE_LEVEL(avx512)
#endif
