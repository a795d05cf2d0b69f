"""The command line, through `main`, as a user would call it."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

import extensor
from extensor import cli
from extensor.cli import formats, printing
from extensor.cli.recipe import recipe_sheet
from extensor.cli.sheet import Sheet
from extensor.formats import DIALECTS, ELEMENTS, FORMATS
from extensor.io import save_checkpoint
from extensor.io.gguf import write_gguf
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.training import cli as training
from tests.unit.cli.commands import fails, run


def test_formats_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "formats")
    for name in (*ELEMENTS, *FORMATS):
        assert f" {name} " in text
    assert "microxcaling" not in text


def test_formats_shows_dialects_with_worked_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "formats", "--dialects")
    lines = {name: line for name in DIALECTS for line in text.splitlines() if f" {name} " in line}
    assert set(lines) == set(DIALECTS)
    # Scale bytes for amax 6, just above 6, and 3.5 on e2m1; what 2.5, 3.5, 5 round to.
    assert "127 127 126" in lines["torchao"] and "even: 2 4 4" in lines["torchao"]
    assert "127 128 127" in lines["nvidia"] and "0xFE" in lines["nvidia"]
    assert "127 127 127" in lines["compressed_tensors"] and "0x20" in lines["compressed_tensors"]
    assert "away: 3 4 6" in lines["microxcaling"]
    assert "zero: 2 3 4" in lines["model_optimizer"] and "0x38" in lines["model_optimizer"]
    gguf = [line for line in text.splitlines() if " gguf " in line and " | " in line]
    assert "0 16 | 1 17" in gguf[0] and "0 8 | 1 9" in gguf[1]


def test_element_sheet_agrees_with_the_published_table() -> None:
    rows = {row[0]: row[1:] for row in formats.element_sheet().rows}
    assert rows["e2m1"] == ("4", "1-2-1", "1", "6", "1", "0.5", "-")
    assert rows["e4m3"][3:5] == ("448", "0.015625")
    assert rows["e5m2"][3] == "57344"
    bits = {row[0]: row[4] for row in formats.format_sheet().rows}
    assert bits["mxfp4"] == "4.25" and bits["nvfp4"] == "4.5" and bits["mxfp6_e2m3"] == "6.25"


# ---- what goes wrong


def test_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such file" in fails(capsys, "inspect", tmp_path / "none.npz")
    assert "no such file" in fails(capsys, "inspect", tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY", b"\xff" * 64])
def test_broken_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert str(path) in fails(capsys, "inspect", path)


def test_pickled_arrays_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    assert "x.npy" in fails(capsys, "inspect", tmp_path / "x.npy")


def test_directory_and_unknown_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.pt").touch()
    assert "use an intact safetensors file" in fails(capsys, "inspect", tmp_path / "x.pt")
    folder = tmp_path / "x.npy"
    folder.mkdir()
    assert str(folder) in fails(capsys, "inspect", folder)


def test_names_match_by_their_case_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems' file names have no case; tensors' names do, also there."""
    source, out = tmp_path / "small.npz", tmp_path / "out.safetensors"
    np.savez(source, weight=np.ones((2, 32), np.float32))
    monkeypatch.setattr("os.path.normcase", str.lower)
    assert "'W*' fits none of: weight" in fails(
        capsys, "quantize", source, out, "--format", "mxfp4", "--match", "W*"
    )
    assert not out.exists()


def test_a_file_is_not_quantized_over_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file({"w": np.ones((2, 32), np.float32)}, source)
    before = source.read_bytes()
    there = tmp_path / "." / "in.safetensors"
    assert "would be lost" in fails(capsys, "quantize", source, there, "--format", "mxfp4")
    assert source.read_bytes() == before


