"""Memory of whole training steps on a GPU, ours beside torch's: by kind, and the device's peak.

    python ci/bench/cuda_memory.py block            # a block of width 4096, 16 x 1024 tokens
    python ci/bench/cuda_memory.py gpt              # 1.3 billion weights, AdamW, 8 x 1024 tokens
    python ci/bench/cuda_memory.py llama            # Llama-3.1-8B's shape, all weights, 1 x 2048
    python ci/bench/cuda_memory.py batch            # the largest batch of the first that fits
    python ci/bench/cuda_memory.py block gpt llama batch --small --device cpu   # does it all run?

Each command takes less than 8 minutes on an H100 (``--seconds`` ends a search for batches). The
block is that of ``cuda_step.py``: forward and backward without an update, one float32 batch
included, beside torch.compile in bfloat16; "captured" is the same step in a CUDA graph, which reads
batches where they are written (`CapturedStep.own`).
Every contestant runs in a process of its own, so that no pool of memory counts another's. "ours" is
mxfp4_all with bfloat16 activations and weights (or these in MXINT8), states in MXFP8, what is kept
for backward in MXFP8, blocks run again where the name says so, and updates inside the backward
pass; "captured" is in a CUDA graph; "ours, float32" has float32 weights and states, inputs kept,
and a step after backward. "torch" is AMP in bfloat16 with fused AdamW; "torch bf16, checkpointing"
has everything in bfloat16 and runs its blocks again; "compiled" is torch.compile of each block,
"float8" torchao's linear layers of float8 under AMP. "device" is the memory of the GPU that the
process holds; with a captured step, once it is captured. "most" is the most that it held, the
capture included. Kinds are of the ledger (`et.inspect.memory_ledger`) in the last step. Weights
repeat a few values, and layers are alike: loss means nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import shown
from ci.bench.cuda_step import Repeating
from extensor import models, nn
from extensor.models.gpt.configs import GPTConfig
from extensor.optim import AdamW
from extensor.quant.recipes import get_recipe
from extensor.quant.saved import parse_saved

GPT = GPTConfig(vocab=50304, context=1024, layers=24, heads=16, width=2048)
SMALL = GPTConfig(vocab=64, context=16, layers=2, heads=2, width=64)
LLAMA_LAYERS, ROUNDS = 32, 3


def build(part: str, small: bool, layers: int | None = None) -> Any:
    """The model, on the host, or its first layers."""
    rng = Repeating(np.random.PCG64(0))
    config = SMALL if small else GPT
    if part == "llama":
        config = models.config("llama", "nano" if small else "llama-3.1-8b")
    config = config if layers is None else replace(config, layers=layers)
    return models.build("llama" if part == "llama" else "gpt", config, rng)


def on_device(part: str, small: bool, weights: str, device: str) -> Any:
    """The model on the device, where its layers are copies of one."""
    model = build(part, small, layers=1)
    model.to(device)
    nn.cast_weights(model, weights)
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
    layers = model.model.layers if part == "llama" else model.blocks
    for _ in range(1 if small else LLAMA_LAYERS - 1 if part == "llama" else GPT.layers - 1):
        layers.append(copy.deepcopy(layers[0]))
    return model


Run = Callable[[int], dict[str, float]]
"""Runs some steps with a batch of so many windows; gives bytes and rates."""


def ours(part: str, how: str, small: bool, device: str, follows: bool = True) -> Run:
    """Steps of extensor on one model; a ledger ``follows`` a step of Python."""
    lean = how != "ours, float32"
    weights = "mxint8" if "mxint8" in how else "bfloat16" if lean else "float32"
    model = on_device(part, small, weights, device)
    recipe = get_recipe("mxfp4_all")
    if lean:
        recipe = replace(recipe, saved=parse_saved("mxfp8"))
    nn.apply_recipe(model, recipe, activations="bfloat16")
    if "run again" in how:
        for name, module in model.named_modules():
            if name.rpartition(".")[2].isdigit():
                module.recomputed = True
    by = AdamW(model.parameters(), lr=1e-5, states="mxfp8_e4m3" if lean else "float32",
               masters=False)  # fmt: skip
    length = 16 if small else 2048 if part == "llama" else 1024

    def step(tokens: Any) -> Any:
        scores = model(tokens)
        loss = et.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1))
        del scores
        if lean:
            with by.step_in_backward():
                loss.backward()
        else:
            loss.backward()
            by.step()
            by.zero_grad()
        return loss

    def run(batch: int) -> dict[str, float]:
        free_cached(device)
        tokens = et.zeros((batch, length), dtype="int64").to(device)
        call: Any = et.capture(step) if "captured" in how else step
        for _ in range(3 if call is not step else 2):  # compile; then warm up and capture
            float(call(tokens))
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            float(call(tokens))
        seconds = (time.perf_counter() - begin) / ROUNDS
        taken = 0
        if device == "cuda":
            import cupy

            taken = cupy.get_default_memory_pool().total_bytes() + getattr(call, "nbytes", 0)
        rate = {"device_gb": taken / 1e9, "tokens_per_second": batch * length / seconds}
        if call is not step:
            call.close()  # a larger batch follows
        if call is not step or not follows:
            return rate
        with et.inspect.memory_ledger(model, by, device) as ledger:
            float(step(tokens))
        found = ledger.report()
        kinds = {f"{kind}_gb": n / 1e9 for kind, n in found.by_kind().items()}
        return {**rate, "ledger_gb": found.peak / 1e9, **kinds}

    return run


def free_cached(device: str) -> None:
    """Give back what the last batch left in the pools of this process."""
    gc.collect()
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
            sys.modules["torch"].cuda.reset_peak_memory_stats()


def theirs(part: str, how: str, small: bool, device: str) -> Run:
    """Steps of torch on one model."""
    import torch

    from ci.bench.torch_models import torch_gpt

    pure = "checkpointing" in how
    length = 16 if small else 2048 if part == "llama" else 1024
    model: Any
    if part == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        size = (64, 128, 2, 4, 2, 65) if small else (4096, 14336, 32, 32, 8, 128256)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "vocab_size")  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            shape: Any = dict(zip(names, size, strict=True))
            model = LlamaForCausalLM(LlamaConfig(**shape))
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable()
        model.train()
    else:
        config = SMALL if small else GPT
        model = torch_gpt(config, build(part, small).state_dict()).to(device)
        if "float8" in how:
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model)
        for block in model.blocks if "compiled" in how else ():
            block.compile()  # one program, which the blocks share
    by = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Any) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=not pure):
            scores = model(tokens)
            scores = getattr(scores, "logits", scores)
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), tokens.flatten())
        loss.backward()
        by.step()
        by.zero_grad()
        loss.item()

    def run(batch: int) -> dict[str, float]:
        free_cached(device)
        tokens = torch.zeros((batch, length), dtype=torch.long, device=device)
        step(tokens)
        if "compiled" in how and device == "cuda":
            free_cached(device)  # of what compiling measured
            step(tokens)
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            step(tokens)
        seconds = (time.perf_counter() - begin) / ROUNDS
        taken = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return {"device_gb": taken / 1e9, "tokens_per_second": batch * length / seconds}

    return run


def block_sizes(small: bool) -> tuple[int, int, int]:
    """Width, windows and tokens of a window of the block."""
    return (64, 2, 32) if small else (4096, 16, 1024)


def block_ours(how: str, small: bool, device: str) -> dict[str, float]:
    """Forward and backward of one block.

    "lean" has bfloat16 weights and MXFP8 for what is kept; "slim" the same, but q, k, v and o as
    they are; "mxint8" has weights in blocks.
    """
    width, windows, length = block_sizes(small)
    rng, heads = Repeating(np.random.PCG64(1)), max(width // 128, 1)
    attention = nn.MultiheadAttention(width, heads, causal=True, bias=False, rng=rng)
    feed_forward = nn.FeedForward(width, 4 * width, bias=False, rng=rng)
    model = nn.TransformerBlock(attention, feed_forward, bias=False)
    recipe = get_recipe("mxfp4_all")
    lean = "lean" in how or "slim" in how
    if not ("packed" in how or lean):
        recipe = replace(recipe, saved_input="input")
    if lean:
        nn.cast_weights(model, "mxint8" if "mxint8" in how else "bfloat16")
        saved = "mxfp8" if "lean" in how else "norm=mxfp8,activation=mxfp8"
        recipe = replace(recipe, saved=parse_saved(saved))
    model.to(device)
    state = nn.apply_recipe(model, recipe, activations="bfloat16")
    x = et.zeros((windows, length, width)).to(device)

    def step(x: et.ExTensor) -> et.ExTensor:
        for param in model.parameters():
            param.grad = None
        loss: et.ExTensor = model(x).square().mean()
        loss.backward()
        return loss

    run: Any = step
    if "captured" in how:
        run = et.capture(step)
        (x,) = run.own(x)

    def call() -> None:
        state.step += 1
        for param in () if run is not step else model.parameters():
            param._version[0] += 1  # as an update: operands are made anew
        run(x)

    def taken() -> float:
        if device != "cuda":
            return 0.0
        pool = x.backend.xp.get_default_memory_pool()
        return float(pool.total_bytes() + (0 if run is step else run.nbytes)) / 1e9

    most = 0.0
    for _ in range(4):
        call()
        most = max(most, taken())
    if run is not step and device == "cuda":
        x.backend.xp.get_default_memory_pool().free_all_blocks()  # the batch that was copied
    seconds = timed(call, device)
    found = {"device_gb": taken(), "most_gb": most, "milliseconds": 1e3 * seconds}
    if run is step:
        with et.inspect.memory_ledger(model, device=device) as ledger:
            ledger.hold(x.data, "workspaces", "", "batch")
            call()
        report = ledger.report()
        print(report.table(40), file=sys.stderr)
        found["ledger_gb"] = report.peak / 1e9
        found |= {f"{kind}_gb": n / 1e9 for kind, n in report.by_kind().items()}
    return found


def block_theirs(small: bool, device: str) -> dict[str, float]:
    """The same of torch: compiled, AMP in bfloat16."""
    import torch

    from ci.bench.torch_models import torch_gpt

    width, windows, length = block_sizes(small)
    config = GPTConfig(vocab=64, context=length, layers=1, heads=max(width // 128, 1), width=width)
    state = models.build("gpt", config, Repeating(np.random.PCG64(0))).state_dict()
    block = torch_gpt(config, state).blocks[0].to(device)
    ready: Any = torch.compile(block) if device == "cuda" else block
    x = torch.zeros((windows, length, width), device=device)

    def call() -> None:
        block.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = ready(x).float().square().mean()
        loss.backward()

    for _ in range(4):
        call()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(call, device)
    asked = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    taken = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {"device_gb": taken / 1e9, "ledger_gb": asked / 1e9, "milliseconds": 1e3 * seconds}


def timed(call: Any, device: str, rounds: int = 20) -> float:
    """Seconds of a call, of several that follow each other."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    for _ in range(rounds if device == "cuda" else 1):
        call()
    wait()
    return (time.perf_counter() - begin) / (rounds if device == "cuda" else 1)


