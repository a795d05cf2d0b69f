// Whole cache lines: asked for ahead, or streamed to memory where no cache can hold a result, so
// that no line is read first and nothing useful is evicted.
#pragma once

#include "common/simd.hpp"

namespace EXTENSOR_ISA {

// Results of so many values are streamed.
constexpr int64_t kStreamedValues = int64_t{1} << 24;

// Asks for some bytes, into the first cache or the second. GCC drops a loop of prefetches alone, as
// it has no effect; the empty statement is one that it must keep.
template <int Cache = 1>
INLINE void prefetch(const void* from, int64_t bytes) {
    const char* at = static_cast<const char*>(from);
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(at + i, 0, 4 - Cache);
        asm volatile("" ::"r"(at + i));
    }
}

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
