// Fused block quantizer: values -> packed codes and scales, byte for byte as extensor/quant does it.
//
// A thread owns a chunk, 16 neighbouring positions of one block: one Philox call at 8 random bits,
// whole 32-bit words of codes at 4, 6 and 8 bits. `quantize_rows` blocks along the last axis
// (contiguous), `quantize_columns` along an axis before it. Both read the values once.
//
// No headers. Everything about the format, the scale rule and the rounding comes as macros (see
// quantize.py), so that each cubin holds one straight path. Compiled with --fmad=false: every float
// operation here decides bits.

#include "input.cuh"
#include "hadamard.cuh"
#include "scale.cuh"
#include "search.cuh"
#include "encode.cuh"
#include "pairs.cuh"

// ---- totals ----

#if HADAMARD
#define SIGNS u32 sign0, u32 sign1, u32 sign2, u32 sign3,
#else
#define SIGNS
#endif

// Elements coded along the axis.
__device__ __forceinline__ i64 coded_length(i64 length) {
#if HADAMARD
    return (length + HADAMARD - 1) / HADAMARD * HADAMARD;
#else
    return length;
#endif
}

__device__ __forceinline__ void add_counts(const Tally& tally, u64* counters) {
#if STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        const u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
        u64* slot = counters + warp % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#endif
}

// The largest finite element (NVFP4), or the largest maximum of the blocks without NaN and Inf.
__device__ __forceinline__ void add_maximum(u32 mine, u32* maximum) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(maximum))
        atomicMax(maximum, most);
}

#if NEEDS_TENSOR
// One thread, once per tensor: what its largest magnitude means for every block.
extern "C" __global__ void tensor_scales(const u32* maximum, Tensor* tensor) {
    const float amax = float_of(*maximum);
#if UE4M3
    float encode = fminf(__fdiv_rn(TENSOR_TARGET, amax), kFloatMax);
    if (amax == 0 || encode == 0) encode = 1;
    tensor->scale = __fdiv_rn(1.0f, encode);
    tensor->encode = RULE == 6 ? encode : __fmul_rn(encode, __fdiv_rn(1.0f, 6.0f));
    tensor->lowest = 0;
    tensor->amax = amax;
#else
    tensor->scale = tensor->encode = tensor->amax = 1;
    tensor->lowest = amax > 0 ? exponent_byte(bits_of(amax)) - WINDOW : 0;
#endif
}
#endif

#if !DOWN && ROWS == 1
// ---- blocks along rows: ITEMS chunks per thread ----

// x (rows, length) -> codes, scales or values. Whole: length is a multiple of the block, and x is
// aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
quantize_rows(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
              float* __restrict__ values, const Tensor* __restrict__ tensor_of,
              u32* __restrict__ maximum, u64* __restrict__ counters, u32 key0, u32 key1, u32 high0,
              u32 high1, SIGNS i64 rows, i64 length) {
    const Stream stream = {key0, key1, high0, high1};
#if HADAMARD
    const Signs signs = {sign0, sign1, sign2, sign3};
#endif
    const i64 coded = coded_length(length);
    const i64 per_row = (coded + BLOCK - 1) / BLOCK * kParts, total = rows * per_row;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * ITEMS) + threadIdx.x;
#if NEEDS_TENSOR && OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    Tally tally = {0, 0};
    u32 raw[ITEMS][sizeof(Raw) * kChunk / 4];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const i64 chunk = first + item * kThreads;
#if WHOLE
        const uint4* from = reinterpret_cast<const uint4*>(x + chunk * kChunk);
#pragma unroll
        for (int v = 0; v < kChunk / kPerVector; ++v) {
            const uint4 four = chunk < total ? __ldg(from + v) : uint4{0, 0, 0, 0};
            raw[item][4 * v] = four.x, raw[item][4 * v + 1] = four.y;
            raw[item][4 * v + 2] = four.z, raw[item][4 * v + 3] = four.w;
        }
#else
        const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
        const i64 left = chunk < total ? length - start : 0;
        const Raw* from = x + row * length + start;
#pragma unroll
        for (int k = 0; k < kChunk; k += 4 / sizeof(Raw)) {
            u32 word = k < left ? from[k] : 0;
            if (sizeof(Raw) == 2 && k + 1 < left) word |= static_cast<u32>(from[k + 1]) << 16;
            raw[item][k * sizeof(Raw) / 4] = word;
        }
#endif
    }
    u32 most = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const i64 chunk = first + item * kThreads;
        const u32 block = static_cast<u32>(chunk / kParts), part = static_cast<u32>(chunk % kParts);