def measured(part: str, how: str, batch: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """A contestant in a process of its own; None where its memory ran out."""
    command = [sys.executable, __file__, part, "--contestant", how, "--batch", str(batch)]
    command += ["--device", args.device, *(["--small"] if args.small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return dict(json.loads(lines[-1]))
    if "MemoryError" in done.stderr or "OutOfMemory" in done.stderr:
        return None
    raise RuntimeError(f"{part}, {how}, batch {batch}:\n{done.stderr[-2000:]}")


def curve(how: str, args: argparse.Namespace) -> None:
    """Print rows of growing batches until memory runs out, then of the largest that fits."""
    part, mine = "gpt", how.startswith("ours")
    if mine:
        run = ours(part, how, args.small, args.device, follows=False)
    else:
        run = theirs(part, how, args.small, args.device)
    good, failed, batch = 0, None, 4
    deadline = time.monotonic() + args.seconds
    while time.monotonic() < deadline and not (args.small and batch > 8):
        found = fitting(run, batch)
        if found is None:
            failed = batch
        else:
            good = batch
            print(json.dumps({"step": how, "batch": batch, **found}), flush=True)
        batch = 2 * good if failed is None else (good + failed) // 2
        if failed is not None and failed - good <= max(1, good // 8):
            break


def fitting(run: Run, batch: int) -> dict[str, float] | None:
    """What a batch takes; None where it does not fit."""
    try:
        return run(batch)
    except MemoryError:
        return None
    except RuntimeError as error:  # torch's error of memory is one
        if "out of memory" in str(error) or "MemoryError" in str(error):
            return None
        raise


def curves(part: str, names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of each contestant, from a process of its own."""
    rows: list[dict[str, Any]] = []
    for how in names:
        command = [sys.executable, __file__, part, "--contestant", how, "--device", args.device]
        command += ["--seconds", str(args.seconds / len(names)), *(["--small"] * args.small)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not found:
            raise RuntimeError(f"{part}, {how}:\n{done.stderr[-2000:]}")
        rows += shown(found)
    return rows


CONTESTANTS = {
    "block": (
        "torch", "ours", "ours, captured", "ours, packed, captured", "ours, slim",
        "ours, slim, captured", "ours, lean", "ours, lean, captured",
        "ours, lean, mxint8, captured",
    ),
    "gpt": (
        "ours", "ours, captured", "ours, mxint8, captured", "ours, captured, run again",
        "ours, float32", "torch",
    ),
    "llama": ("ours", "ours, captured", "ours, mxint8, captured", "torch bf16, checkpointing"),
    "batch": (
        "ours, captured", "ours, captured, run again", "ours, float32", "torch",
        "torch, compiled", "torch float8, compiled",
    ),
}  # fmt: skip


def contestant(part: str, how: str, args: argparse.Namespace) -> dict[str, float]:
    """One of them, in this process; "batch" is `curve`'s."""
    mine = how.startswith("ours")
    if part == "block":
        if mine:
            return block_ours(how, args.small, args.device)
        return block_theirs(args.small, args.device)
    run = ours if mine else theirs
    return run(part, how, args.small, args.device)(args.batch)


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--contestant", help="one, in this process")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=160.0, help="of a search for batches")
    args = parser.parse_args()
    if args.contestant and args.parts == ["batch"]:
        curve(args.contestant, args)
        return
    if args.contestant:
        print(json.dumps(contestant(args.parts[0], args.contestant, args)))
        return
    rows: list[dict[str, Any]] = []
    for part in args.parts:
        names = CONTESTANTS[part]
        if part == "batch":
            rows += curves(part, names, args)
            continue
        for how in names:
            batch = 1 if part == "llama" else args.batch
            found = measured(part, how, batch, args)
            rows += shown([{"step": how, "batch": batch, **(found or {"device_gb": None})}])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
