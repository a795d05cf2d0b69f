"""The Hopper GEMM: compiles without spills anywhere; on a GPU, against float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from extensor_cuda.kernels.gemm.config import ACTIVATIONS, ROWS_PER_SCALE, Config, gemm_source
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    Epilogue,
    Flags,
    Scales,
    empty_rows,
    epilogue_structure,
    gemm,
)
from extensor_cuda.runtime.compile import compile_cubin
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.fields import check_fields
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import properties

COMPILED = (
    Config.of(out="bfloat16"),
    Config.of(vectors=True),
    Config.of("e4m3", "e5m2", tile_n=128, cluster=2),
    Config.of(tile_n=256, promote=0, out="bfloat16"),
    Config.of("bf16", tile_n=192, promote=0, out="bfloat16", activation="silu"),
    Config.of("s8", tile_n=256, promote=0),
    Config.of(out="bfloat16", cluster=2, epilogue_tiles=3, ping_pong=True),
    Config.of(tile_n=176, extras=True, activation="silu"),
)
SHAPES = ((1, 7, 16), (300, 200, 1000), (128, 192, 4096), (513, 770, 2050))
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {"e5m2": ml_dtypes.float8_e5m2, "e4m3": ml_dtypes.float8_e4m3fn}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "config", COMPILED, ids=lambda c: f"{c.a}-{c.pipeline.tile_n}-{c.pipeline.promote}"
)
def test_no_gemm_spills_or_serialises(config: Config) -> None:
    code, log = compile_cubin(gemm_source(config), "sm_90a")
    assert "warning" not in log.lower() and "C75" not in log, log
    assert all(numbers["stack"] == 0 for numbers in properties(code).values())


def test_the_epilogues_fields_lie_where_the_kernel_reads_them(
    tmp_path: Path, compiler: str
) -> None:
    text = gemm_source(Config()).text
    check_fields(text, "Epilogue", epilogue_structure(), compiler, tmp_path)


@pytest.fixture(params=PLACES)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a Hopper GPU, or of the kernel's source on the CPU."""
    return place(request, monkeypatch, ())


def here(config: Config, xp: Any) -> Config:
    """The program, without what an emulator cannot do: clusters."""
    return config.replace(cluster=1) if isinstance(xp, Cupy) else config


def operand(rng: Any, rows: int, k: int, kind: str, xp: Any) -> tuple[Any, np.ndarray]:
    """Codes on the device, what lies beyond K poisoned with NaN or 77, and values."""
    size = 2 if kind == "bf16" else 1
    pitch = -(-k // 128) * 128
    if kind == "s8":
        held = rng.integers(-96, 97, (rows, pitch)).astype(np.int8)
    elif kind == "bf16":
        held = rng.standard_normal((rows, pitch)).astype(ml_dtypes.bfloat16)
    else:
        held = (rng.choice(FP4, (rows, pitch)) * 2.0 ** rng.integers(-3, 4, (rows, 1))).astype(
            DTYPES[kind]
        )
    values = held[:, :k].astype(np.float64)
    raw = held.view(np.uint16 if size == 2 else np.uint8).copy()
    raw[:, k:] = 77 if kind == "s8" else 0x7F if size == 1 else 0x7FC0
    return xp.asarray(raw)[:, :k], values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config.of(cluster=2, epilogue_tiles=3),
        Config.of(tile_n=176, cluster=2, epilogue_tiles=2, ping_pong=True),
        Config.of("e4m3", "e5m2", tile_n=160),
        Config.of("s8", tile_n=256, promote=0),
        Config.of("bf16", tile_n=192, promote=0),
    ],
    ids=lambda c: (
        f"{c.a}-{c.b}-{c.pipeline.tile_n}-{c.pipeline.cluster}-{c.pipeline.epilogue_tiles}"
    ),
)
def test_products_with_tails_exponents_bias_and_residual(
    hopper: Any, config: Config, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m)
    a, va = operand(rng, m, k, config.a, hopper)
    b, vb = operand(rng, n, k, config.b, hopper)
    rows, columns = (rng.integers(-70, 41, size).astype(np.int32) for size in (m, n))
    out = empty_rows(hopper, m, n, np.float32)
    out[...] = np.nan
    config = here(config, hopper)
    gemm(a, b, out, config, Epilogue(Scales((hopper.asarray(rows), hopper.asarray(columns)))))
    expected = (
        va @ vb.T * np.exp2(rows[:, None].astype(float)) * np.exp2(columns[None].astype(float))
    )
    got = out.get()
    if config.a == "bf16":  # a float32 sum that truncates: K terms of at most 2**-23 each
        bound = k * 2.0**-22 * (np.abs(va) @ np.abs(vb).T)
        bound = bound * np.exp2(rows[:, None].astype(float)) * np.exp2(columns[None].astype(float))
        assert (np.abs(got - expected) <= bound).all()
    else:  # every product and every partial sum of these values fits the accumulator
        np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("out_type", ["float32", "bfloat16"])
