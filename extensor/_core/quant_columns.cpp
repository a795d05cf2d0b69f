// Quantizing in blocks down columns: a panel of columns at a time (panels.hpp), so that no
// transposing copy is made.

#include "columns.hpp"

namespace EXTENSOR_ISA {
namespace {

// How the array is cut. A unit holds whole tiles down the columns and whole transforms; it is worked
// through in panels of `deep` rows, which hold whole tiles, or part of one that is longer.
struct Cut {
    int64_t deep, unit, units, per_task, chunk, chunks, count;

    Cut(const Call& call) {
        const QuantJob& job = call.job;
        deep = job.tile_length;
        while (call.plan.hadamard && deep % call.plan.hadamard) deep += job.tile_length;
        unit = deep;
        if (!call.plan.hadamard) deep = least(deep, kDeep);
        units = ceil_div(job.coded, unit);
        chunk = least(round_up(most(kTask / unit, 1), kWide), job.inner);
        chunks = ceil_div(job.inner, chunk);
        per_task = most(1, kTask / (unit * chunk));
        count = job.outer * ceil_div(units, per_task) * chunks;
    }

    // Whether a panel holds the whole of each of its tiles.
    bool holds_tiles(const QuantJob& job) const {
        return deep >= job.tile_length && kWide % job.tile_rows == 0;
    }
};

// Calls body(task, piece, ahead, tally) for every piece of a tile in a panel, in parallel. `rows`:
// how far down the columns, the padding of codes included or not.
template <class Body>
void for_pieces(const Call& call, const Cut& cut, int64_t rows, Counts* counts, Body body) {
    const QuantJob& job = call.job;
    const int64_t groups = ceil_div(cut.units, cut.per_task);
    const int64_t bytes_each = job.type == FloatType::float32 ? 4 : 2;
    threads::run(cut.count, 8 * job.outer * job.coded * job.inner, [&](int64_t task) {
        const int64_t image = task / (groups * cut.chunks), group = task / cut.chunks % groups;
        const int64_t first = group * cut.per_task * cut.unit;
        const int64_t last = least(first + cut.per_task * cut.unit, rows);
        const int64_t left = task % cut.chunks * cut.chunk, right = least(left + cut.chunk, job.inner);
        const Source x = call.source().from(image * job.length * job.inner);
        PanelValues panel = {scratch_of<float>(Slot::padded, cut.deep * kWide)};
        bfloat16* halves =
            takes_halves(call) ? scratch_of<bfloat16>(Slot::halves, cut.deep * kWide) : nullptr;
        panel.halves = halves;
        Tally tally;
        for (int64_t unit = first; unit < last; unit += cut.unit) {
            const int64_t bottom = least(unit + cut.unit, rows);
            for (int64_t j = left; j < right; j += kWide) {
                for (int64_t top = unit; top < bottom; top += cut.deep) {
                    const int64_t deep = least(cut.deep, bottom - top);
                    const int64_t real = most(0, least(deep, job.length - top));
                    ColumnPiece p = {panel, image, 0, 0, 0, 0, j, least(kWide, right - j)};
                    const Source corner = x.from(top * job.inner + j);
                    if (halves)
                        fill_halves(static_cast<const bfloat16*>(corner.at), job.inner, real, deep, p.lanes, halves);
                    else
                        fill_panel(corner, job.inner, real, deep, p.lanes, panel.wide);
                    if (call.plan.hadamard) transform_columns(call.plan, least(deep, job.coded - top), panel.wide);
                    Ahead ahead;
                    if (j + kWide < right && real == deep)
                        ahead = {static_cast<const char*>(x.from(top * job.inner + j + kWide).at),
                                 job.inner * bytes_each, kWide * bytes_each};
                    for (int64_t at = top; at < top + deep; at += p.rows, p.panel = p.panel.from(p.rows)) {
                        p.tile = at / job.tile_length, p.offset = at % job.tile_length;
                        p.rows = least(job.tile_length - p.offset, top + deep - at);
                        p.real = most(0, least(p.rows, job.coded - at));
                        body(task, p, ahead, tally);
                    }
                }
            }
        }
        finish_lines();
        counts[task] = count(tally);
    });
}

template <bool Words, bool Divide, bool Codes>
void run(Call& call) {
    const QuantJob& job = call.job;
    const Cut cut(call);
    const bool inside = looks_inside(call.plan, job), stored = inside || !cut.holds_tiles(job);
    const bool values = call.plan.scale == Scale::ue4m3;
    const int64_t width = job.inner, runs = job.outer * call.tiles;
    const Totals totals(cut.count, stored ? runs * width : 0);
    const auto known = [&](const ColumnPiece& p, int64_t k) {
        return totals.maxima + (p.image * call.tiles + p.tile) * width + p.j + k * VL;
    };

    if (stored) std::memset(totals.maxima, 0, static_cast<size_t>(runs * width) * 4);
    if (values && !stored && call.scaler.needs_global() && !call.plan.hadamard) {
        survey_values(job, cut.count, totals.finite);
        settle(call, totals, 0);
    } else if (stored || call.scaler.needs_global()) {
        for_pieces(call, cut, job.coded, totals.counts,
                   [&](int64_t task, const ColumnPiece& p, const Ahead& ahead, Tally&) {
            for (int64_t i = 0; i < p.rows; ++i) ahead.row(i);
            vu m[4], finite[4];
            column_maxima(p.panel, p.real, p.vectors(), m);
            if (stored) {
                for (int64_t k = 0; k < p.vectors(); ++k) {
                    float* to = reinterpret_cast<float*>(known(p, k));
                    const vf before = load_upto(to, p.lanes - k * VL);
                    store_upto(to, float_of(larger(bits_of(before), m[k])), p.lanes - k * VL);
                }
            } else {
                spread_over_groups(m, job.tile_rows);
            }
            vu all = {};
            for (int64_t k = 0; k < p.vectors(); ++k) all = larger(all, m[k]);
            if (values && !all_lanes(reinterpret_cast<vu>(all < kExponentMask)))
                column_maxima<true>(p.panel.widened(p.real), p.real, p.vectors(), finite);
            else
                for (int k = 0; k < 4; ++k) finite[k] = m[k] & reinterpret_cast<vu>(m[k] < kExponentMask);
            for (int64_t k = 0; k < p.vectors(); ++k) {
                const uint32_t most = largest_lane(finite[k]);
                if (most > totals.finite[task]) totals.finite[task] = most;
            }
        });
        if (stored && job.tile_rows > 1)
            combine(totals.maxima, call.tiles, job.inner, job.tile_rows, 1, 1, 0);
        settle(call, totals, stored ? runs * width : 0);
    }
    const int64_t rows = Codes ? call.tiles * job.tile_length : job.coded;
    for_pieces(call, cut, rows, totals.counts,
               [&](int64_t, const ColumnPiece& p, const Ahead& ahead, Tally& tally) {
        vu m[4];
        if (stored) {
            for (int64_t k = 0; k < p.vectors(); ++k)
                m[k] = bits_of(load_upto(reinterpret_cast<const float*>(known(p, k)), p.lanes - k * VL));
        } else {
            column_maxima(p.panel, p.real, p.vectors(), m);
            spread_over_groups(m, job.tile_rows);
        }
        code_piece<Words, Divide, Codes>(call, p, m, ahead, tally);
    });
    totals.finish(call);
}

}  // namespace

void quantize_columns(Call& call) {
    specialize(call, [&]<bool Words, bool Divide, bool Codes>() { run<Words, Divide, Codes>(call); });
}

}  // namespace EXTENSOR_ISA
