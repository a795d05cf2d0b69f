"""Classification losses: `cross_entropy`, `nll`, `distillation`; dtypes as in `ops.loss`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.ops.arguments import tensors_only
from extensor.ops.declare import quiet
from extensor.ops.elementwise import exp
from extensor.ops.loss import Reduction, reduced, wide
from extensor.ops.softmax import log_softmax

__all__ = ["cross_entropy", "distillation", "nll"]


def _check_labels(name: str, x: ExTensor, labels: Any) -> None:
    tensors_only(name, x, labels)
    if not labels.dtype.is_integer:
        raise TypeError(
            f"{name}: labels: expected integer class numbers, got {labels.dtype.name}; "
            "labels.astype('int64')"
        )
    if x.ndim < 2 or labels.shape != (x.shape[0], *x.shape[2:]):
        raise ValueError(
            f"{name}: expected scores (N, C, ...) and labels (N, ...), got shapes {x.shape} and "
            f"{labels.shape}"
        )
    if not x.shape[1]:
        raise ValueError(f"{name}: expected scores of one class or more, got shape {x.shape}")


def _check_classes(backend: Any, name: str, labels: Any, classes: int, hint: str) -> None:
    """Refuse labels (an array) that are no class numbers."""

    def error() -> ValueError:
        return ValueError(
            f"{name}: labels: expected 0..{classes - 1} for {classes} classes, got "
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
    """The losses, and for the gradient: probabilities, labels, counted rows, their number."""
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
    """The factor of each row's gradient: () or (rows, 1)."""
    weight = g.reshape(-1, 1) if reduction == "none" else g
    if reduction == "mean":
        one = 1 / count
        weight = weight * (g.dtype.type(one) if isinstance(count, int) else one.astype(g.dtype))
    return weight if kept is None else xp.where(kept[:, None], weight, g.dtype.type(0))


def _cross_entropy_fused(
    backend: Any, g: Any, out: None, inputs: Any, needs: Any, saved: Any, **params: Any
) -> Any:
    xp = backend.xp
    p, safe, kept, count = saved
    weight = _row_weights(xp, g, kept, count, params["reduction"])
    d = backend.cross_entropy_grad(weight, _flat(xp, inputs[0]), safe, p, params["smoothing"])
    shape = inputs[0].shape
    if len(shape) > 2:
        d = xp.moveaxis(d.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
    return d, None


def _cross_entropy_vjp(
    g: ExTensor, out: None, x: ExTensor, labels: ExTensor, saved: Any, **params: Any
) -> ExTensor:
    smoothing, reduction = params["smoothing"], params["reduction"]
    _, safe, kept, count = saved
    xp, classes = x.backend.xp, x.shape[1]
    target = xp.full((len(safe), classes), smoothing / classes, dtype=np.float64)
    target[xp.arange(len(safe)), safe] += 1 - smoothing
    shape = (x.shape[0], *x.shape[2:])
    target = xp.moveaxis(target.reshape(*shape, classes), -1, 1)
    ones = xp.ones(shape if reduction == "none" else ())
    weight = _row_weights(xp, ones, kept, count, reduction)
    weight = xp.broadcast_to(weight, (len(safe), 1)).reshape(x.shape[0], 1, *x.shape[2:])
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
        BadInput((_LOGITS, np.array([0, 3])), ValueError, "expected 0..2"),
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
    """The cross entropy of scores, ``-log softmax(scores)[label]``, without overflow.

    Args:
        scores: (N, C, ...), a score for each class.
        labels: (N, ...), integers in 0..C - 1, or ``ignore_index``.
        label_smoothing: s in 0..1; the target is 1 - s at the label plus s / C everywhere.
        ignore_index: rows with this label count neither in the sum nor in the mean.
        reduction: "mean", "sum", or "none" for (N, ...).

    Returns:
        A single value, or (N, ...) for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for labels that are no class numbers, shapes that do not match, or a
            mean over no rows.

    Source: label smoothing: Szegedy et al., arXiv 1512.00567, section 7.

    Example:
        >>> et.cross_entropy(et.ExTensor([[0.0, 0.0], [9.0, 0.0]]), et.ExTensor([1, 0]))
        ExTensor(shape=(), dtype=float32, device=cpu,
          0.3466)
    """
    _check_labels("cross_entropy", scores, labels)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"cross_entropy: label_smoothing: expected a number in 0..1, got {label_smoothing!r}"
        )
    if reduction not in ("mean", "sum", "none"):
        reduced("cross_entropy", scores, reduction)
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
        BadInput(
            (_LOGITS, np.array([0, 3])), ValueError, "nll: labels: expected 0..2 for 3 classes"
        ),
        BadInput((_LOGITS, np.array([0, -1])), ValueError, "got -1..0"),
        BadInput((_LOGITS, np.array([0.0, 1.0])), TypeError, "integer class numbers"),
    ),
)
def nll(log_probabilities: ExTensor, labels: ExTensor, reduction: Reduction = "mean") -> ExTensor:
    """The negative log likelihood, ``-log_probabilities[label]``: `cross_entropy` of log_softmax.

    Args:
        log_probabilities: (N, C, ...).
        labels: (N, ...), integers in 0..C - 1.
        reduction: "mean", "sum", or "none" for (N, ...).

    Returns:
        A single value, or (N, ...) for "none"; float32 of 16-bit floats.

    Raises:
        TypeError, ValueError: for labels that are no class numbers, or shapes that do not match.

    Example:
        >>> et.nll(et.ExTensor([[-1.0, -0.5], [-2.0, -0.25]]), et.ExTensor([1, 0])).item()
        1.25
    """
    _check_labels("nll", log_probabilities, labels)
    _check_classes(labels.backend, "nll", labels.data, log_probabilities.shape[1], "")
    picked = wide(log_probabilities).gather(labels.expand_dims(1), 1).squeeze(1)
    return reduced("nll", -picked, reduction)


