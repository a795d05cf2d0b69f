"""Configuration: what is refused, and TOML that reads back equal."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from extensor import models
from extensor.training.cli import main
from extensor.training.config import RunConfig
from extensor.training.data import DATASETS
from extensor.training.runs import RUNS, defaults
from extensor.training.toml import read_toml, write_toml


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**defaults("lenet"), **changes})


@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        (model, dataset)
        for model, run in RUNS.items()
        for dataset, row in DATASETS.items()
        if row.kind == run.kind
    ],
)
def test_every_row_of_runs_is_a_valid_configuration(model: str, dataset: str) -> None:
    made = RunConfig(**defaults(model, dataset))
    assert made.model == model
    assert made.dataset == dataset


def test_defaults_depend_on_the_data_set() -> None:
    assert defaults("lenet")["epochs"] == 10
    assert defaults("lenet", "fashion_mnist")["epochs"] == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "digit"}, "no dataset named 'digit'; did you mean 'digits'"),
        ({"recipe": "mxpf4"}, "no recipe named 'mxpf4'; did you mean .*'mxfp4'"),
        ({"optimizer": "adamm"}, "no optimizer named 'adamm'; did you mean 'adam"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"loss_scale": "on"}, "no loss scale named 'on'"),
        ({"epochs": 0}, "--epochs: expected a whole number, 1 or more, got 0"),
        ({"epochs": -3}, "--epochs: expected a whole number, 1 or more, got -3"),
        ({"batch_size": 0}, "--batch-size: expected a whole number, 1 or more, got 0"),
        ({"lr": 0.0}, "--lr: expected a positive number"),
        ({"lr": float("nan")}, "--lr: expected a positive number, got nan"),
        ({"lr": float("inf")}, "--lr: expected a positive number, got inf"),
        ({"momentum": 1.0}, r"--momentum: expected a number in \[0, 1\)"),
        ({"weight_decay": -0.1}, "--weight-decay: expected a number, 0 or more"),
        ({"warmup_epochs": 11.0}, "--warmup-epochs: expected at most the 10 epochs"),
        ({"clip_norm": float("inf")}, "--clip-norm: expected a number, 0 or more"),
        ({"patience": -1}, "--patience: expected a whole number, 0 or more"),
        ({"train_limit": -1}, "--train-limit: expected a whole number"),
        ({"seed": -1}, "--seed: expected a whole number in 0"),
        ({"augment": "flips"}, "no augmentation of images named 'flips'; did you mean 'flip'"),
        ({"augment": "noise"}, "no augmentation of images named 'noise'"),
        ({"sampler": "weigthed"}, "no sampler named 'weigthed'; did you mean 'weighted'"),
        ({"val_share": 1.0}, r"--val-share: expected a number in \[0, 1\), got 1.0"),
        ({"patience": 3}, "--patience: 3 epochs .* nothing is held out; .*--val-share 0.1"),
        ({"optimizer_states": "int8"}, "no optimizer states named 'int8'; .*bfloat16"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 1.5}, "epochs: expected int, got 1.5"),
        ({"epochs": True}, "epochs: expected int, got True"),
        ({"lr": "0.1"}, "lr: expected float, got '0.1'"),
        ({"augment": 1}, "augment: expected str, got 1"),
    ],
)
def test_bad_types_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        config(**changes)


def test_whole_numbers_serve_as_floats() -> None:
    assert config(lr=1) == config(lr=1.0)


def test_unknown_model_lists_near_names() -> None:
    with pytest.raises(ValueError, match="no model named 'lennet'; did you mean 'lenet'"):
        defaults("lennet")


def test_toml_reads_back_equal() -> None:
    made = config(lr=1e-7, augment="shift", seed=2**64 - 1, recipe="mxfp4")
    text = write_toml(made.as_dict(), "a header\nof two lines")
    assert RunConfig(**tomllib.loads(text)) == made


def test_toml_strings_are_escaped() -> None:
    values = {"name": 'quote " backslash \\ newline \n é', "none": None}
    assert tomllib.loads(write_toml(values)) == {"name": values["name"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "no setting named 'epoch'; did you mean 'epochs'"),
        ("epochs = = 3", "expected TOML, got"),
        ("epochs = \xff", "expected TOML, got"),
    ],
)
def test_bad_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        read_toml(path, defaults("lenet"))
    assert str(path) in str(caught.value)


def test_missing_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_toml(tmp_path / "none.toml", [])


def test_toml_keys_may_have_hyphens(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("batch-size = 7\nlr = 0.5\n", encoding="utf-8")
    assert read_toml(path, defaults("lenet")) == {"batch_size": 7, "lr": 0.5}


ZOO = ("alexnet", "vgg", "resnet", "mobilenet", "googlenet")


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("dataset", ["cifar10", "digits"])
def test_every_image_model_has_a_run_for_photographs_and_digits(model: str, dataset: str) -> None:
    run = RunConfig(**defaults(model, dataset))
    assert defaults(model)["dataset"] == "cifar10"
    assert run.augment == ("flip" if dataset == "cifar10" else "shift")
    channels, side = (3, 32) if dataset == "cifar10" else (1, 28)
    made = models.config(model, run.variant, in_channels=channels, image_size=side, classes=10)
    assert (made.in_channels, made.image_size, made.classes) == (channels, side, 10)


def test_photographs_that_are_nowhere_are_one_error_with_a_way_out(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resnet", "--out", str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert "cifar-10-binary.tar.gz" in text and "curl -LO" in text and "--dataset digits" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 1.0}, "clipping reads all gradients first; the way out: --clip-norm 0"),
        ({"loss_scale": "dynamic"}, "--loss-scale off"),
        ({"micro_batches": 2}, "--micro-batches 1"),
        ({"grad_comm": "exact"}, "--grad-comm"),
        ({"optimizer": "muon"}, "two optimizers"),
    ],
)
def test_updates_in_backward_refuse_what_needs_all_gradients(
    changes: dict[str, Any], message: str
) -> None:
    given = {**defaults("mlp"), "update": "in_backward", "loss_scale": "off", **changes}
    with pytest.raises(ValueError, match=f"--update in_backward: .*{message}"):
        RunConfig(**given)


def test_bfloat16_weights_are_not_sharded() -> None:
    with pytest.raises(ValueError, match="--weights bfloat16: --shard states"):
        RunConfig(**defaults("mlp"), weights="bfloat16", shard="states")
