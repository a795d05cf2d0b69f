// Quantizing and decoding float32 arrays, byte for byte as extensor/quant does it.
//
// Blocks run along rows (contiguous) or down columns (lanes run over columns, so no transposing
// copy is made). Work goes through a cache-sized piece at a time: Hadamard transform, block maxima,
// scales, then codes or values. Only tiles of several rows, and scales that depend on the whole
// array, need the maxima of the whole array first.
//
// Compiled without contraction: every float operation here decides bits.

#include "hadamard.hpp"
#include "philox.hpp"
#include "rounding.hpp"
#include "threads.hpp"
#include "tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

constexpr int64_t kPiece = 8192;  // floats of one piece: it and its random words fit the cache

constexpr int64_t kPast = 1 << 21;  // decoded floats that no cache holds for their reader

INLINE int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

// ---- bytes of codes ----

// The code at `index` of a packed row whose bytes lie `stride` apart.
INLINE uint32_t unpack_one(const uint8_t* row, int64_t stride, int64_t index, int bits) {
    if (bits == 8) return row[index * stride];
    if (bits == 4) return row[index / 2 * stride] >> (index % 2 * 4) & 15u;
    const uint8_t* at = row + index / 4 * 3 * stride;
    switch (index % 4) {
        case 0: return at[0] & 63u;
        case 1: return (at[0] >> 6 | at[stride] << 2) & 63u;
        case 2: return (at[stride] >> 4 | at[2 * stride] << 4) & 63u;
        default: return at[2 * stride] >> 2;
    }
}

// ---- maxima ----

INLINE vu magnitude_bits(vf v) { return bits_of(v) & kMagnitude; }

INLINE uint32_t largest_lane(vu v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(v));
#else
    uint32_t most = 0;
    for (int i = 0; i < VL; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

INLINE bool all_lanes(vu mask) {
    for (int i = 0; i < VL; ++i)
        if (mask[i] != ~0u) return false;
    return true;
}

uint32_t run_maximum(const float* x, int64_t count) {
    vu m = {};
    int64_t i = 0;
    for (; i + VL <= count; i += VL) m = larger(m, magnitude_bits(load(x + i)));
    if (i < count) m = larger(m, magnitude_bits(load_part(x + i, static_cast<int>(count - i))));
    return largest_lane(m);
}

// The largest magnitude below infinity.
uint32_t finite_maximum(const float* x, int64_t count, int64_t stride) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i * stride, 4);
        bits &= kMagnitude;
        if (bits < kExponentMask && bits > most) most = bits;
    }
    return most;
}

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE vf load_upto(const float* p, int64_t n) {
    return n >= VL ? load(p) : load_part(p, static_cast<int>(n));
}

INLINE void store_upto(float* p, vf v, int64_t n) {
    n >= VL ? store(p, v) : store_part(p, v, static_cast<int>(n));
}

// Writes n stored scales (bytes, or floats as bits).
INLINE void store_scales(void* scales, int64_t at, const uint32_t* stored, int64_t n, bool bytes) {
    if (bytes)
        for (int64_t i = 0; i < n; ++i)
            static_cast<uint8_t*>(scales)[at + i] = static_cast<uint8_t>(stored[i]);
    else
        std::memcpy(static_cast<uint32_t*>(scales) + at, stored, static_cast<size_t>(n) * 4);
}

// Everything one call shares between its tasks.
struct Call {
    const QuantPlan& plan;
    const QuantStream& stream;
    QuantJob& job;
    Scaler scaler;
    int64_t tiles;       // along `length`
    int64_t packed;      // bytes along `length`
    int64_t calls;       // Philox calls of one row of a tile
    uint32_t constant;   // the word that rounds ties away or towards zero
    uint32_t* maxima = nullptr;  // of every tile, repeated for each of its rows; null: not needed

    Call(const QuantPlan& plan, const QuantStream& stream, QuantJob& job)
        : plan(plan), stream(stream), job(job), scaler(plan),
          tiles(ceil_div(job.coded, job.tile_length)),
          packed(ceil_div(tiles * job.tile_length * scaler.grid.bits, 8)),
          calls(ceil_div(job.tile_length, plan.rbits == 8 ? 16 : 4)),
          constant(plan.ties == Ties::away ? 0x7FFFFFFFu : 0x80000000u) {}

