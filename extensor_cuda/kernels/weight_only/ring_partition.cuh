// Divides a thread block's tiles among the warps of w4a16_sm90_ring.cu. Macros: WEIGHT_ONLY_WARPS,
// WEIGHT_ONLY_SPLIT_K.

constexpr int kPairs = kWarps / kShares;
// Two warps on each of an odd number of pairs load the four schedulers unevenly. Warps on the
// fuller schedulers then get fewer chunks: chunk k is the first warp's if k step % kPeriod < step.
constexpr bool kUneven = kShares == 2 && kPairs % 2 && kPairs > 1;
constexpr int kPeriod = 2 * kPairs;
constexpr int kMaxStep = kUneven ? 3 : kShares;  // chunks between two of one share, at most

// A warp's pair of tiles, and its share of their chunks.
struct WarpShare {
    int pair, part, step;
    DEVICE explicit WarpShare(int warp) : pair(warp / kShares), part(warp % kShares), step(kPairs) {
        if (!kUneven) return;
        const int place = warp / 4 * 2 + warp % 2;
        pair = min(place, kPairs - 1), part = warp % 4 < 2 ? place - pair : 1;
        if (pair < kPairs - 1)
            step = kPairs - 1;  // both warps of the last pair are on fuller schedulers
    }
    DEVICE static int warp(int pair, int part) {
        if (!kUneven) return pair * kShares + part;
        return pair / 2 * 4 + pair % 2 + (pair == kPairs - 1 ? part : 2 * part);
    }
};

// Iterates over the chunks of a share.
struct ChunkIterator {
    int chunk, place;  // k, and k step % kPeriod
    DEVICE explicit ChunkIterator(const WarpShare& share)
        : chunk(kUneven ? -1 : share.part - kShares), place(-share.step) {
        next(share);
    }
    // Returns the distance to the next chunk.
    DEVICE int next(const WarpShare& share) {
        const int before = chunk;
        if (kUneven) do {
                ++chunk, place += share.step;
                if (place >= kPeriod) place -= kPeriod;
            } while ((place < share.step) != (share.part == 0));
        else chunk += kShares;
        return chunk - before;
    }
};
