"""Checkpoints: named tensors, dense or blocked, in one safetensors file, written atomically.

A blocked tensor is stored as its parts, `<name>.codes`, `<name>.scales` and so on, which any
safetensors reader can read. Its spec and logical shape are JSON in the file's metadata. The file
gets its name only when every byte is on the disk: a full disk, a crash or a signal leaves an older
checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from extensor.errors import layout_error
from extensor.io.atomic import replacing
from extensor.io.safetensors_format import (
    CheckpointError,
    check_array_shape,
    read,
    write,
)
from extensor.quant.array import QuantArray, block_grid, packed_length, super_grid
from extensor.quant.spec import QuantSpec
from extensor.schema import SchemaError, check, parse_json

__all__ = ["RUN_PARTS", "Checkpoint", "load_checkpoint", "save_checkpoint"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

RUN_PARTS = ("model", "optimizer", "residual")
"""First words of the names in a training run's checkpoint: the weights; then what resuming needs
besides, the optimizer's state and what sums of gradients left over."""
METADATA_KEY = "extensor"
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Attributes:
        tensors: numpy arrays and `QuantArray` objects by name.
        metadata: as given to `save_checkpoint`; the metadata strings of another program's file.

    >>> import numpy as np
    >>> et.io.Checkpoint({"w": np.zeros((2, 2), np.float32)}, {"step": 10}).metadata["step"]
    10
    """

    tensors: dict[str, Stored]
    metadata: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors and metadata to ``path``, all or nothing.

    Args:
        path: the file; its directory must exist. A file already there is replaced at the end.
        tensors: numpy arrays (bfloat16 included), `QuantArray`s, ExTensors, or arrays of another
            backend that `get()` copies to the host.
        metadata: JSON that reads back equal: dicts with string keys, lists, strings, finite
            numbers, booleans and None.

    Raises:
        TypeError, ValueError: for a tensor or metadata that cannot be stored; nothing is written.
        OSError: if the disk is full or the directory cannot be written. An older file under
            ``path`` is then still there, unchanged, and nothing else is left behind. (Where only
            the final sync of the directory fails, the new file is there, whole.)

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/model.safetensors"
    ...     et.io.save_checkpoint(path, {"w": et.ones((4, 64)).to_mxfp4()}, {"step": 10})
    ...     et.io.load_checkpoint(path).tensors["w"].nbytes
    136
    """
    arrays: dict[str, Array] = {}
    blocked: dict[str, Any] = {}
    for name, value in tensors.items():
        stored = _to_host(name, value)
        if isinstance(stored, QuantArray):
            blocked[name] = _described(stored)
            parts = {f"{name}.{part}": array for part, array in stored.parts.items()}
        else:
            parts = {name: stored}
        taken = sorted(arrays.keys() & parts.keys())
        if taken:
            raise ValueError(
                f"{name}: its parts would be stored under names already taken, {taken}; rename one"
            )
        arrays.update(parts)
    content = {"version": _VERSION, "blocked": blocked, "metadata": dict(metadata or {})}
    with replacing(Path(path)) as file:
        write(file, arrays, {METADATA_KEY: _to_json(content)})


def load_checkpoint(
    path: str | os.PathLike[str], like: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Read a checkpoint; all of it is checked first.

    Args:
        path: a file that `save_checkpoint`, or any other safetensors writer, made.
        like: tensors of the names, shapes and dtypes that are expected, such as a model's
            ``state_dict()``; anything else in the file is an error.

    Returns:
        Fresh arrays that share nothing with the file.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the file is truncated or inconsistent, or differs from ``like``.

    >>> import tempfile
    >>> model = et.nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/model.safetensors"
    ...     et.io.save_checkpoint(path, model.state_dict())
    ...     names = model.load_state_dict(et.io.load_checkpoint(path).tensors)
    """
    arrays, strings = read(path)
    try:
        checkpoint = _decode(arrays, strings)
        if like is not None:
            _check_like(checkpoint.tensors, like)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}. Nothing was loaded") from None
    return checkpoint


def _described(q: QuantArray) -> dict[str, Any]:
    """What the metadata say of a blocked tensor."""
    spec = dataclasses.asdict(q.spec)
    return {"spec": spec, "shape": list(q.shape), "parts": sorted(q.parts)}


def blocked_content(blocked: Mapping[str, QuantArray]) -> str:
    """The metadata of a file that holds these blocked tensors' parts, under `METADATA_KEY`."""
    described = {name: _described(q) for name, q in blocked.items()}
    return _to_json({"version": _VERSION, "blocked": described, "metadata": {}})


def _to_host(name: str, value: Any) -> Stored:
    """A numpy array or a QuantArray of numpy arrays."""
    if not isinstance(name, str):
        raise TypeError(f"tensor name: expected a str, got {name!r}")
    value = getattr(value, "data", value) if hasattr(value, "requires_grad") else value
    if isinstance(value, QuantArray):
        parts: dict[str, Any] = {
            part: _host_array(name, array) for part, array in value.parts.items()
        }
        return dataclasses.replace(value, **parts)
    return _host_array(name, value)


def _host_array(name: str, value: Any) -> Array:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if hasattr(value, "__cuda_array_interface__"):
        return np.asarray(value.get())
    raise TypeError(
        f"{name}: expected a numpy array, an ExTensor or a QuantArray, got {type(value).__name__}; "
        "plain values belong in metadata"
    )


def _to_json(content: dict[str, Any]) -> str:
    expected = (
        "metadata: expected JSON that reads back equal (lists, not tuples; string keys; finite "
    )
    try:
        text = json.dumps(content, allow_nan=False, sort_keys=True)
        same = json.loads(text)["metadata"] == content["metadata"]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{expected}numbers), got {error}") from None
    if not same:
        raise ValueError(f"{expected}numbers), got {content['metadata']!r:.200}")
    return text


