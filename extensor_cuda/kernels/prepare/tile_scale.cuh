// PREPARE_REBASED: finds the scale of a 128 x 128 tile before its values are rounded, because all
// its blocks share the largest of their scales. A tile is one or two tiles of shared memory.

// The largest float bits of a thread block.
DEVICE u32 block_max(u32 mine, u32* scratch) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    u32 all = scratch[0];
#pragma unroll
    for (int w = 1; w < kTileThreads / 32; ++w) all = larger(all, scratch[w]);
    __syncthreads();
    return all;
}

// The fast path rounds under the tile's scale only: a normal code is the same under its block's.
#define PREPARE_FAST_PATH (CODEC_IN <= 1 && CODEC_RULE == 1 && !CODEC_STOCHASTIC)
#if PREPARE_FAST_PATH
// The smallest nonzero magnitude, less one, as float bits.
template <int N>
DEVICE u32 least_of(const u32 (&words)[N]) {
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

// Encodes four values that are within the grid's range.
DEVICE u32 four_codes(u32 a, u32 b, u32 c, u32 d, float scale) {
    const float y[4] = {
        float_of(a) * scale, float_of(b) * scale, float_of(c) * scale, float_of(d) * scale};
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

DEVICE float value_at(const u32 (*tile)[kRowWords], int row, int column) {
    constexpr int kEach = 4 / sizeof(Raw);
    const u32 word = tile[row][swizzled(row, column / kEach)];
    return widen(kEach == 1 ? word : column % 2 ? word >> 16 : word & 0xFFFFu);
}

// Raises `rowwise` and `columnwise` to the largest magnitudes of the tile's finite blocks in each
// direction. Returns whether all blocks are finite.
DEVICE bool tile_amax(const u32 (*tile)[kRowWords], u32* scratch, u32& rowwise, u32& columnwise) {
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
    most = block_max(larger(most, larger(low_float(pairs), high_float(pairs))), scratch);
    if (most < kExponent) {
        rowwise = larger(rowwise, most), columnwise = larger(columnwise, most);
        return true;
    }
    // A value that is not finite excludes its block, which differs rowwise and columnwise.
#pragma unroll 1
    for (int axis = 0; axis < 2; ++axis) {
        most = 0;
#pragma unroll 1
        for (int b = threadIdx.x; b < kRows * kColumns / CODEC_BLOCK; b += kTileThreads) {
            const int row = axis ? b / kColumns * CODEC_BLOCK : b / (kColumns / CODEC_BLOCK);
            const int column = axis ? b % kColumns : b % (kColumns / CODEC_BLOCK) * CODEC_BLOCK;
            u32 amax = 0;
#pragma unroll 1
            for (int k = 0; k < CODEC_BLOCK; ++k)
                amax = larger(amax,
                    bits_of(value_at(tile, axis ? row + k : row, axis ? column : column + k)) &
                        kMagnitude);
            if (amax < kExponent) most = larger(most, amax);
        }
        most = block_max(most, scratch);
        rowwise = axis ? rowwise : larger(rowwise, most),
        columnwise = axis ? larger(columnwise, most) : columnwise;
    }
    return false;
}

// Puts all blocks of a tile under the scale of magnitude `most`, and stores it for 128 rows or
// columns.
DEVICE void set_tile_scale(
    TileState& state, u32 most, bool numbers, float* scales, int rowwise, int across, i64 lines) {
    const Scale s = block_scale(most, Tensor{1, 1, 0, 1});
    state.anchor = static_cast<int>(s.stored);
    state.apply = s.apply;
    const int least =
        state.anchor + CODEC_MIN_EXPONENT;  // the exponent field of the smallest normal value
    state.limit = least > 0       ? static_cast<u32>(least << 23) - (CODEC_IN == 1 ? 0x10000u : 1u)
                  : CODEC_IN == 1 ? 0xFFFF0000u
                                  : ~0u;
    state.careful = !numbers || CODEC_ELEMENT_SCALE != 1.0f;
    const i64 pitch = (lines + kSide - 1) / kSide * (kSide / kRowsPerScale) + kPadding;
    if (scales && threadIdx.x < kSide / kRowsPerScale)
        scales[rowwise / kSide * pitch + across / kRowsPerScale + threadIdx.x] = s.decode;
}
