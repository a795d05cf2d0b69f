"""The operators that torch knows: quantized linear and conv2d, forward and backward.

Each is a custom operator with a fake kernel, so torch.compile traces it, and the forward ones have
an autograd formula. A forward one returns its result, and behind it what backward wants saved. A
kernel computes by the primitives of `extensor.ops.quantized`, whose bits it therefore has.
Arguments beside tensors are numbers: a layer is named by its handle. Where nobody traces, the same
kernels are called by an autograd function instead, which costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from extensor.torch import saved
from extensor.torch.arrays import check_memory
from extensor.torch.clock import read_clock
from extensor.torch.layer import LayerHandle, layer_of
from extensor.torch.products import (
    CONV2D,
    LINEAR,
    NONE_SAVED,
    ONCE,
    Pass,
    Product,
    Released,
)

__all__ = ["call"]

_AGAIN = "extensor::{}: its gradient cannot be differentiated again: " + str(ONCE)


# --- operators ------------------------------------------------------------------------------------

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
        kept = saved.of_operator(held, saves) if held else NONE_SAVED
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
_scripting: Any = torch._C._get_tracing_state  # of torch.jit.trace
_unpack: Any = forward_ad.unpack_dual
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


def _is_traced(x: Tensor, weight: Tensor) -> bool:
    return (
        _is_compiling()
        or type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or _dispatch_modes() > 0
        or _transform() is not None
        or _of_transform(x)
        or forward_ad._current_level >= 0
        or _scripting() is not None
    )


def _check_transforms(name: str, tensors: Sequence[Tensor | None]) -> None:
    """Refuse what has no rule: torch's own rules would give tangents of zero without a word."""
    given = [t for t in tensors if t is not None]
    transform: Any = _transform()
    if transform is not None and transform.key() != _FUNCTIONALIZE:
        kind = f"torch.func's {transform.key().name.lower()}"
    elif any(_unpack(t).tangent is not None for t in given):
        kind = "forward-mode differentiation"
    else:
        return
    raise RuntimeError(
        f"extensor::{name}: {kind} is not supported for a quantized layer; use backward() or "
        "torch.autograd.grad on a loss, one batch after the other"
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
        check_memory(f"extensor::{ctx.all[0].name}_backward: gradient", g)
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
        if not _is_compiling():
            _check_transforms(product.name, tensors)
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
