"""Optimizers and schedules: all of `extensor.optim` can be chosen, with every option."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extensor import models, optim
from extensor.training.choices import FROM_SETTINGS, OPTIMIZERS, SCHEDULES
from extensor.training.cli import parse_train
from extensor.training.loop import Trainer
from extensor.training.optimizers import MuonWithAdamW, make_optimizer, make_schedule
from tests.unit.training.conftest import Make

VALUES = {
    "nesterov": "true", "eps": "1e-6", "decay": "0.5", "trust": "0.01", "every": "3",
    "gamma": "0.25", "milestones": "3+1ep", "start": "0.5", "start_divisor": "5",
    "final_divisor": "50", "shape": "sqrt", "patience": "3", "threshold": "0.5", "cooldown": "1",
    "minimum": "0.125",
}  # fmt: skip
"""A value for each option that is not the default of any."""
PARSED = {"nesterov": True, "milestones": (3, 6), "shape": "sqrt"}


def classes(base: type) -> set[type]:
    found = (getattr(optim, name) for name in optim.__all__)
    return {c for c in found if isinstance(c, type) and issubclass(c, base) and c is not base}


def model() -> Any:
    made = models.config("mlp", "mlp", in_channels=1, image_size=28, classes=10)
    return models.build("mlp", made, np.random.default_rng(0))


def given(kind: str, name: str) -> tuple[str, dict[str, Any]]:
    """Text that sets every option of a class, and the values that it stands for."""
    table: dict[str, Any] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}[kind]
    names = [n for n in inspect.signature(table[name]).parameters if n not in FROM_SETTINGS[kind]]
    values = {**VALUES, "decay": "2"} if kind == "schedule" else VALUES
    text = ",".join(f"{option}={values[option]}" for option in names)
    return text, {n: PARSED.get(n, float(values[n]) if n not in PARSED else None) for n in names}


def test_every_optimizer_and_schedule_has_a_name() -> None:
    assert set(OPTIMIZERS.values()) == classes(optim.Optimizer)
    assert set(SCHEDULES.values()) == classes(optim.Schedule)
    assert {"sgd", "adamw", "rmsprop", "lars", "muon"} <= OPTIMIZERS.keys()
    assert {"cosine", "constant", "multi_step", "wsd", "reduce_lr_on_plateau"} <= SCHEDULES.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gets_every_option(name: str, small: Make) -> None:
    text, expected = given("optimizer", name)
    config = small(
        optimizer=name, optimizer_options=text, lr=0.5, momentum=0.75, weight_decay=0.125,
        beta1=0.6, beta2=0.7, optimizer_states="bfloat16",
    )  # fmt: skip
    made = make_optimizer(model(), config)
    made = made.parts["muon"] if isinstance(made, MuonWithAdamW) else made
    assert type(made) is OPTIMIZERS[name] and made.states == "bfloat16"
    settings = {"lr": 0.5, "momentum": 0.75, "beta1": 0.6, "beta2": 0.7, "weight_decay": 0.125}
    options = made.groups[0].options
    for option, value in {**settings, **expected}.items():
        if option in options:
            assert options[option] == value, option
    assert expected.keys() <= options.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gets_every_option_and_a_warm_up(name: str, small: Make) -> None:
    text, expected = given("schedule", name)
    config = small(schedule=name, schedule_options=text, warmup_epochs=0.5, final_lr=0.125)
    made = make_schedule(config, epoch_steps=6)
    inner = made.then if isinstance(made, optim.Warmup) and made.then else made
    assert type(inner) is SCHEDULES[name]
    for option, value in expected.items():
        assert getattr(inner, option) == value, option
    if name != "one_cycle":  # its rise is half a cosine
        assert [made.factor(step) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    if hasattr(inner, "final"):
        assert made.factor(12) == 0.125 and 0.125 < made.factor(11) < 1


def test_muon_takes_the_hidden_matrices(small: Make, tmp_path: Path) -> None:
    made = make_optimizer(model(), small(optimizer="muon", lr=0.02))
    assert [m.name for g in made.parts["muon"].groups for m in g.members] == [
        "layers.0.weight",
        "layers.1.weight",
    ]
    assert [m.name for g in made.parts["adamw"].groups for m in g.members] == [
        "layers.2.weight",
        *(f"layers.{i}.bias" for i in range(3)),
    ]
    assert made.parts["adamw"].groups[0].base_lr == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="expected a hidden layer"):
        Trainer(small(optimizer="muon", variant="linear"), tmp_path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_parameters_decay(name: str, small: Make, tmp_path: Path) -> None:
    """All of them, or matrices alone; Muon's hidden matrices decay by themselves."""
    trainer = Trainer(small(optimizer=name, weight_decay=0.25), tmp_path)
    names = {id(p): path for path, p in trainer.model.named_parameters()}
    decays = {
        names[id(p)]: group.options.get("weight_decay", 0.0)
        for group in trainer.optimizer.groups
        for p in group.params
    }
    assert set(decays) == set(names.values())
    matrices_only = name in ("adamw", "lion", "lars", "muon")
    takes = "weight_decay" in inspect.signature(OPTIMIZERS[name]).parameters
    for path, p in trainer.model.named_parameters():
        expected = 0.25 if takes and (p.ndim > 1 or not matrices_only) else 0.0
        assert decays[path] == expected, (path, name)


def test_flags_reach_the_run() -> None:
    words = ["--optimizer", "rmsprop", "--optimizer-options", "decay=0.9", "--schedule", "wsd"]
    _, config, _ = parse_train("lenet", [*words, "--schedule-options", "decay=2ep,shape=sqrt"])
    made = make_schedule(config, epoch_steps=45)
    assert isinstance(made, optim.WSD) and (made.decay, made.shape) == (90, "sqrt")
    assert make_optimizer(model(), config).groups[0].options["decay"] == 0.9


def test_the_plateau_reads_the_validation_loss(small: Make, tmp_path: Path) -> None:
    options = {"schedule": "reduce_lr_on_plateau", "schedule_options": "gamma=0.5,patience=0"}
    config = small(epochs=4, lr=1e-12, val_share=0.2, warmup_epochs=0.0, **options)
    trainer = Trainer(config, tmp_path)
    trainer.fit()
    losses = [report.val_loss for report in trainer.history]
    best, factor, factors = np.inf, 1.0, [1.0]
    for loss in losses[:-1]:
        assert loss is not None
        factor, best = (factor, loss) if loss < best * (1 - 1e-4) else (factor / 2, best)
        factors.append(factor)
    assert [report.lr / 1e-12 for report in trainer.history] == pytest.approx(factors)
    assert factors[-1] < 1.0


@pytest.mark.parametrize(("share", "part"), [(0.2, "val_loss"), (0.0, "train_loss")])
def test_the_plateau_never_reads_the_test_data(
    share: float, part: str, small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[float] = []
    monkeypatch.setattr(optim.ReduceLROnPlateau, "observe", lambda self, x: observed.append(x))
    trainer = Trainer(small(schedule="reduce_lr_on_plateau", val_share=share), tmp_path)
    trainer.fit()
    assert observed == [getattr(report, part) for report in trainer.history]
    assert len(set(observed)) == 2
