"""Converting a checkpoint from one program's layout to another's, with a certificate.

Each weight is read, put into the new form, written, read back from what was written, and compared
value by value with what it was. So the certificate speaks of the files, not of the intention.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.io.atomic import replacing
from extensor.io.checkpoint import METADATA_KEY, blocked_content
from extensor.io.gguf.container import Typed
from extensor.io.stored.archive import Archive, open_archive
from extensor.io.stored.certificate import Conversion, LossyConversionError, compare
from extensor.io.stored.forms import new_form, stored_form
from extensor.io.stored.gguf_models import as_hugging_face
from extensor.io.stored.gguf_write import GgufModelWriter
from extensor.io.stored.quantization_config import hf_quant_config, quantization_config
from extensor.io.stored.targets import TARGETS, Target, takes_blocks
from extensor.io.stored.writer import SHARD_BYTES, SafetensorsWriter, copy_files
from extensor.quant.array import QuantArray

__all__ = ["WriteOptions", "convert", "metadata_of", "write_checkpoint"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "LICENSE", "LICENSE.txt",
)  # fmt: skip
"""Files beside the weights that go with them unchanged."""

CERTIFICATE = "certificate.json"


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    layout: str,
    *,
    only_lossless: bool = False,
    dense_dtype: str | None = None,
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
        dense_dtype: of floating-point weights that the layout keeps out of blocks, such as an
            embedding: "bfloat16", "float16" or "float32". None keeps each in its own, and decodes
            a blocked one to the smallest that holds every value.
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
        options=WriteOptions(
            only_lossless, shard_bytes, dict(files or {}), archive.unused, dense_dtype=dense_dtype
        ),
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
        dense_dtype: as of `convert`.

    >>> et.io.stored.WriteOptions().only_lossless
    False
    """

    only_lossless: bool = False
    shard_bytes: int = SHARD_BYTES
    files: dict[str, bytes] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dense_dtype: str | None = None


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
    options = options or WriteOptions()
    target = TARGETS[layout].with_dense(options.dense_dtype)
    _check_path(path, target)
    done = Conversion(notes=list(options.notes), dropped=options.dropped)
    cut: dict[str, int] = {}
    weights = _watched(weights, target, cut)
    if target.container == "gguf":
        _write_gguf(path, target, weights, config, dict(gguf or {}), options, done)
        place = path.with_name(f"{path.name}.{CERTIFICATE}")
    elif path.suffix == ".safetensors":
        with _filling(path.parent, path.name) as folder:
            _write_safetensors(folder, path.name, target, weights, options, done)
        done.files = [path]
        place = path.with_name(f"{path.name}.{CERTIFICATE}")
    else:
        with _filling(path, None) as folder:
            blocked, kept = _write_safetensors(folder, None, target, weights, options, done)
            if beside is not None:
                copy_files(beside, folder, COPIED)
            for name, content in options.files.items():
                (folder / name).write_bytes(content)
            if config is not None:
                _write_config(folder, target, dict(config), blocked, kept)
            done.files = [path / file.name for file in sorted(folder.iterdir())]
        place = path / CERTIFICATE
    if cut:
        first, more = next(iter(cut)), f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        done.notes.append(
            f"{first}{more}: not packed, as rows of {cut[first]} values are no whole number of "
            f"{layout}'s blocks; the way out: a layout whose blocks divide them"
        )
    with replacing(place) as file:
        file.write(json.dumps(done.as_json(), indent=1).encode())
    done.files.append(place)
    return done


def _watched(
    weights: Iterable[tuple[str, Stored]], target: Target, cut: dict[str, int]
) -> Iterator[tuple[str, Stored]]:
    """The weights; in ``cut`` the rows' length of those that only longer rows would pack.

    256 values are the longest block of a layout, and a multiple of all others.
    """
    for name, value in weights:
        *outer, length = value.shape or (0,)
        blocks = (takes_blocks(target, name, (*outer, n)) for n in (length, 256 * length))
        if tuple(blocks) == (False, True):
            cut[name] = length
        yield name, value


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
            written, back = stored_form(target, name, made)
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


def _write_config(
    folder: Path, target: Target, config: dict[str, Any], blocked: dict[str, Any], kept: list[str]
) -> None:
    config.pop("quantization_config", None)
    if (dtype := target.dtype or target.dense) is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype)
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
    config: Mapping[str, Any] | None,
    metadata: dict[str, Any],
    options: WriteOptions,
    done: Conversion,
) -> None:
    if config is None:
        raise ValueError("GGUF: expected a config.json beside the weights, whose model it stores")
    with contextlib.closing(GgufModelWriter(path, target, config, metadata)) as writer:
        for name, value in weights:
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                done.notes.append("lm_head.weight is the embedding's and not stored again")
                continue
            done.certificates += writer.add(name, value)
        _refuse_lossy(done, options)
        done.files = writer.finish()
