// The gradients of attention.cu with respect to keys and values: gv = p^T g and gk = scale ds^T q.
// The weights p and their gradients ds are those of attention_grad_q.cu, rounded to bfloat16.
// Macros and wgmma functions come from attention.py.
//
// After Dao, FlashAttention-2 (arXiv 2307.08691, section 3.1, algorithm 2). One producer warp and
// two consumer warpgroups of 64 keys, as in attention.cu. Scores are transposed, so that they stay
// in registers between products. A block sums all query heads of its key head.

#include "attention/attention.cuh"

constexpr int kStage = 2 * kStreamTileBytes;
constexpr int kVectorBytes = 2 * kStreamRows * 4;  // lse2 and delta of a stage's queries

// The first query that sees a key of the tile, rounded down to a multiple of kStreamRows.
DEVICE int first_query(const Problem& e, int key) {
    return e.causal ? max(key - (e.keys - e.queries), 0) / kStreamRows * kStreamRows : 0;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_grad_kv(const __grid_constant__ TensorMap q_map,
        const __grid_constant__ TensorMap g_map, const __grid_constant__ TensorMap k_map,
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap gk_map,
        const __grid_constant__ TensorMap gv_map, const __grid_constant__ Problem e) {
    extern __shared__ u8 raw_memory[];
    const Memory m =
        begin<2 * kHeldTileBytes, kStage, ATTENTION_STAGES * kVectorBytes, 32 * kWarps>(raw_memory);
    const u32 held = shared_address(m.held), ring = shared_address(m.ring);
    u8* vectors = m.out_tiles + kWarps * kOutTileBytes;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    TileScheduler scheduler = {static_cast<int>(blockIdx.x), 0};
    Tile tile;
    Ring at = {0, 0};
    u32 held_parity = 0;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) {
            while (scheduler.next(e, tile)) {
                barrier_wait(m.held_empty, held_parity ^ 1);
                held_parity ^= 1;
                barrier_expect_bytes(m.held_full, 2 * kHeldTileBytes);
                load_tile<kRows>(held, &k_map, tile.first, tile.head, tile.batch, m.held_full);
                load_tile<kRows>(
                    held + kHeldTileBytes, &v_map, tile.first, tile.head, tile.batch, m.held_full);
                for (int head = tile.head * e.q_heads_per_kv_head;
                    head < (tile.head + 1) * e.q_heads_per_kv_head; ++head) {
                    const i64 line =
                        static_cast<i64>(tile.batch * e.heads * e.q_heads_per_kv_head + head) *
                        e.padded;
                    for (int row = first_query(e, tile.first); row < e.queries;
                        row += kStreamRows) {
                        barrier_wait(m.empty + 8 * at.stage, at.parity ^ 1);
                        const u32 barrier = m.full + 8 * at.stage, to = ring + at.stage * kStage;
                        barrier_expect_bytes(barrier, kStage + kVectorBytes);
                        load_tile<kStreamRows>(to, &q_map, row, head, tile.batch, barrier);
                        load_tile<kStreamRows>(
                            to + kStreamTileBytes, &g_map, row, head, tile.batch, barrier);
                        const u32 numbers = shared_address(vectors + at.stage * kVectorBytes);
                        bulk_load(numbers, e.lse2 + line + row, kStreamRows * 4, barrier);
                        bulk_load(numbers + kStreamRows * 4, e.delta + line + row, kStreamRows * 4,
                            barrier);
                        at.advance();
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int warp = threadIdx.x / 32;
        u8* out_tile = m.out_tiles + warp * kOutTileBytes;
        const u32 keys = held + warpgroup * 64 * 128, values = keys + kHeldTileBytes;
        while (scheduler.next(e, tile)) {
            const int row0 = tile.first + warp * 16, row = row0 + lane / 4;
            const int begin = first_query(e, tile.first);
            const int each = (e.queries - begin + kStreamRows - 1) / kStreamRows,
                      count = each * e.q_heads_per_kv_head;
            Sum s[kStreamRows / 2], d[kStreamRows / 2], gk[kHead / 2], gv[kHead / 2];
            u32 rounded[kStreamRows / 16][4];
            barrier_wait(m.held_full, held_parity);
            held_parity ^= 1;
            int last = 0, query = begin;
            for (int j = 0; j < count; ++j) {
                const u32 queries = ring + at.stage * kStage;
                const float* lse2 =
                    reinterpret_cast<const float*>(vectors + at.stage * kVectorBytes) +
                    lane % 4 * 2;
                barrier_wait(m.full + 8 * at.stage, at.parity);
                fence_accumulators(s);
                fence_accumulators(d);
                warpgroup_arrive();
                product(s, keys, queries);
                warpgroup_commit();
                product(d, values, queries + kStreamTileBytes);
                warpgroup_commit();
                if (j) {
                    warpgroup_wait<2>(gk);
                    barrier_arrive(m.empty +
                                   // Every thread arrives, because every thread has read lse2 and
                                   // delta.
                                   8 * last);
                }
                last = at.stage;
                at.advance();
                warpgroup_wait<1>(s);
                const bool masked = e.causal && row0 + 15 > query + e.keys - e.queries;
#pragma unroll
                for (int i = 0; i < kStreamRows / 8; ++i) {
                    const float2 here = *reinterpret_cast<const float2*>(lse2 + 8 * i);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float &a = s[4 * i + 2 * h], &b = s[4 * i + 2 * h + 1];
                        a = exp2_of(__fmaf_rn(a, e.scale2, -here.x));
                        b = exp2_of(__fmaf_rn(b, e.scale2, -here.y));
                    }
                }
                if (masked) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int first = row + 8 * h - (e.keys - e.queries) - query - lane % 4 * 2;
#pragma unroll
                        for (int i = 0; i < kStreamRows / 4; ++i)
                            if (i / 2 * 8 + i % 2 < first) s[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
                    }
                }
                to_bf16_operand(rounded, s);
                fence_accumulators(gv);
                warpgroup_arrive();
                add_product(gv, rounded, queries + kStreamTileBytes, j > 0);
                warpgroup_commit();
                warpgroup_wait<1>(d);
#pragma unroll
                for (int i = 0; i < kStreamRows / 8; ++i) {
                    const float2 here =
                        *reinterpret_cast<const float2*>(lse2 + kStreamRows + 8 * i);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 p = rounded[i / 2][i % 2 * 2 + h];
                        float &a = d[4 * i + 2 * h], &b = d[4 * i + 2 * h + 1];
                        a = low_of(p) * (a - here.x);
                        b = high_of(p) * (b - here.y);
                    }
                }
                fence_accumulators(d);  // keeps the products before the wait
                warpgroup_wait<0>(gv);
                to_bf16_operand(rounded, d);
                fence_accumulators(gk);
                warpgroup_arrive();
                add_product(gk, rounded, queries, j > 0);
                warpgroup_commit();
                query = query + kStreamRows < e.queries ? query + kStreamRows : begin;
            }
            warpgroup_wait<0>(gk);
            barrier_arrive(m.empty + 8 * last);
            release_stage(m.held_empty, lane);
            write_rows(gv, 1.0f, 1.0f, &gv_map, out_tile, row0, e.keys, tile, lane);
            write_rows(gk, e.scale, e.scale, &gk_map, out_tile, row0, e.keys, tile, lane);
        }
        if (lane == 0) tma_store_wait();
    }
}
