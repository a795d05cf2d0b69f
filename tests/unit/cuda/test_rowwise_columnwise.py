"""Rows and columns in one launch: the bytes of the reference, and operands of the FP8 product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor.backends.unsupported import Unsupported
from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize import rowwise_columnwise
from extensor_cuda.runtime.compile import compile_cubin
from tests.oracle.compare import same_bytes
from tests.unit.cuda.test_compile import properties
from tests.unit.cuda.test_quantize import COVERED, DTYPES, KINDS, ROUNDINGS, host, values

STREAMS = (Stream(0x123456789ABCDEF0, 7, 3, 2), Stream(0x123456789ABCDEF0, 7, 3, 2, column=True))
SHAPES = ((64, 512), (64, 256), (37, 70), (1, 40), (70, 1), (33, 516))


def specs_of(name: str, **options: Any) -> tuple[QuantSpec, QuantSpec]:
    return QuantSpec(name, axis=1, **options).resolve(2), QuantSpec(
        name, axis=0, **options
    ).resolve(2)


def plan_of(name: str, shape: tuple[int, int], **options: Any) -> rowwise_columnwise.RowColumnPlan:
    plan = rowwise_columnwise.row_column_plan(specs_of(name, **options), shape)
    assert isinstance(plan, rowwise_columnwise.RowColumnPlan)
    return plan


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_no_kernel_spills(name: str, rounding: str, arch: str) -> None:
    plan = plan_of(name, (256, 512), rounding=rounding, rbits=8)
    for out in ("codes", "values"):
        for dtype, whole, stats in (
            ("bfloat16", True, False),
            ("bfloat16", True, True),
            ("float32", False, True),
        ):
            source = rowwise_columnwise.row_column_source(plan, dtype, out, whole, stats)
            code, log = compile_cubin(source, arch)
            assert "warning" not in log, log
            for numbers in properties(code).values():
                assert numbers["stack"] == 0, f"{source.macros}: {numbers}"


def test_what_one_launch_does_not_cover_has_a_reason() -> None:
    rows, columns = specs_of("mxfp4")
    for specs, word in (
        ((rows, rows), "one axis"),
        ((rows, columns.replace(scale_rule="ceil")), "differ"),
        (specs_of("mxfp4", transform=Hadamard(16)), "transform"),
        (specs_of("mxfp4", tile=(1, 128)), "blocks above"),
        (specs_of("mxfp4", scale_window=4), "window"),
    ):
        plan = rowwise_columnwise.row_column_plan(specs, (64, 64))
        assert isinstance(plan, Unsupported) and word in plan.reason
    swapped = rowwise_columnwise.row_column_plan((columns, rows), (64, 64))
    assert isinstance(swapped, rowwise_columnwise.RowColumnPlan) and swapped.ordered((1, 2)) == (
        2,
        1,
    )


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_pairs_are_two_calls_of_the_reference(cuda: Any, name: str, rounding: Any) -> None:
    specs = specs_of(name, rounding=rounding[0], rbits=rounding[1])
    streams = STREAMS if rounding[0] == "stochastic" else (None, None)
    for shape in SHAPES:
        for dtype in DTYPES:
            for kind in KINDS:
                check(cuda, values(shape, 1, kind, dtype), specs, streams)


@pytest.mark.parametrize("tile", [(1, 16), (1, 64)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e5m2", "nvfp4"])
def test_other_blocks_and_orders(cuda: Any, name: str, tile: Any) -> None:
    rows, columns = specs_of(name, tile=tile)
    for shape in SHAPES:
        check(cuda, values(shape, 0, KINDS[0], "bfloat16"), (columns, rows), (None, None))


def check(cuda: Any, x: np.ndarray, specs: Any, streams: Any) -> None:
    device = cuda.xp.asarray(x)
    assert cuda.path("quantize_rowwise_columnwise", device, specs, streams) == "fused kernel"
    stored = cuda.quantize_rowwise_columnwise(device, specs, streams)
    decoded = cuda.fake_quantize_rowwise_columnwise(device, specs, streams)
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        context = f"{spec} on {x.dtype} of shape {x.shape}"
        expected, stats = reference.quantize(x, spec, stream)
        q, counted = stored[i]
        for part in expected.parts:
            same_bytes(part, host(q.parts[part]), expected.parts[part], context)
        assert counted() == stats, context
        same_bytes(
            "operand", host(decoded[i][0]), reference.fake_quantize(x, spec, stream)[0], context
        )
        assert decoded[i][1]() == stats, context


def test_what_is_not_covered_is_two_calls(cuda: Any) -> None:
    x = values((64, 256), 1, KINDS[0], "float32")
    specs = specs_of("mxfp4", transform=Hadamard(16))
    device = cuda.xp.asarray(x)
    assert cuda.path("quantize_rowwise_columnwise", device, specs).startswith("two calls: ")
    for (q, _), spec in zip(cuda.quantize_rowwise_columnwise(device, specs), specs, strict=True):
        same_bytes("codes", host(q.codes), reference.quantize(x, spec)[0].codes)
