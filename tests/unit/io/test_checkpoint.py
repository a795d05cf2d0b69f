"""Checkpoints: exact round trips, all or nothing on the disk, everything checked on the way in."""

import dataclasses
import errno
import json
import os
import resource
import stat

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from extensor.formats import FORMATS
from extensor.io import CheckpointError, load_checkpoint, save_checkpoint
from extensor.io.safetensors_format import read, write
from extensor.quant.array import QuantArray, block_grid, packed_length
from extensor.quant.spec import Hadamard, QuantSpec

OLD = {"w": np.arange(3, dtype=np.float32)}


def blocked(spec: QuantSpec, shape=(4, 70), seed=0) -> QuantArray:
    """A blocked array of random bytes with the parts its spec wants."""
    rng = np.random.default_rng(seed)
    spec = spec.resolve(len(shape))
    grid = block_grid(spec, shape)

    def along(n):
        return (*shape[: spec.axis], n, *shape[spec.axis + 1 :])

    def integers(size, dtype):
        return rng.integers(0, 100, size, dtype=dtype)

    is_number = spec.scale_name.startswith("float")
    parts = {"scales": rng.random(grid).astype(spec.scale_name)} if is_number else {}
    if spec.row.tensor_scale:
        parts["tensor_scale"] = np.asarray(0.37, np.float32)
    if not spec.symmetric:
        parts["zero_points"] = integers(grid, np.int8)
    if spec.row.outliers:
        parts["row_means"] = rng.random(along(1)).astype(np.float32)
        parts["outlier_index"] = integers(along(5), np.int32) % shape[spec.axis]
        parts["outlier_value"] = rng.random(along(5)).astype(np.float32)
    codes = integers(along(packed_length(spec, shape)), np.uint8)
    return QuantArray(
        **{
            "codes": codes,
            "scales": integers(grid, np.uint8),
            **parts,
            "spec": spec,
            "shape": shape,
        }
    )


SPECS = [QuantSpec(name) for name in FORMATS] + [
    QuantSpec("mxfp4", axis=0, tile=(16, 16), rounding="stochastic", scale_rule="even"),
    QuantSpec("mxfp4", transform=Hadamard(32, "random", 7), scale_window=28, element_scale=0.75),
    QuantSpec("int4", symmetric=False, scale_dtype="float16"),
    QuantSpec("fp8_e4m3", tile="channel"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.format}-{s.axis}-{s.tile}")
def test_blocked_tensors_round_trip(tmp_path, spec):
    array = blocked(spec)
    save_checkpoint(tmp_path / "a", {"layer.weight": array, "bias": np.ones(3, np.float16)})
    got = load_checkpoint(tmp_path / "a").tensors
    assert got.keys() == {"layer.weight", "bias"}
    weight = got["layer.weight"]
    assert isinstance(weight, QuantArray)
    assert weight.spec == array.spec and weight.shape == array.shape
    assert weight.parts.keys() == array.parts.keys()
    for name, part in array.parts.items():
        assert weight.parts[name].dtype == part.dtype
        np.testing.assert_array_equal(weight.parts[name], part)


def test_other_readers_see_the_parts(tmp_path):
    array = blocked(QuantSpec("nvfp4"))
    save_checkpoint(tmp_path / "a", {"w": array})
    theirs = load_file(tmp_path / "a")
    assert theirs.keys() == {"w.codes", "w.scales", "w.tensor_scale"}
    np.testing.assert_array_equal(theirs["w.codes"], array.codes)


def test_bfloat16_and_metadata_round_trip(tmp_path):
    x = np.array([[1 / 3, -0.0, np.inf, np.nan]], ml_dtypes.bfloat16)
    metadata = {"step": 12, "lr": 0.1 + 0.2, "note": "é", "list": [1, None, True, {"a": "b"}]}
    save_checkpoint(tmp_path / "a", {"x": x}, metadata)
    got = load_checkpoint(tmp_path / "a")
    assert got.metadata == metadata
    assert got.tensors["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.tensors["x"].view(np.uint16), x.view(np.uint16))


def test_files_of_other_programs(tmp_path):
    save_file({"a": np.arange(3)}, tmp_path / "a", metadata={"format": "np"})
    got = load_checkpoint(tmp_path / "a")
    assert got.metadata == {"format": "np"} and list(got.tensors) == ["a"]


def test_what_is_loaded_is_writable_and_apart_from_the_file(tmp_path):
    save_checkpoint(tmp_path / "a", OLD)
    load_checkpoint(tmp_path / "a").tensors["w"][:] = 9
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "a").tensors["w"], OLD["w"])


