"""Products: within the bounds of any order of sums.

Blocked products have tests of their own for bounds, variants and special blocks (unit/backends).
"""

from __future__ import annotations

import itertools

import numpy as np

from extensor.backends import cpu
from extensor.quant.spec import QuantSpec
from tests.kernels.inputs import GENERIC, UNIT, Check, plain


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
