// Decodes A of gemm_sm90.cu from packed storage to bfloat16, exactly, in the registers that wgmma
// reads. Stages hold packed rows of A; B is in shared memory as usual.
//
// wgmma expects two neighbours of each eight elements along K in each of the four lanes of a row.
// With 4 bits that is one byte of a word, so a lane reads all 64 elements of its two rows and picks
// its bytes.
//
// Macros: CODEC_BITS (4, or 8 for integers), CODEC_IS_FLOAT (E2M1), CODEC_UE4M3, CODEC_BLOCK
// (elements that share a scale or zero point; 0: none), GEMM_ROW_ZERO_POINT (one zero point for all
// of K), GEMM_FOLD_SCALES (no E8M0 scale is above 2^9 or NaN, so one multiplication decodes an
// element).

namespace decoding {
#define CODEC_FLOAT_SCALES (!CODEC_IS_FLOAT)
#include "codec/decode_bf16x2.cuh"

constexpr int kUnits = CODEC_BITS / 4;  // 16-byte units of a row that two wgmmas use
constexpr int kStagesPerWord =
    CODEC_BLOCK > 16 ? CODEC_BLOCK / 16 : 1;  // stages that one word of scales serves
constexpr int kColumnsPerScale =
    CODEC_BLOCK && CODEC_BLOCK < 64 ? CODEC_BLOCK : 64;  // elements of a stage under one scale

#ifdef __CUDA_ARCH__
// Selects bytes of two words. Adding 8 to a selector replicates that byte's sign bit.
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}
#endif

// Keeps the registers of operand A unused by others until wgmma has read them.
DEVICE void keep_operand(u32 (&left)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) keep(left[i]);
}

// The scales or zero points of a lane's two rows. Each of a row's four lanes holds every fourth
// word and prefetches the next.
struct RowScales {
    const u32* row[2];
    u32 held[2], next[2];
    int words, word, start;
    // Starts at stage `start`.
    DEVICE RowScales(const Epilogue& e, int first, int start, int lane) : start(start) {
        if (!CODEC_BLOCK) return;
        const u8* const bytes =
            CODEC_IS_FLOAT ? e.code_scales : reinterpret_cast<const u8*>(e.zeros);
        words = static_cast<int>(e.scale_pitch / 4),
        word = start / (4 * kStagesPerWord) * 4 + lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 packed_row = min(first + lane / 4 + 8 * h, e.rows - 1);
            row[h] = reinterpret_cast<const u32*>(bytes + packed_row * e.scale_pitch);
            next[h] = row[h][min(word, words - 1)];
        }
    }
    // Gives the word of each row that holds stage k's bytes. Call it for every stage in order.
    DEVICE void stage_scales(int k, u32 (&four)[2]) {
        if (!CODEC_BLOCK) return;
        if (k == start || k % (4 * kStagesPerWord) == 0) {
            word += 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) held[h] = next[h], next[h] = row[h][min(word, words - 1)];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) four[h] = __shfl_sync(~0u, held[h], k / kStagesPerWord % 4, 4);
    }
};

// One stage of a lane's two rows, before it is decoded.
struct Stage {
    // What two wgmmas use of each row: 16 bytes at 4 bits, 32 bytes at 8 bits.
    uint4 words[2][kUnits][2];
    u32 four[2], low[2], high[2], scales[2], factor[2];
    int k;
    // The bf16x2 that multiplies, or is added to, the elements of the i-th wgmma.
    DEVICE u32 factor_of(int i, int h, int zero) {
        const int bit = CODEC_BLOCK ? k % kStagesPerWord * 64 / CODEC_BLOCK * 8
                                    : 0;  // bit offset of the stage's first byte
#if !CODEC_IS_FLOAT
        const int point = CODEC_BLOCK ? static_cast<signed char>(four[h] >> bit) : zero;
        return repeat_bf16x2(
            __float_as_uint(-0.015625f * static_cast<float>((CODEC_BITS == 8 ? 128 : 8) + point)) >>
            16);
#elif !GEMM_FOLD_SCALES
        return scale_bf16x2(four[h] >> (bit + i * 16 / CODEC_BLOCK * 8) & 0xFFu, false);
#else
        // Converts two scale bytes at a time, in the way of scale_bf16x2.
        constexpr int kDistinct = CODEC_BLOCK == 16 ? 2 : 4;  // wgmmas that two bytes serve
        if (i % kDistinct == 0) {
            const u32 bytes =
                permute(four[h] >> bit, 0u, i && CODEC_BLOCK == 16 ? 0x4342u : 0x4140u);
#if CODEC_UE4M3
            scales[h] = fma_bf16x2(fma_bf16x2(bytes << 4, 0x7B807B80u, 0u), 0x7A807A80u, 0u);
#else
            scales[h] = bytes * 0x80u + 118u * 0x00800080u;
#endif
        }
        return permute(scales[h], 0u, i * 16 / CODEC_BLOCK % 2 ? 0x3232u : 0x1010u);
#endif
    }
    // Decodes operand A of the i-th wgmma. Call it in order; it consumes two units.
    DEVICE void decode(int i, const int (&zero)[2], int quad_lane, u32 (&left)[4]) {
        const u32 pick =
            quad_lane * (CODEC_BITS == 8 ? 0x22u : 0x11u) + (CODEC_BITS == 8 ? 0x10u : 0x40u);
        const u32 flip = CODEC_IS_FLOAT    ? 0u
                         : CODEC_BITS == 8 ? 0x80808080u
                                           : 0x08080808u;  // makes integers non-negative
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (CODEC_BITS == 8 || i % 2 == 0) {
                const uint4& w = words[i / 2][i % kUnits][h];
                const u32 bytes =
                    permute(permute(w.x, w.y, pick), permute(w.z, w.w, pick), 0x5410u);
                if (CODEC_BITS == 8) low[h] = bytes ^ flip;
                else
                    low[h] = and_xor(bytes, 0x0F0F0F0Fu, flip),
                    high[h] = and_xor(bytes >> 4, 0x0F0F0F0Fu, flip);
            }
            if (i * 16 % kColumnsPerScale == 0) factor[h] = factor_of(i, h, zero[h]);
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 pair =
                    CODEC_BITS == 8 ? permute(low[h], 0u, u ? 0x4342u : 0x4140u)
                                    : permute(low[h], high[h], 0xC480u + (i % 2 * 2 + u) * 0x1111u);
#if CODEC_IS_FLOAT
                const u32 bits = pair * 0x1040u & 0x81C081C0u;  // as in weights.cuh
                // E4M3 scales always include the elements' factor 2^-126 (scale_bf16x2).
                left[u * 2 + h] = fma_bf16x2(
                    GEMM_FOLD_SCALES || CODEC_UE4M3 ? bits : fma_bf16x2(bits, 0x7E807E80u, 0u),
                    factor[h], 0u);
#else
                left[u * 2 + h] =
                    fma_bf16x2(pair, 0x7F007F00u, factor[h]);  // as in decode_int8.cuh
#endif
            }
        }
    }
};
}  // namespace decoding

