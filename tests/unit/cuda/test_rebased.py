"""Rebased MXFP8: the operands are the CPU's bit for bit, products within the stated bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.rebase import rebased_values
from extensor.quant.recipe_state import stats_of
from extensor.quant.schemes import get_scheme
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE, gemm_source
from extensor_cuda.kernels.prepare import cast_bf16, quantize_operand, rebase
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.matmul import product as products
from extensor_cuda.matmul.expand import rebase_mxfp8
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import Product, product
from extensor_cuda.matmul.stored import matmul
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda import hopper
from tests.unit.cuda.bounds import check_product, sent
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.preparing import FUSED
from tests.unit.cuda.preparing import made as made_by
from tests.unit.cuda.test_compile import check_compiles

E4M3, E5M2 = QuantSpec("mxfp8_e4m3", axis=1), QuantSpec("mxfp8_e5m2", axis=1)
SPECS = (
    E4M3,
    E5M2,
    E4M3.replace(tile=(1, 16)),
    E4M3.replace(tile=(1, 128)),
    E5M2.replace(tile=(32, 32)),
)
MXFP8_SPECS = (E4M3.replace(scale_rule="rceil"), E5M2.replace(scale_rule="rceil"), E4M3)
SHAPES = ((1, 16), (7, 100), (40, 33), (3, 2200))
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def name(value: object) -> str:
    return (
        f"{value.format}-{value.tile}-{value.rule}" if isinstance(value, QuantSpec) else str(value)
    )


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_no_kernel_spills(spec: QuantSpec) -> None:
    check_compiles(rebase.mxfp8_source(spec.resolve(2)), "sm_80", "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("n", [4096, 8192])
def test_no_gemm_of_it_spills(n: int) -> None:
    config = configure("e4m3", n, n, "bfloat16", 1).replace(vectors=True)
    check_compiles(gemm_source(config), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_no_kernel_of_squares_spills(rounding: str, dtype: str) -> None:
    for spec in MXFP8_SPECS:
        spec = spec.replace(rebased=True, rounding=rounding).resolve(2)
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            source = quantize_operand.fused_source(spec, dtype, rowwise, columnwise, False)
            check_compiles(source, "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("tile", [128, 176, 192])
def test_no_gemm_of_squares_spills(tile: int, extras: bool) -> None:
    config = configure("e4m3", 4096, 4096, "bfloat16", blocks=(ROWS_PER_SCALE, ROWS_PER_SCALE))
    config = config.replace(tile_n=tile, ping_pong=tile == 192, extras=extras)
    check_compiles(gemm_source(config), "sm_90a")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(
        request, monkeypatch, [rebase, expand_kernel, cast_bf16], quantizing=[quantize_operand]
    )


def made(
    shape: tuple[int, int], spec: QuantSpec, spread: int = 6, seed: int = 0, odd: bool = True
) -> QuantArray:
    """Normal data whose blocks lie binades apart; odd: a zero row, a zero block with a large scale.

    That scale counts elsewhere, where one number for the tensor lifts all of them.
    """
    rng = np.random.default_rng(seed)
    blocks = np.exp2(rng.integers(-spread, spread + 1, (shape[0], -(-shape[1] // 16))))
    x = rng.standard_normal(shape) * blocks.repeat(16, axis=1)[:, : shape[1]]
    q = reference.quantize(x.astype(np.float32), spec.resolve(2))[0]
    assert isinstance(q.spec.tile, tuple)
    if shape[0] > 2 and q.spec.tile[0] == 1 and odd:
        q.codes[0] = 0
        q.codes[1, : q.spec.tile[1]] = 0
        q.scales[1, 0] = 250
    return q


def bits_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Values that a format holds as its bits; NaN whatever its sign."""
    return np.where(np.isnan(values), 0x7F, values.astype(DTYPES[kind]).view(np.uint8))


