"""Quantizing and dequantizing on any array module: what every kernel's bytes must be.

Every step works on integer bits, or is one float32 operation in a stated order, so that C++ and
CUDA kernels can give the same bytes. The generic backend runs these functions, which is what
training without the C++ core does; tests compare the kernels with them byte for byte.

They are judged in turn by what shares no code with them: the scalar oracle in ``tests/oracle``,
in exact integers, and ``tests/oracle/rounding.py``, integer rounding of whole arrays.
``ci/exhaustive.py`` compares every float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from extensor.quant import outlier
from extensor.quant.array import QuantArray, QuantStats, block_grid
from extensor.quant.block_codec import (
    BlockLayout,
    clip_mask,
    decode_array,
    fake_quantize_blocks,
    quantize_blocks,
)
from extensor.quant.hadamard import hadamard, inverse_hadamard
from extensor.quant.rebase import rebase_tiles
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = [
    "FLOATS", "RunningAmax", "check_previous", "clip_mask", "clipped_gradient", "dequantize",
    "fake_quantize", "masked", "quantize", "quantize_clipped", "rebase", "round_to",
]  # fmt: skip

Array = Any

FLOATS = ("float32", "bfloat16", "float16")  # dtypes that kernels read and write


def quantize(
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
    previous_amax: Array | None = None,
    xp: Any = np,
) -> tuple[QuantArray, QuantStats]:
    """Quantize a float array of one axis or more.

    Args:
        x: float array; float64 and 16-bit floats are cast to float32 first.
        spec: how; resolved here for x's number of axes.
        stream: names the random bits; given exactly when rounding is stochastic.
        previous_amax: float32 of the scales' shape, with ``statistic="running"``: the last block
            maxima (None on the first call).
        xp: the array module.

    Returns:
        The stored array, and counts over the coded values (a Hadamard transform's padding counts,
        block padding does not).

    Raises:
        TypeError: if x is not a float array.
        ValueError: if the spec or ``previous_amax`` does not fit x, if the stream is missing, or if
            there is one although nothing is rounded stochastically.

    >>> import numpy as np
    >>> from extensor.quant.reference import quantize
    >>> q, stats = quantize(np.float32([[1.0, -2.0, 5.1, 0.1]]), et.QuantSpec("mxfp4"))
    >>> q.scales, stats.count, stats.flushed
    (array([[127]], dtype=uint8), 4, 1)
    """
    x, spec = _checked(x, spec, stream, previous_amax, xp)
    if spec.row.outliers:
        return outlier.quantize(x, spec, stream, xp)
    if spec.rebased:
        exact = quantize_blocks(x, spec.replace(rebased=False), stream, previous_amax, xp)
        return rebase(*exact, xp)
    return quantize_blocks(x, spec, stream, previous_amax, xp)


def quantize_clipped(
    x: Array, spec: QuantSpec, stream: Stream | None = None, xp: Any = np
) -> tuple[QuantArray, QuantStats, Array]:
    """Quantize, and note which values lie within their block's largest one.

    Args:
        x: float array.
        spec: symmetric, without a minimum, rebasing or the outlier codec.
        stream: names the random bits of stochastic rounding.
        xp: the array module.

    Returns:
        What `quantize` gives, and the mask: uint8, one bit a value along the axis, the first in the
        lowest bit. Under a Hadamard transform it is of the transformed values.

    Raises:
        TypeError, ValueError: as `quantize`, and for a spec without such a mask.

    Source: arXiv 2505.14669, algorithm 1 (M in QuEST's trust estimate, 2502.05003, section 3.2).

    >>> import numpy as np
    >>> from extensor.quant.reference import quantize_clipped
    >>> spec = et.QuantSpec("mxfp4", scale_rule="floor")
    >>> quantize_clipped(np.float32([[1.0, -7.0, 5.0, 6.0]]), spec)[2]
    array([[13]], dtype=uint8)
    """
    if not spec.clips:
        raise ValueError(
            "clip mask: expected symmetric blocks without a minimum, rebasing or the outlier "
            f"codec, got {spec}"
        )
    x, spec = _checked(x, spec, stream, None, xp)
    q, stats = quantize_blocks(x, spec, stream, None, xp)
    with np.errstate(invalid="ignore", over="ignore"):
        return q, stats, clip_mask(x, q, xp)


def masked(g: Array, mask: Array, axis: int, xp: Any = np) -> Array:
    """A gradient where a clip mask lets it through, zero elsewhere.

    Args:
        g: float32.
        mask: uint8, one bit a value of g along the axis, as `quantize_clipped` gives it.
        axis: of the bits.
        xp: the array module.

    Returns:
        float32 of g's shape.

    >>> import numpy as np
    >>> from extensor.quant.reference import masked
    >>> masked(np.float32([1.0, 2.0, 3.0]), np.uint8([5]), 0)
    array([1., 0., 3.], dtype=float32)
    """
    along = xp.moveaxis(mask, axis, -1)
    bits = xp.unpackbits(xp.ascontiguousarray(along), bitorder="little").reshape(
        *along.shape[:-1], 8 * along.shape[-1]
    )[..., : g.shape[axis]]
    return xp.where(xp.moveaxis(bits, -1, axis) != 0, g, xp.float32(0))


def clipped_gradient(g: Array, mask: Array, spec: QuantSpec, xp: Any = np) -> Array:
    """The straight-through gradient of quantizing and decoding, where clipped values get none.

    With y = x D H the transformed values and m the mask, it is ((g D H) * m) H D: the gradient is
    taken to the transform's domain, masked there, and taken back.

    Args:
        g: float32 gradient of the decoded values, of the array's shape.
        mask: of `quantize_clipped`.
        spec: resolved.
        xp: the array module.

    Returns:
        float32 of g's shape.

    Source: arXiv 2505.14669, algorithm 1; 2502.05003, section 3.2.

    >>> import numpy as np
    >>> from extensor.quant.reference import clipped_gradient
    >>> spec = et.QuantSpec("mxfp4").resolve(2)
    >>> clipped_gradient(np.float32([[1.0, 2.0]]), np.uint8([[2]]), spec)
    array([[0., 2.]], dtype=float32)
    """
    if spec.transform is None:
        return masked(g, mask, spec.axis, xp)
    rotated = masked(
        hadamard(xp.moveaxis(g, spec.axis, -1), spec.transform, xp),
        xp.moveaxis(mask, spec.axis, -1),
        -1,
        xp,
    )
    back = inverse_hadamard(rotated, spec.transform, g.shape[spec.axis], xp)
    return xp.ascontiguousarray(xp.moveaxis(back, -1, spec.axis))


def _checked(
    x: Array, spec: QuantSpec, stream: Stream | None, previous_amax: Array | None, xp: Any
) -> tuple[Array, QuantSpec]:
    """The array in float32 and the resolved spec; see `quantize` for what is refused."""
    spec = spec.resolve(x.ndim)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"quantize: expected a float array, got {x.dtype}; convert it first")
    if not spec.accepts_stream(stream):
        problem = "needs a stream (a seed)" if stream is None else "takes no stream"
        raise ValueError(f"rounding={spec.rounding!r} {problem}")
    if previous_amax is not None:
        check_previous(previous_amax, spec, tuple(x.shape), xp)
    with np.errstate(
        over="ignore"
    ):  # float64 beyond float32 becomes Inf, and follows the rule for Inf
        return xp.asarray(x, dtype=xp.float32), spec


def rebase(q: QuantArray, stats: QuantStats, xp: Any = np) -> tuple[QuantArray, QuantStats]:
    """What a spec with ``rebased`` gives, from what the same spec gives without it.

    Args:
        q: MXFP8, not rebased.
        stats: the counts of quantizing it.
        xp: the array module.

    Returns:
        The rebased array, and the counts with the values that rebasing changed.

    >>> import numpy as np
    >>> from extensor.quant.reference import quantize, rebase
    >>> q, stats = rebase(*quantize(np.ones((128, 128), np.float32), et.QuantSpec("mxfp8_e4m3")))
    >>> q.spec.rebased, stats.rebase_changed
    (True, 0)
    """
    q, changed, flushed = rebase_tiles(q, xp)
    return q, dataclasses.replace(
        stats, flushed=stats.flushed + int(flushed), rebase_changed=int(changed)
    )


def check_previous(previous_amax: Array, spec: QuantSpec, shape: tuple[int, ...], xp: Any) -> None:
    """Check that the maxima of the last step fit a resolved spec.

    Args:
        previous_amax: float32 of the scales' shape.
        spec: resolved, with ``statistic="running"``.
        shape: of the arrays that are quantized.
        xp: the array module.

    Raises:
        ValueError: for another statistic, shape or dtype, or maxima that are negative or not
            finite.
    """
    if spec.statistic != "running":
        raise ValueError(f"previous_amax: only with statistic='running', not {spec.statistic!r}")
    grid = block_grid(spec, shape)
    if tuple(previous_amax.shape) != grid or previous_amax.dtype != xp.float32:
        raise ValueError(
            f"previous_amax: expected float32 of the scales' shape {grid}, "
            f"got {previous_amax.dtype} of shape {tuple(previous_amax.shape)}"
        )
    if not bool((xp.isfinite(previous_amax) & (previous_amax >= 0)).all()):
        raise ValueError(
            "previous_amax: expected finite magnitudes, got NaN, Inf or a negative one; "
            "keep the maxima of the last finite step"
        )


def dequantize(q: QuantArray, xp: Any = np) -> Array:
    """Decode a stored array; a Hadamard transform is undone.

    Args:
        q: the stored array.
        xp: the array module.

    Returns:
        float32 of ``q.shape``.

    >>> import numpy as np
    >>> from extensor.quant.reference import dequantize, quantize
    >>> q, _ = quantize(np.float32([[1.0, -2.0, 5.1, 0.1]]), et.QuantSpec("mxfp4"))
    >>> dequantize(q)
    array([[ 1., -2.,  6.,  0.]], dtype=float32)
    """
    if q.spec.row.outliers:
        return outlier.dequantize(q, xp)
    if not math.prod(q.shape):  # no blocks, although there may be a static scale
        return xp.zeros(q.shape, np.float32)
    values = decode_array(q, xp)
    if q.spec.transform:
        values = inverse_hadamard(values, q.spec.transform, q.shape[q.spec.axis], xp)
    return xp.ascontiguousarray(xp.moveaxis(values, -1, q.spec.axis))


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 values to another dtype of `FLOATS`, to nearest even.

    Args:
        values: float32.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.

    Returns:
        The same shape; ``values`` itself for float32.

    Raises:
        ValueError: for another dtype.

    >>> import numpy as np
    >>> from extensor.quant.reference import round_to
    >>> float(round_to(np.float32([1.001]), "bfloat16")[0])
    1.0
    """
    if dtype not in FLOATS:
        raise ValueError(f"dequantize: expected one of {', '.join(FLOATS)}, got {dtype!r}")
    with np.errstate(over="ignore"):  # values beyond float16 become infinite
        return values if dtype == "float32" else values.astype(dtype)


def fake_quantize(
    x: Array, spec: QuantSpec, stream: Stream | None = None, xp: Any = np
) -> tuple[Array, QuantStats]:
    """The float32 values that a GEMM multiplies: quantized and decoded, a transform not undone.

    Args:
        x: float array.
        spec: how.
        stream: names the random bits of stochastic rounding.
        xp: the array module.

    Returns:
        float32 of x's shape (a transform pads the axis), and the counts.

    Raises:
        TypeError, ValueError: as `quantize`.

    >>> import numpy as np
    >>> from extensor.quant.reference import fake_quantize
    >>> fake_quantize(np.float32([[1.0, -2.0, 5.1, 0.1]]), et.QuantSpec("mxfp4"))[0]
    array([[ 1., -2.,  6.,  0.]], dtype=float32)
    """
    if spec.rebased or spec.row.outliers:
        q, stats = quantize(x, spec, stream, None, xp)
        return dequantize(q, xp), stats
    x, spec = _checked(x, spec, stream, None, xp)
    values, stats = fake_quantize_blocks(x, spec, stream, xp)
    return xp.ascontiguousarray(xp.moveaxis(values, -1, spec.axis)), stats


class RunningAmax:
    """Running block maxima of one tensor: value = max(amax, float32(decay) * previous value).

    A block with NaN or Inf leaves its maximum as it was (0 before the first finite one), so that
    the next steps are not NaN too. The tensor's shape must not change.

    Attributes:
        value: float32 of the scales' shape, None before the first call; store it in checkpoints.

    >>> import numpy as np
    >>> spec = et.QuantSpec("int8", tile="channel", statistic="running", decay=0.5).resolve(2)
    >>> amax = et.RunningAmax()
    >>> for value in (8.0, 1.0):
    ...     amax.update(np.full((1, 4), value, np.float32), spec)
    >>> amax.value.tolist()
    [[4.0]]
    """

    def __init__(self) -> None:
        self.value: Array | None = None

    def update(self, x: Array, spec: QuantSpec, xp: Any = np) -> None:
        """Update the maxima with those of an array.

        Args:
            x: a float array of the same shape as before.
            spec: resolved.
            xp: the array module.

        Raises:
            ValueError: if x has other blocks than the calls before.

        >>> import numpy as np
        >>> spec = et.QuantSpec("int8", tile="channel", statistic="running").resolve(2)
        >>> amax = et.RunningAmax()
        >>> amax.update(np.float32([[3.0, -4.0]]), spec)
        >>> amax.value.tolist()
        [[4.0]]
        """
        layout = BlockLayout(spec, tuple(x.shape), xp)
        if self.value is not None and self.value.shape != layout.grid:
            raise ValueError(
                f"running amax: expected a tensor with blocks {self.value.shape} as before, got "
                f"{layout.grid}; use one RunningAmax per tensor"
            )
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf
            x = xp.asarray(x, dtype=xp.float32)
        if spec.transform:
            x = xp.moveaxis(
                hadamard(xp.moveaxis(x, spec.axis, -1), spec.transform, xp), -1, spec.axis
            )
        magnitude = xp.abs(layout.split(x))
        amax = magnitude.max(axis=1) if x.size else xp.zeros(len(magnitude), dtype=xp.float32)
        before = xp.zeros_like(amax) if self.value is None else layout.split_scales(self.value)
        kept = xp.maximum(amax, xp.float32(spec.decay) * before)
        kept = xp.where(xp.isfinite(amax), kept, before)
        self.value = xp.ascontiguousarray(layout.join_scales(kept))
