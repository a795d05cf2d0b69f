"""What the page says the model answers: right numbers, real images, escaped text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image as reader

import extensor.training.tasks.language as language
from extensor import no_grad
from extensor.training.config import RunConfig
from extensor.training.data.corpora import Corpus
from extensor.training.loop import Trainer, open_run
from extensor.training.page import ReportArgs, write_page
from extensor.training.page import answers as answering
from extensor.training.page.answers import _mistakes, _png, answers
from extensor.training.rundir import UsageError
from extensor.training.runs import defaults
from extensor.training.train import train
from tests.unit.training.conftest import QUIET

TEXT = "to be, or not to be: that is <b>the</b> question & more. " * 60


def trained(config: RunConfig, out: Path) -> tuple[Trainer, str]:
    """A finished run, and the section of its page."""
    train(config, out, resume=False, console=QUIET)
    page = write_page(ReportArgs(run=out)).read_text(encoding="utf-8")
    found = re.search(r"<h2>Answers</h2>(.*?)</section>", page, re.DOTALL)
    assert found
    return open_run(out), found.group(1)


def test_images(small: Callable[..., RunConfig], tmp_path: Path) -> None:
    trainer, said = trained(small(recipe="mxfp4_all"), tmp_path / "run")
    batch = next(trainer.task.test(60))
    trainer.model.eval()
    with no_grad():
        rows = trainer.forward(batch)[0].numpy()
    guesses = rows.argmax(1)
    cells = re.findall(r'<i class="(good|bad)" style="--share:[\d.]+">(\d*)</i>', said)
    assert len(cells) == 100
    counts = np.array([int(count or 0) for _, count in cells]).reshape(10, 10)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (batch.labels, guesses), 1)
    np.testing.assert_array_equal(counts, expected)
    assert [kind for kind, _ in cells] == ["good" if i % 11 == 0 else "bad" for i in range(100)]
    wrong = np.flatnonzero(guesses != batch.labels)
    assert f"{len(wrong)} of the first 60 test images are mistaken" in said
    pictures = re.findall(r'<img alt="(\d)" src="data:image/png;base64,([^"]+)">', said)
    assert len(pictures) == min(24, len(wrong))
    p = np.exp(rows - rows.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    first = min(wrong, key=lambda i: p[i, batch.labels[i]])
    assert int(pictures[0][0]) == batch.labels[first]
    seen = reader.imread(io.BytesIO(base64.b64decode(pictures[0][1])), format="png")
    image = batch.inputs[first, 0]
    spread = (image - image.min()) / (image.max() - image.min())
    np.testing.assert_allclose(seen, spread, atol=0.5 / 255 + 1e-6)


def test_colours_of_an_image_survive() -> None:
    image = np.random.default_rng(0).random((3, 5, 7)).astype(np.float32)
    image.flat[:2] = 0.0, 1.0
    data = base64.b64decode(_png(image).partition(",")[2])
    seen = reader.imread(io.BytesIO(data), format="png")
    np.testing.assert_allclose(seen, image.transpose(1, 2, 0), atol=0.5 / 255 + 1e-6)
    flat = reader.imread(io.BytesIO(base64.b64decode(_png(image[:1] * 0).partition(",")[2])))
    assert flat.shape == (5, 7) and not flat.any()


def language_run(model: str, **changes: Any) -> RunConfig:
    small = {"epochs": 1, "epoch_steps": 10, "batch_size": 4, "context": 16, "test_limit": 8}
    return RunConfig(**{**defaults(model), **small, "warmup_epochs": 0.2, **changes})


@pytest.fixture
def tiny(one_text: Callable[[str], None]) -> None:
    """The data set is one sentence, with marks that HTML would read."""
    one_text(TEXT)


def test_text(tiny: None, tmp_path: Path) -> None:
    trainer, said = trained(language_run("gpt"), tmp_path / "run")
    found = re.search(r'<pre><span class="soft">(.*?)</span>(.*?)</pre>', said, re.DOTALL)
    assert found
    seen, new = map(unescape, found.groups())
    assert seen == Corpus.of("", [TEXT]).test[:16] and len(new) == 400
    assert "<b>" not in found.group(0).replace("</span>", "")
    assert answers(trainer, None)["text"] == (seen, new)  # the same text each time


def test_filled_in(tiny: None, tmp_path: Path) -> None:
    trainer, said = trained(language_run("encoder"), tmp_path / "run")
    batch = next(trainer.task.test(6))
    trainer.model.eval()
    with no_grad():
        rows, labels, _ = trainer.forward(batch)
    right = rows.numpy().argmax(1) == labels
    kinds = re.findall(r'<b class="(good|bad)" title="([^"]*)">(.*?)</b>', said, re.DOTALL)
    assert [kind == "good" for kind, _, _ in kinds] == right.tolist()
    assert all((unescape(t) == unescape(s)) == (kind == "good") for kind, t, s in kinds)
    assert said.count("<hr>") == 5
    plain = unescape(re.sub(r'<b class="\w+" title="([^"]*)">.*?</b>|<[^>]+>', r"\1", said))
    windows = [trainer.task.tokenizer.decode(w) for w in _windows(trainer)]
    assert all(window in plain for window in windows)


def _windows(trainer: Trainer) -> np.ndarray:
    tokens = trainer.task.test_tokens
    starts = language.even_starts(len(tokens), 16, 8)[:6]
    return tokens[starts[:, None] + np.arange(16)]


def test_a_diverged_model_says_so(tiny: None, tmp_path: Path) -> None:
    trainer, _ = trained(language_run("gpt"), tmp_path / "run")
    trainer.model.norm.weight.data[0] = np.nan
    with pytest.raises(UsageError, match="diverged"):
        answers(trainer, None)
    trainer.save(tmp_path / "run" / "checkpoint.safetensors")
    page = write_page(ReportArgs(run=tmp_path / "run")).read_text(encoding="utf-8")
    assert "a training run that diverged" in page


def test_mistakes_are_searched_for_in_so_many_images(
    small: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, until enough were seen; the worst of all of them come first."""
    trainer, _ = trained(small(recipe="fp32"), tmp_path / "run")
    monkeypatch.setattr(type(trainer.task), "eval_batch", 25)
    everything, mistaken, seen = _mistakes(trainer, trainer.task)  # type: ignore[arg-type]
    assert seen == 60 and mistaken >= len(everything)
    monkeypatch.setattr(answering, "SEARCHED", 30)
    assert _mistakes(trainer, trainer.task)[2] == 50  # type: ignore[arg-type]
