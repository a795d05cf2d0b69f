"""Commands as a user calls them, through `main`: those that succeed, and those that do not."""

from __future__ import annotations

import pytest

from extensor import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Standard output of a command that succeeds."""
    assert cli.main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of standard error of a command that exits with 2."""
    assert cli.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err
