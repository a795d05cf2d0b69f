"""Backward, gradients as functions, and what the graph keeps."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.apply import apply
from extensor.autograd.node import Node
from extensor.autograd.primitive import FUNCTIONS, OPS, PRIMITIVES, Sample, primitive


def leaf(*values: float, dtype: str = "float64") -> et.ExTensor:
    return et.ExTensor(np.array(values), dtype, requires_grad=True)


def test_backward_adds_up_over_paths_and_calls() -> None:
    x = leaf(1.0, 2.0)
    y = x * x + x * 3.0
    y.sum().backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), [5.0, 7.0])
    (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [7.0, 9.0])
    x.zero_grad()
    assert x.grad is None


def test_gradient_argument() -> None:
    x = leaf(1.0, 2.0)
    y = x * x
    with pytest.raises(ValueError, match=r"shape \(2,\) needs a gradient"):
        y.backward()
    with pytest.raises(ValueError, match="expected a gradient of the output's shape"):
        y.backward(et.ones(3, "float64"))
    seed = et.ExTensor(np.array([1.0, 10.0]))
    y.backward(seed)
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 40.0])


def test_grads_do_not_share_memory() -> None:
    """add hands the same array to both; writing to one .grad must not change the other."""
    a, b, seed = leaf(1.0, 2.0), leaf(3.0, 4.0), et.ones(2, "float64")
    (a + b).backward(seed)
    assert a.grad is not None
    assert b.grad is not None
    a.grad[...] = 7.0
    np.testing.assert_array_equal(b.grad.numpy(), [1.0, 1.0])
    np.testing.assert_array_equal(seed.numpy(), [1.0, 1.0])
    x = leaf(1.0, 2.0)
    x.sum().backward()  # a broadcast view inside
    assert x.grad is not None
    x.grad[0] = 5.0
    np.testing.assert_array_equal(x.grad.numpy(), [5.0, 1.0])


def test_a_gradient_that_a_kernel_made_is_taken_and_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of large results too, whose memory a kernel's allocator owns."""
    x = et.ExTensor(np.ones((512, 1024), np.float32), requires_grad=True)
    made, kernel = [], x.backend.softmax_grad

    def softmax_grad(*args: Any) -> Any:
        made.append(kernel(*args))
        return made[-1]

    monkeypatch.setattr(x.backend, "softmax_grad", softmax_grad)
    x.softmax().sum().backward()
    assert x.grad is not None
    assert x.grad.data is made[0]


def test_a_second_pass_needs_retain_graph() -> None:
    x = leaf(2.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [8.0])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [8.0])


def test_nothing_to_differentiate() -> None:
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        et.ones(1).backward()
    x = leaf(1.0)
    with et.no_grad():
        y = x * x
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        y.backward()
    x.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])


def test_requires_grad_is_for_float_leaves() -> None:
    with pytest.raises(TypeError, match="got int64"):
        et.ones(2, "int64").requires_grad = True
    with pytest.raises(TypeError, match="keep the float tensor as the leaf"):
        et.ones((2, 32), "mxfp4").requires_grad = True
    with pytest.raises(RuntimeError, match="expected a leaf"):
        (leaf(1.0) * 2.0).requires_grad = False


WRITES = [
    lambda t: t.__setitem__(0, 5.0),
    lambda t: t.copy_(et.zeros(t.shape, t.dtype)),
    lambda t: t.assign_(et.zeros(t.shape, t.dtype).data),
]


@pytest.mark.parametrize("write", WRITES)
def test_backward_refuses_what_was_overwritten(write: Any) -> None:
    x = leaf(1.0, 2.0)
    y = (x * x).sum()
    with et.no_grad():
        write(x)
    with pytest.raises(RuntimeError, match=r"multiply: .* written in place 2 time"):
        y.backward()  # both of its inputs are x
    assert x.grad is None
    (x * x).sum().backward()
    assert x.grad is not None


def test_views_share_the_version() -> None:
    x = leaf(1.0, 2.0)
    y = x.exp()
    z = y.sum()
    with et.no_grad():
        y.detach().reshape((2, 1))[0] = 9.0
    with pytest.raises(RuntimeError, match=r"exp: .* written in place"):
        z.backward()
    copied = x.exp()
    z = copied.sum()
    with et.no_grad():
        copied.clone()[0] = 9.0
        copied[np.array([0])][0] = 9.0  # a selection by array is a copy
    z.backward()


