// Python's view of gradient reduction: argument checks and the call of the kernels.

#include "common/bind.hpp"
#include "reduction/kernels.hpp"

namespace {

using Anchors = CArray<uint8_t>;
using Totals = CArray<int64_t>;
using Limbs = CArray<int32_t>;
using StreamWords = std::optional<std::array<uint32_t, 4>>;

const ReductionKernels& reductions() { return levels::in_use(reduction_kernels); }

void require_blocks(int64_t n, int64_t blocks, const char* what) {
    require(n == blocks * kReductionBlock, what);
}

CArray<uint32_t> block_max(const Floats& x) {
    const int64_t blocks = x.size() / kReductionBlock;
    require_blocks(x.size(), blocks, "block_max: expected whole blocks of 32");
    auto out = buffers::array<uint32_t>({blocks});
    uint32_t* to = out.mutable_data();
    without_gil([&] { reductions().block_max(x.size(), x.data(), to); });
    return out;
}

CArray<double> block_square_sums(const Floats& x) {
    auto out = buffers::array<double>({(x.size() + kReductionBlock - 1) / kReductionBlock});
    double* to = out.mutable_data();
    without_gil([&] { reductions().block_square_sums(x.size(), x.data(), to); });
    return out;
}

Totals fixed_point(const Floats& x, const Anchors& anchors) {
    require_blocks(x.size(), anchors.size(), "fixed_point: expected an anchor for each 32 values");
    auto out = buffers::array<int64_t>({x.size()});
    int64_t* to = out.mutable_data();
    without_gil([&] { reductions().fixed_point(x.size(), x.data(), anchors.data(), to); });
    return out;
}

void add_limbs(Limbs limbs, const Floats& x, const Anchors& before, const Anchors& after) {
    require_blocks(x.size(), before.size(), "add_limbs: expected an anchor for each 32 values");
    require(before.size() == after.size() && limbs.size() == 3 * x.size(),
            "add_limbs: expected three limbs for each value, and two lists of anchors");
    int32_t* to = limbs.mutable_data();
    without_gil(
        [&] { reductions().add_limbs(x.size(), x.data(), before.data(), after.data(), to); });
}

Totals limb_total(const Limbs& limbs, const Anchors& before, const Anchors& after) {
    const int64_t n = limbs.size() / 3;
    require(limbs.size() == 3 * n && before.size() == after.size(),
            "limb_total: expected three limbs for each value, and two lists of anchors");
    require_blocks(n, before.size(), "limb_total: expected an anchor for each 32 values");
    auto out = buffers::array<int64_t>({n});
    int64_t* to = out.mutable_data();
    without_gil([&] { reductions().limb_total(n, limbs.data(), before.data(), after.data(), to); });
    return out;
}

Floats fixed_point_mean(const Totals& total, const Anchors& anchors, double divisor) {
    require_blocks(total.size(), anchors.size(),
                   "fixed_point_mean: expected an anchor for each 32 values");
    auto out = buffers::array<float>({total.size()});
    float* to = out.mutable_data();
    without_gil([&] {
        reductions().fixed_point_mean(total.size(), total.data(), anchors.data(), divisor, to);
    });
    return out;
}

template <class Code>
CArray<Code> mxint_codes(const Floats& x, const Anchors& exponents, const StreamWords& stream,
                         uint32_t first_block, std::optional<Floats> residual) {
    require_blocks(x.size(), exponents.size(), "mxint: expected an exponent for each 32 values");
    require(!residual || residual->size() == x.size(), "mxint: expected a residual for each value");
    auto codes = buffers::array<Code>({x.size()});
    Code* to = codes.mutable_data();
    QuantStream words{};
    if (stream) words = {(*stream)[0], (*stream)[1], (*stream)[2], (*stream)[3]};
    const MxintJob job = {x.size(),         x.data(),
                          exponents.data(), stream ? &words : nullptr,
                          first_block,      residual ? residual->mutable_data() : nullptr};
    without_gil([&] {
        if constexpr (sizeof(Code) == 1)
            reductions().mxint8(job, to);
        else
            reductions().mxint16(job, to);
    });
    return codes;
}

template <class Code>
Floats mxint_mean(const CArray<Code>& codes, const Anchors& exponents, double divisor) {
    require(codes.ndim() == 2 && exponents.ndim() == 2 && codes.shape(0) == exponents.shape(0),
            "mxint_mean: expected codes and exponents of the same ranks");
    const int64_t ranks = codes.shape(0), n = codes.shape(1);
    require_blocks(n, exponents.shape(1), "mxint_mean: expected an exponent for each 32 values");
    auto out = buffers::array<float>({n});
    float* to = out.mutable_data();
    without_gil([&] {
        if constexpr (sizeof(Code) == 1)
            reductions().mxint8_mean(n, ranks, codes.data(), exponents.data(), divisor, to);
        else
            reductions().mxint16_mean(n, ranks, codes.data(), exponents.data(), divisor, to);
    });
    return out;
}

}  // namespace

void bind_reduction(py::module_& m) {
    m.def("block_max", block_max);
    m.def("block_square_sums", block_square_sums);
    m.def("fixed_point", fixed_point);
    // noconvert: written in place, so a converted copy would lose the sums
    m.def("add_limbs", add_limbs, py::arg("limbs").noconvert(), py::arg("x"), py::arg("before"),
          py::arg("after"));
    m.def("limb_total", limb_total);
    m.def("fixed_point_mean", fixed_point_mean);
    m.def("mxint8", mxint_codes<int8_t>, py::arg("x"), py::arg("exponents"), py::arg("stream"),
          py::arg("first_block"), py::arg("residual").noconvert());
    m.def("mxint16", mxint_codes<int16_t>, py::arg("x"), py::arg("exponents"), py::arg("stream"),
          py::arg("first_block"), py::arg("residual").noconvert());
    m.def("mxint8_mean", mxint_mean<int8_t>);
    m.def("mxint16_mean", mxint_mean<int16_t>);
}
