// The epilogue of gemm_sm90.cu: scales a tile's sums, adds bias and residual, applies the
// activation, and stores the result by TMA. Configured by the GEMM's macros.

DEVICE float power_of_two(int exponent) {
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// v * 2^e in two steps, because 2^e alone may not be a float. The first step is exact: sums of FP8
// products are multiples of 2^-32.
DEVICE float scaled(float v, int e) {
    e = min(max(e, -252), 254);
    const int half = e >> 1;
    return v * power_of_two(half) * power_of_two(e - half);
}

DEVICE float activate(float v) {
#if GEMM_ACTIVATION == 1
    return v > 0.0f || v != v ? v : 0.0f;
#elif GEMM_ACTIVATION == 2
    return v / (1.0f + __expf(-v));
#elif GEMM_ACTIVATION == 3
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return v / (1.0f + __expf(-2.0f * inner));
#elif GEMM_ACTIVATION == 4
    return 0.5f * v * (1.0f + erff(v * 0.7071067811865476f));
#else
    return v;
#endif
}

#if GEMM_OUT_BF16
typedef u16 Out;
#else
typedef float Out;
#endif
constexpr int kEpilogueTileN =
    128 / sizeof(Out);  // columns of an epilogue tile; GEMM_C_TRANSPOSED: rows of C in 128 bytes
constexpr int kEpiloguePhases = GEMM_REQUANTIZED
                                    ? 2 * kEpilogueTiles
                                    : kEpilogueTiles;  // the tile index and its barrier parity

#if GEMM_REQUANTIZED
#include "gemm/requantize.cuh"
#endif

DEVICE float widen(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }
DEVICE float widen(float v) { return v; }

// Starts copying one number per row and per column to a warpgroup's table.
DEVICE void fetch_table(int* table, const int* rows, const int* columns, int row_step,
    int column_step, int none, int row0, int column0, int end_row, int end_column) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = thread; i < kTableEntries; i += 128) {
        const bool row = i < 64;
        const int* from = row ? rows : columns;
        const int at = row ? min(row0 + i, end_row - 1) * row_step
                           : min(column0 + i - 64, end_column - 1) * column_step;
        if (from)
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(table + i)),
                "l"(from + at)
                : "memory");
        else table[i] = none;
    }
}

// `shift`: the first column of the tile's group.
DEVICE void fetch_epilogue_tables(
    int* table, const Epilogue& e, int row0, int column0, int end_of_rows, int shift) {
    constexpr int kNone = GEMM_VECTORS == 2 ? 0x3F800000 : 0;  // a factor of 1, or an exponent of 0
    const int end = shift + e.columns;
    column0 += shift;
    fetch_table(table, e.row_exponent, e.column_exponent, e.row_step, e.column_step, kNone, row0,
        column0, end_of_rows, end);
#if GEMM_ZERO_POINTS
    fetch_table(
        table + kTableEntries, e.row_zero, e.column_zero, 1, 1, 0, row0, column0, end_of_rows, end);
    fetch_table(table + 2 * kTableEntries, e.row_rest, e.column_sum, 1, 1, 0, row0, column0,
        end_of_rows, end);
#endif
}

DEVICE void await_warpgroup(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}
DEVICE void await_epilogue_tables(int warpgroup) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    await_warpgroup(warpgroup);
}

// Stores 16 rows of 128 bytes to C.
DEVICE void tma_store_rows(const TensorMap* map, int column, int row, const u8* from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(column), "r"(row), "r"(shared_address(from))
        : "memory");
}

// What multiplies a sum: two powers of two for all of C, or table entries per row and column.
struct Factors {
    float first, second;
    const int* table;
};

#if GEMM_C_TRANSPOSED
static_assert(
    !(GEMM_EXTRAS || GEMM_GROUPED || GEMM_REQUANTIZED || GEMM_ZERO_POINTS), "C goes down as it is");
