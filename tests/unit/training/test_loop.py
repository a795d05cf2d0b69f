"""The loop: what a run leaves, exact resuming, what it refuses, what it does not hide."""

from __future__ import annotations

import dataclasses
import io
import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor.nn
from extensor import no_grad
from extensor.io import load_checkpoint
from extensor.quant import QuantArray
from extensor.quant.recipe import Recipe, Rule
from extensor.quant.recipes import get_recipe
from extensor.training import checkpoints, loop, step
from extensor.training.callbacks import Callback, EarlyStopping, InterruptAfter, SaveCheckpoint
from extensor.training.config import RunConfig
from extensor.training.data import DataError, Dataset, epoch_order, load_dataset
from extensor.training.loop import Interrupted, Trainer
from extensor.training.records import StepReport
from extensor.training.rundir import LAST, UsageError, claim
from extensor.training.tasks import TASKS
from extensor.training.train import train
from tests.unit.training.conftest import Make, fitted, weights


class InterruptAt(Callback):
    """Asks for the end at a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step == self.step:
            trainer.interrupt()


class Record(Callback):
    """Keeps the step reports."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.steps.append(report)


def timeless(trainer: Trainer) -> list[dict[str, Any]]:
    """History without clocks."""
    drop = ("seconds", "per_second", "waited")
    return [
        {k: v for k, v in report.as_dict().items() if k not in drop} for report in trainer.history
    ]


