"""Encoder: shapes, size, what sees what, hidden tokens, training, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn
from extensor.training.config import RunConfig
from extensor.training.data.corpora import Corpus
from extensor.training.language_model import load_language_model
from extensor.training.loop import Trainer
from extensor.training.rundir import UsageError
from extensor.training.runs import defaults
from extensor.training.tasks import TASKS
from extensor.training.text.masking import IGNORE_LABEL, mask_tokens

SMALL = {
    "epochs": 1, "epoch_steps": 10, "batch_size": 8, "context": 16, "test_limit": 20, "lr": 1e-3,
    "warmup_epochs": 0.1,
}  # fmt: skip


def small(**changes: Any) -> nn.Module:
    settings = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 32, **changes}
    return models.build("encoder", models.config("encoder", **settings), np.random.default_rng(0))


def tokens(shape: tuple[int, ...] = (3, 8)) -> et.ExTensor:
    return et.from_numpy(np.random.default_rng(1).integers(0, 12, shape))


def words(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, shape).astype(np.uint32)


@pytest.fixture
def corpus() -> Corpus:
    """Runs of one letter: a hidden one is what its neighbours are."""
    letters = np.random.default_rng(0).integers(0, 5, 200)
    return Corpus.of("toy", ["".join("abcde"[n] * 40 for n in letters)])


def test_size_shapes_gradients_and_roles() -> None:
    nano = models.build("encoder", models.config("encoder", "nano"), np.random.default_rng(0))
    block = 12 * 128**2 + 13 * 128
    count = 4 * block + (66 + 64) * 128 + 2 * 128 + 128 * 65 + 65
    assert sum(p.size for p in nano.parameters()) == count
    model = small()
    scores = model(tokens())
    assert scores.shape == (3, 8, 11)
    labels = et.from_numpy(tokens().numpy().reshape(-1) % 11)
    loss = et.cross_entropy(scores.reshape(-1, 11), labels)
    assert abs(float(loss.item()) - math.log(11)) < 0.2
    loss.backward()
    assert all(p.grad is not None and np.any(p.grad.numpy()) for p in model.parameters())
    state = nn.apply_recipe(model, "mxfp4")
    assert model.head.quant is state.layers["head"]


def test_every_token_sees_every_other() -> None:
    model, x = small(), tokens((1, 8)).numpy()
    before = model(et.from_numpy(x)).numpy()
    for place in range(8):
        y = x.copy()
        y[0, place] = (y[0, place] + 1) % 12
        moved = np.abs(model(et.from_numpy(y)).numpy() - before).max(axis=-1)
        assert (moved[0] > 0).all()


def test_bad_input() -> None:
    model = small()
    for shape, message in (
        ((8,), r"expected tokens \(B, T\)"),
        ((2, 0), r"expected tokens \(B, T\) with T of 1 or more"),
        ((1, 9), "at most the 8 tokens of the context, got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens(shape))
    for bad in (-1, 12):  # 11 is the token that hides
        with pytest.raises(ValueError, match=r"numbers in 0\.\.11"):
            model(et.from_numpy(np.array([[0, bad]])))
    with pytest.raises(ValueError, match="a multiple of the heads"):
        models.config("encoder", width=30, heads=4)
    with pytest.raises(ValueError, match="sizes of 1 or more"):
        models.config("encoder", layers=0)


# --- hiding tokens


def test_fifteen_per_cent_are_asked_for_in_three_ways() -> None:
    x = np.random.default_rng(0).integers(0, 50, (200, 500))
    inputs, labels = mask_tokens(x, words(x.shape, 1), words(x.shape, 2), 50)
    chosen = labels != IGNORE_LABEL
    assert np.array_equal(labels[chosen], x[chosen]) and np.array_equal(inputs[~chosen], x[~chosen])
    assert chosen.mean() == pytest.approx(0.15, abs=0.007)  # six standard deviations
    hidden = (inputs == 50)[chosen].mean()
    same = (inputs == x)[chosen].mean()
    assert hidden == pytest.approx(0.8, abs=0.02)
    assert same == pytest.approx(0.1 + 0.1 / 50, abs=0.015)
    replaced = inputs[chosen & (inputs != 50) & (inputs != x)]
    assert set(replaced) == set(range(50))


def test_one_token_at_least_is_asked_for() -> None:
    x = np.zeros((1, 3), np.int64)
    for seed in range(20):
        _, labels = mask_tokens(x, words(x.shape, seed), words(x.shape, 99), 5)
        assert (labels != IGNORE_LABEL).any()


def test_hiding_refuses() -> None:
    x = np.zeros((2, 3), np.int64)
    for bad, message in (
        (x[:0], "expected tokens"), (x + 5, r"expected tokens in 0\.\.4, got 5"), (x - 1, "got -1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            mask_tokens(bad, words(bad.shape, 0), words(bad.shape, 1), 5)
    with pytest.raises(ValueError, match="random words of their shape"):
        mask_tokens(x, words((2, 2), 0), words((2, 3), 1), 5)


# --- training


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**defaults("encoder", "python_source"), **SMALL, **changes})


def test_tests_ask_for_the_same_tokens_whatever_the_seed(corpus: Corpus) -> None:
    one, two = (TASKS["masked"](config(seed=seed), corpus) for seed in (0, 1))
    for a, b in zip(one.test(64), two.test(64), strict=True):
        assert np.array_equal(a.inputs, b.inputs) and np.array_equal(a.labels, b.labels)
    first, other = (next(task.training(1, 0)) for task in (one, two))
    assert not np.array_equal(first.inputs, other.inputs)
    later = list(one.training(1, 0))[4]
    again = next(one.training(1, 4))
    assert np.array_equal(later.inputs, again.inputs)
    assert 0 < first.count < first.labels.size
    assert not np.array_equal(next(one.training(2, 0)).inputs, first.inputs)


def test_it_learns_what_both_sides_tell(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "extensor.models.encoder.configs.CONFIGS",
        {"nano": models.config("encoder", layers=1, width=64)},
    )
    run = config(epochs=2, epoch_steps=60, lr=3e-3, recipe="mxfp4", val_share=0.1)
    trainer = Trainer(run, tmp_path, data=corpus)
    result = trainer.fit()
    assert result["diverged"] is None and result["accuracy"] > 0.8
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert trainer.history[-1].val_perplexity is not None
    assert result["test_tokens"] < 0.3 * 20 * 16  # hidden ones only
    trainer.save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(UsageError, match="expected the checkpoint of a language model.*'encoder'"):
        load_language_model(tmp_path / "checkpoint.safetensors")


def test_ragged_and_short_corpora_are_refused() -> None:
    make: Callable[..., Any] = TASKS["masked"]
    with pytest.raises(ValueError, match="expected at least 17"):
        make(config(), Corpus("toy", "abc" * 20, "abcabc"))
    with pytest.raises(ValueError, match="expected at least 17"):
        make(config(val_share=0.01), Corpus("toy", "abc" * 20, "abc" * 20))
