// Records the largest magnitude of a matrix as its operands are made, for delayed scaling.

struct Place {
    int anchor;   // PREPARE_REBASED: the scale byte of all blocks
    u32 beyond;   // whether a block of numbers lies outside the window
    u32 largest;  // magnitude of the blocks of numbers seen
#if PREPARE_REBASED
    Changed changed;
    float apply;   // the scale's inverse
    u32 limit;     // what `least_of` gives of the first value whose code is normal
    bool careful;  // whether it does not tell
#endif
};

struct History {
    u32 before, now;  // largest magnitudes, as float bits
    u32 done;         // blocks of threads that have finished
    u32 beyond[2];    // the flags so far, of rows and of columns
};

// A matrix (rows, columns) and where its operands go; `start`: the first of its tiles among
// several's.
struct Matrix {
    const Raw* x;
    History* history;
    u8 *along, *down;
    int* exponent;
    u32 *along_flag, *down_flag;
    u64 *along_counts, *down_counts;
    i64 rows, columns, start;
    float *along_scales, *down_scales;  // PREPARE_REBASED
};

__device__ __forceinline__ void report(const Place& place, u32* flag) {
    if (flag && __any_sync(~0u, place.beyond) && threadIdx.x % 32 == 0) atomicOr(flag, 1u);
}

// Leaves the largest magnitude found now for the next time, and the flags, once all blocks of
// threads have reported: so nothing has to be cleared before.
__device__ __forceinline__ void remember(const Matrix& m, u32 blocks, u32 largest) {
    History* history = m.history;
    const u32 most = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(&history->now))
        atomicMax(&history->now, most);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&history->done, 1u) + 1 < blocks) return;
    history->before = atomicExch(&history->now, 0u);
    if (m.along_flag) *m.along_flag = atomicExch(&history->beyond[0], 0u);
    if (m.down_flag) *m.down_flag = atomicExch(&history->beyond[1], 0u);
    history->done = 0;
}
