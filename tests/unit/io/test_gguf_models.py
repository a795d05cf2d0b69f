"""GGUF files of Llama's relatives: stacked experts, Llama 3.1's rotary factors, gpt-oss's rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.io import CheckpointError, open_archive
from extensor.io.gguf.container import GgufFile
from extensor.io.stored import as_hugging_face, convert, gguf_metadata
from extensor.io.stored.gguf_config import llama3_scaling, rope_factors
from extensor.models.llama.configs import ExpertsConfig, LlamaConfig
from extensor.nn import Rope, RopeScaling
from extensor.quant import QuantArray
from extensor.quant.reference import dequantize
from extensor.schema import SchemaError

F = np.float32
PLAIN = LlamaConfig(
    vocab=96, context=64, layers=2, width=64, heads=4, kv_heads=2, head_size=16, hidden=96,
    eps=1e-5, rope=Rope(16, 1e6),
)  # fmt: skip
GPT_OSS = ExpertsConfig(
    count=4, active=2, hidden=64, bias=True, alpha=1.702, limit=7.0, router="router"
)
CONFIGS = {
    "llama": dataclasses.replace(
        PLAIN, rope=Rope(16, 500000.0, scaling=RopeScaling("llama3", 8.0, 8192))
    ),
    "mixtral": dataclasses.replace(
        PLAIN,
        experts=ExpertsConfig(4, 2, 96, block="block_sparse_moe", parts=("w1", "w3", "w2")),
    ),
    "qwen3_moe": dataclasses.replace(PLAIN, qk_norm=True, experts=ExpertsConfig(4, 2, 32)),
    "gpt_oss": dataclasses.replace(
        PLAIN,
        hidden=64,
        rope=Rope(16, 150000.0, scaling=RopeScaling("yarn", 32.0, 4096, whole=False)),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        windows=(16, None),
        experts=GPT_OSS,
    ),
}


def built(kind: str) -> Any:
    rng = np.random.default_rng(0)
    model = et.models.build("llama", CONFIGS[kind], rng)
    for parameter in model.parameters():
        parameter.data[...] = (rng.standard_normal(parameter.shape) * 0.2).astype(F)
    return model


def logits(model: Any) -> np.ndarray:
    tokens = np.random.default_rng(1).integers(0, 96, (2, 24))
    return np.asarray(model(et.ExTensor(tokens)).numpy())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_comes_back_from_a_file_value_for_value(tmp_path: Path, kind: str) -> None:
    model, path = built(kind), tmp_path / "m.gguf"
    done = model.save_pretrained(path, layout="gguf-f32", model_type=kind, only_lossless=True)
    back = et.models.from_pretrained(path)
    assert back.config == model.config
    assert np.array_equal(logits(back), logits(model))
    assert len({c.name for c in done.certificates}) == len(done.certificates)


@pytest.mark.parametrize("layout", ["gguf-mxfp4", "gguf-q8_0", "gguf-nvfp4"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_go_to_a_folder_and_back_unchanged(tmp_path: Path, kind: str, layout: str) -> None:
    """Through Hugging Face's names: experts cut apart, gpt-oss's rows joined, and all undone."""
    path = tmp_path / "m.gguf"
    if (kind, layout) == ("gpt_oss", "gguf-nvfp4"):
        with pytest.raises(ValueError, match="each expert a tensor scale"):
            built(kind).save_pretrained(path, layout=layout, model_type=kind)
        return
    built(kind).save_pretrained(path, layout=layout, model_type=kind)
    model = et.models.from_pretrained(path)
    held = [tensor.is_blocked for tensor in model.buffers()]
    assert sum(held) > 12
    convert(path, tmp_path / "hf", "extensor", only_lossless=True)
    assert np.array_equal(logits(et.models.from_pretrained(tmp_path / "hf")), logits(model))
    convert(tmp_path / "hf", tmp_path / "back.gguf", "gguf", only_lossless=True)
    one, two = GgufFile(path), GgufFile(tmp_path / "back.gguf")
    assert sorted(one.tensors) == sorted(two.tensors)
    for name in one.tensors:
        a, b = one.read(name), two.read(name)
        if isinstance(a, QuantArray):
            assert isinstance(b, QuantArray), name
            assert np.array_equal(dequantize(a), dequantize(b)), name
        else:
            assert np.array_equal(a, b), name


def test_an_expert_is_the_slice_of_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    built("qwen3_moe").save_pretrained(path, layout="gguf-mxfp4", model_type="qwen3_moe")
    archive, file = as_hugging_face(open_archive(path)), GgufFile(path)
    stack = dequantize(file.read("blk.1.ffn_up_exps.weight"))  # type: ignore[arg-type]
    assert stack.shape == (4, 32, 64)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert archive.infos[name].shape == (32, 64)
        assert archive.infos[name].nbytes == file.tensors["blk.1.ffn_up_exps.weight"].nbytes // 4
        assert np.array_equal(dequantize(archive.read(name)), stack[expert])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factor", "low", "high", "context"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 2.0, 8.0, 4096), (2.5, 1.5, 6.0, 8192)],
)
def test_rotary_factors_say_their_rule(
    factor: float, low: float, high: float, context: int
) -> None:
    """The original context scales both bounds; angles, which are what counts, are the same."""
    given = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    factors = rope_factors(128, 500000.0, given)
    found = llama3_scaling(factors, 128, 500000.0)
    assert np.allclose(rope_factors(128, 500000.0, found), factors, rtol=1e-6)
    assert found["factor"] == factor
    assert found["high_freq_factor"] == pytest.approx(high * 8192 / context, rel=1e-3)


def test_other_factors_are_refused() -> None:
    factors = rope_factors(128, 500000.0, {})
    factors[40] *= 1.01
    with pytest.raises(SchemaError, match="Llama 3.1's rule"):
        llama3_scaling(factors, 128, 500000.0)
    with pytest.raises(SchemaError, match="expected 64 numbers above 0"):
        llama3_scaling(factors[:32], 128, 500000.0)


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    from extensor.models.architectures import architecture_of

    values = architecture_of({"model_type": kind}).config_to_hf(CONFIGS[kind])
    return values | changes


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob of False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("mixtral", {"sliding_window": 16}, "sliding window"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "every second layer"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit of 5.0"),
    ],
)
def test_what_gguf_cannot_say_is_refused(kind: str, changes: dict[str, Any], word: str) -> None:
    gguf_metadata(config_of(kind))
    with pytest.raises(ValueError, match=word):
        gguf_metadata(config_of(kind, **changes))


def test_a_router_without_its_key_is_not_taken_for_normalized() -> None:
    config = config_of("qwen3_moe")
    del config["norm_topk_prob"]  # transformers' default is false, llama.cpp always normalizes
    with pytest.raises(ValueError, match="norm_topk_prob of False"):
        gguf_metadata(config)


def test_a_missing_expert_is_told(tmp_path: Path) -> None:
    model = built("mixtral")
    model.save_pretrained(tmp_path / "hf", layout="float32", model_type="mixtral")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 4', '"num_local_experts": 5'))
    with pytest.raises(ValueError, match="expected 5 experts, got 4"):
        convert(tmp_path / "hf", tmp_path / "m.gguf", "gguf-f32")
    assert not (tmp_path / "m.gguf").exists()


def test_gate_without_up_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    built("gpt_oss").save_pretrained(path, layout="gguf-f32", model_type="gpt_oss")
    content = path.read_bytes().replace(b"blk.0.ffn_up_exps.weight", b"blk.9.ffn_up_exps.weight")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"gate_up_proj lacks blk.0.ffn_up_exps.weight"):
        as_hugging_face(open_archive(path))
