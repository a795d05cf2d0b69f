"""Results that leave the Hopper GEMM quantized: bytes of the reference from the bfloat16 result."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda.kernels.gemm import requantize
from extensor_cuda.kernels.gemm.config import Config, gemm_source, quantizes
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Scales, empty_rows, gemm
from extensor_cuda.kernels.gemm.requantize import requantized
from extensor_cuda.kernels.prepare import cast_bf16, rebase
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import Product
from extensor_cuda.matmul.stored import matmul
from tests.oracle.compare import same_bytes
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.test_float_scaled_product import sent
from tests.unit.cuda.test_gemm import operand

BF16 = ml_dtypes.bfloat16


def spec_of(name: str, **options: Any) -> QuantSpec:
    return QuantSpec(name, axis=1, **options).resolve(2)


SPECS = (
    *(spec_of(f"mxfp8_{e}", scale_rule=r) for e in ("e4m3", "e5m2") for r in ("floor", "rceil")),
    *(spec_of("mxfp4", scale_rule=rule) for rule in ("floor", "ceil", "rceil", "even")),
    spec_of("mxfp4", tile=(1, 64)),
    spec_of("mxfp4", scale_window=4),
    spec_of("mxfp6_e2m3"),
    spec_of("mxint8", tile=(1, 16)),
    spec_of("nvfp4"),
    spec_of("nvfp4", scale_rule="four_over_six"),
)
COMPILED = (
    Config.of(out=spec_of("mxfp8_e4m3"), vectors=True),
    Config.of(out=spec_of("mxfp8_e5m2"), tile_n=128, extras=True, vectors=True, activation="gelu"),
    Config.of("e4m3", "e5m2", out=spec_of("mxfp4"), tile_n=160),
    Config.of(out=spec_of("mxfp4"), vectors=True, tile_n=128, extras=True, activation="gelu_tanh"),
    Config.of(out=spec_of("mxfp4"), tile_n=160, factors=True, extras=True, activation="gelu"),
    Config.of("bf16", out=spec_of("mxfp4"), promote=0, extras=True, activation="silu"),
    Config.of("e4m3", out=spec_of("mxfp6_e3m2"), factors=True),
    Config.of("s8", out=spec_of("mxint8"), promote=0, zeros=True, factors=True),
    configure("e4m3", 4096, 4096, spec_of("mxfp8_e4m3"), blocks=(1, 1)),
    Config.of(out=spec_of("mxfp4"), tile_n=128, grouped=True, extras=True),
    Config.of(out=spec_of("nvfp4"), vectors=True),
    Config.of(out=spec_of("nvfp4", scale_rule="four_over_six"), tile_n=128, extras=True),
    Config.of(out=spec_of("nvfp4_fp8exact"), tile_n=128, vectors=True, extras=True),
)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "config", COMPILED, ids=lambda c: f"{c.a}-{c.pipeline.tile_n}-{c.out.format}"
)
def test_no_gemm_spills(config: Config) -> None:
    patches = 2 if config.scaling.blocks or config.pipeline.tile_n == 128 else 3
    check_compiles(gemm_source(config.replace(epilogue_tiles=patches)), "sm_90a")


@pytest.fixture(params=PLACES)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a Hopper GPU, or of the kernel's source on the CPU."""
    xp = place(request, monkeypatch, (rebase, expand_kernel, cast_bf16))
    if isinstance(xp, Cupy):
        monkeypatch.setattr(requantize, "tensor_scales", tensor_scales)
    return xp


def tensor_scales(plan: Any, amax: Any, xp: Any) -> Any:
    """Stands for the kernel: 1 / S, S / 6 or S, the least scale byte, the maximum."""
    largest, words = np.float32(amax), np.zeros(4, np.float32)
    if plan.spec.is_mx:
        top = int(np.frexp(largest)[1]) - 1 + 127 - plan.spec.row.element.emax
        words[2:3].view(np.int32)[0] = top - plan.spec.scale_window
    else:
        over = plan.spec.rule == "four_over_six"
        scale = np.float32((256 if over else 448) * 6) / largest
        six = np.float32(1) / np.float32(6)
        words[:] = np.float32(1) / scale, scale if over else scale * six, 0, largest
    return xp.asarray(words)


