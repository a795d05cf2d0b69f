"""The live bar: what it shows fits the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from extensor.training.callbacks.progress import WIDE, ShowProgress
from extensor.training.records import StepReport


def shown(width: int) -> str:
    """The bar's last state, as text."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    trainer: Any = SimpleNamespace(
        batches=938, config=SimpleNamespace(epochs=10), task=SimpleNamespace(unit="images")
    )
    report = StepReport(
        step=9000,
        epoch=10,
        batch=937,
        batches=938,
        loss=0.1,
        epoch_loss=0.1234,
        epoch_accuracy=0.9999,
        per_second=12345.6,
        lr=0.1,
        loss_scale=1.0,
        skipped=False,
        skipped_steps=0,
        saturated=0.1234,
        flushed=0.0567,
    )
    progress = ShowProgress(console)
    progress.on_start(trainer)
    progress.on_step(trainer, report)
    bar = progress._bar
    assert bar is not None
    progress.on_end(trainer, None)
    page = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    page.print(bar.get_renderable())
    return page.file.getvalue()


@pytest.mark.parametrize("width", [80, WIDE, 160])
def test_nothing_is_cut_off(width: int) -> None:
    text = shown(width)
    assert len(text.splitlines()) == 1
    for part in ("10/10", "0.1234", "99.99%", "12,346 images/s", "12.34%", "5.67%", "━"):
        assert part in text
    assert "…" not in text
    assert ("937/938" in text) == (width >= WIDE)


def test_elsewhere_there_is_no_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    trainer: Any = SimpleNamespace(batches=1)
    ShowProgress(console).on_start(trainer)
    assert console.file.getvalue() == ""
