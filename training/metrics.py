"""Classification metrics on numpy arrays: top-1, top-k, per class, confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Scores", "confusion_matrix", "top_k_hits"]


def top_k_hits(logits: np.ndarray, labels: np.ndarray, k: int) -> int:
    """How many rows have their label among the k largest logits.

    Ties go to the lower class, as in argmax, so k = 1 is the confusion matrix's diagonal.

    Args:
        logits: (N, C).
        labels: (N,) whole numbers in 0..C-1.
        k: 1..C.

    Raises:
        ValueError: if k is out of range.
    """
    classes = logits.shape[1]
    if not 1 <= k <= classes:
        raise ValueError(f"k: wanted 1..{classes}, got {k}")
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return int((best == labels[:, None]).sum())


def confusion_matrix(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Counts (classes, classes), rows the true label, columns the predicted one."""
    flat = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return flat.reshape(classes, classes)


@dataclass
class Scores:
    """Accumulates metrics over batches.

    Attributes:
        classes: number of classes.
        k: the k of top-k.
        loss_sum: sum of the per-image losses.
        count: images seen.
        hits_k: images whose label was among the top k.
        confusion: see `confusion_matrix`.
    """

    classes: int
    k: int = 3
    loss_sum: float = 0.0
    count: int = 0
    hits_k: int = 0
    confusion: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.confusion = np.zeros((self.classes, self.classes), np.int64)

    def add(self, logits: np.ndarray, labels: np.ndarray, mean_loss: float) -> None:
        """Count one batch: logits (B, C), labels (B,), the batch's mean loss."""
        self.loss_sum += mean_loss * len(labels)
        self.count += len(labels)
        self.hits_k += top_k_hits(logits, labels, min(self.k, self.classes))
        self.confusion += confusion_matrix(logits.argmax(axis=1), labels, self.classes)

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in 0..1."""
        return int(self.confusion.trace()) / self.count

    @property
    def accuracy_k(self) -> float:
        """Top-k accuracy in 0..1."""
        return self.hits_k / self.count

    @property
    def per_class(self) -> np.ndarray:
        """Accuracy of each class; NaN for one with no images."""
        totals = self.confusion.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return self.confusion.diagonal() / totals
