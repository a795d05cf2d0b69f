"""GGUF models in Hugging Face's terms and back: tensors, and the order of the rows of q and k.

llama.cpp turns neighbouring elements of a head, Hugging Face the two halves of it. So for the
architecture `llama` its files hold the rows of the query and key projections in another order:
row (head, j, s) is Hugging Face's row (head, s, j), s being 0 or 1. Architectures whose rotary
embedding is of the other kind (qwen2, qwen3, gpt-oss) keep their rows.

Source: llama.cpp, convert_hf_to_gguf.py (`permute`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.io.safetensors_format import CheckpointError
from extensor.io.stored.archive import Archive, GgufSource, Source, TensorInfo
from extensor.io.stored.gguf_config import config_of, row_of
from extensor.io.stored.gguf_names import ROPE_FACTORS, Place, places
from extensor.quant.array import QuantArray
from extensor.quant.views import take, transpose
from extensor.schema import SchemaError

__all__ = ["as_hugging_face", "heads_of", "interleaved", "reordered", "transposed"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray


def heads_of(name: str, config: Mapping[str, Any]) -> int | None:
    """Heads whose rows llama.cpp reorders in this tensor of Hugging Face's; None for none."""
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    if ".self_attn.k_proj." in name:
        return int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return None


def reordered(value: Stored, heads: int, to_gguf: bool) -> Stored:
    """Rows of a query or key projection in the other order."""
    rows = value.shape[0]
    inner = (2, rows // heads // 2) if to_gguf else (rows // heads // 2, 2)
    index = np.arange(rows).reshape(heads, *inner).swapaxes(1, 2).reshape(-1)
    if isinstance(value, QuantArray):
        return take(value, index, 0)
    return np.ascontiguousarray(value[index])


def transposed(value: Stored) -> Stored:
    """The last two axes swapped; blocks move with them."""
    axes = (*range(len(value.shape) - 2), len(value.shape) - 1, len(value.shape) - 2)
    return transpose(value, axes) if isinstance(value, QuantArray) else value.transpose(axes)


def interleaved(one: Stored, two: Stored) -> Stored:
    """Rows of two stacks of experts in turns, along axis 1.

    Raises:
        ValueError: for stacks that are stored differently.
    """

    def in_turns(a: Array, b: Array) -> Array:
        return np.stack([a, b], axis=2).reshape(a.shape[0], -1, *a.shape[2:])

    if one.shape == two.shape and _form(one) == _form(two):
        if isinstance(one, QuantArray) and isinstance(two, QuantArray):
            others = two.parts
            parts: dict[str, Any] = {
                name: in_turns(part, others[name])
                for name, part in one.parts.items()
                if name != "tensor_scale"
            }
            shape = (one.shape[0], 2 * one.shape[1], *one.shape[2:])
            return dataclasses.replace(one, shape=shape, **parts)
        return in_turns(np.asarray(one), np.asarray(two))
    raise ValueError("expected gate and up of one type and shape, whose rows are joined")


def _form(value: Stored) -> tuple[Any, ...]:
    """What two stacks must share to be joined."""
    if not isinstance(value, QuantArray):
        return (value.dtype,)
    scale = None if value.tensor_scale is None else float(value.tensor_scale)
    return value.spec, scale, sorted(value.parts)


class _Renamed(Source):
    """A GGUF file's tensors under Hugging Face's names, with its order of rows."""

    def __init__(
        self, archive: Archive, places: Mapping[str, Place], heads: Callable[[str], int | None]
    ) -> None:
        assert isinstance(archive.source, GgufSource)
        self.path, self.source = archive.path, archive.source
        self.places, self.heads = places, heads

    def read(self, name: str) -> Stored:
        place = self.places[name]
        value = self.source.read(place.names[0], place.expert)
        if len(place.names) == 2:
            try:
                value = interleaved(value, self.source.read(place.names[1], place.expert))
            except ValueError as error:
                raise CheckpointError(f"{self.path}: {name}: {error}") from None
        heads = self.heads(name)
        if heads is not None:
            if not value.shape or value.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{self.path}: {name}: expected rows of {heads} heads, got shape "
                    f"{tuple(value.shape)}"
                )
            value = reordered(value, heads, to_gguf=False)
        return transposed(value) if place.transposed else value


def as_hugging_face(archive: Archive) -> Archive:
    """An opened GGUF model with Hugging Face's names, configuration and order of rows.

    Args:
        archive: of a GGUF file; any other is given back.

    Returns:
        The archive; its metadata are the file's.

    Raises:
        CheckpointError: for an unknown architecture (the list is given), a missing key, or tensors
            that have no name in Hugging Face's terms.

    >>> from extensor.io.stored import GGUF_ARCHITECTURES, as_hugging_face
    >>> sorted(GGUF_ARCHITECTURES)
    ['gpt_oss', 'llama', 'mistral', 'mixtral', 'qwen2', 'qwen3', 'qwen3_moe']
    """
    if archive.kind != "gguf":
        return archive
    row = row_of(archive)
    shapes = {n: i.shape or () for n, i in archive.infos.items() if n != ROPE_FACTORS}
    named: dict[str, Place] = {}
    unknown: list[str] = []
    for name, place in places(row, shapes):
        if name:
            named[name] = place
        else:
            unknown += place.names
    if unknown:
        raise CheckpointError(
            f"{archive.path}: tensors without a place in a {row.model_type} model: "
            f"{', '.join(unknown[:8])}"
        )
    infos = {name: _info(archive, name, place) for name, place in named.items()}
    try:
        config = config_of(archive, row, tied="lm_head.weight" not in named)
    except SchemaError as error:
        raise CheckpointError(f"{archive.path}: {error}") from None

    def heads(name: str) -> int | None:
        return heads_of(name, config) if row.permuted else None

    source = _Renamed(archive, named, heads)
    return dataclasses.replace(archive, infos=infos, config=config, source=source)


def _info(archive: Archive, name: str, place: Place) -> TensorInfo:
    """What is known of one of Hugging Face's tensors before it is read."""
    missing = [n for n in place.names if n not in archive.infos]
    if missing:
        raise CheckpointError(f"{archive.path}: {name} lacks {', '.join(missing)}")
    infos = [archive.infos[n] for n in place.names]
    shape, nbytes = infos[0].shape or (), sum(info.nbytes for info in infos)
    if place.expert is not None:
        shape, nbytes = shape[1:], nbytes // max(shape[0], 1)
    if len(infos) == 2 and len(shape) > 1:
        shape = (shape[0], 2 * shape[1], *shape[2:])
    if place.transposed and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return dataclasses.replace(infos[0], name=name, shape=shape, nbytes=nbytes, parts=place.names)
