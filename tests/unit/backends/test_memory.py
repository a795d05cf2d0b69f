"""Large results of the core lie in memory that is used again."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.quant.spec import QuantSpec
from tests.kernels.inputs import BACKEND, CORE, GENERIC, special


@pytest.mark.parametrize("rows", [1056, 70])  # codes of a little over 1 MiB and 64 KiB
def test_large_results_that_live_never_share_memory(rows: int) -> None:
    """Blocks of these sizes come back after an array has died, and not before."""
    spec = QuantSpec("mxfp8_e4m3").resolve(2)
    inputs = [special((rows, 1024), seed) for seed in range(3)]
    expected = [GENERIC.quantize(x, spec)[0].codes.tobytes() for x in inputs]
    alive = [BACKEND.quantize(x, spec)[0].codes for x in inputs]
    view = alive[0][1:, ::2]  # keeps the block alive by itself
    kept = view.tobytes()
    del alive[0]
    for _ in range(3):
        again = [BACKEND.quantize(x, spec)[0].codes for x in inputs]
        arrays = [view, *alive, *again]
        for i, a in enumerate(arrays):
            assert not any(np.may_share_memory(a, b) for b in arrays[i + 1 :])
        assert [a.tobytes() for a in (*alive, *again)] == expected[1:] + expected
    assert view.tobytes() == kept


def test_results_lent_to_the_system_are_whole_when_they_come_back() -> None:
    """Single blocks of more than 256 MiB, whose pages the system may have taken in between."""
    x = np.ones((1 << 26) + 5, np.float32)
    for _ in range(2):
        first, second = BACKEND.relu(x), BACKEND.relu(x)
        assert not np.may_share_memory(first, second)
        for result in (first, second):
            assert result.shape == x.shape
            assert (result[::1021] == 1).all()
            assert result[-1] == 1
        del first, second, result


def test_the_memory_that_is_kept_for_later_is_bounded() -> None:
    """Results of many sizes that all die leave no more than the bound behind."""
    import resource

    if CORE is None:
        return
    spec = QuantSpec("mxfp8_e4m3").resolve(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rows in range(1100, 3000, 100):
        BACKEND.dequantize(BACKEND.quantize(np.ones((rows, 8192), np.float32), spec)[0])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < (1 << 28) + 4 * 3000 * 8192 * 4  # kept, and a few arrays of one turn
