// C = epilogue(A B^T): A (M, K) and B (N, K) with K contiguous, 8-bit or 16-bit elements, on Hopper's
// tensor cores.
//
// One producer warp loads tiles of 128 bytes along K with the tensor memory accelerator into a ring
// of shared-memory stages; two consumer warpgroups multiply 64 rows each with wgmma. A cluster of two
// blocks stands on neighbouring rows and shares the tile of B, each loading half of it for both.
// Blocks are persistent: a tile goes out through shared memory, by TMA, while the next one is multiplied.
//
// PROMOTE: the tensor core's FP8 accumulator keeps about 13 fraction bits (extensor_cuda/gemm_model.py),
// so that every PROMOTE stages the partial sum is added to float32 registers. The order of all
// additions depends on K and PROMOTE alone, never on the tile or the cluster.
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
    const int* row_exponent;     // C is multiplied by 2^(row + column); null: 0
    const int* column_exponent;
    const float* bias;           // one per column; null: none
    const void* residual;        // as out, added last; null: none
    i64 residual_pitch;
    const u32* row_flag;         // null, or what decides whether this kernel runs at all
    const u32* column_flag;
    u32* amax;                   // null, or the largest magnitude of C, as float bits
    u32* runs;                   // null, or a count of the launches that were not ended by flags
    int row_step, column_step;   // 1: an exponent per row or column; 0: one for all
    int flag_wanted;             // 0: run if no flag is set; 1: run if one is; -1: always
    int rows, columns, stages_of_k;
};

constexpr int kTileM = 128, kTileN = TILE_N, kRowBytes = 128;
constexpr int kABytes = kTileM * kRowBytes, kBBytes = kTileN * kRowBytes;
constexpr int kStage = kABytes + kBBytes, kStages = STAGES, kCluster = CLUSTER;
constexpr int kRegisters = kTileN / 2;  // accumulators of a thread: 64 * N / 128
constexpr int kWarps = 8, kPatch = 16 * 128;  // a consumer warp's results leave in 16 rows of 128 bytes
constexpr int kPatches = PATCHES;             // of these a warp has
constexpr int kTable = 64 + kTileN;           // exponents of a warpgroup's rows, and of the columns
constexpr int kGroup = GROUP / kCluster;      // rows of tiles that are walked together

#if KIND == 2
typedef int Sum;
#define SUM "r"
#else
typedef float Sum;
#define SUM "f"
#endif

//WGMMA//

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- barriers and copies ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
#if GUARD
    for (u32 spins = 0;; ++spins) {
        if (spins > (1u << 22)) asm volatile("trap;");
#else
    for (;;) {
#endif
        u32 done;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) return;
    }
}

// Says to every block of the cluster that a stage of theirs may be overwritten.
__device__ __forceinline__ void release(u32 barrier, int lane) {
    if (lane >= kCluster) return;
    if (kCluster == 1) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    } else {
        asm volatile(
            "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier),
            "r"(lane)
            : "memory");
    }
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int byte, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* map, int byte, int row,
                                             u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << kCluster) - 1))
        : "memory");
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- wgmma ----

// A tile of rows of 128 bytes, swizzled by TMA: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Names the accumulators, so that the compiler moves no use of them across.
__device__ __forceinline__ void hold(Sum (&d)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+" SUM(d[i])::"memory");
}

template <int kInFlight>
__device__ __forceinline__ void finish(Sum (&d)[kRegisters]) {
    hold(d);
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
    hold(d);
}

// ---- tiles ----

struct Tile {
    int row, column;
};

// Neighbouring clusters work on a square patch of C, whose operands then stay in the cache.
__device__ __forceinline__ Tile tile_of(int index, int tall, int wide) {
    const int group = index / (kGroup * wide), within = index % (kGroup * wide);
    const int first = group * kGroup, height = min(kGroup, tall - first);
    return {first + within % height, within / height};
}

// ---- epilogue ----

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// v * 2^e in two steps, since 2^e itself may not be a float. Sums of FP8 products are multiples of
// 2^-32, so that the first step is exact.
__device__ __forceinline__ float scaled(float v, int e) {
    e = min(max(e, -252), 254);
    const int half = e >> 1;
    return v * power_of_two(half) * power_of_two(e - half);
}

__device__ __forceinline__ float activate(float v) {
#if ACTIVATION == 1
    return v > 0.0f || v != v ? v : 0.0f;
#elif ACTIVATION == 2
    return v / (1.0f + __expf(-v));
#elif ACTIVATION == 3
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return v / (1.0f + __expf(-2.0f * inner));
#else
    return v;
#endif
}

#if OUT_BF16
typedef u16 Out;
#else
typedef float Out;
#endif
constexpr int kChunk = 128 / sizeof(Out);  // columns of a patch

