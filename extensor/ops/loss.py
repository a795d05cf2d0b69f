"""Losses. All take ``reduction``: "mean", "sum" or "none"."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.activation import softplus
from extensor.ops.arguments import quiet, tensors_only
from extensor.ops.arithmetic import clip, where
from extensor.ops.elementwise import sigmoid

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "focal", "hinge",
    "huber", "kl_div", "l1", "mse", "nll", "smooth_l1",
]  # fmt: skip

Reduction = Literal["mean", "sum", "none"]


def _reduced(name: str, losses: ExTensor, reduction: str) -> ExTensor:
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
    raise ValueError(f"{name}: reduction: wanted 'mean', 'sum' or 'none', got {reduction!r}")


def _same_shape(name: str, prediction: Any, target: Any) -> None:
    tensors_only(name, prediction, target)
    if prediction.shape != target.shape:
        raise ValueError(
            f"{name}: wanted prediction and target of one shape, got {prediction.shape} and "
            f"{target.shape}; reshape one (broadcasting here is almost always a mistake)"
        )


def _raw(x: ExTensor) -> Any:
    return x.dequantize().data if x.is_blocked else x.data


def _within(name: str, what: str, x: ExTensor, hint: str) -> None:
    """Refuse values outside 0..1; NaN passes, and is seen in the loss."""
    data = _raw(x)
    if bool(((data < 0) | (data > 1)).any()):  # one wait for a GPU
        got = f"{float(data.min())!r}..{float(data.max())!r}"
        raise ValueError(f"{name}: wanted {what} in 0..1, got {got}{hint}")


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
    _same_shape("mse", prediction, target)
    difference = prediction - target
    return _reduced("mse", difference * difference, reduction)


@composite(samples=_two, errors=_PAIR_ERRORS)
def l1(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """abs(prediction - target)."""
    _same_shape("l1", prediction, target)
    return _reduced("l1", (prediction - target).abs(), reduction)


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
    _same_shape(name, prediction, target)
    if not 0.0 < delta < math.inf:
        raise ValueError(f"{name}: {option}: wanted a finite number above 0, got {delta!r}")
    size = (prediction - target).abs()
    losses = where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta)
    return _reduced(name, losses, reduction)


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
    _same_shape(name, prediction, target)
    _within(name, "predictions", prediction, f"; for scores use {name}_with_logits")
    _within(name, "targets", target, _SOFT)
    yes = clip(prediction.log(), min=-100.0)
    no = clip((-prediction).log1p(), min=-100.0)
    losses = -(target * yes + (1.0 - target) * no)
    return _reduced("binary_cross_entropy", losses, reduction)


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
    _same_shape("binary_cross_entropy_with_logits", prediction, target)
    _within("binary_cross_entropy_with_logits", "targets", target, _SOFT)
    losses = softplus(prediction) - prediction * target
    return _reduced("binary_cross_entropy_with_logits", losses, reduction)


def _check_labels(name: str, x: ExTensor, labels: Any) -> None:
    tensors_only(name, x, labels)
    if not labels.dtype.is_integer:
        raise TypeError(
            f"{name}: labels: wanted integer class numbers, got {labels.dtype.name}; "
            "labels.astype('int64')"
        )
    if x.ndim < 2 or labels.shape != (x.shape[0], *x.shape[2:]):
        raise ValueError(
            f"{name}: wanted scores (N, C, ...) and labels (N, ...), got shapes {x.shape} and "
            f"{labels.shape}"
        )
    if not x.shape[1]:
        raise ValueError(f"{name}: wanted scores of one class or more, got shape {x.shape}")


def _check_classes(backend: Any, name: str, labels: Any, classes: int, hint: str) -> None:
    """Refuse labels (an array) that are no class numbers."""

    def error() -> ValueError:
        return ValueError(
            f"{name}: labels: wanted 0..{classes - 1} for {classes} classes, got "
            f"{int(labels.min())}..{int(labels.max())}{hint}"
        )

    backend.refuse((labels < 0) | (labels >= classes), error)


def _flat(xp: Any, x: Any) -> Any:
    """(N, C, ...) -> (rows, C)."""
    return x if x.ndim == 2 else xp.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


@quiet
def _cross_entropy(
    backend: Any, x: Any, labels: Any, smoothing: float, ignore: int | None, reduction: str
) -> Any:
    """The losses, and what the gradient is made of: the backend's part, labels, which count."""
    xp = backend.xp
    rows, flat = _flat(xp, x), labels.reshape(-1)
    classes = rows.shape[1]
    kept = None if ignore is None else flat != ignore
    safe = flat if kept is None else xp.where(kept, flat, 0)
    hint = "" if ignore is not None else "; say ignore_index=... if some are to be left out"
    _check_classes(backend, "cross_entropy", safe, classes, hint)
    losses, p = backend.cross_entropy(rows, safe, smoothing)
    if kept is not None:
        losses = xp.where(kept, losses, 0)
    count = len(flat) if kept is None else kept.sum()
    if kept is not None and xp is np:
        count = int(count)  # a device keeps it, so that nothing waits
    if reduction == "none":
        return losses.reshape(labels.shape), (p, safe, kept, count)
    out = losses.sum()
    if reduction == "mean":
        out = _mean(backend, out, count, len(flat))
    return out, (p, safe, kept, count)