def test_one_exponent_for_all_with_bias_activation_residual_and_amax(
    hopper: Any, out_type: str
) -> None:
    rng = np.random.default_rng(2)
    m, n, k = 200, 328, 640
    (a, va), (b, vb) = (operand(rng, rows, k, "e5m2", hopper) for rows in (m, n))
    bias = rng.standard_normal(n).astype(np.float32)
    dtype = np.float32 if out_type == "float32" else ml_dtypes.bfloat16
    residual = rng.standard_normal((m, n)).astype(dtype)
    out, amax = empty_rows(hopper, m, n, dtype), hopper.zeros((), dtype=np.uint32)
    exponents = [hopper.asarray([e], dtype=np.int32) for e in (-9, 5)]
    config = Config.of(out=out_type, activation="relu", cluster=2, epilogue_tiles=3)
    config = here(config, hopper)
    scales, more = (
        Scales((exponents[0], exponents[1])),
        [hopper.asarray(v) for v in (bias, residual)],
    )
    gemm(a, b, out, config, Epilogue(scales, *more, amax))
    wide = (va @ vb.T / 16).astype(np.float32) + bias
    expected = np.maximum(wide, 0) + residual.astype(np.float32)
    np.testing.assert_array_equal(out.get(), expected.astype(dtype))
    assert amax.get().view(np.float32) == np.abs(expected).max()


def reference_of(name: str, v: np.ndarray) -> np.ndarray:
    v = v.astype(np.float64)
    if name == "relu":
        return np.maximum(v, 0)
    if name == "silu":
        return v / (1 + np.exp(-v))
    if name == "gelu_tanh":
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    if name == "gelu":
        return 0.5 * v * (1 + np.vectorize(math.erf)(v / np.sqrt(2)))
    return v


