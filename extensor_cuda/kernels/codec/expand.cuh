// Converts 16 packed codes of a row and their scale to elements of a GEMM operand, for expand.cu
// and gemm_sm90.cu. Macros: as in expand.cu.

constexpr int kChunk = 16, kWords = CODEC_BITS * kChunk / 32;
constexpr int kVectors = CODEC_EXPAND_TO ? 1 : 2;  // of a value
constexpr int kOutMantissa = CODEC_EXPAND_TO == 1 ? 2 : 3,
              kOutLeast = CODEC_EXPAND_TO == 1 ? -14 : -6;  // of FP8
constexpr u32 kOutNaN = CODEC_EXPAND_TO ? 0x7Fu : 0x7FC0u;

DEVICE float power_of_two(int exponent) {  // -126 to 127
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// Whether MXFP4 values under a scale are all normal numbers, the usual case.
constexpr bool kMostlyPlain = CODEC_BITS == 4 && !CODEC_FLOAT_SCALES && !CODEC_UE4M3 && CODEC_FIXED;
DEVICE bool is_plain(u32 scale) { return scale - 2 <= 250; }

// The value of a code's magnitude bits.
DEVICE float grid(u32 magnitude, int mantissa, int least) {
    const u32 field = magnitude >> mantissa, part = magnitude & ((1u << mantissa) - 1);
    if (field == 0) return static_cast<float>(part) * power_of_two(least - mantissa);
    return __uint_as_float((field + least + 126) << 23 | part << (23 - mantissa));
}

// A block's scale in the operand, 2^shift if it is E8M0; `live`: it is not NaN.
struct Unit {
    float value;
    bool live, small;  // small: so small that bfloat16 may lose bits
    int shift;
};

DEVICE Unit unit_of(u32 scale, int anchor) {
#if CODEC_UE4M3
    const bool live = scale < 0x7Fu;
    return {live ? grid(scale, 3, -6) * power_of_two(CODEC_LIFT) : 0.0f, live, false, 0};
#else
    const int shift = static_cast<int>(scale) - anchor + CODEC_LIFT;
    if (CODEC_FIXED)
        return {shift < -126 ? 0.5f * power_of_two(-126) : power_of_two(shift), scale != 255u,
            false, shift};
    return {power_of_two(shift < -126 ? -126 : shift), scale != 255u, shift < -126, shift};
#endif
}

// A non-negative value in CODEC_EXPAND_TO's bits; `lost` if it has none.
DEVICE u32 encoded(float v, bool& lost) {
    const u32 bits = __float_as_uint(v);
#if CODEC_EXPAND_TO == 0 && CODEC_UE4M3
    return bits >> 16;  // a 5-bit product, far from both ends
#elif CODEC_EXPAND_TO == 0
    const bool held = !(bits & 0xFFFFu) && !(CODEC_FIXED && bits >= 0x7F800000u);
    lost = lost || !held;
    return CODEC_FIXED && !held ? kOutNaN : bits >> 16;
#else
    const int exponent = static_cast<int>(bits >> 23) - 127;
    u32 code =
        ((exponent - kOutLeast + 1) << kOutMantissa) | (bits & 0x7FFFFFu) >> (23 - kOutMantissa);
    if (exponent < kOutLeast) code = static_cast<u32>(v * power_of_two(kOutMantissa - kOutLeast));
    const bool held = exponent < 16 && code < (CODEC_EXPAND_TO == 1 ? 0x7Cu : 0x7Fu);
    lost = lost || !held || grid(code, kOutMantissa, kOutLeast) != v;
    return code & 0x7Fu;
#endif
}

#if CODEC_BITS == 4 && !CODEC_FLOAT_SCALES
// The bytes of the eight magnitudes; for bfloat16 also the upper bytes.
struct Table {
    u32 low[2], high[2];
};

constexpr bool kFp4InE5M2 = CODEC_EXPAND_TO == 1 && CODEC_IS_FLOAT && !CODEC_UE4M3;
constexpr int kNormalShift = 13;  // up to which 0.5 and 6 are normal numbers of E5M2, both ways

template <bool kPlain>
DEVICE Table table_of(u32 scale, const Unit& unit, bool& lost) {
    Table t = {{0, 0}, {0, 0}};
    if (kFp4InE5M2 && unit.live &&
        static_cast<u32>(unit.shift + kNormalShift) <= 2 * kNormalShift) {
        // 0, 0.5, 1, 1.5; 2, 3, 4, 6, with the scale added to their exponents
        const u32 by = static_cast<u32>(unit.shift) << kOutMantissa;
        t.low[0] = 0x3E3C3800u + by * 0x01010100u, t.low[1] = 0x46444240u + by * 0x01010101u;
        return t;
    }
#if CODEC_FIXED && !CODEC_UE4M3
    if (kPlain ||
        is_plain(scale)) {  // 0, 0.5; 1, 1.5; 2, 3; 4, 6, with the scale added to their exponents
        const u32 both = scale * 0x00800080u;
        const u32 pairs[4] = {
            (scale - 1) << 23, both + 0x00400000u, both + 0x00C00080u, both + 0x01400100u};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            t.low[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6420);
            t.high[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
        }
    } else
#endif
    {
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
            const u32 code =
                unit.live ? encoded(grid(n, CODEC_MANTISSA, CODEC_MIN_EXPONENT) * unit.value, lost)
                          : kOutNaN;
            t.low[n / 4] |= (code & 0xFFu) << (8 * (n % 4));
            t.high[n / 4] |= code >> 8 << (8 * (n % 4));
        }
    }
    return t;
}
#endif

