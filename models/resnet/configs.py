"""ResNet's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..vision import VisionConfig

__all__ = ["CONFIGS", "ResNetConfig"]


@dataclass(frozen=True)
class ResNetConfig(VisionConfig):
    """ResNet of basic blocks for small images.

    Attributes:
        blocks: how many blocks each stage has; stages after the first halve the image.
        channels: of each stage.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    channels: tuple[int, ...] = (64, 128, 256, 512)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.blocks) != len(self.channels) or min(*self.blocks, *self.channels) < 1:
            raise ValueError(
                "ResNet: expected a number of blocks and of channels, 1 or more, for each stage, "
                f"got blocks {self.blocks} and channels {self.channels}"
            )


CONFIGS = {"resnet18": ResNetConfig(), "resnet34": ResNetConfig(blocks=(3, 4, 6, 3))}
"""The variants; the first is the default."""
