"""Checkpoints of any kind as named weights that are read one at a time.

An archive is a folder of safetensors files (with an index or without), one such file, or a GGUF
file. Blocked weights are known by the parts that are stored; see `extensor.io.stored.rows`. Opening
reads headers only. Nothing outside the folder is opened, whatever an index names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.io.checkpoint import METADATA_KEY as OWN_KEY
from extensor.io.checkpoint import blocked_entries, decode_blocked
from extensor.io.gguf.container import GgufFile
from extensor.io.safetensors_format import (
    PACKED_DTYPES,
    CheckpointError,
    Entry,
    check_array_shape,
)
from extensor.io.stored.mapped import SafetensorsFile
from extensor.io.stored.rows import WEIGHT_LAYOUTS, WeightLayout, read_weight
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor.schema import SchemaError, printable, read_json

__all__ = ["Archive", "GgufSource", "Source", "TensorInfo", "open_archive"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

INDEX = ".safetensors.index.json"
_BARE = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}
_MODEL_FILES = ("model.safetensors", "pytorch_model.safetensors")
_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".weight_g_idx")


@dataclass(frozen=True)
class TensorInfo:
    """A weight of an archive, before it is read.

    Attributes:
        name: the weight's.
        shape: its shape; None where only reading tells it.
        kind: the stored dtype, GGUF type or layout.
        nbytes: in the file.
        parts: the stored tensors.
    """

    name: str
    shape: tuple[int, ...] | None
    kind: str
    nbytes: int
    parts: tuple[str, ...]


class _Index(TypedDict):
    """A model.safetensors.index.json."""

    weight_map: dict[str, str]


class Source(Protocol):
    """Reads weights by name."""

    def read(self, name: str) -> Stored:
        """One weight, fresh.

        Args:
            name: a key of the archive's ``infos``.
        """
        ...


@dataclass(frozen=True, eq=False)
class Archive:
    """An opened checkpoint.

    Attributes:
        path: the file or folder.
        kind: ``"safetensors"`` or ``"gguf"``.
        infos: the weights, by name.
        config: config.json's contents; None without.
        metadata: a GGUF file's values, or a safetensors file's strings.
        unused: stored tensors that belong to no weight, such as scales of activations.
        source: reads the weights.
        kinds: GGUF's number of the type of each of its metadata.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save({"w": et.ones((4, 64)).to_mxfp4()}, f"{folder}/w.safetensors")
    ...     archive = et.io.open_archive(folder)
    >>> archive.kind, list(archive.infos)
    ('safetensors', ['w'])
    """

    path: Path
    kind: str
    infos: dict[str, TensorInfo]
    config: dict[str, Any] | None
    metadata: dict[str, Any]
    unused: tuple[str, ...]
    source: Source = field(repr=False)
    kinds: dict[str, int] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> Stored:
        """Read one weight.

        Args:
            name: a key of `infos`.

        Returns:
            A fresh numpy array or QuantArray.

        Raises:
            KeyError: for an unknown name (near ones are given).
            CheckpointError: if its parts are inconsistent.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     et.save({"w": et.ones((4, 64)).to_mxfp4()}, f"{folder}/w.safetensors")
        ...     et.io.open_archive(f"{folder}/w.safetensors").read("w").shape
        (4, 64)
        """
        if name not in self.infos:
            raise KeyError(unknown_name(f"tensor of {self.path}", name, self.infos))
        return self.source.read(name)

    def __iter__(self) -> Iterator[tuple[str, Stored]]:
        return ((name, self.read(name)) for name in self.infos)


_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE = (
    "a pickle, which runs code when it is read; the way out, in Python: "
    "safetensors.torch.save_file(torch.load(PATH, weights_only=True), 'model.safetensors')"
)


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """Open a checkpoint of any kind; headers are read and checked, weights are not read.

    Args:
        path: a folder, a .safetensors file, a model.safetensors.index.json, or a .gguf file.

    Returns:
        The archive.

    Raises:
        FileNotFoundError: if there is nothing there, or an index names a file that is not there.
        CheckpointError: if a file is truncated or damaged, or an index names files elsewhere.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save({"w": et.ones((4, 64)).to_mxfp4()}, f"{folder}/w.safetensors")
    ...     et.io.open_archive(folder).infos["w"].kind
    'mxfp4'
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder{_download(path)}")
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.name.endswith(INDEX):
        return _open_safetensors(path.parent, indexed_shards(path))
    return _open_safetensors(path, {None: [path]})


