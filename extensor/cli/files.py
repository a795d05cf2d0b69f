"""``extensor quantize`` and ``extensor inspect``: commands for files of tensors."""

from __future__ import annotations

import fnmatch
import math
import zipfile
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
from tyro.conf import Positional, arg

from extensor.backends import registry
from extensor.cli.sheet import CommandError, Sheet, shape_text, show, tile_text
from extensor.formats import ELEMENTS
from extensor.io import load_checkpoint, save_checkpoint
from extensor.quant import QuantArray, QuantSpec, QuantStats
from extensor.quant.rounding import decode
from extensor.quant.scale_rules import E8M0_NAN
from extensor.random import Stream

__all__ = ["inspect", "quantize", "read_tensors"]

Array = Any
READABLE = (".npy", ".npz", ".safetensors")
BARS = "▁▂▃▄▅▆▇█"


def read_tensors(path: Path) -> dict[str, Array | QuantArray]:
    """Named tensors of a .npy, .npz or .safetensors file.

    Raises:
        CommandError: if the file is missing, broken or of another kind.
    """
    if path.suffix not in READABLE:
        raise CommandError(f"{path}: expected a file that ends in {', '.join(READABLE)}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_checkpoint(path).tensors)
        with path.open("rb") as file:  # numpy does not close a broken file that it opened itself
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {path.stem: loaded}
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise CommandError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        known = "" if str(path) in text else f"{path}: cannot be read: "
        raise CommandError(f"{known}{text}") from None


def quantize(
    source: Annotated[Positional[Path], arg(metavar="IN")],
    target: Annotated[Positional[Path], arg(metavar="OUT")],
    format: str,
    axis: int = -1,
    block_size: int | None = None,
    scale_rule: str | None = None,
    dialect: str = QuantSpec.dialect,
    rounding: Literal["nearest_even", "stochastic"] = "nearest_even",
    seed: int = 0,
    match: str = "*",
) -> None:
    """Quantize the float tensors of a file to a safetensors file, and report the errors made.

    Args:
        source: .npy, .npz or .safetensors.
        target: the .safetensors file to write.
        format: a name from `extensor formats`.
        axis: the axis the blocks run along.
        block_size: elements that share a scale; the format's own where left out.
        scale_rule: a rule of the format; its default where left out.
        dialect: a name from `extensor formats --dialects`.
        rounding: to the nearest grid value, or stochastically.
        seed: of stochastic rounding.
        match: glob of the tensor names to quantize; the others are copied.
    """
    if target.suffix != ".safetensors":
        raise CommandError(f"{target}: expected a name that ends in .safetensors")
    if target.resolve() == source.resolve():
        raise CommandError(f"{target}: expected another file than {source}, which would be lost")
    try:
        tile = None if block_size is None else (1, block_size)
        spec = QuantSpec(format, axis, tile, scale_rule, rounding=rounding, dialect=dialect)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    tensors = read_tensors(source)
    if not any(fnmatch.fnmatchcase(name, match) for name in tensors):
        raise CommandError(
            f"--match {match!r} fits none of: {', '.join(tensors) or '(no tensors)'}"
        )
    rows, written = [], {}
    for number, (name, value) in enumerate(tensors.items()):
        stored, row = _quantize_one(name, value, spec, seed, number, match)
        written[name] = stored
        rows.append(row)
    try:
        save_checkpoint(target, written, {"source": source.name})
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    columns = ("tensor", "shape", "from", "bytes", "to", "bytes", "SQNR dB")
    show([Sheet(f"{source} -> {target}", (*columns, "saturated", "flushed"), tuple(rows))])


def _quantize_one(
    name: str, value: Array | QuantArray, spec: QuantSpec, seed: int, number: int, match: str
) -> tuple[Array | QuantArray, tuple[str, ...]]:
    """Quantize or copy one tensor; what to store, and its line of the report."""
    before = (name, shape_text(value.shape), _kind(value), str(value.nbytes))
    chosen = fnmatch.fnmatchcase(name, match)
    if isinstance(value, QuantArray) or not (chosen and value.ndim and _is_float(value)):
        return value, (*before, "copied", str(value.nbytes), "", "", "")
    backend = registry.get("cpu")
    try:
        stream = Stream(seed, tensor=number) if spec.rounding == "stochastic" else None
        q, stats = backend.quantize(value, spec.resolve(value.ndim), stream)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{name}: {error}") from None
    noise = _sqnr(value.astype(np.float64), backend.dequantize(q).astype(np.float64))
    counts = _percent(stats.saturated, stats), _percent(stats.flushed, stats)
    return q, (*before, spec.format, str(q.nbytes), noise, *counts)


def _is_float(value: Array) -> bool:
    return bool(value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16)


def _sqnr(exact: Array, coded: Array) -> str:
    """Signal to quantization noise in decibels: 10 log10(sum x^2 / sum (x - q)^2)."""
    with np.errstate(invalid="ignore", over="ignore"):
        signal, noise = float(np.sum(exact**2)), float(np.sum((exact - coded) ** 2))
    if not math.isfinite(noise):
        return "nan: has NaN or Inf"
    if noise == 0:
        return "exact"
    return f"{10 * math.log10(signal / noise):.2f}" if signal else "-inf"


def _percent(part: int, stats: QuantStats) -> str:
    return f"{100 * part / stats.count:.2f}%" if stats.count else "-"


def inspect(file: Annotated[Positional[Path], arg(metavar="FILE")]) -> None:
    """List a file's tensors: shape, format, bytes, and how its block scales are spread.

    Args:
        file: .safetensors, .npz or .npy.
    """
    tensors = read_tensors(file)
    rows = []
    for name, value in tensors.items():
        bits = f"{8 * value.nbytes / size:.3g}" if (size := math.prod(value.shape)) else "-"
        spread = _scale_histogram(value) if isinstance(value, QuantArray) else ""
        rows.append((name, shape_text(value.shape), _kind(value), str(value.nbytes), bits, spread))
    total = sum(value.nbytes for value in tensors.values())
    rows.append(("all", "", "", str(total), "", ""))
    columns = (
        "tensor",
        "shape",
        "format",
        "bytes",
        "bits/element",
        "block scales, by power of two",
    )
    show([Sheet(str(file), columns, tuple(rows))])


def _kind(value: Array | QuantArray) -> str:
    if not isinstance(value, QuantArray):
        return str(value.dtype)
    spec = value.spec
    return f"{spec.format} ({tile_text(spec.tile)} along axis {spec.axis}, {spec.rule})"


def _scale_histogram(q: QuantArray) -> str:
    """Lowest exponent, a bar for each power of two, highest exponent; then special scales.

    Byte 0 of E8M0 is counted apart, since blocks of zeros have it.
    """
    if q.spec.is_mx:
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
