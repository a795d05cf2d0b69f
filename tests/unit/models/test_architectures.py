"""Architectures against transformers on the CPU: scores, and gradients of all parameters.

Weights are random, drawn by transformers; its files are read by their names. Both compute in
float32. Bound, of each tensor: |ours - theirs| <= 2e-4 of its largest magnitude, plus 1e-6. Both
add terms of these sizes in other orders, over a few layers; a wrong formula is off by a tenth.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import ExTensor, models, nn
from extensor.models.architectures import ARCHITECTURES, architecture_of
from extensor.models.bert.configs import BertConfig
from extensor.models.bert.model import Intermediate

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
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3_moe normalized": {
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "head_dim": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "gpt2 untied": {
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 12,
        "n_inner": 40,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 4,
        "swiglu_limit": 0.3,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "truncate": False,
            "rope_theta": 500.0,
        },
    },
}


BERTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert tanh": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "num_attention_heads": 2},
}


def settings(case: str) -> dict[str, Any]:
    """The keys of a case's config.json that differ from transformers' own."""
    given = {**CASES, **BERTS}[case]
    if "n_embd" in given:
        return {"vocab_size": 61, **given}
    small = {k: v for k, v in SMALL.items() if case not in BERTS or k != "num_key_value_heads"}
    return {**small, **given}


def theirs(case: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Transformers' model of a case, its norms and biases moved off ones and zeros."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = case.partition(" ")[0]
    config = transformers.AutoConfig.for_model(name, **settings(case))
    config._attn_implementation = "eager"
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).eval().float()
    torch.manual_seed(0)
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
    model: nn.Module = models.build(row.model, config, np.random.default_rng(0))
    state = {
        path: np.ascontiguousarray(s.read(tensors[s.name]))
        for path, s in row.sources(model).items()
    }
    model.load_state_dict(state)
    return model


def assert_close(name: str, got: Any, expected: Any) -> None:
    bound = 2e-4 * np.abs(expected).max() + 1e-6
    error = np.abs(got - expected).max()
    assert error <= bound, f"{name}: off by {error:.3g}, bound {bound:.3g}"


def assert_same_gradients(row: Any, mine: nn.Module, model: Any, folder: Path) -> None:
    """Theirs are written as weights are, so that they have the names of a file."""
    torch = pytest.importorskip("torch")
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
        gradients = written(model, folder / "gradients")
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    sources, parameters = row.sources(mine), dict(mine.named_parameters())
    assert sources.keys() == parameters.keys()
    for path, source in sources.items():
        grad = parameters[path].grad  # None: of an expert without tokens
        got = np.zeros(parameters[path].shape) if grad is None else grad.numpy()
        assert_close(path, got, source.read(gradients[source.name]))


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
        assert_same_gradients(row, mine, model, tmp_path)


@pytest.mark.parametrize("case", BERTS)
def test_an_encoder_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    """Hidden states, the pooled vector, and gradients of all parameters through both."""
    torch = pytest.importorskip("torch")
    model, tensors = theirs(case, tmp_path)
    values = model.config.to_dict()
    row = architecture_of(values)
    mine = ours(row, row.config_from_hf(values), tensors)
    rng = np.random.default_rng(0)
    for side in ("left", "right"):
        tokens, mask = batch_of(side)
        types = rng.integers(0, 2, tokens.shape)
        weight = rng.standard_normal((3, 12, 32)).astype(np.float32) * mask[..., None]
        weigh = rng.standard_normal((3, 32)).astype(np.float32) * mask[:, :1]
        expected = model(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            token_type_ids=torch.tensor(types),
        )
        model.zero_grad()
        loss = (expected.last_hidden_state * torch.tensor(weight)).sum()
        (loss + (expected.pooler_output * torch.tensor(weigh)).sum()).backward()
        got = mine(et.ExTensor(tokens), attention_mask=mask, token_types=et.ExTensor(types))
        real = mask.astype(bool)
        hidden, pooled = (t.detach().numpy() for t in expected[:2])
        assert_close(side, got.hidden.numpy()[real], hidden[real])
        assert_close(f"{side} pooled", got.pooled.numpy()[real[:, 0]], pooled[real[:, 0]])
        mine.zero_grad()
        loss = (got.hidden * et.ExTensor(weight)).sum() + (got.pooled * et.ExTensor(weigh)).sum()
        loss.backward()
        assert_same_gradients(row, mine, model, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_cache_changes_nothing(case: str, tmp_path: Path) -> None:
    """Chunks of 1, 3 and 8 tokens with a cache, beside all 12 at once."""
    if "dynamic" in case:
        pytest.skip("angles depend on the length so far: keys of a cache keep their own")
    transformers = pytest.importorskip("transformers")
    row = ARCHITECTURES[case.partition(" ")[0]]
    values = transformers.AutoConfig.for_model(row.model_type, **settings(case)).to_dict()
    model = models.build(row.model, row.config_from_hf(values), np.random.default_rng(0))
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


@pytest.mark.parametrize("case", [*CASES, *BERTS])
def test_configurations_come_back(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    name = case.partition(" ")[0]
    values = transformers.AutoConfig.for_model(name, **settings(case)).to_dict()
    row = architecture_of(values)
    config = row.config_from_hf(values)
    older = {key: value for key, value in values.items() if key != "layer_types"}
    assert row.config_from_hf(older) == config
    back = row.config_to_hf(config)
    assert row.config_from_hf(back) == config
    read = transformers.AutoConfig.for_model(**back).to_dict()
    assert row.config_from_hf(read) == config


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that depend on a tensor's name in the file alone; norms are about one."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
    return (0.15 * rng.standard_normal(shape) + centre).astype(np.float32)


def first_scores(output: Any) -> list[float]:
    """Eight numbers of the last token of the first sequence."""
    return [round(float(value), 5) for value in output[0, -1, :8]]


STORED = json.loads(Path(__file__).with_name("scores.json").read_text(encoding="utf-8"))
"""What transformers 5.24 gave for weights of `drawn`, and the config.json; see below."""


@pytest.mark.parametrize("case", STORED)
def test_stored_scores(case: str) -> None:
    """The same without transformers at hand."""
    row = architecture_of(STORED[case]["config"])
    config = row.config_from_hf(STORED[case]["config"])
    model = models.build(row.model, config, np.random.default_rng(0))
    tensors = {s.name: drawn(s.name, s.shape) for s in row.sources(model).values()}
    found = {path: s.read(tensors[s.name]) for path, s in row.sources(model).items()}
    model.load_state_dict({path: np.ascontiguousarray(value) for path, value in found.items()})
    tokens, _ = batch_of("right")
    out = model(et.ExTensor(tokens[:1]))
    np.testing.assert_allclose(
        first_scores((out[0] if isinstance(out, tuple) else out).numpy()),
        STORED[case]["scores"],
        rtol=0,
        atol=2e-4 * np.abs(STORED[case]["scores"]).max() + 1e-5,
    )


@pytest.mark.parametrize("case", STORED)
def test_the_stored_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """To store others: write what `found` holds to scores.json."""
    torch = pytest.importorskip("torch")
    model, tensors = theirs(case, tmp_path)
    row = architecture_of(STORED[case]["config"])
    mine = models.build(row.model, ours_config(case), None)
    names = {source.name for source in row.sources(mine).values()}
    assert names <= tensors.keys()
    folder = tmp_path / "weights"
    save = pytest.importorskip("safetensors.numpy").save_file
    drawn_tensors = {name: drawn(name, value.shape) for name, value in tensors.items()}
    save(drawn_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor(batch_of("right")[0][:1]))[0]
    np.testing.assert_allclose(first_scores(out.numpy()), STORED[case]["scores"], atol=2e-5)


def ours_config(case: str) -> Any:
    values = STORED[case]["config"]
    return architecture_of(values).config_from_hf(values)


@pytest.mark.parametrize("case", STORED)
def test_a_configuration_comes_back_from_its_own_config_json(case: str) -> None:
    row, config = architecture_of(STORED[case]["config"]), ours_config(case)
    back = row.config_to_hf(config)
    assert architecture_of(back) is row and row.config_from_hf(back) == config


def test_unknown_settings_are_errors() -> None:
    values = {**ARCHITECTURES["llama"].config_to_hf(ours_config("llama"))}
    for changes, message in (
        ({"logit_scale": 2.0}, "unknown setting, .* logit_scale=2.0"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_type: expected default, lin"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "rope: partial_rotary_factor: expected 1 or None, got 0.5",
        ),
        ({"vocab_size": None}, "expected the setting 'vocab_size'"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers: expected 10000 or fewer"),
        ({"model_type": "lama"}, "did you mean 'llama'. known: bert, gpt2"),
        ({"model_type": None}, "expected a model_type, got none"),
    ):
        given = values | changes
        with pytest.raises(ValueError, match=message):
            architecture_of(given).config_from_hf(given)


PUBLISHED = {
    ("llama", "smollm2-135m"): 134_515_008, ("llama", "llama-2-7b"): 6_738_415_616,
    ("llama", "llama-3.1-8b"): 8_030_261_248, ("llama", "mistral-7b"): 7_241_732_096,
    ("llama", "qwen2-7b"): 7_615_616_512, ("llama", "qwen3-8b"): 8_190_735_360,
    ("llama", "qwen3-30b-a3b"): 30_532_122_624, ("llama", "mixtral-8x7b"): 46_702_792_704,
    ("llama", "gpt-oss-20b"): 20_914_757_184, ("gpt2", "gpt2"): 124_439_808,
    ("gpt2", "gpt2-medium"): 354_823_168, ("gpt2", "gpt2-large"): 774_030_080,
    ("gpt2", "gpt2-xl"): 1_557_611_200, ("bert", "minilm-l6"): 22_713_216,
    ("bert", "bert-base"): 109_482_240, ("bert", "bert-large"): 335_141_888,
}  # fmt: skip
"""Weights of the files that Hugging Face has of each."""

OURS = {
    ("llama", "nano"): 82_368, ("llama", "0.4m"): 1_475_200, ("llama", "3m"): 5_310_720,
    ("llama", "10m"): 13_767_552, ("llama", "30m"): 34_988_160, ("llama", "98m"): 109_593_600,
    ("gpt2", "nano"): 108_352, ("bert", "nano"): 79_616, ("gpt", "nano"): 804_096,
    ("gpt", "small"): 10_745_088, ("encoder", "nano"): 818_369, ("encoder", "small"): 10_796_225,
    ("mlp", "mlp"): 235_146, ("mlp", "wide"): 1_863_690, ("mlp", "linear"): 7_850,
}  # fmt: skip
"""Those of sizes that experiments and results on record name."""


@pytest.mark.parametrize(("name", "variant"), PUBLISHED | OURS)
def test_sizes_are_the_published_ones(name: str, variant: str) -> None:
    model = models.build(name, models.config(name, variant), None)
    assert sum(p.size for p in model.parameters()) == (PUBLISHED | OURS)[name, variant]


SEVEN: dict[str, Any] = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **SEVEN, "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral-7b": {
        **SEVEN, "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768,
        "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "mixtral-8x7b": {
        **SEVEN, "model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
        "use_sliding_window": False, "attention_bias": False, "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""config.json of the files of Hugging Face, without what is about tokens and training."""


