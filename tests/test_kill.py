"""A sample of `ci/kill.py`: runs that are killed, or whose disk is full, end as if nothing was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.parametrize(("campaign", "every"), [("killed", 6), ("twice", 12), ("full", 9)])
def test_a_run_that_died_ends_as_if_it_had_not(campaign: str, every: int) -> None:
    command = [sys.executable, str(ROOT / "ci" / "kill.py"), "--only", campaign]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, "--every", str(every)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " 0 failures" in done.stdout
