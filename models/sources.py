"""Where a file of weights stores a model's tensors, and which file a model came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.quant import QuantArray
from extensor.quant.reference import dequantize

__all__ = ["LoadedFrom", "Source", "Stored", "by_name", "floats"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray
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


@dataclass(frozen=True, eq=False)
class LoadedFrom:
    """Where a model's weights came from: ``model.loaded_from``.

    Attributes:
        path: the file or folder.
        config: config.json's contents, or what a GGUF file's metadata say in its terms.
        metadata: a GGUF file's metadata, its vocabulary too; a safetensors file's strings.
        kinds: how each weight is stored, by Hugging Face's name.
    """

    path: Path
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    kinds: Mapping[str, str]


def by_name(sources: Mapping[str, Source]) -> dict[str, list[tuple[str, Source]]]:
    """The model's tensors by the file's tensor that holds them.

    Args:
        sources: of the model's tensors, by their paths.

    Returns:
        By the name in the file, the paths and sources of all that it holds.
    """
    shared: dict[str, list[tuple[str, Source]]] = {}
    for at, source in sources.items():
        shared.setdefault(source.name, []).append((at, source))
    return shared


def floats(value: Stored) -> Array:
    """The float32 values of what a file stores.

    Args:
        value: dense or blocked.

    Returns:
        An array of the same shape.
    """
    return dequantize(value) if isinstance(value, QuantArray) else value.astype(np.float32)
