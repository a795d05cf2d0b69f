// Python's view of the matrix products: block-scaled, weight-only and float32.
//
// The block-scaled kernels have levels of their own, since dot-product instructions come and go
// between CPUs. Setting the level of all kernels picks the best of these, `set_gemm_level` another.

#include <iterator>

#include "common/replay.hpp"
#include "common/dtypes.hpp"
#include "conv_pool/kernels.hpp"
#include "matmul/kernels.hpp"
#include "rows.hpp"

#if defined(EXTENSOR_X86)
#include <cpuid.h>
#if defined(EXTENSOR_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

// ---- levels ----

struct Variant {
    const char *name, *base;
    const GemmKernels* kernels;
    const char* instructions;  // of the kernels
    const TileKernels* tiles = nullptr;
    FewRows few_rows = nullptr;  // tried first
};

#if defined(EXTENSOR_AVX_VNNI)
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(EXTENSOR_AMX)
// AMX needs the system's permission, asked for once per process (Linux 5.16 and later).
bool has_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; the state's number
    constexpr unsigned kRequired = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kRequired) != kRequired) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(EXTENSOR_AVX512_BF16)
// VDPBF16PS takes as long as a float32 multiply-add on AMD's CPUs (Zen 4), and four times as long
// on Intel's, where a product on it would be slower than in float32.
bool has_fast_bf16() {
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd")) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
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
            const auto rows =
                __builtin_cpu_supports("avx512vbmi") ? avx512_vnni::few_rows_on_bytes : nullptr;
            found.push_back({"avx512_vnni", "avx512", vnni, "avx512_vnni", nullptr, rows});
#if defined(EXTENSOR_AVX512_BF16)
            if (has_fast_bf16())
                found.push_back({"avx512_bf16", "avx512", vnni, "avx512_vnni",
                                 &avx512_bf16::tile_kernels, rows});
#endif
#if defined(EXTENSOR_AMX)
            if (has_amx())
                found.push_back({"amx", "avx512", vnni, "avx512_vnni", &amx::tile_kernels, rows});
#endif
        }
    }
#endif
    return found;
}

const std::vector<Variant> variants = supported();
// Read once in a call: another thread may change it where Python's lock is released.
Variant current = variants.back();

void use(const Variant& v) {
    current = v;
    use_pair_kernels(v.name == std::string("avx512_bf16"));  // tiles are for larger products
}

void set_gemm_level(const std::string& name) {
    std::string known;
    for (const Variant& v : variants) {
        if (name == v.name) {
            use(v);
            return;
        }
        known += std::string(known.empty() ? "" : ", ") + v.name;
    }
    throw py::value_error("set_gemm_level: expected one of " + known + ", got " + name);
}

// ---- block-scaled matrices ----

// A block-scaled matrix as Python hands it over; keeps the arrays alive.
class Matrix {
public:
    explicit Matrix(const py::kwargs& f)
        : k(f["k"].cast<int64_t>()),
          codes_(f["codes"].cast<Bytes>()),
          scales_(f["scales"].cast<py::array>()) {
        const auto element = f["element"].cast<std::string>();
        m.element = -1;
        for (size_t i = 0; i < std::size(kElementNames); ++i)
            if (element == kElementNames[i]) m.element = static_cast<int>(i);
        require(m.element >= 0, "Matrix: unknown element");
        m.tile_rows = f["tile_rows"].cast<int64_t>();
        m.tile_length = f["tile_length"].cast<int64_t>();
        m.tensor_scale = f["tensor_scale"].cast<float>();
        require(codes_.ndim() == 2 && k > 0 && codes_.shape(0) > 0 && m.tile_rows > 0 &&
                    m.tile_length > 0,
                "Matrix: expected codes of (rows, bytes), and positive extents");
        const int64_t tiles = (k + m.tile_length - 1) / m.tile_length;
        m.rows = codes_.shape(0), m.row_bytes = codes_.shape(1);
        const int64_t bands = (m.rows + m.tile_rows - 1) / m.tile_rows;
        require(m.row_bytes * 8 >= tiles * m.tile_length * kElements[m.element].bits,
                "Matrix: the codes do not fit k and the tiles");
        require((scales_.flags() & py::array::c_style) != 0 && scales_.size() == bands * tiles,
                "Matrix: the scales do not fit the tiles");
        m.scale = scale_of(f["scale"].cast<std::string>(), scales_);
        m.codes = codes_.data(), m.scales = scales_.data();
        if (f.contains("minimums") || f.contains("super_scales")) read_affine(f, bands, tiles);
        zeros_ = f["zero_points"];
        if (zeros_.is_none()) return;
        require(py::isinstance<CArray<int8_t>>(zeros_), "Matrix: expected zero points as int8");
        const auto zeros = zeros_.cast<CArray<int8_t>>();
        require(zeros.size() == bands * tiles, "Matrix: the zero points do not fit the tiles");
        m.zero_points = zeros.data();
    }

