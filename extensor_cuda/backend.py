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
from functools import lru_cache, partial
from typing import Any

from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.backends.unsupported import Unsupported
from extensor.optim.states import STATES
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda import (
    conv_pool,
    dense,
    expanded,
    gemm,
    grouped,
    multi_tensor,
    near,
    nn,
    operands,
    quantize,
    scaled,
    scaling,
    tuned,
    weights,
)
from extensor_cuda.dispatch import Route, routed
from extensor_cuda.kernels.optimizer import optimizer
from extensor_cuda.runtime import blas
from extensor_cuda.runtime.capture import StepCapture, current_capture
from extensor_cuda.runtime.driver import capability as _capability
from extensor_cuda.runtime.graph import CudaGraph
from extensor_cuda.runtime.memory import allocate

__all__ = ["ROUTES", "CudaBackend", "make_backend"]

Array = Any
_INSTALL = "it takes an NVIDIA GPU with its driver, and pip install 'extensor[cuda13]'"


# --- what runs where no kernel fits ---


def _on_device(backend: CudaBackend, q: QuantArray) -> QuantArray:
    """A stored array of the CPU, on the GPU."""
    return replace(q, **{name: backend.xp.asarray(part) for name, part in q.parts.items()})


def _quantize_on_host(
    backend: CudaBackend,
    gap: Unsupported,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
    previous_amax: Array | None = None,
) -> tuple[QuantArray, QuantStats]:
    before = None if previous_amax is None else previous_amax.get()
    q, stats = registry.get("cpu").quantize(x.get(), spec, stream, before)
    return _on_device(backend, q), stats


def _fake_quantize_on_host(
    backend: CudaBackend,
    gap: Unsupported,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
) -> tuple[Array, Counts]:
    if current_capture() is not None:
        raise RuntimeError(
            f"capture: the step makes {spec.format} operands on the CPU ({gap.reason}), which a "
            "GPU cannot replay by itself; use a recipe whose operands have kernels (backend.path "
            "says which), or no capture"
        )
    values, stats = registry.get("cpu").operand(x.get(), spec, stream)
    return backend.xp.asarray(values), stats


def _dequantize_on_host(
    backend: CudaBackend, gap: Unsupported, q: QuantArray, dtype: str = "float32"
) -> Array:
    there = {name: part.get() for name, part in q.parts.items()}
    return backend.xp.asarray(registry.get("cpu").dequantize(replace(q, **there), dtype))


def _grad_plus_addend(generic: Callable[..., tuple[Array, ...]]) -> Callable[..., Any]:
    """A generic gradient method, whose first result is added to an ``addend``."""

    def fallback(
        backend: CudaBackend, gap: Unsupported, *args: Any, addend: Array | None = None
    ) -> tuple[Array, ...]:
        gx, *others = generic(backend, *args)
        return (gx if addend is None else backend.add(addend, gx), *others)

    return fallback


