"""Grouped products: groups of any size, empty ones too, against a product for each."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.prepare import cast_bf16
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.matmul.expand import FITS_BF16
from extensor_cuda.matmul.grouped import grouped_matmul, grouped_weight_only_matmul, offsets_of
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
    return place(request, monkeypatch, [expand_kernel, cast_bf16])


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


def packed(name: str, shape: tuple[int, int], seed: int) -> Any:
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return reference.quantize(w, QuantSpec(name, axis=1).resolve(2))[0]


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_floats_times_the_weights_of_their_group(xp: Any, name: str, dtype: str) -> None:
    """Bound: that of `extensor_cuda.matmul.weight_only` for many tokens; rounded x is exact."""
    k, n, ends = 320, 77, [3, 4, 133]
    x = np.random.default_rng(3).standard_normal((ends[-1], k)).astype(dtype)
    weights = [packed(name, (n, k), seed) for seed in range(len(ends))]
    there = [sent(w, xp) for w in weights]
    for _ in range(2):  # the second time nothing is asked of the weights
        done = grouped_weight_only_matmul(xp.asarray(x), there, ends, xp)
        got = done.out.get().astype(np.float64)
        assert done.path == "bf16 tensor cores, weights expanded, in groups"
        assert got.shape == (ends[-1], n) and all(FITS_BF16[w] for w in there)
        for w, start, end in zip(weights, [0, *ends], ends, strict=False):
            rows = x[start:end].astype(np.float64)
            size = np.abs(rows) @ np.abs(exact(w)).T
            error = np.abs(got[start:end] - rows @ exact(w).T)
            assert (error <= (k * 2.0**-22 + 2.0**-20) * size).all()


def test_weights_that_are_not_grouped_say_why(xp: Any) -> None:
    x = xp.asarray(np.ones((4, 64), np.float32))
    one, two = (sent(packed("mxfp4", (6, 64), seed), xp) for seed in range(2))
    wide = sent(packed("mxfp4", (7, 64), 0), xp)
    vast = packed("mxfp4", (6, 64), 0)
    vast.scales[0, 0], vast.scales[1, 1] = 254, 0
    for rows, weights, reason in (
        (x, [one, wide], "several formats or shapes"),
        (x, [sent(packed("nvfp4", (6, 64), 0), xp)] * 2, "nvfp4, whose scales"),
        (x.astype(np.float16), [one, two], "float16 activations"),
        (x, [one, sent(vast, xp)], "values that bfloat16 does not hold"),
    ):
        refused = grouped_weight_only_matmul(rows, weights, [1, 4], xp)
        assert reason in refused.reason
