"""Gradient sums on the GPU: the generic methods' bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor.random import DeviceClock, Stream
from extensor_cuda.kernels.reduction import reduction as kernels
from tests.kernels import reduction as cases
from tests.kernels.inputs import GENERIC, assert_bytes
from tests.unit.cuda.test_compile import check_compiles

METHODS = ("block_max", "fixed_point", "add_limbs", "limb_total", "fixed_point_mean")


class ByHost:
    """A GPU's methods on arrays of the CPU, as the shared checks call them."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        method, xp = getattr(self.backend, name), self.backend.xp

        def call(*args: Any) -> Any:
            there = [xp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
            assert self.backend.path(name, *there) == "fused kernel"
            out = method(*there)
            for here, back in zip(args, there, strict=True):
                if isinstance(here, np.ndarray):
                    here[...] = back.get()
            return None if out is None else out.get()

        return call


@pytest.mark.parametrize("name", METHODS)
def test_exact_sums_have_the_generic_bytes(trainer: Any, name: str) -> None:
    getattr(cases, f"check_{name}")(ByHost(trainer))


@pytest.mark.parametrize("bits", [8, 16])
def test_mxint_is_packed_and_unpacked_to_the_generic_bytes(trainer: Any, bits: int) -> None:
    cases.check_mxint_packed(ByHost(trainer), bits)


def test_what_no_kernel_reads_runs_generically(trainer: Any) -> None:
    x = trainer.xp.asarray(np.ones(65, np.float32))[1:]
    assert trainer.path("block_max", x).startswith("generic: arrays that are strided or not")
    assert_bytes(trainer.block_max(x).get(), GENERIC.block_max(np.ones(64, np.float32)), "gap")
    packed = trainer.xp.zeros((2, 33), np.uint8)
    trainer.mxint_pack(x, 8, Stream(0, 0, 0), 0, None, packed)
    assert packed.get().any(axis=1).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_may_begin_anywhere(trainer: Any, bits: int) -> None:
    """A rank packs into its own row of what is gathered, which words may cross."""
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    rows, expected = (np.zeros((2, 12 * bits + 3), np.uint8) for _ in range(2))
    there = trainer.xp.asarray(rows)
    assert trainer.path("mxint_pack", trainer.xp.asarray(x), bits, None, 0, None, there[1:]) == (
        "fused kernel"
    )
    trainer.mxint_pack(trainer.xp.asarray(x), bits, None, 0, None, there[1:])
    GENERIC.mxint_pack(x, bits, None, 0, None, expected[1:])
    assert_bytes(there.get(), expected, bits)
    out = [trainer.xp.zeros(96, np.float32), np.zeros(96, np.float32)]
    trainer.mxint_unpack(there[1:], bits, 1.0, False, out[0])
    GENERIC.mxint_unpack(expected[1:], bits, 1.0, False, out[1])
    assert_bytes(out[0].get(), out[1], bits)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_captured_step_reads_its_number_from_the_device(trainer: Any, bits: int) -> None:
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    clock = DeviceClock(trainer.xp.asarray(np.array(3, np.uint64)))
    rows, expected = (
        trainer.xp.zeros((1, 12 * bits + 3), np.uint8),
        np.zeros((2, 12 * bits + 3), "u1"),
    )
    trainer.mxint_pack(trainer.xp.asarray(x), bits, Stream(7, 0, 2, clock=clock), 0, None, rows)
    for step in (0, 3):
        GENERIC.mxint_pack(x, bits, Stream(7, step, 2), 0, None, expected[step // 3 :][:1])
    assert_bytes(rows.get()[0], expected[1], bits)
    assert (expected[0] != expected[1]).any()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_kernel_spills(arch: str) -> None:
    for bits in (8, 16):
        check_compiles(kernels.source(bits), arch)