__device__ __forceinline__ float widen(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }
__device__ __forceinline__ float widen(float v) { return v; }

// Where a patch holds a 16-byte unit: TMA's swizzle of 128 bytes.
__device__ __forceinline__ u32 place(int row, int unit) {
    return static_cast<u32>(row * 128 + ((unit ^ (row & 7)) << 4));
}

// Begins to copy the exponents that a warpgroup's part of a tile needs.
__device__ __forceinline__ void fetch_exponents(int* table, const Epilogue& e, int row0, int column0) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = thread; i < kTable; i += 128) {
        const bool row = i < 64;
        const int* from = row ? e.row_exponent : e.column_exponent;
        const int at = row ? min(row0 + i, e.rows - 1) * e.row_step
                           : min(column0 + i - 64, e.columns - 1) * e.column_step;
        if (from)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(table + i)),
                         "l"(from + at)
                         : "memory");
        else
            table[i] = 0;
    }
}

__device__ __forceinline__ void await_exponents(int warpgroup) {
    asm volatile("cp.async.wait_all;\nbar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// What multiplies a sum: two powers of two for all of C, or exponents of its own row and column.
struct Factors {
    float first, second;
    const int* table;
};

// A warp writes its 16 rows of a tile. kNear: the exponents' powers and their products are floats.
template <bool kNear>
__device__ __forceinline__ void write_rows(const Sum (&sum)[kRegisters], const Epilogue& e,
                                           const TensorMap* map, const Factors& factors, int row0,
                                           int column0, u8* patches, u32& turn, int lane) {
    const int row = lane / 4, pair = lane % 4;
    const int* columns = factors.table + 64;
    int row_exponent[2];
    float row_factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        row_exponent[h] = VECTORS ? factors.table[threadIdx.x / 32 % 4 * 16 + row + 8 * h] : 0;
        row_factor[h] = VECTORS ? power_of_two(kNear ? row_exponent[h] : 0) : factors.first;
    }
    u32 largest = 0;
#pragma unroll
    for (int from = 0; from < kTileN; from += kChunk) {
        const int start = min(from, kTileN - kChunk);  // the last patch may write columns again
        u8* patch = patches + turn * kPatch;
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPatches - 1) : "memory");
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kChunk / 8; ++j) {
            const int within = start + 8 * j + 2 * pair;
            float v[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int exponent = VECTORS ? columns[within + c] : 0;
                const float factor = VECTORS ? power_of_two(kNear ? exponent : 0) : factors.second;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float raw = static_cast<float>(sum[(start / 8 + j) * 4 + 2 * h + c]);
                    float y = kNear ? raw * row_factor[h] * factor
                                    : scaled(raw, row_exponent[h] + exponent);
#if EXTRAS
                    const int r = row0 + row + 8 * h, k = column0 + within + c;
                    if (e.bias) y += e.bias[min(k, e.columns - 1)];
                    y = activate(y);
                    if (r < e.rows && k < e.columns) {
                        if (e.residual)
                            y += widen(static_cast<const Out*>(e.residual)[r * e.residual_pitch + k]);
                        // NaN stays: comparisons as integers order it above infinity
                        largest = max(largest, __float_as_uint(y) & 0x7FFFFFFFu);
                    }
#endif
                    v[2 * h + c] = y;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = row + 8 * h;
#if OUT_BF16
                u32 packed;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                    : "=r"(packed)
                    : "f"(v[2 * h + 1]), "f"(v[2 * h]));
                *reinterpret_cast<u32*>(patch + place(r, j) + 4 * pair) = packed;
#else
                *reinterpret_cast<float2*>(patch + place(r, 2 * j + pair / 2) + 8 * (pair % 2)) =
                    float2{v[2 * h], v[2 * h + 1]};
#endif
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            if (row0 < e.rows && column0 + start < e.columns)
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                             "r"(column0 + start), "r"(row0), "r"(shared_address(patch))
                             : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        turn = turn + 1 == kPatches ? 0 : turn + 1;
    }
#if EXTRAS
    if (e.amax) {
        const u32 top = __reduce_max_sync(~0u, largest);
        if (lane == 0) atomicMax(e.amax, top);
    }
#endif
}

