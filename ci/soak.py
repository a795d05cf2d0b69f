"""Train for a very long time in a short one: the memory must stay flat, and every result the same.

    python ci/soak.py --steps 1000000            an hour of one idle core
    python ci/soak.py --steps 1500 --every 7     a sample: what the tests run

A small model (a convolution, a norm, two linear layers) is trained under every recipe by every
optimizer, `EACH` steps a time, over and over. Parts, each with a share of the steps:

- alone: in this thread;
- threads: in eight at once;
- signals: while a timer interrupts Python a thousand times a second;
- fork, spawn: in worker processes that are started from here, four times each.

The weights must be those of the first time, bit for bit, wherever they were trained. Memory is
measured before each round of the part `alone` but the first; from there on it may grow by 1 MB.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from extensor import nn
from extensor.quant.recipes import RECIPES
from extensor.training.choices import OPTIMIZERS

EACH = 4
THREADS, WORKERS, STARTS = 8, 2, 4
GROWTH_MB = 1.0
PARTS = {"alone": 0.7, "threads": 0.15, "signals": 0.1, "fork": 0.025, "spawn": 0.025}

Pair = tuple[str, str]
PAIRS: list[Pair] = list(itertools.product(RECIPES, OPTIMIZERS))
_RNG = np.random.default_rng(0)
INPUTS = _RNG.standard_normal((4, 1, 8, 8)).astype(np.float32)
LABELS = _RNG.integers(0, 4, 4)


def trained(pair: Pair) -> str:
    """Train a pair of recipe and optimizer from the beginning; a digest of the weights."""
    recipe, optimizer = pair
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, rng=rng), nn.ReLU(), nn.Flatten(), nn.LayerNorm(288),
        nn.Linear(288, 32, rng=rng), nn.ReLU(), nn.Linear(32, 4, rng=rng),
    )  # fmt: skip
    nn.apply_recipe(model, recipe, seed=0)
    fit = [p for p in model.parameters() if optimizer != "muon" or p.ndim > 1]
    steps = OPTIMIZERS[optimizer](fit, lr=0.01)
    for _ in range(EACH):
        steps.zero_grad()
        et.cross_entropy(model(et.from_numpy(INPUTS)), et.from_numpy(LABELS)).backward()
        steps.step()
    found = hashlib.sha256()
    for value in model.state_dict().values():
        assert isinstance(value, np.ndarray)  # masters are float32
        found.update(value.tobytes())
    return found.hexdigest()


def memory_mb() -> float:
    """This process's resident memory, in 10**6 bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def rounds(steps: float, pairs: list[Pair]) -> Iterator[list[Pair]]:
    """The pairs of each round; the last is cut where the steps are spent."""
    left = math.ceil(steps / EACH)
    while left > 0:
        yield pairs[:left]
        left -= len(pairs)


class Soak:
    """The parts, and what they found.

    Args:
        steps: of all parts together.
        pairs: what is trained in each round.
    """

    def __init__(self, steps: int, pairs: list[Pair]) -> None:
        self.steps, self.pairs, self.done = steps, pairs, 0
        self.failures: list[str] = []
        self.first: dict[Pair, str] = {}
        self.memory: list[float] = []

    def compare(self, part: str, pairs: Sequence[Pair], digests: Sequence[str]) -> None:
        """Note the weights that are not those of the first time."""
        for pair, digest in zip(pairs, digests, strict=True):
            self.done += EACH
            if self.first.setdefault(pair, digest) != digest:
                self.failures.append(f"{part}: {' '.join(pair)}: other weights")

    def alone(self) -> None:
        """One thread; the memory is measured."""
        for number, pairs in enumerate(rounds(self.steps * PARTS["alone"], self.pairs)):
            if number > 1:
                self.memory.append(memory_mb())
            self.compare("alone", pairs, [trained(pair) for pair in pairs])
        self.memory.append(memory_mb())
        if (growth := self.memory[-1] - self.memory[0]) > GROWTH_MB:
            self.failures.append(f"memory grew by {growth:.2f} MB")

    def threads(self) -> None:
        """Eight threads."""
        with ThreadPoolExecutor(THREADS) as pool:
            for pairs in rounds(self.steps * PARTS["threads"], self.pairs):
                self.compare("threads", pairs, list(pool.map(trained, pairs)))

    def signals(self) -> None:
        """A signal each millisecond, whose handler allocates."""
        caught = [0]

        def handler(number: int, frame: Any) -> None:
            caught[0] += len(bytearray(1000)) // 1000

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for pairs in rounds(self.steps * PARTS["signals"], self.pairs):
                self.compare("signals", pairs, [trained(pair) for pair in pairs])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if not caught[0]:
            self.failures.append("signals: none arrived")

    def workers(self, method: str) -> None:
        """Worker processes, started anew several times."""
        for _ in range(STARTS):
            with ProcessPoolExecutor(WORKERS, mp_context=get_context(method)) as pool:
                for pairs in rounds(self.steps * PARTS[method] / STARTS, self.pairs):
                    self.compare(method, pairs, list(pool.map(trained, pairs)))


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; 1 if a result changed or the memory grew."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=1, help="take each N-th pair")
    chosen = parser.parse_args(argv)
    soak = Soak(chosen.steps, PAIRS[:: chosen.every])
    parts: dict[str, Callable[[], None]] = {
        "alone": soak.alone,
        "threads": soak.threads,
        "signals": soak.signals,
        "fork": lambda: soak.workers("fork"),
        "spawn": lambda: soak.workers("spawn"),
    }
    for name, run in parts.items():
        begun, before = time.monotonic(), soak.done
        run()
        print(
            f"{name:<8} {soak.done - before:,} steps, {time.monotonic() - begun:.0f} s", flush=True
        )
    for text in dict.fromkeys(soak.failures):
        print(text)
    print(
        f"{soak.done:,} steps, {len(soak.pairs)} pairs of recipe and optimizer, memory "
        f"{soak.memory[0]:.1f} to {soak.memory[-1]:.1f} MB (largest {max(soak.memory):.1f}), "
        f"{len(soak.failures)} failures"
    )
    return int(bool(soak.failures))


if __name__ == "__main__":
    sys.exit(main())
