"""The operators that torch knows: quantized linear and conv2d, forward and backward.

Each is a custom operator with a fake kernel, so torch.compile traces it, and the forward ones have
an autograd formula. A forward one returns its result, and behind it what backward wants saved. A
kernel computes by the primitives of `extensor.ops.quantized`, whose bits it therefore has.
Arguments beside tensors are numbers: a layer is named by its handle. Where nobody traces, the same
kernels are called by an autograd function instead, which costs less.
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
from extensor.torch.clock import read_clock
from extensor.torch.layer import ClockedContext, LayerHandle, layer_of

__all__ = ["CONV2D", "LINEAR", "Product", "call"]

_FLOAT32 = np.dtype(np.float32)
_LINEAR, _CONV2D = (PRIMITIVES[f.__name__] for f in (quantized_matmul, quantized_conv2d))
_NOTHING = SavedOperands(None, None)
_SAVED, _NOT_SAVED = Input("input"), Input("nothing")
_linear_vjp: Any = _LINEAR.fused_vjp
_conv2d_vjp: Any = _CONV2D.fused_vjp
_AGAIN = "extensor::{}: its gradient cannot be differentiated again: " + _LINEAR.once


Saved = Sequence[Tensor | None]
"""What is saved of an input and of a weight."""

_NONE_SAVED: Saved = (None, None)


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
            self.made = self.layer.at(self.clock, clock, activations)
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
        return [_cast(out, call.dtype, place), *(saved.buffers(made) if saves else _NONE_SAVED)]

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
    return out, _NONE_SAVED


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


# --- operators ------------------------------------------------------------------------------------

LINEAR = Product("linear", _linear, _linear_grad, _linear_shape)
"""Linear layers."""

CONV2D = Product("conv2d", _conv2d, _conv2d_grad, _conv2d_shape)
"""Convolutions of two dimensions."""

_OPS = torch.ops.extensor
_NUMBERS = "Tensor? clock, int layer, ScalarType dtype, bool keep, int saves"
_WINDOW = ", int[] stride, int[] padding, int[] dilation, int groups"
_OPERANDS = f"Tensor x, Tensor weight, Tensor? bias, {_NUMBERS}"
_GRADIENT = f"Tensor g, Tensor x, Tensor weight, Tensor[] kept, {_NUMBERS}, bool[] needs"


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, clock, layer, dtype, keep, saves, *window = inputs
    ctx.save_for_backward(x, weight, clock, *output[1:])
    ctx.set_materialize_grads(False)  # there are none of what is saved
    ctx.numbers, ctx.window = (layer, dtype if bias is None else bias.dtype, keep, saves), window


def _spread(found: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients that there are, at their inputs' places."""
    gradients = iter(found)
    return [next(gradients) if need else None for need in needs]


def _register(product: Product, of_window: str) -> None:
    """Register a product's two operators: kernels, fake kernels and autograd formulas."""

    def forward(x: Tensor, weight: Tensor, bias: Any, clock: Any, *rest: Any) -> list[Tensor]:
        number, dtype, keep, saves, *window = rest
        layer = layer_of(number)
        call = Pass(layer, clock, dtype, keep, tuple(window), saves, True)
        out, made = product.forward(call, x, weight, bias)
        return [out, *saved.promised(made, x, weight, saves)] if saves else [out]

    def fake(x: Tensor, weight: Tensor, bias: Any, clock: Any, *rest: Any) -> list[Tensor]:
        _, dtype, _, saves, *window = rest
        out = x.new_empty(product.shape(x, weight, *window), dtype=dtype)
        sizes = saved.sizes(x.shape, weight.shape, saves) if saves else {}
        return [out, *(x.new_empty((size,), dtype=torch.uint8) for size in sizes.values())]

    # ``dtype`` is the bias's, or that of the result.
    def backward(
        g: Tensor, x: Tensor, weight: Tensor, held: list[Tensor], clock: Any, *rest: Any
    ) -> list[Tensor]:
        number, dtype, keep, saves, needs, *window = rest
        layer = layer_of(number)
        call = Pass(layer, clock, torch.float32, keep, tuple(window), saves, True)
        kept = saved.of_operator(held, saves) if held else _NONE_SAVED
        found = product.backward(call, g, x, weight, kept, needs, dtype)
        return [gradient for gradient in found if gradient is not None]

    def fake_backward(
        g: Tensor, x: Tensor, weight: Tensor, held: list[Tensor], clock: Any, *rest: Any
    ) -> list[Tensor]:
        _, dtype, _, _, needs, *_ = rest
        like = (x.shape, x.dtype), (weight.shape, weight.dtype), (weight.shape[:1], dtype)
        made = zip(like, needs, strict=True)
        return [g.new_empty(shape, dtype=of) for (shape, of), need in made if need]

    def formula(ctx: Any, g: list[Tensor | None]) -> tuple[Any, ...]:
        x, weight, clock, *kept = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        if ctx.numbers[3] & saved.UNREAD and not needs[1]:  # compilers then do not keep it
            x = weight.new_empty(1, dtype=x.dtype).expand(x.shape)
        operator = getattr(_OPS, f"{product.name}_backward")
        found = operator(g[0], x, weight, kept, clock, *ctx.numbers, needs, *ctx.window)
        return (*_spread(found, needs), *[None] * 5, *(None for _ in ctx.window))

    def refuse(ctx: Any, *g: Any) -> Any:
        raise RuntimeError(_AGAIN.format(name))

    tags = (torch.Tag.pt2_compliant_tag,)
    name = f"{product.name}_backward"
    for qualified, schema, kernel, its_fake in (
        (f"extensor::{product.name}", f"({_OPERANDS}{of_window}) -> Tensor[]", forward, fake),
        (f"extensor::{name}", f"({_GRADIENT}{of_window}) -> Tensor[]", backward, fake_backward),
    ):
        torch.library.define(qualified, schema, tags=tags)
        torch.library.impl(qualified, ("cpu", "cuda"))(kernel)
        torch.library.register_fake(qualified)(its_fake)
    torch.library.register_autograd(f"extensor::{product.name}", formula, setup_context=_setup)
    torch.library.register_autograd(f"extensor::{name}", refuse)


