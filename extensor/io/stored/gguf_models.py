"""GGUF models in Hugging Face's terms and back: names of tensors, configuration, rows of q and k.

llama.cpp turns neighbouring elements of a head, Hugging Face the two halves of it. So for the
architecture `llama` its files hold the rows of the query and key projections in another order:
row (head, j, s) is Hugging Face's row (head, s, j), s being 0 or 1. Architectures whose rotary
embedding is of the other kind (qwen2, qwen3) keep their rows.

Sources: llama.cpp, convert_hf_to_gguf.py (names, `permute`) and llama-arch.cpp (keys).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.io.gguf.container import Typed
from extensor.io.safetensors_format import CheckpointError
from extensor.io.stored.archive import Archive, Source, TensorInfo
from extensor.quant.array import QuantArray
from extensor.quant.views import take
from extensor.schema import SchemaError, check

__all__ = [
    "GGUF_ARCHITECTURES",
    "GgufArchitecture",
    "as_hugging_face",
    "gguf_metadata",
    "gguf_name",
]

Array = npt.NDArray[Any]
Stored = Array | QuantArray


@dataclass(frozen=True)
class GgufArchitecture:
    """One ``general.architecture``.

    Attributes:
        name: in the file.
        model_type: Hugging Face's.
        class_name: Hugging Face's, for ``architectures``.
        permuted: whether the rows of q and k are in llama.cpp's order.
        model_types: others that llama.cpp stores under this name.
    """

    name: str
    model_type: str
    class_name: str
    permuted: bool = False
    model_types: tuple[str, ...] = ()


GGUF_ARCHITECTURES: MappingProxyType[str, GgufArchitecture] = MappingProxyType(
    {
        row.name: row
        for row in (
            GgufArchitecture("llama", "llama", "LlamaForCausalLM", True, ("mistral",)),
            GgufArchitecture("qwen2", "qwen2", "Qwen2ForCausalLM"),
            GgufArchitecture("qwen3", "qwen3", "Qwen3ForCausalLM"),
        )
    }
)
"""The architectures of GGUF files that are read as models and written."""

_WHOLE = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
)
_LAYER = (
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)
_TO_HF = dict(_WHOLE), dict(_LAYER)
_TO_GGUF = {hf: gguf for gguf, hf in _WHOLE}, {hf: gguf for gguf, hf in _LAYER}
_KEYS = (  # GGUF's key after the architecture, config.json's, whether a float
    ("block_count", "num_hidden_layers", False),
    ("context_length", "max_position_embeddings", False),
    ("embedding_length", "hidden_size", False),
    ("feed_forward_length", "intermediate_size", False),
    ("attention.head_count", "num_attention_heads", False),
    ("attention.head_count_kv", "num_key_value_heads", False),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", True),
    ("rope.freq_base", "rope_theta", True),
)
_OPTIONAL = ("rope.freq_base", "attention.head_count_kv")
_SCALINGS = ("linear", "yarn")


def _renamed(name: str, tables: tuple[dict[str, str], dict[str, str]], pattern: str) -> str | None:
    """A name by the tables of whole tensors and of layers' ones; None if neither has it."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias", "scale"):
        return None
    whole, layer = tables
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    found = re.fullmatch(pattern, stem)
    if found is None or found.group(2) not in layer:
        return None
    to = "blk" if pattern.startswith("model") else "model.layers"
    return f"{to}.{found.group(1)}.{layer[found.group(2)]}.{kind}"


def hugging_face_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None where it has none."""
    return _renamed(name, _TO_HF, r"blk\.(\d+)\.(.+)")


def gguf_name(name: str) -> str | None:
    """The GGUF name of one of Hugging Face's tensors.

    Args:
        name: such as ``model.layers.0.self_attn.q_proj.weight``.

    Returns:
        The name; None where GGUF has none that is known here.

    >>> from extensor.io.stored import gguf_name
    >>> gguf_name("model.layers.0.self_attn.q_proj.weight")
    'blk.0.attn_q.weight'
    """
    return _renamed(name, _TO_GGUF, r"model\.layers\.(\d+)\.(.+)")


def heads_of(name: str, config: Mapping[str, Any]) -> int | None:
    """Heads whose rows llama.cpp reorders in this tensor of Hugging Face's; None for none."""
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    if ".self_attn.k_proj." in name:
        return int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return None


