// cached.cu's attention of bfloat16, on tensor cores. A warp has 16 keys at a time and works alone:
// what it multiplies goes from global memory to registers. Keys are rows of the first product,
// S^T = K Q^T, and values' columns rows of the second, O^T = V^T P^T, so that the few queries are
// columns of both.
//
// mma's order of an index that is summed, and of rows, is free, if both operands have it: each lane
// loads neighbouring values. Weights are the sum of two bfloat16, which is within 2^-18 of them.
//
// Macros: NN_A, 1; CACHED_HEAD, CACHED_QUERIES and CACHED_CHUNK as in cached.cu. Limits: cached.py.

#include "common/types.cuh"

constexpr int kWarps = 4, kThreads = 32 * kWarps;

#include "attention/cached.cuh"
#include "common/mma.cuh"

constexpr int kKeys = 16, kQueryTiles = (kQueries + 7) / 8;
// Words of two values: a lane's of a key, of which it has a fourth; and of a value, an eighth.
constexpr int kKeyWords = kHead / 8, kValueWords = kHead / 16, kPitch = kHead + 8;

struct Shared {
    alignas(16) T::Raw q[8 * kQueryTiles][kPitch], own[2][kHead];  // own: the new key and value
    alignas(16) float sums[kWarps][kQueries][kHead];
    float tops[kWarps][8 * kQueryTiles], weights[kWarps][8 * kQueryTiles];
};
union Memory {
    Shared tiles;
    Combined parts;
};

// The words of a row that one of kLanes lanes has: 16 bytes at a time, if there are so many.
template <int kLanes, int kWords>
DEVICE void load_words(u32 (&to)[kWords], const T::Raw* row, int lane) {
    constexpr int kAtOnce = kWords < 4 ? kWords : 4;
#pragma unroll
    for (int i = 0; i < kWords; i += kAtOnce) {
        const T::Raw* const from = row + (i * kLanes + lane * kAtOnce) * 2;
        if (kAtOnce == 4) {
            const uint4 w = *reinterpret_cast<const uint4*>(from);
            to[i] = w.x, to[i + 1 < kWords ? i + 1 : 0] = w.y;
            to[i + 2 < kWords ? i + 2 : 0] = w.z, to[i + 3 < kWords ? i + 3 : 0] = w.w;
        } else if (kAtOnce == 2) {
            const uint2 w = *reinterpret_cast<const uint2*>(from);
            to[i] = w.x, to[i + 1 < kWords ? i + 1 : 0] = w.y;
        } else to[i] = *reinterpret_cast<const u32*>(from);
    }
}

// A lane's part of 16 keys and values: keys `lane / 4` and 8 more; values of keys `lane % 4 * 2`,
// the next, and those 8 on.
struct Rows {
    u32 keys[2][kKeyWords], values[4][kValueWords];

    DEVICE static int key_of(int lane, int h) { return lane / 4 + 8 * h; }
    DEVICE static int value_of(int lane, int h) { return lane % 4 * 2 + h % 2 + h / 2 * 8; }

    // Zeros for keys from `end` on; `end` is the new one.
    DEVICE void load(const T::Raw* keys_of, const T::Raw* values_of, int start, int end, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int key = start + key_of(lane, h);
#pragma unroll
            for (int i = 0; i < kKeyWords; ++i) keys[h][i] = 0;
            if (key < end)
                load_words<4>(keys[h], keys_of + static_cast<i64>(key) * kHead, lane % 4);
        }
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const int key = start + value_of(lane, h);
#pragma unroll
            for (int i = 0; i < kValueWords; ++i) values[h][i] = 0;
            if (key < end)
                load_words<8>(values[h], values_of + static_cast<i64>(key) * kHead, lane / 4);
        }
    }

    // The new key and value, which may be one of these.
    DEVICE void insert(const Shared& shared, int at, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (at == key_of(lane, h)) load_words<4>(keys[h], shared.own[0], lane % 4);
#pragma unroll
        for (int h = 0; h < 4; ++h)
            if (at == value_of(lane, h)) load_words<8>(values[h], shared.own[1], lane / 4);
    }
};

// Of eight queries: of queries `lane % 4 * 2` and the next the largest score and the sum of
// weights, and of sixteen columns of values each their sums.
struct Running {
    float top[2] = {kNone, kNone}, weight[2] = {0, 0}, sums[kValueWords][4] = {};