def _distillation_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for temperature in (1.0, 2.0):
        student, teacher = rng.normal(size=(2, 3, 4))
        p, q = (np.exp(x / temperature) for x in (teacher, student))
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
        expected = temperature**2 * (p * np.log(p / q)).sum(-1).mean()
        yield Sample((student, teacher, temperature), expected=expected)


@composite(
    samples=_distillation_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros((2, 4))), ValueError, "of one shape"),
        BadInput((np.zeros((0, 3)), np.zeros((0, 3))), ValueError, "one class or more"),
        BadInput((np.zeros((2, 3)), np.zeros((2, 3)), 0.0), ValueError, "temperature"),
    ),
)
def distillation(student: ExTensor, teacher: ExTensor, temperature: float = 1.0) -> ExTensor:
    """How far a student's classes are from a teacher's, each row's divergence averaged.

    T^2 sum p log(p / q), with p and q the softmax of the teacher's and the student's scores divided
    by the temperature T. T^2 keeps the gradients' size.

    Args:
        student: scores (..., C).
        teacher: scores (..., C), such as the float model's; compute them in `no_grad`.
        temperature: above 0; larger ones weigh unlikely classes more.

    Returns:
        A single value, 0 where the two agree.

    Raises:
        TypeError, ValueError: for scores of two shapes or without classes or rows, or a temperature
            that is not above 0.

    Source: Hinton et al., arXiv 1503.02531, section 2.

    Example:
        >>> scores = et.ExTensor([[1.0, 2.0, 3.0]])
        >>> et.distillation(scores, scores).item()
        0.0
    """
    tensors_only("distillation", student, teacher)
    if student.shape != teacher.shape or student.ndim < 1 or not student.size:
        raise ValueError(
            "distillation: expected scores (..., C) of one shape, a row and one class or more, got "
            f"{student.shape} and {teacher.shape}"
        )
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"distillation: temperature: expected above 0, got {temperature!r}")
    student, teacher = (log_softmax(x * (1.0 / temperature)) for x in (student, teacher))
    rows = (exp(teacher) * (teacher - student)).sum(axis=-1)
    return rows.mean() * temperature**2
