"""Architectures by Hugging Face's model type: how a folder's config and tensors become a model.

A row says how a config.json is read and written, which module is built, and where each of the
module's tensors stands in a file. Modules are named as the files' tensors are, so most rows map
nothing; what a file stores fused or transposed has a `Source` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.nn import Module

from .llama.hugging_face import RELATIVES
from .llama.model import build as build_llama

__all__ = ["ARCHITECTURES", "Architecture", "Source", "architecture_of"]

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

    >>> from extensor.models.architectures import Source
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


@dataclass(frozen=True)
class Architecture:
    """One model type.

    Attributes:
        model_type: in config.json.
        config_from_hf: the configuration that a config.json's contents say. Keys that may change
            what the model computes and are not known are errors.
        config_to_hf: and back: what says how the model computes, nothing about tokens.
        build: a model from a configuration and a random generator; with None instead of one,
            without memory for weights, which a loader fills.
        mapping: of a configuration, the sources of tensors that files name or store otherwise.
        prefix: of tensor names; some files have it and some do not.
        ignored: ends of names of tensors that files may hold and nothing reads.
    """

    model_type: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]
    build: Callable[[Any, np.random.Generator | None], Module]
    mapping: Callable[[Any], Iterator[tuple[str, Source]]] = lambda config: iter(())
    prefix: str = ""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def sources(self, config: Any) -> dict[str, Source]:
        """Where each of the model's tensors stands in a file.

        Args:
            config: the configuration.

        Returns:
            By the path of each parameter and buffer, in model order; tied ones once.
        """
        special = dict(self.mapping(config))
        model = self.build(config, None)
        found = {}
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[path] = special.pop(path, Source(path, tensor.shape))
        assert not special, f"{self.model_type}: no such tensors: {sorted(special)}"
        return found


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        row.model_type: Architecture(
            row.model_type, row.config_from_hf, row.config_to_hf, build_llama, prefix="model."
        )
        for row in RELATIVES
        if not row.experts
    }
)
"""The model types that can be built, by name."""


def architecture_of(values: Mapping[str, Any]) -> Architecture:
    """The row of a config.json.

    Args:
        values: the file's contents.

    Returns:
        The row of its ``model_type``.

    Raises:
        ValueError: for an unknown model type (the list is given), or none.

    >>> from extensor.models.architectures import architecture_of
    >>> architecture_of({"model_type": "llama"}).model_type
    'llama'
    """
    name = values.get("model_type")
    if not isinstance(name, str):
        raise ValueError(
            "config.json: expected a model_type, got none; known: " + ", ".join(ARCHITECTURES)
        )
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{unknown_name('model type', name, ARCHITECTURES)}; known: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
