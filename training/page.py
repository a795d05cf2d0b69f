"""`python -m training report RUN`: one page about a run that needs nothing but a browser.

Everything is inline (charts are SVG), everything that came from a file is escaped, and what a run
has not got yet is left out with a word on why.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import tyro

from extensor import ExTensor
from extensor.inspect import LayerRow, compare_layers
from extensor.io import CheckpointError
from extensor.nn import apply_recipe
from extensor.quant.recipe import SLOTS, LayerRecipe
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from training.callbacks import LAST, METRICS, NOISE_RATIO, TELEMETRY
from training.callbacks.progress import percent
from training.config import RunConfig
from training.data import DataError
from training.ptq import restored
from training.rundir import CONFIG, UsageError, read_config, read_result
from training.runs import RUNS
from training.snapshot import Operands, Seen, operands
from training.svg import Line, bars, lines
from training.tasks import TASKS

__all__ = ["ReportArgs", "write_page"]

LAYER_BATCH = 200
MOST_LINES = 8
LOW_DB = 15.0
STYLE = Path(__file__).with_name("page.css")
SLOT_TITLES = {"fprop.w": "weights", "fprop.x": "activations", "dgrad.g": "gradients"}


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


@dataclass(frozen=True)
class Facts:
    """What the folder says.

    ``rows`` compares the layers with float32, ``seen`` holds their operands; both are empty, and
    ``missing`` says why, where there is no checkpoint or no data.
    """

    config: RunConfig
    result: dict[str, Any] | None
    epochs: list[dict[str, Any]]
    telemetry: list[dict[str, Any]]
    rows: Sequence[LayerRow]
    seen: Operands
    missing: str | None


def write_page(args: ReportArgs) -> Path:
    """Write the page; returns its path.

    Raises:
        UsageError: if the folder holds no run, or its files cannot be read.
    """
    folder = args.run
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder}: wanted the folder of a run, but {CONFIG} is not there; the way out: the "
            "--out of a run of `python -m training MODEL`"
        )
    config = read_config(folder)
    rows, seen, missing = _layers(folder)
    facts = Facts(
        config,
        read_result(folder),
        _json_lines(folder / METRICS),
        _json_lines(folder / TELEMETRY),
        rows,
        seen,
        missing,
    )
    args.path.write_text(_page(facts), encoding="utf-8")
    return args.path


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that is being written does not count yet."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise UsageError(f"{path}:{number}: not a record: {error}") from error
    return found


def _layers(folder: Path) -> tuple[Sequence[LayerRow], Operands, str | None]:
    """Each layer beside float32 and its operands, from the checkpoint and the data."""
    if not (folder / LAST).is_file():
        return (), {}, "the run has no checkpoint yet: its first epoch is not done"
    try:
        trainer = restored(folder)
    except (UsageError, DataError, CheckpointError) as error:
        return (), {}, str(error)
    reference = trainer.fresh_model()
    reference.load_state_dict(trainer.model.state_dict())
    apply_recipe(reference, "fp32")
    batch = next(trainer.task.test(min(LAYER_BATCH, trainer.task.eval_batch)))
    inputs = ExTensor.from_numpy(batch.inputs).to(trainer.config.device)
    rows = compare_layers(trainer.model, reference, inputs, isolated=True).rows
    return rows, operands(trainer), None


# --- the page -----------------------------------------------------------------------------------


def _page(facts: Facts) -> str:
    title = escape(facts.config.label)
    sections = [
        _head(facts),
        _section(
            "Training", _curves(facts), "nothing is recorded yet: the first epoch is not done"
        ),
        _section("Layers, worst first", _worst(facts), facts.missing or ""),
        _section(
            "Operands on their grids",
            _histograms(facts.seen),
            facts.missing or "no layer was reached",
        ),
        _section(
            "Telemetry",
            _telemetry(facts.telemetry),
            "not recorded; train with --telemetry 20, say, to see each layer's saturation, "
            "gradient noise and weight oscillation over time",
        ),
        _section("Recipe", _recipe(facts.config.recipe), ""),
        _section("Settings and versions", _settings(facts), ""),
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


# --- training -----------------------------------------------------------------------------------


def _curves(facts: Facts) -> str:
    if not facts.epochs:
        return ""
    at = [e["epoch"] for e in facts.epochs]

    def curve(name: str, key: str, factor: float = 1.0) -> Line:
        values = [e.get(key) for e in facts.epochs]
        return Line(name, at, [None if v is None else factor * v for v in values])

    held = ["val"] if facts.config.val_share else []
    names = {"train": "training", "test": "test", "val": "validation"}
    shown = ("train", "test", *held)
    parts = [
        lines("loss", [curve(names[key], f"{key}_loss") for key in shown], "epoch"),
        lines("accuracy, %", [curve(names[key], f"{key}_accuracy", 100) for key in shown], "epoch"),
        _rates(facts, curve("learning rate", "lr")),
        lines("seconds an epoch", [curve("training alone", "seconds")], "epoch"),
    ]
    if any(e["saturated"] is not None for e in facts.epochs):
        shares = [curve("saturated", "saturated", 100), curve("flushed to zero", "flushed", 100)]
        parts.append(lines("quantized values, %", shares, "epoch"))
    return f'<div class="charts">{"".join(parts)}</div>'


def _rates(facts: Facts, by_epoch: Line) -> str:
    steps = [record["step"] for record in facts.telemetry]
    if steps:
        rates = Line("learning rate", steps, [r["lr"] for r in facts.telemetry])
        return lines("learning rate", [rates], "step")
    return lines("learning rate at the epoch's end", [by_epoch], "epoch")


# --- layers -------------------------------------------------------------------------------------


def _worst(facts: Facts) -> str:
    if not facts.rows:
        return ""
    health: dict[str, list[dict[str, Any]]] = {}
    for row in (facts.result or {}).get("health", []):
        health.setdefault(row["layer"], []).append(row)
    inner = [row for row in facts.rows if row.layer != "(output)"]
    if all(row.sqnr_db == math.inf for row in inner):
        return "<p>Every layer computes in float32: there is no quantization error.</p>"
    lines_ = []
    for row in sorted(inner, key=lambda r: math.inf if math.isnan(r.sqnr_db) else r.sqnr_db):
        slots = sorted(health.get(row.layer, []), key=lambda s: SLOTS.index(s["slot"]))
        alarms = [f"{s['slot']} {s['verdict']}" for s in slots if s["verdict"] != "ok"]
        lines_.append(
            (
                f"<code>{escape(row.layer)}</code>",
                escape(row.kind),
                _meter(row.sqnr_db),
                f"{row.cosine:.5f}",
                f"{row.mse:.2e}",
                "" if row.clipped is None else percent(row.clipped),
                "" if row.flushed is None else percent(row.flushed),
                escape("; ".join(alarms)) or "ok",
            )
        )
    head = ("layer", "kind", "signal to noise", "cosine", "MSE", "clipped", "flushed", "last epoch")
    output = facts.rows[-1]
    note = (
        "Each layer beside float32 with the same weights and inputs, so an error is its own, on "
        f"test data. The model's output as a whole: {_decibels(output.sqnr_db)}, cosine "
        f"{output.cosine:.5f}."
    )
    return f"<p>{escape(note)}</p>" + _table(head, lines_)


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else "NaN" if math.isnan(value) else f"{value:.1f} dB"


def _meter(value: float) -> str:
    width = 100.0 if value == math.inf else max(0.0, min(100.0, 100 * value / 50.0 or 0.0))
    width = 0.0 if math.isnan(value) else width
    kind = "low" if width < 2 * LOW_DB else ""
    return f'<span class="meter {kind}"><i style="width:{width:.0f}%"></i></span>{_decibels(value)}'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of HTML cells."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _histograms(seen: Operands) -> str:
    if not seen:
        return ""
    note = (
        "One training batch at the last checkpoint. Filled: the values before rounding, in units "
        "of their block's scale. Stems: how often each code of the grid is what a value becomes."
    )
    parts = [f"<p>{escape(note)}</p>"]
    for path, slots in seen.items():
        charts = "".join(_histogram(SLOT_TITLES[slot], row) for slot, row in slots.items())
        parts.append(f'<h3><code>{escape(path)}</code></h3><div class="three">{charts}</div>')
    return "".join(parts)


def _histogram(title: str, seen: Seen) -> str:
    top = max((abs(v) for v, _ in seen.grid), default=0.0)
    few = [v for v, _ in seen.grid if abs(v) in (0.0, top) or v in (-top / 2, top / 2)]
    return bars(
        title,
        f"{seen.format}, {seen.zeros:.0%} zeros apart" if seen.zeros > 0.005 else seen.format,
        seen.edges,
        seen.counts,
        seen.axis,
        stems=seen.grid,
        marks=seen.marks,
        x_ticks=few or None,
    )


# --- telemetry ----------------------------------------------------------------------------------


def _telemetry(records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    steps = [r["step"] for r in records]
    paths = list(dict.fromkeys(path for r in records for path in r["layers"]))

    def collect(key: str, factor: float = 1.0) -> list[Line]:
        found = []
        for path in paths:
            values = [r["layers"].get(path, {}).get(key) for r in records]
            if any(v is not None for v in values):
                found.append(Line(path, steps, [None if v is None else factor * v for v in values]))
        return found

    def of_slots(share: str) -> list[Line]:
        found = []
        for path in paths:
            values: list[float | None] = []
            for r in records:
                slots = r["layers"].get(path, {}).get("slots", {})
                known = [s[share] for s in slots.values() if s[share] is not None]
                values.append(100 * max(known) if known else None)
            if any(v is not None for v in values):
                found.append(Line(path, steps, values))
        return found

    loss = Line("loss", steps, [r["loss"] for r in records])
    ratios = collect("gradient_over_noise")
    parts = [
        lines("loss of the batch", [loss], "step"),
        lines("gradient norm by layer", _few(collect("gradient_norm"), True), "step", log=True),
        lines(
            "gradient over its quantization noise",
            _few(ratios, False),
            "step",
            log=True,
            threshold=(NOISE_RATIO, "√3: below, training gains little"),
        )
        if ratios
        else "",
        lines("flushed to zero, worst operand, %", _few(of_slots("flushed"), True), "step"),
        lines("saturated, worst operand, %", _few(of_slots("saturated"), True), "step"),
        lines("weight codes that changed, %", _few(collect("changed", 100), True), "step"),
        lines("weight codes that turned back, %", _few(collect("turned", 100), True), "step"),
    ]
    return f'<div class="charts">{"".join(parts)}</div>'


def _few(found: list[Line], highest: bool) -> list[Line]:
    """At most `MOST_LINES`: those with the highest (lowest) values, in the model's order."""

    def mean(line: Line) -> float:
        known = [y for y in line.y if y is not None]
        return sum(known) / len(known)

    chosen = sorted(found, key=mean, reverse=highest)[:MOST_LINES]
    return [line for line in found if line in chosen]


