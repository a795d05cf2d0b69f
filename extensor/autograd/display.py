"""How an ExTensor shows itself: as text and as an HTML table for notebooks."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from extensor.autograd.node import TensorState
from extensor.quant.array import QuantArray

__all__ = ["html_of", "repr_of"]

_SHOWN = 6


def repr_of(x: TensorState) -> str:
    """Shape, dtype, device and some values; for a blocked tensor codes beside scales."""
    head = f"ExTensor(shape={x.shape}, dtype={x.dtype.name}, device={x.device}"
    if isinstance(x.data, QuantArray):
        q = x.data
        return (
            f"{head}, axis={q.spec.axis}, tile={q.spec.tile}, nbytes={q.nbytes},\n"
            f"  codes={_few(q.codes, '02x')} (hex, packed),\n"
            f"  scales={_few(q.scales, '02x' if q.scales.dtype == np.uint8 else '.4g')})"
        )
    if x.node is not None:
        head += f", from={x.node.primitive.name}"
    elif x.requires_grad:
        head += ", requires_grad=True"
    return f"{head},\n  {_values(x)})"


def html_of(x: TensorState) -> str:
    """The same as a table."""
    rows: list[tuple[str, object]] = [
        ("shape", x.shape),
        ("dtype", x.dtype.name),
        ("device", x.device),
    ]
    rows += [("nbytes", x.nbytes)]
    if isinstance(x.data, QuantArray):
        q = x.data
        hexed = q.scales.dtype == np.uint8
        rows += [("axis", q.spec.axis), ("tile", q.spec.tile)]
        rows += [("codes (hex, packed)", _few(q.codes, "02x"))]
        rows += [("scales", _few(q.scales, "02x" if hexed else ".4g"))]
    else:
        rows += [("values", _values(x))]
    cells = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td><pre>{html.escape(str(value))}</pre></td></tr>"
        for name, value in rows
    )
    return f"<table class='extensor'>{cells}</table>"


def _host(array: Any) -> np.ndarray[Any, Any]:
    host: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.get()
    return host


def _few(array: Any, form: str) -> str:
    flat = _host(array[tuple(slice(_SHOWN) for _ in array.shape)]).reshape(-1)[:_SHOWN]
    shown = " ".join(format(v.item(), form) for v in flat)
    return f"[{shown}{' ...' if array.size > len(flat) else ''}] {tuple(array.shape)}"


def _values(x: TensorState) -> str:
    array = _host(x.data)
    if array.dtype.kind == "V":  # bfloat16 prints as void in numpy's summaries
        array = array.astype(np.float32)
    return np.array2string(array, threshold=64, edgeitems=3, precision=4, prefix="  ")
