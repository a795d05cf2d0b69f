// Norms that are quantized, both directions.
//
// A group of GROUP blocks, all of which run at a time, has TALL rows at a time, each block WIDE columns of
// them, which are copied to a stage of its shared memory. Some warps sum the rows LEAD tiles before they are
// encoded, post the sums where all blocks of the group look, and encode down the columns what others have
// left that encode rows. A last warp waits for the sums and tells its block what they make. So nobody else
// waits for sums, nor, with STAGES stages, for memory.

constexpr int kColumnThreads = COLUMN_THREADS, kColumnWarps = kColumnThreads / 32;
constexpr bool kHeld = !BIAS;  // whether weights and bias stay in registers

// A block's columns are what a warp sums; at a time it has so many rows.
constexpr int kSummed = TALL / kColumnWarps, kShare = 32 / kSummed, kMostTerms = 32;
static_assert(WIDE * sizeof(Given) == 1024 && TALL == 32 && GROUP <= kMostTerms, "a lane has a row's terms");
// Whoever posts a tile's sums knows that every block has read those of so many tiles before, and that
// its own has encoded the rows of so many before.
constexpr int kPosts = 2 * LEAD + 2, kFound = LEAD + 1;

// `over_warp` of what `of` makes of sum e and a value. A lane has two vectors of a term's, `mine` on.
template <class Of>
__device__ __forceinline__ float over_columns(const Given* mine, i64 real, Of of) {
    float sums[kSummed];
#pragma unroll
    for (int e = 0; e < kSummed; ++e) {
        sums[e] = 0;
#pragma unroll
        for (int at = 0; at < WIDE; at += WIDE / 2) {
            u32 words[4];
            load_vector(words, mine + e * WIDE + at, at < real);
#pragma unroll
            for (int k = 0; k < kGivenVector; ++k) sums[e] = of(sums[e], given(words, k), e, WHOLE || at < real);
        }
    }
    return over_warp(sums);
}

// Columns of a term.
__device__ __forceinline__ float width_of(int term, i64 columns) {
    return WHOLE ? WIDE : static_cast<float>(min(static_cast<i64>(WIDE), max(columns - term * WIDE, static_cast<i64>(0))));
}

typedef u64 Posts[NORM][GROUP][TALL];  // a float and the number of its tile: squares about the mean; with NORM 2 the mean

// A warp's sums to their places `to`; `from`: the lane's first columns, of term `term`.
__device__ __forceinline__ void post_sums(const Given* from, i64 real, int term, i64 columns, u64* to, u32 tile) {
    const int lane = threadIdx.x % 32;
    const auto post_all = [&](int n, float v) {
        u64 *const mine = to + n * GROUP * TALL + lane / kShare, it = static_cast<u64>(tile) << 32 | __float_as_uint(v);
        if (lane % kShare) return;
        if (GROUP > 1)
            post(mine, it);
        else
            *mine = it;
    };
#if NORM == 2
    const float width = width_of(term, columns);
    float mean = over_columns(from, real, [](float sum, float v, int, bool) { return __fadd_rn(sum, v); });
    mean = width > 0 ? __fdiv_rn(mean, width) : 0.0f;
    float middles[kSummed];
#pragma unroll
    for (int e = 0; e < kSummed; ++e) middles[e] = __shfl_sync(~0u, mean, e * kShare);
    post_all(1, mean);
    post_all(0, over_columns(from, real, [&](float sum, float v, int e, bool inside) {
        v = inside ? __fsub_rn(v, middles[e]) : 0.0f;
        return __fmaf_rn(v, v, sum);
    }));
#else
    post_all(0, over_columns(from, real, [](float sum, float v, int, bool) { return __fmaf_rn(v, v, sum); }));
#endif
}

// A block alone keeps its sums to itself, and waits for them at a barrier.
__device__ __forceinline__ u64 look(const u64* from) { return GROUP > 1 ? posted(from) : *from; }

// A tile's terms of a row, once all of them are there.
__device__ __forceinline__ void await_terms(float (&terms)[kMostTerms], const u64* from, u32 tile) {
    for (;;) {
        bool there = true;
#pragma unroll
        for (int t = 0; t < kMostTerms; ++t) {
            const u64 found = t < GROUP ? look(from + t * TALL) : 0;
            terms[t] = float_of(static_cast<u32>(found));
            if (t < GROUP) there &= found >> 32 == tile;
        }
        if (GROUP == 1 || __all_sync(~0u, there)) return;
        asm volatile("nanosleep.u32 64;");
    }
}

