"""Calibration: observe the inputs of a model's layers, and choose a range for their codes.

Two passes run over the same batches. The first finds each layer's least and largest input. The
second counts the inputs in `BINS` equal bins between them; zeros are counted apart, since zero is
always coded exactly. A range is then chosen by one of three methods:

- ``minmax``: from the least input to the largest. Nothing saturates in calibration, but one outlier
  makes all other codes coarse.
- ``percentile``: the upper edge of the bin that holds the p-th percentile (nearest rank), and the
  same below with the values negated. Each is within one bin of the exact percentile.
- ``mse``: the one of `SHRINKS` shrunken ranges that codes the bins' centres with the least squared
  error, each weighted by its count; among equals the widest.

Source: Wu et al., arXiv 2004.09602, section 4.2 (max, percentile); Choukroun et al., arXiv
1902.06822, section 3.1 (least squared error).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module, evaluating
from extensor.quant.reference import dequantize
from extensor.quant.schemes import Scheme
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import StaticScale, choose_static_scale, quantize_static

__all__ = ["InputHistogram", "calibrate", "choose_scale"]

BINS = 4096
SHRINKS = np.linspace(1.0, 0.05, 96)

Inputs = tuple[ExTensor, ...]


@dataclass
class InputHistogram:
    """The inputs of one layer over all calibration batches.

    Attributes:
        low: the least input, at most 0; high: the largest, at least 0.
        zeros: how many inputs were exactly 0.
        counts: int64 (BINS,), how many other inputs fell into each equal bin of [low, high].
    """

    low: float = 0.0
    high: float = 0.0
    zeros: int = 0
    counts: np.ndarray[Any, Any] | None = None


def batches_of(calibration: Iterable[Any]) -> list[Inputs]:
    """The calibration set as tuples of a model's inputs.

    Raises:
        TypeError: for anything but tensors and tuples of tensors.
        ValueError: for an empty set, or a batch of nothing.
    """
    if isinstance(calibration, ExTensor):
        raise TypeError("calibration: expected a list of batches, got one tensor; pass [tensor]")
    batches = [b if isinstance(b, tuple) else (b,) for b in calibration]
    if not batches:
        raise ValueError(
            "calibration: expected at least one batch, got an empty set; pass a few hundred "
            "inputs of the kind that the model was trained on"
        )
    for place, batch in enumerate(batches):
        if not batch or not all(isinstance(x, ExTensor) for x in batch):
            raise TypeError(
                f"calibration: batch {place}: expected an ExTensor or a tuple of them, got "
                f"{batch!r:.80}"
            )
        if not all(x.size for x in batch):
            raise ValueError(
                f"calibration: batch {place}: expected inputs, got shapes "
                f"{[x.shape for x in batch]}"
            )
    return batches


def calibrate(
    model: Module, layers: Mapping[str, Module], batches: Sequence[Inputs]
) -> dict[str, InputHistogram]:
    """Histograms of each layer's inputs while the model runs on the batches.

    The model runs in evaluation mode without gradients.

    Args:
        model: as it is in high precision.
        layers: some of its layers, by path.
        batches: from `batches_of`.

    Raises:
        ValueError: if a layer is never reached, or gets NaN or infinity; the message names the
            batch.
    """
    seen = {path: InputHistogram() for path in layers}
    reached: set[str] = set()

    def widen(path: str, x: np.ndarray[Any, Any], place: int) -> None:
        reached.add(path)
        if not np.isfinite(x).all():
            raise ValueError(
                f"calibration: batch {place} gives layer {path!r} inputs that are NaN or infinite; "
                "use calibration data like the training data, or a model that did not "
                "diverge"
            )
        if x.size:
            seen[path].low = min(seen[path].low, float(x.min()))
            seen[path].high = max(seen[path].high, float(x.max()))

    def count(path: str, x: np.ndarray[Any, Any], place: int) -> None:
        row = seen[path]
        values = x[x != 0]
        row.zeros += x.size - values.size
        if row.counts is None:
            row.counts = np.zeros(BINS, np.int64)
        if values.size:  # so that the range is not empty
            row.counts += np.histogram(values, BINS, (row.low, row.high))[0]

    with no_grad(), evaluating(model):
        for observe in (widen, count):
            for place, batch in enumerate(batches):
                with _observed(layers, lambda path, x, at=place, f=observe: f(path, x, at)):
                    model(*batch)
            unreached = [path for path in layers if path not in reached]
            if unreached:
                raise ValueError(
                    f"calibration never reached layer {unreached[0]!r}"
                    + (f" and {len(unreached) - 1} more" if unreached[1:] else "")
                    + "; use inputs that take the model through it, or keep="
                    f"({unreached[0]!r},)"
                )
    return seen


@contextmanager
def _observed(layers: Mapping[str, Module], take: Any) -> Iterator[None]:
    """Call ``take(path, array)`` with every input of every layer, as float32 on the host."""

    def hook(path: str) -> Any:
        return lambda _, args: take(path, args[0].detach().to("cpu").to("float32").numpy())

    with ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(hook(path)))
        yield


def choose_scale(seen: InputHistogram, scheme: Scheme) -> StaticScale:
    """The static scale of a layer's inputs under a scheme with a ``range``."""
    spec = scheme.activations
    assert isinstance(spec, QuantSpec)
    low, high = seen.low, seen.high
    if scheme.range != "minmax" and seen.counts is not None and seen.counts.sum():
        pick = _percentile if scheme.range == "percentile" else _least_error
        low, high = pick(seen, scheme)
    return choose_static_scale(low, high, spec)


def _percentile(seen: InputHistogram, scheme: Scheme) -> tuple[float, float]:
    """Bin edges at the two percentiles; zeros count at 0, which both sides include."""
    assert seen.counts is not None
    edges = np.linspace(seen.low, seen.high, BINS + 1)
    total = int(seen.counts.sum()) + seen.zeros
    at_zero = min(int(np.searchsorted(edges, 0.0, side="right")) - 1, BINS - 1)
    counts = seen.counts.copy()
    counts[at_zero] += seen.zeros
    rank = math.ceil(
        Fraction(repr(scheme.percentile)) * total / 100
    )  # 99.99 exactly, not its float
    above = int(np.searchsorted(np.cumsum(counts), rank))
    below = BINS - 1 - int(np.searchsorted(np.cumsum(counts[::-1]), rank))
    return min(float(edges[below]), 0.0), max(float(edges[above + 1]), 0.0)


def _least_error(seen: InputHistogram, scheme: Scheme) -> tuple[float, float]:
    """The shrunken range that codes the inputs with the least squared error."""
    spec = scheme.activations
    assert isinstance(spec, QuantSpec) and seen.counts is not None
    edges = np.linspace(seen.low, seen.high, BINS + 1)
    kept = seen.counts > 0
    centres = ((edges[:-1] + edges[1:]) / 2)[kept].astype(np.float32)
    counts = seen.counts[kept]
    best, chosen = math.inf, (seen.low, seen.high)
    for share in SHRINKS:
        low, high = float(share * seen.low), float(share * seen.high)
        q, _ = quantize_static(centres, spec, choose_static_scale(low, high, spec))
        error = float((counts * (dequantize(q).astype(np.float64) - centres) ** 2).sum())
        if error < best:
            best, chosen = error, (low, high)
    return chosen
