// Norms quantized rowwise only. Macros: QUANT_ (norm_quantize.py).
//
// A cluster of QUANT_GROUP blocks has QUANT_CTA_ROWS rows at a time, and each block
// QUANT_CTA_COLUMNS of their columns, copied to a stage of shared memory. A thread has a chunk of
// columns in kEach rows. Sums run over a thread, then a warp, then the warps of a row. Each warp
// sends its sums to all blocks before it encodes the previous rows, so that no warp waits for sums,
// nor, with QUANT_STAGES stages, for memory.

constexpr int kSlices = kSide / 32;  // warps that share a row of the block
constexpr int kShare = 32 / kEach;   // lanes that hold the sum of one of a warp's rows
constexpr int kTerms = (QUANT_GROUP * kSlices + 31) / 32 * 32;  // warp sums that make a row's

DEVICE float of_row(float of_lanes, int e) { return __shfl_sync(~0u, of_lanes, e * kShare); }

// Stores `*to = v` in block `rank` of the cluster and adds 4 bytes at its barrier.
DEVICE void send(float* to, float v, u32 barrier, int rank) {
    if (QUANT_GROUP == 1) {
        *to = v;  // `sent` completes it
        return;
    }
    asm volatile(
        "{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %2, "
        "%3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %1, [b];\n}" ::"r"(
            shared_address(to)),
        "f"(v), "r"(barrier), "r"(rank)
        : "memory");
}
// A block without a cluster waits for its threads, others wait for bytes.
constexpr int kSent = sizeof(float) * QUANT_NORM * QUANT_CTA_ROWS * QUANT_GROUP * kSlices;
DEVICE void sent(u32 barrier) {
    if (QUANT_GROUP == 1) barrier_arrive(barrier);
}
DEVICE void expect_sums(u32 barrier) {
    if (QUANT_GROUP > 1) barrier_expect_bytes(barrier, kSent);
}

typedef float Terms[QUANT_NORM][QUANT_CTA_ROWS]
                   [kTerms];  // per warp: squares about its mean; QUANT_NORM 2: and the mean

// Sends the sums of a warp's rows, from `row` on, to all blocks.
DEVICE void send_sums(
    const NormInput* mine, i64 real, float width, Terms& terms, u32 barrier, int row, int term) {
    const int lane = threadIdx.x % 32;
    float sums[kEach], mean = 0;
    u32 words[kInputWords];
#if QUANT_NORM == 2
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * QUANT_CTA_COLUMNS, real);
        sums[e] = 0;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) sums[e] = __fadd_rn(sums[e], given(words, k));
    }
    mean = over_warp(sums);
    mean = width > 0 ? __fdiv_rn(mean, width) : 0.0f;
#endif
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * QUANT_CTA_COLUMNS, real);
        const float middle = QUANT_NORM == 2 ? of_row(mean, e) : 0.0f;
        sums[e] = 0;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            float v = given(words, k);
            if (QUANT_NORM == 2) v = QUANT_WHOLE || k < real ? __fsub_rn(v, middle) : 0.0f;
            sums[e] = __fmaf_rn(v, v, sums[e]);
        }
    }
    const float squares = over_warp(sums);
    for (int to = lane % kShare; to < QUANT_GROUP; to += kShare) {
        send(&terms[0][row + lane / kShare][term], squares, barrier, to);
        if (QUANT_NORM == 2)
            send(&terms[QUANT_NORM - 1][row + lane / kShare][term], mean, barrier, to);
    }
    sent(barrier);
}

// How many columns a warp's term covers.
DEVICE float width_of(int term, i64 columns) {
    return QUANT_WHOLE ? 512.0f
                       : static_cast<float>(min(static_cast<i64>(512),
                             max(columns - term * 512, static_cast<i64>(0))));
}

// Lane l gets the sum over all terms of row l / kShare.
template <class Of>
DEVICE float over_terms(Of of) {
    const int lane = threadIdx.x % 32;
    float sums[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        sums[e] = 0;
#pragma unroll
        for (int t = 0; t < kTerms; t += 32)
            if (t + lane < QUANT_GROUP * kSlices) sums[e] = __fadd_rn(sums[e], of(e, t + lane));
    }
    return over_warp(sums);
}

