"""What the model answers on test data: text it writes, tokens it fills in, images it mistakes."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from html import escape
from typing import Any

import numpy as np

from extensor import no_grad
from extensor.nn.module import evaluating
from training.generate import go_on
from training.loop import Trainer
from training.page.cells import table
from training.rundir import UsageError
from training.tasks.classification import Classification
from training.tasks.language import Causal, Masked
from training.text.masking import NOT_ASKED

__all__ = ["answers"]

LOOKED_AT = 1000
"""Test images among which the worst mistakes are looked for."""
SHOWN = 24
TOKENS, WINDOWS = 400, 6
MOST_CLASSES = 30
"""A larger matrix says nothing at a glance."""


def answers(trainer: Trainer, result: dict[str, Any] | None) -> str:
    """The section's HTML, by the kind of task.

    Raises:
        UsageError: if the model's scores are not finite.
    """
    with evaluating(trainer.model), no_grad():
        if isinstance(trainer.task, Masked):
            return _filled(trainer, trainer.task)
        if isinstance(trainer.task, Causal):
            return _text(trainer, trainer.task)
        assert isinstance(trainer.task, Classification)
        return _confusion(trainer.task, result) + _mistakes(trainer, trainer.task)


def _text(trainer: Trainer, task: Causal) -> str:
    context, rng = trainer.config.context, np.random.default_rng(0)
    prompt = task.test_tokens[:context]
    device, tokens = trainer.config.device, [int(token) for token in prompt]
    text = go_on(trainer.model, tokens, context, TOKENS, 0.8, 200, rng, device)
    seen, new = task.tokenizer.decode(prompt), task.tokenizer.decode(text)
    return (
        "<p>The beginning of the test text, then what the model writes after it, at temperature "
        f'0.8.</p><pre><span class="soft">{escape(seen)}</span>{escape(new)}</pre>'
    )


def _filled(trainer: Trainer, task: Masked) -> str:
    batch = next(task.test(WINDOWS))
    scores, _, _ = trainer.forward(batch)
    guesses = iter(_finite(scores.to("cpu").numpy()).argmax(-1))
    lines = []
    for asked, given in zip(batch.labels, batch.inputs, strict=True):
        parts = []
        for label, token in zip(asked, given, strict=True):
            if label == NOT_ASKED:
                parts.append(escape(task.tokenizer.decode([int(token)])))
            else:
                guess = next(guesses)
                kind = "good" if guess == label else "bad"
                shown, truth = (escape(task.tokenizer.decode([int(t)])) for t in (guess, label))
                parts.append(f'<b class="{kind}" title="{truth}">{shown}</b>')
        lines.append("".join(parts))
    return (
        "<p>Test windows. The coloured letters were asked for: green are right; what stood in "
        f"place of a red one shows when it is pointed at.</p><pre>{'<hr>'.join(lines)}</pre>"
    )


def _confusion(task: Classification, result: dict[str, Any] | None) -> str:
    names = task.dataset.classes
    if result is None or "confusion" not in result or len(names) > MOST_CLASSES:
        return ""
    counts = np.array(result["confusion"])
    rows = []
    for name, row in zip(names, counts, strict=True):
        total = max(int(row.sum()), 1)
        cells = [
            f'<i class="{"good" if said == name else "bad"}" '
            f'style="--share:{math.sqrt(count / total):.3f}">{count or ""}</i>'
            for said, count in zip(names, row, strict=True)
        ]
        right = row[names.index(name)] / total
        rows.append([f"<b>{escape(name)}</b>", *cells, f"{right:.1%}"])
    return (
        "<p>Rows are what test images show, columns what the model says.</p>"
        f'<div class="heat">{table(["", *names, "right"], rows)}</div>'
    )


def _mistakes(trainer: Trainer, task: Classification) -> str:
    found: list[tuple[float, np.ndarray, int, int, float]] = []
    seen = 0
    for batch in task.test(task.eval_batch):
        scores, labels, _ = trainer.forward(batch)
        rows = _finite(scores.to("cpu").numpy()).astype(np.float64)
        p = np.exp(rows - rows.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        said = p.argmax(1)
        for i in np.flatnonzero(said != labels):
            found.append(
                (p[i, labels[i]], batch.inputs[i], int(labels[i]), int(said[i]), p[i].max())
            )
        seen += batch.count
        if seen >= LOOKED_AT:
            break
    if not found:
        return f"<p>All of the first {seen:,} test images are right.</p>"
    names = task.dataset.classes
    found.sort(key=lambda row: row[0])
    figures = "".join(
        f'<figure><img alt="{escape(names[true])}" src="{_png(image)}"><figcaption>'
        f"{escape(names[true])} <small>taken for</small> {escape(names[wrong])} "
        f"<small>{sure:.0%}</small></figcaption></figure>"
        for _, image, true, wrong, sure in found[:SHOWN]
    )
    return (
        f"<p>{len(found):,} of the first {seen:,} test images are mistaken; those whose class it "
        f'least believes in, and how sure it is:</p><div class="thumbs">{figures}</div>'
    )


def _finite(scores: np.ndarray) -> np.ndarray:
    if not np.isfinite(scores).all():
        raise UsageError("the model's scores are NaN or infinite: its training diverged")
    return scores


def _png(image: np.ndarray) -> str:
    """A (C, H, W) image of one channel or three as a data address, its values spread to 0..255.

    Source: PNG specification, third edition (W3C), sections 5.3 and 11.2: one IDAT of rows that
    each begin with filter type 0.
    """
    low, high = float(image.min()), float(image.max())
    pixels = np.rint((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    pixels = pixels if len(pixels) == 3 else pixels[:1]
    channels, height, width = pixels.shape
    rows = pixels.transpose(1, 2, 0).reshape(height, width * channels)
    data = np.insert(rows, 0, 0, axis=1).tobytes()

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()
