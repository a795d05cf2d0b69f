// Sums the columns of a matrix over chunks of its rows. A second launch adds the chunks' rows.
//
// A block has 32 lanes of NN_THREAD_VALUES columns and NN_BLOCK_ROWS rows. Each thread adds its own
// rows, then the block adds its threads' sums, in an order that depends on the shape only.
//
// Macros: those (NN_THREAD_VALUES is 1, or 16 bytes' worth for aligned rows), NN_IN (0: float32, 1:
// bfloat16). Compiled with --fmad=false.

#include "common/types.cuh"

#include "common/vector_types.cuh"

typedef ElementType<NN_IN>::Raw Raw;

constexpr int kThreads = 32 * NN_BLOCK_ROWS, kAhead = 4;  // rows in flight

#if NN_THREAD_VALUES == 8
typedef FloatVector Values;
#else
struct Values {
    float v[NN_THREAD_VALUES];
};
#endif

DEVICE Values loaded(const Raw* from) {
#if NN_THREAD_VALUES == 1
    return {{ElementType<NN_IN>::wide(*from)}};
#elif NN_IN == 0
    const float4 w = *reinterpret_cast<const float4*>(from);
    return {{w.x, w.y, w.z, w.w}};
#else
    return ElementType<NN_IN>::load(from);
#endif
}

DEVICE void add(Values& sum, const Values& next) {
#pragma unroll
    for (int i = 0; i < NN_THREAD_VALUES; ++i) sum.v[i] = __fadd_rn(sum.v[i], next.v[i]);
}

// x (rows, columns) -> out (chunks, columns).
extern "C" __global__ void __launch_bounds__(kThreads) column_sums(
    const Raw* __restrict__ x, float* __restrict__ out, i64 rows, i64 columns, i64 chunk) {
    __shared__ float sums[NN_BLOCK_ROWS][32 * NN_THREAD_VALUES];
    const i64 column_tiles = (columns + 32 * NN_THREAD_VALUES - 1) / (32 * NN_THREAD_VALUES);
    const i64 part = blockIdx.x / column_tiles,
              left = blockIdx.x % column_tiles * (32 * NN_THREAD_VALUES);
    const int lane = threadIdx.x % 32, row_of_block = threadIdx.x / 32;
    const i64 end = (part + 1) * chunk < rows ? (part + 1) * chunk : rows;
    Values sum;
#pragma unroll
    for (int i = 0; i < NN_THREAD_VALUES; ++i) sum.v[i] = 0.0f;
    if (left + lane * NN_THREAD_VALUES < columns) {
        const Raw* from = x + left + lane * NN_THREAD_VALUES;
        i64 row = part * chunk + row_of_block;
        for (; row + (kAhead - 1) * NN_BLOCK_ROWS < end; row += kAhead * NN_BLOCK_ROWS) {
            Values next[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k)
                next[k] = loaded(from + (row + k * NN_BLOCK_ROWS) * columns);
#pragma unroll
            for (int k = 0; k < kAhead; ++k) add(sum, next[k]);
        }
        for (; row < end; row += NN_BLOCK_ROWS) add(sum, loaded(from + row * columns));
    }
#pragma unroll
    for (int i = 0; i < NN_THREAD_VALUES; ++i)
        sums[row_of_block][lane * NN_THREAD_VALUES + i] = sum.v[i];
    __syncthreads();
    const int column = threadIdx.x;
    if (column < 32 * NN_THREAD_VALUES && left + column < columns) {
        float total = sums[0][column];
#pragma unroll
        for (int k = 1; k < NN_BLOCK_ROWS; ++k) total = __fadd_rn(total, sums[k][column]);
        out[part * columns + left + column] = total;
    }
}
