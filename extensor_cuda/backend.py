"""The CUDA backend: cupy's arrays, and kernels compiled for the GPU at hand.

Each override asks ``reason`` first: None means that a kernel covers these arguments, anything else
is a sentence. A product then runs generically on cupy. Quantizing and decoding run on the CPU
backend and come back: cupy's own kernels flush float32's subnormals to zero (they are compiled
with ``-ftz=true``), which would change bits. `CudaBackend.path` gives the same answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from extensor.backends import registry
from extensor.backends.protocol import OperandSpec, Preparation, Prepared
from extensor.backends.unsupported import Unsupported
from extensor.quant import reference
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.optimizer import optimizer
from extensor_cuda.kernels.quantize import dequantize
from extensor_cuda.kernels.quantize import float_scaled as floats
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize import rowwise_columnwise as pair
from extensor_cuda.matmul.prepare import prepare, run_batch
from extensor_cuda.matmul.product import FallbackCounter, Product, product, values_of
from extensor_cuda.matmul.stored import block_scaled_matmul
from extensor_cuda.matmul.weight_only import weight_only_matmul
from extensor_cuda.quantize import fake_quantize_rebased, input_gap
from extensor_cuda.runtime import blas
from extensor_cuda.runtime.capture import StepCapture, current_capture
from extensor_cuda.runtime.graph import CudaGraph
from extensor_cuda.runtime.memory import allocate
from extensor_cuda.training import CudaTraining

__all__ = ["CudaBackend", "make_backend"]

Array = Any
Streams = tuple[Stream | None, Stream | None]
_WAY_OUT = "it takes an NVIDIA GPU with its driver, and pip install 'extensor[cuda13]'"


def _plan_of(
    spec: QuantSpec, shape: tuple[int, ...], decoding: bool = False
) -> kernels.Plan | floats.FloatPlan | Unsupported:
    """How the quantizers' kernels take an array, or why there is none for it."""
    by_floats = spec.has_float_scales
    return (floats if by_floats else kernels).plan_of(spec, shape, decoding)


def make_backend() -> CudaBackend:
    """The CUDA backend on cupy's current device.

    Raises:
        RuntimeError: without cupy, a driver or a GPU; names what is missing and the way out.
    """
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"device 'cuda': cupy cannot be imported ({error}); {_WAY_OUT}"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"device 'cuda': no usable NVIDIA driver or GPU ({error}); {_WAY_OUT}"
        ) from error
    if not count:
        raise RuntimeError(f"device 'cuda': the driver finds no GPU; {_WAY_OUT}")
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


