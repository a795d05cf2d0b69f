"""Attention in bfloat16 on tensor cores: within its bounds of float64, the same bits each time."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.autograd.tensor import wrap
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import AttentionForward
from extensor_cuda.kernels.attention import attention as kernels
from extensor_cuda.runtime.compile import compile_cubin
from tests.unit.cuda import hopper as emulated
from tests.unit.cuda.emulator import Cupy, Emulated
from tests.unit.cuda.fields import check_fields
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import properties

BFLOAT16 = ml_dtypes.bfloat16
ROUNDING, UNIT = 2.0**-8, 2.0**-22
PROGRAMS = [(kernel, d) for kernel in kernels.KERNELS for d in kernels.HEADS]


class Case(NamedTuple):
    """B, H, Hkv, T, S, d, causal, and what the queries are multiplied by."""

    batch: int
    heads: int
    shared: int
    queries: int
    keys: int
    d: int
    causal: bool
    large: float = 1.0


SMALL = (
    Case(1, 2, 1, 70, 200, 64, True),
    Case(2, 1, 1, 130, 130, 64, True),
    Case(1, 2, 2, 40, 70, 64, False, 30.0),
    Case(1, 2, 1, 130, 140, 128, True, 4.0),
    Case(1, 1, 1, 5, 131, 128, False),
)
LARGE = (
    Case(2, 8, 8, 1024, 1024, 64, True),
    Case(2, 8, 2, 1000, 1300, 64, True),
    Case(3, 4, 4, 513, 640, 64, False, 8.0),
    Case(2, 23, 23, 520, 520, 64, True),
    Case(2, 8, 8, 1024, 1024, 128, True),
    Case(2, 8, 2, 777, 1025, 128, True, 4.0),
    Case(1, 6, 3, 1, 2000, 128, False),
    Case(2, 34, 17, 300, 520, 128, True),
    Case(20, 8, 4, 200, 129, 128, False),
)


@pytest.fixture(params=PLACES)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a Hopper GPU, or of the kernels' source on the CPU."""
    return place(request, monkeypatch, ())


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("kernel", "d"), PROGRAMS)
def test_no_kernel_spills_or_serialises(kernel: str, d: int) -> None:
    code, log = compile_cubin(kernels.source(kernel, d), "sm_90a")
    assert "warning" not in log.lower() and "C75" not in log, log
    assert all(numbers["stack"] == 0 for numbers in properties(code).values())


def test_the_problems_fields_lie_where_the_kernels_read_them(tmp_path: Path, compiler: str) -> None:
    text = kernels.source(kernels.KERNELS[0], 64).text
    check_fields(text, "Problem", kernels._parameters(), compiler, tmp_path)


