"""Operands' noise and block scales by step, where values overflow, advice at equal bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.nn.recipe import assign_recipe
from extensor.quant.recipe import SLOTS, LayerRecipe, OperandRule
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor.training.advise import advise_run
from extensor.training.callbacks import Callback, Telemetry
from extensor.training.config import RunConfig
from extensor.training.loop import Trainer
from extensor.training.operand_noise import (
    IMAGES,
    TRIED,
    _scales,
    _share,
    layer_operands,
    quantile_exponent,
)
from extensor.training.page import ReportArgs, write_page
from extensor.training.reallocate import reallocate
from extensor.training.rundir import read_telemetry
from extensor.training.train import train
from tests.unit.training.conftest import QUIET, Make, fitted, weights

MXFP4 = get_recipe("mxfp4_all").layers


def test_noise_and_scales_of_known_blocks() -> None:
    layer = et.nn.Linear(64, 32, rng=0)
    state = et.nn.apply_recipe(layer, "mxfp4_all")
    x = np.zeros((4, 64), np.float32)
    x[0, :32] = 6.0  # scale 1
    x[1, :32] = 24.0  # 4
    x[2, 32:] = 0.75  # 1/8
    x[3, :32] = 5.0  # scale 1: rounded to 4, a tie goes to the even code
    found = layer_operands(layer, et.from_numpy(x), et.ones((4, 32)), state.layers[""])
    assert list(found) == list(SLOTS)
    row = found["fprop.x"]
    assert row["operand"] == "mxfp4 1x32 rceil" and row["values"] == 256
    assert row["scales"] == {"low": -3, "counts": [1, 0, 0, 2, 0, 1]}  # blocks of zeros left out
    assert [quantile_exponent(row["scales"], q) for q in (0.01, 0.5, 0.99)] == [-3, 0, 2]
    signal = float((x.astype(np.float64) ** 2).sum())
    assert row["noise"]["now"] == row["noise"]["mxfp4"] == pytest.approx(32 / signal)
    assert row["noise"]["mxfp8_nvidia"] == row["noise"]["bf16"] == 0
    columns = found["wgrad.x"]  # four rows are one short block of each column
    assert sum(columns["scales"]["counts"]) == 64


def test_a_few_images_stand_for_a_batch_in_convolutions_alone() -> None:
    """Of a linear layer every row counts."""
    x = np.zeros((IMAGES + 2, 1, 8, 8), np.float32)
    x[IMAGES:] = 1.0
    conv, linear = et.nn.Conv2d(1, 4, 3, rng=0), et.nn.Linear(64, 4, rng=0)
    for layer, inputs, shape, seen in (
        (conv, x, (len(x), 4, 6, 6), False), (linear, x.reshape(len(x), 64), (len(x), 4), True),
    ):  # fmt: skip
        state = et.nn.apply_recipe(layer, "mxfp4_all")
        found = layer_operands(layer, et.from_numpy(inputs), et.ones(shape), state.layers[""])
        row = found["fprop.x"]
        assert ("scales" in row) is seen and (row["noise"]["now"] is not None) is seen
        assert row["values"] == (inputs.size if layer is linear else len(x) * 36 * 9)


def test_noise_under_a_transform_is_of_what_the_product_sees() -> None:
    layer = et.nn.Linear(128, 64, rng=0)
    state = et.nn.apply_recipe(layer, "mxfp4_tseng")
    x, g = et.randn(64, 128, seed=1), et.randn(64, 64, seed=2)
    found = layer_operands(layer, x, g, state.layers[""])
    assert found["fprop.x"]["noise"]["now"] == found["fprop.x"]["noise"]["bf16"] < 1e-5
    assert "scales" not in found["fprop.x"]
    assert 0.01 < found["wgrad.x"]["noise"]["now"] < 0.1  # stochastic MXFP4, its 3/4 undone


def telemetry_of(noise: dict[str, dict[str, float]], norms: dict[str, float]) -> Any:
    """A record of layers whose slots hold 1,000 values each, by ``noise`` of layer and format."""
    return {
        "step": 1,
        "loss": 1.0,
        "layers": {
            path: {
                "gradient_norm": norms[path],
                "slots": {},
                "operands": {
                    slot: {"operand": "mxfp4", "values": 1000, "noise": noise[path]}
                    for slot in SLOTS
                },
            }
            for path in noise
        },
    }


ORDINARY = {"now": 5e-4, "mxfp4": 1e-2, "mxfp6": 5e-4, "mxfp8_nvidia": 4e-4, "bf16": 3e-6}
EASY = {"now": 0.0, "mxfp4": 0.0, "mxfp6": 0.0, "mxfp8_nvidia": 0.0, "bf16": 0.0}


def test_bits_go_where_the_noise_is() -> None:
    layers = dict.fromkeys(("a", "b", "c"), get_recipe("mxfp6").layers)
    record = telemetry_of({"a": ORDINARY, "b": EASY, "c": ORDINARY}, {"a": 1.0, "b": 1.0, "c": 1.0})
    found = reallocate([record], layers)
    assert found is not None
    assert found.bits == 6.25 >= found.advised_bits > 6
    assert found.advised_noise < 0.9 * found.noise
    moved = {(m.layer, m.slot): m for m in found.moves}
    assert all(moved["b", slot].recipe == "mxfp4" for slot in ("fprop.x", "wgrad.g", "dgrad.g"))
    assert moved["a", "fprop.x"].advised_bits > 6.25 and moved["a", "fprop.x"].reach == 1.0
    assert ("a", "dgrad.g") not in moved  # nothing comes before it: it is not computed
    assert {m.reach for m in found.moves if m.slot == "dgrad.g"} <= {1 / 3, 2 / 3}
    # What the advice says is what a run of it has.
    run = RunConfig(**{**SETTINGS, "recipe": "mxfp6", "operands": found.operands})
    for change in run.resolved_recipe.operands:
        assert change.use.slot(change.slots) is not None


SETTINGS: dict[str, Any] = {
    "model": "mlp", "dataset": "digits", "variant": "mlp", "epochs": 1, "batch_size": 16,
    "lr": 0.02, "train_limit": 96, "test_limit": 60,
}  # fmt: skip


def test_operands_that_a_transform_ties_stay() -> None:
    for name in ("mxfp4_tseng", "mxfp8_rebased", "quartet"):
        layers = dict.fromkeys(("a", "b"), get_recipe(name).layers)
        record = telemetry_of({"a": ORDINARY, "b": ORDINARY}, {"a": 1.0, "b": 1.0})
        found = reallocate([record], layers)
        if name == "mxfp4_tseng":  # its forward product is dense
            assert found is not None
            assert {m.slot for m in found.moves} <= {"fprop.x", "fprop.w"}
        else:
            assert found is None
    assert reallocate([], {"a": MXFP4}) is None


def test_single_operands_of_another_recipe() -> None:
    mxfp8 = get_recipe("mxfp8_nvidia").layers
    changed = MXFP4.with_slots("wgrad.*", mxfp8)
    assert changed.wgrad == mxfp8.wgrad and changed.dgrad == MXFP4.dgrad
    recipe = dataclasses.replace(
        get_recipe("mxfp4"),
        operands=(OperandRule("@first", "fprop.w", mxfp8), OperandRule("*", "fprop.w", MXFP4)),
    )
    model = et.nn.Sequential(*(et.nn.Linear(32, 32, rng=i) for i in range(3)))
    chosen = assign_recipe(model, recipe)  # the later change holds
    assert {layer.slot("fprop.w") for layer in chosen.values()} == {MXFP4.slot("fprop.w")}
    assert chosen["0"].slot("fprop.x") == "bfloat16"
    with pytest.raises(ValueError, match=r"rule 'fc' matches no layer"):
        assign_recipe(model, dataclasses.replace(recipe, operands=(OperandRule("fc", "*", MXFP4),)))
    with pytest.raises(ValueError, match="matches no slot"):
        MXFP4.with_slots("fprop", mxfp8)
    with pytest.raises(ValueError, match="role"):
        OperandRule("@frist", "*", mxfp8)
    with pytest.raises(ValueError, match="both operands of a GEMM carry it"):
        get_recipe("nvfp4_nvidia").layers.with_slots("wgrad.x", mxfp8)


@pytest.mark.parametrize("text", ["fc1", "fc1/fprop.x", "fc1=mxfp8", "a/b/c=mxfp8", ","])
def test_operands_that_are_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="--operands: expected LAYER/SLOT=RECIPE"):
        RunConfig(**{**SETTINGS, "operands": text})
    with pytest.raises(ValueError, match="mxfp9"):
        RunConfig(**{**SETTINGS, "operands": "*/fprop.x=mxfp9"})


class Broken(et.nn.Module):
    """Two layers; while ``broken``, values or gradients are not finite."""

    def __init__(self) -> None:
        self.first, self.second = et.nn.Linear(64, 32, rng=0), et.nn.Linear(32, 10, rng=1)
        self.broken = ""

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        y = self.first(x.reshape(len(x), -1)[:, :64])
        if self.broken == "forward":
            y = y * np.inf
        y = et.sqrt(et.abs(y) * 0) if self.broken == "backward" else et.relu(y)
        return self.second(y)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("forward", {"layer": "second", "where": "output"}),
        ("backward", {"layer": "first", "where": "gradient of the output"}),
    ],
)
def test_the_first_layer_to_overflow(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: Any
) -> None:
    class Break(Callback):
        def on_step(self, trainer: Trainer, report: Any) -> None:
            trainer.model.broken = kind if report.step == 3 else ""

    monkeypatch.setattr(Trainer, "fresh_model", lambda self: Broken())
    config = small(recipe="mxfp4_all", epochs=1)
    trainer = fitted(config, tmp_path, Telemetry(6), Break())
    records = read_telemetry(tmp_path)
    assert [r["step"] for r in records] == [4, 6] and trainer.position.skipped == 1
    assert records[0]["overflow"] == expected
    assert records[0]["layers"] == {} and "overflow" not in records[1]
    (tmp_path / "plain").mkdir()
    plain = fitted(config, tmp_path / "plain", Break())  # a watched run is the same run
    assert weights(plain) == weights(trainer)
    assert dict(plain.quant.telemetry) == dict(trainer.quant.telemetry)


def test_advice_that_a_run_can_take(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(
        RunConfig(**{**SETTINGS, "recipe": "mxfp4"}), out, resume=False, console=QUIET, telemetry=2
    )
    last = read_telemetry(out)[-1]
    assert last["recording_share"] > 0
    assert set(last["layers"]["layers.1"]["operands"]["dgrad.g"]["noise"]) == {"now", *TRIED}
    found = advise_run(out, 20.0)
    assert found.moves is not None and found.moves.moves
    assert found.moves.advised_bits <= found.moves.bits
    assert json.loads(json.dumps(found.as_json()))["moves"]["operands"] == found.moves.operands
    assert any("--operands" in change for change in found.changes)
    recipe = RunConfig(**{**SETTINGS, "recipe": "mxfp4", "operands": found.moves.operands})
    again = fitted(recipe, tmp_path / "advised")
    assert again.history[-1].train_loss is not None
    layers: dict[str, LayerRecipe] = {p: c.layer for p, c in again.quant.layers.items()}
    for move in found.moves.moves:
        expected = get_recipe(move.recipe).layers.slot(move.slot)
        assert layers[move.layer].slot(move.slot) == expected
    text = write_page(ReportArgs(run=out)).read_text()
    assert "Recording took" in text and "log2 of block scales" in text


def test_only_what_differs_from_now_is_advised() -> None:
    layers = dict.fromkeys(("a", "b", "c"), get_recipe("mxfp6").layers)
    noise = {"a": ORDINARY, "b": EASY, "c": ORDINARY}
    found = reallocate([telemetry_of(noise, {"a": 1.0, "b": 1.0, "c": 1.0})], layers)
    assert found is not None and found.moves
    assert all(move.recipe != "now" and move.bits != move.advised_bits for move in found.moves)


def test_noise_is_a_share_of_the_signal() -> None:
    """One value of two is off by a third of it: 1 / 10 of the squares' sum 10."""
    exact, coded = np.float32([[1.0, 3.0]]), np.float32([[1.0, 2.0]])
    assert _share(exact, coded) == pytest.approx(0.1)
    assert _share(4 * exact, 4 * coded) == pytest.approx(0.1)
    assert _share(0 * exact, coded) is None


def test_scales_of_tiles_and_of_what_has_no_symmetric_grid() -> None:
    """A tile of 2 x 4 has one scale for its rows; with a zero point there is none to speak of."""
    stream = Stream(0)
    rows = np.float32([[1, 1, 1, 1, 8, 8, 8, 8], [2, 2, 2, 2, 1, 1, 1, 1]])
    tiled = QuantSpec("int8", tile=(2, 4), scale_dtype="float32")
    found = _scales(rows, tiled, stream)
    assert found == {"low": -6, "counts": [1, 0, 1]}  # 2 / 127 and 8 / 127
    assert _scales(rows, QuantSpec("int8", tile=(1, 4), symmetric=False), stream) is None
    assert _scales(rows, "bfloat16", stream) is None
