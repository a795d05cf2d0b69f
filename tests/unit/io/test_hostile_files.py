"""Broken and hostile files: each is one error of its reader, before memory is taken."""

from __future__ import annotations

import io
import json
import lzma
import runpy
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.cli import main
from extensor.cli.files import read_tensors
from extensor.cli.sheet import CommandError
from extensor.formats import FORMATS
from extensor.io import CheckpointError, load_checkpoint, open_archive, save_checkpoint
from extensor.io import npy as npy_files
from extensor.io.safetensors_format import write
from extensor.quant import QuantSpec

ESCAPES = "\x1b[2J", "\x9b31m", "\u202egpj"  # C0, C1 and bidirectional
SPACE = 1 << 24


def container(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, size: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


HEADERS: dict[str, bytes] = {
    "metadata null": container({"__metadata__": None}),
    "metadata of numbers": container({"__metadata__": {"a": 1}}),
    "infinite shape": container(b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,0]}}'),
    "shape beyond addresses": container({"w": entry([2**62, 0], 0)}),
    "65 axes": container({"w": entry([1] * 64 + [0], 0)}),
    "bool in a shape": container({"w": entry([True, 1], 4)}, bytes(4)),
    "float in a shape": container({"w": entry([1.0, 1], 4)}, bytes(4)),
    "offsets of text": container({"w": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}),
    "deep": container(b"[" * 100_000),
    "dtype of a list": container({"w": {**entry([1], 4), "dtype": ["F32"]}}, bytes(4)),
    "no object": container(b"3"),
    "no UTF-8": container(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("read", [load_checkpoint, open_archive, et.load])
def test_bad_headers_are_checkpoint_errors(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(HEADERS[name])
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        read(path)


SPEC_CHANGES: dict[str, tuple[str, Any]] = {
    "symmetric is text": ("int8", {"symmetric": "no"}),
    "rbits is a float": ("mxfp4", {"rbits": 32.0}),
    "percentile is a bool": ("int8", {"percentile": True}),
    "axis is a bool": ("mxfp4", {"axis": True}),
    "decay is infinite": ("int8", {"decay": float("inf")}),
    "format is a list": ("mxfp4", {"format": ["mxfp4"]}),
    "rebased is a number": ("mxfp8_e4m3", {"rebased": 1}),
    "transform is text": ("mxfp4", {"transform": "hadamard"}),
    "transform of text": ("mxfp4", {"transform": {"size": "16"}}),
    "a tile of 2**30": ("int8", {"tile": [1, 2**30]}),
    "unknown field": ("mxfp4", {"colour": "red"}),
}
ENTRY_CHANGES: dict[str, Any] = {
    "shape of floats": {"shape": [4.9, 64]},
    "infinite shape": {"shape": [float("inf"), 64]},
    "negative shape": {"shape": [-4, 64]},
    "no axes": {"shape": []},
    "shape is text": {"shape": "464"},
    "spec is a list": {"spec": []},
    "parts are text": {"parts": "codes"},
    "parts of numbers": {"parts": [1, 2]},
    "no parts": {"parts": []},
}


def stored(spec: str, shape: tuple[int, ...] = (4, 64), **options: Any) -> Any:
    return et.randn(*shape, seed=0).quantize(QuantSpec(spec, **options)).data


def blocked_file(path: Path, q: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    """A checkpoint of one blocked tensor, with what its metadata say of it changed."""
    save_checkpoint(path, {"w": q})
    parts = {f"w.{name}": part for name, part in q.parts.items()}
    content = json.loads(open_archive(path).source.where["w.codes"].metadata["extensor"])
    change(content["blocked"]["w"])
    with path.open("wb") as file:
        write(file, parts, {"extensor": json.dumps(content)})


def refuse(path: Path, text: str = "w") -> None:
    for read in (load_checkpoint, lambda p: dict(open_archive(p)), et.load):
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=text) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert path.name in str(caught.value)
        assert peak < SPACE


@pytest.mark.parametrize("name", SPEC_CHANGES)
def test_specs_of_other_types_are_refused(name: str, tmp_path: Path) -> None:
    format, change = SPEC_CHANGES[name]
    path = tmp_path / "w.safetensors"
    blocked_file(path, stored(format), lambda e: e["spec"].update(change))
    refuse(path)


@pytest.mark.parametrize("name", ENTRY_CHANGES)
def test_entries_of_other_types_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    blocked_file(path, stored("mxfp4"), lambda e: e.update(ENTRY_CHANGES[name]))
    refuse(path)


@pytest.mark.parametrize("index", [-1, 64, 2**30])
def test_outliers_outside_their_row_are_refused(index: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    q = stored(next(name for name, row in FORMATS.items() if row.outliers))
    q.outlier_index[0, 0] = index
    save_checkpoint(path, {"w": q})
    refuse(path, "outlier_index")


def test_a_tile_larger_than_its_axis_does_not_pad(tmp_path: Path) -> None:
    """2**30 values in a tile, 20 in the axis: the file would have to hold the padding."""
    path = tmp_path / "w.safetensors"
    tracemalloc.start()
    with pytest.raises(ValueError, match="tile"):
        et.ones((20,)).quantize(QuantSpec("int8", tile=(1, 2**30)))
    assert tracemalloc.get_traced_memory()[1] < SPACE
    tracemalloc.stop()
    blocked_file(
        path, stored("int8", (1, 20), tile=(1, 20)), lambda e: e["spec"].update(tile=[1, 2**30])
    )
    refuse(path)


@pytest.mark.parametrize(
    "fields",
    [{"symmetric": "no"}, {"symmetric": 1}, {"minimum": 0}, {"percentile": True}, {"rbits": 32.0},
     {"rbits": True}, {"element_scale": "1"}, {"rounding": ["x"]}, {"statistic": None},
     {"dialect": {}}],
)  # fmt: skip
def test_a_spec_takes_its_types_only(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(fields))):
        QuantSpec("int8", **fields)


# --- npy and npz ------------------------------------------------------------------------------


def npy(shape: str, dtype: str = "'<f4'", data: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def npz(content: bytes, **more: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", content)
    return out.getvalue()


NPY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "huge claim": ("a.npy", lambda: npy(f"({2**40},)")),
    "claim beyond addresses": ("a.npy", lambda: npy(f"({2**70},)")),
    "negative": ("a.npy", lambda: npy("(-4,)", data=bytes(16))),
    "bool": ("a.npy", lambda: npy("(True,)", data=bytes(4))),
    "text": ("a.npy", lambda: npy("'ab'", data=bytes(4))),
    "names": ("a.npy", lambda: npy("(x,)", data=bytes(4))),
    "deep": ("a.npy", lambda: npy("(" * 5000 + ")" * 5000)),
    "structure": ("a.npy", lambda: npy("(1,)", "[('a', '<f4')]", bytes(4))),
    "objects": ("a.npy", lambda: npy("(1,)", "'|O'", bytes(8))),
    "dates": ("a.npy", lambda: npy("(1,)", "'<M8[ns]'", bytes(8))),
    "cut": ("a.npy", lambda: npy("(4,)", data=bytes(15))),
    "spare": ("a.npy", lambda: npy("(4,)", data=bytes(17))),
    "no magic": ("a.npy", lambda: b"hello"),
    "empty": ("a.npy", lambda: b""),
    "version 9": ("a.npy", lambda: b"\x93NUMPY\x09\x00" + npy("(1,)", data=bytes(4))[8:]),
    "a huge claim in a zip": ("a.npz", lambda: npz(npy(f"({2**40},)"))),
    "a cut zip": ("a.npz", lambda: npz(npy("(4,)", data=bytes(16)))[:-30]),
    "no zip": ("a.npz", lambda: b"PK\x03\x04 and nothing more"),
    "another member": ("a.npz", lambda: npz(b"hello")),
    "a bomb": ("a.npz", lambda: npz(npy(f"({1 << 26},)", data=bytes(1 << 28)))),
    "an encrypted member": ("a.npz", lambda: _flagged(npz(npy("(1,)", data=bytes(4))))),
    "an unknown compression": ("a.npz", lambda: _packed_by(npz(npy("(1,)", data=bytes(4))), 99)),
    "damaged bzip2": ("a.npz", lambda: _damaged_header(zipfile.ZIP_BZIP2)),
    "damaged lzma": ("a.npz", lambda: _damaged_header(zipfile.ZIP_LZMA)),
    "damaged": ("a.npz", lambda: _damaged(npz(npy("(999,)", data=bytes(range(36)) * 111)))),
}


def _flagged(content: bytes) -> bytes:
    out = bytearray(content)
    out[6] |= 1
    out[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(out)


def _packed_by(content: bytes, method: int) -> bytes:
    out = bytearray(content)
    out[8] = out[content.index(b"PK\x01\x02") + 10] = method
    return bytes(out)


def _damaged(content: bytes) -> bytes:
    out = bytearray(content)
    out[60:80] = b"\xff" * 20
    return bytes(out)


def _damaged_header(method: int) -> bytes:
    """An archive whose member's own header is damaged; it lies behind the file's and its name."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr("a.npy", npy("(4,)", data=bytes(16)))
    out = bytearray(whole.getvalue())
    out[39:44] = b"\xff" * 5
    return bytes(out)


@pytest.mark.parametrize("name", NPY)
def test_broken_arrays_of_numpy_are_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, make = NPY[name]
    path = tmp_path / file
    path.write_bytes(make())
    tracemalloc.start()
    assert main(["inspect", str(path)]) == 2
    assert tracemalloc.get_traced_memory()[1] < SPACE
    tracemalloc.stop()
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and error.count("\n") == 1


def test_a_python_without_lzma_reads_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lzma.LZMAError in npy_files.ZIP_ERRORS
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert lzma.LZMAError not in runpy.run_path(npy_files.__file__)["ZIP_ERRORS"]


def test_good_arrays_of_numpy_are_read(tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4))
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "a.npz", x=x, s=np.float32(3))
    np.savez_compressed(tmp_path / "b.npz", x=x, z=np.zeros((500, 500)))
    np.testing.assert_array_equal(read_tensors(tmp_path / "x.npy")["x"], x)
    for name in ("a.npz", "b.npz"):
        np.testing.assert_array_equal(read_tensors(tmp_path / name)["x"], x)


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_name_reaches_the_terminal_as_it_is(
    escape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "w.safetensors", tmp_path / "v.safetensors"
    save_checkpoint(good, {f"w{escape}": np.ones((2, 2), np.float32)})
    bad.write_bytes(container({f"w{escape}": entry([3], 4)}, bytes(4)))
    assert main(["inspect", str(good)]) == 0
    assert main(["inspect", str(bad)]) == 2
    main(
        [
            "quantize",
            str(good),
            str(tmp_path / "q.safetensors"),
            "--format",
            "mxfp4",
            "--match",
            "x",
        ]
    )
    main(["convert", str(good), str(tmp_path / "c"), "--layout", "modelopt-nvfp4"])
    main(["advise", str(good)])
    said = capsys.readouterr()
    assert escape not in said.out + said.err
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(bad)
    assert escape not in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(good, like={"v": np.ones((2, 2), np.float32)})
    assert escape not in str(caught.value)
    with pytest.raises(CommandError) as refused:
        read_tensors(bad)
    assert escape not in str(refused.value)
    with pytest.raises(ValueError, match="w") as unfit:
        et.nn.Linear(2, 2).load_state_dict(et.load(good))
    assert escape not in str(unfit.value)
