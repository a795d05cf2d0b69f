// Divides the tiles of a thread block among its warps, for w4a16_sm90_ring.cu.

constexpr int kPairs = kWarps / kShares;
// A multiprocessor's four schedulers have every fourth warp each. Two warps to each of an odd
// number of pairs leave two schedulers with one warp more than the others, whose warps then get
// fewer pieces, so that all are done at a time: of so many pieces `step` are of the first warp, as
// evenly spread as may be: those k with k step % kPeriod < step.
constexpr bool kUneven = kShares == 2 && kPairs % 2 && kPairs > 1;
constexpr int kPeriod = 2 * kPairs;
constexpr int kFurthest = kUneven ? 3 : kShares;  // pieces from one of a share to the next, at most

// The pair that a warp has, and which of its shares.
struct Share {
    int pair, part, step;
    __device__ __forceinline__ explicit Share(int warp)
        : pair(warp / kShares), part(warp % kShares), step(kPairs) {
        if (!kUneven) return;
        const int place = warp / 4 * 2 + warp % 2;
        pair = min(place, kPairs - 1), part = warp % 4 < 2 ? place - pair : 1;
        if (pair < kPairs - 1)
            step = kPairs - 1;  // the last pair has two warps of fuller schedulers
    }
    __device__ __forceinline__ static int warp(int pair, int part) {
        if (!kUneven) return pair * kShares + part;
        return pair / 2 * 4 + pair % 2 + (pair == kPairs - 1 ? part : 2 * part);
    }
};

// Pieces of a share, one behind the other.
struct Walk {
    int piece, place;  // k, k step % kPeriod
    __device__ __forceinline__ explicit Walk(const Share& share)
        : piece(kUneven ? -1 : share.part - kShares), place(-share.step) {
        next(share);
    }
    // Returns how many pieces further the next one is.
    __device__ __forceinline__ int next(const Share& share) {
        const int before = piece;
        if (kUneven) do {
                ++piece, place += share.step;
                if (place >= kPeriod) place -= kPeriod;
            } while ((place < share.step) != (share.part == 0));
        else
            piece += kShares;
        return piece - before;
    }
};
