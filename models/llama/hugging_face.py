"""Llama's relatives in Hugging Face's terms: how the config.json of each is read and written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from extensor.nn import Rope, RopeScaling

from ..settings import Settings
from ..sources import Source
from .configs import ExpertsConfig, LlamaConfig

__all__ = ["RELATIVES", "Relative", "fused_experts"]


@dataclass(frozen=True)
class Relative:
    """What the class of a model type fixes, or names by a key of its own.

    Attributes:
        model_type: in config.json.
        name: of the class in ``architectures``.
        base, head_size: where the file does not say; None: the width by the heads.
        qkv_bias, out_bias: fixed, or the key that says it.
        mlp_bias: the key that says whether feed-forward layers have biases; "" for none.
        qk_norm, sinks: see `LlamaConfig`.
        windows: "" none, "all" layers see ``sliding_window``, "types" those that layer_types names.
        switch: the key without which windows are off; "" for none.
        experts: names of the keys of the count, of the hidden width, and of normalizing; () where
            there are none.
        mixture: what the class fixes of `ExpertsConfig`.
    """

    model_type: str
    name: str
    base: float = 10000.0
    head_size: int | None = None
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: str = ""
    qk_norm: bool = False
    sinks: bool = False
    windows: str = ""
    switch: str = ""
    experts: tuple[str, str] | tuple[()] = ()
    mixture: Mapping[str, Any] | None = None

    def config_from_hf(self, values: Mapping[str, Any]) -> LlamaConfig:
        """The configuration that a config.json says.

        Args:
            values: the file's contents.

        Returns:
            The configuration.

        Raises:
            ValueError: for a missing key, a value that the models here do not compute, or an
                unknown key that may change what the model computes.
        """
        s = Settings(values)
        layers, width, heads = (
            s.get(n) for n in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        s.only("hidden_act", "silu")
        size = s.get("head_dim", self.head_size or width // heads)
        context = s.get("max_position_embeddings")
        experts, dense = self._experts(s, layers)
        config = LlamaConfig(
            vocab=s.get("vocab_size"),
            context=context,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=s.get(
                "num_key_value_heads", *((heads,) if self.model_type == "llama" else ())
            ),
            head_size=size,
            hidden=s.get("intermediate_size"),
            eps=s.get("rms_norm_eps"),
            rope=read_rope(s, size, self.base, context),
            tied=s.get("tie_word_embeddings", False),
            qkv_bias=self._flag(s, self.qkv_bias),
            out_bias=self._flag(s, self.out_bias),
            mlp_bias=self._flag(s, self.mlp_bias),
            qk_norm=self.qk_norm,
            sinks=self.sinks,
            windows=self._windows(s, layers),
            experts=experts,
            dense=dense,
        )
        s.finish()
        return config

    def config_to_hf(self, config: LlamaConfig) -> dict[str, Any]:
        """The config.json of a configuration: what the model computes, nothing about tokens.

        Args:
            config: one of this type.

        Returns:
            A dictionary that JSON takes.

        Raises:
            ValueError: for a configuration that this type cannot say.
        """
        values: dict[str, Any] = {
            "architectures": [self.name],
            "model_type": self.model_type,
            "vocab_size": config.vocab,
            "max_position_embeddings": config.context,
            "num_hidden_layers": config.layers,
            "hidden_size": config.width,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "intermediate_size": config.hidden,
            "hidden_act": "silu",
            "rms_norm_eps": config.eps,
            "tie_word_embeddings": config.tied,
            **write_rope(config.rope, config.context),
        }
        for key, value in ((self.qkv_bias, config.qkv_bias), (self.mlp_bias, config.mlp_bias)):
            if isinstance(key, str) and key:
                values[key] = value
        if self.windows:
            values |= self._written_windows(config)
        if config.experts is not None and self.experts:
            values |= self._written_experts(config, config.experts)
        if self.config_from_hf(values) != config:
            raise ValueError(f"{self.model_type}: its config.json cannot say {config}")
        return values

    def _flag(self, s: Settings, given: bool | str) -> bool:
        return bool(s.get(given, False)) if isinstance(given, str) and given else bool(given)

    def _windows(self, s: Settings, layers: int) -> tuple[int | None, ...]:
        if not self.windows:
            return ()
        if self.windows == "all" and not (
            self.switch or self.experts or "sliding_window" in s.values
        ):
            raise ValueError(f"{s.family}: expected the setting 'sliding_window', a number or null")
        size = s.get("sliding_window", None)
        on = (not self.switch or s.get(self.switch, False)) and size is not None
        types, first = s.get("layer_types", None), s.get("max_window_layers", layers)
        if not on:
            size = None
        elif types is not None:
            found = {"sliding_attention": size, "full_attention": None}
            if unknown := set(types) - set(found):
                raise ValueError(f"{s.family}: unknown layer_types {sorted(unknown)}")
            return tuple(found[name] for name in types)
        elif self.windows == "types":
            if self.sinks:  # gpt-oss: every second layer
                return tuple(None if i % 2 else size for i in range(layers))
            return tuple(None if i < first else size for i in range(layers))
        return () if size is None else (size,) * layers

    def _written_windows(self, config: LlamaConfig) -> dict[str, Any]:
        sizes = sorted({w for w in config.windows if w is not None})
        if len(sizes) > 1:
            raise ValueError(f"{self.model_type}: expected one sliding window, got {sizes}")
        values: dict[str, Any] = {"sliding_window": sizes[0] if sizes else None}
        if self.switch:
            values[self.switch] = bool(sizes)
        if self.windows == "types" and sizes:
            names = ("full_attention" if w is None else "sliding_attention" for w in config.windows)
            values["layer_types"] = list(names)
        return values

    def _experts(self, s: Settings, layers: int) -> tuple[ExpertsConfig | None, tuple[int, ...]]:
        if not self.experts:
            return None, ()
        count_key, hidden_key = self.experts
        mixture = dict(self.mixture or {})
        if "normalize" not in mixture:
            mixture["normalize"] = s.get("norm_topk_prob", False)
        if self.sinks:
            mixture["alpha"] = s.get("swiglu_alpha", 1.702)
            mixture["limit"] = s.get("swiglu_limit", 7.0)
            for repeated in ("experts_per_token", "initial_context_length"):
                s.get(repeated, None)
        count = s.get(count_key, None)
        config = ExpertsConfig(
            count=s.get("num_local_experts") if count is None else count,
            active=s.get("num_experts_per_tok"),
            hidden=s.get(hidden_key),
            **mixture,
        )
        step, plain = s.get("decoder_sparse_step", 1), s.get("mlp_only_layers", ())
        dense = (i for i in range(layers) if i in plain or (i + 1) % step)
        return config, tuple(dense)

    def _written_experts(self, config: LlamaConfig, experts: ExpertsConfig) -> dict[str, Any]:
        assert self.experts
        count, hidden = self.experts
        values: dict[str, Any] = {
            count: experts.count,
            hidden: experts.hidden,
            "num_experts_per_tok": experts.active,
        }
        if "normalize" not in (self.mixture or {}):
            values |= {"norm_topk_prob": experts.normalize, "mlp_only_layers": list(config.dense)}
        if self.sinks:
            values |= {"swiglu_alpha": experts.alpha, "swiglu_limit": experts.limit}
        return values


_SCALING = {  # our field: the key
    "linear": {},
    "dynamic": {},
    "llama3": {
        "context": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
    "yarn": {
        "context": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "whole": "truncate",
        "attention": "attention_factor",
    },
}


def read_rope(s: Settings, size: int, base: float, context: int) -> Rope:
    """The rotary embedding, from the keys of transformers 4 or 5."""
    given = s.get("rope_parameters", None) or s.get("rope_scaling", None) or {}
    s.get("rope_scaling", None)
    r = Settings({"model_type": f"{s.family}: rope", **given})
    base = float(r.get("rope_theta", s.get("rope_theta", base)))
    for settings in (s, r):
        settings.only("partial_rotary_factor", 1, None)
    kind = r.get("rope_type", r.get("type", "default"))
    r.get("type", None)
    scaling = None
    if kind not in ("default", *_SCALING):
        raise ValueError(
            f"{s.family}: rope_type: expected default, {', '.join(_SCALING)}, got {kind!r}"
        )
    if kind != "default":
        fields = {ours: r.get(key, None) for ours, key in _SCALING[kind].items()}
        fields = {ours: value for ours, value in fields.items() if value is not None}
        fields.setdefault("context", 0 if kind == "linear" else context)
        scaling = RopeScaling(kind, float(r.get("factor")), **fields)
        if kind == "dynamic":
            r.get("original_max_position_embeddings", None)
    r.finish()
    return Rope(size, base, scaling=scaling)


def write_rope(rope: Rope, context: int) -> dict[str, Any]:
    """The keys of transformers 4, which later ones read, too."""
    if rope.interleaved:
        raise ValueError(
            "config.json cannot say that rotary pairs are interleaved; permute the rows of the "
            "query and key projections instead"
        )
    values: dict[str, Any] = {"rope_theta": rope.base}
    if rope.scaling is not None:
        kind = rope.scaling.kind
        values["rope_scaling"] = {"rope_type": kind, "factor": rope.scaling.factor} | {
            key: value
            for ours, key in _SCALING[kind].items()
            if (value := getattr(rope.scaling, ours)) is not None
        }
    return values


def fused_experts(config: LlamaConfig) -> Iterator[tuple[str, Source]]:
    """Where gpt-oss's files keep experts: one tensor for all of a layer, gate and up in turns."""
    experts = config.experts
    assert experts is not None
    count, width, hidden = experts.count, config.width, experts.hidden
    for layer, e in itertools.product(range(config.layers), range(count)):
        block = f"model.layers.{layer}.mlp.experts"
        both, own = (count, width, 2 * hidden), (count, hidden, width)
        for name, column in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))):
            part = (e, slice(None), column)
            yield f"{block}.{e}.{name}.weight", Source(f"{block}.gate_up_proj", both, part, True)
            yield (
                f"{block}.{e}.{name}.bias",
                Source(f"{block}.gate_up_proj_bias", (count, 2 * hidden), (e, column)),
            )
        yield f"{block}.{e}.down_proj.weight", Source(f"{block}.down_proj", own, (e,), True)
        yield (
            f"{block}.{e}.down_proj.bias",
            Source(f"{block}.down_proj_bias", (count, width), (e,)),
        )