def _mean(backend: Any, total: Any, count: Any, labels: int) -> Any:
    """The sum of losses over their number, an int or an array of shape () on a device."""

    def error() -> ValueError:
        left_out = f": all {labels} are left out" if labels else ""
        return ValueError(
            f"cross_entropy: no labels to average over{left_out}; leave such a batch out, or ask "
            "for reduction='sum'"
        )

    if not isinstance(count, int):
        backend.refuse(count == 0, error)
        return total / count.astype(total.dtype)
    if not count:
        raise error()
    return total / total.dtype.type(count)


def _row_weights(xp: Any, g: Any, kept: Any, count: int, reduction: str) -> Any:
    """What each row's gradient is multiplied by: () or (rows, 1)."""
    weight = g.reshape(-1, 1) if reduction == "none" else g
    if reduction == "mean":
        one = 1 / count
        weight = weight * (g.dtype.type(one) if isinstance(count, int) else one.astype(g.dtype))
    return weight if kept is None else xp.where(kept[:, None], weight, g.dtype.type(0))


def _cross_entropy_fused(
    backend: Any,
    g: Any,
    out: None,
    inputs: Any,
    needs: Any,
    smoothing: float,
    ignore: int | None,
    reduction: str,
    saved: Any,
) -> Any:
    xp = backend.xp
    p, safe, kept, count = saved
    weight = _row_weights(xp, g, kept, count, reduction)
    d = backend.cross_entropy_grad(weight, _flat(xp, inputs[0]), safe, p, smoothing)
    shape = inputs[0].shape
    if len(shape) > 2:
        d = xp.moveaxis(d.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
    return d, None


def _cross_entropy_vjp(
    g: ExTensor,
    out: None,
    x: ExTensor,
    labels: ExTensor,
    smoothing: float,
    ignore: int | None,
    reduction: str,
    saved: Any,
) -> ExTensor:
    _, safe, kept, count = saved
    xp, classes = x.backend.xp, x.shape[1]
    target = xp.full((len(safe), classes), smoothing / classes, dtype=np.float64)
    target[xp.arange(len(safe)), safe] += 1 - smoothing
    shape = (x.shape[0], *x.shape[2:])
    target = xp.moveaxis(target.reshape(*shape, classes), -1, 1)
    ones = xp.ones(shape if reduction == "none" else ())
    weight = _row_weights(xp, ones, kept, count, reduction)
    weight = xp.broadcast_to(weight, (len(safe), 1)).reshape(x.shape[0], 1, *x.shape[2:])
    from extensor.autograd.apply import wrap

    goal = wrap(xp.ascontiguousarray(target), x.backend).astype(x.dtype)
    scale = wrap(xp.ascontiguousarray(weight), x.backend).astype(x.dtype)
    spread = g.expand_dims(1) if reduction == "none" else g
    return (apply("softmax", x, axis=1) - goal) * scale * spread


_LOGITS, _LABELS = np.zeros((2, 3)), np.array([0, 2])


def _class_samples(rng: np.random.Generator) -> list[Sample]:
    x, labels = rng.normal(size=(4, 3)), np.array([0, 2, -100, 1])
    image, marks = rng.normal(size=(2, 3, 2)), np.array([[0, 1], [2, 2]])
    return [
        Sample((x, np.abs(labels) % 3)),
        Sample((x, labels), {"label_smoothing": 0.1, "ignore_index": -100}),
        Sample((x, labels), {"ignore_index": -100, "reduction": "sum"}),
        Sample((image, marks), {"label_smoothing": 0.2, "reduction": "none"}),
        Sample((image, marks)),
    ]


@primitive(
    forward=_cross_entropy,
    vjps=(_cross_entropy_vjp, None),
    fused_vjp=_cross_entropy_fused,
    reads="inputs",
    saves=True,
    to_float=True,
    totals=True,
    samples=_class_samples,
    errors=(
        BadInput((_LOGITS, np.array([0, 3])), ValueError, "wanted 0..2"),
        BadInput((_LOGITS, np.array([0.0, 1.0])), TypeError, "integer class numbers"),
        BadInput((_LOGITS, np.array([0])), ValueError, "labels (N"),
        BadInput((_LOGITS, _LABELS, 1.5), ValueError, "label_smoothing"),
        BadInput((_LOGITS, _LABELS), ValueError, "'mean', 'sum'", {"reduction": "avg"}),
    ),
)
def cross_entropy(
    scores: ExTensor,
    labels: ExTensor,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
) -> ExTensor:
    """-log softmax(scores)[label], without overflow.

    Args:
        scores: (N, C, ...), a score for each class.
        labels: (N, ...), integers in 0..C - 1, or ``ignore_index``.
        label_smoothing: s in 0..1; the target is 1 - s at the label plus s / C everywhere.
        ignore_index: rows with this label count neither in the sum nor in the mean.
        reduction: "mean", "sum", or "none" for (N, ...).

    Returns:
        Of 16-bit scores float32, in which it is computed.

    Raises:
        TypeError, ValueError: for labels that are no class numbers, shapes that do not match, or a
            mean over no rows.
    """
    _check_labels("cross_entropy", scores, labels)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"cross_entropy: label_smoothing: wanted a number in 0..1, got {label_smoothing!r}"
        )
    if reduction not in ("mean", "sum", "none"):
        _reduced("cross_entropy", scores, reduction)
    return apply(
        "cross_entropy",
        scores,
        labels,
        smoothing=float(label_smoothing),
        ignore=ignore_index,
        reduction=reduction,
    )


