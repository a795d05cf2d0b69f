// Python's view of the quantizers: plans, layouts, new arrays for codes and scales, casts, and
// floats rounded to odd.

#include <algorithm>
#include <iterator>

#include "common/replay.hpp"
#include "quantize/kernels.hpp"
#include "rows.hpp"

namespace {

const QuantKernels& kernels() { return levels::in_use(quant_kernels); }

// ---- plans ----

template <class T>
T named(const py::kwargs& fields, const char* key, const std::vector<std::string>& names) {
    const auto name = fields[key].cast<std::string>();
    for (size_t i = 0; i < names.size(); ++i)
        if (name == names[i]) return static_cast<T>(i);
    throw py::value_error(std::string(key) + ": unknown name " + name);
}

// A resolved QuantSpec, by the names that `_plan` in extensor/backends passes.
QuantPlan make_plan(const py::kwargs& f) {
    QuantPlan p{};
    p.element = named<int>(f, "element", {kElementNames, kElementNames + kQuantized});
    p.scale = named<Scale>(f, "scale", {"e8m0", "ue4m3", "float32", "float16"});
    p.rule = named<Rule>(f, "rule",
                         {"floor", "rceil", "ceil", "even", "one", "amax", "four_over_six",
                          "least_error", "mse", "quest"});
    p.ties = named<Ties>(f, "ties", {"even", "away", "zero"});
    p.zeros =
        named<Zeros>(f, "zeros", {"kept", "zeros_positive", "zeros_negative", "codes_positive"});
    p.order = named<Order>(f, "order", {"transformer_engine", "torchao", "model_optimizer"});
    p.statistic = named<Statistic>(f, "statistic", {"amax", "percentile", "running"});
    p.stochastic = f["stochastic"].cast<bool>();
    p.symmetric = f["symmetric"].cast<bool>();
    p.rbits = f["rbits"].cast<int>();
    p.mx_inf_byte = f["mx_inf_byte"].cast<uint32_t>();
    p.mx_least_byte = static_cast<uint32_t>(f["mx_least_divisor"].cast<int>() + 127);
    p.nv_zero_byte = f["nv_zero_byte"].cast<uint32_t>();
    p.nv_least_byte = f["nv_least_byte"].cast<uint32_t>();
    p.nv_tiny_saturates = f["nv_tiny_saturates"].cast<bool>();
    p.rebased = f["rebased"].cast<bool>();
    p.percentile = f["percentile"].cast<double>();
    p.decay = f["decay"].cast<float>();
    p.window = f["window"].cast<int>();
    p.element_scale = f["element_scale"].cast<float>();
    const auto signs = f["signs"].cast<std::vector<float>>();
    require(f.size() == 22, "Plan: expected 22 fields");
    require(!p.rebased || (kElements[p.element].bits == 8 && p.scale == Scale::e8m0 &&
                           f["signs"].cast<std::vector<float>>().empty()),
            "Plan: expected MXFP8 without a transform to be rebased");
    require(p.symmetric || !is_byte(p.scale), "Plan: a zero point needs a float scale");
    require(signs.size() <= 128, "signs: expected at most 128");
    p.hadamard = static_cast<int>(signs.size());
    p.eden = f["eden"].cast<bool>() ? p.hadamard / 16 : 0;
    require(!p.eden || (p.scale == Scale::ue4m3 && !p.stochastic),
            "Plan: expected NVFP4 codes rounded to nearest under eden");
    std::copy(signs.begin(), signs.end(), p.signs);
    return p;
}

QuantPlan with_signs(const QuantPlan& plan, const Floats& signs) {
    require(signs.size() == plan.hadamard, "Plan: expected as many signs");
    QuantPlan p = plan;
    std::copy(signs.data(), signs.data() + signs.size(), p.signs);
    return p;
}

// ---- layouts ----

// (outer, rows, length, inner, padded, tile rows, tile length); see QuantJob.
using Layout = std::array<int64_t, 7>;
using Int8s = CArray<int8_t>;
using Words = std::array<uint32_t, 4>;  // of a random stream
template <class T>
using Both = std::array<T, 2>;  // rowwise, columnwise

FloatType float_type(const py::dtype& dtype) {
    switch (dtype.char_()) {
        case 'f': return FloatType::float32;
        case 'e': return FloatType::float16;
        case 'E': return FloatType::bfloat16;  // ml_dtypes
        default:
            throw py::type_error("expected float32, bfloat16 or float16, got " +
                                 py::str(dtype).cast<std::string>());
    }
}

QuantJob make_job(const py::array& x, const Layout& l) {
    QuantJob job{};
    job.outer = l[0], job.rows = l[1], job.length = l[2], job.inner = l[3], job.padded = l[4];
    job.tile_rows = l[5], job.tile_length = l[6];
    require(job.outer > 0 && job.rows > 0 && job.length > 0 && job.inner > 0 &&
                job.padded >= job.length && job.tile_rows > 0 && job.tile_length > 0 &&
                job.outer * job.rows * job.length * job.inner == x.size(),
            "quantize: the layout does not fit the array");
    require(job.inner == 1 || (job.rows == 1 && (job.tile_rows == 1 || job.outer == 1)),
            "quantize: tiles of several columns need a matrix");
    require((x.flags() & py::array::c_style) != 0 && x.dtype().byteorder() == '=',
            "quantize: expected a contiguous array of this machine's byte order");
    job.type = float_type(x.dtype());
    job.x = x.data();
    return job;
}

// Bytes of codes along the length.
int64_t packed_bytes(const QuantPlan& plan, int64_t padded, int64_t tile_length) {
    const int64_t tiles = (padded + tile_length - 1) / tile_length;
    return (tiles * tile_length * kElements[plan.element].bits + 7) / 8;
}

int64_t tile_count(const Layout& l) {
    const int64_t tiles = (l[4] + l[6] - 1) / l[6];
    const int64_t across = l[3] == 1 ? l[1] : l[3];
    return l[0] * tiles * ((across + l[5] - 1) / l[5]);
}

// ---- quantizing ----

// The arrays that a job writes, checked against its layout.
Floats new_values(QuantJob& job, const Shape& shape) {
    require(product(shape) == job.outer * job.rows * job.padded * job.inner,
            "fake_quantize: the layout does not fit the result's shape");
    Floats values = buffers::array<float>(shape);
    job.values = values.mutable_data();
    return values;
}

Bytes new_codes(const QuantPlan& plan, QuantJob& job, const Shape& shape) {
    require(product(shape) ==
                job.outer * job.rows * job.inner * packed_bytes(plan, job.padded, job.tile_length),
            "quantize: the layout does not fit the shape of the codes");
    Bytes codes = buffers::array<uint8_t>(shape);
    job.codes = codes.mutable_data();
    return codes;
}

py::array new_scales(const QuantPlan& plan, QuantJob& job, const Layout& layout,
                     const Shape& shape) {
    require(product(shape) == tile_count(layout),
            "quantize: the layout does not fit the shape of the scales");
    py::array scales;
    if (is_byte(plan.scale))
        scales = buffers::array<uint8_t>(shape);
    else if (plan.scale == Scale::float32)
        scales = buffers::array<float>(shape);
    else
        scales = py::array(py::dtype("float16"), shape);
    job.scales = scales.mutable_data();
    return scales;
}

// Zero points, where the plan has some, of the scales' shape; else None.
py::object new_points(const QuantPlan& plan, QuantJob& job, const Shape& shape) {
    if (plan.symmetric) return py::none();
    Int8s points(shape);
    job.zero_points = points.mutable_data();
    return points;
}

void run(const QuantPlan& plan, const Words& w, QuantJob& job) {
    without_gil([&] { kernels().quantize(plan, {w[0], w[1], w[2], w[3]}, job); });
}

// Two jobs on one matrix: rowwise and columnwise.
void run(const Both<QuantPlan>& plans, const Both<Words>& words, QuantJob (&jobs)[2]) {
    require(jobs[0].inner == 1 && jobs[0].outer == 1 && jobs[1].outer * jobs[1].rows == 1 &&
                jobs[0].rows == jobs[1].length && jobs[0].length == jobs[1].inner,
            "rowwise_columnwise: expected the rows of a matrix, then its columns");
    const QuantPlan two[2] = {plans[0], plans[1]};
    QuantStream streams[2];
    for (int i = 0; i < 2; ++i) streams[i] = {words[i][0], words[i][1], words[i][2], words[i][3]};
    without_gil([&] { kernels().quantize_rowwise_columnwise(two, streams, jobs); });
}

py::tuple fake_quantize(const QuantPlan& plan, const py::array& x, const Layout& layout,
                        const Shape& shape, const Words& stream) {
    QuantJob job = make_job(x, layout);
    const Floats values = new_values(job, shape);
    run(plan, stream, job);
    return py::make_tuple(values, job.saturated, job.flushed, job.changed);
}

py::tuple fake_quantize_rowwise_columnwise(const Both<QuantPlan>& plans, const py::array& x,
                                           const Both<Layout>& layouts, const Both<Shape>& shapes,
                                           const Both<Words>& words) {
    QuantJob jobs[2] = {make_job(x, layouts[0]), make_job(x, layouts[1])};
    const Floats values[2] = {new_values(jobs[0], shapes[0]), new_values(jobs[1], shapes[1])};
    run(plans, words, jobs);
    const auto result = [&](int i) {
        return py::make_tuple(values[i], jobs[i].saturated, jobs[i].flushed, jobs[i].changed);
    };
    return py::make_tuple(result(0), result(1));
}

// A clip mask of this shape; None where the shape is empty.
py::object new_mask(const QuantPlan& plan, QuantJob& job, const Shape& shape) {
    if (shape.empty()) return py::none();
    require(job.inner == 1 && job.tile_rows == 1 && job.tile_length % 16 == 0 && plan.symmetric &&
                product(shape) == job.outer * job.rows * ((job.padded + 7) / 8),
            "quantize: a clip mask is of rows in tiles of whole sixteens, a bit a value");
    Bytes mask = buffers::array<uint8_t>(shape);
    job.mask = mask.mutable_data();
    return mask;
}

// Codes, scales, zero points and clip mask of one job, and the tuple of them that Python gets.
struct Quantized {
    Bytes codes;
    py::array scales;
    py::object points, mask;

