"""Grouped products: groups of any size, empty ones too, against a product for each."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.matmul.grouped import grouped_matmul, offsets_of
from tests.kernels.matmul_cases import exact
from tests.unit.cuda.bounds import sent
from tests.unit.cuda.places import PLACES, place

SIZES = ((5,), (128, 0, 131, 1), (0, 0, 300), (16, 17, 15, 33, 128, 2), (0,), (40,) * 7)
FORMATS = {
    "mxfp4": "FP8 tensor cores",
    "mxfp6_e2m3": "FP8 tensor cores",
    "mxfp8_e4m3": "bf16 tensor cores: FP8 does not hold mxfp8_e4m3",
    "nvfp4": "bf16 tensor cores: FP8 does not hold nvfp4",
    "fp8_e4m3": "FP8 tensor cores",
    "int8": "int8 tensor cores",
}


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [expand_kernel])


def want_of(a: np.ndarray, b: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    n, start, parts = len(b) // len(sizes), 0, []
    for g, size in enumerate(sizes):
        parts.append(a[start : start + size] @ b[g * n : (g + 1) * n].T)
        start += size
    return np.concatenate(parts)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", [*FORMATS, "bfloat16"])
def test_each_group_is_a_product_of_its_own(xp: Any, form: str, sizes: tuple[int, ...]) -> None:
    k, n = 320, 77
    rng = np.random.default_rng(len(sizes))
    rows = max(sum(sizes), 1)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    w = rng.standard_normal((len(sizes) * n, k)).astype(np.float32)
    if form == "bfloat16":
        a, b = (v.astype(ml_dtypes.bfloat16) for v in (x, w))
        va, vb = a.astype(np.float64), b.astype(np.float64)
        sides: list[Any] = [xp.asarray(a), xp.asarray(b)]
    else:
        spec = QuantSpec(form, axis=1).resolve(2)
        qa, qb = (reference.quantize(v, spec)[0] for v in (x, w))
        va, vb = exact(qa), exact(qb)
        sides = [sent(q, xp) for q in (qa, qb)]
    offsets = offsets_of(xp.asarray(np.array(sizes, dtype=np.int64)), xp)
    for out in ("float32", "bfloat16"):
        done = grouped_matmul(*sides, offsets, xp, out_dtype=out)
        assert done.path == FORMATS.get(form, "bf16 tensor cores")
        got = done.out.get()[: sum(sizes)].astype(np.float64)
        expected, size = (want_of(p, q, sizes) for p, q in ((va, vb), (np.abs(va), np.abs(vb))))
        bound = (k * 34 / 32 * 2.0**-13 + 2.0**-20) * size
        if form in ("int8", "bfloat16", "nvfp4", "mxfp8_e4m3"):
            bound = (k * 2.0**-22 + 2.0**-20) * size
        if out == "bfloat16":
            bound = 2 * bound + 2.0**-8 * np.abs(expected)
        assert (np.abs(got - expected) <= bound).all()


def test_a_rank_without_tokens_gets_nothing(xp: Any) -> None:
    offsets = offsets_of(xp.asarray(np.zeros(3, np.int64)), xp)
    a, b = (xp.zeros((rows, 64), dtype=ml_dtypes.bfloat16) for rows in (0, 3 * 40))
    done = grouped_matmul(a, b, offsets, xp, out_dtype="bfloat16")
    assert done.out.shape == (0, 40) and done.out.dtype == ml_dtypes.bfloat16


def test_what_does_not_fit_is_refused(xp: Any) -> None:
    a = xp.asarray(np.ones((6, 64), dtype=ml_dtypes.bfloat16))
    q = sent(
        reference.quantize(np.ones((6, 64), np.float32), QuantSpec("mxfp4", axis=1).resolve(2))[0],
        xp,
    )
    eight = reference.quantize(
        np.ones((6, 64), np.float32), QuantSpec("int8", axis=1, symmetric=False).resolve(2)
    )[0]
    two = offsets_of(xp.asarray(np.array([2, 4])), xp)
    four = offsets_of(xp.asarray(np.array([1, 1, 2, 2])), xp)
    cases: list[tuple[Any, Any, Any, dict[str, str], str]] = [
        (a, a, two.astype(np.int64), {}, "offsets int32"),
        (a, a, four, {}, "in 4 groups"),
        (a, a[:, :32], two, {}, "expected a"),
        (a, q, two, {}, "two packed operands"),
        (a.astype(np.float32), a.astype(np.float32), two, {}, "packed or bfloat16"),
        (a, a, two, {"out_dtype": "float16"}, "out_dtype"),
        (sent(eight, xp), sent(eight, xp), two, {}, "no zero points"),
    ]
    for left, right, offsets, options, words in cases:
        with pytest.raises(ValueError, match=words):
            grouped_matmul(left, right, offsets, xp, **options)