    const Bytes& codes() const { return codes_; }
    const py::array& scales() const { return scales_; }

    // Whether only weight-only products read it.
    bool affine() const { return m.minimums || m.super_scales; }

    BlockedMatrix m{};
    int64_t k;

private:
    static Scale scale_of(const std::string& name, const py::array& scales) {
        constexpr struct {
            const char* name;
            Scale scale;
            char kind;
            py::ssize_t bytes;
        } kScales[] = {{"e8m0", Scale::e8m0, 'u', 1},       {"ue4m3", Scale::ue4m3, 'u', 1},
                       {"float32", Scale::float32, 'f', 4}, {"float16", Scale::float16, 'f', 2},
                       {"int8", Scale::int8, 'i', 1},       {"uint8", Scale::uint8, 'u', 1}};
        const char kind = scales.dtype().kind();
        for (const auto& row : kScales) {
            if (name != row.name) continue;
            // Float16 scales may have been widened.
            const bool wide = row.scale == Scale::float16 && scales.itemsize() == 4;
            require(kind == row.kind && (scales.itemsize() == row.bytes || wide),
                    "Matrix: the scales are not stored as their name says");
            return wide ? Scale::float32 : row.scale;
        }
        throw py::value_error("Matrix: unknown scale " + name);
    }

    // The array of this name, whose data the matrix then reads; null for None.
    const void* part(const py::kwargs& f, const char* name, const char* kinds, py::ssize_t bytes,
                     int64_t size) {
        const py::object given = f[name];
        if (given.is_none()) return nullptr;
        const auto array = given.cast<py::array>();
        const char kind = array.dtype().kind();
        require(std::string(kinds).find(kind) != std::string::npos && array.itemsize() == bytes &&
                    (array.flags() & py::array::c_style) != 0 && array.size() == size,
                "Matrix: minimums or super-blocks do not fit the tiles");
        affine_.push_back(array);
        return array.data();
    }

    void read_affine(const py::kwargs& f, int64_t bands, int64_t tiles) {
        m.super_tiles = f["super_tiles"].cast<int64_t>();
        require(m.super_tiles > 0 && m.tile_rows == 1, "Matrix: expected tiles of one row");
        const int64_t supers = bands * ((tiles + m.super_tiles - 1) / m.super_tiles);
        m.minimums = part(f, "minimums", "fu", scales_.itemsize(), bands * tiles);
        m.super_scales = static_cast<const uint16_t*>(part(f, "super_scales", "f", 2, supers));
        m.super_minimums = static_cast<const uint16_t*>(part(f, "super_minimums", "f", 2, supers));
        require((m.super_scales != nullptr) == (m.scale == Scale::int8 || m.scale == Scale::uint8),
                "Matrix: integer scales come with super-blocks, and only these");
        require((m.super_minimums != nullptr) == (m.minimums && m.super_scales),
                "Matrix: expected minimums of super-blocks where there are both");
    }

    Bytes codes_;
    py::array scales_;
    py::object zeros_;
    std::vector<py::array> affine_;
};

void require_blocks(const Matrix& a, const Matrix& b) {
    require(!a.affine() && !b.affine(),
            "expected matrices without minimums and super-blocks; only weight-only products take "
            "them");
}

