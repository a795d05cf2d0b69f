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

#if IN == 0
typedef float Raw;
#else
typedef u16 Raw;
#endif

constexpr int kThreads = 32 * LANES, kAhead = 4;  // rows that are under way at a time

struct Values {
    float v[EACH];
};

__device__ __forceinline__ Values loaded(const Raw* from) {
    Values out;
#if EACH == 1 && IN == 0
    out.v[0] = *from;
#elif EACH == 1
    out.v[0] = __uint_as_float(static_cast<u32>(*from) << 16);
#else
    const uint4 w = *reinterpret_cast<const uint4*>(from);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if IN == 0
        out.v[i] = __uint_as_float(words[i]);
#else
        out.v[2 * i] = __uint_as_float(words[i] << 16);
        out.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
#endif
    }
#endif
    return out;
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
