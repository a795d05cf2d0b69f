"""Layers by number: operators take tensors and numbers, so a layer is named by one."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

__all__ = ["layer_count", "new_number", "numbered"]

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(2)
"""From 2 on: torch.compile takes 0 and 1 for constants, and would compile anew for others."""


def new_number(layer: Any) -> int:
    """A number for a layer, as long as the layer lives."""
    number = next(_numbers)
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
            "until its backward pass is done"
        ) from None


def layer_count() -> int:
    """How many layers there are."""
    return len(_LAYERS)