ROUTES: dict[str, Route] = {
    # quantize
    "quantize": Route(quantize.quantize, fallback=_quantize_on_host, fallback_path="host"),
    "operand": Route(quantize.fake_quantize, fallback=_fake_quantize_on_host, fallback_path="host"),
    "dequantize": Route(quantize.dequantize, fallback=_dequantize_on_host, fallback_path="host"),
    "quantize_pair": Route(quantize.quantize_rowwise_columnwise, fallback_path="two calls"),
    "operand_pair": Route(quantize.fake_quantize_rowwise_columnwise, fallback_path="two calls"),
    "bfloat16_values": Route(nn.bfloat16_values),
    # nn
    "add": Route(nn.add),
    "add_rows": Route(nn.add_rows),
    "attention": Route(nn.attention),
    "attention_grad": Route(nn.attention_grad),
    "cast": Route(nn.cast),
    "cross_entropy": Route(nn.cross_entropy),
    "cross_entropy_grad": Route(nn.cross_entropy_grad),
    "dropout_mask": Route(nn.dropout_mask),
    "gelu": Route(nn.gelu),
    "gelu_grad": Route(nn.gelu_grad),
    "layer_norm": Route(nn.layer_norm),
    "layer_norm_grad": Route(
        nn.layer_norm_grad, fallback=_grad_plus_addend(GenericBackend.layer_norm_grad)
    ),
    "leading_sum": Route(nn.leading_sum),
    "relu": Route(nn.relu),
    "relu_grad": Route(nn.relu_grad),
    "rms_norm": Route(nn.rms_norm),
    "rms_norm_grad": Route(
        nn.rms_norm_grad, fallback=_grad_plus_addend(GenericBackend.rms_norm_grad)
    ),
    "softmax": Route(nn.softmax),
    "softmax_grad": Route(nn.softmax_grad),
    # conv_pool
    "conv2d_grad_x": Route(conv_pool.conv2d_grad_x),
    "max_pool2d": Route(conv_pool.max_pool2d),
    "max_pool2d_grad": Route(conv_pool.max_pool2d_grad),
    # optim
    "adam_each": Route(multi_tensor.adam_multi_tensor),
    "all_finite_each": Route(multi_tensor.all_finite_multi_tensor),
    "scale_each": Route(multi_tensor.scale_multi_tensor),
    "sgd_each": Route(multi_tensor.sgd_multi_tensor),
    "square_sum_each": Route(multi_tensor.square_sum_multi_tensor),
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


class CudaBackend(GenericBackend):
    """Cupy, with the kernels of `ROUTES`."""

    steps_together = frozenset(STATES)
    adding = frozenset({"layer_norm", "rms_norm"})
    bfloat16 = frozenset(
        {
            "add",
            "cross_entropy",
            "gelu_exact",
            "packed_attention",
            "relu",
            "scaled_dot_product_attention",
            "softmax",
        }
    )

    def __init__(self, xp: Any) -> None:
        super().__init__("cuda", xp)
        self._falls: Array | None = None

    @property
    def capturing(self) -> StepCapture | None:
        """The capture under way in this thread."""
        return current_capture()

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
        "two calls: " for what is not read once, "one after the other: " for a batch of products
        that is no single launch.

        The path of a product depends on values. So `block_matmul`, `block_matmul_batch` and
        `weight_matmul` are run to tell: see `extensor_cuda.gemm.Product`.

        Raises:
            ValueError: for a method that has no kernel.
        """
        if method in ROUTES:
            route = ROUTES[method]
            chosen = route.choose(self.xp, *args)
            return route.path(chosen) if chosen else f"{route.fallback_path}: {chosen.reason}"
        if method == "block_matmul":
            done = self._product(*args)
            return f"generic: {done}" if isinstance(done, str) else done.path
        if method == "block_matmul_batch":
            each = self._batched(*args)
            return f"one after the other: {each}" if isinstance(each, str) else each.path
        if method == "weight_matmul":
            made = self._weight_product(*args)
            return f"generic: {made}" if isinstance(made, str) else made[1]
        if method != "product_operands":
            products = "block_matmul", "block_matmul_batch", "weight_matmul", "product_operands"
            known = ", ".join((*ROUTES, *products))
            raise ValueError(f"path: expected one of {known}, got {method!r}")
        reason = self._product_operands_reason(*args)
        if reason is None:
            return "fused kernel"
        if self._other_reason(scaling.reason, *args) is None:
            return "scaled kernel"
        other = self._other_reason(expanded.reason, *args)
        return f"host: {other}" if other else f"expanded: {reason}"

    def block_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol. Waits for the GPU; `extensor_cuda.gemm` has the bounds."""
        done = self._product(a, b)
        return super().block_matmul(a, b) if isinstance(done, str) else done.out

    def block_matmul_batch(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol: one launch where `extensor_cuda.grouped` has it. Waits for the GPU."""
        done = self._batched(a, b)
        return super().block_matmul_batch(a, b) if isinstance(done, str) else done.out

    def weight_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol; `extensor_cuda.weights` has ways, bounds, and which of them wait."""
        done = self._weight_product(x, w)
        return super().weight_matmul(x, w) if isinstance(done, str) else done[0]

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

    def product_operands(
        self,
        x: Array,
        specs: Sequence[QuantSpec],
        streams: Sequence[Stream | None],
        work: int,
        memory: dict[str, Any] | None = None,
    ) -> list[tuple[Any, Counts]]:
        """See the protocol. Does not wait for the GPU where a kernel covers it."""
        x = quantize.readable(self.xp, x)
        if self._product_operands_reason(x, specs, streams, work):
            if self._other_reason(scaling.reason, x, specs, streams, work) is None:
                return list(scaling.make(x, specs, streams, self.xp))
            if self._other_reason(expanded.reason, x, specs, streams, work) is None:
                return list(expanded.make(x, specs, streams, self.xp))
            return super().product_operands(x, specs, streams, work, memory)
        if len(specs) == 2 and not _turned(specs[0], specs[1]):
            sides = zip(specs, streams, strict=True)
            return [operands.make(x, [spec], [stream], self.xp)[0] for spec, stream in sides]
        return list(operands.make(x, specs, streams, self.xp, memory))

    def product_operands_each(
        self,
        xs: Sequence[Array],
        specs: Sequence[QuantSpec],
        memories: Sequence[dict[str, Any]],
    ) -> list[list[tuple[Any, Counts]]]:
        """See the protocol: one launch."""
        ready = [quantize.readable(self.xp, x) for x in xs]
        return [list(made) for made in operands.make_each(ready, specs, self.xp, memories)]

    def joins_operands(self, specs: Sequence[QuantSpec]) -> bool:
        """See the protocol."""
        turned = len(specs) == 1 or _turned(specs[0], specs[1])
        return turned and operands.joinable_specs(specs)

    def dense_operands(self, x: Array, axes: Sequence[int], dtype: str, work: int) -> list[Any]:
        """See the protocol. Does not wait for the GPU."""
        if not self.keeps_dense(dtype, work):
            return super().dense_operands(x, axes, dtype, work)
        return list(dense.make(quantize.readable(self.xp, x), axes, self.xp))

    def keeps_dense(self, dtype: str, work: int) -> bool:
        """See the protocol: where the tensor cores take bfloat16."""
        hopper = _capability(self.xp.cuda.runtime.getDevice()) == "90"
        least = tuned.least_work("dense", operands.LEAST_WORK)
        return dtype == "bfloat16" and hopper and work >= least

    def keeps_operands(
        self,
        x: Array,
        specs: Sequence[QuantSpec],
        streams: Sequence[Stream | None],
        work: int,
    ) -> bool:
        """See the protocol: they are bytes where a kernel makes them."""
        return (
            self._product_operands_reason(quantize.readable(self.xp, x), specs, streams, work)
            is None
        )

    def _product_operands_reason(
        self, x: Array, specs: Sequence[QuantSpec], streams: Sequence[Stream | None], work: int
    ) -> str | None:
        capability = _capability(self.xp.cuda.runtime.getDevice())
        for spec, stream in zip(specs, streams, strict=True):
            if spec.row.element.bits == 6:
                return f"FP8 holds {spec.format}; operands made at once are MXFP4 or bfloat16"
            found = operands.reason(x, spec, work, capability)
            plain = spec.replace(rebased=False)
            if found:
                return found
            call = quantize.fake_quantize(self.xp, x, plain, stream)
            if not call:
                return call.reason
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
            gap = quantize.input_gap(x, spec, stream)
            if found or gap is not None:
                return found or (gap.reason if gap is not None else None)
        return None

    def operand_product(
        self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None
    ) -> Array:
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
        return super().operand_product(self._decoded(a), self._decoded(b), dtype, bias)

    def _decoded(self, operand: Any) -> Array:
        """The values of an operand whose other side has no kernel."""
        if isinstance(operand, (dense.Dense, expanded.Expanded, near.Square)):
            return operand.values(self.xp)
        if isinstance(operand, scaled.Side):
            return scaling.values(operand, self.xp)
        if not isinstance(operand, operands.Operand):
            return operand
        values, _ = self.operand(operand.x, operand.spec, operand.stream)
        return values if operand.spec.axis == 1 else values.T

    @property
    def fallbacks(self) -> int:
        """How many products of FP4 operands were out of FP8's window and ran in bfloat16.

        Waits for the GPU.
        """
        return 0 if self._falls is None else int(self._falls)


for _name, _route in ROUTES.items():
    setattr(CudaBackend, _name, routed(_name, _route))
