"""Telemetry: the figures against a computation of their own, and a run that it does not change."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor as et
from extensor import nn
from extensor.training.callbacks import Callback, SaveCheckpoint, Telemetry, telemetry
from extensor.training.cli import main
from extensor.training.loop import Interrupted, Trainer
from extensor.training.rundir import LAST, TELEMETRY
from extensor.training.train import train
from tests.unit.training.conftest import Make, fitted, weights


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / TELEMETRY).read_text().splitlines()]


class Kept(Callback):
    """The gradients of a step, and the model before it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_gradients(self, trainer: Trainer, batch: Any) -> None:
        if trainer.position.step + 1 == self.step:
            named = list(trainer.model.named_parameters())
            self.grads = {path: p.grad.numpy().copy() for path, p in named if p.grad is not None}
            self.weights = trainer.model.state_dict()
            self.batch = batch


def test_gradients_beside_their_noise(small: Make, tmp_path: Path) -> None:
    kept = Kept(4)
    trainer = fitted(small(recipe="mxfp4_all", epochs=1), tmp_path / "run", kept, Telemetry(4))
    (record,) = records(tmp_path / "run")
    assert record["step"] == 4 and record["epoch"] == 1
    model = trainer.fresh_model()
    model.load_state_dict(kept.weights)
    y = model(et.from_numpy(kept.batch.inputs))
    et.cross_entropy(y, et.from_numpy(kept.batch.labels)).backward()
    exact = {path: p.grad.numpy().astype(np.float64) for path, p in model.named_parameters()}
    for path in ("layers.0", "layers.1", "layers.2"):
        names = [name for name in exact if name.startswith(path)]
        norm = math.sqrt(sum(float((exact[n] ** 2).sum()) for n in names))
        noise = math.sqrt(sum(float(((kept.grads[n] - exact[n]) ** 2).sum()) for n in names))
        row = record["layers"][path]
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert row["noise_norm"] == pytest.approx(noise, rel=1e-4)
        assert row["gradient_over_noise"] == pytest.approx(norm / noise, rel=1e-4)
        assert 1 < row["gradient_over_noise"] < 100
    whole = math.sqrt(sum(float((g**2).sum()) for g in exact.values()))
    assert record["gradient_norm"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("share", "steps"), [(1e9, [2, 3, 4, 5, 6]), (1e-9, [2])])
def test_records_as_often_as_a_share_of_the_time_allows(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, steps: list[int]
) -> None:
    monkeypatch.setattr(telemetry, "FIRST", 2)
    monkeypatch.setattr(telemetry, "SHARE", share)
    fitted(small(recipe="mxfp4_all", epochs=1), tmp_path / "run", Telemetry("auto"))
    assert [record["step"] for record in records(tmp_path / "run")] == steps


def test_the_next_record_waits_until_all_cost_their_share() -> None:
    watch = Telemetry("auto")
    assert watch._after(0, 0.0) == telemetry.FIRST
    watch._spent.seconds, watch._records = 3.0, 1  # of 13 s: 50 steps of 0.2 s
    assert watch._after(50, 13.0) == 1500  # this one and the next, 6 s, are 2% of 1,500 steps
    watch._spent.seconds, watch._records = 8.0, 2
    assert watch._after(1500, 308.0) == 3000
    assert Telemetry(20)._after(50, 13.0) == 60


def test_auto_begins_anew_in_a_resumed_run(small: Make, tmp_path: Path) -> None:
    trainer, watch = Trainer(small(), tmp_path), Telemetry("auto")
    trainer.position.step, trainer.position.seconds = 100, 20.0
    watch.on_start(trainer)
    assert watch.sees_gradients(100 + telemetry.FIRST)


