// Norms quantized rowwise and columnwise. Macros: QUANT_ (norm_quantize.py).
//
// A group of QUANT_GROUP co-resident blocks has QUANT_CTA_ROWS rows at a time, and each block
// QUANT_CTA_COLUMNS of their columns, copied to a stage of shared memory. Some warps sum rows
// QUANT_NORM_LEAD tiles ahead, post the sums to the group, and encode columnwise what the
// row-encoding warps left. One more warp waits for the sums and hands the results to its block. So
// no other warp waits for sums, nor, with QUANT_STAGES stages, for memory.

constexpr int kColumnThreads = QUANT_COLUMN_THREADS, kColumnWarps = kColumnThreads / 32;
constexpr bool kHeld = !QUANT_NORM_BIAS;  // whether weights and bias stay in registers

// A warp sums all of a block's columns for so many rows at a time.
constexpr int kSummed = QUANT_CTA_ROWS / kColumnWarps, kShare = 32 / kSummed, kMostTerms = 32;
static_assert(QUANT_CTA_COLUMNS * sizeof(NormInput) == 1024 && QUANT_CTA_ROWS == 32 &&
                  QUANT_GROUP <= kMostTerms,
    "a lane has a row's terms");
// When a tile's sums are posted, every block has read those of kPosts tiles before, and this block
// has encoded the rows of kFound tiles before.
constexpr int kPosts = 2 * QUANT_NORM_LEAD + 2, kFound = QUANT_NORM_LEAD + 1;

// `over_warp` of `of`(sum e, value). A lane has two vectors of a term, from `mine` on.
template <class Of>
DEVICE float over_columns(const NormInput* mine, i64 real, Of of) {
    float sums[kSummed];
#pragma unroll
    for (int e = 0; e < kSummed; ++e) {
        sums[e] = 0;
#pragma unroll
        for (int at = 0; at < QUANT_CTA_COLUMNS; at += QUANT_CTA_COLUMNS / 2) {
            u32 words[4];
            load_vector(words, mine + e * QUANT_CTA_COLUMNS + at, at < real);
#pragma unroll
            for (int k = 0; k < kInputVector; ++k)
                sums[e] = of(sums[e], given(words, k), e, QUANT_WHOLE || at < real);
        }
    }
    return over_warp(sums);
}

// How many columns a term covers.
DEVICE float width_of(int term, i64 columns) {
    return QUANT_WHOLE ? QUANT_CTA_COLUMNS
                       : static_cast<float>(min(static_cast<i64>(QUANT_CTA_COLUMNS),
                             max(columns - term * QUANT_CTA_COLUMNS, static_cast<i64>(0))));
}

typedef u64 Posts[QUANT_NORM][QUANT_GROUP]
                 [QUANT_CTA_ROWS];  // a float and its tile's number: squares about the mean;
                                    // QUANT_NORM 2: and the mean

// Posts a warp's sums to `to`; `from`: the lane's first columns, of term `term`.
DEVICE void post_sums(const NormInput* from, i64 real, int term, i64 columns, u64* to, u32 tile) {
    const int lane = threadIdx.x % 32;
    const auto post_all = [&](int n, float v) {
        u64 *const mine = to + n * QUANT_GROUP * QUANT_CTA_ROWS + lane / kShare,
                   it = static_cast<u64>(tile) << 32 | __float_as_uint(v);
        if (lane % kShare) return;
        if (QUANT_GROUP > 1) store_relaxed(mine, it);
        else *mine = it;
    };
#if QUANT_NORM == 2
    const float width = width_of(term, columns);
    float mean =
        over_columns(from, real, [](float sum, float v, int, bool) { return __fadd_rn(sum, v); });
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
    post_all(0, over_columns(from, real,
                    [](float sum, float v, int, bool) { return __fmaf_rn(v, v, sum); }));
#endif
}

// A block without a group keeps its sums to itself and waits at a barrier.
DEVICE u64 load_post(const u64* from) { return QUANT_GROUP > 1 ? load_relaxed(from) : *from; }

