"""Launches attention in bfloat16 on Hopper's tensor cores: arrays -> tensor maps and launches.

After Dao, FlashAttention-2 (arXiv 2307.08691, section 3) and Shah et al., FlashAttention-3 (arXiv
2407.08608, section 3): no array of scores is ever written. Sums are float32; weights, and the
gradients of scores, are rounded to bfloat16 for the products they go into. Each result is summed
by one thread in an order that depends on the shapes alone, so that two runs give the same bits.

Bounds against exact arithmetic on the same bfloat16 values, with u = 2^-8 for a rounding to
bfloat16 and e = 2^-22 (d + 4) (1 + a) + S 2^-23 for float32 sums and exp2, where a is the largest
scale |q| |k| of a query: a result is within (2 u + e) sum over keys of p |v|. Given that result,
with t = sum over d of g out, a score's gradient ds = p (g v - t) is within
b = p |g v - t| (2 u + 2 e) + p 2^-22 (d + 4) (|g| |v| + |g| |out|), and the gradients within
scale b |k| + u |gq|, scale b^T |q| + u |gk| and (u + e) p^T |g| + u |gv|.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.protocol import AttentionForward
from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.common.wgmma import wgmma
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.c_struct import structure
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.recording import TensorMap

__all__ = ["KERNELS", "attention", "attention_grad", "source", "unsupported"]

Array = Any
HEADS = (64, 128)
KERNELS = ("attention", "attention_grad_q", "attention_grad_kv")
_ROWS, _BOX, _THREADS, _WARPS, _SLACK = 128, 64, 384, 8, 1024
# Of each kernel: tiles of 128 rows that stay, rows of a stage, bytes of its vectors.
_PARTS = {KERNELS[0]: (1, 128, 0), KERNELS[1]: (3, 128, 0), KERNELS[2]: (2, 128, 512)}


@cache
def _parameters() -> type[ctypes.Structure]:
    """The kernels' parameter struct."""
    text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
    return structure(text, "Problem")


