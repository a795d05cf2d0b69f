"""ExTensor: making, showing, converting, writing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et


@pytest.mark.host
def test_construction() -> None:
    assert et.ExTensor([1.0, 2.0]).dtype is et.float32
    assert et.ExTensor([1, 2]).dtype is et.int64
    assert et.ExTensor([True]).dtype is et.bool_
    assert et.ExTensor(np.ones(2)).dtype is et.float64
    assert et.ExTensor(3.0).shape == ()
    assert et.ExTensor([1.5], "bfloat16").dtype is et.bfloat16
    source = np.ones(2, np.float32)
    x = et.ExTensor(source)
    source[0] = 7
    assert x.tolist() == [1.0, 1.0]
    shared = et.from_numpy(source)
    source[0] = 8
    assert shared.tolist() == [8.0, 1.0]
    with pytest.raises(TypeError, match=r"use x\.clone"):
        et.ExTensor(x)


@pytest.mark.parametrize("bad", ["abc", ["a"], None, [None], {1}, [object()]])
def test_what_is_not_numbers_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match=r"expected numbers, nested lists of them or an array, got"):
        et.ExTensor(bad)


@pytest.mark.parametrize("dtype", [None, "float32", "mxfp4"])
def test_ragged_lists_are_refused(dtype: str | None) -> None:
    nested: list[object] = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(ValueError, match=r"nested lists of equal lengths, got \[\[\[.*\.\.\."):
        et.ExTensor(nested)
    with pytest.raises(ValueError, match=r"lists of equal lengths, got \[\[1, 2\], \[3\]\]"):
        et.ExTensor([[1, 2], [3]], dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.nan, "int32"),
        (np.float32("inf"), "int64"),
        (300, "uint8"),
        (-1, "uint8"),
        (1e30, "int8"),
    ],
)
def test_full_refuses_a_number_that_the_dtype_cannot_hold(value: float, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"a number that {dtype} can hold, got"):
        et.full((2,), value, dtype)
    with pytest.raises(ValueError, match=f"within {dtype}'s"):
        et.ExTensor(np.array([0, value])).astype(dtype)


@pytest.mark.parametrize("value", ["a", None, [1]])
def test_full_takes_a_number(value: object) -> None:
    with pytest.raises(TypeError, match="full: expected a number, got"):
        et.full((2,), value)


@pytest.mark.parametrize("seed", [-1, "a", 1.5, [1]])
def test_seeds_are_whole_numbers(seed: object) -> None:
    for make in (et.randn, et.rand):
        with pytest.raises(ValueError, match="seed: expected an int of 0 or more"):
            make(3, seed=seed)


def test_arange_refuses_what_has_no_length() -> None:
    for stop in (float("nan"), float("inf"), 1e30):
        with pytest.raises((ValueError, OverflowError), match="arange: expected finite numbers"):
            et.arange(0, stop)


def test_creation_functions() -> None:
    assert et.zeros((2, 3)).numpy().tolist() == [[0, 0, 0], [0, 0, 0]]
    assert et.full(2, 3).dtype is et.int64
    assert et.full(2, 3.0).dtype is et.float32
    assert et.full(2, True).dtype is et.bool_
    assert et.arange(3).tolist() == [0, 1, 2]
    assert et.arange(0, 1, 0.25).tolist() == [0, 0.25, 0.5, 0.75]
    assert et.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
    assert et.eye(2, 3).shape == (2, 3)
    assert et.ones_like(et.zeros(3, "int8")).dtype is et.int8
    assert et.full_like(et.zeros(3), 2).tolist() == [2, 2, 2]
    assert et.ExTensor.rand == et.rand
    assert et.empty(3, "bfloat16").dtype is et.bfloat16
    a, b = et.randn(3, 4, seed=5), et.randn((3, 4), seed=5)
    np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert not np.array_equal(et.rand(9).numpy(), et.rand(9).numpy())
    assert et.randn_like(a, seed=5).tolist() == a.tolist()
    with pytest.raises(ValueError, match="0 or more"):
        et.zeros((2, -1))
    with pytest.raises(TypeError, match="tuple of ints"):
        et.zeros("23")
    with pytest.raises(TypeError, match="floating-point or blocked"):
        et.randn(3, dtype="int32")
    x, y = et.meshgrid(et.arange(2), et.arange(3))
    assert x.shape == y.shape == (3, 2)


def test_creating_into_a_blocked_dtype_quantizes() -> None:
    for dtype in ("mxfp4", et.nvfp4):
        x = et.ones((4, 64), dtype)
        assert x.is_blocked
        assert x.nbytes < 4 * 64
        np.testing.assert_allclose(x.dequantize().numpy(), 1.0)
    q = et.randn(4, 64, seed=0, dtype="mxfp4")
    expected = et.randn(4, 64, seed=0).to_mxfp4()
    np.testing.assert_array_equal(q.to("cpu").codes, expected.to("cpu").codes)
    assert et.ExTensor([[1.0] * 32], "mxfp4").dtype is et.mxfp4
    assert et.zeros_like(q).dtype is et.mxfp4


@pytest.mark.host
def test_devices() -> None:
    x = et.ones(2)
    assert x.device == "cpu"
    assert x.to("cpu") is x
    with pytest.raises(ValueError, match="devices: cpu, cuda"):
        x.to("tpu")
    with pytest.raises(ValueError, match="cpu, cuda"):
        et.ones(2, device="tpu")


def test_dir_has_what_is_public_and_what_is_pythons() -> None:
    names = dir(et.ExTensor([1.0]))
    assert {"shape", "__add__", "__dlpack__"} <= set(names)
    assert not [name for name in names if name[0] == "_" and not name.startswith("__")]


def test_conversion() -> None:
    x = et.ExTensor([1.0, 2.5])
    assert x.astype("float32") is x
    assert x.to(et.float64).dtype is et.float64
    assert x.to("int64").tolist() == [1, 2]
    assert x.to(ml_dtypes.bfloat16).dtype is et.bfloat16
    assert et.ones((2, 32)).to(et.mxfp4).dtype is et.mxfp4
    assert et.ones((2, 32)).to(et.mxfp4).to("float64").dtype is et.float64
    leaf = et.ExTensor([1.0], requires_grad=True)
    leaf.astype("bfloat16").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype is et.float32


@pytest.mark.host
def test_numpy_is_a_read_only_view() -> None:
    x = et.ones(3)
    view = x.numpy()
    assert np.shares_memory(view, x.data)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 2
    assert np.asarray(x).dtype == np.float32
    np.testing.assert_array_equal(np.array(x, dtype=np.float64), 1.0)
    with pytest.raises(TypeError, match=r"dequantize\(\)\.numpy\(\)"):
        et.ones((1, 32), "mxfp4").numpy()


def test_numbers() -> None:
    x = et.ExTensor([3])
    assert x.item() == 3
    assert float(x) == 3.0
    assert [10, 20, 30, 40][x] == 40
    assert bool(x)
    with pytest.raises(ValueError, match="one element"):
        et.ones(2).item()
    with pytest.raises(ValueError, match="any"):
        bool(et.ones(2))
    with pytest.raises(TypeError, match="float32"):
        [1][et.ones(1)]
    assert isinstance(et.ones(1, "bfloat16").item(), float)
    assert len(et.ones((2, 3))) == 2
    assert [row.shape for row in et.ones((2, 3))] == [(3,), (3,)]
    with pytest.raises(TypeError, match="without axes"):
        len(et.ones(()))


def test_comparison_is_elementwise_and_tensors_are_hashable() -> None:
    x = et.ExTensor([1.0, 2.0])
    assert (x == 1.0).tolist() == [True, False]
    assert (x != x).tolist() == [False, False]
    assert x.__gt__(1.5).tolist() == [False, True]
    assert len({x, x}) == 1


def test_numpy_operands() -> None:
    x = et.ones(2)
    result = np.array([1.0, 2.0], np.float32) * x
    assert isinstance(result, et.ExTensor)
    assert result.tolist() == [1.0, 2.0]
    assert (x - np.float32(0.5)).dtype is et.float32
    with pytest.raises(TypeError, match="expected an ExTensor, a number or an array, got str"):
        x + "1"


def test_writes() -> None:
    x = et.zeros((2, 3))
    x[0, 1] = 5.0
    x[:, 2] = et.ExTensor([1.0, 2.0])
    assert x.tolist() == [[0, 5, 1], [0, 0, 2]]
    x.copy_(et.ones(3))
    assert x.tolist() == [[1] * 3] * 2
    x[et.ExTensor([1])] = 4
    assert x.tolist() == [[1] * 3, [4] * 3]
    with pytest.raises(TypeError, match="do not fit a int64"):
        et.zeros(2, "int64")[0] = et.ones(1)
    with pytest.raises(ValueError, match="broadcast to the selection"):
        x[0] = et.ones(2)
    with pytest.raises(ValueError, match="read-only"):
        et.ones(1).broadcast_to((3,))[0] = 1.0
    with pytest.raises(TypeError, match="shares scales between values"):
        et.ones((1, 32), "mxfp4")[0] = 1.0
    with pytest.raises(ValueError, match=r"expected shape \(2, 3\)"):
        x.assign_(et.zeros(3).data)
    with pytest.raises(TypeError, match="expected dtype float32"):
        x.assign_(et.zeros((2, 3), "float64").data)
    with pytest.raises(TypeError, match="expected an array of device"):
        x.assign_([[0.0] * 3] * 2)
    before = x.numpy()
    x.assign_(et.zeros((2, 3)).data)
    assert before[1, 0] == 4.0
    assert x.tolist() == [[0] * 3] * 2


def test_repr_shows_shape_dtype_device_and_values() -> None:
    x = et.ExTensor([1.0, 2.0], "bfloat16")
    text = repr(x)
    for part in ("(2,)", "bfloat16", x.device, "1", "2"):
        assert part in text
    assert "from=exp" in repr(et.ExTensor([1.0], requires_grad=True).exp())
    q = et.ones((2, 32), "mxfp4")
    for part in ("(2, 32)", "mxfp4", x.device, "codes", "scales", "66 66", "7d"):
        assert part in repr(q)
    for part in ("(2, 32)", "mxfp4", x.device, "codes", "scales", ">1</td>", ">-2</sup>"):
        assert part in q._repr_html_()
    assert len(repr(et.ones((1000, 1000)))) < 1000


def test_copies() -> None:
    x = et.ExTensor([1.0], requires_grad=True)
    for made in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert made.tolist() == [1.0]
        assert made.requires_grad
        assert made.data is not x.data
    q = pickle.loads(pickle.dumps(et.ones((1, 32), "mxfp4")))
    assert q.dtype is et.mxfp4
    with pytest.raises(TypeError, match=r"y\.detach"):
        copy.copy(x * 2.0)


def test_blocked_operands_compute_as_float32() -> None:
    q = et.ones((2, 32), "mxfp4")
    assert (q + q).dtype is et.float32
    assert (q * et.ones((2, 32), "bfloat16")).dtype is et.float32
    np.testing.assert_array_equal(q.sum().numpy(), 64.0)
    with pytest.raises(TypeError, match="dequantize"):
        et.concatenate([q, q])


def test_one_number_is_formatted_as_python_does() -> None:
    loss = et.ExTensor([2.0, 4.0], requires_grad=True).mean()
    assert f"{loss:.3f} {loss:>6.1f}" == "3.000    3.0"
    assert f"{et.ExTensor([[7]]):03d} {et.ExTensor(1.5, 'bfloat16'):.2e}" == "007 1.50e+00"
    assert f"{et.ones(2)}" == repr(et.ones(2))
    with pytest.raises(TypeError, match=r"format '\.2f': expected one element, got shape \(2,\)"):
        f"{et.ones(2):.2f}"


@pytest.mark.host
@pytest.mark.parametrize(
    "like",
    [et.zeros_like, et.ones_like, et.empty_like, lambda x: et.full_like(x, 3)],
    ids=["zeros", "ones", "empty", "full"],
)
def test_a_tensor_like_another_is_on_its_device(like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = et.ExTensor([1, 2], device="cpu")
    monkeypatch.setenv("EXTENSOR_DEVICE", "cuda")
    assert like(x).device == "cpu" and like(x).dtype is x.dtype


def test_a_device_is_named_and_has_no_stream() -> None:
    x = et.ones(2)
    for device, stream in (("cpu", 1), ("nowhere", None), ("nowhere", 1)):
        with pytest.raises(ValueError, match="to_device: expected one of cpu, .* no stream, got"):
            x.to_device(device, stream=stream)
    with pytest.raises(RuntimeError, match="the graph lives on one device; move the leaves"):
        (et.ones(2, requires_grad=True) * 2).to("cuda")


def test_six_codes_and_scales_of_blocks_are_shown() -> None:
    text = repr(et.ones((8, 64)).to_mxfp8())
    rows = [line.partition("=[")[2].partition(" ...")[0].split() for line in text.splitlines()]
    assert [len(row) for row in rows] == [0, 6, 6]
