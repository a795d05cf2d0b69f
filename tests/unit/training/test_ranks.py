"""Several ranks: the same bits on any number of them, and what all of them agree on.

Ranks are threads here; tests/unit/distributed/test_mpi.py has processes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.distributed import LocalCommunicator, RanksDiffer, run_ranks
from extensor.quant import QuantStats
from extensor.quant.recipe_state import RecipeState
from extensor.quant.recipes import RECIPES
from extensor.training import ranks as of_ranks
from extensor.training.batch import Batch
from extensor.training.callbacks import Callback, EarlyStopping, SaveCheckpoint
from extensor.training.config import RunConfig
from extensor.training.loop import Interrupted, Trainer
from extensor.training.micro_batches import MicroBatches, shares
from extensor.training.parallel import grid_of
from extensor.training.rundir import UsageError
from extensor.training.runs import RUNS, defaults
from extensor.training.tasks import TASKS
from tests.unit.training.conftest import Make, fitted, weights

Run = tuple[dict[str, bytes], dict[str, Any], Any]


def on(
    size: int,
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    callbacks: Any = (),
    graph: bool = False,
) -> Run:
    """Train on ranks that are threads; all of them must end alike."""
    out.mkdir(exist_ok=True)

    def program(ranks: LocalCommunicator) -> Run:
        mine = [make() for make in callbacks if ranks.rank == 0 or make is SaveCheckpoint]
        trainer = Trainer(config, out, callbacks=mine, graph=graph, ranks=ranks)
        if resume:
            trainer.load(trainer.last)
        trainer.fit()
        history = [timeless(report) for report in trainer.history]
        return weights(trainer), {"history": history, "health": trainer.health}, trainer

    runs = run_ranks(size, program)
    for each in runs[1:]:
        assert each[:2] == runs[0][:2]
    return runs[0]


def timeless(report: Any) -> dict[str, Any]:
    clocks = ("seconds", "per_second", "waited")
    return {k: v for k, v in report.as_dict().items() if k not in clocks}


def image_run(model: str, **changes: Any) -> RunConfig:
    small = {"epochs": 1, "batch_size": 16, "train_limit": 40, "test_limit": 60}
    return RunConfig(**{**defaults(model, "digits"), **small, **changes})


CASES: dict[str, Callable[[], RunConfig]] = {
    # 40 images in batches of 16: the last one has 8 for 8 micro-batches of one image each.
    "lenet": lambda: image_run("lenet", recipe="mxfp4", micro_batches=8, clip_norm=1.0),
    # Dropout, and a recipe that switches scale rules by its counts.
    "mlp": lambda: image_run("mlp", recipe="mxfp4_adaptive", micro_batches=8, val_share=0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_number_of_ranks(case: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CASES[case](), grad_comm="exact")
    alone = on(1, config, tmp_path / "1")
    for size in (2, 3, 8):
        shared = on(size, config, tmp_path / str(size))
        assert shared[0] == alone[0]
        assert shared[1] == alone[1]  # losses, accuracies, counts of quantizing
    other = on(1, dataclasses.replace(config, seed=1), tmp_path / "other")
    assert other[0] != alone[0]


def test_a_run_goes_on_with_another_number_of_ranks(small: Make, tmp_path: Path) -> None:
    config = small(recipe="mxfp4", micro_batches=4, grad_comm="exact")
    whole = on(1, config, tmp_path / "whole")

    class Stop(Callback):
        def on_step(self, run: Any, report: Any) -> None:
            if report.step in (3, 8):
                run.interrupt()
                run.ranks.timeout = 60.0

    out = tmp_path / "parts"
    with pytest.raises(Interrupted):
        on(4, config, out, callbacks=[Stop, SaveCheckpoint])
    with pytest.raises(Interrupted):
        on(2, config, out, resume=True, callbacks=[Stop, SaveCheckpoint])
    rest = on(1, config, out, resume=True)
    assert rest[0] == whole[0] and rest[1] == whole[1]


@pytest.mark.parametrize("comm", ["float32", "bfloat16", "mxint8", "mxint16"])
def test_other_sums_are_near_and_alike_on_all_ranks(small: Make, tmp_path: Path, comm: str) -> None:
    config = small(epochs=1, recipe="fp32", micro_batches=2)
    exact = on(1, dataclasses.replace(config, grad_comm="exact"), tmp_path / "exact")
    other = on(2, dataclasses.replace(config, grad_comm=comm), tmp_path / comm)
    for name, theirs in exact[0].items():
        mine = np.frombuffer(other[0][name], np.float32)
        np.testing.assert_allclose(mine, np.frombuffer(theirs, np.float32), atol=5e-3)


def test_one_micro_batch_is_the_batch_itself(small: Make, tmp_path: Path) -> None:
    plain = fitted(small(recipe="mxfp4"), tmp_path / "plain")
    one = fitted(small(recipe="mxfp4", micro_batches=1), tmp_path / "one")
    assert weights(plain) == weights(one)


def test_batch_norms_move_by_the_mean_of_micro_batches(tmp_path: Path) -> None:
    config = RunConfig(
        **{
            **defaults("resnet", "digits"),
            "epochs": 1, "batch_size": 8, "train_limit": 8, "test_limit": 8,
            "micro_batches": 2, "recipe": "mxfp4", "grad_comm": "exact",
        }
    )  # fmt: skip
    alone, shared = on(1, config, tmp_path / "1"), on(2, config, tmp_path / "2")
    assert alone[0] == shared[0]
    trainer = alone[2]
    (batch,) = trainer.task.training(1, 0)
    parts = []
    for half in (slice(0, 4), slice(4, 8)):
        fresh = Trainer(config, tmp_path)
        fresh.model(fresh._tensor(batch.inputs[half]))
        parts.append(dict(fresh.model.named_buffers()))
    name = next(name for name in parts[0] if name.endswith("running_mean"))
    mean = (parts[0][name].numpy() + parts[1][name].numpy()) / 2
    got = np.frombuffer(alone[0][name], np.float32)
    np.testing.assert_allclose(got, mean, rtol=1e-6, atol=1e-7)


def test_one_ranks_infinity_skips_the_step_on_all(small: Make, tmp_path: Path) -> None:
    config = small(epochs=1, train_limit=16, micro_batches=2)

    def program(ranks: LocalCommunicator) -> tuple[bool, dict[str, bytes], float]:
        trainer = Trainer(config, tmp_path, ranks=ranks)
        before = weights(trainer)
        if ranks.rank == 1:
            good = trainer.forward
            trainer.forward = lambda *args: (*good(*args)[:2], good(*args)[2] * float("inf"))
        (batch,) = trainer.task.training(1, 0)
        with np.errstate(all="ignore"):
            (report,) = trainer.advance([batch])
        return not report.skipped, weights(trainer) == before, trainer.scaler.current_scale

    assert run_ranks(2, program) == [(False, True, 32768.0)] * 2


@pytest.mark.parametrize(
    ("comm", "rounding"),
    [("exact", "stochastic"), ("mxint8", "stochastic"), ("mxint16", "error_feedback")],
)
def test_captured_ranks_train_as_others(comm: str, rounding: str, tmp_path: Path) -> None:
    """The same weights, losses and counts; a batch of 12 has 6 rows a rank, a last one of 5 has 3
    and 2. On the CPU the captured step is called."""
    config = image_run("lenet", recipe="mxfp4", batch_size=12, train_limit=29, micro_batches=2)
    changes = {"grad_comm": comm, "grad_rounding": rounding, "loss_scale": "off"}
    config = dataclasses.replace(config, **changes)
    eager = on(2, config, tmp_path / "eager")
    assert on(2, config, tmp_path / "graph", graph=True)[:2] == eager[:2]


@pytest.mark.parametrize("shard", ["states", "gradients", "parameters"])
def test_captured_ranks_may_keep_parts(shard: str, tmp_path: Path) -> None:
    config = image_run(
        "lenet", recipe="mxfp4", batch_size=12, train_limit=29, micro_batches=2, shard=shard,
        grad_comm="exact", optimizer="adamw", lr=1e-3, clip_norm=0.1,
    )  # fmt: skip
    eager = on(2, config, tmp_path / "eager")
    assert on(2, config, tmp_path / "graph", graph=True)[:2] == eager[:2]


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({"micro_batches": 4}, 2, "one micro-batch on each rank, got 4 on 2; the way out: as many"),
        (
            {"grad_comm": "mxint8", "grad_rounding": "error_feedback", "loss_scale": "dynamic"},
            2,
            "left over is rescaled between steps",
        ),
        ({"model": "resnet"}, 2, "batch norms and dropout"),
        ({"batch_size": 8, "train_limit": 17, "model": "lenet"}, 2, "none in step 3; the way out"),
    ],
)
def test_what_captured_ranks_do_not_do(
    tmp_path: Path, changes: dict[str, Any], size: int, expected: str
) -> None:
    config = image_run(changes.pop("model", "mlp"), **{"lr": 1e-3, **changes})
    with pytest.raises((UsageError, ValueError), match=expected):
        on(size, config, tmp_path / "run", graph=True)


def test_early_stopping_stops_all(small: Make, tmp_path: Path) -> None:
    config = small(epochs=5, val_share=0.25, patience=1, lr=1e-30, micro_batches=2)

    def program(ranks: LocalCommunicator) -> tuple[int, str | None]:
        trainer = Trainer(config, tmp_path, callbacks=[EarlyStopping(1)], ranks=ranks)
        trainer.fit()
        return len(trainer.history), trainer.stop_reason

    first, second = run_ranks(2, program)
    assert first == second and first[0] == 2


def test_ranks_that_differ_are_refused_at_the_start_with_each_difference(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of numpy, one pixel, one weight, the seed: each named, nothing else."""
    mine = threading.local()
    monkeypatch.setattr(of_ranks, "_version", lambda name: mine.versions.get(name, "1.0"))

    def program(ranks: LocalCommunicator) -> str:
        mine.versions = {"numpy": "2.0"} if ranks.rank == 1 else {}
        config = small(micro_batches=4, seed=int(ranks.rank == 3))
        trainer = Trainer(config, tmp_path, ranks=ranks)
        if ranks.rank == 2:
            next(iter(trainer.task.arrays())).reshape(-1)[7] += 1
        if ranks.rank == 1:  # another seed makes other weights on rank 3 anyway
            with et.no_grad():
                next(iter(trainer.model.parameters())).data.reshape(-1)[0] += 1
        with pytest.raises(RanksDiffer) as caught:
            of_ranks.check_start(trainer)
        return str(caught.value)

    told = set(run_ranks(4, program))
    assert len(told) == 1
    parts = told.pop().split(" got ", 1)[1].split("; the way out")[0].split(" | ")
    assert [part.split(":")[0] for part in parts] == [
        "--seed", "checksum of the data", "version of numpy", "weights",
    ]  # fmt: skip
    assert parts[0] == "--seed: 0 on ranks 0, 1, 2; 1 on rank 3"
    assert parts[2] == "version of numpy: '1.0' on ranks 0, 2, 3; '2.0' on rank 1"
    assert parts[1].endswith("on rank 2") and "on rank 1;" in parts[3]


