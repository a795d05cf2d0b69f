"""A sample of `ci/soak.py`: long training leaves the memory flat, and every result the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.soak import PAIRS, Soak

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, and reads /proc")
def test_memory_stays_flat_and_results_the_same() -> None:
    command = [sys.executable, str(ROOT / "ci" / "soak.py"), "--steps", "1500", "--every", "7"]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **one_thread}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " 0 failures" in done.stdout


def test_other_weights_are_noticed() -> None:
    soak = Soak(0, PAIRS[:2])
    soak.compare("first", soak.pairs, ["a", "b"])
    soak.compare("threads", soak.pairs, ["a", "c"])
    assert soak.failures == [f"threads: {' '.join(PAIRS[1])}: other weights"]
