// Chunks of rows before they are encoded: float32 or transformed values, block maxima and random
// words.
#pragma once

#include "quantize/blocks.hpp"
#include "quantize/hadamard.hpp"
#include "quantize/philox.hpp"
#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {

// `tiles` tiles of each of `rows` rows, from tile `start` of row `first` on; all of a row's tiles
// where there are several rows.
struct RowChunk {
    int64_t first, rows, start, tiles;
};

// Prepared values, of which `padded` count in each row (block padding does not).
struct Values {
    const float* x;
    int64_t stride, padded;
};

inline int64_t values_in(const QuantJob& job, const RowChunk& p) {
    return least(p.tiles * job.tile_length, job.padded - p.start * job.tile_length);
}

// `count` values of a row from `start` on, transformed or at least as float32.
void prepare(const Call& call, int64_t row, int64_t start, int64_t count, float* out);

// Transforms `count` values, whole transforms of them, and prefetches what follows.
using TransformAll = void (*)(const void* x, int64_t count, const float* signs, float* out);
TransformAll transform_for(FloatType type, int size);

// The values of a chunk: the array's own where they need no preparation.
Values prepared(const Call& call, const RowChunk& p);

// ---- maxima ----

// The largest magnitude of a run of values.
uint32_t run_maximum(const float* x, int64_t count);

// The largest magnitude of each tile of a chunk.
void chunk_maxima(const QuantJob& job, Values v, const RowChunk& p, uint32_t* maxima);

// The largest magnitude below infinity.
template <class T>
inline uint32_t finite_run_maximum(const T* x, int64_t count) {
    constexpr int kBatch = 4 * VL;
    vu m[4] = {};
    int64_t i = 0;
#if EXTENSOR_LANES == 16
    if constexpr (kFloatType<T> == FloatType::bfloat16) i = maximum_start(x, count, m[0]);
#endif
    for (; i + kBatch <= count; i += kBatch) {
        prefetch_stream(x + i, kBatch);
        for (int k = 0; k < 4; ++k) m[k] = larger(m[k], magnitude_bits(load(x + i + k * VL)));
    }
    for (; i < count; i += VL) m[0] = larger(m[0], magnitude_bits(load_upto(x + i, count - i)));
    const uint32_t top = largest_lane(larger(larger(m[0], m[1]), larger(m[2], m[3])));
    if (top < kExponentMask) return top;
    vu finite = {};
    for (i = 0; i < count; i += VL) {
        const vu v = magnitude_bits(load_upto(x + i, count - i));
        finite = larger(finite, v & reinterpret_cast<vu>(v < kExponentMask));
    }
    return largest_lane(finite);
}

// ---- random bits ----

// The random words of a chunk, a run of `stride` words per tile. Where ties do not go to even, the
// words are the constant that has the same effect.
uint32_t* random_words(const Call& call, const Philox& philox, const RowChunk& p, int64_t& stride);

}  // namespace EXTENSOR_ISA
