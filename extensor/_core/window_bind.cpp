// The window kernels: argument checks and allocation. `use` is told a level the CPU has.

#include "window_bind.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "buffers.hpp"
#include "kernels.hpp"

namespace py = pybind11;

namespace windows {
namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Ints = py::array_t<int32_t, py::array::c_style>;
using Pair = std::array<int64_t, 2>;

struct Kernels {
    const ConvKernels* conv;
    const PoolKernels* pool;
    const QuantConvKernels* quantized;
};

Kernels kernels = {&scalar::conv_kernels, &scalar::pool_kernels, &scalar::quant_conv_kernels};

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

Conv geometry(const Pair& kernel, const Pair& stride, const Pair& padding, const Pair& dilation) {
    Conv s{};
    s.kh = kernel[0], s.kw = kernel[1], s.sh = stride[0], s.sw = stride[1];
    s.ph = padding[0], s.pw = padding[1], s.dh = dilation[0], s.dw = dilation[1];
    s.groups = 1;
    require(s.kh > 0 && s.kw > 0 && s.sh > 0 && s.sw > 0 && s.dh > 0 && s.dw > 0 && s.ph >= 0 &&
                s.pw >= 0,
            "window: wanted a positive kernel, stride and dilation and no negative padding");
    return s;
}

void set_input(Conv& s, int64_t n, int64_t c, int64_t h, int64_t w) {
    s.n = n, s.c = c, s.h = h, s.w = w;
    const int64_t rows = h + 2 * s.ph - s.dh * (s.kh - 1) - 1;
    const int64_t columns = w + 2 * s.pw - s.dw * (s.kw - 1) - 1;
    require(rows >= 0 && columns >= 0, "window: it does not fit the image");
    s.ho = rows / s.sh + 1, s.wo = columns / s.sw + 1;
}

Conv of_input(const Floats& x, Conv s) {
    require(x.ndim() == 4, "wanted an array of (N, C, H, W)");
    set_input(s, x.shape(0), x.shape(1), x.shape(2), x.shape(3));
    return s;
}

Conv of_shape(const std::array<int64_t, 4>& shape, Conv s) {
    set_input(s, shape[0], shape[1], shape[2], shape[3]);
    return s;
}

void set_weights(Conv& s, int64_t o, int64_t c, int64_t kh, int64_t kw, int64_t groups) {
    require(groups > 0 && s.c % groups == 0 && o % groups == 0 && c == s.c / groups && kh == s.kh &&
                kw == s.kw,
            "conv2d: the weights do not fit the input, the window and the groups");
    s.o = o, s.groups = groups;
}

void require_output(const Conv& s, const Floats& g, int64_t channels) {
    require(g.ndim() == 4 && g.shape(0) == s.n && g.shape(1) == channels && g.shape(2) == s.ho &&
                g.shape(3) == s.wo,
            "the gradient does not have the output's shape");
}

Floats conv2d(const Floats& x, const Floats& w, const Pair& stride, const Pair& padding,
              const Pair& dilation, int64_t groups, const std::optional<Floats>& bias) {
    require(w.ndim() == 4, "conv2d: wanted weights of (O, C / groups, kh, kw)");
    Conv s = of_input(x, geometry({w.shape(2), w.shape(3)}, stride, padding, dilation));
    set_weights(s, w.shape(0), w.shape(1), w.shape(2), w.shape(3), groups);
    Floats y = buffers::array<float>({s.n, s.o, s.ho, s.wo});
    require(!bias || bias->size() == s.o, "conv2d: wanted one bias per output channel");
    const float *in = x.data(), *weights = w.data(), *starts = bias ? bias->data() : nullptr;
    float* out = y.mutable_data();
    py::gil_scoped_release release;
    kernels.conv->conv(s, in, weights, starts, out);
    return y;
}

Floats conv2d_grad_x(const Floats& g, const Floats& w, const std::array<int64_t, 4>& shape,
                     const Pair& stride, const Pair& padding, const Pair& dilation,
                     int64_t groups) {
    require(w.ndim() == 4, "conv2d_grad_x: wanted weights of (O, C / groups, kh, kw)");
    Conv s = of_shape(shape, geometry({w.shape(2), w.shape(3)}, stride, padding, dilation));
    set_weights(s, w.shape(0), w.shape(1), w.shape(2), w.shape(3), groups);
    require_output(s, g, s.o);
    Floats gx = buffers::array<float>({s.n, s.c, s.h, s.w});
    const float *in = g.data(), *weights = w.data();
    float* out = gx.mutable_data();
    py::gil_scoped_release release;
    kernels.conv->grad_x(s, in, weights, out);
    return gx;
}

Floats conv2d_grad_w(const Floats& g, const Floats& x, const std::array<int64_t, 4>& shape,
                     const Pair& stride, const Pair& padding, const Pair& dilation,
                     int64_t groups) {
    Conv s = of_input(x, geometry({shape[2], shape[3]}, stride, padding, dilation));
    set_weights(s, shape[0], shape[1], shape[2], shape[3], groups);
    require_output(s, g, s.o);
    Floats gw = buffers::array<float>({shape[0], shape[1], shape[2], shape[3]});
    const float *grad = g.data(), *in = x.data();
    float* out = gw.mutable_data();
    py::gil_scoped_release release;
    kernels.conv->grad_w(s, grad, in, out);
    return gw;
}

py::tuple max_pool2d(const Floats& x, const Pair& kernel, const Pair& stride, const Pair& padding,
                     const Pair& dilation) {
    const Conv s = of_input(x, geometry(kernel, stride, padding, dilation));
    require(s.h * s.w <= INT32_MAX, "max_pool2d: wanted images of fewer than 2**31 pixels");
    Floats y = buffers::array<float>({s.n, s.c, s.ho, s.wo});
    Ints index = buffers::array<int32_t>({s.n, s.c, s.ho, s.wo});
    const float* in = x.data();
    float* out = y.mutable_data();
    int32_t* where = index.mutable_data();
    {
        py::gil_scoped_release release;
        kernels.pool->max_pool(s, in, out, where);
    }
    return py::make_tuple(y, index);
}

Floats max_pool2d_grad(const Floats& g, const Ints& index, const std::array<int64_t, 4>& shape) {
    require(g.ndim() == 4 && index.ndim() == 4 && g.shape(0) == shape[0] && g.shape(1) == shape[1],
            "max_pool2d_grad: wanted g and index of (N, C, Ho, Wo)");
    for (int i = 0; i < 4; ++i)
        require(g.shape(i) == index.shape(i), "max_pool2d_grad: g and index differ in shape");
    Conv s{};
    s.n = shape[0], s.c = shape[1], s.h = shape[2], s.w = shape[3];
    s.ho = g.shape(2), s.wo = g.shape(3);
    Floats gx = buffers::array<float>({s.n, s.c, s.h, s.w});
    const float* grad = g.data();
    const int32_t* where = index.data();
    float* out = gx.mutable_data();
    bool inside;
    {
        py::gil_scoped_release release;
        inside = kernels.pool->max_pool_grad(s, grad, where, out);
    }
    require(inside, "max_pool2d_grad: an index lies outside the image");
    return gx;
}

// Where the quantizer's blocks of `tile_length` run down (forward) or along the matrix of patches.
py::tuple operand_conv2d(const QuantPlan& plan, int64_t tile_length, const Floats& x,
                         const Floats& w, const std::array<int64_t, 4>& shape, const Pair& stride,
                         const Pair& padding, const Pair& dilation, int64_t groups,
                         const std::optional<Floats>& bias) {
    Conv s = of_input(x, geometry({shape[2], shape[3]}, stride, padding, dilation));
    set_weights(s, shape[0], shape[1], shape[2], shape[3], groups);
    require(w.size() == s.o * shape[1] * s.kh * s.kw && tile_length > 0 && !plan.stochastic &&
                !plan.hadamard && (!bias || bias->size() == s.o),
            "operand_conv2d: wanted weights, blocks and bias that go together");
    Floats y = buffers::array<float>({s.n, s.o, s.ho, s.wo});
    const float *in = x.data(), *weights = w.data(), *starts = bias ? bias->data() : nullptr;
    float* out = y.mutable_data();
    int64_t counts[2];
    {
        py::gil_scoped_release release;
        kernels.quantized->conv(s, plan, tile_length, in, weights, starts, out, counts);
    }
    return py::make_tuple(y, counts[0], counts[1]);
}

py::tuple operand_conv2d_grad_w(const QuantPlan& plan, int64_t tile_length, const Floats& g,
                                const Floats& x, const std::array<int64_t, 4>& shape,
                                const Pair& stride, const Pair& padding, const Pair& dilation,
                                int64_t groups) {
    Conv s = of_input(x, geometry({shape[2], shape[3]}, stride, padding, dilation));
    set_weights(s, shape[0], shape[1], shape[2], shape[3], groups);
    require(g.size() == s.o * s.n * s.ho * s.wo && tile_length > 0 && !plan.stochastic &&
                !plan.hadamard,
            "operand_conv2d_grad_w: wanted a gradient and blocks that go together");
    Floats gw = buffers::array<float>({shape[0], shape[1], shape[2], shape[3]});
    const float *grad = g.data(), *in = x.data();
    float* out = gw.mutable_data();
    int64_t counts[2];
    {
        py::gil_scoped_release release;
        kernels.quantized->grad_w(s, plan, tile_length, grad, in, out, counts);
    }
    return py::make_tuple(gw, counts[0], counts[1]);
}

}  // namespace

void use(const std::string& level) {
    kernels = {&scalar::conv_kernels, &scalar::pool_kernels, &scalar::quant_conv_kernels};
#if defined(EXTENSOR_X86)
    if (level == "avx2") kernels = {&avx2::conv_kernels, &avx2::pool_kernels, &avx2::quant_conv_kernels};
    if (level == "avx512")
        kernels = {&avx512::conv_kernels, &avx512::pool_kernels, &avx512::quant_conv_kernels};
#endif
}

void bind(py::module_& m) {
    m.def("conv2d", conv2d);
    m.def("conv2d_grad_x", conv2d_grad_x);
    m.def("conv2d_grad_w", conv2d_grad_w);
    m.def("max_pool2d", max_pool2d);
    m.def("max_pool2d_grad", max_pool2d_grad);
    m.def("operand_conv2d", operand_conv2d);
    m.def("operand_conv2d_grad_w", operand_conv2d_grad_w);
}

}  // namespace windows
