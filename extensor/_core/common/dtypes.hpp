// Dtypes of arrays and of block scales, as the kernels and their bindings number them.
#pragma once

enum class FloatType : int { float32, bfloat16, float16 };
// int8 and uint8: small integers times a super-block's float16.
enum class Scale : int { e8m0, ue4m3, float32, float16, int8, uint8 };

constexpr bool is_byte(Scale scale) { return scale == Scale::e8m0 || scale == Scale::ue4m3; }
