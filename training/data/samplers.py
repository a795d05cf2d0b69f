"""Samplers: which items an epoch takes, and in which order.

Each is a pure function of (items, seed, epoch), by Philox words, so that an epoch is the same on
every machine and a resumed run needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from extensor.random import Stream

from .draws import DATA_TENSOR, ORDER_SLOT, PICK_SLOT, stream_words

__all__ = ["SAMPLERS", "class_weights", "epoch_order", "in_order", "weighted_order"]

Sampler = Callable[[np.ndarray, int, int], np.ndarray]
"""(labels, seed, epoch) to the indices (N,) of the items of that epoch."""


def in_order(count: int) -> np.ndarray:
    """The indices 0..count-1 in order."""
    return np.arange(count)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..count-1 that depends on nothing but the arguments.

    It sorts Philox words, so it is the same on every machine and every numpy.
    """
    words = stream_words(Stream(seed, epoch, DATA_TENSOR, ORDER_SLOT), count)
    return np.argsort(words, kind="stable")


def weighted_order(weights: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """``count`` indices drawn with replacement, each as often as its weight says.

    Args:
        weights: (N,), 0 or more, not all 0.
        count: how many are drawn.
        seed: of the run.
        epoch: of the run.

    Raises:
        ValueError: for weights that are negative, not finite, all 0 or none at all.
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 1 or not weights.size or not np.isfinite(weights).all():
        raise ValueError(f"weights: expected finite numbers (N,), got shape {weights.shape}")
    if weights.min() < 0 or not weights.sum() > 0:
        raise ValueError(
            "weights: expected numbers of 0 or more, one of them above 0, got "
            f"{weights.min()} to {weights.max()}"
        )
    ends = np.cumsum(weights)
    words = stream_words(Stream(seed, epoch, DATA_TENSOR, PICK_SLOT), count)
    places = (words.astype(np.float64) + 0.5) / 2.0**32 * ends[-1]
    return np.searchsorted(ends, places, side="right")


def class_weights(labels: np.ndarray) -> np.ndarray:
    """Weights that draw every class equally often: one over the number of items of a label."""
    return 1.0 / np.bincount(labels)[labels]


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "random": lambda labels, seed, epoch: epoch_order(len(labels), seed, epoch),
        "sequential": lambda labels, seed, epoch: in_order(len(labels)),
        "weighted": lambda labels, seed, epoch: weighted_order(
            class_weights(labels), len(labels), seed, epoch
        ),
    }
)
"""By the name that ``--sampler`` takes."""