def test_wrong_arguments_leave_no_file(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    common = ("quantize", weights, out, "--format")
    assert "did you mean 'mxfp4'" in fails(capsys, *common, "mxfp44")
    assert "'rceil'" in fails(capsys, *common, "mxfp4", "--scale-rule", "rcei")
    assert "axis" in fails(capsys, *common, "mxfp4", "--axis", "2")
    assert "'nothing'" in fails(capsys, *common, "mxfp4", "--match", "nothing")
    assert "seed" in fails(capsys, *common, "mxfp4", "--rounding", "stochastic", "--seed", "-1")
    assert not out.exists()
    expected = fails(capsys, "quantize", weights, tmp_path / "out.npz", "--format", "mxfp4")
    assert ".safetensors" in expected


@pytest.mark.parametrize(
    ("word", "meant"), [("quantise", "quantize"), ("Doctor", "doctor"), ("trian", "train")]
)
def test_an_unknown_command_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    assert f"no command named {word!r}; did you mean {meant!r}" in fails(capsys, word)


def test_names_in_another_case_get_a_suggestion(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.safetensors"
    said = fails(capsys, "quantize", weights, out, "--format", "MXFP4")
    assert "did you mean 'mxfp4'?" in said
    assert "did you mean 'lenet'?" in fails(capsys, "train", "LeNet")


def test_other_first_words_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean `extensor train lenet`?" in fails(capsys, "LeNet")
    assert "did you mean '--version'?" in fails(capsys, "--verison")
    assert run(capsys, "help") == run(capsys, "--help")
    assert run(capsys, "version") == run(capsys, "-V") == run(capsys, "--version")


def test_other_kinds_of_files_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    archive, text = tmp_path / "w.npz", tmp_path / "t.txt"
    np.savez(archive, w=np.ones(3))
    text.write_text("hello, newcomer")
    target = tmp_path / "out"
    said = fails(capsys, "convert", archive, target, "--layout", "modelopt-nvfp4")
    assert "expected a safetensors file, got a zip archive" in said
    assert "no language model; expected a folder with" in fails(capsys, "generate", text)
    pointer = tmp_path / "lfs.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1")
    assert "git lfs pull" in fails(capsys, "inspect", pointer)
    assert "no such file" in fails(capsys, "inspect", tmp_path / "nothing")
    assert "not a safetensors file" in fails(capsys, "convert", text, target, "--layout", "gguf")
    gguf = tmp_path / "w.gguf"
    gguf.write_text("hello")
    assert "not a GGUF file" in fails(capsys, "inspect", gguf)
    assert "add --text FILE" in fails(capsys, "advise", gguf)
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    assert "save_file(torch.load(" in fails(capsys, "inspect", folder)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left", "d/w"), 2, "d/w: the disk is full; the way out"),
        (OSError(errno.EROFS, "Read-only", "d"), 2, "d: the disk is read-only; the way out"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_what_stops_a_command_is_one_line(
    error: BaseException,
    code: int,
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop() -> None:
        raise error

    monkeypatch.setattr("extensor.cli.doctor.doctor", stop)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    assert cli.main(["doctor"]) == code
    assert said in capfd.readouterr().err


def test_tables_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(printing, "Console", lambda: narrow)
    names = ("tensor", "from", "bytes", "to", "bytes", "blocks")
    row = ("model.layers.0.mlp.down_proj.weight", "int4", "552960", "nvfp4", "497668", "all")
    printing.show([Sheet("t", names, (row,))])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    (first,) = (line for line in lines if "552960" in line)
    assert first.split()[1:] == ["int4", "552960", "nvfp4", "497668", "all"]


def test_unknown_flags_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["formats", "--dialect"], ["train", "lenet", "--epoch", "3"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--help")
    assert text == run(capsys)
    for name in (*cli.COMMANDS, *cli.TRAINING):
        assert f"\n  {name} " in text
    assert cli.TRAINING.keys() | {"generate"} == training.COMMANDS.keys()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == f"extensor {extensor.__version__}\n"


@pytest.mark.parametrize("words", [("train", "gpt"), ("compare", "gpt", "--seeds", "2")])
def test_a_dataset_without_a_name_lists_them(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    text = run(capsys, *words, "--dataset")
    assert "shakespeare" in text and "mnist" not in text


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("train", "lenet"), "tensorboardX"),
        (("compare", "lenet"), "matplotlib"),
        (("ptq", "a-run"), "matplotlib"),
        (("report", "a-run"), "jinja2"),
    ],
)
def test_a_missing_package_is_named_before_the_work(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    package: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    said = fails(capsys, *words)
    assert f"needs {package}, which is not installed" in said
    assert "pip install 'extensor[train]'" in said
    assert not list(tmp_path.iterdir())


def test_tune_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    timing = SimpleNamespace(path="scaled", size=512, ours=0.001, other=0.002, ratio=2.0)
    dense = SimpleNamespace(path="dense", size=512, ours=0.003, other=0.004, ratio=1.333)
    plain = SimpleNamespace(path="scaled", size=512, ours=0.001, other=0.00071, ratio=0.71)
    module = SimpleNamespace(
        SIZES=(512,),
        NEVER=9,
        tune=lambda plot, sizes, hadamard: (
            tmp_path / "table.json",
            [timing, dense],
            [timing][: bool(hadamard)],
        ),
        crossovers=lambda timings: (
            {"scaled": 77**3} if timings == [plain] else {"scaled": 512**3, "dense": 9}
        ),
        of_bf16=lambda timings: [plain],
        label=lambda path: f"{path} (recipe)",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "extensor_cuda.matmul.tuning", module)
    assert cli.main(["tune"]) == 0
    text = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    measured = ["scaled", "(recipe)", "512", "1.0000", "2.0000", "2.000x", "0.7100", "0.710x"]
    assert measured in rows
    assert ["dense", "(recipe)", "512", "3.0000", "4.0000", "1.333x"] in rows
    assert ["scaled", "(recipe)", "134,217,728", "456,533"] in rows
    assert ["dense", "(recipe)", "never"] in rows
    assert "Hadamard" not in text and str(tmp_path / "table.json") in text.replace("\n", "")
    assert cli.main(["tune", "--hadamard", "cost.svg"]) == 0
    assert "Hadamard" in capsys.readouterr().out
    assert cli.main(["tune", "--sizes", "8"]) == 2
    assert "sides of 16 or more" in capsys.readouterr().err
    for bad in ("cost.json", "nowhere/cost.svg"):
        for name in ("--plot", "--hadamard"):
            assert cli.main(["tune", name, bad]) == 2
            assert f"{name}: expected an .svg file in a folder that exists, got {bad}" in (
                capsys.readouterr().err
            )

    def fails(plot: object, sizes: object, hadamard: object) -> None:
        raise RuntimeError("no GPU here")

    module.tune = fails
    assert cli.main(["tune"]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_layers_stand_in_the_order_of_their_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_checkpoint(path, {f"layers.{n}.w": np.ones((2, 2), np.float32) for n in (10, 2, 1)})
    lines = run(capsys, "inspect", path).splitlines()
    assert [line.split()[1] for line in lines if "layers." in line] == [
        "layers.1.w",
        "layers.2.w",
        "layers.10.w",
    ]


def test_texts_of_a_gguf_file_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "m.gguf").open("wb") as file:
        write_gguf(file, {"few": ["en", "de"], "many": list("abcde")}, {}, [])
    text = run(capsys, "inspect", tmp_path / "m.gguf")
    assert "['en', 'de']" in text and "5 values: a, b, c, d ..." in text


def test_a_recipe_is_a_name_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    missing = fails(capsys, "train", "mlp", "--recipe", "my.toml")
    assert "recipe my.toml: cannot be read: No such file" in missing
    assert "a file that ends in .toml" in fails(capsys, "train", "mlp", "--recipe", "a/my.json")


def test_a_recipe_is_printed_as_a_file_and_beside_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(run(capsys, "recipe", "quartet"))
    assert replace(get_recipe(str(mine)), name="quartet") == get_recipe("quartet")
    both = run(capsys, "recipe", "mxfp4_tseng", mine)
    rows = [[cell.strip() for cell in line.split("│")] for line in both.splitlines()]
    operands = {row[1]: row[2:-1] for row in rows if len(row) > 3}
    assert operands["fprop.x"] == ["bfloat16", "mxfp4 1x32 quest Hadamard-32 none"]
    assert operands["clip_gradient"] == ["false", "true"]
    assert "Recipes" in run(capsys, "recipe") and "mxfp4_tseng" in run(capsys, "recipe")
    assert "did you mean 'mxfp4'" in fails(capsys, "recipe", "mxpf4")


def test_recipes_that_differ_never_look_alike() -> None:
    recipes = list(RECIPES.values())
    sheet = recipe_sheet(recipes)
    columns = [tuple(row[place + 1] for row in sheet.rows) for place in range(len(recipes))]
    assert len(set(columns)) == len({replace(each, name="", doc="") for each in recipes})
