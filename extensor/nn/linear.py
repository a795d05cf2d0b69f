"""Linear layers, and what all layers with matrix products have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.mode import is_grad_enabled
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import bfloat16
from extensor.nn import init
from extensor.nn.checks import check_last_axes, check_size, check_width
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.block_scaled import grouped_weight_only_linear, weight_only_linear
from extensor.ops.gated import gated_silu
from extensor.ops.joining import stack
from extensor.ops.matmul import linear
from extensor.ops.prequantized import prequantized_matmul
from extensor.ops.quantized import quantized_matmul
from extensor.quant.recipe_state import LayerContext

__all__ = ["GemmLayer", "Linear", "apply_all", "can_group", "gated_linear", "grouped_linear"]


class GemmLayer(Module):
    """Base of layers whose GEMMs a recipe can quantize; subclasses set both attributes.

    Attributes:
        weight: float32, output channels first; or in blocks: a Buffer by `quantize_model`, a
            Parameter by `cast_weights`.
        quant: the layer under a recipe; None computes in the dtype of the operands.
    """

    weight: ExTensor
    quant: LayerContext | None

    def _next_use(self, quant: LayerContext) -> LayerContext:
        """The context of a forward pass; each that is recorded rounds with bits of its own.

        The optimizer that updates the weight ends the step of its recipe.
        """
        if not is_grad_enabled():
            return quant
        if isinstance(self.weight, Parameter):
            self.weight.recipe_state = quant.state
        return quant.next_use()


class Linear(GemmLayer):
    """y = x weight^T + bias.

    Args:
        in_features: K, 1 or more.
        out_features: N, 1 or more.
        bias: whether there is one.
        rng: draws the initial weights, uniform in +-1 / sqrt(K); see `init.as_rng`.

    Attributes:
        weight: float32 (N, K), or blocked along K by `quantize_model`; bias: float32 (N,), or None.
        quant: the layer under a recipe; None computes in the dtype of the operands.

    Raises:
        ValueError: for sizes below 1; when called, for an input that is not (..., K).
        TypeError: when called, for a float64 input beside weights that are not.

    >>> layer = et.nn.Linear(4, 2, rng=0)
    >>> layer
    Linear(4, 2)
    >>> layer(et.zeros((8, 4))).shape
    (8, 2)
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, rng: Seed = None
    ) -> None:
        self.in_features = check_size("in_features", in_features)
        self.out_features = check_size("out_features", out_features)
        generator, bound = init.as_rng(rng), 1.0 / math.sqrt(in_features)
        shape = out_features, in_features
        self.weight = init.parameter(shape, lambda r: init.uniform(shape, bound, r), generator)
        self.bias = Parameter(init.uniform(shape[:1], bound, generator)) if bias else None
        self.quant = None

    def forward(self, x: ExTensor) -> ExTensor:
        """(..., K) -> (..., N).

        Args:
            x: the input.

        Returns:
            x weight^T + bias.

        >>> et.nn.Linear(4, 2).forward(et.zeros((3, 5, 4))).shape
        (3, 5, 2)
        """
        check_last_axes("Linear", x, self.in_features)
        check_width("Linear", x, self.weight)
        packed = self.weight.is_blocked and not self.weight.is_blocked_parameter
        if self.quant is None:
            if packed:
                return weight_only_linear(x, self.weight, self.bias)
            return linear(x, self.weight, self.bias)
        if packed:
            y = prequantized_matmul(x, self.weight, self.quant)
            return y if self.bias is None else y + self.bias
        return quantized_matmul(x, self.weight, self._next_use(self.quant), self.bias)

    @property
    def is_weight_only(self) -> bool:
        """Whether a call is a product with packed weights, and no more."""
        weight = self.weight
        if not weight.is_blocked or weight.is_blocked_parameter or weight.axis != 1:
            return False
        if self._hooks or self._pre_hooks:
            return False
        return self.quant is None or self.quant.operand("fprop.x") == "float32"

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.in_features}, {self.out_features}{bias}"


