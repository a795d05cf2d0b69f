// Float32 products and attention: argument checks, allocation, and layouts from strides.

#include "sgemm_bind.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "buffers.hpp"
#include "products.hpp"

namespace py = pybind11;

namespace sgemm {
namespace {

using Shape = std::vector<py::ssize_t>;

constexpr int64_t kBatched = 1 << 20;  // multiply-adds of a product that a thread does alone

const ProductKernels* products = &scalar::product_kernels;

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

// The last two axes of an array as a matrix of float32 with neighbours along one of them.
struct Side {
    const float* at;
    int64_t rows, columns, ld;
    bool transposed;
};

std::optional<Side> side_of(const py::array& x) {
    const py::ssize_t n = x.ndim();
    if (n < 2 || !py::isinstance<py::array_t<float>>(x)) return {};
    Side s{static_cast<const float*>(x.data()), x.shape(n - 2), x.shape(n - 1), 0, false};
    const int64_t down = x.strides(n - 2), across = x.strides(n - 1);
    if (reinterpret_cast<uintptr_t>(s.at) % 4 || down % 4 || across % 4) return {};
    if (across == 4 || s.columns == 1 || !x.size()) {
        s.ld = down / 4;
    } else if (down == 4 || s.rows == 1) {
        s.ld = across / 4, s.transposed = true;
    } else {
        return {};
    }
    return s;
}

// Where each matrix of a batch begins, in floats, the leading axes broadcast to `lead`.
std::vector<int64_t> offsets(const py::array& x, const Shape& lead) {
    const size_t own = static_cast<size_t>(x.ndim() - 2), skip = lead.size() - own;
    std::vector<int64_t> at = {0};
    for (size_t axis = 0; axis < lead.size(); ++axis) {
        const bool moves = axis >= skip && x.shape(axis - skip) != 1;
        const int64_t stride = moves ? x.strides(axis - skip) / 4 : 0;
        std::vector<int64_t> next;
        next.reserve(at.size() * static_cast<size_t>(lead[axis]));
        for (int64_t begin : at)
            for (py::ssize_t i = 0; i < lead[axis]; ++i) next.push_back(begin + i * stride);
        at = std::move(next);
    }
    return at;
}

bool steps_in_floats(const py::array& x) {
    for (py::ssize_t i = 0; i < x.ndim(); ++i)
        if (x.strides(i) % 4) return false;
    return true;
}

bool takes_matrices(const py::array& a, const py::array& b) {
    return side_of(a) && side_of(b) && steps_in_floats(a) && steps_in_floats(b);
}

// a (..., M, K) b (..., K, N), + bias (N,): (..., M, N).
py::array matmul(const py::array& a, const py::array& b, const py::object& bias) {
    require(takes_matrices(a, b), "matmul: wanted float32 matrices, contiguous along one axis");
    const auto left = side_of(a), right = side_of(b);
    require(left->columns == right->rows, "matmul: wanted as many rows on the right as columns");
    Shape shape;
    const py::ssize_t axes = std::max(a.ndim(), b.ndim()) - 2;
    for (py::ssize_t i = 0; i < axes; ++i) {
        const py::ssize_t ia = i - axes + a.ndim() - 2, ib = i - axes + b.ndim() - 2;
        const py::ssize_t na = ia < 0 ? 1 : a.shape(ia), nb = ib < 0 ? 1 : b.shape(ib);
        require(na == nb || na == 1 || nb == 1, "matmul: wanted leading axes that broadcast");
        shape.push_back(na == 1 ? nb : na);
    }
    const Shape lead = shape;
    shape.push_back(left->rows), shape.push_back(right->columns);
    py::array_t<float, py::array::c_style> c = buffers::array<float>(shape), row;
    Product s{left->rows, right->columns, left->columns,     left->at,
              right->at,  nullptr,        c.mutable_data(),  left->ld,
              right->ld,  right->columns, left->transposed,  right->transposed};
    if (!bias.is_none()) {
        row = py::cast<py::array_t<float, py::array::c_style>>(bias);
        require(row.ndim() == 1 && row.size() == s.n, "matmul: wanted a bias for every column");
        s.bias = row.data();
    }
    if (!c.size()) return c;
    const std::vector<int64_t> at_a = offsets(a, lead), at_b = offsets(b, lead);
    py::gil_scoped_release release;
    if (at_a.size() > 1 && s.m * s.n * s.k <= kBatched) {
        products->batch(s, static_cast<int64_t>(at_a.size()), at_a.data(), at_b.data());
    } else {
        for (size_t i = 0; i < at_a.size(); ++i) {
            Product one = s;
            one.a += at_a[i], one.b += at_b[i], one.c += static_cast<int64_t>(i) * s.m * s.n;
            products->product(one);
        }
    }
    return c;
}

const AttentionKernels* attentions = &scalar::attention_kernels;

using Floats = py::array_t<float>;

// (outer, heads, rows, width) as the kernels take it.
Heads heads_of(const Floats& x, bool written) {
    require(x.ndim() == 4, "attention: wanted arrays of four axes");
    require(x.size() > 0 && (x.strides(3) == 4 || x.shape(3) == 1) && steps_in_floats(x) &&
                reinterpret_cast<uintptr_t>(x.data()) % 4 == 0 && (!written || x.writeable()),
            "attention: wanted float32 arrays, not empty, whose last axis is contiguous");
    return {const_cast<float*>(x.data()), x.strides(0) / 4, x.strides(1) / 4, x.strides(2) / 4};
}

void require_shape(const Floats& x, int64_t outer, int64_t heads, int64_t rows, int64_t width) {
    require(x.shape(0) == outer && x.shape(1) == heads && x.shape(2) == rows &&
                x.shape(3) == width,
            "attention: wanted arrays that go together");
}

Attention attention_of(const Floats& q, const Floats& k, const Floats& v, bool causal,
                       float scale) {
    Attention s{};
    s.q = heads_of(q, false), s.k = heads_of(k, false), s.v = heads_of(v, false);
    s.outer = q.shape(0), s.heads = q.shape(1), s.queries = q.shape(2), s.width = q.shape(3);
    s.groups = k.shape(1), s.keys = k.shape(2), s.value_width = v.shape(3);
    s.causal = causal, s.scale = scale;
    require_shape(k, s.outer, s.groups, s.keys, s.width);
    require_shape(v, s.outer, s.groups, s.keys, s.value_width);
    require(s.heads % s.groups == 0 && (!causal || s.keys >= s.queries),
            "attention: wanted whole groups of heads and, if causal, as many keys as queries");
    return s;
}

// The output, whose memory is (outer, queries, heads, width), and what the gradient needs.
py::tuple attention(const Floats& q, const Floats& k, const Floats& v, bool causal, float scale) {
    Attention s = attention_of(q, k, v, causal, scale);
    const Floats memory = buffers::array<float>({s.outer, s.queries, s.heads, s.value_width});
    const Floats out = memory.attr("transpose")(0, 2, 1, 3);
    Floats stats = buffers::array<float>({s.outer, s.heads, s.queries, 2});
    s.out = heads_of(out, true), s.stats = stats.mutable_data();
    {
        py::gil_scoped_release release;
        attentions->forward(s);
    }
    return py::make_tuple(out, stats);
}

void attention_grad(const Floats& g, const Floats& q, const Floats& k, const Floats& v,
                    const Floats& out, py::array_t<float, py::array::c_style> stats, bool causal,
                    float scale, Floats gq, Floats gk, Floats gv) {
    Attention s = attention_of(q, k, v, causal, scale);
    for (const Floats* x : {&g, static_cast<const Floats*>(&out)})
        require_shape(*x, s.outer, s.heads, s.queries, s.value_width);
    require_shape(gq, s.outer, s.heads, s.queries, s.width);
    require_shape(gk, s.outer, s.groups, s.keys, s.width);
    require_shape(gv, s.outer, s.groups, s.keys, s.value_width);
    require(stats.size() == s.outer * s.heads * s.queries * 2, "attention: wanted its own stats");
    s.g = heads_of(g, false), s.out = heads_of(out, false), s.stats = stats.mutable_data();
    s.gq = heads_of(gq, true), s.gk = heads_of(gk, true), s.gv = heads_of(gv, true);
    py::gil_scoped_release release;
    attentions->gradient(s);
}

}  // namespace

void use(const std::string& level) {
    products = &scalar::product_kernels, attentions = &scalar::attention_kernels;
#if defined(EXTENSOR_X86)
    if (level == "avx2")
        products = &avx2::product_kernels, attentions = &avx2::attention_kernels;
    if (level == "avx512")
        products = &avx512::product_kernels, attentions = &avx512::attention_kernels;
#endif
}

void bind(py::module_& m) {
    m.def("matmul", matmul, py::arg("a"), py::arg("b"), py::arg("bias") = py::none());
    m.def("takes_matrices", takes_matrices);
    m.def("attention", attention);
    // noconvert: written in place
    m.def("attention_grad", attention_grad, py::arg("g"), py::arg("q"), py::arg("k"),
          py::arg("v"), py::arg("out"), py::arg("stats").noconvert(), py::arg("causal"),
          py::arg("scale"), py::arg("gq").noconvert(), py::arg("gk").noconvert(),
          py::arg("gv").noconvert());
}

}  // namespace sgemm
