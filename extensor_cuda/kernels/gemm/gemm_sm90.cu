// C = epilogue(A B^T): A (M, K) and B (N, K), 8-bit or 16-bit elements, on Hopper's tensor cores.
//
// K is contiguous; 16-bit elements may lie the other way round, GEMM_A_MN_MAJOR: A is read from (K,
// M), GEMM_B_MN_MAJOR: B from (K, N). Then a tile is boxes of 64 of its columns by 64 of K, which
// wgmma reads as they lie. GEMM_C_TRANSPOSED: C is written as (N, M).
//
// One producer warp loads tiles of 128 bytes along K with the tensor memory accelerator into a ring
// of shared-memory stages; two consumer warpgroups multiply 64 rows each with wgmma. A cluster of
// two blocks stands on neighbouring rows and shares the tile of B, each loading half of it for
// both. Blocks are persistent: a tile goes out through shared memory, by TMA, while the next one is
// multiplied.
//
// GEMM_PROMOTE: the tensor core's FP8 accumulator keeps about 13 fraction bits
// (extensor_cuda/gemm_model.py), so that every GEMM_PROMOTE stages the partial sum is added to
// float32 registers. The order of all additions depends on K and GEMM_PROMOTE alone, never on the
// tile or the cluster. GEMM_SCALES_1D2D: float scales of 128 elements along K on both sides, by
// which each stage's sum is multiplied when it is promoted; one for GEMM_A_SCALE_ROWS rows of A and
// GEMM_B_SCALE_ROWS of B, and if that is not 1, 128 rows from the first on have the same.
//
// GEMM_PING_PONG: a warpgroup issues a stage when the other one has: their products end one after
// the other, and each promotes while the other's run.
//
// GEMM_SCALE_GROUP_K: float scales of so many elements along K for each row of A: every
// GEMM_PROMOTE stages, or several times in a stage, the sum since the last of them is multiplied by
// its row's and added to float32 registers.
//
// GEMM_EXPAND_A: A is expanded from packed storage by the warps beside the one that loads; what the
// first tiles need is there before. Rows are taken from a counter, so that no block waits for one
// that is not running.
//
// GEMM_DECODE_A: A is packed storage of so many bits, decoded on the way to registers, from which
// it is multiplied.
//
// Packed weights are A, and GEMM_C_TRANSPOSED, since a thread has two rows of a tile and dozens of
// columns: what it reads of the scales of groups is two numbers.
//
// GEMM_SPLIT_K: K in parts, each multiplied as a tile of its own and written to rows of its own,
// for another kernel to add in order: the work of a small C of a long K for all multiprocessors.
//
// GEMM_GROUPED: the rows of A are in groups, each with a B of its own; where they begin is read on
// the device. GEMM_ZERO_POINTS: 8-bit integers whose zero points are taken off the exact sum.
// GEMM_REQUANTIZED: C as codes and scales, which three idle warps make (requantize.cuh).
//
// No headers; macros and the wgmma function come from config.py. TMA fills what lies outside A and
// B with zeros, which add nothing; what lies outside C is not written.

#include "common/types.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Epilogue {
    const int* row_exponent;  // C is multiplied by 2^(row + column); null: 0
    const int* column_exponent;
    const float* bias;     // one per column; null: none
    const void* residual;  // as out, added last; null: none
    i64 residual_pitch;
    const u32* row_flag;  // null, or what decides whether this kernel runs at all
    const u32* column_flag;
    u32* amax;                  // null, or the largest magnitude of C, as float bits
    u32* runs;                  // null, or a count of the launches that were not ended by flags
    int row_step, column_step;  // 1: an exponent per row or column; 0: one for all
    int flag_expected;          // 0: run if no flag is set; 1: run if one is; -1: always
    int rows, columns, stages_of_k;
    const int* row_zero;  // GEMM_ZERO_POINTS: the sum of (a - za) (b - zb) is that of a b, less za
                          // times b's ...
    const int* row_rest;  // ... sum of codes, less zb times the rest: a's sum of codes less K za
    const int* column_zero;
    const int* column_sum;
    const float* row_blocks;  // GEMM_SCALES_1D2D, GEMM_SCALE_GROUP_K: (groups along K, pitch), rows
                              // contiguous, readable beyond the last
    const float* column_blocks;
    i64 row_block_pitch, column_block_pitch;
    const int*
        offsets;  // GEMM_GROUPED: group g has the rows offsets[g] to offsets[g + 1] of A and C
    void* out;    // C itself, for the rows of a patch that end within it, or its codes
    i64 out_pitch;
    int groups;
    int parts, stages_of_part;      // GEMM_SPLIT_K: of K
    u8* scales;                     // GEMM_REQUANTIZED: of the codes' blocks
    const void* tensor;             // null, or what the whole tensor decides of them
    int ready;                      // GEMM_EXPAND_A: rows of A that are there before; whole tiles
    const u8 *codes, *code_scales;  // as Stored in expand.cuh; GEMM_DECODE_A: of A, rows
                                    // scale_pitch apart, 4 bytes aligned
    const signed char* zeros;
    i64 octets, scale_pitch;
    u8* expanded;  // A
    i64 chunks;    // of 16 elements, of a row of A
    u32* counts;   // what is taken, then the rows that are done of each tile; at first 0
};

