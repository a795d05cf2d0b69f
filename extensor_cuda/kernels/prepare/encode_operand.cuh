// Encodes a tile in shared memory as operands: rowwise to memory, columnwise transposed.
// PREPARE_FAST_PATH (tile_scale.cuh): chunks whose codes are all normal under the tile's scale skip
// the slow path.

#if CODEC_BF16X8
// Encodes rows of the tile to `out` (rows, pitch), a block per thread at a time.
DEVICE void encode_rowwise(const u32 (*tile)[kRowWords], u8* out, int row0, int column0, i64 rows,
    i64 columns, const Stream& stream, TileState& state, Tally& tally) {
    const i64 pitch = (columns + 15) / 16 * 16;
    const u32 across_all = static_cast<u32>((columns + CODEC_BLOCK - 1) / CODEC_BLOCK);
#pragma unroll 1
    for (int part = 0; part < kRows * kColumns / CODEC_BLOCK / kTileThreads; ++part) {
        const u32 i = part * kTileThreads + threadIdx.x;
        const u32 row = i / 32 * 8 + i % 8,
                  start = i / 8 % 4 * CODEC_BLOCK;  // neighbouring lanes take other rows
        const auto pairs = [&](int k, u32(&x)[4]) {
            const uint4 four =
                *reinterpret_cast<const uint4*>(&tile[row][swizzled(row, start / 2 + 4 * k)]);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        };
        u32 x[4];
        BlockStats survey;
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs(k, x), survey.add(x);
        const u32 amax = larger(low_float(survey.largest), high_float(survey.largest));
        const Scale s = block_scale(amax, Tensor{1, 1, 0, 1});
        const uint2 table = table_of(s, state);
        const bool careful = needs_care(is_far(amax, s), survey.least, s, s);
        Blocks block = {{s.apply, s.apply},
            (row0 + row) * across_all + (column0 + start) / CODEC_BLOCK, careful, stream};
        u8* to = out + (row0 + row) * pitch + column0 + start;
        const i64 left = row0 + row < rows ? columns - column0 - start : 0;
        const bool beyond = is_beyond(s, amax, state);
        u32 any = 0;
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                pairs(2 * h + j, x);
                const u32 n = saturate(codes_of_row(x, 2 * h + j, block), s.live, tally);
                if (survey.zeros()) forget_zeros<4, 1>(x, s.live, tally);
                any |= n;
                words[2 * j] = signed_bytes(table, n, __byte_perm(x[0], x[1], 0x7531), s.live);
                words[2 * j + 1] =
                    signed_bytes(table, n >> 16, __byte_perm(x[2], x[3], 0x7531), s.live);
            }
            if (16 * h < left)
                reinterpret_cast<uint4*>(to)[h] = uint4{words[0], words[1], words[2], words[3]};
        }
        if (beyond && any) state.beyond = 1;
    }
}
#else
// Encodes rows of the tile to `out` (rows, pitch), 16 values per thread at a time.
DEVICE void encode_rowwise(const u32 (*tile)[kRowWords], u8* out, int row0, int column0, i64 rows,
    i64 columns, const Stream& stream, TileState& state, Tally& tally) {
    const i64 pitch = (columns + 15) / 16 * 16, blocks = (columns + CODEC_BLOCK - 1) / CODEC_BLOCK;
#pragma unroll 1
    for (int i = 0; i < kRows * (kColumns / kChunk) / kTileThreads; ++i) {
        const int chunk = i * kTileThreads + threadIdx.x;
        const int row = chunk / (kColumns / kChunk), start = chunk % (kColumns / kChunk) * kChunk;
        u32 raw[kRead];
#pragma unroll
        for (int w = 0; w < kRead; w += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(
                &tile[row][swizzled(row, start / kChunk * kRead + w)]);
            raw[w] = four.x, raw[w + 1] = four.y, raw[w + 2] = four.z, raw[w + 3] = four.w;
        }
        uint4 units[kUnits];
        const int column = column0 + start;
#if PREPARE_FAST_PATH
        const auto of = [&](int k) { return bits_of(element(raw, k)); };
        const auto four = [&](int k) {
            return four_codes(of(k), of(k + 1), of(k + 2), of(k + 3), state.apply);
        };
        units[0] = uint4{four(0), four(4), four(8), four(12)};
        if (__any_sync(~0u, state.careful || least_of(raw) < state.limit)) {
#else
        {
#endif
            float v[kChunk];
#pragma unroll
            for (int k = 0; k < kChunk; ++k) v[k] = element(raw, k);
            const u32 amax = across_lanes(chunk_maximum(v));
            encode_chunk_of_operand(v, amax,
                static_cast<u32>((row0 + row) * blocks + column / CODEC_BLOCK),
                static_cast<u32>(start % CODEC_BLOCK / kChunk), stream, state, units, tally);
        }
        if (row0 + row < rows && column < columns) {
            uint4* to = reinterpret_cast<uint4*>(out + ((row0 + row) * pitch + column) * kOut);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) to[u] = units[u];
        }
    }
}
#endif

