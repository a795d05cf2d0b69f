"""Products of bfloat16 arrays of either layout, with K split or not; rounding to bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.protocol import CastSpec
from extensor_cuda.kernels.gemm.config import Config, Split, gemm_source
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    Epilogue,
    Scales,
    empty_rows,
    gemm,
    partial_sum_rows,
)
from extensor_cuda.kernels.prepare import cast_bf16
from extensor_cuda.kernels.prepare.cast_bf16 import bf16_source
from extensor_cuda.matmul.fallback_count import FallbackCounter
from extensor_cuda.matmul.operand import RESULT_DTYPES, GemmOperand, Scale, bf16_rows
from extensor_cuda.matmul.partition import configure, configure_split_k
from extensor_cuda.matmul.product import product
from extensor_cuda.runtime.compile import compile_cubin
from extensor_cuda.runtime.counters import Reserve
from extensor_cuda.runtime.memory import ALLOCATORS
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.preparing import CASTS
from tests.unit.cuda.preparing import made as made_by
from tests.unit.cuda.test_compile import check_compiles, properties

TRANSPOSED = ((False, False), (False, True), (True, False), (True, True))
GPT = {  # rows, columns and terms of the products of a GPT of 30 million parameters
    name: ((m, n, k), (m, k, n), (n, k, m))
    for name, (m, n, k) in {
        "qkv": (16384, 1536, 512),
        "out": (16384, 512, 512),
        "up": (16384, 2048, 512),
        "deep": (16384, 512, 2048),
        "logits": (16384, 8192, 512),
    }.items()
}


@pytest.fixture(params=PLACES)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a Hopper GPU, or of the kernels' sources on the CPU."""
    return place(request, monkeypatch, [cast_bf16])


