// Dequantizes packed codes and scales to float32, with the bits of extensor/quant; QUANT_HALF:
// these rounded to bfloat16. A thread decodes four codes along the axis (columnwise: of four
// columns), so that it stores 16 or 8 bytes. Macros: as for quantize.cu, and QUANT_HALF.

#include "common/types.cuh"

constexpr int kThreads = 256, kCodeBytes = CODEC_BITS / 2;  // bytes of four codes

#include "codec/decode.cuh"

#if QUANT_HALF
#include "common/vector_types.cuh"

typedef u16 Value;
DEVICE Value narrow(float v) { return static_cast<Value>(round_bf16(v)); }
DEVICE void store_four(Value* to, const float (&v)[4]) {
    *reinterpret_cast<uint2*>(to) = uint2{round_bf16x2(v[0], v[1]), round_bf16x2(v[2], v[3])};
}
#else
typedef float Value;
DEVICE Value narrow(float v) { return v; }
DEVICE void store_four(Value* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = float4{v[0], v[1], v[2], v[3]};
}
#endif

DEVICE float scale_value(u32 byte) {
#if CODEC_UE4M3
    return grid_value(
        byte, 8, CODEC_SCALE_MANTISSA, CODEC_SCALE_MIN_EXPONENT, CODEC_SCALE_MAX_CODE, false);
#else
    return byte == 255u ? nan_value() : __uint_as_float(byte == 0 ? 0x400000u : byte << 23);
#endif
}

DEVICE float decode(u32 code, float scale, float tensor_scale) {
    const float value = __fmul_rn(element_value(code), scale);
    return CODEC_UE4M3 ? __fmul_rn(value, tensor_scale) : value;
}

constexpr u32 kCode = (1u << CODEC_BITS) - 1;

extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize_rows(const u8* __restrict__ codes, const u8* __restrict__ scales,
        const float* __restrict__ tensor_scale, Value* __restrict__ values, i64 rows, i64 length) {
    const i64 tiles = (length + CODEC_BLOCK - 1) / CODEC_BLOCK, per_row = tiles * (CODEC_BLOCK / 4);
    const i64 four = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (four >= rows * per_row) return;
    const i64 row = four / per_row, start = four % per_row * 4;
    const u8* from = codes + four * kCodeBytes;
    u32 word;
#if CODEC_BITS == 8
    word = *reinterpret_cast<const u32*>(from);
#elif CODEC_BITS == 4
    word = *reinterpret_cast<const unsigned short*>(from);
#else
    word = from[0] | from[1] << 8 | from[2] << 16;
#endif
    const float scale = scale_value(scales[row * tiles + start / CODEC_BLOCK]);
    const float tensor = CODEC_UE4M3 ? *tensor_scale : 1.0f;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = decode(word >> (CODEC_BITS * k) & kCode, scale, tensor);
    Value* to = values + row * length + start;
#if QUANT_WHOLE
    store_four(to, v);
#else
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (start + k < length) to[k] = narrow(v[k]);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize_columns(const u8* __restrict__ codes, const u8* __restrict__ scales,
        const float* __restrict__ tensor_scale, Value* __restrict__ values, i64 outer, i64 length,
        i64 inner) {
    const i64 tiles = (length + CODEC_BLOCK - 1) / CODEC_BLOCK, fours = tiles * (CODEC_BLOCK / 4);
    const i64 groups = (inner + 3) / 4;
    const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= outer * fours * groups) return;
    const i64 column = index % groups * 4, four = index / groups % fours;
    const i64 image = index / groups / fours, start = four * 4;
    const u8* from = codes + (image * fours + four) * kCodeBytes * inner + column;
    const u8* scale = scales + (image * tiles + start / CODEC_BLOCK) * inner + column;
    Value* to = values + (image * length + start) * inner + column;
    const float tensor = CODEC_UE4M3 ? *tensor_scale : 1.0f;
    u32 code_bytes[kCodeBytes], bytes = 0;
#if QUANT_WHOLE
#pragma unroll
    for (int b = 0; b < kCodeBytes; ++b)
        code_bytes[b] = *reinterpret_cast<const u32*>(from + b * inner);
    bytes = *reinterpret_cast<const u32*>(scale);
#else
#pragma unroll
    for (int b = 0; b < kCodeBytes; ++b) code_bytes[b] = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (column + c >= inner) break;
        bytes |= static_cast<u32>(scale[c]) << (8 * c);
#pragma unroll
        for (int b = 0; b < kCodeBytes; ++b)
            code_bytes[b] |= static_cast<u32>(from[b * inner + c]) << (8 * c);
    }
#endif
    float v[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        u32 word = 0;
#pragma unroll
        for (int b = 0; b < kCodeBytes; ++b) word |= (code_bytes[b] >> (8 * c) & 255u) << (8 * b);
        const float s = scale_value(bytes >> (8 * c) & 255u);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k][c] = decode(word >> (CODEC_BITS * k) & kCode, s, tensor);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if QUANT_WHOLE
        store_four(to + k * inner, v[k]);
#else
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (start + k < length && column + c < inner) to[k * inner + c] = narrow(v[k][c]);
#endif
    }
}
