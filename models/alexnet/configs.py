"""AlexNet's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..vision import VisionConfig

__all__ = ["CONFIGS", "AlexNetConfig"]


@dataclass(frozen=True)
class AlexNetConfig(VisionConfig):
    """AlexNet for small images.

    Attributes:
        dropout: before each hidden linear layer, in [0, 1).
    """

    dropout: float = 0.5


CONFIGS = {"alexnet": AlexNetConfig()}
"""The variants; the first is the default."""
