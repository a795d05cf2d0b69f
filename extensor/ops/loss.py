"""Losses. All take ``reduction``: "mean", "sum" or "none".

Those of 16-bit floats are computed in float32 and are float32, since a sum over a batch rarely fits
16 bits; gradients have their tensor's dtype.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import LEVEL_HALF, float32
from extensor.ops.activation import softplus
from extensor.ops.arguments import tensors_only
from extensor.ops.arithmetic import clip, where
from extensor.ops.elementwise import sigmoid

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "focal", "hinge", "huber",
    "kl_div", "l1", "mse", "smooth_l1",
]  # fmt: skip

Reduction = Literal["mean", "sum", "none"]


def reduced(name: str, losses: ExTensor, reduction: str) -> ExTensor:
    """The mean or the sum of losses, or themselves.

    Raises:
        ValueError: for a mean over none, or another reduction.
    """
    if reduction == "mean":
        if not losses.size:
            raise ValueError(
                f"{name}: no values to average over in shape {losses.shape}; leave an empty batch "
                "out, or ask for reduction='sum'"
            )
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses
    raise ValueError(f"{name}: reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")


def wide(x: ExTensor) -> ExTensor:
    """16-bit floats widened to float32; other tensors as they are."""
    return x.astype(float32) if x.dtype.level == LEVEL_HALF else x


def _pair(name: str, prediction: Any, target: Any) -> tuple[ExTensor, ExTensor]:
    """Both as `wide` gives them; refuses tensors of different shapes."""
    tensors_only(name, prediction, target)
    if prediction.shape != target.shape:
        raise ValueError(
            f"{name}: expected prediction and target of one shape, got {prediction.shape} and "
            f"{target.shape}; reshape one (broadcasting here is almost always a mistake)"
        )
    return wide(prediction), wide(target)


def _raw(x: ExTensor) -> Any:
    return x.dequantize().data if x.is_blocked else x.data


def _within(name: str, what: str, x: ExTensor, hint: str) -> None:
    """Refuse values outside 0..1; NaN passes and shows in the loss."""
    data = _raw(x)
    if bool(((data < 0) | (data > 1)).any()):  # one wait for a GPU
        got = f"{float(data.min())!r}..{float(data.max())!r}"
        raise ValueError(f"{name}: expected {what} in 0..1, got {got}{hint}")


_SOFT = "; a label of another range is divided by its largest value first"


def _two(rng: np.random.Generator) -> list[Sample]:
    a = rng.normal(size=(3, 4))
    b = a + rng.choice([-1.0, 1.0], (3, 4)) * rng.choice([0.3, 0.7, 1.6], (3, 4))
    return [Sample((a, b), {"reduction": how}) for how in ("mean", "sum", "none")]


_EMPTY = np.zeros((0, 2))
_PAIR_ERRORS = (
    BadInput((_EMPTY, _EMPTY), ValueError, "no values to average over in shape (0, 2); leave an"),
    BadInput((np.zeros((2, 3)), np.zeros((2, 1))), ValueError, "of one shape"),
    BadInput((np.zeros(3), np.zeros(3)), ValueError, "'mean', 'sum'", {"reduction": "avg"}),
)


@composite(samples=_two, errors=_PAIR_ERRORS)
def mse(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """The squared error, ``(prediction - target) ** 2``.

    Args:
        prediction: any shape.
        target: of the same shape.
        reduction: "mean", "sum", or "none" for the error of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for different shapes, another reduction, or a mean of no values.

    Example:
        >>> et.mse(et.ExTensor([1.0, 4.0]), et.ExTensor([1.0, 2.0])).item()
        2.0
    """
    prediction, target = _pair("mse", prediction, target)
    difference = prediction - target
    return reduced("mse", difference * difference, reduction)


@composite(samples=_two, errors=_PAIR_ERRORS)
def l1(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """The absolute error, ``abs(prediction - target)``.

    Args:
        prediction: any shape.
        target: of the same shape.
        reduction: "mean", "sum", or "none" for the error of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for different shapes, another reduction, or a mean of no values.

    Example:
        >>> et.l1(et.ExTensor([1.0, 4.0]), et.ExTensor([1.0, 2.0])).item()
        1.0
    """
    prediction, target = _pair("l1", prediction, target)
    return reduced("l1", (prediction - target).abs(), reduction)


@composite(
    samples=lambda rng: [*_two(rng), Sample((*_two(rng)[0].args, 0.5))],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "above 0", {"delta": 0.0}),
    ),
)
def huber(
    prediction: ExTensor, target: ExTensor, delta: float = 1.0, reduction: Reduction = "mean"
) -> ExTensor:
    """The Huber loss of the difference d: quadratic for small ``|d|``, linear beyond.

    ``d ** 2 / 2`` up to ``|d| = delta``, ``delta * (|d| - delta / 2)`` beyond, for d of prediction
    - target.

    Args:
        prediction: any shape.
        target: of the same shape.
        delta: where the linear part begins, above 0.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for a delta not above 0, and as `mse`.

    Source: Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35 (1964).

    Example:
        >>> et.huber(et.ExTensor([0.0, 3.0]), et.ExTensor([1.0, 0.0]), reduction="none").tolist()
        [0.5, 2.5]
    """
    return _huber("huber", "delta", prediction, target, delta, reduction)


def _huber(
    name: str,
    option: str,
    prediction: ExTensor,
    target: ExTensor,
    delta: float,
    reduction: str,
) -> ExTensor:
    prediction, target = _pair(name, prediction, target)
    if not 0.0 < delta < math.inf:
        raise ValueError(f"{name}: {option}: expected a finite number above 0, got {delta!r}")
    size = (prediction - target).abs()
    losses = where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta)
    return reduced(name, losses, reduction)


@composite(
    samples=lambda rng: [*_two(rng), Sample((*_two(rng)[0].args, 0.5))],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "above 0", {"beta": -1.0}),
    ),
)
def smooth_l1(
    prediction: ExTensor, target: ExTensor, beta: float = 1.0, reduction: Reduction = "mean"
) -> ExTensor:
    """The absolute error, quadratic for small differences: `huber` divided by beta.

    ``d ** 2 / (2 * beta)`` up to ``|d| = beta``, ``|d| - beta / 2`` beyond, for d of prediction -
    target.

    Args:
        prediction: any shape.
        target: of the same shape.
        beta: where the linear part begins, above 0.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for a beta not above 0, and as `mse`.

    Source: Girshick, arXiv 1504.08083, equation 3 (beta = 1).

    Example:
        >>> et.smooth_l1(et.ExTensor([1.0]), et.ExTensor([0.0]), beta=2.0).item()
        0.25
    """
    return _huber("smooth_l1", "beta", prediction, target, beta, reduction) * (1 / beta)


def _bits(rng: np.random.Generator) -> list[Sample]:
    p, y = rng.uniform(0.1, 0.9, (3, 4)), rng.uniform(0.1, 0.9, (3, 4))
    expected = -(y * np.log(p) + (1 - y) * np.log1p(-p))
    return [Sample((p, y), {"reduction": "none"}, expected=expected), Sample((p, y))]


@composite(
    samples=_bits,
    errors=(*_PAIR_ERRORS, BadInput((np.array([1.5]), np.array([1.0])), ValueError, "in 0..1")),
)
def binary_cross_entropy(
    prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean"
) -> ExTensor:
    """The cross entropy of probabilities p and targets y, ``-(y log p + (1 - y) log(1 - p))``.

    Each logarithm is at least -100, so that the loss stays finite.

    Args:
        prediction: probabilities in 0..1, any shape.
        target: 0..1, of the same shape.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for predictions or targets outside 0..1, and as `mse`; for scores use
            `binary_cross_entropy_with_logits`, which is also more accurate.

    Example:
        >>> et.binary_cross_entropy(et.ExTensor([0.5, 1.0]), et.ExTensor([1.0, 1.0]), "sum")
        ExTensor(shape=(), dtype=float32, device=cpu,
          0.6931)
    """
    name = "binary_cross_entropy"
    prediction, target = _pair(name, prediction, target)
    _within(name, "predictions", prediction, f"; for scores use {name}_with_logits")
    _within(name, "targets", target, _SOFT)
    yes = clip(prediction.log(), min=-100.0)
    no = clip((-prediction).log1p(), min=-100.0)
    losses = -(target * yes + (1.0 - target) * no)
    return reduced("binary_cross_entropy", losses, reduction)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.uniform(0.1, 0.9, (3, 4))), {"reduction": how})
        for how in ("mean", "sum", "none")
    ],
    errors=(*_PAIR_ERRORS, BadInput((np.zeros(2), np.array([1.0, 2.0])), ValueError, "in 0..1")),
)
def binary_cross_entropy_with_logits(
    prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean"
) -> ExTensor:
    """The `binary_cross_entropy` of ``sigmoid(prediction)``, without overflow.

    It is computed as ``softplus(x) - x y``.

    Args:
        prediction: scores, any shape.
        target: 0..1, of the same shape.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for targets outside 0..1, and as `mse`.

    Example:
        >>> et.binary_cross_entropy_with_logits(et.ExTensor([0.0]), et.ExTensor([1.0]))
        ExTensor(shape=(), dtype=float32, device=cpu,
          0.6931)
    """
    prediction, target = _pair("binary_cross_entropy_with_logits", prediction, target)
    _within("binary_cross_entropy_with_logits", "targets", target, _SOFT)
    losses = softplus(prediction) - prediction * target
    return reduced("binary_cross_entropy_with_logits", losses, reduction)


@composite(
    samples=lambda rng: [
        Sample((np.array([-2.0, 0.5, 2.0]), np.array([1, -1, 1]))),
        Sample((np.array([-2.0, 0.5, 2.0]), np.array([1, -1, 1]), "sum")),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.ones((2, 1))), ValueError, "of one shape"),
        BadInput((np.zeros(3), np.ones(3)), ValueError, "'mean', 'sum'", {"reduction": "avg"}),
        BadInput((np.zeros(2), np.array([0.0, 1.0])), ValueError, "targets of -1 and 1, got 0.0"),
    ),
)
def hinge(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """The hinge loss, ``max(0, 1 - prediction * target)``.

    Args:
        prediction: scores, any shape.
        target: -1 or 1, of the same shape.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for other targets, and as `mse`.

    Example:
        >>> et.hinge(et.ExTensor([2.0, 0.5]), et.ExTensor([1, 1]), "none").tolist()
        [0.0, 0.5]
    """
    prediction, target = _pair("hinge", prediction, target)
    data = _raw(target)
    other = data[(data != 1) & (data != -1) & (data == data)]
    if other.size:
        raise ValueError(
            f"hinge: expected targets of -1 and 1, got {other[0].item()!r}; of labels 0 and 1 make "
            "2 * labels - 1"
        )
    return reduced("hinge", clip(1.0 - prediction * target, min=0.0), reduction)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 2, (3, 4)))),
        Sample((rng.normal(size=(3, 4)), rng.uniform(0.1, 0.9, (3, 4)), 3.0, None, "sum")),
    ],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(2), np.array([-1.0, 1.0])), ValueError, "targets in 0..1"),
        BadInput(
            (np.zeros(2), np.zeros(2), -1.0), ValueError, "gamma: expected a number, 0 or more"
        ),
        BadInput((np.zeros(2), np.zeros(2), 2.0, 1.5), ValueError, "alpha: expected a number in"),
    ),
)
def focal(
    prediction: ExTensor,
    target: ExTensor,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    reduction: Reduction = "mean",
) -> ExTensor:
    """The focal loss of scores for targets 0 and 1, ``alpha_t (1 - p_t) ** gamma * -log p_t``.

    For targets between 0 and 1, p_t and alpha_t are interpolated, and -log p_t is
    `binary_cross_entropy_with_logits`.

    Args:
        prediction: scores, any shape.
        target: 0..1, of the same shape.
        gamma: how strongly well classified examples are weakened, 0 or more.
        alpha: the weight of target 1, in 0..1; that of target 0 is 1 - alpha. None for no weights.
        reduction: "mean", "sum", or "none" for the loss of each value.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for targets outside 0..1, gamma below 0, alpha outside 0..1, and as
            `mse`.

    Source: Lin et al., arXiv 1708.02002, equation 5.

    Example:
        >>> et.focal(et.ExTensor([0.0]), et.ExTensor([1.0]))
        ExTensor(shape=(), dtype=float32, device=cpu,
          0.0433)
    """
    prediction, target = _pair("focal", prediction, target)
    _within("focal", "targets", target, _SOFT)
    if not 0.0 <= gamma < math.inf:
        raise ValueError(f"focal: gamma: expected a number, 0 or more, got {gamma!r}")
    if alpha is not None and not 0.0 <= alpha <= 1.0:
        raise ValueError(f"focal: alpha: expected a number in 0..1 or None, got {alpha!r}")
    loss = softplus(prediction) - prediction * target
    p = sigmoid(prediction)
    missed = p + target - 2.0 * p * target  # 1 - p_t
    loss = loss * missed**gamma
    if alpha is not None:
        loss = loss * (alpha * target + (1 - alpha) * (1.0 - target))
    return reduced("focal", loss, reduction)


@composite(
    samples=lambda rng: [
        Sample((np.log(rng.uniform(0.1, 1, (3, 4))), rng.uniform(0.1, 0.9, (3, 4)), how))
        for how in ("mean", "batchmean")
    ],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(2), np.array([-0.5, 1.5])), ValueError, "expected targets in 0..1"),
        BadInput(
            (np.zeros((0, 2)), np.zeros((0, 2))),
            ValueError,
            "no values",
            {"reduction": "batchmean"},
        ),
    ),
)
def kl_div(
    log_prediction: ExTensor, target: ExTensor, reduction: Reduction | str = "mean"
) -> ExTensor:
    """The Kullback-Leibler divergence, ``target * (log target - log_prediction)``.

    Args:
        log_prediction: logarithms of probabilities, any shape.
        target: probabilities in 0..1, of the same shape; 0 gives 0.
        reduction: "mean", "sum", "none", or "batchmean" for the sum divided by the first axis,
            which is the divergence proper.

    Returns:
        A single value, or the shape of the inputs for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for targets outside 0..1, and as `mse`.

    Example:
        >>> p = et.ExTensor([[0.5, 0.5]])
        >>> et.kl_div(et.log(p), et.ExTensor([[1.0, 0.0]]), "batchmean")
        ExTensor(shape=(), dtype=float32, device=cpu,
          0.6931)
    """
    log_prediction, target = _pair("kl_div", log_prediction, target)
    _within("kl_div", "targets", target, "; probabilities are expected, not their logarithms")
    safe = where(target > 0, target, 1.0)
    losses = target * (safe.log() - log_prediction)
    if reduction == "batchmean":
        if not losses.size:
            return reduced("kl_div", losses, "mean")  # says what is wrong
        return losses.sum() * (1 / target.shape[0])
    return reduced("kl_div", losses, reduction)
