"""Recipes from files in a run: kept in its settings, whatever becomes of the files."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from extensor.quant import QuantSpec
from extensor.training.callbacks import SaveCheckpoint
from extensor.training.cli import main, parse_train
from extensor.training.config import RunConfig
from extensor.training.loop import Interrupted, Trainer
from extensor.training.recipe_text import files_named, join, split
from extensor.training.rundir import LAST, UsageError
from extensor.training.toml import write_toml
from tests.unit.training.conftest import Make, weights
from tests.unit.training.test_loop import InterruptAt

MINE = """\
# a comment
parent = "mxfp4_all"
[layers]
x = { block_size = 16 }
"""
SMALL = ["mlp", "--epochs", "1", "--train-limit", "64", "--test-limit", "60"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with mine.toml."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    return tmp_path


def block(config: RunConfig, step: int = 0) -> object:
    spec = config.recipe_at(step, 100).layers.slot("fprop.x")
    assert isinstance(spec, QuantSpec)
    return spec.tile


def test_a_run_keeps_the_recipe_and_not_the_file(here: Path, small: Make) -> None:
    config = small(recipe="mine.toml")
    assert block(config) == (1, 16) and config.resolved_recipe.name == "mine"
    assert config.label == "mlp-digits-mine-s0"
    os.remove("mine.toml")
    text = write_toml(config.as_dict())
    assert "a comment" not in text and '\nname = "mine"\n' in text
    assert RunConfig(**tomllib.loads(text)) == config
    assert block(replace(config, seed=3)) == (1, 16)
    with pytest.raises(ValueError, match=r"recipe mine.toml: cannot be read"):
        small(recipe="mine.toml")


def test_comments_do_not_make_another_run(here: Path, small: Make) -> None:
    before = small(recipe="mine.toml")
    Path("mine.toml").write_text(MINE.replace("a comment", "another"))
    assert small(recipe="mine.toml") == before
    Path("mine.toml").write_text(MINE.replace("16", "64"))
    assert small(recipe="mine.toml").differences(before).keys() == {"recipe_text"}


def test_files_stand_in_schedules_and_operands(here: Path, small: Make) -> None:
    (here / "sub").mkdir()
    Path("sub/other.toml").write_text('parent = "mxfp4_all"\n[layers]\nx = { block_size = 64 }')
    config = small(recipe="bf16,mine.toml@50%,sub/other.toml@90%", operands="*/fprop.w=mine.toml")
    assert files_named(config.recipe, config.operands) == ["mine.toml", "sub/other.toml"]
    assert [block(config, step) for step in (50, 90)] == [(1, 16), (1, 64)]
    assert config.recipe_label == "bf16+mine@50pc+other@90pc"
    assert join(split(config.recipe_text)) == config.recipe_text
    assert list(split(replace(config, recipe="bf16").recipe_text)) == ["mine.toml"]
    assert replace(config, recipe="bf16", operands="").recipe_text == ""
    Path("sub/mine.toml").write_text('parent = "mxfp4_all"')
    schedule = replace(config, recipe="mine.toml,sub/mine.toml@50%", operands="")
    assert schedule.recipe_label == "mine+mine@50pc"


def test_another_text_is_no_recipe_text(small: Make) -> None:
    with pytest.raises(ValueError, match="expected files that begin with '# file: '"):
        small(recipe="mine.toml", recipe_text="name = 3")


def test_a_run_resumes_without_its_file_and_not_with_another(
    here: Path, small: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*SMALL, "--recipe", "mine.toml", "--out", "run"]
    assert main(run) == 0
    os.remove("mine.toml")
    assert main([*SMALL[:1], "--out", "run", "--resume"]) == 0
    _, config, _ = parse_train("mlp", ["--out", "run", "--resume"])
    assert block(config) == (1, 16)
    with pytest.raises(UsageError, match="mine.toml: cannot be read.*leave --recipe"):
        parse_train("mlp", ["--recipe", "mine.toml", "--out", "run", "--resume"])
    Path("mine.toml").write_text(MINE.replace("16", "64"))
    with pytest.raises(UsageError) as caught:
        parse_train("mlp", ["--recipe", "mine.toml", "--out", "run", "--resume"])
    message = str(caught.value)
    assert "tile = [1, 16]" in message and "tile = [1, 64]" in message
    assert "dgrad" not in message  # only what differs
    capsys.readouterr()
    assert main(run) == 2
    assert "tile = [1, 64]" in capsys.readouterr().err


def test_a_flag_reads_a_file_anew_beside_a_configuration(here: Path) -> None:
    assert main([*SMALL, "--recipe", "mine.toml", "--out", "run"]) == 0
    Path("mine.toml").write_text(MINE.replace("16", "64"))
    given = ["--config", "run/config.toml"]
    assert block(parse_train("mlp", given)[1]) == (1, 16)
    assert block(parse_train("mlp", [*given, "--recipe", "mine.toml"])[1]) == (1, 64)


@pytest.mark.parametrize("change", [None, "recipe", "operands"])
def test_a_checkpoint_goes_on_under_the_same_recipes_alone(
    here: Path, small: Make, change: str | None
) -> None:
    """A schedule may change what comes later; a file with other content is another recipe."""
    settings = {"recipe": "mine.toml", "operands": "*/fprop.w=mine.toml"}
    config = small(**settings)
    whole = Trainer(config, here / "a")
    whole.out.mkdir()
    whole.fit()
    out = here / "b"
    out.mkdir()
    with pytest.raises(Interrupted):
        Trainer(config, out, callbacks=[InterruptAt(4), SaveCheckpoint()]).fit()
    if change is None:
        resumed = Trainer(config, out)
        resumed.load(out / LAST)
        resumed.fit()
        assert weights(resumed) == weights(whole)
        later = Trainer(replace(config, recipe="mine.toml,bf16@90%"), out)
        later.load(out / LAST)
        return
    text = MINE.replace("x =", "w =" if change == "operands" else "x =").replace("16", "64")
    Path("mine.toml").write_text(text)
    other = Trainer(small(**settings), out)
    with pytest.raises(ValueError, match="differs in recipe_text"):
        other.load(out / LAST)


def test_a_comparison_takes_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--recipes", "mine.toml", "--seeds", "1", "--jobs", "1", "--out", "both"]
    assert main(["compare", *SMALL, *flags]) == 0
    assert "mine.toml" in capsys.readouterr().out
    assert (here / "both" / "runs" / "mine-s0" / "result.json").is_file()
    Path("mine.toml").write_text(MINE.replace("16", "64"))
    assert main(["compare", *SMALL, *flags]) == 2
    assert "tile = [1, 64]" in capsys.readouterr().err
    Path("sub").mkdir()
    Path("sub/mine.toml").write_text(MINE)
    assert main(["compare", *SMALL, "--recipes", "mine.toml,sub/mine.toml", "--out", "b"]) == 2
    assert "two files with the same name" in capsys.readouterr().err


def test_runs_side_by_side_show_the_lines_in_which_recipes_differ(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in (("one", "16"), ("two", "64")):
        Path("mine.toml").write_text(MINE.replace("16", size))
        assert main([*SMALL, "--recipe", "mine.toml", "--out", name]) == 0
    capsys.readouterr()
    assert main(["compare", "one", "two"]) == 0
    shown = capsys.readouterr().out
    assert "[1, 16]" in shown and "[1, 64]" in shown and "dgrad" not in shown
