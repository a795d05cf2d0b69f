"""Converting a checkpoint from one program's layout to another's, with a certificate.

Each weight is read, put into the new form, written, read back from what was written, and compared
value by value with what it was. So the certificate speaks of the files, not of the intention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.io.atomic import replacing
from extensor.io.checkpoint import METADATA_KEY, blocked_content
from extensor.io.gguf.container import Typed
from extensor.io.gguf.types import GGUF_TYPES, GgufType, gguf_type_of
from extensor.io.safetensors_format import DTYPES
from extensor.io.stored.archive import Archive, open_archive
from extensor.io.stored.certificate import TensorCertificate, compare
from extensor.io.stored.gguf_models import (
    GgufArchitecture,
    as_hugging_face,
    gguf_metadata,
    gguf_name,
    heads_of,
    reordered,
)
from extensor.io.stored.quantization_config import hf_quant_config, quantization_config
from extensor.io.stored.requantize import requantize, smallest_float
from extensor.io.stored.rows import WeightLayout, read_weight, reciprocal_of, write_weight
from extensor.io.stored.targets import TARGETS, Target, takes_blocks
from extensor.io.stored.writer import SHARD_BYTES, GgufWriter, SafetensorsWriter, copy_files
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize
from extensor.quant.views import transpose
from extensor.schema import FileError

__all__ = [
    "Conversion", "LossyConversionError", "WriteOptions", "convert", "metadata_of",
    "write_checkpoint",
]  # fmt: skip

Array = npt.NDArray[Any]
Stored = Array | QuantArray

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "LICENSE", "LICENSE.txt",
)  # fmt: skip
"""Files beside the weights that go with them unchanged."""

CERTIFICATE = "certificate.json"
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 15, "Q5_K": 17}
_FILE_TYPES |= {"Q6_K": 18, "BF16": 32, "MXFP4": 38}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LossyConversionError(FileError, ValueError):
    """A conversion that would change values, refused; nothing was written.

    Attributes:
        certificates: of all weights.

    >>> issubclass(et.io.stored.LossyConversionError, ValueError)
    True
    """

    def __init__(self, certificates: list[TensorCertificate]) -> None:
        lossy = [c for c in certificates if not c.lossless]
        listed = "; ".join(
            f"{c.name}: {c.before} to {c.after}, SQNR {c.sqnr_db:.2f} dB" for c in lossy[:8]
        )
        rest = f"; and {len(lossy) - 8} more" if len(lossy) > 8 else ""
        super().__init__(
            f"only lossless: {len(lossy)} of {len(certificates)} weights would change: "
            f"{listed}{rest}. Nothing was written"
        )
        self.certificates = certificates


@dataclass
class Conversion:
    """What was written.

    Attributes:
        certificates: what became of each weight.
        files: the files.
        notes: what else a user should know.
        dropped: stored tensors that the new layout does not have, such as scales of activations.

    >>> et.io.stored.Conversion().certificates
    []
    """

    certificates: list[TensorCertificate] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dropped: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The certificate file's contents.

        >>> et.io.stored.Conversion().as_json()["lossless"]
        True
        """
        return {
            "lossless": all(c.lossless for c in self.certificates),
            "weights": [c.as_json() for c in self.certificates],
            "dropped": list(self.dropped),
            "notes": self.notes,
        }


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    layout: str,
    *,
    only_lossless: bool = False,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Conversion:
    """Write a checkpoint in another layout, with a certificate of every weight.

    Args:
        source: a folder, a safetensors file or a GGUF file.
        path: the folder to write, a .safetensors file, or for GGUF layouts a .gguf file. An older
            one is replaced at the end.
        layout: a name of `TARGETS`.
        only_lossless: refuse unless every value stays equal.
        shard_bytes: size at which safetensors files are cut.
        files: further files of a folder, by name, such as a tokenizer.json.
        metadata: further values of a GGUF file, such as a vocabulary.
        progress: called with each weight's name.

    Returns:
        What was written.

    Raises:
        FileNotFoundError, CheckpointError: as `open_archive`.
        LossyConversionError: with ``only_lossless``, if a value would change.
        ValueError: for an unknown layout, a path of the wrong kind, or what the layout cannot say.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save({"a.weight": et.randn(8, 64, seed=0).to_mxfp4()}, f"{folder}/m.safetensors")
    ...     done = et.io.stored.convert(f"{folder}/m.safetensors", f"{folder}/nv", "modelopt-nvfp4")
    >>> done.certificates[0].after, done.certificates[0].lossless
    ('nvfp4 1x16', True)
    """
    opened = open_archive(source)
    path = Path(path)
    if path.resolve() == opened.path.resolve():
        raise ValueError(f"{path}: expected another place than the source, which would be lost")
    archive = as_hugging_face(opened) if opened.metadata.get("general.architecture") else opened

    def weights() -> Iterator[tuple[str, Stored]]:
        for name in archive.infos:
            if progress is not None:
                progress(name)
            yield name, archive.read(name)

    folder = opened.path if opened.path.is_dir() else opened.path.parent
    return write_checkpoint(
        path,
        layout,
        weights(),
        config=archive.config,
        gguf=metadata_of(opened) | dict(metadata or {}),
        beside=folder if opened.kind == "safetensors" else None,
        options=WriteOptions(only_lossless, shard_bytes, dict(files or {}), archive.unused),
    )


