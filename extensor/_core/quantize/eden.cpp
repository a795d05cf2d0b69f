// NVFP4 block scales that are corrected to be unbiased, MS-EDEN (arXiv 2601.22813): see
// `_corrected_scales` in extensor/quant/nvfp4.py.

#include "quantize/block_groups.hpp"
#include "quantize/philox.hpp"

namespace EXTENSOR_ISA {
namespace {

// Replaces the maxima by scale bytes plus one, and sums y y and y q of each block: y the scaled
// values, q what they are rounded to.
void nearest_scales(const Call& call, uint32_t* maxima, float* squares, float* products) {
    const Grid grid = call.scaler.grid;
    for_block_groups(call, 0, [&](BlockGroup& group) {
        const vu amax = group.words(maxima);
        const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
        const vu some = finite & reinterpret_cast<vu>(amax > 0u);
        vf value;
        vu code =
            grid_code(call.scaler.ideal(float_of(amax & finite)), call.scaler.scale_grid, value);
        code &= some;
        const vf apply = call.scaler.applied(code, float_of(bits_of(value) & some));
        vf square = {}, product = {};
        group.for_positions([&](vf x) {
            const vf y = float_of(bits_of(x) & finite) * apply;
            const vf magnitude = smaller(float_of(bits_of(y) & kMagnitude), splat(grid.clamp));
            vu exponent, steps;
            const vf r = round_magnitude<false>(magnitude, vu{}, grid, exponent, steps);
            const vf q = float_of(bits_of(smaller(r, splat(grid.top))) | (bits_of(y) & kSign));
            square += y * y;
            product += y * q;
        });
        group.set_words(squares, square);
        group.set_words(products, product);
        group.set_words(maxima, finite ? (amax ? code + 1u : vu{}) : amax);
    });
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
        vf square = {}, product = {};
        for (int64_t i = 0; i < blocks; ++i) {
            vf more_squares = {}, more_products = {};
            for (int l = 0; l < lanes; ++l) {
                more_squares[l] = squares[begin + i * step + l * next];
                more_products[l] = products[begin + i * step + l * next];
            }
            square += more_squares;
            product += more_products;
        }
        const vf correction = product == 0.0f ? splat(1.0f) : square / product;
        for (int64_t i = 0; i < blocks; ++i) {
            vu word = {}, block = {};
            for (int l = 0; l < lanes; ++l) {
                const int64_t at = begin + i * step + l * next;
                word[l] = maxima[at];
                block[l] = static_cast<uint32_t>(
                    job.inner == 1 ? call.block(at / call.tiles, at % call.tiles) : at);
            }
            const vf value = grid_value(word - 1u, scale_grid) * correction;
            vu exponent, above;
            round_magnitude<true>(smaller(value, splat(scale_grid.clamp)),
                                  first_words(call.plan, philox, block), scale_grid, exponent,
                                  above);
            vu code = ((exponent - scale_grid.lowest) >> (23 - scale_grid.mantissa_bits)) + above;
            code = code < scale_grid.max_code ? code : splat(scale_grid.max_code);
            const vu chosen = reinterpret_cast<vu>((word > 0u) & (word < kExponentMask));
            word |= code << 8 & chosen;
            for (int l = 0; l < lanes; ++l) maxima[begin + i * step + l * next] = word[l];
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
