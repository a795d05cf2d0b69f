"""Architectures against transformers on the CPU: scores, and gradients of all parameters.

Weights are random, drawn by transformers; its files are read by their names. Both compute in
float32. Bound, of each tensor: |ours - theirs| <= 2e-4 of its largest magnitude, plus 1e-6. Both
add terms of these sizes in other orders, over a few layers; a wrong formula is off by a tenth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.models.architectures import ARCHITECTURES, architecture_of

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama tied": {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "llama linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    },
    "llama dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        "max_position_embeddings": 8,
    },
    "llama llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 50.0,
        },
        "head_dim": 16,
    },
    "llama yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "rope_theta": 100.0,
        },
        "head_dim": 16,
    },
    "mistral": {"sliding_window": 4},
    "mistral head": {"sliding_window": None, "head_dim": 24},
    "qwen2": {},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3 window": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
        "attention_bias": True,
        "head_dim": 8,
    },
}


def theirs(case: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Transformers' model of a case, its norms and biases moved off ones and zeros."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = case.partition(" ")[0]
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **CASES[case]})
    torch.manual_seed(len(case))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.15 + (1.0 if p.ndim == 1 and (p == 1).all() else 0.0))
    return model, written(model, tmp_path / "weights")


def written(model: Any, folder: Path) -> dict[str, Any]:
    """The tensors that transformers writes of a model, by their names in the file."""
    safetensors = pytest.importorskip("safetensors.numpy")
    model.save_pretrained(folder)
    return dict(safetensors.load_file(folder / "model.safetensors"))


def ours(row: Any, config: Any, tensors: dict[str, Any]) -> nn.Module:
    """Our model with the tensors of a file."""
    model: nn.Module = row.build(config, np.random.default_rng(0))
    state = {
        path: np.ascontiguousarray(s.read(tensors[s.name]))
        for path, s in row.sources(config).items()
    }
    model.load_state_dict(state)
    return model


def assert_close(name: str, got: Any, expected: Any) -> None:
    bound = 2e-4 * np.abs(expected).max() + 1e-6
    error = np.abs(got - expected).max()
    assert error <= bound, f"{name}: off by {error:.3g}, bound {bound:.3g}"


def batch_of(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Three sequences of 12, 7 and 3 tokens with padding on a side, and the mask."""
    rng = np.random.default_rng(5)
    tokens, mask = rng.integers(1, 61, (3, 12)), np.ones((3, 12), np.int64)
    for row, count in ((1, 5), (2, 9)):
        hidden = slice(0, count) if side == "left" else slice(12 - count, 12)
        mask[row, hidden] = 0
    return tokens * mask, mask


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, tensors = theirs(case, tmp_path)
    values = model.config.to_dict()
    row = architecture_of(values)
    config = row.config_from_hf(values)
    mine = ours(row, config, tensors)
    rng = np.random.default_rng(0)
    for side in ("left", "right"):
        tokens, mask = batch_of(side)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        weight = rng.standard_normal((3, 12, 61)).astype(np.float32) * mask[..., None]
        given = {"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(positions)}
        expected = model(torch.tensor(tokens), **given).logits
        model.zero_grad()
        (expected * torch.tensor(weight)).sum().backward()
        scores = mine(et.ExTensor(tokens), attention_mask=mask)
        real = mask.astype(bool)
        assert_close(side, scores.numpy()[real], expected.detach().numpy()[real])
        mine.zero_grad()
        (scores * et.ExTensor(weight)).sum().backward()
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.copy_(p.grad)
            gradients = written(model, tmp_path / "gradients")
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        sources, parameters = row.sources(config), dict(mine.named_parameters())
        assert sources.keys() == parameters.keys()
        for path, source in sources.items():
            assert_close(path, parameters[path].grad.numpy(), source.read(gradients[source.name]))


@pytest.mark.parametrize("case", CASES)
def test_a_cache_changes_nothing(case: str, tmp_path: Path) -> None:
    """Chunks of 1, 3 and 8 tokens with a cache, beside all 12 at once."""
    if "dynamic" in case:
        pytest.skip("angles depend on the length so far: keys of a cache keep their own")
    transformers = pytest.importorskip("transformers")
    row = ARCHITECTURES[case.partition(" ")[0]]
    values = transformers.AutoConfig.for_model(row.model_type, **{**SMALL, **CASES[case]}).to_dict()
    model = row.build(row.config_from_hf(values), np.random.default_rng(0))
    tokens, mask = batch_of("left")
    with et.no_grad():
        whole = model(et.ExTensor(tokens), attention_mask=mask).numpy()
        cache, parts = nn.KVCache(layers=2, capacity=2), []
        for start, end in ((0, 1), (1, 4), (4, 12)):
            part = et.ExTensor(tokens[:, start:end])
            parts.append(model(part, attention_mask=mask[:, :end], cache=cache).numpy())
    real = mask.astype(bool)
    assert_close(case, np.concatenate(parts, axis=1)[real], whole[real])
    assert cache.length == 12


@pytest.mark.parametrize("case", CASES)
def test_configurations_come_back(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    name = case.partition(" ")[0]
    values = transformers.AutoConfig.for_model(name, **{**SMALL, **CASES[case]}).to_dict()
    row = architecture_of(values)
    config = row.config_from_hf(values)
    back = row.config_to_hf(config)
    assert row.config_from_hf(back) == config
    read = transformers.AutoConfig.for_model(**back).to_dict()
    assert row.config_from_hf(read) == config