constexpr int kTileM = 128, kTileN = GEMM_TILE_N, kRowBytes = 128;
constexpr int kARow =
    GEMM_DECODE_A ? 64 * GEMM_DECODE_A / 8 : kRowBytes;  // bytes of a row of A in a stage
constexpr int kABytes = kTileM * kARow, kBBytes = kTileN * kRowBytes;
constexpr int kStage = kABytes + kBBytes, kStages = GEMM_STAGES, kCluster = GEMM_CLUSTER;
constexpr int kRegisters = kTileN / 2;  // accumulators of a thread: 64 * N / 128
constexpr int kWarps = 8,
              kPatch = 16 * 128;  // a consumer warp's results leave in 16 rows of 128 bytes
constexpr int kPatches = GEMM_EPILOGUE_TILES;  // of these a warp has
constexpr int kTable = 64 + kTileN;  // exponents of a warpgroup's rows, and of the columns
constexpr int kTables =
    GEMM_ZERO_POINTS ? 3 * kTable : kTable;  // with zero points and sums behind them
constexpr int kLines = GEMM_SCALE_GROUP_K && GEMM_SCALE_GROUP_K < 64
                           ? 64 / GEMM_SCALE_GROUP_K
                           : 1;  // GEMM_SCALE_GROUP_K: scales of a row in a stage
constexpr int kScales = GEMM_SCALES_1D2D ? kTileM / GEMM_A_SCALE_ROWS + kTileN / GEMM_B_SCALE_ROWS
                        : GEMM_SCALE_GROUP_K ? kLines * kTileM
                                             : 0;  // of a stage
// Registers of a thread beside those that multiply, and of these: three warpgroups have 504.
constexpr int kBeside = GEMM_EXPAND_A || (GEMM_REQUANTIZED && kTileN > 128) ? 72
                        : GEMM_REQUANTIZED                                  ? 104
                                                                            : 40;
constexpr int kMultiplying = (504 - kBeside) / 2;
constexpr bool kPeeks = !GEMM_REQUANTIZED || kTileN <= 128;  // for which there are registers
static_assert(!(GEMM_EXPAND_A && GEMM_REQUANTIZED),
              "the warps beside the one that loads do one thing");
constexpr int kGroup = GEMM_RASTER_GROUP / kCluster;  // rows of tiles that are walked together
constexpr int kBox = 64,
              kBoxBytes =
                  kBox * kRowBytes;  // GEMM_A_MN_MAJOR, GEMM_B_MN_MAJOR: of K, and all of a box
static_assert(!(GEMM_A_MN_MAJOR || GEMM_B_MN_MAJOR) || GEMM_KIND == 1,
              "wgmma reads 16-bit elements alone either way");
static_assert(!GEMM_B_MN_MAJOR || kTileN / kCluster % kBox == 0, "whole boxes");

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

// To the next step of K, in a descriptor's units.
constexpr int kAStep = GEMM_A_MN_MAJOR ? 16 * kRowBytes / 16 : 2,
              kBStep = GEMM_B_MN_MAJOR ? 16 * kRowBytes / 16 : 2;

// Brings `rows` of A or B, from `first` on, of stage k along K.
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