def test_a_write_that_no_gradient_needs_is_fine() -> None:
    x = leaf(1.0, 2.0)
    y = x + 1.0
    z = (y * 3.0).sum()
    with et.no_grad():
        y[0] = 100.0  # 3.0 is read, for x's sake, and y is not, for 3.0 wants no gradient
    with pytest.raises(RuntimeError, match="written in place"):
        z.backward()  # but the engine keeps both: it says so rather than guess
    x = leaf(1.0, 2.0)
    y = x + 1.0
    z = y.sum()
    with et.no_grad():
        y[0] = 100.0
    z.backward()


def test_writes_into_a_graph_are_refused() -> None:
    x = leaf(1.0, 2.0)
    with pytest.raises(RuntimeError, match="no_grad"):
        x[0] = 1.0
    with pytest.raises(RuntimeError, match="no_grad"):
        (x * 2.0)[0] = 1.0


def test_deep_graphs_need_no_recursion() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(30_000):
        y = y + 1.0
    y.backward(retain_graph=True)
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])
    del y  # freed without recursion too


def _step(w: et.ExTensor, x: et.ExTensor) -> None:
    h = (x @ w).relu()
    loss = (h * h).mean() + et.cross_entropy(h, et.zeros(h.shape[0], "int64"))
    loss.backward()
    w.grad = None


@pytest.mark.parametrize("finish", ["backward", "dropped", "create_graph"])
def test_memory_is_flat_without_the_garbage_collector(finish: str) -> None:
    w = et.randn(32, 32, seed=0, requires_grad=True)
    x = et.randn(64, 32, seed=1)

    def step() -> None:
        if finish == "backward":
            _step(w, x)
        elif finish == "dropped":
            (x @ w).exp().sum()
        else:
            g = et.grad((x @ w).tanh().sum(), w, create_graph=True)
            et.grad((g * g).sum(), w)

    def live() -> tuple[int, int]:
        """Bytes of array data, and how many tensors and nodes there are."""
        arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        # type(), not isinstance: other libraries' objects answer __class__ with a warning
        objects = sum(issubclass(type(o), (et.ExTensor, Node)) for o in gc.get_objects())
        return sum(trace.size for trace in traces), objects

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        step()
        before = live()
        for _ in range(10):
            step()
        assert live() == before
    finally:
        tracemalloc.stop()
        gc.enable()


def test_grad_mode_is_thread_local() -> None:
    seen: dict[str, bool] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with et.no_grad():
            seen["other"] = et.is_grad_enabled()
            inside.set()
            done.wait(5)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(5)
    assert et.is_grad_enabled()
    assert (leaf(1.0) * 2.0).requires_grad
    done.set()
    thread.join()
    assert seen == {"other": False}


def test_grad_modes_nest_and_decorate() -> None:
    with et.no_grad():
        with et.enable_grad():
            assert et.is_grad_enabled()
        assert not et.is_grad_enabled()

    @et.no_grad()
    def product(x: et.ExTensor) -> et.ExTensor:
        return x * x

    assert not product(leaf(1.0)).requires_grad
    assert not product(leaf(1.0)).requires_grad
    with pytest.raises(KeyError), et.no_grad():
        raise KeyError
    assert et.is_grad_enabled()


def test_grad_of_leaves_and_inner_results() -> None:
    x, unused = leaf(1.0, 2.0), leaf(0.0)
    h = x * x
    y = (h * h).sum()
    gx, gh, gu = et.grad(y, [x, h, unused])
    np.testing.assert_array_equal(gx.numpy(), [4.0, 32.0])
    np.testing.assert_array_equal(gh.numpy(), [2.0, 8.0])
    np.testing.assert_array_equal(gu.numpy(), [0.0])
    assert x.grad is None
    assert et.grad(y.detach() * x.sum(), x).shape == (2,)
    with pytest.raises(ValueError, match="requires a gradient"):
        et.grad(y, et.ones(1))
    with pytest.raises(TypeError, match="expected the inputs"):
        et.grad(y)


