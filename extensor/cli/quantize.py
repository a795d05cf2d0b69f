"""``extensor quantize``: tensors of a file, or of a model's shards, into a block-scaled format."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
from tyro.conf import Positional, arg

from extensor.backends import registry
from extensor.cli.files import (
    INDEX,
    is_state,
    kind_text,
    read_tensors,
    tensor_files,
    tensor_names,
)
from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet, shape_text
from extensor.inspect import decibels
from extensor.io import save_checkpoint
from extensor.io.atomic import replacing
from extensor.quant import QuantArray, QuantSpec, QuantStats
from extensor.quant.recipe_state import stats_of
from extensor.random import Stream

__all__ = ["quantize"]

Array = Any
Stored = Array | QuantArray


@dataclass(frozen=True, kw_only=True)
class SpecFlags:
    """How values are rounded."""

    axis: int = -1
    """The axis the blocks run along."""
    block_size: Annotated[int | None, arg(metavar="INT")] = None
    """Elements that share a scale; the format's own where left out."""
    scale_rule: Annotated[str | None, arg(metavar="RULE")] = None
    """A scale rule of the format; its default where left out."""
    dialect: str = QuantSpec.dialect
    """A name from `extensor formats --dialects`."""
    rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    """To the nearest grid value, or stochastically."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def spec(self, format: str) -> QuantSpec:
        """The spec of a format with these flags.

        Raises:
            CommandError: on values that the format does not have.
        """
        tile = None if self.block_size is None else (1, self.block_size)
        try:
            Stream(self.seed)  # refuses a seed that is out of range
            return QuantSpec(
                format,
                self.axis,
                tile,
                self.scale_rule,
                rounding=self.rounding,
                dialect=self.dialect,
            )
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from None


def quantize(
    source: Annotated[Positional[Path], arg(metavar="IN")],
    target: Annotated[Positional[Path], arg(metavar="OUT")],
    format: str,
    match: Annotated[str | None, arg(metavar="GLOB")] = None,
    flags: Annotated[SpecFlags, arg(name="")] = SpecFlags(),
) -> None:
    """Quantize the weights of a file or a model's shards, and report bytes and errors.

    Float tensors of two dimensions are quantized: the weights of linear layers and embeddings.
    Every other tensor is copied as it is, and so is what a run's checkpoint keeps for resuming;
    --match chooses tensors by name instead.
    IN is a .npy, .npz or .safetensors file, and OUT a .safetensors file. Or IN is a folder of
    .safetensors files, or a model.safetensors.index.json, and OUT a folder that gets a file for
    each file, and an index.
    An OUT that exists is replaced at the end, when all of the new one is written.

    example: extensor quantize model.safetensors small.safetensors --format mxfp4

    Args:
        source: A file of tensors, a folder of .safetensors files, or a model's index.
        target: The .safetensors file to write, or the folder.
        format: A name from `extensor formats`, such as mxfp4.
        match: Quantize the float tensors of one dimension or more whose names match; quote it.
        flags: How values are rounded.
    """
    spec = flags.spec(format)
    files = tensor_files(source)
    if match is not None:
        names = [name for file in files for name in tensor_names(file)]
        if not any(fnmatch.fnmatchcase(name, match) for name in names):
            found = ", ".join(names) or "(no tensors)"
            raise CommandError(f"--match {match!r} fits none of: {found}")
    sharded = files != [source]
    _check_target(source, target, files if sharded else [])
    rows: list[tuple[str, ...]] = []
    weight_map: dict[str, str] = {}
    before = after = quantized = 0
    with _filled(target) if sharded else nullcontext() as folder:
        for file in files:
            written: dict[str, Stored] = {}
            output = target if folder is None else folder / file.name
            for name, value in read_tensors(file).items():
                random = spec.rounding == "stochastic"
                stream = Stream(flags.seed, tensor=len(rows)) if random else None
                stored, row = _quantize_one(name, value, spec, stream, match)
                written[name] = stored
                rows.append(row)
                before, after = before + value.nbytes, after + stored.nbytes
                quantized += stored is not value
                parts = stored.parts if isinstance(stored, QuantArray) else ()
                keys = [f"{name}.{part}" for part in parts] or [name]
                weight_map.update(dict.fromkeys(keys, output.name))
            _save(output, written, file.name)
        if folder is not None:
            index = {"metadata": {"total_size": after}, "weight_map": weight_map}
            with replacing(folder / f"model{INDEX}") as written_index:
                written_index.write(json.dumps(index, indent=1).encode())
    share = f", {after / before:.1%}" if before else ""
    held = "1 tensor" if len(rows) == 1 else f"{len(rows)} tensors"
    rows.append(("total", held, "", str(before), f"{quantized} quantized"))
    rows[-1] += (f"{after}{share}", "", "", "")
    columns = ("tensor", "shape", "from", "bytes", "to", "bytes", "SQNR dB")
    show([Sheet(f"{source} -> {target}", (*columns, "saturated", "flushed"), tuple(rows))])


def _check_target(source: Path, target: Path, shards: list[Path]) -> None:
    """Refuse a target of the wrong kind, and one that is the source."""
    if not shards:
        if target.suffix != ".safetensors":
            raise CommandError(f"{target}: expected a name that ends in .safetensors")
        if target.resolve() == source.resolve():
            raise CommandError(
                f"{target}: expected another file than {source}, which would be lost"
            )
        return
    if target.suffix == ".safetensors" or target.is_file():
        raise CommandError(f"{target}: expected a folder, as {source} holds several files")
    if target.resolve() == shards[0].parent.resolve():
        raise CommandError(f"{target}: expected another folder than {source}, which would be lost")


@contextmanager
def _filled(target: Path) -> Iterator[Path]:
    """A temporary folder; its files move into ``target`` when the block ends without an error.

    The index moves last, and an older one goes first: a folder with an index holds what it names.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".incomplete-", dir=target) as folder:
            yield Path(folder)
            index = target / f"model{INDEX}"
            index.unlink(missing_ok=True)
            for path in sorted(Path(folder).iterdir(), key=lambda path: path.name == index.name):
                path.replace(target / path.name)
    except OSError as error:
        raise CommandError(str(error)) from None


