// Under PREPARE_REBASED: the square of 128 x 128 that a tile, or two of them, belongs to. It is
// looked at before its values are rounded, as its blocks are all under the largest of their scales.

// The largest float bits that a block of threads has.
__device__ __forceinline__ u32 over_threads(u32 mine, u32* scratch) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    u32 all = scratch[0];
#pragma unroll
    for (int w = 1; w < kTileThreads / 32; ++w) all = larger(all, scratch[w]);
    __syncthreads();
    return all;
}

// What values round to under the square's scale alone: a normal code is the same under its block's.
#define PREPARE_FAST_PATH (CODEC_IN <= 1 && CODEC_RULE == 1 && !CODEC_STOCHASTIC)
#if PREPARE_FAST_PATH
// The least magnitude, zeros left out, less one, as float bits.
template <int N>
__device__ __forceinline__ u32 least_of(const u32 (&words)[N]) {
    u32 least = ~0u;
#pragma unroll
    for (int k = 0; k < N; ++k) {
#if CODEC_IN == 1
        least = __viaddmin_u16x2(words[k] & kPairMagnitude, ~0u, least);
#else
        least = __viaddmin_u32(words[k] & kMagnitude, ~0u, least);
#endif
    }
    return CODEC_IN == 1 ? smaller(least & 0xFFFFu, least >> 16) << 16 : least;
}

// Four values on the grid, not beyond its top.
__device__ __forceinline__ u32 four_codes(u32 a, u32 b, u32 c, u32 d, float scale) {
    const float y[4] = {float_of(a) * scale, float_of(b) * scale, float_of(c) * scale,
                        float_of(d) * scale};
#if CODEC_CONVERTS
    return __byte_perm(convert_pair(y[0], y[1]), convert_pair(y[2], y[3]), 0x5410);
#else
    u32 codes = 0;
    for (int i = 0; i < 4; ++i) {
        float value;
        codes |= (round_magnitude(y[i], 0, value) | bits_of(y[i]) >> 31 << 7) << (8 * i);
    }
    return codes;
#endif
}
#endif

__device__ __forceinline__ float value_at(const u32 (*tile)[kRowWords], int row, int column) {
    constexpr int kEach = 4 / sizeof(Raw);
    const u32 word = tile[row][swizzled(row, column / kEach)];
    return widen(kEach == 1 ? word : column % 2 ? word >> 16 : word & 0xFFFFu);
}

// Raises `along` and `down` to the largest magnitudes of the tile's blocks of numbers either way;
// whether all are.
__device__ __forceinline__ bool survey(const u32 (*tile)[kRowWords], u32* scratch, u32& along,
                                       u32& down) {
    const uint4* units = reinterpret_cast<const uint4*>(tile);
    u32 most = 0, pairs = 0;
#pragma unroll 4
    for (int i = 0; i < kRows * kRowWords / 4 / kTileThreads; ++i) {
        const uint4 four = units[i * kTileThreads + threadIdx.x];
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#if CODEC_IN == 1
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs = pair_max(pairs, words[k] & kPairMagnitude);
#else
#pragma unroll
        for (int k = 0; k < kPerVector; ++k)
            most = larger(most, bits_of(element(words, k)) & kMagnitude);
#endif
    }
    most = over_threads(larger(most, larger(low_float(pairs), high_float(pairs))), scratch);
    if (most < kExponent) {
        along = larger(along, most), down = larger(down, most);
        return true;
    }
    // What is no number takes its block with it, along rows another one than down columns.
#pragma unroll 1
    for (int way = 0; way < 2; ++way) {
        most = 0;
#pragma unroll 1
        for (int b = threadIdx.x; b < kRows * kColumns / CODEC_BLOCK; b += kTileThreads) {
            const int row = way ? b / kColumns * CODEC_BLOCK : b / (kColumns / CODEC_BLOCK);
            const int column = way ? b % kColumns : b % (kColumns / CODEC_BLOCK) * CODEC_BLOCK;
            u32 amax = 0;
#pragma unroll 1
            for (int k = 0; k < CODEC_BLOCK; ++k)
                amax = larger(
                    amax, bits_of(value_at(tile, way ? row + k : row, way ? column : column + k)) &
                              kMagnitude);
            if (amax < kExponent) most = larger(most, amax);
        }
        most = over_threads(most, scratch);
        along = way ? along : larger(along, most), down = way ? larger(down, most) : down;
    }
    return false;
}

// All of a square's blocks are under the scale of a magnitude, which is stored for its 128 lines.
__device__ __forceinline__ void place_square(Place& place, u32 most, bool numbers, float* scales,
                                             int along, int across, i64 lines) {
    const Scale s = block_scale(most, Tensor{1, 1, 0, 1});
    place.anchor = static_cast<int>(s.stored);
    place.apply = s.apply;
    const int least =
        place.anchor + CODEC_MIN_EXPONENT;  // the exponent field of the least normal value
    place.limit = least > 0       ? static_cast<u32>(least << 23) - (CODEC_IN == 1 ? 0x10000u : 1u)
                  : CODEC_IN == 1 ? 0xFFFF0000u
                                  : ~0u;
    place.careful = !numbers || CODEC_ELEMENT_SCALE != 1.0f;
    const i64 pitch = (lines + kSide - 1) / kSide * (kSide / kShared) + kBehind;
    if (scales && threadIdx.x < kSide / kShared)
        scales[along / kSide * pitch + across / kShared + threadIdx.x] = s.decode;
}
