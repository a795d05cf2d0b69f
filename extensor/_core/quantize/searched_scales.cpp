// Block scales that need more of a block than its largest magnitude: percentiles, running maxima,
// zero points, and rules that choose among scales by their error. The results replace the maxima,
// as scales.hpp reads them, so that the encoders need not know.
//
// Lanes run over blocks, position by position in the order of extensor/quant/block_codec.py, since
// the order in which an error is summed is part of the result.

#include "quantize/block_groups.hpp"
#include "quantize/hadamard.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int kOptions = 4;

// The rank-th smallest magnitude of each block, as bits: found bit by bit from the
// highest, since magnitudes are ordered as their bits are.
vu ranked(BlockGroup& group, const vi& rank) {
    vu found = {};
    for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
        const vi below = reinterpret_cast<vi>(found + (bit - 1));
        vi count = {};
        group.for_positions(
            [&](vf v) { count -= reinterpret_cast<vi>(bits_of(v) & kMagnitude) <= below; });
        found += reinterpret_cast<vu>(count < rank) & bit;
    }
    return found;
}

// See `block_statistic` in extensor/quant/scale_encoders.py.
void percentiles(const Call& call, uint32_t* maxima) {
    for_block_groups(call, kMagnitude, [&](BlockGroup& group) {
        vi rank = {};
        for (int i = 0; i < group.lanes; ++i) {
            const int64_t count = group.count(i);
            const double place = call.plan.percentile * static_cast<double>(count) / 100;
            rank[i] = static_cast<int32_t>(
                least(most(1, static_cast<int64_t>(__builtin_ceil(place))), count));
        }
        const vu amax = group.words(maxima), chosen = ranked(group, rank);
        group.set_words(maxima, ((amax < kExponentMask) & (chosen > 0u)) ? chosen : amax);
    });
}

void running_maxima(const Call& call, uint32_t* maxima) {
    for_block_groups(call, 0, [&](BlockGroup& group) {
        vu amax = group.words(maxima);
        for (int i = 0; i < group.lanes; ++i) {
            const float kept = call.plan.decay * call.job.previous[group.number(i)];
            if (amax[i] && amax[i] < kExponentMask && kept > as_float(amax[i]))
                amax[i] = bits_of(splat(kept))[0];
        }
        group.set_words(maxima, amax);
    });
}

// See `_asymmetric` in extensor/quant/scale_encoders.py: ranges in float64, rounded once.
void zero_points(const Call& call, uint32_t* maxima, float* points) {
    const float top = call.scaler.grid.top, bottom = -top - 1;
    const double steps = static_cast<double>(top) - static_cast<double>(bottom);
    for_block_groups(call, 0, [&](BlockGroup& group) {
        const vu amax = group.words(maxima);
        const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
        vf low = {}, high = {};
        group.for_positions([&](vf v) {
            v = float_of(bits_of(v) & finite);
            low = smaller(low, v);
            high = larger(high, v);
        });
        vf ratio = splat(1.0f), point = {};
        if (call.plan.rule != Rule::one)
            for (int i = 0; i < VL; ++i)
                ratio[i] = static_cast<float>(
                    (static_cast<double>(high[i]) - static_cast<double>(low[i])) / steps);
        vu stored;
        const vf scale = call.scaler.rounded(ratio, stored);
        for (int i = 0; i < group.lanes; ++i) {
            const double ideal =
                __builtin_rint(static_cast<double>(bottom) -
                               static_cast<double>(low[i]) / static_cast<double>(scale[i]));
            point[i] = ideal < bottom ? bottom : ideal > top ? top : static_cast<float>(ideal);
            if (call.job.zero_points)
                call.job.zero_points[group.number(i)] = static_cast<int8_t>(point[i]);
        }
        group.set_words(points, point);
        group.set_words(maxima, finite ? bits_of(scale) : amax);
    });
}

// ---- rules that choose among block scales of NVFP4 ----