def test_more_ranks_than_micro_batches_are_refused(small: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one for each of the 3 ranks, got 2"):
        run_ranks(3, lambda ranks: Trainer(small(micro_batches=2), tmp_path, ranks=ranks))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("lenet", {"augment": "strong"}),
        ("gpt", {"augment": "noise", "epoch_steps": 3, "context": 16}),
        ("encoder", {"epoch_steps": 3, "context": 16}),
    ],
)
def test_a_rank_draws_its_rows_alone(model: str, changes: dict[str, Any]) -> None:
    """Together they are the whole batch; weights of micro-batches count the whole one's labels."""
    small = {"batch_size": 10, "train_limit": 20 if model == "lenet" else 4000}
    config = RunConfig(**{**defaults(model), **small, **changes, "micro_batches": 4})
    if model == "lenet":
        config = dataclasses.replace(config, dataset="digits")
    task = TASKS[RUNS[model].task](config)
    whole = list(task.training(1, 0))
    net, state = et.nn.Linear(2, 2, rng=0), RecipeState(RECIPES["fp32"])
    ranks = [LocalCommunicator(rank, 3, None) for rank in range(3)]
    shared = [MicroBatches(net, state, 4, grid_of(each, 1)) for each in ranks]
    drawn = [list(task.training(1, 0, each.rows)) for each in shared]
    alone = MicroBatches(net, state, 4, grid_of(LocalCommunicator(), 1))
    for index, batch in enumerate(whole):
        parts = [each[index] for each in drawn]
        assert [len(part.inputs) for part in parts] == [5, 3, 2]
        np.testing.assert_array_equal(np.concatenate([p.inputs for p in parts]), batch.inputs)
        np.testing.assert_array_equal(np.concatenate([p.labels for p in parts]), batch.labels)
        each = [one for s, part in zip(shared, parts, strict=True) for one in s.divide(part)]
        assert [(one.index, one.weight) for one in each] == [
            (one.index, one.weight) for one in alone.divide(batch)
        ]


