"""Language models with packed weights on a GPU, beside torch in bfloat16.

    python ci/bench/cuda_language.py decode      # one more token of 1, 4 and 16 texts
    python ci/bench/cuda_language.py prefill     # a prompt of 8192 tokens
    python ci/bench/cuda_language.py experts     # one layer of experts, 4096 tokens
    python ci/bench/cuda_language.py decode --profile   # and which kernels take how long
    python ci/bench/cuda_language.py decode prefill experts --small --device cpu   # does it run?

decode   Llama 3.1 8B's shape (32 layers, head and embedding), random weights in MXFP4, activations
         in bfloat16, 512 tokens in the cache and one more each time; the head in bfloat16, and in
         MXFP4, too; the whole step from a CUDA graph, and its products alone. torch: the same model
         in bfloat16, from a CUDA graph, `scaled_dot_product_attention`
prefill  the same model and one prompt; MXFP4 weights with activations in MXFP8 that is rebased,
         as stored, and in MXFP4, and products alone. torch: eager, whose kernels are long enough to
         hide its host
experts  gpt-oss 20B's layer of experts: 32 of width 2880, 4 for each token, MXFP4 weights; forward,
         router and both permutations included, called as it is and from a CUDA graph. torch:
         bfloat16, `torch._grouped_mm`, the same twice

A call takes from an idle GPU to an idle GPU, the host's time included; contestants take turns in
one process; medians over the rounds. "of_torch_bf16" is how many times as fast as torch. A
contestant that fails is a row that says why. Needs torch and the extra ``cuda13``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import extensor as et
from ci.bench.contest import shown
from extensor import ExTensor, models, nn
from extensor.models.llama.configs import ExpertsConfig
from extensor.models.llama.model import mixture
from extensor.nn.ptq import pack_weight
from extensor.nn.recipe import assign_recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.schemes import get_scheme

Call = Callable[[], Any]
BEFORE = 512
"""Tokens in the cache before one is decoded."""
SCHEMES = {"prefill": ("mxfp4_a8_rebased", "mxfp4_weights", "mxfp4"), "decode": ("mxfp4_weights",)}


class Bench:
    """A device, sizes and rounds."""

    def __init__(self, device: str, small: bool, rounds: int, profiles: bool = False) -> None:
        self.device, self.small, self.rounds = device, small, rounds
        self.profiles = profiles and device == "cuda"
        self.backend = et.ones(1, device=device).backend
        self.xp = self.backend.xp
        self.config = models.config("llama", "nano" if small else "llama-3.1-8b")
        if small:
            self.config = replace(self.config, context=1024)

    def random(self, *shape: int, scale: float = 0.02, dtype: str = "float32") -> ExTensor:
        """Normal numbers on the device."""
        values = (scale * self.xp.random.standard_normal(shape)).astype(np.float32)
        return ExTensor(values, device=self.device).to(dtype)

    def torch(self, *shape: int) -> torch.Tensor:
        """The same of torch."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16) * 0.02

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def graph(self, call: Call) -> Call:
        """The call from a CUDA graph of torch's."""
        if self.device == "cpu":
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            call()
        return made.replay

    def milliseconds(self, calls: dict[str, Call]) -> dict[str, Any]:
        """Medians; what a contestant that fails says."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        failed: dict[str, Any] = {}
        for turn in range(self.rounds + 4):
            for name, call in calls.items():
                if name in failed:
                    continue
                try:
                    self.wait()
                    begin = time.perf_counter()
                    call()
                    self.wait()
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"[:300]
                    continue
                if turn >= 4:
                    times[name].append(1e3 * (time.perf_counter() - begin))
        for name, call in calls.items() if self.profiles else ():
            if name not in failed:
                self.profile(name, call)
        return {name: failed.get(name) or median(t) for name, t in times.items()}

    def profile(self, name: str, call: Call) -> None:
        """Print the kernels of one call, the longest first: how often, and how long in all."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            self.wait()
        kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
        print(f"kernels of {name}: {sum(k.self_device_time_total for k in kernels):.0f} us")
        for one in kernels[:24]:
            took = one.self_device_time_total
            if took:
                print(f"{took:10.1f} us {one.count:6} x {took / one.count:8.2f}  {one.key[:90]}")

    def rows(self, times: dict[str, Any], **about: Any) -> Iterator[dict[str, Any]]:
        """A row for each contestant."""
        torchs = times.get("torch bf16")
        for name, taken in times.items():
            row = {**about, "name": name}
            if isinstance(taken, str):
                yield row | {"failed": taken}
                continue
            ratio = torchs / taken if isinstance(torchs, float) else 0.0
            yield row | {"milliseconds": round(taken, 4), "of_torch_bf16": round(ratio, 3)}


