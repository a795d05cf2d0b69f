"""The kinds of layers, linear and conv2d: their passes on arrays, forward and backward.

A pass computes by the primitives of `extensor.ops.quantized`, whose bits it therefore has, on
torch's memory. `extensor.torch.operators` makes it part of torch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensor.autograd.mode import MODE
from extensor.autograd.primitive import PRIMITIVES
from extensor.backends.protocol import Window
from extensor.ops.quantized import quantized_conv2d, quantized_matmul
from extensor.ops.recipe_operands import Input, SavedOperands
from extensor.quant.recipe import FloatName
from extensor.quant.recipe_state import LayerContext
from extensor.torch import arrays, saved
from extensor.torch.arrays import DTYPES
from extensor.torch.layer import ClockedContext, LayerHandle

__all__ = ["CONV2D", "LINEAR", "NONE_SAVED", "ONCE", "Pass", "Product", "Released", "Saved"]

_FLOAT32 = np.dtype(np.float32)
_LINEAR, _CONV2D = (PRIMITIVES[f.__name__] for f in (quantized_matmul, quantized_conv2d))
_NOTHING = SavedOperands(None, None)
_SAVED, _NOT_SAVED = Input("input"), Input("nothing")
ONCE = _LINEAR.once
"""Why a gradient cannot be differentiated again."""
_linear_vjp: Any = _LINEAR.fused_vjp
_conv2d_vjp: Any = _CONV2D.fused_vjp


Saved = Sequence[Tensor | None]
"""What is saved of an input and of a weight."""

NONE_SAVED: Saved = (None, None)


class Released(NamedTuple):
    """What is left of an input that the backward pass does not read: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Pass:
    """One forward pass of a layer: all that a call is beside its tensors.

    Attributes:
        layer: the layer.
        clock: the clock's reading, a tensor or on the CPU its number; None: no random bits.
        dtype: of the result.
        keep: whether operands of the weight may be kept.
        window: of a convolution: stride, padding, dilation and groups.
        saves: which operands of the backward pass are results, too: see `extensor.torch.saved`.
        traced: whether an operator of torch's makes the pass, which returns what was promised.
        made: the context, once made, for forward and backward.
        array: of the input, for the backward pass; None: it makes its own.
        address: of that array's memory.
    """

    layer: LayerHandle
    clock: Tensor | int | None
    dtype: torch.dtype
    keep: bool
    window: tuple[Any, ...]
    saves: int = 0
    traced: bool = False
    made: ClockedContext | None = None
    array: Any = None
    address: int = 0

    def context(self, place: Any) -> LayerContext:
        """The layer's context; ``place`` is what `on_device` gave."""
        if self.made is None:
            activations: FloatName = "bfloat16" if self.dtype is torch.bfloat16 else "float32"
            clock = None if self.clock is None else place.clock(self.clock)
            self.made = self.layer.at(self.clock, clock, activations, bool(self.saves))
        self.made.capturing = place.capturing
        return self.made

    def savable(self) -> int:
        """What it saves of all that its recipe can: see `extensor.torch.saved`."""
        known = self.layer.savable
        return self.saves & (saved.savable(self.layer.number) if known is None else known)

    def input(self, x: Tensor | Released, place: Any) -> Any:
        """The array of the input, in the backward pass the forward pass's if it is still that."""
        if isinstance(x, Released):
            return place.unread(*x)
        array, self.array = self.array, None
        return place.to_array(x) if array is None or x.data_ptr() != self.address else array

    def weight(self, weight: Tensor, place: Any) -> Any:
        """See `LayerHandle.weight`."""
        if place.capturing:
            return place.to_array(weight), None
        return self.layer.weight(weight, self.keep)


class Product(NamedTuple):
    """A kind of layer.

    Attributes:
        name: of its operators.
        forward: the result of a pass of x, weight and bias, and what is saved of x and weight.
        backward: the gradients of x, weight and bias that are needed, from g, x and weight, and
            what was saved of them.
        shape: of the result.
    """

    name: str
    forward: Callable[[Pass, Tensor, Tensor, Tensor | None], tuple[Tensor, Saved]]
    backward: Callable[
        [Pass, Tensor, Tensor | Released, Tensor, Saved, Sequence[bool], torch.dtype],
        list[Tensor | None],
    ]
    shape: Callable[..., tuple[int, ...]]


def _cast(array: Any, dtype: torch.dtype, place: Any) -> Any:
    """A result in a dtype; ``place`` is what `on_device` gave."""
    of = DTYPES[dtype]
    return array if array.dtype is of else place.backend.cast(array, of)