def lying(v: np.ndarray, transposed: bool, xp: Any) -> Any:
    """Bits of (rows, K), as (K, rows) if ``transposed``, with NaN behind the end of each row."""
    v = v.T if transposed else v
    pitch = -(-v.shape[1] // 8) * 8 + 8
    held = np.full((len(v), pitch), 0x7FC0, dtype=np.uint16)
    held[:, : v.shape[1]] = v.astype(ml_dtypes.bfloat16).view(np.uint16)
    return xp.asarray(held)[:, : v.shape[1]]


def values(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """Float64 values of bfloat16."""
    return rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16).astype(np.float64)


def bound(va: np.ndarray, vb: np.ndarray) -> np.ndarray:
    """Of a float32 sum of K terms that is cut: `extensor_cuda.matmul.product`."""
    return np.asarray(va.shape[1] * 2.0**-22 * (np.abs(va) @ np.abs(vb).T))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("transposed", TRANSPOSED, ids=str)
def test_no_program_for_arrays_of_either_layout_spills(transposed: tuple[bool, bool]) -> None:
    sizes = [size for sizes in GPT.values() for size in sizes]
    configs = {
        configure_split_k("bf16", *size, out, transposed)[0]
        for size in sizes
        for out in RESULT_DTYPES
    }
    if not any(transposed):
        configs |= {
            configure_split_k("e5m2", *size, out)[0] for size in sizes for out in RESULT_DTYPES
        }
        configs |= {config.replace(factors=True) for config in configs if config.layout.split_k}
    wider = {config.replace(extras=True) for config in configs if not config.layout.split_k}
    for config in {
        *configs,
        *wider,
        Config.of("bf16", tile_n=128, promote=0, cluster=2, transposed=transposed),
    }:
        code, log = compile_cubin(gemm_source(config), "sm_90a")
        assert "warning" not in log.lower() and "C75" not in log, log
        assert all(numbers["stack"] == 0 for numbers in properties(code).values()), config


@pytest.mark.parametrize(
    ("size", "transposed", "tile"),
    [
        ((65536, 640, 640), (False, False), 160),  # four whole tiles: three of 256 leave 128 empty
        ((65536, 640, 1728), (False, True), 128),  # an operand (K, N) comes in boxes of 64
        ((65536, 1728, 640), (False, False), 192),
        ((65536, 8192, 640), (False, False), 256),
        ((8192, 8192, 8192), (False, False), 256),
    ],
)
def test_tiles_leave_few_columns_empty(
    size: tuple[int, int, int], transposed: tuple[bool, bool], tile: int
) -> None:
    config, split = configure_split_k("bf16", *size, "bfloat16", transposed)
    assert (config.pipeline.tile_n, split) == (tile, None)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_and_adding_compile_without_spills(dtype: str) -> None:
    for whole in (False, True):
        for out in RESULT_DTYPES:
            check_compiles(bf16_source(dtype, whole, out), "sm_80", "sm_90a")


@pytest.mark.parametrize("shape", [(1, 7, 16), (300, 200, 130), (129, 328, 1000)], ids=str)
@pytest.mark.parametrize("tile", [128, 192, 256])
@pytest.mark.parametrize("transposed", TRANSPOSED, ids=str)
def test_products_of_arrays_of_either_layout(
    hopper: Any, transposed: tuple[bool, bool], tile: int, shape: tuple[int, int, int]
) -> None:
    (m, n, k), rng = shape, np.random.default_rng(1)
    va, vb = values(rng, m, k), values(rng, n, k)
    a, b = (lying(v, swap, hopper) for v, swap in zip((va, vb), transposed, strict=True))
    clusters = (1,) if isinstance(hopper, Cupy) or tile == 192 else (1, 2)
    seen = []
    for cluster in clusters:
        out = empty_rows(hopper, m, n, np.float32)
        out[...] = np.nan
        gemm(
            a,
            b,
            out,
            Config.of("bf16", tile_n=tile, promote=0, cluster=cluster, transposed=transposed),
        )
        seen.append(out.get())
        assert (np.abs(seen[-1] - va @ vb.T) <= bound(va, vb)).all()
    assert (seen[0] == seen[-1]).all()  # the order of a sum is K's alone


def test_bits_do_not_depend_on_how_an_array_lies(hopper: Any) -> None:
    rng = np.random.default_rng(2)
    va, vb = values(rng, 140, 200), values(rng, 270, 200)
    seen = []
    for transposed in TRANSPOSED:
        a, b = (lying(v, swap, hopper) for v, swap in zip((va, vb), transposed, strict=True))
        out = empty_rows(hopper, 140, 270, np.float32)
        gemm(a, b, out, Config.of("bf16", tile_n=128, promote=0, transposed=transposed))
        seen.append(out.get())
    assert all((found == seen[0]).all() for found in seen)


@pytest.mark.parametrize("transposed", TRANSPOSED, ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((136, 200, 3000), "float32"), ((70, 41, 2500), "bfloat16"), ((5, 3, 2048), "float32")],
    ids=str,
)
def test_splits_of_k_are_added_in_order(
    hopper: Any, shape: tuple[int, int, int], dtype: str, transposed: tuple[bool, bool]
) -> None:
    (m, n, k), rng = shape, np.random.default_rng(3)
    va, vb = values(rng, m, k), values(rng, n, k)
    a, b = (lying(v, swap, hopper) for v, swap in zip((va, vb), transposed, strict=True))
    bias = rng.standard_normal(n).astype(np.float32)
    config, split = configure_split_k("bf16", m, n, k, dtype, transposed)
    assert split is not None and split.count > 1
    sides = (
        GemmOperand(side, "bf16", transposed=swap)
        for side, swap in zip((a, b), transposed, strict=True)
    )
    got = product(*sides, dtype, hopper, hopper.asarray(bias)).get()
    expected = np.zeros((m, n), np.float32)
    alone = config.replace(split_k=False)
    for part in range(split.count):
        ks = slice(part * split.stages * 64, (part + 1) * split.stages * 64)
        left, right = (
            x[ks] if swap else x[:, ks] for x, swap in zip((a, b), transposed, strict=True)
        )
        out = empty_rows(hopper, m, n, np.float32)
        gemm(left, right, out, alone)
        expected = out.get().copy() if part == 0 else expected + out.get()
    np.testing.assert_array_equal(got, (expected + bias).astype(RESULT_DTYPES[dtype]))
    assert (np.abs(expected - va @ vb.T) <= bound(va, vb)).all()