def check_operand(q: QuantArray, xp: Any) -> None:
    expected = rebased_values(q)
    got, inexact = rebase_mxfp8(sent(q, xp), xp)
    kind = q.spec.row.element.name
    assert got.kind == kind and got.codes.strides[0] % 16 == 0 and got.scale.exponent is not None
    codes = np.asarray(got.codes.get())
    held = np.where(np.isnan(hopper.values(codes, kind)), 0x7F, codes)
    np.testing.assert_array_equal(held, bits_of(expected.values, kind))
    np.testing.assert_array_equal(got.scale.exponent.get(), expected.exponents)
    np.testing.assert_array_equal(
        inexact.counts.get(), np.stack([expected.changed, expected.flushed], 1)
    )
    assert inexact.shares() == expected.shares


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_operands_are_the_references(xp: Any, spec: QuantSpec, shape: tuple[int, int]) -> None:
    for spread in (0, 6, 40):
        check_operand(made(shape, spec, spread), xp)


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=name)
def test_every_code_under_every_shift(xp: Any, spec: QuantSpec) -> None:
    """All 256 codes, NaN and infinities too, 0 to 70 binades below a block of ones."""
    shifts = np.arange(71)
    x = np.ones((len(shifts), 32 * 9), dtype=np.float32)
    q = reference.quantize(x, spec.resolve(2))[0]
    q.codes[:, 32:] = np.arange(256, dtype=np.uint8)
    q.scales[:, 0] = 200
    q.scales[:, 1:] = (200 - shifts)[:, None]
    check_operand(q, xp)
    expected = rebased_values(q)
    assert expected.changed[0] == 0 and expected.flushed[-1] > 240


def test_nan_blocks_and_rows_without_a_number(xp: Any) -> None:
    q = made((4, 96), E4M3)
    q.scales[2, 1], q.scales[3] = 255, 255
    check_operand(q, xp)
    expected = rebased_values(q)
    assert np.isnan(expected.values[2, 32:64]).all() and np.isnan(expected.values[3]).all()
    assert list(expected.exponents[[0, 3]]) == [0, 0]


def test_the_reference_moves_values_by_half_a_least_number_at_most() -> None:
    for spec, step in ((E4M3, 2.0**-9), (E5M2, 2.0**-16)):
        q = made((50, 640), spec, 12)
        got = rebased_values(q)
        stored = reference.dequantize(q, np).astype(np.float64)
        exact = np.ldexp(stored, -got.exponents[:, None])
        off = np.abs(got.values - exact)
        assert 0 < off.max() <= step / 2
        assert ((off > 0).sum(axis=1) == got.changed).all()
        nearest = exact.astype(DTYPES[spec.row.element.name]).astype(np.float64)
        np.testing.assert_array_equal(got.values, nearest)


def test_what_the_reference_does_not_cover_is_named() -> None:
    x = np.ones((4, 64), dtype=np.float32)
    for spec, words in ((QuantSpec("mxfp4", axis=1), "MXFP8"), (E4M3.replace(axis=0), "axis 0")):
        with pytest.raises(ValueError, match=words):
            rebased_values(reference.quantize(x, spec.resolve(2))[0])


