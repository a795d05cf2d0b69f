"""Sequential."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extensor.nn.module import Module

__all__ = ["Sequential"]


class Sequential(Module):
    """Modules called one after the other, each on the output of the one before.

    Args:
        layers: named ``"0"``, ``"1"``, ...
        named: further layers under names of their own.

    Raises:
        TypeError: if something is no Module.
        ValueError: for two layers of one name.
    """

    def __init__(self, *layers: Module, **named: Module) -> None:
        for name, layer in [*((str(i), layer) for i, layer in enumerate(layers)), *named.items()]:
            if not isinstance(layer, Module):
                raise TypeError(f"Sequential: {name}: wanted a Module, got {layer!r:.80}")
            if name in vars(self):
                raise ValueError(
                    f"Sequential: wanted a name of its own for each layer, got two named {name!r}; "
                    "layers without a name are numbered from 0"
                )
            setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
        """The last module's output."""
        for layer in self:
            x = layer(x)
        return x

    def __iter__(self) -> Iterator[Module]:
        return (layer for _, layer in self.named_children())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]
