// Attention of one token of each text to the keys and values of a cache, to which its own are
// added. A block has a text's key head, the queries that share it, and CACHED_CHUNK of its keys at
// most; the last of a head's blocks to finish adds what all left, in the order of the keys. So a
// text's bits depend neither on other texts nor on which block was last.
//
// A row of d values is kLanes lanes' of 8; a block's kGroups groups of lanes take a key each.
//
// With tables of a position's angles, q and k are turned as rotary.cu turns them.
//
// Macros: NN_A, the dtype (0: float32, 1: bfloat16); CACHED_HEAD, d; CACHED_QUERIES, those that
// share a key; CACHED_CHUNK, a multiple of 64. Limits: cached.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"

typedef ElementType<NN_A> T;
constexpr int kThreads = 128, kTile = 64, kHead = CACHED_HEAD, kLanes = kHead / kVector;
constexpr int kGroups = kThreads / kLanes, kKeys = kTile / kGroups;  // keys of a group in a tile
constexpr int kQueries = CACHED_QUERIES,
              kPart = kHead + 4;  // a sum, its largest score, its weight, none
constexpr float kLog2E = 1.44269504088896340736f, kNone = -3.0e38f;

struct Shared {
    alignas(16) float q[kQueries][kHead];
    alignas(16) float scores[kQueries][kTile], sums[kGroups][kHead];
};

// The largest score and the sum of a query's weights, and each lane's part of its weighted values.
struct Running {
    float top, weight, values[kVector];
};