class _Blocked(TypedDict):
    """What the metadata say of a blocked tensor."""

    spec: dict[str, Any]
    shape: list[int]
    parts: list[str]


class _Content(TypedDict):
    version: int
    blocked: dict[str, _Blocked]
    metadata: dict[str, Any]


def _decode(arrays: dict[str, Array], strings: dict[str, str]) -> Checkpoint:
    """Assemble blocked tensors from their parts."""
    if METADATA_KEY not in strings:
        return Checkpoint(dict(arrays), dict(strings))
    content = _content(strings)
    tensors: dict[str, Stored] = {
        name: decode_blocked(name, entry, arrays) for name, entry in content["blocked"].items()
    }
    clash = sorted(tensors.keys() & arrays.keys())
    if clash:
        raise CheckpointError(f"expected each tensor once, got {clash} both dense and blocked")
    return Checkpoint({**tensors, **arrays}, content["metadata"])


def _content(strings: dict[str, str]) -> _Content:
    """What the metadata say of blocked tensors, and the metadata that were given."""
    try:
        value = check(parse_json(strings[METADATA_KEY]), dict[str, Any])
        version = value.get("version")
        if type(version) is int and version != _VERSION:
            raise CheckpointError(
                f"expected version {_VERSION} of the checkpoint layout, got {version!r}; "
                "read it with the release that wrote it"
            )
        content: _Content = check(value, _Content)
    except SchemaError as error:
        raise CheckpointError(f"bad {METADATA_KEY} metadata: {error}") from None
    return content


def blocked_entries(path: Path, strings: dict[str, str]) -> dict[str, _Blocked]:
    """What a file's metadata say of its blocked tensors, by name; empty for another program's file.

    Raises:
        CheckpointError: if the metadata are damaged.
    """
    if METADATA_KEY not in strings:
        return {}
    try:
        return _content(strings)["blocked"]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}. Nothing was loaded") from None


def decode_blocked(name: str, entry: _Blocked, arrays: dict[str, Array]) -> QuantArray:
    """Remove one blocked tensor's parts from ``arrays``, and check them against its spec.

    Raises:
        CheckpointError: if they do not fit it; the text does not name the file.
    """
    shape = tuple(entry["shape"])
    try:
        spec = QuantSpec.from_dict(entry["spec"])
        fits = len(shape) > 0 and min(shape) >= 0 and spec == spec.resolve(len(shape))
        check_array_shape("shape", shape)
        if not fits:
            raise SchemaError(f"its spec does not fit the shape {shape}")
        expected = _part_layout(spec, shape)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"blocked tensor {name!r}: bad spec: {error}") from None
    missing = sorted(part for part in expected if f"{name}.{part}" not in arrays)
    if missing or sorted(expected) != entry["parts"]:
        raise CheckpointError(
            f"blocked tensor {name!r}: expected the parts {sorted(expected)}, got "
            f"{entry['parts']}, of which missing in the file: {missing}"
        )
    parts = {part: arrays.pop(f"{name}.{part}") for part in expected}
    for part, (dtype, part_shape) in expected.items():
        array = parts[part]
        fits = len(array.shape) == len(part_shape) and all(
            want in (None, got) for want, got in zip(part_shape, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise CheckpointError(
                f"blocked tensor {name!r}: expected {part} of {dtype} and shape {part_shape}, "
                f"got {array.dtype} and {array.shape}"
            )
    if spec.row.outliers:
        _check_outliers(name, parts, shape[spec.axis])
    return QuantArray(spec=spec, shape=shape, **parts)


def _check_outliers(name: str, parts: dict[str, Array], length: int) -> None:
    index, value = parts["outlier_index"], parts["outlier_value"]
    if index.shape != value.shape:
        raise CheckpointError(
            f"blocked tensor {name!r}: expected an outlier_value for each outlier_index, got "
            f"shapes {value.shape} and {index.shape}"
        )
    if index.size and not 0 <= index.min() <= index.max() < length:
        raise CheckpointError(
            f"blocked tensor {name!r}: expected outlier_index in 0..{length - 1}, got "
            f"{index.min()}..{index.max()}"
        )


def _part_layout(
    spec: QuantSpec, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Dtype and shape of each part of a blocked tensor; None is any length."""

    def along(length: int | None) -> tuple[int | None, ...]:
        return (*shape[: spec.axis], length, *shape[spec.axis + 1 :])

    # Scales of a numpy dtype are stored as numbers, the others as bytes.
    scale = "uint8" if spec.scale_name in ("e8m0", "ue4m3") else spec.scale_name
    layout: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "codes": ("uint8", along(packed_length(spec, shape))),
        "scales": (scale, block_grid(spec, shape)),
    }
    if spec.row.tensor_scale:
        layout["tensor_scale"] = ("float32", ())
    if not spec.symmetric:
        layout["zero_points"] = ("int8", block_grid(spec, shape))
    if spec.minimum:
        layout["minimums"] = (scale, block_grid(spec, shape))
    if spec.super_block is not None:
        layout["super_scales"] = ("float16", super_grid(spec, shape))
        if spec.minimum:
            layout["super_minimums"] = ("float16", super_grid(spec, shape))
    if spec.row.outliers:
        layout["row_means"] = ("float32", along(1))
        layout["outlier_index"] = ("int32", along(None))
        layout["outlier_value"] = ("float32", along(None))
    return layout


def _check_like(tensors: Mapping[str, Stored], like: Mapping[str, Any]) -> None:
    expected = {name: _to_host(name, value) for name, value in like.items()}
    message = layout_error("this checkpoint", expected, tensors)
    if message:
        raise CheckpointError(message)
