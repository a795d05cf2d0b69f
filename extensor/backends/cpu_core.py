"""What the parts of the CPU backend share: the C++ core, and which arrays it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Array

__all__ = ["CoreBackend", "ready"]

_FLOAT32 = np.dtype(np.float32)


class CoreBackend(GenericBackend):
    """A backend with the C++ core, where it is built.

    Attributes:
        core: the extension module, or None.
        core_missing: why there is none; "" where there is one.
    """

    core: Any
    core_missing: str

    def _arrays_reason(self, *arrays: Array) -> str | None:
        """Why the core cannot take these arrays; None if it can."""
        if self.core is None:
            return self.core_missing
        for x in arrays:
            if x.dtype != _FLOAT32:
                return f"{x.dtype} array; the core computes in float32"
            if x.size == 0:
                return "empty array"
        return None

    def _arguments_reason(self, *args: Any) -> str | None:
        """The same for the arrays among a method's arguments."""
        return self._arrays_reason(*(x for x in args if isinstance(x, np.ndarray)))

    def _updates_reason(self, grad: Array, *written: Array) -> str | None:
        """The same for arrays that are written in place from a gradient."""
        if reason := self._arrays_reason(*written, grad):
            return reason
        if not all(a.flags.c_contiguous and a.flags.aligned and a.flags.writeable for a in written):
            return "an array to be written that is strided, misaligned or read-only"
        return None


def ready(x: Array) -> Array:
    """C-contiguous and aligned, copied only where it is not."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")