def parts(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Two values, or the arrays of two blocked ones, in pairs."""
    if not isinstance(a, QuantArray):
        return [(a, b)]
    return [(a.parts[name], b.parts[name]) for name in a.parts]


def test_a_run_leaves_everything(small: Make, tmp_path: Path) -> None:
    out, console = tmp_path / "run", Console(file=io.StringIO(), width=100)
    config = small(
        recipe="mxfp4", label_smoothing=0.1, clip_norm=1.0, augment="shift", lr=0.05, val_share=0.2
    )
    result = train(config, out, resume=False, console=console)
    assert {p.name for p in out.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "result.json",
        "tensorboard",
        "checkpoint.safetensors",
        "checkpoint-best.safetensors",
    }
    assert RunConfig(**tomllib.loads((out / "config.toml").read_text())) == config
    assert json.loads((out / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert result["accuracy"] == lines[-1]["test_accuracy"] > 0.5
    assert result["loss"] == lines[-1]["test_loss"]
    assert (result["steps"], result["skipped_steps"], result["diverged"]) == (10, 0, None)
    assert result["parameters"] == 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert 0 < result["flushed"] < 1
    assert 0 <= result["saturated"] < 0.1
    assert sum(map(sum, result["confusion"])) == 60
    chosen = max(lines, key=lambda line: (line["val_accuracy"], -line["epoch"]))
    assert result["best_epoch"] == chosen["epoch"] and result["best_by"] == "val_accuracy"
    assert result["best_accuracy"] == chosen["test_accuracy"]
    assert result["optimizer_bytes"] == 4 * result["parameters"]
    assert 0 <= result["waited"] < 1
    assert 0 < result["peak_rss_mb"] < 16_000  # of the whole process, other tests included
    assert any((out / "tensorboard").iterdir())
    text = console.file.getvalue()
    assert text.count("epoch 1/2") == 1
    assert "saturated" in text
    assert "layers.1" in text
    assert str(out / "result.json") in text.replace("\n", "")


def test_training_learns(small: Make, tmp_path: Path) -> None:
    record = Record()
    trainer = fitted(small(epochs=4), tmp_path, record)
    assert record.steps[0].loss == pytest.approx(np.log(10), rel=0.15)
    assert trainer.history[-1].test_accuracy > 0.7
    assert record.steps[0].saturated is None
    assert [s.batch for s in record.steps[:7]] == [1, 2, 3, 4, 5, 6, 1]


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (4, {"recipe": "mxfp4"}),
        (6, {"recipe": "mxfp4"}),
        (
            9,
            {
                "recipe": "fp32",
                "optimizer": "adam",
                "augment": "strong",
                "optimizer_states": "mxfp8_e4m3",
            },
        ),
        (
            8,
            {
                "recipe": "mxfp4_adaptive",
                "optimizer": "adamw",
                "schedule": "constant",
                "weights": "mxint8",
            },
        ),
        (
            5,
            {
                "recipe": "mxfp4",
                "optimizer": "adamw",
                "optimizer_states": "mxfp8_e4m3",
                "weights": "bfloat16",
                "update": "in_backward",
                "loss_scale": "off",
                "saved": "activation=mxfp4~",
            },
        ),
        (
            8,
            {
                "epochs": 4,
                "optimizer": "muon",
                "schedule": "reduce_lr_on_plateau",
                "schedule_options": "patience=0,threshold=0.9",
            },
        ),
    ],
)
def test_a_resumed_run_is_bit_identical(
    small: Make, tmp_path: Path, step: int, changes: dict[str, Any]
) -> None:
    config = small(**changes)
    whole = fitted(config, tmp_path / "whole")
    out = tmp_path / "parts"
    with pytest.raises(Interrupted):
        fitted(config, out, InterruptAt(step), SaveCheckpoint())
    resumed = Trainer(config, out)
    resumed.load(out / LAST)
    assert resumed.position.step == step
    resumed.fit()
    assert weights(resumed) == weights(whole)
    assert resumed.health == whole.health
    assert timeless(resumed) == timeless(whole)
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    ours, theirs = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    assert all(np.array_equal(a, b) for n in ours | theirs for a, b in parts(ours[n], theirs[n]))


def test_the_seed_decides_everything(small: Make, tmp_path: Path) -> None:
    config = small(recipe="mxfp4", epochs=1)
    one, again = (fitted(config, tmp_path / name) for name in "ab")
    other = fitted(dataclasses.replace(config, seed=1), tmp_path / "c")
    assert weights(one) == weights(again)
    assert weights(one) != weights(other)


def test_nan_in_the_data_names_the_batch(small: Make, tmp_path: Path) -> None:
    digits = load_dataset("digits")
    images = digits.train.images.copy()
    trainer = Trainer(small(), tmp_path)
    order = epoch_order(96, 0, 1)
    images[order[2 * 16 + 5], 0, 3, 3] = np.nan
    spoilt = dataclasses.replace(digits, train=dataclasses.replace(digits.train, images=images))
    trainer = Trainer(small(), tmp_path, data=spoilt)
    with pytest.raises(DataError, match=r"NaN or infinite pixels in epoch 1, batch 2 .*\[5\]"):
        trainer.fit()
    assert trainer.position.step == 2


def test_a_step_with_nan_gradients_is_skipped_and_counted(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(epochs=1)
    record = Record()
    trainer = Trainer(config, tmp_path, callbacks=[record])
    usual, before = trainer.scaler.unscale_, []

    def spoil(optimizer: Any) -> None:
        if trainer.position.step == 2:
            optimizer.params[0].grad.data[0, 0] = np.nan
            before.append(weights(trainer))
        elif trainer.position.step == 3:
            before.append(weights(trainer))
        usual(optimizer)

    monkeypatch.setattr(trainer.scaler, "unscale_", spoil)
    result = trainer.fit()
    assert before[0] == before[1]
    assert [s.skipped for s in record.steps] == [False, False, True, False, False, False]
    assert record.steps[-1].skipped_steps == result["skipped_steps"] == 1
    assert record.steps[2].loss_scale == record.steps[1].loss_scale / 2
    assert result["diverged"] is None


def test_a_run_that_cannot_go_on_is_recorded_as_diverged(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 3)
    trainer = Trainer(small(), tmp_path)
    first = next(iter(trainer.model.parameters()))
    with no_grad():
        first.assign_(np.full(first.shape, np.nan, np.float32))
    result = trainer.fit()
    assert result["steps"] == result["skipped_steps"] == 3
    assert result["diverged"] == "no finite gradients in 3 steps in a row"
    assert result["loss"] is None
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_stuck_at_chance_is_recorded_as_diverged(small: Make, tmp_path: Path) -> None:
    trainer = Trainer(small(lr=1e-12, epochs=1), tmp_path)
    with no_grad():
        for parameter in trainer.model.parameters():
            parameter.assign_(np.zeros(parameter.shape, np.float32))
    assert "stuck at chance" in trainer.fit()["diverged"]


def test_early_stopping_stops(small: Make, tmp_path: Path) -> None:
    trainer = Trainer(
        small(epochs=9, lr=1e-12, val_share=0.2), tmp_path, callbacks=[EarlyStopping(2)]
    )
    trainer.fit()
    losses = [report.val_loss for report in trainer.history]
    assert len(losses) - 1 - losses.index(min(losses)) == 2
    assert trainer.stop_reason is not None
    assert "has not improved for 2 epochs" in trainer.stop_reason


def test_a_run_is_interrupted_after_an_epoch_and_goes_on(small: Make, tmp_path: Path) -> None:
    whole = fitted(small(epochs=3), tmp_path / "whole", SaveCheckpoint())
    with pytest.raises(Interrupted):
        fitted(small(epochs=3), tmp_path / "parts", SaveCheckpoint(), InterruptAfter(2))
    assert not (tmp_path / "parts" / "result.json").exists()
    parts = Trainer(small(epochs=3), tmp_path / "parts", callbacks=[SaveCheckpoint()])
    parts.load(parts.last)
    assert (parts.position.epoch, parts.position.batch) == (3, 0)
    parts.fit()
    assert weights(parts) == weights(whole)


def test_without_validation_nothing_is_chosen(small: Make, tmp_path: Path) -> None:
    trainer = fitted(small(epochs=1), tmp_path, SaveCheckpoint())
    assert not (tmp_path / "checkpoint-best.safetensors").exists()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["best_epoch"] is result["best_accuracy"] is result["val_loss"] is None
    assert trainer.history[0].val_accuracy is None
    with pytest.raises(ValueError, match="expected validation data, got none"):
        fitted(small(epochs=1), tmp_path, EarlyStopping(2))


def test_validation_images_are_of_no_other_part(small: Make, tmp_path: Path) -> None:
    task = Trainer(small(val_share=0.2), tmp_path).task
    whole = load_dataset("digits").limited(96, 60).train
    train, held = task.dataset.train, task.held
    assert len(train) + len(held) == len(whole) == 96
    keys = [{image.tobytes() for image in part.images} for part in (train, held, whole)]
    assert not keys[0] & keys[1] and keys[0] | keys[1] == keys[2]
    counts = np.bincount(held.labels, minlength=10), np.bincount(whole.labels)
    assert (np.abs(counts[0] - 0.2 * counts[1]) <= 0.5).all()  # a share of each class
    with pytest.raises(ValueError, match="at least one training image beside 1 held out, got 1"):
        Trainer(small(val_share=0.5, train_limit=9, batch_size=4), tmp_path)


def test_best_checkpoint_is_the_best_epochs(small: Make, tmp_path: Path) -> None:
    trainer = fitted(small(epochs=4, val_share=0.2), tmp_path, SaveCheckpoint())
    best = load_checkpoint(tmp_path / "checkpoint-best.safetensors")
    accuracies = [report.val_accuracy for report in trainer.history]
    assert len(best.metadata["history"]) == accuracies.index(max(accuracies)) + 1
    last = load_checkpoint(tmp_path / LAST)
    assert len(last.metadata["history"]) == 4


def test_random_bits_follow_the_runs_step_and_training_goes_on_after_evaluation(
    small: Make, tmp_path: Path
) -> None:
    """Over epochs, not within one; layers are in training in each step, not when evaluated."""
    seen: list[tuple[int, int]] = []
    modes: list[bool] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:
            seen.append((trainer.quant.step, report.step))
            modes.append(trainer.model.training)

        def on_epoch(self, trainer: Trainer, report: Any) -> None:
            seen.append((trainer.quant.step, report.step))
            modes.append(trainer.model.training)

    trainer = Trainer(small(recipe="mxfp4"), tmp_path, callbacks=[Watch()])
    forward, evaluated = trainer.forward, []

    def noted(*args: Any, **options: Any) -> Any:
        evaluated.append((trainer.model.training, trainer.quant.step))
        return forward(*args, **options)

    trainer.forward = noted  # type: ignore[method-assign]
    trainer.fit()
    assert [mine for mine, _ in seen] == [run for _, run in seen]
    assert [run for _, run in seen] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12]
    assert all(modes)
    steps = [(True, step) for step in range(12)]
    assert evaluated == [*steps[:6], (False, 6), *steps[6:], (False, 12)]


def test_the_best_epoch_is_chosen_by_the_validation_data() -> None:
    """The earliest of equals; never by the training or test data, which say otherwise here."""
    for task, key, sign in (("classification", "accuracy", 1.0), ("causal", "loss", -1.0)):
        values = (0.3, 0.5, 0.5, 0.2)
        history = [
            SimpleNamespace(
                **{f"val_{key}": sign * v, f"test_{key}": -sign * v, f"train_{key}": -sign * v},
                epoch=epoch,
            )
            for epoch, v in enumerate(values, start=1)
        ]
        assert TASKS[task].metric.best(history).epoch == 2  # type: ignore[arg-type]


def test_a_batch_larger_than_the_data_is_refused(small: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at most the 96 training images, got 97"):
        Trainer(small(batch_size=97), tmp_path)


def test_a_rule_that_matches_no_layer_is_refused_before_anything_is_written(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = get_recipe("fp32").layers
    bad = Recipe("bad", "a rule too many", layers, (Rule("features.*", layers),))
    monkeypatch.setattr(
        step, "apply_recipe", lambda model, name, *rest: extensor.nn.apply_recipe(model, bad, *rest)
    )
    with pytest.raises(UsageError, match=r"'features\.\*' matches no layer.*layers\.0"):
        train(small(), tmp_path / "run", resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_is_refused(small: Make, tmp_path: Path) -> None:
    fitted(small(epochs=1), tmp_path, SaveCheckpoint())
    other = Trainer(small(epochs=1, lr=0.03, seed=5), tmp_path)
    before = weights(other)
    with pytest.raises(ValueError, match="differs in lr, seed"):
        other.load(tmp_path / LAST)
    assert weights(other) == before


def test_a_checkpoint_from_before_a_setting_existed_goes_on(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = small(epochs=1), fitted(small(epochs=1), tmp_path, SaveCheckpoint())
    read = checkpoints.load_checkpoint

    def older(path: Path) -> Any:
        checkpoint = read(path)
        del checkpoint.metadata["config"]["activations"]
        return checkpoint

    monkeypatch.setattr(checkpoints, "load_checkpoint", older)
    Trainer(trainer, tmp_path).load(tmp_path / LAST)


def test_claiming_a_folder(small: Make, tmp_path: Path) -> None:
    config, out = small(), tmp_path / "run"
    with pytest.raises(UsageError, match="has no checkpoint: its run"):
        claim(out, config, resume=True)
    claim(out, config, resume=False)
    claim(out, config, resume=False)  # nothing was trained yet: it may begin again
    with pytest.raises(UsageError, match="holds a run with another configuration"):
        claim(out, small(seed=3), resume=False)
    (out / LAST).touch()
    with pytest.raises(UsageError, match="interrupted; the way out: add --resume"):
        claim(out, config, resume=False)
    kept = {"accuracy": 1.0, "loss": 0.1, "parameters": 1, "steps": 1, "skipped_steps": 0}
    kept |= dict.fromkeys(("diverged", "stopped_early", "best_epoch", "saturated", "flushed"))
    kept |= {"seconds_per_epoch": 1.0, "peak_rss_mb": 1.0, "device": "cpu"}
    (out / "result.json").write_text(json.dumps({**kept, "health": [], "versions": {}}))
    with pytest.raises(UsageError, match="holds this very run, finished"):
        claim(out, config, resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not empty, and holds no run"):
        claim(tmp_path / "other", config, resume=False)
    with pytest.raises(UsageError, match="expected a folder, got a file"):
        claim(tmp_path / "other" / "thesis.tex", config, resume=False)
    assert isinstance(load_dataset("digits"), Dataset)
