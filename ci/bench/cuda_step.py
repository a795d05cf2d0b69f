"""Whole training steps on a GPU: eager, captured in a CUDA graph, and torch's.

    python ci/bench/cuda_step.py [--only lenet gpt wide layers] [--recipes mxfp4 ...] [--profile]

lenet   LeNet-5, batch 256, SGD with momentum; torch float32: eager, compiled with
        mode="reduce-overhead", and its whole step in one CUDA graph
gpt     a GPT of 30 million parameters (8 layers, width 512, vocabulary 8192), 16 windows of 1024
        tokens, AdamW; torch in bfloat16 (autocast): eager and compiled
wide    a GPT of width 4096 (2 layers, vocabulary 32,768, 8 windows of 2048 tokens), captured
        only; torch compiled only
layers  one transformer block, forward and backward, of 16,384 tokens and width 2048 and 4096;
        torch likewise

A step is forward, backward and update, all of the optimizer's checks included; batches lie on the
GPU. `--activations` is what ours store between layers: bfloat16, as torch does under autocast, or
float32; lenet is float32 on both sides. Ours are `extensor.capture`d, or the same function called
by Python ("eager"). CUDA events around several steps, each of ours taking turns with torch's in one
process, medians. "of_torch" is to torch's fastest, whose time in those turns is "torch".
"gigabytes" is the most memory of the GPU that a contestant takes, weights, gradients and optimizer
included: torch's allocated at the peak of a step, all that ours has taken from the device. Needs a
GPU, torch and the extra ``cuda13``; minutes, most of them torch.compile's, which `--quick` leaves
out; `--captured` leaves out gpt's eager steps. `--profile` prints where the time of each goes, by
kernel.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import extensor as et
from ci.bench.gpu import Call, cuda, milliseconds, options, write_gpu
from ci.bench.torch_models import torch_gpt, torch_lenet
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.models.lenet.configs import LeNetConfig
from extensor.models.lenet.model import build as build_lenet
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, AdamW
from extensor.quant.recipe import FLOAT_NAMES, FloatName, Recipe

Recipes = Sequence[str | Recipe]
PARTS = ("lenet", "gpt", "wide", "layers")
RECIPES = {
    "lenet": ["fp32", "mxfp4", "mxfp8_nvidia"],
    "gpt": ["bf16", "mxfp8_nvidia", "mxfp4", "nvfp4_nvidia"],
    "wide": ["bf16", "mxfp4_all"],
    "layers": ["bf16", "mxfp8_nvidia", "mxfp8_rebased", "mxfp4_all"],
}
GPTS = {
    "gpt": GPTConfig(vocab=8192, context=1024, layers=8, heads=8, width=512),
    "wide": GPTConfig(vocab=32768, context=2048, layers=2, heads=32, width=4096),
}
TOKENS, IMAGES, BATCHES = 16384, 256, 4
PROFILED = 40
"""Kernels in a profile."""


def profile(title: str, call: Call) -> None:
    """Print the microseconds and launches of each kernel in a step, the longest first."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as found:
        for turn in range(BATCHES):
            call(turn)
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in kernels) / BATCHES
    print(f"--- {title}: {total:.0f} us in kernels, of one step")
    for one in kernels[:PROFILED]:
        each = one.self_device_time_total / BATCHES
        print(f"{each:10.1f} us {one.count / BATCHES:7.1f} x  {one.key[:110]}", flush=True)


