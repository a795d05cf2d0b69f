"""The operands of a layer's input, for the other layers that read it: q, k and v; gate and up.

They hold what the layers that made them keep for backward, so nothing is kept twice. Stochastic
rounding draws other bits in each layer, so its operands are not shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from extensor.quant.weight_cache import WeightVersion

__all__ = ["InputCache"]


class InputCache:
    """What was made of the input that was quantized last, for as long as the input lives."""

    def __init__(self) -> None:
        self._x: weakref.ref[Any] | None = None
        self._version: WeightVersion | None = None
        self._made: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._made)

    def share(self, x: Any, version: WeightVersion, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for these values of x and this key before, or gives now.

        Args:
            x: the input's array.
            version: of its values.
            key: what decides the operand beside the values.
            make: makes the operand.
        """
        before, same = self._version, False
        if before is not None and self._x is not None and self._x() is x:
            same = before.cell is version.cell and before.writes == version.writes
        if not same:
            made: dict[Hashable, Any] = {}
            self._made = made
            self._x, self._version = weakref.ref(x, lambda _: made.clear()), version
        if (found := self._made.get(key)) is None:
            found = self._made[key] = make()
        return found
