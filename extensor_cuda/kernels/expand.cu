// Packed codes and their scales -> the operand of a product on Hopper's tensor cores, contraction
// contiguous: FP8 codes where these hold every value, or bfloat16.
//
// E8M0 scales: a value is element 2^(s - anchor + LIFT) times 2^(anchor - 127 - LIFT), with `anchor` the
// largest scale byte of the tensor; the first factor is what is written, the second the operand's
// exponent, and its factor too. E4M3 scales (UE4M3): element times scale times 2^LIFT is written, and tensor_scale 2^-LIFT
// is the operand's factor. What OUT cannot hold raises the flag. NaN blocks are NaN throughout.
//
// FIXED (bfloat16): the anchor is 127 whatever the scales are, so that nothing has to be read before and
// the values are whole; what bfloat16 does not hold is NaN and raises the flag, if there is one.
//
// A thread has 16 elements of a row, or of four neighbouring columns, which it turns: no block size, no
// tail divides its work, since stored blocks are whole. No headers, no inline assembly; macros: BITS,
// MANTISSA, MIN_EXPONENT, IS_FLOAT, UE4M3, BLOCK, TILE_ROWS, DOWN, OUT (0: bfloat16, 1: e5m2, 2: e4m3),
// LIFT, FIXED.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 256, kChunk = 16, kWords = BITS * kChunk / 32;
constexpr int kOctets = OUT ? 1 : 2;                          // of a value
constexpr int kOutMantissa = OUT == 1 ? 2 : 3, kOutLeast = OUT == 1 ? -14 : -6;  // of FP8
constexpr u32 kOutNaN = OUT ? 0x7Fu : 0x7FC0u;

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// What a code's magnitude bits mean.
__device__ __forceinline__ float grid(u32 magnitude, int mantissa, int least) {
    const u32 field = magnitude >> mantissa, part = magnitude & ((1u << mantissa) - 1);
    if (field == 0) return static_cast<float>(part) * power_of_two(least - mantissa);
    return __uint_as_float((field + least + 126) << 23 | part << (23 - mantissa));
}

// A block's scale as the operand carries it; `live`: it is a number.
struct Unit {
    float value;
    bool live, small;  // small: so far below the largest that bfloat16 may cut values
};

__device__ __forceinline__ Unit unit_of(u32 scale, int anchor) {
#if UE4M3
    const bool live = scale < 0x7Fu;
    return {live ? grid(scale, 3, -6) * power_of_two(LIFT) : 0.0f, live, false};
#else
    const int shift = static_cast<int>(scale) - anchor + LIFT;
    if (FIXED) return {shift < -126 ? 0.5f * power_of_two(-126) : power_of_two(shift), scale != 255u, false};
    return {power_of_two(shift < -126 ? -126 : shift), scale != 255u, shift < -126};
#endif
}

// A value of 0 or more as OUT's bits; `lost` where it has none.
__device__ __forceinline__ u32 encoded(float v, bool& lost) {
    const u32 bits = __float_as_uint(v);
#if OUT == 0
    const bool held = !(bits & 0xFFFFu) && !(FIXED && bits >= 0x7F800000u);
    lost = lost || !held;
    return FIXED && !held ? kOutNaN : bits >> 16;
#else
    const int exponent = static_cast<int>(bits >> 23) - 127;
    u32 code = ((exponent - kOutLeast + 1) << kOutMantissa) | (bits & 0x7FFFFFu) >> (23 - kOutMantissa);
    if (exponent < kOutLeast) code = static_cast<u32>(v * power_of_two(kOutMantissa - kOutLeast));
    const bool held = exponent < 16 && code < (OUT == 1 ? 0x7Cu : 0x7Fu);
    lost = lost || !held || grid(code, kOutMantissa, kOutLeast) != v;
    return code & 0x7Fu;
#endif
}

#if BITS == 4
// Bytes of the eight magnitudes; of bfloat16 the upper ones too.
struct Table {
    u32 low[2], high[2];
};

__device__ __forceinline__ Table table_of(const Unit& unit, bool& lost) {
    Table t = {{0, 0}, {0, 0}};
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
        const u32 code = unit.live ? encoded(grid(n, MANTISSA, MIN_EXPONENT) * unit.value, lost) : kOutNaN;
        t.low[n / 4] |= (code & 0xFFu) << (8 * (n % 4));
        t.high[n / 4] |= code >> 8 << (8 * (n % 4));
    }
    return t;
}
#endif

