"""Which operand to move to which format at the same number of bits, by a run's telemetry.

The quantization noise of an operand adds to the noise of its product, and that to the gradients
that come after it. Noise here is relative and squared, and noises of different operands are taken
to be independent, so that they add. An operand's noise reaches

    fprop   the gradients of all layers (values flow forward, gradients back)
    dgrad   those of the layers before its own
    wgrad   that of its own layer

each with the layer's share of the squared gradient norm. The advice minimises the sum of noise
times reach while the operands' values take no more bits than they do now.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extensor.quant.recipe import LayerRecipe, OperandSpec
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec

from .operand_noise import TRIED

__all__ = ["Move", "Reallocation", "bits_of", "reallocate"]

NOW = "now"
STEPS = 60
"""Halvings of the price of a bit."""


@dataclass(frozen=True)
class Move:
    """One operand in another recipe's format.

    Attributes:
        layer, slot: the operand.
        operand: its format now, in words.
        recipe: whose format it should take.
        noise, advised_noise: squared error over squared values, in the two.
        bits, advised_bits: of a value.
        reach: the share of the squared gradient norm that its noise reaches, 0 to 1.
    """

    layer: str
    slot: str
    operand: str
    recipe: str
    noise: float
    advised_noise: float
    bits: float
    advised_bits: float
    reach: float


@dataclass(frozen=True)
class Reallocation:
    """The advice.

    Attributes:
        moves: operands that change, those that gain the most noise power first.
        bits, advised_bits: mean of a value, over all operands that were measured.
        noise, advised_noise: the sum of noise times reach.
        operands: what ``--operands`` takes; empty where nothing moves.
    """

    moves: tuple[Move, ...]
    bits: float
    advised_bits: float
    noise: float
    advised_noise: float
    operands: str


@dataclass(frozen=True)
class _Slot:
    """An operand as the telemetry has it, and what it may become."""

    layer: str
    slot: str
    operand: str
    values: int
    reach: float
    options: dict[str, tuple[float, float]]  # name: (noise, bits)

    def cheapest(self, price: float) -> str:
        """The option of least noise plus bits at a price."""
        return min(
            self.options,
            key=lambda name: (
                self.reach * self.options[name][0] + price * self.values * self.options[name][1],
                name != NOW,
            ),
        )


def bits_of(operand: OperandSpec) -> float:
    """Bits that a value takes, scales included."""
    if isinstance(operand, QuantSpec):
        tile = operand.tile if isinstance(operand.tile, tuple) else None
        return operand.row.bits_per_element(tile)
    return 32.0 if operand == "float32" else 16.0


def reallocate(
    records: Sequence[Mapping[str, Any]], layers: Mapping[str, LayerRecipe]
) -> Reallocation | None:
    """The best formats at the bits of now; None where the telemetry holds no operands.

    Args:
        records: of telemetry.jsonl.
        layers: the recipe of each layer, in model order.
    """
    slots = _slots([r for r in records if r["layers"]], layers)
    if not slots:
        return None
    budget = sum(s.values * s.options[NOW][1] for s in slots)
    low, high, best = 0.0, 1.0, {id(s): NOW for s in slots}
    for _ in range(STEPS):  # the least price at which everything fits
        price = math.sqrt(low * high) if low else high / 16
        chosen = {id(s): s.cheapest(price) for s in slots}
        if sum(s.values * s.options[chosen[id(s)]][1] for s in slots) <= budget * (1 + 1e-12):
            high = price
            if _noise(slots, chosen) <= _noise(slots, best):
                best = chosen
        else:
            low = price
    _spend(slots, best, budget)
    count = sum(s.values for s in slots)
    moves = [
        Move(s.layer, s.slot, s.operand, name, *_pair(s, name, 0), *_pair(s, name, 1), s.reach)
        for s in slots
        if (name := best[id(s)]) != NOW
    ]
    moves.sort(key=lambda m: m.reach * (m.advised_noise - m.noise))
    advised = sum(s.values * s.options[best[id(s)]][1] for s in slots)
    return Reallocation(
        tuple(moves),
        budget / count,
        advised / count,
        _noise(slots, {id(s): NOW for s in slots}),
        _noise(slots, best),
        _text(moves, layers),
    )


def _spend(slots: Sequence[_Slot], chosen: dict[int, str], budget: float) -> None:
    """Spend what one price for all has left: the largest gain for a bit that fits, again."""
    while True:
        left = budget - sum(s.values * s.options[chosen[id(s)]][1] for s in slots)
        found = []
        for place, s in enumerate(slots):
            noise, bits = s.options[chosen[id(s)]]
            for name, (less, more) in s.options.items():
                gain, cost = s.reach * (noise - less), s.values * (more - bits)
                if gain > 0 and cost <= left:
                    found.append((gain / max(cost, 1e-9), -place, name))  # the first of equals
        if not found:
            return
        _, place, name = max(found)
        chosen[id(slots[-place])] = name


def _pair(slot: _Slot, name: str, place: int) -> tuple[float, float]:
    return slot.options[NOW][place], slot.options[name][place]


def _noise(slots: Sequence[_Slot], chosen: Mapping[int, str]) -> float:
    return sum(s.reach * s.options[chosen[id(s)]][0] for s in slots)


def _slots(records: Sequence[Mapping[str, Any]], layers: Mapping[str, LayerRecipe]) -> list[_Slot]:
    """The operands that may move, with means over the records."""
    squares = {
        path: _mean([_square(r["layers"].get(path, {}).get("gradient_norm")) for r in records])
        for path in layers
    }
    whole = sum(v for v in squares.values() if v is not None)
    found: list[_Slot] = []
    before = 0.0
    for path, recipe in layers.items():
        own = (squares[path] or 0.0) / whole if whole else 0.0
        reach = {"fprop": 1.0, "dgrad": before, "wgrad": own}
        seen = [r["layers"].get(path, {}).get("operands", {}) for r in records]
        for slot in seen[-1] if seen else ():
            gemm = slot.partition(".")[0]
            rows = [row[slot] for row in seen if slot in row]
            options = _options(slot, recipe, rows)
            if reach[gemm] and NOW in options and _may_move(recipe, gemm):
                row = rows[-1]
                found.append(_Slot(path, slot, row["operand"], row["values"], reach[gemm], options))
        before += own
    return found


def _may_move(recipe: LayerRecipe, gemm: str) -> bool:
    """Whether single operands of a product may change: no transform ties it to the other one."""
    product = getattr(recipe, gemm)
    specs = [o for o in (product.a, product.b) if isinstance(o, QuantSpec)]
    tied = any(s.transform is not None or s.rebased or s.element_scale != 1.0 for s in specs)
    return not (tied or recipe.uses_forward_operands)


def _options(
    slot: str, recipe: LayerRecipe, rows: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    found = {}
    for name in (NOW, *TRIED):
        noise = _mean([row["noise"].get(name) for row in rows])
        operand = recipe.slot(slot) if name == NOW else get_recipe(name).layers.slot(slot)
        if noise is not None:
            found[name] = noise, bits_of(operand)
    return found


def _square(value: float | None) -> float | None:
    return None if value is None else value**2


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _text(moves: Sequence[Move], layers: Mapping[str, LayerRecipe]) -> str:
    """``--operands``: a slot that moves alike in every layer is written once."""
    by_slot: dict[str, dict[str, str]] = {}
    for move in moves:
        by_slot.setdefault(move.slot, {})[move.layer] = move.recipe
    parts = []
    for slot, chosen in by_slot.items():
        names = set(chosen.values())
        if len(names) == 1 and len(chosen) == len(layers):
            parts.append(f"*/{slot}={names.pop()}")
        else:
            parts += [f"{path}/{slot}={name}" for path, name in chosen.items()]
    return ",".join(parts)
