"""The memory of a run: what it will hold, what its first step held, and what does not fit."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from extensor.inspect import Holder, MemoryLedger, MemoryReport, memory_ledger
from extensor.inspect.memory import alike_table

from ..config import RunConfig
from ..memory import MemoryPlan, gradient_bytes, savings
from ..records import StepReport
from ..rundir import MEMORY, write_json
from .base import Callback, RunView

__all__ = ["ShowMemory", "explain"]

POINTS = 400
"""Of the timeline in the file."""


class ShowMemory(Callback):
    """Says what does not fit; with a plan, the plan, and the first step's peak in `MEMORY`, too.

    Args:
        console: where it reports.
        plan: of the run; None prints nothing unless memory runs out.
    """

    def __init__(self, console: Console, plan: MemoryPlan | None = None) -> None:
        self.console, self.plan, self._stack = console, plan, ExitStack()
        self._ledger: MemoryLedger | None = None
        self._found: MemoryReport | None = None

    def on_start(self, run: RunView) -> None:
        if self.plan is None:
            return
        self.console.print(f"memory: plan {_mb(self.plan.total)}: {_list(self.plan.kinds)}")
        self.console.print(str(alike_table(self.plan.saved, 12)))
        ledger = memory_ledger(run.model, run.optimizer, run.config.device)
        self._ledger = self._stack.enter_context(ledger)

    def on_step(self, run: RunView, report: StepReport) -> None:
        if self._ledger is None:
            return
        self._stack.close()
        self._found, self._ledger = self._ledger.report(), None
        kinds = self._found.by_kind()
        self.console.print(
            f"memory: peak of the first step {_mb(self._found.peak)}: {_list(kinds)}"
        )
        self.console.print(str(alike_table(self._found.holders, 12)))
        assert self.plan is not None
        write_json(run.out / MEMORY, _as_dict(self._found, self.plan))

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        self._stack.close()
        found = self._found if self._ledger is None else self._ledger.report()
        self._ledger = None
        if isinstance(sys.exc_info()[1], MemoryError):
            if found is not None and self.plan is not None:  # for the report
                write_json(run.out / MEMORY, _as_dict(found, self.plan))
            explain(self.console, run.config, run.model, run.optimizer, found)


def explain(
    console: Console,
    config: RunConfig,
    model: Any,
    optimizer: Any,
    found: MemoryReport | None,
    what: str = "",
) -> None:
    """Say what holds memory where it ran out, and what each setting would save.

    Args:
        console: where.
        config: of the run.
        model: of the run.
        optimizer: of the run.
        found: the ledger's report; None: there was no ledger.
        what: said first; "" is that memory ran out.
    """
    if found is None:
        kinds = {
            "weights": sum(param.nbytes for param in model.parameters()),
            "gradients": gradient_bytes(config, model),
            "states": int(optimizer.nbytes),
        }
        held = tuple(Holder(kind, "", "all", n) for kind, n in kinds.items() if n)
        what = what or "out of memory; the run held, besides what its layers keep for backward:"
    else:
        kinds, held = found.by_kind(), found.holders
        what = what or f"out of memory at {_mb(found.peak)}; the largest holders:"
    console.print(what)
    console.print(str(alike_table(held, 12)))
    if found is None:
        console.print(
            "What layers keep is most of it in many runs; the same command with --memory and a "
            "smaller --batch-size tells it by layer. It grows with the batch."
        )
    console.print("settings that make the run smaller:")
    for setting, nbytes in savings(config, kinds, model, held):
        if nbytes is None:
            setting = setting.removesuffix(", at most")
            console.print(f"  {setting}: layers keep less (--memory says how much)")
        else:
            console.print(f"  {setting}: {_mb(nbytes)} less")


def _list(kinds: Any) -> str:
    return ", ".join(f"{kind} {_mb(n)}" for kind, n in kinds.items())


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _as_dict(report: MemoryReport, plan: MemoryPlan) -> dict[str, Any]:
    """The peak by kind and holder, and timelines of the most bytes in each part of the step."""
    line, kinds = report.timeline, report.timelines()
    part = -(-len(line) // POINTS)
    starts = range(0, len(line), part)
    return {
        "plan": dict(plan.kinds),
        "peak": report.peak,
        "kinds": report.by_kind(),
        "holders": [list(row) for row in report.table(50).rows],
        "timeline": [int(line[i : i + part].max()) for i in starts],
        "timelines": {k: [int(v[i : i + part].max()) for i in starts] for k, v in kinds.items()},
    }
