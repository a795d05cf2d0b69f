"""ci/exhaustive.py on samples, at every level: all 16-bit floats, and float32s around them.

The run over all 2**32 float32 values takes minutes; its result stands in ci/bench/results.
"""

from __future__ import annotations

import numpy as np
import pytest

from ci import exhaustive
from extensor.backends.cpu import make_backend
from extensor.formats import ELEMENTS

CORE = make_backend().core
LEVELS = [*(CORE.levels() if CORE else []), "numpy"]


@pytest.mark.parametrize("level", LEVELS)
def test_samples_through_every_grid(level: str) -> None:
    assert exhaustive.run_reduced([level]) == []


def test_every_element_has_a_case() -> None:
    assert {case.element for case in exhaustive.CASES} == set(ELEMENTS)


def test_a_wrong_breakpoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = exhaustive.CASES[0]
    grid = exhaustive.grid_of(case.element, case.ties)
    starts = grid.starts.copy()
    starts[3] += 1  # 1.25 is a tie and goes to 1
    moved = exhaustive.Grid(grid.bits, starts, grid.codes, grid.values, grid.saturates)
    bits = np.arange(grid.starts[3] - 4096, grid.starts[3] + 4096, dtype=np.uint32)
    args = case, exhaustive.backend_of("numpy"), bits.view(np.float32), bits
    assert exhaustive.check(*args) is None
    monkeypatch.setattr(exhaustive, "grid_of", lambda element, ties: moved)
    assert "codes, values" in (exhaustive.check(*args) or "")