def test_splits_of_k_under_a_factor_are_scaled_then_added(hopper: Any) -> None:
    """NVFP4's weight gradient: few rows and columns, many terms, a scale for each tensor."""
    (m, n, k), rng = (70, 41, 2500), np.random.default_rng(5)
    va, vb = values(rng, m, k), values(rng, n, k)
    scales = [hopper.asarray([factor], dtype=np.float32) for factor in (1.7, 3.1e-3)]
    sides = [
        GemmOperand(lying(v, False, hopper), "bf16", Scale(factor=scale))
        for v, scale in zip((va, vb), scales, strict=True)
    ]
    config, split = configure_split_k("bf16", m, n, k, "float32")
    assert split is not None and split.count > 1
    expected = np.zeros((m, n), np.float32)
    for part in range(split.count):
        ks = slice(part * split.stages * 64, (part + 1) * split.stages * 64)
        out = empty_rows(hopper, m, n, np.float32)
        epilogue = Epilogue(Scales(factors=tuple(scales)))
        gemm(*(side.codes[:, ks] for side in sides), out, config.replace(split_k=False), epilogue)
        expected = out.get().copy() if part == 0 else expected + out.get()
    np.testing.assert_array_equal(product(*sides, "float32", hopper).get(), expected)
    factor = float(scales[0].get()[0]) * float(scales[1].get()[0])
    assert (np.abs(expected / factor - va @ vb.T) <= bound(va, vb)).all()


