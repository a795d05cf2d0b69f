"""The encoder's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..language import LanguageConfig

__all__ = ["CONFIGS", "EncoderConfig"]


@dataclass(frozen=True)
class EncoderConfig(LanguageConfig):
    """An encoder-only transformer; one token more than ``vocab`` stands for a hidden one."""

    @property
    def mask(self) -> int:
        """The token that hides another."""
        return self.vocab


CONFIGS = {
    "nano": EncoderConfig(),
    "small": EncoderConfig(context=256, layers=6, heads=6, width=384),
}
"""The variants; the first is the default: as large as GPT's of the same name."""
