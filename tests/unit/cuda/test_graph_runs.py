"""`python -m training --graph`: the run that it is without, and what it does not do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ci import kill
from extensor.optim import MXGradScaler
from extensor.training.callbacks.telemetry import UNSEEN, Telemetry
from extensor.training.config import RunConfig
from extensor.training.loop import Trainer
from extensor.training.rundir import UsageError, read_telemetry
from extensor.training.runs import defaults
from extensor.training.train import train as run_training
from tests.unit.cuda import fake_backend
from tests.unit.cuda.graphs import same
from tests.unit.training.conftest import SMALL

QUIET = Console(quiet=True)


def small_run(**changes: Any) -> RunConfig:
    return RunConfig(**{**defaults("mlp"), **SMALL, **changes})


LEAN = {"weights": "bfloat16", "update": "in_backward", "loss_scale": "off", "clip_norm": 0.0}


@pytest.mark.parametrize(
    ("states", "changes"),
    [
        ("float32", {}),
        ("mxfp8_e4m3", {}),
        ("bfloat16", LEAN),
        ("bfloat16", {"optimizer": "lion", "lr": 1e-3}),
    ],
)
def test_training_with_a_graph_is_training(
    gpu: Any, tmp_path: Path, states: str, changes: dict[str, Any]
) -> None:
    results = []
    given = {"recipe": "mxfp4", "epochs": 2, "batch_size": 40, "clip_norm": 1.0} | changes
    for graph in (False, True):
        config = small_run(device="cuda", optimizer_states=states, **given)
        (tmp_path / str(graph)).mkdir()
        trainer = Trainer(config, tmp_path / str(graph), graph=graph)
        trainer.fit()
        results.append((trainer.model.state_dict(), trainer.optimizer.state_dict()))
        results[-1] += ([(e.train_loss, e.test_loss, e.flushed) for e in trainer.history],)
    same(results[1], results[0])


def test_a_watched_run_with_a_graph_is_the_run_without(gpu: Any, tmp_path: Path) -> None:
    """Recorded steps are made in Python between replays, of which the first ones overflow."""
    given = {"recipe": "mxfp4", "epochs": 2, "batch_size": 20, "clip_norm": 1.0}
    found: dict[tuple[bool, bool], Any] = {}
    for graph, watched in ((False, True), (True, True), (True, False)):
        out = tmp_path / f"{graph}-{watched}"
        out.mkdir()
        watches = [Telemetry(4)] if watched else []
        trainer = Trainer(small_run(device="cuda", **given), out, graph=graph, callbacks=watches)
        trainer.scaler = MXGradScaler(trainer.quant, init_scale=2.0**127)
        dict(trainer.model.named_parameters())["layers.2.weight"].data *= 4096
        trainer.fit()
        found[graph, watched] = trainer.model.state_dict(), trainer.optimizer.state_dict()
        found[graph, watched] += ([(e.train_loss, e.test_loss) for e in trainer.history],)
    same(found[True, True], found[False, True])
    same(found[True, True], found[True, False])
    eager, captured = (read_telemetry(tmp_path / f"{graph}-True") for graph in (False, True))
    assert [r["step"] for r in captured if "overflow" not in r] == [4, 8]
    for one, other in zip(captured, eager, strict=True):
        assert all(one[key] == other[key] for key in ("step", "loss", "layers"))
        if "overflow" in one:
            seen = one["step"] in (4, 8)
            assert other["overflow"]["layer"]
            assert one["overflow"] == (other["overflow"] if seen else UNSEEN)
    assert [r["step"] for r in captured if "overflow" in r][:4] == [1, 2, 3, 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_run_with_a_graph_that_died_ends_as_if_it_had_not(
    fake_launch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed in its second epoch, and again while it resumes."""
    fake_backend.install(monkeypatch, fake_launch)
    given = "--recipe mxfp4 --epochs 3 --train-limit 48 --patience 0 --device cuda --graph"
    monkeypatch.setattr(kill, "OTHER", given.split())
    Trainer(small_run(device="cuda", recipe="mxfp4"), tmp_path, graph=True).fit()  # compiles
    folder = tmp_path / "run"
    assert kill.Process(folder).end()[0] == 0
    whole, points = kill.state(folder), int(folder.with_suffix(".points").read_text())
    for at, later in ((points // 2, 4), (points - 3, 1)):
        folder = tmp_path / f"killed-{at}"
        ends = [kill.Process(folder, at=at).end()[0], kill.Process(folder, at=later).end()[0]]
        assert ends == [-signal.SIGKILL] * 2
        assert kill.differences(folder, whole) == []


def test_a_run_says_what_a_graph_does_not_do(tmp_path: Path) -> None:
    for options, word in (
        ({}, "add --device cuda"),
        ({"device": "cuda", "optimizer": "lars"}, "adamw or lion"),
        ({"device": "cuda", "recipe": "mxfp4_adaptive"}, "scale rules between steps"),
    ):
        config = small_run(**options)
        with pytest.raises(UsageError, match=word):
            run_training(config, tmp_path, resume=False, console=QUIET, graph=True)
