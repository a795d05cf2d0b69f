// What a captured step keeps on the device besides its tensors: the step's host numbers, failed
// checks, updates made, the loss scale. One block per kernel. No macros.

#include "common/types.cuh"

// Makes the host's next row the numbers of this step.
extern "C" __global__ void __launch_bounds__(256)
    advance(const u64* rows, u64* now, u32* position, int width) {
    const u32 row = *position;
    if (static_cast<int>(threadIdx.x) < width) now[threadIdx.x] = rows[row * width + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) *position = row + 1;
}

// Raises `flag`, and `stop` for all later updates, if a value is true.
extern "C" __global__ void __launch_bounds__(256)
    watch(const u8* bad, i64 count, u32* flag, u32* stop) {
    u32 any = 0;
    for (i64 i = threadIdx.x; i < count; i += 256) any |= bad[i];
    if (any) {
        atomicOr(flag, 1u);
        atomicOr(stop, 1u);
    }
}

extern "C" __global__ void count(u32* made, const u32* bad, const u32* stop) {
    if (!(*bad | *stop)) ++*made;
}

// extensor.backends.generic.optim.rescale on (scale, consecutive good steps, made, skipped).
extern "C" __global__ void rescale(double* state, const u32* bad, const u32* stop, double growth,
    double backoff, double interval, double least) {
    if (*stop) return;
    if (*bad) {
        const double scale = __dmul_rn(state[0], backoff);
        state[0] = scale > least ? scale : least;
        state[1] = 0;
        ++state[3];
        return;
    }
    ++state[1];
    ++state[2];
    if (state[1] == interval) {
        state[1] = 0;
        state[0] = __dmul_rn(state[0], growth);
    }
}
