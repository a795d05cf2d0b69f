// Rebases MXFP8, as extensor/quant/rebase.py defines it: all blocks of a tile of 128 x 128 get the
// largest of their scales. Scales grow with the blocks' maxima, so the tile's largest maximum gives
// it. A value below the least normal number under it is rounded to a multiple of the least number.

#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kSide = 128;  // REBASE_TILE in extensor/quant/spec.py

template <class T>
uint32_t maximum_of(const T* x, const RebasePart& part, int64_t block, bool rowwise) {
    vu m = {};
    for (int64_t r = 0; r < part.rows; ++r)
        for (int64_t c = 0; c < part.columns; c += VL)
            m = larger(m, magnitude_bits(load_upto(x + r * part.stride + c, part.columns - c)));
    const uint32_t top = largest_lane(m);
    if (top < kExponentMask) return top;
    uint32_t found = 0;  // blocks that hold no number do not count
    const int64_t down = rowwise ? 1 : block, across = rowwise ? block : 1;
    for (int64_t r = 0; r < part.rows; r += down) {
        for (int64_t c = 0; c < part.columns; c += across) {
            uint32_t most_here = 0;
            for (int64_t i = r; i < least(r + down, part.rows); ++i)
                for (int64_t j = c; j < least(c + across, part.columns); ++j)
                    most_here = larger(splat(most_here),
                                       magnitude_bits(load_upto(x + i * part.stride + j, 1)))[0];
            if (most_here < kExponentMask && most_here > found) found = most_here;
        }
    }
    return found;
}

// The code of value(code) * 2**-shift, 256 more where that rounded the value.
uint32_t shifted_code(const Element& e, uint32_t code, uint32_t shift) {
    const uint32_t magnitude = code & 0x7Fu, unit = 1u << e.mantissa_bits;
    const uint32_t exponent = magnitude >> e.mantissa_bits;
    if (static_cast<int>(magnitude) > e.max_code) return code;
    if (exponent > shift) return code - (shift << e.mantissa_bits);
    // In units of the least number; at most 7 * 2**29.
    const uint64_t value = exponent ? static_cast<uint64_t>(unit | (magnitude & (unit - 1)))
                                          << (exponent - 1)
                                    : magnitude;
    const uint64_t one = uint64_t{1} << (shift < 40 ? shift : 40);
    const uint64_t rest = value % one;
    uint64_t steps = value / one;
    if (2 * rest > one || (2 * rest == one && steps % 2)) ++steps;
    return (code & 0x80u) | static_cast<uint32_t>(steps) | (rest ? 256u : 0u);
}

// What a tile's codes under shorter scales become; rows are made as they are needed.
class ShiftedCodes {
public:
    explicit ShiftedCodes(const Element& element) : element_(element) {}

    const uint16_t* row(uint32_t shift) {
        shift = shift < kRows ? shift : kRows - 1;
        if (!made_[shift])
            for (uint32_t code = 0; code < 256; ++code)
                codes_[shift][code] = static_cast<uint16_t>(shifted_code(element_, code, shift));
        made_[shift] = true;
        return codes_[shift];
    }

private:
    static constexpr uint32_t kRows = 40;  // binades; values are zero so far below the scale
    const Element& element_;
    bool made_[kRows] = {};
    uint16_t codes_[kRows][256];
};

// Steps in bytes of codes and scales along a matrix's blocks and across them.
struct Steps {
    int64_t value, across, scale, scale_across;
};

// Rebases `blocks` blocks of each of `lines` lines.
RebaseCounts rebase_codes(int64_t block, uint8_t* codes, uint8_t* scales, int64_t blocks,
                          int64_t lines, const Steps& steps, ShiftedCodes& table) {
    RebaseCounts counts = {};
    uint8_t common = 0;
    const auto scale_at = [&](int64_t b, int64_t line) -> uint8_t& {
        return scales[b * steps.scale + line * steps.scale_across];
    };
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t b = 0; b < blocks; ++b)
            if (scale_at(b, line) != 255 && scale_at(b, line) > common) common = scale_at(b, line);
    for (int64_t line = 0; line < lines; ++line) {
        for (int64_t b = 0; b < blocks; ++b) {
            uint8_t& scale = scale_at(b, line);
            if (scale == 255 || scale == common) continue;
            const uint16_t* shifted = table.row(common - scale);
            uint8_t* at = codes + b * block * steps.value + line * steps.across;
            for (int64_t i = 0; i < block; ++i, at += steps.value) {
                const uint32_t code = shifted[*at];
                counts.changed += code >> 8;
                counts.flushed += (code & 0x17Fu) == 256;
                *at = static_cast<uint8_t>(code);
            }
            scale = common;
        }
    }
    return counts;
}

}  // namespace

