"""The perceptron's shapes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "MLPConfig"]


@dataclass(frozen=True)
class MLPConfig:
    """A multilayer perceptron on flattened images.

    Attributes:
        in_channels: channels of the images.
        image_size: height and width.
        classes: number of classes.
        hidden: widths of the hidden layers; none gives a linear classifier.
    """

    in_channels: int = 1
    image_size: int = 28
    classes: int = 10
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        if min(self.in_channels, self.image_size, self.classes, *self.hidden) < 1:
            raise ValueError(f"MLP: expected sizes of 1 or more, got {self}")


CONFIGS = {
    "mlp": MLPConfig(),
    "wide": MLPConfig(hidden=(1024, 1024)),
    "linear": MLPConfig(hidden=()),
}
"""The variants; the first is the default."""
