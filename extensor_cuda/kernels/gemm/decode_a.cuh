// A of gemm_sm90.cu from packed storage, decoded to bfloat16 by the warps that multiply, in the
// registers that wgmma takes it from: exactly, as weights.cuh does. Stages bring packed rows; B is
// multiplied as it lies.
//
// wgmma wants of each eight elements along K two neighbours in each of the four lanes that have a
// row: of four bits, a byte of a word of eight codes. So a lane reads all 64 elements of its two
// rows, and picks its bytes.
//
// Macros: CODEC_BITS (4, or 8 of integers), CODEC_IS_FLOAT (E2M1), CODEC_UE4M3, CODEC_BLOCK
// (elements that share a byte beside the codes: a scale, or an integer's zero point; 0: there is
// none), GEMM_ROW_ZERO_POINT (a zero point for all of K), GEMM_FOLD_SCALES (no E8M0 scale is above
// 2^9, so that one multiplication takes elements to their values, and none is NaN).

namespace decoding {
#define CODEC_FLOAT_SCALES (!CODEC_IS_FLOAT)
#include "codec/decode_bf16x2.cuh"

constexpr int kUnits = CODEC_BITS / 4;  // of 16 bytes, of a row, that two products take
constexpr int kWordStages =
    CODEC_BLOCK > 16 ? CODEC_BLOCK / 16 : 1;  // that four bytes beside the codes are for
constexpr int kAlike =
    CODEC_BLOCK && CODEC_BLOCK < 64 ? CODEC_BLOCK : 64;  // elements of a stage that share a byte

#ifdef __CUDA_ARCH__
// Bytes of two words; 8 more than a byte's number gives its sign, which is 0 of those below 128.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}
#endif

// wgmma has read the left side of a product: until here its registers must be in no other use.
__device__ __forceinline__ void was_read(u32 (&left)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) keep(left[i]);
}

// What lies beside the codes of a lane's two rows. Of the four lanes that have a row each holds
// every fourth word of it, and has asked for the next one.
struct Beside {
    const u32* row[2];
    u32 held[2], next[2];
    int words, word, start;
    // From stage `start` on.
    __device__ __forceinline__ Beside(const Epilogue& e, int first, int start, int lane)
        : start(start) {
        if (!CODEC_BLOCK) return;
        const u8* const bytes =
            CODEC_IS_FLOAT ? e.code_scales : reinterpret_cast<const u8*>(e.zeros);
        words = static_cast<int>(e.scale_pitch / 4),
        word = start / (4 * kWordStages) * 4 + lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 line = min(first + lane / 4 + 8 * h, e.rows - 1);
            row[h] = reinterpret_cast<const u32*>(bytes + line * e.scale_pitch);
            next[h] = row[h][min(word, words - 1)];
        }
    }
    // The four bytes with those of stage k, a row each; to be called for every stage in turn.
    __device__ __forceinline__ void of_stage(int k, u32 (&four)[2]) {
        if (!CODEC_BLOCK) return;
        if (k == start || k % (4 * kWordStages) == 0) {
            word += 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) held[h] = next[h], next[h] = row[h][min(word, words - 1)];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) four[h] = __shfl_sync(~0u, held[h], k / kWordStages % 4, 4);
    }
};

// A stage of a lane's two rows, on its way to being decoded.
struct Stage {
    // Of each row what two products take, twice: of four bits 16 bytes, of eight 32.
    uint4 words[2][kUnits][2];
    u32 four[2], low[2], high[2], scales[2], aside[2];
    int k;
    // What multiplies, or is added to, the elements of the i-th product: a pair of the same.
    __device__ __forceinline__ u32 aside_of(int i, int h, int zero) {
        const int bit =
            CODEC_BLOCK ? k % kWordStages * 64 / CODEC_BLOCK * 8 : 0;  // of the stage's first byte
#if !CODEC_IS_FLOAT
        const int point = CODEC_BLOCK ? static_cast<signed char>(four[h] >> bit) : zero;
        return twice(
            __float_as_uint(-0.015625f * static_cast<float>((CODEC_BITS == 8 ? 128 : 8) + point)) >>
            16);
#elif !GEMM_FOLD_SCALES
        return scale_pair(four[h] >> (bit + i * 16 / CODEC_BLOCK * 8) & 0xFFu, false);
#else
        // Two bytes at a time, as scale_pair has them.
        constexpr int kEach = CODEC_BLOCK == 16 ? 2 : 4;  // products that two are for
        if (i % kEach == 0) {
            const u32 bytes =
                permute(four[h] >> bit, 0u, i && CODEC_BLOCK == 16 ? 0x4342u : 0x4140u);
#if CODEC_UE4M3
            scales[h] = fma_pair(fma_pair(bytes << 4, 0x7B807B80u, 0u), 0x7A807A80u, 0u);
#else
            scales[h] = bytes * 0x80u + 118u * 0x00800080u;
#endif
        }
        return permute(scales[h], 0u, i * 16 / CODEC_BLOCK % 2 ? 0x3232u : 0x1010u);
#endif
    }
    // The left sides of the i-th product, in turn: two units.
    __device__ __forceinline__ void decode(int i, const int (&zero)[2], int quarter,
                                           u32 (&left)[4]) {
        const u32 pick =
            quarter * (CODEC_BITS == 8 ? 0x22u : 0x11u) + (CODEC_BITS == 8 ? 0x10u : 0x40u);
        const u32 flip = CODEC_IS_FLOAT    ? 0u
                         : CODEC_BITS == 8 ? 0x80808080u
                                           : 0x08080808u;  // integers: to 0 and more
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (CODEC_BITS == 8 || i % 2 == 0) {
                const uint4& w = words[i / 2][i % kUnits][h];
                const u32 bytes =
                    permute(permute(w.x, w.y, pick), permute(w.z, w.w, pick), 0x5410u);
                if (CODEC_BITS == 8)
                    low[h] = bytes ^ flip;
                else
                    low[h] = and_xor(bytes, 0x0F0F0F0Fu, flip),
                    high[h] = and_xor(bytes >> 4, 0x0F0F0F0Fu, flip);
            }
            if (i * 16 % kAlike == 0) aside[h] = aside_of(i, h, zero[h]);
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 pair =
                    CODEC_BITS == 8 ? permute(low[h], 0u, u ? 0x4342u : 0x4140u)
                                    : permute(low[h], high[h], 0xC480u + (i % 2 * 2 + u) * 0x1111u);
#if CODEC_IS_FLOAT
                const u32 bits = pair * 0x1040u & 0x81C081C0u;  // as in weights.cuh
                // E4M3 scales take the elements' 2^-126 along in any case (scale_pair).
                left[u * 2 + h] = fma_pair(
                    GEMM_FOLD_SCALES || CODEC_UE4M3 ? bits : fma_pair(bits, 0x7E807E80u, 0u),
                    aside[h], 0u);
#else
                left[u * 2 + h] = fma_pair(pair, 0x7F007F00u, aside[h]);  // as in decode_int8.cuh
#endif
            }
        }
    }
};
}  // namespace decoding

