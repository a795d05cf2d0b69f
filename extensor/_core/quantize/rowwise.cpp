// Quantizes in blocks that run rowwise: contiguous memory.
//
// Tiles of 16 or 32 values go VL at a time through maxima, scales and codes while they are in the
// level-1 cache and the next ones are being fetched. Everything else takes the loops of
// encode_chunk.

#include "quantize/plain_values.hpp"
#include "quantize/row_groups.hpp"

namespace EXTENSOR_ISA {
namespace {

// ---- codes or values of a chunk, whatever its tiles ----

// Values of a chunk whose blocks hold only numbers. Words of a tile are `word_stride` apart.
template <class Round, bool Words>
void round_chunk(const Call& call, Values v, const RowChunk& p, const ScaleArrays& scales,
                 const uint32_t* words, int64_t word_stride, LaneCounts& counted_out) {
    const QuantJob& job = call.job;
    const int64_t tile = job.tile_length;
    const Round round(call);
    LaneCounts counted = counted_out;
    int64_t at = 0;
    for (int64_t r = 0; r < p.rows; ++r) {
        const float* x = v.x + r * v.stride;
        float* out = job.values + (p.first + r) * job.padded + p.start * tile;
        for (int64_t left = v.padded; left > 0; left -= tile, ++at, x += tile, out += tile) {
            const auto block = round.block(splat(scales.apply[at]), splat(scales.decode[at]));
            const uint32_t* w = words + at * word_stride;
            const int64_t n = least(tile, left);
            int64_t i = 0;
            for (; i + VL <= n; i += VL)
                store(out + i, round(load(x + i), Words ? load(w + i) : vu{}, block, counted));
            if (i == n) continue;
            const int rest = static_cast<int>(n - i);
            store_part(out + i,
                       round(load_part(x + i, rest), Words ? load(w + i) : vu{}, block, counted),
                       rest);
        }
    }
    counted_out = counted;
}

template <bool Words, bool Divide, bool Codes>
void encode_chunk(const Call& call, Values v, const RowChunk& p, const uint32_t* maxima,
                  LaneCounts& counted_out) {
    const QuantJob& job = call.job;
    const int64_t tile = job.tile_length, total = p.rows * p.tiles, padded = p.tiles * tile;
    const Grid grid = call.scaler.grid;
    const vf element_scale = splat(call.plan.element_scale);
    const vf tensor_scale = splat(call.scaler.tensor_scale);
    LaneCounts counted;

    const ScaleArrays scales(call, maxima, total);
    int64_t word_stride = 0;
    const uint32_t* words =
        Words ? random_words(call, Philox(call.stream), p, word_stride) : nullptr;
    if constexpr (!Codes)
        if (has_plain_values<Divide>(call) && all_lanes(scales.numbers))
            return for_plain_values<Words, Divide>(
                call, all_lanes(Words ? scales.within : scales.bounded), all_lanes(scales.moderate),
                [&]<class Round>() {
                    round_chunk<Round, Words>(call, v, p, scales, words, word_stride, counted_out);
                });
    uint8_t* unpacked = Codes ? scratch_of<uint8_t>(Slot::codes, padded + 4 * VL) : nullptr;
    // Whole tiles that the block encoder does at once; the loop below does the rest of each row.
    int64_t batched = 0;
    const BlockEncoder<Words, float> encoder(call.plan.element, tile);
    if constexpr (Codes && !Divide)
        if (encoder.code && all_lanes(scales.plain) && (!Words || word_stride == tile) &&
            call.plan.element_scale == 1 && call.scaler.bounded())
            batched = v.padded / encoder.batch * encoder.batch / tile;
    const int64_t done = batched * tile;
    EncodeCounts counts;

    for (int64_t r = 0, at = 0; r < p.rows; ++r) {
        const int64_t row = p.first + r;
        const float* x = v.x + r * v.stride;
        float* out = Codes ? nullptr : job.values + row * job.padded + p.start * tile;
        uint8_t* to =
            Codes ? job.codes + row * call.packed + p.start * tile * grid.bits / 8 : nullptr;
        uint8_t* codes = unpacked;
        if (Codes && job.mask)
            store_mask(call, x, v.padded, scales.decode + at, mask_of(job, row, p.start * tile));
        if (batched) {
            encoder.code(x, scales.apply + at, words + at * word_stride, false, batched, to,
                         counts);
            at += batched;
            x += done;
        }
        for (int64_t left = v.padded - done; left > 0; left -= tile, ++at) {
            const int64_t n = least(tile, left), whole = n / VL * VL;
            Scales s = scales.at(at);
            if (Divide && call.points)
                s.point = splat(call.points[p.first * call.tiles + p.start + at]);
            const uint32_t* w = words + at * word_stride;
            vu code;
            for (int64_t i = 0; i < whole; i += VL) {
                const vu word = Words ? load(w + i) : vu{};
                const vf value = quantize_vector<Words, Divide, Codes>(
                    load(x + i), word, s, element_scale, tensor_scale, grid, counted, code);
                if constexpr (Codes)
                    store_codes(codes + i, code);
                else
                    store(out + i, value);
            }
            if (whole < n) {
                const int rest = static_cast<int>(n - whole);
                const vu word = Words ? load(w + whole) : vu{};
                const vf value = quantize_vector<Words, Divide, Codes>(
                    load_part(x + whole, rest), word, s, element_scale, tensor_scale, grid, counted,
                    code);
                // Codes reach beyond the tile's end: into padding, or the next tile, which comes
                // later.
                if constexpr (Codes)
                    store_codes(codes + whole, code);
                else
                    store_part(out + whole, value, rest);
            }
            x += tile;
            Codes ? void(codes += tile) : void(out += tile);
        }
        if constexpr (Codes) {
            std::memset(unpacked + v.padded - done, 0, static_cast<size_t>(padded - v.padded + VL));
            pack_row(unpacked, padded - done, grid.bits, to + done * grid.bits / 8);
            const int64_t in_image = row % job.rows, image = row / job.rows;
            const int64_t band = in_image / job.tile_rows,
                          bands = ceil_div(job.rows, job.tile_rows);
            if (in_image % job.tile_rows == 0)
                store_scales(job.scales, (image * bands + band) * call.tiles + p.start,
                             scales.stored + r * p.tiles, p.tiles, call.plan.scale);
        }
    }
    counted_out.saturated += counted.saturated;
    counted_out.flushed += counted.flushed;
    counted_out.saturated[0] += static_cast<int32_t>(counts.saturated);
    counted_out.flushed[0] += static_cast<int32_t>(counts.flushed);
}

using EncodeChunk = void (*)(const Call&, Values, const RowChunk&, const uint32_t* maxima,
                             LaneCounts&);

// Encodes any chunk, in parts that fit the cache. `known`: maxima of the chunk's tiles, or null.
void encode_any(const Call& call, const RowChunk& p, const uint32_t* known, LaneCounts& counted) {
    const EncodeChunk encode =
        specialize(call, []<bool Words, bool Divide, bool Codes>() -> EncodeChunk {
            return encode_chunk<Words, Divide, Codes>;
        });
    const int64_t unit = call.unit(), tile = call.job.tile_length;
    const int64_t most_rows = p.rows > 1 ? most(1, kChunkValues / call.job.padded) : 1;
    const int64_t most_tiles = p.rows > 1 ? p.tiles : most(1, kChunkValues / (unit * tile)) * unit;
    for (int64_t r = 0; r < p.rows; r += most_rows) {
        for (int64_t t = 0; t < p.tiles; t += most_tiles) {
            const RowChunk part = {p.first + r, least(most_rows, p.rows - r), p.start + t,
                                   least(most_tiles, p.tiles - t)};
            const Values v = prepared(call, part);
            const uint32_t* maxima = known ? known + r * p.tiles + t : nullptr;
            if (!maxima) {
                uint32_t* mine = scratch_of<uint32_t>(Slot::maxima, part.rows * part.tiles + VL);
                chunk_maxima(call.job, v, part, mine);
                if (chooses_in_chunks(call.plan, call.job)) choose_in_chunk(call, v, part, mine);
                maxima = mine;
            }
            encode(call, v, part, maxima, counted);
        }
    }
}

// ---- tiles of 16 or 32 values, VL at a time ----

void encode_group(const Call& call, const RowChunk& group, vu statistic, LaneCounts& counted) {
    alignas(64) uint32_t maxima[VL];
    store(maxima, statistic);
    encode_any(call, group, maxima, counted);
}

void add(const EncodeCounts& counts, LaneCounts& counted) {
    counted.saturated[0] += static_cast<int32_t>(counts.saturated);
    counted.flushed[0] += static_cast<int32_t>(counts.flushed);
}

// Both loops below find a group's scales while the group before is encoded, as they wait for its
// maxima. They return how many tiles are encoded.

template <int Tile, bool Words, class T>
int64_t stream(const Call& call, const RowChunk& p, LaneCounts& counted) {
    const Groups<Tile, T> groups(call, p);
    const BlockEncoder<Words, T> encoder(call.plan.element, Tile);
    const Philox philox(call.stream);
    const Grid& grid = call.scaler.grid;
    alignas(64) float apply[VL];
    EncodeCounts counts;

    struct Group {
        const T* values;
        vu amax, statistic;
        Scales scales;
    };
    const auto group_at = [&](int64_t g) __attribute__((always_inline)) {
        const T* values = groups.values(g);
        const vu amax = tile_maxima<Tile>(values), statistic = groups.statistic(values, amax);
        return Group{values, amax, statistic, call.scaler.of(statistic)};
    };
    if (!groups.count) return 0;
    Group next = group_at(0);
    for (int64_t g = 0; g < groups.count; ++g) {
        const Group now = next;
        if (g + 1 < groups.count) next = group_at(g + 1);
        const Scales& s = now.scales;
        if (!all_lanes(is_plain(s, now.amax, call.scaler.tensor_scale, grid))) {
            encode_group(call, groups.chunk(g), now.statistic, counted);
            continue;
        }
        if (call.job.mask) groups.mask(g, now.values, s.decode);
        store_codes(groups.scales(g), s.stored);
        int64_t stride;
        const uint32_t* drawn =
            Words ? random_words(call, philox, groups.chunk(g), stride) : nullptr;
        store(apply, s.apply);
        const vu bounded = reinterpret_cast<vu>(float_of(now.amax) * s.apply < grid.limit);
        encoder.code(now.values, apply, drawn, all_lanes(bounded), VL, groups.codes(g), counts);
    }
    add(counts, counted);
    return groups.count * VL;
}

#if EXTENSOR_LANES == 16
// The same of tiles of 32 by an encoder that reads the scales' bytes alone.
template <bool Words, class T>
int64_t stream(const Call& call, const RowChunk& p, const Bf16BlockEncoder<Words, T>& encoder,
               LaneCounts& counted) {
    const Groups<32, T> groups(call, p);
    const Philox philox(call.stream);
    BlockRandomWords words(philox, 0);
    EncodeCounts counts;

    struct Group {
        const T* values;
        vu amax, statistic, stored;
    };
    const auto group_at = [&](int64_t g) __attribute__((always_inline)) {
        const T* values = groups.values(g);
        const vu amax = tile_maxima<32>(values), statistic = groups.statistic(values, amax);
        return Group{values, amax, statistic, call.scaler.e8m0_unclamped(statistic)};
    };
    if (!groups.count) return 0;
    Group next = group_at(0);
    for (int64_t g = 0; g < groups.count; ++g) {
        Group now = next;
        if (g + 1 < groups.count) next = group_at(g + 1);
        if (!all_lanes(encoder.covers_unclamped(now.stored, now.amax, call.scaler.lowest_byte))) {
            now.stored = call.scaler.e8m0_stored(now.statistic);
            if (!all_lanes(encoder.covers(now.stored, now.amax))) {
                encode_group(call, groups.chunk(g), now.statistic, counted);
                continue;
            }
        }
        if (call.job.mask) groups.mask(g, now.values, float_of(now.stored << 23));
        store_codes(groups.scales(g), now.stored);
        if constexpr (Words)
            words.block = static_cast<uint32_t>(call.block(p.first, groups.start(g)));
        encoder.code(now.values, now.stored, &words, groups.codes(g), counts);
    }
    add(counts, counted);
    return groups.count * VL;
}
#endif

template <bool Words, class T>
int64_t stream(const Call& call, const RowChunk& p, LaneCounts& counted) {
#if EXTENSOR_LANES == 16
    const bool powers_of_two = call.plan.scale == Scale::e8m0 && (!Words || call.plan.rbits == 32);
    if (call.job.tile_length == 32 && powers_of_two) {
        const Bf16BlockEncoder<Words, T> encoder(call.plan.element);
        if (encoder.code) return stream(call, p, encoder, counted);
    }
#endif
    return call.job.tile_length == 16 ? stream<16, Words, T>(call, p, counted)
                                      : stream<32, Words, T>(call, p, counted);
}

// As above, where the call supports it; else 0.
template <bool Words>
int64_t stream(const Call& call, const RowChunk& p, LaneCounts& counted) {
    const QuantJob& job = call.job;
    const int64_t tile = job.tile_length;
    if (job.tile_rows > 1 || (tile != 16 && tile != 32)) return 0;
    if (!kElements[call.plan.element].is_float || call.plan.element_scale != 1) return 0;
    const bool chosen = chooses_in_chunks(call.plan, job);
    if (!call.scaler.bounded() && !(chosen && call.scaler.grid.zeros == Zeros::kept)) return 0;
    if (Words && !call.plan.stochastic) return 0;
    if (VL * tile % most(1, call.plan.hadamard) || p.start * tile % most(1, call.plan.hadamard))
        return 0;
#if EXTENSOR_LANES == 16
    if (!call.plan.hadamard && !chosen && job.type == FloatType::bfloat16)
        return stream<Words, bfloat16>(call, p, counted);
    if (!Words && !call.plan.hadamard && !chosen && job.type == FloatType::float16)
        return stream<false, float16>(call, p, counted);
#endif
    return stream<Words, float>(call, p, counted);
}

// ---- one call ----

// Calls body(task, chunk) for every chunk, in parallel.
struct RowTasks {
    int64_t rows, step, tiles, parts, count;  // rows and tiles of a chunk, chunks of a row