#if PAIRS
        const u32 pair = pair_maximum<8, 1>(raw[item]);
        const u32 amax = across_lanes(larger(low_float(pair), high_float(pair)));
        const Scale s = block_scale(amax, tensor);
        u32 packed[kWords];
        encode_pairs(raw[item], s, is_far(amax, s), packed, tally);
#else
        float v[1][kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[0][k] = element(raw[item], k);
#if HADAMARD
        turn_lanes(v[0], signs, static_cast<u32>(chunk % kTurned));
#endif
#endif
#if OUT == 2
#if UE4M3
        most = larger(most, finite_maximum(v[0]));
#else
        const u32 amax = across_lanes(chunk_maximum(v[0]));
        most = larger(most, amax < kExponent ? amax : 0);
#endif
#else
#if !PAIRS
        const u32 amax = across_lanes(chunk_maximum(v[0]));
#if SEARCH
        const Scale s = best_scale<1, 1, 1>(v, 0, amax, tensor);
#else
        const Scale s = block_scale(amax, tensor);
#endif
        u32 packed[kWords];
        encode(v[0], s, is_far(amax, s), tensor, block, part, stream, packed, tally);
#endif
        if (chunk < total) {
#if OUT == 0
            u32* to = reinterpret_cast<u32*>(codes) + chunk * kWords;
            if (kWords == 4)
                *reinterpret_cast<uint4*>(to) = uint4{packed[0], packed[1], packed[2 % kWords], packed[3 % kWords]};
            else if (kWords == 2)
                *reinterpret_cast<uint2*>(to) = uint2{packed[0], packed[1]};
            else
#pragma unroll
                for (int w = 0; w < kWords; ++w) to[w] = packed[w];
            if (part == 0) scales[block] = static_cast<u8>(s.stored);
#elif WHOLE
            float4* to = reinterpret_cast<float4*>(values + chunk * kChunk);
#pragma unroll
            for (int k = 0; k < kChunk; k += 4) to[k / 4] = float4{v[0][k], v[0][k + 1], v[0][k + 2], v[0][k + 3]};
#else
            const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
#pragma unroll
            for (int k = 0; k < kChunk; ++k)
                if (start + k < coded) values[row * coded + start + k] = v[0][k];
#endif
        }
#endif
    }
#if OUT == 2
    add_maximum(most, maximum);
#else
    add_counts(tally, counters);
#endif
}

#elif !DOWN
// ---- tiles of several rows, blocked along rows: a chunk per thread ----

constexpr int kWarps = ROWS / 16;  // warps of a tile's rows; each holds 16 rows of two chunks

// x (images, rows, length), tiles of (ROWS, BLOCK), blocks numbered along the rows.
extern "C" __global__ void __launch_bounds__(kThreads)
quantize_tiles(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
               float* __restrict__ values, const Tensor* __restrict__ tensor_of,
               u32* __restrict__ maximum, u64* __restrict__ counters, u32 key0, u32 key1, u32 high0,
               u32 high1, i64 images, i64 rows, i64 length) {
    const Stream stream = {key0, key1, high0, high1};
    const i64 across = (length + BLOCK - 1) / BLOCK, strips = (across * kParts + 1) / 2;
    const i64 bands = (rows + ROWS - 1) / ROWS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 place = static_cast<i64>(blockIdx.x) * (kThreads / 32 / kWarps) + warp / kWarps;
    const i64 band = place / strips, start = (place % strips * 2 + lane % 2) * kChunk;
    const int inner = warp % kWarps * 16 + lane / 2;  // row of the tile
    const i64 row = band % bands * ROWS + inner, line = band / bands * rows + row;
    const bool inside = band < images * bands && start < across * BLOCK;
    const bool real = inside && row < rows;
#if NEEDS_TENSOR && OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    float v[1][kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        v[0][k] = real && start + k < length ? widen(x[line * length + start + k]) : 0.0f;
    u32 amax = across_lanes(chunk_maximum(v[0]));
#pragma unroll
    for (int step = 2; step < 32; step *= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, step));
#if ROWS > 16
    __shared__ u32 shared[kThreads / 32][2];
    if (lane < 2) shared[warp][lane] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = larger(amax, shared[warp / kWarps * kWarps + w][lane % 2]);
#endif
#if OUT == 2
    add_maximum(UE4M3 ? finite_maximum(v[0]) : amax < kExponent ? amax : 0, maximum);
#else
    Tally tally = {0, 0};
#if SEARCH
    const Scale s = best_scale<1, ROWS, 2>(v, lane % 2, amax, tensor);
#else
    const Scale s = block_scale(amax, tensor);
