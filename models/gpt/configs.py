"""GPT's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..language import LanguageConfig

__all__ = ["CONFIGS", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig(LanguageConfig):
    """A decoder-only transformer.

    Attributes:
        bias: whether linear layers and norms have biases, as GPT-2's do.
    """

    bias: bool = False


CONFIGS = {"nano": GPTConfig(), "small": GPTConfig(context=256, layers=6, heads=6, width=384)}
"""The variants; the first is the default: nanoGPT's for a CPU, then its own for a GPU."""
