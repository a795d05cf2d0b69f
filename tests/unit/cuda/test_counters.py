"""What is counted on the device reaches a layer's telemetry, also if another program captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from extensor.ops.quantized import layer_context
from extensor.quant.array import QuantStats
from extensor.quant.recipes import get_recipe
from extensor_cuda.matmul.fallback_count import FallbackCounter, SharedCounter
from extensor_cuda.runtime.counters import CAPTURED, Counters, OperandCounts, Reserve
from tests.unit.cuda import fake


class Another:
    """A capture of another program, whose replays the test makes."""

    def __init__(self, reserve: Reserve) -> None:
        self.reserve, self.replays = reserve, 0
        self.made: list[Any] = []

    def counters(self, number: int) -> tuple[Any, int, int] | None:
        taken = self.reserve.take(number)
        if taken is None:
            return None
        self.made.append(taken)
        return taken, len(self.made) - 1, 0

    def read_counters(self, chunk: int) -> np.ndarray:
        return np.asarray(self.made[chunk].get())


@pytest.fixture
def another() -> Iterator[Another]:
    reserve = Reserve(fake.FakeCupy())
    reserve.refill(1 << 12)
    CAPTURED.capture = made = Another(reserve)
    yield made
    CAPTURED.capture = None


def test_fallbacks_reach_the_telemetry_of_their_layer() -> None:
    whole = FallbackCounter(Reserve(fake.FakeCupy()))
    context = layer_context(get_recipe("mxfp4").layers)
    held = context.fallbacks("fprop")
    share = SharedCounter(whole, held)
    share.array[...] += np.uint32(2)
    whole.array[...] += np.uint32(1)
    assert dict(context.state.telemetry) == {("layer", "fprop.x"): QuantStats(fallbacks=2)}
    SharedCounter(whole, held).array[...] += np.uint32(1)
    assert context.state.telemetry["layer", "fprop.x"] == QuantStats(fallbacks=3)
    assert whole.count == 4
    context.state.reset_telemetry()
    assert dict(context.state.telemetry) == {}


def test_replays_of_another_programs_graph_are_counted(another: Another) -> None:
    """Nothing is allocated or cleared in the capture: a replay would clear it again."""
    before = another.reserve._left[0]
    fake.TAPE.begin()
    counters = Counters(4, another.reserve.xp)
    first = FallbackCounter(another.reserve).array
    assert fake.TAPE.end() == []
    assert all(np.shares_memory(array, before) for array in (counters.array, first))
    counts = OperandCounts(counters, (2, 4), 64)
    assert counts.replayed and counts() == QuantStats()
    another.replays = 3
    counters.array[2:] += np.uint64(5)
    assert counts() == QuantStats(192, 5, 5) and counts() == QuantStats()


def test_a_capture_without_a_reserve_counts_nothing(another: Another) -> None:
    another.reserve.take(another.reserve._left[0].size)
    assert not OperandCounts(Counters(4, another.reserve.xp), (0, 4), 64).replayed
