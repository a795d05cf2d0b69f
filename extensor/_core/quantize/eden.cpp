// NVFP4 block scales that are corrected to be unbiased, MS-EDEN (arXiv 2601.22813): see
// `_corrected_scales` in extensor/quant/nvfp4.py.

#include "quantize/block_groups.hpp"
#include "quantize/philox.hpp"

namespace EXTENSOR_ISA {
namespace {

// Sums of each of VL blocks: y y and y q, y the scaled values, q what they are rounded to.
struct Sums {
    vf squares, products;
};

// The scale bytes plus one of VL blocks whose largest magnitudes are `amax`, and the blocks' sums;
// for_positions(body) gives body the blocks' values.
template <class Positions>
INLINE vu nearest_scale(const Call& call, vu amax, Sums& sums, Positions for_positions) {
    const Grid grid = call.scaler.grid;
    const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
    const vu some = finite & reinterpret_cast<vu>(amax > 0u);
    vf value;
    vu code = grid_code(call.scaler.ideal(float_of(amax & finite)), call.scaler.scale_grid, value);
    code &= some;
    const vf apply = call.scaler.applied(code, float_of(bits_of(value) & some));
    vf square = {}, product = {};
    for_positions([&](vf x) {
        // Both signs have the same products.
        const vf y = float_of(bits_of(x) & kMagnitude & finite) * apply;
        vu exponent, steps;
        const vf q =
            round_magnitude<false>(smaller(y, splat(grid.top)), vu{}, grid, exponent, steps);
        square += y * y;
        product += y * q;
    });
    sums = {square, product};
    return finite ? (amax ? code + 1u : vu{}) : amax;
}

// Blocks of 16 in rows that hold whole groups of VL of them: no block needs to be looked for.
void nearest_scales_of_rows(const Call& call, uint32_t* maxima, float* squares, float* products) {
    constexpr int64_t kTile = 16;
    const QuantJob& job = call.job;
    const auto* x = static_cast<const float*>(job.x);
    const int64_t groups = job.outer * job.rows * call.tiles / VL;
    const int64_t per_task = kChunkValues / (kTile * VL);
    threads::run(ceil_div(groups, per_task), 32 * groups * VL * kTile, [&](int64_t task) {
        for (int64_t g = task * per_task; g < least(groups, (task + 1) * per_task); ++g) {
            const int64_t at = g * VL;
            Sums sums;
            const vu word = nearest_scale(call, load(maxima + at), sums, [&](auto body) {
                for (int64_t k = 0; k < kTile; k += VL) {
                    vf v[VL];
#pragma GCC unroll 16
                    for (int l = 0; l < VL; ++l) v[l] = load(x + (at + l) * kTile + k);
                    transpose(v);
#pragma GCC unroll 16
                    for (int l = 0; l < VL; ++l) body(v[l]);
                }
            });
            store(maxima + at, word);
            store(squares + at, sums.squares);
            store(products + at, sums.products);
        }
    });
}

// Columnwise blocks of 16 values: those of VL adjacent columns at a time.
void nearest_scales_of_columns(const Call& call, uint32_t* maxima, float* squares,
                               float* products) {
    constexpr int64_t kTile = 16;
    const QuantJob& job = call.job;
    const int64_t rows = job.outer * call.tiles, width = job.inner;
    threads::run(rows, 32 * rows * width * kTile, [&](int64_t row) {
        const float* x = static_cast<const float*>(job.x) + row * kTile * width;
        for (int64_t j = 0; j < width; j += VL) {
            const int64_t at = row * width + j;
            Sums sums;
            const vu word = nearest_scale(call, load(maxima + at), sums, [&](auto body) {
#pragma GCC unroll 16
                for (int64_t k = 0; k < kTile; ++k) body(load(x + k * width + j));
            });
            store(maxima + at, word);
            store(squares + at, sums.squares);
            store(products + at, sums.products);
        }
    });
}

// Replaces the maxima by scale bytes plus one, and sums each block.
void nearest_scales(const Call& call, uint32_t* maxima, float* squares, float* products) {
    const QuantJob& job = call.job;
    if (job.tile_rows == 1 && job.tile_length == 16) {
        if (job.inner == 1 && job.length % (16 * VL) == 0)
            return nearest_scales_of_rows(call, maxima, squares, products);
        if (job.inner > 1 && job.inner % VL == 0 && job.length % 16 == 0)
            return nearest_scales_of_columns(call, maxima, squares, products);
    }
    for_block_groups(call, 0, [&](BlockGroup& group) {
        Sums sums;
        const vu word = nearest_scale(call, group.words(maxima), sums,
                                      [&](auto body) { group.for_positions(body); });
        group.set_words(squares, sums.squares);
        group.set_words(products, sums.products);
        group.set_words(maxima, word);
    });
}

// `lanes` floats that are `step` apart; zero in the other lanes.
INLINE vf load_strided(const float* p, int64_t step, int lanes) {
    if (step == 1) return load_upto(p, lanes);
#if EXTENSOR_LANES == 16
    const __m512i index = _mm512_mullo_epi32(reinterpret_cast<__m512i>(lane_numbers()),
                                             _mm512_set1_epi32(static_cast<int>(step)));
    const auto mask = static_cast<__mmask16>((1u << lanes) - 1);
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, index, p, 4);
#else
    vf v = {};
    for (int i = 0; i < lanes; ++i) v[i] = p[i * step];
    return v;
#endif
}

// The first random word of each of VL blocks.
vu first_words(const QuantPlan& plan, const Philox& philox, vu block) {
    vu draw[4];
    PhiloxColumns(philox, block)(0u, draw);
    return plan.rbits == 8 ? draw[0] << 24 | (1u << 23) : draw[0];
}

// Adds to each scale byte plus one, eight bits above it, the byte of the scale times sum(y y) /
// sum(y q) of its transform, rounded stochastically.
void correct_scales(const Call& call, uint32_t* maxima, const float* squares,
                    const float* products) {
    const QuantJob& job = call.job;
    const Grid& scale_grid = call.scaler.scale_grid;
    const Philox philox(call.stream);
    // A transform's blocks are `step` words apart; neighbouring transforms begin `next` apart.
    const int64_t blocks = call.plan.eden, steps = call.tiles / blocks;
    const int64_t step = job.inner, next = job.inner == 1 ? blocks : 1;
    const int64_t run = job.inner == 1 ? job.outer * job.rows * steps : job.inner;
    const int64_t runs = job.inner == 1 ? 1 : job.outer * steps;
    const int64_t groups = ceil_div(run, VL);
    threads::run(runs * groups, 64 * runs * run * blocks, [&](int64_t task) {
        const int64_t first = task % groups * VL,
                      begin = task / groups * blocks * step + first * next;
        const int lanes = static_cast<int>(least(VL, run - first));
        const auto strided = [&](const void* of, int64_t i) __attribute__((always_inline)) {
            return load_strided(static_cast<const float*>(of) + begin + i * step, next, lanes);
        };
        vf square = {}, product = {};
        for (int64_t i = 0; i < blocks; ++i) {
            square += strided(squares, i);
            product += strided(products, i);
        }
        uint32_t block[VL] = {};  // the first of each lane's transform
        for (int l = 0; l < lanes; ++l) {
            const int64_t at = begin + l * next;
            block[l] = static_cast<uint32_t>(job.inner == 1 && job.pitch
                                                 ? call.block(at / call.tiles, at % call.tiles)
                                                 : job.first_block + at);
        }
        const vf correction = product == 0.0f ? splat(1.0f) : square / product;
        for (int64_t i = 0; i < blocks; ++i) {
            vu word = bits_of(strided(maxima, i));
            const vf value = grid_value(word - 1u, scale_grid) * correction;
            const vu drawn =
                first_words(call.plan, philox, load(block) + static_cast<uint32_t>(i * step));
            vu exponent, above;
            round_magnitude<true>(smaller(value, splat(scale_grid.clamp)), drawn, scale_grid,
                                  exponent, above);
            vu code = ((exponent - scale_grid.lowest) >> (23 - scale_grid.mantissa_bits)) + above;
            code = code < scale_grid.max_code ? code : splat(scale_grid.max_code);
            const vu chosen = reinterpret_cast<vu>((word > 0u) & (word < kExponentMask));
            word |= code << 8 & chosen;
            alignas(64) uint32_t words[VL];
            store(words, word);
            for (int l = 0; l < lanes; ++l) maxima[begin + i * step + l * next] = words[l];
        }
    });
}

}  // namespace

void eden_scales(const Call& call, uint32_t* maxima, int64_t whole) {
    float* sums = scratch_of<float>(Slot::points, 2 * whole);
    nearest_scales(call, maxima, sums, sums + whole);
    correct_scales(call, maxima, sums, sums + whole);
}

}  // namespace EXTENSOR_ISA
