"""Stored FP8, INT8 and INT4 under float scales: the reference's bytes, scales and counts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.formats import FORMATS
from extensor.ops.quantized import layer_context
from extensor.quant import reference
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import DeviceClock, Stream
from extensor_cuda.kernels.quantize import float_scaled, float_scaled_blocks
from tests.oracle.compare import PARTS, same_bytes
from tests.oracle.samples import KINDS, SHAPES, sample
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

STREAM = Stream(seed=0x123456789ABCDEF0, step=7, tensor=3, slot=2, column=True)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NAMES = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
TILES = (None, "tensor", "channel", (1, 32), (1, 128), (128, 128), (3, 7), (1, 1))
FEW = (
    ((37,), 0),
    ((70, 3), 0),
    ((2, 33, 5), 1),
    ((64, 256), 1),
    ((33, 4, 12), 0),
    ((2, 40, 36), 1),
)
MORE = (*FEW, ((256, 64), 0), ((3, 5, 256), 2), *SHAPES)
ROUNDINGS = (("nearest_even", 32), ("stochastic", 32), ("stochastic", 8))


def name(value: object) -> str:
    return str(value).replace("(", "").replace(")", "")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(
        request, monkeypatch, [], hopper=False, quantizing=[float_scaled, float_scaled_blocks]
    )


def shapes_of(xp: Any) -> Any:
    """Each takes a program of its own, which the emulator compiles in a second."""
    return FEW if isinstance(xp, Cupy) else MORE


def host(part: Any) -> Any:
    return np.asarray(part.get())


def check(xp: Any, x: np.ndarray, spec: QuantSpec) -> None:
    """Stored bytes, counts and decoded values of one array."""
    stream = STREAM if spec.rounding == "stochastic" else None
    context = f"{spec} on {x.dtype} of shape {x.shape}"
    plan = float_scaled.plan_of(spec, x.shape)
    assert isinstance(plan, float_scaled.FloatPlan), context
    expected, want_counts = reference.quantize(x, spec, stream)
    got, counts = float_scaled.quantize(xp.asarray(x), plan, stream, xp)
    assert got.spec == expected.spec and got.shape == expected.shape
    for part in PARTS:
        if getattr(expected, part) is not None:
            same_bytes(part, host(getattr(got, part)), getattr(expected, part), context)
    assert counts() == want_counts, context
    values = host(float_scaled.dequantize(got, plan, xp))
    same_bytes("values", values, reference.dequantize(expected), context)
    decoded, again = float_scaled.fake_quantize(xp.asarray(x), plan, stream, xp)
    same_bytes("operand", host(decoded), reference.fake_quantize(x, spec, stream)[0], context)
    assert again() == want_counts, context


@pytest.mark.parametrize(("tile", "element"), list(zip(TILES, NAMES * 2, strict=True)), ids=name)
def test_every_tile_and_shape(xp: Any, element: str, tile: Any) -> None:
    tall = isinstance(tile, tuple) and tile[0] > 1
    for number, (shape, axis) in enumerate(shapes_of(xp)):
        for kind in KINDS if not tall or len(shape) > 1 else ():
            rounding, rbits = ROUNDINGS[number % 3]
            spec = QuantSpec(element, axis=axis, tile=tile, rounding=rounding, rbits=rbits)
            check(xp, sample(shape, axis, kind, seed=number), spec)


LINES = (  # kernel, shape, tile
    ("quantize_all", (3, 5, 2048), "tensor"),  # several blocks of threads
    ("quantize_groups", (6, 1024), (1, 512)),
    ("quantize_groups", (3, 40, 96), (1, 48 // 3)),
    ("quantize_blocks", (5, 768), "channel"),
    ("quantize_blocks", (2, 70_000), "channel"),  # more than its threads hold
    ("quantize_blocks", (2, 70, 256), (32, 128)),  # cut below
    ("quantize_blocks", (3, 96), (1, 48)),
)


@pytest.mark.parametrize(("kernel", "shape", "tile"), LINES, ids=name)
def test_blocks_along_rows(xp: Any, kernel: str, shape: tuple[int, ...], tile: Any) -> None:
    for number, element in enumerate(NAMES):
        rounding, rbits = ROUNDINGS[number % 3]
        spec = QuantSpec(element, axis=-1, tile=tile, rounding=rounding, rbits=rbits)
        plan = float_scaled.plan_of(spec, shape)
        assert isinstance(plan, float_scaled.FloatPlan) and plan.blocks
        assert plan.blocks.kernel == kernel
        x = sample(shape, len(shape) - 1, KINDS[number % len(KINDS)], seed=number)
        with np.errstate(over="ignore"):
            x = x.astype(list(DTYPES.values())[number % 3])
        check(xp, x, spec)


COLUMN_TILES = (  # shape, tile
    ((256, 148), (1, 32)),
    ((128, 260), (1, 128)),
    ((256, 200), (128, 128)),
    ((150, 20), "channel"),
    ((272, 132), "tensor"),
)


@pytest.mark.parametrize(("shape", "tile"), COLUMN_TILES, ids=name)
def test_blocks_down_columns(xp: Any, shape: tuple[int, ...], tile: Any) -> None:
    for number, element in enumerate(NAMES):
        rounding, rbits = ROUNDINGS[number % 3]
        spec = QuantSpec(element, axis=0, tile=tile, rounding=rounding, rbits=rbits)
        plan = float_scaled.plan_of(spec, shape)
        assert isinstance(plan, float_scaled.FloatPlan) and plan.blocks
        assert plan.blocks.kernel == "quantize_column_tiles"
        x = sample(shape, 0, KINDS[number % len(KINDS)], seed=number)
        with np.errstate(over="ignore"):
            x = x.astype(list(DTYPES.values())[number % 3])
        check(xp, x, spec)


@pytest.mark.parametrize(("kernel", "shape", "tile"), LINES, ids=name)
def test_zero_points_along_rows(xp: Any, kernel: str, shape: tuple[int, ...], tile: Any) -> None:
    for number, element in enumerate(("int8", "int4")):
        scale = ("float32", "float16")[number]
        spec = QuantSpec(element, axis=-1, tile=tile, symmetric=False, scale_dtype=scale)
        plan = float_scaled.plan_of(spec, shape)
        assert isinstance(plan, float_scaled.FloatPlan) and plan.blocks
        assert plan.blocks.kernel == kernel
        for kind in KINDS:
            x = sample(shape, len(shape) - 1, kind, seed=number)
            with np.errstate(over="ignore"):
                check(xp, (x - np.float32(1)).astype(list(DTYPES.values())[number]), spec)


@pytest.mark.parametrize("element", NAMES)
def test_quotients_beside_ties(xp: Any, element: str) -> None:
    """Division by way of a reciprocal: scales of any mantissa, values a place from every tie."""
    rng, grid = np.random.default_rng(5), FORMATS[element].element
    codes = np.array([grid.decode(c) for c in range(grid.max_magnitude_code + 1)])
    ties = (codes[1:] + codes[:-1]) / 2
    ties = rng.permutation(np.resize(ties, 60))
    scales = np.exp2(rng.uniform(-70, 70, 1000)).astype(np.float32)
    x = (ties * scales[:, None].astype(np.float64)).astype(np.float32)
    x = np.concatenate([x, np.full((1000, 4), np.float32(codes[-1])) * scales[:, None]], axis=1)
    for towards in (-np.inf, 0, np.inf):
        near = x if towards == 0 else np.nextafter(x, np.float32(towards))
        near[:, -1] = x[:, -1]  # the largest magnitude
        check(xp, near, QuantSpec(element, axis=1, tile="channel"))


@pytest.mark.parametrize(
    ("element", "tile", "scale", "rounding"),
    [
        ("int8", "tensor", "float32", ROUNDINGS[0]),
        ("int8", "channel", "float16", ROUNDINGS[1]),
        ("int8", (2, 5), "float32", ROUNDINGS[2]),
        ("int4", (1, 32), "float16", ROUNDINGS[0]),
        ("int4", "channel", "float32", ROUNDINGS[1]),
    ],
    ids=name,
)
def test_zero_points(xp: Any, element: str, tile: Any, scale: Any, rounding: Any) -> None:
    for number, (shape, axis) in enumerate((((5, 64), 1), ((70, 3), 0), ((2, 33, 8), 1))):
        for kind in KINDS:
            for base in (
                QuantSpec(element, axis=axis, tile=tile, symmetric=symmetric, scale_dtype=scale)
                for symmetric in (True, False)
            ):
                spec = base.replace(rounding=rounding[0], rbits=rounding[1])
                check(xp, sample(shape, axis, kind, seed=number) + np.float32(1), spec)


@pytest.mark.parametrize(
    ("element", "dtype"),
    [("fp8_e4m3", "bfloat16"), ("fp8_e5m2", "float16"), ("int8", "float16"), ("int4", "bfloat16")],
)
def test_every_input_and_option(xp: Any, element: str, dtype: str) -> None:
    rules = FORMATS[element].scale_rules
    options: list[dict[str, Any]] = [{"scale_rule": rule} for rule in rules]
    options += [{"element_scale": 0.75}, {"scale_dtype": "float16"}, {"tile": (1, 16)}]
    options += [{"element_scale": 0.3, "symmetric": False}] * element.startswith("int")
    shapes = (((6, 256), 1), ((5, 70), 1), ((256, 64), 0), ((70, 19), 0))
    for number, option in enumerate(options):
        for shape, axis in (shapes[number % 4], shapes[(number + 1) % 4])[
            : len(shapes_of(xp)) // 6
        ]:
            for kind in KINDS:
                with np.errstate(over="ignore"):
                    x = sample(shape, axis, kind, seed=1).astype(DTYPES[dtype])
                check(xp, x, QuantSpec(element, axis=axis, **option))


def test_every_kind_of_float16_scale(xp: Any) -> None:
    """Multiples of half the least float16, ties among them; then all exponents, and far beyond."""
    scales = np.arange(1, 2100, dtype=np.float32) * np.float32(2.0**-25)
    bits = np.arange(0x38000000, 0x48000000, 0x0000F000, dtype=np.uint32)
    scales = np.concatenate([scales, bits.view(np.float32)])
    for symmetric, steps in ((True, 127), (False, 255)):
        x = np.stack([scales * np.float32(steps), np.zeros_like(scales)], axis=1)
        assert (x[:, 0] / np.float32(steps) == scales).all()
        check(xp, x, QuantSpec("int8", axis=1, scale_dtype="float16", symmetric=symmetric))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QuantSpec("mxfp4"), "no plain floats"),
        (QuantSpec("nvfp4"), "no plain floats"),
        (QuantSpec("int8", statistic="percentile"), "percentile"),
        (QuantSpec("int8", transform=Hadamard(16)), "Hadamard"),
        (QuantSpec("int8", axis=5), "axis"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_covered_has_a_reason(spec: QuantSpec, words: str) -> None:
    assert words in str(float_scaled.plan_of(spec, (64, 64)))
    assert "empty" in str(float_scaled.plan_of(QuantSpec("int8"), (0, 64)))


@pytest.mark.parametrize("use", [0, 5, 4097])
def test_a_clock_on_the_device_stands_for_step_and_use(xp: Any, use: int) -> None:
    """The bits of `LayerContext.stream`, also where the uses have left the tensor's bits."""
    context = layer_context(get_recipe("int8").layers, seed=(1 << 64) - 3)
    context.state.step, context.use = 7, use
    expected = context.stream("dgrad.g", column=False)
    clock = DeviceClock(xp.asarray(np.array(7 + (use << 32), np.uint64)))
    stream = Stream(context.state.seed, 0, 0, expected.slot, False, clock)
    spec = QuantSpec("int8", axis=1, rounding="stochastic").resolve(2)
    x = sample((5, 64), 1, KINDS[0], seed=1)
    plan = float_scaled.plan_of(spec, x.shape)
    got, _ = float_scaled.fake_quantize(xp.asarray(x), plan, stream, xp)
    want, _ = reference.fake_quantize(x, spec, expected)
    np.testing.assert_array_equal(host(got), want)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("element", "zeros"), [*((name, False) for name in NAMES), ("int8", True), ("int4", True)]
)
def test_no_kernel_spills(element: str, zeros: bool) -> None:
    shapes = (((64, 256), 1), ((256, 64), 0), ((4, 64, 64), 1), ((5, 7), 1))
    for number, (shape, axis) in enumerate(shapes):
        rounding, rbits = ROUNDINGS[number % 2]
        spec = QuantSpec(element, axis=axis, rounding=rounding, rbits=rbits)
        plan = float_scaled.plan_of(spec.replace(symmetric=not zeros), shape)
        assert isinstance(plan, float_scaled.FloatPlan)
        dtype, arch = (("float32", "sm_80"), ("bfloat16", "sm_90a"))[number // 2]
        check_compiles(float_scaled.float_source(plan, dtype, True), arch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("element", NAMES)
@pytest.mark.parametrize(("shape", "tile"), COLUMN_TILES, ids=name)
def test_no_kernel_down_columns_spills(element: str, shape: tuple[int, ...], tile: Any) -> None:
    for number, (rounding, rbits) in enumerate(ROUNDINGS):
        spec = QuantSpec(element, axis=0, tile=tile, rounding=rounding, rbits=rbits)
        plan = float_scaled.plan_of(spec, shape)
        assert isinstance(plan, float_scaled.FloatPlan) and plan.blocks
        extent = plan.extent[3], plan.extent[1]
        for dtype in DTYPES:
            for transposed in {False, plan.codes_per_byte == 1}:
                tiled = float_scaled_blocks.columnwise_plan(plan.spec, shape, extent, transposed)
                source = float_scaled_blocks.block_source(tiled, dtype)
                check_compiles(source, ("sm_80", "sm_89", "sm_90a")[number])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("element", NAMES)
@pytest.mark.parametrize(("kernel", "shape", "tile"), LINES, ids=name)
def test_no_kernel_along_rows_spills(
    element: str, kernel: str, shape: tuple[int, ...], tile: Any
) -> None:
    del kernel
    for number, (rounding, rbits) in enumerate(ROUNDINGS):
        spec = QuantSpec(element, axis=-1, tile=tile, rounding=rounding, rbits=rbits)
        plan = float_scaled.plan_of(spec, shape)
        assert isinstance(plan, float_scaled.FloatPlan) and plan.blocks
        for dtype in DTYPES:
            source = float_scaled_blocks.block_source(plan.blocks, dtype)
            check_compiles(source, ("sm_80", "sm_89", "sm_90a")[number])