// A warpgroup shares its epilogue tiles. A tile holds kEpilogueTileN rows of memory, in one or two
// TMA boxes of 128 bytes, which are the warpgroup's 64 rows of C.
DEVICE u32 transposed_offset(int column, int row) {
    return row / kEpilogueTileN * (kEpilogueTileN * 128) +
           swizzled_offset(column, row % kEpilogueTileN / 4) + row % 4 * 4;
}
DEVICE void store_transposed(
    u8* epilogue_tile, int column, int row, const u32 (&pairs)[2], int lane) {
    const u32 to =
        shared_address(epilogue_tile + swizzled_offset(column + lane % 8, row / 8 + lane / 8 % 2));
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
        "r"(pairs[0]), "r"(pairs[1])
        : "memory");
}
#endif

// Stores an epilogue tile to C, from column `start` of the tile on.
DEVICE void store_tile(u8* epilogue_tile, const Epilogue& e, const TensorMap* map, int row0,
    int end_of_rows, int column0, int start, int lane) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#if GEMM_C_TRANSPOSED
    await_warpgroup(threadIdx.x / 128);  // then each warp stores 16 of the tile's rows
    const int warp_row = threadIdx.x / 32 % 4 * 16;
    const int memory_row = warp_row % kEpilogueTileN,
              first = row0 - warp_row + warp_row / kEpilogueTileN * kEpilogueTileN;
    if (lane == 0) {
        if (first < end_of_rows && (GEMM_SPLIT_K || column0 + start + memory_row < e.columns))
            tma_store_rows(
                map, first, column0 + start + memory_row, epilogue_tile + warp_row * 128);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
#else
    __syncwarp();
    if (lane == 0) {
        if (row0 + (GEMM_GROUPED ? 15 : 0) < end_of_rows && column0 + start < e.columns)
            tma_store_rows(map, column0 + start, row0, epilogue_tile);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
#if GEMM_GROUPED
    // The next group's rows follow, so the rest of this group is written value by value.
    if (row0 < end_of_rows && row0 + 16 > end_of_rows) {
        for (int i = lane; i < (end_of_rows - row0) * kEpilogueTileN; i += 32) {
            const int r = i / kEpilogueTileN, k = i % kEpilogueTileN,
                      byte = k * static_cast<int>(sizeof(Out));
            if (column0 + start + k < e.columns)
                static_cast<Out*>(e.out)[(row0 + r) * e.out_pitch + column0 + start + k] =
                    *reinterpret_cast<const Out*>(
                        epilogue_tile + swizzled_offset(r, byte / 16) + byte % 16);
        }
        __syncwarp();
    }
#endif
#endif
}

// Writes a warp's 16 rows of a tile. kSmallExponents: powers of two and their products are floats.
template <bool kSmallExponents>
DEVICE void write_rows(const Sum (&sum)[kRegisters], const Epilogue& e, const TensorMap* map,
    const Factors& factors, int row0, int end_of_rows, int column0, int group, u8* epilogue_tiles,
    u32 handoff, u32& epilogue_phase, int lane) {
    const int row = lane / 4, pair = lane % 4;
#if GEMM_C_TRANSPOSED
    const int warp_row = threadIdx.x / 32 % 4 * 16;  // the warp's first row within its warpgroup
#endif
    const int* columns = factors.table + 64;
    int row_exponent[2];
    float row_factor[2];
#if GEMM_ZERO_POINTS
    int row_zero[2], row_rest[2];
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = threadIdx.x / 32 % 4 * 16 + row + 8 * h;
        row_exponent[h] = GEMM_VECTORS ? factors.table[at] : 0;
        row_factor[h] = GEMM_VECTORS == 2 ? __int_as_float(row_exponent[h]) * kDecodeFactor
                        : GEMM_VECTORS    ? power_of_two(kSmallExponents ? row_exponent[h] : 0)
                                          : factors.first;
#if GEMM_ZERO_POINTS
        row_zero[h] = factors.table[kTableEntries + at],
        row_rest[h] = factors.table[2 * kTableEntries + at];
#endif
    }
    u32 largest = 0;
#pragma unroll
    for (int from = 0; from < kTileN; from += kEpilogueTileN) {
        const int start =
            min(from, kTileN - kEpilogueTileN);  // the last tile may overlap the one before
        u8* epilogue_tile =
            epilogue_tiles + epilogue_phase % kEpilogueTiles *
                                 (GEMM_C_TRANSPOSED ? 4 * kEpilogueTileBytes : kEpilogueTileBytes);
#if GEMM_REQUANTIZED
        const u32 barrier = handoff + 16 * (epilogue_phase % kEpilogueTiles);
        barrier_wait(barrier + 8, epilogue_phase / kEpilogueTiles ^ 1);
#else
        if (lane == 0)
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kEpilogueTiles - 1) : "memory");
#if GEMM_C_TRANSPOSED
        await_warpgroup(threadIdx.x / 128);
