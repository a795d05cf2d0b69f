// One multi-tensor step of Adam or SGD with bfloat16 or (OPTIMIZER_BLOCKS) MXFP8 states. States are
// decoded, updated in float32 and rounded stochastically in registers, bit by bit as in
// extensor/optim/states.py.
//
// A thread owns four values. One Philox call serves a block of 32, whose maximum 8 lanes find.
// Macros: OPTIMIZER_BLOCKS, and the quantizer's. Compiled with --fmad=false.

#define COMMON_MUL_WIDE 1
#include "optim/optimizer.cuh"
#include "common/philox.cuh"

constexpr u32 kMagnitude = 0x7FFFFFFFu, kExponent = 0x7F800000u, kMantissa = 0x007FFFFFu;
constexpr u32 kSigns = 0x80808080u;
constexpr int kStride = 4 * kThreads, kResident = 4;  // resident blocks per multiprocessor
constexpr int kDrawn =
    OPTIMIZER_BLOCKS ? CODEC_BLOCK : 8192;  // values whose random words are one Philox block

DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float float_of(u32 v) { return __uint_as_float(v); }
DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

#include "codec/decode.cuh"

// ---- four states as they are stored ----

#if OPTIMIZER_BLOCKS
#include "codec/e8m0_scale.cuh"
#include "codec/rounding.cuh"

static_assert(CODEC_BITS == 8 && CODEC_IS_FLOAT && CODEC_RULE == 1 && CODEC_INF_BYTE == 255,
    "scales are 0 to 253, or 255");
typedef u32 Four;                              // codes
constexpr u32 kNormal = 1u << CODEC_MANTISSA;  // the first normal code of the grid
constexpr int kBelow = 23 - CODEC_MANTISSA;
constexpr u32 kBias = 127 + CODEC_MIN_EXPONENT - 1;  // a float's exponent less that of its code

DEVICE Four load(const void* from, bool, int left) {
    return left > 0 ? *static_cast<const u32*>(from) : 0;  // blocks are stored whole
}

DEVICE void store(void* to, Four codes, bool, int left) {
    if (left > 0) *static_cast<u32*>(to) = codes;
}

// Decodes codes: a code's bits are a float's with another exponent, subnormals included.
template <bool kRoot>
DEVICE void decode(Four codes, u32 scale, float (&out)[4]) {
    constexpr u32 kMost = 254 - kBias;  // one multiplication cannot lift larger scales
    const bool nan = ((codes & ~kSigns) + (0x7F - CODEC_MAX_CODE) * 0x01010101u) & kSigns;
    if (scale > kMost || nan) {
        const float factor = scale == 255 ? nan_value() : float_of(scale ? scale << 23 : 0x400000u);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            out[k] = __fmul_rn(element_value(codes >> (8 * k) & 0xFFu), factor);
    } else {
        const float factor = float_of((scale + kBias) << 23);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int top =
                static_cast<int>(codes << (24 - 8 * k));  // the code; bits below are masked
            constexpr u32 kKept = 0x7Fu << kBelow;
            const u32 bits =
                static_cast<u32>(top >> (24 - kBelow)) & (kRoot ? kKept : kKept | ~kMagnitude);
            out[k] = __fmul_rn(float_of(bits), factor);
        }
    }
    if (kRoot) {
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = __fmul_rn(out[k], out[k]);
    }
}

DEVICE u32 high_bytes(const u32 (&v)[4]) {
    return __byte_perm(__byte_perm(v[0], v[1], 0x73), __byte_perm(v[2], v[3], 0x73), 0x5410);
}

// Encodes values and returns their block's scale byte; neighbouring lanes have the rest of the
// block. A positive root never becomes zero.
template <bool kRoot>
DEVICE Four encode(const float (&v)[4], const u32 (&word)[4], u32& scale) {
    u32 magnitude[4], most = 0, least = ~0u;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        magnitude[k] = bits_of(v[k]) & kMagnitude;
        most = larger(most, magnitude[k]), least = smaller(least, magnitude[k]);
    }
