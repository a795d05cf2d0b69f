// C = epilogue(A B^T) on Hopper's tensor cores: A (M, K), B (N, K), 8-bit or 16-bit elements.
// Macros and the wgmma function come from config.py.
//
// One producer warp loads tiles of 128 bytes along K by TMA into a ring of shared-memory stages.
// Two consumer warpgroups multiply 64 rows each with wgmma. A cluster of two blocks takes
// neighbouring rows, and each block multicasts half of their common tile of B. Blocks are
// persistent: a finished tile is stored by TMA while the next one is multiplied. TMA fills zeros
// outside A and B and drops what is outside C.
//
// Macros, besides tile, stages and cluster:
//
// GEMM_A_MN_MAJOR, GEMM_B_MN_MAJOR: 16-bit A is stored as (K, M), B as (K, N). A tile is then boxes
// of 64 columns by 64 of K, which wgmma reads transposed. GEMM_C_TRANSPOSED: C is written as (N,
// M); packed weights are operand A so that a thread needs the scales of two rows only.
//
// GEMM_PROMOTE: partial sums are added to float32 registers every so many stages, because the FP8
// accumulator keeps about 13 fraction bits (extensor_cuda/matmul/accumulator.py). The order of
// additions depends on K and GEMM_PROMOTE only.
//
// GEMM_SCALES_1D2D: float scales of 128 elements along K multiply each stage's sum at promotion,
// one for GEMM_A_SCALE_ROWS rows of A and GEMM_B_SCALE_ROWS rows of B. GEMM_SCALE_GROUP_K: float
// scales of so many elements along K for each row of A, at promotion or within a stage.
//
// GEMM_PING_PONG: the two warpgroups issue stages in turn, so that one promotes while the other
// multiplies.
//
// GEMM_EXPAND_A: idle producer warps expand A from packed storage. GEMM_DECODE_A: A is packed
// storage of so many bits, decoded into wgmma's registers.
//
// GEMM_SPLIT_K: each split of K is a tile of its own, written to rows of its own; another kernel
// adds the splits in order. GEMM_GROUPED: groups of A's rows have a B each, and their offsets are
// read on the device. GEMM_ZERO_POINTS: integers with zero points, subtracted from the exact sum.
// GEMM_REQUANTIZED: C is written as codes and scales by three idle warps (requantize.cuh).

#include "common/types.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Epilogue {
    const int* row_exponent;  // C is multiplied by 2^(row + column); null: 0
    const int* column_exponent;
    const float* bias;     // one per column, or null
    const void* residual;  // like out, added last; or null
    i64 residual_pitch;
    const u32* row_flag;  // null, or decides whether the kernel runs
    const u32* column_flag;
    u32* amax;                  // null, or C's largest magnitude as float bits
    u32* runs;                  // null, or counts launches not ended by flags
    int row_step, column_step;  // 1: one exponent per row or column; 0: one for all
    int flag_expected;          // 0: run if no flag is set; 1: run if one is; -1: always
    int rows, columns, k_stages;
    // GEMM_ZERO_POINTS: sum (a - za) (b - zb) = sum a b - za (sum b) - zb (sum a - K za);
    // `row_rest` is the last bracket.
    const int* row_zero;
    const int* row_rest;
    const int* column_zero;
    const int* column_sum;
    // GEMM_SCALES_1D2D, GEMM_SCALE_GROUP_K: (groups along K, pitch), readable a tile beyond the
    // last.
    const float* row_block_scales;
    const float* column_block_scales;
    i64 row_scale_pitch, column_scale_pitch;
    const int* offsets;  // GEMM_GROUPED: group g has the rows offsets[g] to offsets[g + 1]
    void* out;           // C, or its codes
    i64 out_pitch;
    int groups;
    int splits, stages_per_split;  // GEMM_SPLIT_K
    u8* scales;                    // GEMM_REQUANTIZED: scales of C's blocks
    const void* tensor;            // null, or the tensor's scale state
    int rows_ready;                // GEMM_EXPAND_A: rows of A expanded already, whole tiles
    // As Stored in expand.cuh. GEMM_DECODE_A: rows scale_pitch apart, aligned to 4 bytes.
    const u8 *codes, *code_scales;
    const signed char* zeros;
    i64 code_pitch, scale_pitch;
    u8* expanded;        // operand A
    i64 chunks_per_row;  // of 16 elements
    u32* counts;         // rows taken, then the rows done of each tile; zeros at first
};

