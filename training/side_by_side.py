"""Finished runs side by side: the settings in which they differ, and what came of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extensor.inspect import Table

from .config import RunConfig
from .recipe_text import own_lines
from .rundir import CONFIG, UsageError, read_config, read_result
from .runs import RUNS
from .tasks import TASKS

__all__ = ["side_by_side"]

RESULTS = {
    "loss": ("test loss", "{:.4f}"),
    "train_loss": ("training loss", "{:.4f}"),
    "flushed": ("values flushed to zero", "{:.2%}"),
    "saturated": ("values saturated", "{:.2%}"),
    "diverged": ("diverged", "{}"),
    "stopped_early": ("stopped early", "{}"),
    "steps": ("steps", "{:,}"),
    "skipped_steps": ("steps skipped", "{:,}"),
    "seconds": ("seconds", "{:.1f}"),
    "per_second": ("a second", "{:,.0f}"),
}
"""What is shown of result.json beside the task's metric: title and form."""


def side_by_side(folders: Sequence[Path]) -> Table:
    """A table with a column for each run: first the settings that differ, then the results.

    Args:
        folders: of finished runs.

    Raises:
        UsageError: for a folder that holds no finished run.
    """
    for folder in folders:
        if not (folder / CONFIG).is_file():
            raise UsageError(
                f"compare: {os.fspath(folder)} holds no run ({CONFIG} is not there); the way out: "
                "folders that extensor train wrote"
            )
    configs = [read_config(folder) for folder in folders]
    results = [_result(folder, config) for folder, config in zip(folders, configs, strict=True)]
    names = {name for config in configs[1:] for name in configs[0].differences(config)}
    rows = [
        (field.name, *(_value(getattr(config, field.name)) for config in configs))
        for field in dataclasses.fields(RunConfig)
        if field.name in names - {"recipe_text"}
    ]
    if "recipe_text" in names:
        texts = [config.recipe_text for config in configs]
        rows.append(("recipe_text", *("\n".join(own_lines(t, *texts)) or "-" for t in texts)))
    metrics = dict.fromkeys(TASKS[RUNS[config.model].task].metric for config in configs)
    for metric in metrics:
        if metric.key != "loss":
            form = f"{{:.{metric.digits}f}}"
            values = [result.get(metric.key) for result in results]
            scaled = [None if value is None else value * metric.scale for value in values]
            rows.append((metric.title, *(_form(form, value) for value in scaled)))
    for key, (title, form) in RESULTS.items():
        values = [result.get(key) for result in results]
        forms = [form] * len(results)
        if key == "per_second":
            forms = [f"{form} {result['unit']}" for result in results]
        if any(values):
            rows.append((title, *map(_form, forms, values)))
    return Table(("run", *_short(folders)), tuple(rows))


def _result(folder: Path, config: RunConfig) -> dict[str, Any]:
    result = read_result(folder)
    if result is None:
        raise UsageError(
            f"{folder}: expected a finished run, and this one has no result yet; the way out: "
            f"extensor train {config.model} --out {folder} --resume"
        )
    return result


def _short(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths where two have one name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [os.fspath(folder) for folder in folders]


def _value(value: Any) -> str:
    return str(value) if value != "" else "-"


def _form(form: str, value: Any) -> str:
    return "-" if value is None else form.format(value)