// The order is the same for all rows of a length.
template <int kHalf = kMostTerms / 2>
__device__ __forceinline__ float sum_of(float (&terms)[kMostTerms]) {
#pragma unroll
    for (int t = 0; t < kHalf; ++t) terms[t] = __fadd_rn(terms[t], terms[t + kHalf]);
    if constexpr (kHalf > 1) return sum_of<kHalf / 2>(terms);
    return terms[0];
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
quantize_normed(const __grid_constant__ Norm p) {
    extern __shared__ u8 raw_memory[];
    Given* const tiles = reinterpret_cast<Given*>(raw_memory);
    typedef float Found[NORM][TALL];  // rstds and means
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % GROUP;
    const int step = gridDim.x / GROUP, from = blockIdx.x / GROUP;
    Posts* posts = reinterpret_cast<Posts*>(tiles + STAGES * TALL * WIDE);
    Found* const found = reinterpret_cast<Found*>(posts + (GROUP == 1) * kPosts);
    u32* const left_by = reinterpret_cast<u32*>(found + kFound);  // warps that have left each stage
    const u32 summed = shared_address(left_by + STAGES + STAGES % 2), ready = summed + 8 * kFound, coded = ready + 8 * STAGES,
              sent = coded + 8 * STAGES;  // to itself
    if (GROUP > 1) posts = reinterpret_cast<Posts*>(p.posts) + from * kPosts;
    const i64 left = static_cast<i64>(rank) * WIDE;
    const int count = (static_cast<int>((p.rows + TALL - 1) / TALL) - from + step - 1) / step;  // tiles
    const Tiles own = {p, tiles, left_by, ready, left, from, step, count};

    if (warp == 0) {
        if (lane == 0) {
            for (int b = 0; b < kFound; ++b) barrier_init(summed + 8 * b, 32);
            for (int b = 0; b < kPosts; ++b) barrier_init(sent + 8 * b, 32 * kColumnWarps);
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(ready + 8 * s, 1), barrier_init(coded + 8 * s, kRowThreads);
                left_by[s] = 0;
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        for (int i = 0; i < min(STAGES, count); ++i) own.fill(i);
    }
    __syncthreads();

    const float length = static_cast<float>(p.columns);
    if (warp == kThreads / 32 - 1) {
        for (int i = 0; i < count; ++i) {
            const auto& here = posts[i % kPosts];
            wait(sent + 8 * (i % kPosts), i / kPosts % 2);  // the tile is written over when its sums are told
            float terms[kMostTerms], mean = 0;
#if NORM == 2
            await_terms(terms, &here[1][0][lane], i + 1);
#pragma unroll
            for (int t = 0; t < kMostTerms; ++t) terms[t] = __fmul_rn(terms[t], width_of(t, p.columns));
            mean = __fdiv_rn(sum_of(terms), length);
            found[i % kFound][NORM - 1][lane] = mean;
#endif
            await_terms(terms, &here[0][0][lane], i + 1);
#if NORM == 2
#pragma unroll
            for (int t = 0; t < GROUP; ++t) {
                const float apart = __fsub_rn(float_of(static_cast<u32>(look(&here[1][t][lane]))), mean);
                terms[t] = __fadd_rn(terms[t], __fmul_rn(__fmul_rn(apart, apart), width_of(t, p.columns)));
            }
#endif
            const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of(terms), length), p.eps)));
            found[i % kFound][0][lane] = rstd;
            if (rank == 0 && own.top(i) + lane < p.rows) {
                p.rstd[own.top(i) + lane] = rstd;
                if (NORM == 2) p.mean[own.top(i) + lane] = mean;
            }
            arrive(summed + 8 * (i % kFound));
        }
        return;
    }
    const auto sum = [&](int i) {
        const int row = (warp - kRowWarps) * kSummed, at = lane * kGivenVector;
        wait(ready + 8 * (i % STAGES), i / STAGES % 2);
        post_sums(own.tile(i) + row * WIDE + at, p.columns - left - at, rank, p.columns,
                  &posts[i % kPosts][0][rank][row], i + 1);
        arrive(sent + 8 * (i % kPosts));
    };
    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally = {0, 0};
    if (warp >= kRowWarps) {
        constexpr int kPitch = WIDE * sizeof(Given) / sizeof(Raw), kItems = TALL / kChunk * WIDE / COLUMNS;
        static_assert(kItems <= kColumnThreads, "one each");
        const int item = threadIdx.x - kRowThreads;
        for (int i = -LEAD; i < count; ++i) {
            if (i + LEAD < count) sum(i + LEAD);
            if (i < 0) continue;
            wait(coded + 8 * (i % STAGES), i / STAGES % 2);
            if (item < kItems)
                encode_down<kPitch>(reinterpret_cast<const Raw*>(own.tile(i)), item, own.top(i), left, p.rows, p.columns,
                                    tensor, stream, p.codes[1], p.scales[1], nullptr, tally);
            own.leave<kColumnWarps>(i);
        }
        add_counts(tally, p.counters + 2 * kSlots);
        return;
    }
    const int first = threadIdx.x / kSide * kEach, side = threadIdx.x % kSide;
    const i64 start = left + side * kChunk, real = p.columns - start;
    float weight[kChunk], bias[kChunk];
    if (kHeld) load_factors(p, weight, bias, start, real);
    for (int i = 0; i < count; ++i) {
        wait(summed + 8 * (i % kFound), i / kFound % 2);
        wait(ready + 8 * (i % STAGES), i / STAGES % 2);
        const i64 top = own.top(i), along = tiles_along(p.columns), block = (top + first) * along + start / BLOCK;
        if (!kHeld) load_factors(p, weight, bias, start, real);
#pragma unroll (WHOLE ? 4 : 2)  // registers
        for (int e = 0; e < kEach; ++e) {
            const i64 inside = WHOLE || top + first + e < p.rows ? real : 0;
            const float middle = found[i % kFound][NORM - 1][first + e], factor = found[i % kFound][0][first + e];
            Given* const row = own.tile(i) + (first + e) * WIDE;
            u32 words[kGivenWords], raw[kChunk / 2];
            load_chunk(words, row + side * kChunk, inside);
            normalize(raw, words, middle, factor, weight, bias, inside);
            __syncwarp();  // all lanes have read the row, where what they write may lie
            uint4* to = reinterpret_cast<uint4*>(reinterpret_cast<u16*>(row) + side * kChunk);
            to[0] = uint4{raw[0], raw[1], raw[2], raw[3]}, to[1] = uint4{raw[4], raw[5], raw[6], raw[7]};
            encode_along(raw, top + first + e, start, block + e * along, p.rows, p.columns, tensor, stream, p.codes[0], p.scales[0],
                         nullptr, tally);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // a copy will overwrite what was stored
        arrive(coded + 8 * (i % STAGES));
    }
    add_counts(tally, p.counters);
}
