"""The command line: ``extensor doctor | formats | quantize | inspect``.

Commands print tables made from the same rows and counters that the library uses;
nothing is computed here that the library does not know. What is wrong with a file
is one line on standard error and exit code 2.
"""

from __future__ import annotations

import fnmatch
import math
import platform
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional, arg

from extensor import config
from extensor.backends import registry
from extensor.backends.cpu import CpuBackend
from extensor.backends.protocol import Window
from extensor.formats import DIALECTS, ELEMENTS, FORMATS, SCALES, BlockFormat, Dialect
from extensor.io import load_checkpoint, save_checkpoint
from extensor.io.layouts import LAYOUTS
from extensor.quant import QuantArray, QuantSpec, QuantStats
from extensor.quant.rounding import decode, encode
from extensor.quant.scale_rules import E8M0_NAN, e8m0_bytes, infinity_byte
from extensor.random import Stream

__all__ = [
    "Sheet",
    "dialect_sheet",
    "doctor",
    "element_sheet",
    "format_sheet",
    "formats",
    "inspect",
    "layout_sheet",
    "main",
    "quantize",
    "read_tensors",
]

Array = Any
READABLE = (".npy", ".npz", ".safetensors")
BARS = "▁▂▃▄▅▆▇█"


class CommandError(Exception):
    """What a user can put right: one line, exit code 2."""


