"""What the families of the CPU backend share: the C++ core, and which calls run in it.

Each method in C++ has a function that chooses: given the call's arguments it returns the plan of
the C++ code, or `Unsupported` and why. The method then runs that plan, or the generic method runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from extensor.backends.capture import Replay
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Array, MemoryLog
from extensor.backends.unsupported import Unsupported
from extensor.random import Stream

__all__ = ["CORE_METHODS", "CpuCore", "first_arrays", "ready", "runs_in_core", "stream_words"]

P = ParamSpec("P")
Plan = TypeVar("Plan")
T = TypeVar("T")

_FLOAT32 = np.dtype(np.float32)
_EMPTY = Unsupported("empty array")
_NOT_WRITABLE = Unsupported("an array to be written that is strided, misaligned or read-only")

CORE_METHODS: dict[str, Callable[..., Any]] = {}
"""What chooses, for each method that the core has."""

_DISPATCH = """
def {name}(self, {names}):
    plan = choose(self, {names})
    if isinstance(plan, Unsupported):
        return generic(self, {names})
    return method(self, plan, {names})
"""
# Written out for each method, as dataclasses do: a call through *args takes three times as long.


def runs_in_core(
    choose: Callable[..., Plan | Unsupported],
) -> Callable[[Callable[Concatenate[Any, Plan, P], T]], Callable[Concatenate[Any, P], T]]:
    """Run a method on the plan that ``choose`` returns for its arguments, or the generic method.

    The method takes the plan before its arguments.
    """

    def decorate(
        method: Callable[Concatenate[Any, Plan, P], T],
    ) -> Callable[Concatenate[Any, P], T]:
        name = method.__name__
        CORE_METHODS[name] = choose
        _, _, *names = inspect.signature(method).parameters  # without self and the plan
        scope: dict[str, Any] = {
            "choose": choose,
            "method": method,
            "generic": getattr(GenericBackend, name),
            "Unsupported": Unsupported,
        }
        exec(_DISPATCH.format(name=name, names=", ".join(names)), scope)
        dispatch = scope[name]
        dispatch.__defaults__, dispatch.__doc__ = method.__defaults__, method.__doc__
        found: Callable[Concatenate[Any, P], T] = dispatch
        return found

    return decorate


class _CoreLog:
    """The core's log of its own blocks and numpy's."""

    def __init__(self, core: Any) -> None:
        self._core, self._handler = core, None

    def __enter__(self) -> None:
        self._handler = self._core.ledger_start()

    def __exit__(self, *error: object) -> None:
        self._core.ledger_stop(self._handler)

    def mark(self, block: int, label: int) -> None:
        self._core.ledger_mark(block, label)

    def events(self) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._core.ledger_events()
        return found


class CpuCore(GenericBackend):
    """A backend with the C++ core, where it is built.

    Attributes:
        core: the extension module, or None.
        core_missing: why there is none; "" where there is one.
    """

    core: Any
    core_missing: str
    noting = False
    """Whether calls of kernels are noted: then small arrays go to the core as well."""

    def noted(self, call: Callable[[], Any]) -> tuple[Any, Replay | None]:
        """See the protocol."""
        if self.core is None:
            return super().noted(call)
        replay = self.core.Replay()
        self.noting = True
        try:
            return replay.record(call), replay
        finally:
            self.noting = False

    def memory_log(self) -> MemoryLog:
        """See the protocol."""
        return super().memory_log() if self.core is None else _CoreLog(self.core)

    def float32_core(self, *arrays: Array | None) -> Any:
        """The core, if it takes these arrays: float32 and not empty; else `Unsupported`."""
        if self.core is None:
            return Unsupported(self.core_missing)
        for x in arrays:
            if x is None:  # an argument that was left out
                continue
            if x.dtype is not _FLOAT32 and x.dtype != _FLOAT32:
                return Unsupported(f"{x.dtype} array; the core computes in float32")
            if x.size == 0:
                return _EMPTY
        return self.core

    def update_core(self, grad: Array, *written: Array) -> Any:
        """The same for arrays that are written in place from a gradient."""
        if not (core := self.float32_core(*written, grad)):
            return core
        for a in written:
            if not (a.flags.c_contiguous and a.flags.aligned and a.flags.writeable):
                return _NOT_WRITABLE
        return core


def first_arrays(count: int) -> Callable[..., Any]:
    """What chooses the core if it takes the first ``count`` arguments; None among them is fine."""

    def choose(backend: CpuCore, *args: Any, **kwargs: Any) -> Any:
        return backend.float32_core(*args[:count])

    return choose


def ready(x: Array) -> Array:
    """C-contiguous and aligned, copied only where it is not."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")


def stream_words(stream: Stream | None) -> tuple[int, int, int, int]:
    """A random stream as the core takes it; zeros where nothing is random."""
    return (0, 0, 0, 0) if stream is None else (*stream.key, *stream.counter_high)
