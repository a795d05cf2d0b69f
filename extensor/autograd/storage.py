"""What operations keep for backward, stored in a format of few bits.

The arrays that an operation's gradient reads, its inputs and output, are quantized along their
values in memory order when they are recorded, and decoded when the gradient is computed. The
gradient is that of the operation at the decoded values. Leaves are not stored: parameters and data
live anyway. An array that several operations keep is stored once.

Sources: ActNN (Chen et al., arXiv 2104.14129), COAT (Xi et al., arXiv 2410.19313).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from extensor.autograd.node import Node
from extensor.dtypes import dtype_of
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import RecipeState
from extensor.quant.spec import QuantSpec

__all__ = ["QuantizedStorage", "Stored", "restore"]

LEAST = 1024
"""Values of the smallest array that is stored: fewer are not worth two kernels."""


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in blocks, for its shape and dtype.

    Attributes:
        q: the flat values.
        shape: of the array.
        dtype: of the array.
        source: the array, not kept alive.
    """

    q: QuantArray
    shape: tuple[int, ...]
    dtype: Any
    source: weakref.ref[Any]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What is kept."""
        return tuple(self.q.parts.values())

    def values(self, backend: Any) -> Any:
        """The decoded array."""
        return backend.cast(backend.dequantize(self.q), self.dtype).reshape(self.shape)


class QuantizedStorage:
    """Stores by one spec; see `extensor.autograd.mode.Storage`.

    Args:
        spec: the format; stochastic rounding draws from the recipe's seed and step.
        state: the recipe's.
    """

    def __init__(self, spec: QuantSpec, state: RecipeState) -> None:
        self.spec, self.state = spec.replace(axis=-1).resolve(1), state
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()

    def pack(self, node: Node) -> None:
        """Store the float arrays that a node keeps, but for the packed operand of a layer.

        A layer that keeps its input, such as one in float32, has it stored.
        """
        released = node.primitive.released
        whole = (self.state.recipe.saved_input or node.backend.saved_input) == "input"
        if released is not None and (whole or released(node.saved)):
            return
        edges = node.edges or ()
        for i, edge in enumerate(edges):
            if isinstance(edge, Node):
                node.arrays[i] = self._of(node.arrays[i], node.backend)
        node.out = self._of(node.out, node.backend)
        if node.primitive.saved_again is not None and _is_stored(node):
            node.saved = None

    def _of(self, array: Any, backend: Any) -> Any:
        if not isinstance(array, backend.xp.ndarray) or array.size < LEAST:
            return array
        if not dtype_of(array).is_float or array.dtype.itemsize > 4:
            return array
        found = self._stored.get(id(array))
        if found is not None and found.source() is array:
            return found
        if backend.capturing is not None:
            raise RuntimeError(
                "capture: a step that stores what it keeps for backward in blocks counts on the "
                "host; capture it without Recipe.saved, or do not capture"
            )
        flat = backend.xp.ascontiguousarray(array).reshape(-1)
        stream = self.state.saved_stream() if self.spec.rounding == "stochastic" else None
        q, _ = backend.quantize(flat, self.spec, stream)
        made = Stored(q, tuple(array.shape), array.dtype, weakref.ref(array))
        self._stored[id(array)] = made
        return made


def _is_stored(node: Node) -> bool:
    return any(isinstance(array, Stored) for array in node.arrays)


def restore(node: Node) -> None:
    """Decode what a node stored, for its gradient."""
    backend = node.backend
    again = node.primitive.saved_again if _is_stored(node) else None
    for i, array in enumerate(node.arrays):
        if isinstance(array, Stored):
            node.arrays[i] = array.values(backend)
    if again is not None:
        inputs = node.arrays
        if node.compute is not None:
            inputs = [backend.cast(array, node.compute) for array in inputs]
        node.saved = again(backend, *inputs)
    if isinstance(node.out, Stored):
        node.out = node.out.values(backend)
