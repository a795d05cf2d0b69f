"""Layers of `extensor.torch` on a GPU against torch's own in bfloat16.

    python ci/bench/cuda_torch.py [--rounds N] [--only linear block overhead profile]

"linear" is torch.nn.Linear's forward and backward of normal bfloat16 data, eager and captured by
torch.cuda.graph. "block" is a Llama-style block (RMSNorm, rotary attention, SwiGLU), forward and
backward, under torch.compile, and once more with mode="reduce-overhead". All parameters are
bfloat16. torchao's float8 rowwise training stands beside them where it is installed. CUDA events
around single calls of a layer and around four steps of a block, the contestants taking turns in one
process, medians over the rounds.
"overhead" is the host's time of a small layer's forward and backward call, queued without waiting,
beside custom operators that only make their results. One is written with `torch.library.custom_op`,
one with `torch.library.define` and `impl`, which cost less; each has a second row that also reads
and advances a clock, as a layer with random bits must. "A layer of torch.library.custom_op" is a
module around an operator with the tensors of one of extensor.torch's: x, weight, bias and clock.
Without its primitives, which make their results and compute nothing, the bridge between torch and
extensor is left.
"profile", which runs only by name, prints where a captured block's time goes, kernel by kernel, and
the host's in a small layer's call.
Needs a Hopper GPU and the extra ``cuda13``.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import pstats
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import extensor.torch as ext
from ci.bench import gpu
from ci.bench.contest import shown

PARTS = ("linear", "block", "overhead")
SIZES = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 4096))
RECIPES = ("mxfp4", "mxfp8_rebased")
WIDTH, HEADS, HIDDEN, CONTEXT = 4096, 32, 14336, 2048
OVERHEAD_SIZES = (256, 1024)  # cupy computes the first, this project's kernels the second
BLOCKS = ((None, 8), ("reduce-overhead", 8))
"""Modes of torch.compile and windows of a step: extensor's own block has 16,384 tokens, too."""
STEPS = 4
"""Steps of a block between two events, as in training: the host launches one while another runs."""


def quantized(module: nn.Module, recipe: str) -> nn.Module:
    """A copy whose every layer is under the recipe of the rows, without exceptions."""
    return ext.quantize_(copy.deepcopy(module), recipe, seed=1, rules={"*": recipe})


