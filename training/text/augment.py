"""Text augmentation: small, seeded changes that leave the meaning alone, and noise on tokens.

The four word operations are those of "EDA" (Wei and Zou, arXiv 1901.11196). Each is a frozen record
that is called with a text and a generator; `Compose` applies several. Words are what spaces
separate, and are joined by one space again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Compose",
    "DeleteWords",
    "InsertWords",
    "ReplaceWords",
    "SwapWords",
    "replace_tokens",
]

Augmentation = Callable[[str, np.random.Generator], str]


def _probability(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: wanted a number in [0, 1), got {p!r}")


def _times(n: int) -> None:
    if n < 0:
        raise ValueError(f"n: wanted 0 or more, got {n!r}")


@dataclass(frozen=True)
class SwapWords:
    """Exchange two words, ``n`` times."""

    n: int = 1

    def __post_init__(self) -> None:
        _times(self.n)

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        words = text.split()
        for _ in range(self.n if len(words) > 1 else 0):
            i, j = rng.choice(len(words), 2, replace=False)
            words[i], words[j] = words[j], words[i]
        return " ".join(words)


@dataclass(frozen=True)
class DeleteWords:
    """Leave each word out with probability ``p``; of a text that would vanish, one word stays."""

    p: float = 0.1

    def __post_init__(self) -> None:
        _probability(self.p)

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        words = text.split()
        kept = [w for w, r in zip(words, rng.random(len(words)), strict=True) if r >= self.p]
        if words and not kept:
            kept = [words[int(rng.integers(len(words)))]]
        return " ".join(kept)


@dataclass(frozen=True)
class InsertWords:
    """Put one of the text's own words, or of its synonyms, in a random place, ``n`` times."""

    n: int = 1
    synonyms: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        _times(self.n)

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        words = text.split()
        for _ in range(self.n if words else 0):
            word = words[int(rng.integers(len(words)))]
            others = (self.synonyms or {}).get(word, (word,))
            chosen = others[int(rng.integers(len(others)))]
            words.insert(int(rng.integers(len(words) + 1)), chosen)
        return " ".join(words)


@dataclass(frozen=True)
class ReplaceWords:
    """Replace each word that has synonyms by one of them with probability ``p``."""

    synonyms: Mapping[str, Sequence[str]]
    p: float = 0.1

    def __post_init__(self) -> None:
        _probability(self.p)
        empty = [word for word, others in self.synonyms.items() if not others]
        if empty:
            raise ValueError(f"synonyms: wanted at least one for each word, got none: {empty[:5]}")

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        out = []
        for word in text.split():
            others = self.synonyms.get(word)
            if others and rng.random() < self.p:
                word = others[int(rng.integers(len(others)))]
            out.append(word)
        return " ".join(out)


@dataclass(frozen=True)
class Compose:
    """Apply augmentations one after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        for step in self.steps:
            text = step(text, rng)
        return text


def replace_tokens(
    tokens: np.ndarray, words: np.ndarray, share: float, vocab_size: int
) -> np.ndarray:
    """Replace each token by a random one with probability ``share``.

    Args:
        tokens: whole numbers of any shape.
        words: random uint32 of the same shape: the high half decides whether, the low half which.
        share: in [0, 1).
        vocab_size: how many tokens there are, up to 2**16.
    """
    _probability(share)
    if not 1 <= vocab_size <= 1 << 16:
        raise ValueError(f"vocab_size: wanted 1..65536, got {vocab_size}")
    hit = (words >> np.uint32(16)) < np.uint32(round(share * (1 << 16)))
    other = ((words & np.uint32(0xFFFF)).astype(np.int64) * vocab_size) >> 16
    return np.where(hit, other, tokens)