bool small_integers(const Matrix& m) {
    const Element& e = kElements[m.m.element];
    return !e.is_float || e.mantissa_bits + (e.max_code >> e.mantissa_bits) <= 6;
}

// a b^T. `step` 0: in float32, whatever the elements; else exact integer sums over `step` elements.
// `fixed`: no values of a would have led to another product, so that a captured step may repeat it.
Floats block_scaled_matmul(const Matrix& a, const Matrix& b, int64_t step, bool fixed) {
    require(a.k == b.k, "block_scaled_matmul: the matrices differ in k");
    require_blocks(a, b);
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, step, out.mutable_data()};
    if (step == 0) {
        require(!a.m.zero_points && !b.m.zero_points,
                "block_scaled_matmul: zero points need a step");
        without_gil([&] { current.kernels->floating(g); });
        return out;
    }
    require(step > 0 && step % 4 == 0 && step <= kMaxStep, "block_scaled_matmul: wrong step");
    for (const Matrix* side : {&a, &b}) {
        require(side->m.tile_length % step == 0 || side->m.tile_length >= side->k,
                "block_scaled_matmul: a step would cross a tile");
        require(small_integers(*side), "block_scaled_matmul: the elements are not small integers");
    }
    if (fixed && !a.m.zero_points && !b.m.zero_points && a.m.tensor_scale == 1)
        launch({&a.codes(), &a.scales()}, {&out},
               [g, kernel = current.kernels->integer] { kernel(g); }, {&b.codes(), &b.scales()});
    else
        without_gil([&] { current.kernels->integer(g); });
    return out;
}

// a b^T of small integers on AMX tiles of int8, each row under one float32 scale. The result has
// the same bits as that of block_scaled_matmul.
Floats int8_matmul(const Matrix& a, const Matrix& b) {
    const TileKernels* tiles = current.tiles;
    require(tiles && tiles->integer, "int8_matmul: this level has no tiles of int8");
    require(a.k == b.k, "int8_matmul: the matrices differ in k");
    require_blocks(a, b);
    for (const Matrix* side : {&a, &b})
        require(small_integers(*side) && side->m.scale == Scale::float32 &&
                    side->m.tile_length >= side->k,
                "int8_matmul: expected small integers, and one float32 scale a row");
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, 0, out.mutable_data()};
    without_gil([&] { tiles->integer(g); });
    return out;
}

// a b^T on tiles of bfloat16. The caller knows that every value is exactly a bfloat16 and that
// no sum leaves float32's normal range (extensor/backends/cpu/product_paths.py).
Floats bf16_matmul(const Matrix& a, const Matrix& b) {
    const TileKernels* tiles = current.tiles;
    require(tiles != nullptr, "bf16_matmul: this level has no tiles of bfloat16");
    require(a.k == b.k, "bf16_matmul: the matrices differ in k");
    require_blocks(a, b);
    for (const Matrix* side : {&a, &b})
        require(!side->m.zero_points && is_byte(side->m.scale),
                "bf16_matmul: expected scales as bytes, and no zero points");
    Floats out = buffers::array<float>({a.m.rows, b.m.rows});
    const BlockGemm g{a.m, b.m, a.k, 0, out.mutable_data()};
    without_gil([&] { tiles->codes(g); });
    return out;
}

// a (m, k) times b (k, n), both bfloat16 values times one factor (see `bf16_range`). Each is
// C-contiguous or the transpose of such an array.
Floats bf16_value_matmul(const py::array_t<float>& a, const py::array_t<float>& b, float a_factor,
                         float b_factor) {
    const TileKernels* tiles = current.tiles;
    require(tiles != nullptr, "bf16_value_matmul: this level has no tiles of bfloat16");
    require(a.ndim() == 2 && b.ndim() == 2 && a.shape(1) == b.shape(0) && a.size() && b.size(),
            "bf16_value_matmul: expected (m, k) and (k, n)");
    for (const auto* x : {&a, &b})
        require((x->flags() & (py::array::c_style | py::array::f_style)) != 0,
                "bf16_value_matmul: expected contiguous arrays");
    Floats out = buffers::array<float>({a.shape(0), b.shape(1)});
    const ValueGemm g{a.data(),
                      b.data(),
                      a_factor,
                      b_factor,
                      (a.flags() & py::array::c_style) != 0,
                      (b.flags() & py::array::f_style) != 0,
                      a.shape(0),
                      b.shape(1),
                      a.shape(1),
                      out.mutable_data()};
    without_gil([&] { tiles->values(g); });
    return out;
}

