"""The command line, through `main`, as a user would call it."""

from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

import extensor
from extensor import cli, config
from extensor.backends import registry
from extensor.cli import sheet
from extensor.cli.files import _bars
from extensor.formats import DIALECTS, ELEMENTS, FORMATS
from extensor.io import load_checkpoint
from extensor.quant import QuantArray
from extensor.training import cli as training


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


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "weights.npz"
    np.savez(
        path,
        w=rng.standard_normal((8, 100), dtype=np.float32),
        double=rng.standard_normal((4, 32)),
        steps=np.arange(3),
        scale=np.float32(3.0),
    )
    return path


# ---- formats


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
    rows = {row[0]: row[1:] for row in cli.element_sheet().rows}
    assert rows["e2m1"] == ("4", "1-2-1", "1", "6", "1", "0.5", "-")
    assert rows["e4m3"][3:5] == ("448", "0.015625")
    assert rows["e5m2"][3] == "57344"
    bits = {row[0]: row[4] for row in cli.format_sheet().rows}
    assert bits["mxfp4"] == "4.25" and bits["nvfp4"] == "4.5" and bits["mxfp6_e2m3"] == "6.25"


# ---- quantize


def test_quantize_writes_what_the_library_reads(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    text = run(capsys, "quantize", weights, out, "--format", "mxfp4", "--scale-rule", "rceil")
    stored = load_checkpoint(out).tensors
    assert isinstance(stored["w"], QuantArray)
    assert stored["w"].spec.format == "mxfp4" and stored["w"].spec.rule == "rceil"
    assert stored["w"].codes.shape == (8, 64) and stored["w"].scales.shape == (8, 4)
    assert isinstance(stored["double"], QuantArray)
    np.testing.assert_array_equal(stored["steps"], np.arange(3))
    assert stored["scale"] == 3.0
    (line,) = [line for line in text.splitlines() if "│ w " in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:6] == ["w", "8x100", "float32", "3200", "mxfp4", "544"]
    assert 17 < float(cells[6]) < 20
    assert cells[7] == "0.00%"
    assert [line for line in text.splitlines() if "│ steps " in line and "copied" in line]


def test_quantize_reports_saturation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((1, 32), 7.0, dtype=np.float32))
    text = run(
        capsys, "quantize", tmp_path / "x.npy", tmp_path / "o.safetensors", "--format", "mxfp4"
    )
    assert "100.00%" in text and "16.90" in text  # 7 stored as 6: 20 log10(7)


