"""BERT's masked language modelling: which tokens a model must fill in."""

from __future__ import annotations

import numpy as np

__all__ = ["IGNORE_LABEL", "mask_tokens"]

IGNORE_LABEL = -1
"""The label of a place that the loss leaves out."""
SHARE = 0.15


def mask_tokens(
    tokens: np.ndarray, which: np.ndarray, other: np.ndarray, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select 15% of the tokens, at least one: 80% of them are masked, 10% replaced, 10% left.

    Args:
        tokens: (B, T), whole numbers in 0..vocab - 1.
        which: random uint32 of the same shape: decide whether a token is selected, and for what.
        other: random uint32 of the same shape: the tokens that replace.
        vocab: how many tokens there are; number ``vocab`` is the mask.

    Returns:
        Inputs and labels (B, T), int64; labels are `IGNORE_LABEL` where no token is selected.

    Raises:
        ValueError: for no tokens, random words of another shape, or a token that is none.

    Source: Devlin et al., arXiv 1810.04805, section 3.1.
    """
    if not tokens.size or which.shape != tokens.shape or other.shape != tokens.shape:
        raise ValueError(
            f"mask_tokens: expected tokens (B, T) and random words of their shape, got "
            f"{tokens.shape}, {which.shape} and {other.shape}"
        )
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(
            f"mask_tokens: expected tokens in 0..{vocab - 1}, got {tokens.min()}..{tokens.max()}"
        )
    least = np.uint32(SHARE * 2.0**32)
    selected = (which < least) | (which == which.min())
    share = np.minimum(which, least) / float(least)  # uniform where a token is selected for
    drawn = (other.astype(np.uint64) * np.uint64(vocab) >> np.uint64(32)).astype(np.int64)
    filled = np.where(share < 0.8, vocab, np.where(share < 0.9, drawn, tokens))
    return np.where(selected, filled, tokens), np.where(selected, tokens, IGNORE_LABEL)
