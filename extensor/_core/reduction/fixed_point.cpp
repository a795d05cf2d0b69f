// Gradients as fixed-point integers under a block's anchor, and integers under a block's exponent:
// sums that do not depend on their order. Written per block of 32, for the compiler to vectorize.

#include "common/elementwise.hpp"
#include "quantize/philox.hpp"
#include "reduction/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int kBlock = kReductionBlock;
constexpr int64_t kBlocks = kSegment / kBlock;  // of a task

// body(block) for every block.
template <class F>
void for_blocks(int64_t n, int64_t work, F&& body) {
    const int64_t blocks = n / kBlock;
    threads::run(ceil_div(blocks, kBlocks), n * work, [&](int64_t task) {
        const int64_t end = least(blocks, (task + 1) * kBlocks);
        for (int64_t b = task * kBlocks; b < end; ++b) body(b);
    });
}

INLINE uint32_t bits_of(const float* x, int i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    return bits;
}

// A value's exponent field, 1 for subnormal numbers, and its 24 bits of significand.
INLINE uint32_t field_of(uint32_t bits) {
    const uint32_t field = bits >> 23 & 255u;
    return field ? field : 1u;
}
INLINE uint32_t significand_of(uint32_t bits) {
    return (bits & 0x7FFFFFu) | (bits & 0x7F800000u ? 0x800000u : 0u);
}

// 2^exponent for -1022 <= exponent <= 1023.
INLINE double power(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}

// The magnitude in units of 2^(16 anchor - 159), truncated; below 2^48.
INLINE uint64_t magnitude(uint32_t bits, uint32_t anchor) {
    const uint32_t shift = 16 * anchor + 15 - field_of(bits);
    return static_cast<uint64_t>(significand_of(bits)) << 24 >> (shift < 63 ? shift : 63u);
}

void block_max(int64_t n, const float* x, uint32_t* out) {
    for_blocks(n, 1, [=](int64_t b) {
        const float* p = x + b * kBlock;
        uint32_t most = 0;
        for (int i = 0; i < kBlock; ++i) {
            const uint32_t bits = bits_of(p, i) & 0x7FFFFFFFu;
            most = bits > most ? bits : most;
        }
        out[b] = most;
    });
}

