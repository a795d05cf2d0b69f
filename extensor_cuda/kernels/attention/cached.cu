// Attention of one token of each text to the keys and values of a cache, to which its own are
// added. A block has a text's key head, the queries that share it, and CACHED_CHUNK of its keys at
// most; the last of a head's blocks to finish adds what all left, in the order of the keys. So a
// text's bits depend neither on other texts nor on which block was last.
//
// Of float32; code runs once or twice in a launch, so it is short: loops are rolled where memory
// allows. bfloat16 has cached_bf16.cu.
//
// Macros: NN_A, 0; CACHED_HEAD, d; CACHED_QUERIES, those that share a key; CACHED_CHUNK, a multiple
// of 64. Limits: cached.py.

#include "common/types.cuh"

constexpr int kThreads = 256;

#include "attention/cached.cuh"

constexpr int kTile = 32;                                           // keys at a time
constexpr int kUnit = 16 / sizeof(T::Raw), kUnits = kHead / kUnit;  // 16 bytes of a row
constexpr int kPitch = kHead + kUnit;  // of rows; avoids bank conflicts

struct Shared {
    alignas(16) T::Raw rows[2][kTile * kPitch];  // keys, values
    alignas(16) float q[kQueries][kHead], scores[kQueries][kTile];
    float top[kQueries], weight[kQueries], factor[kQueries];  // the last rescales what was summed
};
union Memory {
    Shared tile;
    Combined parts;
};

// Copies a tile's keys and values to shared memory, zeros for those from `end` on. Row `own` is
// left alone.
DEVICE void load_tile(
    Shared& shared, const T::Raw* keys, const T::Raw* values, i64 start, i64 end, i64 own) {
    constexpr int kOfKeys = kTile * kUnits, kCount = 2 * kOfKeys / kThreads;
    static_assert(kCount * kThreads == 2 * kOfKeys, "threads have as much to copy");
    uint4 got[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        const int i = n * kThreads + threadIdx.x, row = i / kUnits % kTile;
        const i64 token = start + row < end ? start + row : end - 1;
        const T::Raw* const from = (i < kOfKeys ? keys : values) + token * kHead;
        got[n] = reinterpret_cast<const uint4*>(from)[i % kUnits];
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        const int i = n * kThreads + threadIdx.x, row = i / kUnits % kTile;
        T::Raw* const to = shared.rows[i < kOfKeys ? 0 : 1] + row * kPitch + i % kUnits * kUnit;
        if (start + row >= end) got[n] = uint4{0, 0, 0, 0};
        if (start + row != own) *reinterpret_cast<uint4*>(to) = got[n];
    }
}

// A thread has a key, and every kGroups-th query.
DEVICE void find_scores(Shared& shared, int there) {
    constexpr int kGroups = kThreads / kTile, kMine = (kQueries + kGroups - 1) / kGroups;
    const int key = threadIdx.x % kTile, group = threadIdx.x / kTile;
    float sum[kMine] = {};
#pragma unroll 2
    for (int at = 0; at < kHead; at += kVector) {
        const FloatVector k = T::load(shared.rows[0] + key * kPitch + at);
#pragma unroll
        for (int m = 0; m < kMine; ++m) {
            const float* const q = shared.q[min(group + m * kGroups, kQueries - 1)];
            const FloatVector part = ElementType<0>::load(q + at);
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum[m] = fmaf(part.v[e], k.v[e], sum[m]);
        }
    }
#pragma unroll
    for (int m = 0; m < kMine; ++m)
        if (group + m * kGroups < kQueries)
            shared.scores[group + m * kGroups][key] = key < there ? sum[m] : kNone;
}

// Scores become weights relative to the largest score so far. A warp has a query.
DEVICE void find_weights(Shared& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int query = threadIdx.x / 32; query < kQueries; query += kThreads / 32) {
        float* const scores = shared.scores[query];
        const float old = shared.top[query], score = scores[lane];
        float top = fmaxf(old, score);
#pragma unroll
        for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        const float weight = exp2f(score - top);
        float sum = weight;
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        scores[lane] = weight;
        if (lane == 0) {
            const float factor = exp2f(old - top);
            shared.top[query] = top, shared.factor[query] = factor;
            shared.weight[query] = shared.weight[query] * factor + sum;
        }
        __syncwarp();
    }
}

// Two neighbouring values of every kGroups-th query are a thread's.
struct Sums {
    static constexpr int kPairs = kHead / 2, kGroups = kThreads / kPairs,
                         kMine = (kQueries + kGroups - 1) / kGroups;
    float2 sum[kMine];
    DEVICE static int query(int m) { return threadIdx.x / kPairs + m * kGroups; }
    DEVICE static int column() { return threadIdx.x % kPairs * 2; }

