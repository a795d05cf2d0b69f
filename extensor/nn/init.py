"""Initial weights: functions of a shape and a random generator that return float32 arrays.

A weight's first axis is its outputs, the others its inputs: (out, in) in `Linear`,
(out, in / groups, kh, kw) in `Conv2d`. fan_in is the product of all axes but the first, fan_out the
product of all axes but the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from extensor.autograd.creation import Seed
from extensor.errors import unknown_name
from extensor.nn.parameter import Parameter

__all__ = [
    "GAINS",
    "Skeleton",
    "as_rng",
    "fans",
    "kaiming_normal",
    "kaiming_uniform",
    "orthogonal",
    "trunc_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
]

if TYPE_CHECKING:
    _Generator = np.random.Generator
else:  # a model that is loaded draws nothing, and numpy's generators take 6 MB
    _Generator = object

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2.0), "selu": 0.75}
"""Gains that keep the variance through a layer and the function after it (arXiv 1502.01852)."""


def as_rng(rng: Seed) -> np.random.Generator:
    """Make a generator of an ``rng`` argument.

    A model passes one generator to all its layers. One seed for several layers of one shape would
    give them the same weights.

    Args:
        rng: a generator, which is returned itself; a seed; or None for one from the system.

    Returns:
        The generator.

    Raises:
        TypeError: if it is no generator, int or None.

    >>> rng = et.nn.init.as_rng(0)
    >>> et.nn.init.as_rng(rng) is rng
    True
    """
    # Two tests: the second one imports numpy's generators.
    if isinstance(rng, Skeleton) or isinstance(rng, np.random.Generator):  # noqa: SIM101
        return rng
    if rng is None or (isinstance(rng, (int, np.integer)) and not isinstance(rng, bool)):
        return np.random.default_rng(rng)
    raise TypeError(f"rng: expected a numpy.random.Generator, a seed or None, got {rng!r}")


class Skeleton(_Generator):
    """In place of a generator: layers allocate no memory for large weights, which a loader fills.

    The weights are zeros that share one number's memory; writing to them is an error.

    >>> layer = et.nn.Linear(1000, 1000, rng=et.nn.init.Skeleton())
    >>> layer.weight.data.strides
    (0, 0)
    """

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Draws of small values, by a generator that is made for them."""
        return getattr(np.random.default_rng(0), name)


def parameter(shape: Shape, draw: Callable[[np.random.Generator], Array], rng: Seed) -> Parameter:
    """A parameter with drawn values; or without memory, if the generator is a `Skeleton`.

    Args:
        shape: any.
        draw: gives float32 of that shape.
        rng: a generator, a seed or None.

    Returns:
        The parameter.

    >>> et.nn.init.parameter((2, 3), lambda rng: et.nn.init.uniform((2, 3), 1.0, rng), 0).shape
    (2, 3)
    """
    if not isinstance(rng, Skeleton):
        return Parameter(draw(as_rng(rng)))
    made = Parameter(np.zeros((), np.float32))
    made.data = made.backend.xp.broadcast_to(made.data, shape)
    return made


def fans(shape: Shape) -> tuple[int, int]:
    """The numbers of inputs and outputs that a weight connects: (fan_in, fan_out).

    Args:
        shape: (out, in, ...) of the weight.

    Returns:
        The product of all axes but the first, and of all but the second.

    Raises:
        ValueError: for fewer than two axes, or an axis of length 0.

    >>> et.nn.init.fans((16, 3, 5, 5))
    (75, 400)
    """
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"shape: expected two axes or more, (out, in, ...), none empty, got {tuple(shape)}; "
            "a bias starts from zeros"
        )
    return math.prod(shape[1:]), shape[0] * math.prod(shape[2:])


def xavier_uniform(shape: Shape, rng: Seed = None, gain: float = 1.0) -> Array:
    """Uniform in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, eq. 16).

    Args:
        shape: (out, in, ...).
        rng: a generator, a seed or None.
        gain: above 0; `GAINS` has usual ones.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: for a shape of fewer than two axes, or a gain not above 0.

    >>> w = et.nn.init.xavier_uniform((300, 300), rng=0)
    >>> w.dtype, bool(abs(w).max() < 0.1)
    (dtype('float32'), True)
    """
    bound = _positive("gain", gain) * math.sqrt(6.0 / sum(fans(shape)))
    return uniform(shape, bound, rng)


def xavier_normal(shape: Shape, rng: Seed = None, gain: float = 1.0) -> Array:
    """Normal with standard deviation gain sqrt(2 / (fan_in + fan_out)).

    Args:
        shape: (out, in, ...).
        rng: a generator, a seed or None.
        gain: above 0; `GAINS` has usual ones.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: for a shape of fewer than two axes, or a gain not above 0.

    Source: Glorot and Bengio, AISTATS 2010, eq. 12.

    >>> round(float(et.nn.init.xavier_normal((300, 500), rng=0).std()), 2)
    0.05
    """
    return _normal(shape, _positive("gain", gain) * math.sqrt(2.0 / sum(fans(shape))), rng)


