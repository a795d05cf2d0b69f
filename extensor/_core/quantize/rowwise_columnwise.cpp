// Quantizes a matrix rowwise and columnwise in one reading, a column tile at a time; or rowwise
// alone where its tiles are of several rows. `quantize_column_tiles` says which calls it supports:
// those of training recipes.

#include "quantize/column_chunks.hpp"
#include "quantize/row_store.hpp"

namespace EXTENSOR_ISA {
namespace {

INLINE int64_t tiles_across(const QuantJob& job) { return kTileColumns / job.tile_length; }

// The index of the first block of the first row; a column tile begins with whole tiles.
INLINE int64_t first_block(const Call& call, const TileRows& p) {
    const QuantJob& job = call.job;
    const int64_t band = p.image * ceil_div(job.rows, job.tile_rows) + p.top / job.tile_rows;
    return band * call.tiles + p.j / job.tile_length;
}

// Maxima of all tiles of a column tile, one per row and tile.
void row_maxima(const QuantJob& job, const ColumnTile& column_tile, int64_t depth,
                uint32_t* maxima) {
    const int64_t across = tiles_across(job);
    const auto all = [&](const auto* x) {
        for (int64_t t = 0; t < depth * across; t += VL)
            store(maxima + t, job.tile_length == 16 ? tile_maxima<16>(x + t * 16)
                                                    : tile_maxima<32>(x + t * 32));
    };
#if EXTENSOR_LANES == 16
    column_tile.bf16 ? all(column_tile.bf16) : all(column_tile.f32);
#else
    all(column_tile.f32);
#endif
    if (job.tile_rows > 1) combine(maxima, 1, depth, job.tile_rows, across, across, 1);
}

// The random words of all tiles, row after row.
const uint32_t* row_words(const Call& call, const TileRows& p) {
    const QuantJob& job = call.job;
    const Philox philox(call.stream);
    uint32_t* words = scratch_of<uint32_t>(Slot::random, p.depth * kTileColumns + 2 * VL);
    const auto calls = static_cast<uint32_t>(call.calls);
    auto block = static_cast<uint32_t>(first_block(call, p));
    uint32_t* to = words;
    for (int64_t band = 0; band < p.depth;
         band += job.tile_rows, block += static_cast<uint32_t>(call.tiles))
        for (uint32_t r = 0; r < job.tile_rows; ++r, to += kTileColumns)
            philox_run(philox, to, r * calls, calls, block, tiles_across(job));
    return words;
}

#if EXTENSOR_LANES == 16
// Codes of plain tiles of bfloat16, to nearest; in 16-bit arithmetic where each counts from a
// normal number.
void encode_bf16_rows(const Call& call, const TileRows& p, const ScaleArrays& scales,
                      uint8_t* packed, EncodeCounts& counts) {
    const bool bounded = all_lanes(scales.bounded);
    const int64_t tile = call.job.tile_length, total = p.depth * tiles_across(call.job);
    const Bf16BlockEncoder<false> bf16_encoder(
        call.plan.scale == Scale::e8m0 && tile == 32 ? call.plan.element : -1);
    const BlockEncoder<false, bfloat16> encoder(call.plan.element, tile);
    for (int64_t t = 0; t < total; t += VL) {
        const bfloat16* x = p.column_tile.bf16 + t * tile;
        uint8_t* to = packed + t * tile * call.scaler.grid.bits / 8;
        const Scales s = {load(scales.apply + t), vf{}, vu{}, load(scales.stored + t)};
        if (bf16_encoder.code && all_lanes(bf16_encoder.covered(s.stored, bf16_encoder.from)))
            bf16_encoder.code(x, s.stored, nullptr, to, counts);
        else
            encoder.code(x, scales.apply + t, nullptr, bounded, VL, to, counts);
    }
}
#endif

template <bool Words, bool Codes>
void encode_rows(const Call& call, const TileRows& p, const uint32_t* maxima,
                 const Prefetch& prefetch, LaneCounts& counted) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    const int64_t across = tiles_across(job), total = p.depth * across, tile = job.tile_length;
    const vf element_scale = splat(call.plan.element_scale),
             tensor_scale = splat(call.scaler.tensor_scale);
    const ScaleArrays scale_arrays(call, maxima, total);
    const uint32_t* words = Words ? row_words(call, p) : nullptr;
    uint8_t* packed = Codes ? scratch_of<uint8_t>(Slot::codes, p.depth * kTileColumns) : nullptr;
    const BlockEncoder<Words, float> encoder(call.plan.element, tile);
    EncodeCounts counts;
    bool done = false;
    if constexpr (Codes) {
        // The column tile's rows follow one another: one run of whole tiles.
        if (encoder.code && all_lanes(scale_arrays.plain) &&
            p.depth * kTileColumns % encoder.batch == 0) {
#if EXTENSOR_LANES == 16
            if (p.column_tile.bf16)
                encode_bf16_rows(call, p, scale_arrays, packed, counts);
            else
#endif
                encoder.code(p.column_tile.f32, scale_arrays.apply, words,
                             all_lanes(scale_arrays.bounded), p.depth * across, packed, counts);
            done = true;
        }
    }
    for (int64_t r = 0; r < p.rows; ++r) prefetch.row(r);
    const int64_t first = p.image * job.rows + p.top;
    const float* column_tile = done ? nullptr : p.column_tile.widened(p.depth);
    for (int64_t r = 0; !done && r < p.rows; ++r) {
        float* out = Codes ? nullptr : job.values + (first + r) * job.padded + p.j;
        uint8_t codes[kTileColumns];
        for (int64_t i = 0; i < kTileColumns; i += VL) {
            const int64_t t = r * across + i / tile;
            const Scales s = scale_arrays.at(t);
            vu code;
            const vf value = quantize_vector<Words, false, Codes>(
                load(column_tile + r * kTileColumns + i),
                Words ? load(words + r * kTileColumns + i) : vu{}, s, element_scale, tensor_scale,
                grid, counted, code);
            if constexpr (Codes)
                store_codes(codes + i, code);
            else if (p.j + i < job.padded)
                store_upto(out + i, value, job.padded - p.j - i);
        }
        if constexpr (Codes)
            pack_row(codes, kTileColumns, grid.bits, packed + r * kTileColumns * grid.bits / 8);
    }
    if constexpr (Codes) {
        const RowStore rows(call, p, packed);
        uint8_t* to = job.codes + first * call.packed + p.j * grid.bits / 8;
        for (int64_t r = 0; r < p.rows; ++r, to += call.packed) rows.row(r, to);
        // Scales are bytes wherever `fits` is true.
        for (int64_t t = 0; t < total; t += VL)
            store_codes(packed + t, load(scale_arrays.stored + t));
        auto* scales = static_cast<uint8_t*>(job.scales) + first_block(call, p);
        const auto few = [&](auto tiles) {
            for (int64_t r = 0; r < p.rows; r += job.tile_rows, scales += call.tiles)
                std::memcpy(scales, packed + r * across, static_cast<size_t>(tiles));
        };
        p.tiles == 2   ? few(std::integral_constant<int64_t, 2>())
        : p.tiles == 4 ? few(std::integral_constant<int64_t, 4>())
                       : few(p.tiles);
    }
    counted.saturated[0] += static_cast<int32_t>(counts.saturated);
    counted.flushed[0] += static_cast<int32_t>(counts.flushed);
}

using EncodeRows = void (*)(const Call&, const TileRows&, const uint32_t*, const Prefetch&,
                            LaneCounts&);

EncodeRows row_encoder(const Call& call) {
    if (call.job.codes) return call.words() ? encode_rows<true, true> : encode_rows<false, true>;
    return call.words() ? encode_rows<true, false> : encode_rows<false, false>;
}

// How the array is cut: units of `depth` rows, chunks of columns.
struct Cut {
    int64_t images, rows, columns, depth, units, chunk, chunks, count;

