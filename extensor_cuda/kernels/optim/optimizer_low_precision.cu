// One multi-tensor step of Adam, Lion or SGD where weights are bfloat16 or in MX blocks, states
// narrow (bfloat16, or MXFP8) or gradients given by rows. All is decoded, updated in float32 and
// rounded stochastically in registers, bit by bit as in extensor/optim/states.py.
//
// A thread owns four values. One Philox call serves a block of 32, whose maximum 8 lanes find.
// Macros: OPTIMIZER_STATES, the bits of a state's value; OPTIMIZER_NARROW, how narrow a weight may
// be (`Tensor::narrow`); OPTIMIZER_ROWS; OPTIMIZER_WEIGHT_SLOT, of random streams; the format of
// weights in blocks (block_weights.cuh); the quantizer's, of states. Compiled with --fmad=false.

#define COMMON_MUL_WIDE 1
#include "optim/optimizer.cuh"
#include "optim/vectors.cuh"
#include "common/philox.cuh"

constexpr u32 kSigns = 0x80808080u;
constexpr int kStride = 4 * kThreads;
constexpr int kResident = 4 - OPTIMIZER_ROWS - (OPTIMIZER_NARROW > 1);  // blocks per multiprocessor
constexpr int kDrawn =  // values of a state whose random words are one Philox block
    OPTIMIZER_STATES == 8 ? CODEC_BLOCK : kHalves;

DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

#include "codec/decode.cuh"

// ---- four states as they are stored ----

#if OPTIMIZER_STATES == 8
#include "codec/e8m0_scale.cuh"
#include "codec/rounding.cuh"

static_assert(CODEC_BITS == 8 && CODEC_IS_FLOAT && CODEC_RULE == 1 && CODEC_INF_BYTE == 255,
    "scales are 0 to 253, or 255");
typedef u8 State;
typedef u32 Four;                              // codes
constexpr u32 kNormal = 1u << CODEC_MANTISSA;  // the first normal code of the grid
constexpr int kBelow = 23 - CODEC_MANTISSA;
constexpr u32 kBias = 127 + CODEC_MIN_EXPONENT - 1;  // a float's exponent less that of its code

DEVICE Four load(const u8* from, bool, int left) {
    return left > 0 ? *reinterpret_cast<const u32*>(from) : 0;  // blocks are stored whole
}