    bool words() const { return plan.stochastic || plan.ties != Ties::even; }
    bool bytes() const { return plan.scale != Scale::float32; }
};

// ---- blocks along rows ----

struct RowPiece {
    const float* x;  // the transformed rows, or the array's own
    int64_t stride;
};

int64_t rows_of_piece(const QuantJob& job) { return most(1, kPiece / most(job.coded, 1)); }

RowPiece transformed_rows(const Call& call, int64_t first, int64_t count) {
    const QuantJob& job = call.job;
    if (!call.plan.hadamard) return {job.x + first * job.length, job.length};
    const int size = call.plan.hadamard;
    const vf scale = splat(static_cast<float>(1.0 / __builtin_sqrt(size)));
    float* out = scratch_of<float>(Slot::padded, count * job.coded + VL);
    for (int64_t r = 0; r < count; ++r) {
        const float* from = job.x + (first + r) * job.length;
        for (int64_t start = 0; start < job.coded; start += size) {
            float* to = out + r * job.coded + start;
            const int64_t real = most(0, least(size, job.length - start));
            for (int i = 0; i < size; i += VL)
                store(to + i, load_upto(from + start + i, most(0, real - i)) *
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
void quantize_rows(const Call& call, RowPiece piece, int64_t first, int64_t count,
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
        if (all_lanes(plain) && (!Words || word_stride == tile))
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
            const Scales s = {splat(apply[at]), splat(decode[at]), splat(live[at]), vu{}};
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
                             call.bytes());
        }
    }
    tally_out.saturated += tally.saturated;
    tally_out.flushed += tally.flushed;
    tally_out.saturated[0] += static_cast<int32_t>(counts.saturated);
    tally_out.flushed[0] += static_cast<int32_t>(counts.flushed);
}

// ---- blocks down columns ----

// One (outer, panel) of rows [start, start + span), `lanes` columns from j on.
struct ColumnPiece {
    const float* x;
    int64_t stride;
};

constexpr int64_t kMaxSpan = 512;

int64_t panel_span(const QuantJob& job, int hadamard) {
    int64_t span = job.tile_length;
    while (hadamard && span % hadamard) span += job.tile_length;
    return span;
}

ColumnPiece transformed_columns(const Call& call, const float* x, int64_t start, int64_t span,
                                int64_t lanes) {
    const QuantJob& job = call.job;
    const int size = call.plan.hadamard;
    if (!size) return {x + start * job.inner, job.inner};
    float* out = scratch_of<float>(Slot::padded, span * VL);
    const vf scale = splat(static_cast<float>(1.0 / __builtin_sqrt(size)));
    for (int64_t i = 0; i < span; i += size) {
        for (int64_t k = 0; k < size; ++k) {
            const int64_t row = start + i + k;
            const vf v = row < job.length ? load_upto(x + row * job.inner, lanes) : vf{};
            store(out + (i + k) * VL, v * call.plan.signs[k]);
        }
        butterfly_rows(out + i * VL, size, VL);
        for (int64_t k = 0; k < size; ++k)
            store(out + (i + k) * VL, load(out + (i + k) * VL) * scale);
    }
    return {out, VL};
}

INLINE vu column_maxima(const ColumnPiece& piece, int64_t rows, int64_t lanes) {
    vu m = {};
    for (int64_t i = 0; i < rows; ++i)
        m = larger(m, magnitude_bits(load_upto(piece.x + i * piece.stride, lanes)));
    return m;
}

template <bool Words, bool Divide, bool Codes>
void quantize_columns(const Call& call, const ColumnPiece& piece, int64_t image, int64_t tile,
                      int64_t j, int64_t lanes, vu amax, uint8_t* unpacked, Tally& tally) {
    const QuantJob& job = call.job;
    const QuantPlan& plan = call.plan;
    const Grid grid = call.scaler.grid;
    const vf element_scale = splat(plan.element_scale), tensor_scale = splat(call.scaler.tensor_scale);
    const Scales s = call.scaler.of(amax);
    const int64_t start = tile * job.tile_length, n = least(job.tile_length, job.coded - start);
    const int64_t groups = ceil_div(job.inner, job.tile_rows);

    const uint32_t base = static_cast<uint32_t>((image * call.tiles + tile) * groups);
    vu block = splat(base + static_cast<uint32_t>(j)), first_call = {};
    for (int i = 0; i < VL; ++i) block[i] += static_cast<uint32_t>(i);
    if (job.tile_rows > 1) {
        for (int i = 0; i < VL; ++i) {
            const int64_t column = j + i;
            block[i] = base + static_cast<uint32_t>(column / job.tile_rows);
            first_call[i] = static_cast<uint32_t>(column % job.tile_rows * call.calls);
        }
    }
    if constexpr (Codes) {
        uint32_t stored[VL];
        store(stored, s.stored);
        if (job.tile_rows == 1) {
            store_scales(job.scales, block[0], stored, lanes, call.bytes());
        } else {
            for (int64_t i = 0; i < lanes; ++i)
                store_scales(job.scales, block[i], stored + i, 1, call.bytes());
        }
    }
    const int64_t inner = job.inner;
    float* out = Codes ? nullptr : job.values + (image * job.coded + start) * inner + j;
    const float* x = piece.x;
    const bool random = Words && plan.stochastic, octets = plan.rbits == 8;
    Tally mine = tally;
    vu draw[4] = {}, word[4];
    for (vu& v : word) v = splat(call.constant);
    for (int64_t i = 0; i < n; i += 4) {
        if (random && !octets) {
            philox(first_call + static_cast<uint32_t>(i / 4), block, call.stream, word);
        } else if (random) {
            if (i % 16 == 0)
                philox(first_call + static_cast<uint32_t>(i / 16), block, call.stream, draw);
            for (int k = 0; k < 4; ++k)
                word[k] = (draw[i / 4 % 4] >> static_cast<uint32_t>(8 * k)) << 24 | (1u << 23);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            if (i + k >= n) break;
            vu code;
            const vf value = quantize_vector<Words, Divide, Codes>(
                load_upto(x, lanes), word[k], s, element_scale, tensor_scale, grid, mine, code);
            x += piece.stride;
            if constexpr (Codes) {
                store_codes(unpacked + (i + k) * VL, code);
            } else {
                store_upto(out, value, lanes);
                out += inner;
            }
        }
    }
    tally = mine;
    if constexpr (Codes) {
        // Pack down the columns: rows of codes, zero-padded to the block, into rows of bytes.
        const int bits = grid.bits;
        std::memset(unpacked + n * VL, 0, static_cast<size_t>((job.tile_length - n + 4) * VL));
        const int64_t bytes = ceil_div(job.tile_length * bits, 8);
        uint8_t* to = job.codes + (image * call.packed + tile * bytes) * job.inner + j;
        for (int64_t i = 0; i < bytes; ++i, to += job.inner) {
            for (int64_t k = 0; k < lanes; ++k) {
                const uint8_t* column = unpacked + k;
                uint32_t byte;
                if (bits == 8) {
                    byte = column[i * VL];
                } else if (bits == 4) {
                    byte = column[2 * i * VL] | static_cast<uint32_t>(column[(2 * i + 1) * VL]) << 4;
                } else {
                    const uint8_t* four = column + i / 3 * 4 * VL;
                    uint32_t word = 0;
                    for (int q = 0; q < 4; ++q) word |= static_cast<uint32_t>(four[q * VL]) << (6 * q);
                    byte = word >> (8 * (i % 3));
                }
                to[k] = static_cast<uint8_t>(byte);
            }
        }
    }
}

// ---- one call ----

// Calls body(piece, first row, rows) for every piece, in parallel, with a tally per task.
template <class Body>
void for_rows(const QuantJob& job, Body body) {
    const int64_t rows = job.outer * job.rows, step = rows_of_piece(job);
    threads::run(ceil_div(rows, step), 8 * rows * job.coded, [&](int64_t task) {
        const int64_t first = task * step;
        body(task, first, least(step, rows - first));
    });
}

int64_t row_tasks(const QuantJob& job) {
    return ceil_div(job.outer * job.rows, rows_of_piece(job));
}

struct Counts {
    int64_t saturated, flushed;
};

Counts count(const Tally& tally) {
    Counts c = {0, 0};
    for (int i = 0; i < VL; ++i) c.saturated += tally.saturated[i], c.flushed += tally.flushed[i];
    return c;
}

// A task is a run of panels of one image; body(task, piece, image, tile, j, lanes, rows, tally).
struct ColumnTasks {
    int64_t span, panels, per_task, per_image, count;
    ColumnTasks(const QuantJob& job, int hadamard) {
        span = panel_span(job, hadamard);
        panels = ceil_div(job.coded, span);
        per_task = most(1, kPiece / most(1, span * job.inner));
        per_image = ceil_div(panels, per_task);
        count = job.outer * per_image;
    }
};

template <class Body>
void for_columns(const Call& call, const ColumnTasks& tasks, Counts* counts, Body body) {
    const QuantJob& job = call.job;
    threads::run(tasks.count, 8 * job.outer * job.coded * job.inner, [&](int64_t task) {
        const int64_t image = task / tasks.per_image;
        const int64_t first = task % tasks.per_image * tasks.per_task;
        const int64_t last = least(first + tasks.per_task, tasks.panels);
        const float* x = job.x + image * job.length * job.inner;
        Tally tally;
        for (int64_t panel = first; panel < last; ++panel) {
            const int64_t start = panel * tasks.span, end = least(start + tasks.span, job.coded);
            for (int64_t j = 0; j < job.inner; j += VL) {
                const int64_t lanes = least(VL, job.inner - j);
                ColumnPiece piece = transformed_columns(call, x + j, start, tasks.span, lanes);
                for (int64_t row = start; row < end; row += job.tile_length) {
                    body(task, piece, image, row / job.tile_length, j, lanes,
                         least(job.tile_length, job.coded - row), tally);
                    piece.x += job.tile_length * piece.stride;
                }
            }
        }
        counts[task] = count(tally);
    });
}

// Maxima of whole tiles from those of their rows: `count` groups of `rows` runs of `width`.
void combine(uint32_t* maxima, int64_t images, int64_t rows, int64_t band, int64_t width,
             int64_t row_stride, int64_t lane_stride) {
    for (int64_t image = 0; image < images; ++image, maxima += rows * width) {
        for (int64_t r = 0; r < rows; r += band) {
            const int64_t n = least(band, rows - r);
            for (int64_t t = 0; t < width; ++t) {
                uint32_t most = 0;
                for (int64_t i = 0; i < n; ++i) {
                    const uint32_t m = maxima[(r + i) * row_stride + t * lane_stride];
                    most = m > most ? m : most;
                }
                for (int64_t i = 0; i < n; ++i)
                    maxima[(r + i) * row_stride + t * lane_stride] = most;
            }
        }
    }
}

float finite_block_maximum(const uint32_t* maxima, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i)
        if (maxima[i] < kExponentMask && maxima[i] > most) most = maxima[i];
    return as_float(most);
}