// Neighbouring clusters work on a square patch of C, whose operands then stay in the cache.
__device__ __forceinline__ Tile tile_of(int index, int tall, int wide) {
    const int group = index / (kGroup * wide), within = index % (kGroup * wide);
    const int first = group * kGroup, height = min(kGroup, tall - first);
    return {first + within % height, within / height};
}

#if GEMM_GROUPED
// The groups one after the other; `index` must not fall from call to call.
struct Walk {
    int wide, group, before, start, end;
    __device__ __forceinline__ int tall() const {
        return (end - start + kTileM * kCluster - 1) / (kTileM * kCluster);
    }
    __device__ __forceinline__ bool find(int index, const Epilogue& e) {
        for (; group < e.groups; ++group) {
            start = e.offsets[group], end = e.offsets[group + 1];
            if (index < before + tall() * wide) return true;
            before += tall() * wide;
        }
        return false;
    }
    __device__ __forceinline__ Tile tile(int index) const {
        return tile_of(index - before, tall(), wide);
    }
};
#endif

// GEMM_PING_PONG: what both warpgroups wait for in turn.
__device__ __forceinline__ void take_turn(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.sync %0, 256;" ::"r"(4 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
    if (GEMM_PING_PONG) asm volatile("bar.arrive %0, 256;" ::"r"(5 - warpgroup) : "memory");
}

#include "gemm/float_scales.cuh"

#if GEMM_DECODE_A
#include "gemm/decode_a.cuh"
#else
constexpr float kDecodedLift = 1.0f;
#endif

#include "gemm/epilogue.cuh"

#if GEMM_EXPAND_A
#include "gemm/expand_a.cuh"
#endif

