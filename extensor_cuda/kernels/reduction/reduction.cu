// Gradients as integers under a block's exponent, whose sums have no order; the definitions are in
// extensor/backends/generic/reduction.py. REDUCTION_BITS is 8 or 16, of mxint's codes. Compiled
// with --fmad=false.

#include "common/types.cuh"
#include "common/philox.cuh"

constexpr int kThreads = 256;
constexpr int kEach = 4;  // neighbouring values of a thread
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
template <int Each = kEach>
DEVICE i64 first_value() {
    return (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * Each;
}
DEVICE void load(const float* x, i64 at, i64 size, u32 (&bits)[kEach]) {
    uint4 four{0, 0, 0, 0};
    if (at < size) four = *reinterpret_cast<const uint4*>(x + at);
    bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
}

// Of the block of 32 that neighbouring threads have.
template <int Each>
DEVICE u32 greatest(const u32 (&bits)[Each]) {
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < Each; ++k) most = max(most, magnitude(bits[k]));
#pragma unroll
    for (int step = 1; step < 32 / Each; step *= 2)
        most = max(most, __shfl_xor_sync(~0u, most, step));
    return most;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    block_max(const float* __restrict__ x, u32* __restrict__ out, i64 size) {
    const i64 at = first_value();
    u32 bits[kEach];
    load(x, at, size, bits);
    const u32 most = greatest(bits);
    if (at < size && at % 32 == 0) out[at / 32] = most;
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

constexpr int kBits = REDUCTION_BITS, kPlaces = 23 - kBits;
constexpr int kRun = 8;                    // neighbouring values of a thread: a call of Philox
constexpr int kWords = kRun * kBits / 32;  // of their codes
constexpr int kAligned = 4 * kWords;
constexpr u32 kMask = (1u << kBits) - 1, kPlus = 1u << (kBits - 1);
constexpr float kWhole = 12582912.0f;         // 1.5 * 2^23: its last place is 1
constexpr float kFine = 1.5f * (1 << kBits);  // its last place is 2^-kPlaces
constexpr float kUnsigned = 8388608.0f + static_cast<float>(kPlus);  // 2^23, with a code + kPlus

// 2^exponent for -149 <= exponent <= 127.
DEVICE float power32(int exponent) {
    return __uint_as_float(
        exponent < -126 ? 1u << (exponent + 149) : static_cast<u32>(exponent + 127) << 23);
}
DEVICE float unit_of(int exponent) { return power32(exponent - 125 - kBits); }

// The float of one code among a thread's, whose signs are flipped.
DEVICE float code_at(const u32 (&flipped)[kWords], int k) {
    const u32 selector = kBits == 8 ? 0x7440 + k % 4 : 0x7410 + k % 2 * 0x22;
    const u32 bits = __byte_perm(flipped[k * kBits / 32], 0x4B000000, selector);
    return __fsub_rn(__uint_as_float(bits), kUnsigned);
}

// Rows after each other, or each where `at` says: in the memory of another GPU.
struct Rows {
    const u8* packed;
    const u8* const* at;
    i64 pitch;
    DEVICE const u8* operator[](i64 row) const { return at ? at[row] : packed + row * pitch; }
};

// Rows of an odd number of blocks are not aligned.
DEVICE bool aligned(const u8* row) { return reinterpret_cast<u64>(row) % kAligned == 0; }
DEVICE void store_words(u8* to, bool whole, const u32 (&words)[kWords]) {
    if (!whole) {
#pragma unroll
        for (int k = 0; k < kAligned; ++k) to[k] = static_cast<u8>(words[k / 4] >> k % 4 * 8);
    } else {
#if REDUCTION_BITS == 8
        *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
#else
        *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
#endif
    }
}
DEVICE void load_words(const u8* from, bool whole, u32 (&words)[kWords]) {
    if (!whole) {
#pragma unroll
        for (int k = 0; k < kWords; ++k) words[k] = 0;
#pragma unroll
        for (int k = 0; k < kAligned; ++k) words[k / 4] |= static_cast<u32>(from[k]) << k % 4 * 8;
    } else {
#if REDUCTION_BITS == 8
        const uint2 read = *reinterpret_cast<const uint2*>(from);
        words[0] = read.x, words[1] = read.y;
#else
        const uint4 read = *reinterpret_cast<const uint4*>(from);
        words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
#endif
    }
}
DEVICE void load_values(const float* from, float (&values)[kRun]) {
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + k);
        values[k] = four.x, values[k + 1] = four.y, values[k + 2] = four.z, values[k + 3] = four.w;
    }
}
DEVICE void store_values(float* to, const float (&values)[kRun]) {
#pragma unroll
    for (int k = 0; k < kRun; k += 4)
        *reinterpret_cast<float4*>(to + k) =
            float4{values[k], values[k + 1], values[k + 2], values[k + 3]};
}