template <bool Words, bool Divide, bool Codes>
void run(Call& call) {
    QuantJob& job = call.job;
    const bool columns = job.inner != 1;
    const bool whole = job.tile_rows > 1 || call.scaler.needs_global();
    const ColumnTasks tasks(job, call.plan.hadamard);
    const int64_t parts = columns ? tasks.count : row_tasks(job);
    const int64_t width = columns ? job.inner : call.tiles;
    const int64_t runs = columns ? job.outer * call.tiles : job.outer * job.rows;

    // The caller's own scratch, in slots that no task uses: totals per task, and all maxima.
    char* shared = scratch_of<char>(Slot::partial, parts * 24 + (whole ? runs * width + VL : 0) * 4);
    Counts* counts = reinterpret_cast<Counts*>(shared);
    uint32_t* finite = reinterpret_cast<uint32_t*>(shared + parts * 16);
    uint32_t* maxima = reinterpret_cast<uint32_t*>(shared + parts * 24);
    std::memset(shared, 0, static_cast<size_t>(parts * 24));
    const bool elements = call.plan.scale == Scale::ue4m3;

    if (whole) {
        if (columns) {
            for_columns(call, tasks, counts, [&](int64_t task, const ColumnPiece& piece,
                                                 int64_t image, int64_t tile, int64_t j,
                                                 int64_t lanes, int64_t rows, Tally&) {
                const vu m = column_maxima(piece, rows, lanes);
                store_upto(reinterpret_cast<float*>(maxima + (image * call.tiles + tile) * width + j),
                           float_of(m), lanes);
                for (int64_t i = 0; elements && i < lanes; ++i) {
                    uint32_t most = m[i];
                    if (most >= kExponentMask) most = finite_maximum(piece.x + i, rows, piece.stride);
                    if (most > finite[task]) finite[task] = most;
                }
            });
            if (job.tile_rows > 1) combine(maxima, call.tiles, job.inner, job.tile_rows, 1, 1, 0);
        } else {
            for_rows(job, [&](int64_t task, int64_t first, int64_t rows) {
                RowPiece piece = transformed_rows(call, first, rows);
                uint32_t* m = maxima + first * width;
                row_maxima(call, piece, rows, m);
                for (int64_t r = 0; elements && r < rows; ++r, piece.x += piece.stride) {
                    for (int64_t t = 0; t < width; ++t, ++m) {
                        const int64_t start = t * job.tile_length;
                        const int64_t n = least(job.tile_length, job.coded - start);
                        uint32_t most = *m;
                        if (most >= kExponentMask) most = finite_maximum(piece.x + start, n, 1);
                        if (most > finite[task]) finite[task] = most;
                    }
                }
            });
            if (job.tile_rows > 1)
                combine(maxima, job.outer, job.rows, job.tile_rows, width, width, 1);
        }
        if (call.scaler.needs_global()) {
            call.scaler.set_global(elements ? as_float(finite_maximum(
                                                  reinterpret_cast<float*>(finite), parts, 1))
                                            : finite_block_maximum(maxima, runs * width));
        }
    }

    if (columns) {
        for_columns(call, tasks, counts, [&](int64_t, const ColumnPiece& piece, int64_t image,
                                             int64_t tile, int64_t j, int64_t lanes, int64_t rows,
                                             Tally& tally) {
            const vu amax =
                whole ? bits_of(load_upto(reinterpret_cast<float*>(
                                              maxima + (image * call.tiles + tile) * width + j),
                                          lanes))
                      : column_maxima(piece, rows, lanes);
            uint8_t* unpacked =
                Codes ? scratch_of<uint8_t>(Slot::offsets, (job.tile_length + 4) * VL) : nullptr;
            quantize_columns<Words, Divide, Codes>(call, piece, image, tile, j, lanes, amax,
                                                   unpacked, tally);
        });
    } else {
        for_rows(job, [&](int64_t task, int64_t first, int64_t rows) {
            Tally tally;
            const RowPiece piece = transformed_rows(call, first, rows);
            const uint32_t* m = maxima + first * width;
            if (!whole) {
                uint32_t* mine = scratch_of<uint32_t>(Slot::maxima, rows * width + VL);
                row_maxima(call, piece, rows, mine);
                m = mine;
            }
            quantize_rows<Words, Divide, Codes>(call, piece, first, rows, m, tally);
            counts[task] = count(tally);
        });
    }
    job.saturated = job.flushed = 0;
    for (int64_t task = 0; task < parts; ++task) {
        job.saturated += counts[task].saturated;
        job.flushed += counts[task].flushed;
    }
    job.tensor_scale = call.scaler.tensor_scale;
}

