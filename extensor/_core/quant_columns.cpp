// Quantizing float32 arrays in blocks down columns: lanes run over columns, so that no transposing
// copy is made.

#include "hadamard.hpp"
#include "philox.hpp"
#include "quant.hpp"
#include "tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

// One (outer, panel) of rows [start, start + span), `lanes` columns from j on.
struct ColumnPiece {
    Source x;
    int64_t stride;
};

int64_t panel_span(const QuantJob& job, int hadamard) {
    int64_t span = job.tile_length;
    while (hadamard && span % hadamard) span += job.tile_length;
    return span;
}

ColumnPiece transformed_columns(const Call& call, Source x, int64_t start, int64_t span,
                                int64_t lanes) {
    const QuantJob& job = call.job;
    const int size = call.plan.hadamard;
    if (!size) return {x.from(start * job.inner), job.inner};
    float* out = scratch_of<float>(Slot::padded, span * VL);
    const vf scale = splat(static_cast<float>(1.0 / __builtin_sqrt(size)));
    for (int64_t i = 0; i < span; i += size) {
        for (int64_t k = 0; k < size; ++k) {
            const int64_t row = start + i + k;
            const vf v = row < job.length ? x.load_upto(row * job.inner, lanes) : vf{};
            store(out + (i + k) * VL, v * call.plan.signs[k]);
        }
        butterfly_rows(out + i * VL, size, VL);
        for (int64_t k = 0; k < size; ++k)
            store(out + (i + k) * VL, load(out + (i + k) * VL) * scale);
    }
    return {{out, FloatType::float32}, VL};
}

// The largest magnitude of each column; of those below infinity alone, if `Finite`.
template <bool Finite = false>
INLINE vu column_maxima(const ColumnPiece& piece, int64_t rows, int64_t lanes) {
    vu m = {};
    for (int64_t i = 0; i < rows; ++i) {
        vu v = magnitude_bits(piece.x.load_upto(i * piece.stride, lanes));
        if constexpr (Finite) v &= reinterpret_cast<vu>(v < kExponentMask);
        m = larger(m, v);
    }
    return m;
}

template <bool Words, bool Divide, bool Codes>
void code_columns(const Call& call, const ColumnPiece& piece, int64_t image, int64_t tile,
                      int64_t j, int64_t lanes, vu amax, uint8_t* unpacked, Tally& tally) {
    const QuantJob& job = call.job;
    const QuantPlan& plan = call.plan;
    const Grid grid = call.scaler.grid;
    const vf element_scale = splat(plan.element_scale), tensor_scale = splat(call.scaler.tensor_scale);
    Scales s = call.scaler.of(amax);
    if (Divide && call.points)
        s.point = load_upto(call.points + (image * call.tiles + tile) * job.inner + j, lanes);
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
            store_scales(job.scales, block[0], stored, lanes, call.plan.scale);
        } else {
            for (int64_t i = 0; i < lanes; ++i)
                store_scales(job.scales, block[i], stored + i, 1, call.plan.scale);
        }
    }
    const int64_t inner = job.inner;
    float* out = Codes ? nullptr : job.values + (image * job.coded + start) * inner + j;
    int64_t at = 0;
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
                piece.x.load_upto(at, lanes), word[k], s, element_scale, tensor_scale, grid, mine, code);
            at += piece.stride;
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
        const Source x = call.source().from(image * job.length * job.inner);
        Tally tally;
        for (int64_t panel = first; panel < last; ++panel) {
            const int64_t start = panel * tasks.span, end = least(start + tasks.span, job.coded);
            for (int64_t j = 0; j < job.inner; j += VL) {
                const int64_t lanes = least(VL, job.inner - j);
                ColumnPiece piece = transformed_columns(call, x.from(j), start, tasks.span, lanes);
                for (int64_t row = start; row < end; row += job.tile_length) {
                    body(task, piece, image, row / job.tile_length, j, lanes,
                         least(job.tile_length, job.coded - row), tally);
                    piece.x = piece.x.from(job.tile_length * piece.stride);
                }
            }
        }
        counts[task] = count(tally);
    });
}

template <bool Words, bool Divide, bool Codes>
void run(Call& call) {
    const QuantJob& job = call.job;
    const bool whole = needs_whole(call);
    const ColumnTasks tasks(job, call.plan.hadamard);
    const int64_t width = job.inner, runs = job.outer * call.tiles;
    const Totals totals(tasks.count, whole ? runs * width : 0);
    uint32_t* const maxima = totals.maxima;

    if (whole) {
        const bool elements = call.plan.scale == Scale::ue4m3;
        for_columns(call, tasks, totals.counts, [&](int64_t task, const ColumnPiece& piece,
                                                    int64_t image, int64_t tile, int64_t j,
                                                    int64_t lanes, int64_t rows, Tally&) {
            const vu m = column_maxima(piece, rows, lanes);
            store_upto(reinterpret_cast<float*>(maxima + (image * call.tiles + tile) * width + j),
                       float_of(m), lanes);
            const vu finite = elements ? column_maxima<true>(piece, rows, lanes) : vu{};
            for (int64_t i = 0; elements && i < lanes; ++i) {
                if (finite[i] > totals.finite[task]) totals.finite[task] = finite[i];
            }
        });
        if (job.tile_rows > 1) combine(maxima, call.tiles, job.inner, job.tile_rows, 1, 1, 0);
        settle(call, totals, runs * width);
    }
    for_columns(call, tasks, totals.counts, [&](int64_t, const ColumnPiece& piece, int64_t image,
                                                int64_t tile, int64_t j, int64_t lanes,
                                                int64_t rows, Tally& tally) {
        const uint32_t* known = maxima + (image * call.tiles + tile) * width + j;
        const vu amax = whole ? bits_of(load_upto(reinterpret_cast<const float*>(known), lanes))
                              : column_maxima(piece, rows, lanes);
        uint8_t* unpacked =
            Codes ? scratch_of<uint8_t>(Slot::offsets, (job.tile_length + 4) * VL) : nullptr;
        code_columns<Words, Divide, Codes>(call, piece, image, tile, j, lanes, amax, unpacked,
                                           tally);
    });
    totals.finish(call);
}

}  // namespace

void quantize_columns(Call& call) {
    specialize(call, [&]<bool Words, bool Divide, bool Codes>() { run<Words, Divide, Codes>(call); });
}

}  // namespace EXTENSOR_ISA
