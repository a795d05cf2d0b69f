"""Quantized `torch.nn.Linear`, `torch.nn.Conv2d` and transformers' `Conv1D`, under a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional

from extensor.quant.recipe import Recipe
from extensor.quant.recipes import FP4_RECIPE, get_recipe
from extensor.torch.arrays import DEVICES, DTYPES, check_tensor
from extensor.torch.clock import Ticking, advance_with_optimizer, new_clock
from extensor.torch.layer import LayerHandle
from extensor.torch.operators import call
from extensor.torch.products import CONV2D, LINEAR

__all__ = ["Conv2d", "Linear", "QuantizedModule", "quantized_class"]

_FLOATS = tuple(DTYPES)


class QuantizedModule(nn.Module, Ticking):
    """What a module under a recipe has beside its parameters.

    Attributes:
        quant_layer: its recipe.
        quant_clock: int64 of shape (), the step plus 2**32 times the forward passes since; None
            where nothing is rounded stochastically. A buffer, and so part of the state_dict.

    >>> import extensor.torch as ext
    >>> isinstance(ext.Linear(32, 32), ext.modules.QuantizedModule)
    True
    """

    quant_layer: LayerHandle
    quant_clock: Tensor | None

    def set_recipe(self, layer: LayerHandle, step: int = 0) -> None:
        """Put the module under a recipe, at the beginning of a step.

        Args:
            layer: the recipe.
            step: the optimizer step.

        >>> import extensor.torch as ext
        >>> layer = ext.Linear(32, 32, recipe="mxfp8")
        >>> layer.set_recipe(ext.Linear(32, 32, recipe="mxfp4_all").quant_layer, step=2)
        >>> layer.quant_clock
        tensor(2)
        """
        self.quant_layer = layer
        device = next(iter(self.parameters())).device
        clock = new_clock(step, device) if layer.stochastic else None
        self.register_buffer("quant_clock", clock)
        advance_with_optimizer(self)

    def _prepared(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor | None
    ) -> tuple[Tensor, torch.dtype]:
        """The input, cast as autocast casts it, and the dtype of the result."""
        device, dtype = x.device, x.dtype
        if (
            dtype not in _FLOATS
            or device.type not in DEVICES
            or weight.device != device
            or x.layout is not torch.strided
            or weight.dtype not in _FLOATS
            or weight.layout is not torch.strided
            or (clock is not None and clock.device != device)
        ):
            self._refuse(x, weight, bias, clock)
        if bias is not None and (
            bias.dtype not in _FLOATS
            or bias.device != device
            or bias.layout is not torch.strided
            or bias.shape != weight.shape[:1]
        ):
            self._refuse(x, weight, bias, clock)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            return x.to(dtype), dtype
        if self.quant_layer.context.activations == "bfloat16":
            return x, torch.bfloat16
        same = weight.dtype is dtype
        return x, dtype if same else torch.promote_types(dtype, weight.dtype)

    def _refuse(self, x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor | None) -> None:
        name = type(self).__name__
        given = {"input": x, "weight": weight, "bias": bias}
        for part, tensor in given.items():
            if tensor is not None:
                check_tensor(f"{name}: {part}", tensor)
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{name}: expected a bias of shape {tuple(weight.shape[:1])}, got "
                f"{tuple(bias.shape)}"
            )
        there = {p: t.device for p, t in (given | {"quant_clock": clock}).items() if t is not None}
        found = ", ".join(f"{part} on {device}" for part, device in there.items())
        raise ValueError(
            f"{name}: expected all on one device, got {found}; move the module with .to(device), "
            "which takes its buffers along, or the input with x.to(device)"
        )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *rest: Any,
    ) -> None:
        """Weights of a model that was not quantized come without a clock, which then stays."""
        self.quant_layer.forget_weight()  # see _apply
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *rest
        )
        if (clock := f"{prefix}quant_clock") in missing_keys:
            missing_keys.remove(clock)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A clock that had no value, on the meta device, begins at 0 where `to_empty` puts it."""
        self.quant_layer.forget_weight()  # torch does not swap tensors that something refers to
        before = self.quant_clock
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        clock = self.quant_clock
        if before is not None and before.is_meta and clock is not None and not clock.is_meta:
            clock.zero_()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        advance_with_optimizer(self)

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks each module for what it compiles instead."""
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script compiles a module's Python, which cannot "
            "hold a recipe; use torch.compile, torch.export.export or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        """What the layer's repr says: torch's own words, the recipe, and whether it quantizes here.

        Returns:
            The text between the parentheses.

        >>> import extensor.torch as ext
        >>> ext.Linear(64, 32, recipe="mxfp4").extra_repr()
        "in_features=64, out_features=32, bias=True, recipe='mxfp4'"
        """
        context = self.quant_layer.context
        named = f"{super().extra_repr()}, recipe={context.state.recipe.name!r}"
        if context.layer.is_quantized:
            return named
        return f"{named}, not quantized: {context.layer.fprop.a}"


def _is_in_graph(x: Any) -> bool:
    """Whether torch.fx traces the call: x, which is declared a tensor, is none then."""
    return isinstance(x, Proxy)


def _call_in_graph(module: nn.Module, x: Any) -> Any:
    """The call of a layer in a graph of torch.fx, which has layers as they are, as torch's own."""
    path = x.tracer.path_of_module(module)
    if not path:
        raise RuntimeError(
            f"{type(module).__name__}: a graph of torch.fx calls a layer by its name in a model; "
            "trace a model that holds it, as torch.nn.Sequential(layer)"
        )
    return x.tracer.create_proxy("call_module", path, (x,), {})


