// The amax state of delayed scaling: records a matrix's largest magnitude while its operands are
// made. Macro: PREPARE_REBASED.

struct TileState {
    int anchor;   // the scale byte of the tensor; PREPARE_REBASED: of the tile
    u32 beyond;   // whether a finite block is outside the window
    u32 largest;  // largest magnitude of finite blocks
#if PREPARE_REBASED
    Changed changed;
    float apply;   // the scale's inverse
    u32 limit;     // `least_of` of the smallest value with a normal code
    bool careful;  // whether `limit` does not decide
#endif
};

struct AmaxState {
    u32 before, now;  // largest magnitudes, as float bits
    u32 done;         // thread blocks that have finished
    u32 beyond[2];    // flags so far, rowwise and columnwise
};

// A matrix (rows, columns) and its outputs. `start`: its first tile in a multi-tensor launch.
struct Matrix {
    const Raw* x;
    AmaxState* amax_state;
    u8 *rowwise, *columnwise;
    int* exponent;
    u32 *rowwise_flag, *columnwise_flag;
    u64 *rowwise_counts, *columnwise_counts;
    i64 rows, columns, start;
    float *rowwise_scales, *columnwise_scales;  // PREPARE_REBASED
};

DEVICE void report(const TileState& state, u32* flag) {
    if (flag && __any_sync(~0u, state.beyond) && threadIdx.x % 32 == 0) atomicOr(flag, 1u);
}

// Stores the largest magnitude and the flags once all thread blocks have reported, so that nothing
// needs clearing before the next launch.
DEVICE void store_amax_state(const Matrix& m, u32 blocks, u32 largest) {
    AmaxState* amax_state = m.amax_state;
    const u32 most = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(&amax_state->now))
        atomicMax(&amax_state->now, most);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&amax_state->done, 1u) + 1 < blocks) return;
    amax_state->before = atomicExch(&amax_state->now, 0u);
    if (m.rowwise_flag) *m.rowwise_flag = atomicExch(&amax_state->beyond[0], 0u);
    if (m.columnwise_flag) *m.columnwise_flag = atomicExch(&amax_state->beyond[1], 0u);
    amax_state->done = 0;
}
