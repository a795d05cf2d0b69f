// Producer warps of w4a16_sm90_ring.cu: they load the activations x into the ring of stages.
// Configured by that kernel's macros.

// A lane's eight neighbouring elements of every kProducerWarps-th row of a chunk.
struct XFragment {
    static constexpr int kRows =
                             (kTokens / WEIGHT_ONLY_X_PARTS + kProducerWarps - 1) / kProducerWarps,
                         kWords = sizeof(Raw) / 2;
    uint4 words[kRows][kWords];
    // Loads from `from` on; zeros unless `there`.
    DEVICE void fetch(const Raw* from, i64 columns, int first, int rows, bool there) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                const int row = first + r * kProducerWarps;
                words[r][w] = uint4{0, 0, 0, 0};
                if (there && row < rows)
                    words[r][w] = reinterpret_cast<const uint4*>(from + row * columns)[w];
            }
    }
    // Stores pairs of elements that are four apart.
    DEVICE void put(u8* to, int first, int rows) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = first + r * kProducerWarps;
            if (row >= rows) continue;
#if WEIGHT_ONLY_IN == 1
            const uint4 w = words[r][0];
            *reinterpret_cast<uint4*>(to + row * kPitch) =
                uint4{__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632),
                    __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632)};
#else
            const uint4 a = words[r][0], b = words[r][kWords - 1];
            const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int part = 0; part < WEIGHT_ONLY_X_PARTS; ++part) {
                u32 pairs[4];
#pragma unroll
                for (int p = 0; p < 4; ++p)
                    pairs[p] = bf16_part(__uint_as_float(low[p]), part) |
                               bf16_part(__uint_as_float(high[p]), part) << 16;
                *reinterpret_cast<uint4*>(to + (part * rows + row) * kPitch) =
                    uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
#endif
        }
    }
};
constexpr int kPrefetch = WEIGHT_ONLY_IN == 1 ? 4 : 2;  // chunks a warp loads ahead

// A producer warp: the chunks that it has requested ahead, in registers.
struct Producer {
    const Raw* x;
    int begin, count, rows, columns, first_row, own;
    int chunk = 0;  // the next to request
    XFragment part[kPrefetch];
    // Four lanes have 32 elements of a segment each; their first groups of eight are neighbours,
    // and so on.
    DEVICE Producer(
        const Raw* x, int begin, int count, int rows, int columns, int first_row, int lane)
        : x(x),
          begin(begin),
          count(count),
          rows(rows),
          columns(columns),
          first_row(first_row),
          own((lane / 16 * 16 + lane % 4 * 4 + lane / 4 % 4) * 8) {}
    DEVICE void fetch(XFragment& part) {
        const int k = (begin + chunk) * kChunk + own;
        part.fetch(x + k, columns, first_row, rows, k < columns);
        if (++chunk == count) chunk = 0;
    }
    DEVICE void fetch_first() {
#pragma unroll
        for (int e = 0; e < kPrefetch; ++e) fetch(part[e]);
    }
    // Fills the stages of `all` chunks. `place`: the lane's bytes of the first stage.
    DEVICE void run(u8* place, int all, u32 full, u32 empty) {
        Ring at = {0, 0};
        for (int i = 0; i < all; i += kPrefetch)
#pragma unroll
            for (int e = 0; e < kPrefetch; ++e) {
                if (i + e == all) break;
                barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
                part[e].put(place + at.stage * kStage, first_row, rows);
                barrier_arrive(full + 8 * at.stage);
                at.advance(1);
                fetch(part[e]);
            }
    }
};
