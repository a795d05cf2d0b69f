"""How an ExTensor shows itself: as text, and as HTML in notebooks.

Both read a few values only: a large tensor is not decoded, nor copied from a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from extensor.autograd.node import TensorState
from extensor.notebook import Html, bars, beside, card, table, text
from extensor.quant.array import QuantArray
from extensor.quant.corner import code_shares, corner, to_host
from extensor.quant.scale_encoders import scale_values
from extensor.quant.scale_rules import E8M0_NAN

__all__ = ["html_of", "repr_of"]

_SHOWN = 6
_WHOLE = 64
"""A dense tensor of up to so many values is shown whole."""
_EDGE = 3
_COUNTED = 4096
"""The histogram of codes reads up to so many values."""


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
    return f"{head}{_origin(x)},\n  {_values(x)})"


def html_of(x: TensorState) -> str:
    """The same as HTML; a blocked tensor's corner is decoded, and some of its codes are counted."""
    facts: list[tuple[str, object]] = [
        ("shape", x.shape),
        ("dtype", x.dtype.name),
        ("device", x.device),
        ("bytes", f"{x.nbytes:,}"),
    ]
    if isinstance(x.data, QuantArray):
        return card("ExTensor", facts + _block_facts(x.data), *_block_parts(x.data))
    facts += [("graph", _origin(x)[2:])] if _origin(x) else []
    values = text(_values(x, indent=""))
    pre = f'<pre style="margin:0;background:none;color:inherit">{values}</pre>'
    return card("ExTensor", facts, Html(pre))


def _origin(x: TensorState) -> str:
    """Where a dense tensor stands in the graph."""
    if x.node is not None:
        return f", from={x.node.primitive.name}"
    return ", requires_grad=True" if x.requires_grad else ""


def _block_facts(q: QuantArray) -> list[tuple[str, object]]:
    spec, size = q.spec, int(np.prod(q.shape))
    facts: list[tuple[str, object]] = [("blocks", f"{spec.tile} along axis {spec.axis}")]
    facts += [("scale rule", spec.rule)]
    if size:
        facts += [("bits per value", f"{8 * q.nbytes / size:.4g}")]
    if q.tensor_scale is not None:
        facts += [("tensor scale", f"{float(to_host(q.tensor_scale)):.4g}")]
    facts += [("SQNR", "et.inspect.sqnr(source, q)")]  # the source is not kept
    return facts


def _block_parts(q: QuantArray) -> list[Html]:
    """The decoded corner, its scales, and the histogram of codes."""
    seen, parts = corner(q), []
    if seen is None:
        parts.append(table((), [["codes (hex, packed)", _few(q.codes, "02x")]]))
    else:
        axes = " and ".join(map(str, seen.axes))
        rest = " (other axes at 0)" if len(q.shape) > len(seen.axes) else ""
        values = [[f"{v:.4g}" for v in row] for row in seen.values.tolist()]
        scales = [[_scale(v, q) for v in row] for row in seen.scales]
        times = "" if q.tensor_scale is None else ", times the tensor scale"
        parts.append(
            beside(
                table((), values, f"first values, decoded, along axis {axes}{rest}"),
                table((), scales, f"scales of their blocks{times}"),
            )
        )
    if q.codes.size:
        shares, count = code_shares(q, _COUNTED)
        size = int(np.prod(q.shape))
        which = f"the first {count:,} of {size:,}" if count < size else f"all {count:,}"
        grid = q.spec.row.element.name
        parts.append(bars(f"codes by their value on the {grid} grid, of {which} values", shares))
    return parts


def _scale(stored: Any, q: QuantArray) -> Html:
    """One scale: a power of two, or a number."""
    if q.spec.is_mx:
        byte = int(stored)
        power = f'2<sup style="line-height:0">{byte - 127}</sup>'
        return Html("NaN" if byte == E8M0_NAN else power)
    return Html(f"{float(scale_values(np.asarray([stored]), q.spec, np)[0]):.4g}")


def _few(array: Any, form: str) -> str:
    flat = to_host(array[tuple(slice(_SHOWN) for _ in array.shape)]).reshape(-1)[:_SHOWN]
    shown = " ".join(format(v.item(), form) for v in flat)
    return f"[{shown}{' ...' if array.size > len(flat) else ''}] {tuple(array.shape)}"


def _values(x: TensorState, indent: str = "  ") -> str:
    array = x.data if x.data.size <= _WHOLE else _edges(x.data)
    host = to_host(array)
    if host.dtype.kind == "V":  # bfloat16 prints as void in numpy's summaries
        host = host.astype(np.float32)
    least = _WHOLE if x.data.size <= _WHOLE else 0
    return np.array2string(host, threshold=least, edgeitems=_EDGE, precision=4, prefix=indent)


def _edges(array: Any) -> np.ndarray[Any, Any]:
    """On the host: both ends of every axis, and one value between, for which "..." is printed."""
    long = [n > 2 * _EDGE + 1 for n in array.shape]
    ends = (slice(0, _EDGE + 1), slice(-_EDGE, None))
    blocks: Any = [
        to_host(array[key])
        for key in itertools.product(*(ends if cut else (slice(None),) for cut in long))
    ]
    for axis in reversed(range(len(long))):
        if long[axis]:
            pairs = zip(blocks[::2], blocks[1::2], strict=True)
            blocks = [np.concatenate(pair, axis=axis) for pair in pairs]
    joined: np.ndarray[Any, Any] = blocks[0]
    return joined
