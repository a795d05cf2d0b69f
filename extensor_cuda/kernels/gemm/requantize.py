"""Results of the Hopper GEMM that leave it quantized: where their codes and scales go.

The sum with its bias, activation and residual is rounded once to bfloat16, and this is quantized
along its rows, byte for byte as the row quantizer does it with what it reads back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.config import EPILOGUE_COLUMNS
from extensor_cuda.kernels.quantize.quantize import Plan, plan_of, tensor_scales

__all__ = ["Requantized", "finished", "requantized", "row_plan", "type_of"]

Array = Any


@dataclass(frozen=True, eq=False)
class Requantized:
    """Where a GEMM's result goes as codes and scales.

    Attributes:
        q: what is written, (M, N).
        tensor: what the whole tensor decides of its scales; None where it decides nothing.
    """

    q: QuantArray
    tensor: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, N)."""
        return self.q.shape


def type_of(out: Array | Requantized) -> str | QuantSpec:
    """What a GEMM's config says of where its result goes."""
    return out.q.spec if isinstance(out, Requantized) else str(out.dtype.name)


def finished(out: Array | Requantized, xp: Any) -> Array | QuantArray:
    """The result that lies there, contiguous."""
    return out.q if isinstance(out, Requantized) else xp.ascontiguousarray(out)


def row_plan(spec: QuantSpec, m: int, n: int) -> Plan | Unsupported:
    """How a result (M, N) leaves so quantized; or why it does not."""
    plan = plan_of(spec, (m, n))
    if not plan:
        return plan
    if plan.columns or plan.rows > 1:
        where = f"tile {plan.spec.tile} along axis {plan.spec.axis}"
        return Unsupported(f"{where}; the kernel has blocks of rows")
    if plan.block > EPILOGUE_COLUMNS:
        held = f"a warp holds {EPILOGUE_COLUMNS} columns of a row at once"
        return Unsupported(f"blocks of {plan.block}; {held}")
    if plan.spec.rule in E8M0_SEARCHES:
        return Unsupported(f"the {plan.spec.rule} scale rule; the kernel has those of maxima")
    if plan.spec.rounding == "stochastic":
        return Unsupported("stochastic rounding; the kernel draws no random bits")
    return Unsupported("a Hadamard transform") if plan.spec.transform else plan


def requantized(spec: QuantSpec, m: int, n: int, xp: Any, amax: Array | None = None) -> Requantized:
    """An empty result (M, N) for `gemm_sm90.gemm`, quantized along its rows.

    Its config has ``q.spec``. ``amax``, float32 of shape () on the device, is for a format with a
    scale per tensor or a window: what stands for the largest magnitude of the result, which no
    block knows; larger values saturate under NVFP4's scales.

    Raises:
        ValueError: for a spec that `row_plan` refuses, and without an amax that it needs.
    """
    plan = row_plan(spec, m, n)
    if not plan:
        raise ValueError(
            f"requantized: {plan.reason}; take the result as bfloat16 and quantize it, or change "
            f"the spec {spec}"
        )
    if plan.needs_tensor != (amax is not None):
        raise ValueError(
            f"requantized: {plan.spec.format} with scale_window={plan.spec.scale_window} "
            + ("needs" if plan.needs_tensor else "has no use for")
            + " the largest magnitude of the result as amax"
        )
    tensor = None if amax is None else tensor_scales(plan, amax, xp)
    codes, scales = (xp.empty(s, dtype=xp.uint8) for s in (plan.codes_shape, plan.scales_shape))
    whole = tensor if plan.spec.row.tensor_scale else None
    of_tensor = None if whole is None else whole[:1].reshape(())
    return Requantized(QuantArray(codes, scales, plan.spec, plan.shape, of_tensor), tensor)
