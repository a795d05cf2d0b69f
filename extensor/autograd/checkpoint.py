"""Activation checkpointing: keep a function's inputs alone, and run it again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from extensor.autograd.mode import MODE, enable_grad
from extensor.autograd.node import Node
from extensor.autograd.primitive import Primitive
from extensor.autograd.tape import gradients
from extensor.autograd.tensor import ExTensor, wrap
from extensor.quant.replay import RunLog

__all__ = ["checkpoint"]


class _Run:
    """A function that has run, its leaves, and what its random bits depend on."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[ExTensor]) -> None:
        self.function, self.log = function, RunLog()
        self.mode = MODE.storage, MODE.saves_again
        self.differentiable = [tensor._requires_grad for tensor in inputs]
        self.leaves: list[ExTensor] = []

    def first(self, inputs: Sequence[ExTensor]) -> ExTensor:
        """Run, and find the leaves that gradients go to."""
        own = self._detached([tensor.data for tensor in inputs], inputs[0].backend)
        with self.log.recording():
            out = self.function(*own)
        if not isinstance(out, ExTensor):
            raise TypeError(
                f"checkpoint: expected a function that gives one tensor, got {type(out).__name__}; "
                "checkpoint a part that does, or join its results with et.concatenate"
            )
        self.leaves = [leaf for leaf in _leaves(out) if all(leaf is not one for one in own)]
        return out

    def again(
        self, backend: Any, g: Any, out: Any, inputs: Sequence[Any], needs: Sequence[bool]
    ) -> list[Any]:
        """The gradients, of the function run again."""
        own = self._detached(inputs[: len(self.differentiable)], backend)
        before = MODE.storage, MODE.saves_again
        MODE.storage, MODE.saves_again = self.mode
        try:
            with enable_grad(), self.log.repeating():
                result = self.function(*own)
        finally:
            MODE.storage, MODE.saves_again = before
        tensors = [*own, *self.leaves]
        wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        found = iter(gradients([(result, wrap(g, backend))], wanted))
        made = [next(found) if need else None for need in needs]
        return [None if one is None else one.data for one in made]

    def _detached(self, arrays: Sequence[Any], backend: Any) -> list[ExTensor]:
        tensors = [wrap(array, backend) for array in arrays]
        for tensor, needed in zip(tensors, self.differentiable, strict=False):
            tensor._requires_grad = needed
        return tensors


def _again(backend: Any, g: Any, out: Any, inputs: Any, needs: Any, run: _Run) -> list[Any]:
    return run.again(backend, g, out, inputs, needs)


_CHECKPOINT = Primitive(
    "checkpoint",
    forward=lambda backend, *arrays, run: None,
    fused_vjp=_again,
    once="its operations are gone; call the function without et.checkpoint for second derivatives",
    reads="inputs",
    takes_blocked=True,
)


def _leaves(out: ExTensor) -> list[ExTensor]:
    """The leaves that an output was computed from."""
    found: dict[int, ExTensor] = {}
    seen: set[Node] = set()
    stack = [out.node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for edge in node.edges or ():
            if isinstance(edge, Node):
                stack.append(edge)
            elif isinstance(edge, ExTensor):
                found[id(edge)] = edge
    return list(found.values())


def checkpoint(function: Callable[..., ExTensor], *inputs: ExTensor) -> ExTensor:
    """Run ``function(*inputs)``, keep the inputs alone, and run it again in the backward pass.

    What its operations keep is let go when it returns, for the time of one more forward pass of it.
    The second run draws the same random bits: stochastic rounding, dropout, and running means that
    move once. It counts nothing in the telemetry. Gradients have the same bits as without it.

    Args:
        function: a module or function of tensors that gives one tensor. Parameters that it reads
            get their gradients.
        inputs: its tensors.

    Returns:
        What the function gives.

    Raises:
        TypeError: if it gives anything but one tensor, or an input is no tensor.
        RuntimeError: in the backward pass, if an input or parameter was written meanwhile.

    Source: Chen, Xu, Zhang, Guestrin, arXiv 1604.06174.

    Example:
        >>> layer = et.nn.Linear(4, 4, rng=0)
        >>> x = et.ones((2, 4), requires_grad=True)
        >>> et.checkpoint(lambda x: layer(x).exp(), x).sum().backward()
        >>> layer.weight.grad.shape
        (4, 4)
    """
    for tensor in inputs:
        if not isinstance(tensor, ExTensor):
            raise TypeError(
                f"checkpoint: expected tensors after the function, got {type(tensor).__name__}; "
                "bind other arguments: et.checkpoint(functools.partial(function, option=...), x)"
            )
    if not inputs or not MODE.enabled:
        return function(*inputs)
    run = _Run(function, inputs)
    out = run.first(inputs)
    if out.node is None:
        return out
    node = Node(_CHECKPOINT, {"run": run}, (*inputs, *run.leaves), out.data, None, [0])
    if MODE.observer is not None:
        MODE.observer.recorded(node)
    return wrap(out.data, out.backend, node)
