"""Fused training kernels on a GPU against torch's: AdamW, norms, cross-entropy, value by value.

    python ci/bench/cuda_training.py [--rounds N] [--only elements ...]

AdamW is one step on the shapes of GPT-2 small (124 million float32 parameters in 148 tensors):
the whole of ``optimizer.step()``, its check for finite gradients included, and the update alone,
with states of every kind, beside ``torch.optim.AdamW(fused=True).step()``. Norms are of 16384 rows
of 4096 float32 values, forward and backward; cross-entropy is of 2048 rows of 50257. "elements" are
kernels that compute value by value, and cross-entropy, on 16384 x 8192 of float32 and of bfloat16,
beside torch's clone of the same: bytes moved a second are what counts. CUDA events around single
calls, the contestants taking turns, medians. ``seen`` counts the time from an idle GPU to the
step's end, Python included. Needs a GPU, torch and the extra ``cuda13``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ci.bench import gpu
from extensor import ExTensor
from extensor.optim import AdamW
from extensor_cuda.kernels.nn import cross_entropy, norm
from extensor_cuda.kernels.optim import optimizer as kernels

LAYERS, WIDTH, VOCAB, CONTEXT = 12, 768, 50257, 1024
ROWS, LENGTH = 16384, 4096
PARTS = ("adam", "norms", "losses", "elements")
HALF = np.dtype(ml_dtypes.bfloat16)
Contest = dict[str, tuple[int, gpu.Call]]
"""Bytes that must move, and a call."""


def gpt2_shapes() -> list[tuple[int, ...]]:
    """Parameters of GPT-2 small, head tied."""
    block: list[tuple[int, ...]] = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,)]
    block += [(WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,)]
    block += [(WIDTH, 4 * WIDTH), (WIDTH,)]
    return [(VOCAB, WIDTH), (CONTEXT, WIDTH), *block * LAYERS, (WIDTH,), (WIDTH,)]


def adam(xp: Any) -> tuple[Contest, dict[str, gpu.Call]]:
    """Contestants by events, and by the clock."""
    theirs = [torch.randn(s, device="cuda", requires_grad=True) for s in gpt2_shapes()]
    for p in theirs:
        p.grad = torch.randn_like(p)
    fused = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, fused=True)
    each = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, foreach=True)
    ours, parts = [], []
    for p in theirs:
        mine = ExTensor(gpu.as_cupy(p, xp).copy(), device="cuda", requires_grad=True)
        assert p.grad is not None
        mine.grad = ExTensor(gpu.as_cupy(p.grad, xp), device="cuda")
        ours.append(mine)
        moments = (xp.zeros(mine.size, np.float32) for _ in range(2))
        parts.append((mine.data.reshape(-1), mine.grad.data.reshape(-1), *moments))
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    step = AdamW(ours, **options)
    count = sum(p.numel() for p in theirs)
    factors = [step.factors(step.groups[0].options, 5)] * len(parts)
    moved = 28 * count

    def alone(stored: Any) -> gpu.Call:
        return gpu.fixed(kernels.step, kernels.ADAM, stored, factors, kernels.Update(cache={}), xp)

    calls: Contest = {
        "torch AdamW fused": (moved, gpu.fixed(fused.step)),
        "torch AdamW foreach": (moved, gpu.fixed(each.step)),
        "AdamW, update alone": (moved, alone(parts)),
        "AdamW step": (moved + 4 * count, gpu.fixed(step.step)),
    }
    clocked: dict[str, gpu.Call] = {
        "torch AdamW fused, seen": gpu.fixed(fused.step),
        "AdamW step, seen": gpu.fixed(step.step),
    }
    for states in ("bfloat16", "mxfp8_e4m3"):
        narrow = AdamW(ours, **options, states=states)
        narrow.step()
        kept = [m.arrays for m in narrow.groups[0].members]
        stored = [(*part[:2], *arrays.values()) for part, arrays in zip(parts, kept, strict=True)]
        moved = 12 * count + 2 * narrow.nbytes
        name = f"AdamW {states}"
        calls[f"{name}, update alone"] = (moved, alone(stored))
        calls[f"{name} step"] = (moved + 4 * count, gpu.fixed(narrow.step))
        clocked[f"{name} step, seen"] = gpu.fixed(narrow.step)
    return calls, clocked


def norms(xp: Any) -> Contest:
    """LayerNorm and RMSNorm, both ways."""
    x, g = (torch.randn(ROWS, LENGTH, device="cuda") for _ in range(2))
    w, b = (torch.randn(LENGTH, device="cuda") for _ in range(2))
    mx, mg, mw, mb = (gpu.as_cupy(t, xp) for t in (x, g, w, b))
    _, mean, rstd = norm.norm(mx, mw, mb, 1e-5, True, xp)
    _, _, scale = norm.norm(mx, mw, None, 1e-6, False, xp)
    made, saved_mean, saved_rstd = torch.native_layer_norm(x, [LENGTH], w, b, 1e-5)
    del made
    size = 4 * ROWS * LENGTH
    back = torch.ops.aten.native_layer_norm_backward
    functional = torch.nn.functional
    kept = (saved_mean, saved_rstd, w, b, [True, True, True])
    return {
        "torch layer_norm": (2 * size, lambda turn: functional.layer_norm(x, [LENGTH], w, b)),
        "layer_norm": (2 * size, lambda turn: norm.norm(mx, mw, mb, 1e-5, True, xp)),
        "torch layer_norm backward": (3 * size, lambda turn: back(g, x, [LENGTH], *kept)),
        "layer_norm backward": (3 * size, lambda turn: norm.grad(mg, mx, mw, mean, rstd, xp)),
        "torch rms_norm": (2 * size, lambda turn: functional.rms_norm(x, [LENGTH], w, 1e-6)),
        "rms_norm": (2 * size, lambda turn: norm.norm(mx, mw, None, 1e-6, False, xp)),
        "rms_norm backward": (3 * size, lambda turn: norm.grad(mg, mx, mw, None, scale, xp)),
    }


def losses(xp: Any) -> Contest:
    """Cross-entropy of as many scores as GPT-2 has tokens, both ways."""
    x = torch.randn(2048, VOCAB, device="cuda")
    labels = torch.randint(0, VOCAB, (2048,), device="cuda")
    mx, ml = gpu.as_cupy(x, xp), gpu.as_cupy(labels, xp)
    one = xp.asarray(1 / 2048, dtype=np.float32)
    _, kept = cross_entropy.losses(mx, ml, 0.0, xp)
    leaf = x.requires_grad_()
    size = 4 * x.numel()

    def theirs(turn: int) -> None:
        leaf.grad = None
        torch.nn.functional.cross_entropy(leaf, labels).backward()

    def ours(turn: int) -> None:
        cross_entropy.losses(mx, ml, 0.0, xp)
        cross_entropy.grad(one, mx, ml, kept, 0.0, xp)

    return {
        "torch cross_entropy, both ways": (3 * size, theirs),
        "cross_entropy, both ways": (3 * size, ours),
    }


def elements(xp: Any) -> Contest:
    """Sums, casts, relu, GELU, their gradients and cross-entropy, of both dtypes."""
    data = {
        name: [gpu.normal(16384, 8192, seed=seed, dtype=dtype) for seed in range(2)]
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    wide, half = ([gpu.as_cupy(x, xp) for x in data[name]] for name in data)
    backend, count = gpu.cuda(), wide[0].size
    made: Contest = {
        "add float32 + bfloat16": (10 * count, lambda turn: backend.add(wide[0], half[0])),
        "cast to bfloat16": (6 * count, lambda turn: backend.cast(wide[0], HALF)),
        "cast to float32": (6 * count, lambda turn: backend.cast(half[0], np.dtype(np.float32))),
    }
    labels = xp.asarray(np.arange(16384) % 8192)
    one = xp.asarray(1 / 16384, dtype=np.float32)
    for name, (x, g) in (("float32", wide), ("bfloat16", half)):
        size, theirs = x.nbytes, data[name][0]
        _, kept = backend.cross_entropy(x, labels, 0.0)
        calls: dict[str, tuple[int, Callable[..., Any]]] = {
            "torch clone": (2 * size, theirs.clone),
            "torch gelu": (2 * size, partial(torch.nn.functional.gelu, theirs)),
            "gelu": (2 * size, partial(backend.gelu, x)),
            "gelu_grad": (3 * size, partial(backend.gelu_grad, g, x, None)),
            "relu": (2 * size, partial(backend.relu, x)),
            "relu_grad": (3 * size, partial(backend.relu_grad, g, x)),
            "add": (3 * size, partial(backend.add, g, x)),
            "losses": (size, partial(backend.cross_entropy, x, labels, 0.0)),
            "losses_grad": (
                2 * size,
                partial(backend.cross_entropy_grad, one, x, labels, kept, 0.0),
            ),
        }
        for title, (moved, call) in calls.items():
            made[f"{title} {name}"] = (moved, gpu.fixed(call))
    return made


def main() -> None:
    """Measure, print and write."""
    chosen = gpu.options(__doc__, rounds=20, only=PARTS).parse_args()
    backend = gpu.cuda()
    xp = backend.xp
    rows: list[dict[str, Any]] = []
    with gpu.on_torchs_stream(backend):
        calls, clocked = adam(xp) if "adam" in chosen.only else ({}, {})
        for name, make in (("norms", norms), ("losses", losses), ("elements", elements)):
            calls |= make(xp) if name in chosen.only else {}
        timed = {name: call for name, (_, call) in calls.items()}
        for name, taken in gpu.milliseconds(timed, chosen.rounds, burst=1).items():
            rate = round(calls[name][0] / taken / 1e9, 3)
            rows.append(
                {"name": name, "milliseconds": round(taken, 4), "terabytes_per_second": rate}
            )
        for name, taken in gpu.seen(clocked, chosen.rounds).items():
            rows.append({"name": name, "milliseconds": round(taken, 4)})
    for row in rows:
        print(f"{row['name']:32s}", *list(row.values())[1:])
    gpu.write_gpu("cuda-training", rows, xp, merge="name")


if __name__ == "__main__":
    main()