def packed(bench: Bench, module: nn.Module, scheme: str, head: bool = False) -> Any:
    """A module without memory for its weights, filled: packed products, the rest in bfloat16.

    ``head``: whether a model's head is packed, too.
    """
    chosen_scheme = get_scheme(scheme)
    recipe = (replace(chosen_scheme, rules=()) if head else chosen_scheme).recipe(())
    state, chosen = RecipeState(recipe), assign_recipe(module, recipe)
    for path, owner in module.named_modules():
        for name, held in list(vars(owner).items()):
            if not isinstance(held, nn.Parameter):
                continue
            norm = held.ndim == 1 and name == "weight"
            if held.ndim == 2 and isinstance(owner, nn.Linear):
                wide = owner is not getattr(module, "lm_head", None) or head
                if wide and path in chosen:
                    owner.weight = nn.Parameter(bench.random(*held.shape).data, device=bench.device)
                    row = LayerContext(path, len(state.layers), chosen[path], state)
                    pack_weight(owner, row)
                    continue
            value = bench.random(*held.shape)
            dense = nn.Parameter((value + float(norm)).data, "float32", device=bench.device)
            setattr(owner, name, nn.Parameter(dense.to("bfloat16").data, device=bench.device))
    return module.eval()


# --- torch's Llama ---


