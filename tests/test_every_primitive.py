"""Every operation in the registry, by what its declaration says about it.

Nothing here names an operation: whoever declares one is tested.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import extensor as et
import extensor.ops.prequantized  # the registry is complete once its declarations are imported
from extensor.autograd import tape
from extensor.autograd.primitive import FUNCTIONS, OPS, Op, Primitive, Sample
from extensor.autograd.pullback import node_gradients
from extensor.testing import assert_bitwise_equal, gradcheck, gradgradcheck

HALVES = (et.float16, et.bfloat16)


def _samples(op: Op) -> list[Sample]:
    return list(op.samples(np.random.default_rng(zlib.crc32(op.name.encode()))))


def _cases(*kinds: str) -> list[Any]:
    return [
        pytest.param(op, sample, id=f"{name}-{i}")
        for name, op in sorted(OPS.items())
        if op.check in kinds
        for i, sample in enumerate(_samples(op))
    ]


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float64


class Call:
    """An operation with a sample's arguments, as a function of the float64 ones."""

    def __init__(self, op: Op, sample: Sample) -> None:
        self.op, self.sample = op, sample
        self.points: list[np.ndarray[Any, Any]] = []
        for value in self._flat():
            if _is_float(value):
                self.points.append(value)

    def _flat(self) -> Iterator[Any]:
        for value in self.sample.args:
            yield from value if isinstance(value, list) else [value]

    def inputs(self, dtype: Any = et.float64, requires_grad: bool = False) -> list[et.ExTensor]:
        made = [et.ExTensor(p, dtype) for p in self.points]
        for tensor in made:
            tensor.requires_grad = requires_grad
        return made

    def __call__(self, *inputs: et.ExTensor) -> Any:
        rest = iter(inputs)

        def made(value: Any) -> Any:
            if isinstance(value, list) and any(isinstance(v, np.ndarray) for v in value):
                return [made(v) for v in value]
            if not isinstance(value, np.ndarray):
                return value
            return next(rest) if _is_float(value) else et.ExTensor(value)

        return self.op.function(*[made(v) for v in self.sample.args], **self.sample.kwargs)


def _outputs(result: Any) -> list[et.ExTensor]:
    return [result] if isinstance(result, et.ExTensor) else list(result)


def test_the_registry_is_not_empty() -> None:
    assert len(OPS) > 100
    assert all(FUNCTIONS[name] is op.function for name, op in OPS.items())


@pytest.mark.parametrize("name", sorted(OPS))
def test_declarations_are_complete(name: str) -> None:
    op = OPS[name]
    assert _samples(op), "an operation without samples is not tested"
    assert op.function.__doc__, "an operation without a docstring"
    if not op.function.__name__.startswith("_") and not (op.primitive and op.primitive.once):
        assert op.errors or op.check == "forward", "an operation without bad inputs"


def test_only_what_has_no_slope_is_without_gradient() -> None:
    """An operation that gives floats has first and second derivatives, but for those named here."""
    named = {
        "floor_divide": "steps",
        "nextafter": "the next float of the dtype is no function of real numbers",
        **dict.fromkeys(("imag", "real_part"), "of complex numbers"),
        **dict.fromkeys(("block_scaled_matmul", "dequantize"), "of codes"),
        "grouped_weight_only_matmul": "of codes; tests/unit/nn/test_mixture.py",
        **dict.fromkeys(("quantize", "quantized_matmul", "quantized_conv2d"), "straight-through"),
        **dict.fromkeys(("prequantized_matmul", "prequantized_conv2d"), "straight-through"),
        "take_rows": "of codes; tests/unit/optim/test_weights_in_blocks.py",
    }
    found = set()
    for name, op in OPS.items():
        if op.check == "forward":
            call = Call(op, _samples(op)[0])
            outputs = _outputs(call(*call.inputs()))
            if any(out.dtype.is_blocked or out.dtype.is_float for out in outputs):
                found.add(name)
    assert found == set(named)


@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad", "forward"))
def test_forward(op: Op, sample: Sample) -> None:
    call = Call(op, sample)
    inputs = call.inputs()
    before = [x.numpy().copy() for x in inputs]
    result = call(*inputs)
    for x, old in zip(inputs, before, strict=True):
        assert_bitwise_equal(x.numpy(), old, f"{op.name} wrote to its input")
    if sample.expected is not None:
        # float32 inputs are summed in the device's order: K = 40 terms of order 1 at 2**-24 each
        rtol, atol = (1e-12, 1e-14) if result.dtype is not et.float32 else (1e-12, 40 * 2.0**-20)
        np.testing.assert_allclose(result.numpy(), sample.expected, rtol=rtol, atol=atol)
        assert result.numpy().shape == np.shape(sample.expected)


