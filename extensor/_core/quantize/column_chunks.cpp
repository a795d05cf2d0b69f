// What column_chunks.hpp declares: the encoders of columns, compiled once per level.

#include "quantize/column_chunks.hpp"
#include "quantize/plain_values.hpp"

namespace EXTENSOR_ISA {
namespace {

// The index of the block that holds column j of a chunk's tile.
int64_t block_of(const Call& call, const ColumnChunk& p, int64_t j) {
    const QuantJob& job = call.job;
    return (p.image * call.tiles + p.tile) * ceil_div(job.inner, job.tile_rows) + j / job.tile_rows;
}

// Stores one scale per tile, by the chunk that holds the tile's first row and column.
inline void store_column_scales(const Call& call, const ColumnChunk& p, const Scales (&s)[4]) {
    const int64_t across = call.job.tile_rows;
    if (p.offset) return;
    uint32_t stored[kTileColumns];
    for (int k = 0; k < 4; ++k) store(stored + k * VL, s[k].stored);
    if (across == 1) {
        store_scales(call.job.scales, block_of(call, p, p.j), stored, p.lanes, call.plan.scale);
        return;
    }
    for (int64_t i = (across - p.j % across) % across; i < p.lanes; i += across)
        store_scales(call.job.scales, block_of(call, p, p.j + i), stored + i, 1, call.plan.scale);
}

// Byte `place` of each word, as a word with eight random bits.
INLINE vu random_byte(vu words, int place) {
    return (words >> static_cast<uint32_t>(8 * place)) << 24 | (1u << 23);
}

// The random words of a chunk, or the constant that has the effect of a tie rule.
RandomWords random_words(const Call& call, const ColumnChunk& p) {
    if (!call.plan.stochastic) {
        uint32_t* words = scratch_of<uint32_t>(Slot::random, kTileColumns);
        for (int i = 0; i < kTileColumns; i += VL) store(words + i, splat(call.constant));
        return {words, 0};
    }
    uint32_t* words = scratch_of<uint32_t>(Slot::random, round_up(p.rows, 16) * kTileColumns);
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
        for (int64_t i = 0; i < p.rows; i += per_call, to += per_call * kTileColumns) {
            const auto number = static_cast<uint32_t>((p.offset + i) / per_call);
            vu draw[4];
            across == 1 ? columns(number, draw) : columns(first_call + number, draw);
            for (int r = 0; r < per_call; ++r)
                store(to + r * kTileColumns,
                      per_call == 4 ? draw[r] : random_byte(draw[r / 4], r % 4));
        }
    }
    return {words, kTileColumns};
}

// Encodes any chunk on any grid.
template <bool Words, bool Divide, bool Codes>
void encode_any(const Call& call, const ColumnChunk& p, const Scales (&s)[4], RandomWords words,
                ByteRows out, LaneCounts& counted_out) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    const vf element_scale = splat(call.plan.element_scale),
             tensor_scale = splat(call.scaler.tensor_scale);
    LaneCounts counted;
    const float* column_tile = p.column_tile.widened(p.rows);
    const auto at = [&](int64_t i, int64_t k, vu& code) {
        return quantize_vector<Words, Divide, Codes>(load(column_tile + i * kTileColumns + k * VL),
                                                     Words ? words(i, static_cast<int>(k)) : vu{},
                                                     s[k], element_scale, tensor_scale, grid,
                                                     counted, code);
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
        float* to = job.values +
                    (p.image * job.padded + p.tile * job.tile_length + p.offset) * job.inner + p.j;
        for (int64_t i = 0; i < p.real; ++i, to += job.inner) {
            for (int64_t k = 0; k < p.vectors(); ++k) {
                vu code;
                store_upto(to + k * VL, at(i, k, code), p.lanes - k * VL);
            }
        }
    }
    counted_out.saturated += counted.saturated;
    counted_out.flushed += counted.flushed;
}

// Values of a chunk whose blocks hold only numbers.
template <class Round, bool Words>
void round_chunk(const Call& call, const ColumnChunk& p, const Scales (&s)[4], RandomWords words,
                 LaneCounts& counted_out) {
    const QuantJob& job = call.job;
    const Round round(call);
    LaneCounts counted = counted_out;
    const float* column_tile = p.column_tile.widened(p.rows);
    const int64_t rows = p.real, stride = job.inner;
    float* to =
        job.values + (p.image * job.padded + p.tile * job.tile_length + p.offset) * stride + p.j;
    for (int64_t k = 0; k < p.vectors(); ++k) {
        const float* x = column_tile + k * VL;
        float* out = to + k * VL;
        const auto block = round.block(s[k].apply, s[k].decode);
        const int64_t lanes = p.lanes - k * VL;
        for (int64_t i = 0; i < rows; ++i, x += kTileColumns, out += stride) {
            const vu word = Words ? words(i, static_cast<int>(k)) : vu{};
            const vf value = round(load(x), word, block, counted);
            if (lanes >= VL)
                store(out, value);
            else
                store_part(out, value, static_cast<int>(lanes));
        }
    }
    counted_out = counted;
}

