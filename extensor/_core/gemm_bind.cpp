// Products of blocked matrices: argument checks, allocation and the choice of variant.
//
// The variants of one instruction set differ in the dot-product instructions they use; setting the
// level of all kernels picks the best variant, `set_gemm_level` another one.

#include "gemm_bind.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "buffers.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"

#if defined(EXTENSOR_X86)
#include <cpuid.h>
#if defined(EXTENSOR_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace py = pybind11;

namespace gemm {
namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

struct Variant {
    const char *name, *base;
    const GemmKernels* kernels;
    const char* instructions;  // of the kernels
    const TileKernels* tiles = nullptr;
};

#if defined(EXTENSOR_AVX_VNNI)
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(EXTENSOR_AMX)
// Tile registers are switched on per process, by asking the system (Linux 5.16 and later).
bool has_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; the state's number
    constexpr unsigned kWanted = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kWanted) != kWanted) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<Variant> supported() {
    std::vector<Variant> found = {{"scalar", "scalar", &scalar::gemm_kernels, "scalar"}};
#if defined(EXTENSOR_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2) found.push_back({"avx2", "avx2", &avx2::gemm_kernels, "avx2"});
#if defined(EXTENSOR_AVX_VNNI)
    if (avx2 && has_avx_vnni()) 
        found.push_back({"avx_vnni", "avx2", &avx_vnni::gemm_kernels, "avx_vnni"});
#endif
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back({"avx512", "avx512", &avx512::gemm_kernels, "avx512"});
        if (__builtin_cpu_supports("avx512vnni")) {
            const GemmKernels* vnni = &avx512_vnni::gemm_kernels;
            found.push_back({"avx512_vnni", "avx512", vnni, "avx512_vnni"});
#if defined(EXTENSOR_AMX)
            if (has_amx())
                found.push_back({"amx", "avx512", vnni, "avx512_vnni", &amx::tile_kernels});
#endif
        }
    }
#endif
    return found;
}

const std::vector<Variant> variants = supported();
Variant current = variants.back();

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

void set_level(const std::string& name) {
    std::string known;
    for (const Variant& v : variants) {
        if (name == v.name) {
            current = v;
            return;
        }
        known += std::string(known.empty() ? "" : ", ") + v.name;
    }
    throw py::value_error("set_gemm_level: wanted one of " + known + ", got " + name);
}

// A blocked matrix as Python hands it over; keeps the arrays alive.
class Matrix {
public:
    Matrix(const std::string& element, const Bytes& codes, const py::array& scales,
           const py::object& zero_points, float tensor_scale, int64_t k, int64_t tile_rows,
           int64_t tile_length)
        : k(k), codes_(codes), scales_(scales) {
        m.element = -1;
        for (size_t i = 0; i < std::size(kElementNames); ++i)
            if (element == kElementNames[i]) m.element = static_cast<int>(i);
        require(m.element >= 0, "Matrix: unknown element");
        require(codes.ndim() == 2 && k > 0 && codes.shape(0) > 0 && tile_rows > 0 && tile_length > 0,
                "Matrix: wanted codes of (rows, bytes), and positive extents");
        const int64_t tiles = (k + tile_length - 1) / tile_length;
        m.rows = codes.shape(0), m.row_bytes = codes.shape(1);
        m.tile_rows = tile_rows, m.tile_length = tile_length, m.tensor_scale = tensor_scale;
        const int64_t bands = (m.rows + tile_rows - 1) / tile_rows;
        require(m.row_bytes * 8 >= tiles * tile_length * kElements[m.element].bits,
                "Matrix: the codes do not fit k and the tiles");
        require((scales.flags() & py::array::c_style) != 0 && scales.size() == bands * tiles,
                "Matrix: the scales do not fit the tiles");
        const bool floats = py::isinstance<py::array_t<float>>(scales);
        require(floats || py::isinstance<py::array_t<uint8_t>>(scales),
                "Matrix: wanted scales as bytes or float32");
        m.scale = static_cast<int>(floats ? Scale::float32 : Scale::e8m0);
        m.codes = codes.data(), m.scales = scales.data();
        if (!zero_points.is_none()) {
            using Signed = py::array_t<int8_t, py::array::c_style>;
            require(py::isinstance<Signed>(zero_points), "Matrix: wanted zero points as int8");
            const Signed zeros = zero_points.cast<Signed>();
            require(zeros.size() == bands * tiles, "Matrix: the zero points do not fit the tiles");
            zeros_ = zeros;
            m.zero_points = zeros.data();
        }
    }

