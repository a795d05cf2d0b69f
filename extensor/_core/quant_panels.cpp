// Quantizing along rows and down columns in one reading of the array, a panel at a time; rows alone
// where their tiles are square. Covers what training recipes use; `quantize_panels` says no to
// the rest.

#include "columns.hpp"
#include "row_store.hpp"

namespace EXTENSOR_ISA {
namespace {

INLINE int64_t tiles_across(const QuantJob& job) { return kWide / job.tile_length; }

// The index of the first block of the piece's first row; a panel begins with whole tiles.
INLINE int64_t first_block(const Call& call, const RowPiece& p) {
    const QuantJob& job = call.job;
    const int64_t band = p.image * ceil_div(job.rows, job.tile_rows) + p.top / job.tile_rows;
    return band * call.tiles + p.j / job.tile_length;
}

// Maxima of all tiles of a panel, one per row of the panel and tile.
void panel_row_maxima(const QuantJob& job, const PanelValues& panel, int64_t deep, uint32_t* maxima) {
    const int64_t across = tiles_across(job);
    const auto all = [&](const auto* x) {
        for (int64_t t = 0; t < deep * across; t += VL)
            store(maxima + t, job.tile_length == 16 ? tile_maxima<16>(x + t * 16) : tile_maxima<32>(x + t * 32));
    };
#if EXTENSOR_LANES == 16
    panel.halves ? all(panel.halves) : all(panel.wide);
#else
    all(panel.wide);
#endif
    if (job.tile_rows > 1) combine(maxima, 1, deep, job.tile_rows, across, across, 1);
}

// The random words of all tiles, row after row.
const uint32_t* panel_row_words(const Call& call, const RowPiece& p) {
    const QuantJob& job = call.job;
    const Philox philox(call.stream);
    uint32_t* words = scratch_of<uint32_t>(Slot::weights, p.deep * kWide + 2 * VL);
    const auto calls = static_cast<uint32_t>(call.calls);
    auto block = static_cast<uint32_t>(first_block(call, p));
    uint32_t* to = words;
    for (int64_t band = 0; band < p.deep; band += job.tile_rows, block += static_cast<uint32_t>(call.tiles))
        for (uint32_t r = 0; r < job.tile_rows; ++r, to += kWide)
            philox_run(philox, to, r * calls, calls, block, tiles_across(job));
    return words;
}

#if EXTENSOR_LANES == 16
// Codes of plain tiles of bfloat16, to nearest: within 16 bits where each counts from a normal number.
void code_half_rows(const Call& call, const RowPiece& p, const float* apply, const uint32_t* stored,
                    bool bounded, uint8_t* packed, TileCounts& counts) {
    const int64_t tile = call.job.tile_length, total = p.deep * tiles_across(call.job);
    const HalfTileCoder<false> half(call.plan.scale == Scale::e8m0 && tile == 32 ? call.plan.element : -1);
    const TileCoder<false, bfloat16> coder(call.plan.element, tile);
    for (int64_t t = 0; t < total; t += VL) {
        const bfloat16* x = p.panel.halves + t * tile;
        uint8_t* to = packed + t * tile * call.scaler.grid.bits / 8;
        const Scales s = {load(apply + t), vf{}, vu{}, load(stored + t)};
        if (half.code && all_lanes(half.covered(s, half.from)))
            half.code(x, s, nullptr, to, counts);
        else
            coder.code(x, apply + t, nullptr, bounded, VL, to, counts);
    }
}
#endif

template <bool Words, bool Codes>
void code_panel_rows(const Call& call, const RowPiece& p, const uint32_t* maxima,
                     const Ahead& ahead, Tally& tally) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    const int64_t across = tiles_across(job), total = p.deep * across, tile = job.tile_length;
    const vf element_scale = splat(call.plan.element_scale), tensor_scale = splat(call.scaler.tensor_scale);
    const int64_t room = round_up(total, VL);
    float* apply = scratch_of<float>(Slot::planes, 4 * room);
    float* decode = apply + room;
    uint32_t* live = reinterpret_cast<uint32_t*>(decode + room);
    uint32_t* stored = live + room;
    vu plain = splat(~0u), bounded = plain;
    for (int64_t i = 0; i < total; i += VL) {
        const vu amax = load(maxima + i);
        const Scales s = call.scaler.of(amax);
        plain &= is_plain(s, amax, call.scaler.tensor_scale, grid);
        bounded &= reinterpret_cast<vu>(float_of(amax) * s.apply < grid.limit);
        store(apply + i, s.apply);
        store(decode + i, s.decode);
        store(live + i, s.live);
        store(stored + i, s.stored);
    }
    const uint32_t* words = Words ? panel_row_words(call, p) : nullptr;
    uint8_t* packed = Codes ? scratch_of<uint8_t>(Slot::offsets, p.deep * kWide) : nullptr;
    const TileCoder<Words, float> coder(call.plan.element, tile);
    TileCounts counts;
    bool done = false;
    if constexpr (Codes) {
        // The panel's rows follow one another: one run of whole tiles.
        if (coder.code && all_lanes(plain) && p.deep * kWide % coder.batch == 0) {
#if EXTENSOR_LANES == 16
            if (p.panel.halves)
                code_half_rows(call, p, apply, stored, all_lanes(bounded), packed, counts);
            else
#endif
            coder.code(p.panel.wide, apply, words, all_lanes(bounded), p.deep * across, packed, counts);
            done = true;
        }
    }
    for (int64_t r = 0; r < p.rows; ++r) ahead.row(r);
    const int64_t first = p.image * job.rows + p.top;
    const float* panel = done ? nullptr : p.panel.widened(p.deep);
    for (int64_t r = 0; !done && r < p.rows; ++r) {
        float* out = Codes ? nullptr : job.values + (first + r) * job.coded + p.j;
        uint8_t codes[kWide];
        for (int64_t i = 0; i < kWide; i += VL) {
            const int64_t t = r * across + i / tile;
            const Scales s = {splat(apply[t]), splat(decode[t]), splat(live[t]), vu{}};
            vu code;
            const vf value = quantize_vector<Words, false, Codes>(
                load(panel + r * kWide + i), Words ? load(words + r * kWide + i) : vu{}, s,
                element_scale, tensor_scale, grid, tally, code);
            if constexpr (Codes)
                store_codes(codes + i, code);
            else if (p.j + i < job.coded)
                store_upto(out + i, value, job.coded - p.j - i);
        }
        if constexpr (Codes) pack_row(codes, kWide, grid.bits, packed + r * kWide * grid.bits / 8);
    }
    if constexpr (Codes) {
        const RowStore rows(call, p, packed);
        uint8_t* to = job.codes + first * call.packed + p.j * grid.bits / 8;
        for (int64_t r = 0; r < p.rows; ++r, to += call.packed) rows.row(r, to);
        // Scales of a byte, as all that `fits` lets through.
        for (int64_t t = 0; t < total; t += VL) store_codes(packed + t, load(stored + t));
        auto* scales = static_cast<uint8_t*>(job.scales) + first_block(call, p);
        const auto few = [&](auto tiles) {
            for (int64_t r = 0; r < p.rows; r += job.tile_rows, scales += call.tiles)
                std::memcpy(scales, packed + r * across, static_cast<size_t>(tiles));
        };
        p.tiles == 2   ? few(std::integral_constant<int64_t, 2>())
        : p.tiles == 4 ? few(std::integral_constant<int64_t, 4>())
                       : few(p.tiles);
    }
    tally.saturated[0] += static_cast<int32_t>(counts.saturated);
    tally.flushed[0] += static_cast<int32_t>(counts.flushed);
}

using RowCoder = void (*)(const Call&, const RowPiece&, const uint32_t*, const Ahead&, Tally&);
using ColumnCoder = void (*)(const Call&, const ColumnPiece&, const vu (&)[4], const Ahead&, Tally&);

RowCoder row_coder(const Call& call) {
    if (call.job.codes) return call.words() ? code_panel_rows<true, true> : code_panel_rows<false, true>;
    return call.words() ? code_panel_rows<true, false> : code_panel_rows<false, false>;
}

ColumnCoder column_coder(const Call& call) {
    if (call.job.codes) return call.words() ? code_piece<true, false, true> : code_piece<false, false, true>;
    return call.words() ? code_piece<true, false, false> : code_piece<false, false, false>;
}

// How the array is cut: units of `deep` rows, chunks of columns.
struct Cut {
    int64_t images, rows, columns, deep, units, chunk, chunks, count;