static_assert(GEMM_VECTORS != 1, "factors are lifted, exponents are not");
constexpr float kDecodeFactor =
    CODEC_IS_FLOAT ? 256.0f : 64.0f;  // restores what decoding divides by

// Adds a tile's products to `total` (`part` if nothing is promoted), over the range, an even number
// of stages. Operand A of each wgmma is decoded while the previous one runs.
DEVICE void multiply_decoded(Sum (&total)[kRegisters], Sum (&part)[kRegisters], const Epilogue& e,
    const StageRing& ring, int row, const StageRange& range, int& stage, u32& parity) {
    using namespace decoding;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad_lane = lane % 4,
              first = row + warp % 4 * 16;
    RowScales row_scales(e, first, range.first, lane);
    int zero[2] = {0, 0};
#if GEMM_ROW_ZERO_POINT
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = e.zeros[min(first + lane / 4 + 8 * h, e.rows - 1)];
#endif
    int mine = (warp * 16 + lane / 4) * kARow;
    keep(mine);
    // Reads what two wgmmas need of a stage.
    const auto read_half = [&](int half, int stage, Stage& now) {
        const u8* const packed = ring.memory + stage * kStage + mine;
#pragma unroll
        for (int i = 0; i < 2 * kUnits; ++i) {
            const int unit = half * kUnits + i / 2;  // rows of 64 bytes are swizzled
            now.words[half][i / 2][i % 2] = reinterpret_cast<const uint4*>(
                packed + i % 2 * 8 * kARow)[CODEC_BITS == 8 ? unit ^ lane / 8 : unit];
        }
    };
    const auto read = [&](int k, Stage& now) {
        now.k = range.first + k;
        if (k >= range.count) return;
        barrier_wait(ring.full + 8 * stage, parity);
        read_half(0, stage, now);
        if (CODEC_BITS == 4)
            read_half(1, stage, now);  // at 8 bits it is read late, to save registers
        row_scales.stage_scales(range.first + k, now.four);
    };
    u32 left[2][4] = {};
    int last = -1;  // a stage whose wgmmas are in flight
    const auto step = [&](int k, Stage& now, Stage& next) {
        const u64 b = smem_descriptor<GEMM_B_MN_MAJOR>(
            shared_address(ring.memory) + stage * kStage + kABytes, kBoxBytes);
        const int within = GEMM_PROMOTE ? k % GEMM_PROMOTE : k, current = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            now.decode(i, zero, quad_lane, left[i % 2]);
            fence_accumulators(part);
            warpgroup_arrive();
            wgmma(part, left[i % 2], b + kBStep * i, within || i);
            warpgroup_commit();
            warpgroup_wait<1>(part);  // waits for the previous wgmma
            keep_operand(left[(i + 1) % 2]);
            if (i == 0 && last >= 0) release_stage(ring.empty + 8 * last, lane);
            if (i == 0 && CODEC_BITS == 8) read_half(1, current, now);
            if (i == 2) read(k + 1, next);
        }
        last = current;
#if GEMM_PROMOTE
        if (within + 1 < GEMM_PROMOTE && k + 1 < range.count) return;
        const Scales stage_scales(ring.scales + last * kScales, warp, lane);
        end_basic_block(stage_scales.latest());
        warpgroup_wait<0>(part);
        stage_scales.promote(total, part);
        __syncwarp();
        release_stage(ring.empty + 8 * last, lane);
        last = -1;
#endif
    };
    Stage two[2];
    read(0, two[0]);
    for (int k = 0; k < range.count; k += 2) step(k, two[0], two[1]), step(k + 1, two[1], two[0]);
    warpgroup_wait<0>(part);
    keep_operand(left[1]);
    if (last >= 0) release_stage(ring.empty + 8 * last, lane);
}