extern "C" __global__ void QUANT_CLUSTER_DIMS __launch_bounds__(kThreads, 1)
    quantize_normed_rows(const __grid_constant__ Norm p) {
    extern __shared__ u8 raw_memory[];
    NormInput* const tiles = reinterpret_cast<NormInput*>(raw_memory);
    Terms* const terms =
        reinterpret_cast<Terms*>(tiles + QUANT_STAGES * QUANT_CTA_ROWS * QUANT_CTA_COLUMNS);
    u32* const left_by = reinterpret_cast<u32*>(terms + 2);  // warps that have released each stage
    const u32 summed = shared_address(left_by + 4), ready = summed + 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % QUANT_GROUP;
    const i64 left = static_cast<i64>(rank) * QUANT_CTA_COLUMNS;
    const int step = gridDim.x / QUANT_GROUP, from = blockIdx.x / QUANT_GROUP;
    const int count =
        (static_cast<int>((p.rows + QUANT_CTA_ROWS - 1) / QUANT_CTA_ROWS) - from + step - 1) /
        step;  // in tiles
    const Tiles own = {p, tiles, left_by, ready, left, from, step, count};

    if (warp == 0) {
        if (lane == 0) {
            for (int b = 0; b < 2; ++b)
                barrier_init(summed + 8 * b, QUANT_GROUP > 1 ? 1 : kRowThreads);
            for (int s = 0; s < QUANT_STAGES; ++s) {
                barrier_init(ready + 8 * s, 1);
                left_by[s] = 0;
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int b = 0; b < 2; ++b) expect_sums(summed + 8 * b);
        }
        __syncwarp();
        for (int i = 0; i < min(QUANT_STAGES, count); ++i) own.fill(i);
    }
    __syncthreads();
    if (QUANT_GROUP > 1) cluster_sync();  // the receiving blocks have started

    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally = {0, 0};
    const int first = warp / kSlices * kEach, side = threadIdx.x % kSide,
              term = rank * kSlices + warp % kSlices;
    const i64 start = left + side * kChunk, real = p.columns - start;
    const float length = static_cast<float>(p.columns), width = width_of(term, p.columns);
    const auto sum = [&](int i) {
        barrier_wait(ready + 8 * (i % QUANT_STAGES), i / QUANT_STAGES % 2);
        send_sums(own.tile(i) + first * QUANT_CTA_COLUMNS + side * kChunk, real, width,
            terms[i % 2], summed + 8 * (i % 2), first, term);
    };
    float weight[kChunk], bias[kChunk];
    load_factors(p, weight, bias, start, real);
    sum(0);
    for (int i = 0; i < count; ++i) {
        barrier_wait(summed + 8 * (i % 2), i / 2 % 2);
        const Terms& t = terms[i % 2];
        const i64 top = own.top(i), along = tiles_along(p.columns),
                  block = (top + first) * along + start / CODEC_BLOCK;
        float mean = 0;
#if QUANT_NORM == 2
        mean = __fdiv_rn(over_terms([&](int e, int of) {
            return __fmul_rn(t[QUANT_NORM - 1][first + e][of], width_of(of, p.columns));
        }),
            length);
        float middles[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) middles[e] = of_row(mean, e);
        const float square = over_terms([&](int e, int of) {
            const float apart = __fsub_rn(t[QUANT_NORM - 1][first + e][of], middles[e]);
            return __fadd_rn(
                t[0][first + e][of], __fmul_rn(__fmul_rn(apart, apart), width_of(of, p.columns)));
        });
#else
        const float square = over_terms([&](int e, int of) { return t[0][first + e][of]; });
#endif
        const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, length), p.eps)));
        const i64 mine = top + first + lane / kShare;
        if (rank == 0 && warp % kSlices == 0 && lane % kShare == 0 &&
            (QUANT_WHOLE || mine < p.rows)) {
            p.rstd[mine] = rstd;
            if (QUANT_NORM == 2) p.mean[mine] = mean;
        }
        if (threadIdx.x == 0)
            expect_sums(summed + 8 * (i % 2));  // before any block sends the next sums
        if (i + 1 < count) sum(i + 1);
#pragma unroll 4
        for (int e = 0; e < kEach; ++e) {
            const i64 inside = QUANT_WHOLE || top + first + e < p.rows ? real : 0;
            const float middle = QUANT_NORM == 2 ? of_row(mean, e) : 0.0f, factor = of_row(rstd, e);
            NormInput* const row = own.tile(i) + (first + e) * QUANT_CTA_COLUMNS;
            u32 words[kInputWords], raw[kChunk / 2];
            load_chunk(words, row + side * kChunk, inside);
            normalize(raw, words, middle, factor, weight, bias, inside);
            encode_rowwise(raw, top + first + e, start, block + e * along, p.rows, p.columns,
                tensor, stream, p.codes[0], p.scales[0], nullptr, tally);
        }
        own.leave<kRowWarps>(i);
    }
    add_counts(tally, p.counters);
}
