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
// No headers; macros and the wgmma function come from gemm.py. TMA fills what lies outside A and B
// with zeros, which add nothing; what lies outside C is not written.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

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
    int flag_wanted;            // 0: run if no flag is set; 1: run if one is; -1: always
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

// The block's memory: a ring of stages, results on their way out, tables of factors, barriers.
struct Memory {
    u8* bytes;
    u32 base;
    u8* patches;
    float* scales;  // 16 bytes aligned
    int* tables;
    u32 full, empty;
    u32 handed;  // GEMM_REQUANTIZED: two barriers a patch, of all lanes
};

struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

#include "gemm/schedule.cuh"
#include "gemm/float_scales.cuh"

// To the next step of K, in a descriptor's units.
constexpr int kAStep = GEMM_A_MN_MAJOR ? 16 * kRowBytes / 16 : 2,
              kBStep = GEMM_B_MN_MAJOR ? 16 * kRowBytes / 16 : 2;

#if GEMM_DECODE_A
#include "gemm/decode_a.cuh"
#else
constexpr float kDecodedLift = 1.0f;
#endif

#include "gemm/epilogue.cuh"

#if GEMM_EXPAND_A
#include "gemm/expand_a.cuh"
#endif

#include "gemm/producer.cuh"
#include "gemm/consumer.cuh"

// How the block's shared memory is laid out.
__device__ __forceinline__ Memory lay_out(u8* raw) {
    Memory m;
    m.bytes = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    m.base = shared_address(m.bytes);
    m.patches = m.bytes + kStages * kStage;
    m.tables = reinterpret_cast<int*>(m.patches + kWarps * kPatches * kPatch);
    m.scales = reinterpret_cast<float*>(m.tables);
    if (GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K)
        m.tables = reinterpret_cast<int*>(m.scales + kStages * kScales);
    m.full = shared_address(m.tables + (GEMM_VECTORS ? 4 * kTables : 0));
    m.empty = m.full + 8 * kStages;
    m.handed = m.empty + 8 * kStages;
    return m;
}

__device__ __forceinline__ void set_up_barriers(const Memory& m) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(m.full + 8 * s, 1);
            barrier_init(m.empty + 8 * s, kWarps * kCluster);
        }
        for (int p = 0; GEMM_REQUANTIZED && p < 2 * kWarps * kPatches; ++p)
            barrier_init(m.handed + 8 * p, 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
}

extern "C" __global__ void GEMM_CLUSTER_DIMS __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ TensorMap c_map, const __grid_constant__ Epilogue e) {
    if (GEMM_SCALES_1D2D) await_last();  // before anything that it may have written is read
    if (e.flag_wanted >= 0) {
        const u32 flag = (e.row_flag ? *e.row_flag : 0) | (e.column_flag ? *e.column_flag : 0);
        if ((flag != 0) != (e.flag_wanted != 0)) return;
    }
    if (e.runs && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(e.runs, 1u);
    extern __shared__ u8 raw_memory[];
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int rank = kCluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;
    const Memory m = lay_out(raw_memory);
    set_up_barriers(m);
    if (kCluster > 1)
        cluster_sync();
    else
        __syncthreads();
    Schedule schedule = Schedule::of(e);
    const int step = gridDim.x / kCluster;
    Ring at = {0, 0};

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBeside));
        if (threadIdx.x == 256) produce(&a_map, &b_map, e, m, schedule, at, step, rank);
#if GEMM_EXPAND_A
        if (threadIdx.x >= 288) expanding::expand_rows(e, lane);
#elif GEMM_REQUANTIZED
        if (threadIdx.x >= 288)
            quantize_tiles(e, m, schedule, step, rank, threadIdx.x / 32 - 9, lane);
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplying));
        consume(&c_map, e, m, schedule, at, step, rank, warpgroup, lane);
    }
    // A block's shared memory must stay while its neighbour may still write to it.
    if (kCluster > 1) cluster_sync();
}