@pytest.mark.parametrize("variant", FILES)
def test_a_variant_is_what_its_config_json_says(variant: str) -> None:
    values = FILES[variant]
    assert architecture_of(values).config_from_hf(values) == models.config("llama", variant)


def test_defaults_of_a_config_json_are_those_of_its_family() -> None:
    """mixtral's base of rotary angles; llama's head of its own; where experts are not."""
    values = {k: v for k, v in FILES["mixtral-8x7b"].items() if k != "rope_theta"}
    values = {k: v for k, v in values.items() if k != "tie_word_embeddings"}
    config = architecture_of(values).config_from_hf(values)
    assert config.rope.base == 1e6 and not config.tied
    values = FILES["qwen3-30b-a3b"] | {"decoder_sparse_step": 3, "mlp_only_layers": [2, 5]}
    dense = architecture_of(values).config_from_hf(values).dense
    assert dense == tuple(i for i in range(48) if (i + 1) % 3 or i in (2, 5))
    with pytest.raises(ValueError, match="decoder_sparse_step: expected 1 or more, got 0"):
        architecture_of(values).config_from_hf(values | {"decoder_sparse_step": 0})


def test_decoders_of_berts_family_are_refused() -> None:
    values = {
        "model_type": "bert", "vocab_size": 40, "max_position_embeddings": 16,
        "type_vocab_size": 2, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "intermediate_size": 64, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }  # fmt: skip
    read = architecture_of(values).config_from_hf
    assert read({**values, "is_decoder": False, "add_cross_attention": False}) == read(values)
    for key in ("is_decoder", "add_cross_attention"):
        with pytest.raises(ValueError, match=key):
            read({**values, key: True})