    Cut(const Call* along, const Call* down)
        : images(along ? along->job.outer : 1), rows(along ? along->job.rows : down->job.length),
          columns(along ? along->job.length : down->job.inner), deep(1) {
        const int64_t parts[] = {along ? along->job.tile_rows : 1, down ? down->job.tile_length : 1,
                                 down && down->plan.hadamard ? down->plan.hadamard : 1};
        for (int64_t part : parts) {
            int64_t multiple = deep;
            while (multiple % part && multiple <= kDeep) multiple += deep;
            deep = multiple;
        }
        units = ceil_div(rows, deep);
        // Long runs of each row, which hardware fetches ahead, as far as there are tasks enough.
        for (int64_t values = 4 * kTask; values >= kTask; values /= 2) {
            chunk = round_up(most(values / deep, 1), 2 * kWide);
            chunks = ceil_div(columns, chunk);
            count = images * units * chunks;
            if (count >= 8 * threads::get()) break;
        }
    }
};

bool fits(const Call& call) {
    const bool common = is_byte(call.plan.scale) && !divides(call.plan) &&
                        !looks_inside(call.plan, call.job) && call.scaler.bounded() &&
                        call.plan.element_scale == 1;
    return common && (call.plan.stochastic ? call.plan.rbits == 32 : !call.words());
}

bool fits_along(const Call& call, const Cut& cut) {
    const QuantJob& job = call.job;
    const bool tile = job.tile_length == 16 || job.tile_length == 32;
    return fits(call) && tile && kWide % job.tile_length == 0 && cut.deep % job.tile_rows == 0 &&
           cut.deep * tiles_across(job) % VL == 0 && !call.plan.hadamard;
}

bool fits_down(const Call& call, const Cut& cut) {
    const QuantJob& job = call.job;
    return fits(call) && cut.deep % job.tile_length == 0 && kWide % job.tile_rows == 0 &&
           (!call.plan.hadamard || cut.deep % call.plan.hadamard == 0);
}

// Rows in tiles of their own are coded straight from the array, in runs as long as a task is wide; its
// panels then come from the nearer caches.
bool runs_straight(const Call& call) {
    return call.job.codes && call.job.tile_rows == 1 && call.tiles >= VL;
}

// One panel of a task, and what its two readers make of it.
struct Panel {
    PanelValues along, down;  // the panel, transformed for each
    int64_t image, top, deep, real, j, lanes;
    bool more;
    Ahead ahead;