# --- recipe and settings ------------------------------------------------------------------------


def _recipe(name: str) -> str:
    recipe = get_recipe(name)
    parts = [f"<p><b>{escape(recipe.name)}</b>: {escape(recipe.doc)}</p>"]
    parts.append(_slots("every other layer" if recipe.rules else "every layer", recipe.layers))
    parts += [_slots(rule.match, rule.use) for rule in recipe.rules]
    return "".join(parts)


def _slots(title: str, layer: LayerRecipe) -> str:
    plain = {layer.slot(slot) for slot in SLOTS}
    if len(plain) == 1 and isinstance(next(iter(plain)), str):
        only = escape(str(next(iter(plain))))
        return f"<p><code>{escape(title)}</code>: {only} in all six slots</p>"
    rows: list[tuple[str, ...]] = []
    for slot in SLOTS:
        operand = layer.slot(slot)
        if isinstance(operand, QuantSpec):
            spec = operand.resolve(2)
            rows.append((slot, spec.format, str(spec.tile), spec.rule, spec.rounding, _rest(spec)))
        else:
            rows.append((slot, operand, "", "", "", ""))
    cells = [[f"<code>{escape(r[0])}</code>", *map(escape, r[1:])] for r in rows]
    head = ("slot", "format", "block", "scale rule", "rounding", "further")
    return f"<p><code>{escape(title)}</code></p>" + _table(head, cells)


def _short(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _rest(spec: QuantSpec) -> str:
    """The fields that are not the defaults."""
    shown = ("format", "axis", "tile", "scale_rule", "rounding")
    default = {f.name: f.default for f in dataclasses.fields(QuantSpec)}
    values = {name: getattr(spec, name) for name in default if name not in shown}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != default[name])


def _settings(facts: Facts) -> str:
    config = [(k, str(v)) for k, v in facts.config.as_dict().items()]
    groups = [("settings", config)]
    if facts.result is not None:
        groups.append(("versions", [(k, str(v)) for k, v in facts.result["versions"].items()]))
        keys = ("steps", "skipped_steps", "best_epoch", "stopped_early", "peak_rss_mb", "device")
        groups.append(("run", [(k, _short(facts.result.get(k))) for k in keys]))
    tables = "".join(
        f"<div><h3>{escape(title)}</h3>"
        + "".join(
            f"<dl><dt>{escape(name)}</dt><dd>{escape(value)}</dd></dl>" for name, value in rows
        )
        + "</div>"
        for title, rows in groups
    )
    return f'<div class="settings">{tables}</div>'
