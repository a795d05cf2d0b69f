"""Operations that move data, under the names of the standard."""

from __future__ import annotations

import numpy as np

from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_index, tensors_only
from extensor.ops.indexing import gather
from extensor.ops.joining import concatenate
from extensor.ops.shape import broadcast_to, permute

__all__ = [
    "broadcast_arrays",
    "broadcast_shapes",
    "concat",
    "moveaxis",
    "permute_dims",
    "take_along_axis",
    "unstack",
]

concat = concatenate
permute_dims = permute


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)), 0, -1)),
        Sample((rng.normal(size=(2, 3, 4)), (0, 1), (-1, 0))),
    ],
    errors=(BadInput((np.zeros((2, 3)), (0, 1), 0), ValueError, "as many"),),
)
def moveaxis(
    x: ExTensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> ExTensor:
    """Move axes to other places; the others keep their order.

    Args:
        x: any shape.
        source: the axes to move.
        destination: their places in the result.

    Returns:
        A view of x.

    Raises:
        TypeError, ValueError: unless there are as many sources as destinations, each named once.

    Example:
        >>> et.moveaxis(et.zeros((2, 3, 4)), 0, -1).shape
        (3, 4, 2)
    """
    tensors_only("moveaxis", x)
    given = (source if isinstance(source, tuple) else (source,),
             destination if isinstance(destination, tuple) else (destination,))  # fmt: skip
    old, new = ([axis_index("moveaxis", a, x.ndim) for a in axes] for axes in given)
    if not len(old) == len(new) == len(set(old)) == len(set(new)):
        raise ValueError(
            f"moveaxis: expected as many sources as destinations, each once, got {source} and "
            f"{destination}"
        )
    order = [a for a in range(x.ndim) if a not in old]
    for place, axis in sorted(zip(new, old, strict=True)):
        order.insert(place, axis)
    return permute(x, order)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3)),), {"axis": 1})],
    errors=(BadInput((np.zeros((2, 3)),), ValueError, "expected -2..1", {"axis": 2}),),
)
def unstack(x: ExTensor, /, *, axis: int = 0) -> tuple[ExTensor, ...]:
    """The slices of x along an axis.

    Args:
        x: one axis or more.
        axis: the axis to remove.

    Returns:
        One tensor for each position along ``axis``, without that axis.

    Raises:
        TypeError, ValueError: for an axis that is no int or out of range.

    Example:
        >>> [row.tolist() for row in et.unstack(et.ExTensor([[1, 2], [3, 4]]))]
        [[1, 2], [3, 4]]
    """
    tensors_only("unstack", x)
    before = (slice(None),) * axis_index("unstack", axis, x.ndim)
    return tuple(x[(*before, i)] for i in range(x.shape[len(before)]))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all of the given shapes broadcast to.

    Args:
        shapes: any number of shapes.

    Returns:
        The common shape; ``()`` for none.

    Raises:
        ValueError: if they do not broadcast.

    Example:
        >>> et.broadcast_shapes((3, 1), (4,))
        (3, 4)
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"broadcast_shapes: expected shapes that broadcast, got {', '.join(map(str, shapes))}"
        ) from None


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(3, 1)), rng.normal(size=(4,))))],
    errors=(BadInput((np.zeros(2), np.zeros(3)), ValueError, "shapes that broadcast"),),
)
def broadcast_arrays(*arrays: ExTensor) -> tuple[ExTensor, ...]:
    """Read-only views of tensors, repeated to their common shape.

    Args:
        arrays: any number of tensors.

    Returns:
        The views, in order.

    Raises:
        TypeError, ValueError: for shapes that do not broadcast.

    Example:
        >>> [x.shape for x in et.broadcast_arrays(et.zeros((3, 1)), et.zeros(4))]
        [(3, 4), (3, 4)]
    """
    tensors_only("broadcast_arrays", *arrays)
    shape = broadcast_shapes(*(x.shape for x in arrays))
    return tuple(broadcast_to(x, shape) for x in arrays)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 4, (1, 2)))),
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 3, (2, 4))), {"axis": 0}),
    ],
    errors=(BadInput((np.zeros((2, 3)), np.zeros(2, int)), ValueError, "as many axes"),),
)
def take_along_axis(x: ExTensor, indices: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """As `gather`, x and ``indices`` broadcasting against each other off ``axis``.

    Args:
        x: one axis or more.
        indices: integers, as many axes as x.
        axis: the axis the positions are on.

    Returns:
        The broadcast shape; along ``axis`` that of ``indices``.

    Raises:
        IndexError: for a position out of range.
        TypeError, ValueError: for indices of another dtype or number of axes, or a bad axis.

    Example:
        >>> x = et.ExTensor([[10, 20], [30, 40]])
        >>> et.take_along_axis(x, et.ExTensor([[1], [0]])).tolist()
        [[20], [30]]
    """
    tensors_only("take_along_axis", x, indices)
    if x.ndim != indices.ndim:
        raise ValueError(
            f"take_along_axis: expected indices of as many axes as {x.shape}, got {indices.shape}"
        )
    at = axis_index("take_along_axis", axis, x.ndim)

    def with_length(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (*shape[:at], n, *shape[at + 1 :])

    common = broadcast_shapes(with_length(x.shape, 1), with_length(indices.shape, 1))
    wide = broadcast_to(x, with_length(common, x.shape[at]))
    return gather(wide, broadcast_to(indices, with_length(common, indices.shape[at])), at)