    RowPiece rows(const QuantJob& job) const {
        return {along, image, top, real, deep, j, ceil_div(lanes, job.tile_length), more};
    }

    // Calls body(piece, maxima of its columns) for every tile down the columns.
    template <class Body>
    void columns(const QuantJob& job, Body body) const {
        for (int64_t at = 0; at < deep && top + at < round_up(job.coded, job.tile_length);
             at += job.tile_length) {
            const int64_t left = most(0, least(job.tile_length, job.coded - top - at));
            const ColumnPiece p = {down.from(at), image, (top + at) / job.tile_length, 0,
                                   job.tile_length, left, j, lanes};
            vu m[4];
            column_maxima(p.panel, left, p.vectors(), m);
            spread_over_groups(m, job.tile_rows);
            body(p, m);
        }
    }
};

// What a task covers: rows [top, top + rows) of an image, columns [left, right).
struct Unit {
    int64_t image, top, rows, left, right;
};

// Calls first(task, unit), then body(task, panel) for each panel of the unit.
template <class First, class Body>
void for_panels(const Call* along, const Call* down, const Cut& cut, First first, Body body) {
    const Call& any = along ? *along : *down;
    const int64_t each = any.job.type == FloatType::float32 ? 4 : 2;
    threads::run(cut.count, 8 * cut.images * cut.rows * cut.columns, [&](int64_t task) {
        const int64_t image = task / (cut.units * cut.chunks), unit = task / cut.chunks % cut.units;
        const int64_t left = task % cut.chunks * cut.chunk;
        const int64_t right = least(left + cut.chunk, cut.columns), top = unit * cut.deep;
        const int64_t real = least(cut.deep, cut.rows - top);
        const Source x = any.source().from((image * cut.rows + top) * cut.columns);
        first(task, Unit{image, top, real, left, right});
        const bool transforms = down && down->plan.hadamard;
        float* panel = scratch_of<float>(Slot::padded, cut.deep * kWide * (transforms ? 2 : 1));
        const bool keeps = (!along || takes_halves(*along)) && (!down || takes_halves(*down));
        bfloat16* halves = keeps ? scratch_of<bfloat16>(Slot::halves, cut.deep * kWide) : nullptr;
        for (int64_t j = left; j < right; j += kWide) {
            Panel p = {{panel, halves}, {panel, halves}, image, top, cut.deep, real, j, least(kWide, right - j),
                       j + kWide < right, {}};
            if (halves)
                fill_halves(static_cast<const bfloat16*>(x.from(j).at), cut.columns, real, cut.deep, p.lanes, halves);
            else
                fill_panel(x.from(j), cut.columns, real, cut.deep, p.lanes, panel);
            if (transforms) {
                float* turned = panel + cut.deep * kWide;
                std::memcpy(turned, panel, static_cast<size_t>(cut.deep * kWide) * 4);
                transform_columns(down->plan, least(cut.deep, down->job.coded - top), turned);
                p.down.wide = turned;
            }
            if (p.more)
                p.ahead = {static_cast<const char*>(x.from(j + kWide).at), cut.columns * each,
                           kWide * each};
            body(task, p);
        }
        finish_lines();
    });
}

// The largest magnitude of the panel's finite values (tensor scales) or of its blocks without
// infinities (a scale window).
uint32_t statistic_of_rows(const Call& call, const Panel& p) {
    if (call.plan.scale == Scale::ue4m3) return finite_panel_maximum(p.along, p.real);
    uint32_t* maxima = scratch_of<uint32_t>(Slot::maxima, p.deep * tiles_across(call.job));
    panel_row_maxima(call.job, p.along, p.deep, maxima);
    return finite_maximum(reinterpret_cast<const float*>(maxima), p.deep * tiles_across(call.job), 1);
}

uint32_t statistic_of_columns(const Call& call, const Panel& p) {
    if (call.plan.scale == Scale::ue4m3) return finite_panel_maximum(p.down, p.deep);
    uint32_t most = 0;
    p.columns(call.job, [&](const ColumnPiece&, const vu (&m)[4]) {
        const uint32_t mine = finite_maximum(reinterpret_cast<const float*>(m), kWide, 1);
        most = mine > most ? mine : most;
    });
    return most;
}

void set_globals(Call* along, Call* down, const Cut& cut, uint32_t* finite) {
    const bool rows = along && along->scaler.needs_global();
    const bool columns = down && down->scaler.needs_global();
    if (!rows && !columns) return;
    const Call& any = along ? *along : *down;
    const auto values = [](const Call* call) { return !call || call->plan.scale == Scale::ue4m3; };
    if (values(along) && values(down) && !(down && down->plan.hadamard)) {
        survey_values(any.job, cut.count, finite);
        const float amax = as_float(finite_maximum(reinterpret_cast<float*>(finite), cut.count, 1));
        for (Call* call : {along, down})
            if (call) call->scaler.set_global(amax);
        return;
    }
    const auto nothing = [](int64_t, const Unit&) {};
    for_panels(along, down, cut, nothing, [&](int64_t task, const Panel& p) {
        for (int64_t r = 0; r < p.real; ++r) p.ahead.row(r);
        uint32_t* mine = finite + 2 * task;
        if (rows) mine[0] = larger_of(mine[0], statistic_of_rows(*along, p));
        if (columns) mine[1] = larger_of(mine[1], statistic_of_columns(*down, p));
    });
    if (rows) along->scaler.set_global(as_float(finite_maximum(reinterpret_cast<float*>(finite), cut.count, 2)));
    if (columns)
        down->scaler.set_global(as_float(finite_maximum(reinterpret_cast<float*>(finite) + 1, cut.count, 2)));
}

}  // namespace

