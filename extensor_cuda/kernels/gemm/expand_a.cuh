// Expands packed weights to operand A of gemm_sm90.cu while the GEMM runs. Idle producer warps
// expand rows, and the TMA warp waits for the rows that it loads. Macros: those of
// codec/expand.cuh.

namespace expanding {
#include "codec/expand.cuh"

constexpr u32 kRowsPerTake = 2;  // rows a warp takes at once; divides a tile

// A lane converts 16 of every 512 elements, two such chunks at once while possible, to hide
// latency.
DEVICE void expand_row(const Row& row, u8* out, u32 chunks_per_row, int lane) {
    const u32 pairs = chunks_per_row / 64 * 64;
    u32 beyond = 0, chunk = lane;
    if (pairs) {
        Chunk next[2] = {read_chunk(row, chunk), read_chunk(row, chunk + 32)};
        for (u32 first = 0; first < pairs; first += 64, chunk += 64) {
            const Chunk now[2] = {next[0], next[1]};
            if (first + 64 < pairs)
                next[0] = read_chunk(row, chunk + 64), next[1] = read_chunk(row, chunk + 96);
            uint4 units[2][kVectors];
            if (kMostlyPlain && __all_sync(~0u, is_plain(now[0].scale) && is_plain(now[1].scale))) {
                convert<true>(now[0].words, now[0].scale, 127, units[0], beyond);
                convert<true>(now[1].words, now[1].scale, 127, units[1], beyond);
            } else {
                convert(now[0].words, now[0].scale, 127, units[0], beyond);
                convert(now[1].words, now[1].scale, 127, units[1], beyond);
            }
            store(out, chunk, units[0]);
            store(out, chunk + 32, units[1]);
        }
    }
    for (; chunk < chunks_per_row; chunk += 32) {
        const Chunk now = read_chunk(row, chunk);
        uint4 units[kVectors];
        convert(now.words, now.scale, 127, units, beyond);
        store(out, chunk, units);
    }
}

DEVICE void expand_rows(const Epilogue& e, int lane) {
    const Stored stored = {e.codes, e.code_scales, e.zeros, e.code_pitch, e.scale_pitch};
    const u32 all = e.rows, chunks_per_row = static_cast<u32>(e.chunks_per_row);
    u32 taken = lane == 0 ? atomicAdd(e.counts, 1u) : 0;
    for (;;) {
        const u32 row = e.rows_ready + kRowsPerTake * __shfl_sync(~0u, taken, 0);
        if (row >= all) return;
        if (lane == 0) taken = atomicAdd(e.counts, 1u);  // prefetches the next index
        const u32 rows = min(kRowsPerTake, all - row);
        for (u32 r = row; r < row + rows; ++r)
            expand_row(row_of(stored, r), e.expanded + r * e.chunks_per_row * (2 * kChunk),
                chunks_per_row, lane);
        fence_async();
        __syncwarp();
        if (lane == 0) add_release(e.counts + 1 + row / kTileM, rows);
    }
}
}  // namespace expanding

DEVICE void await_rows(const Epilogue& e, int row) {
    const u32 expected = min(kTileM, e.rows - row);
    if (row < e.rows_ready) return;
    while (load_acquire(e.counts + 1 + row / kTileM) < expected) continue;
    fence_async();
}
