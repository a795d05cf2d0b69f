"""From the gradient of one node's output to the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.mode import MODE
from extensor.autograd.node import ArraySpec, Node, TensorState
from extensor.autograd.primitive import Primitive
from extensor.autograd.row_gradient import RowGradient
from extensor.autograd.storage import Stored, restore
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import LEVEL_HALF, as_dtype, bfloat16, dtype_of

__all__ = ["gradient_dtype", "node_gradients", "sum_to"]

Gradient = Any
"""A raw array, or an ExTensor under create_graph."""

_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = bfloat16.numpy


def node_gradients(
    node: Node,
    g: Gradient,
    needs: Sequence[bool],
    create_graph: bool,
    fused: bool = True,
    addend: Any = None,
    own: bool = False,
    rows: bool = False,
) -> list[Gradient | None]:
    """The gradients of a node's inputs, each of its input's shape and dtype.

    Args:
        node: the node, checked and not released.
        g: the output's gradient, a raw array; an ExTensor under ``create_graph``.
        needs: which inputs need a gradient.
        create_graph: whether ``g`` and the result are ExTensors, to be differentiated again.
        fused: whether ``fused_vjp`` may be used (tests compare it with the VJPs).
        addend: added to the first gradient, where the backend's kernel does that (``adding``).
        own: whether nobody else holds ``g``, so that the backend's kernel may write over it.
        rows: whether the first gradient may be a `RowGradient`.
    """
    primitive = node.primitive
    fused = primitive.fused_vjp is not None and (fused or bool(primitive.once)) and not create_graph
    restore(node, fused)
    parts: list[Gradient | None]
    if create_graph:
        parts = list((_differentiable_once if primitive.once else _recorded)(node, g, needs))
    elif fused:
        parts = _fused(node, g, needs, addend, own)
        if not rows and isinstance(first := parts[0], RowGradient):
            parts[0] = first.dense(node.backend)
    else:
        wrapped = _composite(node, wrap(g, node.backend), needs, graph=False)
        parts = [None if part is None else part.data for part in wrapped]
    for i in range(len(parts)):
        part = parts[i]
        if part is None:
            continue
        if not needs[i]:
            parts[i] = None
            continue
        like = node.arrays[i]
        if like is None:  # of the output's shape and dtype, as g is
            like = g.data if create_graph else g
        if part.shape != like.shape:
            part = parts[i] = _reduce(node.backend, part, like.shape, primitive)
        dtype = getattr(like, "dtype", None)
        if dtype is None:  # in blocks
            dtype = gradient_dtype(_BFLOAT16 if _is_leaf(node, i) else None)
        if isinstance(part, ExTensor):
            if part.dtype.numpy != dtype:
                parts[i] = part.astype(as_dtype(dtype))
        elif isinstance(part, np.generic):
            parts[i] = node.backend.xp.asarray(part, dtype=dtype)
        elif part.dtype != dtype:
            parts[i] = node.backend.cast(part, dtype)
    return parts


def _is_leaf(node: Node, i: int) -> bool:
    return node.edges is not None and isinstance(node.edges[i], ExTensor)


def gradient_dtype(dtype: Any) -> Any:
    """Gradients have their tensor's numpy dtype; those of blocked results (None) are float32."""
    return _FLOAT32 if dtype is None else dtype


def sum_to(backend: Any, g: Any, shape: tuple[int, ...]) -> Any:
    """Sum a raw array over the axes in which ``shape`` was broadcast to its shape."""
    lead = g.ndim - len(shape)
    axes = [i + lead for i, n in enumerate(shape) if n == 1 and g.shape[i + lead] != 1]
    if lead and not axes:
        return backend.leading_sum(g, lead).reshape(shape).astype(g.dtype, copy=False)
    wide = np.float32 if dtype_of(g).level == LEVEL_HALF else None
    total = g.sum(axis=(*range(lead), *axes), dtype=wide)
    return total.reshape(shape).astype(g.dtype, copy=False)


def _reduce(backend: Any, part: Gradient, shape: tuple[int, ...], primitive: Primitive) -> Gradient:
    if not primitive.broadcasts:
        raise RuntimeError(
            f"{primitive.name}: its VJP gave a gradient of shape {tuple(part.shape)} for an input "
            f"of shape {shape}; this is a mistake in the primitive's declaration"
        )
    if isinstance(part, ExTensor):
        return apply("sum_to", part, shape=shape)
    return sum_to(backend, part, shape)


