// Rotary position embedding: pairs (a, b) of a head's vector become (a cos - b sin, b cos + a sin).
//
// The bytes that numpy gives: products are rounded before the sum.

#include "common/elementwise.hpp"
#include "nn/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

void halves(int64_t n, const float* x, const float* cos, const float* sin, float* y) {
    for (int64_t i = 0; i < n; i += VL) {
        const vf a = load_at(x, i, n), b = load_at(x + n, i, n);
        const vf c = load_at(cos, i, n), s = load_at(sin, i, n);
        store_at(y, a * c - b * s, i, n);
        store_at(y + n, b * c + a * s, i, n);
    }
}

void neighbours(int64_t n, const float* x, const float* cos, const float* sin, float* y) {
    for (int64_t i = 0; i < n; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        y[2 * i] = a * cos[i] - b * sin[i];
        y[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

void rotary(const Rotary& s) {
    const int64_t heads = s.outer * s.heads;
    threads::run(heads, heads * s.rows * s.width, [=](int64_t task) {
        const int64_t outer = task / s.heads, head = task % s.heads;
        const float* x = s.x.at + outer * s.x.outer + head * s.x.head;
        const int64_t table = outer * s.cos.outer + head * s.cos.head;
        float* y = s.y + task * s.rows * s.width;
        for (int64_t row = 0; row < s.rows; ++row, x += s.x.row, y += s.width) {
            const float* cos = s.cos.at + table + row * s.cos.row;
            const float* sin = s.sin + table + row * s.cos.row;
            (s.interleaved ? neighbours : halves)(s.half, x, cos, sin, y);
            const int64_t turned = 2 * s.half;
            if (turned < s.width)
                std::memcpy(y + turned, x + turned, static_cast<size_t>(s.width - turned) * 4);
        }
    });
}

}  // namespace

extern const RotaryKernels rotary_kernels = {rotary};

}  // namespace EXTENSOR_ISA
