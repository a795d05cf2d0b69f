"""What each format would do to each operand of a layer, measured on a sample of its values.

The noise of an operand is its squared quantization error over its squared values. Samples are a few
thousand values of whole blocks, so that a layer costs milliseconds whatever its size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from extensor import ExTensor
from extensor.autograd.tensor import wrap
from extensor.backends import registry
from extensor.nn import Conv2d
from extensor.nn.linear import GemmLayer
from extensor.quant.block_codec import BlockLayout
from extensor.quant.hadamard import hadamard
from extensor.quant.recipe import SLOTS, OperandSpec, operand_text
from extensor.quant.recipe_state import LayerContext
from extensor.quant.recipes import get_recipe
from extensor.quant.reference import round_to
from extensor.quant.scale_encoders import decode_blocks
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

from .probes import gradient_rows, input_rows
from .records import finite

__all__ = ["TRIED", "layer_operands", "quantile_exponent", "sample_rows"]

TRIED = ("mxfp4", "mxfp6", "mxfp8_nvidia", "bf16")
"""Recipes whose operands are tried in every slot: 4.25, 6.25, 8.25 and 16 bits a value."""
VALUES = 8192
"""Of a sample, about."""
LENGTH = 2048
"""The longest part of a row: whole blocks of every format."""
IMAGES = 4
"""Whose patches stand for a batch's, in a convolution."""

Matrix = np.ndarray[Any, Any]


def layer_operands(
    layer: GemmLayer, x: ExTensor, g: ExTensor, context: LayerContext
) -> dict[str, dict[str, Any]]:
    """The operands of a layer's three products, by slot.

    Args:
        layer: with a weight.
        x: its input.
        g: the gradient of its output.
        context: its recipe.

    Returns:
        By slot: "operand", the spec in words; "values", how many the slot has in a step; "noise",
        by the name of a recipe of `TRIED` and "now" for the recipe in force; and where that stores
        blocks "scales", a histogram: "low" is the least exponent, "counts" are blocks whose scale
        is in [2^e, 2^(e+1)), e ascending. Zeros make no block.
    """
    weight, xp = layer.weight, x.backend.xp
    convolution = isinstance(layer, Conv2d)
    inputs, gradients = (t.data[:IMAGES] if convolution else t.data for t in (x, g))
    matrices = {
        "x": input_rows(layer, inputs, xp),
        "w": weight.detach().dequantize().data.reshape(weight.shape[0], -1),
        "g": gradient_rows(gradients),
    }
    share = len(x) / len(inputs) if convolution else 1.0
    found: dict[str, dict[str, Any]] = {}
    for slot in SLOTS:
        name = slot[-1]
        matrix = matrices[name].T if slot in ("dgrad.w", "wgrad.g", "wgrad.x") else matrices[name]
        now = context.operand(slot)
        rows = sample_rows(matrix, now, x.backend)
        stream = context.stream(slot, column=False)
        scales = _scales(rows, now, stream)
        tried = {"now": now, **{r: get_recipe(r).layers.slot(slot) for r in TRIED}}
        noise = {o: _noise(rows, o, stream) for o in set(tried.values())}
        found[slot] = {
            "operand": operand_text(now),
            "values": round(matrix.size * (1.0 if name == "w" else share)),
            "noise": {recipe: noise[o] for recipe, o in tried.items()},
            **({} if scales is None else {"scales": scales}),
        }
    return found


def sample_rows(matrix: Any, operand: OperandSpec, backend: Any) -> Matrix:
    """Rows on the host, spread over a matrix, or its first ones where blocks have several rows."""
    matrix = matrix[:, :LENGTH]
    tile = operand.resolve(2).tile if isinstance(operand, QuantSpec) else (1, 1)
    high = tile[0] if isinstance(tile, tuple) else 1
    count = max(VALUES // max(matrix.shape[1], 1), high)
    step = max(1, len(matrix) // count) if high == 1 else 1
    rows = backend.xp.ascontiguousarray(matrix[::step][:count])
    host: Matrix = wrap(rows, backend).to("cpu").numpy().astype(np.float32)
    return host


@lru_cache(maxsize=1024)
def _along_rows(spec: QuantSpec) -> QuantSpec:
    return spec.replace(axis=1).resolve(2)


def _noise(rows: Matrix, operand: OperandSpec, stream: Stream) -> float | None:
    """The noise of a matrix blocked along its rows; None without a signal."""
    if not (rows.size and np.isfinite(rows).all()):
        return None
    if isinstance(operand, str):
        return _share(rows, np.asarray(round_to(rows, operand), np.float32))
    spec = _along_rows(operand)
    random = stream if spec.rounding == "stochastic" else None
    values = rows if spec.transform is None else np.asarray(hadamard(rows, spec.transform))
    coded, _ = registry.get("cpu").fake_quantize(rows, spec, random)
    return _share(np.float32(spec.element_scale) * values, coded[:, : values.shape[1]])


def _share(exact: Matrix, coded: Matrix) -> float | None:
    with np.errstate(invalid="ignore", over="ignore"):
        signal = float(np.square(exact, dtype=np.float64).sum())
        error = float(np.square(np.subtract(coded, exact, dtype=np.float64)).sum())
    return finite(error / signal) if signal else None


def _scales(rows: Matrix, operand: OperandSpec, stream: Stream) -> dict[str, Any] | None:
    """A histogram of the exponents of the scales of blocks that are not all zero."""
    if isinstance(operand, str) or not (rows.size and np.isfinite(rows).all()):
        return None
    spec = _along_rows(operand)
    if spec.row.outliers or spec.is_affine or not spec.symmetric:
        return None
    values = rows if spec.transform is None else np.asarray(hadamard(rows, spec.transform))
    random = stream if spec.rounding == "stochastic" else None
    q, _ = registry.get("cpu").quantize(rows, spec, random)
    layout = BlockLayout(spec, q.shape)
    top_codes = np.full((layout.blocks, 1), spec.row.element.max_magnitude_code, np.uint8)
    tops = decode_blocks(top_codes, layout.split_scales(q.scales), spec, q.tensor_scale, None)
    scales = (tops[:, 0] / spec.row.element.max).astype(np.float64)
    largest = np.abs(layout.split(values)).max(axis=1)
    good = (largest > 0) & np.isfinite(scales) & (scales > 0)
    if not good.any():
        return None
    exponents = np.frexp(scales[good])[1] - 1
    low = int(exponents.min())
    return {"low": low, "counts": np.bincount(exponents - low).tolist()}


def quantile_exponent(scales: dict[str, Any], share: float) -> float:
    """The exponent below or at which a share of a histogram's blocks lies."""
    counts = np.cumsum(scales["counts"])
    return float(scales["low"] + int(np.searchsorted(counts, share * counts[-1])))
