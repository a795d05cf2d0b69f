// Adds partial sums of split-K: those of warps in shared memory, those of thread blocks in global
// memory. Macro: WEIGHT_ONLY_X_PARTS.

DEVICE void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// A block's part of the result: `below` output features from `feature0` on, in quads.
struct OutputRange {
    int feature0, below, out_features;
    float factor;
    void* out;
    Gate gate;
    DEVICE i64 pitch() const { return (out_features + 3) / 4 * 4; }
    DEVICE int quads() const { return (below / kSides + 3) / 4; }
    DEVICE void write(int row, int quad, const float4 (&total)[kSides]) const {
        const float4 &a = total[0], &b = total[kSides - 1];
        const float one[4] = {a.x, a.y, a.z, a.w}, other[4] = {b.x, b.y, b.z, b.w};
        const i64 first = static_cast<i64>(row) * (out_features / kSides) + feature0 / kSides;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (quad * 4 + c < below / kSides)
                store_result(
                    out, first + quad * 4 + c, result_of(gate, one[c] * factor, other[c] * factor));
    }
};

// Adds the warps' partial sums and writes results, or one slice's sums. Tokens are kPitch floats
// apart.
template <int kThreads, int kPitch, class Parts>
DEVICE void add_parts(
    const Parts& parts, float* partial, int slice, int slices, int rows, const OutputRange& at) {
    const int quads = at.quads();
    for (int u = threadIdx.x; u < rows * quads; u += kThreads) {
        const int row = u / quads, quad = u - row * quads;
        float4 total[kSides] = {};
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
            const int feature = row_of_quad(quad) + 16 * side;
            for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
                float4 of_part = {0, 0, 0, 0};
                for (int s = 0; s < Parts::kCount; ++s)
                    add(of_part, *reinterpret_cast<const float4*>(
                                     parts(feature, s) + (p * rows + row) * kPitch));
                add(total[side], of_part);
            }
            if (slices > 1)
                __stcg(reinterpret_cast<float4*>(
                           partial + (slice * rows + row) * at.pitch() + at.feature0 + feature),
                    total[side]);
        }
        if (slices == 1) at.write(row, quad, total);
    }
}

// Adds the sums of all slices.
template <int kThreads>
DEVICE void add_slices(const float* partial, int slices, int rows, const OutputRange& at) {
    constexpr int kBatch = 4 / kSides;  // vectors in flight
    const int quads = at.quads(), count = rows * quads;
    for (int u = threadIdx.x; u < count; u += kBatch * kThreads) {
        float4 total[kBatch][kSides] = {};
        const float* from[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = min(u + n * kThreads, count - 1), row = i / quads;
            from[n] = partial + row * at.pitch() + at.feature0 + row_of_quad(i - row * quads);
        }
#pragma unroll 2
        for (int s = 0; s < slices; ++s)
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
#pragma unroll
                for (int side = 0; side < kSides; ++side)
                    add(total[n][side], __ldcg(reinterpret_cast<const float4*>(
                                            from[n] + s * rows * at.pitch() + 16 * side)));
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = u + n * kThreads, row = i / quads;
            if (i < count) at.write(row, i - row * quads, total[n]);
        }
    }
}
