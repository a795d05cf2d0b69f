// Quantizes values to packed codes under float scales, and back, for blocks of any shape: tensors,
// channels, groups, tiles. s = largest magnitude / largest code (1 for zeros), code = x / s
// rounded.
//
// CODEC_ZERO_POINTS: s = (max - min) / (number of codes - 1) over a range that includes 0, code = x
// / s rounded + z. A block that is not finite has scale NaN and codes 0. Orders of operations:
// extensor/quant/scale_encoders.py.
//
// An array is (outer, rows, inner) lines of `columns` elements, along which codes are packed. In
// memory it is (outer, rows, columns, inner), or with QUANT_CONTIGUOUS_AXIS 2 (columns, outer,
// rows). A thread has QUANT_CODE_BYTES bytes of codes that are contiguous.
//
// Macros: QUANT_CONTIGUOUS_AXIS (0: columns, 1: inner, 2: rows), QUANT_CODE_BYTES, QUANT_WHOLE
// (vector loads fit), QUANT_ONE_BLOCK_A_THREAD (a thread's codes share a block),
// QUANT_ALIGNED_BLOCKS (blocks begin at multiples of their number of lanes, a power of two), and
// those of float_codes.cuh.

#include "codec/float_codes.cuh"

constexpr int kPer = 8 / CODEC_BITS, kDeep = 32;
constexpr int kElements = QUANT_CODE_BYTES * kPer;  // of a thread

struct Sizes {
    u32 outer, rows, inner, columns;
};

// The memory offset of an element of an array, or of a block.
DEVICE u32 offset(const Sizes& all, u32 o, u32 r, u32 i, u32 c) {
    return QUANT_CONTIGUOUS_AXIS == 2 ? (c * all.outer + o) * all.rows + r
                                      : ((o * all.rows + r) * all.columns + c) * all.inner + i;
}

DEVICE u32 block_of(const Sizes& grid, const Sizes& each, u32 o, u32 r, u32 i, u32 c) {
    return offset(grid, o / each.outer, r / each.rows, i / each.inner, c / each.columns);
}

DEVICE void take(Most& held, float v) {
    const u32 magnitude = bits_of(v) & kMagnitude;
    const bool nan = magnitude > kExponent, negative = bits_of(v) & kSign;
    join(held,
        {!CODEC_ZERO_POINTS || nan || !negative ? magnitude : 0, nan || negative ? magnitude : 0});
}

DEVICE void store(Most* most, u32 block, const Most& held) {
    raise(&most[block].high, held.high);
    if (CODEC_ZERO_POINTS) raise(&most[block].low, held.low);
}

// Loads contiguous values, zeros beyond the end.
DEVICE void load(const Raw* x, u32 at, u32 left, float (&v)[4]) {
#if QUANT_WHOLE
    load_four(x + at, v);
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = static_cast<u32>(k) < left ? widen(x[at + k]) : 0.0f;
#endif
}

// Finds the bits of each block's extremes, which start at 0. A thread has four contiguous values,
// and up to kDeep along columns that are not contiguous.
extern "C" __global__ void __launch_bounds__(kThreads)
    extremes(const Raw* __restrict__ x, Most* __restrict__ most, u32 outer, u32 rows, u32 inner,
        u32 columns, u32 outer_each, u32 rows_each, u32 inner_each, u32 columns_each,
        u32 outer_grid, u32 rows_grid, u32 inner_grid, u32 columns_grid) {
    const Sizes all = {outer, rows, inner, columns},
                each = {outer_each, rows_each, inner_each, columns_each};
    const Sizes grid = {outer_grid, rows_grid, inner_grid, columns_grid};
    const u32 fast = QUANT_CONTIGUOUS_AXIS == 0   ? columns
                     : QUANT_CONTIGUOUS_AXIS == 1 ? inner
                                                  : rows,
              groups = (fast + 3) / 4;
    u32 t = blockIdx.x * kThreads + threadIdx.x;
    const u32 first = t % groups * 4;
    t /= groups;
#if QUANT_CONTIGUOUS_AXIS == 0
    const bool there = t < outer * rows;
    Most held = {0, 0};
    const u32 row = there ? t % rows : 0, o = there ? t / rows : 0;
    u32 block = block_of(grid, each, o, row, 0, first);
    if (there) {
        float v[4];
        load(x, offset(all, o, row, 0, first), fast - first, v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 mine = block_of(grid, each, o, row, 0, first + k);
            if (first + k < fast && mine != block) {
                store(most, block, held);
                block = mine, held = {0, 0};
            }
            take(held, v[k]);
        }
    }
#if QUANT_ALIGNED_BLOCKS
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Most other = {
            __shfl_xor_sync(~0u, held.high, step), __shfl_xor_sync(~0u, held.low, step)};
        if (__shfl_xor_sync(~0u, block, step) == block) join(held, other);
    }
    const u32 lanes =
        columns_each < 128 ? columns_each / 4 : 32;  // lanes of one block: all get its extremes
    if (there && threadIdx.x % lanes == 0) store(most, block, held);