def test_integers_give_float32_where_a_result_is_no_integer() -> None:
    """Where the docstring says so, and of those named here; all others give no float."""
    named = {
        "avg_pool2d", "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "cholesky", "clip", "conv2d", "cross_entropy", "distillation", "divide", "focal",
        "gelu_exact", "global_avg_pool2d", "hard_tanh", "hinge", "huber", "kl_div", "l1",
        "layer_norm", "logabsdet", "matrix_norm", "max_pool2d", "median", "mse", "nll",
        "percentile", "relu6", "rms_norm", "smooth_l1", "solve", "std", "var", "vector_norm",
    }  # fmt: skip
    for name, op in OPS.items():
        call = Call(op, _samples(op)[0])
        inputs = [et.ExTensor(np.rint(p).astype(np.int32)) for p in call.points]
        said = "integers give float32" in " ".join((op.function.__doc__ or "").split())
        with np.errstate(all="ignore"):
            try:
                found = {y.dtype for y in _outputs(call(*inputs))} if inputs else set()
            except (TypeError, ValueError):  # it takes no integers
                found = set()
        if name in named or said:
            assert found == {et.float32}, name
        elif name not in ("astype", "gather", "matrix_power"):  # as the sample says
            assert not any(dtype.is_inexact for dtype in found), name


def test_blocked_tensors_are_decoded_or_stay_whole() -> None:
    """Each operation gives what it gives for the decoded values, or says what would break."""
    moved = {
        "broadcast_arrays", "broadcast_to", "concatenate", "flip", "gather", "merge_heads", "pad",
        "repeat", "sort", "split_heads", "stack", "take_along_axis", "tile", "topk", "tril", "triu",
    }  # fmt: skip
    for name, op in OPS.items():
        call = Call(op, _samples(op)[0])
        inputs = [et.ExTensor(p, et.float32) for p in call.points]
        if not inputs or not inputs[0].ndim:
            continue
        first, rest = inputs[0].to_mxfp8(), inputs[1:]
        try:
            found = _outputs(call(first, *rest))
        except (TypeError, ValueError) as error:
            why = str(error)
            assert re.search("blocks?( axis)?\\b|blocked|expected floats, got mxfp8", why), name
            assert name not in moved or "(mxfp8_e4m3) cannot be moved without" in why, name
            continue
        assert name not in moved, name
        for y, expected in zip(found, _outputs(call(first.dequantize(), *rest)), strict=True):
            values = [part.dequantize().numpy() for part in (y, expected)]
            if name == "take_rows":  # of a table in blocks: bfloat16
                values[1] = values[1].astype(values[0].dtype)
            assert_bitwise_equal(*values, name)


