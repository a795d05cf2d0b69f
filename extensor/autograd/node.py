"""What the parts of the engine share: a tensor's state, and a recorded operation.

A node holds what its gradient needs: raw arrays and the edges to the nodes (or
leaf tensors) that its inputs came from. It does not hold its output tensor, so
references form no cycle, and a dropped graph is freed without the garbage collector.

`ExTensor` adds methods to `TensorState`. Modules below `extensor.autograd.tensor`
name the state alone, so that imports point one way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

from extensor.autograd.primitive import Primitive
from extensor.backends.protocol import Backend
from extensor.dtypes import DType

__all__ = ["AGAIN", "ArraySpec", "Node", "Tensor", "TensorState"]

AGAIN = object()
"""In place of what forward saved: `Primitive.saved_again` makes it from the inputs."""

_count = itertools.count()


class ArraySpec(NamedTuple):
    """The shape and dtype of an input whose values the gradient does not read."""

    shape: tuple[int, ...]
    dtype: Any


class TensorState:
    """Data, dtype, device and place in the graph: what the engine reads of every tensor."""

    __slots__ = (
        "__weakref__",
        "_requires_grad",
        "_version",
        "backend",
        "data",
        "dtype",
        "grad",
        "node",
    )

    data: Any
    dtype: DType
    backend: Backend
    grad: Any
    node: Node | None
    _requires_grad: bool
    _version: list[int]
    is_parameter: ClassVar[bool] = False
    """Whether a module trains it: see `extensor.nn.Parameter`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape; the padding of blocks never shows in it."""
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.data.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of storage: of the array, or of codes, scales and all beside them."""
        return int(self.data.nbytes)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.backend.name

    @property
    def is_blocked(self) -> bool:
        """True if the data is codes and scales."""
        return self.dtype.is_blocked

    @property
    def is_blocked_parameter(self) -> bool:
        """True for a parameter in blocks, frozen or not: operations read it as bfloat16."""
        return self.is_parameter and self.dtype.is_blocked

    @property
    def requires_grad(self) -> bool:
        """Whether operations on it are recorded and ``backward`` reaches it."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.node is not None:
            raise RuntimeError(
                "requires_grad: expected a leaf, got the result of an operation; use y.detach()"
            )
        if value and not (self.dtype.is_float or self.is_blocked_parameter):
            raise TypeError(
                f"requires_grad: expected a floating-point tensor, got {self.dtype.name}; "
                + (
                    "keep the float tensor as the leaf and quantize it in the computation"
                    if self.dtype.is_blocked
                    else "convert it with x.astype('float32')"
                )
            )
        self._requires_grad = bool(value)


Tensor = TypeVar("Tensor", bound=TensorState)
"""The tensor class that the mixins below it make and return: `ExTensor`."""


class Node:
    """An operation that was applied while gradients were recorded.

    Attributes:
        primitive: what was applied; params: with which parameters.
        edges: per input the node or leaf tensor it came from; None where no gradient goes.
        arrays: the inputs' data, if the gradient reads it; else an `ArraySpec`, or None for an
            input of the output's shape and dtype.
        out: the output's data, if the gradient reads it.
        saved: what forward saved.
        backend: the device it ran on.
        compute: the numpy dtype the inputs were converted to; None if they were taken as they are.
        cells, stamp: the version counters of what is held, and their sum when it was recorded.
        seq: nodes are numbered as they are made, so descending numbers are an order in which
            every node comes before those it was computed from.
    """

    __slots__ = (
        "__weakref__",
        "arrays",
        "backend",
        "cells",
        "compute",
        "edges",
        "out",
        "params",
        "primitive",
        "saved",
        "seq",
        "stamp",
    )

    edges: list[Node | TensorState | None] | None
    arrays: list[Any]

    def __init__(
        self,
        primitive: Primitive,
        params: dict[str, Any],
        inputs: tuple[TensorState, ...],
        out: Any,
        saved: Any,
        out_cell: list[int],
        compute: Any = None,
    ) -> None:
        self.primitive = primitive
        self.params = params
        self.saved = saved
        self.backend = inputs[0].backend
        self.compute = compute
        self.seq = next(_count)
        # Plain loops: a comprehension is a call, and this is the hot path.
        edges: list[Node | TensorState | None] = []
        arrays: list[Any] = []
        cells: list[list[int]] = []
        stamp = 0
        reads_inputs = primitive.reads_inputs
        released = () if primitive.released is None else primitive.released(saved)
        out_type = getattr(out, "dtype", None)  # None for a QuantArray, as its dtype's numpy is
        for tensor in inputs:
            if tensor.node is not None:
                edges.append(tensor.node)
            else:
                edges.append(tensor if tensor._requires_grad else None)
            data = tensor.data
            if reads_inputs and not (released and len(arrays) in released):
                cell = tensor._version
                cells.append(cell)
                stamp += cell[0]
                arrays.append(data)
            elif not reads_inputs and data.shape == out.shape and tensor.dtype.numpy is out_type:
                arrays.append(None)
            else:
                arrays.append(ArraySpec(data.shape, tensor.dtype.numpy))
        if not primitive.every_vjp:
            for i in range(len(edges)):
                if not primitive.has_vjp(i):
                    edges[i] = None
        if primitive.reads_output:
            self.out = out
            cells.append(out_cell)
            stamp += out_cell[0]
        else:
            self.out = None
        self.edges = edges
        self.arrays = arrays
        self.cells = cells
        self.stamp = stamp

    def keep_blocks(self, leaves: Iterable[tuple[int, TensorState]]) -> None:
        """Hold the blocks of inputs in place of what was read of them, and lead to these leaves.

        Args:
            leaves: by the input's number.
        """
        for i, leaf in leaves:
            if self.edges is not None and self.edges[i] is not None:
                self.edges[i] = leaf
            if isinstance(self.arrays[i], self.backend.xp.ndarray):
                self.arrays[i] = leaf.data

    def check(self) -> None:
        """Refuse to differentiate what is gone or was overwritten.

        Raises:
            RuntimeError: if the node was released, or a tensor it needs was written in place.
        """
        if self.edges is None:
            raise RuntimeError(
                f"{self.primitive.name}: this part of the graph was already used by a backward "
                "pass, which freed it; pass retain_graph=True to the earlier pass"
            )
        written = -self.stamp
        for cell in self.cells:
            written += cell[0]
        if written:
            raise RuntimeError(
                f"{self.primitive.name}: a tensor that its gradient needs was written in place "
                f"{written} time(s) after it was used; run backward before the write, or write to "
                "x.clone()"
            )

    def release(self) -> None:
        """Drop everything held for the gradient."""
        self.edges = self.out = self.saved = None
        self.arrays = []
        self.cells = []
        self.stamp = 0
