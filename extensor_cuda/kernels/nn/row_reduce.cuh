// Reduces one value per thread over the NN_WARPS warps of a row; every thread gets the result.

constexpr int kThreads = 256, kRows = kThreads / 32 / NN_WARPS, kLanes = 32 * NN_WARPS;

template <class Join>
DEVICE float over_row(float v, Join join) {
#pragma unroll
    for (int step = 16; step; step /= 2) v = join(v, __shfl_xor_sync(~0u, v, step));
#if NN_WARPS > 1
    __shared__ float parts[kThreads / 32];
    const int warp = threadIdx.x / 32, first = warp / NN_WARPS * NN_WARPS;
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[warp] = v;
    __syncthreads();
    v = parts[first];
#pragma unroll
    for (int w = 1; w < NN_WARPS; ++w) v = join(v, parts[first + w]);
#endif
    return v;
}

struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
