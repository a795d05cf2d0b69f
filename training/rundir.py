"""A run's folder: its files' names, which run may use it, and how to read it.

`config.toml` says what the run is, `result.json` that it is finished.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from extensor.io.atomic import remove_leftovers, replacing

from .config import RunConfig, write_toml

__all__ = [
    "BEST", "CONFIG", "LAST", "METRICS", "NEXT_BEST", "RESULT", "TELEMETRY", "UsageError", "claim",
    "read_config", "read_result", "write_json", "write_text",
]  # fmt: skip

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
TELEMETRY = "telemetry.jsonl"
LAST = "checkpoint.safetensors"
BEST = "checkpoint-best.safetensors"
NEXT_BEST = ".checkpoint-best.safetensors.next"
"""A better one than BEST, until LAST knows of it."""
RESULT = "result.json"
OTHER_OUT = "the way out: another --out, or delete that folder"


class UsageError(Exception):
    """An error that the user can correct."""


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in a folder.

    Raises:
        UsageError: if there is none, or it cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(
            f"--resume: {folder} holds no run ({CONFIG} is not there); the way out: give the "
            "folder of an interrupted run by --out, or leave --resume out"
        )
    try:
        return RunConfig(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not the configuration of a run: {error}; {OTHER_OUT}") from error


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of the run in a folder, or None where it is not finished.

    Raises:
        UsageError: if the file is there and is not JSON.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not a result: {error}; {OTHER_OUT}") from error
    return result


def claim(folder: Path, config: RunConfig, *, resume: bool) -> None:
    """Take a folder for this run, and write its configuration. What killed runs left goes.

    Raises:
        UsageError: if it holds another run, or this one without --resume; or, with --resume, no
            checkpoint.
    """
    if resume:
        if not (folder / LAST).is_file():
            raise UsageError(
                f"--resume: {folder} has no {LAST}: its run did not get that far; the way out: "
                "train anew, without --resume"
            )
        remove_leftovers(folder)
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"--out {folder}: expected a folder, got a file; the way out: another --out, or delete "
            "it"
        )
    if folder.exists():
        remove_leftovers(folder)
    if (folder / CONFIG).exists():
        if read_config(folder) != config:
            raise UsageError(f"--out {folder}: holds a run with another configuration; {OTHER_OUT}")
        if read_result(folder) is not None:
            raise UsageError(f"--out {folder}: holds this very run, finished; {OTHER_OUT}")
        if (folder / LAST).exists():
            raise UsageError(
                f"--out {folder}: holds this very run, interrupted; the way out: add --resume"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: is not empty, and holds no run; {OTHER_OUT}")
    folder.mkdir(parents=True, exist_ok=True)
    header = f"extensor train {config.model} --config THIS_FILE repeats this run"
    write_text(folder / CONFIG, write_toml(config.as_dict(), header))


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader sees the old file or the new one."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 atomically: a reader sees the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode())
