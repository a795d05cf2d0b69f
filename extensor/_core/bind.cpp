// The Python module extensor._core._kernels: argument checks, allocation, and the choice of level.
//
// Shapes are checked once more here although extensor.backends.cpu has done so: a kernel writes
// through raw pointers.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <vector>

#include "buffers.hpp"
#include "gemm_bind.hpp"
#include "kernels.hpp"
#include "layer_bind.hpp"
#include "rows.hpp"
#include "sgemm_bind.hpp"
#include "threads.hpp"
#include "train_bind.hpp"
#include "window_bind.hpp"

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style>;

struct Level {
    const char* name;
    const QuantKernels* quant;
};

std::vector<Level> supported_levels() {
    std::vector<Level> levels = {{"scalar", &scalar::quant_kernels}};
#ifdef EXTENSOR_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        levels.push_back({"avx2", &avx2::quant_kernels});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        levels.push_back({"avx512", &avx512::quant_kernels});
#endif
    return levels;
}

const std::vector<Level> levels = supported_levels();
Level current = levels.back();

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (const Level& level : levels) names.emplace_back(level.name);
    return names;
}

void set_level(const std::string& name) {
    for (const Level& level : levels) {
        if (name == level.name) {
            current = level;
            gemm::use_best(level.name);
            train::use(level.name);
            sgemm::use(level.name);
            windows::use(level.name);
            layers::use(level.name);
            return;
        }
    }
    std::string known;
    for (const Level& level : levels) known += std::string(known.empty() ? "" : ", ") + level.name;
    throw py::value_error("set_level: wanted one of " + known + ", got " + name);
}

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

// ---- quantizing ----

// Where `Layout` is (outer, rows, length, inner, coded, tile rows, tile length); see QuantJob.
using Layout = std::array<int64_t, 7>;
using Shape = std::vector<py::ssize_t>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

template <class T>
T named(const std::string& name, const std::vector<std::string>& names, const char* what) {
    for (size_t i = 0; i < names.size(); ++i)
        if (name == names[i]) return static_cast<T>(i);
    throw py::value_error(std::string(what) + ": unknown name " + name);
}

QuantPlan make_plan(const std::string& element, const std::string& scale, const std::string& rule,
                    const std::string& ties, bool stochastic, int rbits, uint32_t mx_inf_byte,
                    uint32_t nv_zero_byte, bool nv_tiny_saturates, int window, float element_scale,
                    const std::vector<float>& signs) {
    QuantPlan p{};
    p.element = named<int>(element, {std::begin(kElementNames), std::end(kElementNames)}, "element");
    p.scale = named<Scale>(scale, {"e8m0", "ue4m3", "float32"}, "scale");
    p.rule = named<Rule>(rule, {"floor", "rceil", "ceil", "even", "one", "amax"}, "rule");
    p.ties = named<Ties>(ties, {"even", "away", "zero"}, "ties");
    p.stochastic = stochastic, p.rbits = rbits;
    p.mx_inf_byte = mx_inf_byte, p.nv_zero_byte = nv_zero_byte;
    p.nv_tiny_saturates = nv_tiny_saturates, p.window = window, p.element_scale = element_scale;
    require(signs.size() <= 128, "signs: wanted at most 128");
    p.hadamard = static_cast<int>(signs.size());
    std::copy(signs.begin(), signs.end(), p.signs);
    return p;
}

FloatType float_type(const py::dtype& dtype) {
    switch (dtype.char_()) {
        case 'f': return FloatType::float32;
        case 'e': return FloatType::float16;
        case 'E': return FloatType::bfloat16;  // ml_dtypes
        default: throw py::type_error("wanted float32, bfloat16 or float16, got " +
                                      py::str(dtype).cast<std::string>());
    }
}

QuantJob make_job(const py::array& x, const Layout& l) {
    QuantJob job{};
    job.outer = l[0], job.rows = l[1], job.length = l[2], job.inner = l[3], job.coded = l[4];
    job.tile_rows = l[5], job.tile_length = l[6];
    require(job.outer > 0 && job.rows > 0 && job.length > 0 && job.inner > 0 &&
                job.coded >= job.length && job.tile_rows > 0 && job.tile_length > 0 &&
                job.outer * job.rows * job.length * job.inner == x.size(),
            "quantize: the layout does not fit the array");
    require(job.inner == 1 || (job.rows == 1 && (job.tile_rows == 1 || job.outer == 1)),
            "quantize: tiles of several columns need a matrix");
    require((x.flags() & py::array::c_style) != 0 && x.dtype().byteorder() == '=',
            "quantize: wanted a contiguous array of this machine's byte order");
    job.type = float_type(x.dtype());
    job.x = x.data();
    return job;
}