@pytest.mark.parametrize(
    "metadata",
    [{"t": (1, 2)}, {1: "int key"}, {"nan": float("nan")}, {"x": np.float32(1)}, {"s": {1}}],
    ids=str,
)
def test_metadata_that_would_not_read_back_is_refused(tmp_path, metadata):
    with pytest.raises(ValueError, match="metadata: expected JSON that reads back equal"):
        save_checkpoint(tmp_path / "a", OLD, metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, "x: expected a numpy array.*got list.*metadata"),
        ({"x": 3}, TypeError, "got int"),
        ({3: OLD["w"]}, TypeError, "tensor name: expected a str, got 3"),
        ({"x": np.zeros(2, complex)}, TypeError, "got complex128; cast"),
        ({"": OLD["w"]}, ValueError, "non-empty name"),
    ],
)
def test_tensors_that_cannot_be_stored(tmp_path, tensors, error, message):
    save_checkpoint(tmp_path / "a", OLD)
    with pytest.raises(error, match=message):
        save_checkpoint(tmp_path / "a", tensors)
    assert_old(tmp_path)


@pytest.mark.parametrize("dense_first", [True, False])
def test_a_name_that_collides_with_a_part(tmp_path, dense_first):
    tensors = [("w.codes", np.zeros(1)), ("w", blocked(QuantSpec("mxfp4")))]
    with pytest.raises(ValueError, match=r"names already taken, \['w.codes'\]; rename"):
        save_checkpoint(tmp_path / "a", dict(tensors if dense_first else tensors[::-1]))


def assert_old(directory):
    """The old checkpoint is there, whole, and nothing else is."""
    assert [p.name for p in directory.iterdir()] == ["a"]
    np.testing.assert_array_equal(load_checkpoint(directory / "a").tensors["w"], OLD["w"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_system_call_leaves_the_old_file(tmp_path, monkeypatch, call):
    save_checkpoint(tmp_path / "a", OLD)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "a", {"w": np.ones(9)})
    monkeypatch.undo()
    assert_old(tmp_path)


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a", OLD)

    def half_a_write(file, tensors, metadata):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("extensor.io.checkpoint.write", half_a_write)
    with pytest.raises(OSError, match=r"No space left on device: '.*a'"):  # and which file it was
        save_checkpoint(tmp_path / "a", {"w": np.ones(9)})
    assert_old(tmp_path)


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a", OLD)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("extensor.io.checkpoint.write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "a", {"w": np.ones(9)})
    assert_old(tmp_path)


def test_a_real_limit_on_the_file_size(tmp_path):
    """The kernel itself refuses the bytes; Python ignores SIGXFSZ, so write() gets EFBIG."""
    save_checkpoint(tmp_path / "a", OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError) as caught:
            save_checkpoint(tmp_path / "a", {"w": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert_old(tmp_path)


def test_file_is_on_disk_before_the_rename_and_the_directory_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(fd):
        calls.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def watch_replace(source, target):
        assert os.path.dirname(source) == os.path.dirname(target) == str(tmp_path)
        assert os.path.getsize(source) > 0
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    save_checkpoint(tmp_path / "a", OLD)
    assert calls == ["file", "rename", "directory"]


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "a", OLD)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_paths_that_cannot_work(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory; create it first"):
        save_checkpoint(tmp_path / "none" / "a", OLD)
    with pytest.raises(IsADirectoryError, match="expected a file name"):
        save_checkpoint(tmp_path, OLD)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none")


def test_like_accepts_the_same_model(tmp_path):
    tensors = {"w": np.zeros((2, 3), np.float32), "q": blocked(QuantSpec("mxfp4"))}
    save_checkpoint(tmp_path / "a", tensors)
    assert load_checkpoint(tmp_path / "a", like=tensors).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w": np.zeros((3, 2), np.float32)},
            r"w: expected float32 of shape \(3, 2\), got float32 ",
        ),
        ({"w": np.zeros((2, 3), np.float64)}, r"w: expected float64 of shape .* got float32 of"),
        ({"more": np.zeros(1, np.int8)}, r"more: expected int8 of shape \(1,\), got nothing"),
        ({"q": None}, r"q: expected nothing, got QuantSpec\(format='mxfp4'"),
        ({"q": np.zeros((4, 70))}, r"q: expected float64 of shape .* got QuantSpec"),
        ({"q": blocked(QuantSpec("mxfp4", scale_rule="even"))}, "scale_rule='even'.*got"),
    ],
)
def test_like_refuses_another_model(tmp_path, change, message):
    tensors = {"w": np.zeros((2, 3), np.float32), "q": blocked(QuantSpec("mxfp4"))}
    save_checkpoint(tmp_path / "a", tensors)
    like = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path / "a", like=like)
    assert str(tmp_path / "a") in str(caught.value) and "Nothing was loaded" in str(caught.value)


