"""Every way to sum gradients, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from extensor.distributed.communicator import Communicator
from extensor.distributed.reduction.base import GradientReduction
from extensor.distributed.reduction.exact import Exact
from extensor.distributed.reduction.float_sum import Bfloat16, Float32
from extensor.distributed.reduction.mxint import Mxint
from extensor.errors import unknown_name

__all__ = ["GRAD_COMM", "make_reduction"]


def _mxint(bits: int) -> Callable[..., GradientReduction]:
    def make(size: int, ranks: Communicator, **how: Any) -> GradientReduction:
        return Mxint(size, ranks, bits=bits, **how)

    return make


GRAD_COMM: Mapping[str, Callable[..., GradientReduction]] = MappingProxyType(
    {
        "float32": Float32,
        "bfloat16": Bfloat16,
        **{f"mxint{bits}": _mxint(bits) for bits in (8, 16)},
        "exact": Exact,
    }
)
"""Every way to sum gradients, by the name that ``--grad-comm`` takes."""


def make_reduction(name: str, size: int, ranks: Communicator, **how: Any) -> GradientReduction:
    """The reduction of one bucket.

    Args:
        name: a name in `GRAD_COMM`.
        size: values in the bucket, as `padded_size` gives them.
        ranks: the communicator.
        how: more for the class, as ``seed``, ``number``, ``device``, ``error_feedback``.

    Returns:
        The reduction.

    Raises:
        ValueError: for an unknown name or a size not in whole blocks for each rank.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import make_reduction
    >>> type(make_reduction("exact", 32, LocalCommunicator())).__name__
    'Exact'
    """
    if name not in GRAD_COMM:
        raise ValueError(unknown_name("way to sum gradients", name, GRAD_COMM))
    return GRAD_COMM[name](size, ranks, **how)
