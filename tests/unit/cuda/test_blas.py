"""How float32 products are handed to cuBLAS, and their values on a GPU."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest

from extensor_cuda.runtime import blas
from tests.unit.cuda.fake_backend import FakeBlas

UNIT = 2.0**-24


def layouts(shape: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """Arrays of a shape that lie in memory in different ways."""
    x = rng.standard_normal(shape).astype(np.float32)
    wide = rng.standard_normal((*shape[:-1], 2 * shape[-1] + 3)).astype(np.float32)
    transposed = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    made = [x, transposed, wide[..., : shape[-1]], wide[..., : 2 * shape[-1] : 2], x[..., ::-1, :]]
    if len(shape) > 2:
        made.append(np.ascontiguousarray(x.swapaxes(0, -2)).swapaxes(0, -2))
        made.append(np.broadcast_to(x[:1], shape))
    return made


CASES = [
    ((3, 4), (4, 5)),
    ((1, 4), (4, 1)),
    ((5, 1), (1, 1)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 1, 4, 6), (2, 3, 1, 6, 1)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (1, 6, 4, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_read_as_it_lies(case: Any) -> None:
    rng = np.random.default_rng(0)
    for a in layouts(case[0], rng):
        for b in layouts(case[1], rng):
            got = blas.matmul(a, b, np, FakeBlas())
            assert got.flags.c_contiguous
            np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-6)


def test_what_lies_well_is_not_copied() -> None:
    x = np.zeros((4, 6, 5), np.float32)
    for array, transposed in ((x, 0), (x.swapaxes(1, 2), 1), (x[:, ::2], 0), (x[:, :3, :2], 0)):
        read, how, _, stride = blas.gemm_layout(array, (4,), np)
        assert np.shares_memory(read, x) and how == transposed and stride == 30


def test_streams_have_workspaces_of_their_own() -> None:
    used = types.SimpleNamespace(malloc=lambda size: None)

    def stream(number: int, capturing: bool = False) -> Any:
        return types.SimpleNamespace(ptr=number, is_capturing=lambda: capturing)

    held = blas.Blas.__new__(blas.Blas)
    held.xp = types.SimpleNamespace(
        empty=np.empty,
        uint8=np.uint8,
        get_default_memory_pool=lambda: used,
        cuda=types.SimpleNamespace(using_allocator=contextlib.nullcontext),
    )
    held._captured_workspace, held._workspaces = np.empty(1, np.uint8), {}
    one, two = held._workspace(stream(1)), held._workspace(stream(2))
    assert one is not two and held._workspace(stream(1)) is one
    assert (
        held._workspace(stream(1, True))
        is held._workspace(stream(3, True))
        is held._captured_workspace
    )
    for number in range(3, 6):
        held._workspace(stream(number))
    assert list(held._workspaces) == [1, 3, 4, 5]  # 2 was used least lately


def test_others_are_left_to_cupy() -> None:
    calls = []
    cupy = types.ModuleType("cupy")
    cupy.matmul = lambda a, b: calls.append(a.shape)
    xp = blas.with_matmul(cupy)
    one = np.ones((2, 3), np.float32)
    for a, b in ((one.astype(np.float64), one.T), (one[0], one.T), (one, one), (one[:0], one.T)):
        xp.matmul(a, b)
    assert len(calls) == 4
    cupy.late = 7
    assert xp.late == 7


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_on_a_gpu(cuda: Any, case: Any) -> None:
    rng = np.random.default_rng(0)
    for a in layouts(case[0], rng):
        for b in layouts(case[1], rng):
            there = [cuda.xp.asarray(x) for x in (a, b)]
            got = cuda.xp.matmul(*there).get()
            wide = a.astype(np.float64), b.astype(np.float64)
            bound = 2 * a.shape[-1] * UNIT * (np.abs(wide[0]) @ np.abs(wide[1]))
            assert (np.abs(got - wide[0] @ wide[1]) <= bound).all()
