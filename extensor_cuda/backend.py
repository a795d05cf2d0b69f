"""The CUDA backend: cupy's arrays, and kernels compiled for the GPU at hand.

`ROUTES` is the dispatch table: a method of the protocol, what chooses its kernel, and what runs
where no kernel fits. Products then run generically on cupy. Quantizing and decoding run on the CPU
backend and come back: cupy's own kernels flush float32's subnormals to zero (they are compiled
with ``-ftz=true``), which would change bits. `CudaBackend.path` says what a call takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.backends.generic.core import BFLOAT16
from extensor.backends.protocol import OperandSpec, Prepared
from extensor.backends.unsupported import Unsupported
from extensor.errors import CaptureError
from extensor.optim.states import STATES
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda import conv_pool, decoding, multi_tensor, nn, quantize, reduction
from extensor_cuda.dispatch import Route, routed
from extensor_cuda.kernels.attention import cached
from extensor_cuda.kernels.optim import optimizer
from extensor_cuda.matmul.dense import dense_product
from extensor_cuda.matmul.experts import gated_experts
from extensor_cuda.matmul.fallback_count import FallbackCounter, SharedCounter
from extensor_cuda.matmul.grouped import block_scaled_matmul, grouped_weight_only_matmul
from extensor_cuda.matmul.prepare import GemmPreparation, packed_operand, prepare, run_batch
from extensor_cuda.matmul.product import product, values_of
from extensor_cuda.matmul.rebased import rebased_matmul
from extensor_cuda.matmul.stored import stored_product
from extensor_cuda.matmul.weight_only import (
    weight_only_gated,
    weight_only_matmul,
    weight_only_matmuls,
)
from extensor_cuda.runtime import blas
from extensor_cuda.runtime.capture import StepCapture, current_capture
from extensor_cuda.runtime.counters import Reserve
from extensor_cuda.runtime.graph import CudaGraph
from extensor_cuda.runtime.memory import PoolLog, allocate

__all__ = ["ROUTES", "CudaBackend", "make_backend"]

Array = Any
_INSTALL = "it takes an NVIDIA GPU with its driver, and pip install 'extensor[cuda13]'"


# --- what runs where no kernel fits ---


def _on_device(backend: CudaBackend, q: QuantArray) -> QuantArray:
    """A stored array of the CPU, on the GPU."""
    return replace(q, **{name: backend.xp.asarray(part) for name, part in q.parts.items()})


def _refuse_capture(spec: QuantSpec, gap: Unsupported) -> None:
    if current_capture() is not None:
        raise CaptureError(
            f"capture: the step makes {spec.format} operands on the CPU ({gap.reason}), which a "
            "GPU cannot replay by itself; use a recipe whose operands have kernels (backend.path "
            "says which), or no capture"
        )


def _quantize_on_host(
    backend: CudaBackend,
    gap: Unsupported,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
    previous_amax: Array | None = None,
    amax: Array | None = None,
) -> tuple[QuantArray, Counts]:
    _refuse_capture(spec, gap)
    maxima = (None if one is None else one.get() for one in (previous_amax, amax))
    q, stats = registry.get("cpu").quantize(x.get(), spec, stream, *maxima)
    return _on_device(backend, q), stats


def _pack_on_host(
    backend: CudaBackend,
    gap: Unsupported,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
) -> QuantArray:
    _refuse_capture(spec, gap)
    return _on_device(backend, registry.get("cpu").pack(x.get(), spec, stream))


def _quantize_clipped_on_host(
    backend: CudaBackend, gap: Unsupported, x: Array, spec: QuantSpec, stream: Stream | None = None
) -> tuple[QuantArray, Counts, Array]:
    _refuse_capture(spec, gap)
    q, stats, mask = registry.get("cpu").quantize_clipped(x.get(), spec, stream)
    return _on_device(backend, q), stats, backend.xp.asarray(mask)


def _fake_quantize_on_host(
    backend: CudaBackend, gap: Unsupported, x: Array, spec: QuantSpec, stream: Stream | None = None
) -> tuple[Array, Counts]:
    _refuse_capture(spec, gap)
    values, stats = registry.get("cpu").fake_quantize(x.get(), spec, stream)
    return backend.xp.asarray(values), stats


def _dequantize_on_host(
    backend: CudaBackend, gap: Unsupported, q: QuantArray, dtype: str = "float32"
) -> Array:
    _refuse_capture(q.spec, gap)
    there = {name: part.get() for name, part in q.parts.items()}
    return backend.xp.asarray(registry.get("cpu").dequantize(replace(q, **there), dtype))


def _cached_attention(backend: CudaBackend, gap: Unsupported, *args: Any) -> Array:
    if current_capture() is not None:
        raise CaptureError(
            f"capture: attention to a cache has no kernel for {gap.reason}, and a replay would see "
            "no new tokens; call the model without capture"
        )
    return GenericBackend.cached_attention(backend, *args)


def _grad_plus_addend(generic: Callable[..., tuple[Array, ...]]) -> Callable[..., Any]:
    """A generic gradient method, whose first result is added to an ``addend``."""

    def fallback(
        backend: CudaBackend, gap: Unsupported, *args: Any, addend: Array | None = None
    ) -> tuple[Array, ...]:
        gx, *others = generic(backend, *args)
        return (gx if addend is None else backend.add(addend, gx), *others)

    return fallback


def _gelu_grad(
    backend: CudaBackend, gap: Unsupported, *args: Any, overwrites: bool = False
) -> Array:
    return GenericBackend.gelu_grad(backend, *args)


def _prepare(
    xp: Any,
    x: Array,
    specs: Sequence[OperandSpec],
    streams: Sequence[Stream | None],
    work: int,
    amax_state: dict[str, Any] | None = None,
) -> GemmPreparation | Unsupported:
    return prepare(quantize.readable(xp, x), specs, streams, work, xp, amax_state)


ROUTES: dict[str, Route] = {
    # Methods whose fallback is the generic method: functions of these modules, by their names.
    **{
        name: Route(getattr(room, name))
        for room in (nn, conv_pool, multi_tensor, reduction)
        for name in room.__all__
    },
    # matmul; the table of operands is extensor_cuda.matmul.prepare's
    "cached_attention": Route(decoding.cached_attention, fallback=_cached_attention),
    "prepare": Route(
        _prepare, run=lambda plan: plan, path=attrgetter("path"), fallback_path="host"
    ),
    "packed_operand": Route(lambda xp, q, work: packed_operand(q, work, xp), run=lambda made: made),
    "block_scaled_matmul": Route(
        lambda xp, a, b, dtype="float32": block_scaled_matmul(a, b, dtype, xp),
        run=attrgetter("out"),
        path=attrgetter("path"),
        fallback_path=lambda a, b, *dtype: (
            "one after the other" if len(a.shape) == 3 else "generic"
        ),
    ),
    "stored_product": Route(
        lambda xp, a, b: stored_product(a, b, xp),
        run=attrgetter("out"),
        path=attrgetter("path"),
    ),
    "weight_only_matmul": Route(
        lambda xp, x, w, dtype="float32": weight_only_matmul(x, w, dtype, xp),
        run=attrgetter("out"),
        path=attrgetter("path"),
    ),
    "weight_only_matmuls": Route(
        lambda xp, x, weights, dtype="float32": weight_only_matmuls(x, weights, dtype, xp),
        run=lambda made: made,
        path=lambda made: "tensor cores, weights decoded on the way, in one launch",
        fallback_path="one after the other",
    ),
    "weight_only_gated": Route(
        lambda xp, x, weights, dtype, alpha, limit: weight_only_gated(
            x, weights, dtype, (alpha, limit), xp
        ),
        run=attrgetter("out"),
        path=attrgetter("path"),
        fallback_path="one after the other",
    ),
    "grouped_weight_only_matmul": Route(
        lambda xp, x, weights, ends: grouped_weight_only_matmul(x, weights, ends, xp),
        run=attrgetter("out"),
        path=attrgetter("path"),
        fallback_path="one after the other",
    ),
    "gated_experts": Route(gated_experts, fallback_path="one after the other"),
    "rebased_matmul": Route(
        rebased_matmul, path=lambda call: "FP8 tensor cores, activations rebased"
    ),
    # quantize
    "quantize": Route(quantize.quantize, fallback=_quantize_on_host, fallback_path="host"),
    "pack": Route(quantize.pack, fallback=_pack_on_host, fallback_path="host"),
    "quantize_clipped": Route(
        quantize.quantize_clipped, fallback=_quantize_clipped_on_host, fallback_path="host"
    ),
    "fake_quantize": Route(
        quantize.fake_quantize, fallback=_fake_quantize_on_host, fallback_path="host"
    ),
    "dequantize": Route(quantize.dequantize, fallback=_dequantize_on_host, fallback_path="host"),
    "straight_through": Route(quantize.straight_through),
    "round_to_odd": Route(quantize.round_to_odd),
    "odd_values": Route(quantize.odd_values),
    "quantize_rowwise_columnwise": Route(
        quantize.quantize_rowwise_columnwise, fallback_path="two calls"
    ),
    "quantize_rowwise_columnwise_clipped": Route(
        quantize.quantize_rowwise_columnwise_clipped, fallback_path="two calls"
    ),
    "fake_quantize_rowwise_columnwise": Route(
        quantize.fake_quantize_rowwise_columnwise, fallback_path="two calls"
    ),
    # nn
    "gelu_and_pack": Route(quantize.gelu_and_pack),
    "gelu_grad": Route(nn.gelu_grad, fallback=_gelu_grad),
    "layer_norm_grad": Route(
        nn.layer_norm_grad, fallback=_grad_plus_addend(GenericBackend.layer_norm_grad)
    ),
    "rms_norm_grad": Route(
        nn.rms_norm_grad, fallback=_grad_plus_addend(GenericBackend.rms_norm_grad)
    ),
}


def make_backend() -> CudaBackend:
    """The CUDA backend on cupy's current device.

    Raises:
        RuntimeError: without cupy, a driver or a GPU; names what is missing and the way out.
    """
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"device 'cuda': cupy cannot be imported ({error}); {_INSTALL}"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"device 'cuda': no usable NVIDIA driver or GPU ({error}); {_INSTALL}"
        ) from error
    if not count:
        raise RuntimeError(f"device 'cuda': the driver finds no GPU; {_INSTALL}")
    cupy.cuda.set_allocator(partial(allocate, cupy, cupy.get_default_memory_pool()))
    backend = CudaBackend(blas.with_matmul(cupy))
    os.register_at_fork(after_in_child=backend.refuse_after_fork)
    return backend


class _Forked:
    """Stands for the array module in a process forked after CUDA started."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"device 'cuda': {name} was asked for in a process forked after CUDA started, which "
            "CUDA does not survive; start workers with multiprocessing's 'spawn' method"
        )


