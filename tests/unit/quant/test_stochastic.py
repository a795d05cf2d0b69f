"""Random bits and stochastic rounding: known answers, the counter's layout, no bias."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from extensor.backends.cpu import make_backend
from extensor.formats import ELEMENTS, FORMATS
from extensor.quant.reference import dequantize, quantize
from extensor.quant.rounding import decode, encode
from extensor.quant.spec import QuantSpec
from extensor.random import Stream, philox4x32, random_words
from tests.oracle import philox as oracle

# Random123's known answers for Philox4x32-10: counter, key, output.
ONES = 0xFFFFFFFF
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
STREAM = Stream(seed=0xDEADBEEF12345678, step=0x89ABCDEF, tensor=0xFEDCBA, slot=0x55, column=True)
DRAWS = 1_000_000
# For every element grid, the first format that has it.
BLOCKED_AS = {
    element: next(name for name, row in FORMATS.items() if row.element.name == element)
    for element in ELEMENTS
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    got = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in got) == words
    assert all(w.dtype == np.uint32 for w in got)
    assert oracle.philox(counter, key) == words


def test_philox_takes_counters_of_any_shape() -> None:
    blocks = np.arange(5, dtype=np.uint64)[:, None]
    calls = np.arange(3, dtype=np.uint64)[None, :]
    got = philox4x32((calls, blocks, 7, 9), (11, 13))
    for b in range(5):
        for c in range(3):
            assert tuple(int(w[b, c]) for w in got) == oracle.philox((c, b, 7, 9), (11, 13))


@pytest.mark.parametrize("rbits", [32, 8])
def test_word_of_a_block_and_position(rbits: int) -> None:
    index = np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint64)
    words = random_words(STREAM, index, 37, rbits)
    assert words.shape == (5, 37)
    assert words.dtype == np.uint32
    for row, block in enumerate(index):
        for position in range(37):
            expected = oracle.word(STREAM, int(block), position, rbits)
            assert int(words[row, position]) == expected, (int(block), position)


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2\*\*32"):
        random_words(STREAM, np.array([2**32], np.uint64), 4, 32)


def test_every_field_of_a_stream_changes_the_words() -> None:
    index = np.arange(4)
    base = {"seed": 1, "step": 2, "tensor": 3, "slot": 4, "column": False}
    changes = {"seed": [0, 2, 1 + (1 << 32)], "step": [3], "tensor": [4], "slot": [5]}
    seen = [random_words(Stream(**base), index, 16, 32).tobytes()]
    for name, values in {**changes, "column": [True]}.items():
        for value in values:
            stream = Stream(**{**base, name: value})
            seen.append(random_words(stream, index, 16, 32).tobytes())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", 1.0),
        ("step", 1 << 32),
        ("tensor", 1 << 24),
        ("slot", 1 << 7),
        ("slot", -1),
    ],
)
def test_a_stream_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an int in 0"):
        Stream(**{"seed": 0, name: value})


@pytest.mark.parametrize("interval", range(7))
@pytest.mark.parametrize("part", [0.03125, 0.3, 0.5, 0.9])
def test_no_bias_in_any_interval(interval: int, part: float) -> None:
    """The mean error of a million draws stays below four standard errors."""
    low, high = E2M1[interval], E2M1[interval + 1]
    x = np.float32(low + part * (high - low))
    stream = Stream(seed=interval, step=int(part * 1000))
    words = random_words(stream, np.arange(DRAWS // 1000), 1000, 32).reshape(-1)
    codes, saturated = encode(np.full(DRAWS, x), ELEMENTS["e2m1"], words=words)
    values = decode(codes, ELEMENTS["e2m1"]).astype(np.float64)
    assert set(np.unique(values)) == {low, high}
    assert not saturated.any()
    fraction = (float(x) - low) / (high - low)
    sigma = (high - low) * math.sqrt(fraction * (1 - fraction) / DRAWS)
    assert abs(values.mean() - float(x)) < 4 * sigma


@pytest.mark.parametrize("name", BLOCKED_AS)
def test_no_bias_in_any_interval_of_any_grid(name: str) -> None:
    """As above through the backend's quantizer, subnormals included, under a block scale of one.

    The first value of each block fixes the scale; the others are the draws. Without the C++ core
    the draws are fewer and the four standard errors wider.
    """
    backend = make_backend()
    blocks = 32_768 if backend.core else 512
    element = FORMATS[BLOCKED_AS[name]].element
    spec = QuantSpec(BLOCKED_AS[name], tile=(1, 32), rounding="stochastic").resolve(2)
    grid = [element.decode(code) for code in range(element.max_magnitude_code + 1)]
    x = np.empty((blocks, 32), np.float32)
    draws = blocks * 31
    for interval, (low, high) in enumerate(itertools.pairwise(grid)):
        x[:, 0] = 2.0**element.emax if element.is_float or element.mantissa_bits else element.max
        x[:, 1:] = low + 0.3 * (high - low)
        drawn, _ = backend.fake_quantize(x, spec, Stream(seed=7, step=interval))
        values = drawn[:, 1:]
        ups = int(np.count_nonzero(values == np.float32(high)))
        assert ups + int(np.count_nonzero(values == np.float32(low))) == draws, (low, high)
        chance = (float(x[0, 1]) - low) / (high - low)
        sigma = math.sqrt(chance * (1 - chance) / draws)
        assert abs(ups / draws - chance) < 4 * sigma, (low, high)


@pytest.mark.parametrize("exponent", [-3, -6, -12])
def test_no_bias_far_below_the_smallest_value(exponent: int) -> None:
    """What the original flushed: values under a half, both signs."""
    x = np.float32(-(2.0**exponent))
    words = random_words(Stream(seed=99), np.arange(DRAWS // 1000), 1000, 32).reshape(-1)
    codes, _ = encode(np.full(DRAWS, x), ELEMENTS["e2m1"], words=words)
    ups = int((codes == 9).sum())
    assert ups + int((codes == 8).sum()) == DRAWS
    chance = 2.0**exponent / 0.5
    assert abs(ups - chance * DRAWS) < 4 * math.sqrt(DRAWS * chance * (1 - chance))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxint8", "int4"])
def test_no_bias_through_a_whole_quantizer(name: str) -> None:
    x = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (2000, 1))
    q, _ = quantize(x, QuantSpec(name, rounding="stochastic", scale_rule=None), Stream(seed=4))
    error = dequantize(q).astype(np.float64) - x
    inner = np.abs(x[0]) < 0.9  # the largest value of a block may saturate
    sigma = error.std(axis=0)[inner] / math.sqrt(len(x)) + 1e-9
    assert (np.abs(error.mean(axis=0)[inner]) < 5 * sigma).all()


def test_eight_bits_round_up_in_256ths() -> None:
    """With every byte once: k of 256 go up for a fraction of k / 256, and halves go either way."""
    words = (np.arange(256, dtype=np.uint32) << np.uint32(24)) | np.uint32(1 << 23)
    for k in range(257):
        x = np.full(256, 2 + k / 256, np.float32)
        codes, _ = encode(x, ELEMENTS["e2m1"], words=words)
        assert int((codes == 5).sum()) == k
    for k in range(256):
        x = np.full(256, 2 + (k + 0.5) / 256, np.float32)
        codes, _ = encode(x, ELEMENTS["e2m1"], words=words)
        assert int((codes == 5).sum()) == k


def test_up_exactly_when_the_fraction_exceeds_the_word() -> None:
    for numerator in (1, 2**31, 2**32 - 1024):
        x = np.float32(2 + numerator / 2**32) if numerator >= 2**12 else np.float32(0.5 * 2**-32)
        words = np.array([numerator - 1, numerator], np.uint32)
        codes, _ = encode(np.array([x, x]), ELEMENTS["e2m1"], words=words)
        assert codes[0] == codes[1] + 1


def test_a_column_block_draws_what_its_place_in_the_scales_says() -> None:
    """Same spec, stream and values: the draw depends on block and position alone."""
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    spec = QuantSpec("mxfp4", axis=0, rounding="stochastic")
    q, _ = quantize(x, spec, STREAM)
    alone = x[:32].copy()  # blocks 0..7 are the upper half
    upper, _ = quantize(alone, spec, STREAM)
    np.testing.assert_array_equal(q.codes[:16], upper.codes)
    again, _ = quantize(x, spec, STREAM)
    np.testing.assert_array_equal(q.codes, again.codes)
    other, _ = quantize(x, spec, Stream(seed=1))
    assert (q.codes != other.codes).any()
