"""The examples in the docstrings of extensor.torch run."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

import extensor as et

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

PARTS = ("arrays", "blocked", "clock", "export", "modules", "quantize", "require")


@pytest.mark.parametrize("part", PARTS)
def test_examples_run(part: str) -> None:
    module = importlib.import_module(f"extensor.torch.{part}")
    names = {"torch": torch, "nn": torch.nn, "np": np, "et": et}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert tried and not failed
