// Streaming stores of whole cache lines, for results that no cache can hold: no line is read first,
// and nothing useful is evicted.
#pragma once

#include "common/simd.hpp"

namespace EXTENSOR_ISA {

// Results of so many values are streamed.
constexpr int64_t kStreamedValues = int64_t{1} << 24;

#if EXTENSOR_LANES == 16
// Stores 64 bytes; streamed where requested and where the address is aligned.
INLINE void store_cache_line(void* to, __m512i bytes, bool streamed) {
    if (streamed && reinterpret_cast<uintptr_t>(to) % 64 == 0)
        _mm512_stream_si512(static_cast<__m512i*>(to), bytes);
    else
        _mm512_storeu_si512(to, bytes);
}
#endif

// Call before a task ends: other threads may read what it streamed.
INLINE void finish_streaming() {
#if EXTENSOR_LANES == 16
    _mm_sfence();
#endif
}

}  // namespace EXTENSOR_ISA