#pragma unroll
    for (int lane = 1; lane < CODEC_BLOCK / 4; lane *= 2)
        most = larger(most, __shfl_xor_sync(~0u, most, lane));
    const bool finite = most < kExponent;
    const u32 expected = static_cast<u32>(exponent_byte(most));
    scale = finite ? expected : 255u;
    // A normal code is the float's leading bits less an offset. The cut bits carry exactly when
    // frac * 2**32 > word. Smaller scales could involve float32 subnormals.
    const bool plain = finite && scale > 127 - kBias;
    const u32 offset = plain ? (scale + kBias - 127) << 23 : 0;
    const u32 lowest = plain ? offset + (kNormal << kBelow) : most ? ~0u : 0;
    u32 codes = 0;
    if (least < lowest) {
        const float factor = float_of((254u - scale) << 23);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float value;
            u32 n = finite ? smaller(round_magnitude(__fmul_rn(v[k], factor), word[k], value),
                                 CODEC_MAX_CODE)
                           : 0;
            if (kRoot && n == 0 && v[k] > 0) n = 1;
            codes |= n << (8 * k);
        }
    } else {
        u32 top[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            top[k] = (magnitude[k] - (word[k] >> (32 - kBelow)) + (((1u << kBelow) - 1) - offset))
                     << (24 - kBelow);
        codes = high_bytes(top);
    }
    if (!kRoot) {
        const u32 raw[4] = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
        codes |= finite ? high_bytes(raw) & kSigns : 0;
    }
    return codes;
}
#else
typedef uint2 Four;

DEVICE Four load(const void* from, bool four, int left) {
    const u16* halves = static_cast<const u16*>(from);
    if (four) return *reinterpret_cast<const uint2*>(halves);
    u32 half[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) half[k] = k < left ? halves[k] : 0;
    return uint2{half[0] | half[1] << 16, half[2] | half[3] << 16};
}

