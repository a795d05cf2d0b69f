// Adds partial sums of split-K: those of warps in shared memory, those of thread blocks in global
// memory. Macro: WEIGHT_ONLY_X_PARTS.

DEVICE void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// A block's part of the result: `below` output features from `feature0` on.
struct OutputRange {
    int feature0, below, out_features;
    float factor;
    void* out;
    DEVICE i64 pitch() const { return (out_features + 3) / 4 * 4; }
    DEVICE void write(int row, int feature, const float4& total) const {
        const float four[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (feature + c < below)
                store_result(out, static_cast<i64>(row) * out_features + feature0 + feature + c,
                    four[c] * factor);
    }
};

// Adds the warps' partial sums and writes results, or one slice's sums. Tokens are kPitch floats
// apart.
template <int kThreads, int kPitch, class Parts>
DEVICE void add_parts(
    const Parts& parts, float* partial, int slice, int slices, int rows, const OutputRange& at) {
    const int quads = (at.below + 3) / 4;
    for (int u = threadIdx.x; u < rows * quads; u += kThreads) {
        const int row = u / quads, feature = (u - row * quads) * 4;
        float4 total = {0, 0, 0, 0};
        for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
            float4 of_part = {0, 0, 0, 0};
            for (int s = 0; s < Parts::kCount; ++s)
                add(of_part, *reinterpret_cast<const float4*>(
                                 parts(feature, s) + (p * rows + row) * kPitch));
            add(total, of_part);
        }
        if (slices == 1) at.write(row, feature, total);
        else
            __stcg(reinterpret_cast<float4*>(
                       partial + (slice * rows + row) * at.pitch() + at.feature0 + feature),
                total);
    }
}

// Adds the sums of all slices.
template <int kThreads>
DEVICE void add_slices(const float* partial, int slices, int rows, const OutputRange& at) {
    constexpr int kBatch = 4;  // vectors in flight
    const int quads = (at.below + 3) / 4, count = rows * quads;
    for (int u = threadIdx.x; u < count; u += kBatch * kThreads) {
        float4 total[kBatch] = {};
        const float* from[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = min(u + n * kThreads, count - 1), row = i / quads;
            from[n] = partial + row * at.pitch() + at.feature0 + (i - row * quads) * 4;
        }
#pragma unroll 2
        for (int s = 0; s < slices; ++s)
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
                add(total[n],
                    __ldcg(reinterpret_cast<const float4*>(from[n] + s * rows * at.pitch())));
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = u + n * kThreads, row = i / quads;
            if (i < count) at.write(row, (i - row * quads) * 4, total[n]);
        }
    }
}
