"""A sample of `ci/fuzz_files.py`: every reader refuses broken files by its own error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.fuzz_files import Fuzzer, corpus
from ci.fuzz_formats import FORMATS, Format

ROOT = Path(__file__).resolve().parent.parent
SECONDS = os.environ.get("FUZZ_SECONDS", "5")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for each format")
def test_readers_end_as_they_may() -> None:
    command = [sys.executable, str(ROOT / "ci" / "fuzz_files.py"), "--seconds", SECONDS]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--jobs", "1"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " 0 failures" in done.stdout


def test_the_fuzzer_notices(tmp_path: Path) -> None:
    """A reader that raises another error, and one whose error does not name the file."""

    def other(path: Path) -> None:
        raise KeyError("w")

    def unnamed(path: Path) -> None:
        raise ValueError("bad")

    def obeyed(path: Path) -> None:
        raise ValueError(f"{path}: \x1b[2J")

    for read, wrong in ((other, "KeyError"), (unnamed, "not name"), (obeyed, "control")):
        form = Format("f", "f", lambda: [b"1"], lambda c, d: c, read, (ValueError,))
        how, where = Fuzzer(form, tmp_path / "fuzzed").end(b"1")
        assert how == "FAILED" and wrong in where


def test_a_case_is_its_number(tmp_path: Path) -> None:
    fuzzers = [Fuzzer(FORMATS["npy"], tmp_path / name) for name in ("a", "b")]
    cases = [[fuzzer.input(case) for case in range(50)] for fuzzer in fuzzers]
    assert cases[0] == cases[1] and len(set(cases[0])) > 40
    assert sum(map(len, (c for name in FORMATS for c in corpus(name)))) < 400_000