constexpr int kTileM = 128, kTileN = GEMM_TILE_N, kRowBytes = 128, kWarps = 8;
// Bytes of a row of A in a stage, of the operands in a stage, and of a stage.
constexpr int kARow = GEMM_DECODE_A ? 64 * GEMM_DECODE_A / 8 : kRowBytes;
constexpr int kABytes = kTileM * kARow, kBBytes = kTileN * kRowBytes;
constexpr int kStage = kABytes + kBBytes, kStages = GEMM_STAGES, kCluster = GEMM_CLUSTER;
constexpr int kRegisters = kTileN / 2;  // accumulators of a thread: 64 * N / 128
// A consumer warp's epilogue tiles: 16 rows of 128 bytes.
constexpr int kEpilogueTileBytes = 16 * 128, kEpilogueTiles = GEMM_EPILOGUE_TILES;
// Table entries: one per row of a warpgroup and per column; zero points and sums follow.
constexpr int kTableEntries = 64 + kTileN;
constexpr int kTableStride = GEMM_ZERO_POINTS ? 3 * kTableEntries : kTableEntries;
// Scales of a row in a stage, and of a stage.
constexpr int kGroupsPerStage =
    GEMM_SCALE_GROUP_K && GEMM_SCALE_GROUP_K < 64 ? 64 / GEMM_SCALE_GROUP_K : 1;
constexpr int kScales = GEMM_SCALES_1D2D ? kTileM / GEMM_A_SCALE_ROWS + kTileN / GEMM_B_SCALE_ROWS
                        : GEMM_SCALE_GROUP_K ? kGroupsPerStage * kTileM
                                             : 0;
// Registers per thread of the producer and of a consumer warpgroup: the three have 504 together.
constexpr int kProducerRegisters = GEMM_EXPAND_A || (GEMM_REQUANTIZED && kTileN > 128) ? 72
                                   : GEMM_REQUANTIZED                                  ? 104
                                                                                       : 40;
constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;
// Whether registers suffice to test the next barrier early.
constexpr bool kTestAhead = !GEMM_REQUANTIZED || kTileN <= 128;
static_assert(!(GEMM_EXPAND_A && GEMM_REQUANTIZED), "idle producer warps do one thing");
constexpr int kRasterGroup = GEMM_RASTER_GROUP / kCluster;  // rows of tiles in a raster group
// A TMA box of an MN-major operand: elements of K, and bytes.
constexpr int kBoxK = 64, kBoxBytes = kBoxK * kRowBytes;
static_assert(!(GEMM_A_MN_MAJOR || GEMM_B_MN_MAJOR) || GEMM_KIND == 1,
    "wgmma reads 16-bit elements alone either way");
static_assert(!GEMM_B_MN_MAJOR || kTileN / kCluster % kBoxK == 0, "whole boxes");

#if GEMM_KIND == 2
typedef int Sum;
#define SUM "r"
#else
typedef float Sum;
#define SUM "f"
#endif

// clang-format off
//WGMMA//
// clang-format on

#include "common/tma_wgmma.cuh"
#include "common/dependent_launch.cuh"

// ---- tiles ----

#include "common/swizzle.cuh"

struct Tile {
    int row, column;
};

// The distance to wgmma's next step along K, in units of the descriptor.
constexpr int kAStep = GEMM_A_MN_MAJOR ? 16 * kRowBytes / 16 : 2,
              kBStep = GEMM_B_MN_MAJOR ? 16 * kRowBytes / 16 : 2;

// Loads `rows` of A or B, from `first` on, of stage k.
template <bool kMnMajor, bool kMulticast>
DEVICE void load_tile(u32 to, const TensorMap* map, int k, int first, int rows, u32 barrier) {
#pragma unroll
    for (int from = 0; from < (kMnMajor ? rows : 1); from += kBoxK) {
        const int byte = kMnMajor ? 2 * (first + from) : k * kRowBytes,
                  row = kMnMajor ? k * kBoxK : first;
        if (kMulticast) tma_load_multicast(to + from * kRowBytes, map, byte, row, barrier);
        else tma_load_2d(to + from * kRowBytes, map, byte, row, barrier);
    }
}

