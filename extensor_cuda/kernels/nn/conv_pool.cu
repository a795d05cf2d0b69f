// Max pooling of float32 images, its gradient, and the fold of convolution patches to an image. No
// macros; compiled with --fmad=false.
//
// A thread has one value of the result and visits its windows in order, so that sums have the bits
// of extensor/backends/generic/conv_pool.py.

#include "common/types.cuh"

constexpr int kThreads = 256;

// Heights and widths of the image, the windows' grid and a window; its stride, padding and
// dilation.
#define NN_WINDOW_PARAMETERS                                                                  \
    int high, int wide, int out_high, int out_wide, int kernel_y, int kernel_x, int stride_y, \
        int stride_x, int pad_y, int pad_x, int step_y, int step_x

DEVICE bool is_nan(float v) { return v != v; }

// The maxima of (planes, high, wide) and their positions: a NaN wins, otherwise the first maximum.
extern "C" __global__ void __launch_bounds__(kThreads) max_pool(const float* __restrict__ x,
    float* __restrict__ out, int* __restrict__ index, NN_WINDOW_PARAMETERS, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= count) return;
    const int ox = static_cast<int>(at % out_wide), oy = static_cast<int>(at / out_wide % out_high);
    const float* plane = x + at / out_wide / out_high * high * wide;
    float best = 0;
    int where = -1;
    for (int i = 0; i < kernel_y; ++i)
        for (int j = 0; j < kernel_x; ++j) {
            const int y = oy * stride_y - pad_y + i * step_y;
            const int column = ox * stride_x - pad_x + j * step_x;
            if (y < 0 || y >= high || column < 0 || column >= wide) continue;
            const float v = plane[static_cast<i64>(y) * wide + column];
            if (where < 0 || v > best || (is_nan(v) && !is_nan(best)))
                best = v, where = y * wide + column;
        }
    out[at] = best;
    index[at] = where;
}

// For each position of an image, the sum of g (planes, out_high, out_wide) over the windows whose
// maximum it was.
extern "C" __global__ void __launch_bounds__(kThreads) max_pool_grad(const float* __restrict__ g,
    const int* __restrict__ index, float* __restrict__ out, NN_WINDOW_PARAMETERS, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= count) return;
    const int column = static_cast<int>(at % wide), y = static_cast<int>(at / wide % high);
    const i64 plane = at / wide / high * out_high * out_wide;
    float sum = 0;
    for (int i = kernel_y - 1; i >= 0; --i)  // the first window comes first
        for (int j = kernel_x - 1; j >= 0; --j) {
            const int up = y + pad_y - i * step_y, left = column + pad_x - j * step_x;
            if (up < 0 || left < 0 || up % stride_y || left % stride_x) continue;
            const int oy = up / stride_y, ox = left / stride_x;
            if (oy >= out_high || ox >= out_wide) continue;
            const i64 window = plane + static_cast<i64>(oy) * out_wide + ox;
            if (index[window] == y * wide + column) sum = __fadd_rn(sum, g[window]);
        }
    out[at] = sum;
}

// Adds patches (planes, kernel_y, kernel_x, out_high, out_wide) to (planes, high, wide).
extern "C" __global__ void __launch_bounds__(kThreads) fold(
    const float* __restrict__ patches, float* __restrict__ out, NN_WINDOW_PARAMETERS, i64 count) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= count) return;
    const int column = static_cast<int>(at % wide), y = static_cast<int>(at / wide % high);
    const i64 plane = at / wide / high;
    float sum = 0;
    for (int i = 0; i < kernel_y; ++i)
        for (int j = 0; j < kernel_x; ++j) {
            const int up = y + pad_y - i * step_y, left = column + pad_x - j * step_x;
            if (up < 0 || left < 0 || up % stride_y || left % stride_x) continue;
            const int oy = up / stride_y, ox = left / stride_x;
            if (oy >= out_high || ox >= out_wide) continue;
            const i64 tap = (plane * kernel_y + i) * kernel_x + j;
            sum = __fadd_rn(sum, patches[(tap * out_high + oy) * out_wide + ox]);
        }
    out[at] = sum;
}
