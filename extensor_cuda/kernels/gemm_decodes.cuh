// A of gemm.cu from packed storage, decoded to bfloat16 by the warps that multiply, in the registers that wgmma takes it
// from: exactly, as decode.cuh does. Stages bring packed rows; B is multiplied as it lies.
//
// wgmma wants of each eight elements along K two neighbours in each of the four lanes that have a row: of four bits, a
// byte of a word of eight codes. So a lane reads all 64 elements of its two rows, and picks its bytes.
//
// Macros: BITS (4), IS_FLOAT (E2M1), UE4M3, BLOCK (elements that share a byte beside the codes: a scale, or an integer's
// zero point; 0: there is none), ROW_ZERO (a zero point for all of K).

namespace decoding {
#define SCALED (!IS_FLOAT)
#include "decode_pairs.cuh"

constexpr int kWordStages = BLOCK > 16 ? BLOCK / 16 : 1;  // that four bytes beside the codes are for

#ifdef __CUDA_ARCH__
// Bytes of two words; 8 more than a byte's number gives its sign, which is 0 of those below 128.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}
#endif

// The left sides of a stage's four products.
struct Left {
    u32 of[4][4];
    // wgmma has read them: until here they must be in no other use.
    __device__ __forceinline__ void was_read() {
#pragma unroll
        for (int i = 0; i < 16; ++i) keep(of[i / 4][i % 4]);
    }
};

// What lies beside the codes of a lane's two rows. Of the four lanes that have a row each holds every fourth word of it,
// and has asked for the next one.
struct Beside {
    const u32* row[2];
    u32 held[2], next[2];
    int words, word;
    bool folded;  // no E8M0 scale of the warp's is too large to be `folded`
    __device__ __forceinline__ Beside(const Epilogue& e, int first, int lane) : folded(true) {
        if (!BLOCK) return;
        const u8* const bytes = IS_FLOAT ? e.code_scales : reinterpret_cast<const u8*>(e.zeros);
        words = static_cast<int>(e.scale_pitch / 4), word = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 line = min(first + lane / 4 + 8 * h, e.rows - 1);
            row[h] = reinterpret_cast<const u32*>(bytes + line * e.scale_pitch);
            next[h] = row[h][min(word, words - 1)];
        }
    }
    // The four bytes with those of stage k, a row each; to be called for every stage in turn.
    __device__ __forceinline__ void of_stage(int k, u32 (&four)[2]) {
        if (!BLOCK) return;
        if (k % (4 * kWordStages) == 0) {
            word += 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) held[h] = next[h], next[h] = row[h][min(word, words - 1)];
#if IS_FLOAT && !UE4M3
            folded = !__any_sync(~0u, (large_of(held[0]) | large_of(held[1])) != 0);
#endif
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) four[h] = __shfl_sync(~0u, held[h], k / kWordStages % 4, 4);
    }
};

// The byte of `four` that is for the eight elements `unit` of stage k.
__device__ __forceinline__ u32 byte_of(u32 four, int k, int unit) {
    return four >> (k % kWordStages * 64 + unit * 8) / (BLOCK ? BLOCK : 1) * 8 & 0xFFu;
}

// A stage of two rows. `words`: a word a unit of eight elements, four at a time, of each row; `zero`: points of rows.
__device__ __forceinline__ void decode(const uint4 (&words)[2][2], const u32 (&four)[2], const int (&zero)[2], int k,
                                       int quarter, bool folded, Left& left) {
    const u32 pick = quarter * 0x11u + 0x40u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int half = i / 2, h = i % 2;
        const uint4& w = words[half][h];
        const u32 bytes = permute(permute(w.x, w.y, pick), permute(w.z, w.w, pick), 0x5410u);
        const u32 low = bytes & 0x0F0F0F0Fu, high = bytes >> 4 & 0x0F0F0F0Fu;
        u32 aside = 0;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (u == 0 || (BLOCK == 16 && u == 2)) {
                const u32 byte = BLOCK ? byte_of(four[h], k, 4 * half + u) : static_cast<u32>(zero[h]);
#if IS_FLOAT
                aside = scale_pair(byte, folded);
#else
                aside = twice(__float_as_uint(-static_cast<float>(136 + static_cast<signed char>(byte))) >> 16);
#endif
            }
            const u32 pair = permute(low, high, 0xC480u + u * 0x1111u);
            u32& to = left.of[2 * half + u / 2][u % 2 * 2 + h];
#if IS_FLOAT
            const u32 bits = pair * 0x1040u & 0x81C081C0u;  // as in decode.cuh
            to = fma_pair(folded ? bits : fma_pair(bits, 0x7E807E80u, 0u), aside, 0u);
#else
            to = fma_pair(pair ^ 0x43084308u, 0x3F803F80u, aside);
#endif
        }
    }
}
}  // namespace decoding

constexpr float kLift = IS_FLOAT ? 256.0f : 1.0f;  // E2M1 under its scale is 2^-8 of what it means

// The sums of a tile, in `total`, which is `part` if nothing is promoted. A stage is decoded while the last one is
// multiplied: K has an even number of them.
__device__ __forceinline__ void multiply_decoded(Sum (&total)[kRegisters], Sum (&part)[kRegisters], const Epilogue& e,
                                                 const u8* memory, const float* scales, u32 full, u32 empty, int row,
                                                 int stages, int& stage, u32& parity) {
    using namespace decoding;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane % 4, first = row + warp % 4 * 16;
    Beside beside(e, first, lane);
    int zero[2] = {0, 0};
#if ROW_ZERO
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = e.zeros[min(first + lane / 4 + 8 * h, e.rows - 1)];
#endif
    const auto prepare = [&](int k, Left& left) {
        wait(full + 8 * stage, parity);
        const u8* const packed = memory + stage * kStage + (warp * 16 + lane / 4) * kARow;
        const uint4 *const upper = reinterpret_cast<const uint4*>(packed),
                    *const lower = reinterpret_cast<const uint4*>(packed + 8 * kARow);
        const uint4 words[2][2] = {{upper[0], lower[0]}, {upper[1], lower[1]}};
        u32 four[2];
        beside.of_stage(k, four);
        if (UE4M3 || beside.folded)
            decode(words, four, zero, k, quarter, true, left);
        else
            decode(words, four, zero, k, quarter, false, left);
    };
    int last = -1;  // a stage whose products have been begun
    const auto step = [&](int k, Left& now, Left& next) {
        const u64 b = descriptor<B_DOWN>(shared_address(memory) + stage * kStage + kABytes, kBoxBytes);
        const int within = PROMOTE ? k % PROMOTE : k;
        hold(part);
        begin_products();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma(part, now.of[i], b + kBStep * i, within || i);
        end_products();
        finish<1>(part);
        next.was_read();
        if (last >= 0) release(empty + 8 * last, lane);
        last = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
        if (k + 1 < stages) prepare(k + 1, next);
#if PROMOTE
        if (within + 1 < PROMOTE && k + 1 < stages) return;
        const Scales of_stage(scales + last * kScales, warp, lane);
        end_block(of_stage.latest());
        finish<0>(part);
        of_stage.promote(total, part);
        __syncwarp();
        release(empty + 8 * last, lane);
        last = -1;
#endif
    };
    Left left[2];
    prepare(0, left[0]);
    for (int k = 0; k < stages; k += 2) step(k, left[0], left[1]), step(k + 1, left[1], left[0]);
    finish<0>(part);
    left[1].was_read();
    if (last >= 0) release(empty + 8 * last, lane);
}
