// Sums down the columns of a matrix, of chunks of its rows: a launch leaves one row a chunk, another
// adds these.
//
// A block has 32 lanes of EACH neighbouring columns and LANES rows at a time; a thread adds the rows
// of its own one after the other, then the block adds its threads' sums in order. So the order is the
// shape's alone. No headers; IN (0: float32, 1: bfloat16), EACH (1, or what 16 bytes hold: whole and
// aligned rows then) and LANES are macros; compiled with --fmad=false.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#include "common/vector_types.cuh"

typedef Of<IN>::Raw Raw;

constexpr int kThreads = 32 * LANES, kAhead = 4;  // rows that are under way at a time

#if EACH == 8
typedef Group Values;
#else
struct Values {
    float v[EACH];
};
#endif

__device__ __forceinline__ Values loaded(const Raw* from) {
#if EACH == 1
    return {{Of<IN>::wide(*from)}};
#elif IN == 0
    const float4 w = *reinterpret_cast<const float4*>(from);
    return {{w.x, w.y, w.z, w.w}};
#else
    return Of<IN>::load(from);
#endif
}

__device__ __forceinline__ void add(Values& sum, const Values& next) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum.v[i] = __fadd_rn(sum.v[i], next.v[i]);
}

// x (rows, columns) -> out (chunks, columns).
extern "C" __global__ void __launch_bounds__(kThreads)
column_sums(const Raw* __restrict__ x, float* __restrict__ out, i64 rows, i64 columns, i64 chunk) {
    __shared__ float sums[LANES][32 * EACH];
    const i64 panels = (columns + 32 * EACH - 1) / (32 * EACH);
    const i64 part = blockIdx.x / panels, left = blockIdx.x % panels * (32 * EACH);
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const i64 end = (part + 1) * chunk < rows ? (part + 1) * chunk : rows;
    Values sum;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum.v[i] = 0.0f;
    if (left + lane * EACH < columns) {
        const Raw* from = x + left + lane * EACH;
        i64 row = part * chunk + line;
        for (; row + (kAhead - 1) * LANES < end; row += kAhead * LANES) {
            Values next[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) next[k] = loaded(from + (row + k * LANES) * columns);
#pragma unroll
            for (int k = 0; k < kAhead; ++k) add(sum, next[k]);
        }
        for (; row < end; row += LANES) add(sum, loaded(from + row * columns));
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) sums[line][lane * EACH + i] = sum.v[i];
    __syncthreads();
    const int column = threadIdx.x;
    if (column < 32 * EACH && left + column < columns) {
        float total = sums[0][column];
#pragma unroll
        for (int k = 1; k < LANES; ++k) total = __fadd_rn(total, sums[k][column]);
        out[part * columns + left + column] = total;
    }
}
