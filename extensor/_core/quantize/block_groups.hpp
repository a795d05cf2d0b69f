// Blocks of an array in groups of VL, one a lane, position by position: for scales that need more
// of a block than its largest magnitude (searched_scales.cpp, eden.cpp).
#pragma once

#include "common/lanes.hpp"
#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kWindow = 1024;  // positions of VL blocks that are kept, transposed, in the cache

// Up to VL blocks that follow one another in the array of scales.
class BlockGroup {
public:
    // `fill`: what stands where a block has no value.
    BlockGroup(const Call& call, int64_t first, uint32_t fill)
        : job_(call.job),
          columns_(job_.inner != 1),
          tiles_(call.tiles),
          fill_(as_float(fill)),
          span_(least(job_.tile_length, job_.length)),
          high_(least(job_.tile_rows, columns_ ? job_.inner : job_.rows)),
          groups_(ceil_div(columns_ ? job_.inner : job_.rows, job_.tile_rows)),
          first_(first),
          positions_(span_ * high_),
          window_(scratch_of<float>(Slot::values, least(kWindow, positions_ + VL) * VL)) {
        lanes = static_cast<int>(least(VL, blocks(call) - first));
        const int64_t minors = columns_ ? groups_ : tiles_, majors = columns_ ? tiles_ : groups_;
        const int64_t step = columns_ ? 1 : job_.tile_length;
        int64_t minor = first % minors, major = first / minors % majors;
        int64_t image = first / minors / majors;
        even_ = lanes == VL && (!columns_ || high_ == 1);
        for (int i = 0; i < lanes; ++i) {
            at_[i] = columns_ ? place(image, major, minor) : place(image, minor, major);
            even_ = even_ && at_[i].along == span_ && at_[i].across == high_ &&
                    at_[i].values == at_[0].values + i * step;
            if (++minor < minors) continue;
            minor = 0;
            if (++major == majors) major = 0, ++image;
        }
    }

    static int64_t blocks(const Call& call) {
        const QuantJob& job = call.job;
        const int64_t across = job.inner != 1 ? job.inner : job.rows;
        return job.outer * call.tiles * ceil_div(across, job.tile_rows);
    }

    int lanes;

    // How many values the block of a lane has, and its number in the array of scales.
    int64_t count(int lane) const { return at_[lane].along * at_[lane].across; }
    int64_t number(int lane) const { return first_ + lane; }

    // The blocks' words in `maxima`, which every row of a tile repeats.
    vu words(const uint32_t* maxima) const {
        vu w = {};
        for (int i = 0; i < lanes; ++i) w[i] = maxima[at_[i].word];
        return w;
    }

    template <class T, class V>
    void set_words(T* words, V w) const {
        for (int i = 0; i < lanes; ++i)
            for (int64_t r = 0; r < at_[i].across; ++r)
                words[at_[i].word + r * (columns_ ? 1 : tiles_)] = w[i];
    }

    // body(values) for every position.
    template <class Body>
    INLINE void for_positions(Body body) {
        for (int64_t start = 0; start < positions_; start += kWindow) {
            const int64_t n = least(kWindow, positions_ - start);
            if (held_ != start) fetch(start, n);
            held_ = start;
            for (int64_t i = 0; i < n; ++i) body(load(window_ + i * VL));
        }
    }

private:
    struct Place {
        const float* values;
        int64_t word, along, across;
    };

    Place place(int64_t image, int64_t tile, int64_t group) const {
        const int64_t width = columns_ ? job_.inner : job_.rows;
        const int64_t along = tile * job_.tile_length, across = group * job_.tile_rows;
        Place p;
        p.along = least(job_.tile_length, job_.length - along);
        p.across = least(job_.tile_rows, width - across);
        const float* x = static_cast<const float*>(job_.x) + image * job_.length * width;
        p.values = columns_ ? x + along * width + across : x + across * job_.length + along;
        p.word = columns_ ? (image * tiles_ + tile) * width + across
                          : (image * width + across) * tiles_ + tile;
        return p;
    }

    void fetch(int64_t start, int64_t n) {
        const int64_t step = columns_ ? job_.inner : 1, turn = columns_ ? 1 : job_.length;
        int64_t row = start / span_, k = start % span_;
        for (int64_t done = 0; done < n; ++row, k = 0) {
            const int64_t count = least(span_ - k, n - done);
            int64_t i = 0;
            float* to = window_ + done * VL;
            if (even_ && columns_) {
                for (; i < count; ++i) store(to + i * VL, load(at_[0].values + (k + i) * step));
            } else if (even_) {
                const float* from = at_[0].values + row * turn + k;
                for (; i + VL <= count; i += VL) {
                    vf v[VL];
                    for (int l = 0; l < VL; ++l) v[l] = load(from + l * job_.tile_length + i);
                    transpose(v);
                    for (int l = 0; l < VL; ++l) store(to + (i + l) * VL, v[l]);
                }
            }
            for (int l = 0; l < VL; ++l) {
                const bool there = l < lanes && row < at_[l].across;
                const int64_t real = there ? at_[l].along - k : 0;
                for (int64_t j = i; j < count; ++j)
                    to[j * VL + l] = j < real ? at_[l].values[row * turn + (k + j) * step] : fill_;
            }
            done += count;
        }
    }

    const QuantJob& job_;
    bool columns_, even_;  // even: the blocks are whole, and lie evenly in memory
    int64_t tiles_;
    float fill_;
    int64_t span_, high_, groups_, first_, positions_;
    float* window_;
    int64_t held_ = -1;
    Place at_[VL];
};

// body(group) for all blocks of an array, in parallel.
template <class Body>
void for_block_groups(const Call& call, uint32_t fill, Body body) {
    const int64_t groups = ceil_div(BlockGroup::blocks(call), VL);
    const int64_t size = call.job.tile_length * call.job.tile_rows;
    const int64_t per_task = most(1, kChunkValues / most(1, size * VL));
    threads::run(ceil_div(groups, per_task), 32 * groups * VL * size, [&](int64_t task) {
        for (int64_t g = task * per_task; g < least(groups, (task + 1) * per_task); ++g) {
            BlockGroup group(call, g * VL, fill);
            body(group);
        }
    });
}

}  // namespace EXTENSOR_ISA
