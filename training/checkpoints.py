"""A run's checkpoint: everything that the next step depends on.

It is one file, which rank 0 writes, where all ranks have the same. Where ranks keep something of
their own (a part of the optimizer's states, what error feedback left over) it is a folder with a
file for each rank. Either is read on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from extensor.distributed import ShardedOptimizer, load_residuals, residuals, save_sharded, share_of
from extensor.distributed.checkpoint import load_sharded
from extensor.io import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from extensor.io.checkpoint import METADATA_KEY, RUN_PARTS
from extensor.io.stored.mapped import SafetensorsFile
from extensor.quant import QuantArray
from extensor.quant.recipe_schedule import RecipeSchedule
from extensor.quant.recipe_state import counts_from_rows
from extensor.schema import SchemaError, check, parse_json, record

from .parallel import parameter_of
from .recipe_text import files_named, join, lookup, split
from .records import EpochReport, Position

__all__ = ["load_run", "read_checkpoint", "read_position", "save_run"]


OWN_CHECKPOINT = "the checkpoint that this run wrote"


class _Metadata(TypedDict):
    """What a checkpoint says beside its tensors."""

    config: dict[str, bool | int | float | str]
    position: dict[str, Any]
    history: list[dict[str, Any]]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    telemetry: list[list[Any]]
    stop_reason: str | None
    diverged: str | None
    task: dict[str, Any]


def save_run(run: Any, path: Path) -> None:
    """Write a checkpoint of a `training.loop.Trainer` atomically.

    Where it is a folder, and where ranks share blocks, all ranks call this together; else one,
    which needs no other.
    """
    sharded, ranks, parallel = run.config.sharded_checkpoint, run.ranks, run.parallel
    whole = run.optimizer
    shared = isinstance(whole, ShardedOptimizer)
    optimizer = whole.state_share() if shared else whole.state_dict()
    model = run.model.state_dict()
    if parallel is not None:
        if run.grid.data.rank:
            return
        model, optimizer = parallel.gather(model), parallel.gather(optimizer, parameter_of)
        if ranks.rank:
            return
    arrays = {k: v for k, v in optimizer.items() if isinstance(v, (np.ndarray, QuantArray))}
    states = {f"optimizer.{name}": value for name, value in arrays.items()}
    tensors = {f"model.{name}": value for name, value in model.items()}
    if not shared:
        tensors |= states
    if sharded:
        tensors = share_of(tensors, ranks)
    if shared:
        tensors |= states
    if run.config.error_feedback:
        left = residuals(run.buckets, dict(run.model.named_parameters()))
        tensors |= {f"residual.{name}": value for name, value in left.items()}
    metadata = {
        "config": run.config.as_dict(),
        "position": run.position.as_dict(),
        "history": [report.as_dict() for report in run.history],
        "optimizer": {k: v for k, v in optimizer.items() if k not in arrays},
        "scaler": run.scaler.state_dict(),
        "telemetry": [
            [*key, *dataclasses.astuple(counts)] for key, counts in run.quant.telemetry.items()
        ],
        "stop_reason": run.stop_reason,
        "diverged": run.diverged,
        "model": json.loads(json.dumps(dataclasses.asdict(run.model_config))),
        "task": run.task.state(),
    }
    if sharded:
        save_sharded(path, tensors, metadata, ranks)
    else:
        save_checkpoint(path, tensors, metadata)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, a file or a folder.

    Raises:
        CheckpointError: if it is damaged.
    """
    return load_sharded(path) if path.is_dir() else load_checkpoint(path)


def read_position(path: Path) -> Position:
    """Where the run of a checkpoint was; of a file, the tensors are not read.

    Raises:
        CheckpointError: if it is damaged, or no checkpoint of a run.
    """
    try:
        if path.is_dir():
            metadata = load_sharded(path).metadata
        else:
            content = parse_json(SafetensorsFile(path).metadata.get(METADATA_KEY, "{}"))
            metadata = check(content, dict[str, Any]).get("metadata", {})
        return Position.from_dict(check(metadata, dict[str, Any]).get("position", {}))
    except SchemaError as error:
        raise CheckpointError(f"{path}: {error}; the way out: delete it") from None


