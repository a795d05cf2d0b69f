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
    """What was made of the input that was quantized last, for as long as the input lives.

    Threads may share one: each looks at the input and at what was made of it in one reading.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], WeightVersion, dict[Hashable, Any]] | None = None

    def __len__(self) -> int:
        return 0 if self._last is None else len(self._last[2])

    def share(self, x: Any, version: WeightVersion, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for these values of x and this key before, or gives now.

        Args:
            x: the input's array.
            version: of its values.
            key: what decides the operand beside the values.
            make: makes the operand.
        """
        made: dict[Hashable, Any] | None = None
        if (last := self._last) is not None and last[0]() is x:
            before = last[1]
            if before.cell is version.cell and before.writes == version.writes:
                made = last[2]
        if made is None:
            fresh = made = {}
            self._last = weakref.ref(x, lambda _: fresh.clear()), version, fresh
        if (found := made.get(key)) is None:
            found = made[key] = make()
        return found
