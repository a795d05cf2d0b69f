"""`extensor quantize` and `inspect`: files of tensors, packed and listed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from extensor.cli.files import _bars
from extensor.formats import FORMATS
from extensor.io import load_checkpoint
from extensor.quant import QuantArray
from tests.unit.cli.commands import fails, run


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
    shapes = {"bias": (32,), "linear": (4, 32), "conv": (2, 2, 4, 8), "optimizer.state.a": (1, 32)}
    np.savez(source, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    text = run(capsys, "quantize", source, out, "--format", "mxfp8_e4m3")
    stored = load_checkpoint(out).tensors
    assert [name for name in stored if isinstance(stored[name], QuantArray)] == ["linear"]
    (total,) = [line for line in text.splitlines() if "│ total " in line]
    # 32 + 128 + 128 + 32 values of 4 bytes; 128 codes and 4 scales in place of 512 bytes.
    assert "4 tensors" in total and "1 quantized" in total
    assert " 1280 " in total and f" {1280 - 512 + 132}, 70.3%" in total
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
