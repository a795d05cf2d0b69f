"""Products of blocked tensors multiply what is stored, whatever their dtypes and axes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.primitive import PRIMITIVES

K = 96
PRODUCTS = ("block_scaled_matmul", "weight_only_matmul")
Made = Callable[[et.ExTensor], et.ExTensor]
FORMATS: dict[str, Made] = {
    "mxfp4": lambda x: x.to_mxfp4(),
    "nvfp4": lambda x: x.to_nvfp4(),
    "mxfp8": lambda x: x.to_mxfp8(),
    "int8": lambda x: x.to_int8(),
    "int8 of a tensor": lambda x: x.to_int8(tile="tensor", symmetric=False),
    "int4 of groups": lambda x: x.to_int4(group_size=32),
}


def tensor(*shape: int, seed: int = 0) -> et.ExTensor:
    rng = np.random.default_rng((seed, *shape))
    return et.from_numpy(rng.standard_normal(shape).astype(np.float32))


def refuse(*args: Any) -> None:
    raise AssertionError("an operand was dequantized")


@contextmanager
def packed() -> Iterator[list[tuple[str, Any]]]:
    """Which products the backend is asked for, and their left operands; nothing else may decode."""
    calls: list[tuple[str, Any]] = []
    depth = 0
    backend = type(tensor(1).backend)
    decode, honest = backend.dequantize, PRIMITIVES["dequantize"]

    def watched(name: str) -> Callable[..., Any]:
        method = getattr(backend, name)

        def spy(self: Any, a: Any, b: Any) -> Any:
            nonlocal depth
            if not depth:  # not what a batch is made of
                calls.append((name, a))
            depth += 1
            try:
                return method(self, a, b)
            finally:
                depth -= 1

        return spy

    def within(self: Any, *args: Any) -> Any:
        assert depth, "an operand was decoded before the product"
        return decode(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        for name in PRODUCTS:
            patch.setattr(backend, name, watched(name))
        patch.setattr(backend, "dequantize", within)
        changed = dataclasses.replace(honest, forward=refuse)
        patch.setitem(PRIMITIVES, "dequantize", changed)
        yield calls


def values(x: et.ExTensor) -> np.ndarray:
    return x.dequantize().to("float64").numpy()


def check(product: et.ExTensor, left: np.ndarray, right: np.ndarray) -> None:
    """Float32, within the bound of any order: gamma_(K + 6) twice; that of FP8 on a GPU."""
    cpu = product.device == "cpu"
    unit = 2 * (K + 6) * 2.0**-24 if cpu else K * 34 / 32 * 2.0**-13 + 2.0**-20
    expected, size = left @ right, np.abs(left) @ np.abs(right)
    assert product.dtype is et.float32 and product.shape == expected.shape
    assert (np.abs(product.numpy() - expected) <= unit * size).all()


LEADS = ((), (5,), (2, 5), (2, 3, 5), (40,), (0, 5))


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_dense_rows_of_any_axes_are_one_product(lead: tuple[int, ...], dtype: str) -> None:
    x, w = tensor(*lead, K).to(dtype), tensor(7, K).to_mxfp4()
    with packed() as used:
        results = x @ w.T, et.linear(x, w), et.linear(x, w, et.zeros(7))
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    rows = int(np.prod(lead))
    assert [(name, a.dtype.name, a.shape) for name, a in used] == [
        ("weight_only_matmul", kind, (rows, K))
    ] * 3
    for y in results:
        check(y, values(x), values(w).T)


def formats_of(*leads: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Each format with each; without values a tensor has no scale."""
    pairs = [(name, lead) for name in FORMATS for lead in leads]
    return [(name, lead) for name, lead in pairs if np.prod(lead) or "tensor" not in name]


@pytest.mark.parametrize(("name", "lead"), formats_of(*LEADS), ids=str)
def test_blocked_rows_of_any_axes_are_one_product(name: str, lead: tuple[int, ...]) -> None:
    x, w = FORMATS[name](tensor(*lead, K)), FORMATS[name](tensor(7, K))
    with packed() as used:
        results = x @ w.T, et.linear(x, w)
    rows = int(np.prod(lead))
    assert [(method, a.shape) for method, a in used] == [("block_scaled_matmul", (rows, K))] * 2
    for y in results:
        check(y, values(x), values(w).T)


