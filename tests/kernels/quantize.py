"""Quantizers beside the generic ones: every rule and option on a few shapes, by their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends import cpu
from extensor.formats import DIALECTS, FORMATS
from extensor.quant.recipe_state import stats_of
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels.inputs import (
    GENERIC,
    VIEWS,
    Case,
    assert_bytes,
    narrow,
    plain,
    special,
    ties,
    tiny,
)


def specs() -> Iterator[QuantSpec]:
    for name, row in FORMATS.items():
        for rule in row.scale_rules:
            yield QuantSpec(name, scale_rule=rule)
    for name in ("mxfp4", "mxfp8_e4m3", "mxint8", "mxfp6_e3m2"):
        for tile in ((1, 16), (1, 128), (16, 16), (32, 32), (1, 10), "channel", "tensor"):
            yield QuantSpec(name, tile=tile)
        yield QuantSpec(name, scale_window=3)
        yield QuantSpec(name, scale_window=0, scale_rule="rceil")
        yield QuantSpec(name, element_scale=0.75)
        yield QuantSpec(name, transform=Hadamard(16))
        yield QuantSpec(name, transform=Hadamard(128, "random", seed=9), tile=(1, 24))
    signs = Hadamard(64, "per_step", seed=9, step=5, stream=257)
    yield QuantSpec("nvfp4", transform=signs)
    for size in (32, 64):
        yield QuantSpec("mxfp4", transform=Hadamard(size, "none"), element_scale=0.75)
    for dialect in DIALECTS:
        for name in ("mxfp4", "mxfp8_e5m2", "nvfp4"):
            yield QuantSpec(name, dialect=dialect)
    yield QuantSpec("nvfp4", tile=(16, 16))
    yield QuantSpec("nvfp4", transform=Hadamard(16))
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4"):
        for tile in ("tensor", "channel", (1, 128), (128, 128), (4, 32)):
            yield QuantSpec(name, tile=tile)
    yield QuantSpec("int8", symmetric=False)
    yield QuantSpec("int4", scale_dtype="float16")
    yield QuantSpec("mxfp4", statistic="percentile", percentile=90.0)


def quant_cases() -> Iterator[Case]:
    number = 0
    rounding = ({}, {"rounding": "stochastic"}, {"rounding": "stochastic", "rbits": 8})
    for base in specs():
        for choice in rounding:
            for shape, axis in (
                ((37, 150), 1),
                ((70, 25), 0),
                ((2, 33, 6), 1),
                ((3, 18, 40), 2),
                ((1, 1), 0),
                ((130,), 0),
            ):
                number += 1
                spec = base.replace(axis=axis, **choice)
                if len(shape) == 1 and isinstance(spec.tile, tuple) and spec.tile[0] > 1:
                    continue
                make = (plain, special, tiny, ties)[number % 4]
                stream = None
                if choice:
                    stream = Stream(0x123456789ABCDEF0 + number, number, 5, 3, axis == 0)
                dtype = ("float32", "bfloat16", "float16")[number // 4 % 3]
                yield narrow(make(shape, number), dtype), spec, stream
    makers = (plain, special, tiny, ties)
    for number, (shape, axis, tile) in enumerate(
        itertools.product(((150, 140), (2, 33, 6), (200, 1)), (-1, -2), (16, 32, 128))
    ):
        for name in ("mxfp8_e4m3", "mxfp8_e5m2"):
            for rule, make in zip(("rceil", "floor", "one", "even"), makers, strict=True):
                spec = QuantSpec(name, axis=axis, tile=(1, tile), scale_rule=rule, rebased=True)
                yield narrow(make(shape, number), ("float32", "bfloat16")[number % 2]), spec, None
                random = spec.replace(rounding="stochastic")
                yield make(shape, number + 1), random, Stream(number, column=axis == -2)
    eden = QuantSpec("nvfp4", rounding="stochastic", transform=Hadamard(128, "random"), eden=True)
    for number, (shape, axis, size) in enumerate(
        itertools.product(((37, 300), (2, 33, 6), (200, 70), (1, 1)), (-1, -2), (16, 32, 128))
    ):
        spec = eden.replace(
            axis=axis, transform=Hadamard(size, "random", number), rbits=(32, 8)[number % 5 == 0]
        )
        dtype = ("float32", "bfloat16")[number % 2]
        for make in makers:
            x = narrow(make(shape, number), dtype)
            yield x, spec, Stream(number, 3, column=axis == -2)
    shapes = ((0, 32), (4, 0), (1, 5000), (4100, 3), (300, 300), (5, 1))
    for name in ("mxfp4", "mxfp8_e4m3", "nvfp4"):
        for shape in shapes:
            for axis in (0, 1):
                yield special(shape, 1), QuantSpec(name, axis=axis), None
                random = QuantSpec(name, axis=axis, rounding="stochastic")
                yield plain(shape, 2), random, Stream(1, column=axis == 0)
        for view in VIEWS.values():
            for dtype in ("float32", "bfloat16", "float16"):
                x = narrow(special((40, 70), 3), dtype)
                yield view(x), QuantSpec(name), None
                yield view(x), QuantSpec(name, axis=0), None
        for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, ">f4"):
            x = plain((8, 70), 4).astype(dtype)
            yield x, QuantSpec(name), None


@cache
def quant_table() -> list[tuple[Case, Any, Any, Any]]:
    """Every case with what the generic methods make of it: quantize, operand, dequantize."""
    table = []
    for case in quant_cases():
        q, stats = GENERIC.quantize(*case)
        values, same = GENERIC.fake_quantize(*case)
        assert same == stats
        table.append((case, (q, stats), values, GENERIC.dequantize(q)))
    return table


def check_quantize(backend: cpu.CpuBackend) -> None:
    for case, (expected, stats), _, _ in quant_table():
        what = (case[0].shape, case[1], backend.path("quantize", *case))
        q, got = backend.quantize(*case)
        assert got == stats, what
        assert q.spec == expected.spec, what
        assert q.shape == expected.shape, what
        assert q.parts.keys() == expected.parts.keys(), what
        for name, part in q.parts.items():
            assert_bytes(part, expected.parts[name], (name, *what))


def check_fake_quantize(backend: cpu.CpuBackend) -> None:
    for case, (_, stats), expected, _ in quant_table():
        what = (case[0].shape, case[1], backend.path("fake_quantize", *case))
        values, counts = backend.fake_quantize(*case)
        got = stats_of(counts)
        assert got == stats, what
        assert_bytes(values, expected, what)


def check_dequantize(backend: cpu.CpuBackend) -> None:
    for case, (q, _), _, expected in quant_table():
        what = (case[0].shape, case[1], backend.path("dequantize", q))
        assert_bytes(backend.dequantize(q), expected, what)
        for dtype in ("bfloat16", "float16"):
            assert_bytes(backend.dequantize(q, dtype), narrow(expected, dtype), (dtype, *what))


# --- two specs on one matrix ---------------------------------------------------------------------


def two_specs() -> Iterator[tuple[QuantSpec, QuantSpec]]:
    """Rows, then columns: what one reading covers, and what it leaves to two."""
    random = {"rounding": "stochastic"}
    for name in ("mxfp4", "mxfp8_e4m3", "mxfp6_e3m2", "nvfp4", "mxint8", "fp8_e4m3", "int4"):
        both = QuantSpec(name), QuantSpec(name, axis=0)
        yield both
        yield both[0].replace(**random), both[1].replace(**random)
        yield both[0], both[1].replace(**random)
    for name in ("mxfp4", "mxfp8_e5m2", "nvfp4"):
        for tile in ((16, 16), (32, 32), (1, 16), (2, 32), (5, 32), (1, 24)):
            rowwise = QuantSpec(name, tile=tile, **random)
            yield rowwise, QuantSpec(name, axis=0, tile=tile, **random)
            yield rowwise.replace(rounding="nearest_even"), QuantSpec(name, axis=0)
            yield QuantSpec(name), QuantSpec(name, axis=0, tile=tile)
        for size in (16, 32, 128):
            yield QuantSpec(name), QuantSpec(name, axis=0, transform=Hadamard(size), **random)
            yield QuantSpec(name, transform=Hadamard(size)), QuantSpec(name, axis=0)
    yield QuantSpec("mxfp4", scale_window=2), QuantSpec("mxfp4", axis=0, scale_window=3)
    yield QuantSpec("mxfp4", element_scale=0.75), QuantSpec("mxfp4", axis=0, element_scale=0.75)
    yield QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3", axis=0, rbits=8, **random)
    yield QuantSpec("mxfp4", dialect="microxcaling"), QuantSpec("mxfp4", axis=0)
    rebased = QuantSpec("mxfp8_e4m3", rebased=True), QuantSpec("mxfp8_e5m2", axis=0, rebased=True)
    yield rebased
    yield rebased[0], QuantSpec("mxfp8_e4m3", axis=0)
    yield QuantSpec("mxfp4", axis=0), QuantSpec("mxfp4")  # columns first
    yield QuantSpec("mxfp4"), QuantSpec("nvfp4")  # rows twice


TwoSpecs = tuple[np.ndarray, tuple[QuantSpec, QuantSpec], tuple[Stream | None, Stream | None]]


def rowwise_columnwise_cases() -> Iterator[TwoSpecs]:
    shapes = ((64, 128), (37, 150), (70, 25), (1, 40), (40, 1), (200, 65), (0, 5))
    makers = (plain, special, tiny, ties)
    for number, specs in enumerate(two_specs()):
        for shape in shapes:
            streams = [
                Stream(number, i, 7, column=bool(i)) if spec.rounding == "stochastic" else None
                for i, spec in enumerate(specs)
            ]
            yield makers[number % 4](shape, number), specs, (streams[0], streams[1])
    both = QuantSpec("mxfp4"), QuantSpec("mxfp4", axis=0)
    for view in VIEWS.values():
        yield view(special((70, 90), 3)), both, (None, None)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, ">f4"):
        yield plain((70, 130), 4).astype(dtype), both, (None, None)
    yield plain((2, 64, 64)), both, (None, None)  # three axes


@cache
def rowwise_columnwise_table() -> list[tuple[TwoSpecs, Any, Any]]:
    """Every pair with what two calls of the generic methods make of it."""
    return [
        (
            case,
            GENERIC.quantize_rowwise_columnwise(*case),
            GENERIC.fake_quantize_rowwise_columnwise(*case),
        )
        for case in rowwise_columnwise_cases()
    ]


def check_quantize_rowwise_columnwise(backend: cpu.CpuBackend) -> None:
    for case, expected, _ in rowwise_columnwise_table():
        what = (case[0].shape, case[1], backend.path("quantize_rowwise_columnwise", *case))
        for (q, stats), (q2, stats2) in zip(
            backend.quantize_rowwise_columnwise(*case), expected, strict=True
        ):
            assert stats == stats2, what
            assert (q.spec, q.shape) == (q2.spec, q2.shape), what
            assert q.parts.keys() == q2.parts.keys(), what
            for name, part in q.parts.items():
                assert_bytes(part, q2.parts[name], (name, *what))


def check_fake_quantize_rowwise_columnwise(backend: cpu.CpuBackend) -> None:
    for case, _, expected in rowwise_columnwise_table():
        what = (case[0].shape, case[1], backend.path("fake_quantize_rowwise_columnwise", *case))
        for (got, counts), (values, stats2) in zip(
            backend.fake_quantize_rowwise_columnwise(*case), expected, strict=True
        ):
            stats = stats_of(counts)
            assert stats == stats2, what
            assert_bytes(got, values, what)


def check_rounded_to_odd(backend: cpu.CpuBackend) -> None:
    """What is kept of all kinds of values but subnormal ones, and what is restored; or neither."""
    for count in (1, 2, 15, 64, 127, (1 << 14) + 33, 1 << 15):
        x = special((count,), count)
        x[np.abs(x) < np.finfo(np.float32).tiny] = -0.0
        for bits in (12, 16):
            for shaped in (x, x[::2], x[:0]):
                got, expected = (b.round_to_odd(shaped, bits) for b in (backend, GENERIC))
                what = (count, bits, shaped.strides)
                for ours, theirs in zip(got.arrays, expected.arrays, strict=True):
                    assert_bytes(ours, theirs, what)
                assert_bytes(backend.odd_values(got), GENERIC.odd_values(got), what)
            for at in (0, count // 2, count - 1):
                one = x.copy()
                one[at] = -1e-39
                assert backend.round_to_odd(one, bits) is None, (count, bits, at)