def _download(path: Path) -> str:
    """The way out where a path looks like a model's name on a hub: nothing is downloaded here."""
    if path.suffix or path.is_absolute() or len(path.parts) > 2:
        return ""
    return f"; to download a model: hf download {path.as_posix()} --local-dir {path.name}"


def _open_folder(folder: Path) -> Archive:
    index = sorted(folder.glob(f"*{INDEX}"))
    if index:
        chosen = next((i for i in index if i.name == f"model{INDEX}"), index[0])
        return _open_safetensors(folder, indexed_shards(chosen))
    files = sorted(folder.glob("*.safetensors"))
    chosen_files = [f for f in files if f.name in _MODEL_FILES] or files
    if chosen_files:
        return _open_safetensors(folder, {None: chosen_files})
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) == 1:
        return _open_gguf(gguf[0])
    pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLES]
    if pickles and not gguf:
        raise CheckpointError(f"{folder / pickles[0]}: {_PICKLE}")
    held = ", ".join(file.name for file in gguf) or "none"
    raise FileNotFoundError(
        f"{folder}: expected .safetensors files or one .gguf file, found {held}"
    )


def _open_gguf(path: Path) -> Archive:
    file = GgufFile(path)
    infos = {
        name: TensorInfo(name, tensor.shape, f"GGUF {tensor.type_name}", tensor.nbytes, (name,))
        for name, tensor in file.tensors.items()
    }
    return Archive(path, "gguf", infos, None, file.metadata, (), GgufSource(file), file.kinds)


