"""Packed matrices expanded to operands: every value exact, the window, products, recipes.

Without a GPU the kernels run on the emulator, and packed matrices come from the reference.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.autograd.node import ArraySpec
from extensor.backends import registry
from extensor.backends.unsupported import Unsupported
from extensor.ops import quantized, recipe_operands
from extensor.ops.quantized import layer_context
from extensor.quant import reference
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe import SLOTS
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.nn import elementwise
from extensor_cuda.kernels.prepare import cast_bf16, float_scaled_operand, quantize_operand
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.kernels.prepare.expand import expand_source
from extensor_cuda.kernels.quantize import dequantize, float_scaled_blocks
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul.expand import as_bf16, expand
from extensor_cuda.matmul.fallback_count import FallbackCounter
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.matmul.product import product
from extensor_cuda.matmul.rebase import held_by
from extensor_cuda.runtime.counters import Counters, OperandCounts, Reserve
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda import hopper
from tests.unit.cuda.bounds import sent
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.preparing import EXPANDED, gap
from tests.unit.cuda.preparing import made as made_by
from tests.unit.cuda.test_compile import check_compiles

FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")
SHAPES = ((64, 64), (7, 100), (70, 19), (33, 130), (1, 16))
SPECS = (
    *(QuantSpec(name) for name in FORMATS),
    QuantSpec("nvfp4_fp8exact"),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    QuantSpec("nvfp4", tile=(16, 16)),
    QuantSpec("mxfp4", tile=(32, 32)),
    QuantSpec("mxfp4", tile=(1, 16)),
    QuantSpec("mxfp8_e4m3", tile=(1, 128)),
    QuantSpec("mxfp4", transform=Hadamard(64, "random"), element_scale=0.75),
    QuantSpec("nvfp4", transform=Hadamard(16)),
)


def name(value: object) -> str:
    if not isinstance(value, QuantSpec):
        return str(value)
    return f"{value.format}-{value.tile}-{value.rule}-{value.transform is not None}"


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_no_kernel_spills(spec: QuantSpec) -> None:
    for axis in (0, 1):
        resolved = spec.replace(axis=axis).resolve(2)
        kind, lift = held_by(resolved)
        for path in {(kind, lift, False), ("bf16", 0, False), ("bf16", 0, True)}:
            check_compiles(expand_source(resolved, *path), "sm_80", "sm_90a")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    quantizing = [quantize_operand, float_scaled_operand, float_scaled_blocks, dequantize]
    return place(
        request, monkeypatch, [elementwise, expand_kernel, cast_bf16], quantizing=quantizing
    )


def made(shape: tuple[int, int], spec: QuantSpec, spread: int = 2) -> QuantArray:
    rng = np.random.default_rng(shape[0])
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))).astype(
        np.float32
    )
    if min(shape) > 1:
        x[0] = 0
        x[-1, -1] = np.nan
    return reference.quantize(x, spec.resolve(2))[0]


def operand_values(q: QuantArray) -> np.ndarray:
    """Still transformed, contraction last."""
    from extensor.quant.block_codec import decode_array

    return decode_array(q, np).astype(np.float64)


def values_of(made: GemmOperand) -> np.ndarray:
    held = hopper.values(np.asarray(made.codes.get()), made.kind)
    assert made.scale.factor is not None
    factor = float(made.scale.factor.get()[0])
    assert made.scale.exponent is None or factor == np.ldexp(1.0, int(made.scale.exponent.get()[0]))
    return held * factor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_values_are_the_references(
    xp: Any, spec: QuantSpec, axis: int, shape: tuple[int, int]
) -> None:
    q = made(shape, spec.replace(axis=axis))
    expected = operand_values(q)
    for kind in {held_by(q.spec)[0], "bf16"}:
        flag = xp.zeros(1, dtype=np.uint32)
        got = expand(sent(q, xp), kind, flag, xp)
        assert got.codes.shape == expected.shape and got.codes.strides[0] % 16 == 0
        assert not int(flag[0]), kind
        values = values_of(got)
        live = ~np.isnan(expected)
        if got.scale.exponent is not None:
            np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(np.signbit(values[live]), np.signbit(expected[live]))
        else:  # the reference rounds each value to float32; here the product is not rounded
            np.testing.assert_allclose(values, expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_fixed_values_are_whole_numbers_of_bfloat16(xp: Any, form: str) -> None:
    """Without an exponent; scales of the least and the largest powers of two among them."""
    for shape in SHAPES:
        q = made(shape, QuantSpec(form, axis=1))
        expected = operand_values(q)
        got = as_bf16(sent(q, xp), xp)
        held = hopper.values(np.asarray(got.codes.get()), "bf16")
        assert got.scale.exponent is None and (got.scale.factor is None) == q.spec.is_mx
        if q.spec.is_mx:
            np.testing.assert_array_equal(held, expected)
        else:
            assert got.scale.factor is not None
            factor = float(got.scale.factor.get())
            np.testing.assert_allclose(held * factor, expected, rtol=2.0**-23, atol=0)


def test_what_bfloat16_does_not_hold_is_nan_and_raises_the_flag(xp: Any) -> None:
    for form, scale, code, held in (
        ("mxfp4", 0, 1, True),  # 2**-128, a subnormal of bfloat16
        ("mxfp4", 252, 7, True),  # 1.5 * 2**127
        ("mxfp4", 253, 7, False),
        ("mxfp8_e4m3", 3, 1, True),  # 2**-133, its least number
        ("mxfp8_e4m3", 2, 1, False),
    ):
        spec = QuantSpec(form, axis=1).resolve(2)
        q = reference.quantize(np.zeros((3, 64), dtype=np.float32), spec)[0]
        q.scales[:] = 254  # of zero blocks: it does not count
        q.scales[1, 1] = scale
        q.codes[1, q.codes.shape[1] // 2] = code
        flag = xp.zeros(1, dtype=np.uint32)
        got = as_bf16(sent(q, xp), xp, flag)
        values = hopper.values(np.asarray(got.codes.get()), "bf16")
        assert int(flag[0]) == (not held), (form, scale)
        if held:
            np.testing.assert_array_equal(values, operand_values(q))
        else:
            assert np.isnan(values[1, 32]) and np.isnan(values).sum() == 1


WINDOWS = (
    ("mxfp4", 28, 1),
    ("mxfp6_e2m3", 11, 1),
    ("mxfp6_e3m2", 23, 1),
    ("mxfp8_e4m3", 124, 1),
    ("mxfp8_e5m2", 117, 1),
)


@pytest.mark.parametrize(("form", "span", "code"), WINDOWS)
def test_the_window_is_as_stated_and_zero_blocks_do_not_count(
    xp: Any, form: str, span: int, code: int
) -> None:
    spec = QuantSpec(form, axis=1).resolve(2)
    kind, _ = held_by(spec)
    for below, beyond in ((span, 0), (span + 1, 1)):
        x = np.zeros((3, 64), dtype=np.float32)
        x[0, 0], x[1, 32] = 1, 1
        q = reference.quantize(x, spec)[0]
        q.scales[:] = 200
        q.scales[1, 1] = 200 - below
        q.scales[2] = 3  # zeros
        width = q.codes.shape[1] // 2
        q.codes[1, width] = code  # the least magnitude
        flag = xp.zeros(1, dtype=np.uint32)
        got = expand(sent(q, xp), kind, flag, xp)
        assert int(flag[0]) == beyond, (form, below)
        if not beyond:
            np.testing.assert_array_equal(values_of(got), operand_values(q))


@pytest.mark.parametrize("axis", [0, 1])
def test_every_fp4_code_is_held_under_every_scale_of_the_window(xp: Any, axis: int) -> None:
    spec = QuantSpec("mxfp4", axis=axis).resolve(2)
    q = reference.quantize(np.ones((29, 32) if axis else (32, 29), dtype=np.float32), spec)[0]
    pairs = np.arange(16, dtype=np.uint8) % 8 * 0x22 + 0x10  # codes 0, 1; 2, 3; to 14, 15
    q.codes[...] = np.expand_dims(pairs, 1 - axis)
    q.scales[...] = 200 - np.arange(29, dtype=np.uint8).reshape(q.scales.shape)
    flag = xp.zeros(1, dtype=np.uint32)
    got = expand(sent(q, xp), "e5m2", flag, xp)
    assert not int(flag[0]) and len(np.unique(operand_values(q)[0])) == 15
    np.testing.assert_array_equal(values_of(got), operand_values(q))


def test_nvfp4_exact_window(xp: Any) -> None:
    """1.25 is held over 12 binades, 1 over 15 and 1.5 over 13, as far as the scales go."""
    spec = QuantSpec("nvfp4_fp8exact", axis=1).resolve(2)
    q = reference.quantize(np.ones((1, 16), dtype=np.float32), spec)[0]
    q.codes[...] = np.arange(8, dtype=np.uint8) * 0x22 % 0x77  # every magnitude
    least = {0: -5, 2: -3, 4: -4}  # of the exponent, by the last three bits of the scale
    for exponent in range(-6, 9):
        for part, first in least.items():
            q.scales[...] = 8 * (exponent + 7) + part
            flag = xp.zeros(1, dtype=np.uint32)
            got = expand(sent(q, xp), "e4m3", flag, xp)
            assert int(flag[0]) == (exponent < first), (exponent, part)
            if exponent >= first:
                np.testing.assert_allclose(values_of(got), operand_values(q), rtol=2.0**-23)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_parts_of_an_operand_are_those_of_the_whole(xp: Any, format: str, axis: int) -> None:
    q = made((330, 300), QuantSpec(format, axis=axis))
    whole, flag = operand_values(q), xp.zeros(1, dtype=np.uint32)
    for part in ((0, 128), (128, len(whole))):
        got = values_of(expand(sent(q, xp), "bf16", flag, xp, part=part))
        expected = whole[slice(*part)]
        np.testing.assert_allclose(got, expected, rtol=0 if q.spec.is_mx else 2.0**-23, atol=0)


def test_a_scale_window_of_28_always_fits(xp: Any) -> None:
    spec = QuantSpec("mxfp4", axis=1, scale_window=28).resolve(2)
    x = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    x[3] *= np.float32(2.0**-60)
    for window, beyond in ((28, 0), (None, 1)):
        q = reference.quantize(x, spec.replace(scale_window=window))[0]
        flag = xp.zeros(1, dtype=np.uint32)
        got = expand(sent(q, xp), "e5m2", flag, xp)
        assert int(flag[0]) == beyond
        if not beyond:
            np.testing.assert_array_equal(values_of(got), operand_values(q))


def test_a_guarded_expansion_writes_nothing_unless_a_flag_is_set(xp: Any) -> None:
    q, flag = made((64, 64), QuantSpec("mxfp4", axis=1)), xp.zeros(1, dtype=np.uint32)
    quiet, loud = xp.zeros((), dtype=np.uint32), xp.ones((), dtype=np.uint32)
    for guards, written in (((quiet, quiet), False), ((quiet, loud), True), ((loud, quiet), True)):
        got = expand(sent(q, xp), "bf16", flag, xp, guards)
        if written:
            np.testing.assert_array_equal(values_of(got), operand_values(q))
        elif isinstance(xp, emulation.Cupy):
            assert (got.codes.get() == 77).all()


@pytest.fixture
def maker(xp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Operands from packed storage, with the reference as quantizer where there is no GPU."""

    def quantize_raw(x: Any, plan: kernels.Plan, stream: Any, xp: Any) -> kernels.Outputs:
        q, stats = reference.quantize(np.asarray(x), plan.spec, stream)
        counters = Counters(2 * kernels.SLOTS, xp)
        counters.array[:2] = stats.saturated, stats.flushed
        return kernels.Outputs(sent(q, xp), None, counters, None)

    def quantize(x: Any, plan: kernels.Plan, stream: Any, xp: Any) -> Any:
        q, stats = reference.quantize(np.asarray(x), plan.spec, stream)
        return sent(q, xp), stats

    def quantize_clipped(x: Any, plan: kernels.Plan, stream: Any, xp: Any) -> Any:
        q, stats, mask = reference.quantize_clipped(np.asarray(x), plan.spec, stream)
        return sent(q, xp), stats, xp.asarray(mask)

    if isinstance(xp, emulation.Cupy):
        for stand_in in (quantize_raw, quantize, quantize_clipped):
            monkeypatch.setattr(kernels, stand_in.__name__, stand_in)
    return lambda x, specs: made_by(EXPANDED, xp.asarray(x), specs, [None] * len(specs), xp)