bool quantize_panels(Call* along, Call* down) {
    const Cut cut(along, down);
    if (cut.deep > kDeep || (along && !fits_along(*along, cut)) || (down && !fits_down(*down, cut)))
        return false;
    const Totals totals(2 * cut.count, 0);
    set_globals(along, down, cut, totals.finite);
    const RowCoder code_rows = along ? row_coder(*along) : nullptr;
    const ColumnCoder code_columns = down ? column_coder(*down) : nullptr;
    const bool straight = along && runs_straight(*along);
    const auto rows_first = [&](int64_t task, const Unit& u) {
        if (!straight) return;
        const int64_t tile = along->job.tile_length, tiles = ceil_div(u.right - u.left, tile);
        Tally tally;
        for (int64_t r = 0; r < u.rows; ++r)
            code_row(*along, u.image * along->job.rows + u.top + r, u.left / tile, tiles, tally);
        totals.counts[2 * task] = count(tally);  // the one time that this task comes here
    };
    for_panels(straight ? nullptr : along, down, cut, rows_first, [&](int64_t task, const Panel& p) {
        if (along && !straight) {
            Tally tally;
            uint32_t* maxima = scratch_of<uint32_t>(Slot::maxima, p.deep * tiles_across(along->job));
            panel_row_maxima(along->job, p.along, p.deep, maxima);
            code_rows(*along, p.rows(along->job), maxima, down ? Ahead{} : p.ahead, tally);
            totals.counts[2 * task] += count(tally);
        }
        if (down) {
            Tally tally;
            p.columns(down->job, [&](const ColumnPiece& piece, const vu (&m)[4]) {
                code_columns(*down, piece, m, p.ahead, tally);
            });
            totals.counts[2 * task + 1] += count(tally);
        }
    });
    if (along) totals.finish(*along, 0, 2);
    if (down) totals.finish(*down, 1, 2);
    return true;
}

}  // namespace EXTENSOR_ISA