def kaiming_uniform(
    shape: Shape, rng: Seed = None, gain: float | str = "relu", fan: Literal["in", "out"] = "in"
) -> Array:
    """Uniform in +-gain sqrt(3 / fan) (arXiv 1502.01852).

    Args:
        shape: (out, in, ...).
        rng: a generator, a seed or None.
        gain: a number above 0, or a name in `GAINS`.
        fan: which fan keeps its variance: ``"in"`` forward, ``"out"`` backward.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: for a shape of fewer than two axes, an unknown gain or fan, or a gain not
            above 0.

    >>> et.nn.init.kaiming_uniform((2, 8), rng=0, gain="tanh").shape
    (2, 8)
    """
    return uniform(shape, _kaiming(shape, gain, fan) * math.sqrt(3.0), rng)


def kaiming_normal(
    shape: Shape, rng: Seed = None, gain: float | str = "relu", fan: Literal["in", "out"] = "in"
) -> Array:
    """Normal with standard deviation gain / sqrt(fan) (arXiv 1502.01852, eqs. 10 and 14).

    Args:
        shape: (out, in, ...).
        rng: a generator, a seed or None.
        gain: a number above 0, or a name in `GAINS`.
        fan: which fan keeps its variance: ``"in"`` forward, ``"out"`` backward.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: as `kaiming_uniform`.

    >>> round(float(et.nn.init.kaiming_normal((500, 200), rng=0).std()), 2)
    0.1
    """
    return _normal(shape, _kaiming(shape, gain, fan), rng)


def trunc_normal(
    shape: Shape, rng: Seed = None, std: float = 0.02, mean: float = 0.0, bound: float = 2.0
) -> Array:
    """Normal, values beyond ``bound`` standard deviations drawn again.

    Args:
        shape: any.
        rng: a generator, a seed or None.
        std: standard deviation before the redrawing, above 0.
        mean: the mean.
        bound: in standard deviations, 0.25 or more.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: if ``std`` is not above 0, or ``bound`` below 1/4 (redrawing would take long).

    >>> import numpy as np
    >>> w = et.nn.init.trunc_normal((1000,), rng=0, std=0.02)
    >>> bool(abs(w).max() <= np.float32(0.04))
    True
    """
    _positive("std", std)
    if not bound >= 0.25:
        raise ValueError(f"bound: expected 0.25 standard deviations or more, got {bound!r}")
    generator = as_rng(rng)
    values = np.asarray(generator.standard_normal(shape))
    while (outside := np.abs(values) > bound).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return (mean + std * values).astype(np.float32)


def orthogonal(shape: Shape, rng: Seed = None, gain: float = 1.0) -> Array:
    """Rows, or columns if there are fewer, orthonormal times ``gain``, uniform over all such.

    The Q of a normal matrix, its signs fixed by R's diagonal (arXiv 1312.6120; Mezzadri, arXiv
    math-ph/0609050). Axes after the first are taken as one.

    Args:
        shape: (out, in, ...).
        rng: a generator, a seed or None.
        gain: above 0.

    Returns:
        float32 of ``shape``.

    Raises:
        ValueError: for a shape of fewer than two axes, or a gain not above 0.

    >>> import numpy as np
    >>> q = et.nn.init.orthogonal((2, 8), rng=0)
    >>> bool(np.allclose(q @ q.T, np.eye(2), atol=1e-6))
    True
    """
    fans(shape)
    _positive("gain", gain)
    rows, columns = shape[0], math.prod(shape[1:])
    normal = as_rng(rng).standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q *= np.where(np.diagonal(r) < 0, -1.0, 1.0)
    matrix = q if rows >= columns else q.T
    return (gain * matrix).reshape(shape).astype(np.float32)


def _kaiming(shape: Shape, gain: float | str, fan: str) -> float:
    if isinstance(gain, str):
        if gain not in GAINS:
            raise ValueError(unknown_name("gain", gain, GAINS))
        gain = GAINS[gain]
    if fan not in ("in", "out"):
        raise ValueError(f"fan: expected 'in' or 'out', got {fan!r}")
    return _positive("gain", gain) / math.sqrt(fans(shape)[fan == "out"])


def _positive(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return value


def uniform(shape: Shape, bound: float, rng: Seed = None) -> Array:
    """Uniform in +-bound, for a weight or a bias.

    Args:
        shape: any.
        bound: the largest magnitude.
        rng: a generator, a seed or None.

    Returns:
        float32 of ``shape``.

    >>> et.nn.init.uniform((3,), bound=0.0)
    array([0., 0., 0.], dtype=float32)
    """
    return as_rng(rng).uniform(-bound, bound, shape).astype(np.float32)


def _normal(shape: Shape, std: float, rng: Seed) -> Array:
    return (std * as_rng(rng).standard_normal(shape)).astype(np.float32)
