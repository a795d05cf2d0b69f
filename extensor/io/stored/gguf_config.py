"""A GGUF file's metadata as config.json's contents, and back.

Sources: llama.cpp, llama-arch.cpp (keys), convert_hf_to_gguf.py (`generate_extra_tensors` of Llama
3.1's rotary factors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.errors import unknown_name
from extensor.io.gguf.container import Typed
from extensor.io.safetensors_format import CheckpointError
from extensor.io.stored.archive import Archive, TensorInfo
from extensor.io.stored.gguf_names import GGUF_ARCHITECTURES, ROPE_FACTORS, GgufArchitecture
from extensor.nn.rope import Rope, RopeScaling
from extensor.schema import SchemaError, check

__all__ = [
    "config_of",
    "gguf_metadata",
    "llama3_scaling",
    "rope_factors",
    "rope_tensor",
    "row_of",
]

Array = npt.NDArray[Any]

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
_OPTIONAL = ("rope.freq_base", "attention.head_count_kv", "feed_forward_length")
_SCALINGS = ("linear", "yarn")
_UNSAID = {"norm_topk_prob": False}
"""What a config.json without the key means, where that is not what GGUF files mean."""
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class _Values:
    """Metadata of an architecture, each value's type checked as it is read."""

    def __init__(self, archive: Archive, row: GgufArchitecture) -> None:
        self.metadata, self.row = archive.metadata, row

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """A value; of one number for each layer, which must be equal, that number."""
        key = key if key.startswith("tokenizer.") else f"{self.row.name}.{key}"
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise SchemaError(
                    f"{key} differs from layer to layer, which no {self.row.model_type} model has"
                )
            value = value[0].item()
        check(value, kind | None, key)
        if kind is int and value is not None and not 0 <= value < 1 << 62:
            raise SchemaError(f"{key}: expected 0 or more, got {value}")
        # A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind is float and value is not None else value


def config_of(archive: Archive, row: GgufArchitecture, tied: bool) -> dict[str, Any]:
    """The config.json that a GGUF file's metadata say.

    Args:
        archive: of the file.
        row: its architecture.
        tied: whether it has no head of its own.

    Returns:
        The contents.

    Raises:
        SchemaError: for a missing key, a value of another type, or what no such model has.
    """
    values = _Values(archive, row)
    found: dict[str, Any] = {"model_type": row.model_type, "architectures": [row.class_name]}
    for key, name, is_float in (*_KEYS, *((key, name, False) for key, name in row.keys)):
        value = values.get(key, float if is_float else int)
        if value is not None:
            found[name] = value
        elif key not in _OPTIONAL:
            raise SchemaError(f"expected the key {row.name}.{key}")
    if "intermediate_size" not in found:
        raise SchemaError(f"expected the key {row.name}.feed_forward_length")
    found |= row.fixed
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if heads < 1:
        raise SchemaError(f"{row.name}.attention.head_count: expected 1 or more, got {heads}")
    size = values.get("attention.key_length", int)
    found["head_dim"] = width // heads if size is None else size
    turned = values.get("rope.dimension_count", int)
    if turned not in (None, found["head_dim"]):
        raise SchemaError(
            f"expected rotary positions of {found['head_dim']} elements, got {turned}"
        )
    embedding = archive.infos.get("token_embd.weight", TensorInfo("", (0,), "", 0, ()))
    found["vocab_size"] = values.get("vocab_size", int, (embedding.shape or (0,))[0])
    found["tie_word_embeddings"] = tied
    found["hidden_act"] = "silu"
    scaling = _scaling_of(archive, values, found)
    if scaling:
        found["rope_scaling"] = scaling
    for end in ("bos", "eos", "padding"):
        number = values.get(f"tokenizer.ggml.{end}_token_id", int)
        if number is not None:
            found[f"{'pad' if end == 'padding' else end}_token_id"] = number
    return found


