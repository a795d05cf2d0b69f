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
    """(prediction - target)**2."""
    prediction, target = _pair("mse", prediction, target)
    difference = prediction - target
    return reduced("mse", difference * difference, reduction)


@composite(samples=_two, errors=_PAIR_ERRORS)
def l1(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """abs(prediction - target)."""
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
    """``d**2 / 2`` up to ``|d| = delta``, ``delta * (|d| - delta / 2)`` beyond.

    d is prediction - target.

    Source: Huber, Ann. Math. Statist. 35 (1964).
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
    """``d**2 / (2 beta)`` up to ``|d| = beta``, ``|d| - beta / 2`` beyond: `huber` over beta."""
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
    """-(y log p + (1 - y) log(1 - p)) of probabilities p; each logarithm is at least -100.

    Raises:
        ValueError: for predictions or targets outside 0..1; for scores use
            `binary_cross_entropy_with_logits`, which is also more accurate.
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
    """`binary_cross_entropy` of sigmoid(prediction), without overflow: softplus(x) - x y.

    Raises:
        ValueError: for targets outside 0..1.
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
    """max(0, 1 - prediction * target), for targets of -1 and 1.

    Raises:
        ValueError: for other targets.
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
    """Focal loss of scores for targets 0 and 1: alpha_t (1 - p_t)**gamma * -log p_t.

    Targets between are soft: p_t and alpha_t lie between, and -log p_t is
    `binary_cross_entropy_with_logits`.

    Raises:
        ValueError: for targets outside 0..1, gamma below 0, or alpha outside 0..1.

    Source: Lin et al., arXiv 1708.02002, equation 5; alpha None leaves the factor out.
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
    """The divergence target * (log target - log_prediction), 0 where the target is 0.

    ``reduction="batchmean"`` divides the sum by the first axis: the divergence proper.

    Raises:
        ValueError: for targets outside 0..1, which are no probabilities.
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