int64_t product(const Shape& shape) {
    int64_t n = 1;
    for (py::ssize_t d : shape) n *= d;
    return n;
}

// Codes bytes along the length, and the number of tiles.
int64_t packed_bytes(const QuantPlan& plan, int64_t coded, int64_t tile_length) {
    const int64_t tiles = (coded + tile_length - 1) / tile_length;
    return (tiles * tile_length * kElements[plan.element].bits + 7) / 8;
}

int64_t tile_count(const Layout& l) {
    const int64_t tiles = (l[4] + l[6] - 1) / l[6];
    const int64_t across = l[3] == 1 ? l[1] : l[3];
    return l[0] * tiles * ((across + l[5] - 1) / l[5]);
}

py::tuple operand(const QuantPlan& plan, const py::array& x, const Layout& layout, const Shape& shape,
                  const std::array<uint32_t, 4>& stream) {
    QuantJob job = make_job(x, layout);
    require(product(shape) == job.outer * job.rows * job.coded * job.inner,
            "operand: the layout does not fit the result's shape");
    Floats values = buffers::array<float>(shape);
    job.values = values.mutable_data();
    {
        py::gil_scoped_release release;
        current.quant->quantize(plan, {stream[0], stream[1], stream[2], stream[3]}, job);
    }
    return py::make_tuple(values, job.saturated, job.flushed);
}

// The arrays that a job writes, checked against its layout.
Bytes new_codes(const QuantPlan& plan, QuantJob& job, const Shape& shape) {
    require(product(shape) == job.outer * job.rows * job.inner *
                                  packed_bytes(plan, job.coded, job.tile_length),
            "quantize: the layout does not fit the shape of the codes");
    Bytes codes = buffers::array<uint8_t>(shape);
    job.codes = codes.mutable_data();
    return codes;
}

py::array new_scales(const QuantPlan& plan, QuantJob& job, const Layout& layout, const Shape& shape) {
    require(product(shape) == tile_count(layout),
            "quantize: the layout does not fit the shape of the scales");
    py::array scales;
    if (plan.scale == Scale::float32)
        scales = buffers::array<float>(shape);
    else
        scales = buffers::array<uint8_t>(shape);
    job.scales = scales.mutable_data();
    return scales;
}

py::tuple quantize(const QuantPlan& plan, const py::array& x, const Layout& layout,
                   const Shape& codes_shape, const Shape& scales_shape,
                   const std::array<uint32_t, 4>& stream) {
    QuantJob job = make_job(x, layout);
    const Bytes codes = new_codes(plan, job, codes_shape);
    const py::array scales = new_scales(plan, job, layout, scales_shape);
    {
        py::gil_scoped_release release;
        current.quant->quantize(plan, {stream[0], stream[1], stream[2], stream[3]}, job);
    }
    return py::make_tuple(codes, scales, job.tensor_scale, job.saturated, job.flushed);
}

template <class T>
using Both = std::array<T, 2>;
using Words = std::array<uint32_t, 4>;

// Two jobs on one matrix: along its rows, and down its columns.
void run_pair(const Both<QuantPlan>& plans, const Both<Words>& words, QuantJob (&jobs)[2]) {
    require(jobs[0].inner == 1 && jobs[0].outer == 1 && jobs[1].outer * jobs[1].rows == 1 &&
                jobs[0].rows == jobs[1].length && jobs[0].length == jobs[1].inner,
            "pair: wanted the rows of a matrix, then its columns");
    const QuantPlan two[2] = {plans[0], plans[1]};
    QuantStream streams[2];
    for (int i = 0; i < 2; ++i) streams[i] = {words[i][0], words[i][1], words[i][2], words[i][3]};
    py::gil_scoped_release release;
    current.quant->quantize_pair(two, streams, jobs);
}

