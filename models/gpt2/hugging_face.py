"""GPT-2 in Hugging Face's terms: its config.json, and its transposed weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..settings import Settings
from ..sources import Source
from .configs import GPT2Config

__all__ = ["config_from_hf", "config_to_hf", "transposed"]

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_UNUSED = (
    "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
)  # fmt: skip
"""A repeated size, and a head for other tasks."""


def config_from_hf(values: Mapping[str, Any]) -> GPT2Config:
    """The configuration that a config.json says; see `Architecture.config_from_hf`."""
    s = Settings(values)
    width = s.get("n_embd")
    activation = s.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"gpt2: activation_function: expected {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    s.only("scale_attn_weights", True)
    s.only("scale_attn_by_inverse_layer_idx", False)
    s.only("add_cross_attention", False)
    s.only("reorder_and_upcast_attn", False, True)  # float32 needs neither
    for name in _UNUSED:
        s.get(name, None)
    config = GPT2Config(
        vocab=s.get("vocab_size"),
        context=s.get("n_positions"),
        layers=s.get("n_layer"),
        width=width,
        heads=s.get("n_head"),
        hidden=s.get("n_inner", 4 * width),
        eps=s.get("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        tied=s.get("tie_word_embeddings", True),
    )
    s.finish()
    return config


def config_to_hf(config: GPT2Config) -> dict[str, Any]:
    """The config.json of a configuration; see `Architecture.config_to_hf`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_layer": config.layers,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
        "tie_word_embeddings": config.tied,
    }


def transposed(config: GPT2Config) -> Iterator[tuple[str, Source]]:
    """The weights of all linear layers but the head: files have (inputs, outputs)."""
    width, hidden = config.width, config.hidden
    for layer in range(config.layers):
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, hidden),
            ("mlp.c_proj", hidden, width),
        ):
            path = f"transformer.h.{layer}.{name}.weight"
            yield path, Source(path, (inputs, outputs), transposed=True)
