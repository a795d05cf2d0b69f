// The quantizers' kernels: what one call reads and writes, and their table.
#pragma once

#include <cstdint>

#include "common/dtypes.hpp"
#include "common/levels.hpp"

enum class Rule : int {
    floor,
    rceil,
    ceil,
    even,
    one,
    amax,
    four_over_six,
    least_error,
    mse,
    quest
};
enum class Ties : int { even, away, zero };
enum class Zeros : int { kept, zeros_positive, zeros_negative, codes_positive };
enum class Order : int { transformer_engine, torchao, model_optimizer };  // of NVFP4's operations
enum class Statistic : int { amax, percentile, running };

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
    bool rebased;  // to one scale for each 128 x 128; see rebase.cpp
    int eden;      // blocks of a transform whose scales are corrected, or 0; see eden.cpp
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
// and tile_rows > 1 needs outer == 1. `padded` is `length` padded to the Hadamard size.
struct QuantJob {
    const void* x;
    FloatType type;  // of x
    int64_t outer, rows, length, inner, padded, tile_rows, tile_length;
    float* values;        // float32 of the padded shape, or null
    uint8_t* codes;       // packed along `length` in whole blocks, or null
    void* scales;         // uint8, float16 or float32, one per tile, or null
    int8_t* zero_points;  // one per tile where not symmetric, or null
    // One bit a value where it is within its block's largest, the first in the lowest bit, each row
    // from a byte on; or null. Rowwise, tiles of one row and whole sixteens.
    uint8_t* mask;
    const float* previous;       // maxima of the tiles before, for a running statistic, or null
    const uint32_t* known;       // maxima of the tiles as bits, one a row or column, or null
    const uint32_t* whole;       // the statistic of the whole array this is a part of, or null
    int64_t first_block, pitch;  // number of its first block there, and of blocks in a row; or 0
    float tensor_scale;          // out
    int64_t saturated, flushed;  // out
    int64_t changed;             // out: by rebasing
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

// Rows of `length` values and what the outlier codec takes out of them: `kept` values each.
struct OutlierJob {
    const float* x;
    int64_t rows, length, kept;
    float *rest, *means, *values;
    int32_t* index;
};

// Rows of `padded` gradients in the domain of a Hadamard transform of `hadamard` values (0: none),
// to be masked and taken out of it; rows of `length` are written.
struct ClippedRows {
    const float* g;
    const uint8_t* mask;  // one bit a value, each row from a byte on; or null
    int64_t rows, padded, length;
    int hadamard;
    const float* signs;
    float* out;
};

// Rows of `length` values whose largest magnitudes are asked for, `stride` apart; of the finite
// values alone, or of all.
struct RowMaxima {
    const float* x;
    int64_t rows, stride, length;
    bool finite;
};

// A part of a matrix that lies in one rebased tile: rows, `stride` apart, of the values that are
// quantized, or of what became of them.
struct RebasePart {
    const void* x;
    FloatType type;  // of x
    float* values;
    int64_t rows, columns, stride;
};

struct RebaseCounts {
    int64_t changed, flushed;
};

struct QuantKernels {
    void (*quantize)(const QuantPlan&, const QuantStream&, QuantJob&);
    // One array rowwise and columnwise, in one reading where that is supported.
    void (*quantize_rowwise_columnwise)(const QuantPlan (&)[2], const QuantStream (&)[2],
                                        QuantJob (&)[2]);
    // The largest magnitude of each row under the plan's transform, as bits: see `RowMaxima`.
    void (*row_maxima)(const QuantPlan&, const RowMaxima&, uint32_t* maxima);
    // The largest magnitude in x's blocks of numbers, as bits; blocks are `block` rows high, or
    // with `rowwise` as many columns wide.
    uint32_t (*rebase_maximum)(const RebasePart&, int64_t block, bool rowwise);
    // Rounds the values to the scale that this magnitude, of their whole tile, gives.
    RebaseCounts (*rebase_values)(const QuantPlan&, uint32_t maximum, const RebasePart&);
    // Blocks of float32 columns that were clipped: zeroes `values`, a gradient of the padded
    // length, where |x| under the plan's transform is beyond its block's largest value, and undoes
    // the transform of the rest. `known` holds one maximum for all.
    void (*clip_gradient)(const QuantPlan&, QuantJob&);
    void (*straight_through)(const ClippedRows&);
    void (*dequantize)(const QuantPlan&, const DequantJob&);
    void (*split_outliers)(const OutlierJob&);
    // Puts the outliers back into `rest`. With x, returns how many of its nonzero values became
    // zero.
    int64_t (*join_outliers)(const OutlierJob&, const float* scales);
};

// Casts between float32 and bfloat16.
struct CastKernels {
    void (*bfloat16_values)(int64_t n, const float* x, float* y);
    void (*to_bfloat16)(int64_t n, const float* x, uint16_t* y);
    void (*from_bfloat16)(int64_t n, const uint16_t* x, float* y);
};

// Float32 rounded to odd: 12 bits in `high` (a byte) and `low` (two values a byte), or 16 in
// `high`.
struct OddKernels {
    // By 12 or 16 bits. False where a value is subnormal; what is written is then of no use.
    bool (*round_to_odd[2])(int64_t n, const float* x, uint8_t* high, uint8_t* low);
    void (*odd_values[2])(int64_t n, const uint8_t* high, const uint8_t* low, float* y);
};

EXTENSOR_KERNELS(QuantKernels, quant_kernels)
EXTENSOR_KERNELS(CastKernels, cast_kernels)
EXTENSOR_KERNELS(OddKernels, odd_kernels)