// Encodes columns of the tile to rows of `transposed`. A thread has two neighbouring blocks.
// PREPARE_PACKED: to packed codes and scales of a matrix of so many rows, as quantize.cu stores
// them.
DEVICE void encode_columnwise(const u32 (*tile)[kRowWords], uint4 (*transposed)[kTransposedUnits],
    int row0, int column0, i64 columns, const Stream& stream, TileState& state, Tally& tally,
    [[maybe_unused]] u8* packed, [[maybe_unused]] u8* scales, [[maybe_unused]] i64 rows) {
    static_assert(CODEC_BLOCK == 32, "a thread holds blocks of 32");
    const int pair = threadIdx.x % 64, block = threadIdx.x / 64, top = 32 * block;
    const u32 number = (row0 + top) / CODEC_BLOCK * static_cast<u32>(columns) + column0 + 2 * pair;
#if CODEC_BF16X8
    const auto put_word = [&](int c, int k, u32 word) {  // of rows 4 k to 4 k + 3
        reinterpret_cast<u32*>(
            &transposed[2 * pair + c][(2 * block + k / 4) ^ (pair & kMask)])[k % 4] = word;
    };
    const auto pairs = [&](int k, u32(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = tile[top + 4 * k + i][swizzled(4 * k + i, pair)];
    };
    u32 x[4];
    BlockStats survey;
#pragma unroll
    for (int k = 0; k < CODEC_BLOCK / 4; ++k) pairs(k, x), survey.add(x);
    const u32 amax[2] = {low_float(survey.largest), high_float(survey.largest)};
    const Scale a = block_scale(amax[0], Tensor{1, 1, 0, 1});
    const Scale b = block_scale(amax[1], Tensor{1, 1, 0, 1});
    const bool careful = needs_care(is_far(amax[0], a) || is_far(amax[1], b), survey.least, a, b);
    Blocks both = {{a.apply, b.apply}, number, careful, stream};
    const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
#if PREPARE_PACKED
    const i64 column = column0 + 2 * pair;
    const bool inside = row0 + top < rows && column < columns;
    packed += (row0 + top) / 2 * columns + column;  // a byte has two rows
    if (inside)
        *reinterpret_cast<u16*>(scales + (row0 + top) / CODEC_BLOCK * columns + column) =
            static_cast<u16>(a.stored | b.stored << 8);
#else
    const uint2 first = table_of(a, state), second = table_of(b, state);
    const bool beyond[2] = {is_beyond(a, amax[0], state), is_beyond(b, amax[1], state)};
    u32 any = 0;
#endif
#pragma unroll 1
    for (int k = 0; k < CODEC_BLOCK / 4; ++k) {
        pairs(k, x);
        const u32 n = saturate(codes_of_columns(x, k, both), live, tally);
        if (survey.zeros()) forget_zeros<4, 1>(x, live, tally);
#if PREPARE_PACKED
        const u32 c = signs_of(x[0], x[1]), d = signs_of(x[2], x[3]);
        const u32 signs =
            (__byte_perm(c, d, 0x6240) & 0x08080808u) | (__byte_perm(c, d, 0x7351) & 0x80808080u);
        const u32 codes = (n | signs) & live;
        if (inside) {
            *reinterpret_cast<u16*>(packed) = static_cast<u16>(__byte_perm(codes, 0, 0x20));
            *reinterpret_cast<u16*>(packed + columns) =
                static_cast<u16>(__byte_perm(codes, 0, 0x31));
        }
        packed += 2 * columns;
#else
        any |= n;
        const u32 upper = __byte_perm(x[0], x[1], 0x7351), lower = __byte_perm(x[2], x[3], 0x7351);
        put_word(0, k, signed_bytes(first, n, __byte_perm(upper, lower, 0x5410), a.live));
        put_word(1, k, signed_bytes(second, n >> 16, __byte_perm(upper, lower, 0x7632), b.live));
#endif
    }
#if !PREPARE_PACKED
    if ((beyond[0] && any & 0xFFFFu) || (beyond[1] && any >> 16)) state.beyond = 1;
#endif
#else
    const auto put = [&](int c, int h, const uint4(&units)[kUnits]) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
            transposed[2 * pair + c][((2 * block + h) * kUnits + u) ^ (pair & kMask)] = units[u];
    };
    uint4 units[kUnits];
    const auto value = [&](int k, int c) {
        if (sizeof(Raw) == 4) return widen(tile[top + k][swizzled(k, 2 * pair + c)]);
        const u32 word = tile[top + k][swizzled(k, pair)];
        return widen(c ? word >> 16 : word & 0xFFFFu);
    };
    const auto amax_of = [&](int c) {
        float most = 0;
#pragma unroll(PREPARE_FAST_PATH ? 1 : PREPARE_REBASED ? 4 : CODEC_BLOCK)
        for (int k = 0; k < CODEC_BLOCK; ++k) most = max_with_nan(most, fabsf(value(k, c)));
        return bits_of(most) & kMagnitude;
    };
    const auto make_one = [&](int c, int h, u32 amax) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = value(kChunk * h + k, c);
        encode_chunk_of_operand(v, amax, number + c, h, stream, state, units, tally);
        put(c, h, units);
    };
#if PREPARE_FAST_PATH
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
        constexpr int kWide = sizeof(Raw) / 2;  // words of two columns in a row
        u32 both[kChunk * kWide];
#pragma unroll
        for (int k = 0; k < kChunk * kWide; ++k) {
            const int row = top + kChunk * h + k / kWide;
            both[k] = tile[row][swizzled(row, kWide * pair + k % kWide)];
        }
        if (__any_sync(~0u, state.careful || least_of(both) < state.limit)) {
#pragma unroll 1
            for (int c = 0; c < 2; ++c) make_one(c, h, amax_of(c));
            continue;
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const auto of = [&](int k) { return bits_of(element(both, 2 * k + c)); };
            const auto four = [&](int k) {
                return four_codes(of(k), of(k + 1), of(k + 2), of(k + 3), state.apply);
            };
            units[0] = uint4{four(0), four(4), four(8), four(12)};
            put(c, h, units);
        }
    }
#else
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
        const u32 amax = amax_of(c);
#pragma unroll 1
        for (int h = 0; h < 2; ++h) make_one(c, h, amax);
    }
#endif
#endif
}
