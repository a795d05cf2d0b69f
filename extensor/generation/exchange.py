"""A tokenizer in another container: tokenizer.json of a GGUF vocabulary, and the other way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from extensor.extras import lacking
from extensor.generation.gguf_vocab import (
    BYTE,
    CONTROL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    gguf_tokenizer,
)
from extensor.generation.tokenizer import PretrainedTokenizer, TokenizerError
from extensor.io.gguf import Typed
from extensor.io.stored import open_archive
from extensor.schema import SchemaError, check, read_json

__all__ = ["convert_tokenizer", "gguf_vocabulary", "tokenizer_files"]

_INT32, _STRING = 5, 8
_SPARE = 1 << 16  # numbers without a token that padding of a vocabulary may leave


class _Added(TypedDict):
    id: int
    content: str
    special: bool


class _BytePairs(TypedDict):
    vocab: dict[str, int]
    merges: list[str | list[str]]
    byte_fallback: NotRequired[bool]
    unk_token: NotRequired[str | None]


class _TokenizerJson(TypedDict):
    model: dict[str, Any]
    pre_tokenizer: NotRequired[dict[str, Any] | None]
    post_processor: NotRequired[dict[str, Any] | None]
    added_tokens: NotRequired[list[_Added]]


Converted = tuple[dict[str, bytes], dict[str, Any], list[str]]
"""Files of a folder, metadata of a GGUF file, and what could not be done."""


def convert_tokenizer(source: Path, to_gguf: bool) -> Converted:
    """The tokenizer of a checkpoint in the other container's form; nothing where that is the same.

    Args:
        source: a GGUF file, or a folder or a file in it.
        to_gguf: whether the target is a GGUF file.

    Returns:
        Files, metadata and notes.
    """
    if (source.suffix == ".gguf") == to_gguf:
        return {}, {}, []
    if not to_gguf:
        return tokenizer_files(open_archive(source).metadata)
    metadata, notes = gguf_vocabulary(source if source.is_dir() else source.parent)
    return {}, metadata, notes


def tokenizer_files(metadata: Mapping[str, Any]) -> Converted:
    """tokenizer.json and what belongs to it, of a GGUF file's vocabulary.

    Args:
        metadata: the file's.

    Returns:
        Files, no metadata, and notes.
    """
    if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return {}, {}, []
    if missing := lacking("text"):
        note = f"no tokenizer.json: {', '.join(missing)} not installed"
        return {}, {}, [f"{note}; the way out: pip install 'extensor[text]'"]
    try:
        tokenizer = PretrainedTokenizer.from_gguf(metadata)
    except ValueError as error:
        return {}, {}, [f"no tokenizer.json: {error}"]
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    generation: dict[str, Any] = {}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if number is not None:
            config[f"{ours}_token"] = tokens[number]
            generation[f"{ours}_token_id"] = int(number)
    generation.pop("unk_token_id", None)
    template = metadata.get("tokenizer.chat_template")
    files = {"tokenizer.json": tokenizer.library.to_str(pretty=True).encode()}
    if template is not None:
        config["chat_template"] = template
        files["chat_template.jinja"] = str(template).encode()
    files["tokenizer_config.json"] = json.dumps(config, indent=2).encode()
    files["generation_config.json"] = json.dumps(generation, indent=2).encode()
    return files, {}, []


def gguf_vocabulary(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """GGUF's metadata of a folder's tokenizer.json: byte-level BPE, and SentencePiece's.

    Args:
        folder: holds tokenizer.json.

    Returns:
        Metadata and notes.
    """
    place = folder / "tokenizer.json"
    if not place.is_file():
        return {}, ["no vocabulary: the folder has no tokenizer.json"]
    content = read_json(place, _TokenizerJson, TokenizerError)
    model = content["model"]
    steps = json.dumps(content.get("pre_tokenizer") or {})
    bytes_of_words = "ByteLevel" in steps
    if model.get("type") != "BPE" or not (bytes_of_words or model.get("byte_fallback")):
        return {}, [f"no vocabulary: {model.get('type')} tokenizers are not written to GGUF"]
    try:
        check(model, _BytePairs, "model")
    except SchemaError as error:
        raise TokenizerError(f"{place}: {error}") from None
    tokens: dict[int, str] = {number: token for token, number in model["vocab"].items()}
    numbers = [*tokens, *(added["id"] for added in content.get("added_tokens", ()))]
    if not numbers or min(numbers) < 0 or max(numbers) > 2 * len(numbers) + _SPARE:
        raise TokenizerError(f"{place}: expected tokens numbered from 0, almost without gaps")
    types = dict.fromkeys(tokens, 1)
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    count = max(tokens) + 1
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if bytes_of_words:
        rule, problem = _byte_pairs(steps, pairs)
    else:
        rule, problem = _sentence_pieces(content, pairs, [tokens.get(n, "") for n in range(count)])
        types |= {n: BYTE for n, token in tokens.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)}
        unknown = model["vocab"].get(model.get("unk_token"))
        types |= {} if unknown is None else {unknown: UNKNOWN}
    if problem:
        return {}, [f"no vocabulary: {problem}"]
    out: dict[str, Any] = rule | {
        "tokenizer.ggml.tokens": Typed(_STRING, [tokens.get(n, f"[PAD{n}]") for n in range(count)]),
        "tokenizer.ggml.token_type": Typed(_INT32, [types.get(n, 5) for n in range(count)]),
    }
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name, dict[str, Any], TokenizerError)
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        number = settings.get(f"{ours}_token_id")
        if type(number) is int and 0 <= number < count:
            out[f"tokenizer.ggml.{theirs}_token_id"] = Typed(4, number)
    if (folder / "chat_template.jinja").is_file():
        text = (folder / "chat_template.jinja").read_bytes()
        settings["chat_template"] = text.decode("utf-8", "replace")
    if isinstance(settings.get("chat_template"), str):
        out["tokenizer.chat_template"] = settings["chat_template"]
    for end, adds in zip(("bos", "eos"), _adds_ends(content.get("post_processor")), strict=True):
        out[f"tokenizer.ggml.add_{end}_token"] = bool(settings.get(f"add_{end}_token", adds))
    return out, []


def _adds_ends(step: Any) -> tuple[bool, bool]:
    """Whether a post-processor puts a token before every text, and one after it."""
    step = step if isinstance(step, dict) else {}
    single = step.get("single", ())
    if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
        before, after = ("SpecialToken" in part for part in (single[0], single[-1]))
        return before, after
    inner = step.get("processors", ())
    found = [_adds_ends(one) for one in inner] if isinstance(inner, list) else []
    return any(before for before, _ in found), any(after for _, after in found)


def _byte_pairs(steps: str, pairs: list[list[str]]) -> tuple[dict[str, Any], str]:
    """What GGUF says of byte-level BPE, or what it cannot say."""
    pre = _pre_tokenizer_name(steps)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        return {}, f"its pre-tokenizer is none that GGUF names here: {known}"
    merges = [" ".join(pair) for pair in pairs]
    kind = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    return {**kind, "tokenizer.ggml.merges": Typed(_STRING, merges)}, ""


def _sentence_pieces(
    content: Mapping[str, Any], pairs: list[list[str]], tokens: list[str]
) -> tuple[dict[str, Any], str]:
    """What GGUF says of SentencePiece's BPE, or what it cannot say.

    SentencePiece merges any two neighbours that make a token, the token of the highest score
    first. So the merges must be all such pairs, in the order of their tokens.
    """
    steps = content.get("pre_tokenizer") or {}
    if steps and (steps.get("type") != "Metaspace" or steps.get("split", True)):
        return {}, f"its pre-tokenizer {steps.get('type')} cuts words, which SentencePiece does not"
    ranks: dict[str, int] = {}
    for left, right in pairs:
        ranks.setdefault(left + right, len(ranks))
    order = [ranks[left + right] for left, right in pairs]
    known = set(tokens)
    possible = {
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    }
    made = {(left, right) for left, right in pairs}
    if order != sorted(order) or {p for p in possible if p[0] + p[1] in ranks} != made:
        return {}, "its merges are not those of SentencePiece's rule, which GGUF stores as scores"
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    prefix = '"Prepend"' in json.dumps(content.get("normalizer") or {}) or (
        steps.get("prepend_scheme", "never") != "never"
    )
    unknown = content["model"].get("unk_token")
    number = {"tokenizer.ggml.unknown_token_id": Typed(4, tokens.index(unknown))} if unknown else {}
    return {
        **number,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.asarray(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": prefix,
    }, ""


def _pre_tokenizer_name(steps: str) -> str | None:
    """The name of the rule whose pre-tokenizer is that of a tokenizer.json; None if none is."""
    if lacking("text"):
        return None
    for name in PRE_TOKENIZERS:
        small = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.merges": [],
        }
        made = json.loads(gguf_tokenizer(small).to_str())["pre_tokenizer"]
        if json.dumps(made) == steps or _essence(made) == _essence(json.loads(steps)):
            return name
    return None


def _essence(step: Any) -> Any:
    """A pre-tokenizer without what does not change words: offsets and a lone sequence."""
    if isinstance(step, dict):
        if step.get("type") == "Sequence" and len(step.get("pretokenizers", ())) == 1:
            return _essence(step["pretokenizers"][0])
        return {k: _essence(v) for k, v in step.items() if k != "trim_offsets"}
    return [_essence(one) for one in step] if isinstance(step, list) else step
