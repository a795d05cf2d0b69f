"""`python -m training report RUN`: one page about a run that needs nothing but a browser.

Everything is inline (charts are SVG), everything that came from a file is escaped, and what a run
has not got yet is left out with a word on why.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from training.callbacks.progress import percent
from training.config import ACTIVATIONS
from training.page import charts, layers, settings
from training.page.facts import Facts, read_facts
from training.runs import RUNS
from training.tasks import TASKS

__all__ = ["ReportArgs", "write_page"]

STYLE = Path(__file__).with_name("page.css")


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Which run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, finished or not."""
    out: Path | None = None
    """The page; by default report.html in the run's folder."""

    @property
    def path(self) -> Path:
        """Where the page goes."""
        return self.out if self.out is not None else self.run / "report.html"


def write_page(args: ReportArgs) -> Path:
    """Write the page; returns its path.

    Raises:
        UsageError: if the folder holds no run, or its files cannot be read.
    """
    args.path.write_text(_page(read_facts(args.run)), encoding="utf-8")
    return args.path


def _page(facts: Facts) -> str:
    title = escape(facts.config.label)
    sections = [
        _head(facts),
        _section(
            "Training", charts.curves(facts), "nothing is recorded yet: the first epoch is not done"
        ),
        _section("Answers", facts.answers, facts.missing or ""),
        _section("Layers, worst first", layers.worst(facts), facts.missing or ""),
        _section(
            "Operands on their grids",
            layers.histograms(facts.seen),
            facts.missing or "no layer was reached",
        ),
        _section(
            "Telemetry",
            charts.telemetry(facts.telemetry),
            "not recorded; train with --telemetry 20, say, to see each layer's saturation, "
            "gradient noise and weight oscillation over time",
        ),
        _section(
            "Recipe",
            settings.recipe(facts.config.recipe, ACTIVATIONS[facts.config.activations]),
            "",
        ),
        _section("Settings and versions", settings.settings(facts), ""),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>\n<body><main>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def _section(title: str, content: str, missing: str) -> str:
    inside = content or f'<p class="missing">{escape(missing)}</p>'
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _head(facts: Facts) -> str:
    config, result = facts.config, facts.result
    metric = TASKS[RUNS[config.model].task].metric
    done = len(facts.epochs)
    state, kind = f"unfinished, {done} of {config.epochs} epochs", "wait"
    if result is not None:
        state, kind = ("diverged", "bad") if result["diverged"] else ("finished", "good")
    cards: list[tuple[str, str, str]] = []
    last = facts.epochs[-1] if facts.epochs else None
    if last is not None:
        value = last[f"test_{metric.key}"]
        shown = "not finite" if value is None else metric.show(value).removeprefix(metric.key + " ")
        cards.append((f"test {metric.key}", shown, f"after epoch {last['epoch']}"))
        if metric.key != "loss":
            cards.append(("test loss", _number(last["test_loss"]), "nats"))
        if last.get("test_perplexity") is not None:
            cards.append(("perplexity", _number(last["test_perplexity"]), "test"))
        seconds = sum(e["seconds"] for e in facts.epochs)
        cards.append(("training time", _duration(seconds), f"{last['step']:,} steps"))
        unit = TASKS[RUNS[config.model].task].unit
        cards.append((f"{unit} a second", f"{last['per_second']:,.0f}", "last epoch"))
        if last["saturated"] is not None:
            cards.append(("saturated", percent(last["saturated"]), "of quantized values"))
            cards.append(("flushed to zero", percent(last["flushed"]), "of quantized values"))
    if result is not None:
        cards.append(("weights", f"{result['parameters']:,}", "trained"))
    notes = ""
    if result is not None and result["diverged"]:
        notes = f'<p class="alarm">{escape(result["diverged"])}</p>'
    items = "".join(
        f"<div><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>"
        for a, b, c in cards
    )
    doc = (
        f"{RUNS[config.model].doc}, on {config.dataset}, recipe {config.recipe}, seed {config.seed}"
    )
    return (
        f'<header><h1>{escape(config.label)} <span class="{kind}">{escape(state)}</span></h1>'
        f'<p>{escape(doc)}</p>{notes}<div class="cards">{items}</div></header>'
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
