"""LeNet-5's shapes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "LeNetConfig"]


@dataclass(frozen=True)
class LeNetConfig:
    """LeNet-5 for square images.

    Attributes:
        in_channels: channels of the images.
        image_size: height and width; the first convolution keeps it, so a multiple of 4 or, as
            with 28, one where (size / 2 - 4) is even.
        classes: number of classes.
        channels: of the two convolutions.
        hidden: widths of the two hidden linear layers.
    """

    in_channels: int = 1
    image_size: int = 28
    classes: int = 10
    channels: tuple[int, int] = (6, 16)
    hidden: tuple[int, int] = (120, 84)

    def __post_init__(self) -> None:
        sizes = (self.in_channels, self.classes, *self.channels, *self.hidden)
        if min(sizes) < 1:
            raise ValueError(f"LeNet-5: expected sizes of 1 or more, got {self}")
        if self.image_size < 12:
            raise ValueError(f"LeNet-5: expected images of 12x12 or more, got {self.image_size}")

    @property
    def features(self) -> int:
        """Values per image after the second pooling: 400 for 28x28."""
        side = (self.image_size // 2 - 4) // 2
        return int(self.channels[1] * side * side)


CONFIGS = {"lenet5": LeNetConfig()}
"""The variants; the first is the default."""