#endif
    const i64 block = band * across + start / BLOCK;
    const u32 part = static_cast<u32>(inner * kParts + start % BLOCK / kChunk);
    u32 packed[kWords];
    encode(v[0], s, is_far(amax, s), tensor, static_cast<u32>(block), part, stream, packed, tally);
    if (real) {
#if OUT == 0
        u32* to = reinterpret_cast<u32*>(codes) + (line * across * kParts + start / kChunk) * kWords;
#pragma unroll
        for (int w = 0; w < kWords; ++w) to[w] = packed[w];
#else
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (start + k < length) values[line * length + start + k] = v[0][k];
#endif
    }
#if OUT == 0
    if (inside && part == 0) scales[block] = static_cast<u8>(s.stored);
#endif
    add_counts(tally, counters);
#endif
}

#else
// ---- blocks down columns: COLUMNS chunks per thread ----

constexpr int kPanel = kThreads / 32 * kChunk;  // positions of a thread block: 128
constexpr int kPairs = COLUMNS * sizeof(Raw) / 4;  // 32-bit words of a thread's columns

// x (outer, length, inner) blocked along `length`. A warp holds 16 rows of 32 * COLUMNS columns; the
// warps of a block exchange maxima. Whole: length is a multiple of 128, inner of COLUMNS, and x is
// aligned to a thread's columns.
extern "C" __global__ void __launch_bounds__(kThreads, (IN == 0 && WORDS) || HADAMARD || SEARCH || OUT == 1 ? 1 : 2)
quantize_columns(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
                 float* __restrict__ values, const Tensor* __restrict__ tensor_of,
                 u32* __restrict__ maximum, u64* __restrict__ counters, u32 key0, u32 key1,
                 u32 high0, u32 high1, SIGNS i64 outer, i64 length, i64 inner) {
    const Stream stream = {key0, key1, high0, high1};
    const i64 across = (inner + 32 * COLUMNS - 1) / (32 * COLUMNS);
#if HADAMARD
    const Signs signs = {sign0, sign1, sign2, sign3};
#endif
    const i64 coded = coded_length(length);
    const i64 tiles = (coded + BLOCK - 1) / BLOCK, panels = (tiles * BLOCK + kPanel - 1) / kPanel;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 image = blockIdx.x / (across * panels), rest = blockIdx.x % (across * panels);
    const i64 column = (rest % across * 32 + lane) * COLUMNS;
    const i64 start = rest / across * kPanel + warp * kChunk;  // first position of the chunk
    const i64 tile = start / BLOCK;
#if NEEDS_TENSOR && OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0, 1};
#endif
    u32 raw[kChunk][kPairs];
    const Raw* from = x + (image * length + start) * inner + column;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
#if WHOLE
        uint2 two = {0, 0};
        if (column < inner) {
            if (kPairs == 2)
                two = __ldg(reinterpret_cast<const uint2*>(from + k * inner));
            else
                two.x = __ldg(reinterpret_cast<const u32*>(from + k * inner));
        }
        raw[k][0] = two.x, raw[k][kPairs - 1] = kPairs == 2 ? two.y : two.x;
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4 / sizeof(Raw)) {
            const bool real = start + k < length;
            u32 word = real && column + c < inner ? from[k * inner + c] : 0;
            if (sizeof(Raw) == 2 && real && column + c + 1 < inner)
                word |= static_cast<u32>(from[k * inner + c + 1]) << 16;
            raw[k][c * sizeof(Raw) / 4] = word;
        }
#endif
    }
    Tally tally = {0, 0};
#if HADAMARD || SEARCH
    float kept[COLUMNS][kChunk];  // as float, for what needs them more than once
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) kept[c][k] = element(raw[k], c);
#if HADAMARD
        turn_warps(kept[c], signs, warp, lane);
#endif
    }
#define VALUE(k, c) kept[c][k]
#else
#define VALUE(k, c) element(raw[k], c)
#endif
    u32 amax[COLUMNS];
    u32 most = 0;
#if PAIRS
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const u32 pair = pair_maximum<kChunk, kPairs>(&raw[0][p]);
        amax[2 * p] = low_float(pair), amax[2 * p + 1] = high_float(pair);
    }
#else
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = VALUE(k, c);
        amax[c] = chunk_maximum(v);
        if (OUT == 2 && UE4M3) most = larger(most, finite_maximum(v));
    }
