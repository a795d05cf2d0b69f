"""Architectures by Hugging Face's model type: how a folder's config and tensors become a model.

A row says how a config.json is read and written, which model is built, and where each of the
model's tensors stands in a file. Modules are named as the files' tensors are, so most rows map
nothing; what a file stores fused or transposed has a `Source` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from extensor.errors import unknown_name

from .bert import hugging_face as bert
from .gpt2 import hugging_face as gpt2
from .llama.hugging_face import RELATIVES, fused_experts
from .sources import Source

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]


def _nothing(config: Any) -> Iterator[tuple[str, Source]]:
    return iter(())


@dataclass(frozen=True)
class Architecture:
    """One model type.

    Attributes:
        model_type: in config.json.
        model: the one of `extensor.models.names` that is built.
        config_from_hf: the configuration that a config.json's contents say. Keys that may change
            what the model computes and are not known are errors.
        config_to_hf: and back: what says how the model computes, nothing about tokens.
        mapping: of a configuration, the sources of tensors that files name or store otherwise.
        prefix: of tensor names; some files have it and some do not.
        ignored: patterns, as `fnmatch` has them, of tensors that files may hold and nothing reads.
    """

    model_type: str
    model: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]
    mapping: Callable[[Any], Iterator[tuple[str, Source]]] = _nothing
    prefix: str = ""
    ignored: tuple[str, ...] = ("*rotary_emb.inv_freq",)

    def sources(self, model: Any) -> dict[str, Source]:
        """Where each of a model's tensors stands in a file.

        Args:
            model: with its ``config``; one without memory for weights is enough.

        Returns:
            By the path of each parameter and buffer, in model order; tied ones once.
        """
        special = dict(self.mapping(model.config))
        found = {}
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[path] = special.pop(path, Source(path, tensor.shape))
        assert not special, f"{self.model_type}: no such tensors: {sorted(special)}"
        return found


_ROWS = (
    *(
        Architecture(
            row.model_type,
            "llama",
            row.config_from_hf,
            row.config_to_hf,
            fused_experts if row.model_type == "gpt_oss" else _nothing,
            prefix="model.",
        )
        for row in RELATIVES
    ),
    Architecture(
        "gpt2",
        "gpt2",
        gpt2.config_from_hf,
        gpt2.config_to_hf,
        gpt2.transposed,
        prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # of causality
    ),
    Architecture(
        "bert",
        "bert",
        bert.config_from_hf,
        bert.config_to_hf,
        prefix="bert.",
        ignored=("*position_ids", "cls.*", "classifier.*"),  # heads of other tasks
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.model_type: row for row in _ROWS})
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
        raise ValueError(unknown_name("model type", name, ARCHITECTURES))
    return ARCHITECTURES[name]
