"""A run's checkpoint: everything that the next step depends on, in one file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from extensor.io import load_checkpoint, save_checkpoint
from extensor.quant import QuantArray, QuantStats

from .records import EpochReport, Position

__all__ = ["load_run", "save_run"]


def save_run(run: Any, path: Path) -> None:
    """Write a checkpoint of a `training.loop.Trainer` atomically."""
    optimizer = run.optimizer.state_dict()
    arrays = {k: v for k, v in optimizer.items() if isinstance(v, (np.ndarray, QuantArray))}
    tensors = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": value for name, value in arrays.items()}
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
    save_checkpoint(path, tensors, metadata)


def load_run(run: Any, path: Path) -> None:
    """Make a `training.loop.Trainer` go on from a checkpoint that `save_run` wrote.

    Raises:
        CheckpointError: if the file is damaged.
        ValueError: if it belongs to another run.
    """
    checkpoint = load_checkpoint(path)
    metadata, tensors = checkpoint.metadata, checkpoint.tensors
    theirs, mine = metadata.get("config"), run.config.as_dict()
    if theirs:  # what a checkpoint does not name came later, and was as it is by default
        fields = dataclasses.fields(run.config)
        given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        theirs = given | theirs
    if theirs != mine:
        differ = sorted(k for k in mine if not theirs or theirs.get(k) != mine[k])
        raise ValueError(
            f"{path}: expected a checkpoint of this run, got one that differs in "
            f"{', '.join(differ)}; the way out: the checkpoint that this run wrote"
        )
    if metadata.get("task") != json.loads(json.dumps(run.task.state())):
        raise ValueError(
            f"{path}: expected a checkpoint of this run's data, got one of another tokenizer; "
            f"the way out: {run.config.dataset} as it was when the run began (the same "
            "Python for python_source, the same package tokenizers for bpe)"
        )
    parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = value
    run.model.load_state_dict(parts["model"])
    run.optimizer.load_state_dict({**metadata["optimizer"], **parts["optimizer"]})
    counts = {(row[0], row[1]): QuantStats(*row[2:]) for row in metadata["telemetry"]}
    run.quant.load_telemetry(counts)
    run.scaler.load_state_dict(metadata["scaler"])
    run.stop_reason, run.diverged = metadata["stop_reason"], metadata["diverged"]
    run.position = Position.from_dict(metadata["position"])
    run.history = [EpochReport(**values) for values in metadata["history"]]