    Cut(const Call* rowwise, const Call* columnwise)
        : images(rowwise ? rowwise->job.outer : 1),
          rows(rowwise ? rowwise->job.rows : columnwise->job.length),
          columns(rowwise ? rowwise->job.length : columnwise->job.inner),
          depth(1) {
        const int64_t parts[] = {
            rowwise ? rowwise->job.tile_rows : 1, columnwise ? columnwise->job.tile_length : 1,
            columnwise && columnwise->plan.hadamard ? columnwise->plan.hadamard : 1};
        for (int64_t part : parts) {
            int64_t multiple = depth;
            while (multiple % part && multiple <= kMaxTileRows) multiple += depth;
            depth = multiple;
        }
        units = ceil_div(rows, depth);
        // Long runs of each row, which hardware prefetches, as long as there are enough tasks.
        for (int64_t values = 4 * kTask; values >= kTask; values /= 2) {
            chunk = round_up(most(values / depth, 1), 2 * kTileColumns);
            chunks = ceil_div(columns, chunk);
            count = images * units * chunks;
            if (count >= 8 * threads::get()) break;
        }
    }
};

// Tiles of one row are encoded directly from the array, in runs as long as a task is wide; its
// column tiles then come from the nearer caches.
bool encodes_directly(const Call& call) {
    return call.job.codes && call.job.tile_rows == 1 && call.tiles >= VL;
}

bool fits(const Call& call) {
    const bool common = is_byte(call.plan.scale) && !divides(call.plan) &&
                        !needs_more_than_amax(call.plan, call.job) && call.scaler.bounded() &&
                        call.plan.element_scale == 1;
    return common && (call.plan.stochastic ? call.plan.rbits == 32 : !call.words());
}

bool fits_rowwise(const Call& call, const Cut& cut) {
    const QuantJob& job = call.job;
    const bool tile = job.tile_length == 16 || job.tile_length == 32;
    // Rows that are encoded directly may be transformed and masked on the way.
    const bool transforms =
        call.plan.hadamard && (job.padded != job.length || 2 * kTileColumns % call.plan.hadamard);
    return fits(call) && tile && kTileColumns % job.tile_length == 0 &&
           cut.depth % job.tile_rows == 0 && cut.depth * tiles_across(job) % VL == 0 &&
           !transforms &&
           (encodes_directly(call) ? call.scaler.needs_global() == false || !call.plan.hadamard
                                   : !call.plan.hadamard && !job.mask);
}

bool fits_columnwise(const Call& call, const Cut& cut) {
    const QuantJob& job = call.job;
    return fits(call) && cut.depth % job.tile_length == 0 && kTileColumns % job.tile_rows == 0 &&
           (!call.plan.hadamard || cut.depth % call.plan.hadamard == 0);
}

// One column tile of a task, as its rowwise and its columnwise encoder read it.
struct SharedTile {
    ColumnTile rowwise, columnwise;  // transformed for each
    int64_t image, top, depth, real, j, lanes;
    bool more;
    Prefetch prefetch;

