"""Where a file of weights stores a model's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

__all__ = ["Source"]

Array = npt.NDArray[Any]
Part = tuple[int | slice, ...]


@dataclass(frozen=True)
class Source:
    """Where a file stores one of our tensors.

    Attributes:
        name: the tensor in the file.
        shape: of the whole tensor in the file.
        part: which part of it is ours; () for all.
        transposed: whether the part's axes are in reverse order.

    >>> import numpy as np
    >>> from extensor.models.sources import Source
    >>> source = Source("fused", shape=(2, 4), part=(0, slice(0, None, 2)))
    >>> source.read(np.arange(8).reshape(2, 4))
    array([0, 2])
    """

    name: str
    shape: tuple[int, ...]
    part: Part = ()
    transposed: bool = False

    def read(self, whole: Array) -> Array:
        """Our tensor, a view of the file's.

        Args:
            whole: the file's tensor.

        Returns:
            The part, transposed where the file's is.
        """
        part = whole[self.part] if self.part else whole
        return part.T if self.transposed else part

    def write(self, whole: Array, values: Array) -> None:
        """Write our tensor to its place in the file's.

        Args:
            whole: the file's tensor, of `shape`.
            values: ours.
        """
        self.read(whole)[...] = values