@pytest.mark.parametrize(
    ("rows", "calls"),
    [(32, ["block_scaled_matmul"]), (20, ["block_scaled_matmul"] * 3)],
    ids=["whole", "cut"],
)
def test_tiles_of_several_rows_are_not_decoded(rows: int, calls: list[str]) -> None:
    """One product where the tiles of one matrix end with it, else one for each matrix."""
    x, w = tensor(3, rows, K).to_mxfp4(tile=(16, 32)), tensor(7, K).to_mxfp4()
    with packed() as used:
        y = x @ w.T
    assert [name for name, _ in used] == calls
    check(y, values(x), values(w).T)


@pytest.mark.parametrize(("name", "lead"), formats_of((3,), (2, 3), (1,), (0,)), ids=str)
def test_a_batch_of_blocked_matrices(name: str, lead: tuple[int, ...]) -> None:
    a, b = FORMATS[name](tensor(*lead, 5, K)), FORMATS[name](tensor(*lead, 7, K))
    transposed = b.swapaxes(-1, -2)
    with packed() as used:
        y = a @ transposed
    assert [method for method, _ in used] == ["block_scaled_matmul"]
    check(y, values(a), values(transposed))


BROADCAST = (((2, 3), (1, 3)), ((), (3,)), ((3,), (1,)), ((2, 1), (3,)), ((1,), (3,)))


@pytest.mark.parametrize(("left", "right"), BROADCAST, ids=str)
@pytest.mark.parametrize("dense", [None, "float32", "bfloat16"])
def test_leading_axes_broadcast(
    left: tuple[int, ...], right: tuple[int, ...], dense: str | None
) -> None:
    a, b = tensor(*left, 5, K), tensor(*right, 7, K).to_nvfp4().swapaxes(-1, -2)
    a = a.to_mxfp4() if dense is None else a.to(dense)
    with packed() as used:
        y = a @ b
    count = int(np.prod(np.broadcast_shapes(left, right)))
    method = "block_scaled_matmul" if dense is None else "weight_only_matmul"
    assert [name for name, _ in used] == [method] * count
    assert dense is None or {a.dtype.name for _, a in used} == {dense}
    check(y, values(a), values(b))


def test_a_batch_of_dense_matrices_meets_one_of_weights() -> None:
    a, b = tensor(3, 5, K), tensor(3, 7, K).to_mxfp4().swapaxes(-1, -2)
    with packed() as used:
        y = a @ b
    assert [name for name, _ in used] == ["weight_only_matmul"] * 3
    check(y, values(a), values(b))


def test_vectors_on_either_side() -> None:
    vector, w, x = tensor(K).to_mxfp4(), tensor(7, K).to_mxfp4(), tensor(2, 5, K)
    with packed() as used:
        results = vector @ w.T, x @ vector, vector @ vector
    assert [name for name, _ in used] == [
        "block_scaled_matmul",
        "weight_only_matmul",
        "block_scaled_matmul",
    ]
    check(results[0], values(vector), values(w).T)
    check(results[1], values(x), values(vector))
    check(results[2], values(vector), values(vector))


def test_einsum_of_blocked_matrices() -> None:
    a, b = tensor(5, K).to_mxfp4(), tensor(7, K).to_mxfp4()
    with packed():
        one, two = et.einsum("ik,jk->ij", a, b), et.einsum("ik,kj->ij", tensor(5, K), b.T)
    check(one, values(a), values(b).T)
    check(two, values(tensor(5, K)), values(b).T)


def test_what_is_still_a_product_of_decoded_values() -> None:
    """As the module's docstring says; float64 stays float64."""
    a, b = tensor(2, 5, K), tensor(K, 7)
    across = tensor(2, K, 7).to_mxfp4(axis=1, tile=(2, 32))
    for left, right in ((a.to_mxfp4(), b), (a.to("float64"), b.to_mxfp4(axis=0)), (a, across)):
        expected = left.dequantize() @ right.dequantize()
        got = left @ right
        assert got.dtype is expected.dtype and np.array_equal(got.numpy(), expected.numpy())
        with packed(), pytest.raises(AssertionError, match="an operand was dequantized"):
            left @ right


