// Chunks of rows before they are encoded: float32 or transformed values, block maxima and random
// words.
#pragma once

#include <bit>

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

// Turns maxima of a chunk's tiles into statistics, for a rule that chooses in chunks.
void choose_in_chunk(const Call& call, Values v, const RowChunk& p, uint32_t* maxima);

// The same of VL whole tiles that follow one another.
vu choose_whole(const Call& call, const float* x, vu amax);

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

// ---- clip masks ----

// Bits of VL values: whether each is at most `limit` in magnitude.
INLINE void store_bits(uint8_t* to, vf x, vf limit) {
    const vi inside = float_of(bits_of(x) & kMagnitude) <= limit;
#if EXTENSOR_LANES == 16
    const uint16_t bits = _mm512_movepi32_mask(reinterpret_cast<__m512i>(inside));
    std::memcpy(to, &bits, 2);
#elif EXTENSOR_LANES == 8
    *to = static_cast<uint8_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(inside)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < VL; ++i) bits |= static_cast<uint32_t>(inside[i] & 1) << i;
    *to = static_cast<uint8_t>(bits);  // the caller joins two
#endif
}

// The bits of `count` values of one row, in tiles whose scales decode to `decode`.
template <class T>
INLINE void store_mask(const Call& call, const T* x, int64_t count, const float* decode,
                       uint8_t* to) {
    const int64_t tile = call.job.tile_length;
    const float top = call.scaler.grid.top, tensor_scale = call.scaler.tensor_scale;
    for (int64_t start = 0; start < count; start += tile, ++decode) {
        const vf limit = splat(top * *decode * tensor_scale);
        const int64_t n = least(tile, count - start);
        for (int64_t i = 0; i < n; i += 16, to += 2) {
            const bool whole = n - i >= 16;
            uint8_t bits[4];
            uint8_t* out = whole && VL > 4 ? to : bits;
            for (int64_t k = 0; k < 16; k += VL)
                store_bits(out + (VL > 4 ? k / 8 : k / 4),
                           load_upto(x + start + i + k, most(0, n - i - k)), limit);
            if (VL == 4)
                for (int b = 0; b < 2; ++b)
                    bits[b] = static_cast<uint8_t>(bits[2 * b] | bits[2 * b + 1] << 4);
            if (out == to) continue;
            if (!whole) {  // the end of a row: the next byte is another row's
                const uint32_t real = (1u << (n - i)) - 1;
                bits[0] &= static_cast<uint8_t>(real), bits[1] &= static_cast<uint8_t>(real >> 8);
            }
            std::memcpy(to, bits, static_cast<size_t>(whole ? 2 : ceil_div(n - i, 8)));
        }
    }
}

#if EXTENSOR_LANES == 16
// The bits of VL whole tiles: magnitudes are compared as integers, which have the order of floats.
// A bfloat16 is at most a float where its bits are at most the float's upper half.
template <int Tile, class T>
INLINE void store_group_mask(const T* x, const float* limits, uint8_t* to) {
    constexpr int kStep = sizeof(T) == 4 ? 16 : Tile;  // values of one comparison
    for (int t = 0; t < VL; ++t) {
        const uint32_t limit = std::bit_cast<uint32_t>(limits[t]);
        for (int k = 0; k < Tile; k += kStep, x += kStep, to += kStep / 8) {
            uint32_t bits;
            if constexpr (sizeof(T) == 4) {
                const __m512i v = _mm512_loadu_si512(x), most = _mm512_set1_epi32(0x7FFFFFFF);
                bits = _mm512_cmple_epu32_mask(_mm512_and_si512(v, most),
                                               _mm512_set1_epi32(static_cast<int>(limit)));
            } else {
                const __m512i v = _mm512_maskz_loadu_epi16((uint64_t{1} << kStep) - 1, x);
                bits = _mm512_cmple_epu16_mask(_mm512_and_si512(v, _mm512_set1_epi16(0x7FFF)),
                                               _mm512_set1_epi16(static_cast<short>(limit >> 16)));
            }
            std::memcpy(to, &bits, kStep / 8);
        }
    }
}
#endif

// Where the bits of a row begin, from a value on that is a multiple of 16.
inline uint8_t* mask_of(const QuantJob& job, int64_t row, int64_t value) {
    return job.mask + row * ceil_div(job.padded, 8) + value / 8;
}

// ---- random bits ----

// The random words of a chunk, a run of `stride` words per tile. Where ties do not go to even, the
// words are the constant that has the same effect.
uint32_t* random_words(const Call& call, const Philox& philox, const RowChunk& p, int64_t& stride);

}  // namespace EXTENSOR_ISA
