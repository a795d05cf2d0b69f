"""``extensor tune``: measure from which size on each way of multiplying pays on this GPU.

For cubes of growing size and each way of making operands, a forward product with everything
included (quantizing both operands, multiplying) is timed through our kernels and through cupy,
whose operands are float32 values. A way is taken from the smallest size on from which it wins at
every larger one. The table goes to `extensor_cuda.tuned`, the curve to an SVG.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from extensor.ops import operands as slots
from extensor.ops.quantized import layer_context
from extensor.quant.recipes import get_recipe
from extensor_cuda import tuned

__all__ = ["NEVER", "SIZES", "Timing", "crossovers", "curve", "measure", "tune"]

SIZES = (128, 256, 512, 1024, 2048, 4096)
"""Sides of the cubes."""
NEVER = 1 << 62
"""The least work of a way that never wins."""
RECIPES = {
    "made at once": "mxfp4",
    "expanded": "nvfp4_nvidia",
    "scaled": "fp8_block",
    "dense": "bf16",
}
"""A recipe whose forward product takes each way."""
Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One way at one size: seconds through our kernels, and through cupy."""

    way: str
    size: int
    ours: float
    other: float

    @property
    def ratio(self) -> float:
        """How many times as fast our kernels are."""
        return self.other / self.ours


def measure(
    clock: Callable[[Work], float],
    works: Callable[[str, int], tuple[Work, Work]],
    ways: Sequence[str] = tuned.WAYS,
    sizes: Sequence[int] = SIZES,
) -> list[Timing]:
    """Time every way at every size.

    Args:
        clock: seconds of one call of a work.
        works: for a way and a size, our work and the other one.
        ways: to measure.
        sizes: sides of cubes.
    """
    found = []
    for way in ways:
        for size in sizes:
            ours, other = works(way, size)
            found.append(Timing(way, size, clock(ours), clock(other)))
    return found


def crossovers(timings: Sequence[Timing]) -> dict[str, int]:
    """For each way the M N K from which it wins at every larger size that was measured."""
    least: dict[str, int] = {}
    for way in dict.fromkeys(t.way for t in timings):
        least[way] = NEVER
        for timing in sorted((t for t in timings if t.way == way), key=lambda t: -t.size):
            if timing.ratio < 1.0:
                break
            least[way] = timing.size**3
    return least


def curve(timings: Sequence[Timing], title: str) -> str:
    """The ratios over the sizes as an SVG, both axes logarithmic; ways pay above the line at 1."""
    width, height, edge = 640, 400, 60
    colours = ("#1b6ca8", "#c2571a", "#3c8d40", "#8a3ab9")
    sizes = sorted({t.size for t in timings})
    low = min(0.5, *(t.ratio for t in timings)) / 1.1
    high = max(2.0, *(t.ratio for t in timings)) * 1.1

    def place(size: float, ratio: float) -> tuple[float, float]:
        span = max(math.log(sizes[-1] / sizes[0]), 1e-9)
        x = edge + (width - 2 * edge) * math.log(size / sizes[0]) / span
        return x, height - edge - (height - 2 * edge) * math.log(ratio / low) / math.log(high / low)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" {more}>{words}</text>'

    (left, one), (right, _) = place(sizes[0], 1.0), place(sizes[-1], 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(edge, 24, title),
        f'<path d="M{left:.1f} {one:.1f}H{right:.1f}" stroke="#999" stroke-dasharray="4"/>',
        text(8, one + 4, "1x"),
    ]
    parts += [
        text(place(size, low)[0], height - edge + 20, str(size), 'text-anchor="middle"')
        for size in sizes
    ]
    for i, way in enumerate(dict.fromkeys(t.way for t in timings)):
        points = [place(t.size, t.ratio) for t in timings if t.way == way]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = colours[i % len(colours)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(width - edge - 90, 44 + 16 * i, way, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>\n"])


_SLOW = 0.05  # seconds of a call that is not repeated as often


def _clock(xp: Any) -> Callable[[Work], float]:
    """Seconds of a call on the device: the median of rounds of calls between events."""

    def between(work: Work, calls: int) -> float:
        start, stop = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        return float(xp.cuda.get_elapsed_time(start, stop)) / 1000 / calls

    def timed(work: Work) -> float:
        work()
        calls, rounds = (1, 3) if between(work, 1) > _SLOW else (5, 7)
        return statistics.median(between(work, calls) for _ in range(rounds))

    return timed


def _works(backend: Any) -> Callable[[str, int], tuple[Work, Work]]:
    """Forward products of normal bfloat16 cubes, with our kernels and with cupy."""

    def product(recipe: str, size: int, work: int) -> Work:
        rng = np.random.default_rng(size)
        x, w = (
            backend.xp.asarray(rng.standard_normal((size, size)).astype(np.float32))
            for _ in range(2)
        )
        context = layer_context(get_recipe(recipe).layers, seed=1)
        sizes = (size, size, work // size**2)

        def run() -> object:
            (a,) = slots.of_products(backend, x, context, [("fprop.x", -1)], sizes)
            (b,) = slots.of_products(backend, w, context, [("fprop.w", -1)], sizes)
            return backend.operand_product(a, b)

        return run

    def both(way: str, size: int) -> tuple[Work, Work]:
        def ours() -> object:
            with tuned.always():
                return work()

        work = product(RECIPES[way], size, size**3)
        return ours, product(RECIPES[way], size, 0)

    return both


def tune(plot: Path | None = None, sizes: Sequence[int] = SIZES) -> tuple[Path, list[Timing]]:
    """Measure on cupy's current GPU, write the table and, if asked for, the curve.

    Returns:
        The table's file, and what was measured.

    Raises:
        RuntimeError: without a GPU that the products are for; says which.
    """
    from extensor.backends import registry

    backend: Any = registry.get("cuda")
    xp = backend.xp
    capability = xp.cuda.Device().compute_capability
    if capability != "90":
        raise RuntimeError(
            f"tune: the products on tensor cores are for compute capability 9.0 (H100, H200), this "
            f"GPU has {capability}: there is nothing to choose"
        )
    runtime = xp.cuda.runtime
    gpu = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    driver = runtime.driverGetVersion()
    timings = measure(_clock(xp), _works(backend), sizes=sizes)
    path = tuned.path_of(gpu, driver)
    about = {
        "gpu": gpu,
        "driver": driver,
        "date": str(date.today()),
        "timings": [asdict(t) for t in timings],
    }
    tuned.save(path, crossovers(timings), about)
    if plot is not None:
        plot.write_text(curve(timings, f"{gpu}: our kernels against cupy"), encoding="utf-8")
    return path, timings