    Quantized(const QuantPlan& plan, QuantJob& job, const Layout& layout, const Shape& codes_shape,
              const Shape& scales_shape, const Shape& mask_shape)
        : codes(new_codes(plan, job, codes_shape)),
          scales(new_scales(plan, job, layout, scales_shape)),
          points(new_points(plan, job, scales_shape)),
          mask(new_mask(plan, job, mask_shape)) {}

    py::tuple result(const QuantJob& job) const {
        return py::make_tuple(codes, scales, points, job.tensor_scale, job.saturated, job.flushed,
                              job.changed, mask);
    }
};

py::tuple quantize(const QuantPlan& plan, const py::array& x, const Layout& layout,
                   const Shape& codes_shape, const Shape& scales_shape, const Words& stream,
                   const std::optional<Floats>& previous, const Shape& mask_shape) {
    QuantJob job = make_job(x, layout);
    const Quantized q(plan, job, layout, codes_shape, scales_shape, mask_shape);
    require(!previous || previous->size() == q.scales.size(),
            "quantize: expected as many previous maxima as scales");
    if (previous) job.previous = previous->data();
    // A function of x alone: a tensor scale would be a number of Python's.
    const bool plain = plan.scale != Scale::ue4m3 && !plan.stochastic && !plan.hadamard;
    if (Replay::current && plain && !previous && !job.mask)
        Replay::current->add({&x}, {&q.codes, &q.scales}, [plan, stream, again = job] {
            QuantJob job = again;
            kernels().quantize(plan, {stream[0], stream[1], stream[2], stream[3]}, job);
        });
    run(plan, stream, job);
    return q.result(job);
}

py::tuple quantize_rowwise_columnwise(const Both<QuantPlan>& plans, const py::array& x,
                                      const Both<Layout>& layouts, const Both<Shape>& codes_shapes,
                                      const Both<Shape>& scales_shapes, const Both<Words>& words,
                                      const Shape& mask_shape) {
    QuantJob jobs[2] = {make_job(x, layouts[0]), make_job(x, layouts[1])};
    const auto quantized = [&](int i) {
        return Quantized(plans[i], jobs[i], layouts[i], codes_shapes[i], scales_shapes[i],
                         i ? Shape{} : mask_shape);
    };
    const Quantized rowwise = quantized(0), columnwise = quantized(1);
    run(plans, words, jobs);
    return py::make_tuple(rowwise.result(jobs[0]), columnwise.result(jobs[1]));
}

py::array dequantize(const QuantPlan& plan, const Bytes& codes, const py::array& scales,
                     const std::optional<Int8s>& points, float tensor_scale, const Layout& layout,
                     const Shape& shape, const py::dtype& dtype) {
    DequantJob job{};
    job.outer = layout[0], job.rows = layout[1], job.length = layout[2], job.inner = layout[3];
    job.tile_rows = layout[5], job.tile_length = layout[6], job.tensor_scale = tensor_scale;
    const int64_t tiles = tile_count(layout);
    require(codes.size() == job.outer * job.rows * job.inner *
                                packed_bytes(plan, job.length, job.tile_length) &&
                scales.size() == tiles && (!points || points->size() == tiles) &&
                product(shape) == job.outer * job.rows * job.length * job.inner,
            "dequantize: the layout does not fit codes, scales, zero points and shape");
    const char kind = is_byte(plan.scale) ? 'u' : 'f';
    const int bytes = is_byte(plan.scale) ? 1 : plan.scale == Scale::float16 ? 2 : 4;
    require((scales.flags() & py::array::c_style) != 0 && scales.dtype().kind() == kind &&
                scales.itemsize() == bytes && scales.dtype().byteorder() != '>',
            "dequantize: expected scales as contiguous bytes, float16 or float32, as planned");
    job.type = float_type(dtype);
    py::array values = buffers::array(dtype, shape);
    job.codes = codes.data();
    job.scales = scales.data();
    if (points) job.zero_points = points->data();
    job.values = values.mutable_data();
    without_gil([&] { kernels().dequantize(plan, job); });
    return values;
}

// What `mask` lets through of `g`, out of the domain of the transform with these signs.
Floats straight_through(const Floats& g, const std::optional<Bytes>& mask,
                        const std::optional<Floats>& signs, int64_t length) {
    require(g.ndim() == 2 && length > 0 && length <= g.shape(1),
            "straight_through: expected a matrix, and no more columns of the result");
    require(!mask || (mask->ndim() == 2 && mask->shape(0) == g.shape(0) &&
                      mask->shape(1) == (g.shape(1) + 7) / 8),
            "straight_through: expected a bit for each value");
    const int64_t size = signs ? signs->size() : 0;
    require(
        !signs || (size >= 16 && size <= 128 && (size & (size - 1)) == 0 && g.shape(1) % size == 0),
        "straight_through: expected whole transforms of 16, 32, 64 or 128 values");
    Floats out = buffers::array<float>({g.shape(0), length});
    const ClippedRows job = {g.data(),
                             mask ? mask->data() : nullptr,
                             g.shape(0),
                             g.shape(1),
                             length,
                             static_cast<int>(size),
                             signs ? signs->data() : nullptr,
                             out.mutable_data()};
    without_gil([&] { kernels().straight_through(job); });
    return out;
}

// ---- the outlier codec ----

py::tuple split_outliers(const Floats& x, int64_t kept) {
    require(
        x.ndim() == 2 && x.size() > 0 && x.shape(1) <= INT32_MAX && kept >= 0 && kept <= x.shape(1),
        "split_outliers: expected a matrix, and 0..columns values to keep of each row");
    OutlierJob job{};
    job.x = x.data(), job.rows = x.shape(0), job.length = x.shape(1), job.kept = kept;
    Floats rest = buffers::array<float>({job.rows, job.length});
    Floats means({job.rows, int64_t{1}}), values({job.rows, kept});
    CArray<int32_t> index({job.rows, kept});
    job.rest = rest.mutable_data(), job.means = means.mutable_data();
    job.values = values.mutable_data(), job.index = index.mutable_data();
    without_gil([&] { kernels().split_outliers(job); });
    return py::make_tuple(rest, means, index, values);
}

int64_t join_outliers(Floats& rest, const Floats& scales, const Floats& means,
                      const CArray<int32_t>& index, const Floats& values,
                      const std::optional<Floats>& x) {
    require(rest.ndim() == 2 && index.ndim() == 2, "join_outliers: expected matrices");
    OutlierJob job{};
    job.rows = rest.shape(0), job.length = rest.shape(1), job.kept = index.shape(1);
    require(scales.size() == job.rows && means.size() == job.rows && index.shape(0) == job.rows &&
                values.size() == index.size() && (!x || x->size() == rest.size()),
            "join_outliers: the arrays do not fit the rows");
    const int32_t* at = index.data();
    for (int64_t i = 0; i < index.size(); ++i)
        require(at[i] >= 0 && at[i] < job.length, "join_outliers: an index lies outside its row");
    // The kernel reads these and writes `rest` alone.
    job.x = x ? x->data() : nullptr, job.rest = rest.mutable_data();
    job.means = const_cast<float*>(means.data()), job.values = const_cast<float*>(values.data());
    job.index = const_cast<int32_t*>(at);
    return without_gil([&] { return kernels().join_outliers(job, scales.data()); });
}

// ---- casts ----

// A new array of x's shape that a kernel of the casts fills.
template <class To, class From>
CArray<To> cast(void (*CastKernels::*kernel)(int64_t, const From*, To*), const CArray<From>& x) {
    CArray<To> y = buffers::array<To>(shape_of(x));
    without_gil(
        [&] { (levels::in_use(cast_kernels).*kernel)(x.size(), x.data(), y.mutable_data()); });
    return y;
}

// ---- rounding to odd ----

// (high, low or None), flat; None where a value is subnormal.
py::object round_to_odd(const Floats& x, int bits) {
    require(bits == 12 || bits == 16, "round_to_odd: expected 12 or 16 bits");
    const int64_t n = x.size();
    const auto cut = [&](void* high, void* low) {
        return without_gil([&] {
            return levels::in_use(odd_kernels)
                .round_to_odd[bits == 16](n, x.data(), static_cast<uint8_t*>(high),
                                          static_cast<uint8_t*>(low));
        });
    };
    if (bits == 16) {
        CArray<uint16_t> high = buffers::array<uint16_t>({n});
        if (!cut(high.mutable_data(), high.mutable_data())) return py::none();
        return py::make_tuple(high, py::none());
    }
    auto high = buffers::array<uint8_t>({n}), low = buffers::array<uint8_t>({(n + 1) / 2});
    if (!cut(high.mutable_data(), low.mutable_data())) return py::none();
    return py::make_tuple(high, low);
}

// `high` holds bytes, or without `low` words of 16 bits.
Floats odd_values(const py::array& high, const std::optional<CArray<uint8_t>>& low,
                  const Shape& shape) {
    const int64_t n = high.size();
    require((high.flags() & py::array::c_style) && high.itemsize() == (low ? 1 : 2) &&
                n == product(shape) && (!low || low->size() == (n + 1) / 2),
            "odd_values: the arrays are not those that round_to_odd gave for this shape");
    Floats y = buffers::array<float>(shape);
    const auto* from = static_cast<const uint8_t*>(high.data());
    without_gil([&] {
        levels::in_use(odd_kernels)
            .odd_values[!low](n, from, low ? low->data() : from, y.mutable_data());
    });
    return y;
}

}  // namespace

void bind_quantize(py::module_& m) {
    py::class_<QuantPlan>(m, "Plan", "A resolved QuantSpec as the kernels read it.")
        .def(py::init(&make_plan))
        .def("with_signs", with_signs);
    m.def("fake_quantize", fake_quantize);
    m.def("quantize", quantize);
    m.def("fake_quantize_rowwise_columnwise", fake_quantize_rowwise_columnwise);
    m.def("quantize_rowwise_columnwise", quantize_rowwise_columnwise);
    m.def("dequantize", dequantize);
    m.def("straight_through", straight_through);
    m.def("split_outliers", split_outliers);
    m.def("join_outliers", join_outliers);
    m.def("bfloat16_values",
          [](const Floats& x) { return cast(&CastKernels::bfloat16_values, x); });
    m.def("to_bfloat16", [](const Floats& x) { return cast(&CastKernels::to_bfloat16, x); });
    m.def("from_bfloat16",
          [](const CArray<uint16_t>& x) { return cast(&CastKernels::from_bfloat16, x); });
    m.def("round_to_odd", round_to_odd);
    m.def("odd_values", odd_values);
}
