"""What a run will hold, and which settings would make it smaller."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extensor.inspect import Holder
from extensor.nn import Module
from extensor.nn.recompute import outermost
from extensor.quant.array import stored_nbytes
from extensor.quant.spec import QuantSpec

from .config import RunConfig

__all__ = ["MemoryPlan", "again", "gradient_bytes", "repeated", "savings"]

NARROW = 1 + 1 / 32
"""Bytes of a value in MXFP8, with its share of the block's scale."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a step holds when its forward pass is done, and the gradients of the backward pass.

    Attributes:
        kinds: bytes by kind.
        saved: what layers keep for backward, by slot, largest first.
    """

    kinds: Mapping[str, int]
    saved: tuple[Holder, ...]

    @property
    def total(self) -> int:
        """All of it. Gradients come as what is kept goes, so that a step holds less at once."""
        return sum(self.kinds.values())


def gradient_bytes(config: RunConfig, model: Any) -> int:
    """Of the gradients that a step holds at once: all, or the largest alone."""
    sizes = [_gradient(param) for param in model.parameters()]
    return max(sizes) if config.update == "in_backward" else sum(sizes)


def _gradient(param: Any) -> int:
    """Bytes of a parameter's gradient: of its dtype, bfloat16 of blocks."""
    return int(2 * param.size if param.is_blocked else param.nbytes)


def repeated(model: Module) -> str | None:
    """The glob of the model's largest row of numbered parts, as "blocks.*"; None: it has none."""
    sizes = Counter[str]()
    for path, module in model.named_modules():
        above, _, last = path.rpartition(".")
        if above and last.isdecimal():
            sizes[above] += sum(param.size for param in module.parameters())
    return f"{max(sizes, key=sizes.__getitem__)}.*" if sizes else None


def again(model: Module, match: str, held: Sequence[Holder]) -> int:
    """Bytes that parts keep less for backward if they run again one by one; inputs not counted.

    Args:
        model: of the run.
        match: a glob on the parts' paths.
        held: what held memory at the peak.
    """
    parts = outermost(model, match)
    kept = Counter[str]()
    for one in held:
        part = next((p for p in parts if one.layer == p or one.layer.startswith(f"{p}.")), None)
        if one.kind == "saved" and part is not None:
            kept[part] += one.nbytes
    return sum(kept.values()) - max(kept.values(), default=0)


def savings(
    config: RunConfig, kinds: Mapping[str, int], model: Any, held: Sequence[Holder] = ()
) -> list[tuple[str, int | None]]:
    """Settings that a run does not have, with the bytes that each alone would save, most first.

    Args:
        config: of the run.
        kinds: bytes by kind; without "saved" what depends on it is None, and first.
        model: of the run.
        held: what held memory, where that is known.
    """
    found: list[tuple[str, int | None]]
    saved = kinds.get("saved")
    sizes = [_gradient(param) for param in model.parameters()]
    matrices = [param for param in model.parameters() if param.ndim > 1]
    numbers = sum(param.size for param in matrices)
    half = None if saved is None else (saved + kinds["workspaces"]) // 2
    found = [("half of --batch-size", half)]
    if config.optimizer_states in (wide := {"float32": 4, "bfloat16": 2}):
        share = 1 - NARROW / wide[config.optimizer_states]
        found.append(("--optimizer-states mxfp8_e4m3", int(kinds["states"] * share)))
    if config.weights == "float32":
        both = 2 if config.update == "after_backward" else 1
        found.append(("--weights bfloat16 (and gradients)", 2 * numbers * both))
    elif config.weights == "bfloat16" and all(param.ndim == 2 for param in matrices):
        spec = QuantSpec("mxint8").resolve(2)
        blocks = sum(stored_nbytes(spec, param.shape) for param in matrices)
        found.append(("--weights mxint8", 2 * numbers - blocks))
    if config.update == "after_backward":
        setting = "--update in_backward --clip-norm 0 --loss-scale off"
        found.append((setting, sum(sizes) - max(sizes)))
    if config.saved == "float32":
        most = None if saved is None else int(saved * (1 - NARROW / 4))
        found.append(("--saved mxfp8, at most", most))
    if not config.recompute and (match := repeated(model)) is not None:
        most = None if saved is None else again(model, match, held)
        found.append((f"--recompute '{match}', at most", most))
    known = [row for row in found if row[1] is None or row[1] > 0]
    return sorted(known, key=lambda row: -math.inf if row[1] is None else -row[1])
