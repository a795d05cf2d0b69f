"""What a run's layers hold at its last checkpoint: operands of one batch on their grids.

For each layer with products: the weight, the input, and the gradient of the output, as the recipe's
slots fprop.w, fprop.x and dgrad.g see them. Values are in units of their block's scale, so that all
blocks share one picture of the grid; what the grid made of them is counted code by code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor import ExTensor
from extensor.inspect.grid import grid_values
from extensor.nn import gemm_layers
from extensor.quant.recipe import OperandSpec
from extensor.quant.spec import QuantSpec

from .loop import Trainer
from .probes import gradient_rows, input_rows, probed

__all__ = ["Histograms", "OperandHistogram", "histogram_on_grid", "operand_histograms"]

BATCH = 64
VALUES = 400_000
"""Rows beyond so many values are left out."""
BINS = 120
INSIDE = 0.998


@dataclass(frozen=True)
class OperandHistogram:
    """One operand on its grid.

    Attributes:
        format: the blocked format, or "float32" or "bfloat16".
        axis: what the values below are: "value", "value / block scale", or "log2 of it".
        edges, counts: histogram of the values before rounding, zeros apart; of dense operands the
            largest few (`INSIDE`) are left out.
        grid: (grid value, share of the values that are not zero) of every code that the values were
            rounded to, where the grid has few; else empty.
        marks: named places of the grid on the axis.
        zeros: the share of values that are exactly zero.
    """

    format: str
    axis: str
    edges: list[float]
    counts: list[int]
    grid: list[tuple[float, float]]
    marks: list[tuple[float, str]]
    zeros: float


Histograms = dict[str, dict[str, OperandHistogram]]
"""By layer and slot."""

SLOTS = ("fprop.w", "fprop.x", "dgrad.g")


def operand_histograms(trainer: Trainer) -> Histograms:
    """The operands of every layer on the first training batch, by the run's recipe."""
    batch = next(trainer.task.training(1, 0))
    batch = dataclasses.replace(batch, inputs=batch.inputs[:BATCH], labels=batch.labels[:BATCH])
    layers = dict(gemm_layers(trainer.model))
    with probed(layers) as probes:
        trainer.forward(batch)[2].backward()
    found: Histograms = {}
    for path, layer in layers.items():
        gradient = probes.gradient(path)
        if gradient is None:
            continue
        context = trainer.quant.layers[path]
        weight = layer.weight
        arrays = {
            "fprop.w": _host(weight).reshape(weight.shape[0], -1),
            "fprop.x": input_rows(layer, _host(probes.inputs[path]), np),
            "dgrad.g": gradient_rows(_host(gradient)),
        }
        found[path] = {
            slot: histogram_on_grid(arrays[slot], context.operand(slot)) for slot in SLOTS
        }
    return found


def _host(tensor: ExTensor) -> np.ndarray[Any, Any]:
    host: np.ndarray[Any, Any] = tensor.detach().dequantize().to("cpu").numpy()
    return host.astype(np.float32)


def histogram_on_grid(x: np.ndarray[Any, Any], operand: OperandSpec) -> OperandHistogram:
    """A matrix blocked along its rows, beside the grid it is rounded to."""
    x = np.ascontiguousarray(x[: max(1, VALUES // max(x.shape[1], 1))])
    if not isinstance(operand, QuantSpec):
        values = x[np.isfinite(x) & (x != 0)]
        end = float(np.quantile(np.abs(values), INSIDE)) if values.size else 1.0
        low = -end if (values < 0).any() else 0.0
        edges, counts = _histogram(values, (low, end))
        return OperandHistogram(operand, "value", edges, counts, [], [], _zeros(x))
    seen = grid_values(x, operand.replace(axis=1))
    spec, element, scaled = seen.spec, seen.element, seen.scaled
    if element.bits == 8 and element.is_float:
        return _logarithmic(spec, scaled, seen.zeros)
    end = 1.1 * element.max
    ends = (-end if (scaled < 0).any() else -0.05 * end, end)
    edges, counts = _histogram(np.clip(scaled, *ends), ends)  # what saturates piles up there
    grid = [(v, share) for v, share in seen.shares() if v >= edges[0]] if element.bits < 8 else []
    marks = [] if grid else [(sign * element.max, f"{sign * element.max:g}") for sign in (-1, 1)]
    marks = [mark for mark in marks if mark[0] >= edges[0]]
    return OperandHistogram(
        spec.format, "value / block scale", edges, counts, grid, marks, seen.zeros
    )


def _zeros(x: np.ndarray[Any, Any]) -> float:
    return float((x == 0).mean()) if x.size else 0.0


def _logarithmic(spec: QuantSpec, scaled: np.ndarray[Any, Any], zeros: float) -> OperandHistogram:
    """A grid of many binades: magnitudes by their logarithm, with where it ends."""
    element = spec.row.element
    least, largest = float(np.log2(element.min_positive)), float(np.log2(element.max))
    ends = (least - 4, largest + 1)
    edges, counts = _histogram(np.clip(np.log2(np.abs(scaled)), *ends), ends)
    marks = [
        (least - 1, "flushed below"),
        (float(element.min_exponent), "normal from"),
        (largest, "top"),
    ]
    return OperandHistogram(
        spec.format, "log2(|value| / block scale)", edges, counts, [], marks, zeros
    )


def _histogram(
    values: np.ndarray[Any, Any], ends: tuple[float, float]
) -> tuple[list[float], list[int]]:
    counts, edges = np.histogram(values, BINS, ends)
    return edges.tolist(), counts.tolist()
