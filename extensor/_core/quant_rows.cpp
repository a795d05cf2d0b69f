// Quantizing in blocks along rows: contiguous memory.
//
// Tiles of 16 or 32 values go VL at a time through maxima, scales and codes while they are in the
// nearest cache and the next ones are on their way; everything else takes the loops of code_piece.

#include "pieces.hpp"

namespace EXTENSOR_ISA {
namespace {

// ---- codes or values of a piece, whatever its tiles ----

template <bool Words, bool Divide, bool Codes>
void code_piece(const Call& call, Values v, const Piece& p, const uint32_t* maxima, Tally& tally_out) {
    const QuantJob& job = call.job;
    const int64_t tile = job.tile_length, total = p.rows * p.tiles, padded = p.tiles * tile;
    const Grid grid = call.scaler.grid;
    const vf element_scale = splat(call.plan.element_scale);
    const vf tensor_scale = splat(call.scaler.tensor_scale);
    Tally tally;

    // Scales of all tiles of the piece, as arrays: apply, decode, live, stored.
    const int64_t room = round_up(total, VL) + VL;
    float* apply = scratch_of<float>(Slot::planes, 4 * room);
    float* decode = apply + room;
    uint32_t* live = reinterpret_cast<uint32_t*>(decode + room);
    uint32_t* stored = live + room;
    vu plain = splat(~0u);
    for (int64_t i = 0; i < total; i += VL) {
        const vu amax = bits_of(load_upto(reinterpret_cast<const float*>(maxima) + i, total - i));
        const Scales s = call.scaler.of(amax);
        plain &= is_plain(s, amax, call.scaler.tensor_scale, grid);
        store(apply + i, s.apply);
        store(decode + i, s.decode);
        store(live + i, s.live);
        store(stored + i, s.stored);
    }
    int64_t word_stride = 0;
    const uint32_t* words = Words ? piece_words(call, Philox(call.stream), p, word_stride) : nullptr;
    uint8_t* unpacked = Codes ? scratch_of<uint8_t>(Slot::offsets, padded + 4 * VL) : nullptr;
    // Whole tiles that are coded together; the loop below does the rest of each row.
    int64_t together = 0;
    const TileCoder<Words, float> coder(call.plan.element, tile);
    if constexpr (Codes && !Divide)
        if (coder.code && all_lanes(plain) && (!Words || word_stride == tile) &&
            call.plan.element_scale == 1 && call.scaler.bounded())
            together = v.coded / coder.batch * coder.batch / tile;
    const int64_t done = together * tile;
    TileCounts counts;

    for (int64_t r = 0, at = 0; r < p.rows; ++r) {
        const int64_t row = p.first + r;
        const float* x = v.x + r * v.stride;
        float* out = Codes ? nullptr : job.values + row * job.coded + p.start * tile;
        uint8_t* to = Codes ? job.codes + row * call.packed + p.start * tile * grid.bits / 8 : nullptr;
        uint8_t* codes = unpacked;
        if (together) {
            coder.code(x, apply + at, words + at * word_stride, false, together, to, counts);
            at += together;
            x += done;
        }
        for (int64_t left = v.coded - done; left > 0; left -= tile, ++at) {
            const int64_t n = least(tile, left), whole = n / VL * VL;
            Scales s = {splat(apply[at]), splat(decode[at]), splat(live[at]), vu{}};
            if (Divide && call.points)
                s.point = splat(call.points[p.first * call.tiles + p.start + at]);
            const uint32_t* w = words + at * word_stride;
            vu code;
            for (int64_t i = 0; i < whole; i += VL) {
                const vu word = Words ? load(w + i) : vu{};
                const vf value = quantize_vector<Words, Divide, Codes>(
                    load(x + i), word, s, element_scale, tensor_scale, grid, tally, code);
                if constexpr (Codes)
                    store_codes(codes + i, code);
                else
                    store(out + i, value);
            }
            if (whole < n) {
                const int rest = static_cast<int>(n - whole);
                const vu word = Words ? load(w + whole) : vu{};
                const vf value = quantize_vector<Words, Divide, Codes>(
                    load_part(x + whole, rest), word, s, element_scale, tensor_scale, grid, tally,
                    code);
                // Codes go past the tile's end: that is padding, or the next tile, which follows.
                if constexpr (Codes)
                    store_codes(codes + whole, code);
                else
                    store_part(out + whole, value, rest);
            }
            x += tile;
            Codes ? void(codes += tile) : void(out += tile);
        }
        if constexpr (Codes) {
            std::memset(unpacked + v.coded - done, 0, static_cast<size_t>(padded - v.coded + VL));
            pack_row(unpacked, padded - done, grid.bits, to + done * grid.bits / 8);
            const int64_t in_image = row % job.rows, image = row / job.rows;
            const int64_t band = in_image / job.tile_rows, bands = ceil_div(job.rows, job.tile_rows);
            if (in_image % job.tile_rows == 0)
                store_scales(job.scales, (image * bands + band) * call.tiles + p.start,
                             stored + r * p.tiles, p.tiles, call.plan.scale);
        }
    }
    tally_out.saturated += tally.saturated;
    tally_out.flushed += tally.flushed;
    tally_out.saturated[0] += static_cast<int32_t>(counts.saturated);
    tally_out.flushed[0] += static_cast<int32_t>(counts.flushed);
}

// Any piece, in pieces that fit the cache. `known`: maxima of the piece's tiles, or null.
template <bool Words, bool Divide, bool Codes>
void code_any(const Call& call, const Piece& p, const uint32_t* known, Tally& tally) {
    const int64_t unit = call.unit(), tile = call.job.tile_length;
    const int64_t most_rows = p.rows > 1 ? most(1, kPiece / call.job.coded) : 1;
    const int64_t most_tiles = p.rows > 1 ? p.tiles : most(1, kPiece / (unit * tile)) * unit;
    for (int64_t r = 0; r < p.rows; r += most_rows) {
        for (int64_t t = 0; t < p.tiles; t += most_tiles) {
            const Piece part = {p.first + r, least(most_rows, p.rows - r), p.start + t,
                                least(most_tiles, p.tiles - t)};
            const Values v = prepared(call, part);
            const uint32_t* maxima = known ? known + r * p.tiles + t : nullptr;
            if (!maxima) {
                uint32_t* mine = scratch_of<uint32_t>(Slot::maxima, part.rows * part.tiles + VL);
                piece_maxima(call.job, v, part, mine);
                maxima = mine;
            }
            code_piece<Words, Divide, Codes>(call, v, part, maxima, tally);
        }
    }
}

// ---- tiles of 16 or 32 values, VL at a time ----

// Codes the first tiles of a piece of one row, whole groups of VL; says how many. `T` is the
// array's type, or float where values have to be prepared.
template <int Tile, bool Words, class T>
int64_t stream(const Call& call, const Piece& p, Tally& tally) {
    const QuantJob& job = call.job;
    const bool direct = job.type == kFloatType<T> && !call.plan.hadamard;
    const TransformAll transform =
        call.plan.hadamard ? transform_for(job.type, call.plan.hadamard) : nullptr;
    const TileCoder<Words, T> coder(call.plan.element, Tile);
    const Philox philox(call.stream);
#if EXTENSOR_LANES == 16
    const bool halves = call.plan.scale == Scale::e8m0 && (!Words || call.plan.rbits == 32);
    const HalfTileCoder<Words, T> half(halves ? call.plan.element : -1);
    TileWords words(philox, 0);
#endif
    const int64_t groups = coded_in(job, p) / Tile / VL;
    if (!groups) return 0;
    const T* x = static_cast<const T*>(job.x) + p.first * job.length + p.start * Tile;
    uint8_t* to = job.codes + p.first * call.packed + p.start * Tile * call.scaler.grid.bits / 8;
    const float tensor_scale = call.scaler.tensor_scale;
    const Grid& grid = call.scaler.grid;
    alignas(64) float apply[VL];
    alignas(64) uint32_t maxima[VL];
    TileCounts counts;

    struct Group {
        const T* values;
        vu amax;
        Scales scales;
    };
    const auto look = [&](int64_t g) __attribute__((always_inline)) {
        const T* values = x + g * VL * Tile;
        if constexpr (sizeof(T) == 4) {
            if (!direct) {
                float* mine = scratch_of<float>(Slot::padded, 2 * VL * Tile) + g % 2 * VL * Tile;
                const int64_t start = (p.start + g * VL) * Tile;
                if (transform && start + VL * Tile <= job.length)
                    transform(call.source().from(p.first * job.length + start).at, VL * Tile,
                              call.plan.signs, mine);
                else
                    prepare(call, p.first, start, VL * Tile, mine);
                values = mine;
            }
        }
        const vu amax = tile_maxima<Tile>(values);
        return Group{values, amax, call.scaler.of(amax)};
    };
    // The next group's scales first: what they wait for passes while this one's values are coded.
    Group now, next = look(0);
    for (int64_t g = 0; g < groups; ++g) {
        now = next;
        next = look(least(g + 1, groups - 1));
        const Scales& s = now.scales;
        const Piece group = {p.first, 1, p.start + g * VL, VL};
        if (!all_lanes(is_plain(s, now.amax, tensor_scale, grid))) {
            store(maxima, now.amax);
            code_any<Words, false, true>(call, group, maxima, tally);
            if (!direct) next = look(least(g + 1, groups - 1));  // whose values were overwritten
            continue;
        }
        uint8_t* codes = to + g * VL * Tile * grid.bits / 8;
        store_codes(static_cast<uint8_t*>(job.scales) + p.first * call.tiles + group.start, s.stored);
#if EXTENSOR_LANES == 16
        if constexpr (Tile == 32) {
            if (half.code && all_lanes(half.covers(s, now.amax))) {
                words.block = static_cast<uint32_t>(p.first * call.tiles + group.start);
                half.code(now.values, s, &words, codes, counts);
                continue;
            }
        }
#endif
        int64_t stride;
        const uint32_t* drawn = Words ? piece_words(call, philox, group, stride) : nullptr;
        store(apply, s.apply);
        const vu bounded = reinterpret_cast<vu>(float_of(now.amax) * s.apply < grid.limit);
        coder.code(now.values, apply, drawn, all_lanes(bounded), VL, codes, counts);
    }
    tally.saturated[0] += static_cast<int32_t>(counts.saturated);
    tally.flushed[0] += static_cast<int32_t>(counts.flushed);
    return groups * VL;
}

template <bool Words, class T>
int64_t stream(const Call& call, const Piece& p, Tally& tally) {
    return call.job.tile_length == 16 ? stream<16, Words, T>(call, p, tally)
                                      : stream<32, Words, T>(call, p, tally);
}

// As above, where the call allows it; else 0.
template <bool Words>
int64_t stream(const Call& call, const Piece& p, Tally& tally) {
    const QuantJob& job = call.job;
    const int64_t tile = job.tile_length;
    if (job.tile_rows > 1 || (tile != 16 && tile != 32)) return 0;
    if (!kElements[call.plan.element].is_float || call.plan.element_scale != 1) return 0;
    if (!call.scaler.bounded()) return 0;
    if (Words && !call.plan.stochastic) return 0;
    if (VL * tile % most(1, call.plan.hadamard) || p.start * tile % most(1, call.plan.hadamard)) return 0;
#if EXTENSOR_LANES == 16
    if (!call.plan.hadamard && job.type == FloatType::bfloat16)
        return stream<Words, bfloat16>(call, p, tally);
    if (!Words && !call.plan.hadamard && job.type == FloatType::float16)
        return stream<false, float16>(call, p, tally);
#endif
    return stream<Words, float>(call, p, tally);
}

// ---- one call ----

// Calls body(task, piece) for every piece, in parallel.
struct RowTasks {
    int64_t rows, step, tiles, parts, count;  // rows and tiles of a piece, pieces of a row

