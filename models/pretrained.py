"""Models from checkpoints: a folder or a file of any kind, read weight by weight.

The model is built without memory for its weights. Names and shapes are checked before the first
weight is read; each is then read, put in its place and let go, so that the peak is the model as it
is stored and one weight. Blocked weights stay as they are stored.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.dtypes import DTypeLike, as_dtype
from extensor.io import Archive, CheckpointError, open_archive
from extensor.io.stored import (
    as_hugging_face,
)
from extensor.nn import Buffer, Module, Parameter
from extensor.quant import QuantArray
from extensor.quant.pages import in_large_pages
from extensor.quant.reference import dequantize
from extensor.quant.views import slice_blocks, transpose

from .architectures import Architecture, architecture_of
from .registry import build
from .sizes import check_sizes
from .sources import LoadedFrom, Source, Stored, by_name, floats

__all__ = ["from_pretrained"]

Array = npt.NDArray[Any]

_LISTED = 8
_HEAD = "lm_head.weight"
_CLOCKS = "*.quant_clock"
"""What `extensor.torch` adds to the state of a model of torch's: when it draws random bits."""


def from_pretrained(
    path: str | os.PathLike[str], *, dtype: DTypeLike | None = "float32", device: str | None = None
) -> Module:
    """A model with the weights of a checkpoint, ready to run.

    Args:
        path: a folder with config.json and safetensors files (Hugging Face's), or a GGUF file.
            Layouts of blocked weights are those of `extensor.io.stored`.
        dtype: of dense float weights; None, as they are stored. Blocked weights stay blocked.
        device: ``"cpu"`` or ``"cuda"``; None is EXTENSOR_DEVICE, and the CPU without it.

    Returns:
        The model, in evaluation mode: ``model(tokens)`` takes integers (batch, length) and gives
        logits. ``model.loaded_from`` says where it came from.

    Raises:
        FileNotFoundError: if there is no checkpoint, or a shard is missing.
        CheckpointError: for a damaged file; an unknown architecture (the list is given); tensors
            that are missing, unexpected or of another shape than the configuration says; a head
            that is not the embedding although the configuration ties them. Nothing is half-loaded.

    >>> import models
    >>> models.from_pretrained("/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: /nowhere: no such file or folder
    """
    archive = as_hugging_face(open_archive(path))
    if archive.config is None:
        raise CheckpointError(
            f"{archive.path}: expected a config.json beside the weights; et.load(path) reads "
            "tensors without one"
        )
    try:
        row = architecture_of(archive.config)
        config = row.config_from_hf(archive.config)
        check_sizes(dataclasses.asdict(config), archive.infos.values())
        model = build(row.model, config, None)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{archive.path}: {error}") from None
    sources = row.sources(model)
    tied = getattr(config, "tied", False)
    names = _names_in_file(archive, row, sources, tied)
    wanted = None if dtype is None else as_dtype(dtype)
    places = _places(model)
    for at, value in _weights(archive, sources, names):
        parameter = isinstance(getattr(*places[at][0]), Parameter)
        if parameter and not isinstance(value, QuantArray) and value.dtype.kind not in "fV":
            name = names[sources[at].name]
            raise CheckpointError(f"{archive.path}: {name}: expected floats, got {value.dtype}")
        _place(places[at], value, wanted, device)
    if tied and _HEAD in archive.infos:
        path = next(path for path, held in places.items() if held is places[_HEAD])
        _check_tied(archive, names[sources[path].name])
    model.loaded_from = LoadedFrom(
        archive.path,
        dict(archive.config),
        archive.metadata,
        {name: info.kind for name, info in archive.infos.items()},
    )
    return model.eval()


