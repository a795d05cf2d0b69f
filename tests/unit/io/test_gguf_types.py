"""GGUF's tensor types against ggml's C functions `dequantize_row_*`, followed value by value."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.io import CheckpointError
from extensor.io.gguf import GGUF_TYPES, GgufFile, Texts, write_gguf
from extensor.io.gguf.types import UNREADABLE_GGUF_TYPES, gguf_type_of
from extensor.quant.reference import dequantize

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def half(content: bytes) -> float:
    return float(struct.unpack("<e", content)[0])


def q4_0(r: bytes) -> Iterator[float]:
    for shift in (0, 4):
        yield from (((q >> shift & 15) - 8) * half(r[:2]) for q in r[2:])


def q4_1(r: bytes) -> Iterator[float]:
    for shift in (0, 4):
        yield from ((q >> shift & 15) * half(r[:2]) + half(r[2:4]) for q in r[4:])


def q8_0(r: bytes) -> Iterator[float]:
    yield from (q * half(r[:2]) for q in struct.unpack("<32b", r[2:]))


def mxfp4(r: bytes) -> Iterator[float]:
    for shift in (0, 4):
        yield from (E2M1[q >> shift & 15] * 2.0 ** (r[0] - 127) for q in r[1:])


def ue4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return (8 + mantissa if exponent else mantissa) * 2.0 ** (max(exponent, 1) - 10)


def nvfp4(r: bytes) -> Iterator[float]:
    for block in range(4):
        for shift in (0, 4):
            for q in r[4 + 8 * block : 12 + 8 * block]:
                yield E2M1[q >> shift & 15] * ue4m3(r[block])


def scale_and_minimum(j: int, q: bytes) -> tuple[int, int]:
    """`get_scale_min_k4`."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return q[j + 4] & 15 | q[j - 4] >> 6 << 4, q[j + 4] >> 4 | q[j] >> 6 << 4


