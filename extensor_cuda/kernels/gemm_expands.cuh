// B of gemm.cu from packed storage: the warps that expand it, and the wait of the one that loads it.

namespace expanding {
#include "expanding.cuh"

constexpr u32 kTaken = 2;  // rows that a warp takes together: they divide a tile
constexpr u32 kAhead = 2;  // chunks that are read before the one that is converted

__device__ __forceinline__ void expand_row(const Stored& stored, u32 row, u8* out, u32 begin, u32 end, int lane) {
    Chunk held[kAhead];
    u32 beyond = 0;
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
        if (begin + 32 * i + lane < end) held[i] = read_chunk(stored, row, begin + 32 * i + lane);
    for (u32 first = begin; first < end; first += 32 * kAhead) {
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            const u32 chunk = first + 32 * i + lane, later = chunk + 32 * kAhead;
            if (first + 32 * i >= end) return;
            uint4 units[kOctets];
            convert(held[i].words, held[i].scale, 127, units, beyond);
            if (later < end) held[i] = read_chunk(stored, row, later);
            store_together(out, chunk, end, units);
        }
    }
}

// First what is left of the rows that are begun, part by part, then the other rows.
__device__ __forceinline__ void expand_rows(const Epilogue& e, int lane) {
    const Stored stored = {e.codes,   e.code_scales, e.floats,      e.zeros,
                           e.factors, e.octets,      e.scale_pitch, e.factor_pitch};
    const u32 columns = e.columns, tiles = (columns + kTileN - 1) / kTileN, ready = e.ready;
    const u32 chunks = static_cast<u32>(e.chunks), part = static_cast<u32>(e.part);
    const u32 some = ready / kTaken, begun = some * ((chunks + part - 1) / part - 1);
    u32 taken = lane == 0 ? atomicAdd(e.counts, 1u) : 0;
    for (;;) {
        const u32 index = __shfl_sync(~0u, taken, 0);
        const u32 of_row = index < begun ? 1 + index / some : 0;
        const u32 row = index < begun ? index % some * kTaken : ready + (index - begun) * kTaken;
        if (row >= columns) return;
        if (lane == 0) taken = atomicAdd(e.counts, 1u);  // comes meanwhile
        const u32 rows = min(kTaken, columns - row), begin = of_row * part;
        const u32 end = of_row ? min(begin + part, chunks) : chunks;
        for (u32 r = row; r < row + rows; ++r)
            expand_row(stored, r, e.expanded + r * e.chunks * (2 * kChunk), begin, end, lane);
        show_to_copies();
        __syncwarp();
        if (lane == 0) add_released(e.counts + 1 + of_row * tiles + row / kTileN, rows);
    }
}
}  // namespace expanding

// Lets the loads of a tile's columns go on, stage by stage.
struct Awaited {
    const u32* count;
    u32 rows;
    int stage, tiles, stages;
    __device__ __forceinline__ Awaited(const Epilogue& e, int column) {
        rows = min(kTileN, e.columns - column), tiles = (e.columns + kTileN - 1) / kTileN;
        stages = (static_cast<int>(e.part) + 3) / 4;  // of four chunks
        stage = column < e.ready ? stages : 0;
        count = e.counts + 1 + column / kTileN + (column < e.ready ? tiles : 0);
        if (stage == 0) stages = 1 << 30;
    }
    __device__ __forceinline__ void operator()(int k) {
        if (k != stage) return;
        while (acquired(count) < rows) continue;
        show_to_copies();
        count += tiles, stage += stages;
    }
};
