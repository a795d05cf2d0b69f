"""The CUDA backend: cupy's arrays, and kernels compiled for the GPU at hand.

Each override asks ``reason`` first: None means that a kernel covers these arguments, anything else
is a sentence. A product then runs generically on cupy. Quantizing and decoding run on the CPU
backend and come back: cupy's own kernels flush float32's subnormals to zero (they are compiled
with ``-ftz=true``), which would change bits. `CudaBackend.path` gives the same answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from extensor.backends import registry
from extensor.backends.protocol import CastSpec, OperandSpec, Preparation, Prepared
from extensor.quant import reference
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda import (
    dense,
    expanded,
    gemm,
    grouped,
    near,
    operands,
    scaled,
    scaling,
    tuned,
    weights,
)
from extensor_cuda.kernels.optimizer import optimizer
from extensor_cuda.kernels.quantize import dequantize, float_scaled, rowwise_columnwise
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.runtime import blas
from extensor_cuda.runtime.capture import StepCapture, current_capture
from extensor_cuda.runtime.driver import capability as _capability
from extensor_cuda.runtime.graph import CudaGraph
from extensor_cuda.runtime.memory import allocate
from extensor_cuda.training import CudaTraining

__all__ = ["CudaBackend", "make_backend"]

Array = Any
Streams = tuple[Stream | None, Stream | None]
_WAY_OUT = "it takes an NVIDIA GPU with its driver, and pip install 'extensor[cuda13]'"


@lru_cache(maxsize=1024)
def dialect_gap(spec: QuantSpec) -> str | None:
    """What of the dialect no kernel covers, so that the CPU runs it; None if nothing."""
    dialect = spec.dialect_row
    gaps = {
        f"zeros' signs of dialect {dialect.name}": spec.row.element.is_float
        and spec.zero_sign != "kept",
        f"special blocks of dialect {dialect.name}": spec.is_mx
        and (dialect.mx_inf_byte is None or dialect.mx_least_divisor != -127),
        f"the order of operations of dialect {dialect.name}": spec.rule == "amax"
        and spec.row.tensor_scale
        and dialect.nvfp4_order != "transformer_engine",
    }
    return next((phrase for phrase, open_ in gaps.items() if open_), None)


def _plan_of(
    spec: QuantSpec, shape: tuple[int, ...], decoding: bool = False
) -> kernels.Plan | float_scaled.FloatPlan | str:
    """How the quantizers' kernels take an array, or why there is none for it."""
    by_floats = spec.has_float_scales
    return (float_scaled if by_floats else kernels).plan_of(spec, shape, decoding)


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


@lru_cache(maxsize=1024)
def _turned(first: QuantSpec, second: QuantSpec) -> bool:
    """Whether two specs differ in their axis alone."""
    return first.replace(axis=second.axis) == second


