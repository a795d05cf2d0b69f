// Values as they are read, and their magnitudes on an element grid. Macros: IN (0: float32, 1: bfloat16,
// 2: float16), MANTISSA, GRID_EXPONENT, IS_FLOAT, TIES (0: even, 1: away, 2: zero), WORDS (random bits, or 0).

constexpr u32 kInfinity = 0x7F800000u;

#if IN == 0
typedef u32 Raw;
#else
typedef u16 Raw;
#endif

__device__ __forceinline__ float value_of(Raw raw) {
#if IN == 0
    return __uint_as_float(raw);
#elif IN == 1
    return __uint_as_float(static_cast<u32>(raw) << 16);
#else
    return half_value(raw);
#endif
}

// Four neighbours in memory.
__device__ __forceinline__ void load_four(const Raw* from, float (&v)[4]) {
#if IN == 0
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    v[0] = value_of(four.x), v[1] = value_of(four.y), v[2] = value_of(four.z), v[3] = value_of(four.w);
#else
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    v[0] = value_of(static_cast<Raw>(two.x)), v[1] = value_of(static_cast<Raw>(two.x >> 16));
    v[2] = value_of(static_cast<Raw>(two.y)), v[3] = value_of(static_cast<Raw>(two.y >> 16));
#endif
}

// The magnitude of float bits on the grid continued without a top: codes that follow each other.
__device__ __forceinline__ u32 magnitude_code(u32 bits, u32 word) {
    const u32 field = bits >> 23 & 0xFFu;
    const int exponent = field ? static_cast<int>(field) : 1;  // |y| = significand 2^(exponent - 150)
    const u64 significand = (bits & 0x7FFFFFu) | (field ? 0x800000u : 0u);
    const int least = GRID_EXPONENT + MANTISSA;  // of the smallest normal
    const int step = IS_FLOAT && exponent - 127 > least ? exponent - 127 - least : 0;
    int shift = GRID_EXPONENT + step - (exponent - 150);
    shift = shift < 0 ? 0 : shift > 60 ? 60 : shift;
    const u64 rest = significand & ((1ull << shift) - 1);
    u32 n = static_cast<u32>(significand >> shift);
#if WORDS
    // up exactly when rest / 2^shift 2^32 > word
    const u64 threshold = shift <= 32 ? rest << (32 - shift) : (rest + (1ull << (shift - 32)) - 1) >> (shift - 32);
    n += word < threshold;
#else
    const u64 half = shift ? 1ull << (shift - 1) : 1;
    n += rest > half || (rest == half && shift && (TIES == 1 || (TIES == 0 && (n & 1u))));
#endif
    return n + (static_cast<u32>(step) << MANTISSA);
}

__device__ __forceinline__ void raise(u32* most, u32 mine) {
    if (mine > *static_cast<volatile u32*>(most)) atomicMax(most, mine);
}

struct Tally {
    u32 saturated, flushed;
};

// Adds a warp's counts to its pair of counters.
__device__ __forceinline__ void count(const Tally& tally, u64* slot) {
    u32 saturated = tally.saturated, flushed = tally.flushed;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        saturated += __shfl_xor_sync(~0u, saturated, step);
        flushed += __shfl_xor_sync(~0u, flushed, step);
    }
    if (threadIdx.x % 32 == 0 && saturated) atomicAdd(slot, static_cast<u64>(saturated));
    if (threadIdx.x % 32 == 0 && flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
}
