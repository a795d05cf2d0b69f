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

constexpr int kThreads = 256, kGroup = 32, kItems = 2;  // items of a thread, as in odd_planes.py
constexpr int kCut = ODD_WIDTH - ODD_BITS;
constexpr u32 kLost = (1u << kCut) - 1;

// x (count); planes (groups, ODD_BITS).
extern "C" __global__ void __launch_bounds__(kThreads)
    odd_planes(const Word* __restrict__ x, u32* __restrict__ planes, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
    const int lane = threadIdx.x % kGroup;
    u32 word[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const i64 at = first + item * kThreads;
        word[item] = at < count ? x[at] : 0;
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const i64 at = first + item * kThreads;
        const u32 kept = word[item] >> kCut | (word[item] & kLost ? 1u : 0u);
        u32 mine = 0;
#pragma unroll
        for (int bit = 0; bit < ODD_BITS; ++bit) {
            const u32 plane = __ballot_sync(~0u, kept >> bit & 1);
            if (lane == bit) mine = plane;
        }
        if (at - lane < count && lane < ODD_BITS) planes[at / kGroup * ODD_BITS + lane] = mine;
    }
}

// The values again.
extern "C" __global__ void __launch_bounds__(kThreads)
    odd_values(const u32* __restrict__ planes, Word* __restrict__ x, i64 count) {
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
    const int lane = threadIdx.x % kGroup;
    u32 mine[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const i64 at = first + item * kThreads;
        const bool real = at - lane < count && lane < ODD_BITS;
        mine[item] = real ? planes[at / kGroup * ODD_BITS + lane] : 0;
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const i64 at = first + item * kThreads;
        u32 kept = 0;
#pragma unroll
        for (int bit = 0; bit < ODD_BITS; ++bit)
            kept |= (__shfl_sync(~0u, mine[item], bit) >> lane & 1) << bit;
        if (at < count) x[at] = static_cast<Word>(kept << kCut);
    }
}
