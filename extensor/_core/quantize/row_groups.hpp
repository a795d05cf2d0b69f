// Tiles of 16 or 32 values of a row, VL at a time, for the streaming loops of rowwise.cpp.
#pragma once

#include "quantize/row_chunks.hpp"

namespace EXTENSOR_ISA {

// The first tiles of a chunk of one row, in whole groups of VL. `T` is the array's type, or float
// where values have to be prepared.
template <int Tile, class T>
struct Groups {
    const Call& call;
    const RowChunk& p;
    const int64_t count;
    const TransformAll transform;
    const T* x;  // null where values have to be prepared

    Groups(const Call& call, const RowChunk& p)
        : call(call),
          p(p),
          count(values_in(call.job, p) / Tile / VL),
          transform(call.plan.hadamard ? transform_for(call.job.type, call.plan.hadamard)
                                       : nullptr),
          x(call.job.type == kFloatType<T> && !transform
                ? static_cast<const T*>(call.job.x) + p.first * call.job.length + p.start * Tile
                : nullptr) {}

    INLINE int64_t start(int64_t g) const { return p.start + g * VL; }
    INLINE RowChunk chunk(int64_t g) const { return {p.first, 1, start(g), VL}; }
    INLINE uint8_t* codes(int64_t g) const {
        return call.job.codes + p.first * call.packed + start(g) * Tile * call.scaler.grid.bits / 8;
    }
    INLINE uint8_t* scales(int64_t g) const {
        return static_cast<uint8_t*>(call.job.scales) + p.first * call.tiles + start(g);
    }
    // Those of two groups that follow one another live at the same time.
    INLINE const T* values(int64_t g) const {
        if (sizeof(T) == 2 || x) return x + g * VL * Tile;
        return prepared(g);
    }
    const T* prepared([[maybe_unused]] int64_t g) const {
        if constexpr (sizeof(T) == 4) {
            float* mine = scratch_of<float>(Slot::prepared, 2 * VL * Tile) + g % 2 * VL * Tile;
            const int64_t at = start(g) * Tile, length = call.job.length;
            if (transform && at + VL * Tile <= length)
                transform(call.source().from(p.first * length + at).at, VL * Tile, call.plan.signs,
                          mine);
            else
                prepare(call, p.first, at, VL * Tile, mine);
            return mine;
        }
        return nullptr;
    }
    // What the scales follow from.
    INLINE vu statistic(const T* values, vu amax) const {
        if constexpr (sizeof(T) == 4)
            if (chooses(call.plan)) return choose_whole(call, values, amax);
        return amax;
    }
    void mask(int64_t g, const T* values, vf scales) const {
        uint8_t* to = mask_of(call.job, p.first, start(g) * Tile);
#if EXTENSOR_LANES == 16
        if constexpr (!std::is_same_v<T, float16>) {
            const float top = call.scaler.grid.top, tensor_scale = call.scaler.tensor_scale;
            alignas(64) float limits[VL];
            store(limits, splat(top) * scales * splat(tensor_scale));
            return store_group_mask<Tile>(values, limits, to);
        }
#endif
        alignas(64) float decode[VL];
        store(decode, scales);
        store_mask(call, values, VL * Tile, decode, to);
    }
};

}  // namespace EXTENSOR_ISA