class GgufSource:
    """Weights of a GGUF file, by GGUF's names.

    Args:
        file: the file.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def read(self, name: str, index: int | None = None) -> Stored:
        """One weight, or one expert of a stack of them, with the tensor scale that lies beside it.

        Args:
            name: GGUF's.
            index: along the first axis; None for all.

        Returns:
            A fresh numpy array or QuantArray.

        Raises:
            CheckpointError: if its parts are inconsistent.
        """
        value = self.file.read(name, index)
        scale = name.removesuffix(".weight") + ".scale"
        if not isinstance(value, QuantArray) or value.tensor_scale is None:
            return value
        if scale in self.file.tensors:
            factor = np.asarray(self.file.read(scale), np.float32).reshape(-1)
            if index is not None and factor.size == self.file.tensors[name].shape[0]:
                factor = factor[index : index + 1]
            if factor.size != 1:
                raise CheckpointError(
                    f"{self.file.path}: {scale!r}: expected one tensor scale, got {factor.size}"
                )
            value = replace(value, tensor_scale=factor.reshape(()).copy())
        return value


def indexed_shards(index: Path) -> dict[str | None, list[Path]]:
    """The shards that an index names, with the names that it gives them."""
    pairs = sorted(read_json(index, _Index, CheckpointError)["weight_map"].items())
    shards: dict[str, Path] = {}
    for name, shard in pairs:
        if Path(shard).name != shard or shard in ("", ".", "..") or "\0" in shard:
            raise CheckpointError(
                f"{index}: {name!r}: expected the name of a file in its own folder, got {shard!r}"
            )
        shards[shard] = index.parent / shard
    for shard, place in shards.items():
        if not place.is_file():
            first = next(name for name, where in pairs if where == shard)
            raise FileNotFoundError(
                printable(f"{place}: no such file, but {index.name} names it for {first!r}")
            )
        if not place.resolve().is_relative_to(index.parent.resolve()) and not _in_hub(index, place):
            raise CheckpointError(
                f"{place}: a link out of the folder; copy the file into the folder to use it"
            )
    return {None: list(shards.values())} | {name: [shards[shard]] for name, shard in pairs}


def _in_hub(index: Path, place: Path) -> bool:
    """Whether both are links into one cache of the Hugging Face hub, whose folders are links."""
    blobs = place.resolve().parent
    return blobs.name == "blobs" and index.resolve().parent == blobs


def _open_safetensors(path: Path, shards: Mapping[str | None, list[Path]]) -> Archive:
    files = [SafetensorsFile(file) for file in shards[None]]
    where: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in where:
                raise CheckpointError(
                    f"{path}: {name!r} is in {where[name].path.name} and in {file.path.name}; "
                    "expected each tensor once"
                )
            where[name] = file
    for placed, places in shards.items():
        if placed is not None and (placed not in where or where[placed].path != places[0]):
            raise CheckpointError(
                f"{path}: the index places {placed!r} in {places[0].name}, which does not hold it"
            )
    config = _config(path if path.is_dir() else path.parent)
    source = _SafetensorsSource(path, where, config)
    metadata: dict[str, Any] = {}
    for file in files:
        metadata |= {k: v for k, v in file.metadata.items() if k != OWN_KEY}
    unused = tuple(sorted(source.unused))
    return Archive(path, "safetensors", source.infos, config, metadata, unused, source)


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    config: dict[str, Any] | None = None
    if path.is_file():
        config = read_json(path, dict[str, Any], CheckpointError)
    return config


class _SafetensorsSource:
    """Weights of safetensors files, each with the layout that its parts have."""

    def __init__(
        self, path: Path, where: dict[str, SafetensorsFile], config: dict[str, Any] | None
    ) -> None:
        self.path, self.where = path, where
        self.block = _block_of(config)
        self.infos: dict[str, TensorInfo] = {}
        self.layouts: dict[str, WeightLayout] = {}
        self.own: dict[str, Any] = {}
        self.unused: set[str] = set()
        left = dict.fromkeys(where)
        self._find_own(left)
        for layout in WEIGHT_LAYOUTS.values():
            self._find(layout, left)
        for name in left:
            if name.endswith(_ACTIVATIONS):
                self.unused.add(name)
                continue
            entry = self._entry(name)
            if entry.dtype in PACKED_DTYPES:
                raise CheckpointError(
                    f"{path}: {name!r} has dtype {entry.dtype} and no scales that a known layout "
                    f"would give it; known: {', '.join(WEIGHT_LAYOUTS)}"
                )
            self.infos[name] = TensorInfo(name, entry.shape, entry.dtype, entry.nbytes, (name,))
        order = {name: place for place, name in enumerate(where)}
        self.infos = dict(sorted(self.infos.items(), key=lambda item: order[item[1].parts[0]]))

    def _entry(self, name: str) -> Entry:
        return self.where[name].entries[name]

    def _find_own(self, left: dict[str, None]) -> None:
        """Weights that this project stored, which the files' metadata describe."""
        for file in dict.fromkeys(self.where.values()):
            for name, entry in blocked_entries(file.path, file.metadata).items():
                parts = tuple(f"{name}.{part}" for part in entry["parts"])
                missing = [part for part in parts if part not in file.entries]
                if not parts:
                    raise CheckpointError(f"{file.path}: {name!r} is blocked and has no parts")
                if missing:
                    raise CheckpointError(f"{file.path}: {name!r} lacks its parts {missing}")
                for part in parts:
                    left.pop(part, None)
                self.own[name] = entry
                nbytes = sum(file.entries[part].nbytes for part in parts)
                kind = str(entry["spec"].get("format"))
                self.infos[name] = TensorInfo(name, tuple(entry["shape"]), kind, nbytes, parts)

    def _find(self, layout: WeightLayout, left: dict[str, None]) -> None:
        """Take the tensors of weights in a layout out of ``left``."""
        for name in [n for n in left if n.endswith(layout.codes.suffix)]:
            stem = name.removesuffix(layout.codes.suffix)
            needed = {stem + part.suffix: part for part in layout.required}
            if not all(n in left and self._entry(n).dtype in p.dtypes for n, p in needed.items()):
                continue
            parts = [stem + part.suffix for part in layout.parts if stem + part.suffix in left]
            for part_name in parts:
                del left[part_name]
            weight = stem + layout.target
            if weight in self.infos:
                raise CheckpointError(f"{self.path}: {weight!r} is stored twice: {parts}")
            self.layouts[weight] = layout
            nbytes = sum(self._entry(n).nbytes for n in parts)
            shape = self._shape(layout, name, stem)
            self.infos[weight] = TensorInfo(weight, shape, layout.name, nbytes, tuple(parts))

    def _shape(self, layout: WeightLayout, codes: str, stem: str) -> tuple[int, ...] | None:
        entry = self._entry(codes)
        if layout.shape is not None:
            stored = stem + layout.shape.suffix
            shape = tuple(int(n) for n in self.where[stored].array(stored).reshape(-1)[:65])
            try:
                check_array_shape(stored, [max(n, 0) for n in shape])
            except SchemaError as error:
                raise CheckpointError(f"{self.path}: {error}") from None
            return shape
        if layout.packing == "blocks":
            if len(entry.shape) < 3 or entry.shape[-1] != 16:
                raise CheckpointError(
                    f"{self.path}: {codes!r}: expected blocks of 16 bytes, (..., rows, blocks, "
                    f"16), got shape {entry.shape}"
                )
            *lead, rows, groups, size = entry.shape
            return (*lead, 2 * groups * size, rows)
        if entry.dtype == "U8":
            return (*entry.shape[:-1], entry.shape[-1] * 8 // layout.spec.row.element.bits)
        return entry.shape

    def read(self, name: str) -> Stored:
        try:
            return self._read(name)
        finally:
            for part in self.infos[name].parts:
                self.where[part].let_go()

    def _read(self, name: str) -> Stored:
        info = self.infos[name]
        if name in self.own:
            file = self.where[info.parts[0]]
            parts = {part: np.array(file.array(part)) for part in info.parts}
            try:
                return decode_blocked(name, self.own[name], parts)
            except CheckpointError as error:
                raise CheckpointError(f"{file.path}: {error}") from None
        if name not in self.layouts:
            return self._read_plain(name)
        layout = self.layouts[name]
        stem = info.parts[0].removesuffix(layout.codes.suffix)
        arrays = {part.removeprefix(stem): self.where[part].array(part) for part in info.parts}
        try:
            return read_weight(layout, arrays, info.shape, self.block)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name!r}: {error}") from None

    def _read_plain(self, name: str) -> Stored:
        """A dense tensor; FP8 without scales as blocks under a scale of 1, which are its values."""
        entry, array = self._entry(name), np.array(self.where[name].array(name))
        if entry.dtype in _BARE and array.ndim:
            spec = QuantSpec(_BARE[entry.dtype], tile="tensor").resolve(array.ndim)
            one = np.ones((1,) * array.ndim, np.float32)
            return QuantArray(codes=array.view(np.uint8), scales=one, spec=spec, shape=array.shape)
        if entry.dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
            raise CheckpointError(f"{self.path}: {name!r}: expected BOOL bytes 0 or 1")
        return array


def _block_of(config: dict[str, Any] | None) -> tuple[int, int]:
    """The tile of FP8 blocks that config.json says; 128 x 128 where it says none."""
    quantization = _table(config, "quantization_config")
    size = quantization.get("weight_block_size")
    for group in _table(quantization, "config_groups").values():
        size = size or _table(group, "weights").get("block_structure")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return 128, 128


def _table(values: Any, key: str) -> dict[str, Any]:
    """A dictionary inside another; empty where either is none."""
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}