@pytest.fixture
def backend(xp: Any, maker: Any, request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend, or its methods on the emulator."""
    monkeypatch.setattr(tuned, "MIN_WORK", 1)
    if not isinstance(xp, emulation.Cupy):
        return request.getfixturevalue("cuda")
    return CudaBackend(xp)


EXPANDED_RECIPES = (
    *("mxfp6", "mxfp4_tseng", "nvfp4_nvidia", "nvfp4_4over6", "nvfp4_fp8exact"),
    *("mxfp4_block16", "mxfp4_block64", "mxfp4_block128", "nvfp4_forward", "nvfp4_backward"),
    *("quartet", "quartet2", "quartet2_4over6"),
)
HADAMARD_WGRAD = ("mxfp4_hadamard", "mxfp4_hadamard_random", "mxfp4_hadamard_per_step")
SCALED = ("int8", "fp8_tensor", "fp8_block")


@pytest.mark.parametrize("recipe", [*EXPANDED_RECIPES, *SCALED, "mxfp8_rebased"])
def test_a_layers_three_products_are_the_cpus(xp: Any, backend: Any, recipe: str) -> None:
    """The same random bits, so that the operands are the same and the products within bounds."""
    if recipe == "quartet" and isinstance(xp, emulation.Cupy):
        pytest.skip("packed MXFP4 is rebased by assembly that the emulator does not have")
    rng = np.random.default_rng(6)
    m, n, k = 96, 64, 80
    x, w, g = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (n, k), (m, n))
    )
    bias = 10 * rng.standard_normal(n).astype(np.float32)
    results = []
    for device in (backend, registry.get("cpu")):
        context = layer_context(get_recipe(recipe).layers, seed=5)
        inputs = [device.xp.asarray(v) for v in (x, w, bias)]
        out, saved = quantized._matmul_forward(device, *inputs, context=context)
        sent_g, needs = device.xp.asarray(g), (True, True)  # not the bias's
        grads = quantized._matmul_vjp(device, sent_g, out, inputs, needs, context, saved)
        made = [np.asarray(v.get() if hasattr(v, "get") else v) for v in (out, *grads)]
        results.append([v.astype(np.float64) for v in made])
        counted = dict(context.state.telemetry)
        results[-1].append(counted)
    assert results[0].pop() == results[1].pop()
    for got, expected in zip(*results, strict=True):
        assert np.abs(got - expected).max() <= 2.0**-7 * np.abs(expected).max()


@pytest.mark.parametrize("recipe", ["mxfp4_block16", "nvfp4_nvidia", "mxfp8_rebased", "fp8_block"])
def test_a_packed_input_gives_the_same_bits_without_the_input(
    xp: Any, backend: Any, recipe: str
) -> None:
    """MXFP4 in blocks of 16 and NVFP4 are kept in 4.5 bits a value, others as FP8 operands."""
    rng = np.random.default_rng(6)
    m, n, k = 96, 64, 128
    x, w, g = (
        xp.asarray(rng.standard_normal(shape).astype(np.float32))
        for shape in ((m, k), (n, k), (m, n))
    )
    made = []
    for keep in ("input", "packed"):
        context = layer_context(get_recipe(recipe).layers, seed=5)
        given = recipe_operands.Input(keep)
        _, saved = quantized._matmul_forward(backend, x, w, context=context, given=given)
        assert saved.released == ((0,) if keep == "packed" else ())
        inputs = (ArraySpec(x.shape, x.dtype), w) if saved.released else (x, w)
        grads = quantized._matmul_vjp(backend, g, None, inputs, (True, True), context, saved)
        made.append([np.asarray(v.get()).tobytes() for v in grads])
    assert made[0] == made[1]
    held = saved.x.arrays if hasattr(saved.x, "arrays") else [saved.x.codes]
    columns = 32 / m  # FP8 blocks of 1 x 128 run along the tokens: a float32 scale a column
    bits = {"mxfp4_block16": 4.5, "nvfp4_nvidia": 4.5, "fp8_block": 8 + columns}.get(recipe, 8)
    assert sum(part.nbytes for part in held) <= m * k * bits / 8 + 16


def test_the_way_of_every_recipe_is_known(xp: Any, backend: Any) -> None:
    """No recipe's operands come from the CPU; which path they take instead."""
    paths: dict[str, set[str]] = {}
    for name, recipe in RECIPES.items():
        context = layer_context(recipe.layers, seed=1)
        x = xp.asarray(np.ones((64, 64), dtype=np.float32))
        for slot in SLOTS:
            spec = context.operand(slot)
            if isinstance(spec, str):
                continue
            for axis in (0, 1):
                resolved = spec.replace(axis=axis).resolve(2)
                stream = Stream(1, 2, 3, 4) if spec.rounding == "stochastic" else None
                path = backend.path("prepare", x, [resolved], [stream], 1 << 40)
                paths.setdefault(name, set()).add(path.split(":")[0])
    others = {name: path for name, path in paths.items() if path != {"fused kernel"}}
    known = {name: {"expanded"} for name in EXPANDED_RECIPES}
    known |= {name: {"fused kernel", "expanded"} for name in HADAMARD_WGRAD}
    assert others == known | {name: {"scaled kernel"} for name in SCALED}


PAIRS = (
    ("mxfp4", "mxfp4", ("e5m2", "e5m2")),
    ("mxfp6_e2m3", "mxfp6_e3m2", ("e4m3", "e5m2")),
    ("nvfp4_fp8exact", "nvfp4_fp8exact", ("e4m3", "e4m3")),
    ("nvfp4", "nvfp4", ("bf16", "bf16")),
    ("mxfp4", "mxfp8_e4m3", ("e5m2", "bf16")),
    ("nvfp4_fp8exact", "nvfp4", ("e4m3", "bf16")),
)


@pytest.mark.parametrize("spread", [0, 40])
@pytest.mark.parametrize(("left", "right", "kinds"), PAIRS)
def test_products_in_and_out_of_the_window(
    xp: Any, maker: Any, left: str, right: str, kinds: tuple[str, str], spread: int
) -> None:
    m, n, k = 70, 50, 1000
    rng, sides, values = np.random.default_rng(2), [], []
    for rows, form in ((m, left), (n, right)):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        x[rows // 2] *= 2.0**-spread
        spec = QuantSpec(form, axis=1).resolve(2)
        ((side, counts),) = maker(x, [spec])
        q, stats = reference.quantize(x, spec)
        assert isinstance(counts, OperandCounts) and counts() == stats
        sides.append(side)
        values.append(operand_values(q))
    assert tuple(side.kind for side in sides) == kinds
    fallback = FallbackCounter(Reserve(xp))
    got = product(*sides, "float32", xp, fallback=fallback).get().astype(np.float64)
    fp8 = "bf16" not in kinds
    fell = fp8 and any(int(side.flag) for side in sides)
    assert fallback.count == fell
    assert fell == (fp8 and spread > 0 and left != "nvfp4_fp8exact") or left == "nvfp4_fp8exact"
    relative = 512 * 34 / 32 * 2.0**-13 if fp8 and not fell else k * 2.0**-22
    size = np.abs(values[0]) @ np.abs(values[1]).T
    error = np.abs(got - values[0] @ values[1].T)
    assert (error <= (relative + 2.0**-19) * size + k * 2.0**-126).all()


def test_columns_under_a_transform_contract_with_their_like(xp: Any, maker: Any) -> None:
    """A weight gradient: both sides down their columns, padded to the transform's size."""
    rng = np.random.default_rng(4)
    g, x = (rng.standard_normal((100, n)).astype(np.float32) for n in (30, 44))
    spec = QuantSpec("nvfp4", axis=0, transform=Hadamard(16)).resolve(2)
    sides = [maker(v, [spec])[0][0] for v in (g, x)]
    got = product(*sides, "bfloat16", xp)
    assert got.dtype == ml_dtypes.bfloat16 and got.shape == (30, 44)
    a, b = (operand_values(reference.quantize(v, spec)[0]) for v in (g, x))
    error = np.abs(got.get().astype(np.float64) - a @ b.T)
    assert (error <= 2.0**-8 * np.abs(a @ b.T) + 2.0**-11 * np.abs(a) @ np.abs(b).T).all()


def test_every_operand_joins_with_every_other(xp: Any, maker: Any) -> None:
    """Powers of two with NVFP4's tensor scales, and with plain bfloat16."""
    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    specs = [QuantSpec(f, axis=1).resolve(2) for f in ("mxfp4", "nvfp4", "nvfp4_fp8exact")]
    made: list[tuple[Any, np.ndarray]] = [
        (maker(x, [spec])[0][0], operand_values(reference.quantize(x, spec)[0])) for spec in specs
    ]
    rounded = x.astype(ml_dtypes.bfloat16)
    made.append(
        (GemmOperand(xp.asarray(rounded.view(np.uint16)), "bf16"), rounded.astype(np.float64))
    )
    for a, va in made:
        for b, vb in made:
            assert isinstance(product(a, x, "float32", xp), Unsupported)
            got = product(a, b, "float32", xp).get()
            error = np.abs(got - va @ vb.T)
            assert (error <= (64 * 34 / 32 * 2.0**-13 + 2.0**-19) * np.abs(va) @ np.abs(vb).T).all()


def test_a_cut_value_is_warned_of(xp: Any, maker: Any) -> None:
    x = np.ones((16, 64), dtype=np.float32)
    x[:2], x[3, 32:] = 2.0**100, 2.0**-40
    ((_, counts),) = maker(x, [QuantSpec("mxfp8_e5m2", axis=1).resolve(2)])
    with pytest.warns(RuntimeWarning, match="bfloat16"):
        assert isinstance(counts(), QuantStats)


def test_reasons() -> None:
    x = np.ones((64, 64), dtype=np.float32)
    spec = QuantSpec("nvfp4", axis=1).resolve(2)
    assert gap(EXPANDED, x, spec, 1 << 40, "90") is None
    assert "compute capability 80" in str(gap(EXPANDED, x, spec, 1 << 40, "80"))
    assert "fewer than" in str(gap(EXPANDED, x, spec, 1, "90"))
    assert "shape" in str(gap(EXPANDED, x[0], spec, 1 << 40, "90"))
    assert "scales" in str(gap(EXPANDED, x, QuantSpec("int8", axis=1).resolve(2), 1 << 40, "90"))