#else
    if (there) store(most, block, held);
#endif
#else
    const u32 chunks = (columns + kDeep - 1) / kDeep, start = t % chunks * kDeep;
    t /= chunks;
    const u32 of_rows = QUANT_CONTIGUOUS_AXIS == 2 ? 1 : rows;
    if (t >= outer * of_rows) return;
    const u32 row = QUANT_CONTIGUOUS_AXIS == 2 ? 0 : t % rows, o = t / of_rows;
    const u32 end = columns - start < kDeep ? columns : start + kDeep;
    Most held[4] = {};
    for (u32 c = start; c < end; ++c) {
        float v[4];
        load(x,
            QUANT_CONTIGUOUS_AXIS == 2 ? offset(all, o, first, 0, c)
                                       : offset(all, o, row, first, c),
            fast - first, v);
#pragma unroll
        for (int k = 0; k < 4; ++k) take(held[k], v[k]);
        if (c + 1 < end && (c + 1) % columns_each) continue;
        u32 block = 0;
        Most together = {0, 0};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (first + k >= fast) break;
            const u32 mine = QUANT_CONTIGUOUS_AXIS == 2
                                 ? block_of(grid, each, o, first + k, 0, c)
                                 : block_of(grid, each, o, row, first + k, c);
            if (k && mine != block) {
                store(most, block, together);
                together = {0, 0};
            }
            block = mine;
            join(together, held[k]);
            held[k] = {0, 0};
        }
        store(most, block, together);
    }
#endif
}

// The position of a thread's bytes of codes, `bytes` of them along columns.
struct Place {
    u32 o, r, i, byte;
    bool there;
};

DEVICE Place place_of(u32 t, const Sizes& all, u32 bytes) {
    if (QUANT_CONTIGUOUS_AXIS == 2)
        return {t / all.rows % all.outer, t % all.rows, 0, t / all.rows / all.outer,
            t / all.rows / all.outer < bytes};
    const u32 line = t / all.inner / bytes;
    return {line / all.rows, line % all.rows, t % all.inner, t / all.inner % bytes,
        line / all.rows < all.outer};
}

// The four coordinates of element h of byte k.
struct Element {
    u32 o, r, i, c;
};

DEVICE Element element_of(const Place& place, int k, int h) {
    return {place.o, place.r + (QUANT_CONTIGUOUS_AXIS == 2 ? k : 0),
        place.i + (QUANT_CONTIGUOUS_AXIS == 1 ? k : 0),
        (place.byte + (QUANT_CONTIGUOUS_AXIS == 0 ? k : 0)) * kPer + h};
}