@dataclass(frozen=True)
class Sheet:
    """A table before it has a look: the command line and the docs draw the same one."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# ---- formats


def element_sheet() -> Sheet:
    """The element grids, from their rows."""
    kinds = {"none": "-", "nan": "NaN, no Inf", "ieee": "NaN and Inf"}
    rows = []
    for row in ELEMENTS.values():
        layout = (
            f"1-{row.exponent_bits}-{row.mantissa_bits}" if row.is_float else "two's complement"
        )
        normal = f"{row.min_normal:.7g}" if row.is_float else "-"
        rows.append(
            (
                row.name,
                str(row.bits),
                layout,
                str(row.bias) if row.is_float else "-",
                f"{row.max:.7g}",
                normal,
                f"{row.min_positive:.7g}",
                kinds[row.specials],
            )
        )
    columns = ("element", "bits", "sign-exp-mantissa", "bias", "max", "min normal")
    return Sheet("Element grids", (*columns, "min positive", "specials"), tuple(rows))


def _tile_text(row: BlockFormat) -> str:
    return f"{row.tile[0]}x{row.tile[1]}" if isinstance(row.tile, tuple) else f"per {row.tile}"


def format_sheet() -> Sheet:
    """The blocked formats, from their rows."""
    rows = []
    for row in FORMATS.values():
        scale = row.scale.name + (" + float32 per tensor" if row.tensor_scale else "")
        bits = f"{row.bits_per_element():g}" + ("" if isinstance(row.tile, tuple) else " + scales")
        rules = ", ".join((row.scale_rule, *(r for r in row.scale_rules if r != row.scale_rule)))
        rows.append((row.name, row.element.name, _tile_text(row), scale, bits, rules, row.doc))
    columns = ("format", "element", "block", "scale", "bits/element", "scale rules", "")
    return Sheet("Blocked formats (first scale rule: the default)", columns, tuple(rows))


def scale_sheet() -> Sheet:
    """The ways to store a scale, from their rows."""
    rows = tuple((row.name, str(row.bits), row.doc) for row in SCALES.values())
    return Sheet("Scales", ("scale", "bits", ""), rows)


# Largest magnitudes on which the scale rules differ: the top of the narrowest grid, one step above
# it, and seven eighths of a power of two.
_ABOVE = float(np.nextafter(np.float32(6), np.float32(7)))
WORKED_AMAX = (("6", 6.0), ("just above 6", _ABOVE), ("3.5", 3.5))
WORKED_TIES = (2.5, 3.5, 5.0)


def _narrowest_mx() -> BlockFormat:
    rows = [row for row in FORMATS.values() if row.scale.name == "e8m0"]
    return min(rows, key=lambda row: row.element.bits)


def _worked(dialect: Dialect) -> tuple[str, str]:
    """Scale bytes of `WORKED_AMAX` and what `WORKED_TIES` round to, computed by the library."""
    row = _narrowest_mx()
    rule = dialect.mx_scale_rule or row.scale_rule
    amax = np.array([value for _, value in WORKED_AMAX], dtype=np.float32)
    scales = e8m0_bytes(amax, row.element, rule)
    codes, _ = encode(
        np.array(WORKED_TIES, np.float32), row.element, ties=dialect.ties_in(row.name)
    )
    values = decode(codes, row.element)
    return " ".join(str(s) for s in scales), " ".join(f"{v:g}" for v in values)


def dialect_sheet() -> Sheet:
    """The dialects side by side, with worked scale bytes."""
    row = _narrowest_mx()
    rows = []
    for dialect in DIALECTS.values():
        scales, ties = _worked(dialect)
        byte = dialect.mx_inf_byte
        if byte is None:
            byte = infinity_byte(row.element, dialect.mx_scale_rule or row.scale_rule)
        infinite = "NaN" if byte == E8M0_NAN else "saturates"
        rows.append(
            (
                dialect.name,
                dialect.mx_scale_rule or "the format's",
                scales,
                f"{dialect.ties_in(row.name)}: {ties}",
                dialect.zero_sign_in(row.name)
                .replace("_positive", " +")
                .replace("_negative", " -"),
                f"0x{byte:02X}, {infinite}",
                dialect.nvfp4_order.partition("_")[0],
                f"0x{dialect.nvfp4_zero_scale:02X}, 0x{dialect.nvfp4_least_scale:02X}",
                "top code" if dialect.nvfp4_tiny_saturates else "0",
            )
        )
    worked = ", ".join(name for name, _ in WORKED_AMAX)
    ties = ", ".join(f"{value:g}" for value in WORKED_TIES)
    columns = (
        "dialect",
        "MX rule",
        f"byte for {worked}",
        f"ties ({ties})",
        "zeros",
        "Inf",
        "order",
        "zero, least scale",
        "tiny block",
    )
    title = f"Dialects: where libraries differ ({row.name}; then NVFP4: order, scales, tiny blocks)"
    return Sheet(title, columns, tuple(rows))


def layout_sheet() -> Sheet:
    """How other programs lay out four-bit codes and their scales."""
    rows = []
    for layout in LAYOUTS:
        nibbles = " | ".join(f"{low} {high}" for low, high in layout.first_bytes)
        nan = "yes" if layout.nan else "refused"
        row = (layout.name, layout.format, layout.record, nibbles, layout.tensor_scale, nan)
        rows.append(row)
    columns = ("layout", "format", "record", "first bytes: low, high nibble", "tensor scale")
    return Sheet("Storage layouts (extensor.io.layouts)", (*columns, "NaN blocks"), tuple(rows))


def formats(dialects: bool = False) -> None:
    """List the element grids, the blocked formats and their scales.

    Args:
        dialects: also show how other vendors' libraries differ, with worked scale bytes, and how
            other programs lay out the codes.
    """
    sheets = [element_sheet(), format_sheet(), scale_sheet()]
    _show(sheets + ([dialect_sheet(), layout_sheet()] if dialects else []))


# ---- doctor


def doctor() -> None:
    """Say what this installation has: versions, C++ core, what runs on it, devices, flags."""
    sheets = [_version_sheet()]
    try:
        backend = registry.get("cpu")
    except (RuntimeError, ValueError) as error:  # a core that must be there, a flag that is wrong
        sheets.append(Sheet("C++ core", ("what", "state"), (("CPU backend", str(error)),)))
    else:
        assert isinstance(backend, CpuBackend)
        sheets += [
            _core_sheet(backend),
            _format_path_sheet(backend),
            _product_path_sheet(backend),
            _window_path_sheet(backend),
            _training_path_sheet(backend),
        ]
    _show([*sheets, _device_sheet(), _flag_sheet()])


def _version_sheet() -> Sheet:
    rows = (
        ("extensor", metadata.version("extensor")),
        ("python", f"{platform.python_version()} ({platform.machine()}, {platform.system()})"),
        ("numpy", np.__version__),
        ("ml_dtypes", ml_dtypes.__version__),
    )
    return Sheet("Versions", ("what", "version"), rows)


def _core_sheet(backend: CpuBackend) -> Sheet:
    core = backend.core
    if core is None:
        rows = [("C++ core", f"not used: {backend.core_missing}")]
    else:
        levels = " < ".join(core.levels())
        rows = [
            ("C++ core", "in use"),
            ("instruction set", f"{core.level()} (this CPU and build: {levels})"),
            ("threads", str(core.threads())),
        ]
    return Sheet("C++ core", ("what", "state"), tuple(rows))


def _format_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code each format's default spec takes on a float32 matrix."""
    x = np.ones((64, 64), np.float32)
    rows = []
    for name in FORMATS:
        spec = QuantSpec(name).resolve(x.ndim)
        q, _ = backend.quantize(x, spec)
        calls = (("quantize", x, spec), ("dequantize", q), ("operand", x, spec))
        rows.append((name, *(backend.path(method, *args) for method, *args in calls)))
    columns = ("format", "quantize", "dequantize", "operand (in a GEMM)")
    return Sheet("Formats on the CPU, with their default spec", columns, tuple(rows))


