// out[index[i]] += rows[i] for all i in order: the gradient of looking rows up.
//
// A block has the first position of a row of `out` and kColumns of its columns, finds the positions
// after it that are the same, and adds their rows up in registers. Blocks of other positions end at
// once. No headers, no macros; compiled with --fmad=false.

typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 256, kEach = 4, kColumns = kThreads * kEach;

extern "C" __global__ void __launch_bounds__(kThreads)
add_rows(const i64* __restrict__ index, const float* __restrict__ rows, float* __restrict__ out, i64 count,
         i64 length, i64 width) {
    const i64 panels = (width + kColumns - 1) / kColumns;
    const i64 mine = blockIdx.x / panels, column = blockIdx.x % panels * kColumns + threadIdx.x;
    const auto place = [&](i64 i) { return index[i] < 0 ? index[i] + length : index[i]; };
    const i64 at = place(mine);
    if (at < 0 || at >= length) return;  // refused elsewhere
    __shared__ u32 found, hits[kThreads / 32];
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    u32 before = 0;
    for (i64 i = threadIdx.x; i < mine; i += kThreads) before |= place(i) == at;
    if (before) atomicOr(&found, 1u);
    __syncthreads();
    if (found) return;
    float sums[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) sums[k] = 0;
    for (i64 base = mine; base < count; base += kThreads) {
        const i64 i = base + threadIdx.x;
        const u32 same = __ballot_sync(~0u, i < count && place(i) == at);
        if (threadIdx.x % 32 == 0) hits[threadIdx.x / 32] = same;
        __syncthreads();
        for (int warp = 0; warp < kThreads / 32; ++warp)
            for (u32 left = hits[warp]; left; left &= left - 1) {
                const float* row = rows + (base + warp * 32 + __ffs(left) - 1) * width;
#pragma unroll
                for (int k = 0; k < kEach; ++k)
                    if (column + k * kThreads < width) sums[k] = __fadd_rn(sums[k], row[column + k * kThreads]);
            }
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        float* to = out + at * width + column + k * kThreads;
        if (column + k * kThreads < width) *to = __fadd_rn(*to, sums[k]);
    }
}
