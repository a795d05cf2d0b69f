"""What the parts of gradient sums and of gathers take on the GPU's clock, for distributed_gpu.py.

A figure is the mean over calls that the host has queued ahead, so that no Python is in it; `bound`
is the time of the bytes alone: 3 TB/s of memory, 300 GB/s of the link for what a rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import extensor as et
from extensor.random import Stream

__all__ = ["parts_of_gathers", "parts_of_sums"]

CALLS = 16
MEMORY, LINK = 3e12, 300e9
HALF = np.dtype(ml_dtypes.bfloat16)


def gpu_ms(bench: Any, call: Callable[[], Any]) -> float:
    """Milliseconds of one call, replayed from a CUDA graph of several."""
    cuda = bench.xp.cuda
    stream = cuda.Stream(non_blocking=True)
    with stream:
        call()
        bench.ranks.join()
        stream.synchronize()
        bench.host.barrier()
        stream.begin_capture()
        for _ in range(CALLS):
            call()
        bench.ranks.join()
        graph = stream.end_capture()
        begin, end = cuda.Event(), cuda.Event()
        for _ in range(2):  # the first one loads
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            stream.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / CALLS


def row(bench: Any, name: str, call: Any, memory: float, link: float = 0.0) -> dict[str, Any]:
    """A figure beside its bound, of bytes read and written and of bytes sent."""
    bound = (memory / MEMORY + link / LINK) * 1e3
    return {"name": name, "ms": round(gpu_ms(bench, call), 4), "bound_ms": round(bound, 4)}


def collective(bench: Any, start: Callable[[], Any]) -> Callable[[], None]:
    """A collective and the wait of what follows."""

    def call() -> None:
        with bench.ranks.beside():
            start().wait()
        bench.ranks.join()

    return call


def parts_of_sums(bench: Any) -> list[dict[str, Any]]:
    """Kernels and collectives of an MXINT8 sum of 100 MB, and of NCCL's in bfloat16."""
    xp, backend, ranks = bench.xp, bench.backend, bench.ranks
    n, size = 24 << 20, ranks.size
    pitch, share = n * 33 // 32, n * 33 // 32 // size
    x, out = xp.ones(n, np.float32), xp.empty(n, np.float32)
    rows, halves = xp.zeros((size, pitch), np.uint8), xp.zeros((size, share), np.uint8)
    other, stream = xp.zeros_like(halves), Stream(0, 0, 0)
    held = backend.cast(x, HALF)
    comm, kind, add = ranks._comm, ranks._nccl.NCCL_BFLOAT16, ranks._ops["sum"]
    mine = rows[ranks.rank : ranks.rank + 1]

    def nccl_sum() -> None:
        at = held.data.ptr
        comm.allReduce(at, at, held.size, kind, add, xp.cuda.get_current_stream().ptr)

    whole, part = 4 * n, 4 * n // size
    return [
        row(bench, "cast to bfloat16", lambda: backend.cast(x, HALF), 1.5 * whole),
        row(bench, "cast to float32", lambda: backend.cast(held, x.dtype), 1.5 * whole),
        row(bench, "NCCL all-reduce bfloat16", nccl_sum, 0, 2 * n),
        row(bench, "pack", lambda: backend.mxint_pack(x, 8, stream, 0, None, mine), 1.26 * whole),
        row(
            bench, "pack, to nearest",
            lambda: backend.mxint_pack(x, 8, None, 0, None, mine), 1.26 * whole,
        ),
        row(bench, "gather of whole codes",
            collective(bench, lambda: ranks.all_gather(mine, rows)), 0, pitch * (size - 1)),
        row(
            bench, "mean of rows, rounded again",
            lambda: backend.mxint_repack(rows, 8, 1.0, stream, 0, None, out),
            whole * (1 + 0.26 * size),
        ),
        row(bench, "exchange of parts",
            collective(bench, lambda: ranks.all_to_all(halves, other)), 0, share * (size - 1)),
        row(
            bench, "mean of parts, packed again",
            lambda: backend.mxint_repack(halves, 8, 1.0, stream, 0, None, other[:1]),
            part * 0.26 * (size + 1),
        ),
        row(bench, "gather of parts",
            collective(bench, lambda: ranks.all_gather(other[:1], halves)), 0, share * (size - 1)),
        row(bench, "unpack",
            lambda: backend.mxint_unpack(halves, 8, 1.0, False, out), 1.26 * whole),
    ]  # fmt: skip


def parts_of_gathers(bench: Any) -> list[dict[str, Any]]:
    """Quantizing and gathering half of a weight of 16384 x 4096."""
    xp, backend, ranks = bench.xp, bench.backend, bench.ranks
    shard = xp.ones((16384 // ranks.size, 4096), np.float32)
    found = []
    for name, bytes_ in (("bfloat16", 2.0), ("mxfp8_e4m3", 33 / 32), ("mxfp4", 17 / 32)):
        spec = None if name == "bfloat16" else et.QuantSpec(name)

        def make(spec: Any = spec) -> Any:
            return backend.cast(shard, HALF) if spec is None else backend.quantize(shard, spec)[0]

        sent = int(shard.size * bytes_)
        mine, whole = xp.zeros(sent, np.uint8), xp.zeros(sent * ranks.size, np.uint8)

        def gather(mine: Any = mine, whole: Any = whole) -> Any:
            return ranks.all_gather(mine, whole)

        found += [
            row(bench, f"make {name}", make, shard.nbytes + sent),
            row(bench, f"gather {name}", collective(bench, gather), 0, sent * (ranks.size - 1)),
        ]
    return found