// How values are rounded: by random bits, or to nearest; and what rounding left over, or null.
struct Rounding {
    u32 random;
    Stream stream;
    u32 first_block;
    float* residual;
};

// The thread's codes as floats above kWhole, and the exponent of their block. All threads of a
// block call it, those behind the end with zeros.
DEVICE int encode(
    float (&x)[kRun], i64 at, bool inside, const Rounding& how, float (&codes)[kRun]) {
    float left[kRun];
    if (inside && how.residual) {
        load_values(how.residual + at, left);
#pragma unroll
        for (int k = 0; k < kRun; ++k) x[k] = __fadd_rn(x[k], left[k]);
    }
    u32 bits[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) bits[k] = __float_as_uint(x[k]);
    const u32 most = greatest(bits);
    const int exponent =
        static_cast<int>(min((most + ((1u << (25 - kBits)) - 1)) >> 23, kNonfinite));
    // The reciprocal of the unit, in two factors, which are exact: of small units it overflows.
    const int small = exponent < 32 ? 64 : 0;
    const float first = power32(small), second = power32(125 + kBits - exponent - small);
    if (how.random) {
        u32 words[4];
        philox(static_cast<u32>(at % 32) / kRun, how.first_block + static_cast<u32>(at / 32),
            how.stream, words);
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
            const u32 dither = words[k / 2] >> k % 2 * 16 & ((1u << kPlaces) - 1);
            const float fine = __fmaf_rn(
                __fmul_rn(x[k], first), second, __uint_as_float(__float_as_uint(kFine) | dither));
            const u32 floor = __float_as_uint(fine) & ~((1u << kPlaces) - 1);
            codes[k] = __fadd_rn(__uint_as_float(floor), kWhole - kFine);
        }
    } else {
#pragma unroll
        for (int k = 0; k < kRun; ++k) codes[k] = __fmaf_rn(__fmul_rn(x[k], first), second, kWhole);
    }
    if (exponent == kNonfinite) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) codes[k] = kWhole;
    } else if (inside && how.residual) {
        const float unit = unit_of(exponent);
#pragma unroll
        for (int k = 0; k < kRun; ++k) left[k] = __fmaf_rn(__fsub_rn(kWhole, codes[k]), unit, x[k]);
        store_values(how.residual + at, left);
    }
    return exponent;
}

// The part of a value, in whole blocks: a division of 64 bits takes as long as the rest.
DEVICE i64 part_of(i64 at, i64 values, i64 size) {
    return values == size ? 0 : static_cast<u32>(at / 32) / static_cast<u32>(values / 32);
}

DEVICE void store_packed(
    u8* packed, i64 at, i64 size, i64 values, i64 pitch, const float (&codes)[kRun], int exponent) {
    const i64 row = part_of(at, values, size), within = at - row * values;
    u8* to = packed + row * pitch;
    u32 words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = 0;
#pragma unroll
    for (int k = 0; k < kRun; ++k)
        words[k * kBits / 32] |= (__float_as_uint(codes[k]) & kMask) << k * kBits % 32;
    store_words(to + within * kBits / 8, aligned(to), words);
    if (at % 32 == 0) to[values * kBits / 8 + within / 32] = static_cast<u8>(exponent);
}

// A sum of integers, where float32 does not hold it or the divisor is no power of two.
DEVICE float mean_of_integers(const Rows& rows, i64 first, i64 code_at, i64 exponent_at, int added,
    int most, double factor, double divisor) {
    i64 total = 0;
    for (int rank = 0; rank < added; ++rank) {
        const u8* row = rows[first + rank];
        const int behind = min(most - static_cast<int>(row[exponent_at]), 63);
        u32 code = row[code_at] ^ (kBits == 8 ? kPlus : 0);
        if (kBits == 16) code |= (row[code_at + 1] ^ 0x80u) << 8;
        const i64 value = static_cast<int>(code) - static_cast<int>(kPlus);
        total += (value * (i64{1} << 32)) >> behind;
    }
    const double unit = __dmul_rn(power(most - 125 - kBits - 32), factor);
    const double mean = __dmul_rn(static_cast<double>(total), unit);
    return static_cast<float>(divisor == 1.0 ? mean : __ddiv_rn(mean, divisor));
}

