"""A run's folder: its files' names, which run may use it, and how to read it.

`config.toml` says what the run is, `result.json` that it is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from extensor.distributed.checkpoint import INDEX
from extensor.io.atomic import remove_leftovers, replacing
from extensor.schema import FileError, SchemaError, check, parse_json, read_json, record

from .config import RunConfig
from .recipe_text import own_lines
from .records import EpochReport
from .toml import parse_flat_toml, write_toml

__all__ = [
    "BEST",
    "CONFIG",
    "LAST",
    "MEMORY",
    "METRICS",
    "NEXT_BEST",
    "RESULT",
    "TELEMETRY",
    "UsageError",
    "another_run",
    "checkpoint_in",
    "claim",
    "difference",
    "find_checkpoint",
    "read_config",
    "read_epochs",
    "read_memory",
    "read_result",
    "read_telemetry",
    "write_json",
    "write_text",
]  # fmt: skip

T = TypeVar("T")

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
TELEMETRY = "telemetry.jsonl"
LAST = "checkpoint.safetensors"
BEST = "checkpoint-best.safetensors"
NEXT_BEST = ".checkpoint-best.safetensors.next"
"""A better one than BEST, until LAST knows of it."""
SHARDED: Mapping[str, str] = MappingProxyType(
    {LAST: "checkpoint", BEST: "checkpoint-best", NEXT_BEST: ".checkpoint-best.next"}
)
"""The folders that take the files' places where all ranks write a checkpoint."""
RESULT = "result.json"
MEMORY = "memory.json"
OTHER_OUT = "the way out: another --out, or delete that folder"


class UsageError(FileError):
    """An error that the user can correct."""


def checkpoint_in(folder: Path, config: RunConfig, name: str = LAST) -> Path:
    """Where a run writes a checkpoint: a file, or a folder of one file for each rank.

    Args:
        folder: the run's.
        config: the run.
        name: `LAST`, `BEST` or `NEXT_BEST`.
    """
    return folder / (SHARDED[name] if config.sharded_checkpoint else name)


def find_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint in a run's folder, a file or a folder; None if none is complete."""
    file, sharded = folder / LAST, folder / SHARDED[LAST]
    if (sharded / INDEX).is_file():
        return sharded
    return file if file.is_file() else None


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
        return RunConfig(**parse_flat_toml(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: not the configuration of a run: {error}; {OTHER_OUT}") from error


Slot = Literal["fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x"]


class _Health(TypedDict):
    layer: str
    slot: Slot
    verdict: str
    saturated: float
    flushed: float
    rebase_changed: float
    fallbacks: NotRequired[int]


class _Result(TypedDict):
    """What commands read of result.json; `training.result.build_result` writes it."""

    accuracy: float
    loss: float | None
    diverged: str | None
    stopped_early: str | None
    best_epoch: int | None
    parameters: int
    steps: int
    skipped_steps: int
    saturated: float | None
    flushed: float | None
    seconds_per_epoch: float
    peak_rss_mb: float
    device: str
    health: list[_Health]
    versions: dict[str, str]


class _Telemetry(TypedDict):
    """What the page reads of a line of telemetry.jsonl."""

    step: int
    loss: float | None
    layers: dict[str, _LayerRecord]
    overflow: NotRequired[_Overflow]
    recording_share: NotRequired[float | None]


class _Overflow(TypedDict):
    layer: str | None
    where: str


class _Scales(TypedDict):
    low: int
    counts: list[int]


class _Operand(TypedDict):
    operand: str
    values: int
    noise: dict[str, float | None]
    scales: NotRequired[_Scales]


class _Memory(TypedDict):
    """What the page reads of memory.json, which `ShowMemory` writes."""

    peak: int
    timeline: list[int]
    timelines: dict[str, list[int]]
    holders: list[list[str]]


class _Shares(TypedDict):
    saturated: float | None
    flushed: float | None


class _LayerRecord(TypedDict):
    slots: dict[str, _Shares]
    operands: NotRequired[dict[Slot, _Operand]]
    gradient_norm: NotRequired[float | None]
    gradient_over_noise: NotRequired[float | None]
    changed: NotRequired[float | None]
    turned: NotRequired[float | None]


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of the run in a folder, or None where it is not finished.

    Raises:
        UsageError: if the file is there and is not a result.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = read_json(path, _Result, SchemaError)
    except SchemaError as error:
        raise UsageError(f"{error}; not a result; {OTHER_OUT}") from error
    return result


def read_epochs(folder: Path) -> list[EpochReport]:
    """The epochs so far, without a last line that is still being written.

    Raises:
        UsageError: for a line that is no record of an epoch.
    """
    return list(_records(folder / METRICS, lambda value: record(EpochReport, value)))


def read_telemetry(folder: Path) -> list[dict[str, Any]]:
    """The telemetry so far, likewise.

    Raises:
        UsageError: for a line that is no record.
    """
    return list(_records(folder / TELEMETRY, lambda value: check(value, _Telemetry)))


def read_memory(folder: Path) -> dict[str, Any] | None:
    """The memory of the first step, or None where the run did not record it.

    Raises:
        UsageError: if the file is there and is something else.
    """
    path = folder / MEMORY
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = read_json(path, _Memory, SchemaError)
    except SchemaError as error:
        raise UsageError(f"{error}; not a run's memory; the way out: delete the file") from error
    return found


def _records(path: Path, made: Callable[[Any], T]) -> Iterator[T]:
    """The lines of a file that end, each one record of JSON."""
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            yield made(parse_json(line))
        except SchemaError as error:
            raise UsageError(f"{path}:{number}: not a record: {error}") from error


def claim(folder: Path, config: RunConfig, *, resume: bool) -> None:
    """Take a folder for this run, and write its configuration. What killed runs left goes.

    Raises:
        UsageError: if it holds another run, or this one without --resume; or, with --resume, no
            checkpoint.
    """
    if resume:
        if find_checkpoint(folder) is None:
            raise UsageError(
                f"--resume: {folder} has no checkpoint: its run did not get that far; the way out: "
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
        if (saved := read_config(folder)) != config:
            raise UsageError(f"--out {another_run(folder, saved, config)}; {OTHER_OUT}")
        if read_result(folder) is not None:
            raise UsageError(f"--out {folder}: holds this very run, finished; {OTHER_OUT}")
        if find_checkpoint(folder) is not None:
            raise UsageError(
                f"--out {folder}: holds this very run, interrupted; the way out: add --resume"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: is not empty, and holds no run; {OTHER_OUT}")
    folder.mkdir(parents=True, exist_ok=True)
    header = f"extensor train {config.model} --config THIS_FILE repeats this run"
    write_text(folder / CONFIG, write_toml(config.as_dict(), header))


def another_run(folder: Path, saved: RunConfig, wanted: RunConfig) -> str:
    """The message for a folder whose run has other settings: which, and both values."""
    differ = [difference(name, *pair) for name, pair in saved.differences(wanted).items()]
    return f"{folder}: holds a run with another configuration ({'; '.join(differ)})"


def difference(name: str, there: Any, here: Any) -> str:
    """A setting's two values, as messages have them; of recipes' files, the lines that differ."""
    if name == "recipe_text":
        there, here = (" | ".join(own_lines(a, b)) for a, b in ((there, here), (here, there)))
    return f"{name}: {there!r} there, {here!r} here"


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader sees the old file or the new one."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 atomically: a reader sees the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode())