// Four consecutive scales whose products with e2m1 are exact in FP8 (normal, significand 1, 1.25 or
// 1.5), the largest first: one above the first that reaches the base, then down.
int fp8_exact_options(vf base, vu (&codes)[kOptions]) {
    constexpr int kCodes = 45;  // n: significand 1, 1.25 or 1.5 by n % 3, 2**-6 times 2**(n / 3)
    const auto code_of = [](vi n) {
        n = n < 0 ? vi{} : n;
        n = n > kCodes - 1 ? vi{} + (kCodes - 1) : n;
        const vi third = (n * 43) >> 7;  // n / 3 below 128
        return reinterpret_cast<vu>(8 + 8 * third + 2 * (n - 3 * third));
    };
    // How many of them are less than the base.
    const vi significand = reinterpret_cast<vi>(bits_of(base) & 0x7FFFFFu);
    vi at = 3 * (reinterpret_cast<vi>(bits_of(base) >> 23) - (127 - 6));
    at -= (significand > 0) + (significand > 0x200000) + (significand > 0x400000);
    at = at < 0 ? vi{} : at;
    at = at > kCodes - 1 ? vi{} + (kCodes - 1) : at;
    for (int i = 0; i < kOptions; ++i) codes[i] = code_of(at + 1 - i);
    return kOptions;
}

int options_of(const Scaler& scaler, vf amax, vu (&codes)[kOptions]) {
    if (scaler.plan.rule == Rule::least_error) return fp8_exact_options(scaler.ideal(amax), codes);
    const vf base = amax / 6.0f * scaler.encode, top = splat(scaler.scale_grid.top);
    vf value;
    codes[0] = grid_code(smaller(base, top), scaler.scale_grid, value);
    codes[1] = grid_code(smaller(base * 1.5f, top), scaler.scale_grid, value);
    return 2;
}

// y >= 0 on the grid, at most its top, which is on the grid.
template <bool Words>
INLINE vf saturated(vf y, vu word, const Grid& grid) {
    vu exponent, steps;
    return round_magnitude<Words>(smaller(y, splat(grid.top)), word, grid, exponent, steps);
}

// Squared errors of encoding blocks under each of N scales, in float32, position after position.
template <bool Words, int N, class Blocks>
void measure(Blocks& group, const Call& call, const vu* codes, vf* errors) {
    const Grid grid = call.scaler.grid;
    const bool four = call.plan.rule == Rule::four_over_six;
    const vf factor = splat(four ? call.scaler.tensor_amax : call.scaler.tensor_scale);
    const vu word = splat(call.constant);
    vf value[N], apply[N], error[N];
    for (int o = 0; o < N; ++o) {
        value[o] = grid_value(codes[o], call.scaler.scale_grid);
        apply[o] = call.scaler.applied(codes[o], value[o]);
        error[o] = vf{};
    }
    group.for_positions([&](vf x) {
        x = float_of(bits_of(x) & kMagnitude);  // errors of both signs have the same square
#pragma GCC unroll 4
        for (int o = 0; o < N; ++o) {
            vf decoded = saturated<Words>(x * apply[o], word, grid) * value[o] * factor;
            if (four) decoded = decoded / 1536.0f;
            const vf off = decoded - x;
            error[o] += off * off;
        }
    });
    for (int o = 0; o < N; ++o) errors[o] = error[o];
}

// ---- rules that choose among block scales of MX formats ----

// See `_searched_bytes` in extensor/quant/scale_encoders.py: the scale that nothing exceeds, or
// half of it. Errors are in units of their own scale.
template <bool Words, class Blocks>
vu least_squares_byte(Blocks& group, const Call& call, vu amax) {
    const Grid grid = call.scaler.grid;
    const vu whole = call.scaler.e8m0_byte(amax), half = whole - 1u;
    const auto inverse = [](vu byte) {
        return float_of(byte == 254u ? splat(0x400000u) : (254u - byte) << 23);
    };
    const vf apply[2] = {inverse(whole), inverse(whole == 0u ? vu{} : half)};
    const vu word = splat(call.constant);
    vf error[2] = {};
    group.for_positions([&](vf x) {
        x = float_of(bits_of(x) & kMagnitude);
        for (int o = 0; o < 2; ++o) {
            const vf y = x * apply[o], off = saturated<Words>(y, word, grid) - y;
            error[o] += off * off;
        }
    });
    const vu better = reinterpret_cast<vu>(error[1] * 0.25f < error[0]);
    const vu allowed = reinterpret_cast<vu>(whole > call.plan.mx_least_byte);
    return better & allowed ? half : whole;
}

