"""Choosing the next token from a model's scores.

The order of the steps is that of transformers: repetition penalty, temperature, top-k, top-p,
min-p. Random bits are Philox words named by the seed and by how many tokens the row has written, so
that a row's text depends on neither its batch nor its place in it.

Sources: repetition penalty, Keskar et al., arXiv 1909.05858, section 4.1; top-k, Fan et al., arXiv
1805.04833, section 4; top-p (nucleus), Holtzman et al., arXiv 1904.09751, section 3.1; min-p,
Nguyen et al., arXiv 2407.01082, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.random import Stream, random_words

__all__ = ["Sampling", "sample", "token_probabilities"]

Array = np.ndarray[Any, Any]
LEAST = 1e-30  # temperature above 0: scores divided by less would leave float32


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: what scores are divided by; 0 takes the best token, the first of equals.
        top_k: keep the best ``top_k`` scores and those equal to the last of them; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities sum to ``top_p``; 1 keeps all.
        min_p: keep tokens of at least ``min_p`` times the likeliest one's probability; 0 keeps all.
        repetition_penalty: divides scores above 0 of tokens that the row already has, the prompt's
            included, and multiplies those below 0; 1 changes nothing.
        seed: of the draws, 0 to 2**64 - 1: one for all rows, or one for each. Equal rows with equal
            seeds are continued alike.

    Raises:
        ValueError: for a number out of its range.

    >>> from extensor.generation import Sampling
    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).top_k
    0
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        checks = (
            (
                "temperature",
                self.temperature == 0.0 or LEAST <= self.temperature < math.inf,
                f"0, or a finite number of {LEAST} or more",
            ),
            ("top_k", is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number of 0 to 1"),
            (
                "repetition_penalty",
                0.0 < self.repetition_penalty < math.inf,
                "a finite number above 0",
            ),
        )
        for name, fits, expected in checks:
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")
        for seed in [self.seed] if isinstance(self.seed, (int, np.integer)) else self.seed:
            Stream(int(seed))

    def seeds(self, rows: int) -> list[int]:
        """The seed of each row of a batch.

        Args:
            rows: how many.

        Returns:
            One seed for each.

        Raises:
            ValueError: for a sequence of another length.

        >>> from extensor.generation import Sampling
        >>> Sampling(seed=3).seeds(2), Sampling(seed=(1, 2)).seeds(2)
        ([3, 3], [1, 2])
        """
        one = isinstance(self.seed, (int, np.integer))
        seeds = [self.seed] * rows if one else list(self.seed)  # type: ignore[arg-type]
        if len(seeds) != rows:
            raise ValueError(f"seed: expected one, or one for each of {rows} rows, got {seeds}")
        return seeds  # type: ignore[return-value]


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python or numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def token_probabilities(scores: Array, seen: Array, how: Sampling) -> tuple[Array, Array]:
    """The tokens that may come next and their probabilities.

    Args:
        scores: float32 (V,), a model's logits.
        seen: the tokens that the row has so far; repeated ones count once.
        how: what is kept; ``temperature`` above 0.

    Returns:
        The tokens that are kept, ascending, and float64 probabilities that sum to 1.

    Raises:
        ValueError: for scores that are NaN or infinite.

    >>> import numpy as np
    >>> from extensor.generation import Sampling, token_probabilities
    >>> scores = np.log(np.float32([0.5, 0.3, 0.2]))
    >>> tokens, p = token_probabilities(scores, np.array([]), Sampling(temperature=1, top_p=0.6))
    >>> tokens, p.round(3)
    (array([0, 1]), array([0.625, 0.375]))
    """
    scores = _penalized(scores, seen, how.repetition_penalty) / np.float32(how.temperature)
    kept = np.arange(len(scores))
    if 0 < how.top_k < len(scores):
        least = np.partition(scores, -how.top_k)[-how.top_k]
        kept = np.flatnonzero(scores >= least)
    if how.top_p < 1.0:
        kept = kept[_in_nucleus(_softmax(scores[kept]), how.top_p)]
    p = _softmax(scores[kept])
    if how.min_p > 0.0:
        kept = kept[p >= how.min_p * p.max()]
        p = _softmax(scores[kept])
    return kept, p


def _penalized(scores: Array, seen: Array, penalty: float) -> Array:
    if not np.isfinite(scores).all():
        raise ValueError(
            "expected finite scores from the model, got NaN or infinity: its weights or inputs are "
            "not finite; if it is a training run that diverged, take an earlier checkpoint"
        )
    if penalty == 1.0 or not len(seen):
        return scores
    scores, seen = scores.copy(), np.unique(seen).astype(np.int64)
    old, factor = scores[seen], np.float32(penalty)
    scores[seen] = np.where(old < 0, old * factor, old / factor)
    return scores


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    p: Array = weights / weights.sum()
    return p


def _in_nucleus(p: Array, top_p: float) -> Array:
    """Which tokens are the smallest set of the likeliest whose probabilities sum to ``top_p``."""
    # All tokens below this bound together have less than 1 - top_p: none of them is kept.
    likely = np.flatnonzero(p >= (1.0 - top_p) / len(p))
    order = likely[np.argsort(p[likely], kind="stable")[::-1]]
    before = np.cumsum(p[order]) - p[order]
    inside = np.zeros(len(p), bool)
    inside[order[before < top_p]] = True
    return inside


def sample(scores: Array, seen: Sequence[Array], how: Sampling, step: int) -> Array:
    """The next token of each row of a batch.

    Args:
        scores: float32 (B, V), the logits of each row's last token.
        seen: the tokens each row has so far, without padding.
        how: how tokens are chosen.
        step: how many tokens were drawn before; it names the random bits.

    Returns:
        int64 (B,).

    Raises:
        ValueError: for scores that are not finite, or seeds of another number of rows.

    >>> import numpy as np
    >>> from extensor.generation import Sampling, sample
    >>> sample(np.float32([[0.0, 2.0, 1.0]]), [np.array([0])], Sampling(), step=0)
    array([1])
    """
    chosen = np.empty(len(scores), np.int64)
    for row, seed in enumerate(how.seeds(len(scores))):
        if how.temperature == 0.0:
            chosen[row] = _penalized(scores[row], seen[row], how.repetition_penalty).argmax()
            continue
        tokens, p = token_probabilities(scores[row], seen[row], how)
        sums = np.cumsum(p)
        place = np.searchsorted(sums, _uniform(seed, step) * sums[-1], side="right")
        chosen[row] = tokens[min(place, len(tokens) - 1)]  # the product may round up to the sum
    return chosen


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) of 53 random bits."""
    high, low = random_words(Stream(seed), [step], 2, 32)[0].tolist()
    return float((high << 21 | low >> 11) * 2.0**-53)
