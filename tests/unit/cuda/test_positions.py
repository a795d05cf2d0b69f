"""Positions beyond the end of a tensor: cupy would take them from the other end, without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.positions import check_positions

BEYOND = (
    (np.array([0, 3]), "axis 0, got 0..3"),
    ((..., np.array([[-5]])), "axis 1, got -5..-5"),
    ((None, slice(None), np.array([4], np.uint8)), "axis 1, got 4..4"),
    ((np.array([True, False, True]), np.array([1, 7])), "axis 1, got 1..7"),
    ((1, np.array(4)), "axis 1, got 4..4"),
    ((np.array([0, 2]), np.array([1, 4])), "axis 1, got 1..4"),
    ((np.array([3, 0]), np.array([1, 2])), "axis 0, got 0..3"),
)


def on_the_device(key: Any, xp: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(on_the_device(part, xp) for part in key)
    return xp.asarray(key) if isinstance(key, np.ndarray) else key


@pytest.mark.parametrize(("key", "words"), BEYOND)
def test_they_are_refused(gpu: Any, key: Any, words: str) -> None:
    x = et.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4), device="cuda")
    for found in (key, on_the_device(key, gpu.xp)):
        with pytest.raises(IndexError, match=words):
            check_positions(gpu, x.shape, found)
        for use in (lambda k: x[k], lambda k: x.__setitem__(k, 1.0)):
            with pytest.raises(IndexError):
                use(found)
    assert float(x.sum()) == 66


def test_others_are_not(gpu: Any) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    there = et.from_numpy(x, device="cuda")
    for key in (
        np.array([0, 2, -3]),
        (..., np.array([[3, -4]])),
        (np.array([True, False, True]), np.array([1, 3])),
        (np.array([2, 0]), None, np.array([3, 1])),
        x > 4,
        np.zeros(0, int),
    ):
        np.testing.assert_array_equal(there[key].numpy(), x[key])


def test_the_gpu_is_waited_for_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, refuse = [], gpu.refuse
    monkeypatch.setattr(gpu, "refuse", lambda *args: waits.append(0) or refuse(*args))
    x = et.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4), device="cuda")
    key = tuple(gpu.xp.asarray(part) for part in (np.array([[0], [2]]), np.array([1, 3])))
    np.testing.assert_array_equal(x[key].numpy(), [[1, 3], [9, 11]])
    assert len(waits) == 1
