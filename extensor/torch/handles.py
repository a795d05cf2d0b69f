"""Layers by number: operators take tensors and numbers, so a layer is named by one.

A program that is exported or traced keeps the number, and may run in another process. So a
number's upper bits say what the layer computes: the other process finds a layer that computes the
same, or none.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from typing import Any

__all__ = ["layer_count", "new_number", "numbered"]

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(2)
"""From 2 on: torch.compile takes 0 and 1 for constants, and would compile anew for others."""


def new_number(layer: Any, computes: str) -> int:
    """A number for a layer, as long as the layer lives.

    Args:
        layer: the layer.
        computes: all that its results depend on beside its tensors; the same in each process.
    """
    number = zlib.crc32(computes.encode()) << 30 | next(_numbers)
    _LAYERS[number] = layer
    return number


def numbered(number: int) -> Any:
    """The layer of a number.

    Raises:
        RuntimeError: if the layer is gone.
    """
    try:
        return _LAYERS[number]
    except KeyError:
        raise RuntimeError(
            "extensor: the layer that this operation belongs to has been deleted; keep the model "
            "until its backward pass is done. A program that was exported or traced in another "
            "process needs the same layers: begin with the same calls of quantize_"
        ) from None


def layer_count() -> int:
    """How many layers there are."""
    return len(_LAYERS)
