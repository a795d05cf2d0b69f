"""Positions beyond an axis, refused where the array library does not look: without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extensor.autograd.positions import check_bounds, check_positions
from extensor.backends.generic.core import GenericCore

SHAPE = (3, 4)
OTHER: Any = SimpleNamespace(  # numpy under another name: what looks by itself is numpy alone
    xp=SimpleNamespace(ndarray=np.ndarray, concatenate=np.concatenate),
    capturing=None,
    refuse=lambda bad, error: GenericCore.refuse(OTHER, bad, error),
)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (np.array([0, 3]), r"-3\.\.2 along axis 0, got 0\.\.3"),
        (np.array([-4, 2]), r"-3\.\.2 along axis 0, got -4\.\.2"),
        ((..., np.array([[-5, 3]])), r"-4\.\.3 along axis 1, got -5\.\.3"),
        ((None, slice(None), np.array([4], np.uint8)), r"axis 1, got 4\.\.4"),
        ((np.array([True, False, True]), np.array([1, 7])), r"axis 1, got 1\.\.7"),
        ((np.ones(SHAPE, bool), None, np.array([0])), None),
        ((np.array([0, 2]), np.array([-5, 3])), r"axis 1, got -5\.\.3"),
        ((np.array([3, 0]), np.array([1, 2])), r"axis 0, got 0\.\.3"),
        ((np.array([-3, 2]), None, np.array([-4, 3])), None),
        ((..., np.array([3]), slice(1)), r"axis 0, got 3\.\.3"),
    ],
)
def test_positions_beyond_an_axis_are_refused(key: Any, words: str | None) -> None:
    if words is None:
        check_positions(OTHER, SHAPE, key)
    else:
        with pytest.raises(IndexError, match=words):
            check_positions(OTHER, SHAPE, key)


def test_the_error_names_the_first_axis_that_is_left() -> None:
    parts = [(np.array([1]), 3, 0), (np.array([-9, 1]), 4, 1), (np.array([9]), 5, 2)]
    with pytest.raises(IndexError, match=r"^take: .* axis 1, got -9\.\.1$"):
        check_bounds(OTHER, parts, "take: ")
