// The layer kernels: argument checks and allocation. `use` is told a level the CPU has.

#include "layer_bind.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "buffers.hpp"
#include "kernels.hpp"

namespace py = pybind11;

namespace layers {
namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Halves = py::array_t<uint16_t, py::array::c_style>;

const LayerKernels* kernels = &scalar::layer_kernels;

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

template <class Array>
std::vector<py::ssize_t> shape_of(const Array& x) {
    return {x.shape(), x.shape() + x.ndim()};
}

bool same_shape(const Floats& a, const Floats& b) { return shape_of(a) == shape_of(b); }

// A new array of x's shape that kernel(x.size(), x's data, its data) fills.
template <class Out, class In, class Kernel>
py::array_t<Out, py::array::c_style> mapped(const In& x, Kernel kernel) {
    auto y = buffers::array<Out>(shape_of(x));
    const auto* in = x.data();
    Out* out = y.mutable_data();
    {
        py::gil_scoped_release release;
        kernel(x.size(), in, out);
    }
    return y;
}

Floats relu(const Floats& x) { return mapped<float>(x, kernels->relu); }

Floats bfloat16_values(const Floats& x) { return mapped<float>(x, kernels->bfloat16_values); }

Halves to_bfloat16(const Floats& x) { return mapped<uint16_t>(x, kernels->to_bfloat16); }

Floats from_bfloat16(const Halves& x) { return mapped<float>(x, kernels->from_bfloat16); }

Floats relu_grad(const Floats& g, const Floats& y) {
    require(same_shape(g, y), "relu_grad: wanted arrays of one shape");
    const float* out = y.data();
    return mapped<float>(g, [out](int64_t n, const float* grad, float* gx) {
        kernels->relu_grad(n, grad, out, gx);
    });
}

Floats add(const Floats& a, const Floats& b) {
    require(same_shape(a, b), "add: wanted arrays of one shape");
    const float* other = b.data();
    return mapped<float>(a, [other](int64_t n, const float* one, float* y) {
        kernels->add(n, one, other, y);
    });
}

bool all_finite(const Floats& x) {
    const float* in = x.data();
    py::gil_scoped_release release;
    return kernels->all_finite(x.size(), in);
}

// The axes of images, (n, c, pixels).
struct Images {
    int64_t n, c, pixels;
    explicit Images(const Floats& x) {
        require(x.ndim() >= 2 && x.size() > 0, "wanted images (N, C, ...), and some");
        n = x.shape(0), c = x.shape(1), pixels = x.size() / (n * c);
    }
};

Floats channel_sum(const Floats& x) {
    const Images s(x);
    Floats out(s.c);
    const float* in = x.data();
    float* sums = out.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->channel_sum(s.n, s.c, s.pixels, in, sums);
    }
    return out;
}

py::tuple batch_norm(const Floats& x, const Floats& weight, const Floats& bias, float eps) {
    const Images s(x);
    require(weight.size() == s.c && bias.size() == s.c, "batch_norm: wanted a value per channel");
    Floats y = buffers::array<float>(shape_of(x)), mean(s.c), variance(s.c);
    float *out = y.mutable_data(), *m = mean.mutable_data(), *v = variance.mutable_data();
    const float *in = x.data(), *w = weight.data(), *b = bias.data();
    {
        py::gil_scoped_release release;
        kernels->batch_norm(s.n, s.c, s.pixels, in, w, b, eps, out, m, v);
    }
    return py::make_tuple(y, mean, variance);
}

py::tuple batch_norm_grad(const Floats& g, const Floats& x, const Floats& weight,
                          const Floats& mean, const Floats& variance, float eps) {
    const Images s(x);
    require(same_shape(g, x) && weight.size() == s.c && mean.size() == s.c && variance.size() == s.c,
            "batch_norm_grad: wanted arrays that go together");
    Floats gx = buffers::array<float>(shape_of(x)), gw(s.c), gb(s.c);
    float *ox = gx.mutable_data(), *ow = gw.mutable_data(), *ob = gb.mutable_data();
    const float *grad = g.data(), *in = x.data(), *w = weight.data();
    const float *m = mean.data(), *v = variance.data();
    {
        py::gil_scoped_release release;
        kernels->batch_norm_grad(s.n, s.c, s.pixels, grad, in, w, m, v, eps, ox, ow, ob);
    }
    return py::make_tuple(gx, gw, gb);
}

void sgd(Floats weight, const Floats& grad, std::optional<Floats> buffer, float lr, float momentum,
         float decay, bool nesterov) {
    const int64_t n = weight.size();
    require(grad.size() == n && (!buffer || buffer->size() == n), "sgd: wanted arrays of one length");
    float *w = weight.mutable_data(), *b = buffer ? buffer->mutable_data() : nullptr;
    const float* d = grad.data();
    py::gil_scoped_release release;
    kernels->sgd(n, w, d, b, lr, momentum, decay, nesterov);
}

}  // namespace

void use(const std::string& level) {
    kernels = &scalar::layer_kernels;
#if defined(EXTENSOR_X86)
    if (level == "avx2") kernels = &avx2::layer_kernels;
    if (level == "avx512") kernels = &avx512::layer_kernels;
#endif
}

void bind(py::module_& m) {
    m.def("relu", relu);
    m.def("relu_grad", relu_grad);
    m.def("add", add);
    m.def("bfloat16_values", bfloat16_values);
    m.def("to_bfloat16", to_bfloat16);
    m.def("from_bfloat16", from_bfloat16);
    m.def("all_finite", all_finite);
    m.def("channel_sum", channel_sum);
    m.def("batch_norm", batch_norm);
    m.def("batch_norm_grad", batch_norm_grad);
    // noconvert: written in place, so a converted copy would lose the update
    m.def("sgd", sgd, py::arg("weight").noconvert(), py::arg("grad"), py::arg("buffer").noconvert(),
          py::arg("lr"), py::arg("momentum"), py::arg("decay"), py::arg("nesterov"));
}

}  // namespace layers
