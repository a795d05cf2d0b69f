// What quantizing along rows (quant_rows.cpp) and down columns (quant_columns.cpp) share.
#pragma once

#include "floats.hpp"
#include "scales.hpp"
#include "threads.hpp"

namespace EXTENSOR_ISA {

using threads::scratch_of;
using threads::Slot;

constexpr int64_t kPiece = 8192;  // floats of one piece: it and its random words fit the cache

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
    int64_t tiles;       // along `length`
    int64_t packed;      // bytes along `length`
    int64_t calls;       // Philox calls of one row of a tile
    uint32_t constant;   // the word that rounds ties away or towards zero
    float* points = nullptr;  // of every tile as its maximum is, where the grid is offset

    Call(const QuantPlan& plan, const QuantStream& stream, QuantJob& job)
        : plan(plan), stream(stream), job(job), scaler(plan),
          tiles(ceil_div(job.coded, job.tile_length)),
          packed(ceil_div(tiles * job.tile_length * scaler.grid.bits, 8)),
          calls(ceil_div(job.tile_length, plan.rbits == 8 ? 16 : 4)),
          constant(plan.ties == Ties::away ? 0x7FFFFFFFu : 0x80000000u) {}

    Source source() const { return {job.x, job.type}; }
    bool words() const { return plan.stochastic || plan.ties != Ties::even; }
    // Tiles along a row that fill whole bytes and whole transforms.
    int64_t unit() const {
        int64_t n = 1;
        while (n * job.tile_length * scaler.grid.bits % 8 ||
               n * job.tile_length % most(1, plan.hadamard))
            ++n;
        return n;
    }
};

struct Counts {
    int64_t saturated, flushed;

    void operator+=(const Counts& more) { saturated += more.saturated, flushed += more.flushed; }
};

inline Counts count(const Tally& tally) {
    Counts c = {0, 0};
    for (int i = 0; i < VL; ++i) c.saturated += tally.saturated[i], c.flushed += tally.flushed[i];
    return c;
}

// The caller's own scratch, in a slot that no task uses: totals of `parts` tasks, and the maxima of
// `whole` tiles where a scale needs more than its own piece (tiles of several rows, tensor scales).
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

    // The statistic of the whole array: of `whole` maxima the finite ones; of the tasks' own where
    // tensor scales ask for values, or where no maxima were kept.
    void set_global(Scaler& scaler, int64_t whole) const {
        if (!scaler.needs_global()) return;
        const bool values = scaler.plan.scale == Scale::ue4m3;
        scaler.set_global(as_float(values || !whole ? finite_maximum(reinterpret_cast<float*>(finite), parts, 1)
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
    return call.job.tile_rows > 1 || call.scaler.needs_global() || looks_inside(call.plan, call.job);
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

// Calls body<Words, Divide, Codes>() as the call wants it.
template <class Body>
void specialize(const Call& call, Body body) {
    const auto pick = [&]<bool Words, bool Divide>() {
        call.job.codes ? body.template operator()<Words, Divide, true>()
                       : body.template operator()<Words, Divide, false>();
    };
    const auto choose = [&]<bool Words>() {
        divides(call.plan) ? pick.template operator()<Words, true>()
                           : pick.template operator()<Words, false>();
    };
    call.words() ? choose.template operator()<true>() : choose.template operator()<false>();
}

// From the maxima of `whole` tiles to what scales.hpp makes scales of; see inside.cpp.
void settle(Call& call, const Totals& totals, int64_t whole);

// Largest finite magnitudes of an array, whatever its blocks: one for each of `parts` stretches.
void survey_values(const QuantJob& job, int64_t parts, uint32_t* finite);

void quantize_rows(Call& call);

// Tiles [start, start + tiles) of one row, where no other row decides their scales.
void code_row(const Call& call, int64_t row, int64_t start, int64_t tiles, Tally& tally);

void quantize_columns(Call& call);

// Along rows, down columns, or both in one reading (either may be null); false, and nothing done,
// where panels do not fit what is asked.
bool quantize_panels(Call* along, Call* down);

void dequantize(const QuantPlan& plan, const DequantJob& job);
void split_outliers(const OutlierJob& job);
int64_t join_outliers(const OutlierJob& job, const float* scales);

}  // namespace EXTENSOR_ISA
