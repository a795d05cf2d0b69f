// Floats rounded to odd, kept as bit planes (extensor/quant/round_to_odd.py), and restored. A warp
// has a group of 32 values, a lane one of them; words of a group lie one after the other.
//
// Macros: ODD_WIDTH (of a float: 32 or 16), ODD_BITS (that are kept, fewer).

#include "common/types.cuh"

#if ODD_WIDTH == 32
typedef u32 Word;
#else
typedef u16 Word;
#endif

constexpr int kThreads = 256, kGroup = 32, kCut = ODD_WIDTH - ODD_BITS;
constexpr u32 kLost = (1u << kCut) - 1;

// x (count); planes (groups, ODD_BITS).
extern "C" __global__ void __launch_bounds__(kThreads)
    odd_planes(const Word* __restrict__ x, u32* __restrict__ planes, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const int lane = threadIdx.x % kGroup;
    const u32 word = at < count ? x[at] : 0;
    const u32 kept = word >> kCut | (word & kLost ? 1u : 0u);
    u32 mine = 0;
#pragma unroll
    for (int bit = 0; bit < ODD_BITS; ++bit) {
        const u32 plane = __ballot_sync(~0u, kept >> bit & 1);
        if (lane == bit) mine = plane;
    }
    if (at - lane < count && lane < ODD_BITS) planes[at / kGroup * ODD_BITS + lane] = mine;
}

// The values again.
extern "C" __global__ void __launch_bounds__(kThreads)
    odd_values(const u32* __restrict__ planes, Word* __restrict__ x, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const int lane = threadIdx.x % kGroup;
    const bool real = at - lane < count && lane < ODD_BITS;
    const u32 mine = real ? planes[at / kGroup * ODD_BITS + lane] : 0;
    u32 kept = 0;
#pragma unroll
    for (int bit = 0; bit < ODD_BITS; ++bit)
        kept |= (__shfl_sync(~0u, mine, bit) >> lane & 1) << bit;
    if (at < count) x[at] = static_cast<Word>(kept << kCut);
}
