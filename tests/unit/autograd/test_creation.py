"""What makes tensors: the options that all have, by enumeration, and values against numpy's."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import extensor as et

X = np.arange(4, dtype=np.float32)
CALLS: dict[str, tuple[Any, ...]] = {
    "arange": (4,), "asarray": (X,), "astype": (et.ExTensor(X), "float32"), "empty": ((4,),),
    "empty_like": (et.ExTensor(X),), "eye": (4,), "from_dlpack": (et.ExTensor(X),),
    "from_numpy": (X,), "full": ((4,), 2.0), "full_like": (et.ExTensor(X), 2.0),
    "linspace": (0.0, 1.0, 4), "ones": ((4,),), "ones_like": (et.ExTensor(X),), "rand": (4,),
    "randn": (4,), "zeros": ((4,),), "zeros_like": (et.ExTensor(X),),
}  # fmt: skip
"""What a call needs at least."""


def options(name: str) -> Any:
    return inspect.signature(getattr(et, name)).parameters


def floating(name: str) -> dict[str, str]:
    return {"dtype": "float32"} if "dtype" in options(name) else {}


def test_the_table_has_all_that_take_a_device() -> None:
    found = {
        name
        for name in dir(et)
        if inspect.isroutine(getattr(et, name)) and "device" in options(name)
    }
    assert found == CALLS.keys() | {"load"}


@pytest.mark.parametrize("name", CALLS)
def test_options(name: str) -> None:
    make, args = getattr(et, name), CALLS[name]
    made = make(*args)
    assert made.device == "cpu" and not made.requires_grad
    with pytest.raises(ValueError, match="no d(evice|type) named 'nowhere'"):
        make(*args, device="nowhere")
    if "requires_grad" in options(name):
        assert make(*args, requires_grad=True, **floating(name)).requires_grad
    if "dtype" in options(name) and name != "astype":
        for dtype in ("float64", "float16", "bfloat16"):
            assert make(*args, dtype=dtype).dtype.name == dtype
        if name not in ("rand", "randn"):
            assert make(*args, dtype="int16").dtype.name == "int16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_empty_tensor_of_16_bits_is_no_cast_of_old_memory(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bits read as float32 overflow here, which is a warning."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 3e38, dtype))
    assert not et.empty((4,), dtype=dtype).numpy().any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: et.ExTensor([1e6, -1e6], dtype="float16"),
        lambda: et.asarray(np.float64([1e6, -1e6]), dtype="float16"),
        lambda: et.full((2,), 1e6, dtype="float16") * et.ExTensor([1.0, -1.0], dtype="float16"),
        lambda: et.linspace(1e6, -1e6, 2, dtype="float16"),
        lambda: et.arange(1e6, -2e6, -2e6, dtype="float16"),
    ],
)
def test_numbers_beyond_a_float_are_infinite_as_of_a_cast(make: Any) -> None:
    """Without numpy's warning, which the operations do not give either."""
    np.testing.assert_array_equal(make().numpy(), np.float16([np.inf, -np.inf]))


def test_integers_that_cannot_hold_a_float_are_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match="invalid value"):
        et.ExTensor(np.array([np.nan], np.float32), "int32")


@pytest.mark.parametrize("make", [et.rand, et.randn])
def test_a_shape_and_more_sizes_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"expected an int or a tuple of ints, got \(\(2, 3\), 4\)"):
        make((2, 3), 4)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((5,), {}), ((2, 5), {}), ((5, 2, -1), {}), ((0, 1, 0.3), {}), ((1, 1), {}),
        ((-3, 3, 2), {"dtype": "int32"}), ((3, -3), {}), ((0.5, 4.0), {}),
    ],
)  # fmt: skip
def test_arange_as_numpy(args: Any, options: Any) -> None:
    expected = np.arange(*args, **options)
    made = et.arange(*args, **options)
    assert made.shape == expected.shape and made.dtype.is_integer == (expected.dtype.kind == "i")
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_linspace_as_numpy(count: int, endpoint: bool) -> None:
    made = et.linspace(-1.5, 4.0, count, "float64", endpoint=endpoint).numpy()
    np.testing.assert_allclose(made, np.linspace(-1.5, 4.0, count, endpoint=endpoint), rtol=1e-15)


@pytest.mark.parametrize("k", [-4, -1, 0, 2, 9])
@pytest.mark.parametrize(("rows", "columns"), [(3, None), (3, 5), (4, 2), (0, 2)])
def test_eye_as_numpy(rows: int, columns: int | None, k: int) -> None:
    np.testing.assert_array_equal(et.eye(rows, columns, k=k).numpy(), np.eye(rows, columns, k))
