"""The CUDA backend on a GPU made of numpy, whose quantizers are the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extensor.backends import registry
from extensor.quant import reference
from extensor_cuda import quantize
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.attention import cached
from extensor_cuda.kernels.nn import (
    conv_pool,
    cross_entropy,
    dropout,
    elementwise,
    gated_silu,
    norm,
    rotary,
    scatter_add,
    softmax,
    sums,
    topk,
)
from extensor_cuda.kernels.optim import optimizer
from extensor_cuda.kernels.quantize import (
    dequantize,
    odd_planes,
    rowwise_columnwise,
    straight_through,
)
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.reduction import peer_barrier, reduction
from extensor_cuda.runtime import blas, capture
from extensor_cuda.runtime.counters import Counters, OperandCounts
from tests.unit.cuda import fake

__all__ = ["TRAINING", "FakeBlas", "install"]

TRAINING = (
    cached,
    cross_entropy,
    dropout,
    elementwise,
    gated_silu,
    norm,
    optimizer,
    rotary,
    scatter_add,
    softmax,
    sums,
    topk,
    conv_pool,
    reduction,
    peer_barrier,
    straight_through,
    odd_planes,
)
"""Modules whose ``launch`` an emulator replaces."""
SLOTS = 2 * kernels.SLOTS


class FakeBlas:
    """cublasSgemmStridedBatched on numpy: column-major matrices by pitch and stride."""

    def gemm(
        self, transposed: Any, sizes: Any, arrays: Any, pitches: Any, strides: Any, batch: int
    ) -> None:
        (m, n, k), held = sizes, [fake.plain(a) for a in arrays]
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]

        def matrix(i: int, number: int) -> np.ndarray:
            rows, columns = shapes[i]
            assert pitches[i] >= rows
            flat = np.lib.stride_tricks.as_strided(
                held[i], (batch * max(strides[i], 1) + pitches[i] * columns,), (4,)
            )
            start = number * strides[i]
            return np.lib.stride_tricks.as_strided(
                flat[start:], (rows, columns), (4, 4 * pitches[i])
            )

        def again() -> None:
            for number in range(batch):
                a, b = matrix(0, number), matrix(1, number)
                a, b = (a.T if transposed[0] else a), (b.T if transposed[1] else b)
                matrix(2, number)[...] = (a @ b).astype(np.float32)

        fake.TAPE.launch(again)


def replayed(spec: Any, stream: Any, clock: Any) -> tuple[Any, Any]:
    """Spec and stream with the step that the device has."""
    if isinstance(clock, np.ndarray):
        step = int(fake.plain(clock))
        stream = replace(stream, step=step)
        if spec.has_per_step_signs:
            spec = spec.replace(transform=replace(spec.transform, step=step))
    return spec, stream


def counted(
    x: Any, spec: Any, stream: Any, counters: Counters, part: tuple[int, int], xp: Any
) -> Any:
    """A quantizer's launch: the reference, with the step that the device has."""
    clock = capture.clock_of([stream])
    values = fake.plain(x)
    decoded, stats = reference.fake_quantize(values, spec, stream)
    out, adds = fake.made(decoded), fake.plain(counters.array)
    memory = fake.plain(out)
    lost = Counters(2, xp) if spec.rebased else None
    changed = None if lost is None else fake.plain(lost.array)

    def again() -> None:
        made, found = reference.fake_quantize(values, *replayed(spec, stream, clock))
        memory[...] = made
        adds[part[0] : part[0] + 2] += np.array([found.saturated, found.flushed], np.uint64)
        if changed is not None:
            changed[0] += np.uint64(found.rebase_changed)

    fake.TAPE.launch(again)
    near = None if lost is None else (lost, (0, 2))
    return out, OperandCounts(counters, part, stats.count, rebased=near)


def fake_operand(x: Any, plan: Any, stream: Any, xp: Any) -> Any:
    return counted(x, plan.spec, stream, Counters(SLOTS, xp), (0, SLOTS), xp)


def fake_rebased(x: Any, plan: Any, stream: Any, xp: Any) -> Any:
    rebased = replace(plan, spec=plan.spec.replace(rebased=True))
    return stored(x, rebased, stream, xp, reference.quantize)


