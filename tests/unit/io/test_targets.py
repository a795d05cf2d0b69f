"""Which weights a layout stores in blocks, what its config.json says, and a change of blocks."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib import format as npy

import extensor as et
from extensor.io.gguf.container import _kind
from extensor.io.npy import read_npy
from extensor.io.safetensors_format import CheckpointError
from extensor.io.stored import TARGETS, requantize, takes_blocks
from extensor.io.stored.archive import _block_of, indexed_shards, open_archive
from extensor.io.stored.quantization_config import quantization_config
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec

ROWS = [
    name
    for name, target in TARGETS.items()
    if target.spec is not None and (target.layout is None or target.layout.packing != "blocks")
]


@pytest.mark.parametrize("name", ROWS)
def test_matrices_of_whole_blocks_are_stored_in_blocks(name: str) -> None:
    """Of tiles of 128 x 128, channels and tensors any matrix; elsewhere rows of whole blocks."""
    target, linear = TARGETS[name], "model.layers.0.mlp.up_proj.weight"
    tile = (target.layout.spec if target.layout is not None else target.spec).tile  # type: ignore[union-attr]
    any_matrix = target.gguf is None and (tile in ("tensor", "channel") or tile == (128, 128))
    assert takes_blocks(target, linear, (100, 768))
    assert takes_blocks(target, linear, (100, 1000 + 1)) is any_matrix
    assert not takes_blocks(target, linear, (768,))
    assert not takes_blocks(target, linear, (2, 100, 768))
    for other in ("model.norm.weight", "model.layers.0.mlp.gate.weight", "score.weight"):
        assert not takes_blocks(target, other, (100, 768)) or target.gguf is not None
    assert takes_blocks(target, "model.embed_tokens.weight", (100, 768)) is (
        target.gguf is not None
    )


@pytest.mark.parametrize("name", [n for n, t in TARGETS.items() if t.layout is not None])
def test_the_config_names_the_program(name: str) -> None:
    layout = TARGETS[name].layout
    assert layout is not None
    said = quantization_config(layout, {"w": layout.spec.resolve(2)}, ["lm_head"])
    program = {"fp8": "fp8", "extensor": "extensor", "mxfp4": "mxfp4", "modelopt": "modelopt",
               "compressed-tensors": "compressed-tensors"}[layout.program]  # fmt: skip
    assert said["quant_method"] == program
    if program in ("fp8", "mxfp4"):
        assert said["modules_to_not_convert"] == ["lm_head"]
    if program == "fp8":
        assert said["weight_block_size"] == [128, 128] and said["fmt"] == "e4m3"
    if program == "extensor":
        assert said == {"quant_method": "extensor", "layout": layout.name}
    if program == "modelopt":
        nvfp4 = layout.spec.format == "nvfp4"
        assert ("group_size" in said) == nvfp4 and said.get("group_size", 16) == 16
        assert said["quant_algo"] == ("NVFP4" if nvfp4 else said["quant_algo"]) != ""


def test_fp8_in_blocks_is_written_in_tiles_of_128() -> None:
    for name in ("deepseek-fp8", "compressed-tensors-fp8-block"):
        layout = TARGETS[name].layout
        assert layout is not None and layout.spec.tile == (128, 128) == layout.tiles[0]


@pytest.mark.parametrize(
    ("quantization", "tile"),
    [
        ({}, (128, 128)), ({"weight_block_size": [64, 32]}, (64, 32)),
        ({"weight_block_size": [1, 128]}, (1, 128)), ({"weight_block_size": [0, 8]}, (128, 128)),
        ({"weight_block_size": [8, 8, 8]}, (128, 128)), ({"weight_block_size": 8}, (128, 128)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": [32, 1]}}}}, (32, 1)),
    ],
)  # fmt: skip
def test_the_tile_of_fp8_blocks_is_what_the_config_says(
    quantization: Any, tile: tuple[int, int]
) -> None:
    assert _block_of({"quantization_config": quantization}) == tile


def test_experts_are_stored_in_blocks_along_rows_of_whole_blocks() -> None:
    """gpt-oss's: (experts, in, out), blocks along the middle axis."""
    target, name = TARGETS["gpt-oss-mxfp4"], "model.layers.0.mlp.experts.gate_up_proj"
    assert takes_blocks(target, name, (4, 64, 40)) and takes_blocks(target, name, (4, 32, 33))
    assert not takes_blocks(target, name, (4, 40, 64))
    assert not takes_blocks(target, name, (64, 32)) and not takes_blocks(target, "w", (4, 64, 40))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spread", [1, 5, 30])
