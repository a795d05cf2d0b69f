// Stores the codes of neighbouring columns side by side as bytes. Configured by the quantizer's
// macros.

#if QUANT_COLUMNWISE || QUANT_ROWWISE_COLUMNWISE
constexpr int kPairs =
    QUANT_THREAD_COLUMNS * sizeof(Raw) / 4;  // 32-bit words of a thread's columns

#if CODEC_BF16X2
// Encodes 16 rows of a thread's columns to nibbles, four rows per word, the even column in the low
// half.
DEVICE void encode_columns(const u32 (&raw)[kChunk][kPairs], const Scale (&s)[QUANT_THREAD_COLUMNS],
    const u32 (&amax)[QUANT_THREAD_COLUMNS], u32 (&nibbles)[kPairs][4], Tally& tally) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const Scale &a = s[2 * p], &b = s[2 * p + 1];
        const bool far = is_far(amax[2 * p], a) || is_far(amax[2 * p + 1], b);
        const u32 scale = bits_of(a.apply) >> 16 | bits_of(b.apply);
        const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u32* four = &raw[4 * q][p];
#if CODEC_STATS
            const u32 c = signs_of(four[0], four[kPairs]),
                      d = signs_of(four[2 * kPairs], four[3 * kPairs]);
            const u32 signs = (__byte_perm(c, d, 0x6240) & 0x08080808u) |
                              (__byte_perm(c, d, 0x7351) & 0x80808080u);
            const u32 n = codes_columnwise<false, kPairs>(four, scale, far);
            nibbles[p][q] = (saturate(n, live, tally) | signs) & live;
#else
            nibbles[p][q] = codes_columnwise<true, kPairs>(four, scale, far) & live;
#endif
        }
        forget_zeros<kChunk, kPairs>(&raw[0][p], live, tally);
    }
}

// Byte b of each column's codes.
DEVICE u32 column_bytes(const u32 (&nibbles)[kPairs][4], int b) {
    return __byte_perm(nibbles[0][b / 2], nibbles[kPairs - 1][b / 2], 0x6420 + b % 2 * 0x1111);
}
#else
DEVICE u32 column_bytes(const u32 (&packed)[QUANT_THREAD_COLUMNS][kWords], int b) {
    const u32 pick = b % 4 | (b % 4 + 4) << 4;
    const u32 low = __byte_perm(packed[0][b / 4], packed[1][b / 4], pick);
    if (QUANT_THREAD_COLUMNS == 2) return low & 0xFFFFu;
    return __byte_perm(low,
        __byte_perm(
            packed[QUANT_THREAD_COLUMNS - 2][b / 4], packed[QUANT_THREAD_COLUMNS - 1][b / 4], pick),
        0x5410);
}
#endif

// Stores byte b of the columns' codes to row b, rows `inner` bytes apart. `real`: columns inside
// the matrix.
template <class Codes>
DEVICE void store_column_bytes(const Codes& codes, u8* to, i64 inner, i64 real) {
#pragma unroll
    for (int b = 0; b < kWords * 4; ++b, to += inner) {
        const u32 code_bytes = column_bytes(codes, b);
#if QUANT_WHOLE
        if (real > 0) {
            if (QUANT_THREAD_COLUMNS == 4) *reinterpret_cast<u32*>(to) = code_bytes;
            else *reinterpret_cast<u16*>(to) = static_cast<u16>(code_bytes);
        }
#else
#pragma unroll
        for (int c = 0; c < QUANT_THREAD_COLUMNS; ++c)
            if (c < real) to[c] = static_cast<u8>(code_bytes >> (8 * c));
#endif
    }
}
#endif
