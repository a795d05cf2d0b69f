"""What operations keep for backward, stored in a format of few bits.

The arrays that an operation's gradient reads, its inputs and output, are rounded to a format along
their values in memory order when they are recorded, and decoded when the gradient is computed. The
gradient is that of the operation at the decoded values. Leaves are not stored: parameters and data
live anyway. An array that several operations keep in one format is stored once.

Sources: ActNN (Chen et al., arXiv 2104.14129), COAT (Xi et al., arXiv 2410.19313).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from extensor.autograd.node import AGAIN, Node
from extensor.dtypes import bfloat16, dtype_of
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import RecipeState
from extensor.quant.saved import SavedRule
from extensor.quant.spec import QuantSpec

__all__ = ["ArrayStore", "Kept", "SavedStorage", "Stored", "restore"]

LEAST = 1024
"""Values of the smallest array that is stored: fewer are not worth two kernels."""


class Kept(ABC):
    """What is kept in place of an array.

    Attributes:
        fused: whether an operation's fused gradient reads this itself as its output.
    """

    fused: ClassVar[bool] = False

    @abstractmethod
    def values(self, backend: Any) -> Any:
        """The array, as far as a gradient reads it."""


@dataclass(frozen=True, eq=False)
class Stored(Kept):
    """An array in fewer bits.

    Attributes:
        q: the flat values in blocks, or an array of bfloat16.
        shape: of the array.
        dtype: of the array.
        source: the array, not kept alive.
    """

    q: Any
    shape: tuple[int, ...]
    dtype: Any
    source: weakref.ref[Any]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What is kept."""
        return tuple(self.q.parts.values()) if isinstance(self.q, QuantArray) else (self.q,)

    def values(self, backend: Any) -> Any:
        """The decoded array."""
        if isinstance(self.q, QuantArray):
            return backend.dequantize(self.q, self.dtype.name).reshape(self.shape)
        return backend.cast(self.q, self.dtype).reshape(self.shape)


class ArrayStore:
    """Stores arrays in one format.

    Args:
        spec: of blocks, where stochastic rounding draws from the recipe's seed and step; or
            "bfloat16".
        state: the recipe's.
    """

    def __init__(self, spec: QuantSpec | str, state: RecipeState) -> None:
        if isinstance(spec, QuantSpec):
            spec = spec.replace(axis=-1).resolve(1)
        self.spec, self.state = spec, state
        self._next: Stored | None = None  # made by `beside`, for the next `store`
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()

    def store(self, array: Any, backend: Any) -> Any:
        """The array in the format; itself where it is small, or not of 16 or 32 bits a value."""
        if not isinstance(array, backend.xp.ndarray) or array.size < LEAST:
            return array
        if not dtype_of(array).is_float or array.dtype.itemsize > 4:
            return array
        found = self._stored.get(id(array))
        if found is not None and found.source() is array:
            return found
        made, self._next = self._next, None
        if made is None or made.source() is not array:
            q = self._rounded(array, backend)
            if q is array:
                return array
            made = Stored(q, tuple(array.shape), array.dtype, weakref.ref(array))
        self._stored[id(array)] = made
        return made

    def beside(self, array: Any, run: Callable[[Any, QuantSpec], Any]) -> Any:
        """Run an operation that stores its array in the same reading; its result, or None.

        ``run(array, spec)`` gives the array's flat blocks and the result, or None. The next `store`
        of the array takes these blocks.
        """
        if not isinstance(self.spec, QuantSpec) or self.spec.rounding == "stochastic":
            return None
        made = run(array, self.spec) if array.size >= LEAST else None
        if made is None:
            return None
        q, out = made
        self._next = Stored(q, tuple(array.shape), array.dtype, weakref.ref(array))
        return out

    def _rounded(self, array: Any, backend: Any) -> Any:
        if not isinstance(self.spec, QuantSpec):
            return array if array.dtype.itemsize == 2 else backend.cast(array, bfloat16.numpy)
        flat = backend.xp.ascontiguousarray(array).reshape(-1)
        stream = self.state.saved_stream() if self.spec.rounding == "stochastic" else None
        return backend.pack(flat, self.spec, stream)


class SavedStorage:
    """Stores what the operations of a module keep, by the rules that match it.

    Args:
        rules: in order, each with its store; None keeps arrays as they are.
        state: the recipe's, which is told of rules that matched.
    """

    def __init__(
        self, rules: Sequence[tuple[SavedRule, ArrayStore | None]], state: RecipeState
    ) -> None:
        self.rules, self.state = tuple(rules), state

    def pack(self, node: Node) -> None:
        """Store the float arrays that a node keeps, but for the packed operand of a layer.

        A layer that keeps its input, such as one in float32, has it stored.
        """
        primitive, backend = node.primitive, node.backend
        own = primitive.own_input and node.params["context"].keeps_input()
        if own or (primitive.released is not None and primitive.released(node.saved)):
            self._met("a quantized layer's own operand")
            return
        for i, edge in enumerate(node.edges or ()):
            if isinstance(edge, Node) and isinstance(node.arrays[i], backend.xp.ndarray):
                node.arrays[i] = self._store(node.arrays[i], primitive.slot(i), backend)
        if node.out is not None:
            node.out = self._store(node.out, primitive.out_slot, backend)
        if primitive.saved_again is not None and _is_stored(node) and node.saved is not None:
            node.saved = AGAIN

    def of(self, slot: str) -> ArrayStore | None:
        """What stores arrays of a slot; None: they are kept as they are."""
        return next((s for rule, s in self.rules if fnmatchcase(slot, rule.slot)), None)

    def _store(self, array: Any, slot: str, backend: Any) -> Any:
        for rule, store in self.rules:
            if fnmatchcase(slot, rule.slot):
                self._met(slot, rule)
                return array if store is None else store.store(array, backend)
        self._met(slot)
        return array

    def _met(self, slot: str, decides: SavedRule | None = None) -> None:
        """Note that a rule decides about a slot, and the others do not."""
        unmet = self.state.unmet_saved
        if unmet:
            unmet.pop(decides, None)  # type: ignore[arg-type]
            for rule, _ in self.rules:
                if rule in unmet:
                    unmet[rule].add(slot)


def _is_stored(node: Node) -> bool:
    return any(isinstance(array, Stored) for array in node.arrays)


def restore(node: Node, fused: bool) -> None:
    """Decode what a node stored, for its gradient; not what the backend's method decodes."""
    backend, read = node.backend, False
    if fused and node.arrays and node.compute is None and node.saved is not AGAIN:
        first, *others = node.arrays
        if isinstance(first, Stored) and isinstance(first.q, QuantArray):
            read = backend.reads_stored(node.primitive.name, first.q, others)
    plain = backend.xp.ndarray
    for i, array in enumerate(node.arrays):
        if type(array) is plain:  # the usual case; a check of a protocol's class takes longer
            continue
        if isinstance(array, Kept) and not (read and i == 0):
            node.arrays[i] = array.values(backend)
        elif isinstance(array, QuantArray) and not node.primitive.takes_blocked:
            node.arrays[i] = backend.dequantize(array, bfloat16.name)
    if node.saved is AGAIN:
        inputs = node.arrays
        if node.compute is not None:
            inputs = [backend.cast(array, node.compute) for array in inputs]
        assert node.primitive.saved_again is not None
        node.saved = node.primitive.saved_again(backend, *inputs)
    if isinstance(node.out, Kept) and not (fused and node.out.fused):
        node.out = node.out.values(backend)
