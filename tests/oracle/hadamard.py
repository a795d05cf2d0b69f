"""The Hadamard transform on lists of float32, one operation at a time."""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.philox import WORD, hadamard_sign, philox
from tests.oracle.work import F

TRANSFORMER_ENGINE = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def signs(transform: object) -> list[np.float32]:
    kind, size = transform.signs, transform.size
    if kind == "none":
        return [F(1)] * size
    if kind == "fixed":
        return [F(TRANSFORMER_ENGINE[k % 16]) for k in range(size)]
    if kind == "per_step":
        key = (transform.seed % WORD, transform.seed // WORD)
        words = philox((0, 0, transform.step, transform.stream), key)
        return [F(-1 if words[k // 32] >> k % 32 & 1 else 1) for k in range(size)]
    return [F(hadamard_sign(k, transform.seed)) for k in range(size)]


def butterflies(v: list[np.float32]) -> list[np.float32]:
    size, stride = len(v), 1
    while stride < size:
        for start in range(0, size, 2 * stride):
            for k in range(start, start + stride):
                v[k], v[k + stride] = F(v[k] + v[k + stride]), F(v[k] - v[k + stride])
        stride *= 2
    return [F(a * F(1 / math.sqrt(size))) for a in v]


def hadamard(x: np.ndarray, axis: int, transform: object, inverse: bool = False) -> np.ndarray:
    """The transform along an axis, which is filled with zeros to a multiple of its size."""
    size = transform.size
    s = signs(transform)
    lines = np.moveaxis(x, axis, -1)
    length = -(-lines.shape[-1] // size) * size
    out = np.zeros((*lines.shape[:-1], length), np.float32)
    for line in np.ndindex(lines.shape[:-1]):
        row = [*lines[line], *([F(0)] * (length - lines.shape[-1]))]
        for start in range(0, length, size):
            part = row[start : start + size]
            if inverse:
                part = [F(a * b) for a, b in zip(butterflies(part), s, strict=True)]
            else:
                part = butterflies([F(a * b) for a, b in zip(part, s, strict=True)])
            out[(*line, slice(start, start + size))] = part
    return np.moveaxis(out, -1, axis)
