"""``extensor tune``: measure from which size on each path of a product pays on this GPU.

For cubes of growing size and each way to make operands, a forward product of bfloat16 matrices
with everything included (quantizing both operands, multiplying) is timed through our kernels and
through cupy, whose operands are float32 values. A path is taken from the smallest size on from
which it wins at every larger one: the table goes to `extensor_cuda.matmul.tuned`. Beside them the
same product without quantizing, in bfloat16, says from which size on a quantized one is quicker
than that; no choice follows from it. The curves go to an SVG.

Everything is timed as a captured training step runs it, from CUDA graphs (`CudaGraph`), small
products many in one graph: it is the GPU's work that is compared. Called by Python, products below
about 2048 cubed take as long as Python does, whichever path they take.

With `hadamard`, also what Hadamard transforms cost a linear layer's forward and backward: under
recipes that have them and the same without them, in bfloat16, 2048 wide and up to the 8192 of a
transformer of 70B parameters.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.autograd.tensor import wrap
from extensor.ops import recipe_operands as slots
from extensor.ops.quantized import layer_context, quantized_matmul
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from extensor_cuda.matmul import tuned

__all__ = [
    "NEVER",
    "SIZES",
    "WIDTHS",
    "Timing",
    "crossovers",
    "curve",
    "draw",
    "label",
    "measure",
    "of_bf16",
    "overheads",
    "products_per_graph",
    "tune",
    "without_hadamard",
]

SIZES = (128, 256, 512, 1024, 2048, 4096)
"""Sides of the cubes."""
NEVER = 1 << 62
"""The least work of a path that never wins."""
RECIPES = {
    "fused": "mxfp4",
    "expanded": "nvfp4_nvidia",
    "float scales": "fp8_block",
    "bf16": "bf16",
}
"""A recipe whose forward product takes each path; the last is what the others are held against."""
WIDTHS = (2048, 4096, 8192)
"""Inputs of layers that Hadamard transforms are measured on, from 1B to 70B parameters."""
HADAMARD_RECIPES = ("nvfp4_nvidia", "mxfp4_tseng")
"""Recipes that have them."""
_TOKENS, _WIDER = 8192, 3.5  # rows of a layer's input, and its outputs for an input
_MAX_PRODUCTS, _MAX_WORK = 16, 1 << 37  # products of one graph, and their M N K in all
Work = Callable[[], object]
Clock = Callable[..., Sequence[float]]
"""Seconds of one call of each of the works that are given, which take turns."""
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Timing:
    """One path at one size: seconds through our kernels, through cupy, and of plain bfloat16.

    Of a recipe at a width: seconds without its Hadamard transforms, and with them. What was not
    measured is None.
    """

    path: str
    size: int
    ours: float
    other: float
    bf16: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as long the other one takes."""
        return self.other / self.ours


