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
using Labels = py::array_t<int64_t, py::array::c_style>;

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

using OfRows = void (*)(int64_t, int64_t, const float*, float*);
using GradOfRows = void (*)(int64_t, int64_t, const float*, const float*, float*);

template <OfRows TrainKernels::*kernel>
Floats of_rows(const Floats& x, int64_t n) {
    const int64_t rows = rows_of(x, n);
    Floats y = like(x);
    float* out = y.mutable_data();
    py::gil_scoped_release release;
    (kernels->*kernel)(rows, n, x.data(), out);
    return y;
}

template <GradOfRows TrainKernels::*kernel>
Floats grad_of_rows(const Floats& g, const Floats& y, int64_t n) {
    require(same_shape(g, y), "softmax's gradient: wanted arrays of one shape");
    const int64_t rows = rows_of(y, n);
    Floats gx = like(y);
    float* out = gx.mutable_data();
    py::gil_scoped_release release;
    (kernels->*kernel)(rows, n, g.data(), y.data(), out);
    return gx;
}

// The labels of rows of n scores, each in 0..n - 1.
const int64_t* labels_of(const Labels& labels, int64_t rows, int64_t n) {
    require(labels.size() == rows, "losses: wanted a label a row");
    const int64_t* at = labels.data();
    for (int64_t i = 0; i < rows; ++i)
        require(at[i] >= 0 && at[i] < n, "losses: a label is the number of no class");
    return at;
}

py::tuple losses(const Floats& x, const Labels& labels, float smoothing) {
    require(x.ndim() == 2, "losses: wanted a matrix of scores");
    const int64_t n = x.shape(1), rows = rows_of(x, n);
    const int64_t* at = labels_of(labels, rows, n);
    Floats out(rows), kept({rows, int64_t{2}});
    float *to = out.mutable_data(), *keep = kept.mutable_data();
    {
        py::gil_scoped_release release;
        kernels->losses(rows, n, x.data(), at, smoothing, to, keep);
    }
    return py::make_tuple(out, kept);
}

Floats losses_grad(const Floats& weight, const Floats& x, const Labels& labels, const Floats& kept,
                   float smoothing) {
    require(x.ndim() == 2, "losses_grad: wanted a matrix of scores");
    const int64_t n = x.shape(1), rows = rows_of(x, n);
    require(kept.size() == 2 * rows && (weight.size() == 1 || weight.size() == rows),
            "losses_grad: wanted one weight or one a row, and what losses gave");
    const int64_t* at = labels_of(labels, rows, n);
    Floats gx = like(x);
    float* out = gx.mutable_data();
    py::gil_scoped_release release;
    kernels->losses_grad(rows, n, weight.data(), weight.size() > 1, x.data(), at, kept.data(),
                         smoothing, out);
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
    m.def("softmax", of_rows<&TrainKernels::softmax>);
    m.def("softmax_grad", grad_of_rows<&TrainKernels::softmax_grad>);
    m.def("log_softmax", of_rows<&TrainKernels::log_softmax>);
    m.def("log_softmax_grad", grad_of_rows<&TrainKernels::log_softmax_grad>);
    m.def("losses", losses);
    m.def("losses_grad", losses_grad);
    m.def("layer_norm", layer_norm);
    m.def("rms_norm", rms_norm);
    m.def("norm_grad", norm_grad);
    // noconvert: written in place, so a converted copy would lose the update
    m.def("adam", adam, py::arg("weight").noconvert(), py::arg("grad"),
          py::arg("mean").noconvert(), py::arg("square").noconvert(), py::arg("factors"));
}

}  // namespace train
