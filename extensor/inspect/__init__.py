"""Measure what low precision does to a model, by layer and by operand."""

from extensor.inspect.compare import LayerComparison, LayerRow, compare_layers
from extensor.inspect.health import SlotHealth, health_table, slot_health
from extensor.inspect.table import Table

__all__ = [
    "LayerComparison",
    "LayerRow",
    "SlotHealth",
    "Table",
    "compare_layers",
    "health_table",
    "slot_health",
]


def __dir__() -> list[str]:
    return sorted(__all__)
