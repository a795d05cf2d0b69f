"""One recorded operation.

A node holds what its gradient needs: raw arrays and the edges to the nodes (or
leaf tensors) its inputs came from. It does not hold its output tensor, so there
is no cycle, and a graph that is dropped is freed without the garbage collector.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from extensor.autograd.primitive import Primitive

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor

__all__ = ["Node"]

_count = itertools.count()


class Node:
    """An operation that was applied while gradients were recorded.

    Attributes:
        primitive: what was applied; params: with which parameters.
        edges: per input the node or leaf tensor it came from; None where no gradient goes.
        arrays: the inputs' data, if the gradient reads it.
        specs: the inputs' (shape, dtype) where it does not.
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
        "specs",
        "stamp",
    )

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
        self.edges: list[Node | ExTensor | None] | None = [
            t.node or (t if t._requires_grad else None) for t in inputs
        ]
        if primitive.reads_inputs:
            self.arrays: list[Any] | None = [t.data for t in inputs]
            self.specs: list[tuple[tuple[int, ...], Any]] | None = None
            cells = [t._version for t in inputs]
        else:
            self.arrays = None
            self.specs = [(t.data.shape, t.dtype.numpy) for t in inputs]
            cells = []
        if primitive.reads_output:
            self.out = out
            cells.append(out_cell)
        else:
            self.out = None
        self.cells = cells
        self.stamp = sum([cell[0] for cell in cells])

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
        written = sum([cell[0] for cell in self.cells]) - self.stamp
        if written:
            raise RuntimeError(
                f"{self.primitive.name}: a tensor that its gradient needs was written in place "
                f"{written} time(s) after it was used; run backward before the write, or write to "
                "x.clone()"
            )

    def release(self) -> None:
        """Drop everything held for the gradient."""
        self.edges = self.arrays = self.out = self.saved = self.specs = None
        self.cells = []
        self.stamp = 0