def can_group(layers: Sequence[Module], x: ExTensor, gradients: bool = False) -> bool:
    """Whether layers run together: packed weights alone, where that is quicker.

    Args:
        layers: of one kind, with biases or without.
        x: what they would read.
        gradients: whether what runs them has gradients, as `grouped_linear` does.

    Returns:
        False on a CPU, with gradients that it lacks, dense weights, quantized activations, hooks or
        adapters.

    >>> from extensor.nn.linear import can_group
    >>> can_group([et.nn.Linear(4, 2), et.nn.Linear(4, 2)], et.ones((3, 4)))
    False
    """
    if not x.backend.groups_products or (is_grad_enabled() and not gradients):
        return False
    alike = len({getattr(layer, "quant", None) is None for layer in layers}) == 1
    return alike and all(type(layer) is Linear and layer.is_weight_only for layer in layers)


def apply_all(layers: Sequence[Linear], x: ExTensor) -> Sequence[ExTensor]:
    """What each of several layers makes of one input.

    On a GPU, without gradients, their packed weights are multiplied in one launch where the input
    has few rows.

    Args:
        layers: those that read x.
        x: (..., K).

    Returns:
        What a call of each gives.

    >>> from extensor.nn.linear import apply_all
    >>> [y.shape for y in apply_all([et.nn.Linear(4, 2), et.nn.Linear(4, 3)], et.ones((5, 4)))]
    [(5, 2), (5, 3)]
    """
    if not can_group(layers, x) or x.shape[-1] != layers[0].in_features:
        return [layer(x) for layer in layers]
    rows, lead = x.data.reshape((math.prod(x.shape[:-1]), x.shape[-1])), x.shape[:-1]
    weights, dtype = [layer.weight.data for layer in layers], _dtype_of_results(layers[0], x)
    made = x.backend.weight_only_matmuls(rows, weights, dtype)
    outs = [wrap(y.reshape((*lead, y.shape[-1])), x.backend) for y in made]
    biases = [layer.bias for layer in layers]
    return [y if bias is None else y + bias for y, bias in zip(outs, biases, strict=True)]


def gated_linear(gate: Linear, up: Linear, x: ExTensor) -> ExTensor:
    """SwiGLU: silu(gate(x)) up(x).

    On a GPU, without gradients and biases, packed weights take one launch where x has few rows.

    Args:
        gate: what goes through silu.
        up: what it is multiplied with, of the same shape.
        x: (..., K).

    Returns:
        (..., N), what `extensor.gated_silu` gives of calls of both.

    >>> from extensor.nn.linear import gated_linear
    >>> gated_linear(et.nn.Linear(4, 2), et.nn.Linear(4, 2), et.ones((5, 4))).shape
    (5, 2)
    """
    layers = gate, up
    together = can_group(layers, x) and x.shape[-1] == gate.in_features
    if not together or any(layer.bias is not None for layer in layers):
        return gated_silu(*apply_all(layers, x))
    rows, lead = x.data.reshape((math.prod(x.shape[:-1]), x.shape[-1])), x.shape[:-1]
    weights, dtype = [layer.weight.data for layer in layers], _dtype_of_results(gate, x)
    made = x.backend.weight_only_gated(rows, weights, dtype, 1.0, None)
    return wrap(made.reshape((*lead, made.shape[-1])), x.backend)


def _dtype_of_results(layer: Linear, x: ExTensor) -> str:
    """Of a product with packed weights alone."""
    narrow = x.dtype is bfloat16 and layer.quant is not None
    return "bfloat16" if narrow else "float32"


def grouped_linear(layers: Sequence[Linear], x: ExTensor, ends: Sequence[int]) -> ExTensor:
    """What layers make of a group of rows each, in one product.

    The gradient of x decodes one weight at a time.

    Args:
        layers: one for each group, for which `can_group` holds with gradients.
        x: (M, K), the rows of each group together.
        ends: where each group's rows end, one or more to a group.

    Returns:
        (M, N), as `Linear` gives it.

    >>> from extensor.nn.linear import grouped_linear
    >>> layers = [et.quantize_model(et.nn.Linear(32, 2), "mxfp4_weights") for _ in range(2)]
    >>> grouped_linear(layers, et.ones((3, 32)), [1, 3]).shape
    (3, 2)
    """
    y = grouped_weight_only_linear(x, [one.weight for one in layers], ends)
    if layers[0].quant is not None:
        y = y.to(x.dtype)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not biases:
        return y
    numbers = np.repeat(np.arange(len(ends)), np.diff([0, *ends]))
    return y + stack(biases)[ExTensor(numbers, device=x.device)]
