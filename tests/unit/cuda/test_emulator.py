"""The emulator's folder of compiled programs, which processes share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.unit.cuda.emulator import COMPILER, KEPT_DAYS, Emulator


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_file_that_another_process_renames_meanwhile_is_passed_over(tmp_path: Path) -> None:
    # A link to nothing is listed and has no times, as a file that was renamed since.
    (tmp_path / "1-unfinished.so").symlink_to(tmp_path / "gone")
    old = tmp_path / "old.so"
    old.write_bytes(b"")
    long_ago = time.time() - (KEPT_DAYS + 1) * 86400
    os.utime(old, (long_ago, long_ago))
    (tmp_path / "new.so").write_bytes(b"")
    Emulator(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1-unfinished.so", "new.so"}
