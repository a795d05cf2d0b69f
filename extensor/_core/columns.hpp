// Coding one piece of a tile that runs down the columns of a panel.
#pragma once

#include "panels.hpp"

namespace EXTENSOR_ISA {

// Rows [offset, offset + rows) of tile `tile`, of which `real` lie in the array; columns
// [j, j + lanes) of image `image`.
struct ColumnPiece {
    PanelValues panel;
    int64_t image, tile, offset, rows, real, j, lanes;

    int64_t vectors() const { return ceil_div(lanes, VL); }
};

// The index of the block that holds column j of a piece's tile.
INLINE int64_t block_of(const Call& call, const ColumnPiece& p, int64_t j) {
    const QuantJob& job = call.job;
    return (p.image * call.tiles + p.tile) * ceil_div(job.inner, job.tile_rows) + j / job.tile_rows;
}

// One scale per tile, by the piece that holds the tile's first row and column.
inline void store_column_scales(const Call& call, const ColumnPiece& p, const Scales (&s)[4]) {
    const int64_t across = call.job.tile_rows;
    if (p.offset) return;
    uint32_t stored[kWide];
    for (int k = 0; k < 4; ++k) store(stored + k * VL, s[k].stored);
    if (across == 1) {
        store_scales(call.job.scales, block_of(call, p, p.j), stored, p.lanes, call.plan.scale);
        return;
    }
    for (int64_t i = (across - p.j % across) % across; i < p.lanes; i += across)
        store_scales(call.job.scales, block_of(call, p, p.j + i), stored + i, 1, call.plan.scale);
}

// Octet `place` of each word, as the word with that many random bits.
INLINE vu octet(vu words, int place) {
    return (words >> static_cast<uint32_t>(8 * place)) << 24 | (1u << 23);
}

// The random words of a piece, or the constant that has the effect of a tie rule.
inline PanelWords column_words(const Call& call, const ColumnPiece& p) {
    if (!call.plan.stochastic) {
        uint32_t* words = scratch_of<uint32_t>(Slot::weights, kWide);
        for (int i = 0; i < kWide; i += VL) store(words + i, splat(call.constant));
        return {words, 0};
    }
    uint32_t* words = scratch_of<uint32_t>(Slot::weights, round_up(p.rows, 16) * kWide);
    const int per_call = call.plan.rbits == 8 ? 16 : 4;
    const int64_t across = call.job.tile_rows;
    const Philox philox(call.stream);
    for (int64_t k = 0; k < p.vectors(); ++k) {
        vu block, first_call = {};
        if (across == 1) {
            block = splat(static_cast<uint32_t>(block_of(call, p, p.j + k * VL))) + lane_numbers();
        } else {
            for (int i = 0; i < VL; ++i) {
                const int64_t column = p.j + k * VL + i;
                block[i] = static_cast<uint32_t>(block_of(call, p, column));
                first_call[i] = static_cast<uint32_t>(column % across * call.calls);
            }
        }
        const PhiloxColumns columns(philox, block);
        uint32_t* to = words + k * VL;
        for (int64_t i = 0; i < p.rows; i += per_call, to += per_call * kWide) {
            const auto number = static_cast<uint32_t>((p.offset + i) / per_call);
            vu draw[4];
            across == 1 ? columns(number, draw) : columns(first_call + number, draw);
            for (int r = 0; r < per_call; ++r)
                store(to + r * kWide, per_call == 4 ? draw[r] : octet(draw[r / 4], r % 4));
        }
    }
    return {words, kWide};
}

// Any piece, any grid.
template <bool Words, bool Divide, bool Codes>
void code_any(const Call& call, const ColumnPiece& p, const Scales (&s)[4], PanelWords words,
              ByteRows out, Tally& tally_out) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    const vf element_scale = splat(call.plan.element_scale), tensor_scale = splat(call.scaler.tensor_scale);
    Tally tally;
    const float* panel = p.panel.widened(p.rows);
    const auto at = [&](int64_t i, int64_t k, vu& code) {
        return quantize_vector<Words, Divide, Codes>(
            load(panel + i * kWide + k * VL), Words ? words(i, static_cast<int>(k)) : vu{}, s[k],
            element_scale, tensor_scale, grid, tally, code);
    };
    if constexpr (Codes) {
        const int group = group_rows(grid.bits);
        for (int64_t i = 0; i < p.rows; i += group) {
            const int rows = static_cast<int>(least(group, p.rows - i));
            vu joined[4] = {};
            for (int64_t k = 0; k < p.vectors(); ++k) {
                for (int r = 0; r < rows; ++r) {
                    vu code;
                    at(i + r, k, code);
                    if (i + r < p.real)  // zeros of the array may have codes, padding has none
                        joined[k] |= code << static_cast<uint32_t>(grid.bits * r);
                }
            }
            out.store(joined, static_cast<int>(ceil_div(rows * grid.bits, 8)));
        }
    } else {
        float* to = job.values + (p.image * job.coded + p.tile * job.tile_length + p.offset) * job.inner + p.j;
        for (int64_t i = 0; i < p.real; ++i, to += job.inner) {
            for (int64_t k = 0; k < p.vectors(); ++k) {
                vu code;
                store_upto(to + k * VL, at(i, k, code), p.lanes - k * VL);
            }
        }
    }
    tally_out.saturated += tally.saturated;
    tally_out.flushed += tally.flushed;
}

