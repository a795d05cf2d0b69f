"""The architectures of GGUF files, a row for each: its tensors' names there and at Hugging Face.

A GGUF file holds the experts of a layer as one tensor, (experts, rows, columns). Hugging Face's
files hold each expert by itself, or, as gpt-oss's, all experts of a layer with the rows of gate and
up in turns.

Sources: llama.cpp, gguf-py's tensor_mapping.py and constants.py (names), convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = [
    "GGUF_ARCHITECTURES",
    "ROPE_FACTORS",
    "GgufArchitecture",
    "LayerTensor",
    "Place",
    "gguf_name",
    "places",
]

ROPE_FACTORS = "rope_freqs.weight"
"""What divides each angle of the rotary embedding: how GGUF says Llama 3.1's scaling."""

_KINDS = ("weight", "bias")


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer.

    Attributes:
        gguf: its name after ``blk.N.``; two, where Hugging Face holds their rows in turns.
        hf: its name after ``model.layers.N.``; ``{}`` stands for the number of an expert.
        suffixes: what follows ``hf`` for a weight and for a bias.
        transposed: whether Hugging Face holds each matrix transposed.
    """

    gguf: tuple[str, ...]
    hf: str
    suffixes: tuple[str, str] = (".weight", ".bias")
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether GGUF holds the experts of a layer in this tensor."""
        return "_exps" in self.gguf[0]


@dataclass(frozen=True)
class Place:
    """Where one of Hugging Face's tensors lies in a GGUF file.

    Attributes:
        names: the GGUF tensors; two hold its rows in turns.
        expert: its number along the first axis of that tensor; None for all of the tensor.
        transposed: whether the last two axes are swapped.
    """

    names: tuple[str, ...]
    expert: int | None = None
    transposed: bool = False


def _named(*pairs: tuple[str, str]) -> tuple[LayerTensor, ...]:
    return tuple(LayerTensor((gguf,), hf) for gguf, hf in pairs)


def _experts(hf: str, gate: str, up: str, down: str) -> tuple[LayerTensor, ...]:
    """Experts that Hugging Face's files hold one by one."""
    parts = (("ffn_gate_exps", gate), ("ffn_up_exps", up), ("ffn_down_exps", down))
    return _named(*((stack, f"{hf}.{{}}.{part}") for stack, part in parts))


