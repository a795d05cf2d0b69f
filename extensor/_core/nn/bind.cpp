// Python's view of the neural network kernels: argument checks, new arrays, and strides as layouts.

#include <algorithm>
#include <optional>

#include "common/replay.hpp"
#include "nn/kernels.hpp"

namespace {

const ActivationKernels& activations() { return levels::in_use(activation_kernels); }
const SoftmaxKernels& softmaxes() { return levels::in_use(softmax_kernels); }
const NormKernels& norms() { return levels::in_use(norm_kernels); }

// ---- activations ----

using Binary = void (*)(int64_t, const float*, const float*, float*);

// A kernel on two arrays of one shape, into a new one.
Floats binary(Binary kernel, const Floats& a, const Floats& b, const char* unequal) {
    require(same_shape(a, b), unequal);
    Floats y = like(a);
    launch({&a, &b}, {&y},
           [kernel, n = a.size(), a = a.data(), b = b.data(), y = y.mutable_data()] {
               kernel(n, a, b, y);
           });
    return y;
}

Floats relu(const Floats& x) {
    Floats y = like(x);
    without_gil([&] { activations().relu(x.size(), x.data(), y.mutable_data()); });
    return y;
}

Floats relu_grad(const Floats& g, const Floats& y) {
    return binary(activations().relu_grad, g, y, "relu_grad: expected arrays of one shape");
}

Floats add(const Floats& a, const Floats& b) {
    return binary(activations().add, a, b, "add: expected arrays of one shape");
}

py::tuple gelu(const Floats& x) {
    Floats y = like(x), phi = like(x);
    without_gil(
        [&] { activations().gelu(x.size(), x.data(), y.mutable_data(), phi.mutable_data()); });
    return py::make_tuple(y, phi);
}

Floats gelu_grad(const Floats& g, const Floats& x, const Floats& phi) {
    require(same_shape(g, x) && same_shape(x, phi), "gelu_grad: expected arrays of one shape");
    Floats gx = like(x);
    without_gil([&] {
        activations().gelu_grad(x.size(), g.data(), x.data(), phi.data(), gx.mutable_data());
    });
    return gx;
}

// The operands of gated_silu; an infinite limit is none.
GatedSilu gated(const Floats& gate, const Floats& up, float alpha, float limit, float shift) {
    require(same_shape(gate, up), "gated_silu: expected arrays of one shape");
    return {gate.size(), gate.data(), up.data(), alpha, limit, shift};
}

Floats gated_silu(const Floats& gate, const Floats& up, float alpha, float limit, float shift) {
    const GatedSilu s = gated(gate, up, alpha, limit, shift);
    Floats y = like(gate);
    launch({&gate, &up}, {&y},
           [kernel = activations().gated_silu, s, y = y.mutable_data()] { kernel(s, y); });
    return y;
}

py::tuple gated_silu_grad(const Floats& g, const Floats& gate, const Floats& up, float alpha,
                          float limit, float shift) {
    const GatedSilu s = gated(gate, up, alpha, limit, shift);
    require(same_shape(g, gate), "gated_silu_grad: expected arrays of one shape");
    Floats ggate = like(gate), gup = like(up);
    without_gil([&] {
        activations().gated_silu_grad(s, g.data(), ggate.mutable_data(), gup.mutable_data());
    });
    return py::make_tuple(ggate, gup);
}

// ---- rows of scores ----

// Rows of length n, which the last axes must come to.
int64_t rows_of(const Floats& x, int64_t n) {
    require(x.size() > 0 && n > 0 && x.size() % n == 0, "expected whole rows, and some");
    return x.size() / n;
}

using OfRows = void (*)(int64_t, int64_t, const float*, float*);
using GradOfRows = void (*)(int64_t, int64_t, const float*, const float*, float*);

template <OfRows SoftmaxKernels::* kernel>
Floats of_rows(const Floats& x, int64_t n) {
    const int64_t rows = rows_of(x, n);
    Floats y = like(x);
    without_gil([&] { (softmaxes().*kernel)(rows, n, x.data(), y.mutable_data()); });
    return y;
}

template <GradOfRows SoftmaxKernels::* kernel>
Floats grad_of_rows(const Floats& g, const Floats& y, int64_t n) {
    require(same_shape(g, y), "softmax's gradient: expected arrays of one shape");
    const int64_t rows = rows_of(y, n);
    Floats gx = like(y);
    without_gil([&] { (softmaxes().*kernel)(rows, n, g.data(), y.data(), gx.mutable_data()); });
    return gx;
}

// Rows of scores with a label each, which is the number of one of the row's classes.
CrossEntropy scores_of(const Floats& x, const CArray<int64_t>& labels, float smoothing) {
    require(x.ndim() == 2, "cross_entropy: expected a matrix of scores");
    const int64_t n = x.shape(1), rows = rows_of(x, n);
    require(labels.size() == rows, "cross_entropy: expected a label a row");
    const int64_t* at = labels.data();
    for (int64_t i = 0; i < rows; ++i)
        require(at[i] >= 0 && at[i] < n, "cross_entropy: a label is the number of no class");
    return {rows, n, x.data(), at, smoothing};
}

py::tuple cross_entropy(const Floats& x, const CArray<int64_t>& labels, float smoothing) {
    const CrossEntropy s = scores_of(x, labels, smoothing);
    Floats losses(s.rows), saved({s.rows, int64_t{2}});
    without_gil([&] { softmaxes().cross_entropy(s, losses.mutable_data(), saved.mutable_data()); });
    return py::make_tuple(losses, saved);
}

Floats cross_entropy_grad(const Floats& weight, const Floats& x, const CArray<int64_t>& labels,
                          const Floats& saved, float smoothing) {
    const CrossEntropy s = scores_of(x, labels, smoothing);
    require(saved.size() == 2 * s.rows && (weight.size() == 1 || weight.size() == s.rows),
            "cross_entropy_grad: expected one weight or one a row, and what cross_entropy saved");
    Floats gx = like(x);
    without_gil([&] {
        softmaxes().cross_entropy_grad(s, weight.data(), weight.size() > 1, saved.data(),
                                       gx.mutable_data());
    });
    return gx;
}

// ---- norms ----

// The input of a norm over the last values of x, as many as there are weights.
RowNorm rows_to_norm(const Floats& x, const Floats& weight) {
    return {rows_of(x, weight.size()), weight.size(), x.data(), weight.data(), nullptr, nullptr};
}

py::tuple layer_norm(const Floats& x, const Floats& weight, const Floats& bias, float eps) {
    RowNorm s = rows_to_norm(x, weight);
    require(bias.size() == s.n, "layer_norm: expected a bias as long as the weight");
    Floats y = like(x), mean(s.rows), rstd(s.rows);
    s.mean = mean.mutable_data(), s.rstd = rstd.mutable_data();
    without_gil([&] { norms().row_norm(s, bias.data(), eps, y.mutable_data()); });
    return py::make_tuple(y, mean, rstd);
}

py::tuple rms_norm(const Floats& x, const Floats& weight, float eps) {
    RowNorm s = rows_to_norm(x, weight);
    Floats y = like(x), rstd(s.rows);
    s.rstd = rstd.mutable_data();
    launch({&x, &weight}, {&y, &rstd}, [kernel = norms().row_norm, s, eps, y = y.mutable_data()] {
        kernel(s, nullptr, eps, y);
    });
    return py::make_tuple(y, rstd);
}

// Gradients in x, weight and bias; `mean` is None for an RMSNorm, whose third result is not used.
py::tuple norm_grad(const Floats& g, const Floats& x, const Floats& weight, const py::object& mean,
                    const Floats& rstd) {
    RowNorm s = rows_to_norm(x, weight);
    require(same_shape(g, x) && rstd.size() == s.rows,
            "norm_grad: expected arrays that go together");
    // The gradients' kernels only read these.
    s.rstd = const_cast<float*>(rstd.data());
    if (!mean.is_none()) {
        require(py::isinstance<Floats>(mean) && py::cast<Floats>(mean).size() == s.rows,
                "norm_grad: expected a float32 mean per row");
        s.mean = const_cast<float*>(py::cast<Floats>(mean).data());
    }
    Floats gx = like(x), gw = like(weight), gb = like(weight), partial(kNormParts * 2 * s.n);
    const NormGrads grads = {gx.mutable_data(), gw.mutable_data(), gb.mutable_data()};
    without_gil([&] { norms().row_norm_grad(s, g.data(), grads, partial.mutable_data()); });
    return py::make_tuple(gx, gw, gb);
}

BatchNorm images_to_norm(const Floats& x) {
    require(x.ndim() >= 2 && x.size() > 0, "expected images (N, C, ...), and some");
    BatchNorm s{};
    s.n = x.shape(0), s.c = x.shape(1), s.pixels = x.size() / (s.n * s.c), s.x = x.data();
    return s;
}

py::tuple batch_norm(const Floats& x, const Floats& weight, const Floats& bias, float eps) {
    BatchNorm s = images_to_norm(x);
    require(weight.size() == s.c && bias.size() == s.c, "batch_norm: expected a value per channel");
    Floats y = like(x), mean(s.c), variance(s.c);
    s.weight = weight.data(), s.eps = eps;
    s.mean = mean.mutable_data(), s.variance = variance.mutable_data();
    without_gil([&] { norms().batch_norm(s, bias.data(), y.mutable_data()); });
    return py::make_tuple(y, mean, variance);
}

py::tuple batch_norm_grad(const Floats& g, const Floats& x, const Floats& weight,
                          const Floats& mean, const Floats& variance, float eps) {
    BatchNorm s = images_to_norm(x);
    require(
        same_shape(g, x) && weight.size() == s.c && mean.size() == s.c && variance.size() == s.c,
        "batch_norm_grad: expected arrays that go together");
    Floats gx = like(x), gw(s.c), gb(s.c);
    s.weight = weight.data(), s.eps = eps;
    s.mean = const_cast<float*>(mean.data()), s.variance = const_cast<float*>(variance.data());
    const NormGrads grads = {gx.mutable_data(), gw.mutable_data(), gb.mutable_data()};
    without_gil([&] { norms().batch_norm_grad(s, g.data(), grads); });
    return py::make_tuple(gx, gw, gb);
}

Floats channel_sum(const Floats& x) {
    const BatchNorm s = images_to_norm(x);
    Floats out(s.c);
    without_gil([&] { norms().channel_sum(s.n, s.c, s.pixels, s.x, out.mutable_data()); });
    return out;
}

// ---- attention ----

using Strided = py::array_t<float>;

// (outer, heads, rows, width) as the kernels read it.
Heads heads_of(const Strided& x, bool written) {
    require(x.ndim() == 4, "attention: expected arrays of four axes");
    bool whole = reinterpret_cast<uintptr_t>(x.data()) % 4 == 0;
    for (int axis = 0; axis < 4; ++axis) whole = whole && x.strides(axis) % 4 == 0;
    require(x.size() > 0 && (x.strides(3) == 4 || x.shape(3) == 1) && whole &&
                (!written || x.writeable()),
            "attention: expected float32 arrays, not empty, whose last axis is contiguous");
    return {const_cast<float*>(x.data()), x.strides(0) / 4, x.strides(1) / 4, x.strides(2) / 4};
}

void require_shape(const Strided& x, const std::array<int64_t, 4>& shape) {
    require(x.ndim() == 4 && std::equal(shape.begin(), shape.end(), x.shape()),
            "attention: expected arrays that go together");
}

Attention attention_of(const Strided& q, const Strided& k, const Strided& v, bool causal,
                       float scale) {
    Attention s{};
    s.q = heads_of(q, false), s.k = heads_of(k, false), s.v = heads_of(v, false);
    s.outer = q.shape(0), s.heads = q.shape(1), s.queries = q.shape(2), s.width = q.shape(3);
    s.groups = k.shape(1), s.keys = k.shape(2), s.value_width = v.shape(3);
    s.causal = causal, s.scale = scale;
    require_shape(k, {s.outer, s.groups, s.keys, s.width});
    require_shape(v, {s.outer, s.groups, s.keys, s.value_width});
    require(s.heads % s.groups == 0 && (!causal || s.keys >= s.queries),
            "attention: expected whole groups of heads and, if causal, as many keys as queries");
    return s;
}

// The window, 0 for none, and the mask: None, or bytes (outer, heads, queries, keys).
void limit(Attention& s, int64_t window, const std::optional<py::array_t<uint8_t>>& mask) {
    require(window >= 0, "attention: expected a window of 0 or more");
    s.window = window;
    if (!mask) return;
    const std::array<int64_t, 4> shape = {s.outer, s.heads, s.queries, s.keys};
    require(mask->ndim() == 4 && std::equal(shape.begin(), shape.end(), mask->shape()) &&
                (mask->strides(3) == 1 || s.keys == 1),
            "attention: expected a mask of a byte for each score");
    s.mask = {mask->data(), mask->strides(0), mask->strides(1), mask->strides(2)};
}

// The output, whose memory is (outer, queries, heads, width), and what the gradient needs.
py::tuple attention(const Strided& q, const Strided& k, const Strided& v, bool causal, float scale,
                    int64_t window, const std::optional<py::array_t<uint8_t>>& mask,
                    const std::optional<Floats>& sinks) {
    Attention s = attention_of(q, k, v, causal, scale);
    limit(s, window, mask);
    if (sinks) {
        require(sinks->size() == s.heads, "attention: expected a sink for each head");
        s.sinks = sinks->data();
    }
    const Strided memory = buffers::array<float>({s.outer, s.queries, s.heads, s.value_width});
    const Strided out = memory.attr("transpose")(0, 2, 1, 3);
    Floats stats = buffers::array<float>({s.outer, s.heads, s.queries, 2});
    s.out = heads_of(out, true), s.stats = stats.mutable_data();
    without_gil([&] { levels::in_use(attention_kernels).forward(s); });
    return py::make_tuple(out, stats);
}

// Attention of one new token to those of a cache, whose key and value are appended first. `place`:
// the addresses of keys and values (outer, groups, capacity, width) and the capacity; `length`:
// tokens in use. Both are read when the kernel runs, so that a replay follows a cache that grows.
Strided cached_attention(const Strided& q, const Strided& k, const Strided& v,
                         const py::array_t<int64_t>& place, const py::array_t<int64_t>& length,
                         float scale) {
    Attention s = attention_of(q, k, v, false, scale);
    require(s.queries == 1 && s.keys == 1 && place.size() == 3 && length.size() == 1,
            "cached_attention: expected one token, and where the others are");
    const Strided memory = buffers::array<float>({s.outer, 1, s.heads, s.value_width});
    const Strided out = memory.attr("transpose")(0, 2, 1, 3);
    Floats stats = buffers::array<float>({s.outer, s.heads, 1, 2});
    s.out = heads_of(out, true), s.stats = stats.mutable_data();
    const auto append = [](const Attention& s, Heads& kept, const Heads& fresh, int64_t address,
                           int64_t capacity, int64_t width) {
        kept = {reinterpret_cast<float*>(address), s.groups * capacity * width, capacity * width,
                width};
        for (int64_t outer = 0; outer < s.outer; ++outer)
            for (int64_t group = 0; group < s.groups; ++group)
                std::copy_n(
                    fresh.at + outer * fresh.outer + group * fresh.head, width,
                    kept.at + outer * kept.outer + group * kept.head + (s.keys - 1) * kept.row);
    };
    launch({&q, &k, &v, &place, &length}, {&out, &stats},
           [forward = levels::in_use(attention_kernels).forward, s, append, at = place.data(),
            used = length.data()] {
               Attention now = s;
               const int64_t capacity = at[2];
               now.keys = *used + 1;
               require(now.keys <= capacity, "cached_attention: the cache is full");
               append(now, now.k, s.k, at[0], capacity, s.width);
               append(now, now.v, s.v, at[1], capacity, s.value_width);
               forward(now);
           });
    return out;
}

// `arrays`: the output's gradient, q, k, v and the output; `grads` of q, k and v are written.
void attention_grad(const std::array<Strided, 5>& arrays, Floats stats, bool causal, float scale,
                    const std::array<Strided, 3>& grads, int64_t window,
                    const std::optional<py::array_t<uint8_t>>& mask) {
    const auto& [g, q, k, v, out] = arrays;
    const auto& [gq, gk, gv] = grads;
    Attention s = attention_of(q, k, v, causal, scale);
    limit(s, window, mask);
    for (const Strided* x : {&g, &out})
        require_shape(*x, {s.outer, s.heads, s.queries, s.value_width});
    require_shape(gq, {s.outer, s.heads, s.queries, s.width});
    require_shape(gk, {s.outer, s.groups, s.keys, s.width});
    require_shape(gv, {s.outer, s.groups, s.keys, s.value_width});
    require(stats.size() == s.outer * s.heads * s.queries * 2, "attention: expected its own stats");
    s.g = heads_of(g, false), s.out = heads_of(out, false), s.stats = stats.mutable_data();
    s.gq = heads_of(gq, true), s.gk = heads_of(gk, true), s.gv = heads_of(gv, true);
    without_gil([&] { levels::in_use(attention_kernels).gradient(s); });
}

// The last axes of an array of up to four as (outer, heads, rows, width), for `rotary`; axes of
// length one that `shape` has longer repeat.
Heads last_axes(const Strided& x, const std::array<int64_t, 4>& shape) {
    const int64_t axes = x.ndim();
    std::array<int64_t, 3> steps{};
    require(axes >= 1 && axes <= 4 && x.size() > 0 &&
                (x.strides(axes - 1) == 4 || x.shape(axes - 1) == 1),
            "rotary: expected arrays of one to four axes whose last is contiguous");
    for (int64_t i = 2, axis = axes - 2; axis >= 0; --i, --axis) {
        const bool repeats = x.shape(axis) == 1;
        require(repeats || x.shape(axis) == shape[static_cast<size_t>(i)],
                "rotary: expected tables that broadcast to the heads");
        steps[static_cast<size_t>(i)] = repeats ? 0 : x.strides(axis) / 4;
    }
    return {const_cast<float*>(x.data()), steps[0], steps[1], steps[2]};
}

Floats rotary(const Strided& x, const Strided& cos, const Strided& sin, bool interleaved) {
    std::array<int64_t, 4> shape = {1, 1, 1, 1};
    require(x.ndim() >= 1 && x.ndim() <= 4, "rotary: expected one to four axes");
    std::copy_backward(x.shape(), x.shape() + x.ndim(), shape.end());
    Rotary s{};
    s.outer = shape[0], s.heads = shape[1], s.rows = shape[2], s.width = shape[3];
    s.x = last_axes(x, shape), s.cos = last_axes(cos, shape);
    const Heads other = last_axes(sin, shape);
    s.half = cos.shape(cos.ndim() - 1), s.interleaved = interleaved, s.sin = other.at;
    require(s.half == sin.shape(sin.ndim() - 1) && 2 * s.half <= s.width &&
                s.cos.outer == other.outer && s.cos.head == other.head && s.cos.row == other.row,
            "rotary: expected two tables of one layout, and two values for each angle");
    Floats y = buffers::array<float>(std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
    s.y = y.mutable_data();
    launch({&x, &cos, &sin}, {&y},
           [kernel = levels::in_use(rotary_kernels).rotary, s] { kernel(s); });
    return y;
}

}  // namespace

void bind_nn(py::module_& m) {
    m.def("relu", relu);
    m.def("relu_grad", relu_grad);
    m.def("add", add);
    m.def("gelu", gelu);
    m.def("gelu_grad", gelu_grad);
    m.def("gated_silu", gated_silu);
    m.def("gated_silu_grad", gated_silu_grad);
    m.def("rotary", rotary);
    m.def("softmax", of_rows<&SoftmaxKernels::softmax>);
    m.def("softmax_grad", grad_of_rows<&SoftmaxKernels::softmax_grad>);
    m.def("log_softmax", of_rows<&SoftmaxKernels::log_softmax>);
    m.def("log_softmax_grad", grad_of_rows<&SoftmaxKernels::log_softmax_grad>);
    m.def("cross_entropy", cross_entropy);
    m.def("cross_entropy_grad", cross_entropy_grad);
    m.def("layer_norm", layer_norm);
    m.def("rms_norm", rms_norm);
    m.def("norm_grad", norm_grad);
    m.def("batch_norm", batch_norm);
    m.def("batch_norm_grad", batch_norm_grad);
    m.def("channel_sum", channel_sum);
    m.def("attention", attention);
    m.def("cached_attention", cached_attention);
    // noconvert: written in place
    m.def("attention_grad", attention_grad, py::arg("arrays"), py::arg("stats").noconvert(),
          py::arg("causal"), py::arg("scale"), py::arg("grads").noconvert(), py::arg("window"),
          py::arg("mask"));
}