// Quantizes x with its blocks' extremes to packed codes, scales and zero points; counters in pairs.
extern "C" __global__ void __launch_bounds__(kThreads)
    codes(const Raw* __restrict__ x, const Most* __restrict__ most, u8* __restrict__ out,
        Stored* __restrict__ scales, signed char* __restrict__ zeros, u64* __restrict__ counters,
        const u32* __restrict__ clock, u32 key0, u32 key1, u32 high0, u32 high1, u32 bytes,
        u32 outer, u32 rows, u32 inner, u32 columns, u32 outer_each, u32 rows_each, u32 inner_each,
        u32 columns_each, u32 outer_grid, u32 rows_grid, u32 inner_grid, u32 columns_grid) {
    const Sizes all = {outer, rows, inner, columns},
                each = {outer_each, rows_each, inner_each, columns_each};
    const Sizes grid = {outer_grid, rows_grid, inner_grid, columns_grid};
    const u32 t = (blockIdx.x * kThreads + threadIdx.x) * QUANT_CODE_BYTES;
    const Place place = place_of(t, all, bytes);
    Tally tally = {0, 0};
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    if (place.there) {
        float v[kElements];
#if QUANT_WHOLE
#pragma unroll
        for (int four = 0; four < kElements / 4; ++four) {
            const Element e = QUANT_CONTIGUOUS_AXIS == 0 ? element_of(place, four * 4 / kPer, 0)
                                                         : element_of(place, 0, four);
            float part[4];
            if (e.c < columns) load_four(x + offset(all, e.o, e.r, e.i, e.c), part);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                v[QUANT_CONTIGUOUS_AXIS == 0 ? four * 4 + k : k * kPer + four] = part[k];
        }
#else
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
            const Element e = element_of(place, n / kPer, n % kPer);
            v[n] = e.c < columns ? widen(x[offset(all, e.o, e.r, e.i, e.c)]) : 0.0f;
        }
#endif
        u32 packed = 0, block = ~0u, at = 0;
        Scale s;
#if CODEC_RBITS
        u32 draw[4], call = ~0u, drawn = ~0u;
        constexpr u32 kShare = 128 / CODEC_RBITS;  // positions of one Philox call
#endif
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
            const Element e = element_of(place, n / kPer, n % kPer);
            if (e.c >= columns) continue;
            if (QUANT_ONE_BLOCK_A_THREAD && n) {
                ++at;
            } else {
                const u32 mine = block_of(grid, each, e.o, e.r, e.i, e.c);
                if (mine != block) s = block_scale(most[mine]);
                block = mine;
                at = ((e.o % outer_each * rows_each + e.r % rows_each) * inner_each +
                         e.i % inner_each) *
                         columns_each +
                     e.c % columns_each;
            }
            if (at == 0) {
                scales[block] = static_cast<Stored>(s.stored);
                if (CODEC_ZERO_POINTS) zeros[block] = static_cast<signed char>(s.zero);
            }
            if (!s.live) continue;
            u32 word = CODEC_TIE_WORD;
#if CODEC_RBITS
            if (call != at / kShare || drawn != block) {
                call = at / kShare, drawn = block;
                philox(call, block, stream, draw);
            }
            const u32 which = at % kShare / (kShare / 4);
            word = which == 0 ? draw[0] : which == 1 ? draw[1] : which == 2 ? draw[2] : draw[3];
            if (CODEC_RBITS == 8)
                word = 0x43000080u | (word >> at % 4 * 8 & 0xFFu)
                                         << 8;  // in round_magnitude's form
#endif
            packed |= code_of(v[n], s, word, tally) << (n / kPer * 8 + n % kPer * CODEC_BITS);
        }
#if QUANT_CODE_BYTES == 4
        *reinterpret_cast<u32*>(out + t) = packed;
#else
        out[t] = static_cast<u8>(packed);
#endif
    }
    add_counts(tally, counters);
}

// Dequantizes packed codes and scales to float32.
extern "C" __global__ void __launch_bounds__(kThreads)
    values(const u8* __restrict__ in, const Stored* __restrict__ scales,
        const signed char* __restrict__ zeros, float* __restrict__ out, u32 bytes, u32 outer,
        u32 rows, u32 inner, u32 columns, u32 outer_each, u32 rows_each, u32 inner_each,
        u32 columns_each, u32 outer_grid, u32 rows_grid, u32 inner_grid, u32 columns_grid) {
    const Sizes all = {outer, rows, inner, columns},
                each = {outer_each, rows_each, inner_each, columns_each};
    const Sizes grid = {outer_grid, rows_grid, inner_grid, columns_grid};
    const u32 t = (blockIdx.x * kThreads + threadIdx.x) * QUANT_CODE_BYTES;
    const Place place = place_of(t, all, bytes);
    if (!place.there) return;
#if QUANT_CODE_BYTES == 4
    const u32 packed = *reinterpret_cast<const u32*>(in + t);
#else
    const u32 packed = in[t];
#endif
    float v[kElements];
    u32 block = 0;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
        const Element e = element_of(place, n / kPer, n % kPer);
        if (!QUANT_ONE_BLOCK_A_THREAD || n == 0)
            block = block_of(grid, each, e.o, e.r, e.i, e.c < columns ? e.c : columns - 1);
#if CODEC_FLOAT16_SCALES
        const float scale = half_to_float(scales[block]);
#else
        const float scale = float_of(scales[block]);
#endif
        const int zero = CODEC_ZERO_POINTS ? zeros[block] : 0;
        v[n] = decoded(packed >> (n / kPer * 8 + n % kPer * CODEC_BITS) & ((1u << CODEC_BITS) - 1),
            scale, zero);
    }
#if QUANT_WHOLE
#pragma unroll
    for (int four = 0; four < kElements / 4; ++four) {
        const Element e = QUANT_CONTIGUOUS_AXIS == 0 ? element_of(place, four * 4 / kPer, 0)
                                                     : element_of(place, 0, four);
        float part[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            part[k] = v[QUANT_CONTIGUOUS_AXIS == 0 ? four * 4 + k : k * kPer + four];
        if (e.c < columns)
            *reinterpret_cast<float4*>(out + offset(all, e.o, e.r, e.i, e.c)) =
                float4{part[0], part[1], part[2], part[3]};
    }
#else
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
        const Element e = element_of(place, n / kPer, n % kPer);
        if (e.c < columns) out[offset(all, e.o, e.r, e.i, e.c)] = v[n];
    }
#endif
}