def _fused(node: Node, g: Any, needs: Sequence[bool], addend: Any, own: bool) -> list[Any]:
    primitive = node.primitive
    inputs = node.arrays
    if not primitive.reads_inputs:
        inputs = [g if a is None else a for a in inputs]
    out = node.out
    if node.compute is not None:
        cast = node.backend.cast
        g = cast(g, node.compute)
        inputs = [
            cast(a, node.compute) if primitive.has_vjp(i) and hasattr(a, "astype") else a
            for i, a in enumerate(inputs)
        ]
        if hasattr(out, "astype"):
            out = cast(out, node.compute)
    if inputs and isinstance(inputs[0], Stored):
        inputs = [inputs[0].q, *inputs[1:]]
    params = node.params
    if primitive.saves:
        params = {**params, "saved": node.saved}
    if addend is not None:
        params = {**params, "addend": addend}
    if own and primitive.name in node.backend.overwriting_vjps:
        params = {**params, "overwrites": True}
    assert primitive.fused_vjp is not None
    return list(primitive.fused_vjp(node.backend, g, out, inputs, needs, **params))


def _composite(
    node: Node, g: ExTensor, needs: Sequence[bool], graph: bool
) -> list[ExTensor | None]:
    """The VJPs written in operations; with ``graph`` their inputs keep their place in the graph."""
    primitive, backend = node.primitive, node.backend
    arrays = _stand_ins(node, g.data)
    inputs = [
        _in_place_of(array, edge, backend) if graph else wrap(array, backend)
        for array, edge in zip(arrays, node.edges or (), strict=True)
    ]
    out = None
    if primitive.reads_output:
        out = wrap(node.out, backend, node if graph else None)
    params = node.params
    if primitive.saves:
        params = {**params, "saved": node.saved}
    parts: list[ExTensor | None] = []
    for i, need in enumerate(needs):
        if not need:
            parts.append(None)
        elif primitive.vjp_at is not None:
            parts.append(primitive.vjp_at(i, g, out, *inputs, **params))
        else:
            vjp = primitive.vjps[i]
            assert vjp is not None
            parts.append(vjp(g, out, *inputs, **params))
    return parts


def _recorded(node: Node, g: ExTensor, needs: Sequence[bool]) -> list[ExTensor | None]:
    return _composite(node, g, needs, graph=True)


def _in_place_of(array: Any, edge: Node | TensorState | None, backend: Any) -> ExTensor:
    """A tensor with an input's data and its place in the graph."""
    if edge is None or isinstance(edge, Node):
        return wrap(array, backend, edge)
    assert isinstance(edge, ExTensor)
    return edge


def _stand_ins(node: Node, g: Any) -> list[Any]:
    """The inputs; for one that was not kept NaN of its shape, which shows a rule that reads it."""
    xp = node.backend.xp
    stand_ins = []
    for spec in node.arrays:
        if not (spec is None or isinstance(spec, ArraySpec)):
            stand_ins.append(spec)
            continue
        shape, dtype = (g.shape, g.dtype) if spec is None else spec
        dtype = gradient_dtype(dtype)
        value = xp.full((), 0 if dtype.kind in "biu" else xp.nan, dtype=dtype)
        stand_ins.append(xp.broadcast_to(value, shape))
    return stand_ins


def _refuse(index: int, g: ExTensor, out: None, *inputs: ExTensor, name: str, why: str) -> None:
    raise RuntimeError(f"{name}: its gradient cannot be differentiated again: {why}")


_REFUSED_AGAIN = Primitive(
    "gradient", forward=lambda backend, g: g, vjp_at=_refuse, reads="nothing"
)


def _differentiable_once(node: Node, g: ExTensor, needs: Sequence[bool]) -> list[ExTensor | None]:
    """Gradients in the graph that refuse to be differentiated again."""
    results: list[ExTensor | None] = [None] * len(needs)
    if node.primitive.vjp_at is not None:
        results = _composite(node, g, needs, graph=True)
    before, MODE.enabled = MODE.enabled, False
    try:
        rest = [need and done is None for need, done in zip(needs, results, strict=True)]
        parts = node_gradients(node, g.data, rest, create_graph=False)
    finally:
        MODE.enabled = before
    for i, part in enumerate(parts):
        if part is None:
            continue
        params = {"name": node.primitive.name, "why": node.primitive.once}
        refusal = Node(_REFUSED_AGAIN, params, (g,), part, None, [0])
        assert refusal.edges is not None
        refusal.edges += node.edges or []
        refusal.arrays *= len(refusal.edges)
        results[i] = wrap(part, node.backend, refusal)
    return results