_register(LINEAR, "")
_register(CONV2D, _WINDOW)


# --- calls ----------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)


_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_of_transform = torch._C._functorch.is_functorch_wrapped_tensor


def _is_traced(x: Tensor, weight: Tensor) -> bool:
    return (
        _is_compiling()
        or type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or _dispatch_modes() > 0
        or _transform() is not None
        or _of_transform(x)
    )


_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class _Eager(torch.autograd.Function):
    """A pass without torch's dispatcher, whose Python reads the schema in each call."""

    @staticmethod
    def forward(
        ctx: Any, what: tuple[Product, Pass], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        product, call = what
        ctx.all = product, call, call.dtype if bias is None else bias.dtype
        out, kept = product.forward(call, x, weight, bias)
        number = call.layer.number
        if ctx.needs_input_grad[2]:
            released = kept[0] is not None and saved.replaces_input(number)
        else:
            released = not saved.reads_input(number)
        if released:
            ctx.like = Released(tuple(x.shape), x.dtype)
        if released or _hooks(True):  # hooks may move what is saved elsewhere
            call.array = None
        else:
            call.address = x.data_ptr()
        ctx.save_for_backward(None if released else x, weight, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, weight, *kept = ctx.saved_tensors
        product, call, of_bias = ctx.all
        needs = ctx.needs_input_grad[1:]
        given = g, weight, x
        x = ctx.like if x is None else x
        if not torch.is_grad_enabled():
            return None, *product.backward(call, g, x, weight, kept, needs, of_bias)
        with torch.no_grad():
            found = product.backward(call, g, x, weight, kept, needs, of_bias)
        made = _once(product.name, *given, *(t for t in found if t is not None))
        return None, *_spread(made, [t is not None for t in found])


class _Once(torch.autograd.Function):
    """Gradients whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Any) -> Any:
        ctx.name = name
        return tensors[3:]

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        raise RuntimeError(_AGAIN.format(f"{ctx.name}_backward"))


_once: Callable[..., tuple[Tensor, ...]] = _Once.apply


def _saves(x: Tensor, weight: Tensor) -> int:
    """What a pass on a GPU may save: the operands of the gradients that there will be."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return 0
    return saved.INPUT * weight.requires_grad | saved.WEIGHT * x.requires_grad


# `torch.autograd.Function.apply` without what it does for functorch, which `_is_traced` rules out.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Eager).apply


def call(
    product: Product,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    clock: Tensor | None,
    layer: LayerHandle,
    dtype: torch.dtype,
    window: tuple[Any, ...] = (),
) -> Tensor:
    """A layer's forward pass, which advances its clock if it is recorded.

    Args:
        product: the kind of layer.
        tensors: x, weight and bias, checked.
        clock: the layer's.
        layer: its recipe.
        dtype: of the result.
        window: of a convolution: stride, padding, dilation and groups.
    """
    x, weight, bias = tensors
    saves = _saves(x, weight) if product is LINEAR else 0
    if _is_traced(x, weight):
        # CUDA graphs of compiled code own all that it makes, so it keeps no operands.
        keep = not (x.is_cuda and torch.compiler.is_compiling())
        saves = saves & saved.INPUT if keep else saves
        saves = saves & saved.savable(layer.number) if saves else 0
        if not weight.requires_grad and not saved.reads_input(layer.number):
            saves |= saved.UNREAD
        reading = read_clock(clock, layer)
        operator = getattr(_OPS, product.name)
        numbers = layer.number, dtype, keep, saves
        traced: Tensor = operator(x, weight, bias, reading, *numbers, *window)[0]
        return traced
    reading = read_clock(clock, layer, as_number=not x.is_cuda)
    pass_ = Pass(layer, reading, dtype, True, window, saves)
    if not torch.is_grad_enabled():
        return product.forward(pass_, x, weight, bias)[0]
    return _apply((product, pass_), x, weight, bias)