    explicit RowTasks(const Call& call) {
        const QuantJob& job = call.job;
        rows = job.outer * job.rows;
        // Enough chunks for every thread, but large ones, so that memory is read in long runs.
        const int64_t values =
            most(kChunkValues / 2, least(8 * kChunkValues, rows * job.padded / 16));
        step = most(1, values / job.padded);
        const int64_t unit = call.unit();
        // Whole groups of the streaming loop, where they are short.
        const int64_t group = job.tile_length <= 32 ? unit * VL : unit;
        tiles = step > 1 ? call.tiles : most(1, values / (group * job.tile_length)) * group;
        parts = ceil_div(call.tiles, tiles);
        count = ceil_div(rows, step) * parts;
    }

    template <class Body>
    void run(const Call& call, Body body) const {
        threads::run(count, 8 * rows * call.job.padded, [&](int64_t task) {
            const int64_t first = task / parts * step, start = task % parts * tiles;
            body(task, RowChunk{first, least(step, rows - first), start,
                                least(tiles, call.tiles - start)});
        });
    }
};

// Whether the maxima of all tiles are kept, one for each row of a tile.
bool keeps_maxima(const Call& call) {
    return call.job.tile_rows > 1 || needs_more_than_amax(call.plan, call.job);
}

// The statistic of the whole array, and of all tiles where they are kept.
void gather_statistics(Call& call, const RowTasks& tasks, const Totals& totals) {
    const QuantJob& job = call.job;
    const bool values = call.plan.scale == Scale::ue4m3 && !job.whole, kept = keeps_maxima(call);
    tasks.run(call, [&](int64_t task, const RowChunk& p) {
        uint32_t& finite = totals.finite[task];
        if (values && !kept && !call.plan.hadamard) {
            const int64_t count =
                least(p.tiles * job.tile_length, job.length - p.start * job.tile_length);
            const Source x = call.source().from(p.first * job.length + p.start * job.tile_length);
            finite = x.visit([&](const auto* at) {
                return finite_run_maximum(at, p.rows > 1 ? p.rows * job.length : count);
            });
            return;
        }
        const Values v = prepared(call, p);
        uint32_t* maxima = kept ? totals.maxima + p.first * call.tiles + p.start
                                : scratch_of<uint32_t>(Slot::maxima, p.rows * p.tiles + VL);
        chunk_maxima(job, v, p, maxima);
        for (int64_t r = 0; values && r < p.rows; ++r) {
            const uint32_t top = finite_run_maximum(v.x + r * v.stride, v.padded);
            if (top > finite) finite = top;
        }
        if (!values && !kept)
            finite = finite_maximum(reinterpret_cast<float*>(maxima), p.rows * p.tiles, 1);
    });
    if (job.tile_rows > 1)
        combine(totals.maxima, job.outer, job.rows, job.tile_rows, call.tiles, call.tiles, 1);
    finish_statistics(call, totals, kept ? job.outer * job.rows * call.tiles : 0);
}

}  // namespace

void finite_maxima(const QuantJob& job, int64_t parts, uint32_t* finite) {
    const int64_t count = job.outer * job.rows * job.length * job.inner;
    const int64_t each = round_up(ceil_div(count, parts), 64);
    threads::run(parts, 2 * count, [&](int64_t part) {
        const int64_t n = least(each, count - part * each);
        if (n > 0)
            finite[part] = Source{job.x, job.type}.from(part * each).visit([&](const auto* x) {
                return finite_run_maximum(x, n);
            });
    });
}

void encode_row(const Call& call, int64_t row, int64_t start, int64_t tiles, LaneCounts& counted) {
    RowChunk p = {row, 1, start, tiles};
    if (call.job.codes && !divides(call.plan)) {
        const int64_t done =
            call.words() ? stream<true>(call, p, counted) : stream<false>(call, p, counted);
        p.start += done, p.tiles -= done;
    }
    if (p.tiles) encode_any(call, p, nullptr, counted);
}

void quantize_rows(Call& call) {
    const RowTasks tasks(call);
    const bool gathered = !call.job.known && keeps_maxima(call);
    const Totals totals(tasks.count, gathered ? call.job.outer * call.job.rows * call.tiles : 0);
    if (!call.job.known && needs_whole(call)) gather_statistics(call, tasks, totals);
    const uint32_t* maxima = gathered ? totals.maxima : call.job.known;
    tasks.run(call, [&](int64_t task, const RowChunk& p) {
        LaneCounts counted;
        if (maxima || p.tiles < VL) {
            encode_any(call, p, maxima ? maxima + p.first * call.tiles + p.start : nullptr,
                       counted);
        } else {
            for (int64_t r = 0; r < p.rows; ++r)
                encode_row(call, p.first + r, p.start, p.tiles, counted);
        }
        totals.counts[task] = count(counted);
    });
    totals.finish(call);
}

}  // namespace EXTENSOR_ISA
