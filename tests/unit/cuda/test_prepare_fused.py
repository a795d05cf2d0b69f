"""Training's operands on Hopper: the reference's values bit for bit, and their products' bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.ops.quantized import layer_context
from extensor.quant import reference
from extensor.quant.recipe import SLOTS
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.prepare import expand as expanding
from extensor_cuda.kernels.prepare import quantize_operand
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.matmul import fused, prepare, tuned
from extensor_cuda.matmul.fallback_count import FallbackCounter
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.matmul.product import product
from extensor_cuda.runtime.compile import compile_cubin
from extensor_cuda.runtime.counters import Reserve
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.preparing import FUSED, batch, gap
from tests.unit.cuda.preparing import made as made_by
from tests.unit.cuda.test_compile import properties

SHAPES = ((256, 256), (200, 328), (1, 40), (32, 8), (129, 136), (67, 1000))
ROUNDINGS = ("nearest_even", "stochastic")
DTYPES = ("bfloat16", "float32")
E5M2 = ml_dtypes.float8_e5m2


def spec_of(axis: int, rounding: str = "nearest_even", rule: str = "rceil") -> QuantSpec:
    return QuantSpec("mxfp4", axis=axis, scale_rule=rule, rounding=rounding).resolve(2)


WIDE_FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxint8")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_kernels_compile_without_spills(rounding: str, dtype: str) -> None:
    fp4, others = (
        spec_of(1, rounding),
        [spec_of(1, rounding).replace(format=name) for name in WIDE_FORMATS],
    )
    cases = [(fp4, 1, 0, 0), (fp4, 0, 1, 0), (fp4, 1, 1, 0), (fp4, 1, 0, 1), (fp4, 0, 1, 1)]
    sources = [
        quantize_operand.fused_source(spec, dtype, bool(rowwise), bool(columnwise), bool(wide))
        for spec, rowwise, columnwise, wide in cases + [(spec, 1, 1, 1) for spec in others]
    ]
    if rounding == "nearest_even":
        many = [
            quantize_operand.fused_source(fp4, dtype, True, d, False, many=True)
            for d in (False, True)
        ]
        sources += many
    if (rounding, dtype) == ("nearest_even", "bfloat16"):
        sources.append(quantize_operand.fused_source(fp4, dtype, True, True, False, packed=True))
    for source in sources:
        code, log = compile_cubin(source, "sm_90a")
        assert "warning" not in log, log
        for numbers in properties(code).values():
            assert numbers["stack"] == 0, f"{source.macros}: {numbers}"


def test_the_quantizers_macros_stay_theirs() -> None:
    plan = kernels.plan_of(spec_of(1).replace(format="mxfp8_e4m3"), (256, 256))
    assert isinstance(plan, kernels.Plan)
    theirs = dict(kernels.quantize_source(plan, "float32", "values", True, True).macros)
    ours = dict(quantize_operand.fused_source(plan.spec, "float32", True, True, True).macros)
    assert theirs.items() <= ours.items()


PRELUDE = """
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE inline
struct Scale { float apply; };
struct Stream {};
inline void philox(u32, u32, const Stream&, u32 (&)[4]) {}
inline u32 bits_of(float v) { return __float_as_uint(v); }
inline float float_of(u32 v) { return __uint_as_float(v); }
inline u32 low_float(u32 pair) { return pair << 16; }
inline u32 high_float(u32 pair) { return pair & 0xFFFF0000u; }
inline u32 pair_max(u32 a, u32 b) {
    const u32 low = max(a & 0xFFFFu, b & 0xFFFFu);
    return low | max(a >> 16, b >> 16) << 16;
}
inline u32 pair_min(u32 a, u32 b) { return ~pair_max(~a, ~b); }
inline bool holds_zero(u32 pair) { return !(pair & 0x7FFFu) || !(pair & 0x7FFF0000u); }
constexpr u32 kPairMagnitude = 0x7FFF7FFFu;
"""
ENTRY = """
extern "C" __global__ void
codes_of(const u32* x, const Scale* scale, const u32* words, u32* codes, int count) {
    for (int i = threadIdx.x; i < count; i += 32) {
        const u32 pair[4] = {x[2 * i], x[2 * i + 1], x[2 * i], x[2 * i + 1]};
        const u32 a = pair[0], b = pair[1], *word = words + 4 * i;
        const u32 v[4] = {low_float(a), high_float(a), low_float(b), high_float(b)};
        const u32 w[4] = {word[0], word[1], word[2], word[3]};
        BlockStats survey;
        survey.add(pair);
        bool far = false;
        for (int h = 0; h < 32; h += 16)
            far |= float_of(survey.largest >> h << 16) * scale->apply >= float_of(CODEC_CLAMP_BITS);
        codes[i] = needs_care(far, survey.least, *scale, *scale)
                       ? four_codes<true>(v, scale->apply, w)
                       : four_codes<false>(v, scale->apply, w);
    }
}
"""


def steps_of(y: np.ndarray, words: np.ndarray) -> np.ndarray:
    """E2M1's magnitudes up to 10 by the definition, in whole numbers of 2**-160: y in float64."""
    spacing = np.where(y < 2, 0.5, np.where(y < 4, 1.0, np.where(y < 8, 2.0, 4.0)))
    first = np.where(y < 2, 0, np.where(y < 4, 4, np.where(y < 8, 6, 8)))
    start = np.where(y < 2, 0.0, np.where(y < 4, 2.0, np.where(y < 8, 4.0, 8.0)))
    steps = np.floor((y - start) / spacing)
    part = (y - start) / spacing - steps
    return (first + steps + (part * 2.0**32 > words)).astype(np.int64)


