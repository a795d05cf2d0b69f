"""Runs whose ranks share transformer blocks, beside ranks with micro-batches of their own."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor as et
from extensor.distributed import LocalCommunicator, TensorParallel, clip_grad_norm, run_ranks
from extensor.training.callbacks import Callback, SaveCheckpoint
from extensor.training.config import RunConfig
from extensor.training.loop import Interrupted, Trainer, open_run
from extensor.training.parallel import parameter_of
from extensor.training.rundir import UsageError
from extensor.training.runs import defaults
from extensor.training.train import train

CONFIG = RunConfig(
    **{
        **defaults("gpt"),
        "recipe": "mxfp8",
        "epochs": 1,
        "epoch_steps": 3,
        "batch_size": 4,
        "micro_batches": 2,
        "grad_comm": "exact",
        "context": 64,
        "test_limit": 8,
        "tensor_parallel": 2,
    }
)


@pytest.fixture(autouse=True)
def text(one_text: Callable[[str], None]) -> None:
    """A corpus that is there at once."""
    one_text("To be, or not to be, that is the question. " * 200)


def fitted(size: int, config: RunConfig, out: Path, *more: type[Callback]) -> list[Any]:
    """The whole weights, the test loss and the counts of quantizing, by rank."""

    def program(ranks: LocalCommunicator) -> Any:
        watchers = [SaveCheckpoint(), *(make() for make in more)]
        trainer = Trainer(config, out, callbacks=watchers, ranks=ranks)
        if trainer.last.exists():
            trainer.load(trainer.last)
        result = trainer.fit()
        named = trainer.model.named_parameters()
        weights = (
            {name: param.numpy() for name, param in named}
            if trainer.parallel is None
            else trainer.parallel.state_dict()
        )
        counts = {key: stats.count for key, stats in trainer.quant.telemetry.items()}
        return weights, result["loss"], counts, result["parameters"]

    return run_ranks(size, program)


def assert_same(got: Any, expected: Any) -> None:
    assert got[1:] == expected[1:]
    assert got[0].keys() == expected[0].keys()
    for name, weight in expected[0].items():
        np.testing.assert_array_equal(got[0][name], weight, err_msg=name)


def test_the_same_bits_whoever_has_the_micro_batches(tmp_path: Path) -> None:
    """Near one rank's; a checkpoint is the whole model's, and goes on with other data ranks."""
    config = dataclasses.replace(CONFIG, clip_norm=1.0)
    for name in ("1", "2", "4", "parts"):
        (tmp_path / name).mkdir()
    alone = fitted(1, dataclasses.replace(config, tensor_parallel=1), tmp_path / "1")[0]
    pair = fitted(2, config, tmp_path / "2")
    grid = fitted(4, config, tmp_path / "4")
    for each in (*pair, *grid):
        assert_same(each, pair[0])
    assert pair[0][2:] == alone[2:]  # counts and parameters are the whole model's
    assert pair[0][1] == pytest.approx(alone[1], rel=1e-3) and pair[0][1] != alone[1]

    class Stop(Callback):
        def on_step(self, run: Any, report: Any) -> None:
            if report.step == 2:
                run.interrupt()
                run.grid.set_timeout(60.0)

    with pytest.raises(Interrupted):
        fitted(4, config, tmp_path / "parts", Stop)
    saved = et.io.load_checkpoint(tmp_path / "parts" / "checkpoint.safetensors").tensors
    assert saved["model.blocks.0.attention.qkv.weight"].shape == (384, 128)
    moments = [saved[key] for key in saved if "0.attention.out.weight" in key and ".state." in key]
    assert [moment.shape for moment in moments] == [(128, 128)] * 2
    for each in fitted(2, config, tmp_path / "parts"):
        assert_same(each, pair[0])


def test_an_optimizer_s_state_comes_back_where_second_layers_have_biases() -> None:
    """Rank 0 alone has these; the count of their steps goes with them."""

    def program(ranks: LocalCommunicator) -> dict[str, Any]:
        attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        model = et.nn.Sequential(et.nn.ModuleList([block]))
        parallel = TensorParallel(model, ranks)
        optimizer = et.optim.AdamW(model.named_parameters(), lr=0.1)
        block(et.ones((1, 4, 64))).sum().backward()
        optimizer.step()
        before = optimizer.state_dict()
        optimizer.load_state_dict(parallel.cut(parallel.gather(before, parameter_of), parameter_of))
        after = optimizer.state_dict()
        assert before.keys() == after.keys()
        return after

    first, second = run_ranks(2, program)
    assert len(first) > len(second) > 0


def test_a_run_ends_with_the_whole_models_table(tmp_path: Path) -> None:
    """Rank 0 has a part of each block; what is shown, and a report, are of all of it."""
    config, said = dataclasses.replace(CONFIG, micro_batches=1), io.StringIO()

    def program(ranks: LocalCommunicator) -> None:
        text = said if ranks.rank == 0 else io.StringIO()
        train(config, tmp_path / "run", resume=False, console=Console(file=text), ranks=ranks)

    run_ranks(2, program)
    assert "test loss" in said.getvalue() and "layers beside float32" in said.getvalue()
    assert open_run(tmp_path / "run").position.step == 3
    with pytest.raises(UsageError, match="--telemetry: one rank looks at the whole model"):
        run_ranks(2, lambda ranks: train(
            config, tmp_path / "b", resume=False, console=Console(file=io.StringIO()), telemetry=1,
            ranks=ranks,
        ))  # fmt: skip


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    def program(ranks: LocalCommunicator) -> Any:
        trainer = Trainer(CONFIG, tmp_path, ranks=ranks)
        backward = trainer._backward

        def broken(part: Any) -> None:
            backward(part)
            if ranks.rank == 1:
                trainer.model.blocks[0].attention.qkv.weight.grad.data[0, 0] = np.inf

        trainer._backward = broken  # type: ignore[method-assign]
        trainer.buckets = None  # which would sum before it breaks
        before = trainer.parallel.state_dict() if trainer.parallel else {}
        reports = trainer.advance(list(trainer.task.training(1, 0))[:1])
        after = trainer.parallel.state_dict() if trainer.parallel else {}
        same = all((before[name] == after[name]).all() for name in before)
        return same, [report.skipped for report in reports]

    assert run_ranks(2, program) == [(True, [True])] * 2


def test_what_ranks_hold_alike_counts_once_in_the_norm() -> None:
    def program(ranks: LocalCommunicator) -> tuple[float, float]:
        part, alike = et.nn.Parameter([0.0]), et.nn.Parameter([0.0])
        part.grad, alike.grad = et.ExTensor([4.0 * (1 - ranks.rank)]), et.ExTensor([3.0])
        return clip_grad_norm([part], 1.0, ranks, [alike]), float(alike.grad.item())

    assert run_ranks(2, program) == [(5.0, pytest.approx(0.6))] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": "states"}, "--tensor-parallel 2: --shard states divides whole weights"),
        (
            {
                "update": "in_backward",
                "clip_norm": 0.0,
                "grad_comm": "float32",
                "loss_scale": "off",
                "micro_batches": 1,
            },
            "ranks add up gradients of norms",
        ),
        ({"weights": "bfloat16"}, "weights are split in float32"),
        ({"optimizer_states": "mxfp8_e4m3"}, "run along whole weights"),
        ({"grad_comm": "mxint8", "grad_rounding": "error_feedback"}, "what rounding left over"),
        ({"tensor_parallel": 3}, "expected a number of ranks that 3 divides, got 4"),
        ({"tensor_parallel": 4, "context": 62}, "expected a --context that 4 ranks divide, got 62"),
        ({"optimizer": "muon"}, "updates each value by itself, got Muon"),
        ({"recipe": "mxfp4_adaptive"}, "expected one recipe with fixed scale rules"),
        ({"recipe": "mxfp8,bf16@50%"}, "expected one recipe with fixed scale rules"),
        ({"recipe": "fp8_block"}, "attention.qkv: expected each rank's part"),
        ({"micro_batches": 1}, "expected at least one for each of the 2 ranks"),
    ],
)
def test_what_does_not_go_with_shared_blocks_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        config = dataclasses.replace(CONFIG, **changes)
        run_ranks(4, lambda ranks: Trainer(config, tmp_path, ranks=ranks))


def test_captured_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="--graph: ranks that share a block exchange tokens inside it"
    ):
        run_ranks(4, lambda ranks: Trainer(CONFIG, tmp_path, ranks=ranks, graph=True))
