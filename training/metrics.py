"""Metrics of scores and labels: top-1, top-k, per class, confusion matrix; perplexity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor import ExTensor
from extensor.autograd.tensor import wrap

__all__ = ["ClassScores", "Scores", "TokenScores", "confusion_matrix", "label_ranks", "perplexity"]


def _check_classes(what: str, numbers: np.ndarray, classes: int) -> None:
    if not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"{what}: expected whole numbers, got {numbers.dtype}")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= classes):
        raise ValueError(
            f"{what}: expected 0..{classes - 1} for {classes} classes, got "
            f"{int(numbers.min())}..{int(numbers.max())}"
        )


def label_ranks(rows: ExTensor, labels: np.ndarray) -> np.ndarray:
    """How many classes come before each row's label: below k where it is among the k largest.

    Scores are (N, C), labels (N,) whole numbers in 0..C-1. Ties go to the lower class, as in
    argmax. NaN comes before every number, and a label whose score is NaN has rank C. The scores
    stay where they are.

    Raises:
        ValueError: if a label is out of range, or the shapes do not match.
    """
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise ValueError(
            f"label_ranks: expected scores (N, C) and labels (N,), got shapes {rows.shape} and "
            f"{labels.shape}"
        )
    _check_classes("label_ranks: labels", labels, rows.shape[1])
    there = ExTensor.from_numpy(labels).to(rows.device)
    return wrap(rows.backend.label_ranks(rows.data, there.data), rows.backend).numpy()


def perplexity(loss: float) -> float:
    """exp(mean loss in nats per token): how many equally likely tokens it amounts to."""
    return math.inf if loss > 700.0 else math.exp(loss)  # exp(710) does not fit a float


def confusion_matrix(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Counts (classes, classes), rows the true label, columns the predicted one.

    Raises:
        ValueError: for numbers that are no classes, or arrays of different lengths.
    """
    if predicted.shape != labels.shape or labels.ndim != 1:
        raise ValueError(
            f"confusion_matrix: expected predictions (N,) and labels (N,), got shapes "
            f"{predicted.shape} and {labels.shape}"
        )
    _check_classes("confusion_matrix: predictions", predicted, classes)
    _check_classes("confusion_matrix: labels", labels, classes)
    flat = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return flat.reshape(classes, classes)


class Scores:
    """Loss, top-1 and top-3 accuracy over everything added: the metrics of an evaluation."""

    k = 3

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.loss_sum, self.count, self.hits, self.hits_k = 0.0, 0, 0, 0

    def add(self, rows: ExTensor, labels: np.ndarray, mean_loss: float) -> None:
        """Count rows of scores (R, C) with labels (R,) and their mean loss."""
        ranks = label_ranks(rows, labels)
        self.loss_sum += mean_loss * len(labels)
        self.count += len(labels)
        self.hits += int((ranks == 0).sum())
        self.hits_k += int((ranks < min(self.k, self.classes)).sum())

    def merge(self, other: Scores) -> None:
        """Count what another of the same kind has counted."""
        self.loss_sum += other.loss_sum
        self.count += other.count
        self.hits += other.hits
        self.hits_k += other.hits_k

    @property
    def loss(self) -> float:
        """Mean loss per label."""
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in 0..1."""
        return self.hits / self.count

    @property
    def accuracy_k(self) -> float:
        """Top-3 accuracy in 0..1."""
        return self.hits_k / self.count

    @property
    def perplexity(self) -> float | None:
        """For tokens, exp(loss) where that is finite; None for images."""
        return None

    def details(self) -> dict[str, Any]:
        """What result.json says beyond loss and accuracies."""
        return {}


class ClassScores(Scores):
    """Metrics of images with labels of these names."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        super().__init__(len(classes))
        self.names = classes
        self.confusion = np.zeros((self.classes, self.classes), np.int64)

    def add(self, rows: ExTensor, labels: np.ndarray, mean_loss: float) -> None:
        super().add(rows, labels, mean_loss)
        self.confusion += confusion_matrix(rows.numpy().argmax(axis=1), labels, self.classes)

    def merge(self, other: Scores) -> None:
        super().merge(other)
        assert isinstance(other, ClassScores)
        self.confusion += other.confusion

    @property
    def per_class(self) -> np.ndarray:
        """Accuracy of each class; NaN for one with no images."""
        totals = self.confusion.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return self.confusion.diagonal() / totals

    def details(self) -> dict[str, Any]:
        """Accuracy per class, None for one with no images, and the confusion matrix."""
        shares = [None if np.isnan(a) else float(a) for a in self.per_class]
        return {
            "per_class": dict(zip(self.names, shares, strict=True)),
            "confusion": self.confusion.tolist(),
        }


class TokenScores(Scores):
    """Metrics of predicted tokens."""

    @property
    def perplexity(self) -> float | None:
        """See `perplexity`; None where it is not finite."""
        value = perplexity(self.loss)
        return value if math.isfinite(value) else None

    def details(self) -> dict[str, Any]:
        """Perplexity, and how many tokens it is of."""
        return {"perplexity": self.perplexity, "test_tokens": self.count}