def test_grad_visits_only_what_leads_to_the_inputs() -> None:
    visited: list[str] = []
    exp = PRIMITIVES["exp"]

    def spy(g: et.ExTensor, out: et.ExTensor, x: et.ExTensor) -> et.ExTensor:
        visited.append("exp")
        return g * out

    PRIMITIVES["exp"] = type(exp)("exp", exp.forward, vjps=(spy,))
    try:
        a, b = leaf(1.0), leaf(2.0)
        y = (a.exp() * b).sum()
        et.grad(y, b, retain_graph=True)
        assert visited == []
        et.grad(y, a)
        assert visited == ["exp"]
    finally:
        PRIMITIVES["exp"] = exp


def test_functional_forms() -> None:
    def f(x: et.ExTensor, y: et.ExTensor) -> et.ExTensor:
        return (x * x * y).sum()

    x, y = et.ExTensor(np.array([1.0, 2.0])), et.ExTensor(np.array([3.0, 4.0]))
    value, g = et.value_and_grad(f)(x, y)
    assert value.item() == 19.0
    assert not value.requires_grad
    np.testing.assert_array_equal(g.numpy(), [6.0, 16.0])
    np.testing.assert_array_equal(et.grad(f)(x, y).numpy(), g.numpy())
    _, (_, gy) = et.value_and_grad(f, argnums=(0, 1))(x, y)
    np.testing.assert_array_equal(gy.numpy(), [1.0, 4.0])
    out, pull = et.vjp(lambda a: a * a, x)
    np.testing.assert_array_equal(out.numpy(), [1.0, 4.0])
    for _ in range(2):
        np.testing.assert_array_equal(pull(y)[0].numpy(), [6.0, 16.0])
    assert not x.requires_grad


@pytest.mark.parametrize("form", [et.value_and_grad, et.grad])
def test_functional_forms_take_functions(form: Any) -> None:
    with pytest.raises(TypeError, match=r"function.*got int$"):
        form(3)


def test_a_gradient_by_inputs_is_of_a_tensor() -> None:
    with pytest.raises(TypeError, match="grad.*got function with inputs$"):
        et.grad(lambda x: x, et.ExTensor([1.0]))  # type: ignore[call-overload]


def test_hvp_is_the_hessian_times_a_vector() -> None:
    a = np.array([[2.0, 1.0], [1.0, 3.0]])
    matrix = et.ExTensor(a)

    def f(x: et.ExTensor) -> et.ExTensor:
        return (x * (matrix @ x)).sum() * 0.5 + (x**3).sum()

    x, v = np.array([1.0, -2.0]), np.array([0.5, 1.5])
    product = et.hvp(f, et.ExTensor(x), et.ExTensor(v))
    np.testing.assert_allclose(product.numpy(), a @ v + 6 * x * v, rtol=1e-12)
    zero = et.hvp(lambda t: t.sum(), et.ExTensor(x), et.ExTensor(v))
    np.testing.assert_array_equal(zero.numpy(), [0.0, 0.0])
    with pytest.raises(ValueError, match="vector of each input's shape"):
        et.hvp(f, et.ExTensor(x), et.ones(3))


def test_hvp_of_several_inputs_has_every_mixed_derivative() -> None:
    arrays = [np.array(row) for row in ([1.0, 2.0], [3.0, -1.0], [0.5, 2.0])]
    rows = [np.array(row) for row in ([1.0, 0.5], [2.0, 1.0], [-1.0, 3.0])]
    (x, y, z), (u, v, w) = arrays, rows
    found = et.hvp(
        lambda x, y, z: (x**2 * y * z).sum(), map(et.ExTensor, arrays), map(et.ExTensor, rows)
    )
    expected = (
        2 * y * z * u + 2 * x * z * v + 2 * x * y * w, 2 * x * z * u + x**2 * w,
        2 * x * y * u + x**2 * v,
    )  # fmt: skip
    np.testing.assert_allclose([part.numpy() for part in found], expected, rtol=1e-12)


def test_third_derivative() -> None:
    x = leaf(2.0)
    g: Any = (x**4).sum()
    for _ in range(3):
        g = et.grad(g, x, create_graph=True).sum()
    assert g.item() == pytest.approx(48.0)


def test_backward_with_create_graph_gives_grads_with_graphs() -> None:
    x = leaf(3.0)
    (x**3).sum().backward(create_graph=True)
    assert x.grad is not None
    assert x.grad.requires_grad
    second = et.grad(x.grad.sum(), x)
    np.testing.assert_allclose(second.numpy(), [18.0])
    x.grad = None


