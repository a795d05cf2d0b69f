// Whole cache lines written past the caches: no line is read first, and nothing useful leaves them.
#pragma once

#include "simd.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kPastCaches = int64_t{1} << 24;  // values of a result that no cache holds

#if EXTENSOR_LANES == 16
// 64 bytes; past the caches where asked for and the place is aligned.
INLINE void store_line(void* to, __m512i bytes, bool past) {
    if (past && reinterpret_cast<uintptr_t>(to) % 64 == 0)
        _mm512_stream_si512(static_cast<__m512i*>(to), bytes);
    else
        _mm512_storeu_si512(to, bytes);
}
#endif

// Before a task ends: others may read what it wrote.
INLINE void finish_lines() {
#if EXTENSOR_LANES == 16
    _mm_sfence();
#endif
}

}  // namespace EXTENSOR_ISA