_WHOLE = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
)
_ATTENTION = _named(
    ("attn_norm", "input_layernorm"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
)
_NORM = _named(("ffn_norm", "post_attention_layernorm"))
_DENSE = _named(
    ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")
)
_FUSED = ("", "_bias")
_GPT_OSS = (
    *_named(("post_attention_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.router")),
    LayerTensor(("attn_sinks",), "self_attn.sinks", _FUSED),
    LayerTensor(("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj", _FUSED, True),
    LayerTensor(("ffn_down_exps",), "mlp.experts.down_proj", _FUSED, True),
)
_COUNTS = ("expert_used_count", "num_experts_per_tok")


@dataclass(frozen=True)
class GgufArchitecture:
    """One model type and how GGUF files hold it.

    Attributes:
        name: in the file, under ``general.architecture``.
        model_type: Hugging Face's.
        class_name: Hugging Face's, for ``architectures``.
        permuted: whether the rows of q and k are in llama.cpp's order.
        layer: the tensors of a layer.
        keys: further keys of whole numbers: GGUF's after the architecture, and config.json's.
        fixed: what config.json must say, since GGUF files cannot say otherwise.
        fixed_rope: the same of its ``rope_scaling``.
        written_only: whether files of this name are read as another model type.
    """

    name: str
    model_type: str
    class_name: str
    permuted: bool = False
    layer: tuple[LayerTensor, ...] = _ATTENTION + _NORM + _DENSE
    keys: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fixed_rope: Mapping[str, Any] = field(default_factory=dict)
    written_only: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether feed-forward layers are mixtures of experts."""
        return any(tensor.stacked for tensor in self.layer)


GGUF_ARCHITECTURES: MappingProxyType[str, GgufArchitecture] = MappingProxyType(
    {
        row.model_type: row
        for row in (
            GgufArchitecture("llama", "llama", "LlamaForCausalLM", True),
            GgufArchitecture("llama", "mistral", "MistralForCausalLM", True, written_only=True),
            GgufArchitecture(
                "llama", "mixtral", "MixtralForCausalLM", True,
                _ATTENTION + _NORM + _named(("ffn_gate_inp", "block_sparse_moe.gate"))
                + _experts("block_sparse_moe.experts", "w1", "w3", "w2"),
                (("expert_count", "num_local_experts"), _COUNTS),
            ),
            GgufArchitecture("qwen2", "qwen2", "Qwen2ForCausalLM"),
            GgufArchitecture("qwen3", "qwen3", "Qwen3ForCausalLM"),
            GgufArchitecture(
                "qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", False,
                _ATTENTION + _NORM + _named(("ffn_gate_inp", "mlp.gate"))
                + _experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
                (
                    ("expert_count", "num_experts"), _COUNTS,
                    ("expert_feed_forward_length", "moe_intermediate_size"),
                ),
                {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
            ),
            GgufArchitecture(
                "gpt-oss", "gpt_oss", "GptOssForCausalLM", False, _ATTENTION + _GPT_OSS,
                (
                    ("expert_count", "num_local_experts"), _COUNTS,
                    ("expert_feed_forward_length", "intermediate_size"),
                    ("attention.sliding_window", "sliding_window"),
                ),
                {"attention_bias": True, "swiglu_limit": 7.0},
                {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
            ),
        )
    }
)  # fmt: skip
"""The model types that GGUF files are read as and written of, by Hugging Face's name."""


def gguf_name(row: GgufArchitecture, name: str) -> Place | None:
    """Where one of Hugging Face's tensors lies in a GGUF file.

    Args:
        row: the architecture.
        name: such as ``model.layers.0.self_attn.q_proj.weight``.

    Returns:
        The place; None where GGUF has none that is known here.

    >>> from extensor.io.stored import GGUF_ARCHITECTURES, gguf_name
    >>> row = GGUF_ARCHITECTURES["mixtral"]
    >>> gguf_name(row, "model.layers.2.block_sparse_moe.experts.7.w1.weight")
    Place(names=('blk.2.ffn_gate_exps.weight',), expert=7, transposed=False)
    """
    for kind in _KINDS:
        for gguf, hf in _WHOLE:
            if name == f"{hf}.{kind}":
                return Place((f"{gguf}.{kind}",))
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found is None:
        return None
    for tensor in row.layer:
        for kind, suffix in zip(_KINDS, tensor.suffixes, strict=True):
            pattern = re.escape(tensor.hf + suffix).replace(r"\{\}", r"(\d+)")
            if (inner := re.fullmatch(pattern, found[2])) is not None:
                names = tuple(f"blk.{found[1]}.{stem}.{kind}" for stem in tensor.gguf)
                expert = int(inner[1]) if inner.groups() else None
                return Place(names, expert, tensor.transposed and kind == "weight")
    return None


def places(
    row: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Place]]:
    """Hugging Face's tensors that the GGUF tensors of a file hold.

    Args:
        row: the architecture.
        shapes: of the file's tensors, by name; scales of other tensors are passed over.

    Yields:
        Each name with its place; ``""`` with the place of a tensor that has no name.
    """
    whole = dict(_WHOLE)
    layer = {stem: tensor for tensor in row.layer for stem in tensor.gguf}
    for name, shape in shapes.items():
        stem, _, kind = name.rpartition(".")
        if kind == "scale" and f"{stem}.weight" in shapes:
            continue
        if kind in _KINDS and stem in whole:
            yield f"{whole[stem]}.{kind}", Place((name,))
            continue
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        if kind not in _KINDS or found is None or found[2] not in layer:
            yield "", Place((name,))
            continue
        tensor = layer[found[2]]
        if found[2] != tensor.gguf[0]:
            continue  # the first of the names brings the others
        names = tuple(f"blk.{found[1]}.{stem}.{kind}" for stem in tensor.gguf)
        hf = f"model.layers.{found[1]}.{tensor.hf}{tensor.suffixes[_KINDS.index(kind)]}"
        if "{}" not in hf:
            yield hf, Place(names, None, tensor.transposed and kind == "weight")
            continue
        for expert in range(shape[0] if shape else 0):
            yield hf.format(expert), Place(names, expert)