def test_quantize_selects_by_name_and_axis(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    options = ("--format", "nvfp4", "--axis", 0, "--block-size", 8, "--match", "w*")
    run(capsys, "quantize", weights, out, *options)
    stored = load_checkpoint(out).tensors
    assert stored["w"].spec.axis == 0 and stored["w"].spec.tile == (1, 8)
    assert stored["w"].tensor_scale is not None
    assert stored["double"].dtype == np.float64


def test_stochastic_quantize_repeats_with_its_seed(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    codes = []
    for seed in (1, 1, 2):
        out = tmp_path / "out.safetensors"
        options = ("--format", "mxfp4", "--rounding", "stochastic", "--seed", seed)
        run(capsys, "quantize", weights, out, *options)
        codes.append(load_checkpoint(out).tensors["w"].codes)
    np.testing.assert_array_equal(codes[0], codes[1])
    assert (codes[0] != codes[2]).any()


def test_quantizing_again_copies_blocked_tensors(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    run(capsys, "quantize", weights, first, "--format", "mxfp4")
    run(capsys, "quantize", first, second, "--format", "int8")
    assert load_checkpoint(second).tensors["w"].spec.format == "mxfp4"


def test_quantize_reads_foreign_safetensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file({"layer.weight": np.ones((2, 32), np.float16)}, source)
    text = run(capsys, "quantize", source, tmp_path / "o.safetensors", "--format", "mxfp8_e4m3")
    assert "exact" in text and "float16" in text


def test_two_dimensions_are_quantized_by_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.npz", tmp_path / "o.safetensors"
    shapes = {"bias": (32,), "linear": (4, 32), "conv": (2, 2, 4, 8)}
    np.savez(source, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    text = run(capsys, "quantize", source, out, "--format", "mxfp8_e4m3")
    stored = load_checkpoint(out).tensors
    assert [name for name in stored if isinstance(stored[name], QuantArray)] == ["linear"]
    (total,) = [line for line in text.splitlines() if "│ total " in line]
    # 32 + 128 + 128 values of 4 bytes; 128 codes and 4 scales in place of 512 bytes.
    assert "3 tensors" in total and "1 quantized" in total
    assert " 1152 " in total and f" {1152 - 512 + 132}, 67.0%" in total
    run(capsys, "quantize", source, out, "--format", "mxfp8_e4m3", "--match", "*")
    assert all(isinstance(value, QuantArray) for value in load_checkpoint(out).tensors.values())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in two shards with their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    weight_map = {}
    for shard, names in (("a.safetensors", ("x", "bias")), ("b.safetensors", ("y",))):
        tensors = {
            name: rng.standard_normal((32,) if name == "bias" else (4, 64)).astype(np.float32)
            for name in names
        }
        safetensors.numpy.save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json"])
def test_shards_are_quantized_one_by_one(
    capsys: pytest.CaptureFixture[str], sharded: Path, tmp_path: Path, given: str
) -> None:
    (sharded / "stray.safetensors").write_bytes(b"not of the index")
    out = tmp_path / "small"
    text = run(capsys, "quantize", sharded / given, out, "--format", "mxfp4")
    names = ["a.safetensors", "b.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    index = json.loads((out / names[2]).read_text())
    assert index["weight_map"] == {
        "x.codes": names[0], "x.scales": names[0], "bias": names[0],
        "y.codes": names[1], "y.scales": names[1],
    }  # fmt: skip
    assert index["metadata"]["total_size"] == 2 * (128 + 8) + 128
    assert f" {2 * 1024 + 128} " in text and "2 quantized" in text
    y = load_checkpoint(out / "b.safetensors").tensors["y"]
    assert isinstance(y, QuantArray) and y.shape == (4, 64)
    assert "│ y " in run(capsys, "inspect", out)


@pytest.mark.parametrize("existing", [True, False])
def test_a_run_that_breaks_keeps_the_output_of_before(
    capsys: pytest.CaptureFixture[str], sharded: Path, tmp_path: Path, existing: bool
) -> None:
    out = tmp_path / "small"
    if existing:
        run(capsys, "quantize", sharded, out, "--format", "mxfp4")
    before = {path.name: path.read_bytes() for path in out.glob("*")}
    (sharded / "b.safetensors").write_bytes(b"broken")  # read after a.safetensors was written
    assert "b.safetensors" in fails(capsys, "quantize", sharded, out, "--format", "int8")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert len(before) == 3 * existing


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_an_index_never_names_files_of_another_run(
    capsys: pytest.CaptureFixture[str],
    sharded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moves: int,
) -> None:
    """The disk fails after so many files are in their place."""
    out, left, replace = tmp_path / "small", [moves], Path.replace
    run(capsys, "quantize", sharded, out, "--format", "mxfp4")

    def fail(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(f"{target}: no space left")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    assert "no space left" in fails(capsys, "quantize", sharded, out, "--format", "int8")
    assert sorted(path.name for path in out.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_folder_without_an_index_is_all_its_files(
    capsys: pytest.CaptureFixture[str], sharded: Path, tmp_path: Path
) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    run(capsys, "quantize", sharded, tmp_path / "o", "--format", "int8", "--match", "y")
    assert isinstance(load_checkpoint(tmp_path / "o" / "a.safetensors").tensors["x"], np.ndarray)
    assert isinstance(load_checkpoint(tmp_path / "o" / "b.safetensors").tensors["y"], QuantArray)


def test_wrong_folders_are_refused(
    capsys: pytest.CaptureFixture[str], sharded: Path, tmp_path: Path
) -> None:
    common, out = ("--format", "mxfp4"), tmp_path / "out"
    index = sharded / "model.safetensors.index.json"
    assert "would be lost" in fails(capsys, "quantize", sharded, sharded, *common)
    file = tmp_path / "o.safetensors"
    assert "expected a folder" in fails(capsys, "quantize", sharded, file, *common)
    assert "fits none of" in fails(capsys, "quantize", sharded, out, *common, "--match", "z")
    for text, said in (
        ("{}", "weight_map"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "own folder"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors: no such file"),
    ):
        index.write_text(text)
        assert said in fails(capsys, "quantize", sharded, out, *common)
    (tmp_path / "empty").mkdir()
    assert "found none" in fails(capsys, "inspect", tmp_path / "empty")
    assert not out.exists()


# ---- inspect


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_inspect_shows_every_format(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out.safetensors"
    run(capsys, "quantize", weights, out, "--format", name)
    text = run(capsys, "inspect", out)
    (line,) = [line for line in text.splitlines() if "│ w " in line]
    assert name in line and "2^" in line
    total = sum(tensor.nbytes for tensor in load_checkpoint(out).tensors.values())
    assert f" {total} │" in text


def test_inspect_counts_scales(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.zeros((5, 32), dtype=np.float32)
    x[1], x[2], x[3] = 4.0, 4.0, 32.0  # exponents 0, 0, 3
    x[4] = np.nan
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out.safetensors"
    run(capsys, "quantize", tmp_path / "x.npy", out, "--format", "mxfp4", "--scale-rule", "floor")
    text = run(capsys, "inspect", out)
    assert "2^3" in text and "1 NaN" in text


def test_histogram_bars() -> None:
    assert _bars(np.array([8, 0, 4, 1])) == "█·▅▂"
    assert len(_bars(np.arange(100))) <= 32


# ---- doctor


def test_doctor_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "doctor")
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) <= 10
    for said in (extensor.__version__, np.__version__, "C++ core", "device cuda", "extra train"):
        assert said in text
    assert "--all" in text and "quantized_conv2d" not in text


def test_doctor_names_packages_that_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "missing: jinja2; pip install 'extensor[train]'" in run(capsys, "doctor")


def test_doctor_shows_everything_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "doctor", "--all")
    assert np.__version__ in text
    for flag in config.FLAGS.values():
        assert flag.name in text
    for device in registry.BACKENDS:
        assert f" {device} " in text
    methods = [
        name
        for name, _ in inspect.getmembers(registry.Backend, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert methods
    for method in methods:
        assert f" {method} " in text


def doctor(before: str = "", **environment: str) -> str:
    """What `extensor doctor` says in a process of its own, after some statements."""
    code = f"{before}\nfrom extensor.cli import main; raise SystemExit(main(['doctor']))"
    command = [sys.executable, "-c", code]
    env = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "300", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [("0", "EXTENSOR_CORE=0"), ("yes", "EXTENSOR_CORE: expected 0 or 1, got 'yes'")],
)
def test_doctor_says_why_the_core_is_not_used(value: str, said: str) -> None:
    assert said in doctor(EXTENSOR_CORE=value)


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({}, "no c++, g++ or clang++ is on the PATH: install a C++20 compiler"),
        ({"CXX": "missing++"}, "CXX=missing++ is not there"),
        ({"CXX": sys.executable}, f"{sys.executable} is here: install again"),
    ],
)
def test_doctor_says_what_a_core_would_need(environment: dict[str, str], path: str) -> None:
    text = doctor("import sys; sys.modules['extensor._core._kernels'] = None", **environment)
    assert "not used: the C++ core is not built" in text and path in text


def test_doctor_does_not_import_other_devices() -> None:
    code = (
        "import json, sys; from extensor.cli import main; main(['doctor']); "
        "print(json.dumps(['cupy' in sys.modules, 'extensor_cuda.backend' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False]


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

    monkeypatch.setitem(cli.COMMANDS, "doctor", stop)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    assert cli.main(["doctor"]) == code
    assert said in capfd.readouterr().err


def test_tables_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(sheet, "Console", lambda: narrow)
    names = ("tensor", "from", "bytes", "to", "bytes", "blocks")
    row = ("model.layers.0.mlp.down_proj.weight", "int4", "552960", "nvfp4", "497668", "all")
    sheet.show([sheet.Sheet("t", names, (row,))])
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
