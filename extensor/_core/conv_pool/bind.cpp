// Python's view of convolution and pooling: argument checks, new arrays, and geometry.

#include "common/bind.hpp"
#include "conv_pool/kernels.hpp"

#if defined(EXTENSOR_AVX512_BF16)
namespace avx512_bf16 {
extern const PairKernels bf16_pair_kernels;
}
#endif

namespace {

using Pair = std::array<int64_t, 2>;
using Shape4 = std::array<int64_t, 4>;
using Placement = std::array<Pair, 3>;  // stride, padding, dilation

Conv geometry(const Pair& kernel, const Placement& placement) {
    const auto& [stride, padding, dilation] = placement;
    Conv s{};
    s.kh = kernel[0], s.kw = kernel[1], s.sh = stride[0], s.sw = stride[1];
    s.ph = padding[0], s.pw = padding[1], s.dh = dilation[0], s.dw = dilation[1];
    s.groups = 1;
    require(s.kh > 0 && s.kw > 0 && s.sh > 0 && s.sw > 0 && s.dh > 0 && s.dw > 0 && s.ph >= 0 &&
                s.pw >= 0,
            "window: expected a positive kernel, stride and dilation and no negative padding");
    return s;
}

void set_input(Conv& s, const Shape4& shape) {
    s.n = shape[0], s.c = shape[1], s.h = shape[2], s.w = shape[3];
    const int64_t rows = s.h + 2 * s.ph - s.dh * (s.kh - 1) - 1;
    const int64_t columns = s.w + 2 * s.pw - s.dw * (s.kw - 1) - 1;
    require(rows >= 0 && columns >= 0, "window: it does not fit the image");
    s.ho = rows / s.sh + 1, s.wo = columns / s.sw + 1;
}

Shape4 shape4(const Floats& x, const char* otherwise) {
    require(x.ndim() == 4, otherwise);
    return {x.shape(0), x.shape(1), x.shape(2), x.shape(3)};
}

// A convolution of images with weights of (O, C / groups, kh, kw).
Conv convolution(const Shape4& images, const Shape4& weights, const Placement& placement,
                 int64_t groups) {
    Conv s = geometry({weights[2], weights[3]}, placement);
    set_input(s, images);
    require(
        groups > 0 && s.c % groups == 0 && weights[0] % groups == 0 && weights[1] == s.c / groups,
        "conv2d: the weights do not fit the input, the window and the groups");
    s.o = weights[0], s.groups = groups;
    return s;
}

constexpr const char* kImages = "expected an array of (N, C, H, W)";
constexpr const char* kWeights = "conv2d: expected weights of (O, C / groups, kh, kw)";

void require_output(const Conv& s, const Floats& g) {
    require(g.ndim() == 4 && shape4(g, kImages) == Shape4{s.n, s.o, s.ho, s.wo},
            "the gradient does not have the output's shape");
}

const float* bias_of(const Conv& s, const std::optional<Floats>& bias) {
    require(!bias || bias->size() == s.o, "conv2d: expected one bias per output channel");
    return bias ? bias->data() : nullptr;
}

Floats conv2d(const Floats& x, const Floats& w, const Placement& placement, int64_t groups,
              const std::optional<Floats>& bias) {
    const Conv s = convolution(shape4(x, kImages), shape4(w, kWeights), placement, groups);
    Floats y = buffers::array<float>({s.n, s.o, s.ho, s.wo});
    const float* starts = bias_of(s, bias);
    without_gil([&] {
        levels::in_use(conv_kernels).conv(s, x.data(), w.data(), starts, y.mutable_data());
    });
    return y;
}

Floats conv2d_grad_x(const Floats& g, const Floats& w, const Shape4& shape,
                     const Placement& placement, int64_t groups) {
    const Conv s = convolution(shape, shape4(w, kWeights), placement, groups);
    require_output(s, g);
    Floats gx = buffers::array<float>({s.n, s.c, s.h, s.w});
    without_gil(
        [&] { levels::in_use(conv_kernels).grad_x(s, g.data(), w.data(), gx.mutable_data()); });
    return gx;
}

Floats conv2d_grad_w(const Floats& g, const Floats& x, const Shape4& shape,
                     const Placement& placement, int64_t groups) {
    const Conv s = convolution(shape4(x, kImages), shape, placement, groups);
    require_output(s, g);
    Floats gw = buffers::array<float>({shape[0], shape[1], shape[2], shape[3]});
    without_gil(
        [&] { levels::in_use(conv_kernels).grad_w(s, g.data(), x.data(), gw.mutable_data()); });
    return gw;
}

py::tuple max_pool2d(const Floats& x, const Pair& kernel, const Placement& placement) {
    Conv s = geometry(kernel, placement);
    set_input(s, shape4(x, kImages));
    require(s.h * s.w <= INT32_MAX, "max_pool2d: expected images of fewer than 2**31 pixels");
    Floats y = buffers::array<float>({s.n, s.c, s.ho, s.wo});
    CArray<int32_t> index = buffers::array<int32_t>({s.n, s.c, s.ho, s.wo});
    without_gil([&] {
        levels::in_use(pool_kernels).max_pool(s, x.data(), y.mutable_data(), index.mutable_data());
    });
    return py::make_tuple(y, index);
}

Floats max_pool2d_grad(const Floats& g, const CArray<int32_t>& index, const Shape4& shape) {
    require(g.ndim() == 4 && index.ndim() == 4 && g.shape(0) == shape[0] && g.shape(1) == shape[1],
            "max_pool2d_grad: expected g and index of (N, C, Ho, Wo)");
    require(same_shape(g, index), "max_pool2d_grad: g and index differ in shape");
    Conv s{};
    s.n = shape[0], s.c = shape[1], s.h = shape[2], s.w = shape[3];
    s.ho = g.shape(2), s.wo = g.shape(3);
    Floats gx = buffers::array<float>({s.n, s.c, s.h, s.w});
    const bool in_image = without_gil([&] {
        return levels::in_use(pool_kernels)
            .max_pool_grad(s, g.data(), index.data(), gx.mutable_data());
    });
    require(in_image, "max_pool2d_grad: an index lies outside the image");
    return gx;
}

// Blocks of (tile length, padded row), or one scale for all; see PatchQuant.
using Blocks = std::tuple<int64_t, int64_t, bool>;

PatchQuant patch_quant(const QuantPlan& plan, const Blocks& blocks,
                       const std::array<uint32_t, 4>& w) {
    const auto& [tile_length, padded, per_tensor] = blocks;
    require(tile_length > 0 && padded > 0, "quantized_conv2d: expected blocks of values");
    return {plan, {w[0], w[1], w[2], w[3]}, tile_length, padded, per_tensor};
}

// Whether blocks of columns fit a group's patches, with a transform's padding.
bool padded_taps(const Conv& s, const PatchQuant& quant) {
    const int64_t taps = s.c / s.groups * s.kh * s.kw, size = std::max(quant.plan.hadamard, 1);
    return quant.padded == (taps + size - 1) / size * size;
}

// The quantizer's blocks run columnwise over the matrix of patches.
py::tuple quantized_conv2d(const QuantPlan& plan, const Blocks& blocks, const Floats& x,
                           const Floats& w, const Shape4& shape, const Placement& placement,
                           int64_t groups, const std::optional<Floats>& bias) {
    const Conv s = convolution(shape4(x, kImages), shape, placement, groups);
    const PatchQuant quant = patch_quant(plan, blocks, {});
    require(padded_taps(s, quant) && w.size() == s.o * quant.padded && !plan.stochastic,
            "quantized_conv2d: expected weights, and blocks rounded to nearest");
    Floats y = buffers::array<float>({s.n, s.o, s.ho, s.wo});
    const float* starts = bias_of(s, bias);
    int64_t counts[3];
    without_gil([&] {
        levels::in_use(quant_conv_kernels)
            .conv(s, quant, x.data(), w.data(), starts, y.mutable_data(), counts);
    });
    return py::make_tuple(y, counts[0], counts[1], counts[2]);
}

// As above, but the blocks run rowwise; `stream` numbers the random bits of the whole matrix.
py::tuple quantized_conv2d_grad_w(const QuantPlan& plan, const Blocks& blocks, const Floats& g,
                                  const Floats& x, const Shape4& shape, const Placement& placement,
                                  int64_t groups, const std::array<uint32_t, 4>& stream,
                                  const std::optional<std::pair<QuantPlan, Blocks>>& before) {
    const Conv s = convolution(shape4(x, kImages), shape, placement, groups);
    const PatchQuant quant = patch_quant(plan, blocks, stream);
    const int64_t pixels = s.n * s.ho * s.wo;
    require(quant.padded >= pixels && quant.padded - pixels < 128 && g.size() == s.o * quant.padded,
            "quantized_conv2d_grad_w: expected a gradient of the patches' padded length");
    std::optional<PatchQuant> first;
    if (before) first = patch_quant(before->first, before->second, {});
    require(!first || (padded_taps(s, *first) && !first->per_tensor && !first->plan.stochastic),
            "quantized_conv2d_grad_w: expected first blocks of the taps, rounded to nearest");
    Floats gw = first ? buffers::array<float>({s.o, first->padded})
                      : buffers::array<float>({shape[0], shape[1], shape[2], shape[3]});
    int64_t counts[3];
    without_gil([&] {
        levels::in_use(quant_conv_kernels)
            .grad_w(s, quant, first ? &*first : nullptr, g.data(), x.data(), gw.mutable_data(),
                    counts);
    });
    return py::make_tuple(gw, counts[0], counts[1], counts[2]);
}

// g is (O, N * Ho * Wo) and w (O, padded taps); the quantizer's blocks run columnwise.
Floats clipped_conv2d_grad_x(const QuantPlan& plan, const Blocks& blocks, const Floats& g,
                             const Floats& w, const Floats& x, const Pair& kernel,
                             const Placement& placement) {
    Conv s = geometry(kernel, placement);
    set_input(s, shape4(x, kImages));
    const PatchQuant quant = patch_quant(plan, blocks, {});
    require(g.ndim() == 2 && w.ndim() == 2 && g.shape(0) == w.shape(0) &&
                g.shape(1) == s.n * s.ho * s.wo && padded_taps(s, quant) &&
                w.shape(1) == quant.padded && !plan.stochastic,
            "clipped_conv2d_grad_x: expected a gradient and weights of the patches");
    s.o = g.shape(0);
    Floats gx = buffers::array<float>({s.n, s.c, s.h, s.w});
    without_gil([&] {
        levels::in_use(clipped_conv_kernels)
            .grad_x(s, quant, g.data(), w.data(), x.data(), gx.mutable_data());
    });
    return gx;
}

}  // namespace

const PairKernels* pair_kernels = nullptr;

void use_pair_kernels([[maybe_unused]] bool use) {
#if defined(EXTENSOR_AVX512_BF16)
    pair_kernels = use ? &avx512_bf16::bf16_pair_kernels : nullptr;
#endif
}

void bind_conv_pool(py::module_& m) {
    m.def("conv2d", conv2d);
    m.def("conv2d_grad_x", conv2d_grad_x);
    m.def("conv2d_grad_w", conv2d_grad_w);
    m.def("max_pool2d", max_pool2d);
    m.def("max_pool2d_grad", max_pool2d_grad);
    m.def("quantized_conv2d", quantized_conv2d);
    m.def("quantized_conv2d_grad_w", quantized_conv2d_grad_w);
    m.def("clipped_conv2d_grad_x", clipped_conv2d_grad_x);
}
