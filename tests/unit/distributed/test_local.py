"""Ranks that are threads: every collective against numpy's own answer."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest

from extensor.distributed import (
    CollectiveMismatch,
    CollectiveTimeout,
    LocalCommunicator,
    run_ranks,
    shared_memory,
)
from tests.unit.distributed import contract


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", contract.DTYPES)
def test_collectives(size: int, dtype: str) -> None:
    run_ranks(size, lambda ranks: contract.check_collectives(ranks, dtype))


def test_objects() -> None:
    run_ranks(3, contract.check_objects)


@pytest.mark.parametrize(("free", "missing"), [(1 << 30, ""), (5_000_000, "5 MB free, expected 9")])
def test_room_for_shared_memory(
    free: int, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers have little of it."""
    monkeypatch.setattr(shared_memory, "FOLDER", str(tmp_path))
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: usage)
    assert missing in shared_memory._gap(8_000_000)
    assert bool(shared_memory._gap(8_000_000)) == bool(missing)


def test_shared_rows() -> None:
    run_ranks(3, contract.check_shared_rows)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_rows_and_columns_of_ranks(size: int) -> None:
    run_ranks(size, contract.check_split)


def test_a_missing_rank_is_named() -> None:
    def program(ranks: LocalCommunicator) -> None:
        ranks.timeout = 0.1
        if ranks.rank != 1:
            ranks.barrier()

    with pytest.raises(CollectiveTimeout, match="for rank 1, which did not call it") as caught:
        run_ranks(3, program)
    assert caught.value.missing == [1]


def test_different_collectives_are_refused() -> None:
    def program(ranks: LocalCommunicator) -> None:
        ranks.all_reduce(np.zeros(3 + ranks.rank)).wait()

    with pytest.raises(CollectiveMismatch, match="rank 1: all_reduce sum of 4 float64"):
        run_ranks(2, program)


@pytest.mark.parametrize(
    ("method", "send", "recv", "message"),
    [
        ("all_gather", np.zeros(2), np.zeros(2), "2 times fewer values"),
        ("reduce_scatter", np.zeros(2), np.zeros(2), "2 times as many values"),
        ("all_to_all", np.zeros(3), np.zeros(3), "a multiple of 2"),
        ("all_gather", np.zeros(2), np.zeros(4, "f4"), "one dtype"),
        ("all_to_all", np.zeros((4, 4)).T[:, :2], np.zeros((4, 2)), "C-contiguous"),
    ],
)
def test_buffers_that_do_not_fit(
    method: str, send: np.ndarray, recv: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(LocalCommunicator(0, 2), method)(send, recv)
