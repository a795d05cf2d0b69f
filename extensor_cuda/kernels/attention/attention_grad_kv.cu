// The gradients of attention.cu in its keys and values: gv = p^T g and gk = scale ds^T q, with the
// weights p and the gradients ds of attention_grad_q.cu, both rounded to bfloat16 for the products.
// The scores are transposed, so that they go from one product to the next in registers. All query
// heads of a key head are summed by its block.
//
// After Dao, FlashAttention-2 (arXiv 2307.08691, section 3.1, algorithm 2). One producer warp and
// two consumer warpgroups of 64 keys, as in attention.cu.
//
// No headers; macros and wgmma functions come from attention.py.

#include "attention/attention.cuh"

constexpr int kStage = 2 * kOtherTile;
constexpr int kVectors = 2 * kOthers * 4;  // spread and t of the queries of a stage

// The first query that sees a key of the tile, down to a multiple of kOthers.
__device__ __forceinline__ int first_query(const Problem& e, int key) {
    return e.causal ? max(key - (e.keys - e.queries), 0) / kOthers * kOthers : 0;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_grad_kv(const __grid_constant__ TensorMap q_map,
                      const __grid_constant__ TensorMap g_map,
                      const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map,
                      const __grid_constant__ TensorMap gk_map,
                      const __grid_constant__ TensorMap gv_map, const __grid_constant__ Problem e) {
    extern __shared__ u8 raw_memory[];
    const Memory m =
        begin<2 * kHeldTile, kStage, ATTENTION_STAGES * kVectors, 32 * kWarps>(raw_memory);
    const u32 held = shared_address(m.held), ring = shared_address(m.ring);
    u8* vectors = m.patches + kWarps * kPatch;
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
                expect_bytes(m.held_full, 2 * kHeldTile);
                load_tile<kRows>(held, &k_map, tile.first, tile.head, tile.batch, m.held_full);
                load_tile<kRows>(held + kHeldTile, &v_map, tile.first, tile.head, tile.batch,
                                 m.held_full);
                for (int head = tile.head * e.shared; head < (tile.head + 1) * e.shared; ++head) {
                    const i64 line =
                        static_cast<i64>(tile.batch * e.heads * e.shared + head) * e.padded;
                    for (int row = first_query(e, tile.first); row < e.queries; row += kOthers) {
                        wait(m.empty + 8 * at.stage, at.parity ^ 1);
                        const u32 barrier = m.full + 8 * at.stage, to = ring + at.stage * kStage;
                        expect_bytes(barrier, kStage + kVectors);
                        load_tile<kOthers>(to, &q_map, row, head, tile.batch, barrier);
                        load_tile<kOthers>(to + kOtherTile, &g_map, row, head, tile.batch, barrier);
                        const u32 numbers = shared_address(vectors + at.stage * kVectors);
                        load_line(numbers, e.spread + line + row, kOthers * 4, barrier);
                        load_line(numbers + kOthers * 4, e.along + line + row, kOthers * 4,
                                  barrier);
                        at.advance();
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int warp = threadIdx.x / 32;
        u8* patch = m.patches + warp * kPatch;
        const u32 keys = held + warpgroup * 64 * 128, values = keys + kHeldTile;
        while (walk.next(e, tile)) {
            const int row0 = tile.first + warp * 16, row = row0 + lane / 4;
            const int begin = first_query(e, tile.first);
            const int each = (e.queries - begin + kOthers - 1) / kOthers, count = each * e.shared;
            Sum s[kOthers / 2], d[kOthers / 2], gk[kHead / 2], gv[kHead / 2];
            u32 rounded[kOthers / 16][4];
            wait(m.held_full, turn);
            turn ^= 1;
            int last = 0, query = begin;
            for (int j = 0; j < count; ++j) {
                const u32 queries = ring + at.stage * kStage;
                const float* spread =
                    reinterpret_cast<const float*>(vectors + at.stage * kVectors) + lane % 4 * 2;
                wait(m.full + 8 * at.stage, at.parity);
                hold(s);
                hold(d);
                begin_products();
                product(s, keys, queries);
                end_products();
                product(d, values, queries + kOtherTile);
                end_products();
                if (j) {
                    finish<2>(gk);
                    arrive(m.empty +
                           8 * last);  // each thread, since each has read spread and t, too
                }
                last = at.stage;
                at.advance();
                finish<1>(s);
                const bool masked = e.causal && row0 + 15 > query + e.keys - e.queries;
#pragma unroll
                for (int i = 0; i < kOthers / 8; ++i) {
                    const float2 here = *reinterpret_cast<const float2*>(spread + 8 * i);
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
                        for (int i = 0; i < kOthers / 4; ++i)
                            if (i / 2 * 8 + i % 2 < first) s[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
                    }
                }
                round_to(rounded, s);
                hold(gv);
                begin_products();
                add_product(gv, rounded, queries + kOtherTile, j > 0);
                end_products();
                finish<1>(d);
#pragma unroll
                for (int i = 0; i < kOthers / 8; ++i) {
                    const float2 here = *reinterpret_cast<const float2*>(spread + kOthers + 8 * i);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 p = rounded[i / 2][i % 2 * 2 + h];
                        float &a = d[4 * i + 2 * h], &b = d[4 * i + 2 * h + 1];
                        a = low_of(p) * (a - here.x);
                        b = high_of(p) * (b - here.y);
                    }
                }
                hold(d);  // not after the wait
                finish<0>(gv);
                round_to(rounded, d);
                hold(gk);
                begin_products();
                add_product(gk, rounded, queries, j > 0);
                end_products();
                query = query + kOthers < e.queries ? query + kOthers : begin;
            }
            finish<0>(gk);
            arrive(m.empty + 8 * last);
            release(m.held_empty, lane);
            write_rows(gv, 1.0f, 1.0f, &gv_map, patch, row0, e.keys, tile, lane);
            write_rows(gk, e.scale, e.scale, &gk_map, patch, row0, e.keys, tile, lane);
        }
        if (lane == 0) await_stores();
    }
}
