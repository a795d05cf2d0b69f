"""Losses. All take ``reduction``: "mean", "sum" or "none"."""

from __future__ import annotations

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


def _two(rng: np.random.Generator) -> list[Sample]:
    a = rng.normal(size=(3, 4))
    b = a + rng.choice([-1.0, 1.0], (3, 4)) * rng.choice([0.3, 0.7, 1.6], (3, 4))
    return [Sample((a, b), {"reduction": how}) for how in ("mean", "sum", "none")]


_PAIR_ERRORS = (
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
    samples=_two,
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
    _same_shape("huber", prediction, target)
    if not delta > 0:
        raise ValueError(f"huber: delta: wanted a number above 0, got {delta!r}")
    size = (prediction - target).abs()
    losses = where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta)
    return _reduced("huber", losses, reduction)


@composite(
    samples=_two,
    errors=(
        *_PAIR_ERRORS,
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "above 0", {"beta": -1.0}),
    ),
)
def smooth_l1(
    prediction: ExTensor, target: ExTensor, beta: float = 1.0, reduction: Reduction = "mean"
) -> ExTensor:
    """``d**2 / (2 beta)`` up to ``|d| = beta``, ``|d| - beta / 2`` beyond: `huber` over beta."""
    if not beta > 0:
        raise ValueError(f"smooth_l1: beta: wanted a number above 0, got {beta!r}")
    return huber(prediction, target, beta, reduction) * (1 / beta)


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
        ValueError: for predictions outside 0..1; for scores use
            `binary_cross_entropy_with_logits`, which is also more accurate.
    """
    _same_shape("binary_cross_entropy", prediction, target)
    data = prediction.dequantize().data if prediction.is_blocked else prediction.data
    if data.size and (bool((data < 0).any()) or bool((data > 1).any())):
        raise ValueError(
            "binary_cross_entropy: wanted predictions in 0..1; for scores use "
            "binary_cross_entropy_with_logits"
        )
    yes = clip(prediction.log(), min=-100.0)
    no = clip((-prediction).log1p(), min=-100.0)
    losses = -(target * yes + (1.0 - target) * no)
    return _reduced("binary_cross_entropy", losses, reduction)


@composite(samples=_two, errors=_PAIR_ERRORS)
def binary_cross_entropy_with_logits(
    prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean"
) -> ExTensor:
    """`binary_cross_entropy` of sigmoid(prediction), without overflow: softplus(x) - x y."""
    _same_shape("binary_cross_entropy_with_logits", prediction, target)
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
    if bool(((safe < 0) | (safe >= classes)).any()):  # one wait for a GPU
        hint = "" if ignore is not None else "; say ignore_index=... if some are to be left out"
        raise ValueError(
            f"cross_entropy: labels: wanted 0..{classes - 1} for {classes} classes, got "
            f"{int(safe.min())}..{int(safe.max())}{hint}"
        )
    losses, p = backend.cross_entropy(rows, safe, smoothing)
    if kept is not None:
        losses = xp.where(kept, losses, 0)
    count = len(flat) if kept is None else int(kept.sum())
    if reduction == "none":
        return losses.reshape(labels.shape), (p, safe, kept, count)
    if reduction == "mean" and not count:
        left_out = "" if kept is None or not len(flat) else f": all {len(flat)} are left out"
        raise ValueError(
            f"cross_entropy: no labels to average over{left_out}; leave such a batch out, or ask "
            "for reduction='sum'"
        )
    out = losses.sum()
    if reduction == "mean":
        out = out / x.dtype.type(count)
    return out, (p, safe, kept, count)


def _row_weights(xp: Any, g: Any, kept: Any, count: int, reduction: str) -> Any:
    """What each row's gradient is multiplied by: () or (rows, 1)."""
    weight = g.reshape(-1, 1) if reduction == "none" else g
    if reduction == "mean":
        weight = weight * g.dtype.type(1 / count)
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
        ignore_index: rows with this label count neither in the sum nor in the mean; the mean of
            no rows is NaN.
        reduction: "mean", "sum", or "none" for (N, ...).

    Raises:
        TypeError, ValueError: for labels that are no class numbers, or shapes that do not match.
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
    samples=lambda rng: [Sample((np.log(rng.uniform(0.1, 1, (4, 3))), np.array([0, 2, 1, 1])))],
    errors=(
        BadInput((_LOGITS, np.array([0, 3])), IndexError, "wanted positions"),
        BadInput((_LOGITS, np.array([0.0, 1.0])), TypeError, "integer class numbers"),
    ),
)
def nll(log_probabilities: ExTensor, labels: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """-log_probabilities[label], (N, C, ...) and (N, ...): `cross_entropy` after log_softmax."""
    _check_labels("nll", log_probabilities, labels)
    picked = log_probabilities.gather(labels.expand_dims(1), 1).squeeze(1)
    return _reduced("nll", -picked, reduction)


@composite(
    samples=lambda rng: [
        Sample((np.array([-2.0, 0.5, 2.0]), np.array([1.0, -1.0, 1.0]))),
    ],
    errors=_PAIR_ERRORS,
)
def hinge(prediction: ExTensor, target: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """max(0, 1 - prediction * target), for targets of -1 and 1."""
    _same_shape("hinge", prediction, target)
    return _reduced("hinge", clip(1.0 - prediction * target, min=0.0), reduction)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 2, (3, 4)).astype(np.float64)))
    ],
    errors=_PAIR_ERRORS,
)
def focal(
    prediction: ExTensor,
    target: ExTensor,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    reduction: Reduction = "mean",
) -> ExTensor:
    """Focal loss of scores for targets 0 and 1: alpha_t (1 - p_t)**gamma * -log p_t.

    Source: Lin et al., arXiv 1708.02002, equation 5; alpha None leaves the factor out.
    """
    _same_shape("focal", prediction, target)
    loss = softplus(prediction) - prediction * target
    p = sigmoid(prediction)
    missed = p + target - 2.0 * p * target  # 1 - p_t
    loss = loss * missed**gamma
    if alpha is not None:
        loss = loss * (alpha * target + (1 - alpha) * (1.0 - target))
    return _reduced("focal", loss, reduction)


@composite(
    samples=lambda rng: [
        Sample((np.log(rng.uniform(0.1, 1, (3, 4))), rng.uniform(0.1, 1, (3, 4)))),
    ],
    errors=_PAIR_ERRORS,
)
def kl_div(
    log_prediction: ExTensor, target: ExTensor, reduction: Reduction | str = "mean"
) -> ExTensor:
    """The divergence target * (log target - log_prediction), 0 where the target is 0.

    ``reduction="batchmean"`` divides the sum by the first axis: the divergence proper.
    """
    _same_shape("kl_div", log_prediction, target)
    safe = where(target > 0, target, 1.0)
    losses = target * (safe.log() - log_prediction)
    if reduction == "batchmean":
        return losses.sum() * (1 / target.shape[0])
    return _reduced("kl_div", losses, reduction)
