// out = softmax(scale q k^T) v in bfloat16 with float32 sums, on Hopper's tensor cores. Macros and
// wgmma functions come from attention.py.
//
// After Dao, FlashAttention-2 (arXiv 2307.08691, section 3.1) and Shah et al., FlashAttention-3
// (arXiv 2407.08608, sections 3.1 and 3.2). One producer warp loads a tile of 128 queries, then
// tiles of keys and values. Two consumer warpgroups of 64 queries keep a running maximum and sum.
// The scores of the next keys are multiplied while the weights of the current keys multiply values.
//
// TMA fills zeros outside. Keys beyond the last are masked, and queries beyond the last are not
// written.

#include "attention/attention.cuh"

constexpr int kKeys = 128, kStage = kKeys * kHead * 2;

// Sets the scores of keys that a query does not see to -inf, from key `first` on.
DEVICE void mask(Sum (&s)[kKeys / 2], const Problem& e, int row, int first, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int beyond = last_key(e, row + 8 * h) - first - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * j + c > beyond) s[4 * j + 2 * h + c] = -ATTENTION_INFINITY;
    }
}

// Online softmax: turns scores into exp(scale (score - largest)). `rescale` multiplies older sums.
DEVICE void online_softmax(Sum (&s)[kKeys / 2], float (&largest)[2], float (&total)[2],
    float (&rescale)[2], float scale2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float most = largest[h];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
            most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        rescale[h] = exp2_of((largest[h] - most) * scale2);
        largest[h] = most;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& v = s[4 * j + 2 * h + c];
                v = exp2_of(__fmaf_rn(v, scale2, -most * scale2));
                sum += v;
            }
        total[h] = total[h] * rescale[h] + sum;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
        const __grid_constant__ Problem e) {
    extern __shared__ u8 raw_memory[];
    const Memory m = begin<kHeldTileBytes, kStage, 0>(raw_memory);
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
                barrier_expect_bytes(m.held_full, kHeldTileBytes);
                load_tile<kRows>(held, &q_map, tile.first, tile.head, tile.batch, m.held_full);
                const int count = blocks_of_keys<kKeys>(e, tile.first),
                          head = tile.head / e.q_heads_per_kv_head;
                // In the order of use: K0, K1, V0, K2, V1, ..., the last V.
                for (int i = 0; i < 2 * count; ++i) {
                    const bool last = i == 2 * count - 1, keys = !last && (i == 0 || i % 2);
                    const int row = (keys ? (i + 1) / 2 : last ? count - 1 : i / 2 - 1) * kKeys;
                    barrier_wait(m.empty + 8 * at.stage, at.parity ^ 1);
                    const u32 barrier = m.full + 8 * at.stage;
                    barrier_expect_bytes(barrier, kStage);
                    load_tile<kKeys>(ring + at.stage * kStage, keys ? &k_map : &v_map, row, head,
                        tile.batch, barrier);
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
            const int count = blocks_of_keys<kKeys>(e, tile.first);
            // Every query of the warp sees all keys below this one.
            const int unmasked = e.causal ? min(e.keys, row0 + 1 + e.keys - e.queries) : e.keys;
            Sum s[kKeys / 2], o[kHead / 2];
            u32 weights[kKeys / 16][4];
            float largest[2] = {-ATTENTION_INFINITY, -ATTENTION_INFINITY}, total[2] = {0.0f, 0.0f},
                  rescale[2];
            barrier_wait(m.held_full, held_parity);
            held_parity ^= 1;
            barrier_wait(m.full + 8 * at.stage, at.parity);
            fence_accumulators(s);
            warpgroup_arrive();
            product(s, queries, ring + at.stage * kStage);
            warpgroup_commit();
            warpgroup_wait<0>(s);
            release_stage(m.empty + 8 * at.stage, lane);
            at.advance();
            if (unmasked < kKeys) mask(s, e, row, 0, lane);
            online_softmax(s, largest, total, rescale, e.scale2);
            to_bf16_operand(weights, s);
            for (int j = 1; j < count; ++j) {
                const Ring keys = at;
                at.advance();
                barrier_wait(m.full + 8 * keys.stage, keys.parity);
                fence_accumulators(s);
                warpgroup_arrive();
                product(s, queries, ring + keys.stage * kStage);
                warpgroup_commit();
                barrier_wait(m.full + 8 * at.stage, at.parity);
                fence_accumulators(o);
                warpgroup_arrive();
                add_product(o, weights, ring + at.stage * kStage, j > 1);
                warpgroup_commit();
                warpgroup_wait<1>(s);
                release_stage(m.empty + 8 * keys.stage, lane);
                if (unmasked < (j + 1) * kKeys) mask(s, e, row, j * kKeys, lane);
                online_softmax(s, largest, total, rescale, e.scale2);
                end_basic_block(total[0] + total[1]);  // keeps the wait behind the exponentials
                warpgroup_wait<0>(o);
                release_stage(m.empty + 8 * at.stage, lane);
                at.advance();
#pragma unroll
                for (int i = 0; i < kHead / 2; ++i) o[i] *= rescale[i / 2 % 2];
                to_bf16_operand(weights, s);
            }
            release_stage(m.held_empty, lane);
            barrier_wait(m.full + 8 * at.stage, at.parity);
            fence_accumulators(o);
            warpgroup_arrive();
            add_product(o, weights, ring + at.stage * kStage, count > 1);
            warpgroup_commit();
            warpgroup_wait<0>(o);
            release_stage(m.empty + 8 * at.stage, lane);
            at.advance();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                total[h] = sum_of_row(total[h]);
                const int query = row + 8 * h;
                float* to =
                    e.lse2 + static_cast<i64>(tile.batch * e.heads + tile.head) * e.padded + query;
                if (lane % 4 == 0)
                    *to = query < e.queries ? __fmaf_rn(largest[h], e.scale2, log2f(total[h]))
                                            : ATTENTION_INFINITY;
            }
            write_rows(o, 1.0f / total[0], 1.0f / total[1], &out_map, out_tile, row0, e.queries,
                tile, lane);
        }
        if (lane == 0) tma_store_wait();
    }
}