class CudaBackend(CudaTraining):
    """cupy, with fused quantizers and tensor-core products of blocked matrices."""

    def __init__(self, xp: Any) -> None:
        super().__init__("cuda", xp)
        self._fallbacks = FallbackCounter(xp)

    @property
    def capturing(self) -> StepCapture | None:
        """The step being recorded in this thread."""
        return current_capture()

    @staticmethod
    def _only_outside(what: str) -> None:
        """Refuse, while a step is recorded, what makes the CPU work.

        Raises:
            RuntimeError: while recording.
        """
        if current_capture() is not None:
            raise RuntimeError(
                f"capture: the step makes {what}, which a GPU cannot repeat by itself; use a "
                "recipe whose operands have kernels (backend.path says which), or no capture"
            )

    def refuse_after_fork(self) -> None:
        """Make every use of this backend in a forked child an error that says so."""
        self.xp = _Forked()

    def path(self, method: str, *args: Any) -> str:
        """Which code ``method(*args)`` takes: "fused kernel", or "host: " and the reason.

        "generic: " and the reason for what runs on cupy; "two calls: " and the reason for
        a pair that is not read once; "expanded: " and the reason for operands of a product that
        are quantized to packed storage first; "scaled kernel" for those under float scales.

        A product's way depends on the values, so that `block_scaled_matmul` (of stacks "one after
        the other: " and the reason where it is no single launch) and `weight_only_matmul` are run
        to tell: see `extensor_cuda.gemm.Product` and `extensor_cuda.weights`.

        Raises:
            ValueError: for a method that has no kernel.
        """
        if method == "block_scaled_matmul":
            done = block_scaled_matmul(*args, self.xp)
            other = "one after the other" if len(args[0].shape) == 3 else "generic"
            return done.path if isinstance(done, Product) else f"{other}: {done.reason}"
        if method == "weight_only_matmul":
            done = weight_only_matmul(*args, "float32", self.xp)
            return done.path if isinstance(done, Product) else f"generic: {done.reason}"
        if method == "prepare":
            x, *rest = args
            plan = prepare(self._ready(x), *rest, self.xp)
            return f"host: {plan.reason}" if isinstance(plan, Unsupported) else plan.path
        reasons: dict[str, Callable[..., str | None]] = {
            "quantize": self._quantize_reason,
            "fake_quantize": self._operand_reason,
            "dequantize": self._dequantize_reason,
            "quantize_rowwise_columnwise": self._pair_reason,
            "fake_quantize_rowwise_columnwise": self._pair_reason,
        }
        if method in (training := self._training_reasons()):
            reason = training[method](*args)
            return "fused kernel" if reason is None else f"generic: {reason}"
        if method not in reasons:
            products = "block_scaled_matmul", "weight_only_matmul", "prepare"
            known = ", ".join((*reasons, *training, *products))
            raise ValueError(f"path: wanted one of {known}, got {method!r}")
        reason = reasons[method](*args)
        if reason is not None and method.endswith("_columnwise"):
            return f"two calls: {reason}"
        return "fused kernel" if reason is None else f"host: {reason}"

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol. Waits for the GPU, whose counts it returns."""
        if self._quantize_reason(x, spec, stream, previous_amax):
            before = None if previous_amax is None else previous_amax.get()
            q, stats = self._host.quantize(x.get(), spec, stream, before)
            return self._here(q), stats
        plan = _plan_of(spec, tuple(x.shape))
        if isinstance(plan, floats.FloatPlan):
            return floats.quantize(self._ready(x), plan, stream, self.xp)
        assert isinstance(plan, kernels.Plan)
        return kernels.quantize(self._ready(x), plan, stream, self.xp)

    def _quantize_reason(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> str | None:
        reason = self._operand_reason(x, spec, stream)
        return reason or (None if previous_amax is None else "a running maximum")

    def fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """See the protocol. Does not wait for the GPU where a kernel covers it."""
        if spec.rebased and self._operand_reason(x, spec.replace(rebased=False), stream) is None:
            return fake_quantize_rebased(self._ready(x), spec, stream, self.xp)
        if reason := self._operand_reason(x, spec, stream):
            self._only_outside(f"{spec.format} operands on the CPU ({reason})")
            values, stats = self._host.fake_quantize(x.get(), spec, stream)
            return self.xp.asarray(values), stats
        plan = _plan_of(spec, tuple(x.shape))
        if isinstance(plan, floats.FloatPlan):
            return floats.fake_quantize(self._ready(x), plan, stream, self.xp)
        assert isinstance(plan, kernels.Plan)
        return kernels.fake_quantize(self._ready(x), plan, stream, self.xp)

    def _operand_reason(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> str | None:
        if reason := gap.reason if (gap := input_gap(x, spec, stream)) is not None else None:
            return reason
        plan = _plan_of(spec, tuple(x.shape))
        return plan.reason if isinstance(plan, Unsupported) else None

    def quantize_rowwise_columnwise(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol. Waits for the GPU, whose counts it returns."""
        if self._pair_reason(x, specs, streams):
            return super().quantize_rowwise_columnwise(x, specs, streams)
        plan = pair.pair_plan(specs, tuple(x.shape))
        assert isinstance(plan, pair.PairPlan)
        return pair.quantize(self._ready(x), plan, streams, self.xp)

    def fake_quantize_rowwise_columnwise(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol. Does not wait for the GPU where a kernel covers it."""
        if self._pair_reason(x, specs, streams):
            return super().fake_quantize_rowwise_columnwise(x, specs, streams)
        plan = pair.pair_plan(specs, tuple(x.shape))
        assert isinstance(plan, pair.PairPlan)
        return pair.fake_quantize(self._ready(x), plan, streams, self.xp)

    def _pair_reason(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> str | None:
        """Why a pair is two calls, each with a reason of its own or none."""
        for spec, stream in zip(specs, streams, strict=True):
            if reason := self._operand_reason(x, spec, stream):
                return reason
        plan = pair.pair_plan(specs, tuple(x.shape))
        return plan.reason if isinstance(plan, Unsupported) else None

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        plan = _plan_of(q.spec, q.shape, decoding=True)
        if isinstance(plan, Unsupported):
            there = {name: part.get() for name, part in q.parts.items()}
            return self.xp.asarray(self._host.dequantize(replace(q, **there), dtype))
        if isinstance(plan, floats.FloatPlan):
            return reference.narrow(floats.dequantize(q, plan, self.xp), dtype)
        return reference.narrow(dequantize.dequantize(q, plan, self.xp), dtype)

    def _dequantize_reason(self, q: QuantArray, dtype: str = "float32") -> str | None:
        plan = _plan_of(q.spec, q.shape, decoding=True)
        return plan.reason if isinstance(plan, Unsupported) else None

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol, and `extensor_cuda.matmul.stored`. Waits for the GPU."""
        done = block_scaled_matmul(a, b, self.xp)
        return done.out if done else super().block_scaled_matmul(a, b)

    def weight_only_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol, and `extensor_cuda.matmul.weight_only`, which says what waits."""
        done = weight_only_matmul(x, w, "float32", self.xp)
        return done.out if done else super().weight_only_matmul(x, w)

    def new_graph(self) -> CudaGraph:
        """See the protocol."""
        return CudaGraph(self.xp, optimizer.find_nonfinite)

    def prepare(
        self,
        x: Array,
        specs: Sequence[OperandSpec],
        streams: Sequence[Stream | None],
        work: int,
        amax_state: dict[str, Any] | None = None,
    ) -> Preparation:
        """See the protocol."""
        plan = prepare(self._ready(x), specs, streams, work, self.xp, amax_state)
        return plan or super().prepare(x, specs, streams, work, amax_state)

    def run_batch(self, preparations: Sequence[Any]) -> list[Prepared]:
        """See the protocol: one launch."""
        return run_batch(preparations, self.xp)

    def raising(self) -> AbstractContextManager[Any]:
        """See the protocol: cupy is told not to give NaN instead. Waits for the GPU."""
        import cupyx

        return cupyx.errstate(linalg="raise")

    def product(self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None) -> Array:
        """See the protocol, and `extensor_cuda.matmul.product`."""
        out = product(a, b, dtype, self.xp, bias, self._fallbacks)
        if not isinstance(out, Unsupported):
            return out
        return super().product(values_of(a, self.xp), values_of(b, self.xp), dtype, bias)

    @property
    def fallback_count(self) -> int:
        """How many products of FP8 operands ran in bfloat16; waits for the GPU."""
        return self._fallbacks.count

    @property
    def _host(self) -> Any:
        return registry.get("cpu")

    def _here(self, q: QuantArray) -> QuantArray:
        """A stored array of the CPU, on the GPU."""
        return replace(q, **{name: self.xp.asarray(part) for name, part in q.parts.items()})

    def _ready(self, x: Array) -> Array:
        """C-contiguous, in a dtype that the kernels read; float64 becomes float32 as everywhere."""
        if x.dtype.name not in kernels.INPUTS:
            x = x.astype(self.xp.float32)
        return self.xp.ascontiguousarray(x)
