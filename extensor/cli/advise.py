"""``extensor advise``: which format and which recipe fit, from errors that are measured."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from tyro.conf import Positional, arg

from extensor.backends import registry
from extensor.cli.advise_model import advise_model
from extensor.cli.files import INDEX, is_state, kind_text, opened, read_tensors, readable
from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet, shape_text
from extensor.inspect import decibels, normal_sqnr
from extensor.inspect.health import MANY_FLUSHED, MANY_SATURATED
from extensor.quant import QuantArray, QuantSpec
from extensor.quant.recipe_state import stats_of
from extensor.quant.recipes import RECIPES
from extensor.quant.schemes import SCHEMES

__all__ = ["Candidate", "Measured", "TensorAdvice", "advise", "advise_file", "candidates", "plain"]

DEFAULT_FORMATS = "mxfp4:rceil,nvfp4:four_over_six,mxfp6_e2m3:rceil,mxfp8_e4m3:rceil,int8"
BFLOAT16_BITS = 16
REPAIR = "repair it"
EMBEDDING, HEAD, STATE = "embedding", "output head", "resume state"
TOGETHER = ("vector", STATE)
"""Kinds whose tensors have one row of the table."""
END = re.compile(r"(?:^|[._/])(?:(embed\w*|wte|wpe)|(head|classifier|unembed\w*))(?=[._/]|$)")
"""Parts of a name by which a matrix is taken for an embedding or an output head."""


@dataclass(frozen=True)
class Candidate:
    """A format that tensors are tried in."""

    name: str
    spec: QuantSpec
    normal: float


@dataclass(frozen=True)
class Measured:
    """One tensor in one format: what it costs and what it loses."""

    format: str
    nbytes: int
    sqnr_db: float
    saturated: float
    flushed: float

    def problem(self, least: float) -> str | None:
        """Why the format does not fit; None where it does."""
        if self.sqnr_db < least:
            return f"{self.sqnr_db:.1f} dB"
        if self.saturated > MANY_SATURATED:
            return f"saturates {self.saturated:.0%}"
        if self.flushed > MANY_FLUSHED:
            return f"flushes {self.flushed:.0%}"
        return None


@dataclass(frozen=True)
class TensorAdvice:
    """One tensor: what it is, what each format does to it, and what to do."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    nbytes: int
    peak_over_rms: float | None
    measured: tuple[Measured, ...]
    advice: str
    advised_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AdviseFlags:
    """The budget."""

    min_sqnr: float = 20.0
    """Signal over noise, in dB, that a tensor must keep: 20 dB is a root-mean-square error of a
    tenth of the root-mean-square value."""
    formats: str = DEFAULT_FORMATS
    """Formats to try, separated by commas: names from `extensor formats`, each with a scale rule
    behind a colon if it is not the default one."""
    json: bool = False
    """Print JSON instead of tables."""
    text: Path | None = None
    """With MODEL: a text in UTF-8 whose loss decides; not the one that you test on."""
    bits: float = 5.0
    """With MODEL: bits of each weight, scales included, that all layers together may take."""


def candidates(text: str) -> list[Candidate]:
    """The formats to try, the smallest first.

    Raises:
        CommandError: for an unknown format or rule, one given twice, or none.
    """
    found = []
    for word in [word.strip() for word in text.split(",") if word.strip()]:
        name, _, rule = word.partition(":")
        try:
            spec = QuantSpec(name, scale_rule=rule or None)
        except ValueError as error:
            raise CommandError(f"--formats: {error}; `extensor formats` lists them") from None
        found.append(Candidate(word.replace(":", " "), spec, normal_sqnr(spec)))
    if not found or len({c.spec for c in found}) < len(found):
        raise CommandError(f"--formats: expected each format once, got {text!r}")
    return sorted(found, key=lambda c: c.spec.row.bits_per_element())