#endif
#if BLOCK > 16
    __shared__ u32 shared[kThreads / 32][COLUMNS][32];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) shared[warp][c][lane] = amax[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
            amax[c] = larger(amax[c], shared[warp / kParts * kParts + p][c][lane]);
#endif
#if ROWS > 1
    constexpr int kLanes = ROWS / COLUMNS;  // lanes of a tile's rows, which lie side by side here
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) amax[0] = larger(amax[0], amax[c]);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
        amax[0] = larger(amax[0], __shfl_xor_sync(~0u, amax[0], step));
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) amax[c] = amax[0];
#endif
#if OUT == 2
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (!UE4M3) most = larger(most, amax[c] < kExponent ? amax[c] : 0);
    add_maximum(most, maximum);
#else
    const u32 part = static_cast<u32>(start % BLOCK) / kChunk;
    const i64 blocks = (image * tiles + tile) * ((inner + ROWS - 1) / ROWS) + column / ROWS;
#if SEARCH && ROWS > 1
    const Scale s = best_scale<COLUMNS, ROWS, 1>(kept, lane / kLanes * kLanes, amax[0], tensor);
#endif
    const bool inside = tile < tiles;  // else: warps beyond the last block
#if OUT == 0
    u32 stored[COLUMNS];
#endif
#if PAIRS
    u32 nibbles[kPairs][4];  // four rows each: the first column in the low half
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const Scale a = block_scale(amax[2 * p], tensor), b = block_scale(amax[2 * p + 1], tensor);
        stored[2 * p] = a.stored, stored[2 * p + 1] = b.stored;
        const bool far = is_far(amax[2 * p], a) || is_far(amax[2 * p + 1], b);
        const u32 scale = bits_of(a.apply) >> 16 | bits_of(b.apply);
        const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 n = 0, signs = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 x = raw[4 * q + k][p];
                n |= round_pair(x, scale, far) << (4 * k);
                signs |= x >> (12 - 4 * k) & (0x00080008u << (4 * k));
            }
            nibbles[p][q] = (saturate(n, live, tally) | signs) & live;
        }
        forget_zeros<kChunk, kPairs>(&raw[0][p], live, tally);
    }
#else
    u32 packed[COLUMNS][kWords];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = VALUE(k, c);
#if SEARCH && ROWS == 1
        const Scale s = best_scale<1, 1, 1>(reinterpret_cast<const float(&)[1][kChunk]>(kept[c]), 0,
                                            amax[c], tensor);
#elif !SEARCH
        const Scale s = block_scale(amax[c], tensor);
#endif
#if OUT == 0
        stored[c] = s.stored;
#endif
        const u32 block = static_cast<u32>(ROWS > 1 ? blocks : blocks + c);
        const u32 place = ROWS > 1 ? static_cast<u32>((column + c) % ROWS) * kParts + part : part;
        encode(v, s, is_far(amax[c], s), tensor, block, place, stream, packed[c], tally);
#if OUT == 1
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (start + k < coded && column + c < inner)
                values[(image * coded + start + k) * inner + column + c] = v[k];
#endif
    }
#endif
#if OUT == 0
    // Byte b of the chunk's words goes to byte row b: a small transpose in registers.
    const i64 row = (image * tiles + tile) * (BLOCK * BITS / 8) + part * (kWords * 4);
#pragma unroll
    for (int b = 0; b < kWords * 4; ++b) {
        u8* to = codes + (row + b) * inner + column;
#if PAIRS
        const u32 octets = __byte_perm(nibbles[0][b / 2], nibbles[kPairs - 1][b / 2],
                                       0x6420 + b % 2 * 0x1111);
#if WHOLE
        if (column < inner) *reinterpret_cast<u32*>(to) = octets;
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (inside && column + c < inner) to[c] = static_cast<u8>(octets >> (8 * c));
#endif
#elif WHOLE
        u32 octets = __byte_perm(packed[0][b / 4], packed[1][b / 4], b % 4 | (b % 4 + 4) << 4);
#if COLUMNS == 4
        const u32 high = __byte_perm(packed[2][b / 4], packed[3][b / 4], b % 4 | (b % 4 + 4) << 4);
        if (column < inner) *reinterpret_cast<u32*>(to) = __byte_perm(octets, high, 0x5410);
#else
        if (column < inner) *reinterpret_cast<u16*>(to) = static_cast<u16>(octets);
#endif
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (inside && column + c < inner)
                to[c] = static_cast<u8>(packed[c][b / 4] >> (b % 4 * 8));
#endif
    }
    if (part == 0 && inside) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (column + c < inner && (column + c) % ROWS == 0)
                scales[ROWS > 1 ? blocks : blocks + c] = static_cast<u8>(stored[c]);
    }
#endif
    add_counts(tally, counters);
#endif
}
#endif
