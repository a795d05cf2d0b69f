"""Exchange with other array libraries: whose memory it is, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd import dlpack

DENSE = ["bool", "int8", "uint64", "float16", "float32", "float64"]


@pytest.mark.host
@pytest.mark.parametrize("name", DENSE)
def test_numpy_both_ways_without_a_copy(name: str) -> None:
    x = et.ones((3, 2), name)
    there = np.from_dlpack(x)
    assert np.shares_memory(there, x.numpy())
    back = et.from_dlpack(there)
    assert np.shares_memory(back.numpy(), there)
    assert back.dtype is x.dtype


@pytest.mark.host
def test_copy_is_a_copy() -> None:
    array = np.arange(3.0)
    assert not np.shares_memory(et.from_dlpack(array, copy=True).numpy(), array)
    assert np.shares_memory(et.from_dlpack(array, copy=False).numpy(), array)
    x = et.ExTensor(array)
    assert not np.shares_memory(np.from_dlpack(x, copy=True), x.numpy())


@pytest.mark.host
def test_torch_both_ways_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    for name in ("float32", "int64", "bfloat16"):
        x = et.ExTensor([[1.0, 2.5], [-3.0, 0.0]], name) if name != "int64" else et.arange(4)
        there = torch.from_dlpack(x)
        assert str(there.dtype) == f"torch.{name}"
        assert there.data_ptr() == x.data.ctypes.data
        back = et.from_dlpack(there)
        assert back.dtype is x.dtype
        assert back.data.ctypes.data == x.data.ctypes.data
        assert back.tolist() == x.tolist()


def test_bfloat16_to_itself() -> None:
    x = et.ExTensor([1.0, -2.5, 3.0], "bfloat16")
    with pytest.raises((RuntimeError, BufferError), match="Unsupported dtype"):
        np.from_dlpack(x)  # numpy knows none
    y = et.from_dlpack(x)
    assert y.dtype is et.bfloat16
    assert y.tolist() == [1.0, -2.5, 3.0]
    assert np.shares_memory(x.data, y.data)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_memory_lives_as_long_as_either_side(name: str) -> None:
    x = et.ones(1000, "float32").astype(name)
    array = x.data
    watch = weakref.ref(array)
    y = et.from_dlpack(x)
    del x, array
    gc.collect()
    assert watch() is not None
    assert y.astype("float32").sum().item() == 1000
    del y
    gc.collect()
    assert watch() is None


def test_refusals_say_the_way_out() -> None:
    q = et.ones((1, 32)).to_mxfp4()
    with pytest.raises(BufferError, match=r"x\.dequantize\(\)"):
        q.__dlpack__()
    with pytest.raises(TypeError, match=r"x\.dequantize\(\)"):
        np.asarray(q)
    with pytest.raises(BufferError, match=r"x\.detach\(\)"):
        np.from_dlpack(et.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match="expected an object with __dlpack__"):
        et.from_dlpack([1.0])


@pytest.mark.host
def test_array_follows_numpy_2() -> None:
    x = et.ExTensor([1.0, 2.0])
    assert np.shares_memory(np.asarray(x), x.data)
    assert not np.asarray(x).flags.writeable
    own = np.array(x, copy=True)
    own[0] = 5
    assert x.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="copy"):
        np.asarray(x, dtype=np.float64, copy=False)


@pytest.mark.parametrize("op", ["__add__", "__sub__", "__mul__", "__truediv__", "__eq__", "__lt__"])
def test_numpy_on_the_left(op: str) -> None:
    a, b = np.array([1.0, 2.0, 3.0], np.float32), np.array([2.0, 2.0, 2.0], np.float32)
    import operator

    function: Any = getattr(operator, op)
    result = function(a, et.ExTensor(b))
    assert isinstance(result, et.ExTensor)
    assert result.tolist() == function(a, b).tolist()
    with pytest.raises(TypeError):
        np.add(a, et.ExTensor(b))


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_equal_and_apart(again: Any) -> None:
    for x in (
        et.ExTensor([[1.0, 2.0]]),
        et.ExTensor([1.0], requires_grad=True),
        et.ones(3).astype("bfloat16"),
        et.randn(2, 32, seed=0).to_nvfp4(),
    ):
        y = again(x)
        assert y is not x
        assert (y.dtype, y.shape, y.requires_grad) == (x.dtype, x.shape, x.requires_grad)
        assert y.dequantize().tolist() == x.dequantize().tolist()


def test_bits_and_signs() -> None:
    n = et.ExTensor([0, 1, -5])
    assert (~n).tolist() == [-1, -2, 4]
    assert (~et.ExTensor([True, False])).tolist() == [False, True]
    with pytest.raises(TypeError, match="expected integers or bool"):
        ~et.ones(2)
    assert (+n).tolist() == [0, 1, -5]
    assert complex(et.ExTensor(2.5)) == 2.5


def test_unpickled_blocked_tensors_multiply() -> None:
    a, b = et.randn(4, 32, seed=0).to_mxfp4(), et.randn(32, 4, seed=1).to_mxfp4(axis=0)
    again = [pickle.loads(pickle.dumps(q)) for q in (a, b)]
    assert (again[0] @ again[1]).tolist() == (a @ b).tolist()


LAYOUTS = {
    "plain": lambda x: x,
    "strided": lambda x: x[::2, 1::2],
    "offset": lambda x: x[1:, 2:],
    "transposed": lambda x: x.T,
    "empty": lambda x: x[:0],
    "no axes": lambda x: x[1, 1],
}


@pytest.mark.host
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_any_layout_goes_to_torch_and_back(name: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    x = LAYOUTS[layout](et.arange(24).reshape(4, 6).astype(name))
    there = torch.from_dlpack(x)
    back = et.from_dlpack(there)
    assert (str(there.dtype), tuple(there.shape)) == (f"torch.{name}", x.shape)
    assert there.tolist() == back.tolist() == x.tolist()
    assert not x.size or back.data.ctypes.data == there.data_ptr() == x.data.ctypes.data
    mine = LAYOUTS[layout](torch.arange(24).reshape(4, 6).to(there.dtype))
    assert et.from_dlpack(mine).tolist() == mine.tolist()


@pytest.mark.host
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_what_runs_backwards_is_copied_for_torch_which_it_would_kill(name: str) -> None:
    x = et.arange(12).reshape(3, 4).astype(name)[::-1]
    assert x.data.strides[0] < 0
    with pytest.raises(BufferError, match=r"negative stride.*export x\.clone\(\)"):
        x.__dlpack__(copy=False)
    assert et.from_dlpack(x).tolist() == x.tolist()
    assert min(et.from_dlpack(x).data.strides) > 0
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(x).tolist() == x.tolist()
    assert torch.from_dlpack(x.clone()).tolist() == x.tolist()


@pytest.mark.host
def test_what_is_read_only_stays_so() -> None:
    array = np.ones((2, 3), np.float32)
    array.flags.writeable = False
    for x in (et.from_dlpack(array), et.ExTensor.from_numpy(array)):
        assert np.shares_memory(x.data, array) and not np.from_dlpack(x).flags.writeable
        with pytest.raises(ValueError, match=r"read-only: so is the array .*x\.clone\(\)"):
            x[0, 0] = 5
        x.clone()[0, 0] = 5
    assert array[0, 0] == 1


class Float8:
    """An exporter of torch's float8_e4m3fn, whose code is 10."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = np.zeros(2, np.uint8).__dlpack__()
        dlpack._dtype_of(capsule)[0] = 10
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_a_dtype_of_another_library_alone_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype code 10 of 8 bits; convert it.*as uint8"):
        et.from_dlpack(Float8())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_the_gradient(again: Any) -> None:
    """A model and its optimizer may be copied between backward and step."""
    x = et.ExTensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    y = again(x)
    assert y.grad.tolist() == [2.0, 4.0]
    assert y.grad is not x.grad and not np.shares_memory(y.grad.data, x.grad.data)


@pytest.mark.host
@pytest.mark.parametrize("kind", "?bhilqBHILQefdFD")
def test_every_dense_dtype_of_numpy_comes_and_goes(kind: str) -> None:
    array = np.array([[1, 0, 1]], kind)
    there = et.from_dlpack(array)
    assert there.dtype.numpy == array.dtype and np.array_equal(there.numpy(), array)
    assert np.array_equal(np.from_dlpack(there), array)