@pytest.mark.parametrize("rbits", [8, 32])
def test_what_rounds_by_chance_in_halves_is_the_rule(emulator: Any, rbits: int) -> None:
    """Every bfloat16 up to 16 under several scales, with the words at which its code changes."""
    program = quantize_operand.fused_source(
        spec_of(1, "stochastic").replace(rbits=rbits), "bfloat16", True, True, False
    )
    text = program.text
    start = text.index("#if CODEC_BF16X8\nstatic_assert")
    text = text[start : text.index("// Converts 4-bit codes to E5M2", start)]
    source = replace(program, text=PRELUDE + text + ENTRY)
    rng = np.random.default_rng(rbits)
    for power in (0, 3, -100, 110, 126):
        bits = np.arange(0, 0x7F80, dtype=np.uint16)  # all finite ones
        x = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        with np.errstate(over="ignore", under="ignore"):
            y = np.ldexp(x, power).astype(np.float64)  # what underflows is 0 everywhere
        bits, y = bits[y <= 16], y[y <= 16]
        part = np.modf(y * np.where(y < 2, 2, np.where(y < 4, 1, np.where(y < 8, 0.5, 0.25))))[0]
        edge = np.ceil(part * 2.0**32)
        words = np.stack([edge - 1, edge, edge + 1, rng.integers(0, 1 << 32, len(y))])
        words = np.clip(words, 0, 2**32 - 1).astype(np.uint32)
        if rbits == 8:
            words = words & np.uint32(0xFF000000) | np.uint32(1 << 23)
        for word in [*words, np.zeros_like(words[0]), np.full_like(words[0], 2**32 - 1)]:
            if rbits == 8:
                word = word & np.uint32(0xFF000000) | np.uint32(1 << 23)
            order = rng.permutation(len(y) // 4 * 4)
            signs = rng.integers(0, 2, len(order), dtype=np.uint16) << 15
            given = np.ascontiguousarray((bits[order] | signs).astype(np.uint16).view(np.uint32))
            taken = np.ascontiguousarray(word[order])
            apply = np.ldexp(np.ones(1, np.float32), power)
            codes = np.zeros(len(order) // 4, np.uint32)
            emulator(source, "codes_of", 1, 32, given, apply, taken, codes, np.int32(len(codes)))
            got = codes[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
            np.testing.assert_array_equal(got.reshape(-1), steps_of(y[order], taken))


@pytest.fixture
def hopper(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if cuda.xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: no wgmma")
    monkeypatch.setattr(tuned, "MIN_WORK", 1)
    return cuda


def data(shape: tuple[int, int], dtype: str, kind: str) -> np.ndarray:
    rng = np.random.default_rng(shape[0])
    x = rng.standard_normal(shape)
    if kind == "wide":
        x *= np.exp2(rng.integers(-9, 10, shape))
    elif kind == "special":
        x[x < -1] = 0
        x[0, 0] = -0.0
        x[-1, -1] = x[-1, 2] = np.nan  # in either half of a pair
        x[shape[0] // 2] = 0
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def values_of(operand: GemmOperand) -> np.ndarray:
    codes = np.ascontiguousarray(operand.codes.get()).view(E5M2).astype(np.float32)
    return np.ldexp(codes, int(operand.scale.exponent.get()[0]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rows_and_columns_are_the_references_bit_for_bit(
    hopper: Any, rounding: str, dtype: str, kind: str, shape: tuple[int, int]
) -> None:
    x = data(shape, dtype, kind)
    if shape[1] * x.itemsize % 16:
        pytest.skip("rows are no multiple of 16 bytes")
    specs = [spec_of(1, rounding), spec_of(0, rounding)]
    streams = [Stream(1, 2, 3, i, bool(i)) if rounding == "stochastic" else None for i in (0, 1)]
    there, cpu = hopper.xp.asarray(x), registry.get("cpu")
    pair = made_by(FUSED, there, specs, streams, hopper.xp)
    for i, both in enumerate(pair):
        (single,) = made_by(FUSED, there, [specs[i]], [streams[i]], hopper.xp)
        expected, stats = cpu.fake_quantize(x, specs[i], streams[i])
        expected = expected if i == 0 else expected.T
        set_flag = hopper.xp.asarray(1, dtype=np.uint32)
        for made in (both, single):
            operand, counts = made
            assert not int(operand.flag)
            got = values_of(operand)
            np.testing.assert_array_equal(got, expected)
            live = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(got[live]), np.signbit(expected[live]))
            assert counts() == stats
            wide = operand.bf16((set_flag, set_flag)).codes.get().view(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(wide[:, : expected.shape[1]].astype(np.float32), expected)


@pytest.mark.parametrize("shape", [(200, 328), (32, 8), (129, 136)], ids=str)
@pytest.mark.parametrize("kind", ["wide", "special"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_columns_are_packed_beside_the_operand_of_rows(
    xp: Any, rounding: str, kind: str, shape: tuple[int, int]
) -> None:
    x = data(shape, "bfloat16", kind)
    specs = [spec_of(1, rounding), spec_of(0, rounding)]
    streams = [Stream(1, 2, 3, i, bool(i)) if rounding == "stochastic" else None for i in (0, 1)]
    there = xp.asarray(x)
    both = prepare.GemmPreparation(there, specs, streams, FUSED, "", None, {}, xp)
    assert both.packs_second
    (rows, counts), (columns, others) = both.run_packing()
    alone, expected_counts = made_by(FUSED, there, specs[:1], streams[:1], xp, {})[0]
    assert rows.codes.get().tobytes() == alone.codes.get().tobytes()
    assert (int(rows.scale.exponent[0]), int(rows.flag)) == (int(alone.scale.exponent[0]), 0)
    assert counts() == expected_counts()
    q, stats = reference.quantize(x, specs[1], streams[1])
    for name, part in q.parts.items():
        assert columns.q.parts[name].get().tobytes() == part.tobytes(), name
    assert others() == stats
    floats = xp.asarray(x.astype(np.float32))  # which that launch does not read
    assert not prepare.GemmPreparation(floats, specs, streams, FUSED, "", None, {}, xp).packs_second


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_columns_become_the_operand_that_was_not_packed(xp: Any, dtype: str) -> None:
    x, spec = data((200, 328), dtype, "normal"), spec_of(0)
    q, _ = reference.quantize(x, spec)
    there = replace(q, **{name: xp.asarray(part) for name, part in q.parts.items()})
    made = prepare.PackedMatrix(there, xp.zeros(2, dtype=np.uint32), xp).operand()
    ((alone, _),) = made_by(FUSED, xp.asarray(x), [spec], [None], xp, {})
    assert made.kind == alone.kind and not int(made.flag)
    np.testing.assert_array_equal(made.values(xp).get(), alone.values(xp).get())


@pytest.mark.parametrize("axis", [1, 0])
@pytest.mark.parametrize(
    "spec", [*(QuantSpec(name) for name in ("mxfp4", *WIDE_FORMATS, "mxfp6_e2m3", "nvfp4")),
             QuantSpec("nvfp4", tile=(16, 16)), QuantSpec("mxfp4", dialect="torchao")], ids=str
)  # fmt: skip
@pytest.mark.parametrize("columns", [320, 322])
def test_codes_that_are_there_become_the_operand_of_their_matrix(
    xp: Any, monkeypatch: pytest.MonkeyPatch, spec: QuantSpec, columns: int, axis: int
) -> None:
    """In the same kind of operand, and refused for the same products."""
    x, spec = data((224, columns), "float32", "normal"), spec.replace(axis=axis).resolve(2)
    q, _ = reference.quantize(x, spec)
    there = replace(q, **{name: xp.asarray(part) for name, part in q.parts.items()})
    least = {"fused": 1 << 10, "expanded": 1 << 20}
    monkeypatch.setattr(tuned, "min_work", lambda path: least.get(path, 1))
    for work in (1, 1 << 10, 1 << 20):
        found = prepare.packed_operand(there, work, xp)
        expected = prepare.prepare(xp.asarray(x), [spec], [None], work, xp)
        assert bool(found) == bool(expected), work
        if not found:
            continue
        if spec.is_mx:  # the emulator has no view of one number
            ((operand, _),) = expected.run()
            assert found.kind == operand.kind
        assert not int(found.flag if found.flag is not None else 0)
        values = reference.dequantize(q)
        np.testing.assert_array_equal(found.values(xp).get(), values if axis == 1 else values.T)


@pytest.mark.parametrize("axes", [(1, 0), (1,), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_matrices_in_one_launch_are_each_alone(
    hopper: Any, dtype: str, axes: tuple[int, ...]
) -> None:
    shapes = [(rows, columns) for rows, columns in SHAPES if columns % 8 == 0]
    specs, xp = [spec_of(axis) for axis in axes], hopper.xp
    states: list[list[dict[str, Any]]] = [[{} for _ in shapes] for _ in range(2)]
    for number in range(3):  # the later ones go by what the first has found
        there = [data(shape, dtype, "wide") for shape in shapes]
        xs = [xp.asarray((x * np.float32(2**number)).astype(x.dtype)) for x in there]
        each = batch(xs, specs, xp, states[0])
        for x, batched, state in zip(xs, each, states[1], strict=True):
            alone = made_by(FUSED, x, specs, [None] * len(specs), xp, state)
            for (one, counts), (other, others) in zip(batched, alone, strict=True):
                assert one.codes.get().tobytes() == other.codes.get().tobytes()
                assert int(one.scale.exponent[0]) == int(other.scale.exponent[0])
                assert int(one.flag) == int(other.flag)
                assert counts() == others()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_other_formats_are_the_references_as_bfloat16(
    hopper: Any, name: str, rounding: str, dtype: str
) -> None:
    x, cpu = data((200, 328), dtype, "special"), registry.get("cpu")
    specs = [spec_of(axis, rounding).replace(format=name) for axis in (1, 0)]
    streams = [Stream(1, 2, 3, i, bool(i)) if rounding == "stochastic" else None for i in (0, 1)]
    made = made_by(FUSED, hopper.xp.asarray(x), specs, streams, hopper.xp)
    for i, (operand, counts) in enumerate(made):
        expected, stats = cpu.fake_quantize(x, specs[i], streams[i])
        got = np.ascontiguousarray(operand.codes.get()).view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(got.astype(np.float32), expected if i == 0 else expected.T)
        assert counts() == stats
    tiny = hopper.xp.asarray(np.full((32, 32), 2.0**-135, dtype=np.float32))
    ((_, counts),) = made_by(FUSED, tiny, specs[:1], streams[:1], hopper.xp)
    if name.startswith("mxfp8"):
        with pytest.warns(RuntimeWarning, match="bfloat16"):
            counts()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_what_is_kept_of_other_formats_is_their_operand(
    hopper: Any, name: str, rounding: str, dtype: str
) -> None:
    xp, spec = hopper.xp, spec_of(0, rounding).replace(format=name)
    stream = Stream(1, 2, 3, 1, True) if rounding == "stochastic" else None
    x = data((200, 328), dtype, "wide")
    preparation = prepare.GemmPreparation(xp.asarray(x), [spec], [stream], FUSED, "", None, {}, xp)
    assert not preparation.keeps_second
    kept, counts = preparation.pack()
    q, stats = reference.quantize(x, spec, stream)
    for part, array in q.parts.items():
        assert kept.q.parts[part].get().tobytes() == array.tobytes(), part
    assert counts() == stats
    ((alone, _),) = made_by(FUSED, preparation.x, [spec], [stream], xp)
    made = kept.operand()
    assert made.kind == alone.kind == "bf16"
    np.testing.assert_array_equal(made.values(xp).get(), alone.values(xp).get())


def flagged(hopper: Any, low: float) -> bool:
    x = np.zeros((64, 64), dtype=np.float32)
    x[0, 0], x[40, 40] = 6.0, 6.0 * low
    made = made_by(FUSED, hopper.xp.asarray(x), [spec_of(1), spec_of(0)], [None, None], hopper.xp)
    flags = {bool(int(operand.flag)) for operand, _ in made}
    assert len(flags) == 1
    return flags.pop()


def test_the_window_is_29_binades_four_of_them_to_grow(hopper: Any) -> None:
    assert not flagged(hopper, 2.0**-24)
    assert flagged(hopper, 2.0**-25)


def test_the_window_follows_the_tensor_one_step_behind(hopper: Any) -> None:
    x, memory = data((64, 64), "float32", "normal"), {}
    for power, beyond in ((0, 0), (4, 0), (9, 1), (9, 0), (-20, 1), (-20, 0), (-16, 0)):
        there = hopper.xp.asarray(x * np.float32(2.0**power))
        for axis in (1, 0):  # the second call finds what the first one left
            spec = spec_of(axis)
            ((made, _),) = made_by(FUSED, there, [spec], [None], hopper.xp, memory)
            assert bool(int(made.flag)) == (bool(beyond) and axis == 1), (power, axis)
            if not int(made.flag):
                expected = registry.get("cpu").fake_quantize(there.get(), spec)[0]
                np.testing.assert_array_equal(values_of(made), expected if axis else expected.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 40])
def test_products_are_within_the_bound_in_and_out_of_the_window(
    hopper: Any, dtype: str, spread: int
) -> None:
    m, n, k = 200, 136, 1040
    sides, values = [], []
    for rows in (m, n):
        x = data((rows, k), dtype, "normal").astype(np.float32)
        x[rows // 2] *= 2.0**-spread
        x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        sides.append(made_by(FUSED, hopper.xp.asarray(x), [spec_of(1)], [None], hopper.xp)[0][0])
        values.append(registry.get("cpu").fake_quantize(x, spec_of(1))[0].astype(np.float64))
    fallback = FallbackCounter(Reserve(hopper.xp))
    got = product(*sides, dtype, hopper.xp, fallback=fallback).get().astype(np.float64)
    assert fallback.count == (spread > 28)
    expected, size = values[0] @ values[1].T, np.abs(values[0]) @ np.abs(values[1]).T
    relative = k * 2.0**-22 if spread else 512 * 34 / 32 * 2.0**-13 + 2.0**-19
    if dtype == "bfloat16":
        size, relative = size + np.abs(expected), relative + 2.0**-8
    assert (np.abs(got - expected) <= relative * size + k * 2.0**-126).all()


@pytest.fixture
def recipe_grads(hopper: Any) -> Iterator[Any]:
    def run(
        device: str, x: np.ndarray, w: np.ndarray, g: np.ndarray, recipe: str = "mxfp4"
    ) -> list[np.ndarray]:
        layer = get_recipe(recipe).layers
        tensors = [et.from_numpy(v).to(device) for v in (x, w)]
        for tensor in tensors:
            tensor.requires_grad = True
        context = layer_context(layer, seed=5)
        out = et.quantized_matmul(*tensors, context)
        out.backward(et.from_numpy(g).to(device))
        grads = [t.grad for t in tensors]
        assert all(grad is not None for grad in grads)
        results = [out, *grads]
        counted.append(dict(context.state.telemetry))
        return [t.numpy() for t in results]

    counted: list[Any] = []
    run.counted = counted
    yield run


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layers_three_products_are_those_of_the_cpu(
    hopper: Any, recipe_grads: Any, dtype: str
) -> None:
    m, n, k = 200, 136, 264
    x, w, g = (data(shape, dtype, "normal") for shape in ((m, k), (n, k), (m, n)))
    before = hopper.fallback_count
    ours, theirs = (recipe_grads(device, x, w, g) for device in ("cuda", "cpu"))
    assert hopper.fallback_count == before
    assert recipe_grads.counted[0] == recipe_grads.counted[1]
    for got, expected in zip(ours, theirs, strict=True):
        assert got.dtype == expected.dtype == x.dtype
        scale = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        assert error.max() <= scale * np.abs(expected.astype(np.float64)).max()


def test_a_bfloat16_layers_three_products_are_those_of_the_cpu(
    hopper: Any, recipe_grads: Any
) -> None:
    m, n, k = 200, 136, 264
    x, w, g = (data(shape, "float32", "normal") for shape in ((m, k), (n, k), (m, n)))
    ours, theirs = (recipe_grads(device, x, w, g, "bf16") for device in ("cuda", "cpu"))
    for got, expected in zip(ours, theirs, strict=True):
        assert np.abs(got - expected).max() <= 2.0**-18 * 300 * np.abs(expected).max()


def test_small_or_odd_products_are_left_to_cupy(cuda: Any) -> None:
    x = cuda.xp.ones((32, 40), dtype=np.float32)
    for array, spec, work, words in (
        (x, spec_of(1), 1 << 20, "fewer than"),
        (x, QuantSpec("mxfp4", axis=1, tile=(1, 64)).resolve(2), 1 << 40, "tiles (1, 64)"),
        (cuda.xp.ones((32, 39), dtype=np.float32), spec_of(1), 1 << 40, "strides"),
    ):
        assert words in str(gap(FUSED, array, spec, work, "90"))
    assert gap(FUSED, x, spec_of(1), 1 << 40, "90") is None
    assert "compute capability 80" in str(gap(FUSED, x, spec_of(1), 1 << 40, "80"))


def test_the_table_of_several_matrices_lies_as_the_kernel_reads_it() -> None:
    """Fields of eight bytes each, in one order."""
    text = quantize_operand.fused_source(spec_of(1), "float32", True, True, False, many=True).text
    struct = text[text.index("struct Matrix {") :]
    struct = struct[: struct.index("};")]
    names = re.findall(r"(\w+)[,;]", struct)
    assert tuple(names) == quantize_operand.MATRIX.names
    assert quantize_operand.MATRIX.itemsize == 8 * len(names)


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [], quantizing=[quantize_operand, expanding, kernels])


@pytest.mark.parametrize(
    ("name", "rounding"), [("mxfp4", "stochastic"), ("rebased", "nearest_even")]
)
def test_an_operand_comes_back_from_its_one_allocation(xp: Any, name: str, rounding: str) -> None:
    specs = [spec_of(axis, rounding) for axis in (1, 0)]
    if name == "rebased":
        specs = [spec.replace(format="mxfp8_e4m3", rebased=True) for spec in specs]
    streams = [Stream(1, 2, 3, i, bool(i)) if rounding == "stochastic" else None for i in (0, 1)]
    there = xp.asarray(data((130, 136), "bfloat16", "wide"))
    pair = made_by(FUSED, there, specs, streams, xp)
    for (operand, _), spec, stream in zip(pair, specs, streams, strict=True):
        rows, k = operand.shape
        assert operand.buffer.nbytes == fused.nbytes(fused.kind_of(spec), rows, k)
        if spec.axis == 1 and name == "mxfp4":
            continue  # the exponent lies with the columns
        fields = [operand.codes, operand.flag, operand.scale.exponent, operand.scale.blocks]
        before = [None if field is None else field.copy() for field in fields]
        copied = operand.buffer.copy()
        operand.buffer.fill(255)
        again = fused.restored(copied, there, spec, stream, xp)
        fields = [again.codes, again.flag, again.scale.exponent, again.scale.blocks]
        for field, old in zip(fields, before, strict=True):
            assert (field is None) == (old is None)
            assert field is None or field.get().tobytes() == old.get().tobytes()
        assert (again.kind, again.scale.group_k) == (operand.kind, operand.scale.group_k)
        if again.flag is not None:
            expected, _ = registry.get("cpu").fake_quantize(there.get(), spec, stream)
            wide = again.bf16().codes.get().view(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(wide.astype(np.float32), expected.T)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_in_bfloat16_are_those_of_the_whole(xp: Any, axis: int, rounding: str) -> None:
    x, spec = data((200, 328), "bfloat16", "wide"), spec_of(axis, rounding)
    stream = Stream(1, 2, 3, 4, False) if rounding == "stochastic" else None
    ((operand, _),) = made_by(FUSED, xp.asarray(x), [spec], [stream], xp)
    expected, _ = registry.get("cpu").fake_quantize(x, spec, stream)
    expected = expected if axis else expected.T
    for part in ((0, 128), (128, len(expected))):
        wide = operand.bf16((), part).codes.get().view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(wide.astype(np.float32), expected[slice(*part)])


def test_recipes_without_fp8_operands_have_no_allocation_to_save() -> None:
    mxfp4 = spec_of(0)
    others = [mxfp4.replace(format=name) for name in WIDE_FORMATS]
    others += [QuantSpec(name, axis=0).resolve(2) for name in ("nvfp4", "mxfp6_e2m3", "int8")]
    others.append(get_recipe("mxfp4_tseng").layers.slot("wgrad.x").replace(axis=0).resolve(2))
    assert [fused.kind_of(spec) for spec in others] == [0] * len(others)


def test_fallbacks_are_counted_by_layer_and_product(hopper: Any, recipe_grads: Any) -> None:
    """Rows of x too far apart for E5M2: of its columns, too, since a block holds one of each."""
    m, n, k = 200, 136, 264
    x, w, g = (data(shape, "bfloat16", "normal") for shape in ((m, k), (n, k), (m, n)))
    x = (x.astype(np.float32) * np.exp2(-40.0 * (np.arange(m) > 99))[:, None]).astype(x.dtype)
    before = hopper.fallback_count
    recipe_grads("cuda", x, w, g)
    counts = {slot: stats.fallbacks for (_, slot), stats in recipe_grads.counted[0].items()}
    assert counts == {slot: int(slot in ("fprop.x", "wgrad.g")) for slot in SLOTS}
    assert hopper.fallback_count - before == 2