def matrix(shape: tuple[int, int], dtype: str, odd: bool = True) -> np.ndarray:
    """Rows, columns and blocks over many binades; odd: zeros, and what is no number."""
    rng = np.random.default_rng(shape[0])
    x = rng.standard_normal(shape) * np.exp2(
        rng.integers(-4, 5, shape) + rng.integers(-9, 9, (shape[0], 1))
    )
    if odd:
        x[x > 2] = 0
        x[-1, :] = 0
        x[0, -1], x[shape[0] // 2, 3] = np.nan, -np.inf
        x[0, -2] = 2.0**20  # goes with NaN in the row, and not in its column
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def squares_of(x: np.ndarray, spec: QuantSpec) -> Any:
    """The definition, in float64, of what a spec with ``rebased`` gives rowwise or columnwise."""
    rowwise = spec.replace(rebased=False, axis=1)
    q, stats = reference.quantize(np.ascontiguousarray(x if spec.axis else x.T), rowwise)
    held = rebased_values(q, tiles=True)
    exponents = held.exponents.repeat(128, axis=1)[:, : q.shape[1]]
    changed, gone = int(held.changed.sum()), int(held.flushed.sum())
    stats = replace(stats, rebase_changed=changed, flushed=stats.flushed + gone)
    return np.ldexp(held.values, exponents), stats


SQUARE_SHAPES = ((1, 16), (130, 136), (256, 128), (200, 392))


@pytest.mark.parametrize("spec", MXFP8_SPECS, ids=name)
@pytest.mark.parametrize("shape", SQUARE_SHAPES, ids=str)
def test_the_cpu_settles_squares_as_defined(shape: tuple[int, int], spec: QuantSpec) -> None:
    x, cpu = matrix(shape, "float32"), registry.get("cpu")
    for axis in (0, 1):
        each = spec.replace(rebased=True, axis=axis).resolve(2)
        expected, stats = squares_of(x, each)
        expected = expected if axis else expected.T
        for backend in (GenericBackend("generic", np), cpu):
            q, counted = backend.quantize(x, each)
            values, same = backend.fake_quantize(x, each)
            assert counted == same == stats
            np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(backend.dequantize(q), expected)
            assert q.spec == each


@pytest.mark.parametrize("odd", [False, True], ids=["numbers", "odd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", MXFP8_SPECS, ids=name)
def test_squares_are_the_references(xp: Any, spec: QuantSpec, dtype: str, odd: bool) -> None:
    specs = [spec.replace(rebased=True, axis=axis).resolve(2) for axis in (1, 0)]
    for shape in SQUARE_SHAPES:
        x = matrix(shape, dtype, odd)
        there = xp.asarray(x)
        pair = made_by(FUSED, there, specs, [None, None], xp)
        for i, (both, each) in enumerate(zip(pair, specs, strict=True)):
            (single,) = made_by(FUSED, there, [each], [None], xp)
            expected, stats = squares_of(x.astype(np.float32), each)
            for operand, counts in (both, single):
                assert operand.scale.form == "blocks"
                got = np.asarray(operand.values(xp).get())
                np.testing.assert_array_equal(got, expected, err_msg=f"{shape} {i}")
                numbers = ~np.isnan(expected)
                np.testing.assert_array_equal(
                    np.signbit(got[numbers]), np.signbit(expected[numbers])
                )
                assert counts() == stats


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_squares_rounded_by_chance_are_the_cpus(xp: Any, dtype: str) -> None:
    x = matrix((130, 136), dtype)
    spec = MXFP8_SPECS[0].replace(rebased=True, rounding="stochastic")
    specs = [spec.replace(axis=axis).resolve(2) for axis in (1, 0)]
    streams = [Stream(1, 2, 3, i, bool(i)) for i in (0, 1)]
    pair = made_by(FUSED, xp.asarray(x), specs, streams, xp)
    for i, (operand, counts) in enumerate(pair):
        expected, stats = registry.get("cpu").fake_quantize(x, specs[i], streams[i])
        assert operand.scale.form == "blocks" and counts() == stats
        np.testing.assert_array_equal(operand.values(xp).get(), expected.T if i else expected)


@pytest.mark.parametrize("shape", [(64, 64), (3, 40, 70)], ids=str)
def test_small_operands_of_squares_are_the_cpus(cuda: Any, shape: tuple[int, ...]) -> None:
    x, cpu = np.random.default_rng(0).standard_normal(shape).astype(np.float32), registry.get("cpu")
    x = x * np.exp2(np.arange(-20, 20)).astype(np.float32).repeat(2)[: shape[-1]]
    for axis in (-1, -2):
        spec = MXFP8_SPECS[0].replace(rebased=True, axis=axis).resolve(len(shape))
        values, counts = cuda.fake_quantize(cuda.xp.asarray(x), spec)
        expected, stats = cpu.fake_quantize(x, spec)
        np.testing.assert_array_equal(values.get(), expected)
        assert counts() == stats and stats.rebase_changed > 0


@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [128, 176, 192])
def test_products_of_squares_are_within_the_bound(
    xp: Any, monkeypatch: pytest.MonkeyPatch, tile: int, out: str
) -> None:
    m, n, k = 136, 400, 392
    chosen = {"tile_n": tile, "ping_pong": tile == 192}
    monkeypatch.setattr(products, "configure", lambda *a, **b: configure(*a, **b).replace(**chosen))
    values, sides = [], []
    for rows, spec in ((m, MXFP8_SPECS[0]), (n, MXFP8_SPECS[1])):
        x, each = matrix((rows, k), "float32", False), spec.replace(rebased=True).resolve(2)
        sides.append(made_by(FUSED, xp.asarray(x), [each], [None], xp)[0][0])
        values.append(squares_of(x, each)[0])
    bias = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    got = product(*sides, out, xp, xp.asarray(bias))
    share = 128 * 34 / 32 * 2.0**-13 + (k / 128 + 2) * 2.0**-24
    check_product(got, values[0], values[1], share, 2.0**-22 * np.abs(bias), bias)


PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, QuantSpec("mxfp4", axis=1)))