def compare(hopper: Any, spec: QuantSpec, config: Config, m: int, n: int, call: Any) -> np.ndarray:
    """Quantize what ``call`` computes, as it leaves and by the reference; the bfloat16 result."""
    wide = empty_rows(hopper, m, n, BF16)
    wide[...] = 0  # of groups, some rows are not written
    call(wide, config.replace(out="bfloat16"))
    y = wide.get()
    expected, _ = reference.quantize(y, spec)
    amax = None
    if spec.row.tensor_scale or spec.scale_window is not None:
        blocks = np.abs(y.astype(np.float32)).max(axis=1)  # of rows: those with NaN do not count
        amax = hopper.asarray(blocks[np.isfinite(blocks)].max())
    out = requantized(spec, m, n, hopper, amax)
    out.q.codes[...], out.q.scales[...] = 0x5A, 0x5A
    call(out, config.replace(out=spec))
    for part in expected.parts:
        same_bytes(part, out.q.parts[part].get(), expected.parts[part], f"{spec} {(m, n)}")
    return y


@pytest.mark.parametrize(
    ("tile", "spec"),
    [(tile, spec) for tile in (128, 160, 192) for spec in SPECS if quantizes(tile, spec)],
    ids=lambda p: f"{p.format}-{p.rule}-{p.tile}" if isinstance(p, QuantSpec) else str(p),
)
def test_bytes_are_those_of_the_bfloat16_result(hopper: Any, tile: int, spec: QuantSpec) -> None:
    rng = np.random.default_rng(tile)
    for m, n, k in ((130, 2 * tile + 45, 200), (5, 7, 64)):
        (a, _), (b, _) = (operand(rng, rows, k, "e5m2", hopper) for rows in (m, n))
        a[3], b[2] = 0, 0
        if spec.is_mx and spec.scale_window is None:
            a[m - 1] = 0x7F  # NaN in every column, and beyond the last one
        rows, columns = (hopper.asarray(rng.integers(-9, 9, s), dtype=np.int32) for s in (m, n))

        call = partial(gemm, a, b, epilogue=Epilogue(Scales((rows, columns))))
        y = compare(hopper, spec, Config.of(tile_n=tile, epilogue_tiles=2), m, n, call)
        assert len(np.unique(y.view(np.uint16))) > min(m * n // 8, 100)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
def test_bias_activation_residual_and_amax_come_before(hopper: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    m, n, k = 150, 203, 192
    (a, _), (b, _) = (operand(rng, rows, k, "e4m3", hopper) for rows in (m, n))
    bias = hopper.asarray(rng.standard_normal(n).astype(np.float32))
    residual = empty_rows(hopper, m, n, BF16)
    residual[...] = hopper.asarray(rng.standard_normal((m, n)).astype(BF16))
    factors = tuple(
        hopper.asarray(rng.uniform(0.01, 0.1, size).astype(np.float32)) for size in (m, n)
    )
    tops = []

    def call(out: Any, config: Config) -> None:
        amax = hopper.zeros((), dtype=np.uint32)
        gemm(
            a,
            b,
            out,
            config,
            Epilogue(Scales(factors=factors), bias=bias, residual=residual, amax=amax),
        )
        tops.append(int(amax))

    config = Config.of("e4m3", activation="silu")
    compare(hopper, spec_of(name), config, m, n, call)
    assert tops[0] == tops[1] > 0


def test_groups_end_within_a_patch(hopper: Any) -> None:
    rng = np.random.default_rng(4)
    sizes, n, k = (5, 0, 123, 17), 71, 128
    (a, _), (b, _) = (operand(rng, rows, k, "e5m2", hopper) for rows in (sum(sizes), 4 * n))
    offsets = hopper.asarray(np.cumsum([0, *sizes]).astype(np.int32))

    def call(out: Any, config: Config) -> None:
        gemm(a, b, out, config, Epilogue(offsets=offsets))

    compare(hopper, spec_of("mxfp8_e4m3"), Config.of(tile_n=128), sum(sizes), n, call)


PATHS = (
    ("mxfp4", "mxfp4", "promote", "FP8 tensor cores"),
    ("mxfp4", "mxfp4", "exact", "int8 tensor cores"),
    ("nvfp4_fp8exact", "mxfp6_e2m3", "promote", "FP8 tensor cores"),
    ("mxfp8_e4m3", "mxfp8_e5m2", "rebased", "FP8 tensor cores, rebased operands"),
    ("mxfp8_e4m3", "nvfp4", "bf16", "bf16 tensor cores: asked for"),
    ("fp8_e4m3", "fp8_e4m3", "promote", "FP8 tensor cores"),
)


@pytest.mark.parametrize(("left", "right", "accumulate", "path"), PATHS)
def test_products_of_storage_go_back_to_storage(
    hopper: Any, left: str, right: str, accumulate: str, path: str
) -> None:
    if isinstance(hopper, Cupy) and (left, accumulate) == ("mxfp4", "promote"):
        pytest.skip("an emulator has no conversion to E5M2")
    rng = np.random.default_rng(3)
    arrays = (rng.uniform(1, 2, shape).astype(np.float32) for shape in ((70, 100), (45, 100)))
    a, b = (
        sent(reference.quantize(x, spec_of(name))[0], hopper)
        for x, name in zip(arrays, (left, right), strict=True)
    )
    spec = spec_of("mxfp8_e4m3")
    wide, packed = (
        matmul(a, b, hopper, accumulate=accumulate, out_dtype=out) for out in ("bfloat16", spec)
    )
    assert isinstance(wide, Product) and isinstance(packed, Product)
    assert wide.path == packed.path == path
    expected, _ = reference.quantize(wide.out.get(), spec)
    for part in expected.parts:
        same_bytes(part, packed.out.parts[part].get(), expected.parts[part], path)
    with pytest.raises(ValueError, match="goes with a quantized result"):
        matmul(a, b, hopper, out_amax=hopper.zeros((), dtype=np.float32))


def test_a_chosen_program_holds_whole_blocks() -> None:
    for spec in (spec_of("mxfp4"), spec_of("nvfp4", scale_rule="four_over_six")):
        for kind in ("e5m2", "bf16"):
            for n in (128, 176, 176 * 66, 8192):
                config = configure(kind, 128, n, spec)
                assert quantizes(config.pipeline.tile_n, spec)
                assert config.out == spec


def test_what_does_not_leave_quantized_has_a_reason(hopper: Any) -> None:
    for spec, word in (
        (spec_of("mxfp4", rounding="stochastic"), "random bits"),
        (spec_of("mxfp4", transform=Hadamard(64)), "Hadamard"),
        (spec_of("mxfp4", tile=(32, 32)), "blocks of rows"),
        (spec_of("mxfp4", tile=(1, 128)), "blocks of 128"),
        (QuantSpec("mxfp4", axis=0), "axis 0"),
        (spec_of("int8"), "float32 scales"),
        (spec_of("nvfp4"), "needs the largest"),
    ):
        with pytest.raises(ValueError, match=word):
            requantized(spec, 64, 64, hopper)
    with pytest.raises(ValueError, match="no use for"):
        requantized(spec_of("mxfp4"), 64, 64, hopper, hopper.zeros((), dtype=np.float32))
    codes = hopper.zeros((64, 128), dtype=np.uint8)
    out = requantized(spec_of("mxfp4"), 64, 64, hopper)
    for config in (
        Config(),
        Config.of(out=spec_of("mxfp8_e4m3")),
        Config.of(tile_n=176, out=out.q.spec),
    ):
        with pytest.raises(ValueError, match="an out of the config"):
            gemm(codes, codes, out, config)
    with pytest.raises(ValueError, match="an out of the config"):
        gemm(codes, codes, empty_rows(hopper, 64, 64, BF16), Config.of(out=out.q.spec))
