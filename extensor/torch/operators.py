"""The operators that torch knows: quantized linear and conv2d, forward and backward.

Each is a custom operator with a fake kernel, so torch.compile traces it, and the forward ones have
an autograd formula. A kernel computes by the primitives of `extensor.ops.quantized`, whose bits it
therefore has. Arguments beside tensors are numbers: a layer is named by its handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from extensor.autograd.mode import MODE
from extensor.autograd.primitive import PRIMITIVES
from extensor.backends import registry
from extensor.backends.protocol import Window
from extensor.ops.quantized import quantized_conv2d, quantized_matmul
from extensor.ops.recipe_operands import SavedOperands
from extensor.quant.recipe import FloatName
from extensor.quant.recipe_state import LayerContext
from extensor.torch import arrays
from extensor.torch.arrays import DTYPES, to_array, to_tensor
from extensor.torch.layer import LayerHandle, layer_of

__all__ = ["conv2d", "linear"]

_FLOAT32 = np.dtype(np.float32)
_LINEAR, _CONV2D = (PRIMITIVES[f.__name__] for f in (quantized_matmul, quantized_conv2d))
_NOTHING = SavedOperands(None, None)
_linear_vjp: Any = _LINEAR.fused_vjp
_conv2d_vjp: Any = _CONV2D.fused_vjp
_AGAIN = "extensor::{}: its gradient cannot be differentiated again: " + _LINEAR.once
_NUMBERS = "int layer, ScalarType dtype, bool keep"
_WINDOW = "int[] stride, int[] padding, int[] dilation, int groups"
_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? clock"
_GRADIENT = "Tensor g, Tensor x, Tensor weight, Tensor? clock"
_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define("extensor::linear", f"({_OPERANDS}, {_NUMBERS}) -> Tensor", tags=_TAGS)
torch.library.define(
    "extensor::linear_backward",
    f"({_GRADIENT}, {_NUMBERS}, bool[] needs) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "extensor::conv2d", f"({_OPERANDS}, {_NUMBERS}, {_WINDOW}) -> Tensor", tags=_TAGS
)
torch.library.define(
    "extensor::conv2d_backward",
    f"({_GRADIENT}, {_NUMBERS}, bool[] needs, {_WINDOW}) -> Tensor[]",
    tags=_TAGS,
)

_OPS = torch.ops.extensor


def _context(
    layer: LayerHandle, clock: Tensor | None, dtype: torch.dtype, stream: Any
) -> LayerContext:
    """The layer's context; ``stream`` is what `on_stream` gave."""
    on_device = None if clock is None or stream is None else stream.clock(clock)
    activations: FloatName = "bfloat16" if dtype is torch.bfloat16 else "float32"
    return layer.at(clock, on_device, activations, stream is not None and stream.capturing)


def _gradients(
    found: Sequence[Any], inputs: Sequence[Any], dtypes: Sequence[Any], device: torch.device
) -> list[Tensor]:
    """The gradients that there are, in their inputs' dtypes and in memory of their own."""
    cast = registry.get(device.type).cast
    made = []
    for gradient, dtype in zip(found, dtypes, strict=True):
        if gradient is not None:
            gradient = cast(gradient, dtype)
            if any(gradient is given for given in inputs):
                gradient = gradient.copy()
            made.append(to_tensor(gradient, device))
    return made


# --- linear ---------------------------------------------------------------------------------------


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor | None,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
) -> Tensor:
    handle = layer_of(layer)
    with arrays.on_stream(x) as stream:
        backend = arrays.backend_of(x)
        w, version = handle.weight(weight, keep and (stream is None or not stream.capturing))
        context = _context(handle, clock, dtype, stream)
        start = () if bias is None else (to_array(bias),)
        before, MODE.enabled = MODE.enabled, False  # operands of the backward pass are made there
        try:
            out, _ = _LINEAR.forward(
                backend, to_array(x), w, *start, context=context, version=version
            )
        finally:
            MODE.enabled = before
        return to_tensor(backend.cast(out, DTYPES[dtype]), x.device)