RELATIVES = (
    Relative(
        "llama", "LlamaForCausalLM", qkv_bias="attention_bias", out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Relative("mistral", "MistralForCausalLM", windows="all"),
    Relative(
        "qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows="types", switch="use_sliding_window"
    ),
    Relative(
        "qwen3", "Qwen3ForCausalLM", head_size=128, qkv_bias="attention_bias",
        out_bias="attention_bias", qk_norm=True, windows="types", switch="use_sliding_window",
    ),
    Relative(
        "qwen3_moe", "Qwen3MoeForCausalLM", qkv_bias="attention_bias", out_bias="attention_bias",
        qk_norm=True, windows="all", switch="use_sliding_window",
        experts=("num_experts", "moe_intermediate_size"), mixture={},
    ),
    Relative(
        "mixtral", "MixtralForCausalLM", base=1e6, windows="all",
        experts=("num_local_experts", "intermediate_size"),
        mixture={"normalize": True, "block": "block_sparse_moe", "parts": ("w1", "w3", "w2")},
    ),
    Relative(
        "gpt_oss", "GptOssForCausalLM", base=150000.0, head_size=64, qkv_bias="attention_bias",
        out_bias="attention_bias", sinks=True, windows="types",
        experts=("num_local_experts", "intermediate_size"),
        mixture={"normalize": True, "bias": True, "router": "router"},
    ),
)  # fmt: skip
"""The model types that `extensor.models.llama` computes."""