// Raster swizzle: neighbouring clusters work on a square of C, whose operands stay in the L2 cache.
DEVICE Tile tile_of(int index, int tiles_m, int tiles_n) {
    const int group = index / (kRasterGroup * tiles_n), within = index % (kRasterGroup * tiles_n);
    const int first = group * kRasterGroup, height = min(kRasterGroup, tiles_m - first);
    return {first + within % height, within / height};
}

#if GEMM_GROUPED
// Goes through the groups in order. `index` must not fall from call to call.
struct TileScheduler {
    int tiles_n, group, before, start, end;
    DEVICE int tiles_m() const {
        return (end - start + kTileM * kCluster - 1) / (kTileM * kCluster);
    }
    DEVICE bool find(int index, const Epilogue& e) {
        for (; group < e.groups; ++group) {
            start = e.offsets[group], end = e.offsets[group + 1];
            if (index < before + tiles_m() * tiles_n) return true;
            before += tiles_m() * tiles_n;
        }
        return false;
    }
    DEVICE Tile tile(int index) const { return tile_of(index - before, tiles_m(), tiles_n); }
};
#endif

// GEMM_PING_PONG: named barriers at which the warpgroups alternate.
DEVICE void order_barrier_wait(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.sync %0, 256;" ::"r"(4 + warpgroup) : "memory");
}
DEVICE void order_barrier_arrive(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.arrive %0, 256;" ::"r"(5 - warpgroup) : "memory");
}

// A thread of a consumer warpgroup.
struct Consumer {
    int warpgroup, lane;
};

// Stages along K that a tile's sum has.
struct StageRange {
    int first, count;
};

// The ring of stages in shared memory, their scales, and the barriers of full and empty ones.
struct StageRing {
    u8* memory;
    u32 base;  // the address of `memory`
    float* scales;
    u32 full, empty;
};

#include "gemm/float_scales.cuh"

#if GEMM_DECODE_A
#include "gemm/decode_a.cuh"
#else
constexpr float kDecodeFactor = 1.0f;
#endif

#include "gemm/epilogue.cuh"

#if GEMM_EXPAND_A
#include "gemm/expand_a.cuh"
#endif

// The producer: loads stage k of the operands from (row, column) of C on, and of their scales.
DEVICE void load_stage(const StageRing& ring, int stage, const TensorMap* a_map,
    const TensorMap* b_map, [[maybe_unused]] const Epilogue& e, int k, const Tile& origin,
    [[maybe_unused]] int rank) {
    const u32 to = ring.base + stage * kStage, barrier = ring.full + 8 * stage;
    [[maybe_unused]] const u32 scales = shared_address(ring.scales + stage * kScales);
    const int row = origin.row, column = origin.column;
    barrier_expect_bytes(barrier, kStage + 4 * kScales);
    if (GEMM_DECODE_A) tma_load_2d(to, a_map, k * kARow, row, barrier);
    else load_tile<GEMM_A_MN_MAJOR, false>(to, a_map, k, row, kTileM, barrier);
    if (kCluster == 1) {
        load_tile<GEMM_B_MN_MAJOR, false>(to + kABytes, b_map, k, column, kTileN, barrier);
    } else {
        constexpr int kMulticastRows = kTileN / kCluster;
        load_tile<GEMM_B_MN_MAJOR, true>(to + kABytes + rank * kMulticastRows * kRowBytes, b_map, k,
            column + rank * kMulticastRows, kMulticastRows, barrier);
    }
#if GEMM_SCALES_1D2D
    constexpr int kRowScaleBytes = 4 * kTileM / GEMM_A_SCALE_ROWS,
                  kColumnScaleBytes = 4 * kTileN / GEMM_B_SCALE_ROWS;
    bulk_load(scales, e.row_block_scales + k * e.row_scale_pitch + row / GEMM_A_SCALE_ROWS,
        kRowScaleBytes, barrier);
    bulk_load(scales + kRowScaleBytes,
        e.column_block_scales + k * e.column_scale_pitch + column / GEMM_B_SCALE_ROWS,
        kColumnScaleBytes, barrier);
#elif GEMM_SCALE_GROUP_K
#pragma unroll
    for (int i = 0; i < kGroupsPerStage; ++i)
        bulk_load(scales + 4 * i * kTileM,
            e.row_block_scales + (k / GEMM_PROMOTE * kGroupsPerStage + i) * e.row_scale_pitch + row,
            4 * kTileM, barrier);
#endif
}