    TileRows rows(const QuantJob& job) const {
        return {rowwise, image, top, real, depth, j, ceil_div(lanes, job.tile_length), more};
    }

    // Calls body(chunk, maxima of its columns) for every columnwise tile.
    template <class Body>
    void columns(const QuantJob& job, Body body) const {
        for (int64_t at = 0; at < depth && top + at < round_up(job.padded, job.tile_length);
             at += job.tile_length) {
            const int64_t left = most(0, least(job.tile_length, job.padded - top - at));
            const ColumnChunk p = {columnwise.from(at),
                                   image,
                                   (top + at) / job.tile_length,
                                   0,
                                   job.tile_length,
                                   left,
                                   j,
                                   lanes};
            vu m[4];
            column_maxima(p.column_tile, left, p.vectors(), m);
            spread_over_groups(m, job.tile_rows);
            body(p, m);
        }
    }
};

// What a task covers: rows [top, top + rows) of an image, columns [left, right).
struct Unit {
    int64_t image, top, rows, left, right;
};

// Calls first(task, unit), then body(task, column tile) for each column tile of the unit.
template <class First, class Body>
void for_column_tiles(const Call* rowwise, const Call* columnwise, const Cut& cut, First first,
                      Body body) {
    const Call& any = rowwise ? *rowwise : *columnwise;
    const int64_t each = any.job.type == FloatType::float32 ? 4 : 2;
    threads::run(cut.count, 8 * cut.images * cut.rows * cut.columns, [&](int64_t task) {
        const int64_t image = task / (cut.units * cut.chunks), unit = task / cut.chunks % cut.units;
        const int64_t left = task % cut.chunks * cut.chunk;
        const int64_t right = least(left + cut.chunk, cut.columns), top = unit * cut.depth;
        const int64_t real = least(cut.depth, cut.rows - top);
        const Source x = any.source().from((image * cut.rows + top) * cut.columns);
        first(task, Unit{image, top, real, left, right});
        const bool transforms = columnwise && columnwise->plan.hadamard;
        float* column_tile =
            scratch_of<float>(Slot::values, cut.depth * kTileColumns * (transforms ? 2 : 1));
        const bool keeps =
            (!rowwise || keeps_bf16(*rowwise)) && (!columnwise || keeps_bf16(*columnwise));
        bfloat16* bf16 =
            keeps ? scratch_of<bfloat16>(Slot::bf16, cut.depth * kTileColumns) : nullptr;
        for (int64_t j = left; j < right; j += kTileColumns) {
            SharedTile p = {{column_tile, bf16},
                            {column_tile, bf16},
                            image,
                            top,
                            cut.depth,
                            real,
                            j,
                            least(kTileColumns, right - j),
                            j + kTileColumns < right,
                            {}};
            if (bf16)
                fill_bf16_tile(static_cast<const bfloat16*>(x.from(j).at), cut.columns, real,
                               cut.depth, p.lanes, bf16);
            else
                fill_column_tile(x.from(j), cut.columns, real, cut.depth, p.lanes, column_tile);
            if (transforms) {
                float* transformed = column_tile + cut.depth * kTileColumns;
                std::memcpy(transformed, column_tile,
                            static_cast<size_t>(cut.depth * kTileColumns) * 4);
                transform_columns(columnwise->plan, least(cut.depth, columnwise->job.padded - top),
                                  transformed);
                p.columnwise.f32 = transformed;
            }
            if (p.more)
                p.prefetch = {static_cast<const char*>(x.from(j + kTileColumns).at),
                              cut.columns * each, kTileColumns * each};
            body(task, p);
        }
        finish_streaming();
    });
}

// The largest magnitude of a column tile's finite values (tensor scales) or of its blocks without
// infinities (a scale window).
uint32_t rowwise_statistic(const Call& call, const SharedTile& p) {
    if (call.plan.scale == Scale::ue4m3) return finite_tile_maximum(p.rowwise, p.real);
    uint32_t* maxima = scratch_of<uint32_t>(Slot::maxima, p.depth * tiles_across(call.job));
    row_maxima(call.job, p.rowwise, p.depth, maxima);
    return finite_maximum(reinterpret_cast<const float*>(maxima), p.depth * tiles_across(call.job),
                          1);
}

uint32_t columnwise_statistic(const Call& call, const SharedTile& p) {
    if (call.plan.scale == Scale::ue4m3) return finite_tile_maximum(p.columnwise, p.depth);
    uint32_t most = 0;
    p.columns(call.job, [&](const ColumnChunk&, const vu(&m)[4]) {
        const uint32_t mine = finite_maximum(reinterpret_cast<const float*>(m), kTileColumns, 1);
        most = mine > most ? mine : most;
    });
    return most;
}

void set_globals(Call* rowwise, Call* columnwise, const Cut& cut, uint32_t* finite) {
    const bool rows = rowwise && rowwise->scaler.needs_global();
    const bool columns = columnwise && columnwise->scaler.needs_global();
    if (!rows && !columns) return;
    const Call& any = rowwise ? *rowwise : *columnwise;
    const auto values = [](const Call* call) { return !call || call->plan.scale == Scale::ue4m3; };
    if (values(rowwise) && values(columnwise) && !(columnwise && columnwise->plan.hadamard)) {
        finite_maxima(any.job, cut.count, finite);
        const float amax = as_float(finite_maximum(reinterpret_cast<float*>(finite), cut.count, 1));
        for (Call* call : {rowwise, columnwise})
            if (call) call->scaler.set_global(amax);
        return;
    }
    const auto nothing = [](int64_t, const Unit&) {};
    for_column_tiles(rowwise, columnwise, cut, nothing, [&](int64_t task, const SharedTile& p) {
        for (int64_t r = 0; r < p.real; ++r) p.prefetch.row(r);
        uint32_t* mine = finite + 2 * task;
        if (rows) mine[0] = larger_of(mine[0], rowwise_statistic(*rowwise, p));
        if (columns) mine[1] = larger_of(mine[1], columnwise_statistic(*columnwise, p));
    });
    if (rows)
        rowwise->scaler.set_global(
            as_float(finite_maximum(reinterpret_cast<float*>(finite), cut.count, 2)));
    if (columns)
        columnwise->scaler.set_global(
            as_float(finite_maximum(reinterpret_cast<float*>(finite) + 1, cut.count, 2)));
}

}  // namespace