def test_gpt_oss_is_what_its_config_json_says() -> None:
    """The file of openai/gpt-oss-20b, without what is about tokens and training."""
    values = {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "attention_bias": True, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "tie_word_embeddings": False,
    }  # fmt: skip
    read = architecture_of(values).config_from_hf
    assert read(values) == models.config("llama", "gpt-oss-20b")
    del values["layer_types"]  # every second layer sees all, as in the list
    assert read(values) == models.config("llama", "gpt-oss-20b")


def test_a_skeleton_takes_no_memory() -> None:
    """Llama 3.1 8B has 32 GB of weights."""
    model = models.build("llama", models.config("llama", "llama-3.1-8b"), None)
    assert all(p.data.strides == (0, 0) for p in model.parameters() if p.ndim == 2)


def test_positions_beyond_the_context_are_errors() -> None:
    for name in ("llama", "gpt2"):
        model = models.build(name, models.config(name, "nano"), np.random.default_rng(0))
        with pytest.raises(ValueError, match=r"below the context of \d+, got"):
            model(et.zeros((1, model.config.context + 1), dtype="int64"))
        with pytest.raises(ValueError, match=r"expected an attention_mask \(1, 3\)"):
            model(et.zeros((1, 3), dtype="int64"), attention_mask=np.ones((1, 2)))
        with pytest.raises(TypeError, match="expected a tensor of integers"):
            model(et.zeros((1, 3)))