py::tuple operand_pair(const Both<QuantPlan>& plans, const py::array& x, const Both<Layout>& layouts,
                       const Both<Shape>& shapes, const Both<Words>& words) {
    QuantJob jobs[2];
    std::vector<Floats> values;
    for (int i = 0; i < 2; ++i) {
        QuantJob& job = jobs[i] = make_job(x, layouts[i]);
        require(product(shapes[i]) == job.outer * job.rows * job.coded * job.inner,
                "operand_pair: a layout does not fit its result's shape");
        values.push_back(buffers::array<float>(shapes[i]));
        job.values = values[i].mutable_data();
    }
    run_pair(plans, words, jobs);
    py::list results;
    for (int i = 0; i < 2; ++i)
        results.append(py::make_tuple(values[i], jobs[i].saturated, jobs[i].flushed));
    return results;
}

py::tuple quantize_pair(const Both<QuantPlan>& plans, const py::array& x,
                        const Both<Layout>& layouts, const Both<Shape>& codes_shapes,
                        const Both<Shape>& scales_shapes, const Both<Words>& words) {
    QuantJob jobs[2];
    py::list codes, scales;
    for (int i = 0; i < 2; ++i) {
        QuantJob& job = jobs[i] = make_job(x, layouts[i]);
        codes.append(new_codes(plans[i], job, codes_shapes[i]));
        scales.append(new_scales(plans[i], job, layouts[i], scales_shapes[i]));
    }
    run_pair(plans, words, jobs);
    py::list results;
    for (int i = 0; i < 2; ++i)
        results.append(py::make_tuple(codes[i], scales[i], jobs[i].tensor_scale, jobs[i].saturated,
                                      jobs[i].flushed));
    return results;
}

py::array dequantize(const QuantPlan& plan, const Bytes& codes, const py::array& scales,
                     float tensor_scale, const Layout& layout, const Shape& shape,
                     const py::dtype& dtype) {
    DequantJob job{};
    job.outer = layout[0], job.rows = layout[1], job.length = layout[2], job.inner = layout[3];
    job.tile_rows = layout[5], job.tile_length = layout[6], job.tensor_scale = tensor_scale;
    require(codes.size() == job.outer * job.rows * job.inner *
                                packed_bytes(plan, job.length, job.tile_length) &&
                scales.size() == tile_count(layout) &&
                product(shape) == job.outer * job.rows * job.length * job.inner,
            "dequantize: the layout does not fit codes, scales and shape");
    const bool floats = plan.scale == Scale::float32;
    require((scales.flags() & py::array::c_style) != 0 &&
                (floats ? py::isinstance<py::array_t<float>>(scales)
                        : py::isinstance<py::array_t<uint8_t>>(scales)),
            "dequantize: wanted scales as contiguous bytes, or float32 for a float scale");
    job.type = float_type(dtype);
    py::array values = buffers::array(dtype, shape);
    job.codes = codes.data();
    job.scales = scales.data();
    job.values = values.mutable_data();
    py::gil_scoped_release release;
    current.quant->dequantize(plan, job);
    return values;
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.doc() = "extensor's C++ core";
    m.def("levels", level_names, "Instruction sets this build and this CPU have, best last.");
    m.def("level", [] { return current.name; }, "The instruction set in use.");
    m.def("set_level", set_level, "Use another of `levels`.");
    m.def("threads", threads::get, "Number of threads.");
    m.def("set_threads", threads::set, "Use that many threads.");
    py::class_<QuantPlan>(m, "Plan", "A resolved QuantSpec as the kernels take it.")
        .def(py::init(&make_plan), py::kw_only(), py::arg("element"), py::arg("scale"),
             py::arg("rule"), py::arg("ties"), py::arg("stochastic"), py::arg("rbits"),
             py::arg("mx_inf_byte"), py::arg("nv_zero_byte"), py::arg("nv_tiny_saturates"),
             py::arg("window"), py::arg("element_scale"), py::arg("signs"));
    m.def("operand", operand);
    m.def("quantize", quantize);
    m.def("operand_pair", operand_pair);
    m.def("quantize_pair", quantize_pair);
    m.def("dequantize", dequantize);
    gemm::bind(m);
    train::use(current.name);
    train::bind(m);
    sgemm::use(current.name);
    sgemm::bind(m);
    windows::use(current.name);
    windows::bind(m);
    layers::use(current.name);
    layers::bind(m);
}
