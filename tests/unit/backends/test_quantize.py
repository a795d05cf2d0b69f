"""The core against the generic methods for every format on every class of arrays, and from threads.

tests/kernels compares rules and options on a few shapes; here every format meets
ragged, empty, one-element, huge, strided, misaligned and read-only arrays at every instruction
set, by table and by hypothesis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extensor.backends.generic import GenericBackend
from extensor.formats import DIALECTS, ELEMENTS, FORMATS
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream, random_words
from tests.kernels.inputs import (
    BACKEND,
    GENERIC,
    LEVELS,
    assert_bytes,
    forced,
    misaligned,
    read_only,
)

F = np.float32
HUGE = 1 << 16
THREADS = 8

Answer = tuple[QuantArray, QuantStats, Any, Any]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


# --- arrays -------------------------------------------------------------------------------------


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal values over many binades, with zeros, subnormals and special values among them."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))).astype(F)
    flat = x.reshape(-1)
    for value in (0.0, -0.0, 1e-45, -1e-39, 3.4e38, np.nan, np.inf, -np.inf):
        flat[rng.integers(0, flat.size, flat.size // 300)] = value
    return x


def every_third(x: np.ndarray) -> np.ndarray:
    wide = np.full((*x.shape[:-1], 3 * x.shape[-1]), np.nan, x.dtype)
    wide[..., 1::3] = x
    return wide[..., 1::3]


VIEWS = {
    "plain": lambda x: x,
    "strided": every_third,
    "reversed": lambda x: x[::-1, ..., ::-1] if x.ndim > 1 else x[::-1],
    "Fortran": np.asfortranarray,
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "misaligned": misaligned,
    "read-only": read_only,
    "swapped bytes": lambda x: x.astype(">f4"),
}

# Class of shapes -> (shape, axis).
SHAPES: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {
    "ragged": (((7, 45), 1), ((45, 7), 0), ((3, 33, 5), 1), ((2, 3, 2, 67), 3), ((129,), 0)),
    "empty": (((0,), 0), ((0, 32), 1), ((32, 0), 1), ((4, 0), 0), ((2, 0, 32), 2)),
    "one element": (((1,), 0), ((1, 1), 0), ((1, 1, 1), 1)),
    "whole blocks": (((4, 64), 1), ((64, 16), 0)),
    "huge": (((1, HUGE + 5), 1), ((HUGE + 5,), 0), ((HUGE // 128 + 1, 129), 0)),
}


def cases(name: str, kind: str) -> Iterator[tuple[np.ndarray, QuantSpec, Stream | None]]:
    for number, (shape, axis) in enumerate(SHAPES[kind]):
        for rounding in ("nearest_even", "stochastic"):
            spec = QuantSpec(name, axis=axis, rounding=rounding)
            stream = Stream(5, number, 1, 2, axis == 0) if rounding == "stochastic" else None
            yield values(shape, number), spec, stream


def answer(backend: GenericBackend, x: Any, spec: QuantSpec, stream: Stream | None) -> Answer:
    """Everything a backend makes of one array: stored, counted, decoded, as an operand."""
    q, stats = backend.quantize(x, spec, stream)
    operand, same = backend.fake_quantize(x, spec, stream)
    assert same == stats
    return q, stats, backend.dequantize(q), operand


def assert_same(got: Answer, expected: Answer, what: object) -> None:
    assert got[1] == expected[1], what
    assert got[0].parts.keys() == expected[0].parts.keys(), what
    parts = [(name, part, expected[0].parts[name]) for name, part in got[0].parts.items()]
    for name, a, b in (
        *parts,
        ("dequantized", got[2], expected[2]),
        ("operand", got[3], expected[3]),
    ):
        assert_bytes(a, b, (what, name))


@cache
def expected_answers(name: str, kind: str) -> list[Answer]:
    return [answer(GENERIC, *case) for case in cases(name, kind)]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_every_shape(name: str, kind: str) -> None:
    """At every level, on one thread and on two."""
    expected = expected_answers(name, kind)
    for level, threads in itertools.product(LEVELS, (1, 2)):
        with forced(level, threads):
            for case, one in zip(cases(name, kind), expected, strict=True):
                kept = case[0].tobytes()
                what = f"{level}, {threads} threads, {case[1]} on {case[0].shape}"
                assert_same(answer(BACKEND, *case), one, what)
                assert case[0].tobytes() == kept, f"{what}: the input changed"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_memory_layout(level: str, name: str, view: str) -> None:
    """However an array lies in memory, it is stored as its plain copy is."""
    for shape, axis in (((12, 70), 1), ((70, 12), 0), ((3, 20, 37), 1), ((100,), 0)):
        x = VIEWS[view](values(shape, 3))
        kept = x.tobytes()
        spec = QuantSpec(name, axis=axis)
        expected = answer(GENERIC, np.array(x, dtype=F, order="C"), spec, None)
        assert_same(answer(BACKEND, x, spec, None), expected, (level, spec, view))
        assert x.tobytes() == kept


@pytest.mark.parametrize(
    ("rule", "dialect"),
    [("amax", "ocp"), ("four_over_six", "ocp"), ("amax", "torchao"), ("amax", "model_optimizer")],
)
def test_block_scales_next_to_a_tie(level: str, rule: str, dialect: str) -> None:
    """Block maxima whose e4m3 scale nearly ties: the order of the float32 operations decides."""
    rng = np.random.default_rng(120)
    bound = 256 if rule == "four_over_six" else 448
    ties = np.array([8.5, 9.5, 10.5, 13.5, 17, 19, 21, 34, 38, 54, 100, 108, 216, 232], F)
    for _ in range(8):
        amax = F(1 + 4 * rng.random())
        middle = (ties * amax / bound).astype(F)
        near = [np.nextafter(middle, F(0)), middle, np.nextafter(middle, F(9))]
        tops = np.concatenate([[amax], *near]).astype(F)
        x = (rng.uniform(-1, 1, (tops.size, 16)) * tops[:, None]).astype(F)
        x[:, 3] = tops
        for axis, blocked in ((1, x.reshape(1, -1)), (0, x.reshape(-1, 1))):
            spec = QuantSpec("nvfp4", axis=axis, scale_rule=rule, dialect=dialect)
            got, expected = (answer(b, blocked, spec, None) for b in (BACKEND, GENERIC))
            assert_same(got, expected, (level, spec))


@pytest.mark.parametrize("dialect", ["ocp", "microxcaling"])
@pytest.mark.parametrize(
    ("name", "rule"), [("nvfp4", "four_over_six"), ("nvfp4_fp8exact", "least_error")]
)
def test_scales_whose_errors_are_equal(level: str, name: str, rule: str, dialect: str) -> None:
    """0.75 and 1 beside 6 cost a scale of 6 what they cost one of 4: the last bits choose."""
    rng = np.random.default_rng(3)
    steps = np.array([0.75, 1, 0.75, 1, 2.5, 5, 1.25, 1.75, 3.5, 0, 0, 0, 2, 3, 4.5, 2.25], F)
    values = np.array(ELEMENTS["e4m3"].values, F)[1:120]
    for _ in range(12):
        top = F(1 + 3 * rng.random())
        units = values * (top / F(256 * 6 if rule == "four_over_six" else 448 * 6))
        blocks = rng.choice(steps, (8, 16)) * rng.choice(np.array([-1, 1], F), (8, 16))
        blocks[:, rng.integers(16)] = 6
        x = (blocks[None] * units[:, None, None]).reshape(-1, 16)
        x = np.concatenate([np.eye(1, 16, dtype=F) * top, x[np.abs(x).max(1) <= top]])
        for axis, blocked in ((1, x.reshape(1, -1)), (0, x.reshape(-1, 1))):
            spec = QuantSpec(name, axis=axis, scale_rule=rule, dialect=dialect)
            got, expected = (answer(b, blocked, spec, None) for b in (BACKEND, GENERIC))
            assert_same(got, expected, (level, spec))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("axis", [0, 1])
def test_huge_values_above_a_percentile(level: str, name: str, axis: int) -> None:
    """What a block's scale says nothing about saturates, and is counted, in every binade."""
    x = np.random.default_rng(8).standard_normal((64, 64), dtype=F)
    x[np.arange(64), np.arange(64)] = np.ldexp(F(1.5), np.arange(64, 128))
    spec = QuantSpec(name, axis=axis, statistic="percentile", percentile=50.0)
    assert_same(answer(BACKEND, x, spec, None), answer(GENERIC, x, spec, None), (level, spec))