#if CODEC_FLOAT_SCALES
// Codes less their zero point, without a scale: at most 8 significant bits.
DEVICE u32 number_of(u32 code, float zero) {
#if CODEC_IS_FLOAT
    const u32 magnitude = code & 0x7Fu;
    // A float with other widths: shifted into place it is off by a power of two, subnormals too.
    float v = __uint_as_float(magnitude << (23 - CODEC_MANTISSA)) *
              __uint_as_float(static_cast<u32>(253 + (CODEC_MIN_EXPONENT)) << 23);
    if (magnitude > CODEC_MAX_CODE)
        v = __uint_as_float(magnitude == 0x7Cu ? 0x7F800000u : 0x7FC00000u);  // of E5M2
    return __float_as_uint(v) | code >> 7 << 31;
#else
    return __float_as_uint(__uint_as_float(0x4B000000u | (code ^ 1u << (CODEC_BITS - 1))) - zero);
#endif
}

template <bool kPlain = false>
DEVICE void convert(const u32 (&words)[kWords], int zero_point, int, uint4 (&units)[2], u32&) {
    const float zero = static_cast<float>((1 << 23) + (1 << (CODEC_BITS - 1)) + zero_point);
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 word = words[i * CODEC_BITS / 16] >> (2 * CODEC_BITS * i % 32),
                  mask = (1u << CODEC_BITS) - 1;
        out[i] = __byte_perm(
            number_of(word & mask, zero), number_of(word >> CODEC_BITS & mask, zero), 0x7632);
    }
    units[0] = uint4{out[0], out[1], out[2], out[3]},
    units[1] = uint4{out[4], out[5], out[6], out[7]};
}
#else
// Converts 16 codes of one block to 16-byte units. kPlain: all values are known to be normal.
template <bool kPlain = false>
DEVICE void convert(
    const u32 (&words)[kWords], u32 scale, int anchor, uint4 (&units)[kVectors], u32& beyond) {
    const Unit unit = unit_of(scale, anchor);
    bool lost = false;
    u32 any = 0, out[4 * kVectors];
#if CODEC_BITS == 4
    const Table t = table_of<kPlain>(scale, unit, lost);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 four = words[i / 2] >> (16 * (i % 2)), pick = four & 0x7777u;
        const u32 signs = (four & 0x8u) << 4 | (four & 0x80u) << 8 | (four & 0x800u) << 12 |
                          (four & 0x8000u) << 16;
        any |= pick;
        const u32 low = __byte_perm(t.low[0], t.low[1], pick);
#if CODEC_EXPAND_TO == 0
        const u32 high = __byte_perm(t.high[0], t.high[1], pick) | signs;
        out[2 * i] = __byte_perm(low, high, 0x5140);
        out[2 * i + 1] = __byte_perm(low, high, 0x7362);
#else
        out[i] = low | signs;
#endif
    }
#else
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) out[i] = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const int at = k * CODEC_BITS;
        u32 code = words[at / 32] >> (at % 32);
        if (at % 32 + CODEC_BITS > 32) code |= words[at / 32 + 1] << (32 - at % 32);
        code &= (1u << CODEC_BITS) - 1;
        const u32 sign = code >> (CODEC_BITS - 1);