#else
        __syncwarp();
#endif
#endif
#pragma unroll
        for (int j = 0; j < kEpilogueTileN / 8; ++j) {
            const int within = start + 8 * j + 2 * pair;
            float v[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int exponent = GEMM_VECTORS ? columns[within + c] : 0;
                const float factor = GEMM_VECTORS == 2 ? __int_as_float(exponent)
                                     : GEMM_VECTORS ? power_of_two(kSmallExponents ? exponent : 0)
                                                    : factors.second;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#if GEMM_ZERO_POINTS
                    const i64 taken =
                        static_cast<i64>(row_zero[h]) * columns[2 * kTableEntries + within + c] +
                        static_cast<i64>(row_rest[h]) * columns[kTableEntries + within + c];
                    const float raw = __ll2float_rn(sum[(start / 8 + j) * 4 + 2 * h + c] - taken);
#else
                    const float raw = static_cast<float>(sum[(start / 8 + j) * 4 + 2 * h + c]);
#endif
                    float y = kSmallExponents ? raw * row_factor[h] * factor
                                              : scaled(raw, row_exponent[h] + exponent);
#if GEMM_EXTRAS
                    const int r = row0 + row + 8 * h, k = column0 + within + c;
                    if (e.bias) y += e.bias[group * e.columns + min(k, e.columns - 1)];
                    y = activate(y);
                    if (r < end_of_rows && k < e.columns) {
                        if (e.residual)
                            y += widen(
                                static_cast<const Out*>(e.residual)[r * e.residual_pitch + k]);
                        // NaN is kept: as an integer it is above infinity
                        largest = max(largest, __float_as_uint(y) & 0x7FFFFFFFu);
                    }
#endif
                    v[2 * h + c] = y;
                }
            }
#if GEMM_C_TRANSPOSED && GEMM_OUT_BF16
            const u32 packed[2] = {to_bf16x2(v[1], v[0]), to_bf16x2(v[3], v[2])};
            store_transposed(epilogue_tile, 8 * j, warp_row, packed, lane);
#elif GEMM_C_TRANSPOSED
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<float*>(
                    epilogue_tile +
                    transposed_offset(8 * j + 2 * pair + i % 2, warp_row + row + i / 2 * 8)) = v[i];
#else
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = row + 8 * h;
#if GEMM_OUT_BF16
                *reinterpret_cast<u32*>(epilogue_tile + swizzled_offset(r, j) + 4 * pair) =
                    to_bf16x2(v[2 * h + 1], v[2 * h]);
#else
                *reinterpret_cast<float2*>(epilogue_tile + swizzled_offset(r, 2 * j + pair / 2) +
                                           8 * (pair % 2)) = float2{v[2 * h], v[2 * h + 1]};
#endif
            }
#endif
        }
#if GEMM_REQUANTIZED
        barrier_arrive(barrier);
#else
        store_tile(epilogue_tile, e, map, row0, end_of_rows, column0, start, lane);
#endif
        epilogue_phase = epilogue_phase + 1 == kEpiloguePhases ? 0 : epilogue_phase + 1;
    }
#if GEMM_EXTRAS
    if (e.amax) {
        const u32 top = __reduce_max_sync(~0u, largest);
        if (lane == 0) atomicMax(e.amax, top);
    }
#endif
}

DEVICE bool exponents_are_small(const int* table, int lane) {
    bool small = true;
#pragma unroll
    for (int i = lane; i < kTableEntries; i += 32) small = small && abs(table[i]) <= 60;
    return __all_sync(~0u, small);
}