def _names_in_file(
    archive: Archive, row: Architecture, sources: Mapping[str, Source], tied: bool
) -> dict[str, str]:
    """The file's name of each source's tensor; every difference is in one error."""
    names: dict[str, str] = {}
    problems: list[str] = []
    for source in sources.values():
        bare = source.name.removeprefix(row.prefix)
        found = next(
            (n for n in (source.name, bare, row.prefix + bare) if n in archive.infos), None
        )
        if found is None:
            problems.append(f"missing: {source.name}{_near(source.name, archive.infos)}")
            continue
        names[source.name] = found
        shape = archive.infos[found].shape
        if shape is not None and shape != source.shape:
            problems.append(f"{found}: shape {shape}, but config.json says {source.shape}")
    taken = set(names.values())
    for name in archive.infos:
        if name in taken or (name == _HEAD and tied):  # its values are compared later
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*row.ignored, _CLOCKS)):
            continue
        problems.append(f"unexpected: {name}{_near(name, [s.name for s in sources.values()])}")
    if problems:
        rest = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        hint = ""
        if any(p.startswith(f"missing: {_HEAD}") for p in problems):
            hint = "; without a head of its own config.json needs tie_word_embeddings: true"
        raise CheckpointError(
            f"{archive.path}: does not hold a {row.model_type} model of its config.json: "
            f"{'; '.join(problems[:_LISTED])}{rest}{hint}. Nothing was loaded"
        )
    return names


def _near(name: str, others: Any) -> str:
    close = difflib.get_close_matches(name, list(others), 1, 0.8)
    return f" (near: {close[0]})" if close else ""


def _weights(
    archive: Archive, sources: Mapping[str, Source], names: Mapping[str, str]
) -> Iterator[tuple[str, Stored]]:
    """Each weight's path and value; a tensor that several share is read once."""
    for name, members in by_name(sources).items():
        value = archive.read(names[name])
        for at, source in members:
            if tuple(value.shape) != source.shape:
                raise CheckpointError(
                    f"{archive.path}: {name}: shape {tuple(value.shape)}, but config.json says "
                    f"{source.shape}"
                )
            yield at, _part(value, source)
        del value  # let go before the next is read


def _part(value: Stored, source: Source) -> Stored:
    """The part of a file's tensor that is one of the model's."""
    if not isinstance(value, QuantArray):
        part = source.read(value)
        return part if part is value else np.array(part)
    if source.part:
        key = (*source.part, *(slice(None),) * (len(value.shape) - len(source.part)))
        value = slice_blocks(value, key)
    if source.transposed:
        value = transpose(value, tuple(reversed(range(len(value.shape)))))
        parts: dict[str, Any] = {
            name: np.ascontiguousarray(part) for name, part in value.parts.items()
        }
        value = dataclasses.replace(value, **parts)
    return value


Place = tuple[Module, str]


def _places(model: Module) -> dict[str, list[Place]]:
    """The modules and attributes that hold each tensor, by its first path: several where tied."""
    holders: dict[int, list[Place]] = {}
    paths: dict[str, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, held in vars(module).items():
            if isinstance(held, (Parameter, Buffer)):
                places = holders.setdefault(id(held), [])
                places.append((module, name))
                paths[f"{prefix}.{name}" if prefix else name] = places
    return paths


def _place(places: list[Place], value: Stored, dtype: Any, device: str | None) -> None:
    """Put a weight in its place, and wherever the model shares it."""
    owner, name = places[0]
    old = getattr(owner, name)
    if isinstance(value, QuantArray) and (len(value.shape) != 2 or name != "weight"):
        value = dequantize(value)  # exact: norms and biases are multiplied as floats
    if isinstance(value, QuantArray):
        fresh: Any = Buffer(in_large_pages(value), device=device)
    else:
        kind = "float32" if value.dtype.kind not in "fV" else str(value.dtype)
        target = as_dtype(kind) if dtype is None else dtype
        keep = isinstance(old, Buffer) and value.dtype.kind in "iub"
        make = Parameter if isinstance(old, Parameter) else Buffer
        fresh = make(value, None if keep else target, device=device)
    for module, key in places:
        setattr(module, key, fresh)


def _check_tied(archive: Archive, embedding: str) -> None:
    """Refuse a head in the file that differs from the embedding that the model ties it to."""
    head, table = (floats(archive.read(name)) for name in (_HEAD, embedding))
    if head.shape != table.shape or not np.array_equal(head, table):
        raise CheckpointError(
            f"{archive.path}: config.json ties the head to the embedding, but {_HEAD} differs from "
            f"{embedding}; set tie_word_embeddings: false in config.json to use it"
        )
