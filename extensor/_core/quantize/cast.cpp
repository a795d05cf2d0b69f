// Casts between float32 and bfloat16, to nearest even, as numpy with ml_dtypes does them.

#include "common/elementwise.hpp"
#include "common/float_types.hpp"
#include "quantize/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

// To nearest even as float32 bits, the lower half zero; a NaN becomes the quiet one of its sign.
INLINE vu bfloat16_bits(vu v) {
    const vu rounded = (v + 0x7FFFu + (v >> 16 & 1u)) & 0xFFFF0000u;
    const vu nan = (v & 0x80000000u) | 0x7FC00000u;
    return (v & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

void bfloat16_values(int64_t n, const float* x, float* y) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        for (; i < end; i += VL)
            store_at(y,
                     reinterpret_cast<vf>(bfloat16_bits(reinterpret_cast<vu>(load_at(x, i, end)))),
                     i, end);
    });
}

void to_bfloat16(int64_t n, const float* x, uint16_t* y) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        auto* out = reinterpret_cast<bfloat16*>(y);
        for (; i < end; i += VL) store_upto(out + i, load_upto(x + i, end - i), end - i);
    });
}

void from_bfloat16(int64_t n, const uint16_t* x, float* y) {
    for_segments(n, 2, [=](int64_t i, int64_t end) {
        const auto* in = reinterpret_cast<const bfloat16*>(x);
        for (; i < end; i += VL) store_upto(y + i, load_upto(in + i, end - i), end - i);
    });
}

}  // namespace

extern const CastKernels cast_kernels = {bfloat16_values, to_bfloat16, from_bfloat16};

}  // namespace EXTENSOR_ISA