// Codes or values of a piece whose blocks have the magnitudes `amax`, and the blocks' scales.
template <bool Words, bool Divide, bool Codes>
void code_piece(const Call& call, const ColumnPiece& p, const vu (&amax)[4], const Ahead& ahead,
                Tally& tally) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    Scales s[4] = {};
    vu plain = splat(~0u), bounded = plain;
    for (int64_t k = 0; k < p.vectors(); ++k) {
        s[k] = call.scaler.of(amax[k]);
        if (Divide && call.points)
            s[k].point = load_upto(call.points + (p.image * call.tiles + p.tile) * job.inner + p.j +
                                       k * VL, p.lanes - k * VL);
        plain &= is_plain(s[k], amax[k], call.scaler.tensor_scale, grid);
        bounded &= reinterpret_cast<vu>(float_of(amax[k]) * s[k].apply < grid.limit);
    }
    const PanelWords words = Words ? column_words(call, p) : PanelWords{};
    ByteRows out = {};
    if constexpr (Codes) {
        store_column_scales(call, p, s);
        const int64_t tile_bytes = ceil_div(job.tile_length * grid.bits, 8);
        const int64_t row = p.image * call.packed + p.tile * tile_bytes + p.offset * grid.bits / 8;
        out = {job.codes + row * job.inner + p.j, job.inner, p.lanes, goes_past(job)};
    }
    if constexpr (Codes && !Divide) {
        const PanelCoder coder = panel_coder<Words>(call.plan.element);
        if (coder && call.scaler.bounded() && p.rows % group_rows(grid.bits) == 0 && all_lanes(plain)) {
            const vf apply[4] = {s[0].apply, s[1].apply, s[2].apply, s[3].apply};
            TileCounts counts;
#if EXTENSOR_LANES == 16
            if (p.panel.halves)
                HalfPanelCoder(call.plan).code(p.panel.halves, p.rows, s, all_lanes(bounded), out, ahead, counts);
            else
#endif
            coder(p.panel.wide, p.rows, p.vectors(), apply, call.plan.element_scale, all_lanes(bounded),
                  words, out, ahead, counts);
            tally.saturated[0] += static_cast<int32_t>(counts.saturated);
            tally.flushed[0] += static_cast<int32_t>(counts.flushed);
            return;
        }
    }
    for (int64_t i = 0; i < p.rows; ++i) ahead.row(i);
    code_any<Words, Divide, Codes>(call, p, s, words, out, tally);
}

}  // namespace EXTENSOR_ISA
