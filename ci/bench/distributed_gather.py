"""Gathers of a block's weights from their shards, for distributed_gpu.py.

`gather` moves what quantizing or casting made, as collectives of their own, twice a step: for the
forward and for the backward pass. `zero3` calls what training under ``--shard parameters`` calls: a
step packs each weight for its forward and for its backward product, and gathers both. Its peer
casts the shards to bfloat16 once and gathers twice. Both end with the whole weight as it has
travelled; or ("operand") with what the recipe's product multiplies, made of it.
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
from extensor.distributed.packed import AXES
from extensor.nn.recipe import apply_recipe
from extensor.ops.recipe_operands import make_operands, version_of

__all__ = ["gather", "zero3"]

HALF = np.dtype(ml_dtypes.bfloat16)
ROWS = 32
"""Of a rank, at least, for a weight that travels packed."""
WARM_UP = 3
"""Calls before the first that is timed: the third one of a captured step is replayed."""
RECIPES = ("mxfp4_all", "nvfp4_nvidia", "mxfp8_nvidia")
TOKENS = 16384
"""Rows that the products of operands are for."""


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
    bench: Any,
    part: str,
    calls: dict[str, Any],
    captured: bool,
    peers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Times of one of a step's two gathers, in turns, beside their peers'; what else is said."""
    ready = {n: bench.captured_step(c) for n, c in calls.items()} if captured else calls
    for call in ready.values():
        for number in range(WARM_UP):
            call(number)
    steps = bench.milliseconds(ready, 3)
    for name, step in steps.items():
        peer = steps[(peers or {}).get(name, "bfloat16")]
        bench.row(
            part=part, name=name, captured=captured, ms=round(step / 2, 3),
            peer_ms=round(peer / 2, 3), of_bfloat16=round(peer / step, 3),
            **(more or {}).get(name, {}),
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
            q = backend.quantize(shard, spec, None, None, amax)[0]
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
    """A step's gathers as `GatheredBuckets` calls them."""
    widths: dict[str, list[tuple[int, int]]] = {
        "block of width 4096": shapes_of(4096),
        "a weight of 32768 x 8192": [(32768, 8192)],
    }
    if bench.tiny:
        widths = {"tiny": shapes_of(32 * bench.ranks.size)}
    for title, shapes in widths.items():
        calls: dict[str, Any] = {"bfloat16": bfloat16_step(bench, shapes)}
        peers: dict[str, str] = {}
        sent: dict[str, Callable[[], float]] = {}
        for recipe in RECIPES:
            there, operands, layers, sent[recipe] = packed_step(bench, recipe, shapes)
            peer, name = f"bfloat16, then {recipe}", f"{recipe}, operand"
            calls |= {recipe: there, name: operands, peer: bfloat16_step(bench, shapes, layers)}
            peers |= {name: peer, peer: peer}
        for name, call in calls.items():
            began = time.perf_counter()
            call(0)
            bench.say(f"zero3: {title}: {name} is compiled ({time.perf_counter() - began:.0f} s)")
        more: dict[str, dict[str, Any]] = {name: {"weights": title} for name in calls}
        for name, ask in sent.items():
            more[name]["bytes_a_value"] = ask()
        for captured in bench.modes:
            report(bench, "zero3", calls, captured, peers, more)
        del calls, sent
        bench.free()


def packed_step(
    bench: Any, recipe: str, shapes: list[tuple[int, int]]
) -> tuple[Callable[[int], None], Callable[[int], None], list[Any], Callable[[], float]]:
    """A step's gathers under a recipe, and its operands; and the bytes a value that one received.

    The layers are for the peer.
    """
    weights = weights_of(bench, shapes)
    layers = [linear_of(bench, weight) for weight in weights]
    ends = [et.nn.Linear(ROWS, ROWS, bias=False, rng=9) for _ in range(2)]
    model = et.nn.Sequential(ends[0], *layers, ends[1]).to(bench.device)
    apply_recipe(model, recipe, 0)
    buckets = GatheredBuckets(model, bench.ranks, "float32", 1)
    mine = [buckets._of[id(layer.weight)] for layer in layers]
    values = sum(bucket.size for bucket in mine) * (1 - 1 / bench.ranks.size)
    if bench.ranks.size > 1:
        check(buckets, layers, weights)
    steps = [0, buckets.gathered_bytes]

    def step(multiplied: bool, number: int) -> None:
        steps[0] += 1
        buckets.gather()  # pieces are new
        for slot in AXES:
            for layer, bucket in zip(layers, mine, strict=True):
                buckets._let_go()
                buckets._need(bucket, slot)
                if multiplied:
                    operand_of(layer, slot)

    def bytes_a_value() -> float:
        if bench.ranks.size == 1:
            return 0.0
        return round((buckets.gathered_bytes - steps[1]) / (2 * steps[0] * values), 3)

    return partial(step, False), partial(step, True), layers, bytes_a_value


def operand_of(layer: Any, slot: str, values: Any = None) -> Any:
    """What a layer's product multiplies: of its weight, or of other values of its shape."""
    weight, (n, k) = layer.weight, layer.weight.shape
    array, version = (weight.data, version_of(weight)) if values is None else (values, None)
    slots, sizes = ((slot, AXES[slot]),), (TOKENS, n, k)
    return make_operands(weight.backend, array, layer.quant, slots, sizes, version)[0]


def check(buckets: Any, layers: list[Any], weights: list[Any]) -> None:
    """Whether the layers multiply the same of what was gathered as of the whole weights."""
    for layer, weight in zip(layers, weights, strict=True):
        for slot in AXES:
            buckets._let_go()
            buckets._need(buckets._of[id(layer.weight)], slot)
            got, expected = operand_of(layer, slot), operand_of(layer, slot, weight)
            xp = layer.weight.backend.xp
            a, b = (one.values(xp) if hasattr(one, "values") else one for one in (got, expected))
            if not bool((a == b).all()) or getattr(got, "kind", "") != getattr(
                expected, "kind", ""
            ):
                raise SystemExit(f"{slot}: expected the operand of the whole weight, got another")


def bfloat16_step(
    bench: Any, shapes: list[tuple[int, int]], layers: list[Any] | None = None
) -> Callable[[int], None]:
    """The same of shards cast to bfloat16; and what a recipe's layers make of them."""
    xp, backend, size = bench.xp, bench.backend, bench.ranks.size
    shards = weights_of(bench, [(n // size, k) for n, k in shapes])

    def step(number: int) -> None:
        cast = [backend.cast(shard, HALF) for shard in shards]
        for slot in AXES:
            for i, part in enumerate(cast):
                with bench.ranks.beside():
                    whole = xp.empty((size * part.shape[0], part.shape[1]), HALF)
                    sends, recvs = [part.view(np.uint16)], [whole.view(np.uint16)]
                    bench.ranks.all_gather_coalesced(sends, recvs).wait()
                bench.ranks.join()
                if layers is not None:
                    operand_of(layers[i], slot, whole)

    return step
