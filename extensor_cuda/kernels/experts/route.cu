// Sorts what tokens chose by expert, stably: one block. A warp has a part of the choices; lanes
// that chose the same expert find each other by ballots.
//
// Macros: EXPERTS_COUNT, experts, up to 256.

#include "common/types.cuh"

constexpr int kThreads = 1024, kWarps = kThreads / 32, kExperts = EXPERTS_COUNT;
constexpr int kAhead = 8;  // loads of a lane in flight

// The lanes that chose `expert`, of those `there`.
DEVICE u32 alike(u32 expert, bool there) {
    u32 lanes = __ballot_sync(~0u, there);
#pragma unroll
    for (int bit = 1; bit < kExperts; bit *= 2) {
        const u32 set = __ballot_sync(~0u, expert & bit);
        lanes &= expert & bit ? set : ~set;
    }
    return lanes;
}

// chosen (count) -> source, the choice that is at each place; places, where each is; offsets
// (kExperts + 1), where each expert's begin.
extern "C" __global__ void __launch_bounds__(kThreads) route(const i64* __restrict__ chosen,
    int* __restrict__ offsets, int* __restrict__ source, int* __restrict__ places, int count) {
    __shared__ int before[kWarps][kExperts], starts[kExperts + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = (count + kThreads - 1) / kThreads * 32, first = warp * part;
    for (int i = lane; i < kExperts; i += 32) before[warp][i] = 0;
    __syncwarp();
    for (int pass = 0; pass < 2; ++pass) {
        for (int i = first; i < first + part; i += 32 * kAhead) {
            u32 experts[kAhead];
#pragma unroll
            for (int n = 0; n < kAhead; ++n) {
                const int at = i + 32 * n + lane;
                experts[n] = at < first + part && at < count ? static_cast<u32>(chosen[at]) : ~0u;
            }
#pragma unroll
            for (int n = 0; n < kAhead; ++n) {
                const int at = i + 32 * n + lane;
                const bool there = experts[n] != ~0u;
                const u32 expert = there ? experts[n] : 0u;
                const u32 lanes = alike(expert, there);
                const int rank = __popc(lanes & ((1u << lane) - 1));
                const int old = there ? before[warp][expert] : 0;
                if (pass == 1 && there) {
                    const int place = starts[expert] + old + rank;
                    source[place] = at, places[at] = place;
                }
                __syncwarp();
                if (there && rank == 0) before[warp][expert] = old + __popc(lanes);
                __syncwarp();
            }
        }
        if (pass == 1) return;
        __syncthreads();
        if (threadIdx.x < kExperts) {
            int sum = 0;
            for (int w = 0; w < kWarps; ++w) {
                const int own = before[w][threadIdx.x];
                before[w][threadIdx.x] = sum, sum += own;
            }
            starts[threadIdx.x + 1] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            starts[0] = 0;
            for (int e = 0; e < kExperts; ++e) starts[e + 1] += starts[e];
        }
        __syncthreads();
        for (int i = threadIdx.x; i <= kExperts; i += kThreads) offsets[i] = starts[i];
    }
}
