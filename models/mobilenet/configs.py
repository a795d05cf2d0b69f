"""MobileNetV1's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..vision import VisionConfig

__all__ = ["CONFIGS", "MobileNetConfig"]

LAYERS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
)


@dataclass(frozen=True)
class MobileNetConfig(VisionConfig):
    """MobileNetV1 for small images.

    Attributes:
        stem: channels of the first convolution.
        layers: (channels, stride) of each depthwise separable layer (table 1 of the paper).
    """

    stem: int = 32
    layers: tuple[tuple[int, int], ...] = LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stem < 1 or any(min(layer) < 1 for layer in self.layers):
            raise ValueError(f"MobileNet: expected channels and strides of 1 or more, got {self}")


CONFIGS = {"mobilenet": MobileNetConfig(), "half": MobileNetConfig(width=0.5)}
"""The variants; the first is the default."""
