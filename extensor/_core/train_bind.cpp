// The training kernels: argument checks and allocation. `use` is told a level the CPU has.

#include "train_bind.hpp"

#include <pybind11/numpy.h>

#include <vector>

#include "buffers.hpp"
#include "kernels.hpp"

namespace py = pybind11;

namespace train {
namespace {

using Floats = py::array_t<float, py::array::c_style>;

const TrainKernels* kernels = &scalar::train_kernels;

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

bool same_shape(const Floats& a, const Floats& b) {
    if (a.ndim() != b.ndim()) return false;
    for (py::ssize_t i = 0; i < a.ndim(); ++i)
        if (a.shape(i) != b.shape(i)) return false;
    return true;
}

Floats like(const Floats& x) {
    return buffers::array<float>({x.shape(), x.shape() + x.ndim()});
}

// Rows of length n, which the last axes must come to.
int64_t rows_of(const Floats& x, int64_t n) {
    require(x.size() > 0 && n > 0 && x.size() % n == 0, "wanted whole rows, and some");
    return x.size() / n;
}

py::tuple gelu(const Floats& x) {
    Floats y = like(x), phi = like(x);
    const float* in = x.data();
    float *out = y.mutable_data(), *density = phi.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->gelu(x.size(), in, out, density);
    }
    return py::make_tuple(y, phi);
}

Floats gelu_grad(const Floats& g, const Floats& x, const Floats& phi) {
    require(same_shape(g, x) && same_shape(x, phi), "gelu_grad: wanted arrays of one shape");
    Floats gx = like(x);
    float* out = gx.mutable_data();
    py::gil_scoped_release release;
    kernels->gelu_grad(x.size(), g.data(), x.data(), phi.data(), out);
    return gx;
}

Floats softmax(const Floats& x, int64_t n) {
    const int64_t rows = rows_of(x, n);
    Floats y = like(x);
    float* out = y.mutable_data();
    py::gil_scoped_release release;
    kernels->softmax(rows, n, x.data(), out);
    return y;
}

Floats softmax_grad(const Floats& g, const Floats& y, int64_t n) {
    require(same_shape(g, y), "softmax_grad: wanted arrays of one shape");
    const int64_t rows = rows_of(y, n);
    Floats gx = like(y);
    float* out = gx.mutable_data();
    py::gil_scoped_release release;
    kernels->softmax_grad(rows, n, g.data(), y.data(), out);
    return gx;
}

py::tuple layer_norm(const Floats& x, const Floats& weight, const Floats& bias, float eps) {
    const int64_t n = weight.size(), rows = rows_of(x, n);
    require(bias.size() == n, "layer_norm: wanted a bias as long as the weight");
    Floats y = like(x), mean(rows), rstd(rows);
    float *out = y.mutable_data(), *m = mean.mutable_data(), *r = rstd.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->norm(rows, n, x.data(), weight.data(), bias.data(), eps, out, m, r);
    }
    return py::make_tuple(y, mean, rstd);
}

py::tuple rms_norm(const Floats& x, const Floats& weight, float eps) {
    const int64_t n = weight.size(), rows = rows_of(x, n);
    Floats y = like(x), rstd(rows);
    float *out = y.mutable_data(), *r = rstd.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->norm(rows, n, x.data(), weight.data(), nullptr, eps, out, nullptr, r);
    }
    return py::make_tuple(y, rstd);
}

// Gradients in x, weight and bias; `mean` is None for an RMSNorm, whose third result is not used.
py::tuple norm_grad(const Floats& g, const Floats& x, const Floats& weight,
                    const py::object& mean, const Floats& rstd) {
    const int64_t n = weight.size(), rows = rows_of(x, n);
    require(same_shape(g, x) && rstd.size() == rows, "norm_grad: wanted arrays that go together");
    const float* m = nullptr;
    if (!mean.is_none()) {
        require(py::isinstance<Floats>(mean) && py::len(mean.attr("ravel")()) == size_t(rows),
                "norm_grad: wanted a float32 mean per row");
        m = py::cast<Floats>(mean).data();
    }
    Floats gx = like(x), gw = like(weight), gb = like(weight), partial(kNormParts * 2 * n);
    float *ox = gx.mutable_data(), *ow = gw.mutable_data(), *ob = gb.mutable_data();
    float* sums = partial.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->norm_grad(rows, n, g.data(), x.data(), weight.data(), m, rstd.data(), ox, ow, ob,
                           sums);
    }
    return py::make_tuple(gx, gw, gb);
}

void adam(Floats weight, const Floats& grad, Floats mean, Floats square, const Floats& factors) {
    const int64_t n = weight.size();
    require(grad.size() == n && mean.size() == n && square.size() == n &&
                factors.size() == kAdamFactors,
            "adam: wanted arrays of one length");
    float *w = weight.mutable_data(), *m = mean.mutable_data(), *v = square.mutable_data();
    py::gil_scoped_release release;
    kernels->adam(n, w, grad.data(), m, v, factors.data());
}

}  // namespace

void use(const std::string& level) {
    kernels = &scalar::train_kernels;
#if defined(EXTENSOR_X86)
    if (level == "avx2") kernels = &avx2::train_kernels;
    if (level == "avx512") kernels = &avx512::train_kernels;
#endif
}

void bind(py::module_& m) {
    m.def("gelu", gelu);
    m.def("gelu_grad", gelu_grad);
    m.def("softmax", softmax);
    m.def("softmax_grad", softmax_grad);
    m.def("layer_norm", layer_norm);
    m.def("rms_norm", rms_norm);
    m.def("norm_grad", norm_grad);
    // noconvert: written in place, so a converted copy would lose the update
    m.def("adam", adam, py::arg("weight").noconvert(), py::arg("grad"),
          py::arg("mean").noconvert(), py::arg("square").noconvert(), py::arg("factors"));
}

}  // namespace train
