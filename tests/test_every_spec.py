"""Everything a QuantSpec can say has a kernel: the table of all of it, against the generic methods.

Formats x scale rules x dialects, with every statistic, zero point and scale dtype that go with
them, at every instruction set. What the core leaves to numpy is a row of `GAPS`, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from extensor.formats import DIALECTS, FORMATS
from extensor.quant.array import block_grid
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels.inputs import BACKEND, CORE, GENERIC, LEVELS, forced
from tests.oracle.compare import same_bytes

F = np.float32

GAPS = {
    "stochastic tiles whose rows of": "a Philox call gives 4 or 16 words, which would cross rows",
    "tiles of several rows along an axis in the middle": "they span a stride that no kernel walks",
    "one scale per tensor, along an axis in the middle": "likewise",
    "do not fill whole bytes": "two blocks down a column would share a byte",
    "a columnwise Hadamard transform in blocks of": "the panel would leave the cache",
    "a Hadamard transform to undo": "decoding alone; operands keep the transform",
    "2**32 blocks or more": "a block's number is one word of the random counter",
    "rows of 2**31 values or more": "an outlier's index is an int32",
    "empty array": "nothing to do",
}
"""Part of the reason that `path` gives, and why it is left to numpy."""


def variants(name: str) -> Iterator[dict[str, Any]]:
    """What else a spec of that format may say about its scales."""
    row = FORMATS[name]
    yield {}
    if row.outliers:
        yield {"outliers": 3}
        yield {"outliers": 0}
        return
    yield {"statistic": "percentile", "percentile": 73.0}
    yield {"statistic": "running", "decay": 0.75}
    if row.scale.name == "e8m0":
        yield {"scale_window": 3}
    for dtype in ("float32", "float16") if row.scale.name == "float32" else (None,):
        for symmetric in (True, False) if row.zero_point else (True,):
            yield {"scale_dtype": dtype, "symmetric": symmetric}


def specs(name: str) -> Iterator[QuantSpec]:
    """Every rule, dialect and variant of one format."""
    row = FORMATS[name]
    for dialect in DIALECTS.values():
        for rule in row.scale_rules:
            theirs = dialect.mx_scale_rule if row.scale.name == "e8m0" else None
            if theirs in (None, rule):
                for variant in variants(name):
                    if rule in E8M0_SEARCHES and variant:
                        continue  # these rules read a block's values: no statistic, no window
                    yield QuantSpec(name, dialect=dialect.name, scale_rule=rule, **variant)


def values(shape: tuple[int, ...], kind: int) -> np.ndarray:
    """Over many binades, about the smallest scale, exact ties, or without special values."""
    rng = np.random.default_rng(kind)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))).astype(F)
    if kind % 4 == 1:
        x *= F(1e-38)
    if kind % 4 == 2:
        x = (rng.integers(-32, 33, shape) / 4).astype(F)
    flat = x.reshape(-1)
    for value in (0.0, -0.0, 1e-45, -1e-39, 3.4e38, np.nan, np.inf, -np.inf):
        if kind % 4 != 3:
            flat[rng.integers(0, flat.size, max(1, flat.size // 200))] = value
    flat[: min(40, flat.size // 3)] = 0.0
    return x


SHAPES = (((5, 150), 1), ((45, 7), 0), ((64, 70), 0), ((3, 18, 40), 2), ((2, 33, 6), 1), ((67,), 0))


def cases(name: str, level: int) -> Iterator[tuple[np.ndarray, QuantSpec, Any, Any]]:
    """Every spec of a format; the rest of a case (shape, tile, rounding, transform) takes turns."""
    number = 7 * level
    for base in specs(name):
        for _ in range(2):
            number += 1
            shape, axis = SHAPES[number % len(SHAPES)]
            options: dict[str, Any] = {"axis": axis}
            if not base.row.outliers:
                tiles: tuple[Any, ...] = (None, (1, 16), "channel", (1, 10), "tensor")
                tiles += ((4, 8),) if len(shape) == 2 else ()
                options["tile"] = tiles[number // 5 % len(tiles)]
                options["transform"] = Hadamard(16) if number % 4 == 0 else None
            if number % 3 == 0:
                options |= {"rounding": "stochastic", "rbits": (8, 32)[number % 2]}
            spec = base.replace(**options)
            stream = Stream(number, 1, column=axis == 0) if number % 3 == 0 else None
            before = None
            if spec.statistic == "running" and number % 5:
                before = np.abs(values(block_grid(spec.resolve(len(shape)), shape), 3))
            yield values(shape, number), spec, stream, before


def gap(path: str) -> bool:
    """Whether a path left to numpy is one with a reason."""
    return any(part in path for part in GAPS)


def has_core(name: str) -> bool:
    """Whether the core is there, and quantizes the format's codes."""
    return bool(CORE) and FORMATS[name].element.has_kernels


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_spec_equals_the_reference(level: str, name: str) -> None:
    taken = count = 0
    with forced(level):
        for case in cases(name, LEVELS.index(level)):
            x, spec, stream, _ = case
            expected, counts = GENERIC.quantize(*case)
            got, mine = BACKEND.quantize(*case)
            path = BACKEND.path("quantize", *case)
            assert mine == counts, (spec, x.shape, path)
            assert got.parts.keys() == expected.parts.keys(), (spec, x.shape)
            for part, stored in got.parts.items():
                same_bytes(part, stored, expected.parts[part], (spec, x.shape, path))
            decoded = GENERIC.dequantize(expected)
            assert BACKEND.dequantize(got).tobytes() == decoded.tobytes(), (spec, x.shape)
            operand, same = BACKEND.fake_quantize(x, spec, stream)
            exact, stats = GENERIC.fake_quantize(x, spec, stream)
            assert operand.tobytes() == exact.tobytes(), (spec, x.shape)
            assert same == stats, (spec, x.shape)
            count += 1
            taken += path.startswith("core (")
            assert not has_core(name) or path.startswith("core (") or gap(path), (spec, path)
    assert not has_core(name) or taken > 0.7 * count


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_every_rule_dialect_and_statistic_has_a_kernel(name: str, axis: int) -> None:
    """On a matrix in the format's own blocks the core leaves nothing to numpy."""
    x = values((64, 96), 3)
    for base in specs(name):
        for rounding in ("nearest_even", "stochastic"):
            spec = base.replace(axis=axis, rounding=rounding)
            stream = Stream(1, column=axis == 0) if rounding == "stochastic" else None
            q, _ = BACKEND.quantize(x, spec, stream)
            before = None
            if spec.statistic == "running":
                before = np.ones(q.scales.shape, F)
            paths = (
                BACKEND.path("quantize", x, spec, stream, before),
                BACKEND.path("fake_quantize", x, spec, stream),
                BACKEND.path("dequantize", q),
            )
            for path in paths:
                assert path.startswith("core (" if has_core(name) else "generic: "), (spec, path)
