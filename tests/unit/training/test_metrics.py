"""Metrics against hand-counted cases."""

from __future__ import annotations

import numpy as np
import pytest

from training.metrics import ClassScores, confusion_matrix, top_k_hits

LOGITS = np.array([[3, 2, 1], [1, 3, 2], [1, 2, 3], [3, 1, 2]], np.float32)
LABELS = np.array([0, 1, 1, 2])


def test_top_k() -> None:
    assert [top_k_hits(LOGITS, LABELS, k) for k in (1, 2, 3)] == [2, 4, 4]


def test_ties_go_to_the_lower_class_as_in_argmax() -> None:
    equal = np.zeros((3, 3), np.float32)
    assert top_k_hits(equal, np.array([0, 1, 2]), 1) == 1
    assert top_k_hits(equal, np.array([0, 1, 2]), 2) == 2


@pytest.mark.parametrize("k", [0, 4])
def test_top_k_refuses(k: int) -> None:
    with pytest.raises(ValueError, match=r"k: expected 1\.\.3"):
        top_k_hits(LOGITS, LABELS, k)


def test_confusion_rows_are_true_labels() -> None:
    matrix = confusion_matrix(LOGITS.argmax(axis=1), LABELS, 3)
    assert matrix.tolist() == [[1, 0, 0], [0, 1, 1], [1, 0, 0]]


def test_scores_add_up_over_batches() -> None:
    scores = ClassScores(("a", "b", "c"))
    scores.k = 2
    scores.add(LOGITS[:3], LABELS[:3], 2.0)
    scores.add(LOGITS[3:], LABELS[3:], 6.0)
    assert scores.loss == pytest.approx(3.0)
    assert scores.accuracy == 0.5
    assert scores.accuracy_k == 1.0
    np.testing.assert_allclose(scores.per_class, [1.0, 0.5, 0.0])


def test_a_class_without_images_has_no_accuracy() -> None:
    scores = ClassScores(("a", "b", "c", "d"))
    scores.add(np.pad(LOGITS, ((0, 0), (0, 1))), LABELS, 1.0)
    assert np.isnan(scores.per_class[3])