DEVICE void store(u8* to, Four codes, bool, int left) {
    if (left > 0) *reinterpret_cast<u32*>(to) = codes;
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
#elif OPTIMIZER_STATES == 16
typedef u16 State;
typedef Bf16x4 Four;
#else
typedef float State;
typedef Floatx4 Four;
#endif

#if OPTIMIZER_NARROW > 1
#include "optim/block_weights.cuh"
#endif

// ---- the step ----

// How a tensor's weights and gradients are stored; kNarrow is `Tensor::narrow`.
template <int kNarrow>
struct Weights {
    typedef u16 Element;
    typedef Bf16x4 Four;
};
template <>
struct Weights<0> {
    typedef float Element;
    typedef Floatx4 Four;
};

template <int kNarrow>
struct Fetched {
    typename Weights<kNarrow>::Four weight, grad;
    Four first, second;
    u32 first_scale, second_scale, codes;  // codes: of a weight in blocks
};

// Scale bytes of a block's part: of both states and the weight, one kind after the other, in shared
// memory, because single-byte global accesses are slow.
constexpr int kScales = kPart / CODEC_BLOCK;

#if OPTIMIZER_ROWS
// Where the gradient of four values from i on lies; null: they are zero.
template <class Element>
DEVICE const Element* in_rows(const Tensor& t, i64 i) {
    const Element* grad = static_cast<const Element*>(t.grad);
    if (!t.slots) return grad + i;
    const u32 at = static_cast<u32>(i), row = at / t.width;
    const int slot = t.slots[row];
    return slot < 0 ? nullptr : grad + static_cast<i64>(slot) * t.width + (at - row * t.width);
}
#endif

// A block's part of a parameter: `count` values from `begin` on. kWhole: whole warps of aligned
// vectors.
template <class Rule, bool kWhole, int kNarrow>
DEVICE void move(const Tensor& t, const Rule& rule, u32 now, i64 begin, int count, u8* scales) {
    typedef typename Weights<kNarrow>::Element Element;
    const u32 high = t.number << 8, base = static_cast<u32>(begin / kDrawn);
    Element* const weight = static_cast<Element*>(t.weight) + (kNarrow > 1 ? 0 : begin);
#if OPTIMIZER_NARROW > 1
    u8* const codes = static_cast<u8*>(t.weight) + begin / 8 * CODEC_BITS;
#endif
#if !OPTIMIZER_ROWS
    const Element* const grad = static_cast<const Element*>(t.grad) + begin;
#endif
    State* const first = static_cast<State*>(t.first) + begin;
    State* const second = static_cast<State*>(t.second) + begin;
    const bool keeps = Rule::kSquare || t.first;

    const auto fetch = [&](u32 i) {
        const int left = kWhole ? 4 : count - static_cast<int>(i);
        Fetched<kNarrow> f = {};
        if (kNarrow < 2) f.weight = load(weight + i, kWhole, left);
#if OPTIMIZER_NARROW > 1
        else if (left > 0) f.codes = load_codes(codes, i);
#endif
#if OPTIMIZER_ROWS
        if (left > 0)
            if (const Element* from = in_rows<Element>(t, begin + i))
                f.grad = load(from, kWhole, left);
#else
        f.grad = load(grad + i, kWhole, left);
#endif
        if (keeps) f.first = load(first + i, kWhole, left);
        if (Rule::kSquare) f.second = load(second + i, kWhole, left);
#if OPTIMIZER_STATES == 8
        if (left > 0) {
            if (keeps) f.first_scale = scales[i / CODEC_BLOCK];
            if (Rule::kSquare) f.second_scale = scales[kScales + i / CODEC_BLOCK];
        }
#endif
        return f;
    };

    // In bfloat16 one Philox call's words are the noise of two lanes' eight weights; both draw it.
    const auto write = [&](u32 i, int left, const float (&w)[4]) {
        typename Weights<kNarrow>::Four out;
        u32 word[4] = {};
#if OPTIMIZER_NARROW > 1
        if (kNarrow > 1) {
            const u32 call = threadIdx.x % (CODEC_BLOCK / 4);
            u32 scale;
            philox(call, static_cast<u32>(begin / CODEC_BLOCK) + i / CODEC_BLOCK,
                Stream{0, 0, now, high | OPTIMIZER_WEIGHT_SLOT << 1}, word);
            const u32 four = encode_codes(w, word, t, scale);
            if (left <= 0) return;
            store_codes(codes, i, four);
            if (call == 0) scales[2 * kScales + i / CODEC_BLOCK] = static_cast<u8>(scale);
            return;
        }
#endif
        if (kNarrow)
            philox(i % kHalves / 8, static_cast<u32>(begin / kHalves) + i / kHalves,
                Stream{0, 0, now, high | OPTIMIZER_WEIGHT_SLOT << 1}, word);
        const bool odd = threadIdx.x % 2;
        encode(w, odd ? word[2] : word[0], odd ? word[3] : word[1], out);
        store(weight + i, out, kWhole, left);
    };

    // Whole warps iterate, because lanes of a block exchange values. Values beyond the end stay
    // zero.
    const u32 end = (count + 127) / 128 * 128;
    Fetched<kNarrow> next = {};
    if (threadIdx.x * 4 < end) next = fetch(threadIdx.x * 4);
#pragma unroll 1
    for (u32 i = threadIdx.x * 4; i < end; i += kStride) {
        Fetched<kNarrow> f = next;
        if (i + kStride < end) next = fetch(i + kStride);
        const int left = kWhole ? 4 : count - static_cast<int>(i);
        const u32 drawn = base + i / kDrawn;
        float w[4], g[4], mean[4] = {}, square[4] = {};
        u32 word[4];
        decode(f.grad, g);
        if (kNarrow < 2) decode(f.weight, w);
#if OPTIMIZER_NARROW > 1
        else decode_codes(f.codes, scales[2 * kScales + i / CODEC_BLOCK], w);
        __syncwarp();  // all lanes have read their block's scale
#endif
#if OPTIMIZER_STATES == 8
        float root[4];
        if (keeps) decode<false>(f.first, f.first_scale, mean);
        if (Rule::kSquare) decode<true>(f.second, f.second_scale, square);
#pragma unroll
        for (int k = 0; k < 4; ++k) root[k] = rule(w[k], g[k], mean[k], square[k]);
        write(i, left, w);
        const u32 call = threadIdx.x % (CODEC_BLOCK / 4);
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
            if (keeps) scales[i / CODEC_BLOCK] = static_cast<u8>(f.first_scale);
            if (Rule::kSquare) scales[kScales + i / CODEC_BLOCK] = static_cast<u8>(f.second_scale);
        }
#else
        if (keeps) decode(f.first, mean);
        if (Rule::kSquare) decode(f.second, square);
#pragma unroll
        for (int k = 0; k < 4; ++k) rule(w[k], g[k], mean[k], square[k]);
        write(i, left, w);
#if OPTIMIZER_STATES == 16
        // One call's words are the noise of two lanes' eight values. The even lane draws for the
        // first state, the odd lane for the second.
        const u32 odd = threadIdx.x % 2;
        philox(i % kDrawn / 8, drawn, Stream{0, 0, now, high | odd << 1}, word);
        const u32 low = __shfl_xor_sync(~0u, odd ? word[0] : word[2], 1);
        const u32 top = __shfl_xor_sync(~0u, odd ? word[1] : word[3], 1);
#else
        const u32 odd = 0, low = 0, top = 0;
        word[0] = word[1] = word[2] = word[3] = 0;
#endif
        if (keeps) encode(mean, odd ? low : word[0], odd ? top : word[1], f.first);
        if (Rule::kSquare) encode(square, odd ? word[2] : low, odd ? word[3] : top, f.second);
#endif
        if (keeps) store(first + i, f.first, kWhole, left);
        if (Rule::kSquare) store(second + i, f.second, kWhole, left);
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
    const int grads = t.narrow ? 8 : 16, states = OPTIMIZER_STATES == 32 ? 16 : 8;
    const bool vectors = (t.narrow > 1 || aligned(t.weight, grads)) && aligned(t.grad, grads) &&
                         aligned(t.first, states) && aligned(t.second, states);
    const bool whole = vectors && count % 128 == 0;
#if OPTIMIZER_STATES == 8 || OPTIMIZER_NARROW > 1
    __shared__ u8 scales[(OPTIMIZER_NARROW > 1 ? 3 : 2) * kScales];
    const i64 block = begin / CODEC_BLOCK;
    const int blocks = (count + CODEC_BLOCK - 1) / CODEC_BLOCK;
    const bool first = OPTIMIZER_STATES == 8 && (Rule::kSquare || t.first);
    const bool second = OPTIMIZER_STATES == 8 && Rule::kSquare;
    const bool weight = OPTIMIZER_NARROW > 1 && t.narrow > 1;
    for (int i = threadIdx.x; i < blocks; i += kThreads) {
        if (first) scales[i] = t.first_scales[block + i];
        if (second) scales[kScales + i] = t.second_scales[block + i];
        if (weight) scales[2 * kScales + i] = t.weight_scales[block + i];
    }
    __syncthreads();
#else
    u8* scales = nullptr;
#endif
    if (OPTIMIZER_NARROW > 1 && t.narrow > 1) {
        if (whole) move<Rule, true, 2>(t, rule, now, begin, count, scales);
        else move<Rule, false, 2>(t, rule, now, begin, count, scales);
    } else if (OPTIMIZER_NARROW && t.narrow) {
        if (whole) move<Rule, true, 1>(t, rule, now, begin, count, scales);
        else move<Rule, false, 1>(t, rule, now, begin, count, scales);
    } else {
        if (whole) move<Rule, true, 0>(t, rule, now, begin, count, scales);
        else move<Rule, false, 0>(t, rule, now, begin, count, scales);
    }
#if OPTIMIZER_STATES == 8 || OPTIMIZER_NARROW > 1
    __syncthreads();
    for (int i = threadIdx.x; i < blocks; i += kThreads) {
        if (first) t.first_scales[block + i] = scales[i];
        if (second) t.second_scales[block + i] = scales[kScales + i];
        if (weight) t.weight_scales[block + i] = scales[2 * kScales + i];
    }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    adam(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Adam>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

// Left alone the compiler aims at 6 blocks, which spills registers: of weights in blocks, and
// before Hopper of states in blocks.
#if OPTIMIZER_NARROW > 1
#define OPTIMIZER_LION_BOUNDS kThreads, kResident
#elif OPTIMIZER_STATES == 8 && __CUDA_ARCH__ < 900
#define OPTIMIZER_LION_BOUNDS kThreads, 5
#else
#define OPTIMIZER_LION_BOUNDS kThreads
#endif
extern "C" __global__ void __launch_bounds__(OPTIMIZER_LION_BOUNDS)
    lion(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Lion>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sgd(const Tensor* tensors, int number, OPTIMIZER_SPAN_PARAMETERS) {
    step<Descent>(tensors, number, Pace{lr, rows, made, bad, stop, length, apart});
}
