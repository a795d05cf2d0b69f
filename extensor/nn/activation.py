"""Activation functions as modules; `extensor.ops` has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops import activation, elementwise, softmax, trigonometry

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
        """See :meth:`extensor.nn.Module.forward`."""
        return type(self).function(x, **self.options)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class ReLU(_Activation):
    """max(x, 0).

    >>> et.nn.ReLU()(et.ExTensor([-1.0, 0.0, 2.0])).tolist()
    [0.0, 0.0, 2.0]
    """

    function = staticmethod(activation.relu)


class ReLU6(_Activation):
    """min(max(x, 0), 6).

    >>> et.nn.ReLU6()(et.ExTensor([-1.0, 2.0, 8.0])).tolist()
    [0.0, 2.0, 6.0]
    """

    function = staticmethod(activation.relu6)


class Sigmoid(_Activation):
    """1 / (1 + exp(-x)).

    >>> et.nn.Sigmoid()(et.ExTensor([0.0, 100.0])).tolist()
    [0.5, 1.0]
    """

    function = staticmethod(elementwise.sigmoid)


class Tanh(_Activation):
    """tanh(x).

    >>> et.nn.Tanh()(et.ExTensor([0.0, 100.0])).tolist()
    [0.0, 1.0]
    """

    function = staticmethod(trigonometry.tanh)


class SiLU(_Activation):
    """x sigmoid(x), also known as swish (arXiv 1702.03118).

    >>> et.nn.SiLU()(et.ExTensor([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """

    function = staticmethod(activation.silu)


class Mish(_Activation):
    """x tanh(softplus(x)) (arXiv 1908.08681).

    >>> et.nn.Mish()(et.ExTensor([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """

    function = staticmethod(activation.mish)


class SELU(_Activation):
    """Self-normalizing ELU (arXiv 1706.02515).

    >>> et.nn.SELU()(et.ExTensor([0.0, 1.0])).numpy().round(4)
    array([0.    , 1.0507], dtype=float32)
    """

    function = staticmethod(activation.selu)


class HardSigmoid(_Activation):
    """min(max(x / 6 + 1/2, 0), 1).

    >>> et.nn.HardSigmoid()(et.ExTensor([-3.0, 0.0, 3.0])).tolist()
    [0.0, 0.5, 1.0]
    """

    function = staticmethod(activation.hard_sigmoid)


class HardSwish(_Activation):
    """x hard_sigmoid(x) (arXiv 1905.02244, section 5.2).

    >>> et.nn.HardSwish()(et.ExTensor([0.0, 3.0])).tolist()
    [0.0, 3.0]
    """

    function = staticmethod(activation.hard_swish)


class HardTanh(_Activation):
    """min(max(x, -1), 1).

    >>> et.nn.HardTanh()(et.ExTensor([-2.0, 0.5, 2.0])).tolist()
    [-1.0, 0.5, 1.0]
    """

    function = staticmethod(activation.hard_tanh)


class Softplus(_Activation):
    """log(1 + exp(x)).

    >>> et.nn.Softplus()(et.ExTensor([0.0, 100.0])).numpy().round(4)
    array([  0.6931, 100.    ], dtype=float32)
    """

    function = staticmethod(activation.softplus)


class ELU(_Activation):
    """x where x > 0, else alpha (exp(x) - 1) (arXiv 1511.07289).

    Args:
        alpha: minus the limit of the function far below 0.

    >>> et.nn.ELU(alpha=2.0)(et.ExTensor([-100.0, 1.0])).tolist()
    [-2.0, 1.0]
    """

    function = staticmethod(activation.elu)

    def __init__(self, alpha: float = 1.0) -> None:
        self.options = {"alpha": alpha}


class GELU(_Activation):
    """x Phi(x), Phi the normal distribution function (arXiv 1606.08415).

    Args:
        approximate: ``"none"``, or ``"tanh"`` for the paper's approximation by tanh.

    Raises:
        ValueError: when called, for another ``approximate``.

    >>> et.nn.GELU()(et.ExTensor([0.0, 1.0])).numpy().round(4)
    array([0.    , 0.8413], dtype=float32)
    """

    function = staticmethod(activation.gelu)

    def __init__(self, approximate: str = "none") -> None:
        self.options = {"approximate": approximate}


class LeakyReLU(_Activation):
    """x where x > 0, else slope x.

    Args:
        slope: the factor on values below 0.

    >>> et.nn.LeakyReLU(slope=0.5)(et.ExTensor([-2.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    function = staticmethod(activation.leaky_relu)

    def __init__(self, slope: float = 0.01) -> None:
        self.options = {"slope": slope}


class Softmax(_Activation):
    """exp(x), normalized to sum 1 along an axis.

    Args:
        axis: the axis whose values sum to 1.

    >>> et.nn.Softmax()(et.zeros((1, 4))).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """

    function = staticmethod(softmax.softmax)

    def __init__(self, axis: int = -1) -> None:
        self.options = {"axis": axis}


class LogSoftmax(_Activation):
    """The logarithm of `Softmax`, computed without overflow.

    Args:
        axis: the axis whose exponentials sum to 1.

    >>> et.nn.LogSoftmax()(et.ExTensor([0.0, -1000.0])).tolist()
    [0.0, -1000.0]
    """

    function = staticmethod(softmax.log_softmax)

    def __init__(self, axis: int = -1) -> None:
        self.options = {"axis": axis}


class PReLU(Module):
    """x where x > 0, else slope x, with a trained slope (arXiv 1502.01852).

    Args:
        slope: its first value.

    Attributes:
        slope: float32, a scalar Parameter.

    >>> layer = et.nn.PReLU(slope=0.5)
    >>> layer(et.ExTensor([-2.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    def __init__(self, slope: float = 0.25) -> None:
        self.slope = Parameter(np.asarray(slope, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`."""
        return activation.prelu(x, self.slope)
