"""Windows of tokens: at random for training, evenly spaced for testing.

Where a random window begins is a function of (seed, epoch, its number), so a resumed run sees what
an uninterrupted one sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.random import Stream

from ..data.draws import DATA_TENSOR, WINDOW_SLOT, stream_words

__all__ = ["even_starts", "flat_tokens", "random_starts", "window"]


def flat_tokens(tokens: Any, context: int) -> np.ndarray:
    """Tokens in one row, enough of them for a window of ``context`` and the token after it.

    Raises:
        ValueError: for rows of different lengths, more than one row, other numbers, or too few.
    """
    try:
        row = np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            "tokens: expected one row of whole numbers, got rows of different lengths; join them "
            "by numpy.concatenate"
        ) from error
    if row.ndim != 1 or not (row.size == 0 or np.issubdtype(row.dtype, np.integer)):
        raise ValueError(
            f"tokens: expected one row of whole numbers, got shape {row.shape} of {row.dtype}; "
            "join rows by numpy.concatenate"
        )
    if context < 1:
        raise ValueError(f"context: expected 1 or more, got {context}")
    if len(row) <= context:
        raise ValueError(
            f"tokens: expected at least {context + 1} for a window of {context} and what follows "
            f"it, got {len(row)}; the way out: a shorter --context, or more text"
        )
    return row


def random_starts(tokens: int, context: int, seed: int, epoch: int, count: int) -> np.ndarray:
    """Where ``count`` windows begin, int64, uniform over all places, with replacement."""
    words = stream_words(Stream(seed, epoch, DATA_TENSOR, WINDOW_SLOT), count).astype(np.uint64)
    return ((words * np.uint64(tokens - context)) >> np.uint64(32)).astype(np.int64)


def even_starts(tokens: int, context: int, count: int | None) -> np.ndarray:
    """Where test windows begin, int64: side by side, ``count`` of them evenly spaced.

    Of the n = (tokens - 1) // context windows that lie side by side, those numbered
    floor((j + 1/2) n / count); all of them where ``count`` is None or more than n.
    """
    total = (tokens - 1) // context
    count = total if count is None else min(count, total)
    chosen = ((np.arange(count) + 0.5) * total / count).astype(np.int64)
    return chosen * context


def window(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """(B, context) inputs and labels, int64; a label is the token after its input."""
    places = starts[:, None] + np.arange(context + 1)
    cut = tokens[places].astype(np.int64)
    return cut[:, :-1], cut[:, 1:]
