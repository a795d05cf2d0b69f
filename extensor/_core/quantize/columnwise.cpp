// Quantizes in blocks that run columnwise: a column tile at a time (column_tiles.hpp), so that no
// transposed copy is made.

#include "quantize/column_chunks.hpp"

namespace EXTENSOR_ISA {
namespace {

// How the array is cut. A unit holds whole blocks and whole transforms. It is processed in column
// tiles of `depth` rows, which hold whole blocks, or part of one that is longer.
struct Cut {
    int64_t depth, unit, units, per_task, chunk, chunks, count;

    Cut(const Call& call) {
        const QuantJob& job = call.job;
        depth = job.tile_length;
        while (call.plan.hadamard && depth % call.plan.hadamard) depth += job.tile_length;
        unit = depth;
        if (!call.plan.hadamard) depth = least(depth, kMaxTileRows);
        units = ceil_div(job.padded, unit);
        chunk = least(round_up(most(kTask / unit, 1), kTileColumns), job.inner);
        chunks = ceil_div(job.inner, chunk);
        per_task = most(1, kTask / (unit * chunk));
        count = job.outer * ceil_div(units, per_task) * chunks;
    }

    // Whether a column tile holds the whole of each of its blocks.
    bool holds_tiles(const QuantJob& job) const {
        return depth >= job.tile_length && kTileColumns % job.tile_rows == 0;
    }
};

// Calls body(task, chunk, prefetch, counted) for the part of every block in every column tile, in
// parallel. `rows`: rows of the array, with or without the padding of codes.
template <class Body>
void for_chunks(const Call& call, const Cut& cut, int64_t rows, Counts* counts, Body body) {
    const QuantJob& job = call.job;
    const int64_t groups = ceil_div(cut.units, cut.per_task);
    const int64_t bytes_each = job.type == FloatType::float32 ? 4 : 2;
    threads::run(cut.count, 8 * job.outer * job.padded * job.inner, [&](int64_t task) {
        const int64_t image = task / (groups * cut.chunks), group = task / cut.chunks % groups;
        const int64_t first = group * cut.per_task * cut.unit;
        const int64_t last = least(first + cut.per_task * cut.unit, rows);
        const int64_t left = task % cut.chunks * cut.chunk,
                      right = least(left + cut.chunk, job.inner);
        const Source x = call.source().from(image * job.length * job.inner);
        ColumnTile column_tile = {scratch_of<float>(Slot::values, cut.depth * kTileColumns)};
        bfloat16* bf16 =
            keeps_bf16(call) ? scratch_of<bfloat16>(Slot::bf16, cut.depth * kTileColumns) : nullptr;
        column_tile.bf16 = bf16;
        const bool lies_in_tiles =
            job.inner == kTileColumns && job.type == FloatType::float32 && !call.plan.hadamard;
        const bool transforms_floats = job.type == FloatType::float32 && call.plan.hadamard;
        LaneCounts counted;
        for (int64_t unit = first; unit < last; unit += cut.unit) {
            const int64_t bottom = least(unit + cut.unit, rows);
            for (int64_t j = left; j < right; j += kTileColumns) {
                for (int64_t top = unit; top < bottom; top += cut.depth) {
                    const int64_t depth = least(cut.depth, bottom - top);
                    const int64_t real = most(0, least(depth, job.length - top));
                    ColumnChunk p = {column_tile, image, 0, 0,
                                     0,           0,     j, least(kTileColumns, right - j)};
                    const Source corner = x.from(top * job.inner + j);
                    if (lies_in_tiles && real == depth)  // only read
                        p.column_tile.f32 =
                            const_cast<float*>(static_cast<const float*>(corner.at));
                    else if (bf16)
                        fill_bf16_tile(static_cast<const bfloat16*>(corner.at), job.inner, real,
                                       depth, p.lanes, bf16);
                    else if (transforms_floats)
                        fill_transformed(call.plan, static_cast<const float*>(corner.at), job.inner,
                                         real, depth, p.lanes, column_tile.f32);
                    else
                        fill_column_tile(corner, job.inner, real, depth, p.lanes, column_tile.f32);
                    if (call.plan.hadamard && !transforms_floats)
                        transform_columns(call.plan, least(depth, job.padded - top),
                                          column_tile.f32);
                    Prefetch prefetch;
                    if (j + kTileColumns < right && real == depth)
                        prefetch = {
                            static_cast<const char*>(x.from(top * job.inner + j + kTileColumns).at),
                            job.inner * bytes_each, kTileColumns * bytes_each};
                    for (int64_t at = top; at < top + depth;
                         at += p.rows, p.column_tile = p.column_tile.from(p.rows)) {
                        p.tile = at / job.tile_length, p.offset = at % job.tile_length;
                        p.rows = least(job.tile_length - p.offset, top + depth - at);
                        p.real = most(0, least(p.rows, job.padded - at));
                        body(task, p, prefetch, counted);
                    }
                }
            }
        }
        finish_streaming();
        counts[task] = count(counted);
    });
}

}  // namespace

void quantize_columns(Call& call) {
    const QuantJob& job = call.job;
    const Cut cut(call);
    const bool searched = needs_more_than_amax(call.plan, job);
    const bool stored = searched || job.known || !cut.holds_tiles(job);
    const bool values = call.plan.scale == Scale::ue4m3 && !job.whole;
    const int64_t width = job.inner, runs = job.outer * call.tiles;
    const Totals totals(cut.count, stored && !job.known ? runs * width : 0);
    const auto place = [&](const ColumnChunk& p, int64_t k) {
        return (p.image * call.tiles + p.tile) * width + p.j + k * VL;
    };

    if (stored && !job.known) std::memset(totals.maxima, 0, static_cast<size_t>(runs * width) * 4);
    if (values && !stored && call.needs_global() && !call.plan.hadamard) {
        finite_maxima(job, cut.count, totals.finite);
        finish_statistics(call, totals, 0);
    } else if (!job.known && (stored || call.needs_global())) {
        for_chunks(
            call, cut, job.padded, totals.counts,
            [&](int64_t task, const ColumnChunk& p, const Prefetch& prefetch, LaneCounts&) {
                for (int64_t i = 0; i < p.rows; ++i) prefetch.row(i);
                vu m[4], finite[4];
                column_maxima(p.column_tile, p.real, p.vectors(), m);
                if (stored) {
                    for (int64_t k = 0; k < p.vectors(); ++k) {
                        float* to = reinterpret_cast<float*>(totals.maxima + place(p, k));
                        const vf before = load_upto(to, p.lanes - k * VL);
                        store_upto(to, float_of(larger(bits_of(before), m[k])), p.lanes - k * VL);
                    }
                } else {
                    spread_over_groups(m, job.tile_rows);
                }
                vu all = {};
                for (int64_t k = 0; k < p.vectors(); ++k) all = larger(all, m[k]);
                if (values && !all_lanes(reinterpret_cast<vu>(all < kExponentMask)))
                    column_maxima<true>(p.column_tile.widened(p.real), p.real, p.vectors(), finite);
                else
                    for (int k = 0; k < 4; ++k)
                        finite[k] = m[k] & reinterpret_cast<vu>(m[k] < kExponentMask);
                for (int64_t k = 0; k < p.vectors(); ++k) {
                    const uint32_t most = largest_lane(finite[k]);
                    if (most > totals.finite[task]) totals.finite[task] = most;
                }
            });
        if (stored && job.tile_rows > 1)
            combine(totals.maxima, call.tiles, job.inner, job.tile_rows, 1, 1, 0);
        finish_statistics(call, totals, stored ? runs * width : 0);
    }
    const uint32_t* maxima = job.known ? job.known : totals.maxima;
    const bool chosen = chooses_in_chunks(call.plan, job) && !job.known;
    const EncodeColumns encode = column_encoder(call);
    const int64_t rows = job.codes ? call.tiles * job.tile_length : job.padded;
    for_chunks(
        call, cut, rows, totals.counts,
        [&](int64_t, const ColumnChunk& p, const Prefetch& prefetch, LaneCounts& counted) {
            vu m[4];
            if (stored) {
                for (int64_t k = 0; k < p.vectors(); ++k)
                    m[k] = bits_of(load_upto(reinterpret_cast<const float*>(maxima + place(p, k)),
                                             p.lanes - k * VL));
            } else {
                column_maxima(p.column_tile, p.real, p.vectors(), m);
                spread_over_groups(m, job.tile_rows);
            }
            if (chosen)
                choose_statistics(call, p.column_tile.widened(p.real), p.real, kTileColumns,
                                  p.vectors(), splat(static_cast<float>(most(p.real, 1))), m);
            encode(call, p, m, prefetch, counted);
        });
    totals.finish(call);
}

}  // namespace EXTENSOR_ISA
