"""Runs whose ranks keep a part of the optimizer state and gradients: the bits of whole ones."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.distributed import (
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    load_residuals,
    load_sharded,
    residuals,
    run_ranks,
)
from extensor.io import load_checkpoint
from extensor.optim import MXGradScaler
from extensor.training.callbacks import Callback, SaveCheckpoint
from extensor.training.cli import main
from extensor.training.loop import Interrupted, Trainer, open_run
from extensor.training.rundir import BEST, LAST, RESULT, SHARDED
from tests.unit.training.conftest import Make, weights
from tests.unit.training.test_ranks import image_run, on

FEEDBACK = {"grad_comm": "mxint8", "grad_rounding": "error_feedback"}


class Stop(Callback):
    """Interrupts the run after its second step."""

    def on_step(self, run: Any, report: Any) -> None:
        if report.step == 2:
            run.interrupt()
            run.ranks.timeout = 60.0


def test_shards_change_no_bit(tmp_path: Path) -> None:
    """With clipping; checkpoints hold the whole state, and any number of ranks goes on from one."""
    config = image_run(
        "lenet", recipe="mxfp4", micro_batches=4, clip_norm=0.1, optimizer="adamw", lr=1e-3,
        grad_comm="exact", epochs=2,
    )  # fmt: skip
    alone = on(1, config, tmp_path / "1", callbacks=[SaveCheckpoint])
    whole = load_checkpoint(tmp_path / "1" / LAST).tensors
    for size, shard in ((2, "states"), (4, "gradients"), (2, "parameters"), (3, "parameters")):
        sharded, out = dataclasses.replace(config, shard=shard), tmp_path / f"{shard}{size}"
        shared = on(size, sharded, out, callbacks=[SaveCheckpoint])
        assert shared[0] == alone[0]
        assert shared[1] == alone[1]
        assert shared[2].optimizer.nbytes < 0.6 * alone[2].optimizer.nbytes
        files = sorted(path.name for path in (out / SHARDED[LAST]).glob("*.safetensors"))
        assert [name.rpartition("-of-")[2] for name in files] == [f"{size:05d}.safetensors"] * size
        gathered = load_sharded(out / SHARDED[LAST]).tensors
        assert gathered.keys() == whole.keys()
        assert all(gathered[name].tobytes() == whole[name].tobytes() for name in whole)


def test_weights_that_travel_packed_change_no_bit_and_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank counts its own rows of a weight, once a step."""
    asked: list[set[tuple[str, str]]] = []

    class Small(GatheredBuckets):
        """A bucket for each weight."""

        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, bucket_bytes=1, **how)

        @property
        def packed_slots(self) -> set[tuple[str, str]]:
            asked.append(super().packed_slots)
            return asked[-1]

    monkeypatch.setattr("extensor.training.step.GatheredBuckets", Small)
    config = image_run("mlp", recipe="mxfp4_all", micro_batches=4, grad_comm="exact")
    alone = on(1, config, tmp_path / "1")
    shared = on(2, dataclasses.replace(config, shard="parameters"), tmp_path / "2")
    assert asked and all(asked)
    assert shared[0] == alone[0] and shared[1] == alone[1]
    assert shared[2].quant.telemetry == alone[2].quant.telemetry


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_a_sharded_run_goes_on_with_another_number_of_ranks(tmp_path: Path, shard: str) -> None:
    config = image_run("mlp", micro_batches=4, grad_comm="exact", shard=shard)
    straight = on(1, config, tmp_path / "1")
    with pytest.raises(Interrupted):
        on(2, config, tmp_path / "2", callbacks=[Stop, SaveCheckpoint])
    resumed = on(4, config, tmp_path / "2", resume=True)
    assert resumed[0] == straight[0] and resumed[1] == straight[1]


def test_error_feedback_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """What rounding left over is in the checkpoint, under a loss scale that changes, too."""
    config = image_run(
        "mlp",
        micro_batches=4,
        grad_comm="mxint8",
        grad_rounding="error_feedback",
        epochs=2,
        val_share=0.2,
    )
    straight = on(2, config, tmp_path / "straight")
    out = tmp_path / "parts"
    with pytest.raises(Interrupted):
        on(2, config, out, callbacks=[Stop, SaveCheckpoint])
    kept = load_sharded(out / SHARDED[LAST]).tensors
    assert any(values.any() for name, values in kept.items() if name.startswith("residual.sent.1"))
    resumed = on(2, config, out, resume=True, callbacks=[SaveCheckpoint])
    assert resumed[0] == straight[0] and resumed[1] == straight[1]
    assert (out / SHARDED[BEST]).is_dir()
    assert et.load(out / SHARDED[LAST])["model.layers.0.weight"].shape
    other = on(2, config, out, resume=True)  # at the end: nothing is trained
    assert other[0] == straight[0]