@pytest.mark.parametrize("out_of_window", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(136, 72, 4000), (264, 392, 128)], ids=["split", "in parts"])
def test_parts_of_fp8_products_and_of_their_other_way(
    hopper: Any,
    sizes: tuple[int, int, int],
    with_bias: bool,
    out_of_window: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small integers: every sum is exact, whatever the layouts, the splits and the parts."""
    monkeypatch.setattr(ALLOCATORS, "fallback", 2 * 128 * 128)  # three and four parts of a side
    m, n, k = sizes
    rng = np.random.default_rng(7)
    sides, held = [], []
    for rows in (m, n):
        v = rng.integers(-3, 4, (rows, k)).astype(np.float32)
        codes = np.full((rows, k + 16), 0x7F, np.uint8)
        codes[:, :k] = v.astype(ml_dtypes.float8_e5m2).view(np.uint8)
        exponent = hopper.asarray([3], dtype=np.int32)
        flag = hopper.asarray(int(out_of_window), dtype=np.uint32)

        def make_bf16(
            source: Any, guards: Any, part: Any, memory: Any, v: np.ndarray = v
        ) -> GemmOperand:
            values = (v * 8).astype(ml_dtypes.bfloat16)[slice(*part or (None,))]
            if memory is None or not out_of_window:  # a kernel would write nothing
                return GemmOperand(hopper.asarray(values.view(np.uint16)), "bf16")
            out = bf16_rows(hopper, *values.shape, memory)[:, : v.shape[1]]
            out[...] = hopper.asarray(values.view(np.uint16))
            return GemmOperand(out, "bf16")

        there = hopper.asarray(codes)[:, :k]
        sides.append(GemmOperand(there, "e5m2", Scale(exponent), flag=flag, make_bf16=make_bf16))
        held.append(v.astype(np.float64) * 8)

    assert (configure_split_k("e5m2", m, n, k, "float32")[1] is not None) == (k == 4000)
    fallback = FallbackCounter(Reserve(hopper))
    bias = hopper.asarray(rng.integers(-9, 9, n).astype(np.float32)) if with_bias else None
    got = product(sides[0], sides[1], "float32", hopper, bias, fallback).get()
    expected = held[0] @ held[1].T + (0 if bias is None else bias.get())
    np.testing.assert_array_equal(got, expected)
    assert fallback.count == out_of_window


def test_a_bias_and_bfloat16_come_from_the_epilogue(hopper: Any) -> None:
    rng = np.random.default_rng(4)
    va, vb = values(rng, 300, 64), values(rng, 264, 64)
    bias = rng.standard_normal(264).astype(np.float32)
    sides = [GemmOperand(lying(v, False, hopper), "bf16") for v in (va, vb)]
    plain = product(*sides, "float32", hopper)
    got = product(*sides, "bfloat16", hopper, hopper.asarray(bias))
    expected = (plain.get() + bias).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.get(), expected)


def test_every_part_has_terms_and_the_shape_alone_decides() -> None:
    for sizes in GPT.values():
        for m, n, k in sizes:
            for transposed in TRANSPOSED:
                config, split = configure_split_k("bf16", m, n, k, "float32", transposed)
                assert (split is not None) == config.layout.split_k
                assert split == configure_split_k("bf16", m, n, k, "bfloat16", (False, False))[1]
                if split is not None:
                    stages = -(-k // 64)
                    assert (split.count - 1) * split.stages < stages <= split.count * split.stages
    for m, n, k in (size for sizes in GPT.values() for size in sizes):
        config, split = configure_split_k("e5m2", m, n, k, "float32")
        assert config.pipeline.promote == 4
        if split is None:
            assert config == configure("e5m2", m, n, "float32")
        else:  # promoted where K would be without splits
            assert split.stages % 4 == 0 and (split.count - 1) * split.stages < -(-k // 128)
    assert configure_split_k("e5m2", 512, 512, 16384, "float32")[1] is not None
    # 8 tiles of 128 x 256 alone would leave 124 of 132 multiprocessors without work
    assert configure_split_k("bf16", 512, 512, 16384, "float32")[1] is not None
    assert configure_split_k("bf16", 16384, 2048, 512, "float32")[1] is None


def test_what_does_not_go_together_is_refused(hopper: Any) -> None:
    a, out = hopper.zeros((64, 64), dtype=np.uint16), hopper.zeros((64, 64), dtype=np.float32)
    config = Config.of("bf16", tile_n=128, promote=0, transposed=(True, True))
    with pytest.raises(ValueError, match="whole boxes"):
        gemm(a, a, out, config.replace(tile_n=176))
    with pytest.raises(ValueError, match="are bf16"):
        gemm(*[a.view(np.uint8)[:, :64]] * 2, out, Config.of(tile_n=128, transposed=(True, False)))
    split = config.replace(split_k=True)
    rows = hopper.zeros((partial_sum_rows(64, split), 64), dtype=np.float32)
    with pytest.raises(ValueError, match="a config that splits"):
        gemm(a, a, rows, config, Epilogue(split=Split(1, 1)))
    with pytest.raises(ValueError, match="at most one exponent"):
        gemm(
            a, a, rows, split, Epilogue(split=Split(1, 1), bias=hopper.zeros(64, dtype=np.float32))
        )


@pytest.mark.parametrize("shape", [(64, 128), (1, 7), (200, 333), (9, 24)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_is_the_nearest_and_once_for_both_ways(
    hopper: Any, dtype: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, shape))
    x.flat[:6] = 1e-40, -3e-8, np.inf, -np.inf, np.nan, -0.0
    with np.errstate(over="ignore"):
        x = x.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    specs = [CastSpec("bfloat16", axis) for axis in (1, 0)]
    (rowwise, _), (columnwise, _) = made_by(CASTS, hopper.asarray(x), specs, [None, None], hopper)
    assert rowwise.codes is columnwise.codes and rowwise.shape == columnwise.shape[::-1] == shape
    for made, values in ((rowwise, expected), (columnwise, expected.T)):
        np.testing.assert_array_equal(made.values(hopper).get(), values.astype(np.float32))


def test_another_program_allocates_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does, which takes them over without a view."""
    made = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        made.append((shape, dtype))
        return np.empty(shape, dtype)

    monkeypatch.setattr(ALLOCATORS, "empty", empty)
    assert empty_rows(np, 3, 8, np.float32).shape == (3, 8)
    assert empty_rows(np, 3, 5, RESULT_DTYPES["bfloat16"]).shape == (3, 5)
    assert made == [((3, 8), np.dtype(np.float32)), ((3, 8), RESULT_DTYPES["bfloat16"])]
