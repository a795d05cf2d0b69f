"""VGG's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..vision import VisionConfig

__all__ = ["CONFIGS", "VGGConfig"]

VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@dataclass(frozen=True)
class VGGConfig(VisionConfig):
    """VGG for small images.

    Attributes:
        stages: channels of the 3x3 convolutions between pools (table 1 of the paper).
        hidden: widths of the hidden linear layers; none leaves one linear layer.
        batch_norm: a batch norm after each convolution.
        dropout: before each hidden linear layer, in [0, 1).
    """

    stages: tuple[tuple[int, ...], ...] = VGG16
    hidden: tuple[int, ...] = (512, 512)
    batch_norm: bool = True
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stages or min(min(s, default=0) for s in self.stages) < 1:
            raise ValueError(f"VGG: stages: expected channels of 1 or more, got {self.stages}")
        if min(self.hidden, default=1) < 1:
            raise ValueError(f"VGG: hidden: expected widths of 1 or more, got {self.hidden}")


CONFIGS = {
    "vgg16_bn": VGGConfig(),
    "vgg16": VGGConfig(batch_norm=False),
    "vgg11_bn": VGGConfig(stages=VGG11),
}
"""The variants; the first is the default."""
