"""Backends by device name, loaded when first asked for.

The module paths below are the only string imports in the project: asking whether
a backend exists never imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache

from extensor.backends.protocol import Backend
from extensor.config import default_device
from extensor.errors import unknown_name

__all__ = ["BACKENDS", "BackendRow", "available", "get"]


@dataclass(frozen=True)
class BackendRow:
    """Where a backend lives, what it needs, and how to get it."""

    module: str
    needs: tuple[str, ...]
    way_out: str


BACKENDS = {
    "cpu": BackendRow("extensor.backends.cpu", ("numpy",), "pip install extensor"),
    "cuda": BackendRow(
        "extensor_cuda.backend",
        ("extensor_cuda", "cupy", "cuda.core"),
        "an NVIDIA GPU with its driver, and pip install 'extensor[cuda13]'",
    ),
}
"""Every backend, by device name."""


def missing(device: str) -> tuple[str, ...]:
    """Modules that a device's backend needs and that are not installed, without importing any."""
    if device not in BACKENDS:
        raise ValueError(unknown_name("device", device, BACKENDS))
    row = BACKENDS[device]
    return tuple(name for name in (*row.needs, row.module) if not _found(name))


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def available(device: str) -> bool:
    """Whether everything a device's backend imports is installed."""
    return not missing(device)


def get(device: str | None = None) -> Backend:
    """The backend of a device, made once; None is the default device (EXTENSOR_DEVICE).

    Raises:
        ValueError: for a name that is not a device.
        RuntimeError: where something the device needs is not there; names it and the way out.
    """
    return _made(default_device() if device is None else device)


@cache
def _made(device: str) -> Backend:
    lacking = missing(device)
    if lacking:
        raise RuntimeError(
            f"device {device!r} needs {', '.join(lacking)}, not found here; "
            f"it takes {BACKENDS[device].way_out}"
        )
    backend: Backend = importlib.import_module(BACKENDS[device].module).make_backend()
    return backend
