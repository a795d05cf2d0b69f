"""`ci/check.py`: which steps run, and what is said before each."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ci import check

ROOT = Path(check.__file__).parent.parent


@pytest.mark.parametrize(
    "argv", [["--quick"], ["--quick", "--", "-x"], ["--only", "lint"]], ids=str
)
def test_steps_are_chosen_and_counted(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, check.Step]] = []

    def run(step: check.Step, console: Any, progress: str) -> check.Outcome:
        ran.append((progress, step))
        return check.Outcome(step, 0.0, 0, "")

    monkeypatch.setattr(check, "run", run)
    assert check.main(argv) == 0
    progress = [text for text, _ in ran]
    assert progress == [f"{i} of {len(ran)}, after 0:00" for i in range(1, len(ran) + 1)]
    groups = {step.group for _, step in ran}
    assert groups == (set(check.QUICK) if "--quick" in argv else {"lint"})
    if "--quick" in argv:
        (tests,) = [step for _, step in ran if step.group == "tests"]
        assert set(check.QUICK_TESTS) <= set(tests.command)
        assert ("-x" in tests.command) == ("-x" in argv)
        assert all((ROOT / name).exists() for name in check.QUICK_TESTS)


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