bool quantize_column_tiles(Call* rowwise, Call* columnwise) {
    const Cut cut(rowwise, columnwise);
    if (cut.depth > kMaxTileRows || (rowwise && !fits_rowwise(*rowwise, cut)) ||
        (columnwise && !fits_columnwise(*columnwise, cut)))
        return false;
    const Totals totals(2 * cut.count, 0);
    set_globals(rowwise, columnwise, cut, totals.finite);
    const EncodeRows encode_tile_rows = rowwise ? row_encoder(*rowwise) : nullptr;
    const EncodeColumns encode_columns = columnwise ? column_encoder(*columnwise) : nullptr;
    const bool direct = rowwise && encodes_directly(*rowwise);
    const auto encode_first = [&](int64_t task, const Unit& u) {
        if (!direct) return;
        const int64_t tile = rowwise->job.tile_length, tiles = ceil_div(u.right - u.left, tile);
        LaneCounts counted;
        for (int64_t r = 0; r < u.rows; ++r)
            encode_row(*rowwise, u.image * rowwise->job.rows + u.top + r, u.left / tile, tiles,
                       counted);
        totals.counts[2 * task] = count(counted);  // the one time that this task comes here
    };
    for_column_tiles(
        direct ? nullptr : rowwise, columnwise, cut, encode_first,
        [&](int64_t task, const SharedTile& p) {
            if (rowwise && !direct) {
                LaneCounts counted;
                uint32_t* maxima =
                    scratch_of<uint32_t>(Slot::maxima, p.depth * tiles_across(rowwise->job));
                row_maxima(rowwise->job, p.rowwise, p.depth, maxima);
                encode_tile_rows(*rowwise, p.rows(rowwise->job), maxima,
                                 columnwise ? Prefetch{} : p.prefetch, counted);
                totals.counts[2 * task] += count(counted);
            }
            if (columnwise) {
                LaneCounts counted;
                p.columns(columnwise->job, [&](const ColumnChunk& chunk, const vu(&m)[4]) {
                    encode_columns(*columnwise, chunk, m, p.prefetch, counted);
                });
                totals.counts[2 * task + 1] += count(counted);
            }
        });
    if (rowwise) totals.finish(*rowwise, 0, 2);
    if (columnwise) totals.finish(*columnwise, 1, 2);
    return true;
}

}  // namespace EXTENSOR_ISA