#if CODEC_IS_FLOAT
        const u32 magnitude = code & ((1u << (CODEC_BITS - 1)) - 1);
        const float v = grid(magnitude, CODEC_MANTISSA, CODEC_MIN_EXPONENT);
#else
        const u32 magnitude = sign ? (1u << CODEC_BITS) - code : code;
        const float v =
            static_cast<float>(magnitude) * power_of_two(CODEC_MIN_EXPONENT - CODEC_MANTISSA);
#endif
        any |= magnitude;
        u32 made = unit.live ? encoded(v * unit.value, lost) : kOutNaN;
        made |= sign << (8 * kVectors - 1);
        out[k * kVectors / 4] |= made << (8 * kVectors * (k % (4 / kVectors)));
    }
#endif
    if (unit.live && any && (lost || unit.small)) beyond = 1;
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
        units[u] = uint4{out[4 * u], out[4 * u + 1], out[4 * u + 2], out[4 * u + 3]};
}
#endif

// A stored matrix with blocks along its rows.
struct Stored {
    const u8 *codes, *scales;
    const signed char* zeros;     // CODEC_FLOAT_SCALES: zero points or null; no scales
    i64 code_pitch, scale_pitch;  // from row to row
};

// A row of a stored matrix, and a chunk of 16 of its codes with their scale.
struct Row {
    const u8 *codes, *scales;
    const signed char* zeros;
    i64 code_pitch;
};
struct Chunk {
    u32 words[kWords];
    int scale;  // CODEC_FLOAT_SCALES: the zero point
};

DEVICE Row row_of(const Stored& from, u32 row) {
    const i64 blocks = static_cast<i64>(row / CODEC_TILE_ROWS) * from.scale_pitch;
    return {from.codes + row * from.code_pitch, CODEC_FLOAT_SCALES ? nullptr : from.scales + blocks,
        CODEC_FLOAT_SCALES && from.zeros ? from.zeros + blocks : nullptr, from.code_pitch};
}

DEVICE Chunk read_chunk(const Row& row, u32 chunk) {
    Chunk out;
    const u32 block = chunk * kChunk / CODEC_BLOCK;
    const u8* at = row.codes + chunk * (4 * kWords);
#if CODEC_FLOAT_SCALES
    out.scale = row.zeros ? row.zeros[block] : 0;
#if !CODEC_WHOLE
#pragma unroll
    for (int w = 0; w < kWords; ++w) out.words[w] = 0;
#pragma unroll
    for (int b = 0; b < 4 * kWords; ++b)
        if (chunk * (4 * kWords) + b < row.code_pitch)
            out.words[b / 4] |= static_cast<u32>(at[b]) << 8 * (b % 4);
    return out;
#endif
#else
    out.scale = row.scales[block];
#endif
#if CODEC_BITS == 4
    const uint2 two = *reinterpret_cast<const uint2*>(at);
    out.words[0] = two.x, out.words[1] = two.y;
#elif CODEC_BITS == 6
    const u32* three = reinterpret_cast<const u32*>(at);
    out.words[0] = three[0], out.words[1] = three[1], out.words[2] = three[2];
#else
    const uint4 four = *reinterpret_cast<const uint4*>(at);
    out.words[0] = four.x, out.words[1] = four.y, out.words[2] = four.z, out.words[3] = four.w;
#endif
    return out;
}

DEVICE void store(u8* out, i64 chunk, const uint4 (&units)[kVectors]) {
    uint4* to = reinterpret_cast<uint4*>(out) + chunk * kVectors;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) to[u] = units[u];
}

#if CODEC_EXPAND_TO == 0
DEVICE u32 neighbours(u32 mine) { return __shfl_xor_sync(0xFFFFFFFFu, mine, 1); }

// Stores the units of a whole warp with consecutive chunks: two lanes write a 32-byte sector.
DEVICE void store_sectors(u8* out, u32 chunk, u32 count, const uint4 (&units)[2]) {
    const u32 odd = threadIdx.x % 2;
    uint4 theirs = odd ? units[0] : units[1];
    const uint4 own = odd ? units[1] : units[0];
    theirs = uint4{
        neighbours(theirs.x), neighbours(theirs.y), neighbours(theirs.z), neighbours(theirs.w)};
    uint4* to = reinterpret_cast<uint4*>(out) + static_cast<i64>(chunk - odd) * 2 + odd;
    if (chunk - odd < count) to[0] = odd ? theirs : own;
    if (chunk - odd + 1 < count) to[2] = odd ? own : theirs;
}
#endif
