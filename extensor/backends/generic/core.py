"""What every family of generic methods uses: the array module, casts and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from extensor.backends.capture import Graph, Replay, StepCapture
from extensor.backends.protocol import Array, MemoryLog

__all__ = ["BFLOAT16", "FLOAT32", "GenericCore", "widened"]

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
P = ParamSpec("P")
T = TypeVar("T")


def widened(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method call itself again with float32 arrays where arguments are bfloat16."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any(getattr(a, "dtype", None) == BFLOAT16 for a in args):
            return method(*args, **kwargs)
        backend: Any = args[0]
        wide = [
            backend.cast(a, FLOAT32) if getattr(a, "dtype", None) == BFLOAT16 else a
            for a in args[1:]
        ]
        made: T = getattr(backend, method.__name__)(*wide, **kwargs)
        return made

    return call


class GenericCore:
    """A backend's name and array module ``xp``, without kernels, graphs or bfloat16 methods."""

    bfloat16: Collection[str] = ()
    captured_heads: Collection[int] | None = None
    accumulating_vjps: Collection[str] = ()
    overwriting_vjps: Collection[str] = ()

    def __init__(self, name: str, xp: Any) -> None:
        self.name = name
        self.xp = xp

    def reads_stored(self, vjp: str, q: Any, others: Sequence[Any]) -> bool:
        """See the protocol."""
        return False

    @property
    def capturing(self) -> StepCapture | None:
        """See the protocol."""
        return None

    def new_graph(self) -> Graph | None:
        """See the protocol."""
        return None

    def noted(self, call: Callable[[], Any]) -> tuple[Any, Replay | None]:
        """See the protocol."""
        return call(), None

    def memory_log(self) -> MemoryLog:
        """See the protocol."""
        raise RuntimeError(
            "memory ledger: the C++ core logs numpy's allocations, and it is not in use; install "
            "with a C++20 compiler (pip install -e .), and leave EXTENSOR_CORE=0 out"
        )

    def raising(self) -> AbstractContextManager[Any]:
        """See the protocol."""
        return nullcontext()

    def refuse(self, bad: Array, error: Callable[[], Exception]) -> None:
        """See the protocol."""
        if self.capturing is not None:
            self.capturing.watch(bad, error)
        elif bool(bad.any()):  # one wait for a GPU
            raise error()

    def cast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """See the protocol."""
        return x.astype(dtype, copy=False)

    def _wide(self, x: Array) -> Array:
        """Bfloat16 as float32; everything else as it is."""
        return self.cast(x, FLOAT32) if x.dtype == BFLOAT16 else x