py::tuple bf16_range(const py::array_t<float>& x) {
    const TileKernels* tiles = current.tiles;
    require(tiles != nullptr, "bf16_range: this level has no tiles of bfloat16");
    require((x.flags() & (py::array::c_style | py::array::f_style)) != 0,
            "bf16_range: expected a contiguous array");
    const ValueRange found = without_gil([&] { return tiles->range(x.data(), x.size()); });
    return py::make_tuple(found.factor, found.low, found.high);
}

// Weight-only products of the same x: in a replay, those that follow each other.
struct WeightProducts {
    FewRows few_rows;
    void (*kernel)(const WeightGemm&);
    std::vector<WeightGemm> products;

    void operator()() const {
        if (few_rows && few_rows(products.data(), static_cast<int>(products.size()))) return;
        for (const WeightGemm& g : products) kernel(g);
    }

    std::optional<WeightProducts> joined(const WeightProducts& later) const {
        const WeightGemm &mine = products.back(), &next = later.products.front();
        if (!few_rows || mine.m != 1 || next.m != 1) return {};
        if (mine.x != next.x || mine.k != next.k) return {};
        if (few_rows != later.few_rows || kernel != later.kernel || !alike(mine.w, next.w))
            return {};
        WeightProducts both = *this;
        both.products.insert(both.products.end(), later.products.begin(), later.products.end());
        return both;
    }

private:
    // Whether values of x are rounded to the same integers beside both.
    static bool alike(const BlockedMatrix& a, const BlockedMatrix& b) {
        return a.element == b.element && a.scale == b.scale && a.tile_rows == b.tile_rows &&
               a.tile_length == b.tile_length && !a.minimums == !b.minimums &&
               !a.zero_points == !b.zero_points && !a.super_scales == !b.super_scales;
    }
};

Floats weight_only_matmul(const Floats& x, const Matrix& w) {
    require(x.ndim() == 2 && x.shape(1) == w.k && x.shape(0) > 0,
            "weight_only_matmul: expected x of (rows, k)");
    Floats out = buffers::array<float>({x.shape(0), static_cast<py::ssize_t>(w.m.rows)});
    const WeightGemm g{w.m, x.data(), x.shape(0), w.k, out.mutable_data()};
    launch({&x}, {&out}, WeightProducts{current.few_rows, current.kernels->weights, {g}});
    return out;
}

// ---- float32 matrices ----

constexpr int64_t kBatched =
    1 << 20;  // multiply-adds: smaller products of a batch take one thread each

// The last two axes of an array as a float32 matrix that is contiguous along one of them.
struct Side {
    const float* at;
    int64_t rows, columns, ld;
    bool transposed;
};

