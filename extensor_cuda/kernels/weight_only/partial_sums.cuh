// Adds the partial sums of split-K: of warps in shared memory, of thread blocks in global memory.

__device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// What a block has of the result: `below` lines from `line0` on.
struct Lines {
    int line0, below, lines;
    float factor;
    void* out;
    __device__ __forceinline__ i64 pitch() const { return (lines + 3) / 4 * 4; }
    __device__ __forceinline__ void write(int row, int line, const float4& total) const {
        const float four[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (line + c < below)
                finish(out, static_cast<i64>(row) * lines + line0 + line + c, four[c] * factor);
    }
};

// Adds the parts of each line, and writes the results, or a slice's. A token's sums are kPitch
// floats behind the last one's.
template <int kThreads, int kPitch, class Parts>
__device__ __forceinline__ void add_parts(const Parts& parts, float* partial, int slice, int slices,
                                          int rows, const Lines& at) {
    const int fours = (at.below + 3) / 4;
    for (int u = threadIdx.x; u < rows * fours; u += kThreads) {
        const int row = u / fours, line = (u - row * fours) * 4;
        float4 total = {0, 0, 0, 0};
        for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
            float4 of_x = {0, 0, 0, 0};
            for (int s = 0; s < Parts::kCount; ++s)
                add(of_x,
                    *reinterpret_cast<const float4*>(parts(line, s) + (p * rows + row) * kPitch));
            add(total, of_x);
        }
        if (slices == 1)
            at.write(row, line, total);
        else
            __stcg(reinterpret_cast<float4*>(partial + (slice * rows + row) * at.pitch() +
                                             at.line0 + line),
                   total);
    }
}

// Adds what all slices' blocks have left.
template <int kThreads>
__device__ __forceinline__ void add_slices(const float* partial, int slices, int rows,
                                           const Lines& at) {
    constexpr int kBatch = 4;  // sums of four lines, on their way at a time
    const int fours = (at.below + 3) / 4, count = rows * fours;
    for (int u = threadIdx.x; u < count; u += kBatch * kThreads) {
        float4 total[kBatch] = {};
        const float* from[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = min(u + n * kThreads, count - 1), row = i / fours;
            from[n] = partial + row * at.pitch() + at.line0 + (i - row * fours) * 4;
        }
#pragma unroll 2
        for (int s = 0; s < slices; ++s)
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
                add(total[n],
                    __ldcg(reinterpret_cast<const float4*>(from[n] + s * rows * at.pitch())));
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = u + n * kThreads, row = i / fours;
            if (i < count) at.write(row, (i - row * fours) * 4, total[n]);
        }
    }
}
