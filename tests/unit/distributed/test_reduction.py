"""Gradient reductions, judged by Python's integers and fractions."""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extensor as et
from extensor.backends.unsupported import Unsupported
from extensor.distributed import GradientBuckets, LocalCommunicator, run_ranks
from extensor.distributed.reduction import (
    BLOCK,
    GRAD_COMM,
    Exact,
    GradientReduction,
    make_reduction,
    padded_size,
)

RANKS = (1, 2, 4, 8)


def reduced(
    name: str, grads: Sequence[np.ndarray], owners: Sequence[int], ranks: int, **how: object
) -> np.ndarray:
    """The mean of gradients, of which each rank adds those that it owns; equal on all ranks."""

    def program(comm: LocalCommunicator) -> np.ndarray:
        reduction = make_reduction(name, len(grads[0]), comm, **how)
        for grad, owner in zip(grads, owners, strict=True):
            if owner == comm.rank:
                reduction.add(grad)
        out = np.empty(len(grads[0]), np.float32)
        with np.errstate(all="ignore"):
            reduction.all_reduce(out, divisor=len(grads)).wait()
        return out

    results = run_ranks(ranks, program)
    assert len({result.tobytes() for result in results}) == 1, name
    return results[0]


def field(value: float) -> int:
    """The exponent field of a float32, 1 for zero and subnormal numbers."""
    return max(1, math.frexp(value)[1] + 126) if value else 1


def exact_means(grads: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """The means by the definition in fractions, and the units of their blocks; NaN where needed."""
    means, units = [], []
    for start in range(0, len(grads[0]), BLOCK):
        block = [grad[start : start + BLOCK].tolist() for grad in grads]
        values = [value for row in block for value in row]
        if not all(math.isfinite(value) for value in values):
            means += [math.nan] * BLOCK
            units += [math.nan] * BLOCK
            continue
        unit = Fraction(2) ** (16 * (max(field(abs(v)) for v in values) // 16) - 159)
        for place in range(BLOCK):
            total = sum(math.trunc(Fraction(row[place]) / unit) for row in block)
            mean = float(total) * float(unit) / len(grads)
            means.append(float(np.float32(mean)))
            units.append(float(unit))
    return means, units


def of_any_bits(seed: int, count: int, size: int, specials: bool) -> list[np.ndarray]:
    """Gradients: some of one magnitude, some of all float32s, some tiny."""
    rng = np.random.default_rng(seed)
    grads = []
    for _ in range(count):
        kind = rng.integers(4)
        bits = rng.integers(0, 1 << 32, size, dtype=np.uint32)
        values = bits.view(np.float32).copy()
        values[~np.isfinite(values)] = 0.0
        if kind == 0:
            values = rng.standard_normal(size).astype(np.float32)
        elif kind == 1:
            values = (rng.standard_normal(size) * 2.0 ** rng.integers(-140, 100)).astype(np.float32)
        elif kind == 2:
            values[: size // 2] = -0.0
        if specials and rng.integers(3) == 0:
            values[rng.integers(size)] = [np.nan, np.inf, -np.inf][rng.integers(3)]
        grads.append(values)
    return grads


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 9), data=st.data())
def test_exact_is_the_definition_for_any_split_and_order(
    seed: int, count: int, data: st.DataObject
) -> None:
    grads = of_any_bits(seed, count, 8 * BLOCK, specials=seed % 2 == 0)
    means, _ = exact_means(grads)
    expected = np.array(means, np.float32).tobytes()
    for ranks in RANKS:
        order = data.draw(st.permutations(range(count)))
        owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
        got = reduced("exact", [grads[i] for i in order], owners, ranks)
        assert got.tobytes() == expected, (ranks, owners)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 20))
def test_exact_loses_less_than_the_bound(seed: int, count: int) -> None:
    """Before the one rounding of the mean: 2^-9 ulp of the block's largest."""
    grads = of_any_bits(seed, count, 2 * BLOCK, specials=False)
    got = reduced("exact", grads, [0] * count, 1)
    _, units = exact_means(grads)
    for place, value in enumerate(got.tolist()):
        start = place - place % BLOCK
        largest = max(float(np.abs(grad[start : start + BLOCK]).max()) for grad in grads)
        ulp = Fraction(2) ** (field(largest) - 150)
        assert Fraction(units[place]) <= ulp / 512
        true = sum((Fraction(grad[place].item()) for grad in grads), Fraction(0)) / count
        rounding = Fraction(2) ** (field(value) - 150) / 2 * (1 + Fraction(2) ** -28)
        assert abs(Fraction(value) - true) < ulp / 512 + rounding