std::optional<Side> side_of(const py::array& x) {
    const py::ssize_t n = x.ndim();
    if (n < 2 || !py::isinstance<py::array_t<float>>(x)) return {};
    Side s{static_cast<const float*>(x.data()), x.shape(n - 2), x.shape(n - 1), 0, false};
    const int64_t row_stride = x.strides(n - 2), column_stride = x.strides(n - 1);
    if (reinterpret_cast<uintptr_t>(s.at) % 4 || row_stride % 4 || column_stride % 4) return {};
    if (column_stride == 4 || s.columns == 1 || !x.size()) {
        s.ld = row_stride / 4;
    } else if (row_stride == 4 || s.rows == 1) {
        s.ld = column_stride / 4, s.transposed = true;
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

bool supports_matmul(const py::array& a, const py::array& b) {
    return side_of(a) && side_of(b) && steps_in_floats(a) && steps_in_floats(b);
}

// a (..., M, K) b (..., K, N), + bias (N,): (..., M, N).
py::array matmul(const py::array& a, const py::array& b, const py::object& bias) {
    require(supports_matmul(a, b), "matmul: expected float32 matrices, contiguous along one axis");
    const auto left = side_of(a), right = side_of(b);
    require(left->columns == right->rows, "matmul: expected as many rows on the right as columns");
    Shape shape;
    const py::ssize_t axes = std::max(a.ndim(), b.ndim()) - 2;
    for (py::ssize_t i = 0; i < axes; ++i) {
        const py::ssize_t ia = i - axes + a.ndim() - 2, ib = i - axes + b.ndim() - 2;
        const py::ssize_t na = ia < 0 ? 1 : a.shape(ia), nb = ib < 0 ? 1 : b.shape(ib);
        require(na == nb || na == 1 || nb == 1, "matmul: expected leading axes that broadcast");
        shape.push_back(na == 1 ? nb : na);
    }
    const Shape lead = shape;
    shape.push_back(left->rows), shape.push_back(right->columns);
    Floats c = buffers::array<float>(shape), row;
    Product s{left->rows, right->columns, left->columns,    left->at,
              right->at,  nullptr,        c.mutable_data(), left->ld,
              right->ld,  right->columns, left->transposed, right->transposed};
    if (!bias.is_none()) {
        row = py::cast<Floats>(bias);
        require(row.ndim() == 1 && row.size() == s.n, "matmul: expected a bias for each column");
        s.bias = row.data();
    }
    if (!c.size()) return c;
    const std::vector<int64_t> at_a = offsets(a, lead), at_b = offsets(b, lead);
    const ProductKernels& products = levels::in_use(product_kernels);
    WithoutGil released;
    if (at_a.size() > 1 && s.m * s.n * s.k <= kBatched) {
        products.batch(s, static_cast<int64_t>(at_a.size()), at_a.data(), at_b.data());
    } else {
        for (size_t i = 0; i < at_a.size(); ++i) {
            Product one = s;
            one.a += at_a[i], one.b += at_b[i], one.c += static_cast<int64_t>(i) * s.m * s.n;
            products.product(one);
        }
    }
    return c;
}

}  // namespace

void use_best_gemm_level() {
    for (const Variant& v : variants)
        if (std::string(levels::kNames[levels::current]) == v.base) use(v);
}

void bind_matmul(py::module_& m) {
    use(current);
    m.def(
        "gemm_levels",
        [] {
            std::vector<std::string> names;
            for (const Variant& v : variants) names.emplace_back(v.name);
            return names;
        },
        "Levels of the block-scaled products, best last.");
    m.def("gemm_level", [] { return current.name; }, "The level in use.");
    m.def(
        "gemm_instructions", [] { return current.instructions; },
        "What the kernels of the level in use are compiled for; tiles come on top.");
    m.def("set_gemm_level", set_gemm_level, "Use another of `gemm_levels`.");
    m.def(
        "gemm_has_bf16", [] { return current.tiles != nullptr; },
        "Whether the level in use has `bf16_matmul`.");
    m.def(
        "gemm_has_amx", [] { return current.tiles && current.tiles->integer; },
        "Whether it has `int8_matmul` as well.");
    py::class_<Matrix>(m, "Matrix", "A block-scaled matrix as the products read it.")
        .def(py::init<const py::kwargs&>());
    m.def("block_scaled_matmul", block_scaled_matmul, py::arg("a"), py::arg("b"), py::arg("step"),
          py::arg("fixed") = false);
    m.def("int8_matmul", int8_matmul);
    m.def("bf16_matmul", bf16_matmul);
    m.def("bf16_value_matmul", bf16_value_matmul, py::arg("a").noconvert(),
          py::arg("b").noconvert(), py::arg("a_factor"), py::arg("b_factor"));
    m.def("bf16_range", bf16_range, py::arg("x").noconvert());
    m.def("weight_only_matmul", weight_only_matmul);
    m.def("matmul", matmul, py::arg("a"), py::arg("b"), py::arg("bias") = py::none());
    m.def("supports_matmul", supports_matmul);
}
