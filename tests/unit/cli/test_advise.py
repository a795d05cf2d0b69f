"""``extensor advise FILE``: what is measured, which format follows, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import cli
from extensor.cli.advise import DEFAULT_FORMATS, Measured, advise, candidates
from extensor.inspect.health import MANY_FLUSHED, MANY_SATURATED
from extensor.io import load_checkpoint, save_checkpoint
from extensor.io.stored import convert

pytestmark = pytest.mark.host


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["advise", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["advise", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((64, 256)).astype(np.float32)
    spikes = np.where(rng.random((64, 256)) < 1 / 16, 100.0, 0.1).astype(np.float32)
    broken = normal.copy()
    broken[0, 0] = np.nan
    return {
        "blocks.0.weight": normal,
        "blocks.1.weight": spikes,
        "blocks.1.bias": rng.standard_normal(64).astype(np.float32),
        "blocks.2.weight": broken,
        "blocks.3.weight": np.zeros((4, 32), np.float32),
        "conv.weight": rng.standard_normal((8, 4, 3, 3)).astype(ml_dtypes.bfloat16),
        "model.embed_tokens.weight": rng.standard_normal((100, 64)).astype(np.float16),
        "lm_head.weight": normal,
        "multihead.weight": normal,
        "steps": np.arange(6).reshape(2, 3),
        "packed": et.from_numpy(normal).to_mxfp4().data,
        "optimizer.state.w.momentum": normal,
        "residual.w": normal,
    }


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, tensors())
    return path


def advised(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    content["by name"] = {row["name"]: row for row in content["tensors"]}
    return content


def test_each_kind_gets_its_advice(capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    rows = advised(capsys, weights)["by name"]
    found = {name: (row["kind"], row["advice"]) for name, row in rows.items()}
    assert found == {
        "blocks.0.weight": ("weight", "nvfp4 four_over_six"),
        "blocks.1.weight": ("weight", "mxfp8_e4m3 rceil"),
        "blocks.1.bias": ("vector", "bfloat16"),
        "blocks.2.weight": ("weight", "repair it"),
        "blocks.3.weight": ("weight", "bfloat16"),
        "conv.weight": ("convolution", "nvfp4 four_over_six"),
        "model.embed_tokens.weight": ("embedding", "bfloat16"),
        "lm_head.weight": ("output head", "bfloat16"),
        "multihead.weight": ("weight", "nvfp4 four_over_six"),
        "steps": ("not floats", "as it is"),
        "packed": ("quantized", "as it is"),
        "optimizer.state.w.momentum": ("resume state", "left out"),
        "residual.w": ("resume state", "left out"),
    }
    assert "NaN" in rows["blocks.2.weight"]["reason"]
    assert "no signal" in rows["blocks.3.weight"]["reason"]
    assert rows["lm_head.weight"]["measured"] and not rows["blocks.1.bias"]["measured"]


def test_weights_in_another_programs_blocks_are_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weight = et.randn(32, 64, seed=0).numpy()
    save_checkpoint(tmp_path / "w.safetensors", {"model.layers.0.q_proj.weight": weight})
    convert(tmp_path / "w.safetensors", tmp_path / "nv", "compressed-tensors-nvfp4")
    rows = advised(capsys, tmp_path / "nv")["by name"]
    assert {name: row["kind"] for name, row in rows.items()} == {
        "model.layers.0.q_proj.weight": "quantized"
    }
    assert "in blocks already, and left so: 1 of 1" in run(capsys, tmp_path / "nv")


def test_a_checkpoint_partly_in_blocks_is_told_which_figure_is_too_high(
    capsys: pytest.CaptureFixture[str], weights: Path
) -> None:
    assert "try --min-sqnr lower" in run(capsys, weights, "--min-sqnr", "200")


def test_figures_are_those_of_the_library(
    capsys: pytest.CaptureFixture[str], weights: Path
) -> None:
    content = advised(capsys, weights)
    x = et.from_numpy(tensors()["blocks.0.weight"])
    by_format = {one["format"]: one for one in content["by name"]["blocks.0.weight"]["measured"]}
    for candidate in candidates(DEFAULT_FORMATS):
        q = x.quantize(candidate.spec)
        one = by_format[candidate.name]
        assert one["nbytes"] == q.nbytes
        assert one["sqnr_db"] == pytest.approx(et.inspect.sqnr(x, q))
        assert content["normal_sqnr_db"][candidate.name] == pytest.approx(candidate.normal)
    conv = content["by name"]["conv.weight"]
    matrix = et.from_numpy(tensors()["conv.weight"].astype(np.float32).reshape(8, -1))
    for one, candidate in zip(conv["measured"], candidates(DEFAULT_FORMATS), strict=True):
        assert one["nbytes"] == matrix.quantize(candidate.spec).nbytes
        assert one["sqnr_db"] == pytest.approx(et.inspect.sqnr(matrix, candidate.spec))
    rms = math.sqrt(float((x.numpy().astype(np.float64) ** 2).mean()))
    peak = content["by name"]["blocks.0.weight"]["peak_over_rms"]
    assert peak == pytest.approx(float(np.abs(x.numpy()).max()) / rms)
    weights_alone = {
        k: v for k, v in tensors().items() if k.partition(".")[0] not in ("optimizer", "residual")
    }
    before = sum(value.nbytes for value in weights_alone.values())
    assert content["totals"]["bytes"] == before
    assert content["totals"]["advised_bytes"] == sum(
        row["advised_bytes"] for row in content["tensors"]
    )


def test_small_values_beside_large_ones_decide_by_flushing() -> None:
    """The ratio of a block with one huge value is high: it does not see what became zero."""
    limits = {"saturated": 0.0, "flushed": 0.0}
    assert Measured("f", 1, 25.0, **limits).problem(20.0) is None
    assert Measured("f", 1, 19.9, **limits).problem(20.0) == "19.9 dB"
    flushing = Measured("f", 1, 60.0, 0.0, MANY_FLUSHED + 0.01)
    assert flushing.problem(20.0) == "flushes 26%"
    assert Measured("f", 1, 60.0, MANY_SATURATED + 0.01, 0.0).problem(20.0) == "saturates 3%"


def test_spikes_flush_in_four_bits(capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    row = advised(capsys, weights)["by name"]["blocks.1.weight"]
    by_format = {one["format"]: one for one in row["measured"]}
    assert by_format["mxfp4 rceil"]["flushed"] > MANY_FLUSHED
    assert "mxfp4 rceil: " in row["reason"] and "flushes" in row["reason"]


@pytest.mark.parametrize(("least", "advice"), [(15, "mxfp4 rceil"), (30, "mxfp6_e2m3 rceil"),
                                               (40, "int8"), (60, "bfloat16")])  # fmt: skip
def test_the_budget_decides(
    capsys: pytest.CaptureFixture[str], weights: Path, least: float, advice: str
) -> None:
    rows = advised(capsys, weights, "--min-sqnr", least)["by name"]
    assert rows["blocks.0.weight"]["advice"] == advice


def test_the_table_and_the_next_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "two words.safetensors"
    save_checkpoint(path, {"w": tensors()["blocks.0.weight"], "b": np.ones(3, np.float32)})
    text = run(capsys, path)
    assert "│ w " in text and "(1 tensor)" in text and "(normal data)" in text
    (command,) = re.findall(r"next: (extensor quantize .*)", text)
    assert cli.main(shlex.split(command)[1:]) == 0
    (made,) = [p for p in tmp_path.iterdir() if p != path]
    stored = load_checkpoint(made).tensors["w"]
    assert (stored.spec.format, stored.spec.rule) == ("nvfp4", "four_over_six")
    assert "scheme one of nvfp4_4over6" in text and "--recipe nvfp4_4over6" in text
    assert "no weight keeps 90 dB" in run(capsys, path, "--min-sqnr", 90)


def test_a_file_without_a_finite_matrix_gets_no_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, w=np.full((32, 32), np.nan, np.float32), n=np.arange(3))
    text = run(capsys, path)
    assert "4,120 bytes become 4,120" in text and "NaN or Inf in 1 of 2: repair them" in text
    assert "no finite matrix of floats to measure" in text
    assert "All weights in one format" not in text and "no weight keeps" not in text


def test_shards_are_one_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_checkpoint(tmp_path / f"{name}.safetensors", {name: np.eye(32, dtype=np.float32)})
    assert set(advised(capsys, tmp_path)["by name"]) == {"a", "b"}


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 32), np.float32))
    text = run(capsys, tmp_path / "x.npy", "--json")
    content = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert content["tensors"][0]["measured"][0]["sqnr_db"] is None  # exact


def test_what_the_help_states_is_measured() -> None:
    text = " ".join((advise.__doc__ or "").split())
    for candidate in candidates(DEFAULT_FORMATS):
        assert re.search(rf"{candidate.normal:.1f} (dB )?in {candidate.name}\b", text)
    assert f"at most {MANY_SATURATED:.0%} of the values" in text
    assert f"at most {MANY_FLUSHED:.0%} of them" in text


def test_what_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "makes a run, and prints where" in fails(capsys, tmp_path / "none.safetensors")
    assert "found neither" in fails(capsys, tmp_path)
    (tmp_path / "x.bin").write_bytes(b"")
    assert "expected 8 bytes and a header" in fails(capsys, tmp_path / "x.bin")
    np.savez(tmp_path / "empty.npz")
    assert "expected tensors, found none" in fails(capsys, tmp_path / "empty.npz")
    np.save(tmp_path / "x.npy", np.ones((4, 32), np.float32))
    for flags, message in (
        (["--formats", "mxfp5"], "did you mean"),
        (["--formats", "mxfp4:best"], "scale rule of mxfp4"),
        (["--formats", "mxfp4,mxfp4"], "each format once"),
        (["--formats", ""], "each format once"),
        (["--min-sqnr", "nan"], "expected a number of decibels"),
    ):
        assert message in fails(capsys, tmp_path / "x.npy", *flags)