def test_every_count_of_quantizing_survives_micro_batches() -> None:
    """A layer whose input another layer quantized counts its fallbacks alone."""
    net = et.nn.Linear(2, 2, rng=0)
    state = et.nn.apply_recipe(net, "mxfp4_all")
    micro = MicroBatches(net, state, 2, grid_of(LocalCommunicator(), 1))
    gained = {
        ("", "fprop.x"): QuantStats(64, 1, 2, 3, 4), ("", "dgrad.g"): QuantStats(fallbacks=5)
    }  # fmt: skip
    labels = np.zeros(2, np.int64)
    for steps in (1, 2):
        micro.begin()
        for part in micro.run(micro.divide(Batch(0, np.zeros((2, 2), np.float32), labels))):
            micro.record(part, 1.0, 0)
        state.load_telemetry(gained)
        micro.send(stop=False)
        micro.end()
        assert dict(state.telemetry) == {
            key: sum([stats] * steps, QuantStats()) for key, stats in gained.items()
        }


@pytest.mark.parametrize(("count", "parts"), [(32, 4), (29, 4), (3, 8), (0, 2), (10, 3)])
def test_shares_are_even_and_complete(count: int, parts: int) -> None:
    sizes = [len(range(count)[rows]) for rows in shares(count, parts)]
    assert sum(sizes) == count and len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_what_a_step_that_cannot_be_finished_has_changed_is_undone() -> None:
    """Running means, dropout's calls, counts and the micro-batch; a step that ends takes means."""
    model = et.nn.Sequential(et.nn.BatchNorm2d(3), et.nn.Dropout(0.5, rng=0))
    state = RecipeState(RECIPES["fp32"])
    micro = MicroBatches(model, state, 3, grid_of(LocalCommunicator(), 1))
    x = np.random.default_rng(0).standard_normal((6, 3, 2, 2)).astype(np.float32)
    batch = Batch(0, x, np.zeros(6, np.int64))
    before = {name: buffer.numpy().copy() for name, buffer in model.named_buffers()}
    micro.begin()
    for part in micro.run(micro.divide(batch)[:2]):
        model(et.from_numpy(part.batch.inputs))
    state.micro_batch = 2
    micro.rewind()
    assert state.micro_batch == 0
    for name, buffer in model.named_buffers():
        np.testing.assert_array_equal(buffer.numpy(), before[name])
    micro.begin()
    means = []
    for part in micro.run(micro.divide(batch)):
        model(et.from_numpy(part.batch.inputs))
        means.append(model[0].running_mean.numpy().copy())
        micro.record(part, 1.0, 0)
    micro.send(stop=False)
    micro.end()
    np.testing.assert_allclose(model[0].running_mean.numpy(), np.mean(means, axis=0), rtol=1e-6)
