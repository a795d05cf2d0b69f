"""ExTensor: an array (dense or blocked), its dtype and device, and its place in the graph.

Its methods stand in bases: operations (`methods.py`), PyTorch's short forms, creation, blocked
storage, values for other libraries and writes in place. They are typed, and call operations by
name through the registry, so that autograd never imports ops. The bases are generic in the class
that they return; they never import it.

Every tensor carries a version counter, shared by views of the same memory.
Writes in place (`x[...] = v`, `copy_`, `assign_`) raise it, and `backward`
refuses to use what was overwritten.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.autograd.blocked import BlockedMethods
from extensor.autograd.creation import CreationMethods, as_data
from extensor.autograd.display import html_of, repr_of
from extensor.autograd.methods import OpMethods
from extensor.autograd.node import Node
from extensor.autograd.primitive import FUNCTIONS
from extensor.autograd.torch_methods import TorchMethods
from extensor.autograd.values import ValueMethods, to_host
from extensor.autograd.writes import WriteMethods
from extensor.backends import registry
from extensor.backends.protocol import Backend
from extensor.dtypes import BLOCKED, DENSE, DTypeLike, as_dtype, dtype_of
from extensor.quant.array import QuantArray
from extensor.quant.reference import FLOATS
from extensor.quant.spec import QuantSpec
from extensor.torch_names import attribute_error

__all__ = ["ExTensor", "wrap"]


class ExTensor(
    OpMethods["ExTensor"],
    TorchMethods["ExTensor"],
    CreationMethods["ExTensor"],
    BlockedMethods["ExTensor"],
    ValueMethods,
    WriteMethods,
):
    """An n-dimensional array that can be differentiated and can be stored in blocks.

    Args:
        data: nested lists, a number, a numpy array (copied) or a QuantArray. Python floats become
            float32, Python integers int64.
        dtype: converted to this dtype; a blocked one quantizes.
        device: ``"cpu"`` or ``"cuda"``; None is EXTENSOR_DEVICE, and the CPU without it.
        requires_grad: whether ``backward`` collects a gradient for it (floats only).

    Attributes:
        data: the raw array of the device's array module, or a QuantArray. Whoever writes to it goes
            around the version counter, by which gradients and quantized layers know that what they
            keep of a tensor is still right; use the methods.
        dtype: the row of `extensor.dtypes`.
        backend: the device's array module and kernels.
        grad: what ``backward`` collected, for a leaf; of this tensor's shape and dtype.
        node: the recorded operation it came from; None for a leaf.

    Raises:
        TypeError: for data or a dtype that is not understood.
        RuntimeError: for a device that is not available; the message says what it takes.

    Example:
        >>> et.ExTensor([[1.0, 2.0], [3.0, 4.0]])
        ExTensor(shape=(2, 2), dtype=float32, device=cpu,
          [[1. 2.]
           [3. 4.]])
    """

    __slots__ = ()
    __array_ufunc__ = None  # so that numpy_array + tensor asks the tensor

    grad: ExTensor | None

    def __init__(
        self,
        data: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> None:
        self.backend = registry.get(device)
        self.node = None
        self.grad = None
        self._requires_grad = False
        self._version = [0]
        if isinstance(data, ExTensor):
            raise TypeError("ExTensor(data): got an ExTensor; use x.clone() or x.to(...)")
        target = None if dtype is None else as_dtype(dtype)
        if target is not None and target.is_blocked and not isinstance(data, QuantArray):
            made = self.backend.xp.asarray(as_data(data, None), dtype=np.float32)
            self.data, self.dtype = made, dtype_of(made)
            self.data = self.to(target).data
        else:
            self.data = as_data(data, target, self.backend.xp)
        self.dtype = dtype_of(self.data)
        if target is not None and target is not self.dtype:
            raise TypeError(f"ExTensor(data): the data is {self.dtype.name}, not {target.name}")
        if requires_grad:
            self.requires_grad = True

    # What it is.

    def __repr__(self) -> str:
        return repr_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    def __len__(self) -> int:
        if not self.data.shape:
            raise TypeError("len() of a tensor without axes")
        return int(self.data.shape[0])

    def __iter__(self) -> Iterator[ExTensor]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def _wrap(data: Any, backend: Backend) -> ExTensor:
        return wrap(data, backend)

    def __dir__(self) -> list[str]:
        """What is public, and Python's own names."""
        return [n for n in object.__dir__(self) if n[0] != "_" or n[:2] == "__"]

    if not TYPE_CHECKING:  # to a type checker, a name that does not exist stays an error

        def __getattr__(self, name):  # only for what the class does not have
            raise attribute_error("ExTensor", self, name)

    # Gradients.

    def backward(
        self,
        gradient: ExTensor | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add the gradient of this tensor to the ``.grad`` of every leaf it was computed from.

        Args:
            gradient: of this tensor's shape; may be left out for a single element, meaning 1.
            retain_graph: keep the graph for another pass; as ``create_graph`` if None.
            create_graph: record the computation of the gradients, to differentiate them again.

        Raises:
            RuntimeError: if nothing was recorded, the graph was freed by an earlier pass, or a
                tensor that a gradient needs was written in place. No ``.grad`` changes then.
            ValueError: for a gradient of another shape, or none for several elements.

        Example:
            >>> x = et.ExTensor([1.0, 2.0], requires_grad=True)
            >>> (x * x).sum().backward()
            >>> x.grad.tolist()
            [2.0, 4.0]
        """
        FUNCTIONS["backward"](self, gradient, retain_graph, create_graph)

    def zero_grad(self) -> None:
        """Set ``.grad`` to None.

        Example:
            >>> x = et.ExTensor(1.0, requires_grad=True)
            >>> x.backward()
            >>> x.zero_grad()
            >>> x.grad is None
            True
        """
        self.grad = None

    def detach(self) -> ExTensor:
        """The same memory outside the graph; a write to either raises both versions.

        Returns:
            A leaf that requires no gradient.

        Example:
            >>> et.ones(2, requires_grad=True).detach().requires_grad
            False
        """
        tensor = wrap(self.data, self.backend)
        tensor._version = self._version
        return tensor

    # Conversion.

    def astype(self, dtype: DTypeLike) -> ExTensor:
        """This tensor in another dtype; differentiable between floats.

        Args:
            dtype: dense or blocked; a blocked one quantizes.

        Returns:
            The tensor itself if it has the dtype, else a new one.

        Raises:
            TypeError: for an element grid without a scale, such as ``"e2m1"``.
            ValueError: for an unknown name.

        Example:
            >>> et.ExTensor([1, 2]).astype("bfloat16").dtype
            extensor.bfloat16
        """
        target = as_dtype(dtype)
        if target is self.dtype:
            return self
        if target.format is not None:
            return self.quantize(QuantSpec(target.format.name))
        if isinstance(self.data, QuantArray):
            if target.name in FLOATS and not self.requires_grad:
                return wrap(self.backend.dequantize(self.data, target.name), self.backend)
            return self.dequantize().astype(target)
        cast: ExTensor = FUNCTIONS["astype"](self, target)
        return cast

    def to(self, target: DTypeLike) -> ExTensor:
        """This tensor on another device or in another dtype.

        Args:
            target: ``"cpu"``, ``"cuda"`` or a dtype, as `astype` takes.

        Returns:
            The tensor itself if nothing changes, else a new one.

        Raises:
            TypeError, ValueError: as `astype`.
            RuntimeError: for a device that is not available, or moving the result of a recorded
                operation; move the leaves instead.

        Example:
            >>> et.ones((2, 64)).to(et.mxfp8_e4m3).is_blocked
            True
        """
        if not (isinstance(target, str) and target in registry.BACKENDS):
            if isinstance(target, str) and target not in DENSE and target not in BLOCKED:
                try:
                    as_dtype(target)
                except ValueError as error:
                    devices = ", ".join(registry.BACKENDS)
                    raise ValueError(f"to: {error}; devices: {devices}") from None
            return self.astype(target)
        if target == self.device:
            return self
        if self.node is not None:
            raise RuntimeError(
                f"to({target!r}): the graph lives on one device; move the leaves before computing, "
                "or move y.detach()"
            )
        backend = registry.get(target)
        move = to_host if target == "cpu" else backend.xp.asarray
        if isinstance(self.data, QuantArray):
            parts = {name: move(part) for name, part in self.data.parts.items()}
            moved = wrap(dataclasses.replace(self.data, **parts), backend)
        else:
            moved = wrap(move(self.data), backend)
        moved._requires_grad = self._requires_grad
        return moved

    def to_device(self, device: str, /, stream: None = None) -> ExTensor:
        """This tensor on a device, as `to`; the array standard's name.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            stream: must be None.

        Returns:
            The tensor itself if it is there, else a new one.

        Raises:
            ValueError: for a name that is no device, or a stream.
            RuntimeError: as `to`.

        Example:
            >>> et.ones(2).to_device("cpu").device
            'cpu'
        """
        if device not in registry.BACKENDS or stream is not None:
            raise ValueError(
                f"to_device: expected one of {', '.join(registry.BACKENDS)} and no stream, got "
                f"{device!r}, {stream!r}"
            )
        return self.to(device)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12", "2025.12"):
            raise ValueError(
                f"__array_namespace__: expected a version of the standard up to 2025.12, got "
                f"{api_version!r}"
            )
        return sys.modules["extensor"]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.node is not None:
            raise TypeError("copy or pickle: expected a leaf, got a result; use y.detach() first")
        data = self.data
        if not isinstance(data, QuantArray):
            data = to_host(data)
        elif self.device != "cpu":
            data = self.to("cpu").data
        return _rebuild, (type(self), data, self.device, self._requires_grad, self.grad)


_new = object.__new__
_scalar = np.generic


def wrap(data: Any, backend: Any, node: Node | None = None) -> ExTensor:
    """An ExTensor around raw data, without a check or a copy."""
    if isinstance(data, _scalar):  # numpy gives scalars where an array would have no axes
        data = np.asarray(data)
    tensor: ExTensor = _new(ExTensor)
    tensor.data = data
    tensor.dtype = dtype_of(data)
    tensor.backend = backend
    tensor.node = node
    tensor.grad = None
    tensor._requires_grad = node is not None
    tensor._version = [0]
    return tensor


def _rebuild(
    kind: type[ExTensor],
    data: Any,
    device: str,
    requires_grad: bool,
    grad: ExTensor | None = None,
) -> ExTensor:
    tensor: ExTensor = object.__new__(kind)
    ExTensor.__init__(tensor, data, device="cpu")
    if device != "cpu":  # `to` gives a plain ExTensor; this one keeps its class
        moved = tensor.to(device)
        tensor.data, tensor.backend = moved.data, moved.backend
    tensor._requires_grad = requires_grad
    tensor.grad = grad
    return tensor
