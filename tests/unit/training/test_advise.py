"""``extensor advise RUN``: what is wrong with a run, and which recipe or rule changes it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from extensor import cli
from extensor.inspect import SlotHealth
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.training.advise import (
    _counterpart,
    _names,
    _operand_changes,
    _overflow_text,
    advise_run,
)
from extensor.training.config import RunConfig
from extensor.training.runs import defaults
from extensor.training.train import train


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose recipe saturates."""
    return trained(tmp_path_factory.mktemp("floor") / "run", "mxfp4_all_floor")


def trained(folder: Path, recipe: str) -> Path:
    settings = {"epochs": 1, "batch_size": 16, "train_limit": 96, "test_limit": 60, "lr": 0.02}
    config = RunConfig(**{**defaults("mlp"), **settings, "recipe": recipe})
    train(config, folder, resume=False, console=Console(file=io.StringIO(), width=100))
    return folder


def row(slot: str, verdict: str, layer: str = "fc1") -> SlotHealth:
    saturated, flushed = ("saturates" in verdict) * 0.1, ("flushes" in verdict) * 0.5
    changed = ("rebased" in verdict) * 0.5
    return SlotHealth(layer, slot, "mxfp4", "floor", 100, saturated, flushed, False, changed)


def test_counterparts_differ_in_the_changed_field_alone() -> None:
    def rceil(slot: str, spec: Any) -> dict[str, Any]:
        return {"scale_rule": "rceil"}

    assert _counterpart(get_recipe("mxfp4_all_floor"), rceil) == "mxfp4_all"
    assert _counterpart(get_recipe("mxfp4_floor"), rceil) == "mxfp4"
    assert _counterpart(get_recipe("mxfp8_ocp"), rceil) == "mxfp8_nvidia"
    assert _counterpart(get_recipe("mxfp4"), rceil) is None  # it has them already
    rebased = _counterpart(get_recipe("mxfp8_rebased"), lambda slot, spec: {"rebased": False})
    assert rebased == "mxfp8_nvidia"


@pytest.mark.parametrize(
    ("recipe", "operand", "expected"),
    [
        ("mxfp4_all_floor", row("fprop.x", "saturates"), "try --recipe mxfp4_all"),
        ("mxfp8_rebased", row("fprop.w", "changes when rebased"), "try --recipe mxfp8_nvidia"),
        ("mxfp4_nearest", row("dgrad.g", "flushes"), "try --recipe mxfp4"),
        ("mxfp4", row("dgrad.g", "flushes"), "keep fc1 in bfloat16 by a rule"),
        ("mxfp4", row("fprop.x", "flushes"), "keep fc1 in bfloat16 by a rule"),
        ("mxfp4_adaptive", row("fprop.x", "saturates"), "try --recipe mxfp4"),
        (
            "mxfp4_tseng",
            row("dgrad.w", "saturates"),
            'a recipe of your own with scale_rule="rceil" there',
        ),
    ],
)
def test_each_alarm_has_its_way_out(recipe: str, operand: SlotHealth, expected: str) -> None:
    (line,) = _operand_changes(get_recipe(recipe), [operand], None)
    assert f"fc1 {operand.slot}" in line
    assert line.endswith(expected) or f"{expected}," in line


def test_no_alarm_no_change() -> None:
    assert _operand_changes(RECIPES["mxfp4"], [row("fprop.x", "ok")], None) == []


def test_a_run_that_saturates(floor: Path) -> None:
    found = advise_run(floor, 20.0)
    health = json.loads((floor / "result.json").read_text())["health"]
    alarms = {(r["layer"], r["slot"]) for r in health if r["verdict"] != "ok"}
    assert alarms, "the fixture must saturate"
    assert found.own is not None and found.own.name == "mxfp4_all_floor"
    shown = found.sheets()[0]
    assert {(cells[0], cells[1]) for cells in shown.rows} == alarms
    assert any("--recipe mxfp4_all" in line for line in found.changes)
    by_name = {trial.name: trial for trial in found.trials}
    assert by_name["mxfp8_nvidia"].output_db > by_name["mxfp4"].output_db > found.own.output_db
    assert len(found.kept) == 3
    assert all(trial.output_db > found.own.output_db for trial in found.kept[:1])


def test_the_budget_chooses_the_recipe(floor: Path) -> None:
    high = advise_run(floor, 90.0)
    assert any("no recipe tried keeps as much" in line for line in high.changes)
    trials = {trial.name: trial for trial in high.trials}
    best = trials["nvfp4_4over6"]  # MXFP6 and MXFP8 keep more, with more bits
    assert best.output_db < trials["mxfp6"].output_db and best.bits < trials["mxfp6"].bits
    low = advise_run(floor, best.output_db - 0.01).changes
    assert any(f"try --recipe {best.name}: {best.output_db:.1f} dB" in line for line in low)


def test_the_command(floor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", str(floor)]) == 0
    text = capsys.readouterr().out
    assert "beyond the limits" in text and "--recipe mxfp4_all" in text
    assert cli.main(["advise", str(floor), "--json"]) == 0
    content = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert content["recipe"] == "mxfp4_all_floor" and content["changes"]
    assert {"saturates"} <= {r["verdict"] for r in content["operands"]}


def test_a_float32_run_is_told_what_to_try(tmp_path: Path) -> None:
    found = advise_run(trained(tmp_path / "run", "fp32"), 20.0)
    assert found.operands == () and found.kept == ()
    assert any("under fp32 the output keeps exact" in line for line in found.changes)
    assert "try --recipe" in found.changes[0]


def test_an_unfinished_run_says_what_is_missing(
    floor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text((floor / "config.toml").read_text())
    assert cli.main(["advise", str(begun)]) == 0
    assert "not measured: " in (text := capsys.readouterr().out) and "--resume" in text
    (begun / "config.toml").write_text("model = ")
    assert cli.main(["advise", str(begun)]) == 2
    assert "not the configuration of a run" in capsys.readouterr().err


def test_a_diverged_run_is_not_measured(floor: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in floor.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "diverged": "the loss is not finite"}))
    found = advise_run(run, 20.0)
    assert found.own is None and "its weights say nothing" in found.missing
    assert found.changes[0].startswith("the run diverged: the loss is not finite")


def test_an_overflow_is_told_of_with_its_layer() -> None:
    record = {"overflow": {"layer": "fc1", "where": "the gradient"}, "step": 7}
    text = "the first values that were not finite: the gradient{}, in step 7"
    assert _overflow_text(record) == text.format(" of fc1")
    record["overflow"] = {"layer": None, "where": "the gradient"}
    assert _overflow_text(record) == text.format("")


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_of_many_slots_four_are_named_and_the_others_counted(count: int) -> None:
    rows: Any = [SimpleNamespace(layer=f"l{n}", slot="fprop.x") for n in range(count)]
    said = _names(rows)
    assert len(re.findall(r"l\d fprop\.x", said)) == min(count, 4)
    assert said.endswith(f" and {count - 4} more") if count > 4 else " and " not in said
