"""Plans for many GPUs: the model of costs beside what was measured, and what it chooses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from extensor.distributed import LocalCommunicator, make_reduction, run_ranks
from extensor.training.cli import main
from extensor.training.plan.command import PlanArgs, gains, plan, plans
from extensor.training.plan.cost import (
    GRAD_BYTES,
    GRAD_MEMORY,
    START,
    Cost,
    Layout,
    Setup,
    collective,
    cost,
    making,
    packing,
)
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
    rate = 104.9e6 / 0.081  # bytes a second: docs/log/ranks-on-a-cpu.md
    for model, weights, steps in (("GPT", 806528, 40), ("LeNet", 61706, 45)):
        reduction = 4.0 * weights * 2 * 0.5 / rate
        predicted = found[model, "2 threads"] + steps * reduction
        assert predicted == pytest.approx(found[model, "2 ranks of a thread"], rel=0.04)


GATHERED = {"float32": 4.0, "bfloat16": 2.0, "mxfp8": 33 / 32, "mxfp4": 17 / 32, "nvfp4": 9 / 16}
"""Bytes of a gathered weight, by the benchmark's names."""


def captured(name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark of several GPUs in which Python does not wait."""
    rows = json.loads((RESULTS / f"2026-11-{name}.json").read_text())["rows"]
    return [row for row in rows if row["captured"]]


@pytest.mark.parametrize(
    ("file", "gpu", "count"),
    [
        ("26-distributed-2-gpus-scaling-h200", "h200", 4),
        ("27-distributed-4-gpus-scaling-h100", "h100", 4),
        ("27-distributed-4-gpus-scaling-h200", "h200", 8),
    ],
)
def test_steps_of_several_gpus_are_near_the_measured_ones(file: str, gpu: str, count: int) -> None:
    """A rank's measured step by itself and what the model adds for the gradients' sum."""
    shapes = {
        "GPT of 30M": Shape(8, 512, 8, 8, 2048, 8192 + 1024, gated=False, tied=True),
        "block of width 4096": Shape(1, 4096, 32, 32, 16384, 0, gated=False),
    }
    found = captured(file)
    assert len(found) == count
    for row in found:
        ranks, shape = row["ranks"], shapes[row["model"]]
        links = LINKS["nvlink4"], LINKS["ib400"]
        setup = Setup(shape, ranks, 8, GPUS[gpu], *links, ranks * 16384, 1024)
        layout = Layout(RECIPES[row["recipe"]], 1, "none", 1, 0.0, row["name"], 16)
        added = cost(setup, layout).exposed
        assert row["alone_ms"] / 1e3 + added == pytest.approx(row["step_ms"] / 1e3, rel=0.04), row


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_nvlink_are_near_the_measured_ones(ranks: int) -> None:
    """100 MB in one bucket: in the bytes that each way sends, and those that it moves."""
    found = [
        row
        for row in captured(f"27-distributed-{ranks}-gpus-sums-h100")
        if row["buckets"] == "100 MB"
    ]
    assert len(found) == 2
    values, link, gpu = 24 << 20, LINKS["nvlink4"], GPUS["h100"]
    for row in found:
        calls = 1 if row["name"] == "float32" else 2
        took = collective(sum(GRAD_BYTES[row["name"]]) * values, ranks, link, calls)
        took += packing(row["name"], values, values, gpu)
        assert took == pytest.approx(row["ms"] / 1e3, rel=0.17), row


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_over_nvlink_are_near_the_measured_ones(ranks: int) -> None:
    """Four weights of a block of width 4096, made before they travel."""
    values = 12 * 4096**2
    for row in captured(f"27-distributed-{ranks}-gpus-gather-h100"):
        nbytes, link, gpu = GATHERED[row["name"]], LINKS["nvlink4"], GPUS["h100"]
        took = collective(nbytes * values, ranks, link, 4) + making(nbytes, values / ranks, gpu)
        if row["name"] == "nvfp4":  # largest magnitudes: all are read, and agreed on, once a step
            took += (4.0 * values / ranks / gpu.bandwidth + collective(16.0, ranks, link, 1)) / 2
        assert took == pytest.approx(row["ms"] / 1e3, rel=0.08), row


def test_bytes_of_gradients_are_those_of_the_reductions() -> None:
    assert GRAD_MEMORY.keys() == GRAD_BYTES.keys()

    def sent(ranks: LocalCommunicator) -> dict[str, tuple[float, float]]:
        made = {name: make_reduction(name, 6400, ranks) for name in GRAD_BYTES}
        return {name: (r.wire_bytes(), r.wire_bytes(shards=True)) for name, r in made.items()}

    found, other = run_ranks(2, sent)
    assert found == other
    for name, (scatter, gather) in GRAD_BYTES.items():
        assert found[name] == pytest.approx((6400 * (scatter + gather) / 2, 6400 * scatter / 2))


def test_shapes_have_the_published_numbers_of_weights() -> None:
    norms = {"llama-8b": 65 * 4096, "llama-70b": 161 * 8192}  # which a plan leaves out
    published = {"llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496}
    for name, weights in published.items():
        assert SHAPES[name].weights == weights - norms[name]
    assert SHAPES["llama-405b"].weights / 1e9 == pytest.approx(405.9, rel=2e-4)


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
    states = [16.0, 8 + 8 / 64, 4 + 12 / 64]  # float32: a weight, its gradient, two averages
    for found, each in zip(held, states, strict=False):
        assert found == pytest.approx(weights * (each + 2 * RECIPES["mxfp4"].weight))
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


def test_groups_of_gpus_divide_them() -> None:
    """With as many GPUs as tensor parallel ranks there is one group, of one."""
    found = plans(PlanArgs(gpus=8, model="llama-8b", tokens=1 << 16))
    groups = {(plan.layout.tensor, plan.layout.group) for plan in found if plan.gather}
    assert (8, 1) in groups
    assert groups <= {(tensor, 2**i) for tensor in (1, 2, 4, 8) for i in range(4)}
    assert all(8 % (tensor * group) == 0 for tensor, group in groups)


def test_tensor_parallel_ranks_exchange_two_bytes_of_each_value() -> None:
    """Eight gathers or scatters in a block: of attention and MLP, forward and backward."""
    setup = PlanArgs(gpus=8, model="llama-8b", tokens=1 << 16).setup
    layout = Layout(RECIPES["bf16"], 2, "none", 4, 2.0, "float32", 1)
    free = dataclasses.replace(setup.inner, latency=0.0)
    made = cost(dataclasses.replace(setup, inner=free), layout)
    sent = 8 * 32 * 2.0 * 4096 * (1 << 16) / 4 / 2
    begun = made.tensor_comm - sent / free.bandwidth
    assert begun == pytest.approx(8 * 32 * made.micro_batches * START)
    assert made.memory == made.weights + made.activations
    slow = cost(dataclasses.replace(setup, inner=LINKS["ib400"]), layout)
    assert slow.tensor_comm > made.tensor_comm


def test_what_a_block_keeps_of_a_token() -> None:
    """Llama's: two norms' inputs, queries and their attention, keys and values, gate and up."""
    kept = 2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336
    assert SHAPES["llama-8b"].saved(1.0) == 2 * kept + 3 * 4096 + 14336


def test_the_commands_traffic_is_of_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    """Of gradients and of tensor parallel ranks, whose traffic hides behind nothing."""
    args = PlanArgs(gpus=16, model="llama-8b", tokens=1 << 16, recipe="bf16")
    best = plans(args)[0].cost
    assert best.tensor_comm > 0
    plan(args, Console(width=200))
    row = next(line for line in capsys.readouterr().out.splitlines() if "\u2502 bf16" in line)
    _, comm, exposed, _ = (float(cell) for cell in row.split("\u2502")[9:13])
    assert comm == pytest.approx(best.data_comm + best.tensor_comm, abs=2e-3)
    assert exposed == pytest.approx(best.exposed + best.tensor_comm, abs=2e-3)
