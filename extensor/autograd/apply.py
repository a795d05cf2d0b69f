"""`apply`: run a primitive on tensors and record it.

The common case, float32 or float64 inputs of one dtype on one device, goes
straight to the primitive's forward. Other inputs are prepared first: dtypes are
promoted, blocked operands dequantized, and 16-bit floats widened to float32, so
that the result rounds once. A kernel that reads bfloat16 and rounds by itself
(`Backend.bfloat16`) gets bfloat16.

An operation reads a parameter in blocks as bfloat16, and the graph keeps the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.node import AGAIN, Node
from extensor.autograd.primitive import BLOCKED_RULES, PRIMITIVES, Primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import bfloat16, compute_dtype, dtype_of, float32, promote

__all__ = ["apply"]

_NARROW = (bfloat16, float32)
_new = object.__new__
_scalar = np.generic


def apply(name: str, *inputs: ExTensor, **params: Any) -> ExTensor:
    """Run the primitive ``name`` on tensors, recording it if a gradient may be asked for.

    Args:
        name: a key of `PRIMITIVES`.
        inputs: at least one tensor.
        params: handed to the primitive's forward and VJPs as they are.

    Raises:
        TypeError: for dtypes that do not go together, and blocked inputs that the primitive
            cannot take.
        ValueError: for inputs on different devices, or shapes that do not broadcast.
    """
    primitive = PRIMITIVES[name]
    first = inputs[0]
    dtype = first.dtype
    backend = first.backend
    direct = dtype.level <= primitive.direct
    record = False
    arrays = []
    for tensor in inputs:
        arrays.append(tensor.data)
        if tensor.dtype is not dtype or tensor.backend is not backend:
            direct = False
        if tensor._requires_grad:
            record = True
    compute: Any = None
    rounded: Any = None
    blocked: Sequence[tuple[int, ExTensor]] = ()
    if not direct:
        blocked = [(i, t) for i, t in enumerate(inputs) if t.is_blocked_parameter]
        if blocked and not primitive.takes_blocked:
            inputs, arrays = _read(inputs, blocked)
            first = inputs[0]
        if primitive.as_given:
            _check_devices(name, inputs)
        elif name in BLOCKED_RULES and any(t.dtype.is_blocked for t in inputs):
            ruled: ExTensor = BLOCKED_RULES[name](*inputs, **params)
            return ruled
        else:
            inputs, arrays, compute, rounded = _prepare(primitive, inputs)
    try:
        out = primitive.forward(backend, *arrays, **params)
    except ValueError as error:
        if not primitive.broadcasts or isinstance(error, np.linalg.LinAlgError):
            raise
        raise ValueError(_broadcast_message(name, arrays)) from error
    saved = None
    if primitive.saves:
        out, saved = out
    if rounded is not None and getattr(out, "dtype", None) == np.float32:  # codes have no dtype
        out = backend.cast(out, rounded)
    if isinstance(out, _scalar):
        out = np.asarray(out)
    if MODE.recording is not None:
        given = (tuple(t.data for t in inputs), arrays, rounded)
        _note(primitive, backend, given, (out, saved), params)
    result: ExTensor = _new(ExTensor)
    result.data = out
    if direct and getattr(out, "dtype", None) is dtype.numpy:
        result.dtype = dtype  # the usual case, without a table lookup
    else:
        result.dtype = dtype_of(out)
    result.backend = backend
    result.grad = None
    result.node = None
    result._requires_grad = False
    if primitive.view and _shares(out, first.data):
        result._version = first._version
    else:
        result._version = [0]
    if record and MODE.enabled and primitive.differentiable:
        result.node = Node(primitive, params, inputs, out, saved, result._version, compute)
        result._requires_grad = True
        if blocked:
            result.node.keep_blocks(blocked)
        if MODE.saves_again and primitive.saved_again is not None and saved is not None:
            result.node.saved = AGAIN
        if MODE.storage is not None:
            MODE.storage.pack(result.node)
        if MODE.observer is not None:
            MODE.observer.recorded(result.node)
    return result


def _note(
    primitive: Primitive, backend: Any, given: tuple[Any, ...], made: Any, params: dict[str, Any]
) -> None:
    """Add a call to the recording of a captured step."""
    data, arrays, rounded = given
    recorded, name = MODE.recording, primitive.name
    if MODE.enabled:
        recorded.refuse(f"{name} runs outside of et.no_grad()")
    for mine, cast in zip(data, arrays, strict=True):
        if cast is not mine:
            dtype = cast.dtype
            recorded.add("cast", lambda x, to=dtype: backend.cast(x, to), (mine,), (cast,), {})
    out, _ = made
    run: Any = primitive.replay and primitive.replay(backend, arrays, params)
    if not run:
        forward = functools.partial(primitive.forward, backend, **params)
        plain = not primitive.saves and rounded is None and getattr(out, "shape", ()) != ()
        run = forward if plain else functools.partial(_again, primitive, backend, rounded, forward)
    recorded.add(name, run, arrays, (out,), params)


def _again(
    primitive: Primitive, backend: Any, rounded: Any, forward: Callable[..., Any], *arrays: Any
) -> Any:
    """An operation's result as `apply` computes it."""
    out = forward(*arrays)
    if primitive.saves:
        out = out[0]
    if rounded is not None and getattr(out, "dtype", None) == np.float32:
        out = backend.cast(out, rounded)
    return np.asarray(out) if isinstance(out, _scalar) else out


