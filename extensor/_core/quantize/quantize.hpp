// One quantizer call and its totals: what rowwise.cpp, columnwise.cpp and rowwise_columnwise.cpp
// share.
#pragma once

#include "common/float_types.hpp"
#include "common/threads.hpp"
#include "quantize/scales.hpp"

namespace EXTENSOR_ISA {

using threads::scratch_of;
using threads::Slot;

// Floats of one chunk: with its random words it fits the cache.
constexpr int64_t kChunkValues = 8192;

// Writes n stored scales (bytes, or floats as bits).
INLINE void store_scales(void* scales, int64_t at, const uint32_t* stored, int64_t n, Scale kind) {
    if (is_byte(kind))
        for (int64_t i = 0; i < n; ++i)
            static_cast<uint8_t*>(scales)[at + i] = static_cast<uint8_t>(stored[i]);
    else if (kind == Scale::float16)
        for (int64_t i = 0; i < n; ++i)
            static_cast<uint16_t*>(scales)[at + i] = static_cast<uint16_t>(stored[i]);
    else
        std::memcpy(static_cast<uint32_t*>(scales) + at, stored, static_cast<size_t>(n) * 4);
}

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
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) == 0xFFFF;
#endif
    for (int i = 0; i < VL; ++i)
        if (mask[i] != ~0u) return false;
    return true;
}

// The largest magnitude below infinity.
inline uint32_t finite_maximum(const float* x, int64_t count, int64_t stride) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i * stride, 4);
        bits &= kMagnitude;
        if (bits < kExponentMask && bits > most) most = bits;
    }
    return most;
}

// Everything one call shares between its tasks.
struct Call {
    const QuantPlan& plan;
    const QuantStream& stream;
    QuantJob& job;
    Scaler scaler;
    int64_t tiles;            // along `length`
    int64_t packed;           // bytes along `length`
    int64_t calls;            // Philox calls of one row of a tile
    uint32_t constant;        // the word that rounds ties away or towards zero
    float* points = nullptr;  // of every tile as its maximum is, where the grid is offset

    Call(const QuantPlan& plan, const QuantStream& stream, QuantJob& job)
        : plan(plan),
          stream(stream),
          job(job),
          scaler(plan),
          tiles(ceil_div(job.padded, job.tile_length)),
          packed(ceil_div(tiles * job.tile_length * scaler.grid.bits, 8)),
          calls(ceil_div(job.tile_length, plan.rbits == 8 ? 16 : 4)),
          constant(plan.ties == Ties::away ? 0x7FFFFFFFu : 0x80000000u) {
        if (job.whole) scaler.set_global(as_float(*job.whole));
    }

    Source source() const { return {job.x, job.type}; }
    bool words() const { return plan.stochastic || plan.ties != Ties::even; }
    // Whether the statistic of the whole array has yet to be found.
    bool needs_global() const { return scaler.needs_global() && !job.whole; }
    // The number of a row's block in the array that random bits are counted in; tiles of one row.
    int64_t block(int64_t row, int64_t tile) const {
        return job.first_block + row * (job.pitch ? job.pitch : tiles) + tile;
    }
    // Tiles along a row that fill whole bytes and whole transforms.
    int64_t unit() const {
        int64_t n = 1;
        while (n * job.tile_length * scaler.grid.bits % 8 ||
               n * job.tile_length % most(1, plan.hadamard))
            ++n;
        return n;
    }
};

// Blocks in which no value is scaled beyond the grid's clamp, nor is Inf or NaN. All ones or zero
// in each lane.
INLINE vu in_range(const Scales& s, vu amax, const Grid& grid) {
    return reinterpret_cast<vu>(float_of(amax) * s.apply <= grid.clamp);
}

// Blocks that the encoders of blocks.hpp support: in range, and no code but zero decodes to zero.
INLINE vu is_plain(const Scales& s, vu amax, float tensor_scale, const Grid& grid) {
    const vu seen = reinterpret_cast<vu>((grid.smallest * s.decode) * tensor_scale != 0.0f);
    return in_range(s, amax, grid) & (seen | reinterpret_cast<vu>(amax == 0u));
}

// Blocks whose values, scales and what they are added to lie far within float32's normal numbers.
// At random the smallest values matter, too: no scale divides them.
INLINE vu is_moderate(const QuantPlan& plan, vu amax, vf decode) {
    const float top = plan.stochastic ? 2.0f : 0x1p60f;
    return reinterpret_cast<vu>((float_of(amax) < 0x1p60f) & (decode > 0x1p-60f) & (decode < top));
}

// The scales of `total` tiles as arrays, in the thread's scratch, from their statistics.
struct ScaleArrays {
    float *apply, *decode;
    uint32_t *live, *stored;
    // Of all tiles: is_plain, all numbers, below Grid::limit, not above the grid's top,
    // is_moderate.
    vu plain, numbers, bounded, within, moderate;

    ScaleArrays(const Call& call, const uint32_t* maxima, int64_t total);

    // Of one tile, in every lane.
    INLINE Scales at(int64_t tile) const {
        return {splat(apply[tile]), splat(decode[tile]), splat(live[tile]), vu{}};
    }
};

struct Counts {
    int64_t saturated, flushed;

    void operator+=(const Counts& more) { saturated += more.saturated, flushed += more.flushed; }
};

