"""Activation functions as modules; `extensor.ops` has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops import activation, elementwise

__all__ = [
    "ELU",
    "GELU",
    "SELU",
    "HardSigmoid",
    "HardSwish",
    "HardTanh",
    "LeakyReLU",
    "LogSoftmax",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]


class _Activation(Module):
    """A function of `extensor.ops` with fixed options."""

    function: ClassVar[Callable[..., ExTensor]]

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def forward(self, x: ExTensor) -> ExTensor:
        """The function of ``x``."""
        return type(self).function(x, **self.options)

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class ReLU(_Activation):
    """max(x, 0)."""

    function = staticmethod(activation.relu)


class ReLU6(_Activation):
    """min(max(x, 0), 6)."""

    function = staticmethod(activation.relu6)


class Sigmoid(_Activation):
    """1 / (1 + exp(-x))."""

    function = staticmethod(elementwise.sigmoid)


class Tanh(_Activation):
    """tanh(x)."""

    function = staticmethod(elementwise.tanh)


class SiLU(_Activation):
    """x sigmoid(x)."""

    function = staticmethod(activation.silu)


class Mish(_Activation):
    """x tanh(softplus(x))."""

    function = staticmethod(activation.mish)


class SELU(_Activation):
    """Self-normalizing ELU (arXiv 1706.02515)."""

    function = staticmethod(activation.selu)


class HardSigmoid(_Activation):
    """min(max(x / 6 + 1/2, 0), 1)."""

    function = staticmethod(activation.hard_sigmoid)


class HardSwish(_Activation):
    """x hard_sigmoid(x)."""

    function = staticmethod(activation.hard_swish)


class HardTanh(_Activation):
    """min(max(x, -1), 1)."""

    function = staticmethod(activation.hard_tanh)


class Softplus(_Activation):
    """log(1 + exp(x))."""

    function = staticmethod(activation.softplus)


class ELU(_Activation):
    """x where x > 0, else alpha (exp(x) - 1)."""

    function = staticmethod(activation.elu)

    def __init__(self, alpha: float = 1.0) -> None:
        self.options = {"alpha": alpha}


class GELU(_Activation):
    """x Phi(x) with the normal distribution function, or (``"tanh"``) its approximation."""

    function = staticmethod(activation.gelu)

    def __init__(self, approximate: str = "none") -> None:
        self.options = {"approximate": approximate}


class LeakyReLU(_Activation):
    """x where x > 0, else slope x."""

    function = staticmethod(activation.leaky_relu)

    def __init__(self, slope: float = 0.01) -> None:
        self.options = {"slope": slope}


class Softmax(_Activation):
    """exp(x), normalized to sum 1 along an axis."""

    function = staticmethod(activation.softmax)

    def __init__(self, axis: int = -1) -> None:
        self.options = {"axis": axis}


class LogSoftmax(_Activation):
    """The logarithm of `Softmax`."""

    function = staticmethod(activation.log_softmax)

    def __init__(self, axis: int = -1) -> None:
        self.options = {"axis": axis}


class PReLU(Module):
    """x where x > 0, else slope x, with a trained slope (arXiv 1502.01852).

    Attributes:
        slope: float32, a scalar.
    """

    def __init__(self, slope: float = 0.25) -> None:
        self.slope = Parameter(np.asarray(slope, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """The function of ``x``."""
        return activation.prelu(x, self.slope)
