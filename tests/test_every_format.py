"""Every blocked format against the scalar oracle, byte for byte.

The cases come from the table of formats: a new row is tested without a line here,
and fails until the oracle knows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from extensor.formats import DIALECTS, FORMATS
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.oracle import quantize as oracle
from tests.oracle.compare import same_bytes, same_stored
from tests.oracle.samples import KINDS, SHAPES, TILES, sample

STREAM = Stream(seed=0x123456789ABCDEF0, step=7, tensor=3, slot=2, column=True)
TWO = (((5, 70), -1), ((2, 33, 5), 1))
TILED = [name for name, row in FORMATS.items() if not row.outliers]


def check(x: np.ndarray, spec: QuantSpec, previous: np.ndarray | None = None) -> None:
    """Stored bytes, counts, dequantized values and GEMM operand of one array."""
    stream = STREAM if spec.rounding == "stochastic" else None
    context = f"{spec} on shape {x.shape}"
    expected = oracle.quantize(x, spec, stream, previous)
    q, stats = quantize(x, spec, stream, previous)
    same_stored(q, stats, expected, context)
    same_bytes("dequantized", dequantize(q), expected.values, context)
    if previous is None:
        values, again = fake_quantize(x, spec, stream)
        same_bytes("operand", values, expected.operand, context)
        assert again == stats, context


def cases(
    spec: QuantSpec, shapes: tuple[tuple[tuple[int, ...], int], ...] = SHAPES, seed: int = 0
) -> Iterator[tuple[np.ndarray, QuantSpec]]:
    """A spec with both roundings on every shape with every kind of values."""
    for rounding in ("nearest_even", "stochastic"):
        for number, (shape, axis) in enumerate(shapes):
            for kind in KINDS:
                x = sample(shape, axis, kind, seed + number)
                yield x, spec.replace(axis=axis, rounding=rounding)


def rules() -> list[tuple[str, str]]:
    return [(name, rule) for name, row in FORMATS.items() for rule in row.scale_rules]


def test_the_oracle_knows_every_format() -> None:
    assert set(oracle.FORMATS) == set(FORMATS)


@pytest.mark.parametrize(("name", "rule"), rules())
def test_every_rule_on_every_shape(name: str, rule: str) -> None:
    for x, spec in cases(QuantSpec(name, scale_rule=rule)):
        check(x, spec)


@pytest.mark.parametrize("name", TILED)
def test_every_tile(name: str) -> None:
    for tile in (*TILES, "channel", "tensor"):
        for x, spec in cases(QuantSpec(name, tile=tile), TWO, seed=10):
            check(x, spec)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("name", FORMATS)
def test_every_dialect(name: str, dialect: str) -> None:
    for x, spec in cases(QuantSpec(name, dialect=dialect), TWO, seed=20):
        check(x, spec)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("signs", ["none", "fixed", "random"])
def test_every_transform(name: str, signs: str) -> None:
    for size in (16, 32, 64, 128):
        transform = Hadamard(size, signs, seed=0xFEDCBA9876543210 + size)
        for x, spec in cases(QuantSpec(name, transform=transform), (((3, 70), -1),), seed=30):
            check(x, spec)
    transform = Hadamard(16, signs)
    for x, spec in cases(QuantSpec(name, transform=transform), TWO[1:], seed=31):
        check(x, spec)


@pytest.mark.parametrize("name", FORMATS)
def test_eight_random_bits(name: str) -> None:
    for x, spec in cases(QuantSpec(name, rbits=8), (((3, 70), -1), ((70, 3), 0)), seed=40):
        check(x, spec)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("factor", [0.75, 0.5, 0.3])
def test_element_scale(name: str, factor: float) -> None:
    for x, spec in cases(QuantSpec(name, element_scale=factor), (((3, 70), -1),), seed=50):
        check(x, spec)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("percentile", [0.5, 50.0, 55.0, 90.0, 99.9, 100.0])
def test_percentile(name: str, percentile: float) -> None:
    spec = QuantSpec(name, statistic="percentile", percentile=percentile)
    for x, varied in cases(spec, (((2, 100), -1), ((2, 33, 5), 1)), seed=60):
        check(x, varied)


@pytest.mark.parametrize("name", TILED)
def test_running_maximum(name: str) -> None:
    spec = QuantSpec(name, statistic="running", decay=0.7)
    for x, varied in cases(spec, TWO, seed=70):
        check(x, varied)
        stream = STREAM if varied.rounding == "stochastic" else None
        grid = quantize(x, varied, stream)[0].scales.shape
        rng = np.random.default_rng(71)
        previous = (rng.standard_normal(grid).astype(np.float32) ** 2 * 2).astype(np.float32)
        check(x, varied, previous)


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if row.scale.name == "e8m0"])
@pytest.mark.parametrize("window", [0, 3, 28])
def test_scale_window(name: str, window: int) -> None:
    for rule in ("floor", "rceil"):
        spec = QuantSpec(name, scale_window=window, scale_rule=rule)
        for x, varied in cases(spec, TWO, seed=80):
            check(x, varied)


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if row.scale.name == "float32"])
def test_float16_scales(name: str) -> None:
    for x, spec in cases(QuantSpec(name, scale_dtype="float16"), SHAPES[:4], seed=90):
        check(x, spec)


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if row.zero_point])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_zero_points(name: str, scale_dtype: str) -> None:
    for rule in ("amax", "one"):
        spec = QuantSpec(name, symmetric=False, scale_dtype=scale_dtype, scale_rule=rule)
        for x, varied in cases(spec, seed=100):
            check(x, varied)
            check(np.abs(x), varied)
    for tile in ((1, 64), (1, 128), (16, 16), "channel", "tensor"):
        for x, varied in cases(QuantSpec(name, symmetric=False, tile=tile), TWO, seed=101):
            check(x, varied)


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.outliers])
def test_outliers(name: str) -> None:
    for kept in (None, 0, 1, 5, 32):
        for x, spec in cases(QuantSpec(name, outliers=kept), seed=110):
            check(x, spec)


@pytest.mark.parametrize(
    ("name", "rule"), [(n, r) for n, r in rules() if FORMATS[n].scale.name == "ue4m3"]
)
def test_block_scales_next_to_a_tie(name: str, rule: str) -> None:
    """Block maxima whose e4m3 scale nearly ties: the order of the float32 operations decides."""
    rng = np.random.default_rng(120)
    bound = 1536 if rule == "four_over_six" else 2688
    for _ in range(8):
        amax = np.float32(1 + 4 * rng.random())
        ties = np.array([8.5, 9.5, 10.5, 17, 19, 21, 34, 38, 100, 108, 216, 232], np.float32)
        middle = (ties * 6 * amax / bound).astype(np.float32)
        near = [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(9))]
        tops = np.concatenate([[amax], *near]).astype(np.float32)
        blocks = rng.uniform(-1, 1, (len(tops), 16)).astype(np.float32) * tops[:, None]
        blocks[:, 3] = tops
        check(blocks.reshape(1, -1), QuantSpec(name, scale_rule=rule))


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3)])
def test_no_elements(name: str, shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        check(np.zeros(shape, np.float32), QuantSpec(name, axis=axis))


@pytest.mark.parametrize("name", FORMATS)
def test_a_special_value_anywhere_in_a_block(name: str) -> None:
    """The first, an inner and the last place of a whole and of a ragged block."""
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, 1, 31, 32, 36):
            x = sample((37,), 0, "normal", 3)
            x[place] = special
            for dialect in ("ocp", "nvidia"):
                check(x, QuantSpec(name, dialect=dialect))
