"""Configurations that claim more than their file holds: refused before memory is taken for it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import extensor as et
from extensor import models, nn
from extensor.io import CheckpointError
from tests.unit.models.test_pretrained import CONFIG, gguf_of, tensors, weights_of

SPACE = 4 << 20
"""Bytes that a refusal may take; the files hold half a megabyte."""
HUGE = 1 << 40
KINDS: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "mixtral": {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **CONFIG, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "gpt_oss": {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gpt2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "bert": {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 16, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
}  # fmt: skip
EXPERTS = (10_000, 1_000_000, HUGE)
CLAIMS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
         "num_key_value_heads", "num_hidden_layers"), (10_000, 1 << 30, HUGE),
    ),
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": (1 << 30, HUGE)},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "gpt2": dict.fromkeys(("vocab_size", "n_embd", "n_positions", "n_inner"), (1 << 30, HUGE)),
    "bert": dict.fromkeys(
        ("vocab_size", "max_position_embeddings", "type_vocab_size"), (1 << 30, HUGE)
    ),
}  # fmt: skip


def folder(path: Path, kind: str) -> dict[str, Any]:
    """A good folder of random weights; its config.json's contents."""
    values = {**KINDS[kind], "model_type": kind}
    et.save(weights_of(values), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(values))
    return values


def peak_of_refusal(path: Path) -> int:
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        models.from_pretrained(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_folder_is_refused_before_memory_is_taken(tmp_path: Path, kind: str) -> None:
    values = folder(tmp_path, kind)
    models.from_pretrained(tmp_path)
    for key, claims in CLAIMS[kind].items():
        for claim in claims:
            (tmp_path / "config.json").write_text(json.dumps({**values, key: claim}))
            assert peak_of_refusal(tmp_path) < SPACE, (key, claim)


@pytest.mark.parametrize(
    "key",
    ["block_count", "embedding_length", "attention.head_count", "attention.key_length",
     "rope.dimension_count", "expert_count", "vocab_size"],
)  # fmt: skip
def test_a_gguf_file_is_refused_before_memory_is_taken(tmp_path: Path, key: str) -> None:
    path = gguf_of(tmp_path / "m.gguf", tensors(), **{f"llama.{key}": 1 << 31})
    assert peak_of_refusal(path) < SPACE


def test_a_long_context_takes_memory_as_it_is_used(tmp_path: Path) -> None:
    """A context is a promise: nothing in a file backs it, so nothing is made for it."""
    values = folder(tmp_path, "llama")
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": HUGE}
    for changes in ({}, {"rope_scaling": scaling}):
        changed = {**values, "max_position_embeddings": HUGE, **changes}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        tracemalloc.start()
        model = models.from_pretrained(tmp_path)
        et.generate(model, [[1, 2, 3]], 2, cache=nn.new_cache(model))
        assert tracemalloc.get_traced_memory()[1] < SPACE
        tracemalloc.stop()


SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_no_text_goes_beyond_what_rotary_positions_allow(tmp_path: Path, kind: str) -> None:
    """Neither at once nor token by token into a cache, captured calls included."""
    values = folder(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps({**values, "rope_scaling": SCALINGS[kind]}))
    model = models.from_pretrained(tmp_path)
    context = model.config.context
    for cache in (None, nn.new_cache(model)):
        start = [list(range(1, context - 3))]
        assert et.generate(model, start, 4, cache=cache).shape == (1, context)
        again = None if cache is None else nn.new_cache(model)
        if kind == "dynamic":
            assert et.generate(model, start, 8, cache=again).shape == (1, context + 4)
            continue
        with pytest.raises(ValueError, match=f"below the context of {context}, got {context}"):
            et.generate(model, start, 8, cache=again)
