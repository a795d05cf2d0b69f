"""Text augmentation: noise on tokens."""

from __future__ import annotations

import numpy as np

__all__ = ["TEXT_AUGMENTATIONS", "replace_tokens"]

TEXT_AUGMENTATIONS = ("none", "noise")
"""What ``--augment`` takes for texts."""


def replace_tokens(
    tokens: np.ndarray, words: np.ndarray, share: float, vocab_size: int
) -> np.ndarray:
    """Replace each token by a random one with probability ``share``.

    Args:
        tokens: whole numbers of any shape.
        words: random uint32 of the same shape: the high half decides whether, the low half which.
        share: in [0, 1).
        vocab_size: how many tokens there are, up to 2**16.

    Raises:
        ValueError: for a share or a vocabulary out of range.
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share: expected a number in [0, 1), got {share!r}")
    if not 1 <= vocab_size <= 1 << 16:
        raise ValueError(f"vocab_size: expected 1..65536, got {vocab_size}")
    hit = (words >> np.uint32(16)) < np.uint32(round(share * (1 << 16)))
    other = ((words & np.uint32(0xFFFF)).astype(np.int64) * vocab_size) >> 16
    return np.where(hit, other, tokens)