def ours(
    model: Any,
    optimizer: Any,
    recipes: Recipes,
    loss_of: Any,
    batches: list[Any],
    activations: FloatName = "float32",
    captured_or_not: tuple[bool, ...] = (False, True),
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """The step by Python, then captured, or one of them; each with a model of its own."""
    stored = "" if activations == "float32" else f" in {activations}"
    for recipe, captured in itertools.product(recipes, captured_or_not):
        name = recipe if isinstance(recipe, str) else recipe.name

        def make(recipe: str | Recipe = recipe, captured: bool = captured) -> Call:
            mine = model()
            state = apply_recipe(mine, recipe, activations=activations)
            update = optimizer(mine)
            held = [tuple(et.from_numpy(a, device="cuda") for a in batch) for batch in batches]

            def step(*batch: et.ExTensor) -> et.ExTensor:
                update.zero_grad()
                loss: et.ExTensor = loss_of(mine, *batch)
                loss.backward()
                update.step()
                return loss

            train = et.capture(step) if captured else step

            def call(turn: int) -> Any:
                state.step += 1
                return train(*held[turn % BATCHES])

            return call

        yield f"{name}{stored}, {'captured' if captured else 'eager'}", make


def theirs(
    model: torch.nn.Module, optimizer: Any, loss_of: Any, batches: list[Any], half: bool
) -> Call:
    """Torch's step with this model, compiled or not."""
    held = [tuple(torch.from_numpy(a).cuda() for a in batch) for batch in batches]

    def call(turn: int) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = loss_of(model, *held[turn % BATCHES])
        loss.backward()
        optimizer.step()
        return loss

    return call


def graphed(call: Call, batches: list[Any]) -> Call:
    """Torch's whole step in one CUDA graph, on the first batch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which copies the batches
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(0)

    def again(turn: int, inputs: Call = call) -> Any:  # whose batches the graph reads
        return graph.replay()

    return again


Contest = tuple[dict[str, Call], Iterator[tuple[str, Callable[[], Call]]]]
"""Torch's calls, and what makes each of ours when its turn comes: a GPU would not hold them all."""


def lenet(recipes: Recipes, quick: bool) -> Contest:
    """Contestants on random images."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.standard_normal((IMAGES, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, IMAGES))
        for _ in range(BATCHES)
    ]
    loss = torch.nn.functional.cross_entropy
    calls: dict[str, Call] = {}
    for name in ("eager", "reduce-overhead", "whole step in a graph"):
        if quick and name == "reduce-overhead":
            continue
        model = torch_lenet().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        ready: Any = model
        if name == "reduce-overhead":
            ready = torch.compile(model, mode=name)
        call = theirs(ready, optimizer, lambda m, x, y: loss(m(x), y), batches, False)
        calls[f"torch fp32, {name}"] = graphed(call, batches) if "graph" in name else call
    return calls, ours(
        lambda: build_lenet(LeNetConfig(), np.random.default_rng(1)).to("cuda"),
        lambda m: SGD(m.named_parameters(), lr=0.01, momentum=0.9),
        recipes,
        lambda m, x, y: et.cross_entropy(m(x), y),
        batches,
    )


class Repeating(np.random.Generator):
    """Draws a million numbers and repeats them: a large model's weights in seconds."""

    def standard_normal(self, size: Any = None, *more: Any, **options: Any) -> Any:
        return np.resize(super().standard_normal(1 << 20, *more, **options), size)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return np.resize(super().uniform(low, high, 1 << 20), size)


def gpt(
    recipes: Recipes, quick: bool, activations: FloatName, part: str, captured: bool
) -> Contest:
    """Contestants on random tokens, or of these the captured and compiled ones."""
    rng, config = np.random.default_rng(0), GPTS[part]
    shape = (TOKENS // config.context, config.context + 1)
    tokens = [rng.integers(0, config.vocab, shape) for _ in range(BATCHES)]
    batches = [(t[:, :-1].copy(), t[:, 1:].reshape(-1).copy()) for t in tokens]

    def model() -> Any:
        return build_gpt(config, Repeating(np.random.PCG64(1)))

    loss = torch.nn.functional.cross_entropy
    calls: dict[str, Call] = {}
    for name in ["eager"] if quick else ["compiled"] if captured else ["eager", "compiled"]:
        peer = torch_gpt(config, model().state_dict()).cuda()
        optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
        ready: Any = torch.compile(peer) if name == "compiled" else peer
        calls[f"torch bf16, {name}"] = theirs(
            ready, optimizer, lambda m, x, y: loss(m(x).flatten(0, 1).float(), y), batches, True
        )
    return calls, ours(
        lambda: model().to("cuda"),
        lambda m: AdamW(m.named_parameters(), lr=1e-4),
        recipes,
        lambda m, x, y: et.cross_entropy(m(x).reshape(-1, config.vocab), y),
        batches,
        activations,
        (True,) if captured else (False, True),
    )


class NoUpdate:
    """An optimizer for what is forward and backward alone."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def zero_grad(self, **options: Any) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        pass


def layers(recipes: Recipes, quick: bool, activations: FloatName, width: int) -> Contest:
    """Contestants with one block."""
    config = GPTConfig(vocab=64, context=1024, layers=1, heads=width // 128, width=width)
    rng = np.random.default_rng(0)
    shape = (TOKENS // 1024, 1024, width)
    batches = [(rng.standard_normal(shape).astype(np.float32),) for _ in range(BATCHES)]

    def block() -> Any:
        attention = et.nn.MultiheadAttention(width, config.heads, causal=True, bias=False, rng=1)
        feed_forward = et.nn.FeedForward(width, 4 * width, bias=False, rng=1)
        return et.nn.TransformerBlock(attention, feed_forward, bias=False)

    calls: dict[str, Call] = {}
    state = build_gpt(config, np.random.default_rng(1)).state_dict()
    for name in ("eager", "compiled")[: 1 if quick else 2]:
        peer = torch_gpt(config, state).blocks[0].cuda()
        ready: Any = torch.compile(peer) if name == "compiled" else peer
        calls[f"torch bf16, {name}"] = theirs(
            ready,
            NoUpdate(peer.parameters()),
            lambda m, x: m(x).float().square().mean(),
            batches,
            True,
        )
    return calls, ours(
        lambda: block().to("cuda"),
        lambda m: NoUpdate(m.parameters()),
        recipes,
        lambda m, x: m(x).square().mean(),
        batches,
        activations,
    )


def main(recipes_of_all: Recipes = ()) -> None:
    """Measure, print and write; these recipes, if any, instead of those of the command."""
    parser = options(__doc__, rounds=7, only=PARTS)
    parser.add_argument("--recipes", nargs="+", help="instead of those of each part")
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--captured", action="store_true", help="of gpt no eager steps")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--activations", choices=FLOAT_NAMES, default="bfloat16")
    chosen = parser.parse_args()
    xp = cuda().xp
    works: list[tuple[str, Any, int, int]] = []
    for part in chosen.only:
        recipes = recipes_of_all or chosen.recipes or RECIPES[part]
        if part == "layers":
            works += [
                (
                    f"layers {width}",
                    partial(layers, recipes, chosen.quick, chosen.activations, width),
                    TOKENS,
                    4,
                )
                for width in (2048, 4096)
            ]
        else:
            make: Any = partial(lenet, recipes, chosen.quick)
            items, burst = IMAGES, 50
            if part in GPTS:
                captured = chosen.captured or part == "wide"
                make = partial(gpt, recipes, chosen.quick, chosen.activations, part, captured)
                items, burst = TOKENS, 2 if part == "wide" else 5
            works.append((part, make, items, burst))
    rows: list[dict[str, Any]] = []
    for title, make, items, burst in works:
        torchs, mine = make()
        timing: dict[str, int] = {"burst": burst, "ahead": 0, "warm_up": 0, "first": 4}
        times = milliseconds(torchs, chosen.rounds, **timing)
        best = min(times, key=times.__getitem__)
        if chosen.profile:
            profile(f"{title}, {best}", torchs[best])
        for name, taken in times.items():
            held = torch_bytes(torchs[name], len(torchs))
            rows.append(_row(title, name, taken, times[best], items, held))
        for name, start in mine:
            before = free_bytes()
            call = start()
            times = milliseconds({best: torchs[best], name: call}, chosen.rounds, **timing)
            held = before - free_bytes()
            rows.append(_row(title, name, times[name], times[best], items, held))
            if chosen.profile and "captured" in name:
                profile(f"{title}, {name}", call)
            del call
            gc.collect()
            xp.get_default_memory_pool().free_all_blocks()
        del torchs, mine
        gc.collect()
        torch.cuda.empty_cache()
    name = "cuda-step" + "".join(
        f"-{part}" for part in chosen.only if len(chosen.only) < len(PARTS)
    )
    write_gpu(name, rows, xp, by_kind=False)


def free_bytes() -> int:
    """Memory of the GPU that nobody has taken."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def torch_bytes(call: Call, contestants: int) -> int:
    """The most that torch holds during a step, less what contestants of the same size hold."""
    torch.cuda.synchronize()
    idle = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - idle * (contestants - 1) // contestants


def _row(
    part: str, name: str, taken: float, torch_taken: float, items: int, held: int
) -> dict[str, Any]:
    row = {
        "part": part,
        "name": name,
        "milliseconds": round(taken, 4),
        "torch": round(torch_taken, 4),
        "per_second": round(1e3 * items / taken),
        "of_torch": round(torch_taken / taken, 3),
        "gigabytes": round(held / 1e9, 2),
    }
    print(*row.values(), sep="  ", flush=True)
    return row


if __name__ == "__main__":
    main()