// 16 codes of one block -> 16-byte units.
__device__ __forceinline__ void convert(const u32 (&words)[kWords], u32 scale, int anchor,
                                        uint4 (&units)[kOctets], u32& beyond) {
    const Unit unit = unit_of(scale, anchor);
    bool lost = false;
    u32 any = 0, out[4 * kOctets];
#if BITS == 4
    const Table t = table_of(unit, lost);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 four = words[i / 2] >> (16 * (i % 2)), pick = four & 0x7777u;
        const u32 signs = (four & 0x8u) << 4 | (four & 0x80u) << 8 | (four & 0x800u) << 12 |
                          (four & 0x8000u) << 16;
        any |= pick;
        const u32 low = __byte_perm(t.low[0], t.low[1], pick);
#if OUT == 0
        const u32 high = __byte_perm(t.high[0], t.high[1], pick) | signs;
        out[2 * i] = __byte_perm(low, high, 0x5140);
        out[2 * i + 1] = __byte_perm(low, high, 0x7362);
#else
        out[i] = low | signs;
#endif
    }
#else
#pragma unroll
    for (int i = 0; i < 4 * kOctets; ++i) out[i] = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const int at = k * BITS;
        u32 code = words[at / 32] >> (at % 32);
        if (at % 32 + BITS > 32) code |= words[at / 32 + 1] << (32 - at % 32);
        code &= (1u << BITS) - 1;
        const u32 sign = code >> (BITS - 1);
#if IS_FLOAT
        const u32 magnitude = code & ((1u << (BITS - 1)) - 1);
        const float v = grid(magnitude, MANTISSA, MIN_EXPONENT);
#else
        const u32 magnitude = sign ? (1u << BITS) - code : code;
        const float v = static_cast<float>(magnitude) * power_of_two(MIN_EXPONENT - MANTISSA);
#endif
        any |= magnitude;
        u32 made = unit.live ? encoded(v * unit.value, lost) : kOutNaN;
        made |= sign << (8 * kOctets - 1);
        out[k * kOctets / 4] |= made << (8 * kOctets * (k % (4 / kOctets)));
    }
#endif
    if (unit.live && any && (lost || unit.small)) beyond = 1;
#pragma unroll
    for (int u = 0; u < kOctets; ++u)
        units[u] = uint4{out[4 * u], out[4 * u + 1], out[4 * u + 2], out[4 * u + 3]};
}

__device__ __forceinline__ void store(u8* out, i64 chunk, const uint4 (&units)[kOctets]) {
    uint4* to = reinterpret_cast<uint4*>(out) + chunk * kOctets;
#pragma unroll
    for (int u = 0; u < kOctets; ++u) to[u] = units[u];
}

#if OUT == 0
__device__ __forceinline__ u32 neighbours(u32 mine) { return __shfl_xor_sync(0xFFFFFFFFu, mine, 1); }

// The same by a whole warp, whose lanes have chunks in order: two lanes write 32 bytes, a whole sector.
__device__ __forceinline__ void store_together(u8* out, i64 chunk, i64 count, const uint4 (&units)[2]) {
    const bool odd = threadIdx.x % 2;
    uint4 theirs = odd ? units[0] : units[1];
    const uint4 own = odd ? units[1] : units[0];
    theirs = uint4{neighbours(theirs.x), neighbours(theirs.y), neighbours(theirs.z), neighbours(theirs.w)};
    uint4* to = reinterpret_cast<uint4*>(out) + (chunk - odd) * 2 + odd;
    if (chunk - odd < count) to[0] = odd ? theirs : own;
    if (chunk - odd + 1 < count) to[2] = odd ? own : theirs;
}
#endif

