// The encoders of whole blocks that blocks.hpp declares, of every element: compiled once per level.

#include <type_traits>

#include "quantize/blocks.hpp"

namespace EXTENSOR_ISA {

template <bool Words, class T>
BlockEncoder<Words, T>::BlockEncoder(int element, int64_t tile) {
    const auto set = [&]<class Of>() { code = &Of::code, batch = Of::kBatch; };
    with_element(element, [&]<size_t Index>() {
        if constexpr (kElements[Index].is_float) {
            if (tile == 16) set.template operator()<RunEncoder<Index, 16, Words, T>>();
            if (tile == 32) set.template operator()<RunEncoder<Index, 32, Words, T>>();
        }
    });
}

template struct BlockEncoder<false, float>;
template struct BlockEncoder<true, float>;

#if EXTENSOR_LANES == 16
template <bool Words, class T>
Bf16BlockEncoder<Words, T>::Bf16BlockEncoder(int element) {
    with_element(element, [&]<size_t Index>() {
        using Fp8 = Fp8Encoder<Index, T>;
        using Of = std::conditional_t<!Words && Fp8::kCovered, Fp8, Bf16Encoder<Index, Words, T>>;
        if constexpr (Of::kCovered) {
            code = &Of::code, from = Of::kFrom;
            above = static_cast<uint32_t>(Of::e.emax + 1);
        }
    });
}

template struct BlockEncoder<false, bfloat16>;
template struct BlockEncoder<true, bfloat16>;
template struct BlockEncoder<false, float16>;
template struct Bf16BlockEncoder<false, float>;
template struct Bf16BlockEncoder<true, float>;
template struct Bf16BlockEncoder<false, bfloat16>;
template struct Bf16BlockEncoder<true, bfloat16>;
template struct Bf16BlockEncoder<false, float16>;
#endif

}  // namespace EXTENSOR_ISA