// Reads a row's terms of a tile, once all are posted.
DEVICE void await_terms(float (&terms)[kMostTerms], const u64* from, u32 tile) {
    for (;;) {
        bool there = true;
#pragma unroll
        for (int t = 0; t < kMostTerms; ++t) {
            const u64 found = t < QUANT_GROUP ? load_post(from + t * QUANT_CTA_ROWS) : 0;
            terms[t] = float_of(static_cast<u32>(found));
            if (t < QUANT_GROUP) there &= found >> 32 == tile;
        }
        if (QUANT_GROUP == 1 || __all_sync(~0u, there)) return;
        asm volatile("nanosleep.u32 64;");
    }
}

// The order is the same for all rows of a length.
template <int kHalf = kMostTerms / 2>
DEVICE float sum_of(float (&terms)[kMostTerms]) {
#pragma unroll
    for (int t = 0; t < kHalf; ++t) terms[t] = __fadd_rn(terms[t], terms[t + kHalf]);
    if constexpr (kHalf > 1) return sum_of<kHalf / 2>(terms);
    return terms[0];
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    quantize_normed(const __grid_constant__ Norm p) {
    extern __shared__ u8 raw_memory[];
    NormInput* const tiles = reinterpret_cast<NormInput*>(raw_memory);
    typedef float Found[QUANT_NORM][QUANT_CTA_ROWS];  // rstds and means
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % QUANT_GROUP;
    const int step = gridDim.x / QUANT_GROUP, from = blockIdx.x / QUANT_GROUP;
    Posts* posts =
        reinterpret_cast<Posts*>(tiles + QUANT_STAGES * QUANT_CTA_ROWS * QUANT_CTA_COLUMNS);
    Found* const found = reinterpret_cast<Found*>(posts + (QUANT_GROUP == 1) * kPosts);
    u32* const left_by =
        reinterpret_cast<u32*>(found + kFound);  // warps that have released each stage
    const u32 summed = shared_address(left_by + QUANT_STAGES + QUANT_STAGES % 2),
              ready = summed + 8 * kFound, coded = ready + 8 * QUANT_STAGES,
              sent = coded + 8 * QUANT_STAGES;  // to itself
    if (QUANT_GROUP > 1) posts = reinterpret_cast<Posts*>(p.posts) + from * kPosts;
    const i64 left = static_cast<i64>(rank) * QUANT_CTA_COLUMNS;
    const int count =
        (static_cast<int>((p.rows + QUANT_CTA_ROWS - 1) / QUANT_CTA_ROWS) - from + step - 1) /
        step;  // in tiles
    const Tiles own = {p, tiles, left_by, ready, left, from, step, count};

    if (warp == 0) {
        if (lane == 0) {
            for (int b = 0; b < kFound; ++b) barrier_init(summed + 8 * b, 32);
            for (int b = 0; b < kPosts; ++b) barrier_init(sent + 8 * b, 32 * kColumnWarps);
            for (int s = 0; s < QUANT_STAGES; ++s) {
                barrier_init(ready + 8 * s, 1), barrier_init(coded + 8 * s, kRowThreads);
                left_by[s] = 0;
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        for (int i = 0; i < min(QUANT_STAGES, count); ++i) own.fill(i);
    }
    __syncthreads();

    const float length = static_cast<float>(p.columns);
    if (warp == kThreads / 32 - 1) {
        for (int i = 0; i < count; ++i) {
            const auto& here = posts[i % kPosts];
            barrier_wait(sent + 8 * (i % kPosts),
                i / kPosts % 2);  // the tile is overwritten once its sums are handed over
            float terms[kMostTerms], mean = 0;
#if QUANT_NORM == 2
            await_terms(terms, &here[1][0][lane], i + 1);
#pragma unroll
            for (int t = 0; t < kMostTerms; ++t)
                terms[t] = __fmul_rn(terms[t], width_of(t, p.columns));
            mean = __fdiv_rn(sum_of(terms), length);
            found[i % kFound][QUANT_NORM - 1][lane] = mean;
#endif
            await_terms(terms, &here[0][0][lane], i + 1);
#if QUANT_NORM == 2
#pragma unroll
            for (int t = 0; t < QUANT_GROUP; ++t) {
                const float apart =
                    __fsub_rn(float_of(static_cast<u32>(load_post(&here[1][t][lane]))), mean);
                terms[t] =
                    __fadd_rn(terms[t], __fmul_rn(__fmul_rn(apart, apart), width_of(t, p.columns)));
            }
#endif
            const float rstd =
                __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of(terms), length), p.eps)));
            found[i % kFound][0][lane] = rstd;
            if (rank == 0 && own.top(i) + lane < p.rows) {
                p.rstd[own.top(i) + lane] = rstd;
                if (QUANT_NORM == 2) p.mean[own.top(i) + lane] = mean;
            }
            barrier_arrive(summed + 8 * (i % kFound));
        }
        return;
    }
    const auto sum = [&](int i) {
        const int row = (warp - kRowWarps) * kSummed, at = lane * kInputVector;
        barrier_wait(ready + 8 * (i % QUANT_STAGES), i / QUANT_STAGES % 2);
        post_sums(own.tile(i) + row * QUANT_CTA_COLUMNS + at, p.columns - left - at, rank,
            p.columns, &posts[i % kPosts][0][rank][row], i + 1);
        barrier_arrive(sent + 8 * (i % kPosts));
    };
    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally = {0, 0};
    if (warp >= kRowWarps) {
        constexpr int kPitch = QUANT_CTA_COLUMNS * sizeof(NormInput) / sizeof(Raw),
                      kItems = QUANT_CTA_ROWS / kChunk * QUANT_CTA_COLUMNS / QUANT_THREAD_COLUMNS;
        static_assert(kItems <= kColumnThreads, "one each");
        const int item = threadIdx.x - kRowThreads;
        for (int i = -QUANT_NORM_LEAD; i < count; ++i) {
            if (i + QUANT_NORM_LEAD < count) sum(i + QUANT_NORM_LEAD);
            if (i < 0) continue;
            barrier_wait(coded + 8 * (i % QUANT_STAGES), i / QUANT_STAGES % 2);
            if (item < kItems)
                encode_columnwise<kPitch>(reinterpret_cast<const Raw*>(own.tile(i)), item,
                    own.top(i), left, p.rows, p.columns, tensor, stream, p.codes[1], p.scales[1],
                    nullptr, tally);
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
        barrier_wait(summed + 8 * (i % kFound), i / kFound % 2);
        barrier_wait(ready + 8 * (i % QUANT_STAGES), i / QUANT_STAGES % 2);
        const i64 top = own.top(i), along = tiles_along(p.columns),
                  block = (top + first) * along + start / CODEC_BLOCK;
        if (!kHeld) load_factors(p, weight, bias, start, real);
#pragma unroll(QUANT_WHOLE ? 4 : 2)  // saves registers
        for (int e = 0; e < kEach; ++e) {
            const i64 inside = QUANT_WHOLE || top + first + e < p.rows ? real : 0;
            const float middle = found[i % kFound][QUANT_NORM - 1][first + e],
                        factor = found[i % kFound][0][first + e];
            NormInput* const row = own.tile(i) + (first + e) * QUANT_CTA_COLUMNS;
            u32 words[kInputWords], raw[kChunk / 2];
            load_chunk(words, row + side * kChunk, inside);
            normalize(raw, words, middle, factor, weight, bias, inside);
            __syncwarp();  // all lanes have read the row, which their stores may overwrite
            uint4* to = reinterpret_cast<uint4*>(reinterpret_cast<u16*>(row) + side * kChunk);
            to[0] = uint4{raw[0], raw[1], raw[2], raw[3]},
            to[1] = uint4{raw[4], raw[5], raw[6], raw[7]};
            encode_rowwise(raw, top + first + e, start, block + e * along, p.rows, p.columns,
                tensor, stream, p.codes[0], p.scales[0], nullptr, tally);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::
                : "memory");  // orders the stores before the copy that overwrites them
        barrier_arrive(coded + 8 * (i % QUANT_STAGES));
    }
    add_counts(tally, p.counters);
}
