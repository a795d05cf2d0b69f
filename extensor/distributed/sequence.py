"""Collectives with gradients, along the sequence: the axis of tokens, before the last one.

Where one of them copies values to all ranks, the gradient sums what ranks send back, and the other
way round: gather and reduce-scatter are each other's gradients, and so are cut and whole gather.
Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2 (g and its conjugate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.node import Node
from extensor.autograd.primitive import Primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.distributed.communicator import Array, Communicator

__all__ = ["cut_sequence", "gather_sequence", "reduce_scatter_sequence"]

Move = Callable[[Any, Array, Communicator], Array]


def _gather(backend: Any, x: Array, ranks: Communicator) -> Array:
    """All ranks' tokens, in the order of ranks; 16-bit floats travel as their bytes."""
    xp = backend.xp
    if ranks.size == 1:
        return x
    mine = xp.ascontiguousarray(xp.moveaxis(x, -2, 0))
    whole = xp.empty((ranks.size * mine.shape[0], *mine.shape[1:]), mine.dtype)
    ranks.all_gather(mine.view(np.uint8), whole.view(np.uint8)).wait()
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, -2))


def _reduce(backend: Any, x: Array, ranks: Communicator) -> Array:
    """This rank's tokens of the sum over ranks; 16-bit floats are summed in float32."""
    xp = backend.xp
    if ranks.size == 1:
        return x
    wide = x if x.dtype.itemsize >= 4 else backend.cast(x, np.dtype(np.float32))
    whole = xp.ascontiguousarray(xp.moveaxis(wide, -2, 0))
    mine = xp.empty((whole.shape[0] // ranks.size, *whole.shape[1:]), whole.dtype)
    ranks.reduce_scatter(whole, mine).wait()
    return backend.cast(xp.ascontiguousarray(xp.moveaxis(mine, 0, -2)), x.dtype)


def _cut(backend: Any, x: Array, ranks: Communicator) -> Array:
    """This rank's tokens of what all ranks have."""
    length = x.shape[-2] // ranks.size
    part = x[..., ranks.rank * length : (ranks.rank + 1) * length, :]
    return backend.xp.ascontiguousarray(part)


def _primitive(name: str, back: Move) -> Primitive:
    def vjp(
        backend: Any,
        g: Array,
        out: Array,
        inputs: Sequence[Array],
        needs: Sequence[bool],
        ranks: Communicator,
    ) -> list[Array | None]:
        return [back(backend, g, ranks) if needs[0] else None]

    return Primitive(
        name,
        forward=lambda backend, x, ranks: None,
        fused_vjp=vjp,
        once="a collective's gradient is one of first order",
        reads="nothing",
    )


_PRIMITIVES: dict[str, tuple[Move, Primitive]] = {
    "gather_sequence": (_gather, _primitive("gather_sequence", _reduce)),
    "gather_whole": (_gather, _primitive("gather_whole", _cut)),
    "reduce_scatter_sequence": (_reduce, _primitive("reduce_scatter_sequence", _gather)),
    "cut_sequence": (_cut, _primitive("cut_sequence", _gather)),
}
"""By name: what is done forward, and the primitive whose gradient undoes it."""


def _apply(name: str, x: ExTensor, ranks: Communicator) -> ExTensor:
    move, primitive = _PRIMITIVES[name]
    out = move(x.backend, x.data, ranks)
    if not (MODE.enabled and x.requires_grad):
        return wrap(out, x.backend)
    node = Node(primitive, {"ranks": ranks}, (x,), out, None, [0])
    return wrap(out, x.backend, node)


def gather_sequence(x: ExTensor, ranks: Communicator, *, partial: bool = True) -> ExTensor:
    """All tokens, from each rank's part of them.

    Args:
        x: (..., T / size, width), this rank's tokens.
        ranks: the communicator; all of its ranks call this together.
        partial: whether ranks go on with different work on the whole, so that their gradients are
            summed; False, if all do the same, so that each has the whole gradient.

    Returns:
        (..., T, width), the same on all ranks.

    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.sequence import gather_sequence
    >>> run_ranks(2, lambda ranks: gather_sequence(et.ones((3, 4, 8)), ranks).shape)
    [(3, 8, 8), (3, 8, 8)]
    """
    return _apply("gather_sequence" if partial else "gather_whole", x, ranks)


def reduce_scatter_sequence(x: ExTensor, ranks: Communicator) -> ExTensor:
    """This rank's tokens of the sum over ranks.

    Args:
        x: (..., T, width), this rank's summand. 16-bit floats are summed in float32.
        ranks: the communicator; all of its ranks call this together.

    Returns:
        (..., T / size, width).

    Raises:
        ValueError: if the ranks do not divide T.

    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.sequence import reduce_scatter_sequence
    >>> run_ranks(2, lambda ranks: reduce_scatter_sequence(et.ones((2, 1)), ranks).tolist())
    [[[2.0]], [[2.0]]]
    """
    _check_length("reduce_scatter_sequence", x, ranks)
    return _apply("reduce_scatter_sequence", x, ranks)


def cut_sequence(x: ExTensor, ranks: Communicator) -> ExTensor:
    """This rank's tokens of what all ranks have computed alike.

    Args:
        x: (..., T, width), the same on all ranks.
        ranks: the communicator; the gradient is gathered from all of its ranks.

    Returns:
        (..., T / size, width).

    Raises:
        ValueError: if the ranks do not divide T.

    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.sequence import cut_sequence
    >>> tokens = et.arange(4.0).reshape(4, 1)
    >>> run_ranks(2, lambda ranks: cut_sequence(tokens, ranks).tolist())
    [[[0.0], [1.0]], [[2.0], [3.0]]]
    """
    _check_length("cut_sequence", x, ranks)
    return _apply("cut_sequence", x, ranks)


def _check_length(name: str, x: ExTensor, ranks: Communicator) -> None:
    if x.ndim < 2 or x.shape[-2] % ranks.size:
        raise ValueError(
            f"{name}: expected (..., T, width) with T a multiple of the {ranks.size} ranks, got "
            f"{x.shape}"
        )
