// Shared by the attention kernels: tiles, their products, and the tile scheduler. Macros:
// ATTENTION_HEAD (elements of a head), ATTENTION_STAGES.
//
// Arrays are bfloat16 with four axes (element, head, row, batch), in boxes of 64 rows by 64
// elements. In shared memory a tile of n rows is kHalves columns of n rows of 128 bytes.

#include "common/types.cuh"
typedef float Sum;
#define SUM "f"

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Problem {
    // (B, H, padded): log2 of a query's sum of exp(scale score); +inf beyond the last query.
    float* lse2;
    float* delta;  // likewise: the row sum of gradient times out; 0 beyond
    float scale;
    float scale2;             // scale times log2(e)
    int heads;                // heads of the scheduled tiles
    int q_heads_per_kv_head;  // query heads per key head
    int queries, keys, padded;
    int tiles;  // tiles of a head
    int items;  // scheduled items: tiles, or pairs of them
    int paired, causal;
};

constexpr int kHead = ATTENTION_HEAD, kHalves = kHead / 64, kRows = 128, kWarps = 8, kCluster = 1;
constexpr int kHeldTileBytes = kRows * kHead * 2, kOutTileBytes = kHalves * 16 * 128;
#define ATTENTION_INFINITY __uint_as_float(0x7F800000u)

// clang-format off
//WGMMA//
// clang-format on

#include "common/tma_wgmma.cuh"

// ---- tiles ----

#include "common/swizzle.cuh"
#include "common/ring.cuh"

struct Tile {
    int first, head, batch;
};

// Schedules a block's tiles. Under a causal mask tile i is paired with tile n - 1 - i, so that all
// pairs have equal work and blocks end together.
struct TileScheduler {
    int item, second;
    DEVICE bool next(const Problem& e, Tile& tile) {
        if (item >= e.items) return false;
        const int each = e.paired ? (e.tiles + 1) / 2 : e.tiles, row = item / each,
                  at = item % each;
        const int mirrored = e.tiles - 1 - at;
        tile = {(second ? at : mirrored) * kRows, row % e.heads, row / e.heads};
        second = e.paired && !second && at != mirrored;
        if (!second) item += gridDim.x;
        return true;
    }
};

// The last key that a query sees.
DEVICE int last_key(const Problem& e, int query) {
    return e.causal ? min(e.keys - 1, query + e.keys - e.queries) : e.keys - 1;
}

// How many tiles of kKeys keys the queries from `first` on see.
template <int kKeys>
DEVICE int blocks_of_keys(const Problem& e, int first) {
    const int seen = e.causal ? min(e.keys, first + kRows + e.keys - e.queries) : e.keys;
    return (seen + kKeys - 1) / kKeys;
}

// A block's shared memory: resident tiles, a ring of stages, output tiles, barriers.
struct Memory {
    u8* held;
    u8* ring;
    u8* out_tiles;
    u32 full, empty, held_full, held_empty;
};

// kReaders: how many arrivals release a stage.
template <int kHeld, int kStage, int kExtraBytes, int kReaders = kWarps>
DEVICE Memory begin(u8* raw) {
    u8* held = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    u8* out_tiles = held + kHeld + ATTENTION_STAGES * kStage;
    const u32 full = shared_address(out_tiles + kWarps * kOutTileBytes + kExtraBytes),
              empty = full + 8 * ATTENTION_STAGES;
    const Memory m = {held, held + kHeld, out_tiles, full, empty, empty + 8 * ATTENTION_STAGES,
        empty + 8 * ATTENTION_STAGES + 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < ATTENTION_STAGES; ++s)
            barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, kReaders);
        barrier_init(m.held_full, 1), barrier_init(m.held_empty, kWarps);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    return m;
}

typedef RingPosition<ATTENTION_STAGES> Ring;

template <int kCount>
DEVICE void load_tile(u32 to, const TensorMap* map, int row, int head, int batch, u32 barrier) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int r = 0; r < kCount; r += 64)
            tma_load_4d(
                to + (half * kCount + r) * 128, map, half * 64, head, row + r, batch, barrier);
}

// ---- products ----

constexpr int kStreamRows = 64,
              kStreamTileBytes = kStreamRows * kHead *
                                 2;  // the tiles that stream through the ring in the gradients

typedef u32 Fragments[kHead / 16][4];  // a warp's 16 rows of a tile, as wgmma operand A
// Whether resident tiles are multiplied from registers. With 64 elements ptxas 13.0 gives them the
// registers of the rounded scores and loses them after the first iteration:
// tests/unit/cuda/test_instructions.py.
constexpr bool kInRegisters = kHead != kStreamRows;

DEVICE float low_of(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Loads rows `row` and `row` + 8 of a tile of kRows.
DEVICE void load_fragments(Fragments& to, const u8* tile, int row, int lane) {
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int unit = k % 4 * 2 + i / 2, r = row + i % 2 * 8;
            to[k][i] = *reinterpret_cast<const u32*>(
                tile + k / 4 * kRows * 128 + swizzled_offset(r, unit) + lane % 4 * 4);
        }
}

// d = a b^T, with 64 rows of a tile of kRows and a tile of n rows.
template <int kSums>
DEVICE void product(Sum (&d)[kSums], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k)
        wgmma(d, smem_descriptor<false>(a + k / 4 * kRows * 128, 0) + k % 4 * 2,
            smem_descriptor<false>(b + k / 4 * 2 * kSums * 128, 0) + k % 4 * 2, k > 0);
}
template <int kSums>
DEVICE void product(Sum (&d)[kSums], const Fragments& a, u32 b) {
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k)
        wgmma(d, a[k], smem_descriptor<false>(b + k / 4 * 2 * kSums * 128, 0) + k % 4 * 2, k > 0);
}

// d = a b, plus d if `more`: a is in registers, b is a tile with as many rows as a has columns.
template <int kSteps>
DEVICE void add_product(Sum (&d)[kHead / 2], const u32 (&a)[kSteps][4], u32 b, int more) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        wgmma_mn_major(d, a[k], smem_descriptor<true>(b, kSteps * 2048) + k * 128, more);
        more = 1;
    }
}

// Rounds sums of 64 rows to operand A of the next wgmma.
template <int kSteps>
DEVICE void to_bf16_operand(u32 (&to)[kSteps][4], const Sum (&s)[8 * kSteps]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[k][i] = to_bf16x2(s[8 * k + 2 * i + 1], s[8 * k + 2 * i]);
}

DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sums over the four threads that share a row.
DEVICE float sum_of_row(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// Stores a warp's 16 rows from `row` on, each times its factor. Rows beyond the array's last are
// not written.
DEVICE void write_rows(const Sum (&d)[kHead / 2], float factor0, float factor1,
    const TensorMap* map, u8* out_tile, int row, int rows, const Tile& tile, int lane) {
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float factor = h ? factor1 : factor0;
            u8* to =
                out_tile + j / 8 * 2048 + swizzled_offset(lane / 4 + 8 * h, j % 8) + lane % 4 * 4;
            *reinterpret_cast<u32*>(to) =
                to_bf16x2(d[4 * j + 2 * h + 1] * factor, d[4 * j + 2 * h] * factor);
        }
    fence_shared_async();
    __syncwarp();
    if (lane == 0) {
        if (row < rows)
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                tma_store_4d(map, half * 64, tile.head, row, tile.batch,
                    shared_address(out_tile + half * 2048));
        tma_store_commit();
    }
}