def reordered(value: Stored, heads: int, to_gguf: bool) -> Stored:
    """Rows of a query or key projection in the other order."""
    rows = value.shape[0]
    inner = (2, rows // heads // 2) if to_gguf else (rows // heads // 2, 2)
    index = np.arange(rows).reshape(heads, *inner).swapaxes(1, 2).reshape(-1)
    if isinstance(value, QuantArray):
        return take(value, index, 0)
    return np.ascontiguousarray(value[index])


class _Renamed(Source):
    """A GGUF file's tensors under Hugging Face's names, with its order of rows."""

    def __init__(
        self, archive: Archive, names: dict[str, str], config: dict[str, Any], permuted: bool
    ) -> None:
        self.archive, self.names, self.config, self.permuted = archive, names, config, permuted

    def read(self, name: str) -> Stored:
        value = self.archive.read(self.names[name])
        heads = heads_of(name, self.config) if self.permuted else None
        if heads is None:
            return value
        if not value.shape or value.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.archive.path}: {name}: expected rows of {heads} heads, got shape "
                f"{tuple(value.shape)}"
            )
        return reordered(value, heads, to_gguf=False)


def as_hugging_face(archive: Archive) -> Archive:
    """An opened GGUF model with Hugging Face's names, configuration and order of rows.

    Args:
        archive: of a GGUF file; any other is given back.

    Returns:
        The archive; its metadata are the file's.

    Raises:
        CheckpointError: for an unknown architecture (the list is given), a missing key, or tensors
            that have no name in Hugging Face's terms.

    >>> from extensor.io.stored import GGUF_ARCHITECTURES, as_hugging_face
    >>> sorted(GGUF_ARCHITECTURES)
    ['llama', 'qwen2', 'qwen3']
    """
    if archive.kind != "gguf":
        return archive
    metadata = archive.metadata
    kind = str(metadata.get("general.architecture"))
    if kind not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{archive.path}: {unknown_name('GGUF architecture', kind, GGUF_ARCHITECTURES)}; "
            f"known: {', '.join(GGUF_ARCHITECTURES)}"
        )
    row = GGUF_ARCHITECTURES[kind]
    names, unknown = {}, []
    for name in archive.infos:
        theirs = hugging_face_name(name)
        if theirs is None:
            unknown.append(name)
        elif not name.endswith(".scale"):
            names[theirs] = name
    if unknown:
        raise CheckpointError(
            f"{archive.path}: tensors without a place in a {row.model_type} model: "
            f"{', '.join(unknown[:8])}"
        )
    config = _config(archive, row, tied="lm_head.weight" not in names)
    infos = {
        theirs: dataclasses.replace(archive.infos[name], name=theirs)
        for theirs, name in names.items()
    }
    source = _Renamed(archive, names, config, row.permuted)
    return dataclasses.replace(archive, infos=infos, config=config, source=source)