def products_per_graph(size: int) -> int:
    """Products of a cube in one graph: many, where a graph's launch would be seen beside one."""
    return max(1, min(_MAX_PRODUCTS, _MAX_WORK // size**3))


def measure(
    clock: Clock,
    works: Callable[[str, int], Sequence[Work]],
    paths: Sequence[str] = tuned.PATHS,
    sizes: Sequence[int] = SIZES,
) -> list[Timing]:
    """Time every path at every size.

    ``works`` gives, for a path and a size, our work, cupy's and, where it is another one,
    bfloat16's: as many products each as `products_per_graph` says.
    """
    return [
        Timing(
            path,
            size,
            *(seconds / products_per_graph(size) for seconds in clock(*works(path, size))),
        )
        for path in paths
        for size in sizes
    ]


def of_bf16(timings: Sequence[Timing]) -> list[Timing]:
    """The same with plain bfloat16 as the other one, of paths that were held against it."""
    return [replace(t, other=t.bf16, bf16=None) for t in timings if t.bf16 is not None]


def crossovers(timings: Sequence[Timing]) -> dict[str, int]:
    """For each path the M N K from which it wins at every larger size that was measured."""
    least: dict[str, int] = {}
    for path in dict.fromkeys(t.path for t in timings):
        least[path] = NEVER
        for timing in sorted((t for t in timings if t.path == path), key=lambda t: -t.size):
            if timing.ratio < 1.0:
                break
            least[path] = timing.size**3
    return least


def curve(to: Path, timings: Sequence[Timing], title: str, ticks: Sequence[float]) -> None:
    """Draw the ratios over the sizes, both axes logarithmic; the first two ticks are shown.

    Those of plain bfloat16 are dashed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    dashed, sizes = of_bf16(timings), sorted({t.size for t in timings})
    for i, path in enumerate(dict.fromkeys(t.path for t in timings)):
        for held, style, name in ((timings, "-", label(path)), (dashed, "--", "_")):
            points = [(t.size, t.ratio) for t in held if t.path == path]
            if points:
                axes.loglog(*zip(*points, strict=True), style, color=f"C{i}", label=name)
    low, high = axes.get_ylim()
    low, high = min(low, ticks[0]), max(high, ticks[1])
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}x" for tick in shown])
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.axhline(1, color="0.2", linewidth=0.8)
    axes.grid(axis="y", color="0.87")
    figure.legend(loc="outside right upper", frameon=False)
    with mpl.rc_context({"svg.fonttype": "none"}):  # words stay words
        figure.savefig(to, metadata={"Date": None})


def label(path: str) -> str:
    """A path with the recipe that was measured for it; a recipe is its own."""
    return f"{path} ({RECIPES[path]})" if path in RECIPES else path


_SLOW = 0.05  # seconds of a call that is not repeated as often


def _clock(xp: Any) -> Clock:
    """Seconds of calls on the device: medians of rounds of calls between events."""

    def between(work: Work, calls: int) -> float:
        start, stop = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        return float(xp.cuda.get_elapsed_time(start, stop)) / 1000 / calls

    def timed(*works: Work) -> list[float]:
        plans = []
        for work in works:
            work()
            plans.append((1, 3) if between(work, 1) > _SLOW else (5, 7))
        found: list[list[float]] = [[] for _ in works]
        for turn in range(max(rounds for _, rounds in plans)):
            for work, (calls, rounds), times in zip(works, plans, found, strict=True):
                if turn < rounds:
                    times.append(between(work, calls))
        return [statistics.median(times) for times in found]

    return timed


def _works(backend: Any) -> Callable[[str, int], Sequence[Work]]:
    """Forward products of normal bfloat16 cubes: our kernels, cupy, and unquantized in our own."""

    def product(recipe: str, x: Any, w: Any, kernels: bool) -> Work:
        context, size = layer_context(get_recipe(recipe).layers, seed=1), len(x)
        sizes = (size, size, size if kernels else 0)  # 0 is too little work for every kernel

        def run() -> object:
            with tuned.always() if kernels else nullcontext():
                for _ in range(products_per_graph(size)):
                    (a,) = slots.make_operands(backend, x, context, (("fprop.x", -1),), sizes)
                    (b,) = slots.make_operands(backend, w, context, (("fprop.w", -1),), sizes)
                    out = backend.cast(backend.product(a, b, "bfloat16"), _BF16)
            return out

        return run

    def works(path: str, size: int) -> Sequence[Work]:
        rng = np.random.default_rng(size)
        x, w = (_rows(backend.xp, rng, size, size) for _ in range(2))
        found = [product(RECIPES[path], x, w, kernels) for kernels in (True, False)]
        return found if path == "bf16" else [*found, product(RECIPES["bf16"], x, w, True)]

    return works


def without_hadamard(layer: LayerRecipe) -> LayerRecipe:
    """A layer's recipe with no transforms."""

    def plain(operand: Any) -> Any:
        return operand.replace(transform=None) if isinstance(operand, QuantSpec) else operand

    fprop, dgrad, wgrad = (
        Gemm(plain(g.a), plain(g.b), g.output_scale)
        for g in (layer.fprop, layer.dgrad, layer.wgrad)
    )
    return replace(layer, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def overheads(
    backend: Any, clock: Clock, widths: Sequence[int] = WIDTHS, tokens: int = _TOKENS
) -> list[Timing]:
    """Time layers' forward and backward without Hadamard transforms and with them.

    ``widths`` are of the layers' inputs, of so many rows; outputs are three and a half times as
    wide.
    """
    found = []
    for width in widths:
        rng = np.random.default_rng(width)
        shapes = (tokens, width), (int(_WIDER * width), width), (tokens, int(_WIDER * width))
        x, w, g = (wrap(_rows(backend.xp, rng, *shape), backend) for shape in shapes)
        x.requires_grad, w.requires_grad = True, True

        def step(layer: LayerRecipe, x: Any = x, w: Any = w, g: Any = g) -> Work:
            context = layer_context(layer, seed=1)

            def run() -> object:
                x.grad = w.grad = None
                quantized_matmul(x, w, context).backward(g)
                return x.grad, w.grad

            return run

        for recipe in HADAMARD_RECIPES:
            layer = get_recipe(recipe).layers
            works = [step(each) for each in (without_hadamard(layer), layer)]
            found.append(Timing(recipe, width, *clock(*works)))
    return found


def _repeated(backend: Any, work: Work) -> Work:
    """The work as a captured training step is run: recorded, then repeated without Python."""
    graph = backend.new_graph()
    for stage in (graph.run, graph.warm_up, graph.capture):
        stage(work)
    repeat: Work = graph.replay
    return repeat


def _rows(xp: Any, rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Normal bfloat16 (rows, columns), repeated every 256 rows."""
    some = rng.standard_normal((256, columns)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return xp.tile(xp.asarray(some), (-(-rows // 256), 1))[:rows].view(ml_dtypes.bfloat16)


def draw(
    to: Path, timings: Sequence[Timing], about: dict[str, Any], what: str, ticks: Sequence[float]
) -> None:
    """Write the curve, and its numbers with what they are about to a JSON file of the same name."""
    curve(to, timings, f"{about['gpu']}: {what}", ticks)
    record = about | {"what": what, "timings": [_numbers(t) for t in timings]}
    to.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _numbers(timing: Timing) -> dict[str, Any]:
    """A timing with its ratios, for JSON."""
    found = asdict(timing) | {"ratio": timing.ratio}
    if timing.bf16 is None:
        del found["bf16"]
    else:
        found["bf16_ratio"] = timing.bf16 / timing.ours
    return found


def tune(
    plot: Path | None = None, sizes: Sequence[int] = SIZES, hadamard: Path | None = None
) -> tuple[Path, list[Timing], list[Timing]]:
    """Measure on cupy's current GPU and write the table.

    ``plot`` is an SVG file for the curve, with its numbers beside it in a JSON file; ``hadamard``
    likewise for what Hadamard transforms cost, which is not measured without it.

    Returns:
        The table's file, what was measured for it, and of Hadamard transforms.

    Raises:
        RuntimeError: without a GPU that the products are for, or matplotlib for a plot.
    """
    from extensor.backends import registry

    if (plot or hadamard) and find_spec("matplotlib") is None:
        raise RuntimeError("tune: plots are drawn by matplotlib; pip install 'extensor[train]'")

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
    timed = _clock(xp)

    def clock(*works: Work) -> Sequence[float]:
        return timed(*(_repeated(backend, work) for work in works))

    timings = measure(clock, _works(backend), sizes=sorted(set(sizes)))
    path = tuned.path_of(gpu, driver)
    about = {"gpu": gpu, "driver": driver, "date": str(date.today()), "timed": "CUDA graphs"}
    tuned.save(path, crossovers(timings), about | {"timings": [_numbers(t) for t in timings]})
    if plot is not None:
        what = "our kernels against cupy, dashed: against plain bfloat16"
        draw(plot, timings, about | {"recipes": RECIPES}, what, (0.5, 1, 0.25, 2, 4, 8, 16, 32))
    costs = [] if hadamard is None else overheads(backend, clock, WIDTHS)
    if hadamard is not None:
        what = "a linear layer's step with Hadamard transforms, of one without, by width"
        draw(hadamard, costs, about, what, (1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5))
    return path, timings, costs
