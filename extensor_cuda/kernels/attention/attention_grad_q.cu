// The gradient of attention.cu with respect to queries: gq = scale ds k, with ds = p (d - delta), p
// = exp2(scale2 s - lse2) and d = g v^T. It also stores delta, a row's sum of g out, for
// attention_grad_kv.cu. Macros and wgmma functions come from attention.py.
//
// After Dao, FlashAttention-2 (arXiv 2307.08691, section 3.1, algorithm 2). One producer warp and
// two consumer warpgroups of 64 queries, as in attention.cu; queries and gradients stay in
// registers. Both gradient kernels compute the scores again, so that one thread sums each result in
// one order, without atomic additions.

#include "attention/attention.cuh"

constexpr int kStage = 2 * kStreamTileBytes;

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_grad_q(const __grid_constant__ TensorMap q_map,
        const __grid_constant__ TensorMap g_map, const __grid_constant__ TensorMap out_map,
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
        const __grid_constant__ TensorMap gq_map, const __grid_constant__ Problem e) {
    extern __shared__ u8 raw_memory[];
    const Memory m = begin<3 * kHeldTileBytes, kStage, 0>(raw_memory);
    const u32 held = shared_address(m.held), ring = shared_address(m.ring);
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
                barrier_expect_bytes(m.held_full, 3 * kHeldTileBytes);
                load_tile<kRows>(held, &q_map, tile.first, tile.head, tile.batch, m.held_full);
                load_tile<kRows>(
                    held + kHeldTileBytes, &g_map, tile.first, tile.head, tile.batch, m.held_full);
                load_tile<kRows>(held + 2 * kHeldTileBytes, &out_map, tile.first, tile.head,
                    tile.batch, m.held_full);
                const int count = blocks_of_keys<kStreamRows>(e, tile.first),
                          head = tile.head / e.q_heads_per_kv_head;
                for (int j = 0; j < count; ++j) {
                    barrier_wait(m.empty + 8 * at.stage, at.parity ^ 1);
                    const u32 barrier = m.full + 8 * at.stage, to = ring + at.stage * kStage;
                    barrier_expect_bytes(barrier, kStage);
                    load_tile<kStreamRows>(to, &k_map, j * kStreamRows, head, tile.batch, barrier);
                    load_tile<kStreamRows>(
                        to + kStreamTileBytes, &v_map, j * kStreamRows, head, tile.batch, barrier);
                    at.advance();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int warp = threadIdx.x / 32;
        u8* out_tile = m.out_tiles + warp * kOutTileBytes;
        const u32 queries = held + warpgroup * 64 * 128;
        while (scheduler.next(e, tile)) {
            const int row0 = tile.first + warp * 16, row = row0 + lane / 4;
            const int count = blocks_of_keys<kStreamRows>(e, tile.first);
            const int unmasked = e.causal ? min(e.keys, row0 + 1 + e.keys - e.queries) : e.keys;
            const i64 line = static_cast<i64>(tile.batch * e.heads + tile.head) * e.padded + row;
            Fragments q, g;
            float delta[2] = {0.0f, 0.0f}, lse2[2];
            barrier_wait(m.held_full, held_parity);
            held_parity ^= 1;
            {
                Fragments out;
                load_fragments(g, m.held + kHeldTileBytes, warp * 16 + lane / 4, lane);
                load_fragments(out, m.held + 2 * kHeldTileBytes, warp * 16 + lane / 4, lane);
#pragma unroll
                for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& sum = delta[i % 2];
                        sum = __fmaf_rn(low_of(g[k][i]), low_of(out[k][i]), sum);
                        sum = __fmaf_rn(high_of(g[k][i]), high_of(out[k][i]), sum);
                    }
            }
            if constexpr (kInRegisters) {
                load_fragments(q, m.held, warp * 16 + lane / 4, lane);
                __syncwarp();
                release_stage(m.held_empty, lane);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                delta[h] = sum_of_row(delta[h]);
                if (lane % 4 == 0) e.delta[line + 8 * h] = delta[h];
                lse2[h] = e.lse2[line + 8 * h];
            }
            Sum s[kStreamRows / 2], d[kStreamRows / 2], gq[kHead / 2];
            u32 rounded[kStreamRows / 16][4];
            int last = 0;
            for (int j = 0; j < count; ++j) {
                const u32 keys = ring + at.stage * kStage;
                barrier_wait(m.full + 8 * at.stage, at.parity);
                fence_accumulators(s);
                fence_accumulators(d);
                warpgroup_arrive();
                if constexpr (kInRegisters) product(s, q, keys);
                else product(s, queries, keys);
                warpgroup_commit();
                if constexpr (kInRegisters) product(d, g, keys + kStreamTileBytes);
                else product(d, queries + kHeldTileBytes, keys + kStreamTileBytes);
                warpgroup_commit();
                if (j) {
                    warpgroup_wait<2>(gq);
                    release_stage(m.empty + 8 * last, lane);
                }
                last = at.stage;
                at.advance();
                warpgroup_wait<1>(s);
                const bool masked = unmasked < (j + 1) * kStreamRows;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int i = 0; i < kStreamRows / 4; ++i) {
                        float& v = s[i / 2 * 4 + 2 * h + i % 2];
                        v = exp2_of(__fmaf_rn(v, e.scale2, -lse2[h]));
                    }
                    if (masked) {
                        const int beyond =
                            last_key(e, row + 8 * h) - j * kStreamRows - lane % 4 * 2;
#pragma unroll
                        for (int i = 0; i < kStreamRows / 4; ++i)
                            if (i / 2 * 8 + i % 2 > beyond) s[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
                    }
                }
                fence_accumulators(s);  // keeps the products before the wait
                warpgroup_wait<0>(d);
#pragma unroll
                for (int i = 0; i < kStreamRows / 2; ++i) s[i] *= d[i] - delta[i / 2 % 2];
                to_bf16_operand(rounded, s);
                fence_accumulators(gq);
                warpgroup_arrive();
                add_product(gq, rounded, keys, j > 0);
                warpgroup_commit();
            }
            warpgroup_wait<0>(gq);
            release_stage(m.empty + 8 * last, lane);
            if constexpr (!kInRegisters) release_stage(m.held_empty, lane);
            write_rows(gq, e.scale, e.scale, &gq_map, out_tile, row0, e.queries, tile, lane);
        }
        if (lane == 0) tma_store_wait();
    }
}