class TorchLlama:
    """The same decoder in bfloat16: weights, and one pass over tokens after those of a cache."""

    def __init__(self, bench: Bench, batch: int, length: int) -> None:
        self.config = c = bench.config
        q, kv = c.heads * c.head_size, c.kv_heads * c.head_size
        self.layers = [
            {
                "qkv": bench.torch(q + 2 * kv, c.width),
                "o": bench.torch(c.width, q),
                "gate_up": bench.torch(2 * c.hidden, c.width),
                "down": bench.torch(c.width, c.hidden),
                "norms": torch.ones(2, c.width, device=bench.device, dtype=torch.bfloat16),
                "k": bench.torch(batch, c.kv_heads, length, c.head_size),
                "v": bench.torch(batch, c.kv_heads, length, c.head_size),
            }
            for _ in range(c.layers)
        ]
        self.embedding = bench.torch(c.vocab, c.width)
        self.head = bench.torch(c.vocab, c.width)
        angles = torch.rand(length, c.head_size // 2, device=bench.device)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turned(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Rotary positions of (B, heads, T, size)."""
        a, b = x.chunk(2, -1)
        cos, sin = (t[at : at + x.shape[2]] for t in (self.cos, self.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def step(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """Scores of the last of tokens (B, T) that stand at ``at``."""
        c, (batch, count) = self.config, tokens.shape
        sizes = [c.heads * c.head_size, c.kv_heads * c.head_size, c.kv_heads * c.head_size]
        x = functional.embedding(tokens, self.embedding)
        for w in self.layers:
            h = functional.rms_norm(x, (c.width,), w["norms"][0], c.eps)
            q, k, v = (
                part.view(batch, count, -1, c.head_size).transpose(1, 2)
                for part in functional.linear(h, w["qkv"]).split(sizes, -1)
            )
            q, end = self.turned(q, at), at + count
            w["k"][:, :, at:end] = self.turned(k, at)
            w["v"][:, :, at:end] = v
            mixed = functional.scaled_dot_product_attention(
                q, w["k"][:, :, :end], w["v"][:, :, :end], is_causal=count > 1, enable_gqa=True
            )
            x = x + functional.linear(mixed.transpose(1, 2).reshape(batch, count, -1), w["o"])
            h = functional.rms_norm(x, (c.width,), w["norms"][1], c.eps)
            gate, up = functional.linear(h, w["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w["down"])
        return functional.linear(x[:, -1], self.head)

    def products(self, x: torch.Tensor) -> None:
        """All products of rows (M, width) alone."""
        q = self.config.heads * self.config.head_size
        for w in self.layers:
            functional.linear(x, w["qkv"])
            functional.linear(x[:, :q], w["o"])
            hidden = functional.linear(x, w["gate_up"])
            functional.linear(hidden[:, : self.config.hidden], w["down"])


def products(model: Any, x: ExTensor, y: ExTensor) -> Call:
    """All products of rows (M, width) and (M, hidden) alone."""

    def call() -> None:
        with et.no_grad():
            for layer in model.model.layers:
                a, m = layer.self_attn, layer.mlp
                for one in (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj):
                    one(x)
                m.down_proj(y)

    return call


def after(call: Call, x: ExTensor) -> ExTensor:
    """X, after a call: a step has a result."""
    call()
    return x


def captured(call: Callable[[ExTensor], ExTensor], x: ExTensor) -> Call:
    """The call from a CUDA graph, which reads x where it lies."""
    step = et.capture(call)
    return partial(step, *step.own(x))


def decode(bench: Bench) -> Iterator[dict[str, Any]]:
    """One more token."""
    c, before = bench.config, 32 if bench.small else BEFORE
    with torch.no_grad():
        model, whole = (
            packed(bench, models.build("llama", c, None), SCHEMES["decode"][0], head)
            for head in (False, True)
        )
        for batch in (1, 4, 16):
            peer = TorchLlama(bench, batch, before + 1)
            one = torch.ones(batch, 1, dtype=torch.int64, device=bench.device)
            rows = bench.torch(batch, c.width)
            caches = [nn.KVCache(c.layers, 2 * before) for _ in range(3)]
            tokens = et.ones((batch, before), dtype="int64", device=bench.device)
            x = bench.random(batch, c.width, dtype="bfloat16")
            y = bench.random(batch, c.hidden, dtype="bfloat16")
            with et.no_grad():
                for cache in caches:
                    model(tokens, cache=cache, logits_to_keep=1)
            last = tokens[:, :1]

            def ours(token: ExTensor, cache: Any, model: Any = model) -> ExTensor:
                with et.no_grad():
                    out: ExTensor = model(token, cache=cache)[:, -1]
                return out

            alone = products(model, x, y)
            calls: dict[str, Call] = {
                "torch bf16": bench.graph(partial(peer.step, one, before)),
                "ours, captured": captured(partial(ours, cache=caches[0]), last),
                "ours, captured, head in MXFP4": captured(
                    partial(ours, cache=caches[2], model=whole), last
                ),
                "ours, eager": partial(ours, last, caches[1]),
            }
            yield from bench.rows(bench.milliseconds(calls), what="decode", tokens=batch)
            calls = {
                "torch bf16": bench.graph(partial(peer.products, rows)),
                "ours, captured": captured(partial(after, alone), x),
            }
            yield from bench.rows(bench.milliseconds(calls), what="decode, products", tokens=batch)
            del peer, calls, caches


def prefill(bench: Bench) -> Iterator[dict[str, Any]]:
    """A prompt."""
    c, length = bench.config, 64 if bench.small else 8192
    with torch.no_grad():
        peer = TorchLlama(bench, 1, length)
        prompt = torch.ones(1, length, dtype=torch.int64, device=bench.device)
        rows = bench.torch(length, c.width)
        tokens = et.ones((1, length), dtype="int64", device=bench.device)
        x = bench.random(length, c.width, dtype="bfloat16")
        y = bench.random(length, c.hidden, dtype="bfloat16")
        for scheme in SCHEMES["prefill"]:
            model = packed(bench, models.build("llama", c, None), scheme)

            def ours(model: Any = model) -> Any:
                with et.no_grad():
                    return model(tokens, logits_to_keep=1)

            calls: dict[str, Call] = {"torch bf16": lambda: peer.step(prompt, 0), scheme: ours}
            yield from bench.rows(bench.milliseconds(calls), what="prefill", tokens=length)
            calls = {
                "torch bf16": lambda: peer.products(rows),
                scheme: products(model, x, y),
            }
            found = bench.milliseconds(calls)
            yield from bench.rows(found, what="prefill, products", tokens=length)
            del model, ours, calls


# --- experts ---


def experts(bench: Bench) -> Iterator[dict[str, Any]]:
    """One layer of experts, forward."""
    width, count, active = (64, 4, 2) if bench.small else (2880, 32, 4)
    tokens = 32 if bench.small else 4096
    config = ExpertsConfig(count, active, width, bias=True, alpha=1.702, limit=7.0, router="router")
    with torch.no_grad():
        router = bench.torch(count, width)
        both, down = bench.torch(count, width, 2 * width), bench.torch(count, width, width)
        biases = bench.torch(count, 2 * width), bench.torch(count, width)
        rows = 50 * bench.torch(tokens, width)
        ones = torch.ones(tokens * active, dtype=torch.int64, device=bench.device)

        def theirs() -> torch.Tensor:
            scores, chosen = functional.linear(rows, router).topk(active)
            weights = scores.float().softmax(-1)
            numbers = chosen.flatten()
            order = numbers.argsort(stable=True)
            sizes = torch.zeros(count, dtype=torch.int64, device=bench.device)
            ends = sizes.scatter_add_(0, numbers, ones).cumsum(0).to(torch.int32)
            of = numbers[order]
            hidden = torch._grouped_mm(rows[order // active], both, offs=ends) + biases[0][of]
            gate, up = hidden[:, ::2].clamp(max=7.0), hidden[:, 1::2].clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            made = torch._grouped_mm(hidden, down, offs=ends) + biases[1][of]
            made = made * weights.flatten()[order, None].bfloat16()
            return torch.zeros_like(rows).index_add_(0, order // active, made)

        def products() -> None:
            ends = (torch.arange(count, device=bench.device) + 1) * (tokens * active // count)
            arranged = rows.repeat(active, 1)
            torch._grouped_mm(arranged, both, offs=ends.int())
            torch._grouped_mm(arranged, down, offs=ends.int())

        calls: dict[str, Call] = {"torch bf16": theirs}
        graphs: dict[str, Call] = {"torch bf16": bench.graph(theirs)}
        x = bench.random(tokens, width, scale=1.0, dtype="bfloat16")
        for scheme in ("mxfp4_weights", "mxfp4_a8", "mxfp4"):
            layer = mixture(width, config, nn.init.Skeleton())
            layer = packed(bench, layer, scheme)

            def ours(x: ExTensor = x, layer: Any = layer) -> Any:
                with et.no_grad():
                    return layer(x)

            calls[scheme] = ours
            if scheme == "mxfp4_weights":
                graphs[scheme] = captured(ours, x)
        yield from bench.rows(bench.milliseconds(calls), what="experts", tokens=tokens)
        found = bench.milliseconds(graphs)
        yield from bench.rows(found, what="experts, captured", tokens=tokens)
        calls = {"torch bf16": products}
        if bench.device == "cuda":
            calls |= grouped(bench, count, width, tokens * active)
        yield from bench.rows(bench.milliseconds(calls), what="experts, products", tokens=tokens)


def grouped(bench: Bench, count: int, width: int, rows: int) -> dict[str, Call]:
    """Both grouped products, of operands that are stored packed or in bfloat16."""
    from extensor_cuda.matmul.grouped import grouped_matmul, offsets_of

    xp = bench.xp
    offsets = offsets_of(xp.full(count, rows // count), xp)
    calls: dict[str, Call] = {}
    for name in ("bfloat16", "mxfp4"):
        x = bench.random(rows, width, scale=1.0, dtype="bfloat16")
        w = [bench.random(count * n, width, dtype="bfloat16") for n in (2 * width, width)]
        if name == "mxfp4":
            x, w = x.to_mxfp4(), [one.to_mxfp4() for one in w]
        held = [one.data for one in (x, *w)]

        def call(held: list[Any] = held) -> None:
            for one in held[1:]:
                grouped_matmul(held[0], one, offsets, xp, out_dtype="bfloat16")

        calls[f"grouped, {name}"] = call
    return calls


PARTS = {"decode": decode, "prefill": prefill, "experts": experts}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="the kernels of each contestant")
    chosen = parser.parse_args()
    bench = Bench(chosen.device, chosen.small, chosen.rounds, chosen.profile)
    for part in chosen.parts:
        shown(PARTS[part](bench))


if __name__ == "__main__":
    main()
