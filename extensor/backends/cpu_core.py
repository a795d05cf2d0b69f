"""What the parts of the CPU backend share: the C++ core, and which arrays it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Array

__all__ = ["CoreBackend"]

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
