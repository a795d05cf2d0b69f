// Quantizing float32 arrays in blocks along rows: contiguous memory.

#include "hadamard.hpp"
#include "philox.hpp"
#include "quant.hpp"
#include "tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

uint32_t run_maximum(const float* x, int64_t count) {
    vu m = {};
    int64_t i = 0;
    for (; i + VL <= count; i += VL) m = larger(m, magnitude_bits(load(x + i)));
    if (i < count) m = larger(m, magnitude_bits(load_part(x + i, static_cast<int>(count - i))));
    return largest_lane(m);
}

struct RowPiece {
    const float* x;  // the transformed or widened rows, or the array's own
    int64_t stride;
};

int64_t rows_of_piece(const QuantJob& job) { return most(1, kPiece / most(job.coded, 1)); }

RowPiece prepared_rows(const Call& call, int64_t first, int64_t count) {
    const QuantJob& job = call.job;
    const Source source = call.source().from(first * job.length);
    if (!call.plan.hadamard) {
        if (job.type == FloatType::float32)
            return {static_cast<const float*>(source.at), job.length};
        const int64_t n = count * job.length;
        float* out = scratch_of<float>(Slot::padded, n + VL);
        for (int64_t i = 0; i < n; i += VL) store(out + i, source.load_upto(i, n - i));
        return {out, job.length};
    }
    const int size = call.plan.hadamard;
    const vf scale = splat(static_cast<float>(1.0 / __builtin_sqrt(size)));
    float* out = scratch_of<float>(Slot::padded, count * job.coded + VL);
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t start = 0; start < job.coded; start += size) {
            float* to = out + r * job.coded + start;
            const int64_t real = most(0, least(size, job.length - start));
            for (int i = 0; i < size; i += VL)
                store(to + i, source.load_upto(r * job.length + start + i, most(0, real - i)) *
                                  load(call.plan.signs + i));
            butterfly_run(to, size);
            for (int i = 0; i < size; i += VL) store(to + i, load(to + i) * scale);
        }
    }
    return {out, job.coded};
}

void row_maxima(const Call& call, RowPiece piece, int64_t count, uint32_t* maxima) {
    const int64_t length = call.job.coded, tile = call.job.tile_length;
    const int64_t together = (tile == 16 || tile == 32) ? length / tile / VL * VL : 0;
    for (int64_t r = 0; r < count; ++r, piece.x += piece.stride) {
        if (together) {
            tile == 16 ? tile_maxima<16>(piece.x, together, maxima)
                       : tile_maxima<32>(piece.x, together, maxima);
            maxima += together;
        }
        for (int64_t t = together * tile; t < length; t += tile)
            *maxima++ = run_maximum(piece.x + t, least(tile, length - t));
    }
}

// The random words of `count` rows, one run of `stride` words per tile. Where ties are not to even,
// the words are the constant that has the same effect.
uint32_t* row_words(const Call& call, int64_t first, int64_t count, int64_t& stride) {
    const QuantJob& job = call.job;
    const int64_t total = count * call.tiles, band = job.tile_rows;
    if (!call.plan.stochastic) {
        stride = 0;
        const int64_t room = job.tile_length + VL;
        uint32_t* words = scratch_of<uint32_t>(Slot::weights, room);
        for (int64_t i = 0; i < room; ++i) words[i] = call.constant;
        return words;
    }
    const uint32_t calls = static_cast<uint32_t>(call.calls);
    const int64_t raw = 4 * call.calls, room = total * raw + 8 * VL;
    uint32_t* words = scratch_of<uint32_t>(Slot::weights, call.plan.rbits == 8 ? 5 * room : room);
    if (band == 1) {
        philox_run(words, 0, calls, static_cast<uint32_t>(first * call.tiles), total, call.stream);
    } else {
        const int64_t bands = ceil_div(job.rows, band);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t row = (first + r) % job.rows, image = (first + r) / job.rows;
            philox_run(words + r * call.tiles * raw, static_cast<uint32_t>(row % band) * calls, calls,
                       static_cast<uint32_t>((image * bands + row / band) * call.tiles), call.tiles,
                       call.stream);
        }
    }
    stride = raw;
    if (call.plan.rbits == 32) return words;
    // Spread each octet to a word of its own.
    stride = 4 * raw;
    uint32_t* spread = words + room;
    const auto* octets = reinterpret_cast<const uint8_t*>(words);
    for (int64_t i = 0; i < total * stride; ++i)
        spread[i] = static_cast<uint32_t>(octets[i]) << 24 | 1u << 23;
    return spread;
}

