// The consumers of gemm_sm90.cu: two warpgroups that multiply 64 rows of a tile each, and promote.

// GEMM_PING_PONG: what both warpgroups wait for in turn.
__device__ __forceinline__ void take_turn(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.sync %0, 256;" ::"r"(4 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.arrive %0, 256;" ::"r"(5 - warpgroup) : "memory");
}

#if !GEMM_DECODE_A
// The sums of a tile, in `total`, which is `part` if nothing is promoted. `there`: whether the next
// stage is loaded, as far as was seen while the last one was multiplied.
template <class Total>
__device__ __forceinline__ void multiply(Total& total, Sum (&part)[kRegisters], int stages,
                                         const Memory& m, Ring& at, bool& there, int warpgroup,
                                         int lane) {
    [[maybe_unused]] const int warp = threadIdx.x / 32;
    for (int k = 0; k < stages;) {
        const int end = GEMM_PROMOTE == 1 ? k + 1
                        : GEMM_PROMOTE    ? min(k + GEMM_PROMOTE, stages)
                                          : stages;
        int last = -1;
        for (int more = 0; k < end; ++k) {
            if (!there) wait(m.full + 8 * at.stage, at.parity);
            const u32 tiles = m.base + at.stage * kStage;
            const u64 a =
                descriptor<GEMM_A_MN_MAJOR>(tiles + warpgroup * 64 * kRowBytes, kBoxBytes);
            const u64 b = descriptor<GEMM_B_MN_MAJOR>(tiles + kABytes, kBoxBytes);
#pragma unroll
            for (int line = 0; line < kLines; ++line) {
                take_turn(warpgroup);
                hold(part);
                begin_products();
#pragma unroll
                for (int i = line * 4 / kLines; i < (line + 1) * 4 / kLines; ++i) {
                    wgmma(part, a + kAStep * i, b + kBStep * i, more);
                    more = 1;
                }
                end_products();
                give_turn(warpgroup);
#if GEMM_SCALE_GROUP_K && GEMM_SCALE_GROUP_K < 64
                if (line + 1 == kLines) break;  // the last is promoted as whole stages are
                const Scales of_line(m.scales + at.stage * kScales + line * kTileM, warp, lane);
                end_block(of_line.latest());
                finish<0>(part);
                of_line.promote(total, part);
                more = 0;
#endif
            }
            const int now = at.stage;
            at.advance();
            if (kPeeks) there = is_over(m.full + 8 * at.stage, at.parity);
            if (GEMM_PROMOTE != 1) finish<1>(part);
            if (last >= 0) release(m.empty + 8 * last, lane);
            last = now;
        }
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
        const Scales of_stage(m.scales + last * kScales + (kLines - 1) * kTileM, warp, lane);
        end_block(of_stage.latest());
#endif
        finish<0>(part);
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
        of_stage.promote(total, part);
        __syncwarp();
#endif
        release(m.empty + 8 * last, lane);
#if GEMM_PROMOTE && !GEMM_SCALES_1D2D && !GEMM_SCALE_GROUP_K
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) total[i] += part[i];
#endif
    }
}
#endif

// Multiplies the block's tiles, and hands the sums to the epilogue.
__device__ __forceinline__ void consume(const TensorMap* c_map, const Epilogue& e, const Memory& m,
                                        Schedule& schedule, Ring& at, int step, int rank,
                                        int warpgroup, int lane) {
    const int warp = threadIdx.x / 32;
    u8* patch = m.patches + (GEMM_C_TRANSPOSED ? warpgroup * 4 : warp) * kPatches * kPatch;
    const u32 mine = m.handed + 16 * warp * kPatches;
    u32 turn = 0;
    int* table = m.tables + warpgroup * 2 * kTables;
    Factors factors = {1.0f, 1.0f, table};
    if (!GEMM_VECTORS) {
        int exponent =
            (e.row_exponent ? *e.row_exponent : 0) + (e.column_exponent ? *e.column_exponent : 0);
        exponent = min(max(exponent, -252), 254);
        factors.first = power_of_two(exponent >> 1) * kDecodedLift;
        factors.second = power_of_two(exponent - (exponent >> 1));
    }
#if GEMM_PING_PONG
    static_assert(GEMM_PROMOTE > 0, "warpgroups promote in turn");
    if (warpgroup == 1) give_turn(1);  // the first begins
#endif
    bool there = false;
    for (int index = blockIdx.x / kCluster; schedule.has(index, e); index += step) {
        const Tile tile = schedule.tile(index);
        const int row = schedule.start + (tile.row * kCluster + rank) * kTileM + warpgroup * 64;
        const int column = tile.column * kTileN, end_of_rows = schedule.end_of_rows;
        if (GEMM_VECTORS)
            fetch_tables(table, e, row, column, end_of_rows, schedule.group * e.columns);
        Sum part[kRegisters];
#if GEMM_PROMOTE
        float total[kRegisters];
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) total[i] = 0.0f;
#else
        Sum(&total)[kRegisters] = part;
#endif
        const int first_stage = schedule.first_stage(index, e);
        const int stages = schedule.end_stage(index, e) - first_stage;
#if GEMM_DECODE_A
        multiply_decoded(total, part, e, m, row, first_stage, stages, at);
#else
        multiply(total, part, stages, m, at, there, warpgroup, lane);
#endif
        const int first = schedule.rows_before(index) + row + warp % 4 * 16;
        const int first_column = schedule.columns_before(index) + column;
#if GEMM_VECTORS
        await_tables(warpgroup);
        factors.table = table;
        if (GEMM_VECTORS == 2 || are_near(table, lane))
            write_rows<true>(total, e, c_map, factors, first, end_of_rows, first_column,
                             schedule.group, patch, mine, turn, lane);
        else
            write_rows<false>(total, e, c_map, factors, first, end_of_rows, first_column,
                              schedule.group, patch, mine, turn, lane);
        // The other table next: slower warps may still read this one.
        table = table == m.tables + warpgroup * 2 * kTables ? table + kTables : table - kTables;
#else
        write_rows<true>(total, e, c_map, factors, first, end_of_rows, first_column, schedule.group,
                         patch, mine, turn, lane);
#endif
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