def _scaling_of(archive: Archive, values: _Values, found: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling``; empty for none."""
    kind = values.get("rope.scaling.type", str, "none")
    if ROPE_FACTORS in archive.infos:
        if kind != "none":
            raise SchemaError(f"expected {ROPE_FACTORS} or rope scaling {kind!r}, got both")
        factors = np.asarray(archive.read(ROPE_FACTORS))
        return llama3_scaling(factors, found["head_dim"], found.get("rope_theta", 10000.0))
    if kind not in ("none", *_SCALINGS):
        raise SchemaError(f"unknown rope scaling {kind!r}")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", float, 1.0)}
    original = values.get("rope.scaling.original_context_length", int)
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {**scaling, **values.row.fixed_rope}


def rope_factors(size: int, base: float, scaling: Mapping[str, Any]) -> Array:
    """What divides the angle of each rotary pair under Llama 3.1's scaling.

    Args:
        size: elements of a head.
        base: of the angles.
        scaling: config.json's ``rope_scaling``.

    Returns:
        float32 (size / 2,).

    >>> from extensor.io.stored.gguf_config import rope_factors
    >>> scaling = {"factor": 8.0, "original_max_position_embeddings": 8192}
    >>> rope_factors(128, 500000.0, scaling)[[0, -1]]
    array([1., 8.], dtype=float32)
    """
    numbers = {**_LLAMA3, **{key: scaling[key] for key in _LLAMA3 if scaling.get(key) is not None}}
    rope = RopeScaling(
        "llama3",
        float(numbers["factor"]),
        int(numbers["original_max_position_embeddings"]),
        float(numbers["low_freq_factor"]),
        float(numbers["high_freq_factor"]),
    )
    plain, scaled = (Rope(size, base, scaling=s).angles(1)[0] for s in (None, rope))
    return (plain / scaled).astype(np.float32)


def llama3_scaling(factors: Array, size: int, base: float) -> dict[str, Any]:
    """The ``rope_scaling`` whose factors these are.

    GGUF stores the factors, not the four numbers behind them. Factors fix the longest one and the
    two bounds; the original context scales both bounds, and is taken as 8192, Llama 3's.

    Args:
        factors: float (size / 2,).
        size: elements of a head.
        base: of the angles.

    Returns:
        The contents of ``rope_scaling``.

    Raises:
        SchemaError: for factors that Llama 3.1's rule does not give.

    >>> from extensor.io.stored.gguf_config import llama3_scaling, rope_factors
    >>> factors = rope_factors(128, 500000.0, {"factor": 32.0})
    >>> llama3_scaling(factors, 128, 500000.0)["factor"]
    32.0
    """
    if factors.shape != (size // 2,) or not bool((np.isfinite(factors) & (factors > 0)).all()):
        raise SchemaError(
            f"{ROPE_FACTORS}: expected {size // 2} numbers above 0, got shape {factors.shape}"
        )
    largest = float(str(np.float32(factors.max())))
    candidates = [_LLAMA3 | {"factor": largest}]
    between = (factors > 1) & (factors < largest)
    if between.sum() > 1:
        turns = 8192 * base ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
        blend = (1 / factors[between].astype(np.float64) - 1 / largest) / (1 - 1 / largest)
        slope, start = np.polyfit(turns[between], blend, 1)
        low = float(f"{-start / slope:.4g}")
        high = float(f"{(1 - start) / slope:.4g}")
        candidates.append(candidates[0] | {"low_freq_factor": low, "high_freq_factor": high})
    for scaling in candidates:
        # llama.cpp's converter computes the factors in float32.
        if np.allclose(rope_factors(size, base, scaling), factors, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", **scaling}
    raise SchemaError(f"{ROPE_FACTORS}: expected factors of Llama 3.1's rule, got others")


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
    ValueError: GGUF: unknown model type 'gpt2'; known: gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
    """  # noqa: E501
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ValueError(f"GGUF: unknown model type {kind!r}; known: {known}")
    row = GGUF_ARCHITECTURES[kind]
    out: dict[str, Any] = {"general.architecture": row.name}
    rope = _rope(config)
    given = {
        "num_key_value_heads": config.get("num_attention_heads"),
        "rope_theta": rope.get("rope_theta", 10000.0),
    } | {key: value for key, value in config.items() if value is not None}
    for key, name, is_float in (*_KEYS, *((key, name, False) for key, name in row.keys)):
        value = given.get(name)
        if value is None:
            raise ValueError(f"GGUF: expected {name} in config.json")
        out[f"{row.name}.{key}"] = Typed(6, float(value)) if is_float else Typed(4, int(value))
    _check_fixed(row, config)
    size = _head_size(config)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        out[f"{row.name}.{key}"] = Typed(4, int(size))
    out[f"{row.name}.vocab_size"] = Typed(4, int(config["vocab_size"]))
    return row, out | _scaling_metadata(row, rope)


def rope_tensor(config: Mapping[str, Any]) -> Array | None:
    """What `ROPE_FACTORS` holds for a config.json; None where its scaling is no such tensor.

    Args:
        config: its contents.
    """
    rope = _rope(config)
    if _rope_kind(rope) != "llama3":
        return None
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return rope_factors(_head_size(config), float(base), rope)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding's keys, as transformers 5 or 4 name their table."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _scaling_metadata(row: GgufArchitecture, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of rope scaling; Llama 3.1's is said by a tensor, `ROPE_FACTORS`."""
    kind = _rope_kind(rope)
    if kind in ("default", "llama3"):
        return {}
    if kind not in _SCALINGS:
        known = ", ".join(sorted((*_SCALINGS, "llama3")))
        raise ValueError(f"GGUF: rope scaling {kind!r} is not written; known: {known}")
    for key, value in row.fixed_rope.items():
        if rope.get(key, value) != value:
            raise ValueError(f"GGUF: {row.model_type}: {key} of {rope[key]} cannot be said")
    out: dict[str, Any] = {
        f"{row.name}.rope.scaling.type": kind,
        f"{row.name}.rope.scaling.factor": Typed(6, float(rope["factor"])),
    }
    if (original := rope.get("original_max_position_embeddings")) is not None:
        out[f"{row.name}.rope.scaling.original_context_length"] = Typed(4, int(original))
    return out


def _check_fixed(row: GgufArchitecture, config: Mapping[str, Any]) -> None:
    """Refuse what a file of the architecture cannot say."""
    for key, value in row.fixed.items():
        requested = config.get(key, _UNSAID.get(key, value))
        if requested != value:
            raise ValueError(f"GGUF: {row.model_type}: {key} of {requested!r} cannot be said")
    if row.model_type in ("mistral", "mixtral") and config.get("sliding_window"):
        raise ValueError(
            f"GGUF: {row.model_type}: a sliding window of every layer is not written for llama"
        )
    types = config.get("layer_types")
    windows = [("sliding_attention", "full_attention")[i % 2] for i in range(len(types or ()))]
    if row.model_type == "gpt_oss" and types and list(types) != windows:
        raise ValueError("GGUF: gpt_oss: layer_types other than every second layer cannot be said")


def row_of(archive: Archive) -> GgufArchitecture:
    """The row that a file's metadata name.

    Args:
        archive: of a GGUF file.

    Returns:
        The row; of those with one ``general.architecture``, the one with experts if it has some.

    Raises:
        CheckpointError: for an unknown architecture; the list is given.
    """
    kind = str(archive.metadata.get("general.architecture"))
    rows = [r for r in GGUF_ARCHITECTURES.values() if r.name == kind and not r.written_only]
    known = dict.fromkeys(row.name for row in GGUF_ARCHITECTURES.values())
    if not rows:
        raise CheckpointError(
            f"{archive.path}: {unknown_name('GGUF architecture', kind, known)}; "
            f"known: {', '.join(known)}"
        )
    experts = bool(archive.metadata.get(f"{kind}.expert_count"))
    return next((row for row in rows if row.has_experts == experts), rows[0])
