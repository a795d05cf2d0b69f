"""A Hopper GPU that allocates and computes nothing: the ledger of a step at any shape.

Every array is taken from the fake pool as on a GPU, by the code that a GPU runs; kernels are not
launched. So bytes are exact, and values mean nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from typing import Any

import pytest

import extensor_cuda
from extensor.backends import registry
from extensor_cuda.backend import CudaBackend
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.launch import launch
from tests.unit.cuda import fake

__all__ = ["install"]

MULTIPROCESSORS = 132


def install(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """Device "cuda" of compute capability 9.0 without kernels."""
    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: {"name": b"dry"},
        driverGetVersion=lambda: 0,
        streamIsCapturing=lambda stream: False,
    )
    stream = types.SimpleNamespace(ptr=0)
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime, get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for module in pkgutil.walk_packages(extensor_cuda.__path__, "extensor_cuda."):
        found = importlib.import_module(module.name)
        if getattr(found, "launch", None) is launch:
            monkeypatch.setattr(found, "launch", lambda *arguments, **options: None)
    answers: dict[str, Any] = {
        "capability": lambda device: "90",
        "multiprocessors": lambda device: MULTIPROCESSORS,
        "active_clusters": lambda *arguments: MULTIPROCESSORS // arguments[1],
        "load": lambda *arguments: (None, None),
        "tensor_map": lambda *arguments: b"",
        "launch": lambda *arguments, **options: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    xp: Any = fake.FakeCupy()
    backend, usual = CudaBackend(xp), registry._made
    monkeypatch.setattr(registry, "_made", lambda d: backend if d == "cuda" else usual(d))
    return backend