    DEVICE void add(const Rows& rows, const T::Raw* q, int there, float scale, int lane) {
        float s[4] = {};
        u32 of_query[kKeyWords];
        load_words<4>(of_query, q + lane / 4 * kPitch, lane % 4);
#pragma unroll
        for (int i = 0; i < kKeyWords; i += 2) {
            const u32 a[4] = {
                rows.keys[0][i], rows.keys[1][i], rows.keys[0][i + 1], rows.keys[1][i + 1]};
            mma(s, a, of_query[i], of_query[i + 1]);
        }
        u32 high[2], low[2];  // pairs of queries' weights of keys `lane / 4` and 8 more
        float p[4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool is_key = lane / 4 + 8 * h < there;
                s[2 * h + c] = is_key ? s[2 * h + c] * scale : kNone;
            }
            float most = fmaxf(top[c], fmaxf(s[c], s[2 + c]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            p[c] = exp2f(s[c] - most), p[2 + c] = exp2f(s[2 + c] - most);
            float sum = p[c] + p[2 + c];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            const float factor = exp2f(top[c] - most);
            top[c] = most, weight[c] = weight[c] * factor + sum;
#pragma unroll
            for (int j = 0; j < kValueWords; ++j) sums[j][c] *= factor, sums[j][2 + c] *= factor;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float a = p[2 * h], b = p[2 * h + 1];
            high[h] = round_bf16x2(a, b);
            low[h] = round_bf16x2(
                a - __uint_as_float(high[h] << 16), b - __uint_as_float(high[h] & 0xFFFF0000u));
        }
        // As the second product has them: of query `lane / 4`, pairs of keys.
        u32 weights[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int from = lane % 4 * 8 + lane / 8;
            const u32 half = lane / 4 % 2 ? 0x7632 : 0x5410;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const u32 mine = part ? low[h] : high[h];
                const u32 one = __shfl_sync(~0u, mine, from),
                          next = __shfl_sync(~0u, mine, from + 4);
                weights[part][h] = __byte_perm(one, next, half);
            }
        }
#pragma unroll
        for (int j = 0; j < kValueWords; ++j) {
            u32 a[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 one = rows.values[2 * h][j], next = rows.values[2 * h + 1][j];
                a[2 * h] = __byte_perm(one, next, 0x5410);
                a[2 * h + 1] = __byte_perm(one, next, 0x7632);
            }
            mma(sums[j], a, weights[0][0], weights[0][1]);
            mma(sums[j], a, weights[1][0], weights[1][1]);
        }
    }

    // Leaves what the warp has of queries from `first` on.
    DEVICE void store(Shared& shared, int warp, int first, int lane) const {
        constexpr int kAtOnce = kValueWords < 4 ? kValueWords : 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int query = first + lane % 4 * 2 + c;
            if (lane < 4)
                shared.tops[warp][query] = top[c], shared.weights[warp][query] = weight[c];
            if (query >= kQueries) continue;
#pragma unroll
            for (int j = 0; j < kValueWords; ++j) {
                const int word = j / kAtOnce * kAtOnce * 8 + lane / 4 * kAtOnce + j % kAtOnce;
                *reinterpret_cast<float2*>(&shared.sums[warp][query][2 * word]) =
                    float2{sums[j][c], sums[j][2 + c]};
            }
        }
    }
};

// Leaves the sum of what a chunk's warps have, of each query.
DEVICE void store_part(const Shared& shared, float* to) {
    for (int i = threadIdx.x * 4; i < kQueries * kHead; i += 4 * kThreads) {
        const int query = i / kHead, d = i % kHead;
        float top = kNone, weight = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.tops[w][query]);
        float4 total = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float factor = exp2f(shared.tops[w][query] - top);
            const float4 sum = *reinterpret_cast<const float4*>(&shared.sums[w][query][d]);
            weight = fmaf(factor, shared.weights[w][query], weight);
            total.x = fmaf(factor, sum.x, total.x), total.y = fmaf(factor, sum.y, total.y);
            total.z = fmaf(factor, sum.z, total.z), total.w = fmaf(factor, sum.w, total.w);
        }
        *reinterpret_cast<float4*>(to + query * kPart + d) = total;
        if (d == 0) to[query * kPart + kHead] = top, to[query * kPart + kHead + 1] = weight;
    }
}

