"""BERT in Hugging Face's terms: its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings import Settings
from .configs import BertConfig

__all__ = ["config_from_hf", "config_to_hf"]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def config_from_hf(values: Mapping[str, Any]) -> BertConfig:
    """The configuration that a config.json says; see `Architecture.config_from_hf`."""
    s = Settings(values)
    activation = s.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"bert: hidden_act: expected {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    s.only("position_embedding_type", "absolute")
    s.only("is_decoder", False)
    s.only("add_cross_attention", False)
    s.get("tie_word_embeddings", None)  # of heads, which the encoder does not have
    config = BertConfig(
        vocab=s.get("vocab_size"),
        context=s.get("max_position_embeddings"),
        types=s.get("type_vocab_size"),
        layers=s.get("num_hidden_layers"),
        width=s.get("hidden_size"),
        heads=s.get("num_attention_heads"),
        hidden=s.get("intermediate_size"),
        eps=s.get("layer_norm_eps"),
        activation=_ACTIVATIONS[activation],
    )
    s.finish()
    return config


def config_to_hf(config: BertConfig) -> dict[str, Any]:
    """The config.json of a configuration; see `Architecture.config_to_hf`."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "type_vocab_size": config.types,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "layer_norm_eps": config.eps,
        "hidden_act": "gelu" if config.activation == "gelu" else "gelu_new",
    }
