"""Files of tensors: which there are, how they are read, and ``extensor inspect``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional, arg

from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet, natural, shape_text, tile_text
from extensor.formats import ELEMENTS
from extensor.io import Archive, CheckpointError, load_checkpoint, open_archive
from extensor.io.checkpoint import RUN_PARTS
from extensor.io.gguf import UNREADABLE_GGUF_TYPES, Texts
from extensor.io.npy import read_npy, read_npz
from extensor.io.stored.archive import indexed_shards
from extensor.io.stored.mapped import SafetensorsFile
from extensor.quant import QuantArray
from extensor.quant.rounding import decode
from extensor.quant.scale_rules import E8M0_NAN

__all__ = [
    "INDEX",
    "inspect",
    "is_state",
    "kind_text",
    "opened",
    "read_tensors",
    "readable",
    "tensor_files",
    "tensor_names",
]

Array = Any
READABLE = (".npy", ".npz", ".safetensors")
INDEX = ".safetensors.index.json"
BARS = "▁▂▃▄▅▆▇█"


def read_tensors(path: Path) -> dict[str, Array | QuantArray]:
    """Named tensors of a .npy, .npz or .safetensors file.

    Raises:
        CommandError: if the file is missing, broken or of another kind.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file")
    if path.suffix not in READABLE:
        way = "; `extensor convert` reads GGUF files" if path.suffix == ".gguf" else ""
        raise CommandError(f"{path}: expected a file that ends in {', '.join(READABLE)}{way}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_checkpoint(path).tensors)
        return {path.stem: read_npy(path)} if path.suffix == ".npy" else dict(read_npz(path))
    except FileNotFoundError:
        raise CommandError(f"{path}: no such file") from None
    except CheckpointError as error:
        raise CommandError(error) from None
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error}") from None


def tensor_files(path: Path) -> list[Path]:
    """The files of tensors that a path stands for: itself, a folder's, or those an index names.

    Raises:
        CommandError: if there are none, or the index is broken or names a file that is not there.
    """
    if path.is_dir() and path.suffix not in READABLE:
        indices = sorted(path.glob(f"*{INDEX}"))
        if len(indices) == 1:
            return _indexed(indices[0])
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise CommandError(f"{path}: expected one index, got {names}; name one of them")
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise CommandError(f"{path}: expected .safetensors files in this folder, found none")
        return found
    return _indexed(path) if path.name.endswith(INDEX) else [path]


def _indexed(index: Path) -> list[Path]:
    """The shards that a ``model.safetensors.index.json`` names, each once, in order of name."""
    try:
        return indexed_shards(index)[None]
    except FileNotFoundError as error:
        missing = error.filename is not None  # the index itself
        raise CommandError(f"{index}: no such file" if missing else error) from None
    except (CheckpointError, OSError) as error:
        raise CommandError(error) from None