class _Forked:
    """Stands for the array module in a process forked after CUDA started."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"device 'cuda': {name} was asked for in a process forked after CUDA started, which "
            "CUDA does not survive; start workers with multiprocessing's 'spawn' method"
        )


@dataclass(frozen=True, eq=False)
class _Preparation:
    """See `extensor.backends.protocol.Preparation`."""

    run: Callable[[], Prepared]
    compact: bool = False
    batch_key: Hashable | None = None
    source: Any = None


class CudaBackend(CudaTraining):
    """cupy, with fused quantizers and tensor-core products of blocked matrices."""

    def __init__(self, xp: Any) -> None:
        super().__init__("cuda", xp)
        self._falls: Array | None = None

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
        if method == "block_scaled_matmul" and len(args[0].shape) == 3:
            each = self._batched(*args)
            return f"one after the other: {each}" if isinstance(each, str) else each.path
        if method == "block_scaled_matmul":
            done = self._product(*args)
            return f"generic: {done}" if isinstance(done, str) else done.path
        if method == "weight_only_matmul":
            made = self._weight_product(*args)
            return f"generic: {made}" if isinstance(made, str) else made[1]
        reasons: dict[str, Callable[..., str | None]] = {
            "quantize": self._quantize_reason,
            "fake_quantize": self._operand_reason,
            "dequantize": self._dequantize_reason,
            "prepare": self._product_operands_reason,
            "quantize_rowwise_columnwise": self._pair_reason,
            "fake_quantize_rowwise_columnwise": self._pair_reason,
        }
        if method in (training := self._training_reasons()):
            reason = training[method](*args)
            return "fused kernel" if reason is None else f"generic: {reason}"
        if method not in reasons:
            products = "block_scaled_matmul", "weight_only_matmul"
            known = ", ".join((*reasons, *training, *products))
            raise ValueError(f"path: wanted one of {known}, got {method!r}")
        reason = reasons[method](*args)
        if reason is not None and method.endswith("_pair"):
            return f"two calls: {reason}"
        if reason is not None and method == "prepare":
            if self._other_reason(scaling.reason, *args) is None:
                return "scaled kernel"
            other = self._other_reason(expanded.reason, *args)
            return f"host: {other}" if other else f"expanded: {reason}"
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
        if isinstance(plan, float_scaled.FloatPlan):
            return float_scaled.quantize(self._ready(x), plan, stream, self.xp)
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
            return near.operand(self._ready(x), spec, stream, self.xp)
        if reason := self._operand_reason(x, spec, stream):
            self._only_outside(f"{spec.format} operands on the CPU ({reason})")
            values, stats = self._host.fake_quantize(x.get(), spec, stream)
            return self.xp.asarray(values), stats
        plan = _plan_of(spec, tuple(x.shape))
        if isinstance(plan, float_scaled.FloatPlan):
            return float_scaled.operand(self._ready(x), plan, stream, self.xp)
        assert isinstance(plan, kernels.Plan)
        return kernels.operand(self._ready(x), plan, stream, self.xp)

    def _operand_reason(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> str | None:
        if reason := self._input_reason(x, spec, stream) or dialect_gap(spec):
            return reason
        plan = _plan_of(spec, tuple(x.shape))
        return plan if isinstance(plan, str) else None

    def quantize_rowwise_columnwise(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol. Waits for the GPU, whose counts it returns."""
        if self._pair_reason(x, specs, streams):
            return super().quantize_rowwise_columnwise(x, specs, streams)
        plan = rowwise_columnwise.pair_plan(specs, tuple(x.shape))
        assert isinstance(plan, rowwise_columnwise.PairPlan)
        return rowwise_columnwise.quantize(self._ready(x), plan, streams, self.xp)

    def fake_quantize_rowwise_columnwise(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol. Does not wait for the GPU where a kernel covers it."""
        if self._pair_reason(x, specs, streams):
            return super().fake_quantize_rowwise_columnwise(x, specs, streams)
        plan = rowwise_columnwise.pair_plan(specs, tuple(x.shape))
        assert isinstance(plan, rowwise_columnwise.PairPlan)
        return rowwise_columnwise.operand(self._ready(x), plan, streams, self.xp)

    def _pair_reason(
        self, x: Array, specs: tuple[QuantSpec, QuantSpec], streams: Streams = (None, None)
    ) -> str | None:
        """Why a pair is two calls, each with a reason of its own or none."""
        for spec, stream in zip(specs, streams, strict=True):
            if reason := self._operand_reason(x, spec, stream):
                return reason
        plan = rowwise_columnwise.pair_plan(specs, tuple(x.shape))
        return plan if isinstance(plan, str) else None

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        plan = _plan_of(q.spec, q.shape, decoding=True)
        if isinstance(plan, str):
            there = {name: part.get() for name, part in q.parts.items()}
            return self.xp.asarray(self._host.dequantize(replace(q, **there), dtype))
        if isinstance(plan, float_scaled.FloatPlan):
            return reference.narrow(float_scaled.dequantize(q, plan, self.xp), dtype)
        return reference.narrow(dequantize.dequantize(q, plan, self.xp), dtype)

    def _dequantize_reason(self, q: QuantArray, dtype: str = "float32") -> str | None:
        plan = _plan_of(q.spec, q.shape, decoding=True)
        return plan if isinstance(plan, str) else None

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol. Waits for the GPU; `extensor_cuda.gemm` has the bounds.

        Stacks are one launch where `extensor_cuda.grouped` has it.
        """
        done = self._batched(a, b) if len(a.shape) == 3 else self._product(a, b)
        return super().block_scaled_matmul(a, b) if isinstance(done, str) else done.out

    def weight_only_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol; `extensor_cuda.weights` has ways, bounds, and which of them wait."""
        done = self._weight_product(x, w)
        return super().weight_only_matmul(x, w) if isinstance(done, str) else done[0]

    def _weight_product(self, x: Array, w: QuantArray) -> tuple[Array, str] | str:
        """The product of packed weights and the way it was taken, or why there is none."""
        capability = _capability(self.xp.cuda.runtime.getDevice())
        return weights.reason(x, w, capability) or weights.product(x, w, "float32", self.xp)

    def _product(self, a: QuantArray, b: QuantArray) -> gemm.Product | str:
        """The product on the tensor cores, or why there is none."""
        capability = _capability(self.xp.cuda.runtime.getDevice())
        return gemm.reason(a, b, capability) or gemm.matmul(a, b, self.xp)

    def _batched(self, a: QuantArray, b: QuantArray) -> gemm.Product | str:
        """The products of a batch in one launch, or why there is none."""
        return grouped.batch(a, b, self.xp)

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
        if isinstance(specs[0], CastSpec):
            if not self._casts(specs[0].dtype, work):
                return super().prepare(x, specs, streams, work, amax_state)
            axes = [spec.axis for spec in specs]
            return _Preparation(
                lambda: [(made, None) for made in dense.make(self._ready(x), axes, self.xp)],
                compact=True,
            )
        quant = [spec for spec in specs if isinstance(spec, QuantSpec)]
        x = self._ready(x)
        if self._product_operands_reason(x, quant, streams, work):
            for module in (scaling, expanded):
                if self._other_reason(module.reason, x, quant, streams, work) is None:
                    return _Preparation(partial(module.make, x, quant, streams, self.xp))
            return super().prepare(x, quant, streams, work, amax_state)
        turned = len(quant) == 1 or _turned(quant[0], quant[1])
        if not turned:
            sides = list(zip(quant, streams, strict=True))
            return _Preparation(
                lambda: [operands.make(x, [spec], [stream], self.xp)[0] for spec, stream in sides],
                compact=True,
            )
        joins = operands.joinable_specs(quant)
        return _Preparation(
            lambda: list(operands.make(x, quant, streams, self.xp, amax_state)),
            compact=True,
            batch_key=(x.dtype.name, *quant) if joins else None,
            source=(x, quant, {} if amax_state is None else amax_state),
        )

    def run_batch(self, preparations: Sequence[Preparation]) -> list[Prepared]:
        """See the protocol: one launch."""
        sources = [one.source for one in preparations if isinstance(one, _Preparation)]
        xs, specs, states = zip(*sources, strict=True)
        return [list(made) for made in operands.make_each(xs, specs[0], self.xp, states)]

    def raising(self) -> AbstractContextManager[Any]:
        """See the protocol: cupy is told not to give NaN instead. Waits for the GPU."""
        import cupyx

        return cupyx.errstate(linalg="raise")

    def _casts(self, dtype: str, work: int) -> bool:
        """Whether the tensor cores take operands that are rounded to a dtype."""
        hopper = _capability(self.xp.cuda.runtime.getDevice()) == "90"
        least = tuned.least_work("dense", operands.LEAST_WORK)
        return dtype == "bfloat16" and hopper and work >= least

    def _product_operands_reason(
        self, x: Array, specs: Sequence[QuantSpec], streams: Sequence[Stream | None], work: int
    ) -> str | None:
        capability = _capability(self.xp.cuda.runtime.getDevice())
        for spec, stream in zip(specs, streams, strict=True):
            if spec.row.element.bits == 6:
                return f"FP8 holds {spec.format}; operands made at once are MXFP4 or bfloat16"
            found = operands.reason(x, spec, work, capability)
            plain = spec.replace(rebased=False)
            if reason := found or self._operand_reason(x, plain, stream):
                return reason
        return None

    def _other_reason(
        self,
        reason_of: Callable[[Array, QuantSpec, int, str], str | None],
        x: Array,
        specs: Sequence[QuantSpec],
        streams: Sequence[Stream | None],
        work: int,
    ) -> str | None:
        """Why operands are not made the second way, through storage, or the third, under floats."""
        capability = _capability(self.xp.cuda.runtime.getDevice())
        for spec, stream in zip(specs, streams, strict=True):
            found = reason_of(x, spec, work, capability)
            gap = self._input_reason(x, spec, stream) or dialect_gap(spec)
            if reason := found or gap:
                return reason
        return None

    def product(self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None) -> Array:
        """See the protocol; `extensor_cuda.operands` has the ways, `fallbacks` what was taken."""
        xp, kind = self.xp, "bfloat16" if dtype == "bfloat16" else "float32"
        bias = None if bias is None else xp.ascontiguousarray(bias)  # kernels read it in order
        if isinstance(a, dense.Dense) and isinstance(b, dense.Dense):
            return dense.multiply(a, b, kind, xp, bias)
        if self._falls is None:
            self._falls = xp.zeros((), dtype=xp.uint32)
        if isinstance(a, operands.Operand) and isinstance(b, operands.Operand):
            return operands.multiply(a, b, kind, xp, self._falls, bias)
        if isinstance(a, near.Square) and isinstance(b, near.Square):
            return near.multiply(a, b, kind, xp, bias)
        if expanded.joinable(a, b):
            return expanded.multiply(a, b, kind, xp, self._falls, bias)
        if scaled.joinable(a, b):
            return scaled.multiply(a, b, kind, xp, bias)[0]
        return super().product(self._decoded(a), self._decoded(b), dtype, bias)

    def _decoded(self, operand: Any) -> Array:
        """The values of an operand whose other side has no kernel."""
        if isinstance(operand, (dense.Dense, expanded.Expanded, near.Square)):
            return operand.values(self.xp)
        if isinstance(operand, scaled.Side):
            return scaling.values(operand, self.xp)
        if not isinstance(operand, operands.Operand):
            return operand
        values, _ = self.fake_quantize(operand.x, operand.spec, operand.stream)
        return values if operand.spec.axis == 1 else values.T

    @property
    def fallbacks(self) -> int:
        """How many products of FP4 operands were out of FP8's window and ran in bfloat16.

        Waits for the GPU.
        """
        return 0 if self._falls is None else int(self._falls)

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