def test_what_was_left_over_survives_another_number_of_ranks() -> None:
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((4, 3, 40)).astype(np.float32)
    params = {
        "a": et.nn.Parameter(np.zeros((3, 40), np.float32)),
        "b": et.nn.Parameter(np.zeros(3, np.float32)),
    }

    def made(ranks: LocalCommunicator) -> GradientBuckets:
        return GradientBuckets(list(params.values()), ranks, "mxint8", bucket_bytes=400)

    def first(ranks: LocalCommunicator) -> dict[str, np.ndarray]:
        buckets = made(ranks)
        for bucket in buckets.buckets:
            flat = np.zeros(bucket.size, np.float32)
            for param in bucket.params:
                values = grads[ranks.rank].reshape(-1)[: param.size]
                bucket.view(flat, param)[...] = values.reshape(param.shape)
            bucket.reduction.add(flat)
            bucket.reduction.all_reduce(np.empty(bucket.size, np.float32), 4.0).wait()
        return residuals(buckets, params)

    saved = {name: value for part in run_ranks(4, first) for name, value in part.items()}
    assert len(saved) == 10
    sent = sum(saved[f"sent.{rank}.a"].astype(np.float64) for rank in range(4))
    for size in (1, 2, 4, 8):

        def again(ranks: LocalCommunicator) -> dict[str, np.ndarray]:
            buckets = made(ranks)
            load_residuals(buckets, params, saved)
            return residuals(buckets, params)

        loaded = {name: v for part in run_ranks(size, again) for name, v in part.items()}
        total = sum(loaded[f"sent.{rank}.a"].astype(np.float64) for rank in range(size))
        np.testing.assert_allclose(total, sent, atol=1e-6 * np.abs(sent).max())
        for name in ("mean.a", "mean.b"):
            np.testing.assert_array_equal(loaded[name], saved[name])
        if size == 4:
            assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
    with pytest.raises(ValueError, match="fits no parameter"):
        load_residuals(made(LocalCommunicator()), params, saved | {"mean.c": saved["mean.b"]})
    del saved["mean.a"]
    with pytest.raises(ValueError, match="expected mean.a"):
        load_residuals(made(LocalCommunicator()), params, saved)


def test_what_was_left_over_follows_the_loss_scale(small: Make, tmp_path: Path) -> None:
    """A scale that doubles after each step changes no bit: codes stay, and what is kept doubles."""
    config = small(
        epochs=1,
        micro_batches=2,
        grad_comm="mxint8",
        grad_rounding="error_feedback",
        loss_scale="off",
    )

    def program(ranks: LocalCommunicator, growth: float) -> dict[str, bytes]:
        trainer = Trainer(config, tmp_path, ranks=ranks)
        trainer.scaler = MXGradScaler(
            trainer.quant, init_scale=1.0, growth_factor=growth, growth_interval=1
        )
        trainer.fit()
        return weights(trainer)

    plain = run_ranks(2, lambda ranks: program(ranks, 1.0))
    assert run_ranks(2, lambda ranks: program(ranks, 2.0)) == plain


def test_error_feedback_is_of_mxint_alone(small: Make) -> None:
    with pytest.raises(ValueError, match="error_feedback: expected --grad-comm mxint8"):
        small(grad_rounding="error_feedback")


def test_the_command_line_goes_on_from_a_folder(tmp_path: Path) -> None:
    """Flags of the command line, a folder as checkpoint, and what reads a run's checkpoint."""
    words = "mlp --train-limit 64 --test-limit 32 --epochs 1 --micro-batches 2 --shard gradients"
    flags = "--grad-comm mxint8 --grad-rounding error_feedback --val-share 0.5"
    command = [*words.split(), *flags.split(), "--out", str(tmp_path / "run")]
    assert main(command) == 0
    assert (tmp_path / "run" / SHARDED[BEST]).is_dir()
    assert not (tmp_path / "run" / LAST).exists()
    assert open_run(tmp_path / "run").position.epoch == 2
    (tmp_path / "run" / RESULT).unlink()
    assert main([*command, "--resume"]) == 0


def test_a_checkpoint_within_an_epoch(tmp_path: Path) -> None:
    """Written every two steps; a run that failed in the fifth goes on with the fifth."""
    config = image_run("mlp", micro_batches=2, grad_comm="exact", shard="states", epochs=2)
    straight = on(2, config, tmp_path / "straight")
    out = tmp_path / "parts"
    out.mkdir()

    class Fail(Callback):
        def on_step(self, run: Any, report: Any) -> None:
            if report.step == 5:
                raise RuntimeError("a planted error")

    def program(ranks: LocalCommunicator) -> None:
        Trainer(config, out, callbacks=[SaveCheckpoint(2), Fail()], ranks=ranks).fit()

    with pytest.raises(RuntimeError, match="a planted error"):
        run_ranks(2, program)
    assert load_sharded(out / SHARDED[LAST]).metadata["position"]["step"] == 4
    resumed = on(1, config, out, resume=True)
    assert resumed[0] == straight[0] and resumed[1] == straight[1]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["fails", "is lost"])
def test_whoever_is_left_saves_the_finished_steps(tmp_path: Path, victim: int, how: str) -> None:
    """A rank that fails saves by itself; where it is lost, those that waited for it do."""
    config = image_run("mlp", micro_batches=2, grad_comm="exact", epochs=2)
    straight = on(2, config, tmp_path / "straight")
    out = tmp_path / "parts"
    out.mkdir()

    def program(ranks: LocalCommunicator) -> None:
        ranks.timeout = 2.0
        trainer = Trainer(config, out, ranks=ranks)
        backward = trainer._backward

        def planted(part: Any) -> None:
            backward(part)
            if ranks.rank == victim and trainer.position.step == 2:
                raise RuntimeError("a planted error")

        trainer._backward = planted
        if (ranks.rank == victim) != (how == "fails"):
            trainer._save_alone = lambda: None
        trainer.fit()

    with pytest.raises(RuntimeError):
        run_ranks(2, program)
    until = time.monotonic() + 30
    while not (out / LAST).exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert load_checkpoint(out / LAST).metadata["position"]["step"] == 2
    resumed = on(1, config, out, resume=True)
    assert resumed[0] == straight[0] and resumed[1] == straight[1]