def tensor_names(path: Path) -> list[str]:
    """The names in a file; of .safetensors only the header is read.

    Raises:
        CommandError: if the file is missing, broken or of another kind.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        return list(read_tensors(path))
    try:
        return list(SafetensorsFile(path).entries)
    except (OSError, CheckpointError) as error:
        raise CommandError(error) from None


def inspect(file: Annotated[Positional[Path], arg(metavar="FILE")]) -> None:
    """List a checkpoint's tensors: shape, format, bytes, and how its block scales are spread.

    Other programs' layouts of blocked weights are recognized; a GGUF file's metadata are listed.

    example: extensor inspect small.safetensors

    Args:
        file: A .safetensors, .gguf, .npz or .npy file, a folder, or a model's index.
    """
    rows: list[tuple[str, ...]] = []
    total, facts = 0, Sheet(str(file), ("metadata", "value"), ())
    if file.suffix in (".npy", ".npz") and not file.is_dir():
        tensors = iter(read_tensors(file).items())
    else:
        archive = opened(file)
        tensors = readable(archive, rows)
        facts = Sheet(str(file), facts.columns, tuple(_facts(archive)))
    for name, value in tensors:
        total += value.nbytes
        bits = f"{8 * value.nbytes / size:.3g}" if (size := math.prod(value.shape)) else "-"
        spread = _scale_histogram(value) if isinstance(value, QuantArray) else ""
        rows.append(
            (name, shape_text(value.shape), kind_text(value), str(value.nbytes), bits, spread)
        )
    rows.sort(key=lambda row: natural(row[0]))
    rows.append(("all", "", "", str(total), "", ""))
    columns = (
        "tensor",
        "shape",
        "format",
        "bytes",
        "bits/element",
        "block scales, by power of two",
    )
    show([*([facts] if facts.rows else []), Sheet(str(file), columns, tuple(rows))])


def opened(path: Path) -> Archive:
    """A checkpoint of any layout, its tensors not yet read.

    Raises:
        CommandError: if it is missing, broken or of another kind.
    """
    try:
        return open_archive(path)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None


def readable(
    archive: Archive, rows: list[tuple[str, ...]]
) -> Iterator[tuple[str, Array | QuantArray]]:
    """The tensors of an archive, one at a time; those of a type that is not read become rows."""
    for name, info in archive.infos.items():
        if info.kind.removeprefix("GGUF ") in UNREADABLE_GGUF_TYPES.values():
            shape = shape_text(info.shape or ())
            rows.append((name, shape, f"{info.kind}: not supported", "-", "-", ""))
            continue
        try:
            value = archive.read(name)
        except (OSError, ValueError) as error:
            raise CommandError(str(error)) from None
        yield name, value


def _facts(archive: Archive) -> Iterator[tuple[str, str]]:
    """A GGUF file's metadata in short."""
    for key, value in archive.metadata.items() if archive.kind == "gguf" else ():
        if isinstance(value, (list, Texts, np.ndarray)) and len(value) > 4:
            yield key, f"{len(value)} values: {', '.join(map(str, value[:4]))} ..."
        else:
            text = " ".join(str(value).split())
            yield key, text if len(text) <= 100 else f"{text[:100]} ..."


def is_state(name: str) -> bool:
    """Whether a tensor of a training run's checkpoint serves resuming alone, and is no weight."""
    return name.partition(".")[0] in RUN_PARTS[1:]


def kind_text(value: Array | QuantArray) -> str:
    """A tensor's dtype, or its format with what belongs to it, as tables show it."""
    if not isinstance(value, QuantArray):
        return str(value.dtype)
    spec = value.spec
    return f"{spec.format} ({tile_text(spec.tile)} along axis {spec.axis}, {spec.rule})"


def _scale_histogram(q: QuantArray) -> str:
    """Lowest exponent, a bar for each power of two, highest exponent; then special scales.

    Byte 0 of E8M0 is counted apart, since blocks of zeros have it.
    """
    if q.super_scales is not None:
        values = q.super_scales.astype(np.float64)
    elif q.spec.is_mx:
        values = np.exp2(q.scales.astype(np.float64) - 127)
        values[q.scales == 0], values[q.scales == E8M0_NAN] = 0.0, np.nan
    elif q.scales.dtype == np.uint8:
        grid = ELEMENTS[q.spec.scale_name.removeprefix("u")]  # an element grid without its sign
        values = decode(q.scales, grid).astype(np.float64)
    else:
        values = q.scales.astype(np.float64)
    usable = np.isfinite(values) & (values != 0)
    text = ""
    if usable.any():
        exponents = np.frexp(values[usable])[1] - 1
        low, high = int(exponents.min()), int(exponents.max())
        counts = np.bincount(exponents - low, minlength=high - low + 1)
        text = f"2^{low} {_bars(counts)} 2^{high}"
    zeros, broken = int((values == 0).sum()), int(np.isnan(values).sum())
    notes = [f"{zeros} of byte 0"] if zeros else []
    notes += [f"{broken} NaN"] if broken else []
    if q.tensor_scale is not None:
        notes.append(f"times {float(q.tensor_scale):.4g}")
    return ", ".join(part for part in (text, *notes) if part)


def _bars(counts: Array, width: int = 32) -> str:
    """Counts as at most ``width`` bars, each the sum of neighbours; a dot is a count of 0."""
    group = -(-len(counts) // width)
    padded = np.pad(counts, (0, -len(counts) % group)).reshape(-1, group).sum(axis=1)
    top = len(BARS) - 1
    return "".join(BARS[math.ceil(top * n / padded.max())] if n else "·" for n in padded)