__device__ __forceinline__ bool are_near(const int* table, int lane) {
    bool near = true;
#pragma unroll
    for (int i = lane; i < kTable; i += 32) near = near && abs(table[i]) <= 60;
    return __all_sync(~0u, near);
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(384, 1)
gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
     const __grid_constant__ TensorMap c_map, const __grid_constant__ Epilogue e) {
    if (e.flag_wanted >= 0) {
        const u32 flag = (e.row_flag ? *e.row_flag : 0) | (e.column_flag ? *e.column_flag : 0);
        if ((flag != 0) != (e.flag_wanted != 0)) return;
    }
    if (e.runs && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(e.runs, 1u);
    extern __shared__ u8 raw_memory[];
    u8* memory = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    const u32 base = shared_address(memory);
    u8* patches = memory + kStages * kStage;
    int* tables = reinterpret_cast<int*>(patches + kWarps * kPatches * kPatch);
    const u32 full = shared_address(tables + (VECTORS ? 4 * kTable : 0)), empty = full + 8 * kStages;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int rank = kCluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, kWarps * kCluster);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (kCluster > 1)
        cluster_sync();
    else
        __syncthreads();

    const int tall = (e.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
    const int wide = (e.columns + kTileN - 1) / kTileN;
    const int tiles = tall * wide, step = gridDim.x / kCluster;
    int stage = 0;
    u32 parity = 0;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 256) {
            for (int index = blockIdx.x / kCluster; index < tiles; index += step) {
                const Tile tile = tile_of(index, tall, wide);
                const int row = (tile.row * kCluster + rank) * kTileM, column = tile.column * kTileN;
                for (int k = 0; k < e.stages_of_k; ++k) {
                    wait(empty + 8 * stage, parity ^ 1);
                    const u32 to = base + stage * kStage, barrier = full + 8 * stage;
                    expect_bytes(barrier, kStage);
                    load(to, &a_map, k * kRowBytes, row, barrier);
                    if (kCluster == 1) {
                        load(to + kABytes, &b_map, k * kRowBytes, column, barrier);
                    } else {
                        constexpr int kPart = kTileN / kCluster;
                        load_for_all(to + kABytes + rank * kPart * kRowBytes, &b_map, k * kRowBytes,
                                     column + rank * kPart, barrier);
                    }
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int warp = threadIdx.x / 32;
        u8* patch = patches + warp * kPatches * kPatch;
        u32 turn = 0;
        int* table = tables + warpgroup * 2 * kTable;
        Factors factors = {1.0f, 1.0f, table};
        if (!VECTORS) {
            int exponent = (e.row_exponent ? *e.row_exponent : 0) + (e.column_exponent ? *e.column_exponent : 0);
            exponent = min(max(exponent, -252), 254);
            factors.first = power_of_two(exponent >> 1);
            factors.second = power_of_two(exponent - (exponent >> 1));
        }
        bool behind = SKEW && warpgroup == 1;  // the second warpgroup starts SKEW stages late
        bool ahead = SKEW && warpgroup == 0;
        for (int index = blockIdx.x / kCluster; index < tiles; index += step) {
            const Tile tile = tile_of(index, tall, wide);
            const int row = (tile.row * kCluster + rank) * kTileM + warpgroup * 64;
            const int column = tile.column * kTileN;
            if (VECTORS) fetch_exponents(table, e, row, column);
            if (behind) {
                asm volatile("bar.sync 3, 256;" ::: "memory");
                behind = false;
            }
            Sum part[kRegisters];
#if PROMOTE
            float sum[kRegisters];
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) sum[i] = 0.0f;
#endif
            for (int k = 0; k < e.stages_of_k;) {
                const int end = PROMOTE ? min(k + PROMOTE, e.stages_of_k) : e.stages_of_k;
                int last = -1;
                for (int more = 0; k < end; ++k) {
                    wait(full + 8 * stage, parity);
                    const u64 a = descriptor(base + stage * kStage + warpgroup * 64 * kRowBytes);
                    const u64 b = descriptor(base + stage * kStage + kABytes);
                    hold(part);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        wgmma(part, a + 2 * i, b + 2 * i, more);
                        more = 1;
                    }
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    if (ahead && (k + 1 == SKEW || k + 1 == e.stages_of_k)) {
                        asm volatile("bar.arrive 3, 256;" ::: "memory");
                        ahead = false;
                    }
                    finish<1>(part);
                    if (last >= 0) release(empty + 8 * last, lane);
                    last = stage;
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
                finish<0>(part);
                release(empty + 8 * last, lane);
#if PROMOTE
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) sum[i] += part[i];
#endif
            }
#if PROMOTE
#define TOTAL sum
#else
#define TOTAL part
#endif
            const int first = row + warp % 4 * 16;
#if VECTORS
            await_exponents(warpgroup);
            factors.table = table;
            if (are_near(table, lane))
                write_rows<true>(TOTAL, e, &c_map, factors, first, column, patch, turn, lane);
            else
                write_rows<false>(TOTAL, e, &c_map, factors, first, column, patch, turn, lane);
            // The other table next: slower warps may still read this one.
            table = table == tables + warpgroup * 2 * kTable ? table + kTable : table - kTable;
#else
            write_rows<true>(TOTAL, e, &c_map, factors, first, column, patch, turn, lane);
#endif
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    // A block's shared memory must stay while its neighbour may still write to it.
    if (kCluster > 1) cluster_sync();
}