def advise(
    source: Annotated[Positional[Path], arg(metavar="FILE|RUN|MODEL")],
    flags: Annotated[AdviseFlags, arg(name="")] = AdviseFlags(),
) -> None:
    """Say which formats and which recipe fit a model, a file of weights or a training run, and why.

    FILE is a .safetensors, .npz or .npy file, a folder of .safetensors files, or a model's index.
    Every float matrix is quantized in each format along its last axis. The advice is the smallest
    format that keeps --min-sqnr dB of signal over quantization noise, saturates at most 2% of the
    values and turns at most 25% of them into zero; else bfloat16. Both limits are those of a run's
    health table. For comparison, 3% saturate if the largest value of each block of 32 does, and
    MXFP4 turns a tenth of normally distributed values into zero. Norms and biases stay in
    bfloat16, since they are small. So do embeddings and output heads, told by their names, as in
    most recipes; their figures are shown. What a run's checkpoint keeps for resuming alone, such as
    the optimizer's state, is not measured.

    RUN is a folder that `extensor train` wrote. What each operand saturated and flushed in the last
    epoch is held against the same limits. Each layer is compared with float32 on test data, and
    other recipes are tried on the trained weights, forward only. The advice is the recipe of fewest
    bits whose output keeps --min-sqnr dB, and what to change for the operands beyond the limits.

    MODEL, with --text, is a pretrained language model: a folder with config.json, or a .gguf file.
    The advice is a format for each layer, the mix of least predicted loss whose weights take --bits
    each. Rounding a layer's weights by e changes the loss by about half the mean square of a
    token's gradient times e, which is measured on eight windows of the text.

    For comparison, normally distributed values keep 18.8 dB in mxfp4 rceil, 21.2 in nvfp4
    four_over_six, 30.9 in mxfp6_e2m3 rceil, 42.1 in int8 and 31.5 in mxfp8_e4m3 rceil.

    example: extensor advise model.safetensors --min-sqnr 25

    example: extensor advise runs/lenet-digits-mxfp4-s0

    example: extensor advise SmolLM2-135M-Instruct.gguf --text book.txt --bits 4.5

    Args:
        source: a file of tensors, a folder of .safetensors files, the folder of a run, or a model.
        flags: the budget.
    """
    if not math.isfinite(flags.min_sqnr):
        raise CommandError(f"--min-sqnr: expected a number of decibels, got {flags.min_sqnr}")
    if not source.exists():
        raise CommandError(
            f"{source}: no such file or folder; `extensor train lenet` makes a run, and prints "
            "where its checkpoint lies"
        )
    if flags.text is None and source.suffix == ".gguf":
        raise CommandError(
            f"{source}: a language model is measured on a text; add --text FILE, a text in UTF-8"
        )
    if flags.text is not None:
        names = {c.spec: c.name for c in candidates(flags.formats)}
        found = advise_model(source, flags.text, names, flags.bits)
        content, sheets, lines = found.as_json(), found.sheets(), []
    elif source.is_dir() and (module := importlib.import_module("extensor.training.advise")).is_run(
        source
    ):
        advised = module.advise_run(source, flags.min_sqnr)
        content, sheets, lines = advised.as_json(), advised.sheets(), advised.lines()
    else:
        tried = candidates(flags.formats)
        tensors = advise_file(source, tried, flags.min_sqnr)
        content = _as_json(source, tensors, tried, flags.min_sqnr)
        sheets = _sheets(source, tensors, tried, flags.min_sqnr)
        lines = _lines(source, tensors, tried, flags)
    if flags.json:
        print(json.dumps(content, indent=1))
        return
    show(sheets)
    for line in lines:
        print(line)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def advise_file(path: Path, tried: Sequence[Candidate], least: float) -> list[TensorAdvice]:
    """Advice for each tensor of a file or of a model's shards.

    Raises:
        CommandError: if a file is missing, broken or of another kind, or holds no tensors.
    """
    found = [_advice(name, value, tried, least) for name, value in _tensors(path)]
    if not found:
        raise CommandError(f"{path}: expected tensors, found none")
    return found


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a file or a folder; those in blocks, of any layout, as blocked arrays."""
    if path.suffix in (".npy", ".npz") and not path.is_dir():
        yield from read_tensors(path).items()
        return
    if path.is_dir() and not (any(path.glob("*.safetensors")) or any(path.glob(f"*{INDEX}"))):
        raise CommandError(
            f"{path}: expected the folder of a run, with a config.toml, or of .safetensors files, "
            "and found neither"
        )
    yield from readable(opened(path), [])


def _advice(name: str, value: Any, tried: Sequence[Candidate], least: float) -> TensorAdvice:
    kind = _kind(name, value)
    shape, dtype = tuple(value.shape), kind_text(value)

    def made(
        advice: str,
        nbytes: int,
        reason: str,
        measured: tuple[Measured, ...] = (),
        peak: float | None = None,
    ) -> TensorAdvice:
        stored = int(value.nbytes)
        return TensorAdvice(
            name, shape, dtype, kind, stored, peak, measured, advice, nbytes, reason
        )

    if kind == STATE:
        return made("left out", 0, "no weights, and not counted")
    if kind in ("quantized", "not floats"):
        return made("as it is", int(value.nbytes), kind)
    dense = math.prod(shape) * BFLOAT16_BITS // 8
    if kind == "vector":
        return made("bfloat16", dense, "norms and biases are few bytes")
    x = np.asarray(value, np.float32)
    if kind == "convolution":  # blocks run along (C, kh, kw), as its product sees them
        x = x.reshape(len(x), -1)
    if not np.isfinite(x).all():
        return made(REPAIR, int(value.nbytes), "NaN or Inf: one makes its whole block NaN")
    if not x.any():
        return made("bfloat16", dense, "zeros only: no signal to measure")
    measured = tuple(_measure(x, candidate) for candidate in tried)
    rms = math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))
    peak = float(np.abs(x).max()) / rms
    if kind in (EMBEDDING, HEAD):
        why = "most recipes keep it" if kind == HEAD else "looked up, not multiplied"
        return made("bfloat16", dense, why, measured, peak)
    refused: list[str] = []
    for one in measured:
        problem = one.problem(least)
        if problem is None:
            why = f"{one.sqnr_db:.1f} dB"
            if refused:
                why += f"; {', '.join(refused)}"
            return made(one.format, one.nbytes, why, measured, peak)
        refused.append(f"{one.format}: {problem}")
    return made("bfloat16", dense, "; ".join(refused), measured, peak)


def _kind(name: str, value: Any) -> str:
    """What a tensor is, by what it holds, its shape, and for the ends of a model its name."""
    if is_state(name):
        return STATE
    if isinstance(value, QuantArray):
        return "quantized"
    if not (value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16):
        return "not floats"
    if value.ndim < 2 or not value.size:
        return "vector"
    if end := END.search(name.lower().replace("lm_head", "head")):
        return EMBEDDING if end[1] else HEAD
    return "convolution" if value.ndim == 4 else "weight"


def _measure(x: np.ndarray[Any, Any], candidate: Candidate) -> Measured:
    backend = registry.get("cpu")
    q, counts = backend.quantize(x, candidate.spec.resolve(x.ndim))
    stats = stats_of(counts)
    exact, coded = x.astype(np.float64), backend.dequantize(q).astype(np.float64)
    ratio = decibels(float(np.sum(exact**2)), float(np.sum((exact - coded) ** 2)))
    shares = stats.saturated / stats.count, stats.flushed / stats.count
    return Measured(candidate.name, q.nbytes, ratio, *shares)


def _as_json(
    path: Path, tensors: Iterable[TensorAdvice], tried: Iterable[Candidate], least: float
) -> dict[str, Any]:
    """Everything as plain JSON: an infinite SQNR is None."""
    tensors = list(tensors)
    return {
        "source": str(path),
        "limits": {"min_sqnr_db": least, "saturated": MANY_SATURATED, "flushed": MANY_FLUSHED},
        "normal_sqnr_db": {c.name: c.normal for c in tried},
        "tensors": plain([dataclasses.asdict(row) for row in tensors]),
        "totals": _totals(tensors),
    }


def _totals(tensors: Sequence[TensorAdvice]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    tensors = [row for row in tensors if row.kind != STATE]
    for row in tensors:
        counts[row.advice] = counts.get(row.advice, 0) + 1
    return {
        "bytes": sum(row.nbytes for row in tensors),
        "advised_bytes": sum(row.advised_bytes for row in tensors),
        "advice": counts,
    }


def _sheets(
    path: Path, tensors: Sequence[TensorAdvice], tried: Sequence[Candidate], least: float
) -> list[Sheet]:
    rows = []
    for row in tensors:
        if row.kind in TOGETHER:
            continue
        ratios = {one.format: _ratio(one.sqnr_db) for one in row.measured}
        peak = "" if row.peak_over_rms is None else f"{row.peak_over_rms:.1f}"
        cells = (ratios.get(c.name, "") for c in tried)
        shape = shape_text(row.shape)
        rows.append((row.name, shape, row.kind, peak, *cells, row.advice, row.reason))
    for kind in TOGETHER:
        if alike := [row for row in tensors if row.kind == kind]:
            empty, why = ("",) * (len(tried) + 1), alike[0].reason
            held = "(1 tensor)" if len(alike) == 1 else f"({len(alike)} tensors)"
            rows.append((held, "", kind, *empty, alike[0].advice, why))
    normal = (f"{c.normal:.1f}" for c in tried)
    rows.append(("(normal data)", "", "", "", *normal, "", "for comparison"))
    names = (c.name for c in tried)
    columns = ("tensor", "shape", "kind", "max/rms", *names, "advice", "reason")
    title = f"{path}: signal over quantization noise in dB, by format"
    sheets = [Sheet(title, columns, tuple(rows))]
    if whole := _format_rows(tensors, tried, least):
        head = ("format", "weights that fit", "bytes", "lowest dB")
        sheets.append(Sheet("All weights in one format", head, whole))
    return sheets


def _ratio(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "exact"


def _format_rows(
    tensors: Sequence[TensorAdvice], tried: Sequence[Candidate], least: float
) -> tuple[tuple[str, ...], ...]:
    """What the weights would take and keep in each format, the rest as advised."""
    weights = [row for row in tensors if row.measured and row.kind not in (EMBEDDING, HEAD)]
    if not weights:
        return ()
    rest = sum(row.advised_bytes for row in tensors) - sum(row.advised_bytes for row in weights)
    rows = []
    for place, candidate in enumerate(tried):
        ones = [row.measured[place] for row in weights]
        size = rest + sum(one.nbytes for one in ones)
        fit = sum(one.problem(least) is None for one in ones)
        low = min(one.sqnr_db for one in ones)
        rows.append((candidate.name, f"{fit} of {len(ones)}", f"{size:,}", _ratio(low)))
    return tuple(rows)


def _lines(
    path: Path, tensors: Sequence[TensorAdvice], tried: Sequence[Candidate], flags: AdviseFlags
) -> list[str]:
    """Totals in words, and the next commands."""
    totals = _totals(tensors)
    mix = ", ".join(f"{count} {advice}" for advice, count in totals["advice"].items())
    before, after = totals["bytes"], totals["advised_bytes"]
    lines = [f"advice: {mix}; {before:,} bytes become {after:,} ({after / max(before, 1):.1%})"]
    shares = {c: sum(row.advised_bytes for row in tensors if row.advice == c.name) for c in tried}
    best = max(shares, key=lambda c: shares[c], default=None)
    if repair := totals["advice"].get(REPAIR):
        lines.append(f"NaN or Inf in {repair} of {len(tensors)}: repair them before you quantize")
    if packed := sum(row.kind == "quantized" for row in tensors):
        lines.append(
            f"in blocks already, and left so: {packed} of {len(tensors)}; measure the float "
            "checkpoint that they were made of"
        )
    if not any(row.measured for row in tensors):
        lines.append(f"{path}: no finite matrix of floats to measure")
        return lines
    if best is None or not shares[best]:
        lines.append(
            f"no weight keeps {flags.min_sqnr:g} dB in these formats; try --min-sqnr lower, or "
            "--formats with more bits"
        )
        return lines
    spec = best.spec
    rule = f" --scale-rule {spec.rule}" if spec.rule != spec.row.scale_rule else ""
    target = f"{path.stem}-{spec.format}.safetensors"
    if path.is_dir() or path.name.endswith(INDEX):
        target = f"{path.stem.partition('.')[0]}-{spec.format}"
    files = f"{shlex.quote(str(path))} {shlex.quote(target)}"
    lines.append(f"next: extensor quantize {files} --format {spec.format}{rule}")
    if len(totals["advice"].keys() - {"bfloat16", "as it is"}) > 1 or any(
        row.kind in (EMBEDDING, HEAD) for row in tensors
    ):
        lines.append("      which takes every matrix, embeddings too; --match GLOB takes some")
    if schemes := _matching({name: row.weights for name, row in SCHEMES.items()}, spec):
        lines.append(f"in Python: et.quantize_model(model, scheme), scheme one of {schemes}")
    if recipes := _matching({n: r.layers.slot("fprop.w") for n, r in RECIPES.items()}, spec):
        lines.append(f"to train in it: extensor train MODEL --recipe {recipes.split(', ')[0]}")
    return lines


def _matching(rows: dict[str, Any], spec: QuantSpec) -> str:
    """The names of the rows whose weights have a spec's format and scale rule."""
    return ", ".join(
        name
        for name, other in rows.items()
        if isinstance(other, QuantSpec)
        and (other.format, other.rule, other.symmetric) == (spec.format, spec.rule, True)
    )
