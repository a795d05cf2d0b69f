// What the kernels of a cache share: a row of the new token, turned by its position's angles, and
// the sum of what blocks left. Macros: theirs. kThreads comes before it.

#include "common/vector_types.cuh"

typedef ElementType<NN_A> T;
constexpr int kHead = CACHED_HEAD, kQueries = CACHED_QUERIES;
constexpr int kMostParts = 64;    // blocks of a head
constexpr int kPart = kHead + 4;  // a sum, its largest score, its weight, none
constexpr float kLog2E = 1.44269504088896340736f, kNone = -3.0e38f;

// Eight values of a row, turned by the angles of their pairs, (kHead / 2), as rotary.cu turns them,
// and rounded; as they are without tables.
DEVICE FloatVector turned(const T::Raw* row, int at, const float* cosine, const float* sine) {
    if (!cosine) return T::load(row + at);
    constexpr int kHalf = kHead / 2;
    const bool high = at >= kHalf;
    const int i = high ? at - kHalf : at;
    const FloatVector a = T::load(row + i), b = T::load(row + i + kHalf),
                      c = ElementType<0>::load(cosine + i), s = ElementType<0>::load(sine + i);
    FloatVector out;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
        const float value = high ? __fadd_rn(__fmul_rn(b.v[e], c.v[e]), __fmul_rn(a.v[e], s.v[e]))
                                 : __fsub_rn(__fmul_rn(a.v[e], c.v[e]), __fmul_rn(b.v[e], s.v[e]));
        out.v[e] = T::wide(T::narrow(value));
    }
    return out;
}

DEVICE i64 length_of(const i64* where, i64 given) { return where ? *where : given; }

// Parts of a head's queries, and the factors that they are added with.
struct Combined {
    float scores[kQueries][kMostParts], weights[kQueries][kMostParts];
};

// Adds the parts of a head's queries, the first keys' first, and writes results.
DEVICE void combine(const float* parts, T::Raw* out, int chunks, Combined& shared) {
    for (int i = threadIdx.x; i < kQueries * chunks; i += kThreads) {
        const int query = i % kQueries, c = i / kQueries;
        const float* const part = parts + i * kPart + kHead;
        shared.scores[query][c] = __ldcg(part), shared.weights[query][c] = __ldcg(part + 1);
    }
    __syncthreads();
    for (int query = threadIdx.x / 32; query < kQueries; query += kThreads / 32) {
        const int lane = threadIdx.x % 32;
        float top = kNone, factors[2] = {0, 0}, sum = 0;
        for (int n = 0; n < 2; ++n)
            if (lane + 32 * n < chunks) top = fmaxf(top, shared.scores[query][lane + 32 * n]);
        for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        for (int n = 0; n < 2; ++n) {
            const int c = lane + 32 * n;
            if (c < chunks) factors[n] = exp2f(shared.scores[query][c] - top);
            if (c < chunks) sum += factors[n] * shared.weights[query][c];
        }
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        for (int n = 0; n < 2; ++n)
            if (lane + 32 * n < chunks) shared.scores[query][lane + 32 * n] = factors[n] / sum;
    }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < kQueries * kHead; i += 4 * kThreads) {
        const int query = i / kHead, d = i % kHead;
        float4 total = {0, 0, 0, 0};
#pragma unroll 8
        for (int c = 0; c < chunks; ++c) {
            const float factor = shared.scores[query][c];
            const float4 value =
                __ldcg(reinterpret_cast<const float4*>(parts + (c * kQueries + query) * kPart + d));
            total.x = fmaf(factor, value.x, total.x), total.y = fmaf(factor, value.y, total.y);
            total.z = fmaf(factor, value.z, total.z), total.w = fmaf(factor, value.w, total.w);
        }
        out[i] = T::narrow(total.x), out[i + 1] = T::narrow(total.y);
        out[i + 2] = T::narrow(total.z), out[i + 3] = T::narrow(total.w);
    }
}

// Whether this block, which has made so many of a head's parts, is the last to; then all are seen.
DEVICE bool is_last(u32* done, u32 made, u32 parts, u32& last) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(done, made) + made == parts;
        if (last) *done = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}
