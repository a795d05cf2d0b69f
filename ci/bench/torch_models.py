"""Torch's counterparts of our models, of torch's own layers; torch is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extensor.models.gpt.configs import GPTConfig

__all__ = ["torch_gpt", "torch_lenet", "torch_resnet"]


def torch_lenet() -> Any:
    """LeNet-5 of torch's layers."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def torch_resnet() -> Any:
    """ResNet-18 of torch's layers, changed for 32x32 images as models/resnet says."""
    import torch
    from torch import nn

    def unit(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        return [conv, nn.BatchNorm2d(outputs)]

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *unit(inputs, outputs, 3, stride), nn.ReLU(), *unit(outputs, outputs, 3)
            )
            same = stride == 1 and inputs == outputs
            self.shortcut = nn.Sequential(*([] if same else unit(inputs, outputs, 1, stride)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.shortcut(x))

    layers: list[nn.Module] = [*unit(3, 64, 3), nn.ReLU()]
    inputs = 64
    for number, outputs in enumerate((64, 128, 256, 512)):
        for stride in (2 if number else 1, 1):
            layers.append(Block(inputs, outputs, stride))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def torch_gpt(config: GPTConfig, state: Mapping[str, Any]) -> Any:
    """Our GPT as torch modules, its parameters under our names, with the weights of ``state``."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(config.width, 3 * config.width, config.bias)
            self.out = nn.Linear(config.width, config.width, config.bias)

        def forward(self, x: Any) -> Any:
            size = config.width // config.heads
            parts = self.qkv(x).split(config.width, dim=-1)
            q, k, v = (p.unflatten(-1, (config.heads, size)).transpose(1, 2) for p in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(x.shape))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(config.width, 4 * config.width, config.bias)
            self.down = nn.Linear(4 * config.width, config.width, config.bias)

        def forward(self, x: Any) -> Any:
            return self.down(functional.gelu(self.up(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
            self.attention = Attention()
            self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
            self.feed_forward = FeedForward()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width, bias=config.bias)
            self.head = nn.Linear(config.width, config.vocab, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = GPT()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    tensors.setdefault("head.weight", tensors["tokens.weight"])  # tied: ours names it once
    model.load_state_dict(tensors)
    return model