def _linear_grad(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    clock: Tensor | None,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    handle = layer_of(layer)
    with arrays.on_stream(x) as stream:
        backend = arrays.backend_of(x)
        w, version = handle.weight(weight, keep and (stream is None or not stream.capturing))
        context = _context(handle, clock, torch.float32, stream)
        given = to_array(g), to_array(x), w
        found = _linear_vjp(backend, given[0], None, given[1:], needs, context, _NOTHING, version)
        return _gradients(found, given, _dtypes(x, weight, dtype), x.device)


def _dtypes(x: Tensor, weight: Tensor, of_bias: torch.dtype) -> list[np.dtype[Any]]:
    return [DTYPES[dtype] for dtype in (x.dtype, weight.dtype, of_bias)]


def _fake_linear(
    x: Tensor, weight: Tensor, bias: Any, clock: Any, layer: int, dtype: torch.dtype, keep: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _fake_gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    clock: Any,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
    needs: Sequence[bool],
    *window: Any,
) -> list[Tensor]:
    like = (
        (x.shape, x.dtype),
        (weight.shape, weight.dtype),
        ((weight.shape[0],), dtype),
    )
    found = zip(like, needs, strict=True)
    return [g.new_empty(shape, dtype=dtype) for (shape, dtype), need in found if need]


# --- convolution ----------------------------------------------------------------------------------


def _window(weight: Tensor, *pairs: Sequence[int]) -> Window:
    (a, b), (c, d), (e, f) = pairs
    return Window((weight.shape[2], weight.shape[3]), (a, b), (c, d), (e, f))


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor | None,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    with arrays.on_stream(x) as stream:
        backend = arrays.backend_of(x)
        context = _context(layer_of(layer), clock, dtype, stream)
        window = _window(weight, stride, padding, dilation)
        operands = (to_array(t) for t in (x, weight, bias) if t is not None)
        out = _CONV2D.forward(
            backend,
            *(backend.cast(operand, _FLOAT32) for operand in operands),
            context=context,
            window=window,
            groups=groups,
        )
        return to_tensor(backend.cast(out, DTYPES[dtype]), x.device)


def _conv2d_grad(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    clock: Tensor | None,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
    needs: Sequence[bool],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> list[Tensor]:
    with arrays.on_stream(x) as stream:
        backend = arrays.backend_of(x)
        context = _context(layer_of(layer), clock, torch.float32, stream)
        window = _window(weight, stride, padding, dilation)
        given = [backend.cast(to_array(t), _FLOAT32) for t in (g, x, weight)]
        found = _conv2d_vjp(backend, given[0], None, given[1:], needs, context, window, groups)
        return _gradients(found, given, _dtypes(x, weight, dtype), x.device)


def _fake_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    clock: Any,
    layer: int,
    dtype: torch.dtype,
    keep: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    window = _window(weight, stride, padding, dilation)
    size = window.output_size((x.shape[2], x.shape[3]))
    return x.new_empty((x.shape[0], weight.shape[0], *size), dtype=dtype)


# --- registration ---------------------------------------------------------------------------------

for _name, _kernel, _fake in (
    ("linear", _linear, _fake_linear),
    ("linear_backward", _linear_grad, _fake_gradients),
    ("conv2d", _conv2d, _fake_conv2d),
    ("conv2d_backward", _conv2d_grad, _fake_gradients),
):
    torch.library.impl(f"extensor::{_name}", ("cpu", "cuda"))(_kernel)
    torch.library.register_fake(f"extensor::{_name}")(_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, clock, layer, dtype, keep, *window = inputs
    ctx.save_for_backward(x, weight, clock)
    ctx.layer, ctx.keep, ctx.window = layer, keep, window
    ctx.of_bias = dtype if bias is None else bias.dtype


def _backward(op: Any, ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight, clock = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = iter(op(g, x, weight, clock, ctx.layer, ctx.of_bias, ctx.keep, needs, *ctx.window))
    gradients = [next(found) if need else None for need in needs]
    return (*gradients, *[None] * 4, *(None for _ in ctx.window))


def _linear_formula(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return _backward(_OPS.linear_backward, ctx, g)


def _conv2d_formula(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return _backward(_OPS.conv2d_backward, ctx, g)


def _refuse(name: str) -> Any:
    def formula(ctx: Any, *g: Any) -> Any:
        raise RuntimeError(_AGAIN.format(name))

    return formula


torch.library.register_autograd("extensor::linear", _linear_formula, setup_context=_setup)
torch.library.register_autograd("extensor::conv2d", _conv2d_formula, setup_context=_setup)
for _name in ("linear_backward", "conv2d_backward"):
    torch.library.register_autograd(f"extensor::{_name}", _refuse(_name))


# --- eager calls ----------------------------------------------------------------------------------

# A custom operator with seven arguments costs 70 us of torch's Python forward and 110 us backward,
# most of it to look at its schema. Where nobody traces, the kernels are called without it.

_PLAIN = (Tensor, torch.nn.Parameter)


def _is_traced(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class _EagerLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        out = _linear(*inputs)
        _setup(ctx, inputs, out)
        return out

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        # Under create_graph, the operator has the formula that refuses a second derivative.
        return _backward(_OPS.linear_backward if torch.is_grad_enabled() else _linear_grad, ctx, *g)


class _EagerConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        out = _conv2d(*inputs)
        _setup(ctx, inputs, out)
        return out

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return _backward(_OPS.conv2d_backward if torch.is_grad_enabled() else _conv2d_grad, ctx, *g)


def linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """``extensor::linear``, without torch's dispatcher where nobody traces it."""
    if _is_traced(x, weight):
        return _OPS.linear(x, weight, *rest)
    call = _EagerLinear.apply if torch.is_grad_enabled() else _linear
    made: Tensor = call(x, weight, *rest)
    return made


def conv2d(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """``extensor::conv2d``, without torch's dispatcher where nobody traces it."""
    if _is_traced(x, weight):
        return _OPS.conv2d(x, weight, *rest)
    call = _EagerConv2d.apply if torch.is_grad_enabled() else _conv2d
    made: Tensor = call(x, weight, *rest)
    return made
