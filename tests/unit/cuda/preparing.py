"""What tests of GEMM operands share: one preparer's operands, whatever the size of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from extensor.random import Stream
from extensor_cuda.matmul import prepare

__all__ = ["CASTS", "EXPANDED", "FLOAT_SCALES", "FUSED", "batch", "gap", "made"]

CASTS, EXPANDED = prepare.BF16, prepare.EXPANDED
FLOAT_SCALES, FUSED = prepare.FLOAT_SCALES, prepare.FUSED


def made(
    preparer: prepare.Preparer,
    x: Any,
    specs: Sequence[Any],
    streams: Sequence[Stream | None],
    xp: Any,
    state: dict[str, Any] | None = None,
) -> Any:
    """Operands of x and their counts, by one preparer."""
    plans = [preparer.supports(x, spec) for spec in specs]
    assert all(plans), plans
    return preparer.run(x, plans, streams, xp, state)


def batch(xs: Sequence[Any], specs: Sequence[Any], xp: Any, states: Sequence[Any]) -> Any:
    """Operands of several matrices in one launch."""
    streams: list[Stream | None] = [None] * len(specs)
    given = [
        prepare.GemmPreparation(x, specs, streams, FUSED, "", None, state, xp)
        for x, state in zip(xs, states, strict=True)
    ]
    return prepare.run_batch(given, xp)


def gap(
    preparer: prepare.Preparer, x: Any, spec: Any, work: int = 1 << 40, capability: str = "90"
) -> str | None:
    """Why a preparer makes no operand of x; None if it does."""
    plans = prepare._plans(preparer, x, [spec], work, capability)
    return None if isinstance(plans, list) else plans.reason
