"""What the GPU benchmarks share: timing by CUDA events, torch's memory as cupy's, records.

Contestants are calls that take their number, so that they can rotate among inputs. They take turns
in one process. The host runs ahead of the GPU, so that no launch gap is timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import ml_dtypes
import torch

from ci.bench import contest
from ci.bench.contest import shown, write_gpu
from extensor.backends import registry
from extensor_cuda.backend import CudaBackend

__all__ = [
    "Call", "as_cupy", "cuda", "fixed", "milliseconds", "normal", "on_torchs_stream", "options",
    "rates", "seen", "shown", "times_of", "write_gpu",
]  # fmt: skip

Call = Callable[[int], Any]
BURST = 4
"""Calls between two events, where one takes less than a millisecond or so."""
AHEAD = 2_000_000
"""Clock cycles, about a millisecond, in which the host runs ahead."""


def cuda() -> CudaBackend:
    """The CUDA backend."""
    return cast(CudaBackend, registry.get("cuda"))


def options(doc: str | None, rounds: int, only: Sequence[str] = ()) -> argparse.ArgumentParser:
    """`ci.bench.contest.options` and, given parts, ``--only``."""
    parser = contest.options(doc, rounds)
    if only:
        parser.add_argument("--only", nargs="+", choices=only, default=list(only))
    return parser


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal data on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)


def as_cupy(x: torch.Tensor, xp: Any) -> Any:
    """Cupy's view of torch's memory."""
    x = x.detach()
    if x.dtype != torch.bfloat16:
        return xp.from_dlpack(x)
    return xp.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)


def fixed(run: Callable[..., Any], *args: Any, **more: Any) -> Call:
    """A contestant that does the same in every turn."""
    return lambda turn: run(*args, **more)


@contextmanager
def on_torchs_stream(backend: CudaBackend) -> Iterator[None]:
    """Within it cupy launches on torch's stream, whose events time both."""
    with backend.xp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        yield


def times_of(
    calls: dict[str, Call],
    rounds: int,
    burst: int = BURST,
    ahead: int = AHEAD,
    warm_up: int = 3,
    first: int = 0,
) -> dict[str, list[float]]:
    """Milliseconds of a call of each contestant in each round.

    Args:
        calls: the contestants.
        rounds: turns of each.
        burst: calls in a turn.
        ahead: clock cycles that the GPU waits while the host launches; 0: none.
        warm_up: turns before these, whose times are left out.
        first: calls of each contestant before its first turn.
    """
    for call, number in itertools.product(calls.values(), range(first)):
        call(number)
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + warm_up):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead:
                torch.cuda._sleep(ahead)
            start.record()
            for i in range(burst):
                call(burst * turn + i)
            stop.record()
            stop.synchronize()
            if turn >= warm_up:
                times[name].append(start.elapsed_time(stop) / burst)
    return times


def milliseconds(calls: dict[str, Call], rounds: int, **how: int) -> dict[str, float]:
    """Medians of `times_of`."""
    return {name: statistics.median(t) for name, t in times_of(calls, rounds, **how).items()}


def rates(times: dict[str, float], work: float = 0, **about: Any) -> Iterator[dict[str, Any]]:
    """A row for each contestant: ``about``, its time, its speed if ``work`` (operations) is given.

    Its last figure is how many times as fast it is as "torch bf16", one of the contestants.
    """
    for name, taken in times.items():
        speed = {"teraflops": round(work / taken / 1e9, 1)} if work else {}
        yield {
            **about,
            "name": name,
            "milliseconds": round(taken, 4),
            **speed,
            "of_torch_bf16": round(times["torch bf16"] / taken, 3),
        }


def seen(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds from an idle GPU to an idle GPU, Python included."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(turn)
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}