@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(s.format for s in pair))
def test_products_are_within_the_bound(xp: Any, pair: tuple[QuantSpec, ...], out: str) -> None:
    m, n, k = 130, 70, 1000
    spreads = [14 if spec is E5M2 else 4 for spec in pair]  # so that some of each change
    a = made((m, k), pair[0], spreads[0], 1, False)
    b = made((n, k), pair[1], spreads[1], 2, False)
    done = matmul(sent(a, xp), sent(b, xp), xp, accumulate="rebased", out_dtype=out)
    assert isinstance(done, Product)
    assert done.path == "FP8 tensor cores, rebased operands"
    got = done.out.get().astype(np.float64)
    values, off = [], []
    for q, inexact in zip((a, b), done.inexact, strict=True):
        stored = reference.dequantize(q, np).astype(np.float64)
        assert (inexact is not None) == q.spec.is_mxfp8
        if inexact is None:
            values.append(stored)
            off.append(np.zeros_like(stored))
            continue
        held = rebased_values(q)
        assert inexact.shares() == held.shares and 0 < held.shares[0] < 0.2
        values.append(np.ldexp(held.values, held.exponents[:, None]))
        off.append(np.ldexp(np.full(q.shape, held_step(q)), held.exponents[:, None]))
        assert (np.abs(values[-1] - stored) <= off[-1]).all()
    near_product, size = values[0] @ values[1].T, np.abs(values[0]) @ np.abs(values[1]).T
    bound = (128 * 34 / 32 * 2.0**-13 + (k / 128 + 16) * 2.0**-24) * size
    if out == "bfloat16":
        bound = 2 * bound + 2.0**-8 * np.abs(near_product)
    assert (np.abs(got - near_product) <= bound).all()
    x, y = (reference.dequantize(q, np).astype(np.float64) for q in (a, b))
    moved = off[0] @ np.abs(y).T + np.abs(x) @ off[1].T + off[0] @ off[1].T
    assert (np.abs(got - x @ y.T) <= bound + moved).all()


def held_step(q: QuantArray) -> float:
    return 2.0**-10 if q.spec.row.element.name == "e4m3" else 2.0**-17


