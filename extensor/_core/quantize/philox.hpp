// Random bits for stochastic rounding: Philox4x32-10 (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", 2011), counted as in extensor/random.py: counter words (call, block, the
// stream's two), key the stream's.
//
// A counter word sits in the low half of a 64-bit lane; the high half is ignored. There one
// instruction multiplies two words, and the halves of the product are where the next round reads
// them. The first three rounds hardly mix call and block, so what depends on one alone is computed
// apart.
#pragma once

#include "common/simd.hpp"
#include "quantize/kernels.hpp"

namespace EXTENSOR_ISA {

constexpr int VQ = VL / 2;  // 64-bit lanes
typedef uint64_t vq __attribute__((vector_size(4 * VL)));

INLINE vq multiply(vq a, uint32_t m) {
#if defined(__AVX512F__)
    return reinterpret_cast<vq>(
        _mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(m)));
#elif defined(__AVX2__)
    return reinterpret_cast<vq>(
        _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(m)));
#elif defined(__SSE2__)
    return reinterpret_cast<vq>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), _mm_set1_epi64x(m)));
#else
    return (a & 0xFFFFFFFFu) * static_cast<uint64_t>(m);
#endif
}

// The high halves in the low ones; by a shuffle where shifts and products wait for the same port.
INLINE vq upper(vq v) {
#if defined(__AVX512F__)
    return reinterpret_cast<vq>(_mm512_shuffle_epi32(reinterpret_cast<__m512i>(v), _MM_PERM_DDBB));
#else
    return v >> 32;
#endif
}

// The low halves of a and b as one 64-bit word, a's below.
INLINE vq join_words(vq a, vq b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vq>(_mm512_mask_shuffle_epi32(
        reinterpret_cast<__m512i>(a), 0xAAAA, reinterpret_cast<__m512i>(b), _MM_PERM_CCAA));
#else
    return (a & 0xFFFFFFFFu) | b << 32;
#endif
}

class Philox {
public:
    // What a call's number alone makes of the first three rounds, and a block's.
    struct Calls {
        vq low, high, left, right;
    };
    struct Blocks {
        vq product, upper;
    };

    explicit Philox(const QuantStream& stream) {
        for (uint32_t round = 0; round < 10; ++round) {
            key0_[round] = vq{} + (stream.key0 + round * 0x9E3779B9u);
            key1_[round] = vq{} + (stream.key1 + round * 0xBB67AE85u);
        }
        second_ = vq{} + static_cast<uint64_t>(stream.high0) * kM1;
        key0_[0] ^= second_ >> 32;
        first_ = static_cast<uint32_t>(key0_[0][0]);
        key1_[0] ^= vq{} + stream.high1;
    }

    INLINE Calls calls(vq call) const {
        const vq first = multiply(call, kM0);
        const vq p = multiply((first >> 32) ^ key1_[0], kM1);
        const vq q = multiply((p >> 32) ^ second_ ^ key0_[1], kM0);
        return {first ^ key1_[1], p ^ key0_[2], (q >> 32) ^ key1_[2], q};
    }

    INLINE Blocks blocks(vq block) const {
        const vq product = multiply(block ^ key0_[0], kM0);
        return {product, upper(product)};
    }

    // All lanes the same block.
    INLINE Blocks block(uint32_t block) const {
        const uint64_t product = static_cast<uint64_t>(block ^ first_) * kM0;
        return {vq{} + product, vq{} + (product >> 32)};
    }

    // The four words of each counter.
    INLINE void operator()(const Calls& c, const Blocks& b, vq (&out)[4]) const {
        vq words[1][4];
        const Blocks one[1] = {b};
        draw(c, one, words);
        for (int r = 0; r < 4; ++r) out[r] = words[0][r];
    }

    // The same of several vectors of blocks: while one waits for a product, others go on.
    template <int Steps>
    INLINE void draw(const Calls& c, const Blocks (&b)[Steps], vq (&out)[Steps][4]) const {
#pragma GCC unroll 4
        for (int s = 0; s < Steps; ++s) {
            const vq p = multiply(b[s].upper ^ c.low, kM1);
            out[s][0] = upper(p) ^ c.high, out[s][1] = p;
            out[s][2] = b[s].product ^ c.left, out[s][3] = c.right;
        }
#pragma GCC unroll 7
        for (int round = 3; round < 10; ++round) {
#pragma GCC unroll 4
            for (int s = 0; s < Steps; ++s) {
                vq(&w)[4] = out[s];
                const vq p0 = multiply(w[0], kM0), p1 = multiply(w[2], kM1);
                w[0] = upper(p1) ^ w[1] ^ key0_[round];
                w[1] = p1;
                w[2] = upper(p0) ^ w[3] ^ key1_[round];
                w[3] = p0;
            }
        }
    }

private:
    static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;