extern "C" __global__ void GEMM_CLUSTER_DIMS __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ TensorMap c_map, const __grid_constant__ Epilogue e) {
    if (GEMM_SCALES_1D2D) await_last();  // before anything that it may have written is read
    if (e.flag_expected >= 0) {
        const u32 flag = (e.row_flag ? *e.row_flag : 0) | (e.column_flag ? *e.column_flag : 0);
        if ((flag != 0) != (e.flag_expected != 0)) return;
    }
    if (e.runs && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(e.runs, 1u);
    extern __shared__ u8 raw_memory[];
    u8* memory = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    const u32 base = shared_address(memory);
    u8* patches = memory + kStages * kStage;
    int* tables = reinterpret_cast<int*>(patches + kWarps * kPatches * kPatch);
    float* scales = reinterpret_cast<float*>(tables);  // 16 bytes aligned
    if (GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K)
        tables = reinterpret_cast<int*>(scales + kStages * kScales);
    const u32 full = shared_address(tables + (GEMM_VECTORS ? 4 * kTables : 0)),
              empty = full + 8 * kStages;
    const u32 handed = empty + 8 * kStages;  // GEMM_REQUANTIZED: two barriers a patch, of all lanes
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int rank = kCluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, kWarps * kCluster);
        }
        for (int p = 0; GEMM_REQUANTIZED && p < 2 * kWarps * kPatches; ++p)
            barrier_init(handed + 8 * p, 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (kCluster > 1)
        cluster_sync();
    else
        __syncthreads();

#if GEMM_GROUPED
    const int wide = (e.columns + kTileN - 1) / kTileN, step = gridDim.x / kCluster;
    Walk walk = {wide, 0, 0, 0, 0};
    const int &start = walk.start, &end_of_rows = walk.end, &group = walk.group;
#define GEMM_TILES walk.find(index, e)
#define GEMM_TILE walk.tile(index)
#else
    const int tall = (e.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
    const int wide = (e.columns + kTileN - 1) / kTileN;
    const int tiles = tall * wide, step = gridDim.x / kCluster;
    constexpr int start = 0, group = 0;
#if GEMM_SPLIT_K
    const int all_tiles = tiles * e.parts,
              end_of_rows = GEMM_C_TRANSPOSED ? e.rows : tall * kCluster * kTileM * e.parts;
#define GEMM_TILES index < all_tiles
#define GEMM_TILE tile_of(index % tiles, tall, wide)
#else
    const int end_of_rows = e.rows;
#define GEMM_TILES index < tiles
#define GEMM_TILE tile_of(index, tall, wide)
#endif
#endif
#if GEMM_SPLIT_K
#define GEMM_FIRST_STAGE (index / tiles * e.stages_of_part)
#define GEMM_END_STAGE min((index / tiles + 1) * e.stages_of_part, e.stages_of_k)
#if GEMM_C_TRANSPOSED  // of the parts before
#define GEMM_ROWS_BEFORE 0
#define GEMM_COLUMNS_BEFORE (index / tiles * wide * kTileN)
#else
#define GEMM_ROWS_BEFORE (index / tiles * tall * kCluster * kTileM)
#define GEMM_COLUMNS_BEFORE 0
#endif
#else
#define GEMM_FIRST_STAGE 0
#define GEMM_END_STAGE e.stages_of_k
#define GEMM_ROWS_BEFORE 0
#define GEMM_COLUMNS_BEFORE 0
#endif
    int stage = 0;
    u32 parity = 0;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBeside));
        if (threadIdx.x == 256) {
            for (int index = blockIdx.x / kCluster; GEMM_TILES; index += step) {
                const Tile tile = GEMM_TILE;
                const int row = start + (tile.row * kCluster + rank) * kTileM;
                const int column = group * e.columns + tile.column * kTileN;
#if GEMM_EXPAND_A
                await_rows(e, row);
#endif
                for (int k = GEMM_FIRST_STAGE; k < GEMM_END_STAGE; ++k) {
                    wait(empty + 8 * stage, parity ^ 1);
                    const u32 to = base + stage * kStage, barrier = full + 8 * stage;
                    expect_bytes(barrier, kStage + 4 * kScales);
                    if (GEMM_DECODE_A)
                        load(to, &a_map, k * kARow, row, barrier);
                    else
                        load_tile<GEMM_A_MN_MAJOR, false>(to, &a_map, k, row, kTileM, barrier);
                    if (kCluster == 1) {
                        load_tile<GEMM_B_MN_MAJOR, false>(to + kABytes, &b_map, k, column, kTileN,
                                                          barrier);
                    } else {
                        constexpr int kPart = kTileN / kCluster;
                        load_tile<GEMM_B_MN_MAJOR, true>(to + kABytes + rank * kPart * kRowBytes,
                                                         &b_map, k, column + rank * kPart, kPart,
                                                         barrier);
                    }
#if GEMM_SCALES_1D2D
                    const u32 factors = shared_address(scales + stage * kScales);
                    constexpr int kRowLine = 4 * kTileM / GEMM_A_SCALE_ROWS,
                                  kColumnLine = 4 * kTileN / GEMM_B_SCALE_ROWS;
                    load_line(factors,
                              e.row_blocks + k * e.row_block_pitch + row / GEMM_A_SCALE_ROWS,
                              kRowLine, barrier);
                    load_line(
                        factors + kRowLine,
                        e.column_blocks + k * e.column_block_pitch + column / GEMM_B_SCALE_ROWS,
                        kColumnLine, barrier);
#elif GEMM_SCALE_GROUP_K
                    const u32 factors = shared_address(scales + stage * kScales);
#pragma unroll
                    for (int i = 0; i < kLines; ++i)
                        load_line(factors + 4 * i * kTileM,
                                  e.row_blocks +
                                      (k / GEMM_PROMOTE * kLines + i) * e.row_block_pitch + row,
                                  4 * kTileM, barrier);
#endif
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
            }
        }
#if GEMM_EXPAND_A
        if (threadIdx.x >= 288) expanding::expand_rows(e, lane);
#elif GEMM_REQUANTIZED
        if (threadIdx.x >= 288) {
            u32 turn = 0;
            for (int index = blockIdx.x / kCluster; GEMM_TILES; index += step) {
                const Tile tile = GEMM_TILE;
                quantize_tile(patches, handed, e, start + (tile.row * kCluster + rank) * kTileM,
                              end_of_rows, tile.column * kTileN, turn, threadIdx.x / 32 - 9, lane);
            }
        }
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplying));
        const int warp = threadIdx.x / 32;
        u8* patch = patches + (GEMM_C_TRANSPOSED ? warpgroup * 4 : warp) * kPatches * kPatch;
        const u32 mine = handed + 16 * warp * kPatches;
        u32 turn = 0;
        int* table = tables + warpgroup * 2 * kTables;
        Factors factors = {1.0f, 1.0f, table};
        if (!GEMM_VECTORS) {
            int exponent = (e.row_exponent ? *e.row_exponent : 0) +
                           (e.column_exponent ? *e.column_exponent : 0);
            exponent = min(max(exponent, -252), 254);
            factors.first = power_of_two(exponent >> 1) * kDecodedLift;
            factors.second = power_of_two(exponent - (exponent >> 1));
        }
