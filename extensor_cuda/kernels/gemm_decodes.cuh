// A of gemm.cu from packed storage, decoded to bfloat16 by the warps that multiply, in the registers that wgmma takes it
// from: exactly, as decode.cuh does. Stages bring packed rows; x is multiplied as it lies.
//
// wgmma wants of each eight elements along K two neighbours in each of the four lanes that have a row: of four bits, a
// byte of a word of eight codes. So a lane reads all 64 elements of its two rows, and picks its bytes.
//
// Macros: BITS (4), IS_FLOAT (E2M1), UE4M3, BLOCK (elements that share a byte beside the codes: a scale, or an integer's
// zero point; 0: there is none), ROW_ZERO (a zero point for all of K).

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

// wgmma has read them: until here they must be in no other use.
__device__ __forceinline__ void keep_left(u32 (&left)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) keep(left[i / 4][i % 4]);
}

// What lies beside the codes of a lane's two rows. Of the four lanes that have a row each holds every fourth word of it,
// and has asked for the next one.
struct Beside {
    const u32* row[2];
    u32 held[2], next[2];
    int words, word;
    __device__ __forceinline__ Beside(const Epilogue& e, int first, int lane) {
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
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) four[h] = __shfl_sync(~0u, held[h], k / kWordStages % 4, 4);
    }
};

// The byte of `four` that is for the eight elements `unit` of stage k.
__device__ __forceinline__ u32 byte_of(u32 four, int k, int unit) {
    return four >> (k % kWordStages * 64 + unit * 8) / (BLOCK ? BLOCK : 1) * 8 & 0xFFu;
}

// Half a stage of two rows: units 4 half to 4 half + 3 -> the left sides of two products. `words`: of each row, a word a
// unit; `row_zero`: zero points of rows.
__device__ __forceinline__ void decode_half(const uint4 (&words)[2], const u32 (&four)[2], const int (&row_zero)[2], int k,
                                            int half, int quarter, u32 (&left)[2][4]) {
    const u32 pick = quarter * 0x11u + 0x40u;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 bytes = permute(permute(words[h].x, words[h].y, pick), permute(words[h].z, words[h].w, pick), 0x5410u);
        const u32 low = bytes & 0x0F0F0F0Fu, high = bytes >> 4 & 0x0F0F0F0Fu;
        u32 aside = 0;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (u == 0 || (BLOCK == 16 && u == 2)) {
                const u32 byte = BLOCK ? byte_of(four[h], k, 4 * half + u) : static_cast<u32>(row_zero[h]);
#if IS_FLOAT
                aside = scale_pair(byte, UE4M3);
#else
                aside = twice(__float_as_uint(-static_cast<float>(136 + static_cast<signed char>(byte))) >> 16);
#endif
            }
            const u32 pair = permute(low, high, 0xC480u + u * 0x1111u);
#if IS_FLOAT
            const u32 bits = pair * 0x1040u & 0x81C081C0u;  // as in decode.cuh
            left[u / 2][u % 2 * 2 + h] = fma_pair(UE4M3 ? bits : fma_pair(bits, 0x7E807E80u, 0u), aside, 0u);
#else
            left[u / 2][u % 2 * 2 + h] = fma_pair(pair ^ 0x43084308u, 0x3F803F80u, aside);
#endif
        }
    }
}
