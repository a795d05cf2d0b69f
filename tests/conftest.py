"""`--device cuda` runs the suite with every tensor on the GPU, unless a test asks for another."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where tensors are made")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device is not None:
        os.environ["EXTENSOR_DEVICE"] = device
