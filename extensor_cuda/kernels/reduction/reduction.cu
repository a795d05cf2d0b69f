// Gradients as integers under a block's exponent, whose sums have no order; the definitions are in
// extensor/backends/generic/reduction.py. A thread has four neighbouring values, eight threads a
// block of 32. REDUCTION_BITS is 8 or 16, of mxint's codes. Compiled with --fmad=false.

#include "common/types.cuh"
#include "common/philox.cuh"

constexpr int kThreads = 256, kEach = 4, kLanes = 8;
constexpr u32 kNonfinite = 255, kNaN = 0x7FC00000;

DEVICE u32 magnitude(u32 bits) { return bits & 0x7FFFFFFF; }
DEVICE u32 field(u32 bits) { return max(bits >> 23 & 255, 1u); }
DEVICE u32 significand(u32 bits) {
    return (bits & 0x7FFFFF) | static_cast<u32>((bits & 0x7F800000) != 0) << 23;
}
DEVICE double power(int exponent) {
    return __longlong_as_double(static_cast<i64>(exponent + 1023) << 52);
}
DEVICE i64 with_sign(u64 value, u32 bits) {
    const i64 whole = static_cast<i64>(value);
    return bits >> 31 ? -whole : whole;
}

// The thread's values; zeros behind the end, where no block is in part.
DEVICE i64 first_value() { return (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kEach; }
DEVICE void load(const float* x, i64 at, i64 size, u32 (&bits)[kEach]) {
    uint4 four{0, 0, 0, 0};
    if (at < size) four = *reinterpret_cast<const uint4*>(x + at);
    bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
}

// Of the block that eight neighbouring threads have.
DEVICE u32 greatest(const u32 (&bits)[kEach]) {
    u32 most = max(
        max(magnitude(bits[0]), magnitude(bits[1])), max(magnitude(bits[2]), magnitude(bits[3])));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    return most;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    block_max(const float* __restrict__ x, u32* __restrict__ out, i64 size) {
    const i64 at = first_value();
    u32 bits[kEach];
    load(x, at, size, bits);
    const u32 most = greatest(bits);
    if (at < size && threadIdx.x % kLanes == 0) out[at / 32] = most;
}

// --- exact ---

DEVICE i64 fixed(u32 bits, int anchor) {
    if (anchor == kNonfinite) return 0;
    const int shift = min(max(16 * anchor + 15 - static_cast<int>(field(bits)), 0), 63);
    return with_sign((static_cast<u64>(significand(bits)) << 24) >> shift, bits);
}

extern "C" __global__ void __launch_bounds__(kThreads) fixed_point(
    const float* __restrict__ x, const u8* __restrict__ anchors, i64* __restrict__ out, i64 size) {
    const i64 at = first_value();
    if (at >= size) return;
    u32 bits[kEach];
    load(x, at, size, bits);
    const int anchor = anchors[at / 32];
#pragma unroll
    for (int k = 0; k < kEach; ++k) out[at + k] = fixed(bits[k], anchor);
}

// The sums at an anchor that is higher by `raised`.
DEVICE void raise(const int (&limbs)[3], int raised, int (&out)[3]) {
#pragma unroll
    for (int place = 0; place < 3; ++place) {
        out[place] = 0;
#pragma unroll
        for (int from = 0; from <= place; ++from)
            if (raised == place - from) out[place] = limbs[from];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_limbs(int* __restrict__ limbs, const float* __restrict__ x, const u8* __restrict__ before,
        const u8* __restrict__ after, i64 size) {
    const i64 at = first_value();
    if (at >= size) return;
    u32 bits[kEach];
    load(x, at, size, bits);
    const int anchor = after[at / 32], raised = anchor - before[at / 32];
    if (anchor == kNonfinite) return;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        int old[3], now[3];
#pragma unroll
        for (int place = 0; place < 3; ++place) old[place] = limbs[place * size + at + k];
        raise(old, raised, now);
        const i64 value = fixed(bits[k], anchor);
        const u64 digits = static_cast<u64>(value < 0 ? -value : value);
#pragma unroll
        for (int place = 0; place < 3; ++place) {
            const int digit = static_cast<int>(digits >> (32 - 16 * place) & 0xFFFF);
            limbs[place * size + at + k] = now[place] + (value < 0 ? -digit : digit);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) limb_total(const int* __restrict__ limbs,
    const u8* __restrict__ before, const u8* __restrict__ after, i64* __restrict__ out, i64 size) {
    const i64 at = first_value();
    if (at >= size) return;
    const int anchor = after[at / 32], raised = anchor - before[at / 32];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        int old[3], now[3];
#pragma unroll
        for (int place = 0; place < 3; ++place) old[place] = limbs[place * size + at + k];
        raise(old, raised, now);
        const u64 high = static_cast<u64>(static_cast<i64>(now[0])) << 32,
                  middle = static_cast<u64>(static_cast<i64>(now[1])) << 16,
                  low = static_cast<u64>(static_cast<i64>(now[2]));
        out[at + k] = anchor == kNonfinite ? 0 : static_cast<i64>(high + middle + low);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fixed_point_mean(const i64* __restrict__ total, const u8* __restrict__ anchors,
        float* __restrict__ out, i64 size, double divisor) {
    const i64 at = first_value();
    if (at >= size) return;
    const int anchor = anchors[at / 32];
    const double unit = power(anchor == kNonfinite ? 0 : 16 * anchor - 159);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const double mean = __ddiv_rn(__dmul_rn(static_cast<double>(total[at + k]), unit), divisor);
        out[at + k] = anchor == kNonfinite ? __uint_as_float(kNaN) : static_cast<float>(mean);
    }
}

// --- mxint: rows of codes, and behind them an exponent for each block ---

#if REDUCTION_BITS == 8
typedef signed char Code;
typedef u32 Word;  // of four codes
#else
typedef short Code;
typedef u64 Word;
#endif
constexpr int kBits = REDUCTION_BITS, kBytes = kBits / 8, kWord = sizeof(Word);
constexpr int kPlaces = 24 - kBits;  // of fraction, in sums of 32 bits over at most 256 ranks

// Whether all rows begin at multiples of a word; those of an odd number of blocks do not.
DEVICE bool words_in(const u8* rows, i64 pitch) {
    return (reinterpret_cast<u64>(rows) | static_cast<u64>(pitch)) % kWord == 0;
}

DEVICE void store_codes(u8* to, bool aligned, const Code (&codes)[kEach]) {
    constexpr Word kMask = (Word{1} << kBits) - 1;
    Word word = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) word |= (static_cast<Word>(codes[k]) & kMask) << kBits * k;
    if (aligned) {
        *reinterpret_cast<Word*>(to) = word;
    } else {
#pragma unroll
        for (int k = 0; k < kWord; ++k) to[k] = static_cast<u8>(word >> 8 * k);
    }
}

DEVICE void load_codes(const u8* from, bool aligned, Code (&codes)[kEach]) {
    Word word = 0;
    if (aligned) {
        word = *reinterpret_cast<const Word*>(from);
    } else {
#pragma unroll
        for (int k = 0; k < kWord; ++k) word |= static_cast<Word>(from[k]) << 8 * k;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) codes[k] = static_cast<Code>(word >> kBits * k);
}

// How values are rounded: by random bits, or to nearest; and what rounding left over, or null.
struct Rounding {
    u32 random;
    Stream stream;
    u32 first_block;
    float* residual;
};

// Codes of the thread's values and the exponent of their block. All eight threads of a block call
// it, those behind the end with zeros.
DEVICE int encode(
    u32 (&bits)[kEach], i64 at, bool inside, const Rounding& how, Code (&codes)[kEach]) {
    float* residual = inside ? how.residual : nullptr;
    if (residual) {
#pragma unroll
        for (int k = 0; k < kEach; ++k)
            bits[k] = __float_as_uint(__fadd_rn(__uint_as_float(bits[k]), residual[at + k]));
    }
    const u32 most = greatest(bits);
    const int exponent =
        static_cast<int>(min((most + ((1u << (25 - kBits)) - 1)) >> 23, kNonfinite));
    u32 words[kEach] = {0, 0, 0, 0};
    if (how.random)
        philox(
            threadIdx.x % kLanes, how.first_block + static_cast<u32>(at / 32), how.stream, words);
    const double unit = power(exponent - 125 - kBits);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const int shift = min(max(exponent + 25 - kBits - static_cast<int>(field(bits[k])), 1), 63);
        const u64 value = (static_cast<u64>(significand(bits[k])) << 32) >> shift;
        const int whole = static_cast<int>(value >> 32);
        const u32 fraction = static_cast<u32>(value);
        const bool up = how.random ? fraction > words[k]
                                   : fraction > 1u << 31 || (fraction == 1u << 31 && (whole & 1));
        const int rounded = exponent == kNonfinite ? 0 : whole + up;
        const int code = bits[k] >> 31 ? -rounded : rounded;
        codes[k] = static_cast<Code>(code);
        if (residual && exponent != kNonfinite)
            residual[at + k] =
                static_cast<float>(__dsub_rn(static_cast<double>(__uint_as_float(bits[k])),
                    __dmul_rn(static_cast<double>(code), unit)));
    }
    return exponent;
}

// The part of a value, in whole blocks: a division of 64 bits takes as long as the rest.
DEVICE i64 part_of(i64 at, i64 values) {
    return static_cast<u32>(at / 32) / static_cast<u32>(values / 32);
}

DEVICE void store_packed(
    u8* packed, i64 at, i64 values, i64 pitch, const Code (&codes)[kEach], int exponent) {
    const i64 row = part_of(at, values), within = at - row * values;
    u8* to = packed + row * pitch;
    store_codes(to + within * kBytes, words_in(packed, pitch), codes);
    if (threadIdx.x % kLanes == 0) to[values * kBytes + within / 32] = static_cast<u8>(exponent);
}

// Of `added` rows after each other from the row of the value on; `factor` is 1 / divisor where that
// is exact, and the divisor then 1.
DEVICE void mean_of(const u8* packed, i64 at, i64 values, i64 pitch, int added, double factor,
    double divisor, float (&means)[kEach]) {
    const i64 part = part_of(at, values), within = at - part * values;
    const u8* from = packed + part * added * pitch;
    const u8* exponents = from + values * kBytes + within / 32;
    const bool aligned = words_in(packed, pitch);
    Code codes[kEach];
    int most = 0;
    if (added == 1 && factor == 1.0 && divisor == 1.0) {  // exact, also for subnormal numbers
        most = exponents[0];
        const float unit = static_cast<float>(power(most - 125 - kBits));
        load_codes(from + within * kBytes, aligned, codes);
#pragma unroll
        for (int k = 0; k < kEach; ++k) means[k] = __fmul_rn(static_cast<float>(codes[k]), unit);
    } else {
        for (int rank = 0; rank < added; ++rank)
            most = max(most, static_cast<int>(exponents[rank * pitch]));
        int least = most;
        for (int rank = 0; rank < added; ++rank)
            least = min(least, static_cast<int>(exponents[rank * pitch]));
        const double unit = __dmul_rn(power(most - 125 - kBits - 32), factor);
        // Where no result is subnormal, rounding and then scaling by a power of two is rounding
        // once.
        const bool scaled = divisor == 1.0 && unit >= 0x1p-126;
        if (scaled && most - least <= kPlaces && added <= 256) {  // nothing is lost in 32 bits
            int totals[kEach] = {0, 0, 0, 0};
            for (int rank = 0; rank < added; ++rank) {
                const int weight = 1
                                   << (kPlaces - most + static_cast<int>(exponents[rank * pitch]));
                load_codes(from + rank * pitch + within * kBytes, aligned, codes);
#pragma unroll
                for (int k = 0; k < kEach; ++k) totals[k] += codes[k] * weight;
            }
            const float scale = static_cast<float>(__dmul_rn(unit, 1ll << (32 - kPlaces)));
#pragma unroll
            for (int k = 0; k < kEach; ++k)
                means[k] = __fmul_rn(static_cast<float>(totals[k]), scale);
        } else {
            i64 totals[kEach] = {0, 0, 0, 0};
            for (int rank = 0; rank < added; ++rank) {
                const int behind = min(most - static_cast<int>(exponents[rank * pitch]), 63);
                load_codes(from + rank * pitch + within * kBytes, aligned, codes);
#pragma unroll
                for (int k = 0; k < kEach; ++k)
                    totals[k] += (static_cast<i64>(codes[k]) * (i64{1} << 32)) >> behind;
            }
#pragma unroll
            for (int k = 0; k < kEach; ++k) {
                double mean = __dmul_rn(static_cast<double>(totals[k]), unit);
                if (divisor != 1.0) mean = __ddiv_rn(mean, divisor);
                means[k] = static_cast<float>(mean);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k)
        if (most == kNonfinite) means[k] = __uint_as_float(kNaN);
}

extern "C" __global__ void __launch_bounds__(kThreads) mxint_pack(const float* __restrict__ x,
    float* __restrict__ residual, u8* __restrict__ packed, i64 size, i64 values, i64 pitch,
    u32 random, u32 key0, u32 key1, u32 high0, u32 high1, u32 first_block) {
    const i64 at = first_value();
    u32 bits[kEach];
    load(x, at, size, bits);
    const Rounding how{random, Stream{key0, key1, high0, high1}, first_block, residual};
    Code codes[kEach];
    const int exponent = encode(bits, at, at < size, how, codes);
    if (at < size) store_packed(packed, at, values, pitch, codes, exponent);
}

// Adds up `added` rows after each other; the next ones hold the next values.
extern "C" __global__ void __launch_bounds__(kThreads)
    mxint_unpack(const u8* __restrict__ packed, float* __restrict__ out, i64 size, i64 values,
        i64 pitch, int added, double factor, double divisor) {
    const i64 at = first_value();
    if (at >= size) return;
    float means[kEach];
    mean_of(packed, at, values, pitch, added, factor, divisor, means);
    *reinterpret_cast<float4*>(out + at) = float4{means[0], means[1], means[2], means[3]};
}

// The mean of all rows, rounded once more: its codes and exponents, or the values that they have.
extern "C" __global__ void __launch_bounds__(kThreads) mxint_repack(const u8* __restrict__ packed,
    float* __restrict__ residual, u8* __restrict__ codes_out, float* __restrict__ values_out,
    i64 size, i64 pitch, int added, double factor, double divisor, u32 random, u32 key0, u32 key1,
    u32 high0, u32 high1, u32 first_block) {
    const i64 at = first_value();
    float means[kEach] = {0, 0, 0, 0};
    if (at < size) mean_of(packed, at, size, pitch, added, factor, divisor, means);
    u32 bits[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) bits[k] = __float_as_uint(means[k]);
    const Rounding how{random, Stream{key0, key1, high0, high1}, first_block, residual};
    Code codes[kEach];
    const int exponent = encode(bits, at, at < size, how, codes);
    if (at >= size) return;
    if (codes_out) {
        store_packed(codes_out, at, size, pitch, codes, exponent);
        return;
    }
    const float unit = static_cast<float>(power(exponent - 125 - kBits));
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        means[k] = __fmul_rn(static_cast<float>(codes[k]), unit);
        if (exponent == kNonfinite) means[k] = __uint_as_float(kNaN);
    }
    *reinterpret_cast<float4*>(values_out + at) = float4{means[0], means[1], means[2], means[3]};
}
