// Element grids and block scales as numbers, for the quantizers and the matrix products.
#pragma once

#include <utility>

#include "common/dtypes.hpp"
#include "common/simd.hpp"
#include "rows.hpp"

namespace EXTENSOR_ISA {

constexpr uint32_t kExponentMask = 0x7F800000u, kMantissaMask = 0x007FFFFFu, kNaN = 0x7FC00000u;
constexpr uint32_t kSign = 0x80000000u, kMagnitude = 0x7FFFFFFFu;
constexpr float kFloatMax = 3.4028234663852886e38f;

INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE float power_of_two(int exponent) {
    return as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The value of every code of a grid.
inline void decode_table(const Element& e, float* table) {
    const int sign = 1 << (e.bits - 1), unit = 1 << e.mantissa_bits;
    for (int code = 0; code < 1 << e.bits; ++code) {
        if (!e.is_float) {
            table[code] = static_cast<float>(code & sign ? code - 2 * sign : code) / unit;
            continue;
        }
        const int magnitude = code & (sign - 1), exponent = magnitude >> e.mantissa_bits;
        const int mantissa = magnitude & (unit - 1);
        const float value =
            static_cast<float>(exponent ? unit + mantissa : mantissa) *
            power_of_two(e.min_exponent - e.mantissa_bits + (exponent ? exponent - 1 : 0));
        table[code] = code & sign ? -value : value;
        if (magnitude > e.max_code) {
            // Above the largest finite code: infinity (only where NaN comes later), else NaN.
            const bool infinite = magnitude == e.max_code + 1 && magnitude < e.nan_code;
            table[code] =
                infinite ? (code & sign ? -__builtin_inff() : __builtin_inff()) : as_float(kNaN);
        }
    }
}

// body<Index>() for an element that kernels quantize to, known at run time only.
template <class Body>
inline void with_element(int element, Body body) {
    const auto pick = [&]<size_t... Index>(std::index_sequence<Index...>) {
        ((Index == static_cast<size_t>(element) ? body.template operator()<Index>() : void()), ...);
    };
    pick(std::make_index_sequence<kQuantized>());
}

// The value of a float16.
INLINE float half_value(uint32_t bits) {
    const uint32_t field = bits >> 10 & 31u, mantissa = bits & 1023u;
    if (field == 31) return as_float((bits & 0x8000u) << 16 | kExponentMask | mantissa << 13);
    const float magnitude = field ? as_float((field + 112) << 23 | mantissa << 13)
                                  : static_cast<float>(mantissa) * power_of_two(-24);
    return bits & 0x8000u ? -magnitude : magnitude;
}

// The `at`-th of the stored scales; `ue4m3` is the decode_table of kScaleElement.
INLINE float scale_value(Scale kind, const void* scales, int64_t at, const float* ue4m3) {
    if (kind == Scale::float32) return static_cast<const float*>(scales)[at];
    if (kind == Scale::float16) return half_value(static_cast<const uint16_t*>(scales)[at]);
    const uint32_t byte = static_cast<const uint8_t*>(scales)[at];
    if (kind == Scale::ue4m3) return ue4m3[byte];
    return as_float(byte == 255 ? kNaN : byte == 0 ? 0x400000u : byte << 23);
}

}  // namespace EXTENSOR_ISA