def _config(archive: Archive, row: GgufArchitecture, tied: bool) -> dict[str, Any]:
    """The config.json that the metadata say."""
    metadata, arch = archive.metadata, row.name

    def get(key: str, kind: type[Any], default: Any = None) -> Any:
        """A value; of one number for each layer, which must be equal, that number."""
        value = metadata.get(key, default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise SchemaError(
                    f"{key} differs from layer to layer, which no {row.model_type} model has"
                )
            value = value[0].item()
        check(value, kind | None, key)
        if kind is int and value is not None and not 0 <= value < 1 << 62:
            raise SchemaError(f"{key}: expected 0 or more, got {value}")
        # A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind is float and value is not None else value

    found: dict[str, Any] = {"model_type": row.model_type, "architectures": [row.class_name]}
    try:
        for key, name, is_float in _KEYS:
            value = get(f"{arch}.{key}", float if is_float else int)
            if value is not None:
                found[name] = value
            elif key not in _OPTIONAL:
                raise SchemaError(f"expected the key {arch}.{key}")
        heads, width = found["num_attention_heads"], found["hidden_size"]
        if heads < 1:
            raise SchemaError(f"{arch}.attention.head_count: expected 1 or more, got {heads}")
        size = get(f"{arch}.attention.key_length", int)
        found["head_dim"] = width // heads if size is None else size
        turned = get(f"{arch}.rope.dimension_count", int)
        if turned not in (None, found["head_dim"]):
            raise SchemaError(
                f"expected rotary positions of {found['head_dim']} elements, got {turned}"
            )
        embedding = archive.infos.get("token_embd.weight", TensorInfo("", (0,), "", 0, ()))
        found["vocab_size"] = get(f"{arch}.vocab_size", int, (embedding.shape or (0,))[0])
        found["tie_word_embeddings"] = tied
        found["hidden_act"] = "silu"
        scaling = get(f"{arch}.rope.scaling.type", str, "none")
        if scaling not in ("none", *_SCALINGS):
            raise SchemaError(f"unknown rope scaling {scaling!r}")
        if scaling != "none":
            factor = get(f"{arch}.rope.scaling.factor", float, 1.0)
            found["rope_scaling"] = {"rope_type": scaling, "factor": factor}
            original = get(f"{arch}.rope.scaling.original_context_length", int)
            if original is not None:
                found["rope_scaling"]["original_max_position_embeddings"] = original
        for end in ("bos", "eos", "padding"):
            number = get(f"tokenizer.ggml.{end}_token_id", int)
            if number is not None:
                found[f"{'pad' if end == 'padding' else end}_token_id"] = number
    except SchemaError as error:
        raise CheckpointError(f"{archive.path}: {error}") from None
    return found


def gguf_metadata(config: Mapping[str, Any]) -> tuple[GgufArchitecture, dict[str, Any]]:
    """The metadata that say a config.json, tokens aside.

    Args:
        config: its contents.

    Returns:
        The architecture's row, and the values by key.

    Raises:
        ValueError: for a model type that GGUF files are not written of (the list is given), or what
            they cannot say.

    >>> from extensor.io.stored import gguf_metadata
    >>> gguf_metadata({"model_type": "gpt2"})
    Traceback (most recent call last):
    ...
    ValueError: GGUF: unknown model type 'gpt2'; known: llama, mistral, qwen2, qwen3
    """
    rows = {row.model_type: row for row in GGUF_ARCHITECTURES.values()}
    rows |= {other: row for row in GGUF_ARCHITECTURES.values() for other in row.model_types}
    kind = config.get("model_type")
    if kind not in rows:
        raise ValueError(f"GGUF: unknown model type {kind!r}; known: {', '.join(sorted(rows))}")
    row = rows[kind]
    out: dict[str, Any] = {"general.architecture": row.name}
    for key, name, is_float in _KEYS:
        value = config.get(name)
        if value is None and name == "rope_theta":
            value = (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        if value is None and name == "num_key_value_heads":
            value = config["num_attention_heads"]
        if value is None:
            raise ValueError(f"GGUF: expected {name} in config.json")
        out[f"{row.name}.{key}"] = Typed(6, float(value)) if is_float else Typed(4, int(value))
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        out[f"{row.name}.{key}"] = Typed(4, int(size))
    out[f"{row.name}.vocab_size"] = Typed(4, int(config["vocab_size"]))
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling_kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling_kind not in ("default", *_SCALINGS):
        raise ValueError(f"GGUF: rope scaling {scaling_kind!r} is not written; known: linear, yarn")
    if scaling_kind != "default":
        out[f"{row.name}.rope.scaling.type"] = scaling_kind
        out[f"{row.name}.rope.scaling.factor"] = Typed(6, float(scaling["factor"]))
        if (original := scaling.get("original_max_position_embeddings")) is not None:
            out[f"{row.name}.rope.scaling.original_context_length"] = Typed(4, int(original))
    if config.get("sliding_window") and config.get("model_type") == "mistral":
        raise ValueError("GGUF: a sliding window of every layer is not written for llama")
    return row, out
