// Rows of a panel, and how their codes reach memory.
#pragma once

#include "panels.hpp"

namespace EXTENSOR_ISA {

// Rows [top, top + rows) of a panel from column j on, zeros below them down to `deep`; `tiles` tiles
// of each row are the array's. `more`: the panel to its right comes next.
struct RowPiece {
    PanelValues panel;
    int64_t image, top, rows, deep, j, tiles;
    bool more;
};

// Where the codes of a panel's rows go: 64 bytes at a time, so that whole lines can go past the
// caches. The half lines of four-bit codes wait for the next panel's.
class RowStore {
public:
    RowStore(const Call& call, const RowPiece& p, const uint8_t* packed)
        : from_(packed), pitch_(kWide * call.scaler.grid.bits / 8),
          bytes_(p.tiles * call.job.tile_length * call.scaler.grid.bits / 8),
          past_(goes_past(call.job)), halves_(past_ && kWide == 64 && pitch_ == 32),
          second_(halves_ && p.j / kWide % 2), held_(nullptr) {
        if (!halves_) return;
        held_ = scratch_of<uint8_t>(Slot::packed_a, kDeep * pitch_);
        waits_ = !second_ && p.more;
        if (waits_) std::memcpy(held_, packed, static_cast<size_t>(p.deep * pitch_));
    }

    INLINE void row(int64_t r, [[maybe_unused]] uint8_t* to) const {
        const uint8_t* from = from_ + r * pitch_;
        if (waits_) return;
        if (second_) {
            const uint8_t* before = held_ + r * pitch_;
#if EXTENSOR_LANES == 16
            if (bytes_ == 32) {
                const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(before));
                const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                store_line(to - 32, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), true);
                return;
            }
#endif
            std::memcpy(to - pitch_, before, 32);
        }
        if (bytes_ == 32) {
            std::memcpy(to, from, 32);
#if EXTENSOR_LANES == 16
        } else if (bytes_ == 64) {
            store_line(to, _mm512_loadu_si512(from), past_);
#endif
        } else {
            std::memcpy(to, from, static_cast<size_t>(bytes_));
        }
    }

private:
    const uint8_t* from_;
    int64_t pitch_, bytes_;
    bool past_, halves_, second_, waits_ = false;
    uint8_t* held_;
};

}  // namespace EXTENSOR_ISA