def stored(x: Any, plan: Any, stream: Any, xp: Any, quantizes: Any) -> Any:
    """What ``quantizes`` stores; each replay writes it anew, with the step that the device has."""
    clock, values = capture.clock_of([stream]), fake.plain(x)
    q, stats, *masks = quantizes(values, plan.spec, stream)
    parts = {name: fake.made(part) for name, part in q.parts.items()}
    bits = [fake.made(mask) for mask in masks]
    counters = Counters(SLOTS, xp)
    adds, memory = fake.plain(counters.array), {n: fake.plain(p) for n, p in parts.items()}
    lost = Counters(2, xp) if plan.spec.rebased else None
    changed = None if lost is None else fake.plain(lost.array)
    mask_memory = [fake.plain(mask) for mask in bits]

    def again() -> None:
        made, found, *more = quantizes(values, *replayed(plan.spec, stream, clock))
        for name, part in made.parts.items():
            memory[name][...] = part
        for held, mask in zip(mask_memory, more, strict=True):
            held[...] = mask
        adds[:2] += np.array([found.saturated, found.flushed], np.uint64)
        if changed is not None:
            changed[0] += np.uint64(found.rebase_changed)

    fake.TAPE.launch(again)
    near = None if lost is None else (lost, (0, 2))
    counts = OperandCounts(counters, (0, SLOTS), stats.count, rebased=near)
    return replace(q, **parts), counts, *bits


def fake_raw(
    x: Any, plan: Any, stream: Any, xp: Any, amax: Any = None, stats: bool = True
) -> kernels.Outputs:
    assert amax is None
    q, counts = stored(x, plan, stream, xp, reference.quantize)
    return kernels.Outputs(q, None, counts.counters if stats else None, None)


def fake_clipped(x: Any, plan: Any, stream: Any, xp: Any) -> Any:
    return stored(x, plan, stream, xp, reference.quantize_clipped)


def fake_dequantize(q: Any, plan: Any, xp: Any, dtype: str = "float32") -> Any:
    held = replace(q, **{name: fake.plain(part) for name, part in q.parts.items()})

    def values() -> Any:
        return reference.round_to(reference.dequantize(held), dtype)

    out = fake.made(values())
    memory = fake.plain(out)

    def again() -> None:
        memory[...] = values()

    fake.TAPE.launch(again)
    return out


def fake_pair(x: Any, plan: Any, streams: Any, xp: Any) -> Any:
    counters, streams = Counters(2 * SLOTS, xp), plan.ordered(streams)
    sides = (plan.rowwise.spec, 0), (plan.columnwise.spec, 1)
    made = [
        counted(x, spec, streams[i], counters, (i * SLOTS, (i + 1) * SLOTS), xp)
        for spec, i in sides
    ]
    return plan.ordered((made[0], made[1]))


def refuse(source: Any, kernel: str, *arguments: Any) -> None:
    raise AssertionError(f"the GPU made of numpy has no kernel {kernel!r} of {source!r:.80}")


def install(monkeypatch: pytest.MonkeyPatch, launch: fake.FakeLaunch) -> CudaBackend:
    """Device "cuda" on numpy."""
    for module in (*TRAINING, capture):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(kernels, "fake_quantize", fake_operand)
    monkeypatch.setattr(kernels, "quantize_raw", fake_raw)
    monkeypatch.setattr(kernels, "quantize_clipped", fake_clipped)
    monkeypatch.setattr(dequantize, "dequantize", fake_dequantize)
    for module in (kernels, dequantize):
        monkeypatch.setattr(module, "launch", refuse)
    monkeypatch.setattr(quantize, "_quantize_rebased", fake_rebased)
    monkeypatch.setattr(rowwise_columnwise, "fake_quantize", fake_pair)
    monkeypatch.setattr("extensor_cuda.runtime.driver.multiprocessors", lambda device: 2)
    monkeypatch.setattr("extensor_cuda.runtime.driver.capability", lambda device: "80")
    xp: Any = fake.FakeCupy()

    def matmul(a: Any, b: Any) -> Any:
        if a.dtype == b.dtype == np.float32 and min(a.ndim, b.ndim) > 1:
            return blas.matmul(a, b, xp, FakeBlas())
        return np.matmul(a, b)

    xp.matmul = matmul
    backend, usual = CudaBackend(xp), registry._made
    monkeypatch.setattr(registry, "_made", lambda d: backend if d == "cuda" else usual(d))
    return backend