def test_the_page_lists_every_architecture() -> None:
    page = Path(models.__path__[0]).parent / "docs" / "architectures.md"
    if not page.exists():
        pytest.skip("the docs are beside the code in a checkout only")
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert found == ["model_type", *ARCHITECTURES]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_scores_of_the_last_tokens_alone(name: str) -> None:
    model = models.build(name, models.config(name, "nano"), np.random.default_rng(0))
    tokens = ExTensor(np.arange(24).reshape(2, 12) % 65)
    everything = model(tokens)
    assert model(tokens, logits_to_keep=0).shape == everything.shape
    last = model(tokens, logits_to_keep=3)
    assert last.shape == (2, 3, 65)
    assert np.allclose(last.numpy(), everything.numpy()[:, -3:], atol=1e-5)
    with pytest.raises(ValueError, match=r"0 \(all\) to the 12 tokens"):
        model(tokens, logits_to_keep=13)
    with pytest.raises(TypeError, match="expected an int"):
        model(tokens, logits_to_keep=True)


def test_a_prompt_is_scored_at_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama", models.config("llama", "nano"), np.random.default_rng(0))
    rows = []
    head = type(model.lm_head).forward

    def noted(self: Any, x: ExTensor) -> ExTensor:
        if self is model.lm_head:
            rows.append(x.shape[1])
        return head(self, x)

    monkeypatch.setattr(type(model.lm_head), "forward", noted)
    et.generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=2)
    assert rows == [1, 1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_initial_weights_are_drawn_as_gpt2s(name: str) -> None:
    """Normal, of a standard deviation of 0.02; not the layers' own uniform ones."""
    model = models.build(name, models.config(name, "nano"), np.random.default_rng(0))
    for path, layer in nn.gemm_layers(model):
        values = layer.weight.numpy()
        assert values.std() == pytest.approx(0.02, rel=0.1), path
        assert np.abs(values).max() > 3 * 0.02, path


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_berts_wide_layer_has_the_activation_of_its_configuration(name: str) -> None:
    config = BertConfig(vocab=8, context=4, layers=1, width=8, heads=2, hidden=16, activation=name)
    layer = Intermediate(config, np.random.default_rng(0))
    x = et.randn(3, 8, seed=0)
    expected = et.gelu(layer.dense(x), "tanh" if name == "gelu_tanh" else "none")
    np.testing.assert_array_equal(layer(x).numpy(), expected.numpy())
    other = et.gelu(layer.dense(x), "none" if name == "gelu_tanh" else "tanh")
    assert not np.array_equal(layer(x).numpy(), other.numpy())
