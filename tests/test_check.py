"""`ci/check.py`: which steps run, and what is said before each."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path
from typing import TextIO

import pytest

from ci import check

ROOT = Path(check.__file__).parent.parent


@pytest.mark.parametrize(
    "argv", [["--quick"], ["--quick", "--", "-x"], ["--only", "lint"]], ids=str
)
def test_steps_are_chosen_and_counted(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[check.Step] = []

    def run(step: check.Step, out: TextIO) -> check.Outcome:
        ran.append(step)
        return check.Outcome(step, 0.0, 0, "")

    monkeypatch.setattr(check, "run", run)
    assert check.main(argv) == 0
    progress = re.findall(r"(\d+ of \d+), after 0:00: \w", capsys.readouterr().out)
    assert progress == [f"{i} of {len(ran)}" for i in range(1, len(ran) + 1)]
    groups = {step.group for step in ran}
    assert groups == (set(check.QUICK) if "--quick" in argv else {"lint"})
    if "--quick" in argv:
        (tests,) = [step for step in ran if step.group == "tests"]
        assert set(check.QUICK_TESTS) <= set(tests.command)
        assert ("-x" in tests.command) == ("-x" in argv)
        assert all((ROOT / name).exists() for name in check.QUICK_TESTS)


def test_a_step_beside_the_others_is_told_of_after_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And they wait for each other here, so that they do run at once."""
    meet = threading.Barrier(2, timeout=20)

    def run(step: check.Step, out: TextIO) -> check.Outcome:
        meet.wait()
        out.write(f"said by {step.name}\n")
        return check.Outcome(step, 0.0, int(step.beside), "")

    listed = [check.Step("a", "docs", (), beside=True), check.Step("b", "docs", ())]
    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "steps", lambda arguments: listed)
    assert check.main(["--only", "docs"]) == 1
    said = capfd.readouterr().out
    assert said.index("said by b") < said.index("2 of 2") < said.index("said by a")


def test_quick_is_not_some_of_it() -> None:
    with pytest.raises(SystemExit):
        check.main(["--quick", "--only", "lint"])


def test_kernels_that_are_not_compiled_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    step = check.kernels_step()
    done = subprocess.run(step.command, capture_output=True, text=True, check=False)
    assert done.returncode == check.NOT_RUN and "pip install -e '.[nvrtc]'" in done.stdout
    monkeypatch.setattr(check, "find_spec", lambda name: object())
    assert check.kernels_step().command[-3:] == ("-m", "nvrtc", "tests/unit/cuda")
    assert check.kernels_step().group == "kernels" and "kernels" in check.ON_REQUEST