static_assert(GEMM_VECTORS != 1, "factors are lifted, exponents are not");
constexpr float kDecodedLift =
    CODEC_IS_FLOAT ? 256.0f : 64.0f;  // what is multiplied is that part of what it means

// The sums of a tile, in `total`, which is `part` if nothing is promoted; of an even number of
// stages from `start` on. Each product's left side is decoded while the one before runs. What
// bounds this is instructions, two warps a scheduler.
__device__ __forceinline__ void multiply_decoded(Sum (&total)[kRegisters], Sum (&part)[kRegisters],
                                                 const Epilogue& e, const u8* memory,
                                                 const float* scales, u32 full, u32 empty, int row,
                                                 int start, int stages, int& stage, u32& parity) {
    using namespace decoding;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane % 4,
              first = row + warp % 4 * 16;
    Beside beside(e, first, start, lane);
    int zero[2] = {0, 0};
#if GEMM_ROW_ZERO_POINT
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = e.zeros[min(first + lane / 4 + 8 * h, e.rows - 1)];
#endif
    int mine = (warp * 16 + lane / 4) * kARow;
    keep(mine);
    // What two products take, of the stage at hand.
    const auto read_half = [&](int half, int stage, Stage& now) {
        const u8* const packed = memory + stage * kStage + mine;
#pragma unroll
        for (int i = 0; i < 2 * kUnits; ++i) {
            const int unit = half * kUnits + i / 2;  // rows of 64 bytes are swizzled
            now.words[half][i / 2][i % 2] = reinterpret_cast<const uint4*>(
                packed + i % 2 * 8 * kARow)[CODEC_BITS == 8 ? unit ^ lane / 8 : unit];
        }
    };
    const auto read = [&](int k, Stage& now) {
        now.k = start + k;
        if (k >= stages) return;
        wait(full + 8 * stage, parity);
        read_half(0, stage, now);
        if (CODEC_BITS == 4)
            read_half(1, stage, now);  // of eight bits it comes later, for want of registers
        beside.of_stage(start + k, now.four);
    };
    u32 left[2][4] = {};
    int last = -1;  // a stage whose products have been begun
    const auto step = [&](int k, Stage& now, Stage& next) {
        const u64 b = descriptor<GEMM_B_MN_MAJOR>(shared_address(memory) + stage * kStage + kABytes,
                                                  kBoxBytes);
        const int within = GEMM_PROMOTE ? k % GEMM_PROMOTE : k, current = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            now.decode(i, zero, quarter, left[i % 2]);
            hold(part);
            begin_products();
            wgmma(part, left[i % 2], b + kBStep * i, within || i);
            end_products();
            finish<1>(part);  // the product before
            was_read(left[(i + 1) % 2]);
            if (i == 0 && last >= 0) release(empty + 8 * last, lane);
            if (i == 0 && CODEC_BITS == 8) read_half(1, current, now);
            if (i == 2) read(k + 1, next);
        }
        last = current;
#if GEMM_PROMOTE
        if (within + 1 < GEMM_PROMOTE && k + 1 < stages) return;
        const Scales of_stage(scales + last * kScales, warp, lane);
        end_block(of_stage.latest());
        finish<0>(part);
        of_stage.promote(total, part);
        __syncwarp();
        release(empty + 8 * last, lane);
        last = -1;
#endif
    };
    Stage two[2];
    read(0, two[0]);
    for (int k = 0; k < stages; k += 2) step(k, two[0], two[1]), step(k + 1, two[1], two[0]);
    finish<0>(part);
    was_read(left[1]);
    if (last >= 0) release(empty + 8 * last, lane);
}
