"""Checks of a run on several ranks, and the message of a rank that fails."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np
from rich.console import Console

from extensor.backends.registry import get as get_backend
from extensor.distributed import (
    CollectiveTimeout,
    Communicator,
    RanksDiffer,
    check_same,
    launched_rank,
)
from extensor.io import CheckpointError
from extensor.quant.array import QuantArray

from .config import RunConfig
from .data import DataError
from .rundir import UsageError

__all__ = [
    "agree_on_errors", "check_captured", "check_parts", "check_start", "check_weights", "end_all",
    "rank_console", "say",
]  # fmt: skip

SECOND_THOUGHT = 1.0
"""Seconds after which a rank other than 0 says what rank 0 has said by then if it failed alike."""


def digest(arrays: Any) -> str:
    """A checksum of arrays: their types, shapes and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        host = np.ascontiguousarray(array)
        found.update(f"{host.dtype} {host.shape}".encode())
        found.update(host.data)
    return found.hexdigest()


def check_start(run: Any) -> None:
    """Refuse ranks whose settings, versions, data or weights differ.

    Raises:
        RanksDiffer: naming each difference, on all ranks.
    """
    if run.ranks.size == 1:
        return
    core = getattr(get_backend("cpu"), "core", None)
    facts = {f"--{name.replace('_', '-')}": v for name, v in run.config.as_dict().items()}
    facts |= {f"version of {name}": _version(name) for name in ("extensor", "numpy", "ml_dtypes")}
    facts["version of Python"] = platform.python_version()
    facts["instruction set of the C++ core"] = "no core" if core is None else core.level()
    facts["checksum of the data"] = digest(run.task.arrays())
    facts["step to go on from"] = run.position.step
    facts["weights"] = _weights(run)
    check_same(run.ranks, "start", facts)


def check_weights(run: Any) -> None:
    """Refuse to go on where ranks came to have different weights.

    Raises:
        RanksDiffer: naming the ranks, on all ranks.
    """
    if run.ranks.size > 1:
        check_same(run.ranks, f"step {run.position.step}", {"weights": _weights(run)})


def check_parts(config: RunConfig, parts: int, size: int) -> None:
    """Refuse a number of micro-batches that the settings or the ranks do not fit.

    Args:
        config: of the run.
        parts: micro-batches in a batch.
        size: number of ranks.

    Raises:
        ValueError: naming the setting, and the way out.
    """
    if parts > 1 and config.update == "in_backward":
        raise ValueError(
            f"--update in_backward: expected one micro-batch on one rank, got {parts}; the "
            "way out: leave --update out"
        )
    if config.update == "in_backward" and config.resolved_recipe.adaptive_scale_rule:
        raise ValueError(
            f"--update in_backward: {config.recipe} changes its layers' scale rules where "
            "steps are counted; the way out: another recipe, or leave --update out"
        )
    if parts < size:
        raise ValueError(
            f"--micro-batches: expected at least one for each of the {size} ranks, "
            f"got {parts}; the way out: fewer ranks, or a new run of more micro-batches"
        )


def check_captured(run: Any) -> None:
    """Refuse what the ranks' captured steps (``--graph``) cannot do.

    Raises:
        ValueError: naming it, and the way out.
    """
    config, micro, size = run.config, run.micro_batches, run.ranks.size
    for good, what, way_out in (
        (
            config.tensor_parallel == 1,
            "ranks that share a block exchange tokens inside it",
            "leave --tensor-parallel out",
        ),
        (
            micro.parts == size,
            f"a captured step is one micro-batch on each rank, got {micro.parts} on {size}",
            "as many --micro-batches as ranks",
        ),
        (
            not config.error_feedback or config.loss_scale == "off",
            "what rounding left over is rescaled between steps by a loss scale that changes",
            "--loss-scale off, or --grad-rounding stochastic",
        ),
        (
            size == 1 or not (micro.running or micro.draws),
            "batch norms and dropout take the buffers of a micro-batch",
            "a model without them, or one rank",
        ),
    ):
        if not good:
            raise ValueError(f"--graph: {what}; the way out: {way_out}, or leave --graph out")


def _weights(run: Any) -> str:
    if run.parallel is not None:
        return digest(array for _, array in sorted(run.parallel.state_dict().items()))
    with run.whole():
        stored = (param.to("cpu").data for param in run.model.parameters())
        parts = (one.parts.values() if isinstance(one, QuantArray) else [one] for one in stored)
        return digest(itertools.chain.from_iterable(parts))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "used from its source"


def agree_on_errors(ranks: Communicator, error: Exception | None) -> None:
    """Raise on all ranks if one of them has an error.

    Raises:
        UsageError: with each rank's error, the same ones once.
    """
    messages = ranks.all_gather_object(None if error is None else str(error))
    found: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            found.setdefault(message, []).append(rank)
    if not found:
        return
    if len(found) == 1 and len(*found.values()) == ranks.size:
        raise UsageError(*found) from error
    parts = (f"rank {', '.join(map(str, who))}: {message}" for message, who in found.items())
    raise UsageError("; ".join(parts)) from error


def say(message: str) -> None:
    """Print to standard error; of a rank other than 0 a second later, with its number.

    Ranks mostly fail alike. Then rank 0 has spoken, and the launcher has ended the others.
    """
    rank = launched_rank()
    if rank:
        time.sleep(SECOND_THOUGHT)
        message = f"rank {rank} ({platform.node()}, process {os.getpid()}): {message}"
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def end_all(ranks: Any, lost: str) -> Iterator[None]:
    """End all ranks of the program if this one fails: they would wait for it.

    Args:
        ranks: the communicator.
        lost: what is left, and how to go on; said where another rank is lost.
    """
    if ranks.size == 1:
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, CollectiveTimeout):
            print(f"rank {ranks.rank}: {error}. {lost}", file=sys.stderr, flush=True)
        elif isinstance(error, UsageError | DataError | CheckpointError | RanksDiffer):
            say(f"error: {error}")
        else:
            traceback.print_exc()
            print(
                f"{ranks.where()} failed: {type(error).__name__}: {error}. {lost}",
                file=sys.stderr,
                flush=True,
            )
        ranks.abort(2 if isinstance(error, UsageError | RanksDiffer) else 1)
        raise


def rank_console(console: Console, ranks: Communicator) -> Console:
    """The console of rank 0; one that prints nothing for the others."""
    return console if ranks.rank == 0 else Console(quiet=True)