@dataclass(frozen=True)
class WriteOptions:
    """What is asked for beside the layout.

    Attributes:
        only_lossless: refuse unless every value stays equal.
        shard_bytes: size at which safetensors files are cut.
        files: further files of a folder.
        dropped: stored tensors that the new checkpoint does not have.
        notes: what a user should know.

    >>> et.io.stored.WriteOptions().only_lossless
    False
    """

    only_lossless: bool = False
    shard_bytes: int = SHARD_BYTES
    files: dict[str, bytes] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def metadata_of(archive: Archive) -> dict[str, Any]:
    """A GGUF file's values with their types, but those that speak of the types of its weights.

    Args:
        archive: any; one of another kind has none.

    Returns:
        `Typed` values by key.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save({"w": et.ones((2, 2))}, f"{folder}/w.safetensors")
    ...     et.io.stored.metadata_of(et.io.open_archive(folder))
    {}
    """
    if archive.kind != "gguf":
        return {}
    left_out = ("general.file_type", "general.quantization_version", "general.alignment")
    return {
        key: Typed(archive.kinds[key], value)
        for key, value in archive.metadata.items()
        if key not in left_out
    }


def write_checkpoint(
    path: Path,
    layout: str,
    weights: Iterable[tuple[str, Stored]],
    *,
    config: Mapping[str, Any] | None = None,
    gguf: Mapping[str, Any] | None = None,
    beside: Path | None = None,
    options: WriteOptions | None = None,
) -> Conversion:
    """Write weights in a layout, one at a time.

    Args:
        path: as of `convert`.
        layout: a name of `TARGETS`.
        weights: names in Hugging Face's terms, and values.
        config: config.json's contents.
        gguf: further metadata of a GGUF file.
        beside: a folder whose tokenizer and other files are copied.
        options: what `convert` was asked for.

    Returns:
        What was written.

    Raises:
        LossyConversionError, ValueError: as `convert`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> weights = [("a.weight", et.randn(8, 64, seed=0).numpy())]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "m"
    ...     done = et.io.stored.write_checkpoint(path, "compressed-tensors-int4", weights)
    >>> [file.name for file in done.files]
    ['model.safetensors', 'certificate.json']
    """
    if layout not in TARGETS:
        raise ValueError(unknown_name("layout", layout, TARGETS))
    target, options = TARGETS[layout], options or WriteOptions()
    _check_path(path, target)
    done = Conversion(notes=list(options.notes), dropped=options.dropped)
    if target.container == "gguf":
        _write_gguf(path, target, weights, (config, dict(gguf or {})), options, done)
        place = path.with_name(f"{path.name}.{CERTIFICATE}")
    elif path.suffix == ".safetensors":
        with _filling(path.parent, path.name) as folder:
            _write_safetensors(folder, path.name, target, weights, options, done)
        done.files = [path]
        place = path.with_name(f"{path.name}.{CERTIFICATE}")
    else:
        with _filling(path, None) as folder:
            blocked, kept = _write_safetensors(folder, None, target, weights, options, done)
            _write_beside(folder, target, config, beside, options)
            if config is not None:
                _write_config(folder, target, dict(config), blocked, kept)
            done.files = [path / file.name for file in sorted(folder.iterdir())]
        place = path / CERTIFICATE
    with replacing(place) as file:
        file.write(json.dumps(done.as_json(), indent=1).encode())
    done.files.append(place)
    return done


def _check_path(path: Path, target: Target) -> None:
    if target.container == "gguf":
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: expected a name that ends in .gguf for {target.name}")
    elif path.suffix == ".gguf" or (path.is_file() and path.suffix != ".safetensors"):
        raise ValueError(f"{path}: expected a folder or a .safetensors file for {target.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such directory; create it first")


