"""What a run's folder says: its settings, its records, its layers beside float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extensor.inspect import LayerRow
from extensor.io import CheckpointError

from ..config import RunConfig
from ..data import DataError
from ..histograms import Histograms, operand_histograms
from ..loop import open_run
from ..result import compare_with_float32
from ..rundir import (
    CONFIG,
    UsageError,
    find_checkpoint,
    read_config,
    read_epochs,
    read_memory,
    read_result,
    read_telemetry,
)
from .answers import answers

__all__ = ["Facts", "read_facts"]


@dataclass(frozen=True)
class Facts:
    """Everything the page shows of a run.

    ``rows`` compares the layers with float32, ``histograms`` holds their operands, ``answers`` is
    what the model says on test data; all are empty, and ``missing`` says why, where there is no
    checkpoint or no data.
    """

    config: RunConfig
    result: dict[str, Any] | None
    epochs: list[dict[str, Any]]
    telemetry: list[dict[str, Any]]
    rows: Sequence[LayerRow]
    histograms: Histograms
    answers: dict[str, Any]
    memory: dict[str, Any] | None
    missing: str | None


def read_facts(folder: Path) -> Facts:
    """Read the folder of a run.

    Raises:
        UsageError: if the folder holds no run, or its files cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder}: expected the folder of a run, but {CONFIG} is not there; the way out: the "
            "--out of a run of `extensor train MODEL`"
        )
    config = read_config(folder)
    result = read_result(folder)
    rows, seen, said, missing = _from_checkpoint(folder, result)
    return Facts(
        config,
        result,
        [report.as_dict() for report in read_epochs(folder)],
        read_telemetry(folder),
        rows,
        seen,
        said,
        read_memory(folder),
        missing,
    )


def _from_checkpoint(
    folder: Path, result: dict[str, Any] | None
) -> tuple[Sequence[LayerRow], Histograms, dict[str, Any], str | None]:
    """Each layer beside float32, its operands and answers, from the checkpoint and the data."""
    if find_checkpoint(folder) is None:
        return (), {}, {}, "the run has no checkpoint yet: its first epoch is not done"
    try:
        trainer = open_run(folder)
    except (UsageError, DataError, CheckpointError) as error:
        return (), {}, {}, str(error)
    rows = compare_with_float32(trainer, isolated=True)[0].rows
    try:
        said = answers(trainer, result)
    except UsageError as error:  # it diverged: the rest of the page says how
        said = {"error": str(error)}
    return rows, operand_histograms(trainer), said, None