def float8(module: nn.Module) -> nn.Module | None:
    """A copy under torchao's float8 rowwise training; None without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    config = Float8LinearConfig.from_recipe_name("rowwise")
    return convert_to_float8_training(copy.deepcopy(module), config=config)


def step(call: Callable[..., Any], model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> gpu.Call:
    """Forward and backward; gradients begin anew."""

    def run(turn: int) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        call(x).backward(g)

    return run


def captured(run: gpu.Call) -> gpu.Call:
    """The same from a CUDA graph of torch's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):
            run(turn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(0)

    def replay(turn: int, kept: gpu.Call = run) -> None:
        # The graph reads the memory of the model and its input, which ``kept`` keeps alive.
        graph.replay()

    return replay


def linear(rounds: int) -> list[dict[str, Any]]:
    """Rows of one linear layer."""
    rows: list[dict[str, Any]] = []
    for m, n, k in SIZES:
        x, g = gpu.normal(m, k).requires_grad_(), gpu.normal(m, n, seed=1)
        plain = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        models: dict[str, nn.Module | None] = {"torch bf16": plain}
        models |= {recipe: quantized(plain, recipe) for recipe in RECIPES}
        calls: dict[str, gpu.Call] = {}
        for name, model in models.items():
            assert model is not None
            calls[name] = step(model, model, x, g)
            # A captured step has a layer and an input of its own, whose gradients it keeps.
            its, own = copy.deepcopy(model), x.detach().clone().requires_grad_()
            calls[f"{name}, captured"] = captured(step(its, its, own, g))
        if (other := float8(plain)) is not None:
            calls["torchao float8 rowwise, compiled"] = step(torch.compile(other), other, x, g)
        times = gpu.milliseconds(calls, rounds, burst=1)
        rows += shown(gpu.rates(times, 6 * m * n * k, part="linear", size=f"{m}x{n}x{k}"))
    return rows


# --- a block --------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Block(nn.Module):
    """Attention and feed-forward network of Llama, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, False)
        size = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(CONTEXT), 500000.0 ** (-torch.arange(0, size, 2) / size)
        ).repeat(1, 2)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).transpose(1, 3)
        q, k, v = parts.unbind(2)
        y = functional.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def block(rounds: int) -> list[dict[str, Any]]:
    """Rows of a compiled block."""
    torch.manual_seed(0)
    plain = Block().to("cuda", torch.bfloat16)
    models: dict[str, nn.Module | None] = {"torch bf16": plain}
    models |= {recipe: quantized(plain, recipe) for recipe in RECIPES}
    models["torchao float8 rowwise"] = float8(plain)
    rows: list[dict[str, Any]] = []
    for mode, batch in BLOCKS:
        torch._dynamo.reset()
        x = gpu.normal(batch, CONTEXT, WIDTH).requires_grad_()
        g = gpu.normal(batch, CONTEXT, WIDTH, seed=1)
        calls = {}
        for name, model in models.items():
            if model is not None:
                calls[name] = step(torch.compile(model, fullgraph=True, mode=mode), model, x, g)
        times = gpu.milliseconds(calls, rounds, burst=STEPS)
        size = f"{batch}x{CONTEXT} tokens, width {WIDTH}, mode {mode or 'default'}"
        rows += shown(gpu.rates(times, part="block", size=size))
    return rows


# --- overhead -------------------------------------------------------------------------------------


Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _custom_op() -> Operator:
    """A custom operator that only makes its result, as torch's documentation writes one."""

    @torch.library.custom_op("extensor_bench::custom_backward", mutates_args=())
    def backward(
        g: torch.Tensor, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(w)

    @torch.library.custom_op("extensor_bench::custom_linear", mutates_args=())
    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    linear.register_autograd(
        lambda ctx, g: backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return linear


def _clocked(operator: Operator) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operator, and a clock's reading, which advances it."""

    def call(x: torch.Tensor, w: torch.Tensor, clock: torch.Tensor) -> Any:
        reading = clock.clone()
        clock.add_(1)
        return operator(x, w), reading

    return call


class _Layer(nn.Module):
    """A layer around a custom operator that has the tensors of one of extensor.torch's layers."""

    clock: torch.Tensor

    def __init__(self, weight: torch.Tensor, operator: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.operator = weight, None, operator
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The operator's result; the clock advances."""
        reading = self.clock.clone()
        self.clock.add_(1)
        return self.operator(x, self.weight, self.bias, reading, 1)


def _operator_of_a_layer() -> Callable[..., torch.Tensor]:
    """`_custom_op` of x, weight, bias and clock, and the layer's number."""

    @torch.library.custom_op("extensor_bench::layer_backward", mutates_args=())
    def backward(
        g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, clock: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(w)

    @torch.library.custom_op("extensor_bench::layer", mutates_args=())
    def linear(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, clock: torch.Tensor, layer: int
    ) -> torch.Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, w, _, clock, ctx.layer = inputs
        ctx.save_for_backward(x, w, clock)

    def gradients(ctx: Any, g: torch.Tensor) -> Any:
        return *backward(g, *ctx.saved_tensors, ctx.layer), None, None, None

    linear.register_autograd(gradients, setup_context=save)
    return linear


def _plain_operator() -> Operator:
    """The same with the parts of `torch.library` that cost least."""
    library, ops = torch.library, torch.ops.extensor_bench
    library.define("extensor_bench::linear", "(Tensor x, Tensor w) -> Tensor")
    library.define("extensor_bench::backward", "(Tensor g, Tensor x, Tensor w) -> Tensor[]")
    library.impl("extensor_bench::linear", "cuda")(lambda x, w: torch.empty_like(x))
    library.impl("extensor_bench::backward", "cuda")(
        lambda g, x, w: [torch.empty_like(x), torch.empty_like(w)]
    )
    library.register_autograd(
        "extensor_bench::linear",
        lambda ctx, g: tuple(ops.backward(g, *ctx.saved_tensors)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    linear: Operator = ops.linear
    return linear


class _Function(torch.autograd.Function):
    """The same as an autograd function: the least that a layer written in Python costs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def without_primitives(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call while the primitives of `extensor.torch` make their results and compute nothing."""
    from extensor.torch import products
    from extensor_cuda.runtime.memory import empty

    def forward(backend: Any, x: Any, *rest: Any, **more: Any) -> Any:
        return empty(backend.xp, x.shape, x.dtype), products._NOTHING

    def gradients(backend: Any, g: Any, out: None, given: Any, *rest: Any) -> Any:
        return [*(empty(backend.xp, a.shape, a.dtype) for a in given), None]

    def run() -> None:
        before = products._LINEAR, products._linear_vjp
        products._LINEAR = types.SimpleNamespace(forward=forward)  # type: ignore[assignment]
        products._linear_vjp = gradients
        try:
            call()
        finally:
            products._LINEAR, products._linear_vjp = before

    return run


def not_prepared(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call without lists of launches (`extensor.torch.prepared`)."""
    from extensor.torch import prepared

    def run() -> None:
        before, prepared._KINDS = prepared._KINDS, 0
        try:
            call()
        finally:
            prepared._KINDS = before

    return run


def _contestants(
    size: int, operators: dict[str, Operator], of_a_layer: Callable[..., torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """Forward and backward calls of a layer of a size on as many rows, by name."""
    from extensor.autograd.tensor import wrap
    from extensor.ops.quantized import layer_context, quantized_matmul
    from extensor.quant.recipes import get_recipe

    backend = gpu.cuda()
    x, g = gpu.normal(size, size).requires_grad_(), gpu.normal(size, size, seed=1)
    plain = nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
    context = layer_context(get_recipe("mxfp4").layers)
    arrays = [gpu.as_cupy(t, backend.xp) for t in (x, plain.weight, g)]
    clock = torch.zeros((), dtype=torch.int64).cuda()

    def own() -> None:
        a, w, out = (wrap(array, backend) for array in arrays)
        a.requires_grad, w.requires_grad = True, True
        quantized_matmul(a, w, context).backward(out)

    def of(layer: Callable[..., torch.Tensor], *more: Any) -> Callable[[], Any]:
        return lambda: layer(x, *more).backward(g)

    weight = plain.weight
    calls = {
        "torch.nn.Linear": of(plain),
        "an autograd function": of(_Function.apply, weight),
        "extensor.torch, mxfp4": of(quantized(plain, "mxfp4")),
        "extensor.torch, mxfp4, not prepared": not_prepared(of(quantized(plain, "mxfp4"))),
        "extensor's own, mxfp4": own,
    }
    for name, operator in operators.items():
        both = _clocked(operator)
        calls[name] = of(operator, weight)
        calls[f"{name} and a clock"] = of(lambda *a, both=both: both(*a)[0], weight, clock)
    calls["a layer of torch.library.custom_op"] = of(_Layer(weight, of_a_layer))
    # A layer keeps what it has prepared, so those without primitives are layers of their own.
    for recipe, named in (("mxfp4", "mxfp4"), ("mxfp8_rebased", "nothing random")):
        alone = without_primitives(of(quantized(plain, recipe)))
        calls[f"extensor.torch without its primitives, {named}"] = alone
    return calls


def overhead(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of the host for a call."""
    operators = {
        "torch.library.custom_op": _custom_op(),
        "a custom operator": _plain_operator(),
    }
    of_a_layer, rows = _operator_of_a_layer(), []
    for size in OVERHEAD_SIZES:
        calls = _contestants(size, operators, of_a_layer)
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.freeze()  # what is there lasts, and need not be looked at in each collection
        for turn in range(rounds + 3):
            for name, call in calls.items():
                gc.collect()  # the garbage of the contestant before
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                if turn >= 3:
                    times[name].append((time.perf_counter() - start) / 20 * 1e6)
        rows += [
            {
                "part": "overhead",
                "size": f"{size}x{size}x{size}",
                "name": name,
                "host_microseconds": round(median(t), 1),
            }
            for name, t in times.items()
        ]
    return list(shown(rows))


def timeline(run: gpu.Call) -> str:
    """Kernels of one step by name and grid, and for how long nothing ran between two of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        torch.cuda._sleep(gpu.AHEAD)
        run(0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    ran = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    ran = [e for e in ran if "spin_kernel" not in e["name"]]
    if not ran:
        return "the profiler saw no kernel"
    sums: dict[str, list[float]] = {}
    idle, longest, free = 0.0, 0.0, ran[0]["ts"]
    for event in ran:
        gap = max(0.0, event["ts"] - free)
        idle, longest = idle + gap, max(longest, gap)
        free = max(free, event["ts"] + event["dur"])
        args = event.get("args", {})
        sums.setdefault(f"{event['name'][:60]:60} {args.get('grid', '')!s:15}", []).append(
            event["dur"]
        )
    lines = [
        f"{sum(durations):9.1f} us in {len(durations):3}: {name}"
        for name, durations in sorted(sums.items(), key=lambda item: -sum(item[1]))
    ]
    busy = sum(map(sum, sums.values()))
    whole = free - ran[0]["ts"]
    lines.append(
        f"{len(ran)} kernels take {busy:.0f} us of {whole:.0f}; idle {idle:.0f}, at most "
        f"{longest:.0f} at once"
    )
    return "\n".join(lines)


def profile() -> None:
    """Print the kernels of a captured block, torch's and a recipe's, and the host's functions."""
    torch.manual_seed(0)
    plain = Block().to("cuda", torch.bfloat16)
    _, batch = BLOCKS[-1]
    x = gpu.normal(batch, CONTEXT, WIDTH).requires_grad_()
    g = gpu.normal(batch, CONTEXT, WIDTH, seed=1)
    torch._dynamo.reset()
    for name, model in (("torch bf16", plain), ("mxfp4", quantized(plain, "mxfp4"))):
        run = step(torch.compile(model, fullgraph=True, mode="reduce-overhead"), model, x, g)
        for turn in range(5):
            run(turn)
        print(f"a step of a block, {name}\n{timeline(run)}", flush=True)
    small, layer = gpu.normal(256, 256), quantized(nn.Linear(256, 256, False).cuda(), "mxfp4")
    counted = cProfile.Profile()
    for turn in range(120):
        if turn == 20:
            counted.enable()
        layer(small).sum().backward()
    counted.disable()
    pstats.Stats(counted).sort_stats("tottime").print_stats(40)


def main() -> None:
    """Measure, print and write."""
    parser = gpu.options(__doc__, rounds=15)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "profile"), default=list(PARTS))
    chosen = parser.parse_args()
    parts = {"linear": linear, "block": block, "overhead": overhead}
    measured = [name for name in chosen.only if name != "profile"]
    rows = [row for name in measured for row in parts[name](chosen.rounds)]
    if rows:
        gpu.write_gpu("cuda-torch", rows, gpu.cuda().xp, merge="part")
    if "profile" in chosen.only:
        profile()


if __name__ == "__main__":
    main()