#if !GEMM_DECODE_A
// A consumer: multiplies a tile's stages into `sum` (`part` if nothing is promoted). `stage_ready`:
// whether the next stage was full when last tested.
template <class Total>
DEVICE void multiply([[maybe_unused]] Total (&sum)[kRegisters], Sum (&part)[kRegisters],
    const StageRing& ring, const int& stages, int& stage, u32& parity, bool& stage_ready,
    const Consumer& thread) {
    [[maybe_unused]] const int warp = threadIdx.x / 32;
    for (int k = 0; k < stages;) {
        const int end = GEMM_PROMOTE == 1 ? k + 1
                        : GEMM_PROMOTE    ? min(k + GEMM_PROMOTE, stages)
                                          : stages;
        int last = -1;
        for (int more = 0; k < end; ++k) {
            if (!stage_ready) barrier_wait(ring.full + 8 * stage, parity);
            const u64 a = smem_descriptor<GEMM_A_MN_MAJOR>(
                ring.base + stage * kStage + thread.warpgroup * 64 * kRowBytes, kBoxBytes);
            const u64 b =
                smem_descriptor<GEMM_B_MN_MAJOR>(ring.base + stage * kStage + kABytes, kBoxBytes);
#pragma unroll
            for (int group_of_stage = 0; group_of_stage < kGroupsPerStage; ++group_of_stage) {
                order_barrier_wait(thread.warpgroup);
                fence_accumulators(part);
                warpgroup_arrive();
#pragma unroll
                for (int i = group_of_stage * 4 / kGroupsPerStage;
                    i < (group_of_stage + 1) * 4 / kGroupsPerStage; ++i) {
                    wgmma(part, a + kAStep * i, b + kBStep * i, more);
                    more = 1;
                }
                warpgroup_commit();
                order_barrier_arrive(thread.warpgroup);
#if GEMM_SCALE_GROUP_K && GEMM_SCALE_GROUP_K < 64
                if (group_of_stage + 1 == kGroupsPerStage)
                    break;  // the last group is promoted below
                const Scales group_scales(
                    ring.scales + stage * kScales + group_of_stage * kTileM, warp, thread.lane);
                end_basic_block(group_scales.latest());
                warpgroup_wait<0>(part);
                group_scales.promote(sum, part);
                more = 0;
#endif
            }
            const int now = stage;
            if (++stage == kStages) stage = 0, parity ^= 1;
            if (kTestAhead) stage_ready = barrier_test(ring.full + 8 * stage, parity);
            if (GEMM_PROMOTE != 1) warpgroup_wait<1>(part);
            if (last >= 0) release_stage(ring.empty + 8 * last, thread.lane);
            last = now;
        }
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
        const Scales stage_scales(
            ring.scales + last * kScales + (kGroupsPerStage - 1) * kTileM, warp, thread.lane);
        end_basic_block(stage_scales.latest());
#endif
        warpgroup_wait<0>(part);
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
        stage_scales.promote(sum, part);
        __syncwarp();
#endif
        release_stage(ring.empty + 8 * last, thread.lane);
#if GEMM_PROMOTE && !GEMM_SCALES_1D2D && !GEMM_SCALE_GROUP_K
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) sum[i] += part[i];
#endif
    }
}
#endif

// One exponent for all of C: its factor in two powers of two, neither of which underflows.
DEVICE void set_exponents(Factors& factors, const Epilogue& e) {
    int exponent =
        (e.row_exponent ? *e.row_exponent : 0) + (e.column_exponent ? *e.column_exponent : 0);
    exponent = min(max(exponent, -252), 254);
    factors.first = power_of_two(exponent >> 1) * kDecodeFactor;
    factors.second = power_of_two(exponent - (exponent >> 1));
}

// Whether the flags of both operands ask for this kernel.
DEVICE bool flags_match(const Epilogue& e) {
    if (e.flag_expected < 0) return true;
    const u32 flag = (e.row_flag ? *e.row_flag : 0) | (e.column_flag ? *e.column_flag : 0);
    return (flag != 0) == (e.flag_expected != 0);
}

