"""Gradient reduction: the bytes of the generic methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.random import Stream
from tests.kernels.inputs import GENERIC, assert_bytes, plain, special, tiny

NONFINITE = 255


def inputs() -> Iterator[np.ndarray]:
    """Ordinary, special and subnormal values, and any bits at all; whole blocks."""
    rng = np.random.default_rng(0)
    for n in (32, 96, 40_000):
        yield from (make((n,), n) for make in (plain, special, tiny))
        yield rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


def anchors_of(x: np.ndarray) -> np.ndarray:
    most = GENERIC.block_max(x)
    field = np.maximum(most >> 23, 1)
    return np.where(field == 255, NONFINITE, field >> 4).astype(np.uint8)


def exponents_of(x: np.ndarray, bits: int) -> np.ndarray:
    most = GENERIC.block_max(x).astype(np.int64)
    return np.minimum((most + (1 << (25 - bits)) - 1) >> 23, NONFINITE).astype(np.uint8)


def check_block_max(backend: cpu.CpuBackend) -> None:
    for x in inputs():
        assert_bytes(backend.block_max(x), GENERIC.block_max(x), len(x))


def check_block_square_sums(backend: cpu.CpuBackend) -> None:
    for x in inputs():
        for part in (x, x[5:], x[:7]):  # short last blocks, misaligned ones
            with np.errstate(all="ignore"):
                got, expected = (one.block_square_sums(part) for one in (backend, GENERIC))
                squares = np.zeros(len(expected) * 32)
                squares[: len(part)] = part.astype(np.float64) ** 2
                sums = squares.reshape(-1, 32).sum(axis=1)  # numpy adds in this order
            np.testing.assert_array_equal(got, expected)
            np.testing.assert_array_equal(got, sums)


def check_fixed_point(backend: cpu.CpuBackend) -> None:
    for x in inputs():
        for anchors in (anchors_of(x), np.maximum(anchors_of(x), 9)):
            got, expected = (one.fixed_point(x, anchors) for one in (backend, GENERIC))
            assert_bytes(got, expected, len(x))


def check_add_limbs(backend: cpu.CpuBackend) -> None:
    """Anchors that rise by 0 to 5 and to those of blocks that are not finite."""
    for x in inputs():
        before, mine = np.zeros(len(x) // 32, np.uint8), np.zeros((3, len(x)), np.int32)
        generic = mine.copy()
        for scale in (1e-30, 1.0, 1e-10, 1e4, 1e9, 1.0):
            with np.errstate(all="ignore"):
                part = (x * np.float32(scale)).astype(np.float32)
            after = np.maximum(before, anchors_of(part))
            backend.add_limbs(mine, part, before, after)
            GENERIC.add_limbs(generic, part, before, after)
            assert_bytes(mine, generic, (len(x), scale))
            before = after


def check_limb_total(backend: cpu.CpuBackend) -> None:
    limbs = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, (3, 320)).astype(np.int32)
    before = np.zeros(10, np.uint8)
    after = np.array([0, 1, 2, 3, 4, 15, 255, 0, 1, 2], np.uint8)
    got, expected = (one.limb_total(limbs, before, after) for one in (backend, GENERIC))
    assert_bytes(got, expected, "limb_total")


def check_fixed_point_mean(backend: cpu.CpuBackend) -> None:
    total = np.random.default_rng(2).integers(-(1 << 62), 1 << 62, 32 * 257)
    anchors = (np.arange(257) % 16).astype(np.uint8)
    anchors[9] = NONFINITE
    for divisor in (1.0, 3.0, 1024.0):
        with np.errstate(all="ignore"):
            got, expected = (
                one.fixed_point_mean(total, anchors, divisor) for one in (backend, GENERIC)
            )
        assert_bytes(got, expected, divisor)


def check_mxint(backend: cpu.CpuBackend) -> None:
    for x in inputs():
        for bits in (8, 16):
            exact = exponents_of(x, bits)
            higher = np.where(exact == 255, 255, np.minimum(exact.astype(int) + 9, 254))
            for exponents in (exact, higher.astype(np.uint8)):
                for stream in (None, Stream(7, 3, 2)):
                    left = [np.empty_like(x), np.empty_like(x)]
                    with np.errstate(all="ignore"):
                        got, expected = (
                            one.mxint(x, exponents, bits, stream, 5, rest)
                            for one, rest in zip((backend, GENERIC), left, strict=True)
                        )
                    assert_bytes(got, expected, (len(x), bits, stream))
                    assert_bytes(*left, (len(x), bits, stream))
                    without = backend.mxint(x, exponents, bits, stream, 5, None)
                    assert_bytes(without, expected, "no residual")


def check_mxint_mean(backend: cpu.CpuBackend) -> None:
    rng = np.random.default_rng(3)
    for dtype, least in ((np.int8, -127), (np.int16, -32767)):
        codes = rng.integers(least, 1 - least, (5, 3200)).astype(dtype)
        exponents = rng.integers(0, 255, (5, 100)).astype(np.uint8)
        exponents[:, 50:] //= 20
        exponents[2, 7] = NONFINITE
        with np.errstate(all="ignore"):
            got, expected = (one.mxint_mean(codes, exponents, 5.0) for one in (backend, GENERIC))
        assert_bytes(got, expected, dtype)


def check_mxint_packed(backend: cpu.CpuBackend, bits: int) -> None:
    """Rows of any number of blocks; residuals before and after; parts added and side by side."""
    for x in inputs():
        for parts in (1, 3 if len(x) % 96 == 0 else 1):
            for stream in (None, Stream(7, 3, 2)):
                pitch = len(x) // parts * bits // 8 + len(x) // parts // 32
                rows = np.zeros((2, parts, pitch), np.uint8)
                with np.errstate(all="ignore"):
                    left = [0.25 * x[::-1] for _ in range(2)] if stream is None else []
                    for i, one in enumerate((backend, GENERIC)):
                        one.mxint_pack(x, bits, stream, 5, left[i] if left else None, rows[i])
                assert_bytes(rows[0], rows[1], (len(x), bits, parts, stream))
                if left:
                    assert_bytes(*left, (len(x), bits, parts))
                check_unpacked(backend, bits, rows[0], stream)
    for parts in (2, 3, 5):
        check_unpacked(backend, bits, apart(bits, parts), None)


def apart(bits: int, parts: int) -> np.ndarray:
    """Rows of large odd codes whose exponents differ by 0 to 31, below, at and near the highest."""
    rng = np.random.default_rng(parts)
    most = np.array([254, 253, 252, 40, 30])[:, None]
    behind = rng.permuted(np.tile([0, 1, 1, 1, 1], (32, 1)), axis=1)[:, :parts].T  # one row each
    behind = behind * np.arange(32)
    exponents = np.maximum(most[:, None] - behind, 0).transpose(1, 0, 2).reshape(parts, -1)
    top = (1 << (bits - 1)) - 1
    codes = rng.choice([-top, 2 - top, top - 2, top], (parts, 32 * exponents.shape[1]))
    codes = codes.astype(np.int8 if bits == 8 else np.int16).view(np.uint8)
    return np.concatenate([codes, exponents.astype(np.uint8)], axis=1)


def check_unpacked(
    backend: cpu.CpuBackend, bits: int, packed: np.ndarray, stream: Stream | None
) -> None:
    """Parts added and side by side, and added and rounded again, for each kind of divisor."""
    parts, pitch = packed.shape
    values = pitch * 32 // (4 * bits + 1)
    for divisor in (1.0, 3.0, 4.0) if values < 10_000 else (3.0,):
        add, rounding = (packed, bits, divisor), (stream, 9, None)
        calls: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("mxint_unpack", np.zeros((2, values), np.float32), (*add, True)),
            ("mxint_repack", np.zeros((2, values), np.float32), (*add, *rounding)),
            ("mxint_unpack", np.zeros((2, parts * values), np.float32), (*add, False)),
            ("mxint_repack", np.zeros((2, 1, pitch), np.uint8), (*add, *rounding)),
        ]
        for name, out, args in calls if values < 10_000 else calls[:2]:
            with np.errstate(all="ignore"):
                for i, one in enumerate((backend, GENERIC)):
                    getattr(one, name)(*args, out[i])
            assert_bytes(out[0], out[1], (name, values, bits, parts, divisor, stream))
    if stream is None and values < 1000:
        left = np.zeros((2, values), np.float32)
        out = np.zeros((2, 1, pitch), np.uint8)
        with np.errstate(all="ignore"):
            for i, one in enumerate((backend, GENERIC)):
                one.mxint_repack(packed, bits, 1.0, stream, 9, left[i], out[i])
        assert_bytes(left[0], left[1], "what the second rounding left")
