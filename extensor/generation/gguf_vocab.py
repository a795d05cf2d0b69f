"""The tokenizer inside a GGUF file, rebuilt for the package `tokenizers`.

GGUF stores the tokens, their types, the merges or scores, and the name of the rule that cuts text
into words before merging. The rule itself is not in the file, so known rules stand here in a table.

Source: GGUF's specification, section "Tokenizer"; the rules are those of each model's own
tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.errors import unknown_name
from extensor.schema import SchemaError, check

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "gguf_tokenizer"]

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are matched in the text before it is cut into words."""
UNKNOWN, BYTE = 2, 6
"""Types of the token for what has none, and of those for single bytes (SentencePiece)."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    f"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before pairs of bytes are merged.

    Attributes:
        pattern: a regular expression of the words; None, GPT-2's.
        digits: whether each digit is a word.
        nfc: whether text is normalized to Unicode's composed form first.
        whole_words: whether a word that is a token is taken as it is, without merging.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(_LLAMA3, whole_words=True),
    "qwen2": PreTokenizer(_LLAMA3.replace("{1,3}", ""), nfc=True),
    "gpt-4o": PreTokenizer(_O200K),
}
"""By the value of ``tokenizer.ggml.pre``."""


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that GGUF metadata describes.

    Args:
        metadata: values by key, such as ``tokenizer.ggml.tokens``.

    Returns:
        The tokenizer of the package `tokenizers`.

    Raises:
        ValueError: if the metadata has no tokenizer, one of an unknown kind or rule, or values of
            other types.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise ValueError(unknown_name("tokenizer.ggml.model", str(kind), BUILDERS))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("expected tokens under tokenizer.ggml.tokens, got none")
    _check(metadata, tokens)
    tokens = list(tokens)
    library = BUILDERS[kind](metadata, tokens)
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type", ())
    for number, type_ in enumerate(types):
        if type_ in (CONTROL, USER_DEFINED):
            special = bool(type_ == CONTROL)
            added = AddedToken(tokens[number], special=special, normalized=False)
            (library.add_special_tokens if special else library.add_tokens)([added])
    _add_ends(library, metadata, tokens)
    return library


_MAX_TOKEN = 4096  # characters; the work on a token grows with their square


def _check(metadata: Mapping[str, Any], tokens: Any) -> None:
    """Types of the values that describe a tokenizer; numbers of tokens are below their count."""
    for key in ("tokens", "merges"):
        check(list(metadata.get(f"{PREFIX}{key}", ())), list[str], f"{PREFIX}{key}")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise SchemaError(f"{PREFIX}tokens: expected at most {_MAX_TOKEN} characters in each")
    for key in ("token_type", "scores"):
        values = metadata.get(f"{PREFIX}{key}")
        if values is not None and np.shape(values) != (len(tokens),):
            raise SchemaError(f"{PREFIX}{key}: expected a number for each of {len(tokens)} tokens")
    for key, value in metadata.items():
        if key.startswith(f"{PREFIX}add_"):
            check(value, bool, key)
        is_id = key.startswith(PREFIX) and key.endswith("_token_id")
        if is_id and not 0 <= check(value, int, key) < len(tokens):
            raise SchemaError(f"{key}: expected 0..{len(tokens) - 1}, got {value}")
    check(metadata.get("tokenizer.chat_template"), str | None, "tokenizer.chat_template")


def _byte_pairs(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ValueError(unknown_name("tokenizer.ggml.pre", str(name), PRE_TOKENIZERS))
    rule = PRE_TOKENIZERS[name]
    cut = (pair.partition(" ") for pair in metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, _, right in cut]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for left, right in merges:
        if left + right not in vocabulary:
            said = f"expected two tokens that make a third, got {left!r} and {right!r}"
            raise SchemaError(f"{PREFIX}merges: {said}")
    library = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule.nfc:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    return library


def _sentence_pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """SentencePiece's BPE, as Llama 2 and Mistral have it: scores rank the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = [float(score) for score in metadata["tokenizer.ggml.scores"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ranked = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], left, right))
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    library = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library


BUILDERS = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
"""By the value of ``tokenizer.ggml.model``."""


def _add_ends(library: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """The tokens that stand before and after every text, where the file asks for them."""
    from tokenizers import processors

    template, special = ["$A"], []
    for end, default in (("bos", metadata["tokenizer.ggml.model"] == "llama"), ("eos", False)):
        number = metadata.get(f"tokenizer.ggml.{end}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{end}_token", default) and number is not None:
            token = tokens[int(number)]
            template = [token, *template] if end == "bos" else [*template, token]
            special.append((token, int(number)))
    if special:
        library.post_processor = processors.TemplateProcessing(
            single=" ".join(template), special_tokens=special
        )
