// Values of codes under powers of two, as dequantize.cu has them. Macros: decode.cuh's.

#include "codec/decode.cuh"

DEVICE float e8m0_value(u32 byte) {
    return byte == 255u ? nan_value() : __uint_as_float(byte == 0 ? 0x400000u : byte << 23);
}

DEVICE float scaled_value(u32 code, u32 scale) {
    return __fmul_rn(element_value(code), e8m0_value(scale));
}
