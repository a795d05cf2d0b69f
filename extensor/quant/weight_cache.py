"""The GEMM operands of weights, kept until the weight is written.

Micro-batches and evaluation use a weight's operands many times; quantizing the weight once is
enough. The cache stores operands and tells which of them are still right. Its callers make the
operands: `extensor.ops.recipe_operands`.

Operands are stored only where the weight's values are used again: from their second use on, and for
new values if the last ones were used again. A step with one micro-batch stores none. Operands of
small weights that one launch makes for all layers are stored at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extensor.quant.array import QuantArray
from extensor.quant.replay import REPLAY

__all__ = ["CachedOperand", "WeightCache", "WeightSource", "WeightVersion"]


@dataclass(frozen=True, eq=False)
class WeightVersion:
    """Which values a tensor's memory holds, told by how often it was written.

    Attributes:
        cell: the tensor's own count of writes, a list of one number.
        writes: that count when an operation took the tensor.
    """

    cell: list[int]
    writes: int


@dataclass(eq=False, slots=True)
class WeightSource:
    """What an operand of a weight is made from.

    Attributes:
        x: the weight's array.
        version: of its values.
        sizes: M, N and K of the products that it takes part in.
        capture: the step capture that is active, None where none is. Only what one capture made is
            used in it: each replay makes it from the weight that it finds.
    """

    x: Any
    version: WeightVersion
    sizes: tuple[int, int, int]
    capture: Any


@dataclass(eq=False, slots=True)
class CachedOperand:
    """An operand of a weight, and what it was made from.

    Attributes:
        operand: as a backend's product takes it.
        counts: what quantizing counted; None for an operand that is not quantized.
        recipe: the layer's recipe and the random stream; equal ones give equal operands.
        x: the weight's array, not kept alive.
        version, sizes: as of `WeightSource`.
        capture: likewise, not kept alive.
        stored: False: the operand was used, and let go.
    """

    operand: Any
    counts: Any
    recipe: Any
    x: weakref.ref[Any]
    version: WeightVersion
    sizes: tuple[int, int, int]
    capture: weakref.ref[Any] | None
    stored: bool = True

    def is_of(self, source: WeightSource, recipe: Any) -> bool:
        """Whether making it again would give the same operand."""
        version = source.version
        return (
            self.version.cell is version.cell
            and self.x() is source.x
            and self.version.writes == version.writes
            and self.capture == _reference(source.capture)
            and self.sizes == source.sizes
            and self.recipe == recipe
        )


class WeightCache:
    """Operands by layer path and recipe slot.

    Attributes:
        packed: by the same keys, codes and scales, with counts, of weights that are there in no
            other form (`extensor.distributed.packed`): their operands are made of them.
    """

    def __init__(self) -> None:
        self.packed: dict[tuple[str, str], tuple[QuantArray, Any]] = {}
        self._operands: dict[tuple[str, str], CachedOperand] = {}
        self._reused: set[tuple[str, str]] = set()  # slots whose last values were used again
        self._missed: set[tuple[str, str]] = set()  # slots whose operand had been let go

    def __len__(self) -> int:
        return len(self._operands)

    def get(self, path: str, slot: str) -> CachedOperand | None:
        """What is kept for a slot, right or outdated."""
        return self._operands.get((path, slot))

    def find(
        self, path: str, source: WeightSource, recipes: Mapping[str, Any]
    ) -> list[CachedOperand] | None:
        """The operands of a layer's slots if all are kept and right; ``recipes`` by slot."""
        found = []
        for slot, recipe in recipes.items():
            one = self._operands.get((path, slot))
            if one is None or not one.is_of(source, recipe):
                return None
            found.append(one)
        slots = {(path, slot) for slot in recipes}
        if REPLAY.uses is None:  # a second run is no reason to keep floats
            self._reused |= slots
        if not all(one.stored for one in found):
            self._missed |= slots if REPLAY.uses is None else set()
            return None
        return found

    def drop(self, path: str, slots: Iterable[str]) -> None:
        """Forget a layer's slots, so that new operands may lie where the old ones were."""
        for slot in slots:
            self._operands.pop((path, slot), None)
            self.packed.pop((path, slot), None)

    def store(
        self,
        path: str,
        source: WeightSource,
        recipes: Mapping[str, Any],
        made: Sequence[tuple[Any, Any]],
        batched: bool = True,
    ) -> list[CachedOperand]:
        """Keep the operands and counts of a layer's slots; gives what `find` would.

        Operands that are not ``batched`` with other layers' are kept where they will be used again.
        """
        x, capture = weakref.ref(source.x), _reference(source.capture)
        stored = []
        for (slot, recipe), (operand, counts) in zip(recipes.items(), made, strict=True):
            made_from = recipe, x, source.version, source.sizes, capture
            one = CachedOperand(operand, counts, *made_from)
            stored.append(one)
            if not (batched or (path, slot) in self._reused):
                one = CachedOperand(None, None, *made_from, stored=False)
            self._operands[path, slot] = one
            if (path, slot) not in self._missed:  # new values
                self._reused.discard((path, slot))
            self._missed.discard((path, slot))
        return stored


def _reference(capture: Any) -> weakref.ref[Any] | None:
    """A weak reference; that of a capture which is gone equals no other."""
    return None if capture is None else weakref.ref(capture)