class Noisy(nn.Module):
    """What changes while it runs: a norm's averages and a dropout's draws."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 4, 3, rng=0)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5, rng=1)
        self.pool = nn.GlobalAvgPool2d()
        self.head = nn.Linear(4, 10, rng=2)

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        return self.head(self.pool(self.drop(et.relu(self.norm(self.conv(x))))).reshape(-1, 4))


@pytest.mark.parametrize(
    ("recipe", "least"),
    [("mxfp4_all", 0.3), ("mxfp8_nvidia", 5), ("mxfp8_rebased", 5), ("fp32", 0)],
)
def test_a_watched_run_is_the_same_run(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, least: float
) -> None:
    monkeypatch.setattr(Trainer, "fresh_model", lambda self: Noisy())
    config = small(recipe=recipe)
    plain = fitted(config, tmp_path / "plain")
    watched = fitted(config, tmp_path / "watched", Telemetry(2))
    states = [t.model.state_dict() for t in (plain, watched)]
    assert {k: v.tobytes() for k, v in states[0].items()} == {
        k: v.tobytes() for k, v in states[1].items()
    }
    assert dict(plain.quant.telemetry) == dict(watched.quant.telemetry)
    rows = records(tmp_path / "watched")
    assert [r["step"] for r in rows] == [2, 4, 6, 8, 10, 12]
    for row in rows:
        ratio = row["gradient_over_noise"]
        # The masks of the second pass are the first's: else the difference would be as large as the
        # gradient, also in MXFP8. Without rounding there is none.
        assert ratio is None if recipe == "fp32" else ratio > least
        slots = [slot for layer in row["layers"].values() for slot in layer["slots"].values()]
        assert all(("rebase_changed" in slot) == (recipe == "mxfp8_rebased") for slot in slots)


def test_shares_are_since_the_last_record(small: Make, tmp_path: Path) -> None:
    trainer = fitted(small(recipe="mxfp4_all", epochs=1), tmp_path / "run", Telemetry(2))
    slots = [r["layers"]["layers.1"]["slots"] for r in records(tmp_path / "run")]
    stats = trainer.quant.telemetry["layers.1", "wgrad.x"]
    mean = np.mean([s["wgrad.x"]["flushed"] for s in slots])  # as many values in each step
    assert mean == pytest.approx(stats.flushed / stats.count, rel=1e-9)
    assert len({s["wgrad.x"]["flushed"] for s in slots}) == len(slots)


def test_codes_that_turn_back(small: Make, tmp_path: Path) -> None:
    trainer = Trainer(small(recipe="mxfp4_all"), tmp_path)
    watch, weight = Telemetry(1), trainer.model.layers[2].weight
    weight.data[...] = 6.0
    values = [3.0, 4.0, 3.0, 3.0, 4.0, 6.0]  # of one element, under the scale that the sixes set
    seen = []
    for value in values:
        with et.no_grad():
            weight[0, 1] = value
        seen.append(watch._oscillation(trainer, "layers.2"))
    one = 1 / weight.size
    assert [row.get("changed") for row in seen] == [None, one, one, 0.0, one, one]
    assert [row.get("turned") for row in seen] == [None, 0.0, one, 0.0, one, 0.0]


def test_codes_of_large_weights_are_a_sample_on_the_host(small: Make, tmp_path: Path) -> None:
    watch, trainer = Telemetry(1), Trainer(small(recipe="mxfp4_all"), tmp_path)
    trainer.model.layers[0].weight = weight = nn.Parameter(np.ones((4096, 512), np.float32))
    seen = [watch._oscillation(trainer, "layers.0")]
    for value, rows in ((6.0, slice(0, 1)), (1.0, slice(1, 2)), (6.0, slice(None, None, 64))):
        weight.data[rows, :256] = value  # half a row; the sample is every 256th
        seen.append(watch._oscillation(trainer, "layers.0"))
    assert watch._codes["layers.0"].shape == (16, 512)
    assert [row.get("changed") for row in seen] == [None, 1 / 32, 0.0, 15 / 32]


def test_a_resumed_run_drops_what_it_writes_again(small: Make, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step(self, trainer: Trainer, report: Any) -> None:
            if report.step == 8:
                trainer.interrupt()

    config, out = small(recipe="mxfp4_all"), tmp_path / "run"
    out.mkdir()
    first = Trainer(config, out, callbacks=[SaveCheckpoint(), Telemetry(3), Stop()])
    with pytest.raises(Interrupted):
        first.fit()
    before = records(out)
    assert [r["step"] for r in before] == [3, 6]
    with (out / TELEMETRY).open("a") as file:
        file.write(json.dumps({**before[1], "step": 9}) + "\n")
        file.write('{"step": 12, "ep')  # a killed run did not finish its line
    again = Trainer(config, out, callbacks=[Telemetry(3)])
    again.load(out / LAST)
    again.fit()
    rows = records(out)
    assert [r["step"] for r in rows] == [3, 6, 9, 12] and rows[:2] == before
    assert "changed" not in rows[2]["layers"]["layers.1"]
    assert "changed" in rows[3]["layers"]["layers.1"]
    whole = fitted(config, tmp_path / "whole", Telemetry(3))
    assert weights(whole) == weights(again)
    expected = records(tmp_path / "whole")[3]["layers"]["layers.0"]
    assert rows[3]["layers"]["layers.0"]["noise_norm"] == expected["noise_norm"]


def test_the_flag_writes_the_file_and_events(small: Make, tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO(), width=100)
    train(small(recipe="mxfp4"), tmp_path / "a", resume=False, console=quiet, telemetry=5)
    train(small(recipe="mxfp4"), tmp_path / "b", resume=False, console=quiet)
    assert [r["step"] for r in records(tmp_path / "a")] == [5, 10]
    assert not (tmp_path / "b" / TELEMETRY).exists()
    events = [next((tmp_path / run / "tensorboard").iterdir()).read_bytes() for run in "ab"]
    assert b"telemetry/layers.1/wgrad.x/flushed" in events[0] and b"telemetry" not in events[1]
    assert b"telemetry/layers.1/gradient_over_noise" in events[0]


def test_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlp", "--telemetry", "-1"]) == 2
    assert "--telemetry: expected 0 or more steps, got -1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="1 or more steps between records or 'auto', got 0"):
        Telemetry(0)
    with pytest.raises(ValueError, match="or 'auto', got 'often'"):
        Telemetry("often")  # type: ignore[arg-type]