DEVICE void init_barriers(u32 full, u32 empty, [[maybe_unused]] u32 handoff) {
    for (int s = 0; s < kStages; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, kWarps * kCluster);
    }
    for (int p = 0; GEMM_REQUANTIZED && p < 2 * kWarps * kEpilogueTiles; ++p)
        barrier_init(handoff + 8 * p, 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The kernel's loop over tiles: whether there is a tile `index`, which one it is, its stages along
// K, and the sums that the epilogue reads.
#if GEMM_GROUPED
#define GEMM_HAS_TILE scheduler.find(index, e)
#define GEMM_TILE scheduler.tile(index)
#elif GEMM_SPLIT_K
#define GEMM_HAS_TILE index < work_items
#define GEMM_TILE tile_of(index % tiles, tiles_m, tiles_n)
#else
#define GEMM_HAS_TILE index < tiles
#define GEMM_TILE tile_of(index, tiles_m, tiles_n)
#endif
#if GEMM_SPLIT_K
#define GEMM_K_BEGIN (index / tiles * e.stages_per_split)
#define GEMM_K_END min((index / tiles + 1) * e.stages_per_split, e.k_stages)
#if GEMM_C_TRANSPOSED  // of the splits before
#define GEMM_SPLIT_ROWS 0
#define GEMM_SPLIT_COLUMNS (index / tiles * tiles_n * kTileN)
#else
#define GEMM_SPLIT_ROWS (index / tiles * tiles_m * kCluster * kTileM)
#define GEMM_SPLIT_COLUMNS 0
#endif
#else
#define GEMM_K_BEGIN 0
#define GEMM_K_END e.k_stages
#define GEMM_SPLIT_ROWS 0
#define GEMM_SPLIT_COLUMNS 0
#endif
#if GEMM_PROMOTE
#define GEMM_SUM sum
#else
#define GEMM_SUM part
#endif

extern "C" __global__ void GEMM_CLUSTER_DIMS __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
        const __grid_constant__ TensorMap c_map, const __grid_constant__ Epilogue e) {
    if (GEMM_SCALES_1D2D)
        wait_on_dependent_grids();  // the previous grid may have written what follows
    if (!flags_match(e)) return;
    if (e.runs && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(e.runs, 1u);
    extern __shared__ u8 raw_memory[];
    u8* memory = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    const u32 base = shared_address(memory);
    u8* epilogue_tiles = memory + kStages * kStage;
    int* tables =
        reinterpret_cast<int*>(epilogue_tiles + kWarps * kEpilogueTiles * kEpilogueTileBytes);
    float* scales = reinterpret_cast<float*>(tables);  // 16 bytes aligned
    if (GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K)
        tables = reinterpret_cast<int*>(scales + kStages * kScales);
    const u32 full = shared_address(tables + (GEMM_VECTORS ? 4 * kTableStride : 0)),
              empty = full + 8 * kStages;
    const u32 handoff = empty + 8 * kStages;  // GEMM_REQUANTIZED: two barriers per epilogue tile
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int rank = kCluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;

    if (threadIdx.x == 0) init_barriers(full, empty, handoff);
    if (kCluster > 1) cluster_sync();
    else __syncthreads();

#if GEMM_GROUPED
    const int tiles_n = (e.columns + kTileN - 1) / kTileN, step = gridDim.x / kCluster;
    TileScheduler scheduler = {tiles_n, 0, 0, 0, 0};
    const int &start = scheduler.start, &end_of_rows = scheduler.end, &group = scheduler.group;
#else
    const int tiles_m = (e.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
    const int tiles_n = (e.columns + kTileN - 1) / kTileN;
    const int tiles = tiles_m * tiles_n, step = gridDim.x / kCluster;
    constexpr int start = 0, group = 0;
#if GEMM_SPLIT_K
    const int work_items = tiles * e.splits,
              end_of_rows = GEMM_C_TRANSPOSED ? e.rows : tiles_m * kCluster * kTileM * e.splits;
#else
    const int end_of_rows = e.rows;
#endif
#endif
    const StageRing ring = {memory, base, scales, full, empty};
    int stage = 0;
    u32 parity = 0;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == 256) {
            for (int index = blockIdx.x / kCluster; GEMM_HAS_TILE; index += step) {
                const Tile tile = GEMM_TILE;
                const int row = start + (tile.row * kCluster + rank) * kTileM;
                const int column = group * e.columns + tile.column * kTileN;
#if GEMM_EXPAND_A
                await_rows(e, row);
#endif
                for (int k = GEMM_K_BEGIN; k < GEMM_K_END; ++k) {
                    barrier_wait(empty + 8 * stage, parity ^ 1);
                    load_stage(ring, stage, &a_map, &b_map, e, k, {row, column}, rank);
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
            }
        }
#if GEMM_EXPAND_A
        if (threadIdx.x >= 288) expanding::expand_rows(e, lane);
#elif GEMM_REQUANTIZED
        if (threadIdx.x >= 288) {
            u32 epilogue_phase = 0;
            for (int index = blockIdx.x / kCluster; GEMM_HAS_TILE; index += step) {
                const Tile tile = GEMM_TILE;
                quantize_tile(epilogue_tiles, handoff, e,
                    start + (tile.row * kCluster + rank) * kTileM, end_of_rows,
                    tile.column * kTileN, epilogue_phase, threadIdx.x / 32 - 9, lane);
            }
        }
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        const int warp = threadIdx.x / 32;
        u8* epilogue_tile = epilogue_tiles + (GEMM_C_TRANSPOSED ? warpgroup * 4 : warp) *
                                                 kEpilogueTiles * kEpilogueTileBytes;
        const u32 mine = handoff + 16 * warp * kEpilogueTiles;
        u32 epilogue_phase = 0;
        int* table = tables + warpgroup * 2 * kTableStride;
        Factors factors = {1.0f, 1.0f, table};
        if (!GEMM_VECTORS) {
            set_exponents(factors, e);
        }
#if GEMM_PING_PONG
        static_assert(GEMM_PROMOTE > 0, "warpgroups promote in turn");
        if (warpgroup == 1) order_barrier_arrive(1);  // the first warpgroup begins
#endif
        bool stage_ready = false;  // whether the next stage was full when last tested
        for (int index = blockIdx.x / kCluster; GEMM_HAS_TILE; index += step) {
            const Tile tile = GEMM_TILE;
            const int row = start + (tile.row * kCluster + rank) * kTileM + warpgroup * 64;
            const int column = tile.column * kTileN;
            if (GEMM_VECTORS)
                fetch_epilogue_tables(table, e, row, column, end_of_rows, group * e.columns);
            Sum part[kRegisters];
#if GEMM_PROMOTE
            float sum[kRegisters];
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) sum[i] = 0.0f;
#endif
#if GEMM_SPLIT_K
            const int stages = GEMM_K_END - GEMM_K_BEGIN;
#else
            const int& stages = e.k_stages;
#endif
#if GEMM_DECODE_A
            multiply_decoded(GEMM_SUM, part, e, ring, row, {GEMM_K_BEGIN, stages}, stage, parity);
#else
            multiply(GEMM_SUM, part, ring, stages, stage, parity, stage_ready, {warpgroup, lane});
#endif
            const int first = GEMM_SPLIT_ROWS + row + warp % 4 * 16,
                      first_column = GEMM_SPLIT_COLUMNS + column;
#if GEMM_VECTORS
            await_epilogue_tables(warpgroup);
            factors.table = table;
            if (GEMM_VECTORS == 2 || exponents_are_small(table, lane))
                write_rows<true>(GEMM_SUM, e, &c_map, factors, first, end_of_rows, first_column,
                    group, epilogue_tile, mine, epilogue_phase, lane);
            else
                write_rows<false>(GEMM_SUM, e, &c_map, factors, first, end_of_rows, first_column,
                    group, epilogue_tile, mine, epilogue_phase, lane);
            // The other table is next: slower warps may still read this one.
            table = table == tables + warpgroup * 2 * kTableStride ? table + kTableStride
                                                                   : table - kTableStride;
#else
            write_rows<true>(GEMM_SUM, e, &c_map, factors, first, end_of_rows, first_column, group,
                epilogue_tile, mine, epilogue_phase, lane);
#endif
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    // A block must not exit while its cluster neighbour may still write to its shared memory.
    if (kCluster > 1) cluster_sync();
}
