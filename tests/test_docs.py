"""The documentation tells the truth: its examples run, its tables and figures are current."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNABLE = (
    "README.md",
    "docs/guide.md",
    "docs/how-to/look-at-a-run.md",
    "docs/how-to/quantize-a-model.md",
    "docs/index.md",
    "docs/recipes.md",
    "docs/tutorial-gpt.md",
    "docs/tutorial-lenet.md",
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = "# => "


def run_block(source: str, line: int, page: str, names: dict[str, Any]) -> int:
    """Run one block's statements in ``names``; compare what is shown; how many comparisons."""
    padded = "\n" * line + source  # so that an error names the page's own line
    lines = padded.splitlines()
    compared = 0
    for statement in ast.parse(padded, page).body:
        _, shown, wanted = lines[(statement.end_lineno or 1) - 1].partition(SHOWN)
        if not shown:
            exec(compile(ast.Module([statement], []), page, "exec"), names)
            continue
        assert isinstance(statement, ast.Expr), f"{page}:{statement.lineno}: not an expression"
        value = eval(compile(ast.Expression(statement.value), page, "eval"), names)
        assert repr(value) == wanted.strip(), f"{page}:{statement.lineno}"
        compared += 1
    return compared


@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "docs"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    compared = 0
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        compared += run_block(block.group(1), line, page, names)
    assert page != "docs/guide.md" or compared > 15


def test_a_wrong_example_is_noticed() -> None:
    with pytest.raises(AssertionError, match="page:3"):
        run_block("x = 1\nx + 1    # => 3\n", 1, "page", {})


def test_figures_and_tables_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "make_figures.py"
    spec = importlib.util.spec_from_file_location("make_figures", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, (
        "run python docs/make_figures.py: " + capsys.readouterr().out
    )


def test_readme_has_its_two_commands() -> None:
    """What `.ci/run` pastes: one line each, from a fresh clone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^<!-- ci:(\w+) -->\n```bash\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["train", "test"]
    for _, command in found:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert "\n" not in command