def test_it_is_asked_for_and_never_silent(xp: Any) -> None:
    a = sent(made((20, 64), E4M3, odd=False), xp)
    plain = matmul(a, a, xp)
    assert isinstance(plain, Product) and plain.inexact == (None, None)
    assert plain.path.startswith("bf16")
    fp4, nvfp4 = (
        sent(
            reference.quantize(np.ones((20, 64), np.float32), QuantSpec(f, axis=1).resolve(2))[0],
            xp,
        )
        for f in ("mxfp4", "nvfp4")
    )
    with pytest.raises(ValueError, match="'rebased' is for MXFP8, got mxfp4 and mxfp4"):
        matmul(fp4, fp4, xp, accumulate="rebased")
    mixed = matmul(a, nvfp4, xp, accumulate="rebased")
    assert isinstance(mixed, Product) and mixed.inexact == (None, None)
    assert mixed.path == "bf16 tensor cores: FP8 does not hold nvfp4"


@pytest.mark.parametrize("xp", PLACES[:1], indirect=True)
def test_nothing_waits(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = sent(made((20, 64), E4M3), xp)

    def no_reads(array: Any, key: Any) -> Any:
        assert not isinstance(key, int), "read on the host"
        return np.ndarray.__getitem__(array, key)

    def refuse(array: Any) -> Any:
        raise AssertionError("read on the host")

    monkeypatch.setattr(emulation.Device, "__getitem__", no_reads)
    monkeypatch.setattr(emulation.Device, "get", refuse)
    done = matmul(a, a, xp, accumulate="rebased")
    assert isinstance(done, Product)
    with pytest.raises(AssertionError, match="read on the host"):
        assert done.inexact[0] is not None and done.inexact[0].shares()


@pytest.mark.usefixtures("nvrtc")
def test_no_gemm_of_rebased_activations_and_mxfp4_spills() -> None:
    config = configure("e4m3", 8192, 4096, "bfloat16", b="e5m2", blocks=(ROWS_PER_SCALE,) * 2)
    check_compiles(gemm_source(config), "sm_90a")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 256), (200, 264, 640)])
def test_rebased_activations_times_mxfp4(hopper_gpu: Any, m: int, n: int, k: int) -> None:
    """The product of the values that the quantizer stores, as the CPU's too."""
    spec = E4M3.replace(scale_rule="rceil", rebased=True, axis=1).resolve(2)
    rng = np.random.default_rng(m)
    wide = rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, k)))
    x = wide.astype(ml_dtypes.bfloat16)
    mxfp4 = QuantSpec("mxfp4", axis=1)
    w = reference.quantize(rng.standard_normal((n, k)).astype(np.float32), mxfp4)[0]
    there = hopper_gpu.xp.asarray(x), spec, sent(w, hopper_gpu.xp)
    path = hopper_gpu.path("rebased_matmul", *there)
    assert path == "FP8 tensor cores, activations rebased"
    for dtype in ("float32", "bfloat16"):
        out, counts = hopper_gpu.rebased_matmul(*there, dtype)
        values, stats = reference.fake_quantize(x.astype(np.float32), spec)
        a, b = values.astype(np.float64), reference.dequantize(w).astype(np.float64)
        size = np.abs(a) @ np.abs(b).T
        bound = (128 * 34 / 32 * 2.0**-13 + (k / 128 + 16) * 2.0**-24) * size
        got = out.get().astype(np.float64)
        bound = bound + (np.abs(a @ b.T) * 2.0**-8 if dtype == "bfloat16" else 0)
        assert (np.abs(got - a @ b.T) <= bound).all()
        assert stats_of(counts).rebase_changed == stats.rebase_changed


def test_a_layer_of_rebased_activations_on_a_cpu() -> None:
    """The generic method's product: that of what is stored."""
    scheme = get_scheme("mxfp4_a8_rebased")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    layer = et.quantize_model(et.nn.Linear(64, 7, bias=False, rng=0), scheme.name)
    got = layer(et.from_numpy(x)).numpy()
    spec = scheme.activations.replace(axis=1).resolve(2)
    a = reference.quantize(x, spec)[0]
    expected = registry.get("cpu").block_scaled_matmul(a, layer.weight.data)
    np.testing.assert_array_equal(got, expected)
