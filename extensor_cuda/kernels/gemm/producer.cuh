// The producer of gemm_sm90.cu: one thread that loads tiles of A and B, and their scales, by TMA.

// Loads `rows` of A or B, from `first` on, of stage k along K.
template <bool kDown, bool kForAll>
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int k, int first, int rows,
                                          u32 barrier) {
#pragma unroll
    for (int from = 0; from < (kDown ? rows : 1); from += kBox) {
        const int byte = kDown ? 2 * (first + from) : k * kRowBytes, row = kDown ? k * kBox : first;
        if (kForAll)
            load_for_all(to + from * kRowBytes, map, byte, row, barrier);
        else
            load(to + from * kRowBytes, map, byte, row, barrier);
    }
}

__device__ __forceinline__ void produce(const TensorMap* a_map, const TensorMap* b_map,
                                        const Epilogue& e, const Memory& m, Schedule& schedule,
                                        Ring& at, int step, int rank) {
    for (int index = blockIdx.x / kCluster; schedule.has(index, e); index += step) {
        const Tile tile = schedule.tile(index);
        const int row = schedule.start + (tile.row * kCluster + rank) * kTileM;
        const int column = schedule.group * e.columns + tile.column * kTileN;
#if GEMM_EXPAND_A
        await_rows(e, row);
#endif
        for (int k = schedule.first_stage(index, e); k < schedule.end_stage(index, e); ++k) {
            wait(m.empty + 8 * at.stage, at.parity ^ 1);
            const u32 to = m.base + at.stage * kStage, barrier = m.full + 8 * at.stage;
            expect_bytes(barrier, kStage + 4 * kScales);
            if (GEMM_DECODE_A)
                load(to, a_map, k * kARow, row, barrier);
            else
                load_tile<GEMM_A_MN_MAJOR, false>(to, a_map, k, row, kTileM, barrier);
            constexpr int kPart = kTileN / kCluster;  // of B, which a cluster shares
            load_tile<GEMM_B_MN_MAJOR, (kCluster > 1)>(to + kABytes + rank * kPart * kRowBytes,
                                                       b_map, k, column + rank * kPart, kPart,
                                                       barrier);
#if GEMM_SCALES_1D2D
            const u32 scales = shared_address(m.scales + at.stage * kScales);
            constexpr int kRowLine = 4 * kTileM / GEMM_A_SCALE_ROWS,
                          kColumnLine = 4 * kTileN / GEMM_B_SCALE_ROWS;
            load_line(scales, e.row_blocks + k * e.row_block_pitch + row / GEMM_A_SCALE_ROWS,
                      kRowLine, barrier);
            load_line(scales + kRowLine,
                      e.column_blocks + k * e.column_block_pitch + column / GEMM_B_SCALE_ROWS,
                      kColumnLine, barrier);
#elif GEMM_SCALE_GROUP_K
            const u32 scales = shared_address(m.scales + at.stage * kScales);
#pragma unroll
            for (int i = 0; i < kLines; ++i) {
                const i64 line = k / GEMM_PROMOTE * kLines + i;
                load_line(scales + 4 * i * kTileM, e.row_blocks + line * e.row_block_pitch + row,
                          4 * kTileM, barrier);
            }
#endif
            at.advance();
        }
    }
}