    void set_ue4m3() {
        require(m.scale == static_cast<int>(Scale::e8m0), "Matrix: wanted scales as bytes");
        m.scale = static_cast<int>(Scale::ue4m3);
    }

    BlockedMatrix m{};
    int64_t k;

private:
    Bytes codes_;
    py::array scales_;
    py::object zeros_;
};

bool small_integers(const Matrix& m) {
    const Element& e = kElements[m.m.element];
    return !e.is_float || e.mantissa_bits + (e.max_code >> e.mantissa_bits) <= 6;
}

// a b^T; `step` 0: in floats, whatever the elements.
Floats block_matmul(const Matrix& a, const Matrix& b, int64_t step) {
    require(a.k == b.k, "block_matmul: the matrices differ in k");
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, step, out.mutable_data()};
    if (step == 0) {
        require(!a.m.zero_points && !b.m.zero_points, "block_matmul: zero points need a step");
        py::gil_scoped_release release;
        current.kernels->floating(g);
        return out;
    }
    require(step > 0 && step % 4 == 0 && step <= kMaxStep, "block_matmul: wrong step");
    for (const Matrix* side : {&a, &b}) {
        require(side->m.tile_length % step == 0 || side->m.tile_length >= side->k,
                "block_matmul: a step would cross a tile");
        require(small_integers(*side), "block_matmul: the elements are not small integers");
    }
    py::gil_scoped_release release;
    current.kernels->integer(g);
    return out;
}

// a b^T of small integers on tiles of int8, each row under one float32 scale: the bits of
// block_matmul.
Floats int8_matmul(const Matrix& a, const Matrix& b) {
    require(current.tiles != nullptr, "int8_matmul: this level has no tiles of int8");
    require(a.k == b.k, "int8_matmul: the matrices differ in k");
    for (const Matrix* side : {&a, &b})
        require(small_integers(*side) && side->m.scale == static_cast<int>(Scale::float32) &&
                    side->m.tile_length >= side->k,
                "int8_matmul: wanted small integers, and one float32 scale a row");
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, 0, out.mutable_data()};
    py::gil_scoped_release release;
    current.tiles->integer(g);
    return out;
}

// a b^T on tiles of bfloat16; that every value is one, and no sum leaves float32's normal range, is
// the caller's to know (`bf16_reason` in extensor/backends/cpu/product_paths.py).
Floats bf16_matmul(const Matrix& a, const Matrix& b) {
    require(current.tiles != nullptr, "bf16_matmul: this level has no tiles of bfloat16");
    require(a.k == b.k, "bf16_matmul: the matrices differ in k");
    for (const Matrix* side : {&a, &b})
        require(!side->m.zero_points && side->m.scale != static_cast<int>(Scale::float32),
                "bf16_matmul: wanted scales as bytes, and no zero points");
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, 0, out.mutable_data()};
    py::gil_scoped_release release;
    current.tiles->codes(g);
    return out;
}

// a (m, k) times b (k, n) of bfloat16 values times a factor each, as `bf16_range` found them; each
// C-contiguous or the transpose of such an array.
Floats bf16_value_matmul(const py::array_t<float>& a, const py::array_t<float>& b, float a_factor,
                         float b_factor) {
    require(current.tiles != nullptr, "bf16_value_matmul: this level has no tiles of bfloat16");
    require(a.ndim() == 2 && b.ndim() == 2 && a.shape(1) == b.shape(0) && a.size() && b.size(),
            "bf16_value_matmul: wanted (m, k) and (k, n)");
    for (const auto* x : {&a, &b})
        require((x->flags() & (py::array::c_style | py::array::f_style)) != 0,
                "bf16_value_matmul: wanted contiguous arrays");
    Floats out = buffers::array<float>({a.shape(0), b.shape(1)});
    const ValueGemm g{a.data(), b.data(), a_factor, b_factor, (a.flags() & py::array::c_style) != 0,
                      (b.flags() & py::array::f_style) != 0, a.shape(0), b.shape(1), a.shape(1),
                      out.mutable_data()};
    py::gil_scoped_release release;
    current.tiles->values(g);
    return out;
}

