// out[index[i]] += rows[i] for all i in order: the gradient of an embedding lookup. With `slots`
// out has a row for each position, and the first position of a row gets its sum. No macros;
// compiled with --fmad=false.
//
// `collect` counts the positions of each row of `out` and keeps the first kMost it meets. In
// `add_rows` a row's block sorts its positions, or searches them if there are more, kScan of them
// at once, and adds kThreads columns. Of fewer positions than rows, it is the block of the row's
// first one, and other blocks exit at once.

#include "common/types.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32, kTurns = 4, kScan = kThreads * kTurns;
constexpr u32 kMost = 32;

struct Row {
    u32 positions, first;  // their number; and the count of all positions less the first one
};

DEVICE i64 place(const i64* index, i64 i, i64 length) {
    return index[i] < 0 ? index[i] + length : index[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) collect(const i64* __restrict__ index,
    Row* __restrict__ found, u32* __restrict__ kept, i64 count, i64 length) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= count) return;
    const i64 at = place(index, i, length);
    if (at < 0 || at >= length) return;  // refused elsewhere
    atomicMax(&found[at].first, static_cast<u32>(count - i));
    const u32 slot = atomicAdd(&found[at].positions, 1u);
    if (slot < kMost) kept[at * kMost + slot] = static_cast<u32>(i);
}

// Adds the rows of a list in order; the next kAhead are read at once.
template <u32 kAhead>
DEVICE void add_listed(
    float& sum, const float* from, i64 width, const u32* list, u32 many, bool real) {
    for (u32 first = 0; first < many; first += kAhead) {
        float v[kAhead];
#pragma unroll
        for (u32 a = 0; a < kAhead; ++a)
            if (first + a < many && real) v[a] = from[list[first + a] * width];
#pragma unroll
        for (u32 a = 0; a < kAhead; ++a)
            if (first + a < many && real) sum = __fadd_rn(sum, v[a]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) add_rows(const i64* __restrict__ index,
    const Row* __restrict__ found, const u32* __restrict__ kept, const float* __restrict__ rows,
    float* __restrict__ out, int* __restrict__ slots, i64 count, i64 length, i64 width) {
    const i64 column_tiles = (width + kThreads - 1) / kThreads;
    const i64 item = blockIdx.x / column_tiles,
              column = blockIdx.x % column_tiles * kThreads + threadIdx.x;
    const i64 at = count > length ? item : place(index, item, length);
    if (at < 0 || at >= length) return;
    const u32 positions = found[at].positions;
    const i64 mine = count - found[at].first;
    if (!positions || (count <= length && item != mine)) return;
    float sum = 0;
    const bool real = column < width;
    __shared__ u32 met[kMost], list[kScan], hits[kTurns * kWarps];
    if (positions <= kMost) {
        if (threadIdx.x < positions) met[threadIdx.x] = kept[at * kMost + threadIdx.x];
        __syncthreads();
        if (threadIdx.x < positions) {
            u32 before = 0;
            for (u32 i = 0; i < positions; ++i) before += met[i] < met[threadIdx.x];
            list[before] = met[threadIdx.x];
        }
        __syncthreads();
        add_listed<16>(sum, rows + column, width, list, positions, real);
    } else {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (i64 base = mine; base < count; base += kScan) {
            bool hit[kTurns];
            u32 before[kTurns], many = 0;
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const i64 i = base + turn * kThreads + threadIdx.x;
                hit[turn] = i < count && place(index, i, length) == at;
                const u32 same = __ballot_sync(~0u, hit[turn]);
                before[turn] = __popc(same & ((1u << lane) - 1));
                if (lane == 0) hits[turn * kWarps + warp] = __popc(same);
            }
            __syncthreads();
#pragma unroll
            for (u32 w = 0; w < kTurns * kWarps; ++w) {
                if (w % kWarps == warp) before[w / kWarps] += many;
                many += hits[w];
            }
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn)
                if (hit[turn]) list[before[turn]] = turn * kThreads + threadIdx.x;
            __syncthreads();
            add_listed<32>(sum, rows + base * width + column, width, list, many, real);
        }
    }
    if (slots && column == 0) slots[at] = static_cast<int>(mine);
    float* to = out + (slots ? mine : at) * width + column;
    if (real) *to = __fadd_rn(*to, sum);
}
