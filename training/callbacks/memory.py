"""The memory of a run: what it will hold, what its first step held, and what does not fit."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from extensor.inspect import MemoryLedger, MemoryReport, memory_ledger

from ..records import StepReport
from ..rundir import write_json
from .base import Callback, RunView

__all__ = ["MEMORY", "ShowMemory"]

MEMORY = "memory.json"
POINTS = 400
"""Of the timeline in the file."""
SETTINGS = (
    "smaller batches (--batch-size)",
    "optimizer states in 8 bits (--optimizer-states mxfp8_e4m3)",
    "activations in bfloat16 (--activations bfloat16)",
    "what is kept for backward in blocks (--saved mxfp8_e4m3)",
    "blocks that are run again (block.recomputed = True)",
)
"""What makes a run smaller."""


class ShowMemory(Callback):
    """Prints the plan before the first step and the peak after it, and writes `MEMORY`."""

    def __init__(self, console: Console) -> None:
        self.console, self._stack = console, ExitStack()
        self._ledger: MemoryLedger | None = None

    def on_start(self, run: RunView) -> None:
        weights = sum(param.nbytes for param in run.model.parameters())
        states = int(run.optimizer.nbytes)
        self.console.print(
            f"memory: weights {_mb(weights)}, gradients {_mb(weights)}, states {_mb(states)}; what "
            "layers keep for backward and workspaces are measured in the first step"
        )
        ledger = memory_ledger(run.model, run.optimizer, run.config.device)
        self._ledger = self._stack.enter_context(ledger)

    def on_step(self, run: RunView, report: StepReport) -> None:
        if self._ledger is None:
            return
        self._stack.close()
        found, self._ledger = self._ledger.report(), None
        kinds = ", ".join(f"{kind} {_mb(n)}" for kind, n in found.by_kind().items())
        self.console.print(f"memory: peak of the first step {_mb(found.peak)}: {kinds}")
        self.console.print(str(found.table(12)))
        write_json(run.out / MEMORY, _as_dict(found))

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        if self._ledger is None:
            return
        self._stack.close()
        error = sys.exc_info()[1]
        if isinstance(error, MemoryError):
            found = self._ledger.report()
            self.console.print(f"out of memory at {_mb(found.peak)}; the largest holders:")
            self.console.print(str(found.table(8)))
            self.console.print("what makes the run smaller: " + "; ".join(SETTINGS))
        self._ledger = None


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _as_dict(report: MemoryReport) -> dict[str, Any]:
    """The peak by kind and holder, and a timeline of the most bytes in each of its parts."""
    line = report.timeline
    part = -(-len(line) // POINTS)
    return {
        "peak": report.peak,
        "kinds": report.by_kind(),
        "holders": [list(row) for row in report.table(50).rows],
        "timeline": [int(line[i : i + part].max()) for i in range(0, len(line), part)],
    }
