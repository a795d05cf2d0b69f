"""What the model answers on test data: text it writes, tokens it fills in, images it mistakes."""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any

import numpy as np
from PIL import Image

from extensor import no_grad
from extensor.generation import Sampling, next_tokens
from extensor.nn.module import evaluating

from ..loop import Trainer
from ..rundir import UsageError
from ..tasks.classification import Classification
from ..tasks.language import Causal, Masked
from ..text.masking import IGNORE_LABEL

__all__ = ["answers"]

SEARCHED = 1000
"""Test images among which the worst mistakes are looked for."""
SHOWN = 24
TOKENS, WINDOWS = 400, 6
MAX_CLASSES = 30
"""A larger matrix says nothing at a glance."""


def answers(trainer: Trainer, result: dict[str, Any] | None) -> dict[str, Any]:
    """What page.html shows, by the kind of task: "text", "windows", or "mistakes" of images.

    Raises:
        UsageError: if the model's scores are not finite.
    """
    with evaluating(trainer.model), no_grad():
        if isinstance(trainer.task, Masked):
            return {"windows": _filled(trainer, trainer.task)}
        if isinstance(trainer.task, Causal):
            return {"text": _text(trainer, trainer.task)}
        assert isinstance(trainer.task, Classification)
        names, counts = trainer.task.dataset.classes, (result or {}).get("confusion")
        known = counts is not None and len(names) <= MAX_CLASSES
        confusion = (names, counts) if known else None
        return {"mistakes": _mistakes(trainer, trainer.task), "confusion": confusion}


def _text(trainer: Trainer, task: Causal) -> tuple[str, str]:
    """The beginning of the test text, and the model's continuation."""
    context = trainer.config.context
    prompt = [int(token) for token in task.test_tokens[:context]]
    how = Sampling(temperature=0.8, top_k=200)
    steps = next_tokens(trainer.model, [prompt], how=how, context=context)
    try:
        text = [int(token[0]) for token in itertools.islice(steps, TOKENS)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    return task.tokenizer.decode(prompt), task.tokenizer.decode(text)


def _filled(trainer: Trainer, task: Masked) -> list[list[tuple[str, str | None]]]:
    """Test windows as texts: each with the truth where a token was masked, else with None."""
    batch = next(task.test(WINDOWS))
    scores, _, _ = trainer.forward(batch)
    guesses = iter(_finite(scores.to("cpu").numpy()).argmax(-1))

    def token(label: int, given: int) -> tuple[str, str | None]:
        if label == IGNORE_LABEL:
            return task.tokenizer.decode([given]), None
        return task.tokenizer.decode([int(next(guesses))]), task.tokenizer.decode([label])

    return [
        [token(int(label), int(given)) for label, given in zip(*window, strict=True)]
        for window in zip(batch.labels, batch.inputs, strict=True)
    ]


def _mistakes(trainer: Trainer, task: Classification) -> tuple[list[dict[str, Any]], int, int]:
    """The worst mistakes, the number of all mistakes, and the number of images."""
    found: list[tuple[float, np.ndarray, int, int, float]] = []
    seen = 0
    for batch in task.test(task.eval_batch):
        scores, labels, _ = trainer.forward(batch)
        rows = _finite(scores.to("cpu").numpy()).astype(np.float64)
        p = np.exp(rows - rows.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        said = p.argmax(1)
        for i in np.flatnonzero(said != labels):
            true = int(labels[i])
            found.append((p[i, true], batch.inputs[i], true, int(said[i]), p[i].max()))
        seen += batch.count
        if seen >= SEARCHED:
            break
    names = task.dataset.classes
    found.sort(key=lambda row: row[0])
    worst = [
        {"true": names[true], "wrong": names[wrong], "sure": sure, "png": _png(image)}
        for _, image, true, wrong, sure in found[:SHOWN]
    ]
    return worst, len(found), seen


def _finite(scores: np.ndarray) -> np.ndarray:
    if not np.isfinite(scores).all():
        raise UsageError("the model's scores are NaN or infinite: its training diverged")
    return scores


def _png(image: np.ndarray) -> str:
    """A (C, H, W) image of one channel or three as a data address, its values spread to 0..255."""
    low, high = float(image.min()), float(image.max())
    pixels = np.rint((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