// q (B, H, d), k and v (B, Hkv, d) by these strides; keys and values (B, Hkv, capacity, d); out (B,
// H, d); all but `done` aligned to 16 bytes. `done` holds a zero for each head, and does again. Of
// `most` parts of a head each of its `blocks` blocks makes its share, whatever their number is.
extern "C" __global__ void __launch_bounds__(kThreads, 3) attend_cached(const T::Raw* q,
    const T::Raw* k, const T::Raw* v, T::Raw* keys, T::Raw* values, const i64* where,
    float* __restrict__ partial, u32* __restrict__ done, T::Raw* __restrict__ out, i64 given,
    i64 capacity, i64 heads, i64 most, i64 blocks, i64 q_batch, i64 q_head, i64 k_batch, i64 k_head,
    i64 v_batch, i64 v_head, const float* cosine, const float* sine, float scale) {
    __shared__ Memory memory;
    __shared__ u32 last;
    Shared& shared = memory.tiles;
    const u32 number = blockIdx.x / static_cast<u32>(blocks);  // a key head of a text
    const i64 head = number;
    const int own = static_cast<int>(length_of(where, given)), chunks = own / CACHED_CHUNK + 1,
              each = (chunks + static_cast<int>(blocks) - 1) / static_cast<int>(blocks),
              low = static_cast<int>(blockIdx.x - number * static_cast<u32>(blocks)) * each,
              high = min(low + each, chunks);
    if (own < 0 || low >= chunks || own >= capacity) return;
    const i64 batch = number / static_cast<u32>(heads), of_text = head - batch * heads;
    T::Raw* const of_head[2] = {keys + head * capacity * kHead, values + head * capacity * kHead};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Rows rows;
    rows.load(of_head[0], of_head[1], low * CACHED_CHUNK + warp * kKeys, own, lane);
    constexpr int kVectors = kHead / kVector;
    for (int i = threadIdx.x; i < 8 * kQueryTiles * kVectors; i += kThreads) {
        const int query = i / kVectors, d = i % kVectors * kVector;
        const T::Raw* const row = q + batch * q_batch + (of_text * kQueries + query) * q_head;
        FloatVector part = {};
        if (query < kQueries) part = turned(row, d, cosine, sine);
        T::store(shared.q[query] + d, part);
    }
    if (high == chunks && threadIdx.x >= kThreads - kVectors) {
        const int d = (threadIdx.x - (kThreads - kVectors)) * kVector;
        const FloatVector key = turned(k + batch * k_batch + of_text * k_head, d, cosine, sine),
                          value = T::load(v + batch * v_batch + of_text * v_head + d);
        const i64 at = static_cast<i64>(own) * kHead + d;
        T::store(shared.own[0] + d, key), T::store(shared.own[1] + d, value);
        T::store(of_head[0] + at, key), T::store(of_head[1] + at, value);
    }
    __syncthreads();
#pragma unroll 1
    for (int chunk = low; chunk < high; ++chunk) {
        const int first = chunk * CACHED_CHUNK, end = min(own + 1, first + CACHED_CHUNK);
        Running running[kQueryTiles];
#pragma unroll 1
        for (int start = first + warp * kKeys; start < end; start += kWarps * kKeys) {
            if (start != first + warp * kKeys) rows.load(of_head[0], of_head[1], start, own, lane);
            rows.insert(shared, own - start, lane);
            const int there = end - start;
#pragma unroll
            for (int t = 0; t < kQueryTiles; ++t)
                running[t].add(rows, shared.q[8 * t], there, scale * kLog2E, lane);
            if (CACHED_CHUNK == kWarps * kKeys) break;
        }
#pragma unroll
        for (int t = 0; t < kQueryTiles; ++t) running[t].store(shared, warp, 8 * t, lane);
        if (chunk + 1 < high)  // comes while sums meet
            rows.load(of_head[0], of_head[1], first + CACHED_CHUNK + warp * kKeys, own, lane);
        __syncthreads();
        store_part(shared, partial + (head * most + chunk) * kQueries * kPart);
        if (chunk + 1 < high) __syncthreads();  // sums are read
    }
    if (!is_last(done + head, high - low, chunks, last)) return;
    const float* const parts = partial + head * most * kQueries * kPart;
    combine(parts, out + head * kQueries * kHead, chunks, memory.parts);
}