template <bool Words, bool Divide>
void run(Call& call) {
    call.job.codes ? run<Words, Divide, true>(call) : run<Words, Divide, false>(call);
}

void quantize(const QuantPlan& plan, const QuantStream& stream, QuantJob& job) {
    Call call(plan, stream, job);
    const bool divide = plan.scale == Scale::float32;
    if (call.words())
        divide ? run<true, true>(call) : run<true, false>(call);
    else
        divide ? run<false, true>(call) : run<false, false>(call);
}

// ---- decoding ----

float scale_value(const QuantPlan& plan, const void* scales, int64_t at, const float* ue4m3) {
    if (plan.scale == Scale::float32) return static_cast<const float*>(scales)[at];
    const uint32_t byte = static_cast<const uint8_t*>(scales)[at];
    if (plan.scale == Scale::ue4m3) return ue4m3[byte];
    return as_float(byte == 255 ? kNaN : byte == 0 ? 0x400000u : byte << 23);
}

// The value of every code of a grid.
void decode_table(const Element& e, float* table) {
    const int sign = 1 << (e.bits - 1);
    for (int code = 0; code < 1 << e.bits; ++code) {
        if (!e.is_float) {
            const int integer = code & sign ? code - 2 * sign : code;
            table[code] = static_cast<float>(integer) * power_of_two(-e.mantissa_bits);
            continue;
        }
        const int magnitude = code & (sign - 1), exponent = magnitude >> e.mantissa_bits;
        const int unit = 1 << e.mantissa_bits, mantissa = magnitude & (unit - 1);
        const float value =
            static_cast<float>(exponent ? unit + mantissa : mantissa) *
            power_of_two(e.min_exponent - e.mantissa_bits + (exponent ? exponent - 1 : 0));
        table[code] = code & sign ? -value : value;
        if (magnitude > e.max_code) {
            // Above the largest finite code: infinity (only where NaN comes later), else NaN.
            const bool infinite = magnitude == e.max_code + 1 && magnitude < e.nan_code;
            table[code] = infinite ? (code & sign ? -__builtin_inff() : __builtin_inff())
                                   : as_float(kNaN);
        }
    }
}

