"""Activation functions of one value; `ops.gated` and `ops.softmax` have those of several."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.mode import MODE
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.storage import Kept
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only
from extensor.ops.arithmetic import clip, where
from extensor.ops.declare import NO_TENSOR, unary_samples
from extensor.ops.elementwise import erf, sigmoid
from extensor.ops.trigonometry import tanh

__all__ = [
    "elu", "gelu", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu", "mish", "prelu", "relu",
    "relu6", "selu", "silu", "softplus",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Positive(Kept):
    """Where a rectified array is positive: a bit a value."""

    fused: ClassVar[bool] = True
    bits: Any
    shape: tuple[int, ...]
    dtype: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What is kept."""
        return (self.bits,)

    def values(self, backend: Any) -> Any:
        """Ones where it is, as a gradient that is recorded reads them."""
        ones = backend.xp.unpackbits(self.bits)[: math.prod(self.shape)]
        return ones.astype(self.dtype).reshape(self.shape)


def _positive(backend: Any, out: Any) -> _Positive:
    return _Positive(backend.positive_bits(out), tuple(out.shape), out.dtype)


def _relu_grad(backend: Any, g: Any, out: Any) -> Any:
    if isinstance(out, _Positive):
        return backend.relu_grad_of_bits(g, out.bits)
    return backend.relu_grad(g, out)