def _save(path: Path, tensors: dict[str, Stored], source: str) -> None:
    try:
        save_checkpoint(path, tensors, {"source": source})
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from None


def _quantize_one(
    name: str, value: Stored, spec: QuantSpec, stream: Stream | None, match: str | None
) -> tuple[Stored, tuple[str, ...]]:
    """Quantize or copy one tensor; what to store, and its line of the report."""
    before = (name, shape_text(value.shape), kind_text(value), str(value.nbytes))
    matrix = len(value.shape) == 2 and not is_state(name)
    chosen = matrix if match is None else value.shape and fnmatch.fnmatchcase(name, match)
    if isinstance(value, QuantArray) or not (chosen and _is_float(value)):
        return value, (*before, "copied", str(value.nbytes), "", "", "")
    backend = registry.get("cpu")
    try:
        q, counts = backend.quantize(value, spec.resolve(value.ndim), stream)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{name}: {error}") from None
    noise = _sqnr(value.astype(np.float64), backend.dequantize(q).astype(np.float64))
    stats = stats_of(counts)
    shares = _percent(stats.saturated, stats), _percent(stats.flushed, stats)
    return q, (*before, spec.format, str(q.nbytes), noise, *shares)


def _is_float(value: Array) -> bool:
    return bool(value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16)


def _sqnr(exact: Array, coded: Array) -> str:
    """Signal to quantization noise as text; a file may hold zeros, NaN and Inf."""
    with np.errstate(invalid="ignore", over="ignore"):
        signal, noise = float(np.sum(exact**2)), float(np.sum((exact - coded) ** 2))
    if not math.isfinite(noise):
        return "nan: has NaN or Inf"
    return "exact" if noise == 0 else f"{decibels(signal, noise):.2f}"


def _percent(part: int, stats: QuantStats) -> str:
    return f"{100 * part / stats.count:.2f}%" if stats.count else "-"
