// Multiplies partial sums by float scales, for gemm_sm90.cu: GEMM_SCALES_1D2D, of rows and columns,
// and GEMM_SCALE_GROUP_K, of rows.

#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
// Scales as a lane wants them. Those of `kReady` times eight columns are fetched, and multiplied,
// while the products that they are for are made; with more the GEMM was slower.
struct Scales {
    static constexpr bool kFew = GEMM_SCALE_GROUP_K || GEMM_B_SCALE_ROWS > 1;
    static constexpr int kLow = kTileN & -kTileN;
    static constexpr int kAlike = GEMM_SCALE_GROUP_K ? kTileN
                                  : kLow < 128       ? kLow
                                                     : 128;  // columns under one scale
    static constexpr int kReady = kFew ? kTileN / kAlike : kTileN > 128 ? 4 : 2;
    static constexpr int kEach = kFew ? 2 : 4;  // different ones of eight columns
    float rows[2], ready[kReady][kEach];
    const float* columns;
    __device__ __forceinline__ Scales(const float* scales, int warp, int lane) {
        const float* at = GEMM_A_SCALE_ROWS > 1 ? scales : scales + warp * 16 + lane / 4;
        rows[0] = at[0], rows[1] = GEMM_A_SCALE_ROWS > 1 ? rows[0] : at[8];
        columns = scales + kTileM / GEMM_A_SCALE_ROWS + (kFew ? 0 : lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < kReady; ++j) {
            fetch(j, ready[j]);
#pragma unroll
            for (int i = 0; i < kEach; ++i) keep(ready[j][i]);
        }
    }
    // Those of eight columns, or of all that have the same.
    __device__ __forceinline__ void fetch(int j, float (&to)[kEach]) const {
        if (kFew) {
            const float column =
                GEMM_SCALE_GROUP_K ? 1.0f : columns[j * kAlike / GEMM_B_SCALE_ROWS];
            to[0] = rows[0] * column, to[1] = rows[1] * column;
            return;
        }
        const float2 two = *reinterpret_cast<const float2*>(columns + 8 * j);
        to[0] = rows[0] * two.x, to[1] = rows[0] * two.y;
        to[kEach - 2] = rows[1] * two.x, to[kEach - 1] = rows[1] * two.y;
    }
    __device__ __forceinline__ float latest() const { return ready[kReady - 1][kEach - 1]; }
    // sum += part times its scales.
    __device__ __forceinline__ void promote(float (&sum)[kRegisters],
                                            const float (&part)[kRegisters]) const {
#pragma unroll
        for (int j = 0; j < kTileN / 8; ++j) {
            const int of = kFew ? 8 * j / kAlike : j;
            float other[kEach];
            if (of >= kReady) fetch(of, other);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place = kEach == 4 ? i : kFew ? i / 2 : i % 2;
                const float scale = of < kReady ? ready[of % kReady][place] : other[place];
                sum[4 * j + i] = __fmaf_rn(part[4 * j + i], scale, sum[4 * j + i]);
            }
        }
    }
};
#endif
