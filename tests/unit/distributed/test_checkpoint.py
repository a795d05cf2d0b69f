"""Checkpoints of several ranks: whole on any number of them, and after any death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.distributed import LocalCommunicator, load_sharded, run_ranks, save_sharded, share_of

RNG = np.random.default_rng(0)
TENSORS = {
    **{f"w{i}": et.ExTensor(RNG.standard_normal((8 + i, 64)).astype(np.float32)) for i in range(7)},
    "q": et.randn((4, 64), seed=1).to_mxfp4(),
    "n": et.randn((4, 64), seed=2).to_nvfp4(),
}


def save(size: int, folder: Path, step: int) -> None:
    def program(ranks: LocalCommunicator) -> None:
        save_sharded(folder, share_of(TENSORS, ranks), {"step": step}, ranks)

    run_ranks(size, program)


def test_written_on_any_number_of_ranks_and_read_by_load(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        save(size, tmp_path, step=size)
        assert len(list(tmp_path.glob("save-*"))) == size  # the older save's files are gone
        for loaded in (load_sharded(tmp_path).tensors, et.load(tmp_path)):
            assert loaded.keys() == TENSORS.keys()
            for name, tensor in TENSORS.items():
                got = loaded[name]
                ours = got if isinstance(got, et.ExTensor) else et.ExTensor(got)
                assert ours.dtype is tensor.dtype
                same = [x.dequantize() if x.is_blocked else x for x in (ours, tensor)]
                np.testing.assert_array_equal(same[0].numpy(), same[1].numpy())
        assert load_sharded(tmp_path).metadata == {"step": size}


def test_two_ranks_with_one_name_leave_the_old_checkpoint(tmp_path: Path) -> None:
    save(2, tmp_path, step=1)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected each tensor of one rank, got \\['w'\\] of two"):
        run_ranks(2, lambda ranks: save_sharded(tmp_path, {"w": et.ones(2)}, {}, ranks))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert load_sharded(tmp_path).metadata == {"step": 1}


SAVES = """
import sys
import extensor as et
from extensor.distributed import run_ranks, save_sharded, share_of
tensors = {f"w{i}": et.full((200, 100), float(i)) for i in range(8)}
for step in range(1, 100000):
    values = {name: tensor + step for name, tensor in tensors.items()}
    run_ranks(2, lambda ranks: save_sharded(
        sys.argv[1], share_of(values, ranks), {"step": step}, ranks))
"""


def test_a_kill_while_saving_leaves_the_last_complete_one(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    last = 0
    for attempt in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)])
        began, written = time.monotonic(), index.stat().st_mtime_ns if index.exists() else 0
        while not (index.exists() and index.stat().st_mtime_ns != written):
            assert process.poll() is None and time.monotonic() - began < 60
            time.sleep(0.01)
        time.sleep(0.017 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        checkpoint = load_sharded(tmp_path)
        step = checkpoint.metadata["step"]
        assert step > 0
        for i in range(8):  # all of one save
            assert (checkpoint.tensors[f"w{i}"] == i + step).all()
        last = max(last, step)
    assert last
