"""Products: within the bounds of any order of sums.

Blocked products have tests of their own for bounds, variants and special blocks (unit/backends).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.quant.spec import QuantSpec
from tests.kernels.inputs import GENERIC, SECOND, UNIT, Bounded, Check, normals, plain


def check_product(name: str) -> Check:
    def check(backend: cpu.CpuBackend) -> None:
        for spec in (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3")):
            x = plain((7, 150), 1)
            a, b = (GENERIC.quantize(plain((n, 150), n), spec)[0] for n in (7, 40))
            left = a if name == "block_scaled_matmul" else x
            dense = GENERIC.dequantize(a) if name == "block_scaled_matmul" else x
            weights = GENERIC.dequantize(b)
            got = getattr(backend, name)(left, b)
            gamma = 154 * UNIT / (1 - 154 * UNIT)  # each side adds to the order and decoding
            bound = 2 * gamma * (np.abs(dense).astype(np.float64) @ np.abs(weights).T)
            assert (np.abs(got - getattr(GENERIC, name)(left, b)) <= bound).all(), spec

    return check


def check_bound_weight_only(backend: cpu.CpuBackend) -> None:
    """The product with the same weights and other rows, by its bytes; also where none is in C++."""
    for spec in (QuantSpec("mxfp4", axis=1), QuantSpec("outlier", axis=1)):
        w = GENERIC.quantize(plain((5, 64), 1), spec.resolve(2))[0]
        multiply = backend.bound_weight_only(plain((3, 64)), w)
        for seed in (2, 3):
            x = plain((3, 64), seed)
            assert multiply(x).tobytes() == backend.weight_only_matmul(x, w).tobytes()


def check_product_of_operands(backend: cpu.CpuBackend) -> None:
    for m, n, k in ((70, 130, 90), (3, 4, 5)):
        a, b = (
            GENERIC.fake_quantize(plain(s, 1), QuantSpec("mxfp4", axis=1))[0]
            for s in ((m, k), (n, k))
        )
        columnwise = [np.ascontiguousarray(x.T).T for x in (a, b)]
        for left, right in itertools.product((a, columnwise[0]), (b, columnwise[1])):
            gamma = (k + 20) * UNIT / (1 - (k + 20) * UNIT)
            bound = 2 * gamma * (np.abs(left).astype(np.float64) @ np.abs(right).T)
            error = np.abs(backend.product(left, right) - GENERIC.product(left, right))
            assert (error <= bound).all()


PRODUCTS = (  # rows, terms, columns
    (8, 1, 8), (9, 5, 17), (12, 64, 32), (13, 33, 70), (25, 400, 100), (100, 1000, 33),
    (65, 768, 128), (768, 128, 65), (40, 1024, 48), (200, 30, 4200),
)  # fmt: skip


def arrays(count: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def product_case(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None) -> Any:
    wide = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    if bias is not None:
        wide, size = wide + bias, size + np.abs(bias)
    return (a, b, bias), [wide], [SECOND * (a.shape[-1] + 1) * UNIT * size]


def matmul_cases() -> Bounded:
    for number, (m, k, n) in enumerate(PRODUCTS):
        a, b, a_t, b_t, bias = normals(number, (m, k), (k, n), (k, m), (n, k), (n,))
        yield product_case(a, b, bias)
        yield product_case(a, b_t.T)
        yield product_case(a_t.T, b)
        yield product_case(a_t.T, b_t.T, bias)
    a, b, wide, tall = normals(0, (2, 3, 9, 20), (3, 20, 11), (5, 7, 20), (2, 1, 18, 20))
    yield product_case(a, b)
    yield product_case(a, a[:, :1].swapaxes(-1, -2))
    yield product_case(wide, b[0])
    yield product_case(tall[:, :, ::2], b)