@composite(
    samples=lambda rng: [
        Sample((np.log(rng.uniform(0.1, 1, (4, 3))), np.array([0, 2, 1, 1]))),
        Sample((np.log(rng.uniform(0.1, 1, (4, 3))), np.array([0, 2, 1, 1]), "none")),
    ],
    errors=(
        BadInput((_LOGITS, np.array([0, 3])), ValueError, "nll: labels: wanted 0..2 for 3 classes"),
        BadInput((_LOGITS, np.array([0, -1])), ValueError, "got -1..0"),
        BadInput((_LOGITS, np.array([0.0, 1.0])), TypeError, "integer class numbers"),
    ),
)
def nll(log_probabilities: ExTensor, labels: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """-log_probabilities[label], (N, C, ...) and (N, ...): `cross_entropy` after log_softmax.

    Raises:
        TypeError, ValueError: for labels that are no class numbers, or shapes that do not match.
    """
    _check_labels("nll", log_probabilities, labels)
    _check_classes(labels.backend, "nll", labels.data, log_probabilities.shape[1], "")
    picked = log_probabilities.gather(labels.expand_dims(1), 1).squeeze(1)
    return _reduced("nll", -picked, reduction)


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
    _same_shape("hinge", prediction, target)
    data = _raw(target)
    other = data[(data != 1) & (data != -1) & (data == data)]
    if other.size:
        raise ValueError(
            f"hinge: wanted targets of -1 and 1, got {other[0].item()!r}; of labels 0 and 1 make "
            "2 * labels - 1"
        )
    return _reduced("hinge", clip(1.0 - prediction * target, min=0.0), reduction)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 2, (3, 4)))),
        Sample((rng.normal(size=(3, 4)), rng.uniform(0.1, 0.9, (3, 4)), 3.0, None, "sum")),
    ],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(2), np.array([-1.0, 1.0])), ValueError, "targets in 0..1"),
        BadInput((np.zeros(2), np.zeros(2), -1.0), ValueError, "gamma: wanted a number, 0 or more"),
        BadInput((np.zeros(2), np.zeros(2), 2.0, 1.5), ValueError, "alpha: wanted a number in"),
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
    _same_shape("focal", prediction, target)
    _within("focal", "targets", target, _SOFT)
    if not 0.0 <= gamma < math.inf:
        raise ValueError(f"focal: gamma: wanted a number, 0 or more, got {gamma!r}")
    if alpha is not None and not 0.0 <= alpha <= 1.0:
        raise ValueError(f"focal: alpha: wanted a number in 0..1 or None, got {alpha!r}")
    loss = softplus(prediction) - prediction * target
    p = sigmoid(prediction)
    missed = p + target - 2.0 * p * target  # 1 - p_t
    loss = loss * missed**gamma
    if alpha is not None:
        loss = loss * (alpha * target + (1 - alpha) * (1.0 - target))
    return _reduced("focal", loss, reduction)


@composite(
    samples=lambda rng: [
        Sample((np.log(rng.uniform(0.1, 1, (3, 4))), rng.uniform(0.1, 0.9, (3, 4)), how))
        for how in ("mean", "batchmean")
    ],
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(2), np.array([-0.5, 1.5])), ValueError, "wanted targets in 0..1"),
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
    _same_shape("kl_div", log_prediction, target)
    _within("kl_div", "targets", target, "; probabilities are wanted, not their logarithms")
    safe = where(target > 0, target, 1.0)
    losses = target * (safe.log() - log_prediction)
    if reduction == "batchmean":
        if not losses.size:
            return _reduced("kl_div", losses, "mean")  # says what is wrong
        return losses.sum() * (1 / target.shape[0])
    return _reduced("kl_div", losses, reduction)