def k_quant(r: bytes, low: bytes, high: bytes) -> Iterator[float]:
    for j in range(8):
        scale, minimum = scale_and_minimum(j, r[4:16])
        for place in range(32):
            q = low[32 * (j // 2) + place] >> 4 * (j % 2) & 15 | (high[place] >> j & 1) << 4
            yield half(r[:2]) * scale * q - half(r[2:4]) * minimum


def q4_k(r: bytes) -> Iterator[float]:
    return k_quant(r, r[16:], bytes(32))


def q5_k(r: bytes) -> Iterator[float]:
    return k_quant(r, r[48:], r[16:48])


def q6_k(r: bytes) -> Iterator[float]:
    low, high, scales = r[:128], r[128:192], struct.unpack("<16b", r[192:208])
    for n in range(2):
        for part in range(4):
            for place in range(32):
                nibble = low[64 * n + 32 * (part % 2) + place] >> 4 * (part // 2) & 15
                q = nibble | (high[32 * n + place] >> 2 * part & 3) << 4
                yield half(r[208:]) * scales[8 * n + 2 * part + place // 16] * (q - 32)


ROWS: dict[str, Callable[[bytes], Iterator[float]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "MXFP4": mxfp4, "NVFP4": nvfp4,
}  # fmt: skip
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a record has float16, which are drawn finite."""


def drawn(name: str, count: int) -> np.ndarray:
    """Records of random bytes that the type can hold."""
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (count, GGUF_TYPES[name].size), np.uint8)
    for at in HALVES.get(name, ()):
        scales = rng.standard_normal(count).astype(np.float16)
        records[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        records[:, 0] = rng.integers(100, 150, count)
    if name == "NVFP4":
        records[:, :4] = rng.integers(0, 0x7F, (count, 4))
    return records


def test_every_type_of_blocks_has_a_formula() -> None:
    assert ROWS.keys() == {name for name, row in GGUF_TYPES.items() if row.spec is not None}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 2)])
def test_values_are_ggmls_and_go_back_to_the_same_bytes(name: str, shape: tuple[int, ...]) -> None:
    row = GGUF_TYPES[name]
    records = drawn(name, int(np.prod(shape)))
    whole = (*shape[:-1], shape[-1] * row.values)
    stored = row.read(records.reshape(-1), whole)
    expected = [value for record in records for value in ROWS[name](record.tobytes())]
    np.testing.assert_allclose(
        dequantize(stored).reshape(-1), expected, rtol=1e-6, atol=1e-5 if "K" in name else 1e-6
    )
    np.testing.assert_array_equal(row.write(stored), records.reshape(-1))
    assert gguf_type_of(stored) is row


@pytest.mark.parametrize("name", [name for name, row in GGUF_TYPES.items() if row.dtype])
def test_dense_types(name: str) -> None:
    row = GGUF_TYPES[name]
    assert row.dtype is not None and row.values == 1 and row.size == row.dtype.itemsize
    values = np.arange(6).astype(row.dtype).reshape(2, 3)
    content = row.write(values)
    assert content.dtype == np.uint8 and content.size == row.nbytes((2, 3)) == 6 * row.size
    read = row.read(content, (2, 3))
    np.testing.assert_array_equal(read, values)
    assert read.dtype == row.dtype and not np.shares_memory(read, content)
    assert gguf_type_of(values) is row and row.nbytes(()) == row.size


def test_what_a_type_refuses() -> None:
    q4, mx, nv = GGUF_TYPES["Q4_0"], GGUF_TYPES["MXFP4"], GGUF_TYPES["NVFP4"]
    with pytest.raises(ValueError, match="rows of a multiple of 32 values, got 31"):
        q4.nbytes((2, 31))
    with pytest.raises(ValueError, match=r"Q4_0 of shape \(1, 32\): expected 18 bytes, got 17"):
        q4.read(np.zeros(17, np.uint8), (1, 32))
    nan = np.zeros(34, np.uint8)
    nan[17] = 255
    with pytest.raises(ValueError, match=r"MXFP4 has no NaN: scale \[0, 1\] is 0xff"):
        mx.read(nan, (1, 64))
    for byte, words in ((0x7F, r"no NaN: scale \[0, 0, 3\] is 0x7f"), (0x80, "without a sign")):
        record = np.zeros(36, np.uint8)
        record[3] = byte
        with pytest.raises(ValueError, match=words):
            nv.read(record, (1, 64))
    with pytest.raises(ValueError, match="GGUF Q4_0: expected QuantSpec.*, got QuantSpec"):
        q4.write(et.ones((2, 32)).to_mxfp4().data)
    with pytest.raises(ValueError, match="GGUF F32: expected float32, got float16"):
        GGUF_TYPES["F32"].write(np.ones(2, np.float16))
    with pytest.raises(ValueError, match="GGUF F32: expected float32, got QuantSpec"):
        GGUF_TYPES["F32"].write(et.ones((2, 32)).to_mxfp4().data)
    with pytest.raises(ValueError, match="GGUF Q4_0: expected QuantSpec.*, got float32"):
        q4.write(np.ones((2, 32), np.float32))
    assert gguf_type_of(np.ones(2, np.uint16)) is None
    assert gguf_type_of(et.ones((2, 64)).to_mxfp8().data) is None
    assert gguf_type_of(et.ones((2, 48)).to_nvfp4().data) is None


def test_numbers_are_ggmls() -> None:
    """Of `enum ggml_type`; 4, 5, and 31 to 33 and 36 to 38 are types that ggml has removed."""
    numbers = [row.number for row in GGUF_TYPES.values()] + [*UNREADABLE_GGUF_TYPES]
    assert sorted(numbers) == sorted({*range(42)} - {4, 5, 31, 32, 33, 36, 37, 38})
    known = {name: row.number for name, row in GGUF_TYPES.items()}
    assert known == {
        "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
        "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "BF16": 30, "MXFP4": 39, "NVFP4": 40,
    }  # fmt: skip
    assert UNREADABLE_GGUF_TYPES == {
        6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
        17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
        23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 41: "Q1_0",
    }  # fmt: skip


def test_a_file_may_end_with_its_metadata(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "a.b": 7, "names": ["x", "yy"]}
    with (tmp_path / "m.gguf").open("wb") as file:
        write_gguf(file, metadata, {}, [])
    read = GgufFile(tmp_path / "m.gguf")
    assert read.metadata == metadata and not read.tensors
    content = (tmp_path / "m.gguf").read_bytes().rstrip(b"\0")  # what aligns the tensors' data
    assert content.endswith(b"yy")
    (tmp_path / "cut.gguf").write_bytes(content)
    assert GgufFile(tmp_path / "cut.gguf").metadata == metadata
    (tmp_path / "cut.gguf").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="2 bytes expected at byte"):
        GgufFile(tmp_path / "cut.gguf")


def test_texts_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    words = ["", "a", "\u00fc\u4e16", "end"]
    with (tmp_path / "m.gguf").open("wb") as file:
        write_gguf(file, {"words": words}, {}, [])
    texts = GgufFile(tmp_path / "m.gguf").metadata["words"]
    assert isinstance(texts, Texts) and texts == words and texts != words[:3]
    assert repr(texts) == repr(words)
    assert len(texts) == 4 and texts[-1] == "end" and texts[2] == words[2]
    assert texts[1:3] == words[1:3] and list(reversed(texts)) == words[::-1]
    with pytest.raises(IndexError):
        texts[4]
    with (tmp_path / "again.gguf").open("wb") as file:
        write_gguf(file, {"words": texts}, {}, [])
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    damaged = (tmp_path / "m.gguf").read_bytes().replace(b"end", b"e\xffd")
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged: 'utf-8' codec"):
        GgufFile(tmp_path / "m.gguf")


def test_a_slice_of_a_stack_is_one_of_its_first_axis(tmp_path: Path) -> None:
    stack = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    row = GGUF_TYPES["F32"]
    with (tmp_path / "m.gguf").open("wb") as file:
        write_gguf(file, {"general.architecture": "llama"}, {"w": (row, stack.shape)},
                   [("w", row.write(stack))])  # fmt: skip
    read = GgufFile(tmp_path / "m.gguf")
    for index in range(2):
        assert np.array_equal(read.read("w", index), stack[index])
    for index in (-1, 2):
        with pytest.raises(IndexError, match=r"a stack of shape \(2, 3, 4\)"):
            read.read("w", index)


NUMBERS = "BbHhIif?Qqd"
"""struct's codes of the value types 0 to 7 and 10 to 12, in that order (ggml's gguf.h)."""


def gguf_bytes(pairs: bytes, count: int, tensors: bytes = b"", number: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, number, count) + pairs + tensors


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_every_type_of_number_is_read_alone_and_in_a_list(tmp_path: Path) -> None:
    kinds = [*range(8), 10, 11, 12]
    pairs, expected = b"", {}
    for kind, code in zip(kinds, NUMBERS, strict=True):
        values = [1, 0] if code == "?" else [-1, 5] if code in "bhiqfd" else [200, 5]
        expected[f"one {kind}"], expected[f"list {kind}"] = values[0], values
        pairs += gguf_text(f"one {kind}") + struct.pack(f"<I{code}", kind, values[0])
        pairs += gguf_text(f"list {kind}") + struct.pack("<IIQ", 9, kind, 2)
        pairs += struct.pack(f"<2{code}", *values)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(pairs, len(expected)))
    found = GgufFile(tmp_path / "m.gguf").metadata
    assert {k: v if k.startswith("one") else v.tolist() for k, v in found.items()} == expected


@pytest.mark.parametrize("alignment", [0, 3, 48, 1, 64])
def test_tensors_are_aligned_to_a_power_of_two(alignment: int, tmp_path: Path) -> None:
    pairs = gguf_text("general.alignment") + struct.pack("<II", 4, alignment)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(pairs, 1))
    if alignment in (1, 64):
        assert GgufFile(tmp_path / "m.gguf").metadata == {"general.alignment": alignment}
    else:
        with pytest.raises(CheckpointError, match=f"damaged: general.alignment of {alignment}$"):
            GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(("number", "name"), [(6, "Q5_0"), (34, "TQ1_0"), (99, "number 99")])
def test_a_type_that_is_not_read_is_named(number: int, name: str, tmp_path: Path) -> None:
    tensor = gguf_text("w") + struct.pack("<IQIQ", 1, 32, number, 0)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(b"", 0, tensor, 1).ljust(4096, b"\0"))
    with pytest.raises(CheckpointError, match=f"'w' is of type {name}, which is not supported"):
        GgufFile(tmp_path / "m.gguf").read("w")