#if GEMM_PING_PONG
        static_assert(GEMM_PROMOTE > 0, "warpgroups promote in turn");
        if (warpgroup == 1) give_turn(1);  // the first begins
#endif
        bool there = false;  // the next stage, as far as was seen while the last one was multiplied
        for (int index = blockIdx.x / kCluster; GEMM_TILES; index += step) {
            const Tile tile = GEMM_TILE;
            const int row = start + (tile.row * kCluster + rank) * kTileM + warpgroup * 64;
            const int column = tile.column * kTileN;
            if (GEMM_VECTORS) fetch_tables(table, e, row, column, end_of_rows, group * e.columns);
#if GEMM_PROMOTE
#define GEMM_TOTAL sum
#else
#define GEMM_TOTAL part
#endif
            Sum part[kRegisters];
#if GEMM_PROMOTE
            float sum[kRegisters];
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) sum[i] = 0.0f;
#endif
#if GEMM_SPLIT_K
            const int stages = GEMM_END_STAGE - GEMM_FIRST_STAGE;
#else
            const int& stages = e.stages_of_k;
#endif
#if GEMM_DECODE_A
            multiply_decoded(GEMM_TOTAL, part, e, memory, scales, full, empty, row,
                             GEMM_FIRST_STAGE, stages, stage, parity);
#else
            for (int k = 0; k < stages;) {
                const int end = GEMM_PROMOTE == 1 ? k + 1
                                : GEMM_PROMOTE    ? min(k + GEMM_PROMOTE, stages)
                                                  : stages;
                int last = -1;
                for (int more = 0; k < end; ++k) {
                    if (!there) wait(full + 8 * stage, parity);
                    const u64 a = descriptor<GEMM_A_MN_MAJOR>(
                        base + stage * kStage + warpgroup * 64 * kRowBytes, kBoxBytes);
                    const u64 b =
                        descriptor<GEMM_B_MN_MAJOR>(base + stage * kStage + kABytes, kBoxBytes);
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
                        const Scales of_line(scales + stage * kScales + line * kTileM, warp, lane);
                        end_block(of_line.latest());
                        finish<0>(part);
                        of_line.promote(sum, part);
                        more = 0;
#endif
                    }
                    const int now = stage;
                    if (++stage == kStages) stage = 0, parity ^= 1;
                    if (kPeeks) there = is_over(full + 8 * stage, parity);
                    if (GEMM_PROMOTE != 1) finish<1>(part);
                    if (last >= 0) release(empty + 8 * last, lane);
                    last = now;
                }
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
                const Scales of_stage(scales + last * kScales + (kLines - 1) * kTileM, warp, lane);
                end_block(of_stage.latest());
#endif
                finish<0>(part);
#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
                of_stage.promote(sum, part);
                __syncwarp();
#endif
                release(empty + 8 * last, lane);
#if GEMM_PROMOTE && !GEMM_SCALES_1D2D && !GEMM_SCALE_GROUP_K
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) sum[i] += part[i];
#endif
            }
#endif
            const int first = GEMM_ROWS_BEFORE + row + warp % 4 * 16,
                      first_column = GEMM_COLUMNS_BEFORE + column;
#if GEMM_VECTORS
            await_tables(warpgroup);
            factors.table = table;
            if (GEMM_VECTORS == 2 || are_near(table, lane))
                write_rows<true>(GEMM_TOTAL, e, &c_map, factors, first, end_of_rows, first_column,
                                 group, patch, mine, turn, lane);
            else
                write_rows<false>(GEMM_TOTAL, e, &c_map, factors, first, end_of_rows, first_column,
                                  group, patch, mine, turn, lane);
            // The other table next: slower warps may still read this one.
            table = table == tables + warpgroup * 2 * kTables ? table + kTables : table - kTables;
#else
            write_rows<true>(GEMM_TOTAL, e, &c_map, factors, first, end_of_rows, first_column,
                             group, patch, mine, turn, lane);
#endif
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    // A block's shared memory must stay while its neighbour may still write to it.
    if (kCluster > 1) cluster_sync();
}