    // Adds a tile's values times their weights.
    DEVICE void add(const Shared& shared) {
#pragma unroll
        for (int m = 0; m < kMine; ++m) {
            const float factor = shared.factor[min(query(m), kQueries - 1)];
            sum[m].x *= factor, sum[m].y *= factor;
        }
#pragma unroll 2
        for (int key = 0; key < kTile; key += 4) {
            float2 v[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const T::Raw* const at = shared.rows[1] + (key + n) * kPitch + column();
                v[n] = float2{T::wide(at[0]), T::wide(at[1])};
            }
#pragma unroll
            for (int m = 0; m < kMine; ++m) {
                const float4 p = *reinterpret_cast<const float4*>(
                    &shared.scores[min(query(m), kQueries - 1)][key]);
                const float weights[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    sum[m].x = fmaf(weights[n], v[n].x, sum[m].x),
                    sum[m].y = fmaf(weights[n], v[n].y, sum[m].y);
            }
        }
    }
};

// q (B, H, d), k and v (B, Hkv, d) by these strides; keys and values (B, Hkv, capacity, d); out (B,
// H, d); all but `done` aligned to 16 bytes. `done` holds a zero for each head, and does again.
extern "C" __global__ void __launch_bounds__(kThreads, kQueries > 8 ? 2 : 3) attend_cached(
    const T::Raw* q, const T::Raw* k, const T::Raw* v, T::Raw* keys, T::Raw* values,
    const i64* where, float* __restrict__ partial, u32* __restrict__ done, T::Raw* __restrict__ out,
    i64 given, i64 capacity, i64 heads, i64 most, i64 blocks, i64 q_batch, i64 q_head, i64 k_batch,
    i64 k_head, i64 v_batch, i64 v_head, const float* cosine, const float* sine, float scale) {
    __shared__ Memory memory;
    __shared__ u32 last;
    Shared& shared = memory.tile;
    const u32 number = blockIdx.x / static_cast<u32>(blocks);  // a key head of a text
    const i64 head = number, chunk = blockIdx.x - number * static_cast<u32>(blocks);
    const i64 length = length_of(where, given) + 1, first = chunk * CACHED_CHUNK;
    const i64 end = length < first + CACHED_CHUNK ? length : first + CACHED_CHUNK;
    if (first >= length || length > capacity) return;
    const int chunks = static_cast<int>((length + CACHED_CHUNK - 1) / CACHED_CHUNK);
    const i64 batch = number / static_cast<u32>(heads), of_text = head - batch * heads;
    const T::Raw* const new_key = k + batch * k_batch + of_text * k_head;
    const T::Raw* const new_value = v + batch * v_batch + of_text * v_head;
    T::Raw* const of_head[2] = {keys + head * capacity * kHead, values + head * capacity * kHead};
    for (int i = threadIdx.x; i < kQueries * kHead / kVector; i += kThreads) {
        const int query = i / (kHead / kVector), d = i % (kHead / kVector) * kVector;
        const T::Raw* const row = q + batch * q_batch + (of_text * kQueries + query) * q_head;
        FloatVector part = turned(row, d, cosine, sine);
#pragma unroll
        for (int e = 0; e < kVector; ++e) part.v[e] *= scale * kLog2E;
        ElementType<0>::store(shared.q[query] + d, part);
    }
    if (threadIdx.x < kQueries) shared.top[threadIdx.x] = kNone, shared.weight[threadIdx.x] = 0;
    Sums sums = {};
#pragma unroll 1
    for (i64 start = first; start < end; start += kTile) {
        const i64 own = length - 1;
        load_tile(shared, of_head[0], of_head[1], start, end, own);
        if (start <= own && own < start + kTile && threadIdx.x < kHead / kVector) {
            const int d = threadIdx.x * kVector, row = static_cast<int>(own - start) * kPitch + d;
            const FloatVector key = turned(new_key, d, cosine, sine),
                              value = T::load(new_value + d);
            T::store(shared.rows[0] + row, key), T::store(shared.rows[1] + row, value);
            T::store(of_head[0] + own * kHead + d, key);
            T::store(of_head[1] + own * kHead + d, value);
        }
        __syncthreads();
        find_scores(shared, static_cast<int>(end - start));
        __syncthreads();
        find_weights(shared);
        __syncthreads();
        sums.add(shared);
        __syncthreads();
    }
    float* const mine = partial + (head * most + chunk) * kQueries * kPart;
#pragma unroll
    for (int m = 0; m < Sums::kMine; ++m)
        if (Sums::query(m) < kQueries)
            *reinterpret_cast<float2*>(mine + Sums::query(m) * kPart + Sums::column()) =
                sums.sum[m];
    if (threadIdx.x < kQueries) {
        mine[threadIdx.x * kPart + kHead] = shared.top[threadIdx.x];
        mine[threadIdx.x * kPart + kHead + 1] = shared.weight[threadIdx.x];
    }
    if (!is_last(done + head, 1, static_cast<u32>(chunks), last)) return;
    const float* const parts = partial + head * most * kQueries * kPart;
    combine(parts, out + head * kQueries * kHead, chunks, memory.parts);
}
