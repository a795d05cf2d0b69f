"""Gradient sums on the GPU: the generic methods' bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor.backends.protocol.reduction import PeerRows
from extensor.random import DeviceClock, Stream
from extensor_cuda.kernels.reduction import peer_barrier
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


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_may_be_in_the_memory_of_other_gpus(trainer: Any, bits: int, first: int) -> None:
    """Rows apart from each other, in any order, some not aligned; read from any of them on."""
    values = 64 * 256
    x = np.random.default_rng(0).standard_normal((3, values)).astype(np.float32)
    packed = np.zeros((3, values * bits // 8 + values // 32), np.uint8)
    for row, one in zip(packed, x, strict=True):
        GENERIC.mxint_pack(one, bits, None, 0, None, row[None])
    apart = [
        trainer.xp.asarray(np.append(np.zeros(8 + i % 2, np.uint8), packed[i])) for i in range(3)
    ]
    rows = tuple(row[8 + i % 2 :] for i, row in enumerate(apart))
    addresses = trainer.xp.asarray(np.array([row.data.ptr for row in rows], np.uint64))
    peers = PeerRows(rows, addresses, first)
    backends = ((trainer, trainer.xp, peers), (GENERIC, np, packed))
    for add, size in ((True, values), (False, 3 * values)):
        got = [xp.zeros(size, np.float32) for _, xp, _ in backends]
        for (backend, _, given), out in zip(backends, got, strict=True):
            backend.mxint_unpack(given, bits, 1.0, add, out)
        assert_bytes(got[0].get(), got[1], (bits, add))
        assert trainer.path("mxint_unpack", peers, bits, 1.0, add, got[0]) == "fused kernel"
    for divisor in (1.0, 3.0):
        again = [xp.zeros((1, packed.shape[1]), np.uint8) for _, xp, _ in backends]
        for (backend, _, given), out in zip(backends, again, strict=True):
            backend.mxint_repack(given, bits, divisor, Stream(1, 2, 3), 5, None, out)
        assert_bytes(again[0].get(), again[1], (bits, divisor))


def flags_of(xp: Any, words: np.ndarray) -> PeerRows:
    rows = tuple(xp.asarray(row.copy().view(np.uint8)) for row in words)
    addresses = np.array([getattr(row.data, "ptr", row.ctypes.data) for row in rows], np.uint64)
    return PeerRows(rows, xp.asarray(addresses))


@pytest.mark.parametrize("before", [0, 5, (1 << 32) - 1])
def test_a_barrier_of_gpus_tells_all_and_waits_for_all(trainer: Any, before: int) -> None:
    """The others are here, one is a step ahead; a word of the host ends the wait for a third."""
    words = np.zeros((3, 64), np.uint32)
    words[1, 32:35] = before
    now = (before + 1) % (1 << 32)
    for ahead in (0, 1):
        words[1, :3] = now
        words[1, 2] = (now + ahead) % (1 << 32)
        expected = words.copy()
        expected[1, 32:35] = now
        expected[:, 1] = now
        for backend, xp in ((trainer, trainer.xp), (GENERIC, np)):
            flags = flags_of(xp, words)
            backend.peer_barrier(flags, 1, np.zeros(1, np.uint32))
            got = np.stack([np.asarray(row.view(np.uint32)) for row in flags.rows])
            assert_bytes(got, expected, (backend.name, ahead))
    words[1, 0] = before
    for backend, xp in ((trainer, trainer.xp), (GENERIC, np)):
        backend.peer_barrier(flags_of(xp, words), 1, np.ones(1, np.uint32))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_kernel_spills(arch: str) -> None:
    for bits in (8, 16):
        check_compiles(kernels.source(bits), arch)
    check_compiles(peer_barrier.source(), arch)