template <bool Words, bool Divide, bool Codes>
void code_rows(const Call& call, RowPiece piece, int64_t first, int64_t count,
                   const uint32_t* maxima, Tally& tally_out) {
    const QuantJob& job = call.job;
    const int64_t tiles = call.tiles, tile = job.tile_length, total = count * tiles;
    const int64_t coded = job.coded, padded = tiles * tile;
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
    // Whether all blocks hold numbers, and no code but zero decodes to zero.
    vu plain = splat(~0u);
    for (int64_t i = 0; i < total; i += VL) {
        const vf amax = load_upto(reinterpret_cast<const float*>(maxima) + i, total - i);
        const Scales s = call.scaler.of(bits_of(amax));
        const vf least_value = (grid.smallest * s.decode) * tensor_scale;
        plain &= s.live & (reinterpret_cast<vu>(least_value != 0.0f) |
                           reinterpret_cast<vu>(amax == 0.0f));
        store(apply + i, s.apply);
        store(decode + i, s.decode);
        store(live + i, s.live);
        store(stored + i, s.stored);
    }
    int64_t word_stride = 0;
    const uint32_t* words = Words ? row_words(call, first, count, word_stride) : nullptr;
    uint8_t* unpacked = Codes ? scratch_of<uint8_t>(Slot::offsets, padded + 4 * VL) : nullptr;
    // Whole tiles that are coded together; the loop below does the rest of each row.
    TileCoder coder = nullptr;
    if constexpr (Codes && !Divide)
        if (all_lanes(plain) && (!Words || word_stride == tile) && grid.zeros == Zeros::kept)
            coder = tile_coder<Words>(call.plan.element, tile);
    const int64_t together = coder ? coded / kQuad * kQuad / tile : 0, done = together * tile;
    TileCounts counts;

    for (int64_t r = 0, at = 0; r < count; ++r) {
        const float* x = piece.x + r * piece.stride;
        float* out = Codes ? nullptr : job.values + (first + r) * coded;
        uint8_t* codes = unpacked;
        if (together) {
            coder(x, apply + at, words + at * word_stride, call.plan.element_scale, together,
                  job.codes + (first + r) * call.packed, counts);
            at += together;
            x += done;
        }
        for (int64_t left = coded - done; left > 0; left -= tile, ++at) {
            const int64_t n = least(tile, left), whole = n / VL * VL;
            Scales s = {splat(apply[at]), splat(decode[at]), splat(live[at]), vu{}};
            if (Divide && call.points) s.point = splat(call.points[first * tiles + at]);
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
            std::memset(unpacked + coded - done, 0, static_cast<size_t>(padded - coded + VL));
            pack_row(unpacked, padded - done, grid.bits,
                     job.codes + (first + r) * call.packed + done * grid.bits / 8);
            const int64_t row = (first + r) % job.rows, image = (first + r) / job.rows;
            const int64_t band = row / job.tile_rows, bands = ceil_div(job.rows, job.tile_rows);
            if (row % job.tile_rows == 0)
                store_scales(job.scales, (image * bands + band) * tiles, stored + r * tiles, tiles,
                             call.plan.scale);
        }
    }
    tally_out.saturated += tally.saturated;
    tally_out.flushed += tally.flushed;
    tally_out.saturated[0] += static_cast<int32_t>(counts.saturated);
    tally_out.flushed[0] += static_cast<int32_t>(counts.flushed);
}

// Calls body(piece, first row, rows) for every piece, in parallel, with a tally per task.
template <class Body>
void for_rows(const QuantJob& job, Body body) {
    const int64_t rows = job.outer * job.rows, step = rows_of_piece(job);
    threads::run(ceil_div(rows, step), 8 * rows * job.coded, [&](int64_t task) {
        const int64_t first = task * step;
        body(task, first, least(step, rows - first));
    });
}

template <bool Words, bool Divide, bool Codes>
void run(Call& call) {
    const QuantJob& job = call.job;
    const bool whole = needs_whole(call);
    const int64_t width = call.tiles, runs = job.outer * job.rows;
    const Totals totals(ceil_div(runs, rows_of_piece(job)), whole ? runs * width : 0);
    uint32_t* const maxima = totals.maxima;

    if (whole) {
        const bool elements = call.plan.scale == Scale::ue4m3;
        for_rows(job, [&](int64_t task, int64_t first, int64_t rows) {
            RowPiece piece = prepared_rows(call, first, rows);
            uint32_t* m = maxima + first * width;
            row_maxima(call, piece, rows, m);
            for (int64_t r = 0; elements && r < rows; ++r, piece.x += piece.stride) {
                for (int64_t t = 0; t < width; ++t, ++m) {
                    const int64_t start = t * job.tile_length;
                    const int64_t n = least(job.tile_length, job.coded - start);
                    uint32_t most = *m;
                    if (most >= kExponentMask) most = finite_maximum(piece.x + start, n, 1);
                    if (most > totals.finite[task]) totals.finite[task] = most;
                }
            }
        });
        if (job.tile_rows > 1) combine(maxima, job.outer, job.rows, job.tile_rows, width, width, 1);
        settle(call, totals, runs * width);
    }
    for_rows(job, [&](int64_t task, int64_t first, int64_t rows) {
        Tally tally;
        const RowPiece piece = prepared_rows(call, first, rows);
        const uint32_t* m = maxima + first * width;
        if (!whole) {
            uint32_t* mine = scratch_of<uint32_t>(Slot::maxima, rows * width + VL);
            row_maxima(call, piece, rows, mine);
            m = mine;
        }
        code_rows<Words, Divide, Codes>(call, piece, first, rows, m, tally);
        totals.counts[task] = count(tally);
    });
    totals.finish(call);
}

}  // namespace

void quantize_rows(Call& call) {
    specialize(call, [&]<bool Words, bool Divide, bool Codes>() { run<Words, Divide, Codes>(call); });
}

}  // namespace EXTENSOR_ISA