@contextlib.contextmanager
def _filling(target: Path, single: str | None) -> Iterator[Path]:
    """A temporary folder whose files move into ``target`` if the block ends without an error.

    Weights of an older checkpoint there go first, so that no file is left that does not belong.
    """
    made = not target.exists()
    target.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=target) as folder:
            yield Path(folder)
            if single is None:
                for pattern in ("*.safetensors", "*.safetensors.index.json"):
                    for old in target.glob(pattern):
                        old.unlink()
            for file in sorted(Path(folder).iterdir(), key=lambda f: f.name.endswith(".json")):
                file.replace(target / file.name)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise


# --- safetensors ---


def _write_safetensors(
    folder: Path,
    single: str | None,
    target: Target,
    weights: Iterable[tuple[str, Stored]],
    options: WriteOptions,
    done: Conversion,
) -> tuple[dict[str, Any], list[str]]:
    """Write the weights; specs of modules with blocked ones, and linear modules without."""
    blocked: dict[str, Any] = {}
    kept: list[str] = []
    own: dict[str, Any] = {}
    with contextlib.closing(SafetensorsWriter(folder, single, options.shard_bytes)) as writer:
        for name, value in weights:
            made = new_form(target, name, value)
            written, back = _stored(target, name, made)
            if isinstance(made, QuantArray):
                blocked[name.removesuffix(".weight")] = made.spec
                if target.as_stored:
                    own[name] = made
            elif len(value.shape) == 2 and name.endswith(".weight") and "embed" not in name:
                kept.append(name.removesuffix(".weight"))
            done.certificates.append(compare(name, value, back))
            for stored, (dtype, shape, content) in written.items():
                writer.add(stored, dtype, shape, content)
        _refuse_lossy(done, options)
        if own:
            writer.metadata[METADATA_KEY] = blocked_content(own)
        writer.finish()
    return blocked, kept


def _refuse_lossy(done: Conversion, options: WriteOptions) -> None:
    if options.only_lossless and not all(c.lossless for c in done.certificates):
        raise LossyConversionError(done.certificates)


def new_form(target: Target, name: str, value: Stored) -> Stored:
    """A weight in the form that a layout stores it in."""
    if target.as_stored:
        return value
    if target.dtype is not None:
        return _cast(value, target.dtype)
    blocks = takes_blocks(target, name, tuple(value.shape))
    if target.container == "gguf":
        return _gguf_form(target, value, blocks)
    layout = target.layout
    assert layout is not None
    if not blocks or (not isinstance(value, QuantArray) and value.dtype.kind in "iub"):
        return smallest_float(value)
    if isinstance(value, QuantArray) and _fits(layout, value):
        made = value
    else:
        spec = layout.spec.replace(axis=-2) if layout.packing == "blocks" else layout.spec
        made = requantize(value, spec)
    if layout.reciprocal and made.tensor_scale is not None:
        divisor, exact = reciprocal_of(np.float32(made.tensor_scale))
        if not exact:
            nearest = np.asarray(np.float32(1) / divisor, np.float32)
            made = dataclasses.replace(made, tensor_scale=nearest)
    return made


def _fits(layout: WeightLayout, q: QuantArray) -> bool:
    return layout.stores(_along_rows(layout, q).spec, len(q.shape))


def _along_rows(layout: WeightLayout, q: QuantArray) -> QuantArray:
    """The weight as the layout stores it: gpt-oss's is transposed."""
    ndim = len(q.shape)
    if layout.packing == "blocks" and ndim > 1 and q.spec.axis == ndim - 2:
        return transpose(q, (*range(ndim - 2), ndim - 1, ndim - 2))
    return q


def _cast(value: Stored, dtype: np.dtype[Any]) -> Array:
    values = dequantize(value) if isinstance(value, QuantArray) else value
    if values.dtype.kind in "iub":
        return values
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _stored(
    target: Target, name: str, value: Stored
) -> tuple[dict[str, tuple[str, tuple[int, ...], Array]], Stored]:
    """What goes into the file, by full names, and the weight read back from it."""
    if not isinstance(value, QuantArray):
        array = np.ascontiguousarray(value) if value.ndim else value
        return {name: (_NAMES[array.dtype], array.shape, array)}, value
    if target.as_stored:
        parts = {f"{name}.{part}": np.asarray(array) for part, array in value.parts.items()}
        return {n: (_NAMES[a.dtype], a.shape, a) for n, a in parts.items()}, value
    assert target.layout is not None
    layout = target.layout
    written = write_weight(layout, value)
    arrays = {suffix: array for suffix, (_, _, array) in written.items()}
    shape = tuple(_along_rows(layout, value).shape)
    back = read_weight(layout, arrays, shape)
    stem = name.removesuffix(layout.target) if layout.target else name
    return {stem + suffix: entry for suffix, entry in written.items()}, back