uint32_t rebase_maximum(const RebasePart& part, int64_t block, bool rowwise) {
    return Source{part.x, part.type}.visit(
        [&](const auto* x) { return maximum_of(x, part, block, rowwise); });
}

RebaseCounts rebase_values(const QuantPlan& plan, uint32_t maximum, const RebasePart& part) {
    const Scaler scaler(plan);
    const Element& e = scaler.element;
    const auto byte = static_cast<int>(scaler.of(splat(maximum)).stored[0]);
    const auto power = [](int exponent) {  // subnormal below -126
        return exponent < -126 ? as_float(0x400000u) : power_of_two(exponent);
    };
    const vf down = splat(power(127 - byte)), up = splat(power(byte - 127));
    const vf normal = splat(power_of_two(e.min_exponent));
    // The sum's last place is the least number, so the addition rounds.
    const vf anchor = splat(power_of_two(e.min_exponent - e.mantissa_bits + 23));
    vi changed = {}, flushed = {};
    for (int64_t r = 0; r < part.rows; ++r) {
        float* row = part.values + r * part.stride;
        for (int64_t c = 0; c < part.columns; c += VL) {
            const vf value = load_upto(row + c, part.columns - c);
            const vf magnitude = float_of(bits_of(value * down) & kMagnitude);
            const vf rounded = ((magnitude + anchor) - anchor) * up;
            const vf signed_ = float_of(bits_of(rounded) | (bits_of(value) & kSign));
            const vf kept = magnitude < normal ? signed_ : value;
            const vi differ = (kept != value) & (value == value);
            changed -= differ;
            flushed -= differ & (kept == 0.0f);
            store_upto(row + c, kept, part.columns - c);
        }
    }
    RebaseCounts counts = {};
    for (int i = 0; i < VL; ++i) counts.changed += changed[i], counts.flushed += flushed[i];
    return counts;
}

void rebase(const QuantPlan& plan, QuantJob& job) {
    const bool rowwise = job.inner == 1;
    const int64_t rows = rowwise ? job.rows : job.length,
                  columns = rowwise ? job.length : job.inner;
    const int64_t block = job.tile_length, blocks = ceil_div(job.length, block);
    const int64_t down = ceil_div(rows, kSide), across = ceil_div(columns, kSide);
    const int64_t tasks = job.outer * down * across;
    auto* each = scratch_of<RebaseCounts>(Slot::partial, tasks);
    threads::run(tasks, 4 * job.outer * rows * columns, [&](int64_t task) {
        const int64_t image = task / (down * across);
        const int64_t r = task / across % down * kSide, c = task % across * kSide;
        const int64_t height = least(kSide, rows - r), width = least(kSide, columns - c);
        if (job.values) {
            const int64_t at = (image * rows + r) * columns + c;
            const RebasePart part = {Source{job.x, job.type}.from(at).at,
                                     job.type,
                                     job.values + at,
                                     height,
                                     width,
                                     columns};
            each[task] = rebase_values(plan, rebase_maximum(part, block, rowwise), part);
            return;
        }
        ShiftedCodes table(kElements[plan.element]);
        const int64_t lines = rowwise ? rows : columns, coded = blocks * block;
        const Steps steps = rowwise ? Steps{1, coded, 1, blocks} : Steps{lines, 1, lines, 1};
        const int64_t first = (rowwise ? c : r) / block, line = rowwise ? r : c;
        uint8_t* codes =
            job.codes + image * coded * lines + first * block * steps.value + line * steps.across;
        uint8_t* scales = static_cast<uint8_t*>(job.scales) + image * blocks * lines +
                          first * steps.scale + line * steps.scale_across;
        each[task] = rebase_codes(block, codes, scales, ceil_div(rowwise ? width : height, block),
                                  rowwise ? height : width, steps, table);
    });
    for (int64_t i = 0; i < tasks; ++i)
        job.changed += each[i].changed, job.flushed += each[i].flushed;
}

}  // namespace EXTENSOR_ISA
