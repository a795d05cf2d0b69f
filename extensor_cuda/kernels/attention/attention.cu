// out = softmax(scale q k^T) v in bfloat16 with float32 sums, on Hopper's tensor cores.
//
// After Dao, FlashAttention-2 (arXiv 2307.08691, section 3.1) and Shah et al., FlashAttention-3
// (arXiv 2407.08608, sections 3.1 and 3.2): one producer warp loads a tile of 128 queries and, tile
// after tile, keys and values; two consumer warpgroups of 64 queries keep a running maximum and
// sum. The scores of the next keys are multiplied while this thread's weights are still on the way
// through the values, and while the other warpgroup takes exponentials.
//
// No headers; macros and wgmma functions come from attention.py. TMA fills what lies outside with
// zeros: keys behind the last are masked, queries behind the last are not written.

#include "attention/attention.cuh"

constexpr int kKeys = 128, kStage = kKeys * kHead * 2;

// Keys that a query does not see, from key `first` on, get -inf.
__device__ __forceinline__ void mask(Sum (&s)[kKeys / 2], const Problem& e, int row, int first,
                                     int lane) {
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

// Scores -> exp(scale (score - largest)); `faded` is what older sums are to be multiplied by.
__device__ __forceinline__ void weigh(Sum (&s)[kKeys / 2], float (&largest)[2], float (&total)[2],
                                      float (&faded)[2], float scale2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float most = largest[h];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
            most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        faded[h] = exp2_of((largest[h] - most) * scale2);
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
        total[h] = total[h] * faded[h] + sum;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
              const __grid_constant__ Problem e) {
    extern __shared__ u8 raw_memory[];
    const Memory m = begin<kHeldTile, kStage, 0>(raw_memory);
    const u32 held = shared_address(m.held), ring = shared_address(m.ring);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    Walk walk = {static_cast<int>(blockIdx.x), 0};
    Tile tile;
    Ring at = {0, 0};
    u32 turn = 0;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) {
            while (walk.next(e, tile)) {
                wait(m.held_empty, turn ^ 1);
                turn ^= 1;
                expect_bytes(m.held_full, kHeldTile);
                load_tile<kRows>(held, &q_map, tile.first, tile.head, tile.batch, m.held_full);
                const int count = blocks_of_keys<kKeys>(e, tile.first), head = tile.head / e.shared;
                // As they are used: K0, K1, V0, K2, V1, ..., the last V.
                for (int i = 0; i < 2 * count; ++i) {
                    const bool last = i == 2 * count - 1, keys = !last && (i == 0 || i % 2);
                    const int row = (keys ? (i + 1) / 2 : last ? count - 1 : i / 2 - 1) * kKeys;
                    wait(m.empty + 8 * at.stage, at.parity ^ 1);
                    const u32 barrier = m.full + 8 * at.stage;
                    expect_bytes(barrier, kStage);
                    load_tile<kKeys>(ring + at.stage * kStage, keys ? &k_map : &v_map, row, head,
                                     tile.batch, barrier);
                    at.advance();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int warp = threadIdx.x / 32;
        u8* patch = m.patches + warp * kPatch;
        const u32 queries = held + warpgroup * 64 * 128;
        while (walk.next(e, tile)) {
            const int row0 = tile.first + warp * 16, row = row0 + lane / 4;
            const int count = blocks_of_keys<kKeys>(e, tile.first);
            // Below this key every query of the warp sees all.
            const int open = e.causal ? min(e.keys, row0 + 1 + e.keys - e.queries) : e.keys;
            Sum s[kKeys / 2], o[kHead / 2];
            u32 weights[kKeys / 16][4];
            float largest[2] = {-ATTENTION_INFINITY, -ATTENTION_INFINITY}, total[2] = {0.0f, 0.0f},
                  faded[2];
            wait(m.held_full, turn);
            turn ^= 1;
            wait(m.full + 8 * at.stage, at.parity);
            hold(s);
            begin_products();
            product(s, queries, ring + at.stage * kStage);
            end_products();
            finish<0>(s);
            release(m.empty + 8 * at.stage, lane);
            at.advance();
            if (open < kKeys) mask(s, e, row, 0, lane);
            weigh(s, largest, total, faded, e.scale2);
            round_to(weights, s);
            for (int j = 1; j < count; ++j) {
                const Ring keys = at;
                at.advance();
                wait(m.full + 8 * keys.stage, keys.parity);
                hold(s);
                begin_products();
                product(s, queries, ring + keys.stage * kStage);
                end_products();
                wait(m.full + 8 * at.stage, at.parity);
                hold(o);
                begin_products();
                add_product(o, weights, ring + at.stage * kStage, j > 1);
                end_products();
                finish<1>(s);
                release(m.empty + 8 * keys.stage, lane);
                if (open < (j + 1) * kKeys) mask(s, e, row, j * kKeys, lane);
                weigh(s, largest, total, faded, e.scale2);
                end_block(total[0] + total[1]);  // the wait comes after the exponentials
                finish<0>(o);
                release(m.empty + 8 * at.stage, lane);
                at.advance();
#pragma unroll
                for (int i = 0; i < kHead / 2; ++i) o[i] *= faded[i / 2 % 2];
                round_to(weights, s);
            }
            release(m.held_empty, lane);
            wait(m.full + 8 * at.stage, at.parity);
            hold(o);
            begin_products();
            add_product(o, weights, ring + at.stage * kStage, count > 1);
            end_products();
            finish<0>(o);
            release(m.empty + 8 * at.stage, lane);
            at.advance();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                total[h] = sum_of_row(total[h]);
                const int query = row + 8 * h;
                float* to = e.spread +
                            static_cast<i64>(tile.batch * e.heads + tile.head) * e.padded + query;
                if (lane % 4 == 0)
                    *to = query < e.queries ? __fmaf_rn(largest[h], e.scale2, log2f(total[h]))
                                            : ATTENTION_INFINITY;
            }
            write_rows(o, 1.0f / total[0], 1.0f / total[1], &out_map, patch, row0, e.queries, tile,
                       lane);
        }
        if (lane == 0) await_stores();
    }
}
