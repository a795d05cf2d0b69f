"""GPUs, links and measured rates: the figures that a plan is computed from.

Rates are those of a whole transformer block, forward and backward, so that quantizing, attention
and norms are in them. What is not measured here is marked so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["GPUS", "LINKS", "RECIPES", "Gpu", "Link", "PlanRecipe"]


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        memory: bytes that a run can use.
        bandwidth: bytes a second of its memory, as the optimizer's kernels reach it.
    """

    memory: float
    bandwidth: float


GPUS: Mapping[str, Gpu] = MappingProxyType({"h100": Gpu(76e9, 2.8e12), "h200": Gpu(136e9, 4.0e12)})
"""The two that rates were measured on. Bandwidths are 0.84 of the makers' figures (assumed)."""


@dataclass(frozen=True)
class Link:
    """What carries bytes between GPUs.

    Attributes:
        bandwidth: bytes a second of one GPU in one direction, that collectives reach.
        latency: seconds for one hop of a ring.
        hidden: the share of computing under which its collectives hide.
    """

    bandwidth: float
    latency: float
    hidden: float = 0.9


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink4": Link(0.8 * 450e9, 2e-6, hidden=0.0),
        "ib400": Link(0.8 * 50e9, 5e-6),
        "ib200": Link(0.8 * 25e9, 5e-6),
        "ethernet100": Link(0.7 * 12.5e9, 15e-6),
        "ethernet25": Link(0.7 * 3.125e9, 20e-6),
    }
)
"""One network card for each GPU. Of networks all is assumed. NVLink was measured: a step
takes as long as computing and collectives one after the other, although they run at once."""


@dataclass(frozen=True)
class PlanRecipe:
    """What a plan knows of a recipe.

    Attributes:
        rate: floating-point operations a second of a block of width 4096.
        weight: bytes of a weight as its products read it.
        saved: bytes of a layer's input kept for backward.
    """

    rate: float
    weight: float
    saved: float


RECIPES: Mapping[str, PlanRecipe] = MappingProxyType(
    {
        "bf16": PlanRecipe(605e12, 2.0, 2.0),
        "fp8_block": PlanRecipe(769e12, 1 + 4 / 128**2, 1 + 4 / 128),
        "mxfp8_rebased": PlanRecipe(837e12, 1 + 1 / 32, 1 + 1 / 32),
        "mxfp4": PlanRecipe(688e12, 0.5 + 1 / 32, 0.5 + 1 / 32),
        "mxfp4_all": PlanRecipe(819e12, 0.5 + 1 / 32, 0.5 + 1 / 32),
    }
)
"""Measured on an H200: ci/bench/results/2026-11-23-cuda-step-layers-h200.json."""