    vq key0_[10], key1_[10];  // of the rounds; the first with the stream's counter words in it
    vq second_;
    uint32_t first_;
};

// The words of VL blocks' calls of the same numbers: word r of lane i is block i's.
struct PhiloxColumns {
    const Philox& philox;
    Philox::Blocks even, odd;

    PhiloxColumns(const Philox& philox, vu block)
        : philox(philox),
          even(philox.blocks(reinterpret_cast<vq>(block))),
          odd(philox.blocks(reinterpret_cast<vq>(block) >> 32)) {}

    INLINE void operator()(vu call, vu (&out)[4]) const {
        vq a[4], b[4];
        philox(philox.calls(reinterpret_cast<vq>(call)), even, a);
        philox(philox.calls(reinterpret_cast<vq>(call) >> 32), odd, b);
        for (int r = 0; r < 4; ++r) out[r] = reinterpret_cast<vu>(join_words(a[r], b[r]));
    }

    // All lanes the same call.
    INLINE void operator()(uint32_t call, vu (&out)[4]) const {
        const Philox::Calls c = philox.calls(vq{} + call);
        vq a[4], b[4];
        philox(c, even, a);
        philox(c, odd, b);
        for (int r = 0; r < 4; ++r) out[r] = reinterpret_cast<vu>(join_words(a[r], b[r]));
    }
};

#if EXTENSOR_LANES == 16
#define INTERLEAVE_LOW 0, 8, 2, 10, 4, 12, 6, 14
#define INTERLEAVE_HIGH 1, 9, 3, 11, 5, 13, 7, 15
#elif EXTENSOR_LANES == 8
#define INTERLEAVE_LOW 0, 4, 2, 6
#define INTERLEAVE_HIGH 1, 5, 3, 7
#else
#define INTERLEAVE_LOW 0, 2
#define INTERLEAVE_HIGH 1, 3
#endif

// The words of consecutive calls, in order: `calls` per block from `first_call` on, for `blocks`
// blocks. Writes 4 * calls * blocks words and up to 2 * VL more.
inline void philox_run(const Philox& philox, uint32_t* out, uint32_t first_call, uint32_t calls,
                       uint32_t first_block, int64_t blocks) {
    // The lanes of one step in the order in which the pairs below come out.
    vq call, block;
    uint32_t step = 0, jump = 0;  // of the next step's first call: counted, as divisions are slow
    for (int n = 0; n < VQ; ++n) {
        const int lane = n % (VQ / 2) * 2 + n / (VQ / 2);
        call[lane] = step;
        block[lane] = jump;
        if (++step == calls) step = 0, ++jump;
    }
    block += first_block;
    const auto put = [&](const vq(&w)[4]) __attribute__((always_inline)) {
        const vq a = join_words(w[0], w[1]), b = join_words(w[2], w[3]);
        store(out, reinterpret_cast<vu>(__builtin_shufflevector(a, b, INTERLEAVE_LOW)));
        store(out + VL, reinterpret_cast<vu>(__builtin_shufflevector(a, b, INTERLEAVE_HIGH)));
        out += 2 * VL;
    };
    const int64_t total = calls * blocks;
    int64_t done = 0;
    if (!step) {  // a step holds whole blocks: its calls are always the same
        const Philox::Calls c = philox.calls(call + first_call);
        const auto steps = [&]<int Steps>() __attribute__((always_inline)) {
            Philox::Blocks at[Steps];
            vq w[Steps][4];
            for (int s = 0; s < Steps; ++s, block += uint64_t{jump}) at[s] = philox.blocks(block);
            philox.draw(c, at, w);
            for (int s = 0; s < Steps; ++s) put(w[s]);
            done += Steps * VQ;
        };
        constexpr int kSteps = VL == 16 ? 4 : 1;  // as many as registers hold
        while (total - done >= kSteps * VQ) steps.template operator()<kSteps>();
        while (done < total) steps.template operator()<1>();
        return;
    }
    for (; done < total; done += VQ) {
        vq w[4];
        philox(philox.calls(call + first_call), philox.blocks(block), w);
        put(w);
        call += uint64_t{step};
        block += uint64_t{jump};
        const vq over = reinterpret_cast<vq>(call >= calls);
        call -= over & calls;
        block -= over;  // minus all ones is plus one
    }
}

}  // namespace EXTENSOR_ISA
