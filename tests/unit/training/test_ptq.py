"""`python -m training ptq`: what it writes about a run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.training import ptq as quantizing
from extensor.training.cli import main
from extensor.training.config import RunConfig
from extensor.training.evaluation import evaluate
from extensor.training.loop import Trainer, open_run
from extensor.training.ptq import calibration_set, nbytes
from extensor.training.ptq_report import LayerResult, SchemeResult
from extensor.training.rundir import LAST
from extensor.training.runs import defaults
from extensor.training.train import train
from tests.unit.training.conftest import QUIET, Make


@pytest.fixture
def run(small: Make, tmp_path: Path) -> Path:
    train(small(recipe="mxfp4", augment="shift"), tmp_path / "run", resume=False, console=QUIET)
    return tmp_path / "run"


def test_a_run_under_several_schemes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / LAST).read_bytes()
    command = ["ptq", str(run), "--schemes", "int8, mxfp4,fp8_block8", "--calibration", "40"]
    assert main([*command, "--save"]) == 0
    printed = capsys.readouterr().out
    out = run / "ptq"
    content = json.loads((out / "ptq.json").read_text())
    rows = {row["scheme"]: row for row in content["rows"]}
    assert list(rows) == ["float32", "int8", "mxfp4", "fp8_block8"]
    weights = 784 * 256 + 256 * 128 + 128 * 10
    biases = 4 * (256 + 128 + 10)
    assert rows["float32"]["nbytes"] == 4 * weights + biases
    assert rows["float32"]["bits_per_weight"] == 32
    assert rows["int8"]["nbytes"] == weights + 4 * (256 + 128 + 10) + biases
    blocks = 256 * 25 + 128 * 8 + 10 * 4  # of 17 bytes; 784 values are 24.5 of them
    assert rows["mxfp4"]["bits_per_weight"] == pytest.approx(8 * 17 * blocks / weights)
    assert rows["fp8_block8"]["bits_per_weight"] == pytest.approx(10.0)
    for name in ("int8", "mxfp4", "fp8_block8"):
        assert [r["layer"] for r in rows[name]["layers"]] == ["layers.0", "layers.1", "layers.2"]
        assert all(10 < r["sqnr_db"] < 60 for r in rows[name]["layers"])
        assert rows[name]["gap"] == pytest.approx(rows[name]["value"] - rows["float32"]["value"])
        assert name in printed
    assert rows["int8"]["sqnr_db"] > rows["fp8_block8"]["sqnr_db"] > rows["mxfp4"]["sqnr_db"] + 5
    assert "40 training images" in (out / "ptq.md").read_text()
    assert (out / "ptq.png").read_bytes().startswith(b"\x89PNG")
    trainer = open_run(run)
    reference = trainer.fresh_model()
    again = et.load_quantized(out / "mxfp4.safetensors", reference)
    trainer.model = again
    assert 100 * evaluate(trainer).accuracy == rows["mxfp4"]["value"]
    assert nbytes(again) == rows["mxfp4"]["nbytes"]
    assert (run / LAST).read_bytes() == before


def test_calibration_takes_plain_training_images(run: Path) -> None:
    trainer = open_run(run)
    batches = calibration_set(trainer, 40)
    assert [x.shape[0] for (x,) in batches] == [32, 8]
    dataset = trainer.task.dataset
    pixels = dataset.train.images.reshape(96, -1).astype(np.float64)
    pixels /= 255 if dataset.train.images.dtype == np.uint8 else 1
    plain = (pixels - dataset.mean) / dataset.std
    found = set()
    for (x,) in batches:
        for image in x.numpy().reshape(len(x), -1):
            distance = np.abs(plain - image).max(axis=1)
            assert distance.min() < 1e-5  # one of the 96, not shifted
            found.add(int(distance.argmin()))
    assert len(found) == 40


def test_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"epochs": 1, "epoch_steps": 2, "batch_size": 4, "context": 16, "test_limit": 4}
    text = tmp_path / "gpt"
    settings |= {"warmup_epochs": 0.0, "train_limit": 20_000, "dataset": "python_source"}
    config = RunConfig(**{**defaults("gpt"), **settings})
    train(config, text, resume=False, console=QUIET)
    assert main(["ptq", str(text), "--schemes", "int8,nvfp4_weights", "--calibration", "8"]) == 0
    rows = json.loads((text / "ptq" / "ptq.json").read_text())["rows"]
    assert rows[0]["perplexity"] is not None
    assert {r["layer"] for r in rows[1]["layers"]} >= {"blocks.0.attention.qkv"}
    assert "head" not in {r["layer"] for r in rows[1]["layers"]}
    assert abs(rows[1]["gap"]) < 1.0  # per cent of the loss
    assert "perplexity" in (text / "ptq" / "ptq.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schemes", "int9"], "did you mean 'int8'"),
        (["--schemes", ""], "expected each scheme once, got ''"),
        (["--schemes", "int8,int8"], "expected each scheme once"),
        (["--calibration", "0"], "expected 1 or more inputs, got 0"),
        (["--calibration", "97"], "expected at most the 96 training images"),
        (
            ["--schemes", "int8", "--keep", "layer.*", "--calibration", "9"],
            "rule 'layer.*' matches no layer",
        ),
        (["--schemes", "mxfp4", "--keep", "*", "--calibration", "9"], "no layer to quantize"),
    ],
)
def test_what_it_refuses(
    flags: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ptq", str(run), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_without_a_run_or_its_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ptq", str(tmp_path / "none")]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    (run / LAST).unlink()
    assert main(["ptq", str(run)]) == 2
    assert "its first epoch is not done; the way out" in capsys.readouterr().err


def test_a_model_that_diverged(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverged(folder: Path) -> Trainer:
        trainer = open_run(folder)
        next(trainer.model.parameters()).data[0, 0] = np.nan
        return trainer

    monkeypatch.setattr(quantizing, "open_run", diverged)
    assert main(["ptq", str(run), "--schemes", "mxfp4", "--calibration", "9"]) == 2
    assert "its weight has NaN or infinity" in capsys.readouterr().err


def test_the_worst_layer_is_the_noisiest_and_one_without_a_figure_above_all() -> None:
    def result(**decibels: float | None) -> SchemeResult:
        rows = [
            LayerResult(name, "Linear", 1, 1, None, value, None, None)
            for name, value in decibels.items()
        ]
        return SchemeResult("int8", "", None, None, None, None, 0, 8.0, None, rows)

    assert result().worst is None
    assert result(a=30.0, b=12.0, c=40.0).worst.layer == "b"  # type: ignore[union-attr]
    assert result(a=30.0, b=12.0, c=None).worst.layer == "c"  # type: ignore[union-attr]
