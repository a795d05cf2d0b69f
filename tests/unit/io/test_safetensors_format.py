"""The container: interoperable, canonical, and strict about every kind of damage."""

import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from extensor.io.safetensors_format import DTYPES, CheckpointError, read, write


def write_file(path: Path, tensors, metadata=None) -> Path:
    with open(path, "wb") as file:
        write(file, tensors, metadata or {})
    return path


def raw_file(path: Path, header, data: bytes = b"") -> Path:
    """A file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_every_dtype_and_shape_round_trips(tmp_path, name, shape):
    rng = np.random.default_rng(0)
    count = int(np.prod(shape))
    dtype = DTYPES[name]
    raw = rng.integers(0, 2 if name == "BOOL" else 256, count * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype).reshape(shape)
    tensors, metadata = read(write_file(tmp_path / "a", {"x": array, "y": array}, {"k": "v"}))
    assert metadata == {"k": "v"} and list(tensors) == ["x", "y"]
    for got in tensors.values():
        assert got.dtype == dtype and got.shape == shape and got.flags.writeable
        assert got.tobytes() == array.tobytes()


def test_any_memory_order_and_byte_order(tmp_path):
    array = np.arange(24, dtype=">f4").reshape(2, 3, 4).transpose(2, 0, 1)
    got = read(write_file(tmp_path / "a", {"x": array}))[0]["x"]
    assert got.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(got, array.astype("<f4"))


def test_the_reference_library_reads_what_we_write(tmp_path):
    tensors = {
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "byte": np.arange(5, dtype=np.uint8),
        "scalar": np.asarray(3, np.int64),
    }
    path = write_file(tmp_path / "a.safetensors", tensors, {"made": "here"})
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()
    for name, array in tensors.items():
        assert theirs[name].dtype == array.dtype and theirs[name].shape == array.shape
        np.testing.assert_array_equal(theirs[name], array)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"made": "here"}


def test_we_read_what_the_reference_library_writes(tmp_path):
    tensors = {"a": np.arange(7, dtype=np.int16), "b": np.ones((2, 2), np.float64)}
    save_file(tensors, tmp_path / "a", metadata={"format": "np"})
    got, metadata = read(tmp_path / "a")
    assert metadata == {"format": "np"}
    for name, array in tensors.items():
        np.testing.assert_array_equal(got[name], array)


def test_bytes_depend_only_on_the_content():
    x, y = np.zeros(3, np.float32), np.ones(2, np.uint8)
    files = []
    for tensors in ({"x": x, "y": y}, {"y": y, "x": x}):
        buffer = io.BytesIO()
        write(buffer, tensors, {})
        files.append(buffer.getvalue())
    assert files[0] == files[1]
    assert (8 + int.from_bytes(files[0][:8], "little")) % 8 == 0


def test_write_refuses_what_the_container_cannot_hold():
    with pytest.raises(TypeError, match=r"x: expected one of .*float32.*got complex128.*cast"):
        write(io.BytesIO(), {"x": np.zeros(2, np.complex128)}, {})
    with pytest.raises(TypeError, match="got object"):
        write(io.BytesIO(), {"x": np.array([None])}, {})
    for name in ("", "__metadata__"):
        with pytest.raises(ValueError, match="tensor name"):
            write(io.BytesIO(), {name: np.zeros(2)}, {})
    with pytest.raises(ValueError, match="put large values in tensors"):
        write(io.BytesIO(), {}, {"k": "v" * 100_000_001})


def test_every_truncation_is_noticed(tmp_path):
    whole = write_file(tmp_path / "a", {"x": np.arange(6, dtype=np.float32)}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "b").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            read(tmp_path / "b")
    (tmp_path / "b").write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes after the last tensor"):
        read(tmp_path / "b")


BAD_HEADERS = {
    "not json": (b"{nonsense", "expected JSON"),
    "not utf-8": (b'{"\xff":1}', "UTF-8"),
    "a list": (b"[]", "expected a table"),
    "deep": (b'{"a":' + b"[" * 100_000, "nested too deep"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", "4300 digits"),
    "duplicate tensor": (
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "each key once, got 'x' twice",
    ),
    "duplicate field": (
        b'{"x":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        "each key once, got 'dtype' twice",
    ),
    "duplicate metadata": (
        b'{"__metadata__":{"a":"1","a":"2"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "each key once, got 'a' twice",
    ),
    "entry no object": ({"x": 3}, "'x': expected a table, got 3"),
    "entry lacks a field": ({"x": {"dtype": "F32", "shape": [2]}}, "expected data_offsets"),
    "entry with more": ({"x": {**entry(), "more": 1}}, "expected dtype, shape"),
    "dtype unknown": ({"x": entry(dtype="F99")}, "expected a dtype in .*F99"),
    "dtype not ours": ({"x": entry(dtype="F4", shape=(16,))}, "expected a dtype in F64.*got 'F4'"),
    "dtype no string": ({"x": entry(dtype=["F32"])}, "dtype: expected text"),
    "shape negative": ({"x": entry(shape=(-2,))}, "0 or more, got .-2"),
    "shape bool": ({"x": entry(shape=(True, 2))}, "whole number, got True"),
    "shape float": ({"x": entry(shape=(2.0,))}, "whole number, got 2.0"),
    "offsets three": ({"x": entry(offsets=(0, 4, 8))}, "expected dtype, shape"),
    "offsets negative": ({"x": entry(offsets=(-8, 0))}, "0 or more, got .2, -8"),
    "offsets reversed": ({"x": entry(offsets=(8, 0))}, "the header gives -8"),
    "wrong length": ({"x": entry(shape=(3,))}, "takes 12 bytes, the header gives 8"),
    "shape product huge": ({"x": entry(shape=(2**40, 2**40))}, "beyond any memory"),
    "hole": ({"x": entry(), "y": entry(offsets=(12, 20))}, "overlap or leave a gap"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, "overlap or leave a gap"),
    "same bytes": ({"x": entry(), "y": entry()}, "overlap or leave a gap"),
    "data too short": ({"x": entry(shape=(4,), offsets=(0, 16))}, "truncated: .* the file has 8"),
    "metadata no object": ({"__metadata__": 3, "x": entry()}, "__metadata__: expected a table"),
    "metadata no strings": (
        {"__metadata__": {"a": 3}, "x": entry()},
        "a: expected text",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD_HEADERS))
def test_bad_headers(tmp_path, case):
    header, message = BAD_HEADERS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert "bad.safetensors" in str(caught.value) and "Nothing was loaded" in str(caught.value)


def test_the_good_header_behind_the_bad_ones(tmp_path):
    tensors, _ = read(raw_file(tmp_path / "a", {"x": entry()}, np.array([1, 2], "<f4").tobytes()))
    np.testing.assert_array_equal(tensors["x"], [1, 2])


def test_the_reference_library_accepts_a_duplicate_that_we_reject(tmp_path):
    """Why we check the header again: a duplicate key silently picks one of two tensors."""
    first = json.dumps(entry())
    second = json.dumps(entry(dtype="I32"))
    text = f'{{"x":{first},"x":{second}}}'.encode()
    path = raw_file(tmp_path / "a", text, bytes(8))
    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["x"]
    with pytest.raises(CheckpointError, match="each key once"):
        read(path)


def test_a_header_length_that_is_nonsense(tmp_path):
    (tmp_path / "a").write_bytes(b"PK\x03\x04 a zip file, say" * 20)
    with pytest.raises(CheckpointError, match="a header of|a zip archive"):
        read(tmp_path / "a")
    for length, what in ((1 << 40, "not a safetensors file"), (500, "truncated or damaged")):
        (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + b"{}" * 50)
        with pytest.raises(CheckpointError, match=f"{what}: a header of {length} bytes in 108"):
            read(tmp_path / "a")


def test_as_many_axes_as_numpy_has(tmp_path):
    path = raw_file(tmp_path / "a", {"x": entry(shape=(2,) + (1,) * 63)}, bytes(8))
    assert read(path)[0]["x"].ndim == 64
    raw_file(tmp_path / "a", {"x": entry(shape=(2,) + (1,) * 64)}, bytes(8))
    with pytest.raises(CheckpointError, match="64"):
        read(path)


def test_bool_bytes_are_zero_or_one(tmp_path):
    path = raw_file(tmp_path / "a", {"x": entry("BOOL", (2,), (0, 2))}, b"\x01\x02")
    with pytest.raises(CheckpointError, match="expected BOOL bytes 0 or 1, got 2"):
        read(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_bfloat16_keeps_its_dtype(tmp_path):
    x = np.array([1.0, 1 / 3, -np.inf, np.nan], ml_dtypes.bfloat16)
    got = read(write_file(tmp_path / "a", {"x": x}))[0]["x"]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.view(np.uint16), x.view(np.uint16))
