"""Tokens of a corpus and the tokenizer that it teaches; those of an archive are kept in the cache.

A kept file says which archive its tokens are of. Where there is none, the file is the data set
itself: it may be carried to another machine without the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extensor.io import CheckpointError, load_checkpoint, save_checkpoint

from ..data import DATASETS, load_dataset
from ..data.corpora import Corpus
from ..data.fetch import cache_directory
from .tokenizers import TOKENIZERS, Tokenizer, from_state

__all__ = ["EncodedCorpus", "TokenFile", "encode_corpus", "encode_dataset"]

LARGE = 50_000_000
"""Letters from which on a text is cut before it is encoded; a vocabulary is learnt from as many
letters at most."""
PIECE = 1_000_000


@dataclass(frozen=True)
class EncodedCorpus:
    """A corpus as tokens.

    Attributes:
        tokenizer: learnt from the training part.
        train, test: tokens of the parts, whole numbers (T,).
    """

    tokenizer: Tokenizer
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class TokenFile:
    """What decides the tokens of a data set.

    Attributes:
        dataset: a row of `DATASETS`.
        kind: of the tokenizer.
        vocab_size: as it takes it.
        limit: letters of the training part; 0 for all.
    """

    dataset: str
    kind: str
    vocab_size: int
    limit: int = 0

    @property
    def path(self) -> Path:
        """Where it is kept."""
        name = f"tokens-{self.kind}-{self.vocab_size}-{self.limit}.safetensors"
        return cache_directory() / self.dataset / name

    def read(self, source: str | None) -> EncodedCorpus | None:
        """The tokens of an archive, or of any where ``source`` is None; None where it has others.

        A damaged file is as good as none.
        """
        try:
            kept = load_checkpoint(self.path)
            if source not in (None, kept.metadata["source"]):
                return None
            arrays: dict[str, Any] = kept.tensors
            return EncodedCorpus(
                from_state(kept.metadata["tokenizer"]), arrays["train"], arrays["test"]
            )
        except (CheckpointError, FileNotFoundError, KeyError):
            return None

    def write(self, found: EncodedCorpus, source: str) -> None:
        """Keep the tokens of an archive."""
        narrow = np.uint16 if found.tokenizer.size <= 1 << 16 else np.int32
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = {"train": found.train.astype(narrow), "test": found.test.astype(narrow)}
        about = {"source": source, "tokenizer": found.tokenizer.state()}
        save_checkpoint(self.path, parts, about)


def encode_dataset(file: TokenFile) -> EncodedCorpus:
    """The tokens of a data set, from the cache where it has them.

    Raises:
        DataError: if the data set is missing or damaged.
        TokenizerError: for a vocabulary that the text does not give.
    """
    row = DATASETS[file.dataset]
    source = None if row.source is None else row.source()
    if row.source is not None and (kept := file.read(source)) is not None:
        return kept
    corpus = load_dataset(file.dataset).limited(file.limit or None)
    found = encode_corpus(corpus, file.kind, file.vocab_size)
    if source is not None:
        file.write(found, source)
    return found


def encode_corpus(corpus: Corpus, kind: str, vocab_size: int) -> EncodedCorpus:
    """Learn a tokenizer from a corpus, and encode it.

    Letters of the test part count too where tokens are letters, or it could not be read.

    Raises:
        TokenizerError: for a vocabulary that the text does not give.
    """
    known = corpus.train + corpus.test if kind == "char" else corpus.train[:LARGE]
    tokenizer = TOKENIZERS[kind].train(known, vocab_size)
    return EncodedCorpus(tokenizer, *(_tokens(tokenizer, t) for t in (corpus.train, corpus.test)))


def _tokens(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens of a text; a large one is cut after line ends, about every `PIECE` letters."""
    if len(text) < LARGE:
        return tokenizer.encode(text)
    return np.concatenate([tokenizer.encode(piece) for piece in _pieces(text)])


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
