"""What the dispatch table's rows are made of: a choice of kernel, and what runs without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from extensor.backends.generic import GenericBackend
from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.nn.elementwise import KINDS

__all__ = [
    "FLOAT32",
    "FLOATS",
    "Call",
    "Route",
    "aligned",
    "contiguous",
    "dtype_gap",
    "routed",
    "unless",
]

Array = Any
Call = Callable[[], Any] | Unsupported
"""A kernel's call, ready to run, or why there is none."""

FLOATS = KINDS
"""Float32 and bfloat16."""
FLOAT32 = KINDS[:1]


@dataclass(frozen=True)
class Route:
    """How the GPU runs a method of the protocol: a row of the dispatch table.

    Attributes:
        choose: takes the array module and the method's arguments; gives the kernel's call, or
            another choice that ``run`` and ``path`` know, or `Unsupported`.
        run: gives the method's result, of what was chosen.
        path: what `CudaBackend.path` says of what was chosen.
        fallback: runs the method without a kernel, from the backend, the `Unsupported` and the
            method's arguments; None: the generic method on cupy.
        fallback_path: what `CudaBackend.path` calls the fallback, before the reason; of the
            method's arguments, where these decide.
    """

    choose: Callable[..., Any]
    run: Callable[[Any], Any] = lambda call: call()
    path: Callable[[Any], str] = lambda call: "fused kernel"
    fallback: Callable[..., Any] | None = None
    fallback_path: str | Callable[..., str] = "generic"


def routed(name: str, route: Route) -> Callable[..., Any]:
    """The backend's method of a row: it chooses once, and runs what it chose."""
    generic = getattr(GenericBackend, name)

    @wraps(generic)
    def method(self: GenericBackend, *args: Any, **kwargs: Any) -> Any:
        chosen = route.choose(self.xp, *args, **kwargs)
        if chosen:
            return route.run(chosen)
        if route.fallback is None:
            return generic(self, *args, **kwargs)
        return route.fallback(self, chosen, *args, **kwargs)

    return method


def unless(gap: Unsupported | None, call: Callable[[], Any]) -> Call:
    """The call, unless something stands against it."""
    return call if gap is None else gap


def dtype_gap(arrays: Sequence[Array], dtypes: Sequence[Any] = FLOAT32) -> Unsupported | None:
    """Why no kernel reads these arrays: their dtypes, or that the first is empty."""
    if any(a.dtype not in dtypes for a in arrays):
        return Unsupported(f"no {' or '.join(dtype.name for dtype in dtypes)} arrays")
    return None if arrays[0].size else Unsupported("an empty array")


def contiguous(xp: Any, a: Array) -> Array:
    """The array, or a C-contiguous copy."""
    return a if a.flags.c_contiguous else xp.ascontiguousarray(a)


def aligned(xp: Any, a: Array) -> Array:
    """The array, or a C-contiguous copy aligned to 16 bytes."""
    a = contiguous(xp, a)
    return a if a.data.ptr % 16 == 0 else a.copy()