// See `quest_bytes` in extensor/quant/scale_rules.py. `count`: values of each block. N vectors of
// blocks: a sum waits for its last addition, others go on.
template <int N, class Blocks>
void quest_bytes(Blocks& group, vf count, vu (&amax)[N]) {
    vi power[N];
    vf inverse[N], total[N] = {};
    for (int n = 0; n < N; ++n) {
        power[n] = reinterpret_cast<vi>(amax[n] >> 23) - 127;
        power[n] = power[n] < -126 ? vi{} - 126 : power[n];
        power[n] = power[n] > 126 ? vi{} + 126 : power[n];
        inverse[n] = float_of(reinterpret_cast<vu>(127 - power[n]) << 23);
    }
    group.for_positions([&](vf x, int n = 0) {
        const vf y = x * inverse[n];
        total[n] += y * y;
    });
    for (int n = 0; n < N; ++n) {
        vf scale = total[n] / count;
        for (int i = 0; i < VL; ++i) scale[i] = __builtin_sqrtf(scale[i]);
        scale = scale * static_cast<float>(2.92247856 / 6);
        vi byte = reinterpret_cast<vi>(bits_of(scale) >> 23) + power[n];
        byte = byte < 0 ? vi{} : byte;
        byte = byte > 254 ? vi{} + 254 : byte;
        amax[n] = reinterpret_cast<vu>(byte);
    }
}

template <bool Words, class Blocks>
vu nvfp4_byte(Blocks& group, const Call& call, vu amax) {
    vu codes[kOptions];
    vf errors[kOptions];
    const int count = options_of(call.scaler, float_of(amax), codes);
    call.plan.rule == Rule::four_over_six ? measure<Words, 2>(group, call, codes, errors)
                                          : measure<Words, kOptions>(group, call, codes, errors);
    vu best = codes[0];
    vf least_error = errors[0];
    for (int o = 1; o < count; ++o) {
        const vi better = errors[o] < least_error;
        best = better ? codes[o] : best;
        least_error = better ? errors[o] : least_error;
    }
    return best;
}

// What stands for blocks of numbers whose scale is this byte, and for others.
INLINE vu statistic_of(vu byte, vu amax) {
    return amax < kExponentMask ? (amax ? byte + 1u : vu{}) : amax;
}

// The statistics of blocks whose largest magnitudes are `amax`, by a rule that chooses.
template <class Blocks>
vu choose(Blocks& group, const Call& call, vu amax, vf count) {
    const vu finite = reinterpret_cast<vu>(amax < kExponentMask), safe = amax & finite;
    const bool words = call.plan.ties != Ties::even;
    vu byte[1] = {safe};
    if (call.plan.scale != Scale::e8m0)
        byte[0] =
            words ? nvfp4_byte<true>(group, call, safe) : nvfp4_byte<false>(group, call, safe);
    else if (call.plan.rule == Rule::quest)
        quest_bytes(group, count, byte);
    else
        byte[0] = words ? least_squares_byte<true>(group, call, safe)
                        : least_squares_byte<false>(group, call, safe);
    return statistic_of(byte[0], amax);
}

void choose_scales(const Call& call, uint32_t* maxima) {
    for_block_groups(call, 0, [&](BlockGroup& group) {
        vf count = splat(1.0f);
        for (int i = 0; i < group.lanes; ++i) count[i] = static_cast<float>(group.count(i));
        group.set_words(maxima, choose(group, call, group.words(maxima), count));
    });
}

// N times VL blocks, one a lane, their positions `stride` floats apart.
template <int N>
struct Panel {
    const float* x;
    int64_t positions, stride;

