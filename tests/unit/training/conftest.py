"""Small runs for the training tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from training.config import RunConfig
from training.runs import defaults

SMALL = {
    "epochs": 2,
    "batch_size": 16,
    "train_limit": 96,
    "test_limit": 60,
    "lr": 0.02,
    "variant": "mlp",
}


@pytest.fixture
def small() -> Callable[..., RunConfig]:
    """Makes configurations of a perceptron on 96 digits: 2 epochs of 6 steps."""

    def make(**changes: Any) -> RunConfig:
        return RunConfig(**{**defaults("mlp"), **SMALL, **changes})

    return make
