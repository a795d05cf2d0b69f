"""Backward: walk the recorded nodes from the output and add up gradients.

Nodes are numbered in the order of their recording. A heap of descending numbers
visits each node after all nodes computed from it, without recursion. Without
``create_graph`` gradients are raw arrays, and each node is released after use.
With ``create_graph`` gradients are ExTensors, and their computation is recorded.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.node import Node, TensorState
from extensor.autograd.primitive import FUNCTIONS
from extensor.autograd.pullback import gradient_dtype, node_gradients
from extensor.autograd.row_gradient import RowGradient
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import as_dtype

__all__ = ["backward", "gradients"]

_ACCUMULATE = threading.Lock()
"""Threads may share a leaf; two additions at once would lose one of them."""

Edge = Node | TensorState
Gradient = Any
"""A raw array; of a leaf a `RowGradient`, too; or an ExTensor under create_graph."""


def backward(
    root: ExTensor,
    gradient: ExTensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Add the gradient of ``root`` to the ``.grad`` of every leaf; see `ExTensor.backward`."""
    retain = create_graph if retain_graph is None else retain_graph
    seed = _seed(root, gradient, create_graph)
    owned = set() if gradient is None else {id(gradient.data)}
    hook, row_hook, final = MODE.grad_hook, MODE.row_hook, None
    capture = root.backend.capturing
    if hook is not None:

        def final(leaf: ExTensor, g: Gradient) -> None:
            if isinstance(g, RowGradient):
                if leaf.grad is None and row_hook is not None and row_hook(leaf, g):
                    return
                g = g.dense(leaf.backend)
            if capture is not None:
                capture.require_own_gradients([leaf.grad])
            # The hook only reads, so that memory which may be shared is copied after it.
            lent = leaf.grad is None and not create_graph and g.flags.c_contiguous
            with _ACCUMULATE:
                if lent:
                    leaf.grad = wrap(g, leaf.backend)
                else:
                    _accumulate(leaf, g, create_graph, owned)
            held = id(None if lent or leaf.grad is None else leaf.grad.data)
            hook(leaf)
            if leaf.grad is None:  # the hook let it go: another array may get its address
                owned.discard(held)
            elif lent:
                leaf.grad.data = _own(leaf.grad.data, owned)

    grads = _run([(root, seed)], None, retain, create_graph, final)
    with _ACCUMULATE:
        if capture is not None:
            capture.require_own_gradients([leaf.grad for leaf, _ in grads.values()])
        for leaf, g in grads.values():
            _accumulate(leaf, g, create_graph, owned)
        if capture is not None:
            capture.own_gradients([leaf.grad for leaf, _ in grads.values()])
        if MODE.observer is not None:
            MODE.observer.accumulated([leaf for leaf, _ in grads.values()])
    if hook is not None:
        for leaf, _ in grads.values():
            hook(leaf)


FUNCTIONS["backward"] = backward  # ExTensor.backward, which stands below