void find_scales(const Call& call, const ColumnChunk& p, const vu (&amax)[4], Scales (&s)[4]) {
    for (int64_t k = 0; k < p.vectors(); ++k) {
        s[k] = call.scaler.of(amax[k]);
        if (call.points)
            s[k].point = load_upto(
                call.points + (p.image * call.tiles + p.tile) * call.job.inner + p.j + k * VL,
                p.lanes - k * VL);
    }
}

template <bool Words, bool Divide, bool Codes>
void encode_chunk(const Call& call, const ColumnChunk& p, const vu (&amax)[4],
                  const Prefetch& prefetch, LaneCounts& counted) {
    const QuantJob& job = call.job;
    const Grid& grid = call.scaler.grid;
    Scales s[4] = {};
    find_scales(call, p, amax, s);
    const RandomWords words = Words ? random_words(call, p) : RandomWords{};
    ByteRows out = {};
    if constexpr (Codes) {
        store_column_scales(call, p, s);
        const int64_t tile_bytes = ceil_div(job.tile_length * grid.bits, 8);
        const int64_t row = p.image * call.packed + p.tile * tile_bytes + p.offset * grid.bits / 8;
        out = {job.codes + row * job.inner + p.j, job.inner, p.lanes, is_streamed(job)};
    }
    if constexpr (Codes && !Divide) {
        const ColumnTileEncoder encoder = column_tile_encoder<Words>(call.plan.element);
        vu plain = splat(~0u), bounded = plain;
        for (int64_t k = 0; k < p.vectors(); ++k) {
            plain &= is_plain(s[k], amax[k], call.scaler.tensor_scale, grid);
            bounded &= reinterpret_cast<vu>(float_of(amax[k]) * s[k].apply < grid.limit);
        }
        if (encoder && call.scaler.bounded() && p.rows % group_rows(grid.bits) == 0 &&
            all_lanes(plain)) {
            const vf apply[4] = {s[0].apply, s[1].apply, s[2].apply, s[3].apply};
            EncodeCounts counts;
#if EXTENSOR_LANES == 16
            if (p.column_tile.bf16)
                Bf16ColumnTileEncoder(call.plan).code(p.column_tile.bf16, p.rows, s,
                                                      all_lanes(bounded), out, prefetch, counts);
            else
#endif
                encoder(p.column_tile.f32,
                        {p.rows, p.vectors(), call.plan.element_scale, all_lanes(bounded), words},
                        apply, out, prefetch, counts);
            counted.saturated[0] += static_cast<int32_t>(counts.saturated);
            counted.flushed[0] += static_cast<int32_t>(counts.flushed);
            return;
        }
    }
    for (int64_t i = 0; i < p.rows; ++i) prefetch.row(i);
    if constexpr (!Codes) {
        vu numbers = splat(~0u), bounded = numbers, moderate = numbers;
        for (int64_t k = 0; k < p.vectors(); ++k) {
            numbers &= s[k].live;
            const vf top = float_of(amax[k]);
            const vf largest =
                (Divide ? top / s[k].apply : top * s[k].apply) * call.plan.element_scale;
            bounded &= reinterpret_cast<vu>(Words ? largest <= grid.top : largest < grid.limit);
            moderate &= is_moderate(call.plan, amax[k], s[k].decode);
        }
        if (has_plain_values<Divide>(call) && all_lanes(numbers))
            return for_plain_values<Words, Divide>(
                call, all_lanes(bounded), all_lanes(moderate),
                [&]<class Round>() { round_chunk<Round, Words>(call, p, s, words, counted); });
    }
    encode_any<Words, Divide, Codes>(call, p, s, words, out, counted);
}

}  // namespace

EncodeColumns column_encoder(const Call& call) {
    return specialize(call, []<bool Words, bool Divide, bool Codes>() -> EncodeColumns {
        return encode_chunk<Words, Divide, Codes>;
    });
}

bool keeps_bf16([[maybe_unused]] const Call& call) {
#if EXTENSOR_LANES == 16
    return call.job.type == FloatType::bfloat16 && call.job.codes && !call.words() &&
           !divides(call.plan) && !call.plan.hadamard && call.plan.element_scale == 1 &&
           Bf16ColumnTileEncoder(call.plan).code;
#else
    return false;
#endif
}

}  // namespace EXTENSOR_ISA
