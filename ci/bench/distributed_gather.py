"""Gathers of a block's weights from their shards, for distributed_gpu.py.

`gather` moves what quantizing or casting made, as collectives of their own, twice a step: for the
forward and for the backward pass. `zero3` calls what training under ``--shard parameters`` calls: a
step packs each weight for its forward and for its backward product, gathers both and decodes them
to float32. Its peer casts the shards to bfloat16 once, gathers twice and casts both times to
float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import extensor as et
from extensor.distributed import GatheredBuckets
from extensor.nn.recipe import apply_recipe

__all__ = ["gather", "zero3"]

HALF = np.dtype(ml_dtypes.bfloat16)
ROWS = 32
"""Of a rank, at least, for a weight that travels packed."""
WARM_UP = 3
"""Calls before the first that is timed: the third one of a captured step is replayed."""
RECIPES = ("mxfp4_all", "nvfp4_nvidia", "mxfp8_nvidia")


def shapes_of(width: int) -> list[tuple[int, int]]:
    """The weights of a transformer block."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def weights_of(bench: Any, shapes: list[tuple[int, int]]) -> list[Any]:
    """A million normal values, again and again: to draw all of them takes longer than to gather."""
    some = bench.xp.asarray(np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32))
    return [bench.xp.tile(some, -(-n * k // some.size))[: n * k].reshape(n, k) for n, k in shapes]


def linear_of(bench: Any, weight: Any) -> et.nn.Linear:
    """A layer with this weight."""
    layer = et.nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = et.nn.Parameter(weight, device=bench.device)
    return layer


def report(
    bench: Any, part: str, calls: dict[str, Any], captured: bool, more: dict[str, Any] | None = None
) -> None:
    """Times of one of a step's two gathers, in turns, beside bfloat16's; and what else is said."""
    ready = {n: bench.captured_step(c) for n, c in calls.items()} if captured else calls
    for call in ready.values():
        for number in range(WARM_UP):
            call(number)
    steps = bench.milliseconds(ready, 3)
    for name, step in steps.items():
        bench.row(
            part=part, name=name, captured=captured, ms=round(step / 2, 3),
            of_bfloat16=round(steps["bfloat16"] / step, 3), **(more or {}).get(name, {}),
        )  # fmt: skip


def gather(bench: Any) -> None:
    """A block's weights from their shards: quantized or cast, then gathered."""
    width = 4096 if not bench.tiny else 64
    size, xp, backend = bench.ranks.size, bench.xp, bench.backend
    shards = weights_of(bench, [(n // size, k) for n, k in shapes_of(width)])

    def magnitudes() -> list[Any]:
        with bench.ranks.beside():
            bits = backend.largest_multi_tensor(shards)
            bench.ranks.all_reduce(bits, "max").wait()
        bench.ranks.join()
        return [bits.view(np.float32)[i : i + 1].reshape(()) for i in range(len(shards))]

    def gathered(parts_of: Callable[..., list[Any]], scaled: bool, number: int) -> None:
        largest = magnitudes() if scaled else [None] * len(shards)  # once a step
        for _ in range(2):
            for lane, (shard, amax) in enumerate(zip(shards, largest, strict=True)):
                with bench.ranks.beside(lane):
                    parts = parts_of(shard, amax)
                    wholes = [xp.empty((size * part.size,), part.dtype) for part in parts]
                    bench.ranks.all_gather_coalesced(parts, wholes).wait()
            bench.ranks.join()

    def packed(name: str) -> Callable[[int], None]:
        spec = et.QuantSpec(name).resolve(2)

        def parts_of(shard: Any, amax: Any) -> list[Any]:
            q = backend.pack(shard, spec, None, amax)
            kept = (q.parts["codes"], q.parts["scales"])
            return [xp.ascontiguousarray(part).reshape(-1) for part in kept]

        return partial(gathered, parts_of, spec.row.tensor_scale)

    def cast(shard: Any, amax: Any) -> list[Any]:
        return [backend.cast(shard, HALF).view(np.uint16).reshape(-1)]

    calls = {
        "bfloat16": partial(gathered, cast, False),
        "float32": partial(gathered, lambda shard, amax: [shard.reshape(-1)], False),
        "mxfp8": packed("mxfp8_e4m3"),
        "nvfp4": packed("nvfp4"),
        "mxfp4": packed("mxfp4"),
    }
    for captured in bench.modes:
        report(bench, "gather", calls, captured)


def zero3(bench: Any) -> None:
    """A step's gathers as `GatheredBuckets` calls them, from Python."""
    widths: dict[str, list[tuple[int, int]]] = {
        "block of width 4096": shapes_of(4096),
        "a weight of 32768 x 8192": [(32768, 8192)],
    }
    if bench.tiny:
        widths = {"tiny": shapes_of(32 * bench.ranks.size)}
    for title, shapes in widths.items():
        calls: dict[str, Any] = {}
        sent: dict[str, Callable[[], float]] = {}
        for recipe in RECIPES:
            calls[recipe], sent[recipe] = packed_step(bench, recipe, shapes)
        calls["bfloat16"] = bfloat16_step(bench, shapes)
        for name, call in calls.items():
            began = time.perf_counter()
            call(0)
            bench.say(f"zero3: {title}: {name} is compiled ({time.perf_counter() - began:.0f} s)")
        more: dict[str, dict[str, Any]] = {name: {"weights": title} for name in calls}
        for name, ask in sent.items():
            more[name]["bytes_a_value"] = ask()
        report(bench, "zero3", calls, False, more)
        del calls, sent
        bench.free()


def packed_step(
    bench: Any, recipe: str, shapes: list[tuple[int, int]]
) -> tuple[Callable[[int], None], Callable[[], float]]:
    """A step's gathers under a recipe, and the bytes a value that a gather of them received."""
    weights = weights_of(bench, shapes)
    layers = [linear_of(bench, weight) for weight in weights]
    ends = [et.nn.Linear(ROWS, ROWS, bias=False, rng=9) for _ in range(2)]
    model = et.nn.Sequential(ends[0], *layers, ends[1]).to(bench.device)
    apply_recipe(model, recipe, 0)
    buckets = GatheredBuckets(model, bench.ranks, "float32", 1)
    mine = [buckets._of[id(layer.weight)] for layer in layers]
    values = sum(bucket.size for bucket in mine) * (1 - 1 / bench.ranks.size)
    if bench.ranks.size > 1:
        check(buckets, mine, weights)
    steps = [0, buckets.gathered_bytes]

    def step(number: int) -> None:
        steps[0] += 1
        buckets.gather()  # pieces are new
        for kind in ("fprop.w", "dgrad.w"):
            for bucket in mine:
                buckets._let_go()
                buckets._need(bucket, kind)

    def bytes_a_value() -> float:
        if bench.ranks.size == 1:
            return 0.0
        return round((buckets.gathered_bytes - steps[1]) / (2 * steps[0] * values), 3)

    return step, bytes_a_value


def check(buckets: Any, mine: list[Any], weights: list[Any]) -> None:
    """Whether the layers make the same of what was gathered as of the whole weights."""
    for bucket, weight in zip(mine, weights, strict=True):
        backend = bucket.backend
        for kind, spec in buckets._packed.weights[id(bucket)].specs().items():
            buckets._let_go()
            buckets._need(bucket, kind)
            got, expected = (
                backend.dequantize(backend.pack(x, spec)) for x in (bucket.params[0].data, weight)
            )
            if not bool((got == expected).all()):
                raise SystemExit(f"{spec}: expected the values of the whole weight, got others")


def bfloat16_step(bench: Any, shapes: list[tuple[int, int]]) -> Callable[[int], None]:
    """The same of shards cast to bfloat16."""
    xp, backend, size = bench.xp, bench.backend, bench.ranks.size
    shards = weights_of(bench, [(n // size, k) for n, k in shapes])

    def step(number: int) -> None:
        cast = [backend.cast(shard, HALF) for shard in shards]
        for _ in range(2):
            for part in cast:
                with bench.ranks.beside():
                    whole = xp.empty((size * part.shape[0], part.shape[1]), HALF)
                    sends, recvs = [part.view(np.uint16)], [whole.view(np.uint16)]
                    bench.ranks.all_gather_coalesced(sends, recvs).wait()
                bench.ranks.join()
                backend.cast(whole, np.dtype(np.float32))

    return step
