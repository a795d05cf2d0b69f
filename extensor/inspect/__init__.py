"""Measure what low precision does to a tensor or a model: by format, by layer, by operand."""

from extensor.inspect.compare import LayerComparison, LayerRow, compare_layers
from extensor.inspect.grid_plot import plot
from extensor.inspect.health import SlotHealth, health_table, slot_health
from extensor.inspect.memory import Holder, MemoryLedger, MemoryReport, memory_ledger
from extensor.inspect.noise import decibels, normal_sqnr, sqnr
from extensor.inspect.plan import MemoryLimitError, MemoryPlan, plan_memory
from extensor.inspect.table import Table

__all__ = [
    "Holder",
    "LayerComparison",
    "LayerRow",
    "MemoryLedger",
    "MemoryLimitError",
    "MemoryPlan",
    "MemoryReport",
    "SlotHealth",
    "Table",
    "compare_layers",
    "decibels",
    "health_table",
    "memory_ledger",
    "normal_sqnr",
    "plan_memory",
    "plot",
    "slot_health",
    "sqnr",
]


def __dir__() -> list[str]:
    return sorted(__all__)
