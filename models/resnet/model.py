"""ResNet of basic blocks (He et al., arXiv 1512.03385): ResNet-18 and 34.

Changed for 32x32: the first convolution is 3x3 with stride 1 instead of 7x7 with stride 2, and no
pool follows it, as in the paper's own nets for CIFAR-10 (section 4.2); the four stages and the
projections (option B) are those of ImageNet (table 1). 11,173,962 weights.

Initial weights: He's normal over fan-in (arXiv 1502.01852), as the paper says in section 3.4.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, nn, relu
from extensor.nn import init

from ..vision import ConvUnits, started
from .configs import ResNetConfig

__all__ = ["BasicBlock", "ResNet", "build"]

_draw = init.kaiming_normal


class BasicBlock(nn.Module):
    """relu(conv 3x3 (relu (conv 3x3 x)) + x), each convolution with a batch norm.

    Where the shape changes, x goes through a 1x1 convolution with a batch norm.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, conv: ConvUnits) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, stride=stride)
        self.conv2 = conv(outputs, outputs, 3, relu=False)
        self.shortcut: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.shortcut = conv(inputs, outputs, 1, stride=stride, relu=False)

    def forward(self, x: ExTensor) -> ExTensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        direct = x if self.shortcut is None else self.shortcut(x)
        return relu(self.conv2(self.conv1(x)) + direct)


class ResNet(nn.Module):
    """A convolution, stages of blocks, the mean over all places, a linear layer.

    Args:
        config: the shapes.
        rng: draws the weights.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("resnet", width=0.05)
    >>> models.build("resnet", config, np.random.default_rng(0))(et.zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, config: ResNetConfig, rng: np.random.Generator) -> None:
        super().__init__()
        width = config.wide(config.channels[0])
        conv = ConvUnits(_draw, rng)
        self.stem = conv(config.in_channels, width, 3)
        stages: list[nn.Module] = []
        for number, (blocks, channels) in enumerate(
            zip(config.blocks, config.channels, strict=True)
        ):
            stage: list[nn.Module] = []
            for index in range(blocks):
                stride = 2 if number > 0 and index == 0 else 1
                stage.append(BasicBlock(width, config.wide(channels), stride, conv))
                width = config.wide(channels)
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.GlobalAvgPool2d()
        self.fc = started(nn.Linear(width, config.classes, rng=rng), _draw, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        return self.fc(self.pool(self.stages(self.stem(x))))


def build(config: ResNetConfig, rng: np.random.Generator) -> ResNet:
    """ResNet with fresh weights drawn from ``rng``."""
    return ResNet(config, rng)