// Eight values of a row, turned by the angles of their pairs, (kHead / 2), and rounded; as they are
// without tables.
DEVICE FloatVector turned(
    const T::Raw* row, int at, const float* __restrict__ cosine, const float* __restrict__ sine) {
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

// Adds the parts of a head's queries, the first keys' first, and writes results. There are as many
// parts as a tile has keys, at most.
DEVICE void combine(const float* parts, T::Raw* out, int chunks, Shared& shared) {
    float* const weights = &shared.sums[0][0];
    for (int i = threadIdx.x; i < kQueries * chunks; i += kThreads) {
        const int query = i % kQueries, c = i / kQueries;
        const float* const part = parts + i * kPart + kHead;
        shared.scores[query][c] = __ldcg(part), weights[query * kTile + c] = __ldcg(part + 1);
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
            if (c < chunks) sum += factors[n] * weights[query * kTile + c];
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

// q (B, H, d), k and v (B, Hkv, d) by these strides; keys and values (B, Hkv, capacity, d); out (B,
// H, d); all but `done` aligned to 16 bytes. `done` holds a zero for each head, and does again.
extern "C" __global__ void __launch_bounds__(kThreads) attend_cached(const T::Raw* __restrict__ q,
    const T::Raw* __restrict__ k, const T::Raw* __restrict__ v, T::Raw* __restrict__ keys,
    T::Raw* __restrict__ values, const i64* __restrict__ where, float* __restrict__ partial,
    u32* __restrict__ done, T::Raw* __restrict__ out, i64 given, i64 capacity, i64 heads, i64 most,
    i64 q_batch, i64 q_head, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head,
    const float* __restrict__ cosine, const float* __restrict__ sine, float scale) {
    __shared__ Shared shared;
    __shared__ u32 last;
    const i64 head = blockIdx.x / most, chunk = blockIdx.x % most;  // a key head of a text
    const i64 length = length_of(where, given) + 1, first = chunk * CACHED_CHUNK;
    const i64 end = length < first + CACHED_CHUNK ? length : first + CACHED_CHUNK;
    if (first >= length || length > capacity) return;
    const int chunks = static_cast<int>((length + CACHED_CHUNK - 1) / CACHED_CHUNK);
    const i64 batch = head / heads, of_text = head % heads;
    const int group = threadIdx.x / kLanes, at = threadIdx.x % kLanes * kVector;
    const T::Raw* const new_key = k + batch * k_batch + of_text * k_head;
    const T::Raw* const new_value = v + batch * v_batch + of_text * v_head + at;
    for (int i = threadIdx.x; i < kQueries * kLanes; i += kThreads) {
        const int query = i / kLanes, d = i % kLanes * kVector;
        const T::Raw* const row = q + batch * q_batch + (of_text * kQueries + query) * q_head;
        const FloatVector part = turned(row, d, cosine, sine);
#pragma unroll
        for (int e = 0; e < kVector; ++e) shared.q[query][d + e] = part.v[e] * (scale * kLog2E);
    }
    Running run[kQueries];
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
        run[query].top = kNone, run[query].weight = 0;
#pragma unroll
        for (int e = 0; e < kVector; ++e) run[query].values[e] = 0;
    }
#pragma unroll 1
    for (i64 start = first; start < end; start += kTile) {
        FloatVector key[kKeys], value[kKeys];
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const i64 token = start + group + n * kGroups;
            const i64 place = (head * capacity + token) * kHead + at;
            const bool own = token == length - 1;
#pragma unroll
            for (int e = 0; e < kVector; ++e) key[n].v[e] = value[n].v[e] = 0;
            if (token >= end) continue;
            key[n] = own ? turned(new_key, at, cosine, sine) : T::load(keys + place);
            value[n] = T::load(own ? new_value : values + place);
            if (own) T::store(keys + place, key[n]), T::store(values + place, value[n]);
        }
        __syncthreads();  // q is there, and the scores of the tile before are read
#pragma unroll
        for (int n = 0; n < kKeys; ++n)
#pragma unroll
            for (int query = 0; query < kQueries; ++query) {
                float score = 0;
#pragma unroll
                for (int e = 0; e < kVector; ++e)
                    score = fmaf(shared.q[query][at + e], key[n].v[e], score);
#pragma unroll
                for (int step = kLanes / 2; step; step /= 2)
                    score += __shfl_xor_sync(~0u, score, step);
                if (at == 0)
                    shared.scores[query][group + n * kGroups] =
                        start + group + n * kGroups < end ? score : kNone;
            }
        __syncthreads();
#pragma unroll
        for (int query = 0; query < kQueries; ++query) {
            Running& now = run[query];
            float top = now.top;
#pragma unroll 8
            for (int n = 0; n < kTile; n += 4) {
                const float4 four = *reinterpret_cast<const float4*>(&shared.scores[query][n]);
                top = fmaxf(fmaxf(top, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));
            }
            const float factor = exp2f(now.top - top);
            now.top = top, now.weight *= factor;
#pragma unroll
            for (int e = 0; e < kVector; ++e) now.values[e] *= factor;
#pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                const float weight = exp2f(shared.scores[query][group + n * kGroups] - top);
                now.weight += weight;
#pragma unroll
                for (int e = 0; e < kVector; ++e)
                    now.values[e] = fmaf(weight, value[n].v[e], now.values[e]);
            }
        }
    }
    float* const mine = partial + (head * most + chunk) * kQueries * kPart;
    // All threads have the same largest score; a group has the weights of its own keys.
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < kVector; ++e) shared.sums[group][at + e] = run[query].values[e];
        if (at == 0) shared.scores[0][group] = run[query].weight;
        __syncthreads();
        for (int d = threadIdx.x; d < kHead; d += kThreads) {
            float total = 0;
            for (int g = 0; g < kGroups; ++g) total += shared.sums[g][d];
            mine[query * kPart + d] = total;
        }
        if (threadIdx.x == 0) {
            float weight = 0;
            for (int g = 0; g < kGroups; ++g) weight += shared.scores[0][g];
            mine[query * kPart + kHead] = run[query].top;
            mine[query * kPart + kHead + 1] = weight;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(done + head, 1u) + 1 == static_cast<u32>(chunks);
        if (last) done[head] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    combine(
        partial + head * most * kQueries * kPart, out + head * kQueries * kHead, chunks, shared);
}