py::tuple bf16_range(const py::array_t<float>& x) {
    require(current.tiles != nullptr, "bf16_range: this level has no tiles of bfloat16");
    require((x.flags() & (py::array::c_style | py::array::f_style)) != 0,
            "bf16_range: wanted a contiguous array");
    ValueRange found;
    {
        py::gil_scoped_release release;
        found = current.tiles->range(x.data(), x.size());
    }
    return py::make_tuple(found.factor, found.low, found.high);
}

Floats weight_matmul(const Floats& x, const Matrix& w) {
    require(x.ndim() == 2 && x.shape(1) == w.k && x.shape(0) > 0 && x.shape(0) <= kMaxRows,
            "weight_matmul: wanted x of (1 to 32, k)");
    const int bits = kElements[w.m.element].bits;
    const int64_t tile = w.m.tile_length;
    require(bits == 8 || (bits == 4 && (tile == 16 || tile == 32 || tile == 64 || tile % 128 == 0 ||
                                        tile >= w.k)),
            "weight_matmul: wanted elements of 8 bits, or 4 in blocks of 16, 32, 64 or 128 n");
    Floats out = buffers::array<float>({x.shape(0), static_cast<py::ssize_t>(w.m.rows)});
    const WeightGemm g{w.m, x.data(), x.shape(0), w.k, out.mutable_data()};
    py::gil_scoped_release release;
    current.kernels->weights(g);
    return out;
}

}  // namespace

void use_best(const std::string& base) {
    for (const Variant& v : variants)
        if (base == v.base) current = v;
}

void bind(py::module_& m) {
    m.def("gemm_levels", [] {
        std::vector<std::string> names;
        for (const Variant& v : variants) names.emplace_back(v.name);
        return names;
    }, "Variants of the blocked products, best last.");
    m.def("gemm_level", [] { return current.name; }, "The variant in use.");
    m.def("gemm_instructions", [] { return current.instructions; },
          "What the kernels of the variant in use are compiled for; its tiles come on top.");
    m.def("set_gemm_level", set_level, "Use another of `gemm_levels`.");
    py::class_<Matrix>(m, "Matrix", "A blocked matrix as the products take it.")
        .def(py::init([](const std::string& element, const std::string& scale, const Bytes& codes,
                         const py::array& scales, const py::object& zero_points, float tensor_scale,
                         int64_t k, int64_t tile_rows, int64_t tile_length) {
                 auto made = std::make_unique<Matrix>(element, codes, scales, zero_points,
                                                      tensor_scale, k, tile_rows, tile_length);
                 if (scale == "ue4m3") made->set_ue4m3();
                 return made;
             }),
             py::kw_only(), py::arg("element"), py::arg("scale"), py::arg("codes"),
             py::arg("scales"), py::arg("zero_points"), py::arg("tensor_scale"), py::arg("k"),
             py::arg("tile_rows"), py::arg("tile_length"));
    m.def("block_matmul", block_matmul);
    m.def("int8_matmul", int8_matmul);
    m.def("bf16_matmul", bf16_matmul);
    m.def("bf16_value_matmul", bf16_value_matmul, py::arg("a").noconvert(),
          py::arg("b").noconvert(), py::arg("a_factor"), py::arg("b_factor"));
    m.def("bf16_range", bf16_range, py::arg("x").noconvert());
    m.def("gemm_has_tiles", [] { return current.tiles != nullptr; },
          "Whether the variant in use has `bf16_matmul` and `int8_matmul`.");
    m.def("weight_matmul", weight_matmul);
}

}  // namespace gemm
