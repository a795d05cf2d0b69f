"""Everything together: a run stopped and resumed from a file repeats an uninterrupted one."""

import numpy as np
import pytest

import extensor.nn as nn
import extensor.optim as optim
from extensor.autograd.tensor import ExTensor
from extensor.io import load_checkpoint, save_checkpoint
from extensor.ops.class_loss import cross_entropy

STEPS, STOP = 8, 3


class Run:
    """A small network with every kind of state: dropout, batch norm, momentum, scaler, recipe."""

    def __init__(self, recipe: str, kind: type[optim.Optimizer]):
        rng = np.random.default_rng(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, rng=rng),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.2, rng=rng),
            nn.Linear(32, 32, rng=rng),
            nn.ReLU(),
            nn.Linear(32, 4, rng=rng),
        )
        self.recipe = nn.apply_recipe(self.model, recipe, seed=1)
        self.optimizer = kind(self.model.named_parameters(), lr=0.05, weight_decay=0.01)
        self.schedule = optim.WarmupCosine(2, STEPS)
        self.scaler = optim.MXGradScaler(self.recipe, growth_interval=3, saturation_interval=2)
        self.losses = []

    def steps(self, start, stop):
        for step in range(start, stop):
            rng = np.random.default_rng([7, step])
            labels = rng.integers(0, 4, 16)
            images = rng.standard_normal((16, 1, 8, 8)) + labels[:, None, None, None]
            self.recipe.step = step
            self.schedule.apply(self.optimizer, step)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(ExTensor(images.astype(np.float32))), ExTensor(labels))
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            optim.clip_grad_norm(self.optimizer.params, 1.0)
            assert self.scaler.step(self.optimizer)
            self.scaler.update()
            self.losses.append(loss.item())

    def save(self, path):
        state = self.optimizer.state_dict()
        arrays = {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in arrays.items()}
        scalars = {k: v for k, v in state.items() if k not in arrays}
        save_checkpoint(path, tensors, {"optimizer": scalars, "scaler": self.scaler.state_dict()})

    def load(self, path):
        saved = load_checkpoint(path)
        parts = {
            part: {k.removeprefix(part): v for k, v in saved.tensors.items() if k.startswith(part)}
            for part in ("model.", "optimizer.")
        }
        self.model.load_state_dict(parts["model."])
        self.optimizer.load_state_dict({**parts["optimizer."], **saved.metadata["optimizer"]})
        self.scaler.load_state_dict(saved.metadata["scaler"])


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4_all", "mxfp4_adaptive", "nvfp4_nvidia"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_resume_is_bit_identical(recipe, kind, tmp_path):
    through = Run(recipe, kind)
    through.steps(0, STEPS)
    first = Run(recipe, kind)
    first.steps(0, STOP)
    first.save(tmp_path / "a")
    second = Run(recipe, kind)
    second.load(tmp_path / "a")
    second.steps(STOP, STEPS)
    assert first.losses + second.losses == through.losses
    expected = through.model.state_dict()
    for name, value in second.model.state_dict().items():
        assert value.tobytes() == expected[name].tobytes(), name
    assert second.scaler.state_dict() == through.scaler.state_dict()
    assert second.scaler.current_scale == 65536 * 4
    layers = {path: context.layer for path, context in through.recipe.layers.items()}
    assert layers == {path: context.layer for path, context in second.recipe.layers.items()}


def test_the_adaptive_recipe_switches_saturating_slots():
    run = Run("mxfp4_adaptive", optim.SGD)
    run.steps(0, 2)
    slots = run.scaler.report().slots
    switched = [row for row in slots if row.switched]
    assert switched and all(row.scale_rule == "rceil" for row in switched)
    run.recipe.reset_telemetry()
    run.steps(2, 3)
    after = {(row.layer, row.slot): row for row in run.scaler.report().slots}
    for row in switched:
        assert row.saturated > 1e-3
        assert after[row.layer, row.slot].saturated == 0.0


@pytest.mark.parametrize("recipe", ["fp32", "mxfp8_nvidia", "mxfp4", "nvfp4_nvidia"])
def test_the_loss_scale_changes_no_bit_of_training(recipe):
    """The scale and back are exact, and dynamic block scales follow it: the codes are the same."""
    runs = []
    for scale in (1.0, 65536.0):
        run = Run(recipe, optim.SGD)
        run.scaler = optim.MXGradScaler(run.recipe, init_scale=scale)
        run.steps(0, 4)
        runs.append(run)
    assert runs[0].losses == runs[1].losses
    for one, two in zip(*(run.model.parameters() for run in runs), strict=True):
        assert one.numpy().tobytes() == two.numpy().tobytes()
