"""Runs whose ranks keep a part of the optimizer state and gradients: the bits of whole ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from extensor.io import load_checkpoint
from extensor.training.callbacks import Callback, SaveCheckpoint
from extensor.training.loop import Interrupted
from extensor.training.rundir import LAST
from tests.unit.training.test_ranks import image_run, on


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
    for size, shard in ((2, "states"), (4, "gradients")):
        sharded, out = dataclasses.replace(config, shard=shard), tmp_path / shard
        shared = on(size, sharded, out, callbacks=[SaveCheckpoint])
        assert shared[0] == alone[0]
        assert shared[1] == alone[1]
        assert shared[2].optimizer.nbytes < 0.6 * alone[2].optimizer.nbytes
        gathered = load_checkpoint(out / LAST).tensors
        assert gathered.keys() == whole.keys()
        assert all(gathered[name].tobytes() == whole[name].tobytes() for name in whole)


def test_a_sharded_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    config = image_run("mlp", micro_batches=4, grad_comm="exact", shard="gradients")
    straight = on(1, config, tmp_path / "1")
    with pytest.raises(Interrupted):
        on(2, config, tmp_path / "2", callbacks=[Stop, SaveCheckpoint])
    resumed = on(4, config, tmp_path / "2", resume=True)
    assert resumed[0] == straight[0] and resumed[1] == straight[1]
