"""`--memory`: the plan and the peak, a run that they do not change, and running out of memory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import extensor as et
from extensor.training.callbacks import Callback, ShowMemory
from tests.unit.training.conftest import Make, fitted, weights

pytestmark = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


def console() -> tuple[Console, io.StringIO]:
    said = io.StringIO()
    return Console(file=said, width=200), said


def test_the_plan_then_the_peak_and_the_same_run(tmp_path: Path, small: Make) -> None:
    show, said = console()
    shown = fitted(small(), tmp_path / "a", ShowMemory(show))
    plain = fitted(small(), tmp_path / "b")
    assert weights(shown) == weights(plain)
    found = json.loads((tmp_path / "a" / "memory.json").read_text())
    held = sum(param.nbytes for param in shown.model.parameters())
    assert found["kinds"]["gradients"] <= held <= found["kinds"]["weights"]
    assert sum(found["kinds"].values()) == found["peak"] == max(found["timeline"])
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("memory: weights") and lines[1].startswith("memory: peak")


def test_out_of_memory_names_the_holders_and_the_settings(tmp_path: Path, small: Make) -> None:
    class Full(Callback):
        def on_gradients(self, run: Any, batch: Any) -> None:
            raise MemoryError("requested 1 byte, 0 are free")

    show, said = console()
    with pytest.raises(MemoryError, match="0 are free"):
        fitted(small(), tmp_path, ShowMemory(show), Full())
    text = said.getvalue()
    assert "out of memory" in text and ".weight" in text and "--batch-size" in text


def test_the_setting_says_how_what_is_kept_is_stored(tmp_path: Path, small: Make) -> None:
    run = fitted(small(recipe="fp32", saved="mxfp8_e4m3"), tmp_path)
    ((rule, store),) = run.model.storage.rules
    assert store.spec.format == rule.spec.format == run.config.saved
    with pytest.raises(ValueError, match=r"--saved: no saved format named 'mxfp7'"):
        small(saved="norm=mxfp7")
