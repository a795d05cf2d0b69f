"""The telemetry of a recipe as a table: saturation and underflow of each layer's operands."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from extensor.inspect.table import Table
from extensor.quant.recipe import SLOTS
from extensor.quant.recipe_state import RecipeState
from extensor.quant.spec import QuantSpec

__all__ = ["SlotHealth", "health_table", "slot_health"]

MANY_SATURATED = 0.02
"""If the largest value of each block of 32 saturated, the share would be 0.03."""
MANY_FLUSHED = 0.25
"""MXFP4 flushes about a tenth of normally distributed values."""
MANY_REBASE_CHANGED = 0.1
"""Rebasing changes fewer values of real tensors (`QuantSpec.rebased`; docs/how-to/gpu.md)."""


@dataclass(frozen=True)
class SlotHealth:
    """What quantizing did to one operand of one layer since the telemetry's last reset.

    Attributes:
        layer: the layer's path.
        slot: the operand, as in `SLOTS`.
        format: the operand's format; None where the slot is no longer quantized to blocks.
        scale_rule: the rule in force; None likewise.
        count: how many values were quantized.
        saturated: the share of them that rounded beyond the largest code, 0 to 1.
        flushed: the share that were not zero and became zero, 0 to 1.
        switched: whether the gradient scaler changed the scale rule.
        rebase_changed: the share that rebasing to a tile's scale changed, 0 to 1
            (`QuantSpec.rebased`).
        fallbacks: how many products of the slot's GEMM a GPU computed in bfloat16, since FP8 did
            not hold an operand; counted at the slot of the GEMM's first operand.

    >>> et.inspect.SlotHealth("fc1", "fprop.x", "mxfp4", "floor", 1024, 0.05, 0.1).verdict
    'saturates'
    """

    layer: str
    slot: str
    format: str | None
    scale_rule: str | None
    count: int
    saturated: float
    flushed: float
    switched: bool = False
    rebase_changed: float = 0.0
    fallbacks: int = 0

    @property
    def verdict(self) -> str:
        """``"ok"``, or any of ``"saturates"``, ``"flushes"`` and ``"changes when rebased"``."""
        words = ["saturates"] if self.saturated > MANY_SATURATED else []
        words += ["flushes"] if self.flushed > MANY_FLUSHED else []
        words += ["changes when rebased"] if self.rebase_changed > MANY_REBASE_CHANGED else []
        return " and ".join(words) or "ok"


def slot_health(
    state: RecipeState, switched: Container[tuple[str, str]] = ()
) -> tuple[SlotHealth, ...]:
    """One row per (layer, slot) that has telemetry, layers in model order, slots in GEMM order.

    Args:
        state: what `apply_recipe` returned.
        switched: the (layer, slot) pairs whose scale rule was changed.

    Returns:
        The rows.

    >>> layer = et.nn.Linear(32, 32, rng=0)
    >>> state = et.nn.apply_recipe(layer, "mxfp4_all")
    >>> y = layer(et.randn(8, 32, seed=0))
    >>> [(row.slot, row.format, row.count) for row in et.inspect.slot_health(state)]
    [('fprop.x', 'mxfp4', 256), ('fprop.w', 'mxfp4', 1024), ('wgrad.x', 'mxfp4', 256)]
    """
    rows = []
    for path, context in state.layers.items():
        for slot in SLOTS:
            stats = state.telemetry.get((path, slot))
            if stats is None:
                continue
            spec = context.operand(slot)
            blocked = spec if isinstance(spec, QuantSpec) else None
            rows.append(
                SlotHealth(
                    path,
                    slot,
                    blocked.format if blocked else None,
                    blocked.rule if blocked else None,
                    stats.count,
                    stats.saturated / max(stats.count, 1),
                    stats.flushed / max(stats.count, 1),
                    (path, slot) in switched,
                    stats.rebase_changed / max(stats.count, 1),
                    stats.fallbacks,
                )
            )
    return tuple(rows)


def health_table(rows: tuple[SlotHealth, ...]) -> Table:
    """The rows of `slot_health`, or of a gradient scaler's report, as text.

    Args:
        rows: of any number of layers.

    Returns:
        A table; ``print`` aligns it.

    >>> row = et.inspect.SlotHealth("fc1", "fprop.x", "mxfp4", "floor", 1024, 0.05, 0.1)
    >>> print(et.inspect.health_table((row,)))
    layer     slot  format   rule  values  saturated  flushed  rebased    verdict
    fc1    fprop.x   mxfp4  floor   1,024     5.000%  10.000%   0.000%  saturates
    """
    columns = ("layer", "slot", "format", "rule", "values", "saturated", "flushed", "rebased")
    return Table(
        (*columns, "verdict"),
        tuple(
            (
                row.layer,
                row.slot,
                row.format or "-",
                (row.scale_rule or "-") + (" (switched)" if row.switched else ""),
                f"{row.count:,}",
                f"{row.saturated:.3%}",
                f"{row.flushed:.3%}",
                f"{row.rebase_changed:.3%}",
                row.verdict,
            )
            for row in rows
        ),
    )
