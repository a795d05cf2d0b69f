// Python's view of the optimizers: argument checks and the call of the kernels.

#include "common/bind.hpp"
#include "optim/kernels.hpp"

namespace {

const OptimKernels& optimizers() { return levels::in_use(optim_kernels); }

void sgd(Floats weight, const Floats& grad, std::optional<Floats> buffer, float lr, float momentum,
         float decay, bool nesterov) {
    const int64_t n = weight.size();
    require(grad.size() == n && (!buffer || buffer->size() == n),
            "sgd: expected arrays of one length");
    float *w = weight.mutable_data(), *b = buffer ? buffer->mutable_data() : nullptr;
    without_gil([&] { optimizers().sgd({lr, momentum, decay, nesterov}, n, w, grad.data(), b); });
}

void adam(Floats weight, const Floats& grad, Floats mean, Floats square, const Floats& factors) {
    const int64_t n = weight.size();
    require(grad.size() == n && mean.size() == n && square.size() == n &&
                factors.size() == kAdamFactors,
            "adam: expected arrays of one length");
    float *w = weight.mutable_data(), *m = mean.mutable_data(), *v = square.mutable_data();
    without_gil([&] { optimizers().adam(n, w, grad.data(), m, v, factors.data()); });
}

void lion(Floats weight, const Floats& grad, Floats mean, const Floats& factors) {
    const int64_t n = weight.size();
    require(grad.size() == n && mean.size() == n && factors.size() == kLionFactors,
            "lion: expected arrays of one length");
    float *w = weight.mutable_data(), *m = mean.mutable_data();
    without_gil([&] { optimizers().lion(n, w, grad.data(), m, factors.data()); });
}

bool all_finite(const Floats& x) {
    return without_gil([&] { return optimizers().all_finite(x.size(), x.data()); });
}

CArray<uint16_t> stochastic_bfloat16(const Floats& x, const std::array<uint32_t, 4>& stream) {
    auto out = buffers::array<uint16_t>({x.size()});
    uint16_t* to = out.mutable_data();
    const QuantStream words{stream[0], stream[1], stream[2], stream[3]};
    without_gil([&] { optimizers().stochastic_bfloat16(words, x.size(), x.data(), to); });
    return out;
}

}  // namespace

void bind_optim(py::module_& m) {
    // noconvert: written in place, so a converted copy would lose the update
    m.def("sgd", sgd, py::arg("weight").noconvert(), py::arg("grad"), py::arg("buffer").noconvert(),
          py::arg("lr"), py::arg("momentum"), py::arg("decay"), py::arg("nesterov"));
    m.def("adam", adam, py::arg("weight").noconvert(), py::arg("grad"), py::arg("mean").noconvert(),
          py::arg("square").noconvert(), py::arg("factors"));
    m.def("lion", lion, py::arg("weight").noconvert(), py::arg("grad"), py::arg("mean").noconvert(),
          py::arg("factors"));
    m.def("all_finite", all_finite);
    m.def("stochastic_bfloat16", stochastic_bfloat16);
}
