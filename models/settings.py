"""Reading Hugging Face's config.json: every key is read, known to be harmless, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extensor.schema import SchemaError, check

__all__ = ["Settings"]

_REQUIRED = object()

HARMLESS = frozenset([
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "dtype", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type", "num_labels",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "quantization_config", "return_dict",
    "router_aux_loss_coef", "sep_token_id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
])  # fmt: skip
"""Keys that say nothing about a forward pass: of tokens, losses and files, and of how to run."""

DROPOUT = frozenset([
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop",
    "hidden_dropout_prob", "resid_pdrop", "router_jitter_noise",
])  # fmt: skip
"""Noise of training, which these models do not have."""


SIZES = frozenset([
    "decoder_sparse_step", "head_dim", "hidden_size", "intermediate_size",
    "max_position_embeddings", "moe_intermediate_size", "n_ctx", "n_embd", "n_head", "n_inner",
    "n_layer", "n_positions", "num_attention_heads", "num_experts", "num_experts_per_tok",
    "num_hidden_layers", "num_key_value_heads", "num_local_experts", "type_vocab_size",
    "vocab_size",
])  # fmt: skip
"""Keys of whole numbers of 1 or more."""

MOST_LAYERS = 10_000
"""Configurations list things for each layer; no model is near this."""

KINDS: Mapping[str, Any] = {
    **dict.fromkeys(SIZES, int),
    **dict.fromkeys(
        ["attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "truncate",
         "use_sliding_window", "is_decoder", "add_cross_attention", "scale_attn_weights",
         "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"],
        bool,
    ),
    **dict.fromkeys(
        ["attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
         "layer_norm_eps", "layer_norm_epsilon", "low_freq_factor", "partial_rotary_factor",
         "rms_norm_eps", "rope_theta", "swiglu_alpha", "swiglu_limit"],
        float,
    ),
    **dict.fromkeys(
        ["activation_function", "hidden_act", "model_type", "position_embedding_type",
         "rope_type", "type"],
        str,
    ),
    **dict.fromkeys(["rope_parameters", "rope_scaling"], dict[str, Any]),
    **dict.fromkeys(
        ["max_window_layers", "original_max_position_embeddings", "sliding_window"],
        int,
    ),
    "layer_types": list[str],
    "mlp_only_layers": list[int],
}  # fmt: skip
"""Types of the keys that are read; null stands for a key that is not there."""


class Settings:
    """The keys of a config.json, each to be read once.

    Args:
        values: the file's contents.

    Raises:
        TypeError: for what is no mapping.

    >>> from extensor.models.settings import Settings
    >>> settings = Settings({"model_type": "llama", "hidden_size": 64, "colour": "red"})
    >>> settings.get("hidden_size"), settings.get("head_dim", 16)
    (64, 16)
    >>> settings.finish()
    Traceback (most recent call last):
    ...
    ValueError: llama: unknown setting, which may change what the model computes: colour='red'
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"config: expected a mapping, got {type(values).__name__}")
        for name, value in values.items():
            if name in KINDS and value is not None:
                check(value, KINDS[name], name)
            if name in SIZES and value is not None and value < 1:
                raise SchemaError(f"{name}: expected 1 or more, got {value}")
            if name in ("n_layer", "num_hidden_layers") and (value or 0) > MOST_LAYERS:
                raise SchemaError(f"{name}: expected {MOST_LAYERS} or fewer, got {value}")
        self.values = values
        self.family = str(values.get("model_type", "config"))
        self._read: set[str] = set()

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value, or the default where the key is missing or null.

        Args:
            name: the key.
            default: none: the key must be there.

        Returns:
            The value.

        Raises:
            ValueError: for a missing key without a default.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.family}: expected the setting {name!r} in config.json")
        return default

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a value that these models do not compute.

        Args:
            name: the key; it may be missing, which means the first value.
            supported: values that are.

        Raises:
            ValueError: for another value.
        """
        value = self.get(name, supported[0])
        if value not in supported:
            expected = " or ".join(map(repr, supported))
            raise ValueError(f"{self.family}: {name}: expected {expected}, got {value!r}")

    def finish(self) -> None:
        """Refuse keys that nobody read.

        Raises:
            ValueError: if one may change what the model computes.
        """
        left = {
            name: value
            for name, value in self.values.items()
            if name not in self._read | HARMLESS | DROPOUT and not name.startswith("_")
        }
        if left:
            shown = ", ".join(f"{name}={value!r:.60}" for name, value in left.items())
            raise ValueError(
                f"{self.family}: unknown setting, which may change what the model computes: {shown}"
            )