@pytest.fixture
def once() -> Iterator[str]:
    """A primitive whose gradient is raw and cannot be differentiated again."""

    @primitive(
        name="test_once",
        forward=lambda backend, x, factor: (x * factor, "kept"),
        fused_vjp=lambda backend, g, out, inputs, needs, factor, saved: (g * factor,),
        once="it is only a test",
        saves=True,
        reads="nothing",
        samples=lambda rng: [Sample((np.ones(2),), {"factor": 2.0})],
    )
    def test_once(x: et.ExTensor, factor: float) -> et.ExTensor:
        return apply("test_once", x, factor=factor)

    yield "test_once"
    for table in (OPS, PRIMITIVES, FUNCTIONS):
        table.pop("test_once")


def test_a_primitive_may_refuse_a_second_derivative(once: str) -> None:
    x = leaf(1.0, 2.0)
    y = (apply(once, x, factor=3.0) * x).sum()
    g = et.grad(y, x, retain_graph=True)
    np.testing.assert_array_equal(g.numpy(), [6.0, 12.0])
    recorded = et.grad(y, x, create_graph=True)
    np.testing.assert_array_equal(recorded.numpy(), [6.0, 12.0])
    with pytest.raises(RuntimeError, match="cannot be differentiated again: it is only a test"):
        et.grad(recorded.sum(), x)


def test_nan_stand_ins_show_what_should_not_be_read() -> None:
    """A VJP that reads an input it declared it would not gets NaN, not plausible zeros."""
    exp, name = PRIMITIVES["exp"], f"exp_{threading.get_ident()}"  # other threads need exp whole
    PRIMITIVES[name] = type(exp)(
        name, exp.forward, vjps=(lambda g, out, x: g * x.exp(),), reads="nothing"
    )
    try:
        x = leaf(1.0)
        apply(name, x).backward()
        assert np.isnan(x.grad.numpy()).all()
    finally:
        del PRIMITIVES[name]


def test_threads_that_share_a_leaf_lose_no_gradient() -> None:
    class Slow(et.ExTensor):
        """Reading its gradient takes long enough for another thread to read it too."""

        @property
        def grad(self) -> et.ExTensor | None:
            kept = self.kept
            time.sleep(1e-3)
            return kept

        @grad.setter
        def grad(self, value: et.ExTensor | None) -> None:
            self.kept = value

    x = Slow(np.zeros(4), requires_grad=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: (x * 1.0).sum().backward(), range(40)))
    assert x.grad is not None and x.grad.tolist() == [40.0] * 4


@pytest.mark.parametrize("use", ["once", "twice", "asked for", "of a sum"])
def test_a_gradient_may_be_written_over_if_nobody_else_holds_it(
    monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    context = et.layer_context(et.RECIPES["mxfp4"].layers)
    x, w = et.randn((4, 32), seed=0), et.randn((32, 32), seed=1)
    x.requires_grad = True
    backend, honest, seen = x.backend, x.backend.gelu_grad, []

    def gelu_grad(g: Any, x: Any, phi: Any, overwrites: bool = False) -> Any:
        seen.append(overwrites)
        return honest(g, x, phi)

    monkeypatch.setattr(backend, "gelu_grad", gelu_grad)
    monkeypatch.setattr(backend, "overwriting_vjps", {"gelu_exact"}, raising=False)
    hidden = et.gelu(x)
    y = hidden + 1.0 if use == "of a sum" else et.quantized_matmul(hidden, w, context)
    y = y + et.quantized_matmul(hidden, w, context) if use == "twice" else y
    if use == "asked for":
        et.grad(y.sum(), [hidden, x])
    else:
        y.sum().backward()
    assert seen == [use == "once"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_gradient_of_another_dtype_is_rounded_to_the_outputs(dtype: str) -> None:
    x = et.ones(3, requires_grad=True)
    (x * 3).backward(et.ExTensor([0.1, 0.3, 1 / 7], dtype))
    assert x.grad is not None and x.grad.dtype is et.float32
    expected = np.float32(3) * np.array([0.1, 0.3, 1 / 7], dtype).astype(np.float32)
    np.testing.assert_array_equal(x.grad.numpy(), expected)