def _write_beside(
    folder: Path,
    target: Target,
    config: Mapping[str, Any] | None,
    beside: Path | None,
    options: WriteOptions,
) -> None:
    if beside is not None:
        copy_files(beside, folder, COPIED)
    for name, content in options.files.items():
        (folder / name).write_bytes(content)


def _write_config(
    folder: Path, target: Target, config: dict[str, Any], blocked: dict[str, Any], kept: list[str]
) -> None:
    config.pop("quantization_config", None)
    if target.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(target.dtype)
    if target.layout is not None and blocked:
        config["quantization_config"] = quantization_config(target.layout, blocked, kept)
        if target.layout.program == "modelopt":
            text = json.dumps(hf_quant_config(target.layout, kept), indent=2)
            (folder / "hf_quant_config.json").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


# --- GGUF ---


def _write_gguf(
    path: Path,
    target: Target,
    weights: Iterable[tuple[str, Stored]],
    said: tuple[Mapping[str, Any] | None, dict[str, Any]],
    options: WriteOptions,
    done: Conversion,
) -> None:
    config, given = said
    if config is None:
        raise ValueError("GGUF: expected a config.json beside the weights, whose model it stores")
    row, metadata = gguf_metadata(config)
    metadata |= given
    metadata.setdefault("tokenizer.ggml.model", "none")
    if target.gguf is not None and target.gguf.name in _FILE_TYPES:
        metadata["general.file_type"] = _FILE_TYPES[target.gguf.name]
    metadata["general.quantization_version"] = 2
    with contextlib.closing(GgufWriter(path, metadata)) as writer:
        for name, value in weights:
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                done.notes.append("lm_head.weight is the embedding's and not stored again")
                continue
            _add_gguf(writer, target, row, config, name, value, done)
        _refuse_lossy(done, options)
        done.files = writer.finish()


def _add_gguf(
    writer: GgufWriter,
    target: Target,
    row: GgufArchitecture,
    config: Mapping[str, Any],
    name: str,
    value: Stored,
    done: Conversion,
) -> None:
    theirs = gguf_name(name)
    if theirs is None:
        raise ValueError(f"GGUF: {name!r} has no name in a {row.name} file")
    made = new_form(target, name, value)
    heads = heads_of(name, config) if row.permuted else None
    moved = made if heads is None else reordered(made, heads, to_gguf=True)
    kind: GgufType | None = gguf_type_of(moved)
    if kind is None:
        raise ValueError(f"GGUF: no type stores {name!r}, {getattr(moved, 'dtype', 'blocked')}")
    content = kind.write(moved)
    back = kind.read(content, tuple(moved.shape))
    tensor_scale = moved.tensor_scale if isinstance(moved, QuantArray) else None
    if isinstance(back, QuantArray) and tensor_scale is not None:
        scale = np.asarray(tensor_scale, np.float32).reshape(1)
        back = dataclasses.replace(back, tensor_scale=scale.reshape(()))
        writer.add(theirs.removesuffix(".weight") + ".scale", GGUF_TYPES["F32"], (1,), scale)
    back = back if heads is None else reordered(back, heads, to_gguf=False)
    done.certificates.append(compare(name, value, back))
    writer.add(theirs, kind, tuple(moved.shape), content)


def _gguf_form(target: Target, value: Stored, blocks: bool) -> Stored:
    if isinstance(value, QuantArray):
        if target.gguf is None:
            return value if gguf_type_of(value) is not None else smallest_float(value)
        if target.gguf.spec is None and len(value.shape) > 1:
            assert target.gguf.dtype is not None
            return _cast(value, target.gguf.dtype)
        if not blocks:
            return smallest_float(value)
        if target.gguf.stores(value.spec, len(value.shape)):
            return value
    elif value.ndim < 2:
        return _cast(value, np.dtype(np.float32))  # ggml adds and multiplies vectors in float32
    if target.gguf is None:
        return value
    if blocks:
        assert target.gguf.spec is not None
        return requantize(value, target.gguf.spec)
    if target.gguf.dtype is not None:
        return _cast(value, target.gguf.dtype)
    return value
