"""One recorded operation.

A node holds what its gradient needs: raw arrays and the edges to the nodes (or
leaf tensors) its inputs came from. It does not hold its output tensor, so there
is no cycle, and a graph that is dropped is freed without the garbage collector.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from extensor.autograd.primitive import Primitive

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor

__all__ = ["Node", "Spec"]

_count = itertools.count()


class Spec(NamedTuple):
    """What is left of an input whose values the gradient does not read."""

    shape: tuple[int, ...]
    dtype: Any


class Node:
    """An operation that was applied while gradients were recorded.

    Attributes:
        primitive: what was applied; params: with which parameters.
        edges: per input the node or leaf tensor it came from; None where no gradient goes.
        arrays: the inputs' data, if the gradient reads it; else a `Spec`, or None for an input
            of the output's shape and dtype.
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

    edges: list[Node | ExTensor | None] | None
    arrays: list[Any]

    def __init__(
        self,
        primitive: Primitive,
        params: dict[str, Any],
        inputs: tuple[ExTensor, ...],
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
        edges: list[Node | ExTensor | None] = []
        arrays: list[Any] = []
        cells: list[list[int]] = []
        stamp = 0
        reads_inputs = primitive.reads_inputs
        out_type = getattr(out, "dtype", None)  # None for a QuantArray, as its dtype's numpy is
        for tensor in inputs:
            if tensor.node is not None:
                edges.append(tensor.node)
            else:
                edges.append(tensor if tensor._requires_grad else None)
            data = tensor.data
            if reads_inputs:
                cell = tensor._version
                cells.append(cell)
                stamp += cell[0]
                arrays.append(data)
            elif data.shape == out.shape and tensor.dtype.numpy is out_type:
                arrays.append(None)
            else:
                arrays.append(Spec(data.shape, tensor.dtype.numpy))
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