class _Linear(QuantizedModule):
    weight: Any
    bias: Any

    def _matrix(self) -> Tensor:
        """The weight as (N, K)."""
        weight: Tensor = self.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight under the recipe, plus the bias.

        Args:
            x: (..., K), float32, bfloat16 or float16.

        Returns:
            (..., N).

        Raises:
            ValueError: for another last length.

        >>> import extensor.torch as ext
        >>> ext.Linear(64, 32, recipe="mxfp4").forward(torch.ones(8, 64)).shape
        torch.Size([8, 32])
        """
        if _is_in_graph(x):
            return _call_in_graph(self, x)
        weight, layer = self._matrix(), self.quant_layer
        if not x.ndim or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{type(self).__name__}: expected an input of shape (..., {weight.shape[1]}), got "
                f"{tuple(x.shape)}"
            )
        bias, clock = self.bias, self.quant_clock
        x, dtype = self._prepared(x, weight, bias, clock)
        if not weight.numel():  # nothing is rounded
            bias = None if bias is None else bias.to(dtype)
            return functional.linear(x.to(dtype), weight.to(dtype), bias)
        return call(LINEAR, (x, weight, bias), clock, layer, dtype)


class _Conv1D(_Linear):
    """transformers' Conv1D: a linear layer whose weight is stored transposed, (K, N)."""

    def _matrix(self) -> Tensor:
        transposed: Tensor = self.weight.t()
        return transposed