    explicit RowTasks(const Call& call) {
        const QuantJob& job = call.job;
        rows = job.outer * job.rows;
        // Enough pieces for every thread; large ones, so that memory is read in long stretches.
        const int64_t values = most(kPiece / 2, least(8 * kPiece, rows * job.coded / 16));
        step = most(1, values / job.coded);
        const int64_t unit = call.unit();
        tiles = step > 1 ? call.tiles : most(1, values / (unit * job.tile_length)) * unit;
        parts = ceil_div(call.tiles, tiles);
        count = ceil_div(rows, step) * parts;
    }

    template <class Body>
    void run(const Call& call, Body body) const {
        threads::run(count, 8 * rows * call.job.coded, [&](int64_t task) {
            const int64_t first = task / parts * step, start = task % parts * tiles;
            body(task, Piece{first, least(step, rows - first), start, least(tiles, call.tiles - start)});
        });
    }
};

// Whether the maxima of all tiles are kept, one for each row of a tile.
bool keeps_maxima(const Call& call) {
    return call.job.tile_rows > 1 || looks_inside(call.plan, call.job);
}

// The statistic of the whole array, and of all tiles where they are kept.
void survey(Call& call, const RowTasks& tasks, const Totals& totals) {
    const QuantJob& job = call.job;
    const bool values = call.plan.scale == Scale::ue4m3, kept = keeps_maxima(call);
    tasks.run(call, [&](int64_t task, const Piece& p) {
        uint32_t& finite = totals.finite[task];
        if (values && !kept && !call.plan.hadamard) {
            const int64_t count = least(p.tiles * job.tile_length, job.length - p.start * job.tile_length);
            const Source x = call.source().from(p.first * job.length + p.start * job.tile_length);
            finite = x.visit([&](const auto* at) {
                return finite_run_maximum(at, p.rows > 1 ? p.rows * job.length : count);
            });
            return;
        }
        const Values v = prepared(call, p);
        uint32_t* maxima = kept ? totals.maxima + p.first * call.tiles + p.start
                                : scratch_of<uint32_t>(Slot::maxima, p.rows * p.tiles + VL);
        piece_maxima(job, v, p, maxima);
        for (int64_t r = 0; values && r < p.rows; ++r) {
            const uint32_t top = finite_run_maximum(v.x + r * v.stride, v.coded);
            if (top > finite) finite = top;
        }
        if (!values && !kept)
            finite = finite_maximum(reinterpret_cast<float*>(maxima), p.rows * p.tiles, 1);
    });
    if (job.tile_rows > 1)
        combine(totals.maxima, job.outer, job.rows, job.tile_rows, call.tiles, call.tiles, 1);
    settle(call, totals, kept ? job.outer * job.rows * call.tiles : 0);
}

template <bool Words, bool Divide, bool Codes>
void code_row(const Call& call, Piece row, Tally& tally) {
    if constexpr (Codes && !Divide) {
        const int64_t done = stream<Words>(call, row, tally);
        row.start += done, row.tiles -= done;
    }
    if (row.tiles) code_any<Words, Divide, Codes>(call, row, nullptr, tally);
}

template <bool Words, bool Divide, bool Codes>
void run(Call& call, const RowTasks& tasks, const Totals& totals) {
    const bool kept = keeps_maxima(call);
    tasks.run(call, [&](int64_t task, const Piece& p) {
        Tally tally;
        if (kept || p.tiles < VL) {
            const uint32_t* known = totals.maxima + p.first * call.tiles + p.start;
            code_any<Words, Divide, Codes>(call, p, kept ? known : nullptr, tally);
        } else {
            for (int64_t r = 0; r < p.rows; ++r)
                code_row<Words, Divide, Codes>(call, {p.first + r, 1, p.start, p.tiles}, tally);
        }
        totals.counts[task] = count(tally);
    });
}

}  // namespace

void survey_values(const QuantJob& job, int64_t parts, uint32_t* finite) {
    const int64_t count = job.outer * job.rows * job.length * job.inner;
    const int64_t each = round_up(ceil_div(count, parts), 64);
    threads::run(parts, 2 * count, [&](int64_t part) {
        const int64_t n = least(each, count - part * each);
        if (n > 0)
            finite[part] = Source{job.x, job.type}.from(part * each).visit(
                [&](const auto* x) { return finite_run_maximum(x, n); });
    });
}

void code_row(const Call& call, int64_t row, int64_t start, int64_t tiles, Tally& tally) {
    specialize(call, [&]<bool Words, bool Divide, bool Codes>() {
        code_row<Words, Divide, Codes>(call, {row, 1, start, tiles}, tally);
    });
}

void quantize_rows(Call& call) {
    const RowTasks tasks(call);
    const int64_t kept = keeps_maxima(call) ? call.job.outer * call.job.rows * call.tiles : 0;
    const Totals totals(tasks.count, kept);
    if (needs_whole(call)) survey(call, tasks, totals);
    specialize(call, [&]<bool Words, bool Divide, bool Codes>() {
        run<Words, Divide, Codes>(call, tasks, totals);
    });
    totals.finish(call);
}

}  // namespace EXTENSOR_ISA
