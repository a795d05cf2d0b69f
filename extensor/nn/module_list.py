"""ModuleList."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extensor.nn.module import Module

__all__ = ["ModuleList"]


class ModuleList(Module):
    """A list of modules whose parameters are found; it computes nothing itself.

    Args:
        modules: named ``"0"``, ``"1"``, ...

    Raises:
        TypeError: if something is no Module.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end."""
        if not isinstance(module, Module):
            raise TypeError(f"ModuleList: wanted a Module, got {module!r:.80}")
        setattr(self, str(len(self)), module)

    def __iter__(self) -> Iterator[Module]:
        return (module for _, module in self.named_children())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]