@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad"))
def test_float32_is_near_float64(op: Op, sample: Sample) -> None:
    call = Call(op, sample)
    if op.name == "astype":
        return  # its sample names the result's dtype
    exact = _outputs(call(*call.inputs()))
    for rough, fine in zip(_outputs(call(*call.inputs(et.float32))), exact, strict=True):
        if fine.dtype is et.float64:
            assert rough.dtype is et.float32, "an operation that widens float32"
            np.testing.assert_allclose(rough.numpy(), fine.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad"))
def test_first_derivative(op: Op, sample: Sample) -> None:
    call = Call(op, sample)
    assert call.points, "a differentiable operation needs a float64 sample"
    gradcheck(call, call.inputs())


@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad"))
def test_second_derivative(op: Op, sample: Sample) -> None:
    call = Call(op, sample)
    gradgradcheck(call, call.inputs())


@pytest.mark.parametrize(
    ("op", "bad"),
    [
        pytest.param(op, bad, id=f"{name}-{i}")
        for name, op in sorted(OPS.items())
        for i, bad in enumerate(op.errors)
    ],
)
def test_bad_inputs_are_refused(op: Op, bad: Any) -> None:
    call = Call(op, Sample(bad.args, bad.kwargs))
    with pytest.raises(bad.error, match=re.escape(bad.match)):
        call(*call.inputs())


@pytest.mark.parametrize("dtype", [et.float32, et.float64], ids=lambda d: d.name)
@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad"))
def test_fused_gradients_are_the_composite_ones(
    op: Op, sample: Sample, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every node that backward visits, both ways of differentiating it agree."""
    tolerance = 1e-12 if dtype is et.float64 else 2e-6

    def both(node: Any, g: Any, needs: Any, create_graph: bool, **more: Any) -> Any:
        fused = node_gradients(node, g, needs, create_graph)
        composite = node_gradients(node, g, needs, create_graph, fused=False)
        for a, b in zip(fused, composite, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                a, b = (part if isinstance(part, np.ndarray) else part.get() for part in (a, b))
                scale = max(1, np.abs(b).max(initial=0))
                np.testing.assert_allclose(a, b, rtol=tolerance * 10, atol=tolerance * scale)
        return node_gradients(node, g, needs, create_graph, **more)

    monkeypatch.setattr(tape, "node_gradients", both)
    call = Call(op, sample)
    rng = np.random.default_rng(3)
    for y in _outputs(call(*call.inputs(dtype, requires_grad=True))):
        if y.requires_grad:
            y.backward(et.ExTensor(rng.normal(size=y.shape), y.dtype), retain_graph=True)


@pytest.mark.parametrize("half", HALVES, ids=lambda d: d.name)
@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad", "forward"))
def test_16_bit_floats_compute_in_float32_and_round_once(op: Op, sample: Sample, half: Any) -> None:
    call = Call(op, sample)
    if op.primitive is None or not call.points or op.name in ("astype", "nextafter"):
        return  # a composite rounds once per operation; these two are about the dtype itself
    narrow = call.inputs(half)
    wide = [x.astype(et.float32) for x in narrow]
    for result, exact in zip(_outputs(call(*narrow)), _outputs(call(*wide)), strict=True):
        if op.primitive.totals:
            assert result.dtype is exact.dtype is et.float32
            assert_bitwise_equal(result.numpy(), exact.numpy(), op.name)
        elif exact.dtype is et.float32:
            assert result.dtype is half
            with np.errstate(over="ignore"):
                rounded = exact.numpy().astype(half.numpy)
            assert_bitwise_equal(result.numpy(), rounded, op.name)
        elif not exact.dtype.is_blocked:
            assert_bitwise_equal(result.numpy(), exact.numpy(), op.name)


@pytest.mark.parametrize(("op", "sample"), _cases("gradgrad"))
def test_gradients_have_the_dtype_of_their_tensors(op: Op, sample: Sample) -> None:
    call = Call(op, sample)
    if op.name == "astype":
        return
    inputs = call.inputs(et.bfloat16, requires_grad=True)
    for y in _outputs(call(*inputs)):
        if y.requires_grad:
            y.backward(et.ones_like(y), retain_graph=True)
    for x in inputs:
        if x.grad is not None:
            assert x.grad.dtype is et.bfloat16
            assert x.grad.shape == x.shape


def test_a_wrong_vjp_is_caught() -> None:
    """The checks above can fail: a factor of 1.0001, and a second derivative left out."""
    x = et.ExTensor(np.linspace(0.5, 1.5, 6))
    right = OPS["exp"]
    from extensor.autograd import primitive as registry

    def planted(vjp: Any) -> Any:
        made = Primitive("exp", right.primitive.forward, vjps=(vjp,))
        registry.PRIMITIVES["exp"] = made

    try:
        planted(lambda g, out, x: g * out * 1.0001)
        with pytest.raises(AssertionError, match="the gradient says"):
            gradcheck(et.exp, x)
        planted(lambda g, out, x: g * out.detach())
        gradcheck(et.exp, x)
        with pytest.raises(AssertionError, match="the gradient says"):
            gradgradcheck(et.exp, x)
        planted(lambda g, out, x: g.sum())
        with pytest.raises(RuntimeError, match="mistake in the primitive's declaration"):
            gradcheck(et.exp, x)
    finally:
        assert right.primitive is not None
        registry.PRIMITIVES["exp"] = right.primitive
    assert gradcheck(et.exp, x)
    assert gradgradcheck(et.exp, x)


@pytest.mark.parametrize("declared", [{}, {"vjps": (None,), "no_vjp": "why"}])
def test_registration_wants_a_vjp_or_a_reason(declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either VJPs or no_vjp"):
        Primitive("nothing", lambda backend, x: x, **declared)


def test_a_name_is_registered_once() -> None:
    from extensor.autograd.primitive import composite

    with pytest.raises(ValueError, match="already an operation named 'exp'"):
        composite(samples=lambda rng: [], name="exp")(lambda x: x)
