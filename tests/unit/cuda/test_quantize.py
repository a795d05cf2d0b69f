"""The fused CUDA quantizers against the numpy reference, byte for byte. Needs a GPU.

Shapes come in pairs of a whole and a ragged one for rows and for columns, since the two take
different memory paths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.backends.unsupported import Unsupported
from extensor.formats import DIALECTS, FORMATS
from extensor.quant import reference
from extensor.quant.recipe_state import stats_of
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.quantize import (
    float_scaled,
    float_scaled_blocks,
    quantize,
    rowwise_columnwise,
)
from extensor_cuda.kernels.quantize.quantize import plan_of
from extensor_cuda.quantize import dialect_gap
from tests.oracle.compare import PARTS, same_bytes
from tests.oracle.samples import KINDS, sample
from tests.unit.cuda import fake

STREAM = Stream(seed=0x123456789ABCDEF0, step=7, tensor=3, slot=2, column=True)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
COVERED = [name for name, row in FORMATS.items() if row.scale.name == "e8m0"] + ["nvfp4"]
SHAPES = (((6, 256), -1), ((5, 70), -1), ((256, 64), 0), ((70, 19), 0))
MORE_SHAPES = (((37,), 0), ((1, 1), 1), ((2, 33, 5), 1), ((4, 3, 34), 2), ((3, 128, 66), 1))
MORE_SHAPES += (((300, 3000), -1), ((130, 516), 0))
ROUNDINGS = (("nearest_even", 32), ("stochastic", 32), ("stochastic", 8))


@cache
def values(shape: tuple[int, ...], axis: int, kind: str, dtype: str) -> np.ndarray:
    big = int(np.prod(shape)) > 1 << 15
    if big:  # the samples' generator is slow
        rng = np.random.default_rng(1)
        x = rng.standard_normal(shape, dtype=np.float32) * np.exp2(rng.integers(-9, 9, shape))
        x = x.astype(np.float32)
    else:
        x = sample(shape, axis, kind, seed=len(shape) + shape[0])
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=DTYPES[dtype])


def host(part: Any) -> Any:
    return None if part is None else np.asarray(part.get())


def check(cuda: Any, x: np.ndarray, spec: QuantSpec, operand: bool = True) -> None:
    """Stored bytes, counts, decoded values and GEMM operand of one array."""
    stream = STREAM if spec.rounding == "stochastic" else None
    context = f"{spec} on {x.dtype} of shape {x.shape}"
    device = cuda.xp.asarray(x)
    gap = dialect_gap(spec)
    expected_path = "fused kernel" if gap is None else f"host: {gap.reason}"
    assert cuda.path("quantize", device, spec, stream) == expected_path, context
    want, want_stats = reference.quantize(x, spec, stream)
    got, got_stats = cuda.quantize(device, spec, stream)
    assert got.spec == want.spec
    for name in PARTS:
        part = getattr(want, name)
        if part is not None:
            same_bytes(name, host(getattr(got, name)), part, context)
    assert stats_of(got_stats) == want_stats, context
    decodes = cuda.path("dequantize", got) == "fused kernel"  # else on cupy, transforms undone
    if decodes:
        same_bytes("dequantized", host(cuda.dequantize(got)), reference.dequantize(want), context)
    if operand:
        expected, _ = reference.fake_quantize(x, spec, stream)
        decoded, again = cuda.fake_quantize(device, spec, stream)
        same_bytes("operand", host(decoded), expected, context)
        assert stats_of(again) == want_stats, context


def kinds(shape: tuple[int, ...]) -> tuple[str, ...]:
    return KINDS if np.prod(shape) <= 1 << 15 else KINDS[:1]


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (n, r)
        for n in COVERED
        for r in FORMATS[n].scale_rules
        if r in ("floor", "rceil", "ceil", "even", "one", "amax")
    ],
)
def test_every_rule_and_rounding(cuda: Any, name: str, rule: str, rounding: Any) -> None:
    for shape, axis in SHAPES:
        spec = QuantSpec(name, axis=axis, scale_rule=rule, rounding=rounding[0], rbits=rounding[1])
        for dtype in ("float32", "bfloat16"):
            for kind in KINDS:
                check(cuda, values(shape, axis, kind, dtype), spec, dtype == "bfloat16")


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("name", COVERED)
def test_every_block_size(cuda: Any, name: str, block: int, rounding: Any) -> None:
    for shape, axis in SHAPES:
        spec = QuantSpec(name, axis=axis, tile=(1, block), rounding=rounding[0], rbits=rounding[1])
        for kind in KINDS:
            check(cuda, values(shape, axis, kind, "float16"), spec)


@pytest.mark.parametrize("name", COVERED)
def test_more_shapes(cuda: Any, name: str) -> None:
    for shape, axis in MORE_SHAPES:
        for rounding in ("nearest_even", "stochastic"):
            spec = QuantSpec(name, axis=axis, rounding=rounding, rbits=8)
            for kind in kinds(shape):
                check(cuda, values(shape, axis, kind, "bfloat16"), spec)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("name", COVERED)
def test_every_dialect(cuda: Any, name: str, dialect: str) -> None:
    for shape, axis in (SHAPES[0], SHAPES[3]):
        spec = QuantSpec(name, axis=axis, dialect=dialect)
        for kind in KINDS:
            for dtype in ("float32", "bfloat16"):
                check(cuda, values(shape, axis, kind, dtype), spec)


@pytest.mark.parametrize("name", COVERED)
def test_windows_and_element_scales(cuda: Any, name: str) -> None:
    row = FORMATS[name]
    specs = [QuantSpec(name, element_scale=factor) for factor in (0.75, 0.3)]
    if row.scale.name == "e8m0":
        specs += [QuantSpec(name, scale_window=w, scale_rule="rceil") for w in (0, 3, 28)]
    for spec in specs:
        for shape, axis in (SHAPES[1], SHAPES[2]):
            for kind in KINDS:
                check(cuda, values(shape, axis, kind, "bfloat16"), spec.replace(axis=axis))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", COVERED)
def test_hadamard(cuda: Any, name: str, size: int, rounding: Any) -> None:
    """Every size with every block: a transform may span blocks, and a block transforms."""
    signs = {16: "fixed", 32: "random", 64: "random", 128: "none"}[size]
    transform = Hadamard(size, signs, seed=5)
    for block in (16, 32, 128):
        for shape, axis in SHAPES:
            spec = QuantSpec(name, axis, (1, block), transform=transform)
            spec = spec.replace(rounding=rounding[0], rbits=rounding[1])
            for kind in KINDS:
                for dtype in ("float32", "bfloat16"):
                    check(cuda, values(shape, axis, kind, dtype), spec, block == 32)


SQUARE_SHAPES = (((96, 64), -1), ((96, 64), 0), ((70, 19), 0), ((19, 70), 1), ((3, 40, 50), -1))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("name", COVERED)
def test_square_tiles(cuda: Any, name: str, size: int, rounding: Any) -> None:
    for shape, axis in SQUARE_SHAPES:
        spec = QuantSpec(name, axis, (size, size), rounding=rounding[0], rbits=rounding[1])
        for kind in KINDS:
            for dtype in ("float32", "bfloat16"):
                check(cuda, values(shape, axis, kind, dtype), spec)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_fp8exact"])
def test_scales_by_least_error(cuda: Any, name: str, tile: Any, rounding: Any) -> None:
    rule = "four_over_six" if name == "nvfp4" else "least_error"
    for shape, axis in SQUARE_SHAPES:
        spec = QuantSpec(name, axis, tile, rule, rounding=rounding[0], rbits=rounding[1])
        for kind in KINDS:
            for dtype in ("float32", "bfloat16"):
                check(cuda, values(shape, axis, kind, dtype), spec)


@pytest.mark.parametrize("rule", ["amax", "four_over_six"])
@pytest.mark.parametrize("tile", [(1, 16), (16, 1), (16, 16)])
def test_rows_under_the_scale_of_their_matrix(cuda: Any, rule: str, tile: tuple[int, int]) -> None:
    """As the matrix' own: its largest magnitude is elsewhere."""
    axis = -2 if tile == (16, 1) else -1
    spec = QuantSpec("nvfp4", axis=axis, tile=tile, scale_rule=rule).resolve(2)
    matrix = np.random.default_rng(0).standard_normal((96, 160)).astype(np.float32)
    matrix[80, 3] = 11.0
    q = registry.get("cpu").pack(matrix, spec)
    rows = cuda.xp.asarray(matrix[:64])
    mine = cuda.pack(rows, spec, None, cuda.xp.asarray(np.float32(11.0)))
    on_cpu = registry.get("cpu").pack(matrix[:64], spec, None, np.float32(11.0))
    assert mine.shape == on_cpu.shape == (64, 160)
    for name in ("codes", "scales"):
        whole = q.parts[name]
        part = whole[: whole.shape[0] * 64 // 96].tobytes()
        assert on_cpu.parts[name].tobytes() == part
        assert host(mine.parts[name]).tobytes() == part
    assert host(mine.tensor_scale) == on_cpu.tensor_scale == q.tensor_scale


def test_views_are_copied_as_they_are(cuda: Any) -> None:
    x = values((256, 64), 0, "normal", "float32")
    device = cuda.xp.asarray(x)
    spec = QuantSpec("mxfp4")
    for view in (lambda a: a.T, lambda a: a[1:, 3:], lambda a: a[::2], lambda a: a[:, ::-1]):
        expected, _ = reference.quantize(np.ascontiguousarray(view(x)), spec)
        got, _ = cuda.quantize(view(device), spec)
        same_bytes("codes", host(got.codes), expected.codes)
        same_bytes("scales", host(got.scales), expected.scales)


def test_what_the_kernels_do_not_cover_runs_on_the_host(gpu: Any) -> None:
    """The CPU's method gives the reference's bytes, and `path` says that it ran."""
    specs = [QuantSpec("mxfp4", tile=(16, 32)), QuantSpec("mxfp4", tile=(1, 8))]
    specs += [QuantSpec("mxfp4", tile=(16, 16), transform=Hadamard(16))]
    specs += [QuantSpec("int8", transform=Hadamard(16))]
    for name in ("mxfp8_e4m3", "fp8_e4m3"):
        specs.append(QuantSpec(name, statistic="percentile", percentile=90.0))
    x = values((6, 256), -1, "normal", "float32")
    device = gpu.xp.asarray(x)
    for spec in specs:
        assert gpu.path("quantize", device, spec).startswith("host: "), spec
        got, stats = gpu.quantize(device, spec)
        expected, want_stats = reference.quantize(x, spec)
        same_bytes("codes", host(got.codes), expected.codes, spec)
        same_bytes("scales", host(got.scales), expected.scales, spec)
        assert stats_of(stats) == want_stats
        if gpu.path("dequantize", got) != "fused kernel":
            same_bytes("values", host(gpu.dequantize(got)), reference.dequantize(expected), spec)


def test_tensors_move_to_the_gpu_and_back(cuda: Any) -> None:
    x = et.ExTensor(values((6, 256), -1, "normal", "float32"), device="cpu")
    there = x.to("cuda")
    assert there.device == "cuda" and there.to("cpu").device == "cpu"
    np.testing.assert_array_equal(there.numpy(), x.numpy())
    q, on_cpu = there.to_mxfp4(), x.to_mxfp4()
    same_bytes("codes", q.to("cpu").data.codes, on_cpu.data.codes)
    same_bytes("dequantized", q.dequantize().numpy(), on_cpu.dequantize().numpy())
    moved = on_cpu.to("cuda").dequantize()
    same_bytes("moved", moved.numpy(), on_cpu.dequantize().numpy())
    y = (there @ there.T).sum()
    assert abs(float(y) - float((x @ x.T).sum())) < 1e-2 * abs(float(y)) + 1e-2
    half = x.astype("bfloat16").to("cuda")
    same_bytes("bfloat16", half.numpy(), x.astype("bfloat16").numpy())
    made = et.zeros((3, 40), device="cuda")
    assert made.device == "cuda" and not made.numpy().any()


def test_gradients_flow_on_the_gpu(cuda: Any) -> None:
    x = et.ExTensor(values((6, 256), -1, "normal", "float32"), device="cuda", requires_grad=True)
    (x.to_mxfp8().dequantize() * 2.0).sum().backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.full((6, 256), 2.0, np.float32))