@pytest.mark.parametrize("late", ["writes", "adds"])
def test_float32_sums_wait_for_ranks_that_write_or_add_late(late: str) -> None:
    """In memory that all ranks read: two meetings keep one rank from reading too early."""

    def program(comm: LocalCommunicator) -> list[bool]:
        reduction = make_reduction("float32", 96 * comm.size, comm)
        assert reduction.path == "shared memory"
        shared = reduction._shared  # type: ignore[attr-defined]
        started, count = shared.meet, itertools.count()

        def meet() -> Any:
            work = started()
            work.wait()
            if late == "adds" and next(count) % 2 == 0:
                time.sleep(0.01 * comm.rank)
            return work

        shared.meet, right = meet, []
        for step in range(4):
            if late == "writes":
                time.sleep(0.01 * comm.rank)
            grads = np.random.default_rng(step).standard_normal((comm.size, reduction.size))
            grads = grads.astype(np.float32)
            room = reduction.buffer()
            room[...] = grads[comm.rank]
            reduction.add(room)
            whole = step != 2
            out = np.empty(reduction.size if whole else reduction.shard_size, np.float32)
            (reduction.all_reduce if whole else reduction.reduce_scatter)(out, 1.0).wait()
            total = functools.reduce(np.add, grads)
            part = total if whole else total.reshape(comm.size, -1)[comm.rank]
            right.append(out.tobytes() == part.tobytes())
        return right

    assert run_ranks(3, program) == [[True] * 4] * 3


def test_buckets_do_not_matter() -> None:
    """Of tensors that begin at multiples of a block, in one bucket or in two."""
    grads = of_any_bits(3, 6, 16 * BLOCK, specials=True)
    owners = [0, 1, 1, 0, 0, 1]
    for name in ("exact", "mxint8", "mxint16"):
        whole = reduced(name, grads, owners, 2)
        parts = [
            reduced(name, [grad[half] for grad in grads], owners, 2)
            for half in (slice(0, 4 * BLOCK), slice(4 * BLOCK, None))
        ]
        assert whole.tobytes() == np.concatenate(parts).tobytes(), name


def mxint_mean(grads: Sequence[np.ndarray], bits: int) -> list[float]:
    """The mean of one gradient a rank, with rounding to nearest, in fractions."""

    def encode(block: Sequence[float]) -> list[Fraction]:
        largest, units = max(abs(Fraction(v)) for v in block), 2 ** (bits - 1) - 1
        unit = Fraction(2) ** (-127 - (bits - 2))
        while largest > units * unit:
            unit *= 2
        return [round(Fraction(v) / unit) * unit for v in block]

    means = []
    for start in range(0, len(grads[0]), BLOCK):
        block = [encode(grad[start : start + BLOCK].tolist()) for grad in grads]
        sums = [sum(column, Fraction(0)) for column in zip(*block, strict=True)]
        rounded = [float(np.float32(float(total) / len(grads))) for total in sums]
        means += [float(v) for v in encode(rounded)]
    return means


@pytest.mark.parametrize("bits", [8, 16])
def test_mxint_is_the_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    grads = [
        (rng.standard_normal(8 * BLOCK) * np.exp2(rng.integers(-3, 3))).astype(np.float32)
        for _ in range(4)
    ]
    for grad in grads:
        grad[:BLOCK] *= np.float32(1e-38)  # subnormal numbers
        grad[BLOCK : 2 * BLOCK] = 127.0 / 128.0 * 2.0**20  # the largest code, and above it
        grad[BLOCK] = 2.0**20
        grad[2 * BLOCK : 3 * BLOCK] = -0.0
    got = reduced(f"mxint{bits}", grads, range(4), 4)
    assert got.tolist() == mxint_mean(grads, bits)
    assert not np.signbit(got[2 * BLOCK : 3 * BLOCK]).any()


@pytest.mark.parametrize("name", GRAD_COMM)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_all_ranks(name: str, bad: float) -> None:
    for ranks, owner in ((1, 0), (2, 1), (4, 2)):
        grads = [np.ones(4 * BLOCK, np.float32) for _ in range(ranks)]
        grads[owner][2 * BLOCK + 5] = bad
        got = reduced(name, grads, range(ranks), ranks)
        assert not np.isfinite(got[2 * BLOCK + 5])
        assert (got[: 2 * BLOCK] == 1).all()


def test_the_largest_float_is_infinite_in_mxint_alone() -> None:
    grads = [np.full(2 * BLOCK, np.finfo(np.float32).max)] * 2
    for name, finite in (("exact", True), ("float32", False), ("mxint8", False)):
        assert np.isfinite(reduced(name, grads, [0, 1], 2)).all() == finite, name