class CudaBackend(GenericBackend):
    """Cupy, with the kernels of `ROUTES`."""

    odd_subnormals = True  # looking for them would wait
    groups_products = True
    multi_tensor_states = frozenset(STATES)
    captured_heads = frozenset(cached.HEADS)
    accumulating_vjps = frozenset({"layer_norm", "rms_norm"})
    overwriting_vjps = frozenset({"gelu_exact"})
    bfloat16 = frozenset(
        {
            "add",
            "cross_entropy",
            "gated_silu",
            "gelu_exact",
            "linear",
            "packed_attention",
            "relu",
            "rms_norm",
            "rotary_embedding",
            "scaled_dot_product_attention",
            "softmax",
        }
    )

    def __init__(self, xp: Any) -> None:
        super().__init__("cuda", xp)
        self.reserve = Reserve(xp)
        self._fallbacks = FallbackCounter(self.reserve)

    @property
    def capturing(self) -> StepCapture | None:
        """The capture under way in this thread."""
        return current_capture()

    def reads_stored(self, vjp: str, q: QuantArray, others: Sequence[Array]) -> bool:
        """See the protocol."""
        return nn.reads_stored(vjp, q, others)

    def memory_log(self) -> PoolLog:
        """See the protocol."""
        return PoolLog(self.xp)

    def new_graph(self) -> CudaGraph:
        """See the protocol."""
        return CudaGraph(self.xp, optimizer.find_nonfinite)

    def raising(self) -> AbstractContextManager[Any]:
        """See the protocol: cupy is told not to give NaN instead. Waits for the GPU."""
        import cupyx

        return cupyx.errstate(linalg="raise")

    def refuse_after_fork(self) -> None:
        """Make every use of this backend in a forked child an error that says so."""
        self.xp = _Forked()

    def path(self, method: str, *args: Any) -> str:
        """Which code ``method(*args)`` takes: "fused kernel", another choice, or a fallback.

        A fallback is named with its reason: "host: " for the CPU backend, "generic: " for cupy,
        "two calls: " for what is not read once, "one after the other: " for a stack of products
        that is no single launch. Operands from `prepare` are made by a "fused kernel", a "scaled
        kernel" under float scales, or "expanded: " (and why) from packed storage.

        The path of a product depends on values, so `block_scaled_matmul` and `weight_only_matmul`
        are run to tell: see `extensor_cuda.matmul.stored` and `extensor_cuda.matmul.weight_only`.

        Raises:
            ValueError: for a method that has no kernel.
        """
        if method not in ROUTES:
            raise ValueError(f"path: expected one of {', '.join(ROUTES)}, got {method!r}")
        route = ROUTES[method]
        chosen = route.choose(self.xp, *args)
        if chosen:
            return route.path(chosen)
        named = route.fallback_path
        return f"{named if isinstance(named, str) else named(*args)}: {chosen.reason}"

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """See the protocol; of bfloat16, `extensor_cuda.matmul.dense`, or float32 sums of it."""
        if BFLOAT16 not in (a.dtype, b.dtype):
            return super().matmul(a, b, bias)
        out = dense_product(a, b, bias, self.xp)
        if not isinstance(out, Unsupported):
            return out
        wide = [x if x is None else self._wide(x) for x in (a, b, bias)]
        return super().matmul(*wide)

    def run_batch(self, preparations: Sequence[Any]) -> list[Prepared]:
        """See the protocol: one launch."""
        made: list[Any] = run_batch(preparations, self.xp)
        return made

    def product(
        self,
        a: Any,
        b: Any,
        dtype: str = "float32",
        bias: Array | None = None,
        fallbacks: dict[str, Any] | None = None,
    ) -> Array:
        """See the protocol, and `extensor_cuda.matmul.product`."""
        counter = (
            self._fallbacks if fallbacks is None else SharedCounter(self._fallbacks, fallbacks)
        )
        out = product(a, b, dtype, self.xp, bias, counter)
        if not isinstance(out, Unsupported):
            return out
        return super().product(values_of(a, self.xp), values_of(b, self.xp), dtype, bias)

    @property
    def fallback_count(self) -> int:
        """How many products of FP8 operands ran in bfloat16; waits for the GPU."""
        return self._fallbacks.count


for _name, _route in ROUTES.items():
    setattr(CudaBackend, _name, routed(_name, _route))
