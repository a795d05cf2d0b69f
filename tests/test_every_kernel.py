"""Every kernel against the generic method it overrides.

Overrides are found by reflection; each must have cases here. Codes, scales, decoded values, counts,
copies and maxima are compared by their bytes; sums of products within the bound that holds for any
order of additions: |error| <= gamma_K * sum |a| |b|, gamma_K = K u / (1 - K u), u = 2**-24;
training steps within their stated bounds.
All of it at every instruction set this machine has, on one thread and on two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends import cpu
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Window
from extensor.formats import DIALECTS, FORMATS
from extensor.quant.array import QuantStats
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests import dense_cases

BACKEND = cpu.make_backend()
CORE = BACKEND.core
GENERIC = GenericBackend("generic", np)
LEVELS = CORE.levels() if CORE else ["numpy only"]
METHODS = [name for name in vars(GenericBackend) if not name.startswith("_")]
OVERRIDES = [n for n in METHODS if getattr(cpu.CpuBackend, n) is not getattr(GenericBackend, n)]
UNIT = 2.0**-24

Case = tuple[Any, ...]


@pytest.fixture(
    params=[(level, n) for level in LEVELS for n in (1, 2)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def backend(request: pytest.FixtureRequest) -> Iterator[cpu.CpuBackend]:
    if CORE is None:
        yield BACKEND
        return
    before = CORE.level(), CORE.threads()
    CORE.set_level(request.param[0])
    CORE.set_threads(request.param[1])
    yield BACKEND
    CORE.set_level(before[0])
    CORE.set_threads(before[1])


# --- arrays -------------------------------------------------------------------------------------


def plain(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal values over a dozen binades."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return values.astype(np.float32)


def special(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Zero blocks, NaN, infinities, signed zeros, subnormals and the ends of float32 among them."""
    rng = np.random.default_rng(seed)
    x = plain(shape, seed)
    flat = x.reshape(-1)
    if flat.size:
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 3.4e38, -3e38):
            flat[rng.integers(0, flat.size, max(1, flat.size // 150))] = value
    flat[: min(40, flat.size // 2)] = 0.0
    return x


def tiny(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Magnitudes about the smallest scale."""
    return plain(shape, seed) * np.float32(1e-38)


def ties(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Multiples of a quarter: halfway cases on every small grid."""
    return (np.random.default_rng(seed).integers(-32, 33, shape) / 4).astype(np.float32)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """In another float type; beyond float16's range there are infinities."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def misaligned(x: np.ndarray) -> np.ndarray:
    octets = np.empty(x.nbytes + 1, dtype=np.uint8)
    octets[1:] = np.frombuffer(x.tobytes(), dtype=np.uint8)
    return octets[1:].view(x.dtype).reshape(x.shape)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1],
    "transposed": lambda x: np.asfortranarray(x),
    "misaligned": misaligned,
    "read-only": read_only,
}


# --- quantizing ---------------------------------------------------------------------------------


def specs() -> Iterator[QuantSpec]:
    for name, row in FORMATS.items():
        for rule in row.scale_rules:
            yield QuantSpec(name, scale_rule=rule)
    for name in ("mxfp4", "mxfp8_e4m3", "mxint8", "mxfp6_e3m2"):
        for tile in ((1, 16), (1, 128), (16, 16), (32, 32), (1, 10), "channel", "tensor"):
            yield QuantSpec(name, tile=tile)
        yield QuantSpec(name, scale_window=3)
        yield QuantSpec(name, scale_window=0, scale_rule="rceil")
        yield QuantSpec(name, element_scale=0.75)
        yield QuantSpec(name, transform=Hadamard(16))
        yield QuantSpec(name, transform=Hadamard(128, "random", seed=9), tile=(1, 24))
    for size in (32, 64):
        yield QuantSpec("mxfp4", transform=Hadamard(size, "none"), element_scale=0.75)
    for dialect in DIALECTS:
        for name in ("mxfp4", "mxfp8_e5m2", "nvfp4"):
            yield QuantSpec(name, dialect=dialect)
    yield QuantSpec("nvfp4", tile=(16, 16))
    yield QuantSpec("nvfp4", transform=Hadamard(16))
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4"):
        for tile in ("tensor", "channel", (1, 128), (128, 128), (4, 32)):
            yield QuantSpec(name, tile=tile)
    yield QuantSpec("int8", symmetric=False)
    yield QuantSpec("int4", scale_dtype="float16")
    yield QuantSpec("mxfp4", statistic="percentile", percentile=90.0)


def quant_cases() -> Iterator[Case]:
    number = 0
    rounding = ({}, {"rounding": "stochastic"}, {"rounding": "stochastic", "rbits": 8})
    for base in specs():
        for choice in rounding:
            for shape, axis in (
                ((37, 150), 1),
                ((70, 25), 0),
                ((2, 33, 6), 1),
                ((3, 18, 40), 2),
                ((1, 1), 0),
                ((130,), 0),
            ):
                number += 1
                spec = base.replace(axis=axis, **choice)
                if len(shape) == 1 and isinstance(spec.tile, tuple) and spec.tile[0] > 1:
                    continue
                make = (plain, special, tiny, ties)[number % 4]
                stream = None
                if choice:
                    stream = Stream(0x123456789ABCDEF0 + number, number, 5, 3, axis == 0)
                dtype = ("float32", "bfloat16", "float16")[number // 4 % 3]
                yield narrow(make(shape, number), dtype), spec, stream
    shapes = ((0, 32), (4, 0), (1, 5000), (4100, 3), (300, 300), (5, 1))
    for name in ("mxfp4", "mxfp8_e4m3", "nvfp4"):
        for shape in shapes:
            for axis in (0, 1):
                yield special(shape, 1), QuantSpec(name, axis=axis), None
                random = QuantSpec(name, axis=axis, rounding="stochastic")
                yield plain(shape, 2), random, Stream(1, column=axis == 0)
        for view in VIEWS.values():
            for dtype in ("float32", "bfloat16", "float16"):
                x = narrow(special((40, 70), 3), dtype)
                yield view(x), QuantSpec(name), None
                yield view(x), QuantSpec(name, axis=0), None
        for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, ">f4"):
            x = plain((8, 70), 4).astype(dtype)
            yield x, QuantSpec(name), None


@cache
def quant_table() -> list[tuple[Case, Any, Any, Any]]:
    """Every case with what the generic methods make of it: quantize, operand, dequantize."""
    table = []
    for case in quant_cases():
        q, stats = GENERIC.quantize(*case)
        values, same = GENERIC.operand(*case)
        assert same == stats
        table.append((case, (q, stats), values, GENERIC.dequantize(q)))
    return table


def assert_bytes(got: np.ndarray, wanted: np.ndarray, what: object) -> None:
    assert got.dtype == wanted.dtype, what
    assert got.shape == wanted.shape, what
    assert got.flags.c_contiguous, what
    if got.tobytes() != wanted.tobytes():
        bits = [a.view(f"u{a.itemsize}") for a in (got, wanted)]
        at = tuple(int(i) for i in np.argwhere(bits[0] != bits[1])[0])
        raise AssertionError(f"{what}: at {at} got {got[at]!r}, wanted {wanted[at]!r}")


def check_quantize(backend: cpu.CpuBackend) -> None:
    for case, (wanted, stats), _, _ in quant_table():
        what = (case[0].shape, case[1], backend.path("quantize", *case))
        q, got = backend.quantize(*case)
        assert got == stats, what
        assert q.spec == wanted.spec, what
        assert q.shape == wanted.shape, what
        assert q.parts.keys() == wanted.parts.keys(), what
        for name, part in q.parts.items():
            assert_bytes(part, wanted.parts[name], (name, *what))


def check_operand(backend: cpu.CpuBackend) -> None:
    for case, (_, stats), wanted, _ in quant_table():
        what = (case[0].shape, case[1], backend.path("operand", *case))
        values, got = backend.operand(*case)
        assert got == stats, what
        assert_bytes(values, wanted, what)


def check_dequantize(backend: cpu.CpuBackend) -> None:
    for case, (q, _), _, wanted in quant_table():
        what = (case[0].shape, case[1], backend.path("dequantize", q))
        assert_bytes(backend.dequantize(q), wanted, what)
        for dtype in ("bfloat16", "float16"):
            assert_bytes(backend.dequantize(q, dtype), narrow(wanted, dtype), (dtype, *what))


# --- two specs on one matrix ---------------------------------------------------------------------


def pairs() -> Iterator[tuple[QuantSpec, QuantSpec]]:
    """Rows, then columns: what one reading covers, and what it leaves to two."""
    random = {"rounding": "stochastic"}
    for name in ("mxfp4", "mxfp8_e4m3", "mxfp6_e3m2", "nvfp4", "mxint8", "fp8_e4m3", "int4"):
        both = QuantSpec(name), QuantSpec(name, axis=0)
        yield both
        yield both[0].replace(**random), both[1].replace(**random)
        yield both[0], both[1].replace(**random)
    for name in ("mxfp4", "mxfp8_e5m2", "nvfp4"):
        for tile in ((16, 16), (32, 32), (1, 16), (2, 32), (5, 32), (1, 24)):
            along = QuantSpec(name, tile=tile, **random)
            yield along, QuantSpec(name, axis=0, tile=tile, **random)
            yield along.replace(rounding="nearest_even"), QuantSpec(name, axis=0)
            yield QuantSpec(name), QuantSpec(name, axis=0, tile=tile)
        for size in (16, 32, 128):
            yield QuantSpec(name), QuantSpec(name, axis=0, transform=Hadamard(size), **random)
            yield QuantSpec(name, transform=Hadamard(size)), QuantSpec(name, axis=0)
    yield QuantSpec("mxfp4", scale_window=2), QuantSpec("mxfp4", axis=0, scale_window=3)
    yield QuantSpec("mxfp4", element_scale=0.75), QuantSpec("mxfp4", axis=0, element_scale=0.75)
    yield QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3", axis=0, rbits=8, **random)
    yield QuantSpec("mxfp4", dialect="microxcaling"), QuantSpec("mxfp4", axis=0)
    yield QuantSpec("mxfp4", axis=0), QuantSpec("mxfp4")  # columns first
    yield QuantSpec("mxfp4"), QuantSpec("nvfp4")  # rows twice


Pair = tuple[np.ndarray, tuple[QuantSpec, QuantSpec], tuple[Stream | None, Stream | None]]


def pair_cases() -> Iterator[Pair]:
    shapes = ((64, 128), (37, 150), (70, 25), (1, 40), (40, 1), (200, 65), (0, 5))
    makers = (plain, special, tiny, ties)
    for number, specs in enumerate(pairs()):
        for shape in shapes:
            streams = [
                Stream(number, i, 7, column=bool(i)) if spec.rounding == "stochastic" else None
                for i, spec in enumerate(specs)
            ]
            yield makers[number % 4](shape, number), specs, (streams[0], streams[1])
    both = QuantSpec("mxfp4"), QuantSpec("mxfp4", axis=0)
    for view in VIEWS.values():
        yield view(special((70, 90), 3)), both, (None, None)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, ">f4"):
        yield plain((70, 130), 4).astype(dtype), both, (None, None)
    yield plain((2, 64, 64)), both, (None, None)  # three axes


@cache
def pair_table() -> list[tuple[Pair, Any, Any]]:
    """Every pair with what two calls of the generic methods make of it."""
    return [
        (case, GENERIC.quantize_pair(*case), GENERIC.operand_pair(*case)) for case in pair_cases()
    ]


def check_quantize_pair(backend: cpu.CpuBackend) -> None:
    for case, wanted, _ in pair_table():
        what = (case[0].shape, case[1], backend.path("quantize_pair", *case))
        for (q, stats), (q2, stats2) in zip(backend.quantize_pair(*case), wanted, strict=True):
            assert stats == stats2, what
            assert (q.spec, q.shape) == (q2.spec, q2.shape), what
            assert q.parts.keys() == q2.parts.keys(), what
            for name, part in q.parts.items():
                assert_bytes(part, q2.parts[name], (name, *what))


def check_operand_pair(backend: cpu.CpuBackend) -> None:
    for case, _, wanted in pair_table():
        what = (case[0].shape, case[1], backend.path("operand_pair", *case))
        for (got, stats), (values, stats2) in zip(backend.operand_pair(*case), wanted, strict=True):
            assert stats == stats2, what
            assert_bytes(got, values, what)


# --- blocked products (bounds, variants and special blocks: unit/backends) -----------------------


def check_product(name: str) -> Callable[[cpu.CpuBackend], None]:
    def check(backend: cpu.CpuBackend) -> None:
        for spec in (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3")):
            x = plain((7, 150), 1)
            a, b = (GENERIC.quantize(plain((n, 150), n), spec)[0] for n in (7, 40))
            left = a if name == "block_matmul" else x
            dense = GENERIC.dequantize(a) if name == "block_matmul" else x
            weights = GENERIC.dequantize(b)
            got = getattr(backend, name)(left, b)
            gamma = 154 * UNIT / (1 - 154 * UNIT)  # each side adds to the order and decoding
            bound = 2 * gamma * (np.abs(dense).astype(np.float64) @ np.abs(weights).T)
            assert (np.abs(got - getattr(GENERIC, name)(left, b)) <= bound).all(), spec

    return check


def check_operand_matmul(backend: cpu.CpuBackend) -> None:
    for m, n, k in ((70, 130, 90), (3, 4, 5)):
        a, b = (
            GENERIC.operand(plain(s, 1), QuantSpec("mxfp4", axis=1))[0] for s in ((m, k), (n, k))
        )
        down = np.ascontiguousarray(a.T).T, np.ascontiguousarray(b.T)
        for left, right in ((a, b.T), down, (a, down[1]), (down[0], b.T)):
            gamma = (k + 20) * UNIT / (1 - (k + 20) * UNIT)
            bound = 2 * gamma * (np.abs(left).astype(np.float64) @ np.abs(right))
            error = np.abs(
                backend.operand_matmul(left, right) - GENERIC.operand_matmul(left, right)
            )
            assert (error <= bound).all()


# --- windows ------------------------------------------------------------------------------------

# (N, C, H, W), O, groups, window: LeNet's first, then what a direct kernel may get wrong.
WINDOWS = (
    ((64, 1, 28, 28), 6, 1, Window((5, 5), padding=(2, 2))),
    ((64, 6, 14, 14), 16, 1, Window((5, 5))),
    ((3, 4, 11, 9), 8, 2, Window((3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
    ((2, 6, 13, 17), 6, 6, Window((3, 3), padding=(1, 1))),
    ((2, 3, 12, 40), 7, 1, Window((3, 3), stride=(1, 2), padding=(2, 3), dilation=(2, 2))),
    ((1, 4, 5, 70), 13, 1, Window((1, 1), stride=(3, 2))),
    ((1, 1, 1, 1), 1, 1, Window((1, 1))),
    ((5, 2, 6, 6), 3, 1, Window((6, 6))),
    ((9, 1, 8, 100), 2, 1, Window((2, 9), padding=(1, 4))),
    ((2, 2, 4, 4), 2, 1, Window((1, 2), padding=(2, 2))),
    ((7, 40, 4, 4), 13, 1, Window((3, 3), padding=(1, 1))),
    ((34, 5, 2, 2), 5, 5, Window((3, 3), stride=(2, 2), padding=(1, 1))),
    ((3, 2, 9, 10), 4, 2, Window((3, 3), stride=(3, 2), padding=(5, 1), dilation=(2, 3))),
    ((2, 2, 9, 9), 3, 1, Window((2, 2), stride=(4, 4), dilation=(2, 6), padding=(0, 3))),
    ((2, 30, 33, 31), 9, 1, Window((3, 3), padding=(1, 1))),
    ((0, 2, 6, 6), 3, 1, Window((3, 3))),
)


@cache
def window_arrays(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and the output's gradient."""
    shape, outputs, groups, window = WINDOWS[number]
    rng = np.random.default_rng(number)
    ho, wo = window.output_size(shape[2:])
    shapes = (
        shape,
        (outputs, shape[1] // groups, *window.kernel),
        (shape[0], outputs, ho, wo),
    )
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    return arrays[0], arrays[1], arrays[2]


@cache
def convolution(name: str, number: int) -> tuple[Case, np.ndarray, np.ndarray]:
    """The call's arguments, its value in float64 and the bound on a float32 result's error."""
    _, _, groups, window = WINDOWS[number]
    x, w, g = window_arrays(number)
    options = {
        "conv2d": ((x, w), (), w[0].size),
        "conv2d_grad_x": ((g, w), (x.shape,), w[:, 0].size // groups),
        "conv2d_grad_w": ((g, x), (w.shape,), g[:, 0].size),
    }
    (a, b), extra, terms = options[name]
    tail: tuple[Any, ...] = (*extra, window, groups)
    if name == "conv2d" and number % 2:
        tail = (*tail, plain((len(w),), number))  # a bias
    exact = getattr(GENERIC, name)(a.astype(np.float64), b.astype(np.float64), *tail)
    sizes = [np.abs(t) if isinstance(t, np.ndarray) else t for t in tail]
    total = getattr(GENERIC, name)(
        np.abs(a).astype(np.float64), np.abs(b).astype(np.float64), *sizes
    )
    gamma = (terms + 1) * UNIT / (1 - (terms + 1) * UNIT)
    return (a, b, *tail), exact, gamma * total * (1 + 1e-9)


def check_convolution(name: str) -> Callable[[cpu.CpuBackend], None]:
    def check(backend: cpu.CpuBackend) -> None:
        for number in range(len(WINDOWS)):
            case, exact, bound = convolution(name, number)
            got = getattr(backend, name)(*case)
            what = (WINDOWS[number], backend.path(name, *case))
            assert got.dtype == np.float32, what
            assert got.shape == exact.shape, what
            assert (np.abs(got - exact) <= bound).all(), what
            views = [view(case[0]) for view in VIEWS.values() if view is not VIEWS["reversed"]]
            for view in views:
                assert_bytes(getattr(backend, name)(view, *case[1:]), got, what)

    return check


def patch_specs() -> Iterator[QuantSpec]:
    """What is rounded on the way, and what goes by way of the matrix of patches."""
    for name in ("mxfp4", "mxfp8_e4m3", "mxint8", "int8", "nvfp4"):
        yield QuantSpec(name)
    yield QuantSpec("mxfp4", scale_rule="floor", tile=(1, 16))
    yield QuantSpec("mxfp4", tile="channel")


@cache
def operand_convolutions(name: str) -> list[tuple[Case, np.ndarray, QuantStats, np.ndarray]]:
    """Arguments, the generic method's sums and counts, and the bound on another order's sums."""
    made = []
    for number, (_, _, groups, window) in enumerate(WINDOWS):
        x, w, g = (a[:7] for a in window_arrays(number))  # the generic quantizer is slow
        w = window_arrays(number)[1]
        stack = (-1,) if groups == 1 else (groups, w.shape[0] // groups)
        for spec in patch_specs() if x.size else ():
            axis = -2 if name == "operand_conv2d" else -1
            spec = spec.replace(axis=axis + len(stack) + 1).resolve(len(stack) + 1)
            case: Case
            if name == "operand_conv2d":
                left, terms = w.reshape(*stack, w[0].size), w[0].size + 1
                bias = (plain((len(w),), number),) if number % 2 else ()
                case = (x, left, spec, None, w.shape, window, *bias)
            else:
                terms = g[:, 0].size
                left = np.ascontiguousarray(g.swapaxes(0, 1)).reshape(*stack, terms)
                case = (left, x, spec, None, w.shape, window)
            wanted, counted = getattr(GENERIC, name)(*case)
            sizes = [np.abs(a) if isinstance(a, np.ndarray) else a for a in case]
            total, _ = getattr(GENERIC, name)(*sizes)
            made.append((case, wanted, counted, 2 * (terms + 4) * UNIT * total + 1e-30))
    return made


def check_operand_convolution(name: str) -> Callable[[cpu.CpuBackend], None]:
    def check(backend: cpu.CpuBackend) -> None:
        for case, wanted, counted, bound in operand_convolutions(name):
            got, stats = getattr(backend, name)(*case)
            what = (case[2], case[4:6], backend.path(name, *case))
            assert stats == counted, what
            assert got.shape == wanted.shape, what
            assert (np.abs(got - wanted) <= bound).all(), what
            if CORE and case[2].row.name == "mxfp4" and case[2].tile == (1, 32):
                assert what[-1].startswith("core ("), what

    return check


POOLS = (
    Window((2, 2), stride=(2, 2)),
    Window((3, 3), stride=(2, 2), padding=(1, 1)),
    Window((2, 3), stride=(1, 2), dilation=(2, 1)),
    Window((3, 1), padding=(1, 0)),
)
POOL_SHAPES = ((33, 6, 28, 28), (40, 16, 10, 10), (2, 3, 7, 9), (1, 2, 5, 130))


def pool_input(shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct values, so that the first of equal maxima matters; NaN and -Inf among them."""
    rng = np.random.default_rng(7)
    x = rng.integers(-3, 4, shape).astype(np.float32)
    x[rng.random(shape) < 0.05] = np.nan
    x[rng.random(shape) < 0.3] = -np.inf
    x[rng.random(shape) < 0.05] = -0.0
    return x


def check_max_pool2d(backend: cpu.CpuBackend) -> None:
    for shape in POOL_SHAPES:
        x = pool_input(shape)
        for window in POOLS:
            wanted = GENERIC.max_pool2d(x, window)
            for view in (x, *(VIEWS[name](x) for name in ("strided", "misaligned", "transposed"))):
                got = backend.max_pool2d(view, window)
                assert_bytes(got[1], wanted[1], (shape, window))
                assert_bytes(got[0], wanted[0], (shape, window))


def check_max_pool2d_grad(backend: cpu.CpuBackend) -> None:
    for shape in POOL_SHAPES:
        for window in POOLS:
            _, index = GENERIC.max_pool2d(pool_input(shape), window)
            g = plain(index.shape)
            wanted = GENERIC.max_pool2d_grad(g, index, shape)
            assert_bytes(backend.max_pool2d_grad(g, index, shape), wanted, (shape, window))


# --- training steps ------------------------------------------------------------------------------
# Each: the exact value in float64 and the bound that extensor.backends.cpu_training states, or, for
# the norms, the first-order bound of its formula with any order of additions (1% for the rest).

ROWS = ((1, 1), (3, 5), (7, 16), (2, 4, 33), (40, 128), (5, 1000), (70000, 3), (3, 20001))
normal_below = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), otypes=[np.float64])


def arrays(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(shape[-1])
    return [3 * rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


Bounded = Iterator[tuple[Case, list[np.ndarray], list[np.ndarray]]]


def gelu_cases() -> Bounded:
    for x in (np.linspace(-16, 16, 50001, dtype=np.float32), *(arrays(s, 1)[0] for s in ROWS[:5])):
        wide = x.astype(np.float64)
        phi = normal_below(wide)
        relative = (wide * wide / 2 + 16) * UNIT
        exact = [wide * phi, phi]
        yield (x,), exact, [relative * np.abs(value) + 2.0**-144 for value in exact]


def gelu_grad_cases() -> Bounded:
    for (x,), (_, phi), _ in gelu_cases():
        g, below = np.cos(x), phi.astype(np.float32)
        wide = x.astype(np.float64)
        slope = wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
        bound = (wide * wide / 2 + 16) * UNIT * (below + np.abs(slope)) + 2.0**-144
        yield (g, x, below), [g * (below + slope)], [np.abs(g) * bound + 2.0**-144]


def softmax_cases() -> Bounded:
    for shape in ROWS:
        x = arrays(shape, 1)[0] * np.float32(5)
        x[0, ..., shape[-1] // 2] = -np.inf if shape[-1] > 1 else 2.0
        below = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        p = np.exp(below)
        p /= p.sum(axis=-1, keepdims=True)
        depth = np.where(p > 0, -below, 0)
        spread = depth + (p * depth).sum(axis=-1, keepdims=True) + shape[-1] + 16
        yield (x, x.ndim - 1), [p], [spread * UNIT * p + 2.0**-126]


def softmax_grad_cases() -> Bounded:
    for (x, axis), (p,), _ in softmax_cases():
        g, out = np.sin(x + 1, where=np.isfinite(x), out=np.ones_like(x)), p.astype(np.float32)
        each = g.astype(np.float64) * out
        exact = out * (g - each.sum(axis=-1, keepdims=True))
        size = np.abs(g) + np.abs(each).sum(axis=-1, keepdims=True)
        yield (g, out, axis), [exact], [(x.shape[-1] + 4) * UNIT * out * size + 2.0**-126]


def norm_cases(centred: bool) -> Bounded:
    for shape in ROWS:
        n = shape[-1]
        x = arrays(shape, 1)[0] + np.float32(2)
        weight, bias = arrays(shape[-1:], 2)
        wide, eps = x.astype(np.float64), float(np.float32(1e-3))
        mean = wide.mean(axis=-1, keepdims=True) if centred else 0.0
        rstd = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
        h = (wide - mean) * rstd
        shift = bias if centred else np.float32(0)
        off = (n + 4) * UNIT * np.abs(wide).max(axis=-1, keepdims=True) * centred
        relative = off * rstd + (n + 8) * UNIT
        bound = np.abs(weight) * (rstd * off + np.abs(h) * relative)
        bound = 1.01 * bound + 5 * UNIT * (np.abs(h * weight) + np.abs(shift))
        if centred:
            values = [h * weight + bias, mean, rstd]
            yield (x, weight, bias, eps), values, [bound, off, rstd * relative * 1.01]
        else:
            yield (x, weight, eps), [h * weight, rstd], [bound, rstd * relative * 1.01]


def norm_grad_cases(centred: bool) -> Bounded:
    for case, values, _ in norm_cases(centred):
        x, weight = case[:2]
        g = np.cos(x)
        kept = [v.astype(np.float32) for v in values[1:]]
        n, count, lead = x.shape[-1], x.size // x.shape[-1], tuple(range(x.ndim - 1))
        wide, rstd = x.astype(np.float64), kept[-1].astype(np.float64)
        mean = kept[0].astype(np.float64) if centred else np.zeros_like(rstd)
        h, e = (wide - mean) * rstd, g.astype(np.float64) * weight
        off = 3 * UNIT * (np.abs(wide) + np.abs(mean)) * rstd

        def over_row(v: np.ndarray) -> np.ndarray:
            return v.mean(axis=-1, keepdims=True)

        a, b = over_row(e) * centred, over_row(e * h)
        a_off = (n + 2) * UNIT * over_row(np.abs(e)) * centred
        b_off = over_row(np.abs(e) * off) + (n + 3) * UNIT * over_row(np.abs(e * h))
        terms = np.abs(e) + np.abs(a) + np.abs(h * b)
        exact = [rstd * (e - a - h * b), (g * h).sum(axis=lead)]
        bounds = [rstd * (a_off + np.abs(h) * b_off + off * np.abs(b) + 6 * UNIT * terms) * 1.01]
        weights = (np.abs(g) * off).sum(axis=lead)
        bounds.append(1.01 * (weights + (count + 4) * UNIT * np.abs(g * h).sum(axis=lead)))
        if centred:
            exact.append(g.astype(np.float64).sum(axis=lead))
            bounds.append((count + 4) * UNIT * 1.01 * np.abs(g).sum(axis=lead))
        yield (g, x, weight, *kept), exact, bounds


def check_bounded(name: str, cases: Callable[[], Bounded]) -> Callable[[cpu.CpuBackend], None]:
    made: list[Any] = []

    def check(backend: cpu.CpuBackend) -> None:
        made.extend([] if made else cases())
        method = getattr(backend, name)
        for case, exact, bounds in made:
            what = (name, case[0].shape, backend.path(name, *case))
            assert CORE is None or what[-1].startswith("core ("), what
            result = method(*case)
            results = result if isinstance(result, tuple) else (result,)
            for got, wanted, bound in zip(results, exact, bounds, strict=True):
                assert got.dtype == np.float32, what
                assert got.shape == wanted.shape, what
                assert (np.abs(got - wanted) <= bound).all(), what
            for view in VIEWS.values() if case[0].size < 10_000 else ():
                if view is VIEWS["reversed"]:
                    continue
                seen = method(*[view(a) if isinstance(a, np.ndarray) else a for a in case])
                for one, two in zip(
                    seen if isinstance(seen, tuple) else (seen,), results, strict=True
                ):
                    # attention's output has its heads side by side in memory
                    assert_bytes(np.ascontiguousarray(one), np.ascontiguousarray(two), what)

    return check


def check_attention_grad(backend: cpu.CpuBackend) -> None:
    for case, exact, bounds in dense_cases.attention_grad_cases():
        into = tuple(np.full(a.shape, np.nan, np.float32) for a in case[1:4])
        path = backend.path("attention_grad", *case, into)
        assert CORE is None or path.startswith("core ("), path
        backend.attention_grad(*case, into)
        for got, wanted, bound in zip(into, exact, bounds, strict=True):
            assert (np.abs(got - wanted) <= bound).all(), (case[1].shape, path)
        for view in (VIEWS["strided"], VIEWS["misaligned"], VIEWS["transposed"]):
            other = tuple(np.empty((*a.shape[:-1], a.shape[-1] + 3), np.float32) for a in into)
            parts = tuple(a[..., : b.shape[-1]] for a, b in zip(other, into, strict=True))
            seen = [view(a) if isinstance(a, np.ndarray) else a for a in case]
            backend.attention_grad(*seen, parts)
            for one, two in zip(parts, into, strict=True):
                assert_bytes(one.copy(), two, (case[1].shape, path))


FACTORS = {
    "keep": 0.999, "take1": 0.1, "keep2": 0.99, "take2": 0.01, "widen": 1.7, "eps": 1e-8,
    "rate": 0.01,
}  # fmt: skip


def check_adam(backend: cpu.CpuBackend) -> None:
    for n in (0, 1, 17, 40_000):
        weight, grad, mean, square = (plain((n,), seed) for seed in range(4))
        square = square * square
        mine, generic = ([a.copy() for a in (weight, grad, mean, square)] for _ in range(2))
        for _ in range(3):
            backend.adam(*mine, FACTORS)
            GENERIC.adam(*generic, FACTORS)
        for one, two in zip(mine, generic, strict=True):
            assert_bytes(one, two, (n, backend.path("adam", *mine, FACTORS)))
    state = [plain((34,), seed)[::2] for seed in range(4)]
    assert "strided" in backend.path("adam", *state, FACTORS) or CORE is None


def test_training_special_values(backend: cpu.CpuBackend) -> None:
    """NaN and infinity come out where the generic methods give them."""
    x = special((60, 37), 5)
    with np.errstate(all="ignore"):
        p, other = backend.softmax(x, 1), GENERIC.softmax(x, 1)
        for got, wanted in (
            *zip(backend.gelu(x), GENERIC.gelu(x), strict=True),
            (p, other),
            (backend.gelu_grad(x, x, x), GENERIC.gelu_grad(x, x, x)),
        ):
            assert (np.isnan(got) == np.isnan(wanted)).all()
            assert (np.isinf(got) == np.isinf(wanted)).all()
    for empty in (np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)):
        assert backend.gelu(empty)[0].shape == empty.shape


def test_training_kernels_do_not_depend_on_threads() -> None:
    if CORE is None:
        return
    before = CORE.threads()
    x = arrays((5000, 37), 1)[0]
    weight = arrays((37,), 1)[0]
    results = []
    for count in (1, 2, 3):
        CORE.set_threads(count)
        y, mean, rstd = BACKEND.layer_norm(x, weight, weight, 1e-5)
        gradients = BACKEND.layer_norm_grad(y, x, weight, mean, rstd)
        results.append([a.tobytes() for a in (y, mean, rstd, *gradients)])
    CORE.set_threads(before)
    assert results[0] == results[1] == results[2]


# --- layers ---------------------------------------------------------------------------------------

IMAGES = ((3, 2, 4, 4), (2, 5), (17, 3, 2, 2), (1, 2, 3, 7), (20, 9, 33, 31), (2, 40, 64, 65))


def elementwise(name: str, count: int) -> Callable[[cpu.CpuBackend], None]:
    """Same bytes as the generic method, whatever is in the arrays."""

    def check(backend: cpu.CpuBackend) -> None:
        for shape in ((0,), (1,), (5, 3), (31, 33), (300, 129)):
            made = [special(shape, seed) for seed in range(count)]
            with np.errstate(all="ignore"):
                wanted = getattr(GENERIC, name)(*made)
                what = (name, shape, backend.path(name, *made))
                assert_bytes(getattr(backend, name)(*made), wanted, what)
                for view in VIEWS.values():
                    seen = [view(a) for a in made]
                    got, wanted = (getattr(b, name)(*seen) for b in (backend, GENERIC))
                    assert_bytes(np.ascontiguousarray(got), np.ascontiguousarray(wanted), what)

    return check


def test_bfloat16_around_every_tie(backend: cpu.CpuBackend) -> None:
    """Both sides of the tie above every bfloat16, infinities and NaN among them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    x = (upper | np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_bytes(backend.bfloat16_values(x), wanted, "bfloat16")


def check_all_finite(backend: cpu.CpuBackend) -> None:
    for n in (1, 15, 16, 33, 70_000):
        x = np.full(n, np.finfo(np.float32).max)
        assert backend.all_finite(x)
        for bad in (np.nan, np.inf, -np.inf):
            for at in {0, n // 2, n - 1}:
                y = x.copy()
                y[at] = bad
                assert not backend.all_finite(y), (n, bad, at)


def channels_of(x: np.ndarray) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def across(x: np.ndarray, value: np.ndarray) -> np.ndarray:
    return value.reshape(-1, *(1,) * (x.ndim - 2)).astype(np.float64)


def channel_sum_cases() -> Bounded:
    for shape in IMAGES:
        x = arrays(shape, 1)[0]
        bound = (math.prod(shape[2:]) + 12) * UNIT * np.abs(x.astype(np.float64))
        axes = channels_of(x)
        yield (x,), [x.astype(np.float64).sum(axis=axes)], [bound.sum(axis=axes)]


def batch_norm_cases() -> Bounded:
    for shape in IMAGES:
        x = arrays(shape, 1)[0] + np.float32(2)
        weight, bias = arrays(shape[1:2], 2)
        wide, axes, eps = x.astype(np.float64), channels_of(x), float(np.float32(1e-2))
        terms = math.prod(shape[2:]) + 12
        mean, var = wide.mean(axis=axes), wide.var(axis=axes)
        rstd = 1 / np.sqrt(var + eps)
        off = terms * UNIT * np.abs(wide).mean(axis=axes)  # of the mean
        centred = wide - across(x, mean)
        # A shift of the mean adds its square alone to the variance.
        var_off = 1.01 * (terms + 4) * UNIT * (var + eps) + 2 * off * off
        relative = var_off * rstd * rstd / 2 + 4 * UNIT
        h = centred * across(x, rstd * weight)
        size = (np.abs(centred) + across(x, off)) * across(x, rstd * np.abs(weight))
        bound = 1.01 * (across(x, off * rstd * np.abs(weight)) + size * across(x, relative + UNIT))
        bound += 2 * UNIT * (np.abs(h) + across(x, np.abs(bias)))
        yield (x, weight, bias, eps), [h + across(x, bias), mean, var], [bound, off, var_off]


def batch_norm_grad_cases() -> Bounded:
    for (x, weight, _, eps), (_, mean, var), _ in batch_norm_cases():
        g, axes = np.cos(x), channels_of(x)
        mean, var = mean.astype(np.float32), var.astype(np.float32)
        wide, count = g.astype(np.float64), x.size // x.shape[1]
        terms = math.prod(x.shape[2:]) + 16
        rstd = 1 / np.sqrt(var.astype(np.float64) + eps)
        d = x.astype(np.float64) - across(x, mean)
        gb, gw = wide.sum(axis=axes), (wide * d).sum(axis=axes) * rstd
        gb_off = terms * UNIT * np.abs(wide).sum(axis=axes)
        gw_off = terms * UNIT * np.abs(wide * d).sum(axis=axes) * rstd
        slope, off = across(x, gw * rstd / count), across(x, gw_off * rstd / count)
        scale = across(x, weight * rstd)
        gx = scale * (wide - across(x, gb / count) - d * slope)
        parts = np.abs(wide) + across(x, np.abs(gb) / count) + np.abs(d * slope)
        bound = across(x, gb_off / count) + np.abs(d) * off + 8 * UNIT * parts
        bound = 1.01 * np.abs(scale) * bound
        yield (g, x, weight, mean, var, eps), [gx, gw, gb], [bound, 1.01 * gw_off, gb_off]


def check_sgd(backend: cpu.CpuBackend) -> None:
    for n in (0, 1, 17, 40_000):
        for options in ((0.1, 0.0, 0.0, False), (0.1, 0.9, 0.0, False), (0.3, 0.9, 0.01, True)):
            state = [plain((n,), seed) for seed in range(3)]
            if not options[1]:
                state[2] = None
            mine, generic = ([None if a is None else a.copy() for a in state] for _ in range(2))
            for _ in range(3):
                backend.sgd(*mine, *options)
                GENERIC.sgd(*generic, *options)
            for one, two in zip(mine, generic, strict=True):
                if one is not None:
                    assert_bytes(one, two, (n, options, backend.path("sgd", *mine, *options)))
    strided = plain((34,))[::2]
    assert (
        "strided" in backend.path("sgd", strided, strided, None, 0.1, 0.0, 0.0, False) or not CORE
    )


CHECKS: dict[str, Callable[[cpu.CpuBackend], None]] = {
    "quantize": check_quantize,
    "dequantize": check_dequantize,
    "operand": check_operand,
    "quantize_pair": check_quantize_pair,
    "operand_pair": check_operand_pair,
    "block_matmul": check_product("block_matmul"),
    "weight_matmul": check_product("weight_matmul"),
    "operand_matmul": check_operand_matmul,
    "operand_conv2d": check_operand_convolution("operand_conv2d"),
    "operand_conv2d_grad_w": check_operand_convolution("operand_conv2d_grad_w"),
    "conv2d": check_convolution("conv2d"),
    "conv2d_grad_x": check_convolution("conv2d_grad_x"),
    "conv2d_grad_w": check_convolution("conv2d_grad_w"),
    "max_pool2d": check_max_pool2d,
    "max_pool2d_grad": check_max_pool2d_grad,
    "matmul": check_bounded("matmul", dense_cases.matmul_cases),
    "attention": check_bounded("attention", dense_cases.attention_cases),
    "attention_grad": check_attention_grad,
    "gelu": check_bounded("gelu", gelu_cases),
    "gelu_grad": check_bounded("gelu_grad", gelu_grad_cases),
    "softmax": check_bounded("softmax", softmax_cases),
    "softmax_grad": check_bounded("softmax_grad", softmax_grad_cases),
    "layer_norm": check_bounded("layer_norm", lambda: norm_cases(True)),
    "layer_norm_grad": check_bounded("layer_norm_grad", lambda: norm_grad_cases(True)),
    "rms_norm": check_bounded("rms_norm", lambda: norm_cases(False)),
    "rms_norm_grad": check_bounded("rms_norm_grad", lambda: norm_grad_cases(False)),
    "adam": check_adam,
    "relu": elementwise("relu", 1),
    "relu_grad": elementwise("relu_grad", 2),
    "add": elementwise("add", 2),
    "bfloat16_values": elementwise("bfloat16_values", 1),
    "all_finite": check_all_finite,
    "channel_sum": check_bounded("channel_sum", channel_sum_cases),
    "batch_norm": check_bounded("batch_norm", batch_norm_cases),
    "batch_norm_grad": check_bounded("batch_norm_grad", batch_norm_grad_cases),
    "sgd": check_sgd,
}


def test_every_override_has_a_check() -> None:
    assert sorted(OVERRIDES) == sorted(CHECKS)


@pytest.mark.parametrize("name", OVERRIDES)
def test_kernel_equals_generic(backend: cpu.CpuBackend, name: str) -> None:
    CHECKS[name](backend)


# --- which path, and the promises beside values -------------------------------------------------


def test_most_cases_take_the_core() -> None:
    """A comparison of the generic method with itself would prove nothing."""
    if CORE is None:
        assert BACKEND.path("max_pool2d", plain((1, 1, 3, 3)), Window((2, 2))).startswith(
            "generic: "
        )
        return
    paths = [BACKEND.path("operand", *case) for case, *_ in quant_table()]
    taken = sum(path.startswith("core (") for path in paths)
    assert taken > 0.8 * len(paths)
    for name in ("conv2d", "conv2d_grad_x", "conv2d_grad_w"):
        for number in (0, 1, 3):
            assert BACKEND.path(name, *convolution(name, number)[0]).startswith("core (")


def test_path_names_the_reason() -> None:
    x = plain((2, 3, 8, 8))
    w = plain((4, 3, 3, 3))
    window = Window((3, 3))
    q, _ = GENERIC.quantize(x, QuantSpec("mxfp4", transform=Hadamard(16)))
    for reason, method, *args in (
        ("float64", "max_pool2d", x.astype(np.float64), window),
        ("empty", "conv2d", x[:0], w, window, 1),
        ("middle", "operand", x, QuantSpec("mxfp4", axis=1, tile=(4, 32))),
        ("only with statistic='running'", "quantize", x, QuantSpec("mxfp4"), None, x),
        ("Hadamard", "dequantize", q),
        ("not rows", "operand_pair", x[0, 0], (QuantSpec("mxfp4"), QuantSpec("mxfp4"))),
        ("int64", "max_pool2d_grad", x, np.zeros(x.shape, np.int64), x.shape),
    ):
        path = BACKEND.path(method, *args)
        assert path.startswith("generic: "), (reason, path)
        assert (reason if CORE else BACKEND.core_missing or reason) in path
    assert "BLAS" in BACKEND.path("matmul", plain((2, 60)), plain((60, 60))) or CORE is None
    with pytest.raises(ValueError, match="wanted one of quantize"):
        BACKEND.path("nonsense", x, x)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_grad_x", "conv2d_grad_w"])
def test_sums_do_not_depend_on_threads(backend: cpu.CpuBackend, name: str) -> None:
    """Run to run, too: what a resumed training run needs. The fixture restores the threads."""
    for number in range(len(WINDOWS)):
        case = convolution(name, number)[0]
        results = []
        for threads in (1, 2, 3, 2):
            if CORE is not None:
                CORE.set_threads(threads)
            results.append(getattr(backend, name)(*case).tobytes())
        assert len(set(results)) == 1, WINDOWS[number]


def test_infinities_stay_where_they_are(backend: cpu.CpuBackend) -> None:
    """Lanes beyond the image may hold anything; nothing of it may reach a sum."""
    window = Window((5, 5), padding=(2, 2))
    x = plain((3, 2, 9, 11))
    w = plain((4, 2, 5, 5))
    g = plain((3, 4, 9, 11))
    x[0, 0, 4, 5], x[2, 1, 8, 10], g[1, 2, 8, 10], g[0, 0, 0, 0] = np.inf, np.nan, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        for name, *case in (
            ("conv2d", x, w, window, 1),
            ("conv2d_grad_x", g, w, x.shape, window, 1),
            ("conv2d_grad_w", g, x, w.shape, window, 1),
        ):
            wanted, got = getattr(GENERIC, name)(*case), getattr(backend, name)(*case)
            assert (np.isfinite(got) == np.isfinite(wanted)).all(), name
            assert (np.isnan(got) == np.isnan(wanted)).all(), name


def test_bad_arguments_are_errors(backend: cpu.CpuBackend) -> None:
    x, w = plain((2, 3, 8, 8)), plain((4, 3, 3, 3))
    with pytest.raises(ValueError, match="does not fit"):
        backend.conv2d(x, plain((4, 3, 9, 9)), Window((9, 9)), 1)
    with pytest.raises(ValueError, match="padding only"):
        backend.max_pool2d(x, Window((1, 1), padding=(1, 1)))
    with pytest.raises(ValueError, match="needs a stream"):
        backend.operand(x, QuantSpec("mxfp4", rounding="stochastic"))
    with pytest.raises(ValueError, match="takes no stream"):
        backend.operand(x, QuantSpec("mxfp4"), Stream(1))
    with pytest.raises(TypeError, match="float array"):
        backend.quantize(np.ones((4, 4), dtype=np.int32), QuantSpec("mxfp4"))
    with pytest.raises((ValueError, IndexError), match=r"outside the image|out of bounds"):
        backend.max_pool2d_grad(x, np.full(x.shape, 1000, np.int32), x.shape)
    assert w.shape == (4, 3, 3, 3)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTENSOR_CORE", "0")
    off = cpu.make_backend()
    assert off.path("max_pool2d", plain((1, 1, 3, 3)), Window((2, 2))) == "generic: EXTENSOR_CORE=0"

    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setenv("EXTENSOR_CORE", "1")
    monkeypatch.setattr(cpu.importlib, "import_module", missing)
    monkeypatch.setenv("EXTENSOR_REQUIRE_CORE", "0")
    assert "not built" in cpu.make_backend().core_missing
    monkeypatch.setenv("EXTENSOR_REQUIRE_CORE", "1")
    with pytest.raises(RuntimeError, match="EXTENSOR_REQUIRE_CORE=1"):
        cpu.make_backend()
