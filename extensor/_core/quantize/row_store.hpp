// Stores the codes of a column tile's rows, for rowwise_columnwise.cpp.
#pragma once

#include "quantize/column_tiles.hpp"

namespace EXTENSOR_ISA {

// Rows [top, top + rows) of a column tile from column j on, zeros below them down to `depth`;
// `tiles` tiles of each row are the array's. `more`: the column tile to its right comes next.
struct TileRows {
    ColumnTile column_tile;
    int64_t image, top, rows, depth, j, tiles;
    bool more;
};

// Writes the codes of a column tile's rows 64 bytes at a time, so that whole cache lines can bypass
// the caches. The half lines of four-bit codes wait for the next column tile's.
class RowStore {
public:
    RowStore(const Call& call, const TileRows& p, const uint8_t* packed)
        : from_(packed),
          pitch_(kTileColumns * call.scaler.grid.bits / 8),
          bytes_(p.tiles * call.job.tile_length * call.scaler.grid.bits / 8),
          streamed_(is_streamed(call.job)),
          half_lines_(streamed_ && kTileColumns == 64 && pitch_ == 32),
          second_(half_lines_ && p.j / kTileColumns % 2),
          held_(nullptr) {
        if (!half_lines_) return;
        held_ = scratch_of<uint8_t>(Slot::packed_a, kMaxTileRows * pitch_);
        waiting_ = !second_ && p.more;
        if (waiting_) std::memcpy(held_, packed, static_cast<size_t>(p.depth * pitch_));
    }

    INLINE void row(int64_t r, [[maybe_unused]] uint8_t* to) const {
        const uint8_t* from = from_ + r * pitch_;
        if (waiting_) return;
        if (second_) {
            const uint8_t* before = held_ + r * pitch_;
#if EXTENSOR_LANES == 16
            if (bytes_ == 32) {
                const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(before));
                const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                store_cache_line(to - 32, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1),
                                 true);
                return;
            }
#endif
            std::memcpy(to - pitch_, before, 32);
        }
        if (bytes_ == 32) {
            std::memcpy(to, from, 32);
#if EXTENSOR_LANES == 16
        } else if (bytes_ == 64) {
            store_cache_line(to, _mm512_loadu_si512(from), streamed_);
#endif
        } else {
            std::memcpy(to, from, static_cast<size_t>(bytes_));
        }
    }

private:
    const uint8_t* from_;
    int64_t pitch_, bytes_;
    bool streamed_, half_lines_, second_, waiting_ = false;
    uint8_t* held_;
};

}  // namespace EXTENSOR_ISA