    template <class Body>
    INLINE void for_positions(Body body) const {
        for (int64_t i = 0; i < positions; ++i) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                if constexpr (N == 1)
                    body(load(x + i * stride));
                else
                    body(load(x + i * stride + n * VL), n);
            }
        }
    }
};

}  // namespace

void choose_statistics(const Call& call, const float* x, int64_t positions, int64_t stride,
                       int64_t vectors, vf count, vu* statistics) {
    if (vectors == 4 && call.plan.scale == Scale::e8m0 && call.plan.rule == Rule::quest) {
        const Panel<4> panel = {x, positions, stride};
        vu byte[4];
        for (int k = 0; k < 4; ++k)
            byte[k] = statistics[k] & reinterpret_cast<vu>(statistics[k] < kExponentMask);
        quest_bytes(panel, count, byte);
        for (int k = 0; k < 4; ++k) statistics[k] = statistic_of(byte[k], statistics[k]);
        return;
    }
    for (int64_t k = 0; k < vectors; ++k) {
        const Panel<1> panel = {x + k * VL, positions, stride};
        statistics[k] = choose(panel, call, statistics[k], count);
    }
}

void finish_statistics(Call& call, const Totals& totals, int64_t whole) {
    const QuantPlan& plan = call.plan;
    if (plan.statistic == Statistic::percentile) percentiles(call, totals.maxima);
    if (plan.statistic == Statistic::running && call.job.previous)
        running_maxima(call, totals.maxima);
    if (call.needs_global()) totals.set_global(call.scaler, whole);
    if (plan.eden)
        eden_scales(call, totals.maxima, whole);
    else if (chooses(plan) && whole)
        choose_scales(call, totals.maxima);
    if (!plan.symmetric) {
        call.points = scratch_of<float>(Slot::points, whole + VL);
        zero_points(call, totals.maxima, call.points);
    }
}

const float* float32_values(const QuantPlan& plan, const QuantJob& job) {
    const int size = plan.hadamard ? plan.hadamard : 1;
    const int64_t rows = job.outer * job.rows, steps = job.padded / size,
                  count = rows * job.padded * job.inner;
    const Source x = {job.x, job.type};
    float* out = scratch_of<float>(Slot::copied, count + VL);
    if (!plan.hadamard) {
        threads::run(ceil_div(count, kChunkValues), 4 * count, [&](int64_t task) {
            const int64_t end = least(count, (task + 1) * kChunkValues);
            for (int64_t i = task * kChunkValues; i < end; i += VL)
                store_upto(out + i, x.load_upto(i, end - i), end - i);
        });
        return out;
    }
    threads::run(rows * steps, 8 * count, [&](int64_t task) {
        const int64_t row = task / steps, start = task % steps * size;
        const int64_t real = most(0, least(size, job.length - start));
        const Source from = x.from((row * job.length + start) * job.inner);
        float* to = out + (row * job.padded + start) * job.inner;
        if (job.inner == 1) {
            const auto values = [&](int64_t i) { return from.load_upto(i, most(0, real - i)); };
            return transform_run(size, values, plan.signs, to);
        }
        // Four vectors of columns at a time: a row's part is then whole cache lines of one page.
        constexpr int64_t kWide = 4 * VL;
        float* panel = scratch_of<float>(Slot::values, size * kWide);
        for (int64_t j = 0; j < job.inner; j += kWide) {
            const int64_t left = least(kWide, job.inner - j), wide = round_up(left, VL);
            for (int64_t k = 0; k < size; ++k)
                for (int64_t i = 0; i < wide; i += VL)
                    store(panel + k * kWide + i,
                          k < real ? from.load_upto(k * job.inner + j + i, left - i) : vf{});
            for (int64_t i = 0; i < wide; i += VL)
                transform_rows(panel + i, size, kWide, plan.signs);
            for (int64_t k = 0; k < size; ++k)
                for (int64_t i = 0; i < wide; i += VL)
                    store_upto(to + k * job.inner + j + i, load(panel + k * kWide + i), left - i);
        }
    });
    return out;
}

}  // namespace EXTENSOR_ISA
