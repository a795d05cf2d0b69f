// Producer warps of w4a16_sm90_ring.cu: they copy the activations x to the ring of stages, and put
// what has come in order, each lane its own. Configured by that kernel's macros.

// Stages that are asked for ahead of the one put in order. The others are for consumers, of which
// the slowest may be so many chunks behind.
constexpr int kAhead = WEIGHT_ONLY_STAGES - kMaxStep;
static_assert(kAhead > 0, "nothing is asked for ahead");

// Asks for eight elements. float32 takes the room of two of its parts, which are `apart` bytes
// apart.
DEVICE void request_x(u8* to, const Raw* from, int apart, bool there) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Raw)) / 2; ++w)
        cp_async<16>(to + w * apart, from + 4 * w, there);
}
// Puts them, when they have come, as weights are decoded: in pairs that are four apart.
DEVICE void arrange_x(u8* at, int apart) {
    const uint4 a = *reinterpret_cast<const uint4*>(at);
#if WEIGHT_ONLY_IN == 1
    *reinterpret_cast<uint4*>(at) =
        uint4{__byte_perm(a.x, a.z, 0x5410), __byte_perm(a.x, a.z, 0x7632),
            __byte_perm(a.y, a.w, 0x5410), __byte_perm(a.y, a.w, 0x7632)};
#else
    const uint4 b = *reinterpret_cast<const uint4*>(at + apart);
    const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int part = 0; part < WEIGHT_ONLY_X_PARTS; ++part) {
        u32 pairs[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
            pairs[p] = bf16_part(__uint_as_float(low[p]), part) |
                       bf16_part(__uint_as_float(high[p]), part) << 16;
        *reinterpret_cast<uint4*>(at + part * apart) =
            uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
#endif
}

struct Producer {
    static constexpr int kRows =
        (kTokens / WEIGHT_ONLY_X_PARTS + kProducerWarps - 1) / kProducerWarps;
    const Raw* x;
    u8* place;  // where a lane's eight elements of its first row go in the first stage
    int begin, count, rows, columns, first_row, own;
    int chunk = 0;  // the next to ask for
    Ring next = {0, 0};

    // Four lanes have 32 elements of a segment each; their first groups of eight are neighbours,
    // and so on.
    DEVICE Producer(const Raw* x, u8* stages, int begin, int count, int rows, int columns,
        int first_row, int lane)
        : x(x),
          place(stages + first_row * kPitch + lane * 16),
          begin(begin),
          count(count),
          rows(rows),
          columns(columns),
          first_row(first_row),
          own((lane / 16 * 16 + lane % 4 * 4 + lane / 4 % 4) * 8) {}

    // Asks for the next chunk; zeros beyond the columns.
    DEVICE void request() {
        const int k = (begin + chunk) * kChunk + own;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = first_row + r * kProducerWarps;
            if (row < rows)
                request_x(place + next.stage * kStage + r * kProducerWarps * kPitch,
                    x + static_cast<i64>(row) * columns + k, rows * kPitch, k < columns);
        }
        next.advance();
        if (++chunk == count) chunk = 0;
    }
    DEVICE void request_first(int fills) {
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) {
            if (i < fills) request();
            cp_async_commit();
        }
    }
    // Fills so many stages, after request_first.
    DEVICE void run(int fills, u32 full, u32 empty) {
        Ring at = {0, 0};
#pragma unroll 1
        for (int i = 0; i < fills; ++i) {
            cp_async_wait<kAhead - 1>();
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (first_row + r * kProducerWarps < rows)
                    arrange_x(
                        place + at.stage * kStage + r * kProducerWarps * kPitch, rows * kPitch);
            barrier_arrive(full + 8 * at.stage);
            at.advance();
            if (i + kAhead < fills) {
                barrier_wait(empty + 8 * next.stage, next.parity ^ 1);
                request();
            }
            cp_async_commit();
        }
    }
};
