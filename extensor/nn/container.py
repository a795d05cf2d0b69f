"""Modules that hold other modules in order, and Flatten, which stands between them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.ops.arguments import tensors_only

__all__ = ["Flatten", "ModuleList", "Sequential"]


class _Container(Module):
    """Iteration, length and indexing over child modules, in the order they were set."""

    def __iter__(self) -> Iterator[Module]:
        return (module for _, module in self.named_children())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]


class Sequential(_Container):
    """Modules called one after the other, each on the output of the one before.

    Args:
        layers: named ``"0"``, ``"1"``, ...
        named: further layers under names of their own.

    Raises:
        TypeError: if something is no Module.
        ValueError: for two layers of one name.

    >>> model = et.nn.Sequential(et.nn.Linear(4, 8, rng=0), et.nn.ReLU(), head=et.nn.Linear(8, 2))
    >>> model
    Sequential(
      (0): Linear(4, 8)
      (1): ReLU()
      (head): Linear(8, 2)
    )
    >>> model(et.zeros((1, 4))).shape
    (1, 2)
    """

    def __init__(self, *layers: Module, **named: Module) -> None:
        for name, layer in [*((str(i), layer) for i, layer in enumerate(layers)), *named.items()]:
            if not isinstance(layer, Module):
                raise TypeError(f"Sequential: {name}: expected a Module, got {reprlib.repr(layer)}")
            if name in vars(self):
                raise ValueError(
                    f"Sequential: expected a name of its own for each layer, got two named "
                    f"{name!r}; layers without a name are numbered from 0"
                )
            setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
        """See :meth:`extensor.nn.Module.forward`: the last module's output."""
        for layer in self:
            x = layer(x)
        return x


class ModuleList(_Container):
    """A list of modules whose parameters are found; it computes nothing itself.

    Args:
        modules: named ``"0"``, ``"1"``, ...

    Raises:
        TypeError: if something is no Module.

    >>> layers = et.nn.ModuleList(et.nn.Linear(4, 4) for _ in range(3))
    >>> len(layers), [name for name, _ in layers.named_children()]
    (3, ['0', '1', '2'])
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end.

        Args:
            module: its name is the length of the list before.

        Raises:
            TypeError: if it is no Module.

        >>> layers = et.nn.ModuleList()
        >>> layers.append(et.nn.ReLU())
        >>> len(layers)
        1
        """
        if not isinstance(module, Module):
            raise TypeError(f"ModuleList: expected a Module, got {reprlib.repr(module)}")
        setattr(self, str(len(self)), module)


class Flatten(Module):
    """Joins all axes from ``start`` on: (N, C, H, W) -> (N, C H W).

    Args:
        start: the first axis that is joined, 0 or more.

    Raises:
        ValueError: if ``start`` is negative; when called, for an input of fewer axes.

    >>> et.nn.Flatten()(et.zeros((8, 3, 4, 4))).shape
    (8, 48)
    """

    def __init__(self, start: int = 1) -> None:
        self.start = check_size("start", start, 0)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same values with fewer axes."""
        tensors_only("Flatten", x)
        if x.ndim <= self.start:
            raise ValueError(
                f"Flatten: expected an input of more than {self.start} axes, got shape {x.shape}"
            )
        return x.reshape((*x.shape[: self.start], math.prod(x.shape[self.start :])))

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return "" if self.start == 1 else f"start={self.start}"