class _Conv2d(QuantizedModule):
    weight: Any
    bias: Any
    padding: Any
    padding_mode: Any
    stride: Any
    dilation: Any
    groups: int
    _reversed_padding_repeated_twice: list[int]

    def forward(self, x: Tensor) -> Tensor:
        """The convolution under the recipe, plus the bias.

        Args:
            x: (N, C, H, W) or (C, H, W), float32, bfloat16 or float16.

        Returns:
            (N, O, Ho, Wo) or (O, Ho, Wo).

        Raises:
            ValueError: for another number of channels, or an image that is smaller than the kernel.

        >>> import extensor.torch as ext
        >>> ext.Conv2d(3, 16, kernel_size=3, recipe="mxfp4").forward(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 16, 6, 6])
        """
        if _is_in_graph(x):
            return _call_in_graph(self, x)
        weight, layer = self.weight, self.quant_layer
        bias, clock = self.bias, self.quant_clock
        x, dtype = self._prepared(x, weight, bias, clock)
        single = x.ndim == 3
        x = x[None] if single else x
        if x.ndim != 4 or x.shape[1] != weight.shape[1] * self.groups:
            raise ValueError(
                f"{type(self).__name__}: expected an input of shape (N, "
                f"{weight.shape[1] * self.groups}, H, W), got {tuple(x.shape)}"
            )
        x, padding = self._padded(x)
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, weight.shape[2:], strict=True)]
        if any(x.shape[i + 2] + 2 * padding[i] < spans[i] for i in (0, 1)):
            raise ValueError(
                f"{type(self).__name__}: a kernel that spans {spans} does not fit an image of "
                f"{tuple(x.shape[2:])} with padding {padding}"
            )
        window = self.stride, padding, self.dilation, self.groups
        out = call(CONV2D, (x, weight, bias), clock, layer, dtype, window)
        return out[0] if single else out

    def _padded(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The image, and the zeros on each side that are left to the convolution."""
        around = self._reversed_padding_repeated_twice  # left, right, top, bottom
        left, right, top, bottom = around
        if self.padding_mode == "zeros" and left == right and top == bottom:
            return x, (top, left)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return functional.pad(x, around, mode=mode), (0, 0)


class Linear(_Linear, nn.Linear):
    """`torch.nn.Linear` whose three matrix products follow a recipe.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters: float32, bfloat16 or float16.
        recipe: a recipe or its name; every layer's recipe of it, whatever its rules say.
        seed: of stochastic rounding.
        index: number of the layer, which names its random bits; give each layer of a model its own.
            `quantize_` does.

    Raises:
        ValueError: for an unknown recipe; when called, for an input that is not (..., K).
        TypeError: when called, for an input that is not of dense floats of 16 or 32 bits.

    >>> import extensor.torch as ext
    >>> layer = ext.Linear(64, 32, recipe="mxfp4")
    >>> layer(torch.ones(8, 64)).shape
    torch.Size([8, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = FP4_RECIPE,
        seed: int = 0,
        index: int = 0,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.set_recipe(_alone(recipe, seed, index))


class Conv2d(_Conv2d, nn.Conv2d):
    """`torch.nn.Conv2d` whose three products follow a recipe.

    Args:
        args: those of `torch.nn.Conv2d`.
        recipe: as `Linear` takes it.
        seed: likewise.
        index: likewise.
        options: those of `torch.nn.Conv2d`.

    Raises:
        ValueError: for an unknown recipe; when called, for an input that is not (N, C, H, W).
        TypeError: when called, for an input that is not of dense floats of 16 or 32 bits.

    >>> import extensor.torch as ext
    >>> conv = ext.Conv2d(3, 16, kernel_size=3, padding=1, recipe="mxfp4")
    >>> conv(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 16, 8, 8])
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | str = FP4_RECIPE,
        seed: int = 0,
        index: int = 0,
        **options: Any,
    ) -> None:
        nn.Conv2d.__init__(self, *args, **options)
        self.set_recipe(_alone(recipe, seed, index))


def _alone(recipe: Recipe | str, seed: int, index: int) -> LayerHandle:
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    return LayerHandle.of_recipe(recipe, recipe.layers, seed, index)


# --- other classes --------------------------------------------------------------------------------

_FORWARDS: dict[type[nn.Module], type[QuantizedModule]] = {nn.Linear: _Linear, nn.Conv2d: _Conv2d}


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module has under a recipe; None for one without products to quantize.

    A subclass of torch's own classes counts if it computes by their forward.

    >>> from extensor.torch.modules import quantized_class
    >>> quantized_class(nn.Linear(2, 2)), quantized_class(nn.ReLU())
    (<class 'extensor.torch.modules.Linear'>, None)
    """
    cls = type(module)
    if issubclass(cls, QuantizedModule):
        return cls
    if cls is nn.Linear:
        return Linear
    if cls is nn.Conv2d:
        return Conv2d
    known = dict(_FORWARDS)
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        known[transformers.Conv1D] = _Conv1D
    for base, quantized in known.items():
        used_directly = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        if isinstance(module, base) and cls.forward is base.forward and not used_directly:
            return _joined(quantized, cls)
    return None


_made: dict[tuple[type, type], type[nn.Module]] = {}


def _joined(quantized: type[QuantizedModule], cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` that computes by ``quantized``, made once."""
    if (quantized, cls) in _made:
        return _made[quantized, cls]

    def reduce(self: nn.Module) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _rebuilt, (quantized, cls), self.__dict__

    names = {"__reduce__": reduce, "__module__": cls.__module__}
    return _made.setdefault((quantized, cls), type(cls.__name__, (quantized, cls), names))


def _rebuilt(quantized: type[QuantizedModule], cls: type[nn.Module]) -> Any:
    made: Any = _joined(quantized, cls)
    return made.__new__(made)