def gradients(
    roots: Sequence[tuple[ExTensor, ExTensor | None]],
    inputs: Sequence[ExTensor],
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> list[ExTensor | None]:
    """The gradients of ``inputs``; None where an output does not depend on one."""
    retain = create_graph if retain_graph is None else retain_graph
    for i, tensor in enumerate(inputs):
        if not tensor._requires_grad:
            raise ValueError(
                f"input {i}: expected a tensor that requires a gradient, got {tensor!r}; "
                "set x.requires_grad = True before computing the output"
            )
    seeds = [(root, _seed(root, g, create_graph)) for root, g in roots]
    grads = _run(seeds, inputs, retain, create_graph)
    results: list[ExTensor | None] = []
    owned = {id(g.data) for _, g in roots if g is not None}
    for tensor in inputs:
        if id(tensor) not in grads:
            results.append(None)
        elif create_graph:
            results.append(grads[id(tensor)][1])
        else:
            results.append(wrap(_own(grads[id(tensor)][1], owned), tensor.backend))
    return results


def _seed(root: ExTensor, gradient: ExTensor | None, create_graph: bool) -> Gradient:
    if not root._requires_grad:
        raise RuntimeError(
            "backward: expected an output computed from a tensor with requires_grad=True while "
            f"gradients were recorded, got {root!r}"
        )
    if gradient is None:
        if root.size != 1:
            raise ValueError(
                f"backward: an output of shape {root.shape} needs a gradient of that shape; pass "
                "one, or reduce the output first (y.sum().backward())"
            )
        data = root.backend.xp.ones(root.shape, dtype=gradient_dtype(root.dtype.numpy))
        return wrap(data, root.backend) if create_graph else data
    if gradient.shape != root.shape:
        raise ValueError(
            f"backward: expected a gradient of the output's shape {root.shape}, got "
            f"{gradient.shape}"
        )
    dtype = as_dtype(gradient_dtype(root.dtype.numpy))
    if gradient.dtype is not dtype:
        gradient = gradient.astype(dtype)
    return gradient if create_graph else gradient.data


def _run(
    roots: Sequence[tuple[ExTensor, Gradient]],
    targets: Sequence[ExTensor] | None,
    retain: bool,
    create_graph: bool,
    final: Callable[[ExTensor, Gradient], None] | None = None,
) -> dict[int, tuple[ExTensor, Gradient]]:
    """Gradients by id of the tensor: of all leaves, or of ``targets`` alone.

    ``final`` gets a leaf's gradient as soon as nothing is added to it any more; the result has the
    others.
    """
    walk = _Walk(roots, targets, create_graph)
    waiting = {} if final is None else _uses_of_leaves(root.node for root, _ in roots)
    before = MODE.enabled
    MODE.enabled = create_graph
    try:
        with np.errstate(all="ignore"):
            for root, seed in roots:
                edge = root.node or root
                if walk.needed is None or edge in walk.needed:
                    walk.deliver(edge, seed)
            while walk.heap:
                node = heapq.heappop(walk.heap)[1]
                walk.visit(node)
                if final is not None:
                    for leaf in _completed(node, waiting):
                        if id(leaf) in walk.grads:
                            final(*walk.grads.pop(id(leaf)))
                if not retain:
                    node.release()
    finally:
        MODE.enabled = before
    return walk.grads


class _Walk:
    """The gradients of one backward pass: those that wait for their node, and those to return."""

    __slots__ = ("create_graph", "fresh", "grads", "heap", "inner", "needed", "pending")

    def __init__(
        self,
        roots: Sequence[tuple[ExTensor, Gradient]],
        targets: Sequence[ExTensor] | None,
        create_graph: bool,
    ) -> None:
        self.create_graph = create_graph
        self.grads: dict[int, tuple[ExTensor, Gradient]] = {}
        self.pending: dict[Node, Gradient] = {}
        self.heap: list[tuple[int, Node]] = []
        self.fresh: set[Node] = set()  # whose pending gradient nobody else holds
        self.needed: set[Edge] | None = None  # all
        self.inner: dict[Node, list[ExTensor]] = {}  # targets that are no leaves
        if targets is not None:
            self.needed = _leading_to([root.node or root for root, _ in roots], targets)
            for tensor in targets:
                if tensor.node is not None:
                    self.inner.setdefault(tensor.node, []).append(tensor)

    def deliver(self, edge: Edge | None, g: Gradient, fresh: bool = False) -> None:
        """Add to what a node or a leaf has got; ``fresh``: nobody else holds ``g``."""
        if isinstance(edge, Node):
            pending = self.pending
            if edge in pending:
                old = pending[edge]
                pending[edge] = old + g if self.create_graph else edge.backend.add(old, g)
                if fresh:
                    self.fresh.discard(edge)
            else:
                pending[edge] = g
                heapq.heappush(self.heap, (-edge.seq, edge))
                if fresh:
                    self.fresh.add(edge)
        elif isinstance(edge, ExTensor):
            grads = self.grads
            if id(edge) in grads:
                old = grads[id(edge)][1]
                g = old + g if self.create_graph else _sum(edge.backend, old, g)
            grads[id(edge)] = (edge, g)

    def visit(self, node: Node) -> None:
        """Hand on the gradient of a node, which nothing is added to any more."""
        pending, needed = self.pending, self.needed
        g = pending.pop(node)
        own = node in self.fresh
        if own:
            self.fresh.discard(node)
        if node in self.inner:
            own = False
            self.grads |= {id(tensor): (tensor, g) for tensor in self.inner[node]}
        node.check()
        edges = node.edges
        assert edges is not None
        if needed is None:
            needs = [e is not None for e in edges]
        else:
            needs = [e is not None and e in needed for e in edges]
        if True not in needs:
            return
        first = edges[0]
        addend = _addend(node, pending) if needs[0] and not self.create_graph else None
        rows = needed is None and isinstance(first, ExTensor)
        parts = node_gradients(node, g, needs, self.create_graph, addend=addend, own=own, rows=rows)
        if addend is not None and isinstance(first, Node):
            pending[first], parts[0] = parts[0], None  # already the sum
        fresh = node.primitive.new_gradients
        for i, part in enumerate(parts):
            if part is not None:
                self.deliver(edges[i], part, fresh)


def _completed(node: Node, waiting: dict[int, int]) -> Iterator[ExTensor]:
    """Leaves whose last use the node was; ``waiting`` counts the others."""
    for leaf in node.edges or ():
        if isinstance(leaf, ExTensor):
            waiting[id(leaf)] -= 1
            if not waiting[id(leaf)]:
                yield leaf


def _addend(node: Node, pending: dict[Node, Gradient]) -> Gradient | None:
    """The pending gradient of a node's first input, if the node's kernel can add to it."""
    assert node.edges is not None
    edge = node.edges[0]
    if node.primitive.name not in node.backend.accumulating_vjps or node.compute is not None:
        return None
    addend = pending.get(edge) if isinstance(edge, Node) else None
    same = addend is not None and addend.dtype == node.arrays[0].dtype == np.float32
    return addend if same else None


def _uses_of_leaves(roots: Iterable[Node | None]) -> dict[int, int]:
    """How often recorded operations take each leaf, by its id."""
    uses: dict[int, int] = {}
    seen: set[Node] = set()
    stack = [node for node in roots if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for source in node.edges or ():
            if isinstance(source, Node):
                stack.append(source)
            elif source is not None:
                uses[id(source)] = uses.get(id(source), 0) + 1
    return uses


def _leading_to(roots: Sequence[Edge], targets: Sequence[ExTensor]) -> set[Edge]:
    """The nodes and leaves on a path from a root to a target."""
    reaching: set[Edge] = {t.node or t for t in targets}
    nodes: set[Node] = set()
    stack = [edge for edge in roots if isinstance(edge, Node)]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(e for e in node.edges or () if isinstance(e, Node))
    for node in sorted(nodes, key=lambda n: n.seq):
        if any(edge in reaching for edge in node.edges or () if edge is not None):
            reaching.add(node)
    return reaching


def _sum(backend: Any, a: Gradient, b: Gradient) -> Gradient:
    """The sum of a leaf's two gradients."""
    if isinstance(a, RowGradient):
        a, b = b, a
    if not isinstance(b, RowGradient):
        return backend.add(a, b)
    return b.added_to(a.dense(backend) if isinstance(a, RowGradient) else a, backend)


def _accumulate(leaf: ExTensor, g: Gradient, create_graph: bool, owned: set[int]) -> None:
    if isinstance(g, RowGradient):
        g = g.dense(leaf.backend)
    if create_graph:
        leaf.grad = g if leaf.grad is None else leaf.grad + g
    elif leaf.grad is None:
        leaf.grad = wrap(_own(g, owned), leaf.backend)
    else:
        leaf.grad = wrap(leaf.grad.data + g, leaf.backend)


def _own(g: Any, owned: set[int]) -> Any:
    """``g``, or a copy if another array shares its memory, because a ``.grad`` may be written to.

    A base that is no array, such as a capsule, owns the memory of a kernel's result alone.
    """
    if isinstance(g.base, type(g)) or id(g) in owned:
        g = g.copy()
    owned.add(id(g))
    return g