def test_out_of_memory_leaves_tensors_usable(cuda: Any) -> None:
    x = et.ones((4, 4), device="cuda")
    with pytest.raises(MemoryError, match=r"requested \d+ bytes, \d+ of \d+ are free"):
        et.zeros((1 << 20, 1 << 20), device="cuda")
    assert float((x + x).sum()) == 32.0


@pytest.mark.parametrize(("name", "side"), [("nvfp4", 16), ("mxfp8_e4m3", 32)])
def test_square_tiles_down_one_column(cuda: Any, name: str, side: int) -> None:
    x = values((96, 1), 0, KINDS[0], "float32")
    spec = QuantSpec(name, axis=0, tile=(side, side))
    expected, counts = reference.quantize(x, spec)
    got, found = cuda.quantize(cuda.xp.asarray(x), spec)
    for part in expected.parts:
        same_bytes(part, host(got.parts[part]), expected.parts[part], name)
    assert stats_of(found) == counts


def test_square_tiles_down_one_column_have_no_kernel() -> None:
    """Their rows lie as those of a row do: the kernel of row blocks would find no tile."""
    for shape in ((96, 1), (96, 2), (1, 96)):
        plan = plan_of(QuantSpec("nvfp4", axis=0, tile=(16, 16)), shape)
        assert isinstance(plan, Unsupported) == (shape[1] == 1)


def test_quantizers_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture refuses to read a value back; counts are read when somebody asks."""
    for module in (quantize, float_scaled, float_scaled_blocks, rowwise_columnwise):
        monkeypatch.setattr(module, "launch", lambda *arguments: None)
    gpu = CudaBackend(fake.FakeCupy())
    x = gpu.xp.asarray(np.ones((64, 128), np.float32))
    fake.TAPE.begin()
    try:
        for name in ("mxfp4", "nvfp4", "mxfp8_e4m3", "fp8_e4m3", "int4"):
            rows, columns = (QuantSpec(name, axis=axis).resolve(2) for axis in (1, 0))
            found = [gpu.quantize(x, rows), gpu.quantize(x, columns)]
            found += gpu.quantize_rowwise_columnwise(x, (rows, columns))
            if gpu.path("quantize_clipped", x, rows) == "fused kernel":
                found.append(gpu.quantize_clipped(x, rows)[:2])
            for _, counts in found:
                with pytest.raises(fake.CapturingError):
                    stats_of(counts)
    finally:
        fake.TAPE.end()