void dequantize(const QuantPlan& plan, const DequantJob& job) {
    const Element& e = kElements[plan.element];
    float table[256], ue4m3[256];
    decode_table(e, table);
    decode_table(kElements[kScaleElement], ue4m3);
    const int64_t tiles = ceil_div(job.length, job.tile_length);
    const int64_t packed = ceil_div(tiles * job.tile_length * e.bits, 8);
    const bool columns = job.inner != 1;
    const int64_t rows = columns ? job.outer : job.outer * job.rows;
    const int64_t bands = ceil_div(job.rows, job.tile_rows);
    const int64_t groups = ceil_div(job.inner, job.tile_rows);
    const float tensor_scale = job.tensor_scale;
    const bool past = rows * job.length * job.inner >= kPast;
    // Tasks of whole tiles down the length: independent for rows and columns alike.
    const int64_t step = most(1, kPiece / most(1, job.tile_length * job.inner));
    const int64_t parts = ceil_div(tiles, step);
    threads::run(rows * parts, 8 * rows * job.length * job.inner, [&](int64_t task) {
        const int64_t row = task / parts, first = task % parts * step;
        const int64_t last = least(first + step, tiles);
        const uint8_t* codes = job.codes + row * packed * job.inner;
        float* out = job.values + row * job.length * job.inner;
        for (int64_t t = first; t < last; ++t) {
            const int64_t end = least((t + 1) * job.tile_length, job.length);
            if (!columns) {
                const int64_t image = row / job.rows, band = row % job.rows / job.tile_rows;
                const float scale =
                    scale_value(plan, job.scales, (image * bands + band) * tiles + t, ue4m3);
                int64_t i = t * job.tile_length;
                const int64_t count = end - i;
                if (e.bits != 6 && job.tile_length % VL == 0 && count % VL == 0) {
                    if (e.bits == 4)
                        decode_tile<4>(codes, i, count, table, scale, tensor_scale, past, out + i);
                    else
                        decode_tile<8>(codes, i, count, table, scale, tensor_scale, past, out + i);
                    continue;
                }
                for (; i < end; ++i)
                    out[i] = table[unpack_one(codes, 1, i, e.bits)] * scale * tensor_scale;
                continue;
            }
            float* scales = scratch_of<float>(Slot::planes, job.inner);
            for (int64_t j = 0; j < job.inner; ++j)
                scales[j] = scale_value(plan, job.scales,
                                        (row * tiles + t) * groups + j / job.tile_rows, ue4m3);
            for (int64_t i = t * job.tile_length; i < end; ++i)
                for (int64_t j = 0; j < job.inner; ++j)
                    out[i * job.inner + j] = table[unpack_one(codes + j, job.inner, i, e.bits)] *
                                             scales[j] * tensor_scale;
        }
        if (past) finish_stores();
    });
}

}  // namespace

extern const QuantKernels quant_kernels;
const QuantKernels quant_kernels = {quantize, dequantize};

}  // namespace EXTENSOR_ISA
