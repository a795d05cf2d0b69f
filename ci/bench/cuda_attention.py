"""Attention in bfloat16 on a GPU against torch's scaled_dot_product_attention (cuDNN and flash).

    python ci/bench/cuda_attention.py [--sizes 16x8x1024x64 ...] [--rounds N]

Causal self-attention of normal data, B x H x T x d, queries, keys and values side by side as one
projection gives them, the gradient likewise: forward, backward alone, and both. TFLOP/s count 4
B H T^2 d operations forward and 10 backward, halved for the mask, as is usual; ``ratio`` is the
time of torch's best over ours. CUDA events around four calls, the contestants taking turns in one
process, medians over the rounds. Before that results and gradients are compared: the largest
difference to torch's in units of its root mean square. Needs a Hopper GPU, torch and the extra
``cuda13``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ci.bench import gpu
from extensor.backends.protocol import AttentionForward
from extensor_cuda.backend import CudaBackend

SIZES = ["16x8x1024x64", "16x16x1024x128", "16x32x1024x128", "8x16x2048x128"]
THEIRS = {"torch cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
WORK = {"forward": 4, "backward": 10, "both ways": 14}


def parts(x: Any, heads: int) -> list[Any]:
    """Views (B, heads, T, d) of (B, T, heads n, d)."""
    return [x[:, :, i : i + heads].swapaxes(1, 2) for i in range(0, x.shape[2], heads)]


def torch_calls(
    x: Any, g: Any, heads: int, kernel: SDPBackend
) -> tuple[dict[str, gpu.Call], list[Any]]:
    """Forward, backward, both; and what they give."""
    q, k, v = (a.detach().requires_grad_() for a in parts(x, heads))

    def forward(turn: int) -> Any:
        with sdpa_kernel([kernel]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward(turn: int, out: Any) -> Any:
        return torch.autograd.grad(out, (q, k, v), g, retain_graph=True)

    out = forward(0)
    calls: dict[str, gpu.Call] = {
        "forward": forward,
        "backward": partial(backward, out=out),
        "both ways": lambda turn: backward(turn, forward(turn)),
    }
    return calls, [out.detach(), *backward(0, out)]


def our_calls(
    x: Any, g: Any, heads: int, backend: CudaBackend
) -> tuple[dict[str, gpu.Call], list[Any]]:
    """The same; the gradients are written side by side."""
    xp, scale = backend.xp, x.shape[-1] ** -0.5
    whole, grad = gpu.as_cupy(x, xp), gpu.as_cupy(g, xp)
    q, k, v = parts(whole, heads)
    given = grad.swapaxes(1, 2)
    gq, gk, gv = parts(xp.empty(whole.shape, whole.dtype), heads)
    path = backend.path("attention", q, k, v, True, scale)
    assert path == "fused kernel", path

    def forward(turn: int) -> Any:
        return backend.attention(q, k, v, True, scale)

    def backward(turn: int, made: Any) -> None:
        out, stats = made
        saved = AttentionForward(q, k, v, out, stats, True, scale)
        backend.attention_grad(given, saved, (gq, gk, gv))

    made = forward(0)
    backward(0, made)
    calls: dict[str, gpu.Call] = {
        "forward": forward,
        "backward": partial(backward, made=made),
        "both ways": lambda turn: backward(turn, forward(turn)),
    }
    results = [
        torch.utils.dlpack.from_dlpack(a.swapaxes(1, 2).view(xp.int16))
        .view(torch.bfloat16)
        .swapaxes(1, 2)
        for a in (made[0], gq, gk, gv)
    ]
    return calls, results


def rows_of(size: str, backend: CudaBackend, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each kernel and direction."""
    batch, heads, length, d = map(int, size.split("x"))
    x, g = gpu.normal(batch, length, 3 * heads, d), gpu.normal(batch, length, heads, d, seed=1)
    contestants, results = {}, {}
    contestants["ours"], results["ours"] = our_calls(x, g, heads, backend)
    for name, kernel in THEIRS.items():
        try:
            made = torch_calls(x, g.swapaxes(1, 2), heads, kernel)
        except RuntimeError as error:  # a build without it
            print(f"{size}: {name} does not run: {error}", flush=True)
        else:
            contestants[name], results[name] = made
    for name in list(results)[1:]:
        apart = [
            f"{((a.float() - b.float()).abs().max() / b.float().square().mean().sqrt()).item():.4f}"
            for a, b in zip(results["ours"], results[name], strict=True)
        ]
        print(f"{size}: out, gq, gk, gv differ from {name} by {', '.join(apart)} rms", flush=True)
    for what, factor in WORK.items():
        times = gpu.milliseconds({name: calls[what] for name, calls in contestants.items()}, rounds)
        best = min((t for name, t in times.items() if name != "ours"), default=float("nan"))
        for name, taken in times.items():
            rate = factor * batch * heads * length**2 * d / 2 / taken / 1e9
            yield {
                "size": size,
                "what": what,
                "name": name,
                "ms": round(taken, 4),
                "tflops": round(rate, 1),
                "ratio": round(best / taken, 3),
                "key": f"{size}, {what}, {name}",
            }


def main() -> None:
    """Measure, print and write."""
    parser = gpu.options(__doc__, rounds=7)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    chosen = parser.parse_args()
    backend = gpu.cuda()
    with gpu.on_torchs_stream(backend):
        rows = [
            row for size in chosen.sizes for row in gpu.shown(rows_of(size, backend, chosen.rounds))
        ]
    gpu.write_gpu("cuda-attention", rows, backend.xp, merge="key")


if __name__ == "__main__":
    main()