def side_by_side(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays (B, heads, T, d) as one (B, T, all heads, d), as a projection gives them."""
    return np.concatenate([a.swapaxes(1, 2) for a in parts], axis=2)


def packed(parts: list[np.ndarray], xp: Any) -> list[Any]:
    """The same on the device as views of that one."""
    held = xp.asarray(side_by_side(parts))
    ends = np.cumsum([0, *(a.shape[1] for a in parts)])
    return [held[:, :, a:b].swapaxes(1, 2) for a, b in pairwise(ends)]


def inputs(case: Case, seed: int = 0) -> list[np.ndarray]:
    """g, q, k and v, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    b, h, groups, t, s, d, *_ = case
    shapes = ((b, h, t, d), (b, h, t, d), (b, groups, s, d), (b, groups, s, d))
    made = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    made[1] *= case.large
    return [a.astype(BFLOAT16) for a in made]


def placed(case: Case, arrays: list[np.ndarray], xp: Any) -> list[Any]:
    """The same on the device, as views: q, k, v side by side where their lengths are equal."""
    g, q, k, v = arrays
    if case.queries == case.keys:
        return [packed([g], xp)[0], *packed([q, k, v], xp)]
    return [packed([g], xp)[0], packed([q], xp)[0], *packed([k, v], xp)]


def run(case: Case, there: list[Any], xp: Any) -> tuple[Any, ...]:
    """Result, statistics and gradients, written to views."""
    g, q, k, v = there
    scale = case.d**-0.5
    out, stats = kernels.attention(q, k, v, case.causal, scale, xp)
    into = [xp.empty((*a.swapaxes(1, 2).shape,), BFLOAT16).swapaxes(1, 2) for a in (q, k, v)]
    forward = AttentionForward(q, k, v, out, stats, case.causal, scale)
    kernels.attention_grad(g, forward, (into[0], into[1], into[2]), xp)
    return out, stats, *into


def bits(a: Any) -> np.ndarray:
    """An array's bits, on the host."""
    whole = np.asarray(a.view(np.uint16 if a.dtype == BFLOAT16 else np.uint32).get())
    return np.ascontiguousarray(whole)


def wide(a: Any) -> np.ndarray:
    """Bfloat16 as float64, on the host."""
    return bits(a).view(BFLOAT16).astype(np.float64)


def exact(case: Case, arrays: list[np.ndarray], out: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """In float64: the result, and the gradients given the one computed; each with its bound."""
    g, q, k, v = (a.astype(np.float64) for a in arrays)
    scale, shared = case.d**-0.5, case.heads // case.shared
    k, v = (a.repeat(shared, axis=1) for a in (k, v))

    def transposed(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(-1, -2)

    def grouped(a: np.ndarray) -> np.ndarray:
        return a.reshape(case.batch, case.shared, shared, *a.shape[2:]).sum(axis=2)

    scores = scale * (q @ transposed(k))
    if case.causal:
        seen = np.tri(case.queries, case.keys, case.keys - case.queries, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    size = (scale * (np.abs(q) @ transposed(np.abs(k)))).max(axis=-1, keepdims=True)
    e = UNIT * (case.d + 4) * (1 + size) + case.keys * UNIT / 2
    moved = g @ transposed(v) - (g * out).sum(axis=-1, keepdims=True)
    ds = p * moved
    largest = np.abs(g) @ transposed(np.abs(v)) + (np.abs(g) * np.abs(out)).sum(
        axis=-1, keepdims=True
    )
    error = np.abs(ds) * (2 * ROUNDING + 2 * e) + p * UNIT * (case.d + 4) * largest
    gq, gk, gv = scale * (ds @ k), grouped(scale * (transposed(ds) @ q)), grouped(transposed(p) @ g)
    return [
        (p @ v, (2 * ROUNDING + e) * p @ np.abs(v)),
        (gq, scale * (error @ np.abs(k)) + ROUNDING * np.abs(gq)),
        (gk, grouped(scale * (transposed(error) @ np.abs(q))) + ROUNDING * np.abs(gk)),
        (gv, grouped(transposed(p * (ROUNDING + e)) @ np.abs(g)) + ROUNDING * np.abs(gv)),
    ]


def check(case: Case, xp: Any) -> None:
    """Result and gradients within their bounds; says where they are not."""
    arrays = inputs(case)
    out, stats, *grads = run(case, placed(case, arrays, xp), xp)
    assert stats.shape[2] % 128 == 0 and np.isinf(stats.get()[..., case.queries :]).all()
    mine = [wide(a) for a in (out, *grads)]
    failed = []
    for name, got, (expected, bound) in zip(
        ("out", "gq", "gk", "gv"), mine, exact(case, arrays, mine[0]), strict=True
    ):
        ratio = np.abs(got - expected) / (1.02 * bound + 1e-30)
        worst = np.unravel_index(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)), ratio.shape)
        text = f"{name} {ratio[worst]:.3f} of its bound at {tuple(map(int, worst))}"
        print(case, text)
        bad = np.argwhere(~(ratio <= 1))
        if len(bad):
            failed.append(
                f"{text}: {len(bad)} of {ratio.size} beyond, first {bad[0]}, last {bad[-1]}, "
                f"got {got[worst]}, expected {expected[worst]} within {bound[worst]}"
            )
    assert not failed, f"{case}: " + "; ".join(failed)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_attention_is_within_its_bounds(
    hopper: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with programs whose barriers end in an error where they would wait forever."""
    monkeypatch.setattr(kernels, "source", partial(kernels.source, guard=True))
    check(case, hopper)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_attention_is_within_its_bounds(hopper_gpu: Any, case: Case) -> None:
    check(case, hopper_gpu.xp)


def test_the_bounds_are_narrow() -> None:
    """What ignores the mask's last key, or one key in a hundred, is beyond them."""
    case = Case(1, 1, 1, 100, 100, 64, True)
    arrays = inputs(case)
    out, _ = GenericBackend("cpu", np).attention(
        *(a.astype(np.float64) for a in arrays[1:]), True, 0.125
    )
    for wrong in (np.arange(100) != 50, np.arange(100) < 99):
        parts = [arrays[1], *(a[:, :, wrong] for a in arrays[2:])]
        less, _ = GenericBackend("cpu", np).attention(
            *(a.astype(np.float64) for a in parts), False, 0.125
        )
        (expected, bound), *_ = exact(case, arrays, out)
        assert (np.abs(less - expected)[:, :, -1] > 1.02 * bound[:, :, -1]).any()


def test_two_runs_give_the_same_bits(hopper: Any) -> None:
    case = SMALL[0] if isinstance(hopper, Cupy) else LARGE[1]
    there = placed(case, inputs(case), hopper)
    first, second = (run(case, there, hopper) for _ in range(2))
    for name, a, b in zip(("out", "stats", "gq", "gk", "gv"), first, second, strict=True):
        assert (bits(a) == bits(b)).all(), name


@pytest.mark.parametrize("blocks", [1, 7])
def test_the_number_of_blocks_changes_no_bit(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """One block and two take pairs of tiles, seven take single ones."""
    case = Case(1, 2, 1, 140, 260, 64, True)
    found = []
    for count in (2, blocks):
        xp = emulated.install(monkeypatch, emulator, count)
        found.append([bits(a).tobytes() for a in run(case, placed(case, inputs(case), xp), xp)])
    assert found[0] == found[1]


def test_what_is_not_finite_stays_in_its_row(hopper: Any) -> None:
    case = Case(1, 1, 1, 70, 70, 64, True)
    arrays = inputs(case)
    clean, *_ = run(case, placed(case, arrays, hopper), hopper)
    arrays[1][0, 0, 3, 5], arrays[1][0, 0, 8, 5] = np.nan, np.inf
    got, *_ = run(case, placed(case, arrays, hopper), hopper)
    bad = [3, 8]
    assert np.isnan(wide(got)[0, 0, bad]).all()
    same = wide(got) == wide(clean)
    same[0, 0, bad] = True
    assert same.all(), np.argwhere(~same)[:5]


def test_a_backend_takes_them_where_they_fit(hopper: Any) -> None:
    """Strides of any kind, gradients of float32, and what is said of the rest."""
    backend = Emulated("emulated", hopper)
    case = SMALL[1]
    g, q, k, v = (hopper.asarray(a) for a in inputs(case))
    scale = case.d**-0.5
    assert backend.path("attention", q, k, v, True, scale) == "fused kernel"
    out, stats = backend.attention(q, k, v, True, scale)
    side_by_side = out.swapaxes(1, 2)
    assert out.dtype == BFLOAT16 and side_by_side.flags.c_contiguous
    into = tuple(hopper.empty(a.shape, BFLOAT16) for a in (q, k, v))
    forward = AttentionForward(q, k, v, out, stats, True, scale)
    assert backend.path("attention_grad", g, forward, into) == "fused kernel"
    backend.attention_grad(g, forward, into)
    odd = [hopper.asarray(np.zeros((*a.shape[:-1], 3 * case.d), BFLOAT16)) for a in (q, k, v)]
    spaced = tuple(a[..., ::3] for a in odd)
    backend.attention_grad(g.astype(np.float32), forward, spaced)
    for a, b in zip(into, spaced, strict=True):
        assert (bits(a) == bits(b)).all()
    said = {
        "heads of 32": ((q[..., :32], k[..., :32], v[..., :32]), scale),
        "heads of 64 and 32": ((q, k, v[..., :32]), scale),
        "a scale of 0.0": ((q, k, v), 0.0),
        "arrays of bfloat16, bfloat16 and float32": ((q, k, v.astype(np.float32)), scale),
    }
    for words, (arrays, factor) in said.items():
        path = backend.path("attention", *arrays, True, factor)
        assert path.startswith(f"generic: {words}"), path


def test_packed_attention_reads_and_writes_where_things_lie(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation and its gradient in bfloat16: two calls of these kernels, nothing copied."""
    backend = Emulated("emulated", hopper)
    case = Case(2, 2, 1, 70, 70, 64, True)
    g, *arrays = inputs(case)
    copied: list[int] = []
    monkeypatch.setattr(
        kernels,
        "_readable",
        lambda given: copied.append(sum(not kernels._fits(a) for a in given)) or list(given),
    )
    x = wrap(hopper.asarray(side_by_side(arrays).reshape(2, 70, 256)), backend)
    x.requires_grad = True
    y = et.packed_attention(x, 2, 1, causal=True)
    assert y.data.dtype == BFLOAT16 and y.shape == (2, 70, 128)
    y.backward(wrap(hopper.asarray(side_by_side([g]).reshape(y.shape)), backend))
    assert copied == [0, 0] and x.grad is not None
    out, _, *grads = run(case, placed(case, [g, *arrays], hopper), hopper)
    assert (bits(y.data) == side_by_side([bits(out)]).reshape(y.shape)).all()
    assert (bits(x.grad.data) == side_by_side([*map(bits, grads)]).reshape(x.shape)).all()


def test_a_graph_repeats_both_ways(hopper_gpu: Any) -> None:
    xp, case = hopper_gpu.xp, LARGE[0]
    there = placed(case, inputs(case), xp)
    expected = run(case, there, xp)
    pool, stream = xp.cuda.MemoryPool(), xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        run(case, there, xp)
        stream.synchronize()
        stream.begin_capture()
        kept = run(case, there, xp)
        graph = stream.end_capture()
        for _ in range(2):
            for a in kept:
                a.view(np.uint16 if a.dtype == BFLOAT16 else np.uint32).fill(7)
            graph.launch()
            stream.synchronize()
            for name, a, b in zip(("out", "stats", "gq", "gk", "gv"), kept, expected, strict=True):
                assert (bits(a) == bits(b)).all(), name
