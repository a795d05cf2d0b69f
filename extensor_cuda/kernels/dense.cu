// Values -> bfloat16, to nearest even, as rows or turned into columns: what a product on the tensor
// cores reads, its contraction contiguous.
//
// A block of 256 threads has a tile of 64 x 64. No headers; IN (0: float32, 1: bfloat16, 2: float16)
// and TURNED are macros.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#if IN == 0
typedef float Raw;
#else
typedef u16 Raw;
#endif

__device__ __forceinline__ u16 rounded(Raw raw) {
#if IN == 1
    return raw;
#else
    u16 out;
#if IN == 2
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(raw));
#else
    const float v = raw;
#endif
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
#endif
}

constexpr int kTile = 64;

// x (rows, columns) -> out (rows, pitch), or (columns, pitch) if TURNED.
extern "C" __global__ void __launch_bounds__(256)
dense(const Raw* __restrict__ x, u16* __restrict__ out, i64 rows, i64 columns, i64 pitch) {
    __shared__ u16 tile[kTile][kTile + 2];
    const i64 across = (columns + kTile - 1) / kTile;
    const i64 row0 = blockIdx.x / across * kTile, column0 = blockIdx.x % across * kTile;
    const int pair = threadIdx.x % 32 * 2, first = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
        const int row = first + 8 * i;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const bool inside = row0 + row < rows && column0 + pair + c < columns;
            tile[row][pair + c] = inside ? rounded(x[(row0 + row) * columns + column0 + pair + c]) : 0;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
        const int line = first + 8 * i;  // of the output
#if TURNED
        const u32 two = tile[pair][line] | static_cast<u32>(tile[pair + 1][line]) << 16;
        const i64 row = column0 + line, column = row0 + pair, height = columns;
#else
        const u32 two = tile[line][pair] | static_cast<u32>(tile[line][pair + 1]) << 16;
        const i64 row = row0 + line, column = column0 + pair, height = rows;
#endif
        if (row < height && column < pitch) *reinterpret_cast<u32*>(out + row * pitch + column) = two;
    }
}
