// Float scales of gemm_sm90.cu's partial sums. GEMM_SCALES_1D2D scales rows and columns,
// GEMM_SCALE_GROUP_K scales rows.

#if GEMM_SCALES_1D2D || GEMM_SCALE_GROUP_K
// A lane's scales. The scales of the first `kPrefetched` groups of eight columns are loaded and
// multiplied while wgmma runs. Prefetching more made the GEMM slower.
struct Scales {
    static constexpr bool kSharedScales = GEMM_SCALE_GROUP_K || GEMM_B_SCALE_ROWS > 1;
    static constexpr int kLow = kTileN & -kTileN;
    static constexpr int kColumnsPerScale = GEMM_SCALE_GROUP_K ? kTileN
                                            : kLow < 128       ? kLow
                                                               : 128;  // columns under one scale
    static constexpr int kPrefetched = kSharedScales  ? kTileN / kColumnsPerScale
                                       : kTileN > 128 ? 4
                                                      : 2;
    static constexpr int kDistinct = kSharedScales ? 2 : 4;  // distinct scales of eight columns
    float rows[2], prefetched[kPrefetched][kDistinct];
    const float* columns;
    DEVICE Scales(const float* scales, int warp, int lane) {
        const float* at = GEMM_A_SCALE_ROWS > 1 ? scales : scales + warp * 16 + lane / 4;
        rows[0] = at[0], rows[1] = GEMM_A_SCALE_ROWS > 1 ? rows[0] : at[8];
        columns = scales + kTileM / GEMM_A_SCALE_ROWS + (kSharedScales ? 0 : lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < kPrefetched; ++j) {
            fetch(j, prefetched[j]);
#pragma unroll
            for (int i = 0; i < kDistinct; ++i) keep(prefetched[j][i]);
        }
    }
    // Loads the scales of eight columns, or of all columns that share one.
    DEVICE void fetch(int j, float (&to)[kDistinct]) const {
        if (kSharedScales) {
            const float column =
                GEMM_SCALE_GROUP_K ? 1.0f : columns[j * kColumnsPerScale / GEMM_B_SCALE_ROWS];
            to[0] = rows[0] * column, to[1] = rows[1] * column;
            return;
        }
        const float2 two = *reinterpret_cast<const float2*>(columns + 8 * j);
        to[0] = rows[0] * two.x, to[1] = rows[0] * two.y;
        to[kDistinct - 2] = rows[1] * two.x, to[kDistinct - 1] = rows[1] * two.y;
    }
    DEVICE float latest() const { return prefetched[kPrefetched - 1][kDistinct - 1]; }
    // sum += part * scale.
    DEVICE void promote(float (&sum)[kRegisters], const float (&part)[kRegisters]) const {
#pragma unroll
        for (int j = 0; j < kTileN / 8; ++j) {
            const int of = kSharedScales ? 8 * j / kColumnsPerScale : j;
            float other[kDistinct];
            if (of >= kPrefetched) fetch(of, other);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place = kDistinct == 4 ? i : kSharedScales ? i / 2 : i % 2;
                const float scale =
                    of < kPrefetched ? prefetched[of % kPrefetched][place] : other[place];
                sum[4 * j + i] = __fmaf_rn(part[4 * j + i], scale, sum[4 * j + i]);
            }
        }
    }
};
#endif