inline Counts count(const LaneCounts& counted) {
    Counts c = {0, 0};
    for (int i = 0; i < VL; ++i)
        c.saturated += counted.saturated[i], c.flushed += counted.flushed[i];
    return c;
}

// Totals of `parts` tasks, in a scratch slot that no task uses; and the maxima of `whole` tiles
// where a scale needs more than its own chunk (tiles of several rows, tensor scales).
struct Totals {
    int64_t parts;
    Counts* counts;
    uint32_t* finite;  // largest finite magnitudes
    uint32_t* maxima;

    Totals(int64_t parts, int64_t whole) : parts(parts) {
        char* shared = scratch_of<char>(Slot::partial, parts * 24 + (whole + VL) * 4);
        counts = reinterpret_cast<Counts*>(shared);
        finite = reinterpret_cast<uint32_t*>(shared + parts * 16);
        maxima = reinterpret_cast<uint32_t*>(shared + parts * 24);
        std::memset(shared, 0, static_cast<size_t>(parts * 24));
    }

    // Sets the statistic of the whole array: from the finite ones of `whole` maxima, or from the
    // tasks' own where tensor scales need values, or where no maxima were kept.
    void set_global(Scaler& scaler, int64_t whole) const {
        if (!scaler.needs_global()) return;
        const bool values = scaler.plan.scale == Scale::ue4m3;
        scaler.set_global(as_float(
            values || !whole ? finite_maximum(reinterpret_cast<float*>(finite), parts, 1)
                             : finite_maximum(reinterpret_cast<float*>(maxima), whole, 1)));
    }

    // Sums the counts of every `step`-th part from `first` on.
    void finish(Call& call, int64_t first = 0, int64_t step = 1) const {
        Counts sum = {0, 0};
        for (int64_t part = first; part < parts; part += step) sum += counts[part];
        call.job.saturated = sum.saturated;
        call.job.flushed = sum.flushed;
        call.job.tensor_scale = call.scaler.tensor_scale;
    }
};

// Whether the maxima of the whole array come first.
INLINE bool needs_whole(const Call& call) {
    return call.job.tile_rows > 1 || call.needs_global() ||
           needs_more_than_amax(call.plan, call.job);
}

// Maxima of whole tiles from those of their rows: `count` groups of `rows` runs of `width`.
inline void combine(uint32_t* maxima, int64_t images, int64_t rows, int64_t band, int64_t width,
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

// What body<Words, Divide, Codes>() returns, as the call needs it.
template <class Body>
auto specialize(const Call& call, Body body) {
    const auto pick = [&]<bool Words, bool Divide>() {
        return call.job.codes ? body.template operator()<Words, Divide, true>()
                              : body.template operator()<Words, Divide, false>();
    };
    const auto choose = [&]<bool Words>() {
        return divides(call.plan) ? pick.template operator()<Words, true>()
                                  : pick.template operator()<Words, false>();
    };
    return call.words() ? choose.template operator()<true>() : choose.template operator()<false>();
}

// Turns the maxima of `whole` tiles into the statistics that scales.hpp reads; see
// searched_scales.cpp.
void finish_statistics(Call& call, const Totals& totals, int64_t whole);

// The statistics of `vectors` times VL blocks, one a lane, of `count` values, by a rule that
// chooses, in the place of their largest magnitudes. Positions are `stride` floats apart, zero
// beyond a block's end.
void choose_statistics(const Call& call, const float* x, int64_t positions, int64_t stride,
                       int64_t vectors, vf count, vu* statistics);

// The same for `whole` maxima under QuantPlan::eden; see eden.cpp.
void eden_scales(const Call& call, uint32_t* maxima, int64_t whole);

// The whole array in float32 and under its Hadamard transform, for scales that need more of a block
// than its maximum. Valid until the next such call of this thread.
const float* float32_values(const QuantPlan& plan, const QuantJob& job);

// Largest finite magnitudes of an array, whatever its blocks: one for each of `parts` segments.
void finite_maxima(const QuantJob& job, int64_t parts, uint32_t* finite);

void row_maxima(const QuantPlan& plan, const RowMaxima& rows, uint32_t* maxima);

uint32_t rebase_maximum(const RebasePart& part, int64_t block, bool rowwise);
RebaseCounts rebase_values(const QuantPlan& plan, uint32_t maximum, const RebasePart& part);
// Rebases what a job has quantized, and adds to its counts.
void rebase(const QuantPlan& plan, QuantJob& job);

void quantize_rows(Call& call);

// Tiles [start, start + tiles) of one row, where no other row decides their scales.
void encode_row(const Call& call, int64_t row, int64_t start, int64_t tiles, LaneCounts& counted);

void quantize_columns(Call& call);

// Quantizes rowwise, columnwise, or both in one reading (either may be null). Returns false, and
// does nothing, where column tiles do not support the call.
bool quantize_column_tiles(Call* rowwise, Call* columnwise);

void clip_gradient(const QuantPlan& plan, QuantJob& job);
void straight_through(const ClippedRows& job);

void dequantize(const QuantPlan& plan, const DequantJob& job);
void split_outliers(const OutlierJob& job);
int64_t join_outliers(const OutlierJob& job, const float* scales);

}  // namespace EXTENSOR_ISA
