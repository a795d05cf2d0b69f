"""Gradients as functions: grad, value_and_grad, vjp, hvp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from extensor.autograd import tape
from extensor.autograd.mode import enable_grad
from extensor.autograd.tensor import ExTensor

__all__ = ["grad", "hvp", "value_and_grad", "vjp"]


def grad(
    output: Any,
    inputs: Any = None,
    gradient: ExTensor | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> Any:
    """The gradient of an output with respect to inputs, leaving every ``.grad`` alone.

    ``grad(y, x)`` takes a computed tensor. An input that y does not depend on gets zeros. Leaves
    and results of operations both do.

    ``grad(f)`` takes a function giving a single element; see `value_and_grad`.

    Args:
        output: a computed tensor, or a function.
        inputs: a tensor or a sequence of them, each with requires_grad=True; not for a function.
        gradient: of the output's shape; 1 if left out, for an output of one element.
        argnums: for a function, which arguments.
        retain_graph: keep the graph for another pass; as ``create_graph`` if None.
        create_graph: record the gradient, so that it can be differentiated again.

    Returns:
        A tensor like the input, or a tuple for a sequence; for a function, a function of its
        arguments that gives the gradient for ``argnums``.

    Raises:
        TypeError, ValueError: for arguments of another kind, shape or number.
        RuntimeError: where nothing was recorded, or the graph was freed or overwritten.

    Example:
        >>> x = et.ExTensor([1.0, 2.0], requires_grad=True)
        >>> et.grad((x ** 3).sum(), x).tolist()
        [3.0, 12.0]
        >>> et.grad(lambda x: (x ** 3).sum())(et.ExTensor([1.0, 2.0])).tolist()
        [3.0, 12.0]
    """
    if not isinstance(output, ExTensor):
        if not callable(output) or inputs is not None:
            raise TypeError(
                "grad: expected grad(tensor, inputs) or grad(function), got "
                f"{type(output).__name__}{'' if inputs is None else ' with inputs'}"
            )
        both = value_and_grad(output, argnums, create_graph=create_graph)
        return lambda *args, **kwargs: both(*args, **kwargs)[1]
    if inputs is None:
        raise TypeError("grad: expected the inputs to differentiate by: grad(y, x)")
    single = isinstance(inputs, ExTensor)
    targets = [inputs] if single else list(inputs)
    found = tape.gradients([(output, gradient)], targets, retain_graph, create_graph)
    filled = [
        ExTensor.zeros(x.shape, x.dtype, device=x.device) if g is None else g
        for x, g in zip(targets, found, strict=True)
    ]
    return filled[0] if single else tuple(filled)


def _leaf(name: str, value: Any, create_graph: bool) -> ExTensor:
    """An argument to differentiate by: itself if it already is part of a graph being made."""
    if not isinstance(value, ExTensor):
        raise TypeError(f"{name}: expected an ExTensor, got {type(value).__name__}")
    if create_graph and value.requires_grad:
        return value
    leaf = value.detach()
    leaf.requires_grad = True
    return leaf


def value_and_grad(
    function: Callable[..., ExTensor],
    argnums: int | Sequence[int] = 0,
    *,
    create_graph: bool = False,
) -> Callable[..., tuple[ExTensor, Any]]:
    """A function of the same arguments that gives the value and the gradient.

    Args:
        function: gives a tensor of one element.
        argnums: the argument to differentiate by, or several (then the gradient is a tuple).
        create_graph: record the gradient, so that it can be differentiated again.

    Returns:
        A function that gives (value, gradient).

    Raises:
        TypeError: for what is no function; when called, if such an argument is no float tensor.
        ValueError: when called, for ``argnums`` beyond its arguments.
        RuntimeError: when called, if the value does not depend on any of them.

    Example:
        >>> value, gradient = et.value_and_grad(lambda x: (x * x).sum())(et.ExTensor([1.0, 3.0]))
        >>> value.item(), gradient.tolist()
        (10.0, [2.0, 6.0])
    """
    if not callable(function):
        raise TypeError(f"value_and_grad: expected a function, got {type(function).__name__}")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def both(*args: Any, **kwargs: Any) -> tuple[ExTensor, Any]:
        values = list(args)
        if any(not -len(values) <= i < len(values) for i in numbers):
            raise ValueError(
                f"argnums: expected positions of {len(values)} arguments, got {argnums}"
            )
        for i in numbers:
            values[i] = _leaf("value_and_grad", values[i], create_graph)
        with enable_grad():
            value = function(*values, **kwargs)
            found = grad(value, [values[i] for i in numbers], create_graph=create_graph)
        result = value if create_graph else value.detach()
        return result, found[0] if isinstance(argnums, int) else found

    return both


def vjp(
    function: Callable[..., ExTensor], *inputs: ExTensor
) -> tuple[ExTensor, Callable[[ExTensor], tuple[ExTensor, ...]]]:
    """A function's value, and a function that multiplies vectors by its Jacobian.

    Args:
        function: takes the inputs, gives a tensor.
        inputs: float tensors.

    Returns:
        The value, and a function from a gradient of the value's shape to the gradients of the
        inputs, which may be called as often as one likes.

    Raises:
        TypeError: if an input is no float tensor.

    Example:
        >>> value, pull = et.vjp(lambda x: x * x, et.ExTensor([1.0, 3.0]))
        >>> value.tolist(), pull(et.ExTensor([1.0, 1.0]))[0].tolist()
        ([1.0, 9.0], [2.0, 6.0])
    """
    leaves = [_leaf("vjp", x, False) for x in inputs]
    with enable_grad():
        value = function(*leaves)

    def pull(gradient: ExTensor) -> tuple[ExTensor, ...]:
        return tuple(grad(value, leaves, gradient, retain_graph=True))

    return value.detach(), pull


def hvp(function: Callable[..., ExTensor], inputs: Any, vectors: Any) -> Any:
    """The Hessian of a function times vectors, in two backward passes.

    Args:
        function: gives a tensor of one element.
        inputs: a float tensor, or a sequence of them (the function's arguments).
        vectors: a tensor or sequence to match, each of its input's shape.

    Returns:
        The product, a tensor or a tuple like ``inputs``.

    Raises:
        TypeError, ValueError: for inputs and vectors that do not match.
        RuntimeError: where an operation's gradient cannot be differentiated again.

    Example:
        >>> x, v = et.ExTensor([1.0, 2.0]), et.ExTensor([1.0, 0.0])
        >>> et.hvp(lambda x: (x ** 3).sum(), x, v).tolist()
        [6.0, 0.0]
    """
    single = isinstance(inputs, ExTensor)
    points = [inputs] if single else list(inputs)
    directions = [vectors] if isinstance(vectors, ExTensor) else list(vectors)
    if len(points) != len(directions) or any(
        p.shape != d.shape for p, d in zip(points, directions, strict=False)
    ):
        raise ValueError(
            f"hvp: expected a vector of each input's shape {[p.shape for p in points]}, got "
            f"{[d.shape for d in directions]}"
        )
    leaves = [_leaf("hvp", x, False) for x in points]
    with enable_grad():
        slopes = grad(function(*leaves), leaves, create_graph=True)
        dots = [(s * d).sum() for s, d in zip(slopes, directions, strict=True)]
        total = sum(dots[1:], dots[0])
        if not total.requires_grad:  # a linear function
            products = tuple(ExTensor.zeros(x.shape, x.dtype, device=x.device) for x in leaves)
        else:
            products = grad(total, leaves)
    return products[0] if single else products
