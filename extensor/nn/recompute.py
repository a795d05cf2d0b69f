"""Activation checkpointing by path: parts of a model that run again in the backward pass."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from extensor.nn.module import Module

__all__ = ["outermost", "parse_recompute", "recompute"]

Recomputed = Literal[True, "cheap"]


def outermost(model: Module, match: str) -> dict[str, Module]:
    """The modules whose paths match; of modules in each other, the outermost.

    Args:
        model: the model.
        match: a glob on modules' paths, as "blocks.*".

    Raises:
        ValueError: if none matches.

    >>> from extensor.nn.recompute import outermost
    >>> list(outermost(et.nn.Sequential(et.nn.ReLU(), et.nn.Linear(4, 2)), "*"))
    ['0', '1']
    """
    found: dict[str, Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and fnmatchcase(path, match):
            found[path] = module
    if not found:
        paths = (path for path, _ in model.named_modules() if path)
        globs = (".".join("*" if p.isdecimal() else p for p in path.split(".")) for path in paths)
        known = ", ".join(dict.fromkeys(globs)) or "none"
        raise ValueError(f"{match!r} matches no module; the model's modules: {known}")
    return found


def recompute(model: Module, match: str, how: Recomputed = True) -> tuple[str, ...]:
    """Let parts of a model keep less, and compute the rest again in backward: the same gradients.

    Args:
        model: the model.
        match: a glob on modules' paths, as "blocks.*"; of modules in each other, the outermost.
            Each such part is called with tensors and returns one tensor.
        how: True: a part keeps its input alone, and runs again; see `checkpoint`. "cheap": what
            operations can make again without a product is not kept.

    Returns:
        The paths of the parts.

    Raises:
        ValueError: if no part matches.

    >>> model = et.nn.Sequential(et.nn.Linear(4, 4), et.nn.ReLU(), et.nn.Linear(4, 2))
    >>> et.nn.recompute(model, "[01]")
    ('0', '1')
    >>> model[0].recomputed, model[2].recomputed
    (True, False)
    """
    found = outermost(model, match)
    for module in found.values():
        module.recomputed = how
    return tuple(found)


def parse_recompute(text: str) -> tuple[tuple[str, Recomputed], ...]:
    """What `recompute` takes, as text: ``GLOB[=cheap]``, several with commas; "" is nothing.

    Where two globs match one part, the first is the one that counts: apply them from last to first.

    Args:
        text: such as "blocks.*", or "blocks.[01]=cheap,blocks.2".

    Returns:
        Pairs of a glob and ``how``, in the order of the text.

    Raises:
        ValueError: for an empty glob, or anything but "cheap" after "=".

    >>> from extensor.nn.recompute import parse_recompute
    >>> parse_recompute("blocks.0,blocks.*=cheap")
    (('blocks.0', True), ('blocks.*', 'cheap'))
    """
    found: list[tuple[str, Recomputed]] = []
    for part in text.split(",") if text else ():
        match, equals, how = part.strip().partition("=")
        if not match or (equals and how != "cheap"):
            raise ValueError(f"expected GLOB or GLOB=cheap, as in blocks.*=cheap, got {part!r}")
        found.append((match, "cheap" if equals else True))
    return tuple(found)