@primitive(
    forward=lambda backend, x: backend.relu(x),
    vjps=(lambda g, out, x: where(out > 0, g, 0.0),),
    fused_vjp=lambda backend, g, out, inputs, needs: (_relu_grad(backend, g, out),),
    reads="output",
    out_slot="activation",
    smaller_output=_positive,
    samples=unary_samples(lambda x: np.maximum(x, 0), apart_from=(0.0,)),
    errors=NO_TENSOR,
)
def relu(x: ExTensor) -> ExTensor:
    """The rectifier, ``max(x, 0)``; the gradient at 0 is 0.

    Args:
        x: any shape; NaN stays NaN.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.relu(et.ExTensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    tensors_only("relu", x)
    return apply("relu", x)


@composite(
    samples=unary_samples(lambda x: np.clip(x, 0, 6), -2, 8, apart_from=(0.0, 6.0)),
    errors=NO_TENSOR,
)
def relu6(x: ExTensor) -> ExTensor:
    """The rectifier limited to 6, ``min(max(x, 0), 6)``.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.relu6(et.ExTensor([-1.0, 2.0, 9.0])).tolist()
        [0.0, 2.0, 6.0]
    """
    return clip(x, 0.0, 6.0)


@composite(
    samples=lambda rng: [
        *unary_samples(lambda x: np.where(x > 0, x, 0.01 * x), apart_from=(0.0,))(rng),
        Sample((np.array([-2.0, 3.0]), 0.3), expected=np.array([-0.6, 3.0])),
    ],
    errors=NO_TENSOR,
)
def leaky_relu(x: ExTensor, slope: float = 0.01) -> ExTensor:
    """The leaky rectifier: x where it is positive, ``slope * x`` elsewhere.

    Args:
        x: any shape.
        slope: the factor of values that are not positive.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.leaky_relu(et.ExTensor([-4.0, 2.0]), 0.25).tolist()
        [-1.0, 2.0]
    """
    tensors_only("leaky_relu", x)
    return where(x > 0, x, x * slope)


@composite(
    samples=lambda rng: [
        Sample((np.array([[-1.0, 2.0, -0.5], [0.3, -2.0, 1.0]]), np.array([0.1, 0.2, 0.3])))
    ],
    errors=(BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "that broadcast"),),
)
def prelu(x: ExTensor, slope: ExTensor) -> ExTensor:
    """The leaky rectifier with a slope that is learned: x where positive, ``slope * x`` elsewhere.

    Args:
        x: any shape.
        slope: broadcasts to x.

    Returns:
        The shape of x, of the promoted dtype.

    Raises:
        TypeError, ValueError: for a slope that is no tensor, or does not broadcast.

    Source: He et al., arXiv 1502.01852, section 2.1.

    Example:
        >>> et.prelu(et.ExTensor([[-4.0, -4.0]]), et.ExTensor([0.25, 0.5])).tolist()
        [[-1.0, -2.0]]
    """
    tensors_only("prelu", x, slope)
    return where(x > 0, x, x * slope)


@primitive(
    forward=lambda backend, x: backend.xp.logaddexp(x, x.dtype.type(0)),
    vjps=(lambda g, out, x: g * x.sigmoid(),),
    reads="inputs",
    slots=("activation",),
    to_float=True,
    samples=unary_samples(lambda x: np.log1p(np.exp(x))),
    errors=NO_TENSOR,
)
def softplus(x: ExTensor) -> ExTensor:
    """A smooth rectifier, ``log(1 + exp(x))``, without overflow.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.softplus(et.ExTensor([-1000.0, 0.0, 9.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [0.     0.6931 9.0001])
    """
    tensors_only("softplus", x)
    return apply("softplus", x)


def _gelu_vjp(g: ExTensor, out: None, x: ExTensor, saved: Any) -> ExTensor:
    phi = (erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    return g * (phi + x * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi)))


def _gelu(backend: Any, x: Any) -> tuple[Any, Any]:
    store = None if MODE.storage is None or not MODE.enabled else MODE.storage.of("activation")
    out = None if store is None else store.beside(x, backend.gelu_and_pack)
    return backend.gelu(x) if out is None else (out, None)


@primitive(
    name="gelu_exact",
    forward=_gelu,
    vjps=(_gelu_vjp,),
    fused_vjp=lambda backend, g, out, inputs, needs, saved, **owns: (
        backend.gelu_grad(g, inputs[0], saved, **owns),
    ),
    reads="inputs",
    slots=("activation",),
    saves=True,
    saved_again=lambda backend, x: backend.gelu(x)[1],
    to_float=True,
    samples=unary_samples(
        lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2
    ),
    errors=NO_TENSOR,
)
def _gelu_exact(x: ExTensor) -> ExTensor:
    """X times the normal distribution function of x."""
    tensors_only("gelu_exact", x)
    return apply("gelu_exact", x)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)),)), Sample((rng.normal(size=(2, 3)), "tanh"))
    ],
    errors=(BadInput((np.zeros(3), "cubic"), ValueError, "'none' or 'tanh'"),),
)  # fmt: skip
def gelu(x: ExTensor, approximate: str = "none") -> ExTensor:
    """The Gaussian error linear unit: x times the normal distribution function of x.

    Args:
        x: any shape.
        approximate: "none", or "tanh" for ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x **
            3)))``.

    Returns:
        The shape of x; integers give float32.

    Raises:
        ValueError: for another approximation.

    Source: Hendrycks and Gimpel, arXiv 1606.08415, section 2.

    Example:
        >>> et.gelu(et.ExTensor([-1.0, 0.0, 1.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [-0.1587  0.      0.8413])
    """
    tensors_only("gelu", x)
    if approximate == "none":
        return _gelu_exact(x)
    if approximate != "tanh":
        raise ValueError(f"gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    inside = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (tanh(inside) + 1.0)


@composite(samples=unary_samples(lambda x: x / (1 + np.exp(-x))), errors=NO_TENSOR)
def silu(x: ExTensor) -> ExTensor:
    """The sigmoid linear unit, ``x * sigmoid(x)``, also named swish.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Source: Elfwing et al., arXiv 1702.03118.

    Example:
        >>> et.silu(et.ExTensor([-1.0, 0.0, 1.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [-0.2689  0.      0.7311])
    """
    return x * sigmoid(x)


@composite(samples=unary_samples(lambda x: x * np.tanh(np.log1p(np.exp(x)))), errors=NO_TENSOR)
def mish(x: ExTensor) -> ExTensor:
    """The unit ``x * tanh(softplus(x))``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Source: Misra, arXiv 1908.08681.

    Example:
        >>> et.mish(et.ExTensor([-1.0, 0.0, 1.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [-0.3034  0.      0.8651])
    """
    return x * tanh(softplus(x))


@composite(
    samples=lambda rng: [
        *unary_samples(lambda x: np.where(x > 0, x, np.expm1(x)), apart_from=(0.0,))(rng),
        Sample((np.array([-2.0, 3.0]), 0.5), expected=np.array([0.5 * np.expm1(-2.0), 3.0])),
    ],
    errors=NO_TENSOR,
)
def elu(x: ExTensor, alpha: float = 1.0) -> ExTensor:
    """The exponential linear unit: x where positive, ``alpha * (exp(x) - 1)`` elsewhere.

    Args:
        x: any shape.
        alpha: minus the limit for large negative x.

    Returns:
        The shape of x; integers give float32.

    Source: Clevert et al., arXiv 1511.07289.

    Example:
        >>> et.elu(et.ExTensor([-1.0, 2.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [-0.6321  2.    ])
    """
    tensors_only("elu", x)
    return where(x > 0, x, clip(x, max=0.0).expm1() * alpha)  # clipped, so as not to overflow


@composite(samples=unary_samples(apart_from=(0.0,)), errors=NO_TENSOR)
def selu(x: ExTensor) -> ExTensor:
    """The scaled unit ``1.0507... * elu(x, 1.6733...)``, which keeps mean 0 and variance 1.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Source: Klambauer et al., arXiv 1706.02515, equation 2.

    Example:
        >>> et.selu(et.ExTensor([-1.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [-1.1113  1.0507])
    """
    return elu(x, 1.6732632423543772) * 1.0507009873554805


@composite(
    samples=unary_samples(lambda x: np.clip(x / 6 + 0.5, 0, 1), -4, 4, apart_from=(-3.0, 3.0)),
    errors=NO_TENSOR,
)
def hard_sigmoid(x: ExTensor) -> ExTensor:
    """A piecewise linear sigmoid, ``x / 6 + 1/2`` limited to 0..1.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.hard_sigmoid(et.ExTensor([-3.0, 0.0, 3.0])).tolist()
        [0.0, 0.5, 1.0]
    """
    tensors_only("hard_sigmoid", x)
    return clip(x * (1 / 6) + 0.5, 0.0, 1.0)


@composite(
    samples=unary_samples(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), -4, 4, (-3.0, 3.0)),
    errors=NO_TENSOR,
)
def hard_swish(x: ExTensor) -> ExTensor:
    """A piecewise approximation of `silu`, ``x * hard_sigmoid(x)``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Source: Howard et al., arXiv 1905.02244, section 5.2.

    Example:
        >>> et.hard_swish(et.ExTensor([-3.0, 0.0, 3.0])).tolist()
        [-0.0, 0.0, 3.0]
    """
    return x * hard_sigmoid(x)


@composite(
    samples=unary_samples(lambda x: np.clip(x, -1, 1), apart_from=(-1.0, 1.0)), errors=NO_TENSOR
)
def hard_tanh(x: ExTensor) -> ExTensor:
    """A piecewise linear tanh: x limited to -1..1.

    Args:
        x: any shape.

    Returns:
        The shape of x.

    Example:
        >>> et.hard_tanh(et.ExTensor([-2.0, 0.5, 2.0])).tolist()
        [-1.0, 0.5, 1.0]
    """
    return clip(x, -1.0, 1.0)
