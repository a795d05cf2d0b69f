"""What `ci.cuda_fuzz` says of kernels that are right, wrong, or not there. Without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ci import cuda_cases, cuda_fuzz
from extensor.quant import reference
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import QuantSpec
from tests.unit.cuda.emulator import Cupy, Device

Stored = tuple[QuantArray, QuantStats]
CASES = range(12)


class Made:
    """A backend whose kernels are the reference, and what ``spoils`` does to it."""

    def __init__(self, spoils: Callable[[QuantArray, QuantStats], Stored]) -> None:
        self.xp, self.spoils, self.way = Cupy(), spoils, "fused kernel"

    def path(self, *args: Any) -> str:
        return self.way

    def quantize(self, x: Any, spec: QuantSpec, stream: Any) -> Stored:
        with np.errstate(all="ignore"):
            q, counts = reference.quantize(np.ascontiguousarray(x).view(np.ndarray), spec, stream)
        parts = {name: part.copy().view(Device) for name, part in q.parts.items()}
        return self.spoils(replace(q, **parts), counts)

    def quantize_rowwise_columnwise(self, x: Any, specs: Any, streams: Any) -> list[Stored]:
        return [self.quantize(x, *both) for both in zip(specs, streams, strict=True)]

    def dequantize(self, q: QuantArray) -> Any:
        plain = {name: part.view(np.ndarray) for name, part in q.parts.items()}
        return reference.dequantize(replace(q, **plain)).view(Device)


def keep(q: QuantArray, counts: QuantStats) -> Stored:
    return q, counts


def flip_a_code(q: QuantArray, counts: QuantStats) -> Stored:
    q.codes.reshape(-1).view(np.uint8)[-1] ^= 1
    return q, counts


def flip_a_scale(q: QuantArray, counts: QuantStats) -> Stored:
    q.scales.reshape(-1).view(np.uint8)[0] ^= 1
    return q, counts


def miscount(q: QuantArray, counts: QuantStats) -> Stored:
    return q, replace(counts, flushed=counts.flushed + 1)


@pytest.mark.parametrize("spoils", [keep, flip_a_code, flip_a_scale, miscount])
@pytest.mark.parametrize("part", ["quantizers", "rowwise_columnwise"])
def test_what_is_stored_is_judged(part: str, spoils: Any) -> None:
    words = {flip_a_code: "codes", flip_a_scale: "scales", miscount: "expected", keep: ""}[spoils]
    for case in CASES:
        wrong = cuda_fuzz.PARTS[part](np.random.default_rng(case), Made(spoils))
        assert wrong is not None
        assert words in wrong and bool(wrong) == bool(words)


def test_decoded_values_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Made(keep)
    decode = backend.dequantize
    monkeypatch.setattr(backend, "dequantize", lambda q: -decode(q))
    found = [cuda_cases.quantizers(np.random.default_rng(case), backend) for case in CASES]
    assert any("decoded values" in str(wrong) for wrong in found)


def test_sums_are_judged() -> None:
    expected, sums = np.array([[1.0, -2.0]]), np.array([[3.0, 4.0]])
    share = 2.0**-10
    for off, good in ((0.9, True), (1.1, False), (np.nan, False), (np.inf, False)):
        got = expected + np.array([[0, off * share * 4]])
        assert bool(cuda_cases.judged(got, expected, sums, share, "")) != good
    tie = expected + np.array([[2.0**-8, 0]])  # halfway to the next bfloat16
    half = tie.astype(cuda_cases.HALF)
    assert not cuda_cases.judged(half, tie, sums, share, "")
    assert cuda_cases.judged(half.astype(np.float64), tie, sums, share, "")


def test_products_are_judged_whole() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 64)) for rows in (3, 75))  # w in three slices of 32 rows
    got = x @ w.T
    assert not cuda_cases.multiplied(got, x, w, 2.0**-20, "", most=2048)
    for column, first in ((0, 0), (31, 0), (32, 32), (74, 64)):
        off = got.copy()
        off[2, column] *= 1.01
        wrong = cuda_cases.multiplied(off, x, w, 2.0**-20, "", most=2048)
        assert wrong.endswith(f"in columns from {first} on")


def test_a_part_without_a_kernel_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Made(keep)
    monkeypatch.setattr(cuda_fuzz, "get", lambda device: backend)
    assert cuda_fuzz.run("quantizers", 5, 0) == ("quantizers", 1, 0, [])
    backend.way = "host: none"
    assert cuda_fuzz.run("quantizers", 5, 0) == ("quantizers", 0, 1, [])
