// Producer warps of w4w8a16_sm90_wgmma.cu: they load the activations x into shared memory, in the
// element order of decoded weights. Configured by that kernel's macros.

// Copies a warp's chunk of x as it is stored, with zeros beyond K.
DEVICE void fetch(u8* to, const Raw* x, const Problem& e, int chunk, int lane) {
    constexpr int kUnits = kXRowBytes / 16, kUnitElements = 16 / sizeof(Raw),
                  kRowsAtOnce = kUnits < 32 ? 32 / kUnits : 1;
    for (int at = lane % kUnits; at < kUnits; at += 32) {
        const int k = chunk * WEIGHT_ONLY_SPLIT_K * kSegment + at * kUnitElements;
        const bool there = k < e.columns;
        const Raw* from = x + static_cast<i64>(lane / kUnits) * e.columns + (there ? k : 0);
        for (int row = lane / kUnits; row < e.rows;
            row += kRowsAtOnce, from += static_cast<i64>(kRowsAtOnce) * e.columns)
            cp_async<16>(to + row * kRawPitch + at * 16, from, there);
    }
}

// Reorders a chunk to match decoded weights: the first elements of four lanes' groups of eight are
// neighbours.
DEVICE void permute_chunk(u8* to, const u8* from, int rows, int lane) {
    for (int u = lane; u < kTokens * 4 * WEIGHT_ONLY_SPLIT_K; u += 32) {
        const int token = u / (32 * WEIGHT_ONLY_SPLIT_K) * 8 + u % 8, j = u / 8 % 4,
                  segment = u / 32 % WEIGHT_ONLY_SPLIT_K;
        if (token >= rows * WEIGHT_ONLY_X_PARTS) continue;
        const int part = WEIGHT_ONLY_X_PARTS == 1 ? 0 : token / rows;
        const int lane_start = CODEC_BITS == 4 ? j * 8 : j / 2 * 64 + j % 2 * 8;
        const u8* row = from + (token - part * rows) * kRawPitch +
                        (segment * kSegment + lane_start) * sizeof(Raw);
        u32 pairs[4][4];
#pragma unroll
        for (int of = 0; of < 4; ++of) {
            const uint4* const eight =
                reinterpret_cast<const uint4*>(row + of * (128 / CODEC_BITS) * sizeof(Raw));
#if WEIGHT_ONLY_IN == 1
            const uint4 w = eight[0];
#if CODEC_BITS == 8
            pairs[0][of] = w.x, pairs[1][of] = w.y, pairs[2][of] = w.z, pairs[3][of] = w.w;
#else
            pairs[0][of] = __byte_perm(w.x, w.z, 0x5410),
            pairs[1][of] = __byte_perm(w.x, w.z, 0x7632);
            pairs[2][of] = __byte_perm(w.y, w.w, 0x5410),
            pairs[3][of] = __byte_perm(w.y, w.w, 0x7632);
#endif
#else
            const uint4 a = eight[0], b = eight[1];
            const u32 v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const u32 low = v[CODEC_BITS == 8 ? 2 * p : p],
                          high = v[CODEC_BITS == 8 ? 2 * p + 1 : p + 4];
                pairs[p][of] = bf16_part(__uint_as_float(low), part) |
                               bf16_part(__uint_as_float(high), part) << 16;
            }
#endif
        }
        u8* const tile = to + (segment * 2 + j / 2) * kTile;
#pragma unroll
        for (int p = 0; p < 4; ++p)
            *reinterpret_cast<uint4*>(tile + swizzled_offset(token, j % 2 * 4 + p)) =
                uint4{pairs[p][0], pairs[p][1], pairs[p][2], pairs[p][3]};
    }
}