def _memory(kernel: str, d: int) -> tuple[int, int]:
    """Stages of the ring, as many as fit and 8 at most, and bytes of shared memory."""
    held, rows, vectors = _PARTS[kernel]
    stage = 2 * rows * d + vectors + 16
    fixed = 2 * _ROWS * d * held + _WARPS * 16 * d * 2 + _SLACK + 16
    stages = min((driver.SHARED_BYTES - fixed) // stage, 8)
    return stages, fixed + stages * stage


@lru_cache(maxsize=16)
def source(kernel: str, d: int, guard: bool = False) -> Source:
    """The program of one of `KERNELS` for heads of d elements.

    ``guard``: a barrier that is never reached ends the kernel with an error.
    """
    macros = {
        "ATTENTION_HEAD": d,
        "ATTENTION_STAGES": _memory(kernel, d)[0],
        "COMMON_GUARD": int(guard),
    }
    plain = Source.read(Path(__file__).parent / f"{kernel}.cu", macros)
    scores = 128 if kernel == KERNELS[0] else 64
    functions = [
        wgmma("bf16", "bf16", scores),
        wgmma("bf16", "bf16", scores, registers=True),
        wgmma("bf16", "bf16", d, registers=True, transposed=(False, True)),
    ]
    text = plain.text.replace("//WGMMA//", "\n".join(functions))
    return replace(plain, text=text, exact=False)


def unsupported(q: Array, k: Array, v: Array, scale: float, device: int) -> Unsupported | None:
    """Why these kernels do not compute attention of bfloat16 arrays; None where they do."""
    if any(a.dtype.name != "bfloat16" for a in (q, k, v)):
        return Unsupported(f"arrays of {q.dtype}, {k.dtype} and {v.dtype}; expected bfloat16 alone")
    if q.shape[-1] not in HEADS or v.shape[-1] != q.shape[-1]:
        return Unsupported(
            f"heads of {q.shape[-1]} and {v.shape[-1]} elements; the kernel is for 64 and 128"
        )
    if not scale > 0:
        return Unsupported(f"a scale of {scale}; the kernel is for those above 0")
    if not (q.size and k.size):
        return Unsupported("an empty array")
    if (found := driver.capability(device)) != "90":
        return Unsupported(f"compute capability {found}; the kernel is for 90 (H100, H200)")
    return None


def _fits(a: Array) -> bool:
    """Whether a tensor map describes it: bfloat16, d contiguous, all else 16 bytes apart."""
    if a.dtype.name != "bfloat16":
        return False
    others = zip(a.shape[:-1], a.strides[:-1], strict=True)
    apart = all(n == 1 or (step > 0 and step % 16 == 0) for n, step in others)
    return a.strides[-1] == a.itemsize and apart and a.data.ptr % 16 == 0


def _map(a: Array, rows: int) -> TensorMap:
    """Of (B, H, T, d): axes d, H, T, B, boxes of so many rows of 64 elements."""
    batch, heads, length, d = a.shape
    # The step of an axis of one is anything.
    b, h, t = (
        step if n > 1 else d * a.itemsize
        for n, step in zip(a.shape[:-1], a.strides[:-1], strict=True)
    )
    return driver.tensor_map(
        a.data.ptr, (d, heads, length, batch), (h, t, b), (_BOX, 1, rows, 1), "BFLOAT16"
    )


def _launch(
    kernel: str,
    read: list[Array],
    written: list[Array],
    shape: tuple[int, int, int],
    problem: dict[str, Any],
) -> None:
    """Over (B, heads, rows) of the side whose tiles blocks go through."""
    import cupy

    batch, heads, length = shape
    d = read[0].shape[-1]
    device = cupy.cuda.runtime.getDevice()
    _, shared = _memory(kernel, d)
    function, _ = driver.load(source(kernel, d), kernel, shared, device)
    blocks, tiles = driver.multiprocessors(device), -(-length // _ROWS)
    pairs = batch * heads * -(-tiles // 2)
    paired = bool(problem["causal"]) and pairs >= blocks
    items = pairs if paired else batch * heads * tiles
    parameters = _parameters()(heads=heads, tiles=tiles, items=items, paired=int(paired), **problem)
    maps = [_map(a, _BOX) for a in read] + [_map(a, 16) for a in written]
    driver.launch(function, min(blocks, items), _THREADS, shared, maps, parameters)


def _problem(q: Array, k: Array, causal: bool, scale: float, lse2: Array) -> dict[str, Any]:
    return {
        "lse2": lse2.data.ptr,
        "scale": scale,
        "scale2": scale * math.log2(math.e),
        "q_heads_per_kv_head": q.shape[1] // k.shape[1],
        "queries": q.shape[2],
        "keys": k.shape[2],
        "padded": lse2.shape[-1],
        "causal": int(causal),
    }


def _readable(arrays: tuple[Array, ...]) -> list[Array]:
    """Bfloat16 copies of those that no tensor map describes."""
    half = [a.astype(ml_dtypes.bfloat16, copy=False) for a in arrays]
    return [a if _fits(a) else a.view(np.uint16).copy(order="C").view(a.dtype) for a in half]


def attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float, xp: Any
) -> tuple[Array, Array]:
    """softmax(scale q k^T) v, and what the gradient needs of it; does not wait.

    Args:
        q: bfloat16 (B, H, T, d), d 64 or 128, of any strides; d contiguous and others a multiple of
            16 bytes apart are read in place.
        k: likewise (B, Hkv, S, d), H a multiple of Hkv.
        v: as k.
        causal: query t sees the keys up to t + S - T; S >= T.
        scale: of the scores, above 0.
        xp: cupy.

    Returns:
        bfloat16 (B, H, T, d), whose heads lie side by side in memory, as (B, T, H, d); and float32
        (B, H, T up to a multiple of 128): log2 of each query's sum of exp(scale score).

    Raises:
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    batch, heads, length, d = q.shape
    lse2 = xp.empty((batch, heads, -(-length // _ROWS) * _ROWS), dtype=np.float32)
    out = xp.empty((batch, length, heads, d), dtype=q.dtype).swapaxes(1, 2)
    problem = _problem(q, k, causal, scale, lse2)
    _launch(KERNELS[0], _readable((q, k, v)), [out], (batch, heads, length), problem)
    return out, lse2


def attention_grad(
    g: Array, forward: AttentionForward, into: tuple[Array, Array, Array], xp: Any
) -> None:
    """Gradients of `attention` in q, k and v, written to ``into``; two launches, does not wait.

    Args:
        g: (B, H, T, d), the gradient of the result; what is not bfloat16 is rounded to it.
        forward: what `attention` was given and returned.
        into: arrays of the shapes of q, k and v, of any strides.
        xp: cupy.

    Raises:
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    stats, given = forward.stats, (forward.q, forward.k, forward.v, forward.out)
    g, q, k, v, out = _readable((g, *given))
    written = [a if _fits(a) else xp.empty(a.shape, dtype=q.dtype) for a in into]
    delta = xp.empty(stats.shape, dtype=np.float32)
    problem = _problem(q, k, forward.causal, forward.scale, stats) | {"delta": delta.data.ptr}
    _launch(KERNELS[1], [q, g, out, k, v], written[:1], q.shape[:3], problem)
    _launch(KERNELS[2], [q, g, k, v], written[1:], k.shape[:3], problem)
    for a, b in zip(into, written, strict=True):
        if a is not b and a.dtype == b.dtype:
            a.view(np.uint16)[...] = b.view(np.uint16)
        elif a is not b:
            a[...] = b