// Of `added` rows after each other from the row of the value on; `factor` is 1 / divisor where that
// is exact, and the divisor then 1.
DEVICE void mean_of(const Rows& rows, i64 at, i64 size, i64 values, int added, double factor,
    double divisor, float (&means)[kRun]) {
    const i64 part = part_of(at, values, size), within = at - part * values;
    const i64 first = part * added, code_first = within * kBits / 8;
    const i64 exponent_at = values * kBits / 8 + within / 32;
    int most = 0, least = kNonfinite;
#pragma unroll
    for (int k = 0; k < kRun; ++k) means[k] = 0.0f;
#pragma unroll 2
    for (int rank = 0; rank < added; ++rank) {
        const u8* row = rows[first + rank];
        const int exponent = row[exponent_at];
        most = max(most, exponent), least = min(least, exponent);
        const float unit = unit_of(exponent);
        u32 words[kWords];
        load_words(row + code_first, aligned(row), words);
#pragma unroll
        for (int k = 0; k < kWords; ++k) words[k] ^= kBits == 8 ? 0x80808080 : 0x80008000;
#pragma unroll
        for (int k = 0; k < kRun; ++k) means[k] = __fmaf_rn(code_at(words, k), unit, means[k]);
    }
    // These sums are whole numbers of the least unit: exact below 2^24 of them and 2^128.
    const int doublings = added > 1 ? 32 - __clz(added - 1) : 0;
    const bool exact = most - least + doublings <= 25 - kBits && most + doublings < 254;
    if (most == kNonfinite) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) means[k] = __uint_as_float(kNaN);
    } else if (!exact || divisor != 1.0) {
#pragma unroll 1
        for (int k = 0; k < kRun; ++k) {
            const float mean = mean_of_integers(
                rows, first, code_first + k * kBits / 8, exponent_at, added, most, factor, divisor);
#pragma unroll
            for (int other = 0; other < kRun; ++other)
                if (other == k) means[other] = mean;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kRun; ++k) means[k] = __fmul_rn(means[k], static_cast<float>(factor));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) mxint_pack(const float* __restrict__ x,
    float* __restrict__ residual, u8* __restrict__ packed, i64 size, i64 values, i64 pitch,
    u32 random, const u32* clock, u32 key0, u32 key1, u32 high0, u32 high1, u32 first_block) {
    const i64 at = first_value<kRun>();
    float mine[kRun] = {0, 0, 0, 0, 0, 0, 0, 0}, codes[kRun];
    if (at < size) load_values(x + at, mine);
    const Rounding how{random, stream_of(clock, key0, key1, high0, high1), first_block, residual};
    const int exponent = encode(mine, at, at < size, how, codes);
    if (at < size) store_packed(packed, at, size, values, pitch, codes, exponent);
}

// Adds up `added` rows after each other; the next ones hold the next values. Of several GPUs that
// read each other's rows each begins at another row, which `first_block` of its blocks precede.
extern "C" __global__ void __launch_bounds__(kThreads) mxint_unpack(const u8* __restrict__ packed,
    const u8* const* peers, float* __restrict__ out, i64 size, i64 values, i64 pitch, int added,
    double factor, double divisor, u32 first_block) {
    const u32 turned = blockIdx.x + first_block;
    const u32 block = turned < gridDim.x ? turned : turned - gridDim.x;
    const i64 at = (static_cast<i64>(block) * kThreads + threadIdx.x) * kRun;
    if (at >= size) return;
    float means[kRun];
    mean_of({packed, peers, pitch}, at, size, values, added, factor, divisor, means);
    store_values(out + at, means);
}

// The mean of all rows, rounded once more: its codes and exponents, or the values that they have.
extern "C" __global__ void __launch_bounds__(kThreads, kBits == 8 ? 5 : 4)
    mxint_repack(const u8* __restrict__ packed, const u8* const* peers,
        float* __restrict__ residual, u8* __restrict__ codes_out, float* __restrict__ values_out,
        i64 size, i64 pitch, int added, double factor, double divisor, u32 random, const u32* clock,
        u32 key0, u32 key1, u32 high0, u32 high1, u32 first_block) {
    const i64 at = first_value<kRun>();
    float means[kRun] = {0, 0, 0, 0, 0, 0, 0, 0}, codes[kRun];
    if (at < size) mean_of({packed, peers, pitch}, at, size, size, added, factor, divisor, means);
    const Rounding how{random, stream_of(clock, key0, key1, high0, high1), first_block, residual};
    const int exponent = encode(means, at, at < size, how, codes);
    if (at >= size) return;
    if (codes_out) {
        store_packed(codes_out, at, size, size, pitch, codes, exponent);
        return;
    }
    const float unit = unit_of(exponent);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
        const float mean = __fmul_rn(__fsub_rn(codes[k], kWhole), unit);
        means[k] = exponent == kNonfinite ? __uint_as_float(kNaN) : mean;
    }
    store_values(values_out + at, means);
}