def test_error_feedback_keeps_what_rounding_leaves() -> None:
    """The sum over steps differs from the gradients' by what is still kept, on all ranks."""
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((40, 2, 4 * BLOCK)).astype(np.float32)

    def program(comm: LocalCommunicator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        reduction = make_reduction("mxint8", 4 * BLOCK, comm)
        total = np.zeros(4 * BLOCK)
        for step in steps:
            reduction.add(step[comm.rank])
            out = np.empty(4 * BLOCK, np.float32)
            reduction.all_reduce(out, 2.0).wait()
            total += out
        return total, reduction.state()

    (total, first), (_, second) = run_ranks(2, program)
    kept = (first["sent"] + second["sent"]) / 2 + np.concatenate([first["mean"], second["mean"]])
    np.testing.assert_allclose(total + kept, steps.mean(axis=1).sum(axis=0), atol=1e-4)
    without = sum(reduced("mxint8", list(step), [0, 1], 2) for step in steps)
    off = np.abs(without - steps.mean(axis=1).sum(axis=0)).mean()
    assert np.abs(kept).mean() < 0.3 * off


def test_a_skipped_step_keeps_the_remainder() -> None:
    reduction = make_reduction("mxint8", BLOCK, LocalCommunicator())
    out, grad = np.empty(BLOCK, np.float32), np.linspace(0.1, 1, BLOCK, dtype=np.float32)
    reduction.add(grad)
    reduction.all_reduce(out, 1.0).wait()
    before = {name: left.copy() for name, left in reduction.state().items()}
    assert before["sent"].any()
    with np.errstate(all="ignore"):
        reduction.add(grad * np.float32(np.inf))
        reduction.all_reduce(out, 1.0).wait()
    assert np.isnan(out).all()
    for name, left in reduction.state().items():
        assert left.tobytes() == before[name].tobytes()


def test_stochastic_rounding_is_right_on_average_and_differs_between_ranks() -> None:
    grads = [np.full(4 * BLOCK, 0.3, np.float32)] * 2
    for grad in grads:
        grad[::BLOCK] = 100.0

    def program(comm: LocalCommunicator) -> np.ndarray:
        reduction = make_reduction("mxint8", 4 * BLOCK, comm, error_feedback=False, seed=5)
        means = np.empty((300, 2 * BLOCK), np.float32)
        for step, out in enumerate(means):
            reduction.add(grads[comm.rank])
            reduction.reduce_scatter(out, 2.0, step).wait()
        return means

    means = np.concatenate(run_ranks(2, program))
    inside = np.arange(2 * BLOCK) % BLOCK != 0
    assert abs(means[:, inside].mean() - 0.3) < 0.01
    assert (means[:, inside] == 0.5).mean() > 0.1  # one rank rounded up, the other down


@pytest.mark.parametrize("name", GRAD_COMM)
def test_reduce_scatter_gives_the_parts(name: str) -> None:
    """And the bytes that are counted are those that the collectives carry."""
    grads = of_any_bits(8, 4, 8 * BLOCK, specials=False)
    grads = [np.clip(grad, -1e30, 1e30) for grad in grads]

    def program(comm: LocalCommunicator) -> tuple[np.ndarray, float]:
        counted = Counted(comm)
        reduction = make_reduction(name, 8 * BLOCK, counted)
        reduction.add(grads[comm.rank])
        out = np.empty(reduction.shard_size, np.float32)
        reduction.reduce_scatter(out, 4.0).wait()
        assert counted.bytes == reduction.wire_bytes(shards=True)
        reduction.add(grads[comm.rank])
        counted.bytes = 0.0
        reduction.all_reduce(np.empty(8 * BLOCK, np.float32), 4.0).wait()
        return out, counted.bytes / reduction.wire_bytes()

    results = run_ranks(4, program)
    assert {share for _, share in results} == {1.0}
    whole = np.concatenate([out for out, _ in results])
    expected = sum(grad.astype(np.float64) for grad in grads) / 4
    largest = np.abs(grads).max()
    assert np.abs(whole - expected).max() <= largest / 64


class Counted:
    """A communicator that counts the bytes a rank sends."""

    def __init__(self, comm: LocalCommunicator) -> None:
        self.comm, self.rank, self.size, self.bytes = comm, comm.rank, comm.size, 0.0

    def shared_rows(self, nbytes: int) -> Unsupported:
        return Unsupported("bytes are counted")

    def __getattr__(self, name: str) -> object:
        share = (self.size - 1) / self.size

        def call(send: np.ndarray, *rest: object, **options: object) -> object:
            times = {"all_reduce": 2, "all_gather": self.size}.get(name, 1)
            self.bytes += send.nbytes * times * share
            return getattr(self.comm, name)(send, *rest, **options)

        return call


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", [(3e38, 3e38), (np.inf, -np.inf)])
def test_sums_beyond_float32_warn_of_nothing(name: str, values: tuple[float, float]) -> None:
    """A rank that stopped at a warning would leave the others waiting."""

    def program(comm: LocalCommunicator) -> list[float]:
        reduction, out = make_reduction(name, 64, comm), np.empty(64, np.float32)
        for value in values:
            reduction.add(np.full(64, value if comm.rank else -value, np.float32))
        reduction.all_reduce(out, 1.0).wait()
        return [out[0]]

    assert not np.isfinite(run_ranks(2, program)).any()


def test_bytes_beside_float32() -> None:
    def program(comm: LocalCommunicator) -> dict[str, float]:
        size = padded_size(1_000_000, comm.size)
        made = {name: make_reduction(name, size, comm).wire_bytes() for name in GRAD_COMM}
        return {name: made["float32"] / each for name, each in made.items()}

    ratios = run_ranks(4, program)[0]
    assert {name: round(ratio, 2) for name, ratio in ratios.items()} == {
        "float32": 1.0, "bfloat16": 2.0, "mxint8": 3.88, "mxint16": 1.97, "exact": 0.66,
    }  # fmt: skip


def test_refusals() -> None:
    one = LocalCommunicator()
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        Exact(33, one)
    with pytest.raises(ValueError, match="mxint4"):
        make_reduction("mxint4", 32, one)
    reduction = Exact(32, one)
    for wrong in (np.zeros(32), np.zeros(31, np.float32), np.zeros((1, 32), np.float32)):
        with pytest.raises(ValueError, match="expected float32 of shape"):
            reduction.add(wrong)
    reduction.count = 1 << 15
    with pytest.raises(ValueError, match="at most 32768 micro-batches"):
        reduction.add(np.zeros(32, np.float32))
    assert isinstance(reduction, GradientReduction)


def test_the_most_micro_batches_fit() -> None:
    """32768 of the largest values: sums of 48-bit integers stay below 2^63, digits below 2^31."""
    backend = Exact(32, LocalCommunicator()).backend
    value = np.full(32, np.finfo(np.float32).max)
    anchors = np.full(1, 15, np.uint8)
    assert 32768 * int(backend.fixed_point(value, anchors)[0]) < 1 << 63
    assert 32768 * 0xFFFF < 1 << 31


@pytest.mark.parametrize("name", ["float32", "exact"])
def test_a_gradient_that_fills_its_bucket_is_not_copied(name: str) -> None:
    """And has the sum that it has beside others."""

    def program(comm: LocalCommunicator, bucket_bytes: int) -> tuple[list[bytes], list[int]]:
        layers = et.nn.Sequential(*(et.nn.Linear(8, 8, bias=False, rng=i) for i in range(3)))
        params = list(layers.parameters())
        buckets = GradientBuckets(params, comm, name, bucket_bytes)
        for part in range(2):
            x = np.random.default_rng((part, comm.rank)).standard_normal((4, 8))
            with buckets.micro_batch(last=part == 1):
                layers(et.ExTensor(x.astype(np.float32))).square().sum().backward()
        buckets.finish(0)
        grads = [np.asarray(p.grad.data).tobytes() for p in params if p.grad is not None]
        return grads, [len(bucket._flats) for bucket in buckets.buckets]

    alone = run_ranks(2, lambda comm: program(comm, 256))
    together = run_ranks(2, lambda comm: program(comm, 4096))
    assert [grads for grads, _ in alone] == [grads for grads, _ in together]
    assert alone[0][1] == [0, 0, 0] and together[0][1] == [2]


@pytest.mark.parametrize("name", ["float32", "mxint8", "exact"])
def test_what_is_read_beside_the_computation_lives_until_it_is_joined(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would give its memory to the backward pass while a lane still reads it."""
    reading: set[int] = set()
    lost: list[int] = []

    class Lanes(LocalCommunicator):
        def join(self) -> None:
            reading.clear()

    def noted(self: GradientReduction, grad: np.ndarray) -> None:
        owner = grad if grad.base is None else grad.base
        numbers.append(len(numbers))
        weakref.finalize(owner, lambda n=numbers[-1]: lost.append(n) if n in reading else None)
        reading.add(numbers[-1])
        if self.count == 1:  # the first is read again
            reading.add(numbers[-2])
        add(self, grad)

    add, numbers = GradientReduction.add, list[int]()
    monkeypatch.setattr(GradientReduction, "add", noted)
    layer = et.nn.Linear(8, 8, bias=False, rng=0)
    buckets = GradientBuckets([layer.weight], Lanes(), name, 1)
    for step in range(2):
        for part in range(3):
            with buckets.micro_batch(last=part == 2, step=step):
                layer(et.ones((4, 8))).sum().backward()
        buckets.finish(step)
    assert len(numbers) == 6 and not lost
    assert buckets.buckets[0]._read == []
