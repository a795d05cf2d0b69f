"""Storage layouts of other programs: bytes worked by hand, round trips, what they cannot hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from extensor.io import layouts
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec

F = np.float32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(F)


def stored(name: str, shape: tuple[int, ...], **options: object) -> QuantArray:
    return quantize(values(shape), QuantSpec(name, **options))[0]


def assert_same(got: QuantArray, expected: QuantArray) -> None:
    assert got.shape == expected.shape
    assert got.spec.format == expected.spec.format
    assert got.parts.keys() == expected.parts.keys()
    for name, part in got.parts.items():
        assert part.dtype == expected.parts[name].dtype, name
        assert part.shape == expected.parts[name].shape, name
        assert part.tobytes() == expected.parts[name].tobytes(), name


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=lambda row: f"{row.name}-{row.format}")
def test_the_table_says_where_nibbles_go(layout: layouts.Layout) -> None:
    """Put 6 (code 7) at one element at a time and see which nibble of which byte changes."""
    block, start = (32, {"gguf": 1}) if layout.format == "mxfp4" else (16, {"gguf": 4})
    for byte, (low, high) in enumerate(layout.first_bytes):
        for element, expected in ((low, 0x07), (high, 0x70)):
            x = np.zeros(64, F)
            x[element] = 6
            q, _ = quantize(x, QuantSpec(layout.format))
            q = dataclasses.replace(q, tensor_scale=None if block == 32 else np.asarray(1, F))
            stored = {
                ("this project", 32): lambda q: q.codes,
                ("this project", 16): lambda q: q.codes,
                ("gguf", 32): layouts.to_gguf_mxfp4,
                ("gguf", 16): lambda q: layouts.to_gguf_nvfp4(q)[0],
                ("Mojo original", 32): layouts.to_mojo_mxfp4,
                ("Mojo original", 16): layouts.to_mojo_nvfp4,
            }[layout.name, block](q)
            assert stored[start.get(layout.name, 0) + byte] == expected


# 32 values whose codes are 0..15, 0..15 under scale 2**1.
MX_GGUF = "80" + "".join(f"{k}{k}" for k in "0123456789abcdef")  # position k and k + 16 agree
MX_MOJO = "0123456789abcdef" * 2 + "80"  # high nibble first: as one reads


def test_gguf_mxfp4_by_hand() -> None:
    q = layouts.from_gguf_mxfp4(np.frombuffer(bytes.fromhex(MX_GGUF), np.uint8))
    assert q.codes.tobytes().hex() == "1032547698badcfe" * 2  # the even element in the low nibble
    assert q.scales.tobytes().hex() == "80"
    expected = np.concatenate([VALUES, VALUES]) * 2
    assert dequantize(q).tobytes() == expected.tobytes()
    assert layouts.to_gguf_mxfp4(q).tobytes().hex() == MX_GGUF


def test_gguf_mxfp4_halves_by_hand() -> None:
    """Elements 0-15 are the low nibbles: all 1, and 16-31 the high ones: all -6."""
    q = layouts.from_gguf_mxfp4(np.array([127] + [0xF2] * 16, np.uint8))
    assert dequantize(q).tolist() == [1.0] * 16 + [-6.0] * 16


def test_gguf_nvfp4_by_hand() -> None:
    """Four blocks of scales 1, 2, 0.5, 448; each has 1 in its first half and -3 in its second."""
    record = np.array([0x38, 0x40, 0x30, 0x7E] + [0xD2] * 32, np.uint8)
    q = layouts.from_gguf_nvfp4(record, 0.25)
    block = np.array([1.0] * 8 + [-3.0] * 8, F)
    expected = np.concatenate([block * s * F(0.25) for s in (F(1), F(2), F(0.5), F(448))])
    assert dequantize(q).tobytes() == expected.tobytes()
    back, tensor_scale = layouts.to_gguf_nvfp4(q)
    assert (back.tobytes(), float(tensor_scale)) == (record.tobytes(), 0.25)


def test_mojo_mxfp4_by_hand() -> None:
    records = np.frombuffer(bytes.fromhex(MX_MOJO), np.uint8)
    q = layouts.from_mojo_mxfp4(records, (1, 32))
    assert dequantize(q).tobytes() == (np.concatenate([VALUES, VALUES]) * 2).tobytes()
    assert layouts.to_mojo_mxfp4(q).tobytes() == records.tobytes()


def test_mojo_nvfp4_by_hand() -> None:
    records = np.frombuffer(bytes.fromhex("0123456789abcdef" + "3c"), np.uint8)  # 0x3c: 1.5
    q = layouts.from_mojo_nvfp4(records, (16,))
    assert dequantize(q).tobytes() == (VALUES * F(1.5)).tobytes()
    assert layouts.to_mojo_nvfp4(q).tobytes() == records.tobytes()


def test_swizzled_scales_by_hand() -> None:
    """One tile: the row's place in its 32 counts 16, which 32 counts 4, the column 1."""
    scales = np.arange(128 * 4).reshape(128, 4).astype(np.uint8)
    swizzled = layouts.to_swizzled_scales(scales)
    for r, c in ((0, 0), (0, 3), (1, 0), (31, 2), (32, 0), (33, 1), (127, 3)):
        assert swizzled[16 * (r % 32) + 4 * (r // 32) + c] == scales[r, c], (r, c)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 17), (0, 4), (5, 0)])
def test_swizzled_scales_there_and_back(shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    swizzled = layouts.to_swizzled_scales(scales)
    assert swizzled.size == -(-shape[0] // 128) * 128 * -(-shape[1] // 4) * 4
    assert layouts.from_swizzled_scales(swizzled, shape).tobytes() == scales.tobytes()
    assert int(swizzled.sum(dtype=np.int64)) == int(scales.sum(dtype=np.int64))  # padding is zero
    # The definition in words of views: 128x4 tiles, their rows split into four 32s, columns inside.
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 4)
    padded = np.zeros((rows * 128, columns * 4), np.uint8)
    padded[: shape[0], : shape[1]] = scales
    tiles = padded.reshape(rows, 128, columns, 4).transpose(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    assert swizzled.tobytes() == tiles.transpose(0, 2, 1, 3).reshape(-1, 32, 16).tobytes()


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 32), (2, 0)])
def test_mxfp4_there_and_back(shape: tuple[int, ...]) -> None:
    q = stored("mxfp4", shape)
    records = layouts.to_gguf_mxfp4(q)
    assert records.shape == (*shape[:-1], shape[-1] // 32 * 17)
    assert_same(layouts.from_gguf_mxfp4(records), q)
    assert_same(layouts.from_mojo_mxfp4(layouts.to_mojo_mxfp4(q), shape), q)


@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 3, 64), (0, 64), (2, 0)])
def test_nvfp4_there_and_back(shape: tuple[int, ...]) -> None:
    q = stored("nvfp4", shape)
    records, tensor_scale = layouts.to_gguf_nvfp4(q)
    assert records.shape == (*shape[:-1], shape[-1] // 64 * 36)
    assert_same(layouts.from_gguf_nvfp4(records, float(tensor_scale)), q)
    one = dataclasses.replace(q, tensor_scale=np.asarray(1, F))
    assert_same(layouts.from_mojo_nvfp4(layouts.to_mojo_nvfp4(one), shape), one)


def test_mojo_blocks_that_cross_rows() -> None:
    """Three rows of 20: the flattened 60 values are two blocks, with four zeros at the end."""
    x = values((3, 20))
    flat, _ = quantize(x.reshape(-1), QuantSpec("mxfp4"))
    records = np.zeros(2 * 17, np.uint8)
    codes = np.concatenate([flat.codes & 15, flat.codes >> 4]).reshape(2, -1).T.reshape(2, 32)
    for block in range(2):
        records[17 * block : 17 * block + 16] = codes[block, 0::2] << 4 | codes[block, 1::2]
        records[17 * block + 16] = flat.scales[block]
    with pytest.raises(ValueError, match=r"cross the rows of \(3, 20\); pass \(60,\)"):
        layouts.from_mojo_mxfp4(records, (3, 20))
    assert_same(layouts.from_mojo_mxfp4(records, (60,)), flat)
    records[15] |= 15
    assert layouts.from_mojo_mxfp4(records, (60,)).codes[15] != flat.codes[15]
    records[32] |= 15
    with pytest.raises(ValueError, match="expected zeros after the 60 values"):
        layouts.from_mojo_mxfp4(records, (60,))


def test_nothing_shares_memory_with_the_records() -> None:
    records = layouts.to_gguf_mxfp4(stored("mxfp4", (2, 32)))
    q = layouts.from_gguf_mxfp4(records)
    before = q.codes.tobytes(), q.scales.tobytes()
    records[:] = 0
    assert (q.codes.tobytes(), q.scales.tobytes()) == before


def nan_block(name: str) -> QuantArray:
    x = values((2, 64))
    x[1, 40] = np.nan
    return quantize(x, QuantSpec(name))[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.to_gguf_mxfp4(stored("nvfp4", (2, 64))), "expected mxfp4 in blocks"),
        (lambda: layouts.to_gguf_mxfp4(stored("mxfp4", (2, 64), tile=(1, 16))), r"tile \(1, 16\)"),
        (lambda: layouts.to_gguf_mxfp4(stored("mxfp4", (64, 2), axis=0)), "along the last axis"),
        (lambda: layouts.to_gguf_mxfp4(stored("mxfp4", (2, 33))), "multiple of 32, got 33"),
        (
            lambda: layouts.to_gguf_mxfp4(stored("mxfp4", (2, 64), transform=Hadamard(16))),
            "without a transform",
        ),
        (lambda: layouts.to_gguf_mxfp4(nan_block("mxfp4")), r"no NaN: block \[1, 1\]"),
        (lambda: layouts.to_gguf_nvfp4(nan_block("nvfp4")), r"no NaN: block \[1, 2\]"),
        (lambda: layouts.to_gguf_nvfp4(stored("nvfp4", (2, 48))), "multiple of 64, got 48"),
        (lambda: layouts.to_mojo_nvfp4(stored("nvfp4", (2, 48))), "has no tensor scale"),
        (lambda: layouts.from_gguf_mxfp4(np.full(17, 255, np.uint8)), "has scale 0xFF"),
        (lambda: layouts.from_gguf_mxfp4(np.zeros(18, np.uint8)), "whole records of 17 bytes"),
        (lambda: layouts.from_gguf_mxfp4(np.zeros((), np.uint8)), "whole records of 17 bytes"),
        (lambda: layouts.from_gguf_nvfp4(np.full(36, 0x80, np.uint8)), "without a sign"),
        (lambda: layouts.from_gguf_nvfp4(np.zeros(36, np.uint8), 0.0), "a positive number"),
        (lambda: layouts.from_gguf_nvfp4(np.zeros(36, np.uint8), np.inf), "a positive number"),
        (lambda: layouts.from_mojo_mxfp4(np.zeros(34, np.uint8), (32,)), "takes 1 records, got 2"),
        (lambda: layouts.from_mojo_nvfp4(np.full(9, 0x7F, np.uint8), (16,)), "scale 0x7F"),
        (lambda: layouts.to_swizzled_scales(np.zeros(4, np.uint8)), "a matrix of bytes"),
        (lambda: layouts.to_swizzled_scales(np.zeros((4, 4), F)), "a matrix of bytes"),
        (lambda: layouts.from_swizzled_scales(np.zeros(4, np.uint8), (1, 1)), "expected 512 bytes"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_records_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="records of uint8, got int8"):
        layouts.from_gguf_mxfp4(np.zeros(17, np.int8))


def test_a_mojo_infinity_is_a_nan_block() -> None:
    q = layouts.from_mojo_mxfp4(np.array([0] * 16 + [255], np.uint8), (32,))
    assert np.isnan(dequantize(q)).all()


def test_a_negative_scale_is_named_by_its_block() -> None:
    scales = np.full((2, 3), 0x38, np.uint8)
    scales[0, 1], scales[1, 2] = 0x7F, 0xB8  # NaN, which may stand, and a sign
    with pytest.raises(ValueError, match=r"without a sign, got one in block \[1, 2\]"):
        layouts._refuse_sign(scales, "this layout")
    scales[1, 2] = 0
    layouts._refuse_sign(scales, "this layout")