@pytest.mark.parametrize("rows", [12, 16, 20, 40])
def test_zeros_under_a_transform_keep_the_sign_that_its_signs_give(level: str, rows: int) -> None:
    """Signs that are a row of -H give -0; what pads the last transform takes part in it."""
    transform = Hadamard(16, "random", seed=52)
    spec, x = QuantSpec("mxfp4", axis=0, transform=transform), np.zeros((rows, 70), F)
    expected = answer(GENERIC, x, spec, None)
    assert np.signbit(expected[3]).any()
    assert_same(answer(BACKEND, x, spec, None), expected, rows)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "int4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_running_maxima(level: str, name: str, axis: int) -> None:
    """Earlier maxima above and below; blocks of zeros, and of no number, remember nothing."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((12, 6, 32), dtype=F)
    x[::3], x[1, 2, 3], x[2, :, 5] = 0, np.nan, np.inf
    spec = QuantSpec(name, axis=axis, tile=(1, 32), statistic="running", decay=0.75)
    x = x.reshape(12, 192) if axis == 1 else np.ascontiguousarray(x.reshape(12, 192).T)
    grid = (12, 6) if axis == 1 else (6, 12)
    previous = rng.choice(np.array([0, 1e-3, 2, 40], F), grid)
    got, expected = (b.quantize(x, spec, None, previous) for b in (BACKEND, GENERIC))
    assert_stored(got, expected, (level, spec))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("half_steps", [0, 1, 2])
def test_fractions_next_to_their_random_word(level: str, axis: int, half_steps: int) -> None:
    """Up exactly when frac * 2**32 > word: not where they are equal, but half a step above it."""
    stream = Stream(21, column=axis == 0)
    words = random_words(stream, np.arange(4096), 32, 32)
    chosen = (words < 2**22) & (np.arange(32) > 0)
    assert chosen.sum() > 50
    x = np.zeros(words.shape, F)
    x[:, 0] = 4  # the scale is one, and between 0 and 0.5 the fraction is x / 0.5
    x[chosen] = np.ldexp(words[chosen] + half_steps / 2, -33)
    spec = QuantSpec("mxfp4", axis=axis, rounding="stochastic")
    blocked = np.ascontiguousarray(x.T) if axis == 0 else x
    for got in (
        BACKEND.fake_quantize(blocked, spec, stream),
        GENERIC.fake_quantize(blocked, spec, stream),
    ):
        rounded = got[0].T if axis == 0 else got[0]
        assert (rounded[chosen] == (0.5 if half_steps else 0)).all(), level
    assert_same(
        answer(BACKEND, blocked, spec, stream), answer(GENERIC, blocked, spec, stream), level
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("above", [False, True])
def test_fractions_next_to_words_that_no_float_holds(level: str, axis: int, above: bool) -> None:
    """The largest float below a word of more than 24 bits is not up, the smallest above it is."""
    stream = Stream(22, column=axis == 0)
    words = random_words(stream, np.arange(512), 32, 32)
    near = words.astype(F)
    near = np.where(near.astype(np.float64) > words, np.nextafter(near, F(0)), near)
    chosen = (near.astype(np.float64) < words) & (np.arange(32) > 0)
    assert chosen.sum() > 5000
    fraction = np.nextafter(near, F(2**33)) if above else near
    x = np.where(chosen, fraction * F(2**-33), F(0)).astype(F)
    x[:, 0] = 4  # the scale is one, and between 0 and 0.5 the fraction is x / 0.5
    spec = QuantSpec("mxfp4", axis=axis, rounding="stochastic")
    blocked = np.ascontiguousarray(x.T) if axis == 0 else x
    for got in (
        BACKEND.fake_quantize(blocked, spec, stream),
        GENERIC.fake_quantize(blocked, spec, stream),
    ):
        rounded = got[0].T if axis == 0 else got[0]
        assert (rounded[chosen] == (0.5 if above else 0)).all(), level


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("tile", [None, (32, 32)])
def test_arrays_beyond_the_caches(level: str, name: str, tile: tuple[int, int] | None) -> None:
    """Large results take other store instructions: the same bytes as halves of the array give."""
    x = np.random.default_rng(1).standard_normal((2080, 8256), dtype=F)  # over 2**24 values
    specs = QuantSpec(name, tile=tile), QuantSpec(name, axis=0, tile=tile)

    def stored(part: np.ndarray) -> list[tuple[Any, Any]]:
        quantized = [BACKEND.quantize(part, spec)[0] for spec in specs]
        quantized += [q for q, _ in BACKEND.quantize_rowwise_columnwise(part, specs)]
        return [(q.codes, q.scales) for q in quantized]

    halves = zip(stored(x[:1024]), stored(x[1024:]), strict=True)
    for whole, (top, bottom) in zip(stored(x), halves, strict=True):
        for part, first, second in zip(whole, top, bottom, strict=True):
            assert part.tobytes() == first.tobytes() + second.tobytes(), (level, name, tile)


KINDS = ("normal", "many binades", "zeros", "far scales", "special")
ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"rounding": "stochastic"},
    {"rounding": "stochastic", "rbits": 8},
    {"transform": Hadamard(16)},
    {"transform": Hadamard(32)},
    {"rounding": "stochastic", "transform": Hadamard(16)},
)


def long_rows(shape: tuple[int, int], kind: str, dtype: str) -> np.ndarray:
    """Rows of many whole blocks of 32: the ways that code sixteen of them at a time."""
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.standard_normal(shape).astype(F)
    match kind:
        case "many binades":
            x *= np.exp2(rng.integers(-24, 8, shape)).astype(F)
        case "zeros":
            x[rng.random(shape) < 0.6] = 0
            x[rng.random(shape) < 0.1] *= F(-0.0)
        case "far scales":
            x *= np.ldexp(F(1), rng.integers(-140, 120, (shape[0], 1))).astype(F)
        case "special":
            x.reshape(-1)[rng.integers(0, x.size, x.size // 500)] = np.nan
            x.reshape(-1)[rng.integers(0, x.size, x.size // 500)] = np.inf
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"])
def test_long_rows_of_every_float(name: str, kind: str, dtype: str) -> None:
    """Rows, stochastic rows and transformed rows; columns and both: as the generic methods."""
    for shape in ((16, 1024), (5, 1000), (33, 130)):
        x = long_rows(shape, kind, dtype)
        for options in ROWS:
            spec = QuantSpec(name, **options)
            stream = Stream(7) if spec.rounding == "stochastic" else None
            expected = GENERIC.quantize(x, spec, stream)
            for level in LEVELS:
                with forced(level):
                    got = BACKEND.quantize(x, spec, stream)
                assert_stored(got, expected, (level, shape, options))
        both = QuantSpec(name), QuantSpec(name, axis=0)
        pair = [GENERIC.quantize(x, spec) for spec in both]
        for level in LEVELS:
            with forced(level):
                found = BACKEND.quantize_rowwise_columnwise(x, both)
                found = [*found, BACKEND.quantize(x, both[1])]
            for got, expected in zip(found, [*pair, pair[1]], strict=True):
                assert_stored(got, expected, (level, shape, "both"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_one_small_number_at_every_place(name: str, fill: float, dtype: str) -> None:
    """Below the normal codes or flushed, among zeros or large values: found wherever it stands."""
    x = np.full((256, 512), fill, F)
    x[:, ::32] = 1.0
    place = np.arange(256)
    for odd, small in enumerate((2.0**-18, 1.5 * 2.0**-16, 1e-41)):
        x[place, 2 * place + odd % 2] = small
        expected = GENERIC.quantize(x.astype(dtype), QuantSpec(name))
        for level in LEVELS:
            with forced(level):
                assert_stored(BACKEND.quantize(x.astype(dtype), QuantSpec(name)), expected, small)


@pytest.mark.parametrize("options", [{}, {"scale_rule": "rceil"}, {"scale_window": 0}])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_rows_at_both_ends_of_the_scales(name: str, options: dict[str, Any]) -> None:
    """Scales that are clamped, a window at the top, blocks of zeros, NaN: as the generic method."""
    spec = QuantSpec(name, **options)
    x = np.random.default_rng(0).uniform(-1, 1, (512, 512)).astype(F)
    x *= np.exp2(np.arange(512) - 384.0).astype(F)[:, None]
    x[7], x[509, 5], x[510, 40], x[511, ::8], x[511, 70] = 0, np.nan, np.inf, 3e38, np.nan
    for part in (x[:384], x[380:], x[500:], x[4:10]):
        expected = GENERIC.quantize(part, spec)
        for level in LEVELS:
            with forced(level):
                assert_stored(BACKEND.quantize(part, spec), expected, (level, options))


def assert_stored(
    got: tuple[QuantArray, QuantStats], expected: tuple[QuantArray, QuantStats], what: object
) -> None:
    assert got[0].codes.tobytes() == expected[0].codes.tobytes(), what
    assert np.asarray(got[0].scales).tobytes() == np.asarray(expected[0].scales).tobytes(), what
    assert got[1] == expected[1], what


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if not row.outliers])
def test_every_code_under_every_scale(level: str, name: str) -> None:
    """Decoded to all floats: scales that overflow, are subnormal or no number, and ragged rows.

    A tensor scale half a bfloat16 above 1 makes ties of many of NVFP4's values.
    """
    rng = np.random.default_rng(5)
    tensors = (((96, 512), 1.0), ((95, 262), 1.7e-3), ((40, 96), 3e38), ((8, 512), 1 + 2**-8))
    for shape, tensor_scale in tensors:
        q, _ = GENERIC.quantize(rng.standard_normal(shape, dtype=F), QuantSpec(name))
        codes = rng.integers(0, 256, q.codes.shape, np.uint8)
        codes[::3] &= 0x77  # no special FP8 codes: whole runs of them take the fast way
        scales = rng.standard_normal(q.scales.shape).astype(q.scales.dtype)
        if q.scales.dtype == np.uint8:
            scales = np.arange(q.scales.size).astype(np.uint8).reshape(q.scales.shape)
            scales[::2] = np.clip(scales[::2], 1, 126)
        q = replace(q, codes=codes.view(q.codes.dtype), scales=scales)
        if q.tensor_scale is not None:
            q = replace(q, tensor_scale=np.asarray(tensor_scale, F))
        for dtype in ("float32", "bfloat16", "float16"):
            got, expected = BACKEND.dequantize(q, dtype), GENERIC.dequantize(q, dtype)
            assert got.tobytes() == expected.tobytes(), (level, name, shape, dtype)


@st.composite
def any_case(draw: st.DrawFn) -> tuple[Any, QuantSpec, Stream | None, str]:
    """A format, rule, tile, transform, dialect, rounding, axis, shape, layout and level."""
    name = draw(st.sampled_from(list(FORMATS)))
    row = FORMATS[name]
    shape = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)))
    options: dict[str, Any] = {"axis": draw(st.integers(0, len(shape) - 1))}
    dialect = draw(st.sampled_from(list(DIALECTS)))
    options["dialect"] = dialect
    if not (row.scale.name == "e8m0" and DIALECTS[dialect].mx_scale_rule):
        options["scale_rule"] = draw(st.sampled_from((None, *row.scale_rules)))
    if not row.outliers:
        rows = draw(st.sampled_from((1, 1, 1, 2, 16))) if len(shape) > 1 else 1
        columns = draw(st.sampled_from((16, 32, 1, 6, 10, 64)))
        options["tile"] = draw(st.sampled_from((None, (rows, columns), "channel", "tensor")))
        options["transform"] = draw(st.sampled_from((None, None, Hadamard(16), Hadamard(64))))
    options["rounding"] = draw(st.sampled_from(("nearest_even", "stochastic")))
    options["rbits"] = draw(st.sampled_from((8, 32)))
    spec = QuantSpec(name, **options)
    stream = None
    if spec.rounding == "stochastic":
        stream = Stream(draw(st.integers(0, 2**64 - 1)), column=draw(st.booleans()))
    x = VIEWS[draw(st.sampled_from(list(VIEWS)))](values(shape, draw(st.integers(0, 99))))
    return x, spec, stream, draw(st.sampled_from(LEVELS))


@settings(max_examples=150)
@given(any_case())
def test_any_case(case: tuple[Any, QuantSpec, Stream | None, str]) -> None:
    x, spec, stream, level = case
    with forced(level):
        got = answer(BACKEND, x, spec, stream)
    expected = answer(GENERIC, np.array(x, dtype=F, order="C"), spec, stream)
    assert_same(got, expected, (level, spec, x.shape, x.strides))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_pairs_wider_than_a_task(level: str, name: str, dtype: str) -> None:
    """Rows and columns at once, the rows cut into several tasks, as one after the other."""
    both = QuantSpec(name), QuantSpec(name, axis=0)
    for kind in ("normal", "special"):
        x = long_rows((40, 8264), kind, dtype)
        found = BACKEND.quantize_rowwise_columnwise(x, both)
        for got, spec in zip(found, both, strict=True):
            assert_stored(got, BACKEND.quantize(x, spec), (level, kind, spec.axis))


@st.composite
def any_pair(draw: st.DrawFn) -> tuple[Any, list[QuantSpec], list[Stream | None], str]:
    """A matrix, a spec along its rows and one down its columns, their streams, a level."""
    shape = draw(st.tuples(st.integers(1, 150), st.integers(1, 150)))
    specs, streams = [], []
    for axis in (1, 0):
        name = draw(st.sampled_from(("mxfp4", "mxfp8_e4m3", "mxfp6_e2m3", "mxint8", "nvfp4")))
        tile = draw(st.sampled_from((None, None, (1, 16), (1, 32), (16, 16), (32, 32), (1, 10))))
        rounding = draw(st.sampled_from(("nearest_even", "stochastic")))
        transform = draw(st.sampled_from((None, None, Hadamard(16), Hadamard(64))))
        spec = QuantSpec(name, axis=axis, tile=tile, rounding=rounding, transform=transform)
        specs.append(spec)
        seed = draw(st.integers(0, 2**64 - 1))
        streams.append(Stream(seed, column=not axis) if rounding == "stochastic" else None)
    return values(shape, draw(st.integers(0, 99))), specs, streams, draw(st.sampled_from(LEVELS))


@settings(max_examples=100)
@given(any_pair())
def test_any_pair_is_two_calls(case: tuple[Any, list[QuantSpec], list[Stream | None], str]) -> None:
    """One reading for rows and columns gives the bytes of a generic call each."""
    x, specs, streams, level = case
    both, paired = (specs[0], specs[1]), (streams[0], streams[1])
    with forced(level):
        stored = BACKEND.quantize_rowwise_columnwise(x, both, paired)
        operands = BACKEND.fake_quantize_rowwise_columnwise(x, both, paired)
    for (q, stats), (values, same), spec, stream in zip(
        stored, operands, specs, streams, strict=True
    ):
        assert same == stats
        got = q, stats, GENERIC.dequantize(q), values
        assert_same(got, answer(GENERIC, x, spec, stream), (level, spec, x.shape))


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_eight_threads_on_one_tensor(level: str, name: str, axis: int) -> None:
    """Calls at the same time, each on two threads of its own, give what a call alone gives."""
    x = values((66, 517), 9)
    stream = Stream(11, column=axis == 0)
    specs = (QuantSpec(name, axis=axis), QuantSpec(name, axis=axis, rounding="stochastic"))
    pairs = [(specs[0], None), (specs[1], stream)]
    expected = [answer(GENERIC, x, *pair) for pair in pairs]
    kept = x.tobytes()

    def hammer(number: int) -> list[Answer]:
        order = (0, 1, 0) if number % 2 else (1, 0, 1)
        return [answer(BACKEND, x, *pairs[k]) for k in order]

    with forced(threads=2), ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(hammer, range(THREADS)))
    for number, answers in enumerate(results):
        order = (0, 1, 0) if number % 2 else (1, 0, 1)
        for k, got in zip(order, answers, strict=True):
            assert_same(got, expected[k], (level, name, axis, number))
    assert x.tobytes() == kept