DEVICE void store(void* to, Four pairs, bool four, int left) {
    u16* halves = static_cast<u16*>(to);
    if (four) {
        *reinterpret_cast<uint2*>(halves) = pairs;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (k < left) halves[k] = static_cast<u16>((k < 2 ? pairs.x : pairs.y) >> (k % 2 * 16));
}

DEVICE void decode(Four pairs, float (&out)[4]) {
    out[0] = float_of(pairs.x << 16), out[1] = float_of(pairs.x & 0xFFFF0000u);
    out[2] = float_of(pairs.y << 16), out[3] = float_of(pairs.y & 0xFFFF0000u);
}

// The 16 cut bits carry when they exceed the random ones; two values share a word's halves.
DEVICE u32 encode(float low, float high, u32 word) {
    u32 a = bits_of(low), b = bits_of(high);
    if ((a & kExponent) != kExponent) a += word & 0xFFFFu;
    if ((b & kExponent) != kExponent) b += word >> 16;
    return __byte_perm(a, b, 0x7632);
}
#endif

// ---- the step ----

DEVICE void load(const float* from, bool four, int left, float (&to)[4]) {
    if (four) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = k < left ? from[k] : 0;
}

DEVICE void store(float* to, bool four, int left, const float (&from)[4]) {
    if (four) {
        float4 v;
        v.x = from[0], v.y = from[1], v.z = from[2], v.w = from[3];
        __stcg(reinterpret_cast<float4*>(to), v);  // an assignment would be split into four
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (k < left) to[k] = from[k];
}

struct Fetched {
    float weight[4], grad[4];
    Four first, second;
    u32 first_scale, second_scale;
};

// A block's part of a parameter: `count` values from `begin` on. kWhole: whole warps of aligned
// vectors.
template <class Rule, bool kWhole>
DEVICE void move(const Tensor& t, const Rule& rule, u32 now, i64 begin, int count, u8* first_scales,
    u8* second_scales) {
    constexpr int kBytes = sizeof(Four) / 4;
    const u32 high = t.number << 8, base = static_cast<u32>(begin / kDrawn);
    float* const weight = t.weight + begin;
    const float* const grad = t.grad + begin;
    char* const first = static_cast<char*>(t.first) + begin * kBytes;
    char* const second = static_cast<char*>(t.second) + begin * kBytes;
    const bool keeps = Rule::kSquare || t.first;

    const auto fetch = [&](u32 i) {
        const int left = kWhole ? 4 : count - static_cast<int>(i);
        Fetched f = {};
        load(weight + i, kWhole, left, f.weight);
        load(grad + i, kWhole, left, f.grad);
        if (keeps) f.first = load(first + i * kBytes, kWhole, left);
        if (Rule::kSquare) f.second = load(second + i * kBytes, kWhole, left);
#if OPTIMIZER_BLOCKS
        if (left > 0) {
            if (keeps) f.first_scale = first_scales[i / CODEC_BLOCK];
            if (Rule::kSquare) f.second_scale = second_scales[i / CODEC_BLOCK];
        }
#endif
        return f;
    };

    // Whole warps iterate, because lanes of a block exchange values. Values beyond the end stay
    // zero.
    const u32 end = (count + 127) / 128 * 128;
    Fetched next = {};
    if (threadIdx.x * 4 < end) next = fetch(threadIdx.x * 4);
#pragma unroll 1
    for (u32 i = threadIdx.x * 4; i < end; i += kStride) {
        Fetched f = next;
        if (i + kStride < end) next = fetch(i + kStride);
        const int left = kWhole ? 4 : count - static_cast<int>(i);
        const u32 drawn = base + i / kDrawn;
        float mean[4] = {}, square[4] = {};
#if OPTIMIZER_BLOCKS
        float root[4];
        if (keeps) decode<false>(f.first, f.first_scale, mean);
        if (Rule::kSquare) decode<true>(f.second, f.second_scale, square);
#pragma unroll
        for (int k = 0; k < 4; ++k) root[k] = rule(f.weight[k], f.grad[k], mean[k], square[k]);
        store(weight + i, kWhole, left, f.weight);
        const u32 call = threadIdx.x % (CODEC_BLOCK / 4);
        u32 word[4];
        if (keeps) {
            philox(call, drawn, Stream{0, 0, now, high}, word);
            f.first = encode<false>(mean, word, f.first_scale);
        }
        if (Rule::kSquare) {
            philox(call, drawn, Stream{0, 0, now, high | 2}, word);
            f.second = encode<true>(root, word, f.second_scale);
        }
        __syncwarp();  // all lanes have read their block's scale
        if (call == 0 && left > 0) {
            if (keeps) first_scales[i / CODEC_BLOCK] = static_cast<u8>(f.first_scale);
            if (Rule::kSquare) second_scales[i / CODEC_BLOCK] = static_cast<u8>(f.second_scale);
        }
#else
        if (keeps) decode(f.first, mean);
        if (Rule::kSquare) decode(f.second, square);
#pragma unroll
        for (int k = 0; k < 4; ++k) rule(f.weight[k], f.grad[k], mean[k], square[k]);
        store(weight + i, kWhole, left, f.weight);
        // One call's words are the noise of two lanes' eight values. The even lane draws for the
        // first state, the odd lane for the second.
        const u32 odd = threadIdx.x % 2;
        u32 word[4];
        philox(i % kDrawn / 8, drawn, Stream{0, 0, now, high | odd << 1}, word);
        const u32 low = __shfl_xor_sync(~0u, odd ? word[0] : word[2], 1);
        const u32 top = __shfl_xor_sync(~0u, odd ? word[1] : word[3], 1);
        if (keeps)
            f.first = uint2{encode(mean[0], mean[1], odd ? low : word[0]),
                encode(mean[2], mean[3], odd ? top : word[1])};
        if (Rule::kSquare)
            f.second = uint2{encode(square[0], square[1], odd ? word[2] : low),
                encode(square[2], square[3], odd ? word[3] : top)};
#endif
        if (keeps) store(first + i * kBytes, f.first, kWhole, left);
        if (Rule::kSquare) store(second + i * kBytes, f.second, kWhole, left);
    }
}

template <class Rule>
DEVICE void step(const Tensor* tensors, int number, const Pace& pace) {
    if (pace.bad && (*pace.bad | *pace.stop)) return;
    const Tensor t = tensor_of(tensors, number);
    const Rule rule(t, pace);
    const u32 now = static_cast<u32>(pace.row(t).step);
    const i64 begin = (static_cast<i64>(blockIdx.x) - t.start) * kPart;
    const i64 rest = t.count - begin;
    const int count = rest < kPart ? static_cast<int>(rest) : kPart;
    const bool vectors =
        aligned(t.weight) && aligned(t.grad) && aligned(t.first, 8) && aligned(t.second, 8);
#if OPTIMIZER_BLOCKS
    // Scales go through shared memory, because single-byte global accesses are slow.
    __shared__ u8 scales[2][kPart / CODEC_BLOCK];
    u8 *const first = t.first_scales + begin / CODEC_BLOCK, *const second = t.second_scales +
                                                                            begin / CODEC_BLOCK;
    const int blocks = (count + CODEC_BLOCK - 1) / CODEC_BLOCK;
    for (int i = threadIdx.x; i < blocks; i += kThreads) {
        if (Rule::kSquare || t.first) scales[0][i] = first[i];
        if (Rule::kSquare) scales[1][i] = second[i];
    }
    __syncthreads();
#else
    u8* scales[2] = {};
#endif
    if (vectors && count % 128 == 0)
        move<Rule, true>(t, rule, now, begin, count, scales[0], scales[1]);
    else move<Rule, false>(t, rule, now, begin, count, scales[0], scales[1]);
#if OPTIMIZER_BLOCKS
    __syncthreads();
    for (int i = threadIdx.x; i < blocks; i += kThreads) {
        if (Rule::kSquare || t.first) first[i] = scales[0][i];
        if (Rule::kSquare) second[i] = scales[1][i];
    }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    adam(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Adam>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sgd(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Descent>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}