// codes (rows, bytes), scales (tiles of rows, blocks) -> out (rows, pitch); DOWN: codes (bytes,
// columns), scales (blocks, tiles of columns) -> out (columns, pitch). `lines` are out's rows.
extern "C" __global__ void __launch_bounds__(kThreads)
expand(const u8* __restrict__ codes, const u8* __restrict__ scales, const u32* __restrict__ largest,
       const float* __restrict__ tensor_scale, u8* __restrict__ out, int* __restrict__ exponent,
       float* __restrict__ factor, u32* __restrict__ flag, const u32* __restrict__ guard,
       const u32* __restrict__ other_guard, i64 lines, i64 pitch, i64 octets, i64 scale_pitch) {
    if (guard && !(*guard | *other_guard)) return;
    const int anchor = UE4M3 ? 0 : FIXED ? 127 : static_cast<int>(*largest);
    if (!FIXED && blockIdx.x == 0 && threadIdx.x == 0) {
        if (exponent) *exponent = anchor - 127 - LIFT;
        const int half = (anchor - 127 - LIFT) / 2;  // in two steps: 2^-140 is a subnormal
        *factor = UE4M3 ? *tensor_scale * power_of_two(-(LIFT))
                        : power_of_two(half) * power_of_two(anchor - 127 - LIFT - half);
    }
    const u32 chunks = static_cast<u32>(pitch / kChunk);
    u32 beyond = 0;
#if DOWN
    // A warp has 4 neighbouring chunks of 8 groups of four columns: whole sectors, read and written.
    const u32 quads = static_cast<u32>((lines + 3) / 4), across = (quads + 7) / 8;
    const u32 lane = threadIdx.x % 32, warps = across * ((chunks + 3) / 4);
    const bool whole = lines % 4 == 0;
    for (u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; warp < warps;
         warp += gridDim.x * (kThreads / 32)) {
        const u32 quad = warp % across * 8 + lane / 4, chunk = warp / across * 4 + lane % 4;
        if (quad >= quads || chunk >= chunks) continue;
        const i64 column = static_cast<i64>(quad) * 4;
        u32 words[4][kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            u32 row[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const u8* from = codes + (static_cast<i64>(chunk) * (4 * kWords) + 4 * w + b) * lines + column;
                if (whole) {
                    row[b] = *reinterpret_cast<const u32*>(from);
                } else {
                    row[b] = 0;
                    for (int c = 0; c < 4; ++c)
                        if (column + c < lines) row[b] |= static_cast<u32>(from[c]) << (8 * c);
                }
            }
            const u32 a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
            const u32 c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
            words[0][w] = __byte_perm(a, b, 0x5410), words[1][w] = __byte_perm(a, b, 0x7632);
            words[2][w] = __byte_perm(c, d, 0x5410), words[3][w] = __byte_perm(c, d, 0x7632);
        }
        const u8* of_block = scales + static_cast<i64>(chunk * kChunk / BLOCK) * scale_pitch;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (column + c >= lines) continue;
            uint4 units[kOctets];
            convert(words[c], of_block[(column + c) / TILE_ROWS], anchor, units, beyond);
            store(out, (column + c) * chunks + chunk, units);
        }
    }
#else
    const u32 count = static_cast<u32>(lines) * chunks, step = gridDim.x * kThreads;
    for (u32 first = blockIdx.x * kThreads; first < count; first += step) {  // whole warps go together
        const u32 at = first + threadIdx.x;
        uint4 units[kOctets] = {};
        if (at < count) {
            const u32 row = at / chunks, chunk = at % chunks;
            const u8* from = codes + row * octets + static_cast<i64>(chunk) * (4 * kWords);
            u32 words[kWords];
#if BITS == 4
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            words[0] = two.x, words[1] = two.y;
#elif BITS == 6
            const u32* three = reinterpret_cast<const u32*>(from);
            words[0] = three[0], words[1] = three[1], words[2] = three[2];
#else
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
#endif
            const u32 scale = scales[row / TILE_ROWS * scale_pitch + chunk * kChunk / BLOCK];
            convert(words, scale, anchor, units, beyond);
        }
#if OUT == 0
        store_together(out, at, count, units);
#else
        if (at < count) store(out, at, units);
#endif
    }
#endif
    if (beyond && flag) atomicOr(flag, 1u);
}

// The largest of the scale bytes that are numbers; `most` starts at 0.
extern "C" __global__ void __launch_bounds__(kThreads)
anchor(const u8* __restrict__ scales, u32* __restrict__ most, i64 count) {
    u32 mine = 0;
    for (i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; at < count;
         at += static_cast<i64>(gridDim.x) * kThreads)
        if (scales[at] != 255u && scales[at] > mine) mine = scales[at];
    if (mine > *static_cast<volatile u32*>(most)) atomicMax(most, mine);
}
