"""GoogLeNet's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..vision import VisionConfig

__all__ = ["CONFIGS", "STAGES", "GoogLeNetConfig", "Inception"]


class Inception(NamedTuple):
    """Channels of one inception module (a row of the paper's table 1).

    Attributes:
        one: of the 1x1 branch.
        three_in, three: of the 3x3 branch, its 1x1 reduction first.
        five_in, five: of the 5x5 branch, likewise.
        pool: of the 1x1 projection after the pool.
    """

    one: int
    three_in: int
    three: int
    five_in: int
    five: int
    pool: int


STAGES: tuple[dict[str, Inception], ...] = (
    {"a3": Inception(64, 96, 128, 16, 32, 32), "b3": Inception(128, 128, 192, 32, 96, 64)},
    {
        "a4": Inception(192, 96, 208, 16, 48, 64),
        "b4": Inception(160, 112, 224, 24, 64, 64),
        "c4": Inception(128, 128, 256, 24, 64, 64),
        "d4": Inception(112, 144, 288, 32, 64, 64),
        "e4": Inception(256, 160, 320, 32, 128, 128),
    },
    {"a5": Inception(256, 160, 320, 32, 128, 128), "b5": Inception(384, 192, 384, 48, 128, 128)},
)
"""The modules between pools; the paper calls them 3a, 3b, 4a, ..."""


@dataclass(frozen=True)
class GoogLeNetConfig(VisionConfig):
    """GoogLeNet for small images.

    Attributes:
        batch_norm: a batch norm after each convolution (arXiv 1502.03167).
        dropout: before the linear layer, in [0, 1).
    """

    batch_norm: bool = True
    dropout: float = 0.4


CONFIGS = {"googlenet_bn": GoogLeNetConfig(), "googlenet": GoogLeNetConfig(batch_norm=False)}
"""The variants; the first is the default."""
