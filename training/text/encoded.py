"""Tokens of a text, and the tokenizer it teaches; those of a large text are kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from extensor.io.atomic import replacing

from ..data.fetch import cache_directory
from .tokenizers import TOKENIZERS, Tokenizer, TokenizerError, from_state

__all__ = ["LARGE", "encoded", "learnt"]

LARGE = 50_000_000
"""Letters from which on a text is cut and its tokens are kept; a vocabulary is learnt from as many
letters at most."""
PIECE = 1_000_000


def learnt(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """The tokenizer that a text teaches.

    That of a large text is found again by the checksum of the text, so that the runs of a queue do
    not each learn it anew. A damaged file is written again.

    Raises:
        TokenizerError: for a vocabulary that the text does not give.
    """
    if len(text) < LARGE:
        return TOKENIZERS[kind].train(text, vocab_size)
    key = hashlib.sha256(f"{kind} {vocab_size} ".encode() + text.encode()).hexdigest()
    path = cache_directory() / "tokens" / f"{key}.json"
    try:
        return from_state(json.loads(path.read_bytes()))
    except (OSError, ValueError, TokenizerError):
        made = TOKENIZERS[kind].train(text, vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(made.state()).encode())
    return made


def encoded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens of a text, int64 (T,).

    A large text is cut after line ends, about every `PIECE` letters. Its tokens are found again by
    the checksums of the text and the tokenizer.
    """
    if len(text) < LARGE:
        return tokenizer.encode(text)
    state = json.dumps(tokenizer.state(), sort_keys=True).encode()
    key = hashlib.sha256(hashlib.sha256(state).digest() + text.encode()).hexdigest()
    path = cache_directory() / "tokens" / f"{key}.npy"
    if not path.is_file():
        narrow = np.uint16 if tokenizer.size <= 1 << 16 else np.int32
        tokens = np.concatenate([tokenizer.encode(p).astype(narrow) for p in _pieces(text)])
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.save(file, tokens)
    return np.load(path).astype(np.int64)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