def _gradients(
    found: Sequence[Any],
    given: Sequence[Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    place: Any,
) -> list[Any]:
    """The gradients that there are, in their inputs' dtypes and in memory of their own."""
    made: list[Any] = []
    g, x, w = given
    for gradient, dtype in zip(found, dtypes, strict=True):
        if gradient is None:
            made.append(None)
            continue
        if gradient is g or gradient is x or gradient is w:
            gradient = gradient.copy()
        made.append(_cast(gradient, dtype, place))
    return made


@cache
def _prepared() -> Any:
    """The module for GPUs of passes that are prepared."""
    from extensor.torch import prepared

    return prepared


def _run(
    body: Callable[[Pass, Any], Sequence[Any]],
    call: Pass,
    tensors: Sequence[Any],
    kind: tuple[Any, ...] | None = None,
) -> list[Tensor | None]:
    """A pass on the device of its first tensor, by what is prepared of its kind if anything is.

    Args:
        body: computes its arrays, of the call and of what `on_device` gives.
        call: the pass.
        tensors: what the body reads, of a linear layer the weight first.
        kind: what it depends on beside them; None: it is not prepared.
    """
    first = tensors[0]
    assert first is not None
    if kind is not None and first.is_cuda:
        made: list[Tensor | None] | None = _prepared().run(kind, call, tensors, body)
        if made is not None:
            return made
    with arrays.on_device(first) as place:
        return [None if array is None else place.to_tensor(array) for array in body(call, place)]


# --- linear ---------------------------------------------------------------------------------------


def _linear(call: Pass, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    def body(call: Pass, place: Any) -> list[Any]:
        w, version = call.weight(weight, place)
        context = call.context(place)
        start = () if bias is None else (place.to_array(bias),)
        saves = call.savable() if call.saves else 0
        given = _SAVED if saves & saved.INPUT else _NOT_SAVED
        before, MODE.enabled = MODE.enabled, saves > 0
        call.array = place.to_array(x)
        try:
            out, made = _LINEAR.forward(
                place.backend, call.array, w, *start, context=context, version=version, given=given
            )
        finally:
            MODE.enabled = before
        return [_cast(out, call.dtype, place), *(saved.buffers(made) if saves else NONE_SAVED)]

    tensors, kind = (weight, x, bias, call.clock), ("forward", call.dtype, call.saves)
    out, *kept = _run(body, call, tensors, kind)
    assert out is not None
    return out, kept


def _linear_grad(
    call: Pass,
    g: Tensor,
    x: Tensor | Released,
    weight: Tensor,
    kept: Saved,
    needs: Sequence[bool],
    of_bias: torch.dtype,
) -> list[Tensor | None]:
    def body(call: Pass, place: Any) -> list[Any]:
        w, version = call.weight(weight, place)
        context = call.context(place)
        given = place.to_array(g), call.input(x, place), w
        made = _NOTHING
        if kept[0] is not None or kept[1] is not None:
            buffers = [None if one is None else place.to_array(one) for one in kept]
            made = saved.restored(buffers, context, given[1:], place.backend, not call.traced)
        found = _linear_vjp(place.backend, given[0], None, given[1:], needs, context, made, version)
        return _gradients(found, given, (x.dtype, weight.dtype, of_bias), place)

    held = x if isinstance(x, Tensor) else None
    tensors = weight, g, held, *kept, call.clock
    kind = "backward", x.shape, x.dtype, *needs, of_bias, call.traced
    return _run(body, call, tensors, kind)


def _linear_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], weight.shape[0]


# --- convolution ----------------------------------------------------------------------------------


def _window(weight: Tensor, *pairs: Sequence[int]) -> Window:
    (a, b), (c, d), (e, f) = pairs
    return Window((weight.shape[2], weight.shape[3]), (a, b), (c, d), (e, f))


def _conv2d(call: Pass, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    def body(call: Pass, place: Any) -> list[Any]:
        backend = place.backend
        *pairs, groups = call.window
        operands = (place.to_array(t) for t in (x, weight, bias) if t is not None)
        out, _ = _CONV2D.forward(
            backend,
            *(backend.cast(operand, _FLOAT32) for operand in operands),
            context=call.context(place),
            window=_window(weight, *pairs),
            groups=groups,
        )
        return [_cast(out, call.dtype, place)]

    (out,) = _run(body, call, (x,))
    assert out is not None
    return out, NONE_SAVED


def _conv2d_grad(
    call: Pass,
    g: Tensor,
    x: Tensor | Released,
    weight: Tensor,
    kept: Saved,
    needs: Sequence[bool],
    of_bias: torch.dtype,
) -> list[Tensor | None]:
    def body(call: Pass, place: Any) -> list[Any]:
        backend = place.backend
        *pairs, groups = call.window
        window, context = _window(weight, *pairs), call.context(place)
        image = x._replace(dtype=torch.float32) if isinstance(x, Released) else x
        arrays = place.to_array(g), call.input(image, place), place.to_array(weight)
        given = [backend.cast(array, _FLOAT32) for array in arrays]
        options = context, window, groups, _NOTHING
        found = _conv2d_vjp(backend, given[0], None, given[1:], needs, *options)
        return _gradients(found, given, (x.dtype, weight.dtype, of_bias), place)

    return _run(body, call, (g,))


def _conv2d_shape(x: Tensor, weight: Tensor, *window: Any) -> tuple[int, ...]:
    size = _window(weight, *window[:3]).output_size((x.shape[2], x.shape[3]))
    return x.shape[0], weight.shape[0], *size


# --- kinds ----------------------------------------------------------------------------------------

LINEAR = Product("linear", _linear, _linear_grad, _linear_shape)
"""Linear layers."""

CONV2D = Product("conv2d", _conv2d, _conv2d_grad, _conv2d_shape)
"""Convolutions of two dimensions."""