@pytest.mark.parametrize("tile", [(128, 2), (192, 3)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_after_factors_and_bias(
    hopper: Any, activation: str, tile: tuple[int, int]
) -> None:
    """exp, tanh and erf of a GPU: a few units of float32's last place."""
    rng = np.random.default_rng(5)
    m, n, k = 150, 200, 256
    (a, va), (b, vb) = (operand(rng, rows, k, "e4m3", hopper) for rows in (m, n))
    rows, columns = (rng.uniform(0.01, 0.1, size).astype(np.float32) for size in (m, n))
    bias = rng.standard_normal(n).astype(np.float32)
    out = empty_rows(hopper, m, n, np.float32)
    config = Config.of("e4m3", tile_n=tile[0], epilogue_tiles=tile[1], activation=activation)
    factors = hopper.asarray(rows), hopper.asarray(columns)
    gemm(a, b, out, config, Epilogue(Scales(factors=factors), bias=hopper.asarray(bias)))
    wide = (va @ vb.T) * rows[:, None].astype(float) * columns[None].astype(float) + bias
    expected = reference_of(activation, wide)
    np.testing.assert_allclose(out.get(), expected, rtol=1e-4, atol=1e-4 * np.abs(wide).max())


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("sizes", [(5, 0, 123), (16, 17, 128, 129), (0, 0, 1), (256, 256)], ids=str)
def test_groups_with_exponents_bias_residual_and_amax(
    hopper: Any, sizes: tuple[int, ...], cluster: int
) -> None:
    """What lies beyond the last group is not written, and no group writes into another."""
    rng = np.random.default_rng(len(sizes))
    total, n, k, groups = sum(sizes), 201, 384, len(sizes)
    rows = total + 9
    a, va = operand(rng, rows, k, "e5m2", hopper)
    b, vb = operand(rng, groups * n, k, "e5m2", hopper)
    row = rng.integers(-5, 6, rows).astype(np.int32)
    column = rng.integers(-5, 6, groups * n).astype(np.int32)
    bias = rng.integers(-9, 10, groups * n).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    residual = rng.integers(-9, 10, (rows, n)).astype(np.float32)
    if cluster > 1 and isinstance(hopper, Cupy):
        pytest.skip("an emulator has no clusters")
    for config in (
        Config.of(cluster=cluster),
        Config.of(tile_n=128, epilogue_tiles=2, cluster=cluster),
    ):
        for extras in (False, True):
            out = empty_rows(hopper, rows, n, np.float32)
            out[...] = np.nan
            amax = hopper.zeros((), dtype=np.uint32)
            options = (
                {
                    "bias": hopper.asarray(bias),
                    "amax": amax,
                    "residual": empty_rows(hopper, rows, n, np.float32),
                }
                if extras
                else {}
            )
            if extras:
                options["residual"][...] = hopper.asarray(residual)
            exponents = hopper.asarray(row), hopper.asarray(column)
            given = Epilogue(Scales(exponents), offsets=hopper.asarray(offsets), **options)
            gemm(a, b, out, config, given)
            expected = np.full((rows, n), np.nan)
            for g in range(groups):
                part, columns = slice(offsets[g], offsets[g + 1]), slice(g * n, (g + 1) * n)
                expected[part] = va[part] @ vb[columns].T
                expected[part] *= np.exp2(row[part, None] + column[None, columns].astype(float))
                if extras:
                    expected[part] = (expected[part].astype(np.float32) + bias[columns]) + residual[
                        part
                    ]
            np.testing.assert_array_equal(out.get(), expected.astype(np.float32))
            if extras:
                assert amax.get().view(np.float32) == np.abs(expected[:total]).astype(
                    np.float32
                ).max(initial=0)


@pytest.mark.parametrize("each", [(1, 1), (1, 128), (128, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("tile", [128, 176, 192])
def test_scales_of_128_along_k_multiply_exact_sums(
    hopper: Any, tile: int, each: tuple[int, int]
) -> None:
    """Powers of two as scales and small values: every sum is exact, and so is the result."""
    rng = np.random.default_rng(tile)
    for m, n, k in ((130, 200, 640), (1, 7, 130), (257, 33, 1000), (64, 192, 384)):
        (a, va), (b, vb) = (operand(rng, rows, k, "e4m3", hopper) for rows in (m, n))
        blocks = -(-k // 128)
        scales = [
            np.exp2(rng.integers(-2, 3, (-(-rows // of), blocks))).astype(np.float32)
            for rows, of in zip((m, n), each, strict=True)
        ]
        out = empty_rows(hopper, m, n, np.float32)
        out[...] = np.nan
        scale_rows = ROWS_PER_SCALE if each[0] > 1 else 1, ROWS_PER_SCALE if each[1] > 1 else 1
        stored = [
            Stored(hopper.asarray(s).T, blocks, of // count)
            for s, of, count in zip(scales, each, scale_rows, strict=True)
        ]
        made = block_scales(stored, hopper)
        ping_pong = tile == 192
        config = Config.of(
            "e4m3", tile_n=tile, promote=1, epilogue_tiles=2, blocks=scale_rows, ping_pong=ping_pong
        )
        gemm(a, b, out, config, Epilogue(Scales(blocks=(made[0], made[1]))))
        left, right = (
            v * s.astype(float).repeat(of, axis=0)[: len(v)].repeat(128, axis=1)[:, :k]
            for v, s, of in zip((va, vb), scales, each, strict=True)
        )
        np.testing.assert_array_equal(out.get(), (left @ right.T).astype(np.float32))


def test_flags_decide_on_the_device(hopper: Any) -> None:
    rng = np.random.default_rng(0)
    a, _ = operand(rng, 64, 128, "e5m2", hopper)
    for flag, expected, runs in ((0, 0, True), (1, 0, False), (1, 1, True), (0, 1, False)):
        out = empty_rows(hopper, 64, 64, np.float32)
        out[...] = np.nan
        flags = Flags(row=hopper.asarray(flag, dtype=np.uint32), expected=expected)
        count = hopper.zeros((), dtype=np.uint32)
        gemm(a, a, out, Config(), Epilogue(flags=flags._replace(runs=count)))
        assert bool(np.isfinite(out.get()).all()) is runs
        assert int(count) == runs


def test_a_pitch_that_does_not_fit_is_refused(hopper: Any) -> None:
    codes = hopper.zeros((4, 40), dtype=np.uint8)
    out = hopper.empty((4, 4), dtype=np.float32)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        gemm(codes, codes, out, Config())
