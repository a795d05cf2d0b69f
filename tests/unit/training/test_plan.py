"""Plans for many GPUs: the model of costs beside what was measured, and what it chooses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from extensor.distributed import LocalCommunicator, make_reduction
from extensor.training.cli import main
from extensor.training.plan.command import PlanArgs, gains, plan, plans
from extensor.training.plan.cost import GRAD_BYTES, Cost, Layout, Setup, cost
from extensor.training.plan.hardware import GPUS, LINKS, RECIPES
from extensor.training.plan.shapes import SHAPES, Shape
from extensor.training.rundir import UsageError

RESULTS = Path(__file__).parents[3] / "ci" / "bench" / "results"


def rows(name: str, part: str) -> dict[str, Any]:
    """Rows by name; what was called "near" is "rebased" now."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {row["name"].replace("near", "rebased"): row for row in found if row["part"] == part}


def alone(shape: Shape, recipe: str, sequences: int, context: int) -> Cost:
    """A step on one GPU."""
    setup = Setup(
        shape, 1, 8, GPUS["h100"], LINKS["nvlink4"], LINKS["ib400"], sequences * context, context
    )
    return cost(setup, Layout(RECIPES[recipe], 1, "none", 1, 0.0, "float32", sequences))


def test_rates_are_the_measured_ones() -> None:
    measured = rows("2026-11-23-cuda-step-layers-h200", "layers 4096")
    block = Shape(1, 4096, 32, 32, 16384, 64, gated=False)
    for name, recipe in RECIPES.items():
        seconds = measured[f"{name} in bfloat16, captured"]["milliseconds"] / 1e3
        assert recipe.rate == pytest.approx(
            16384 * block.block_operations(1024) / seconds, rel=2e-3
        )


@pytest.mark.parametrize(
    ("recipe", "error", "memory"), [("bf16", 0.04, 0.05), ("mxfp4", 0.01, 0.2)]
)
def test_a_whole_step_is_near_the_measured_one(recipe: str, error: float, memory: float) -> None:
    """The GPT of width 4096 on an H100: rates are of single blocks on an H200."""
    measured = rows("2026-11-22-cuda-step-wide", "wide")[f"{recipe} in bfloat16, captured"]
    found = alone(SHAPES["gpt-wide"], recipe, 8, 2048)
    assert found.seconds == pytest.approx(measured["milliseconds"] / 1e3, rel=error)
    assert found.memory == pytest.approx(measured["gigabytes"] * 1e9, rel=memory)


def test_two_ranks_over_mpi_are_near_the_measured_ones() -> None:
    """One process' epoch and the time of its float32 all-reduces, which nothing hides there."""
    found = {
        (row["model"], row["name"]): row["epoch_s"]
        for row in json.loads((RESULTS / "2026-11-24-distributed.json").read_text())["rows"]
    }
    rate = 104.9e6 / 0.081  # bytes a second: docs/log/2026-11-24-gradient-sums-over-mpi.md
    for model, weights, steps in (("GPT", 806528, 40), ("LeNet", 61706, 45)):
        reduction = 4.0 * weights * 2 * 0.5 / rate
        predicted = found[model, "2 threads"] + steps * reduction
        assert predicted == pytest.approx(found[model, "2 ranks of a thread"], rel=0.04)


def test_bytes_of_gradients_are_those_of_the_reductions() -> None:
    ranks = LocalCommunicator(0, 2, None)
    for name, (scatter, gather) in GRAD_BYTES.items():
        reduction = make_reduction(name, 6400, ranks)
        assert reduction.wire_bytes() == pytest.approx(6400 * (scatter + gather) / 2)
        assert reduction.wire_bytes(shards=True) == pytest.approx(6400 * scatter / 2)


def test_shapes_have_the_published_numbers_of_weights() -> None:
    for name, billions in (("llama-8b", 8.03), ("llama-70b", 70.6), ("llama-405b", 405.9)):
        assert SHAPES[name].weights / 1e9 == pytest.approx(billions, rel=2e-3)


def test_costs_grow_and_shrink_as_they_must() -> None:
    args = PlanArgs(gpus=64, model="llama-8b", tokens=1 << 20)
    layout = Layout(RECIPES["mxfp4"], 1, "parameters", 64, 2.0, "float32", 1)
    base = cost(args.setup, layout)
    fp4 = cost(args.setup, dataclasses.replace(layout, gather=RECIPES["mxfp4"].weight))
    weights = SHAPES["llama-8b"].weights
    gathered = 2 * 2 * (2.0 - RECIPES["mxfp4"].weight) * weights * 63 / 64  # 2 micro-batches
    assert base.micro_batches == 2 and base.sent - fp4.sent == pytest.approx(gathered)
    mx = cost(args.setup, dataclasses.replace(layout, grad_comm="mxint8"))
    assert base.sent - mx.sent == pytest.approx((4 - 33 / 32) * weights * 63 / 64)
    held = [
        cost(args.setup, dataclasses.replace(layout, shard=shard)).weights
        for shard in ("none", "states", "gradients", "parameters")
    ]
    assert held == sorted(held, reverse=True)
    slow = dataclasses.replace(args.setup, outer=LINKS["ethernet25"])
    assert cost(slow, layout).seconds > base.seconds


@pytest.mark.parametrize("shard", ["none", "states", "gradients", "parameters"])
def test_gradients_hide_behind_backward_and_gathered_weights_behind_the_step(shard: str) -> None:
    """On a slow network, where more is to be sent than can hide."""
    args = PlanArgs(gpus=64, model="llama-8b", tokens=1 << 20)
    slow = dataclasses.replace(args.setup, outer=LINKS["ethernet25"])
    made = cost(slow, Layout(RECIPES["mxfp4"], 1, shard, 64, 2.0, "float32", 1))
    hidden = (made.data_comm - made.exposed) / made.compute
    assert hidden == pytest.approx(0.9 * (1 if shard == "parameters" else 2 / 3))


def test_plans_fit_and_the_first_is_the_fastest() -> None:
    args = PlanArgs()
    found = plans(args)
    seconds = [each.cost.seconds for each in found]
    assert seconds == sorted(seconds)
    assert all(each.cost.memory <= GPUS["h100"].memory for each in found)
    best = found[0]
    assert best.layout.shard == "parameters" and best.gather == "as the recipe"
    lines = gains(found)
    assert any(line.startswith("without gathering in the recipe's format: +") for line in lines)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-8b", "--gpus", "16", "--link", "ethernet100"]
    assert main([*words, "--recipe", "bf16"]) == 0
    told = capsys.readouterr().out
    assert "llama-8b: 8.0 billion weights, 16 h100 in machines of 8" in told
    assert "tokens/s/GPU" in told  # no column is folded
    rows = [line.split("\u2502")[9:13] for line in told.splitlines() if "\u2502 bf16" in line]
    for compute, comm, exposed, step in (map(float, row) for row in rows):
        assert exposed <= comm and step == pytest.approx(compute + exposed, abs=2e-3)
    for words, expected in (
        (["--model", "llama-70"], "did you mean"),
        (["--gpus", "12"], "expected a multiple of the 8 of a machine, got 12"),
        (["--tokens", "0"], "--tokens: expected 1 or more, got 0"),
    ):
        assert main(["plan", *words]) == 2
        assert expected in capsys.readouterr().err


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a way to fit 405.* billion weights into 8 GPUs"):
        plan(PlanArgs(model="llama-405b", gpus=8), Console(quiet=True))
