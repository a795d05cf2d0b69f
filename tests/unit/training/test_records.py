"""What a run leaves for other programs, read independently: metrics.jsonl, TensorBoard events."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from extensor import from_numpy
from extensor.training.callbacks.files import EVERY_STEPS
from extensor.training.config import RunConfig
from extensor.training.loop import open_run
from extensor.training.metrics import (
    ClassScores,
    TokenScores,
    confusion_matrix,
    label_ranks,
    perplexity,
)
from extensor.training.rundir import METRICS
from extensor.training.train import train
from tests.unit.training.conftest import QUIET

LOGITS = np.array([[3, 2, 1], [1, 3, 2], [1, 2, 3], [3, 1, 2]], np.float32)
LABELS = np.array([0, 1, 1, 2])


def events(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of all event files; a record is length, its CRC, the message, its CRC."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_a_run_leaves_the_same_figures_in_both(
    small: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small(recipe="mxfp4_all", epochs=5, val_share=0.2)
    train(config, tmp_path / "run", resume=False, console=QUIET)
    history = open_run(tmp_path / "run").history
    kept = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert kept == [report.as_dict() for report in history]
    assert [row["epoch"] for row in kept] == [1, 2, 3, 4, 5]
    found = {(tag, step): value for tag, step, value in events(tmp_path / "run" / "tensorboard")}
    expected = {
        (f"epoch/{name}", row["step"]): value
        for row in kept
        for name, value in row.items()
        if name not in ("epoch", "step") and value is not None
    }
    for key, value in expected.items():
        assert found.pop(key) == pytest.approx(value, rel=2.0**-23), key
    steps = range(EVERY_STEPS, kept[-1]["step"] + 1, EVERY_STEPS)
    assert set(found) == {(f"step/{name}", step) for step in steps for name in ("loss", "lr")}


def test_class_metrics_as_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((500, 7)), rng.integers(0, 7, 500)
    ranks = label_ranks(from_numpy(scores), labels)
    for k in range(1, 7):
        expected = sklearn_metrics.top_k_accuracy_score(labels, scores, k=k)
        assert (ranks < k).mean() == pytest.approx(expected, rel=1e-12)
    predicted = scores.argmax(1)
    np.testing.assert_array_equal(
        confusion_matrix(predicted, labels, 7), sklearn_metrics.confusion_matrix(labels, predicted)
    )
    total = ClassScores(tuple("abcdefg"))
    for part in np.array_split(np.arange(500), 3):
        total.add(from_numpy(scores[part]), labels[part], 0.5)
    assert total.accuracy == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    recall = sklearn_metrics.recall_score(labels, predicted, average=None)
    np.testing.assert_allclose(list(total.details()["per_class"].values()), recall, rtol=1e-12)


def test_perplexity_as_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    scores, labels = rng.standard_normal((300, 5)), rng.integers(0, 5, 300)
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    total = TokenScores(5)
    for part in np.array_split(np.arange(300), 4):
        loss = sklearn_metrics.log_loss(labels[part], chances[part], labels=range(5))
        total.add(from_numpy(scores[part]), labels[part], loss)
    expected = sklearn_metrics.log_loss(labels, chances)
    assert total.loss == pytest.approx(expected, rel=1e-12)
    assert total.perplexity == pytest.approx(np.exp(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (700.0, np.exp(700.0)), (800.0, np.inf)]
)
def test_a_perplexity_beyond_floats_is_infinite(loss: float, expected: float) -> None:
    assert perplexity(loss) == pytest.approx(expected, rel=1e-12)


def test_ties_go_to_the_lower_class_as_in_argmax() -> None:
    equal = from_numpy(np.zeros((3, 3), np.float32))
    assert label_ranks(equal, np.array([0, 1, 2])).tolist() == [0, 1, 2]


def test_ranks_refuse_other_labels() -> None:
    with pytest.raises(ValueError, match=r"expected 0\.\.2 for 3 classes"):
        label_ranks(from_numpy(LOGITS), LABELS + 1)
    with pytest.raises(ValueError, match=r"expected scores \(N, C\) and labels \(N,\)"):
        label_ranks(from_numpy(LOGITS), LABELS[1:])


def test_a_class_without_images_has_no_accuracy() -> None:
    scores = ClassScores(("a", "b", "c", "d"))
    scores.add(from_numpy(np.pad(LOGITS, ((0, 0), (0, 1)))), LABELS, 1.0)
    assert np.isnan(scores.per_class[3])