def load_run(run: Any, path: Path) -> None:
    """Make a `training.loop.Trainer` go on from a checkpoint that `save_run` wrote.

    Raises:
        CheckpointError: if the file is damaged.
        ValueError: if it belongs to another run.
    """
    checkpoint = read_checkpoint(path)
    try:
        metadata: _Metadata = check(checkpoint.metadata, _Metadata)
        _check_run(run, path, metadata)
        _take_over(run, metadata, checkpoint.tensors)
    except SchemaError as error:
        raise CheckpointError(f"{path}: {error}; the way out: {OWN_CHECKPOINT}") from None


def _check_run(run: Any, path: Path, metadata: _Metadata) -> None:
    """Refuse a checkpoint of another run, or of other data."""
    mine = run.config.as_dict()
    # What a checkpoint does not name came later, and was as it is by default.
    fields = dataclasses.fields(run.config)
    given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    # The model is saved whole, however many ranks share its blocks.
    theirs = given | metadata["config"] | {"tensor_parallel": mine["tensor_parallel"]}
    position = Position.from_dict(metadata["position"])
    if _begins_alike(run, theirs, position.step):
        theirs |= {"recipe": mine["recipe"], "recipe_text": mine["recipe_text"]}
    if theirs != mine:
        differ = sorted(k for k in mine | theirs if k not in mine or theirs.get(k) != mine[k])
        raise ValueError(
            f"{path}: expected a checkpoint of this run, got one that differs in "
            f"{', '.join(differ)}; the way out: {OWN_CHECKPOINT}"
        )
    if metadata["task"] != json.loads(json.dumps(run.task.state())):
        raise ValueError(
            f"{path}: expected a checkpoint of this run's data, got one of another tokenizer; "
            f"the way out: {run.config.dataset} as it was when the run began (the same "
            "Python for python_source, the same package tokenizers for bpe)"
        )


def _begins_alike(run: Any, config: dict[str, Any], done: int) -> bool:
    """Whether a run under another recipe, or schedule of them, made so many steps as this one."""
    steps = run.config.epochs * run.batches
    ours = run.config.recipe_schedule
    try:
        files, mine = split(str(config["recipe_text"])), split(run.config.recipe_text)
        if any(files.get(name) != mine.get(name) for name in files_named(run.config.operands)):
            return False
        theirs = RecipeSchedule.parse(str(config["recipe"]), lookup(join(files)))
    except ValueError:  # of a damaged file, or of a release that had other recipes
        return False
    starts = {phase.first_step(steps) for phase in (*ours.phases, *theirs.phases)}
    return all(ours.at(s, steps) == theirs.at(s, steps) for s in starts if s < done)


def _take_over(run: Any, metadata: _Metadata, tensors: dict[str, Any]) -> None:
    """Check the state, all of it, then go on from it."""
    position = Position.from_dict(metadata["position"])
    epochs = run.config.epochs
    if not (1 <= position.epoch <= epochs + 1 and 0 <= position.batch <= run.batches):
        raise SchemaError(
            f"position: expected epoch 1 to {epochs + 1} and batch 0 to {run.batches}, got "
            f"{position.epoch} and {position.batch}"
        )
    if min(position.step, position.skipped, position.count, position.hits) < 0:
        raise SchemaError(f"position: expected counts of 0 or more, got {position}")
    history = [
        record(EpochReport, values, f"history[{number}]")
        for number, values in enumerate(metadata["history"])
    ]
    if [report.epoch for report in history] != list(range(1, position.epoch)):
        raise SchemaError(f"history: expected epochs 1 to {position.epoch - 1}, each once")
    counts = counts_from_rows(metadata["telemetry"], run.quant.layers, "telemetry")
    parts: dict[str, dict[str, Any]] = {part: {} for part in RUN_PARTS}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise SchemaError(f"{name!r}: expected tensors of {', '.join(parts)}")
        parts[part][rest] = value
    model, optimizer = parts["model"], {**metadata["optimizer"], **parts["optimizer"]}
    if run.parallel is not None:
        model, optimizer = run.parallel.cut(model), run.parallel.cut(optimizer, parameter_of)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    if run.config.error_feedback:
        load_residuals(run.buckets, dict(run.model.named_parameters()), parts["residual"])
    run.quant.load_telemetry(counts)
    run.scaler.load_state_dict(metadata["scaler"])
    run.stop_reason, run.diverged = metadata["stop_reason"], metadata["diverged"]
    run.position, run.history = position, history