# --- gradients ----------------------------------------------------------------------------------

SHAPES = (
    ((K,), (7, K)),
    ((5, K), (7, K)),
    ((2, 3, 5, K), (7, K)),
    ((2, 5, K), (2, 7, K)),
    ((2, 1, 5, K), (3, 7, K)),
    ((5, K), (3, 7, K)),
)


GRADIENTS = [
    (op, kind, left, right)
    for op in ("matmul", "linear")
    for kind in ("float32", "bfloat16", "float16", "mxfp4")
    for left, right in SHAPES
    if (op == "matmul" or len(right) == 2)  # linear takes a matrix
    # A blocked vector of a graph cannot become a row: an error says so.
    and (op == "linear" or len(left) > 1 or kind != "mxfp4")
]


@pytest.mark.parametrize(("op", "kind", "left", "right"), GRADIENTS, ids=str)
def test_gradients_are_those_of_the_decoded_operands(
    op: str, kind: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Straight-through on both sides; weights with a graph of their own stay packed, too."""
    x, w = tensor(*left), tensor(*right, seed=1)
    x = x if kind == "mxfp4" else x.to(kind)
    weights = w if op == "linear" else et.from_numpy(np.swapaxes(w.numpy(), -1, -2).copy())
    x.requires_grad = weights.requires_grad = True
    a = x.to_mxfp4() if kind == "mxfp4" else x
    b = weights.to_mxfp4(axis=weights.ndim - (1 if op == "linear" else 2))
    with packed() as used:
        y = et.linear(a, b) if op == "linear" else a @ b
    assert used
    g = tensor(*y.shape, seed=2)
    (y * g).sum().backward()
    dense = [t.detach().dequantize().to("float64") for t in (a, b)]
    for t in dense:
        t.requires_grad = True
    z = et.linear(*dense) if op == "linear" else dense[0] @ dense[1]
    (z * g).sum().backward()
    for tracked, expected in ((x, dense[0]), (weights, dense[1])):
        assert tracked.grad is not None and expected.grad is not None
        assert tracked.grad.dtype is tracked.dtype
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-10}.get(tracked.dtype.name, 2.0**-18)
        error = np.abs(values(tracked.grad) - expected.grad.numpy())
        assert error.max() <= unit * np.abs(expected.grad.numpy()).max()


@pytest.mark.parametrize(("left", "right"), SHAPES[1:], ids=str)
def test_second_derivatives_of_dense_rows(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    def curved(x: et.ExTensor, w: et.ExTensor) -> np.ndarray:
        """Of |d (y . y) / dx|^2."""
        x.requires_grad = True
        y = x @ w
        (first,) = et.grad((y * y).sum(), [x], create_graph=True)
        (second,) = et.grad((first * first).sum(), [x])
        return values(second)

    x, w = tensor(*left), tensor(*right).to_mxfp4().swapaxes(-1, -2)
    expected = curved(x.detach().to("float64"), w.dequantize().to("float64"))
    error = np.abs(curved(x, w) - expected)
    assert error.max() <= 2.0**-16 * np.abs(expected).max()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, w: et.linear(x, w.to_mxfp4(axis=0)),
            "linear: the weight is blocked along axis 0, expected the contraction axis 1; quantize "
            "it with axis=1",
        ),
        (
            lambda x, w: et.linear(x.to_mxfp4(axis=1), w.to_mxfp4()),
            "linear: the input is blocked along axis 1, expected the contraction axis 2",
        ),
        (
            lambda x, w: x @ w.to_mxfp4().reshape((1, *w.shape)),
            "matmul: the right operand is blocked along axis 2, expected the contraction axis 1",
        ),
        (
            lambda x, w: x.to_mxfp4() @ tensor(3, 64, 64).to_mxfp4(axis=1),
            "expected shapes that broadcast",
        ),
    ],
)
def test_errors_name_the_axes_of_the_call(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(tensor(2, 5, 64), tensor(64, 64))
