// Cuts float32 to 12 or 16 bits by rounding to odd, and restores them: see
// extensor/quant/round_to_odd.py.

#include "common/elementwise.hpp"
#include "quantize/packing.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr uint32_t kSmallestNormal = 1u << 23;
static_assert(kSegment % kQuad == 0, "two segments share no byte");

// The upper `Bits` bits of each value, the last one set where what is cut is not zero.
template <int Bits>
INLINE vu cut(vu word) {
    const vu rest = word << static_cast<uint32_t>(Bits);
    return word >> static_cast<uint32_t>(32 - Bits) | (reinterpret_cast<vu>(rest != 0u) & 1u);
}

// Values cut to `Bits`, four vectors at a time. `high`: bytes of 12 bits, or words of 16; `low`:
// the last four of 12 bits, two values a byte.
template <int Bits>
INLINE void store_cut(const vu (&kept)[4], uint8_t* high, uint8_t* low) {
    if constexpr (Bits == 12) {
        vu upper[4], nibbles[4];
        for (int k = 0; k < 4; ++k) upper[k] = kept[k] >> 4, nibbles[k] = kept[k] & 0xFu;
        store_quad<8>(high, upper);
        store_quad<4>(low, nibbles);
    } else {
        typedef uint16_t words __attribute__((vector_size(2 * VL), aligned(1), may_alias));
        for (int k = 0; k < 4; ++k)
            *reinterpret_cast<words*>(high + 2 * k * VL) = __builtin_convertvector(kept[k], words);
    }
}

template <int Bits>
bool round_to_odd(int64_t n, const float* x, uint8_t* high, uint8_t* low) {
    constexpr int kBytes = Bits == 12 ? 1 : 2;  // of `high`, a value
    bool* subnormal = threads::scratch_of<bool>(threads::Slot::partial, ceil_div(n, kSegment));
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        vu any = {};
        const int64_t task = i / kSegment;
        for (; i < end; i += kQuad) {
            vu kept[4];
            for (int k = 0; k < 4; ++k) {
                const int64_t left = most(0, least(VL, end - i - k * VL));
                const vu word =
                    bits_of(left == VL ? load(x + i + k * VL)
                                       : load_part(x + i + k * VL, static_cast<int>(left)));
                // Zero becomes the largest.
                any |= reinterpret_cast<vu>((word & kMagnitude) - 1u < kSmallestNormal - 1u);
                kept[k] = cut<Bits>(word);
            }
            if (end - i >= kQuad) {
                store_cut<Bits>(kept, high + i * kBytes, low + i / 2);
                continue;
            }
            uint8_t last[2 * kQuad], nibbles[kQuad / 2];
            store_cut<Bits>(kept, last, nibbles);
            std::memcpy(high + i * kBytes, last, static_cast<size_t>((end - i) * kBytes));
            if (Bits == 12)
                std::memcpy(low + i / 2, nibbles, static_cast<size_t>(ceil_div(end - i, 2)));
        }
        uint32_t found = 0;
        for (int k = 0; k < VL; ++k) found |= any[k];
        subnormal[task] = found != 0;
    });
    for (int64_t task = 0; task < ceil_div(n, kSegment); ++task)
        if (subnormal[task]) return false;
    return true;
}

// VL values; `high` and `low` are readable to a whole vector.
template <int Bits>
INLINE vf restored(const uint8_t* high, const uint8_t* low) {
    if constexpr (Bits == 12) {
        typedef uint8_t bytes __attribute__((vector_size(VL / 2), aligned(1), may_alias));
        typedef uint64_t wide __attribute__((vector_size(4 * VL)));
        const wide pairs =
            __builtin_convertvector(*reinterpret_cast<const bytes*>(low), wide);  // two a byte
        const vu nibbles = reinterpret_cast<vu>(pairs | pairs << 28) & 0xFu;
        return float_of(widen(high) << 24 | nibbles << 20);
    } else {
        typedef uint16_t words __attribute__((vector_size(2 * VL), aligned(1), may_alias));
        return float_of(__builtin_convertvector(*reinterpret_cast<const words*>(high), vu) << 16);
    }
}

template <int Bits>
void odd_values(int64_t n, const uint8_t* high, const uint8_t* low, float* y) {
    constexpr int kBytes = Bits == 12 ? 1 : 2;
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        for (; i + VL <= end; i += VL) store(y + i, restored<Bits>(high + i * kBytes, low + i / 2));
        if (i == end) return;
        uint8_t last[2 * VL] = {}, nibbles[VL / 2] = {};
        std::memcpy(last, high + i * kBytes, static_cast<size_t>((end - i) * kBytes));
        if (Bits == 12)
            std::memcpy(nibbles, low + i / 2, static_cast<size_t>(ceil_div(end - i, 2)));
        store_part(y + i, restored<Bits>(last, nibbles), static_cast<int>(end - i));
    });
}

}  // namespace

extern const OddKernels odd_kernels = {{round_to_odd<12>, round_to_odd<16>},
                                       {odd_values<12>, odd_values<16>}};

}  // namespace EXTENSOR_ISA