@pytest.mark.parametrize("levels", [1, 8])
def test_mxfp4_as_nvfp4_keeps_values_where_exponents_allow(
    axis: int, spread: int, levels: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-levels, levels + 1, (64, 64)) / 2 * 2.0 ** rng.integers(0, spread, (64, 64))
    x[:17, :17] = 0
    x[0], x[:, 1] = 0.5, 0.5
    x[20], x[:, 21] = 0, 0
    x[20, 40], x[40, 21] = 0.5, 0.5  # alone in its block, in the low half of a byte
    q = quantize(x.astype(np.float32), QuantSpec("mxfp4", axis=axis))[0]
    spec = QuantSpec("nvfp4", axis=axis).resolve(2)
    made = requantize(q, spec)
    assert made.spec == spec
    exact = np.array_equal(dequantize(made), dequantize(q))
    assert exact == (spread < 30)
    if not exact:
        again = quantize(dequantize(q), spec)[0]
        np.testing.assert_array_equal(made.codes, again.codes)
        np.testing.assert_array_equal(made.scales, again.scales)


@pytest.mark.parametrize(
    "source",
    [QuantSpec("mxfp4", transform=Hadamard(32)), QuantSpec("mxfp4", tile=(1, 64)),
     QuantSpec("mxfp8_e4m3"), QuantSpec("int4")],
)  # fmt: skip
def test_other_blocks_are_quantized_from_their_values(source: QuantSpec) -> None:
    q = et.randn(4, 128, seed=0).quantize(source).data
    spec = QuantSpec("nvfp4").resolve(2)
    made, again = requantize(q, spec), quantize(dequantize(q), spec)[0]
    np.testing.assert_array_equal(made.codes, again.codes)
    np.testing.assert_array_equal(made.scales, again.scales)
    assert requantize(made, spec) is made


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_version_of_npy(version: tuple[int, int], order: Any, tmp_path: Path) -> None:
    array, path = np.asarray(np.arange(12.0).reshape(3, 4), order=order), tmp_path / "a.npy"
    with path.open("wb") as file:
        npy.write_array(file, array, version)
    np.testing.assert_array_equal(read_npy(path), array)
    content = bytearray(path.read_bytes())
    for other in (0, 4):
        content[6] = other
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="version 1 to 3"):
            read_npy(path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, 4), (2**32 - 1, 4), (2**32, 10), (2**64 - 1, 10), (-1, 5), (-(2**31), 5),
        (-(2**31) - 1, 11), (-(2**63), 11), (1.0, 6), (True, 7), ("a", 8), (np.float32(1), 6),
        (np.int64(3), 4),
    ],
)  # fmt: skip
def test_the_smallest_kind_of_gguf_that_holds_a_value(value: Any, kind: int) -> None:
    assert _kind("k", value) == kind


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, None, {}])
def test_what_no_kind_of_gguf_holds(value: Any) -> None:
    with pytest.raises(TypeError, match="k: expected a number, a string or a list of them, got"):
        _kind("k", value)


def test_a_missing_shard_is_named_with_its_first_tensor(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shards = {"c": "2.safetensors", "a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "1.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"2\.safetensors: no such file, .* for 'b'"):
        indexed_shards(index)


def folder_of_links(folder: Path, blobs: Path, indexed: Path) -> Path:
    """A folder as the hub's cache makes it: its shard is a link into ``blobs``, its index too."""
    for place in (folder, blobs, indexed):
        place.mkdir(parents=True, exist_ok=True)
    (blobs / "1a").write_bytes(b"")
    (indexed / "2b").write_text(json.dumps({"weight_map": {"w": "1.safetensors"}}))
    (folder / "1.safetensors").symlink_to(blobs / "1a")
    index = folder / "model.safetensors.index.json"
    index.symlink_to(indexed / "2b")
    return index


def test_links_into_the_cache_of_the_hub_are_followed_and_others_refused(tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "blobs"
    index = folder_of_links(tmp_path / "hub" / "snapshots", blobs, blobs)
    assert indexed_shards(index)["w"] == [index.parent / "1.safetensors"]
    others = tmp_path / "other" / "blobs"
    for number, (one, two) in enumerate(
        ((tmp_path / "elsewhere", tmp_path / "elsewhere"), (blobs, others), (others, blobs))
    ):
        index = folder_of_links(tmp_path / f"m{number}", one, two)
        with pytest.raises(CheckpointError, match="a link out of the folder"):
            indexed_shards(index)


@pytest.mark.parametrize(("files", "found"), [([], "none"), (["b", "a"], "a.gguf, b.gguf")])
def test_a_folder_without_one_model_says_what_it_has(
    files: list[str], found: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=f"one .gguf file, found {found}$"):
        open_archive(tmp_path)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_fp8_without_scales_is_read_as_its_values(kind: str, tmp_path: Path) -> None:
    dtype = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[kind]
    values = np.array([[0.5, -2.0, 448.0, 0.0]]).astype(dtype)
    header = json.dumps({"w": {"dtype": kind, "shape": [1, 4], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + values.tobytes()
    (tmp_path / "m.safetensors").write_bytes(content)
    read = open_archive(tmp_path / "m.safetensors").read("w")
    assert isinstance(read, QuantArray) and read.scales.shape == (1, 1)
    np.testing.assert_array_equal(dequantize(read), values.astype(np.float32))