def _product_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code products of blocked matrices take: with themselves, and with 4 float rows."""
    x, few = np.ones((64, 64), np.float32), np.ones((4, 64), np.float32)
    rows = []
    for name in FORMATS:
        q, _ = backend.quantize(x, QuantSpec(name).resolve(x.ndim))
        paths = backend.path("block_matmul", q, q), backend.path("weight_matmul", few, q)
        rows.append((name, *paths))
    return Sheet("Products on the CPU", ("format", "block_matmul", "weight_matmul"), tuple(rows))


def _window_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code convolutions and pooling take on float32 images, 3x3 kernel, padding 1."""
    x, w = np.ones((2, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    rows, spec = [], QuantSpec(next(iter(FORMATS))).resolve(2)
    for stride in (1, 2):
        window = Window((3, 3), (stride, stride), (1, 1))
        g, index = backend.max_pool2d(x, window)
        calls: tuple[tuple[Any, ...], ...] = (
            ("operand_conv2d", x, w, spec, None, w.shape, window),
            ("operand_conv2d_grad_w", g.reshape(4, -1), x, spec, None, w.shape, window),
            ("conv2d", x, w, window, 1),
            ("conv2d_grad_x", g, w, x.shape, window, 1),
            ("conv2d_grad_w", g, x, w.shape, window, 1),
            ("max_pool2d", x, window),
            ("max_pool2d_grad", g, index, x.shape),
        )
        rows += [(method, str(stride), backend.path(method, *args)) for method, *args in calls]
    return Sheet("Windows on the CPU, float32", ("method", "stride", "path"), tuple(rows))


def _training_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code a training step's methods take on a float32 matrix."""
    x, w = np.ones((64, 64), np.float32), np.ones(64, np.float32)
    line, mean = w.copy(), np.ones((64, 1), np.float32)
    calls: tuple[tuple[Any, ...], ...] = (
        ("operand_matmul", x, x),
        ("gelu", x),
        ("gelu_grad", x, x, x),
        ("softmax", x, -1),
        ("softmax_grad", x, x, -1),
        ("layer_norm", x, w, w, 1e-5),
        ("layer_norm_grad", x, x, w, mean, mean),
        ("rms_norm", x, w, 1e-6),
        ("rms_norm_grad", x, x, w, mean),
        ("adam", line, w, w, w, {}),
    )
    rows = tuple((method, backend.path(method, *args)) for method, *args in calls)
    return Sheet("Training on the CPU, float32", ("method", "path"), rows)


def _device_sheet() -> Sheet:
    rows = []
    for name, row in registry.BACKENDS.items():
        lacking = registry.missing(name)
        state = "found" if not lacking else f"not found: {', '.join(lacking)}"
        rows.append((name, state, row.way_out))
    return Sheet("Devices (looked for, not imported)", ("device", "packages", "needs"), tuple(rows))


def _flag_sheet() -> Sheet:
    rows = tuple((f.name, f.read(), f.default, f.doc) for f in config.FLAGS.values())
    return Sheet("Flags", ("variable", "value", "default", ""), rows)


# ---- quantize


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
    """Quantize the float tensors of a file into a safetensors file, and report what it did to them.

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
        raise CommandError(f"{target}: wanted a name that ends in .safetensors")
    try:
        tile = None if block_size is None else (1, block_size)
        spec = QuantSpec(format, axis, tile, scale_rule, rounding=rounding, dialect=dialect)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    tensors = read_tensors(source)
    if not fnmatch.filter(tensors, match):
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
    _show([Sheet(f"{source} -> {target}", (*columns, "saturated", "flushed"), tuple(rows))])


def _quantize_one(
    name: str, value: Array | QuantArray, spec: QuantSpec, seed: int, number: int, match: str
) -> tuple[Array | QuantArray, tuple[str, ...]]:
    """One tensor's stored form and its line of the report."""
    shape = "x".join(str(n) for n in value.shape) or "scalar"
    before = (name, shape, _kind(value), str(value.nbytes))
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


# ---- inspect


def inspect(file: Annotated[Positional[Path], arg(metavar="FILE")]) -> None:
    """List a file's tensors: shape, format, bytes, and how its block scales are spread.

    Args:
        file: .safetensors, .npz or .npy.
    """
    tensors = read_tensors(file)
    rows = []
    for name, value in tensors.items():
        shape = "x".join(str(n) for n in value.shape) or "scalar"
        bits = f"{8 * value.nbytes / size:.3g}" if (size := math.prod(value.shape)) else "-"
        spread = _scale_histogram(value) if isinstance(value, QuantArray) else ""
        rows.append((name, shape, _kind(value), str(value.nbytes), bits, spread))
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
    _show([Sheet(str(file), columns, tuple(rows))])


def _kind(value: Array | QuantArray) -> str:
    if not isinstance(value, QuantArray):
        return str(value.dtype)
    spec = value.spec
    tile = "x".join(map(str, spec.tile)) if isinstance(spec.tile, tuple) else f"per {spec.tile}"
    return f"{spec.format} ({tile} along axis {spec.axis}, {spec.rule})"


def _scale_histogram(q: QuantArray) -> str:
    """Lowest exponent, one bar per power of two, highest exponent; then what stands outside.

    Byte 0 of E8M0 is counted apart: it is what all-zero blocks have.
    """
    if q.spec.is_mx:
        values = np.exp2(q.scales.astype(np.float64) - 127)
        values[q.scales == 0], values[q.scales == E8M0_NAN] = 0.0, np.nan
    elif q.scales.dtype == np.uint8:
        grid = ELEMENTS[q.spec.scale_name.removeprefix("u")]  # an element used without its sign
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
    """Counts as bars, neighbours summed where there are more than ``width``; a dot is none."""
    group = -(-len(counts) // width)
    padded = np.pad(counts, (0, -len(counts) % group)).reshape(-1, group).sum(axis=1)
    top = len(BARS) - 1
    return "".join(BARS[math.ceil(top * n / padded.max())] if n else "·" for n in padded)


# ---- shared


def read_tensors(path: Path) -> dict[str, Array | QuantArray]:
    """Named tensors of a .npy, .npz or .safetensors file.

    Raises:
        CommandError: if the file is missing, broken or of another kind.
    """
    if path.suffix not in READABLE:
        raise CommandError(f"{path}: wanted a file that ends in {', '.join(READABLE)}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_checkpoint(path).tensors)
        with path.open("rb") as file:  # numpy leaks the file it opens itself where it is broken
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


def _show(sheets: Iterable[Sheet]) -> None:
    """Print sheets as rich tables; wide enough to read where the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    for sheet in sheets:
        table = Table(title=escape(sheet.title), title_justify="left")
        for column in sheet.columns:
            table.add_column(escape(column), overflow="fold")
        for row in sheet.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)


COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "formats": formats,
    "quantize": quantize,
    "inspect": inspect,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for a wrong argument or a file that cannot be used."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=argv, prog="extensor")
    except CommandError as error:
        print(f"extensor: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
