"""The CPU backend: numpy, and the C++ core where it is built.

`CpuBackend.path` says which code a call takes without running it, so that nobody has to guess.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from extensor.backends.cpu.conv_pool import CpuConvPool
from extensor.backends.cpu.core import CORE_METHODS
from extensor.backends.cpu.matmul import CpuMatmul
from extensor.backends.cpu.nn import CpuNn
from extensor.backends.cpu.optim import CpuOptim
from extensor.backends.cpu.quantize import CpuQuantize
from extensor.backends.cpu.reduction import CpuReduction
from extensor.config import num_threads, require_core, use_core

__all__ = ["CpuBackend", "load_core", "make_backend"]


def load_core() -> tuple[Any, str]:
    """The C++ core and "", or None and why it is not used.

    Raises:
        RuntimeError: where the core is missing although EXTENSOR_REQUIRE_CORE=1.
    """
    if not use_core():
        return None, "EXTENSOR_CORE=0"
    try:
        return importlib.import_module("extensor._core._kernels"), ""
    except ImportError as error:
        if require_core():
            raise RuntimeError(
                f"EXTENSOR_REQUIRE_CORE=1, but the C++ core cannot be imported ({error}); install "
                "with a C++20 compiler (pip install -e .), or leave the variable out"
            ) from error
        return None, f"the C++ core is not built ({error})"


def make_backend() -> CpuBackend:
    """The CPU backend, on the C++ core where there is one."""
    return CpuBackend(*load_core())


class CpuBackend(CpuMatmul, CpuQuantize, CpuConvPool, CpuNn, CpuOptim, CpuReduction):
    """numpy, with the hot methods in C++."""

    def __init__(self, core: Any, core_missing: str = "") -> None:
        super().__init__("cpu", np)
        self.core = core
        self.core_missing = core_missing
        if core is not None:
            core.set_threads(num_threads())

    def core_methods(self) -> frozenset[str]:
        """The methods that the core has; the others are made of these or run on numpy."""
        return frozenset(CORE_METHODS)

    def path(self, method: str, *args: Any) -> str:
        """Which code ``method(*args)`` takes: "core (avx512)", or "generic: " and the reason.

        Raises:
            ValueError: for a method that the core does not have.
        """
        if method not in CORE_METHODS:
            names = ", ".join(CORE_METHODS)
            raise ValueError(f"path: expected one of {names}, got {method!r}")
        plan = CORE_METHODS[method](self, *args)
        if not plan:
            return f"generic: {plan.reason}"
        return f"core ({self.product_level(method, plan) or self.core.level()})"
