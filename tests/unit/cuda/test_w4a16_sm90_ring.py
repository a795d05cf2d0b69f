"""Products of 3 to 16 tokens with many packed E2M1 weights on Hopper: emulated, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only import w4a16_sm90_ring
from extensor_cuda.kernels.weight_only.program import TOKENS_PER_ROW
from extensor_cuda.kernels.weight_only.w4a16_sm90_ring import Schedule
from extensor_cuda.matmul import partition
from tests.unit.cuda import weight_only_cases
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.weight_only_cases import WEIGHTS, activations, check, name, weights


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(partition, "MODEL_MULTIPROCESSORS", 3)  # as many blocks: weights are many
    partition.ring_schedule.cache_clear()
    request.addfinalizer(partition.ring_schedule.cache_clear)
    return weight_only_cases.placed(request, monkeypatch)


def divide(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    monkeypatch.setattr(partition, "ring_schedule", lambda *shape: schedule)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", WEIGHTS[:4], ids=name)
def test_no_kernel_of_a_ring_spills(spec: QuantSpec) -> None:
    """As many warps as there are at most, and as few as are usual."""
    for n, rows, dtype in (
        (28672, 1, "float32"),
        (28672, 5, "float32"),
        (8192, 5, "float32"),
        (8192, 3, "bfloat16"),
        (28672, 16, "bfloat16"),
    ):
        q, tokens = weights(spec, (16, 8192)), rows * TOKENS_PER_ROW[dtype]
        schedule = partition.ring_schedule(n, 8192, tokens, tile_extent(q.spec, q.shape)[1])
        shape, dtypes = (n, 8192), (dtype, dtype)
        source, _ = w4a16_sm90_ring.source(q.spec, shape, tokens, dtypes, schedule)
        check_compiles(source, "sm_90a")


@pytest.mark.parametrize("spec", WEIGHTS[:5], ids=name)
def test_a_ring(xp: Any, spec: QuantSpec) -> None:
    """Ends of chunks, tiles and tokens; all kinds of copies scales."""
    for m, n, k, dtype in (
        (3, 200, 1024, "bfloat16"),
        (5, 101, 2560, "float32"),
        (16, 120, 5632, "bfloat16"),
        (1, 97, 640, "float32"),
        (9, 350, 2176, "bfloat16"),
    ):
        w = weights(spec, (n, k))
        if not w4a16_sm90_ring.supports(w, m * TOKENS_PER_ROW[dtype]):
            assert k // tile_extent(w.spec, w.shape)[1] % 4
            continue
        check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)


def test_which_weights() -> None:
    """Such that a block has more than a pair of tiles, and more tokens than load in no time."""
    fewest = 2 * partition.MODEL_MULTIPROCESSORS * 16 + 1
    for n in (fewest - 1, fewest):
        w = weights(QuantSpec("mxfp4"), (n, 128))
        pays = partition.ring_is_faster(n)
        taken = [n for n in range(1, 20) if pays and w4a16_sm90_ring.supports(w, n)]
        assert taken == (list(range(3, 17)) if n == fewest else [])
    for spec, columns in ((QuantSpec("nvfp4"), 160), (weight_only_cases.INT4, 128)):
        assert not w4a16_sm90_ring.supports(weights(spec, (fewest, columns)), 3)


def test_more_tiles_than_warps_have_at_a_time(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last time there are fewer; x comes again from its beginning."""
    w = weights(QuantSpec("mxfp4"), (1031, 896))
    for pairs, split in ((4, 3), (3, 2), (1, 1)):
        divide(monkeypatch, Schedule(slices=1, groups=3, pairs=pairs, split=split))
        check(activations((10, 896), "bfloat16"), w, "bfloat16", xp)


def test_every_cut_of_a_ring(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, the same bits each time, counters left at zero."""
    x, w = activations((3, 1664), "bfloat16"), weights(QuantSpec("mxfp4"), (150, 1664))
    schedules = [one for _, one in partition.ring_schedules(150, 1664, 3, 32)]
    assert {schedule.slices for schedule in schedules} == {1, 2, 3} and {1, 2, 3, 4, 7} <= {
        schedule.split for schedule in schedules
    }
    assert any(schedule.split == 2 and schedule.pairs == 1 for schedule in schedules)
    schedules += [
        Schedule(1, 1, 5, 2),
        Schedule(2, 1, 5, 2),
        Schedule(1, 1, 3, 2),
    ]  # splits of an odd number of pairs
    for schedule in schedules:
        divide(monkeypatch, schedule)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.mark.parametrize("tokens", [3, 16])
@pytest.mark.parametrize("block", [16, 128])
def test_cuts_suit_the_kernel(tokens: int, block: int) -> None:
    """All tiles have warps, and none waits for x that has no place yet."""
    for n, columns in ((2113, 128), (28672, 8192), (8192, 28672), (8192, 8192), (129280, 7168)):
        schedules = partition.ring_schedules(n, columns, tokens, block)
        assert schedules
        for _, schedule in schedules:
            warps = schedule.pairs * schedule.split
            stages, shared = w4a16_sm90_ring.memory(warps, tokens, block)
            assert (
                schedule.slices * schedule.groups <= 132
                and warps <= 14
                and schedule.split <= stages
            )
            assert shared <= 226 * 1024 and schedule.slices * schedule.split <= -(-columns // 256)


@pytest.mark.parametrize(
    ("shape", "pairs", "split"),
    [
        ((28672, 8192), 7, 2),
        ((28672, 4096), 7, 2),
        ((8192, 8192), 2, 4),
        ((14336, 4096), 4, 2),
        ((10240, 8192), 3, 4),
    ],
)
def test_cuts_that_were_measured(shape: tuple[int, int], pairs: int, split: int) -> None:
    """The fastest on an H200, or within two hundredths of it."""
    for tokens in (4, 16):
        assert partition.ring_schedule(*shape, tokens, 32) == Schedule(1, 132, pairs, split)