def test_a_long_list_of_differences_is_cut(tmp_path):
    save_checkpoint(tmp_path / "a", {f"t{i:02}": np.zeros(1) for i in range(20)})
    with pytest.raises(CheckpointError, match=r"t07: .*and 12 more"):
        load_checkpoint(tmp_path / "a", like={})


def damaged(tmp_path, change):
    """A checkpoint with one blocked tensor, its extensor metadata changed by a function."""
    save_checkpoint(tmp_path / "a", {"w": blocked(QuantSpec("nvfp4"))})
    arrays, strings = read(tmp_path / "a")
    content = json.loads(strings["extensor"])
    change(content, arrays)
    with open(tmp_path / "a", "wb") as file:
        write(file, arrays, {"extensor": json.dumps(content)})
    return tmp_path / "a"


def set_spec(**fields):
    return lambda content, arrays: content["blocked"]["w"]["spec"].update(fields)


DAMAGE = {
    "version": (lambda c, a: c.update(version=2), "expected version 1 .* got 2; read it with"),
    "no blocked": (lambda c, a: c.pop("blocked"), "bad extensor metadata"),
    "blocked a list": (lambda c, a: c.update(blocked=[]), "bad extensor metadata"),
    "entry a number": (lambda c, a: c["blocked"].update(w=3), "blocked.w: expected a table"),
    "no shape": (lambda c, a: c["blocked"]["w"].pop("shape"), "blocked.w: expected shape"),
    "unknown format": (set_spec(format="mxfp5"), "'w': bad spec: no format named 'mxfp5'"),
    "unknown field": (set_spec(colour=1), "'w': bad spec: .*colour"),
    "bad field": (set_spec(rbits=9), "bad spec: rbits"),
    "unresolved": (set_spec(axis=-1), "its spec does not fit the shape"),
    "negative": (lambda c, a: c["blocked"]["w"].update(shape=[4, -70]), "does not fit the shape"),
    "axis out of range": (set_spec(axis=5), "bad spec: axis"),
    "another shape": (
        lambda c, a: c["blocked"]["w"].update(shape=[4, 200]),
        r"expected codes of uint8 and shape \(4, 104\), got uint8 and \(4, 40\)",
    ),
    "missing part": (lambda c, a: a.pop("w.scales"), r"missing in the file: \['w?\.?scales'\]"),
    "part of another dtype": (
        lambda c, a: a.update({"w.scales": a["w.scales"].view(np.int8)}),
        "expected scales of uint8 .* got int8",
    ),
    "another rank": (
        lambda c, a: a.update({"w.scales": a["w.scales"].reshape(-1)}),
        "expected scales of uint8 and shape",
    ),
    "another format": (
        set_spec(format="mxfp4", tile=[1, 16], scale_rule="floor"),
        r"expected the parts \['codes', 'scales'\], got",
    ),
    "both": (lambda c, a: a.update(w=np.zeros(2)), r"\['w'\] both dense and blocked"),
}


@pytest.mark.parametrize("case", sorted(DAMAGE))
def test_damaged_blocked_tensors(tmp_path, case):
    change, message = DAMAGE[case]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(damaged(tmp_path, change))


def test_the_undamaged_file_behind_them(tmp_path):
    assert list(load_checkpoint(damaged(tmp_path, lambda c, a: None)).tensors) == ["w"]


def test_metadata_that_is_no_json(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        write(file, {}, {"extensor": "{"})
    with pytest.raises(CheckpointError, match="bad extensor metadata"):
        load_checkpoint(tmp_path / "a")


def test_a_tensor_like_object_is_stored_by_its_data(tmp_path):
    @dataclasses.dataclass
    class Tensor:
        data: object
        requires_grad: bool = True

    save_checkpoint(tmp_path / "a", {"w": Tensor(OLD["w"])})
    assert_old(tmp_path)