def _shares(out: Any, data: Any) -> bool:
    """Whether a view primitive's output is a view: arrays keep the owner of their memory."""
    base = getattr(out, "base", None)
    return out is data or (base is not None and (base is data or base is data.base))


def _check_devices(name: str, inputs: tuple[ExTensor, ...]) -> None:
    devices = {t.backend.name for t in inputs}
    if len(devices) > 1:
        raise ValueError(
            f"{name}: expected tensors on one device, got {', '.join(sorted(devices))}; "
            "move them with x.to(device)"
        )


def _read(
    inputs: tuple[ExTensor, ...], blocked: Sequence[tuple[int, ExTensor]]
) -> tuple[tuple[ExTensor, ...], list[Any]]:
    """Inputs and their arrays, parameters in blocks decoded, with their versions."""
    if MODE.recording is not None:
        MODE.recording.refuse("it reads a parameter in blocks")
    read = list(inputs)
    for i, leaf in blocked:
        read[i] = wrap(leaf.backend.dequantize(leaf.data, bfloat16.name), leaf.backend)
        read[i]._requires_grad, read[i]._version = leaf._requires_grad, leaf._version
    return tuple(read), [tensor.data for tensor in read]


def _prepare(
    primitive: Primitive, inputs: tuple[ExTensor, ...]
) -> tuple[tuple[ExTensor, ...], list[Any], Any, Any]:
    """Inputs to record, arrays to compute on, the dtype to compute in, and the one to round to."""
    name = primitive.name
    _check_devices(name, inputs)
    if not primitive.takes_blocked and any(t.dtype.is_blocked for t in inputs):
        if primitive.moves:
            blocked = next(t.dtype.name for t in inputs if t.dtype.is_blocked)
            raise TypeError(
                f"{name}: a blocked tensor ({blocked}) cannot be moved without breaking its "
                "blocks; use x.dequantize() first"
            )
        inputs = tuple(t.dequantize() if t.dtype.is_blocked else t for t in inputs)
    arrays = [t.data for t in inputs]
    promoted = [i for i, t in enumerate(inputs) if primitive.has_vjp(i) and not t.dtype.is_blocked]
    if not promoted:
        return inputs, arrays, None, None
    common = reduce(promote, [inputs[i].dtype for i in promoted])
    if primitive.to_float and not common.is_inexact:
        common = float32
    wide = compute_dtype(common)
    backend = inputs[0].backend
    compute = common if primitive.moves else wide
    if compute.is_complex and MODE.enabled and any(t.requires_grad for t in inputs):
        raise TypeError(
            f"{name}: complex numbers have no gradients here, and an input requires one; compute "
            "with x.detach(), or keep real and imaginary parts as two real tensors"
        )
    if primitive.mixed:
        return inputs, arrays, None, None
    rounds = wide is not common and not primitive.moves and not primitive.totals
    rounded = common.numpy if rounds else None
    if name in backend.bfloat16 and all(inputs[i].dtype in _NARROW for i in promoted):
        return inputs, arrays, None, rounded
    for i in promoted:
        if inputs[i].dtype is not compute:
            assert compute.numpy is not None
            arrays[i] = backend.cast(arrays[i], compute.numpy)
    return inputs, arrays, compute.numpy, rounded


def _broadcast_message(name: str, arrays: list[Any]) -> str:
    shapes = " and ".join(str(tuple(a.shape)) for a in arrays)
    return (
        f"{name}: expected shapes that broadcast (equal, or 1, counted from the last axis), got "
        f"{shapes}; reshape one, or add axes of length 1 with expand_dims"
    )