// Squares are exact in float64.
INLINE double square_sum(const float* __restrict p) {
    double sums[8] = {};
    for (int i = 0; i < kBlock; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(p[i + j]) * p[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void block_square_sums(int64_t n, const float* x, double* out) {
    for_blocks(n, 1, [=](int64_t b) { out[b] = square_sum(x + b * kBlock); });
    if (const int64_t rest = n % kBlock) {
        float last[kBlock] = {};
        std::memcpy(last, x + n - rest, rest * 4);
        out[n / kBlock] = square_sum(last);
    }
}

void fixed_point(int64_t n, const float* x, const uint8_t* anchors, int64_t* out) {
    for_blocks(n, 3, [=](int64_t b) {
        const float* __restrict p = x + b * kBlock;
        int64_t* __restrict o = out + b * kBlock;
        const uint32_t anchor = anchors[b];
        if (anchor == kNonfinite) {
            std::memset(o, 0, kBlock * 8);
            return;
        }
        for (int i = 0; i < kBlock; ++i) {
            const uint32_t bits = bits_of(p, i);
            const int64_t v = static_cast<int64_t>(magnitude(bits, anchor));
            const int64_t sign = -static_cast<int64_t>(bits >> 31);
            o[i] = (v ^ sign) - sign;
        }
    });
}

void add_limbs(int64_t n, const float* x, const uint8_t* before, const uint8_t* after,
               int32_t* limbs) {
    for_blocks(n, 6, [=](int64_t b) {
        const float* __restrict p = x + b * kBlock;
        int32_t* __restrict high = limbs + b * kBlock;
        int32_t* __restrict middle = high + n;
        int32_t* __restrict low = middle + n;
        const uint32_t anchor = after[b];
        if (anchor == kNonfinite) return;
        const int raise = static_cast<int>(anchor) - before[b];
        if (raise == 1) {
            std::memcpy(low, middle, kBlock * 4);
            std::memcpy(middle, high, kBlock * 4);
        } else if (raise == 2) {
            std::memcpy(low, high, kBlock * 4);
            std::memset(middle, 0, kBlock * 4);
        } else if (raise > 2) {
            std::memset(low, 0, kBlock * 4);
            std::memset(middle, 0, kBlock * 4);
        }
        if (raise) std::memset(high, 0, kBlock * 4);
        for (int i = 0; i < kBlock; ++i) {
            const uint32_t bits = bits_of(p, i);
            const uint64_t v = magnitude(bits, anchor);
            const int32_t sign = -static_cast<int32_t>(bits >> 31);
            high[i] += (static_cast<int32_t>(v >> 32) ^ sign) - sign;
            middle[i] += (static_cast<int32_t>(v >> 16 & 0xFFFFu) ^ sign) - sign;
            low[i] += (static_cast<int32_t>(v & 0xFFFFu) ^ sign) - sign;
        }
    });
}

void limb_total(int64_t n, const int32_t* limbs, const uint8_t* before, const uint8_t* after,
                int64_t* out) {
    for_blocks(n, 3, [=](int64_t b) {
        const int32_t* __restrict high = limbs + b * kBlock;
        const int32_t* __restrict middle = high + n;
        const int32_t* __restrict low = middle + n;
        int64_t* __restrict o = out + b * kBlock;
        const int raise = static_cast<int>(after[b]) - before[b];
        if (after[b] == kNonfinite || raise > 2)
            std::memset(o, 0, kBlock * 8);
        else if (raise == 0)
            for (int i = 0; i < kBlock; ++i)
                o[i] = static_cast<int64_t>(high[i]) * 65536 * 65536 +
                       static_cast<int64_t>(middle[i]) * 65536 + low[i];
        else if (raise == 1)
            for (int i = 0; i < kBlock; ++i)
                o[i] = static_cast<int64_t>(high[i]) * 65536 + middle[i];
        else
            for (int i = 0; i < kBlock; ++i) o[i] = high[i];
    });
}

constexpr float kNan = __builtin_nanf("");

void fixed_point_mean(int64_t n, const int64_t* total, const uint8_t* anchors, double divisor,
                      float* out) {
    for_blocks(n, 3, [=](int64_t b) {
        const int64_t* __restrict t = total + b * kBlock;
        float* __restrict o = out + b * kBlock;
        const int anchor = anchors[b];
        if (anchor == kNonfinite) {
            for (int i = 0; i < kBlock; ++i) o[i] = kNan;
            return;
        }
        const double unit = power(16 * anchor - 159);
        for (int i = 0; i < kBlock; ++i)
            o[i] = static_cast<float>(static_cast<double>(t[i]) * unit / divisor);
    });
}

// The nearest integer, ties to even, of a magnitude below 2^31.
INLINE int32_t nearest(double x) {
    const double shifted = x + 0x1.8p52;  // whose last place is 1
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);
    return static_cast<int32_t>(static_cast<uint32_t>(bits));
}

template <int Bits, class Code>
void mxint(const MxintJob& job, Code* codes) {
    constexpr int64_t kRun = 64;  // blocks whose random words are drawn together
    constexpr int kPlaces = 23 - Bits;
    const int64_t blocks = job.n / kBlock;
    threads::run(ceil_div(blocks, kRun), job.n * (job.stream ? 12 : 4), [&](int64_t task) {
        const int64_t first = task * kRun, end = least(blocks, first + kRun);
        uint32_t* words = nullptr;
        if (job.stream) {
            words =
                threads::scratch_of<uint32_t>(threads::Slot::random, kRun * kBlock / 2 + 2 * VL);
            philox_run(Philox(*job.stream), words, 0, kBlock / 8,
                       job.first_block + static_cast<uint32_t>(first), end - first);
        }
        for (int64_t b = first; b < end; ++b) {
            const float* __restrict p = job.x + b * kBlock;
            Code* __restrict q = codes + b * kBlock;
            float* __restrict left = job.residual ? job.residual + b * kBlock : nullptr;
            const int exponent = job.exponents[b];
            if (exponent == kNonfinite) {
                std::memset(q, 0, sizeof(Code) * kBlock);
                if (left) std::memset(left, 0, kBlock * 4);
                continue;
            }
            const double scale = power(125 + Bits - exponent);
            if (words) {
                uint16_t halves[kBlock];  // a word serves two values
                std::memcpy(halves, words + (b - first) * (kBlock / 2), sizeof(halves));
                int32_t fine[kBlock];
                for (int i = 0; i < kBlock; ++i) {
                    const int32_t dither = halves[i] & ((1 << kPlaces) - 1);
                    fine[i] = nearest(p[i] * (scale * (1 << kPlaces)) + dither);
                }
                for (int i = 0; i < kBlock; ++i) q[i] = static_cast<Code>(fine[i] >> kPlaces);
            } else {
                for (int i = 0; i < kBlock; ++i)
                    q[i] = static_cast<Code>(nearest(static_cast<double>(p[i]) * scale));
            }
            if (left) {
                const double unit = power(exponent - 125 - Bits);
                for (int i = 0; i < kBlock; ++i)
                    left[i] = static_cast<float>(p[i] - static_cast<double>(q[i]) * unit);
            }
        }
    });
}

template <int Bits, class Code>
void mxint_mean(int64_t n, int64_t ranks, const Code* codes, const uint8_t* exponents,
                double divisor, float* out) {
    const int64_t blocks = n / kBlock;
    for_blocks(n, 2 * ranks, [=](int64_t b) {
        int most = 0;
        for (int64_t r = 0; r < ranks; ++r) {
            const int exponent = exponents[r * blocks + b];
            most = exponent > most ? exponent : most;
        }
        float* __restrict o = out + b * kBlock;
        if (most == kNonfinite) {
            for (int i = 0; i < kBlock; ++i) o[i] = kNan;
            return;
        }
        int64_t total[kBlock] = {};
        for (int64_t r = 0; r < ranks; ++r) {
            const Code* __restrict q = codes + r * n + b * kBlock;
            const int behind = most - exponents[r * blocks + b];
            const int shift = behind < 63 ? behind : 63;
            for (int i = 0; i < kBlock; ++i)
                total[i] += static_cast<int64_t>(q[i]) * (int64_t{1} << 32) >> shift;
        }
        const double unit = power(most - 125 - Bits - 32);
        for (int i = 0; i < kBlock; ++i)
            o[i] = static_cast<float>(static_cast<double>(total[i]) * unit / divisor);
    });
}

}  // namespace

extern const ReductionKernels reduction_kernels = {block_max,
                                                   block_square_sums,
                                                   fixed_point,
                                                   add_limbs,
                                                   limb_total,
                                                   fixed_point_mean,
                                                   mxint<8, int8_t>,
                                                   mxint<16, int16_t>,
                                                   mxint_mean<8, int8_t>,
                                                   mxint_mean<16, int16_t>};

}  // namespace EXTENSOR_ISA
