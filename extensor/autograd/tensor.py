"""ExTensor: an array (dense or blocked), its dtype and device, and its place in the graph.

Its methods stand in four bases: operations (`methods.py`), PyTorch's short forms, creation and
blocked storage. They are typed, and call operations by name through the registry, so that
autograd never imports ops. The bases are generic in the class that they return;
they never import it.

Every tensor carries a version counter, shared by views of the same memory.
Writes in place (`x[...] = v`, `copy_`, `assign_`) raise it, and `backward`
refuses to use what was overwritten.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.autograd import dlpack
from extensor.autograd.blocked import BlockedMethods
from extensor.autograd.creation import CreationMethods, as_data, share_writes
from extensor.autograd.display import html_of, repr_of
from extensor.autograd.methods import OpMethods
from extensor.autograd.mode import MODE
from extensor.autograd.node import Node
from extensor.autograd.positions import check_positions, raw_key
from extensor.autograd.primitive import FUNCTIONS
from extensor.autograd.torch_methods import TorchMethods
from extensor.backends import registry
from extensor.backends.protocol import Backend
from extensor.dtypes import BLOCKED, DENSE, DTypeLike, as_dtype, dtype_of
from extensor.quant.array import QuantArray
from extensor.quant.reference import FLOATS
from extensor.quant.spec import QuantSpec
from extensor.torch_names import attribute_error

__all__ = ["ExTensor", "wrap"]

_ORDER = {"bool": 0, "int": 1, "float": 2, "complex": 3}


class ExTensor(
    OpMethods["ExTensor"],
    TorchMethods["ExTensor"],
    CreationMethods["ExTensor"],
    BlockedMethods["ExTensor"],
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
        move = _to_host if target == "cpu" else backend.xp.asarray
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

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values as a read-only numpy array, sharing memory on the CPU.

        Returns:
            An array of the tensor's shape; bfloat16 has the dtype of ml_dtypes.

        Raises:
            TypeError: for a blocked tensor; use ``x.dequantize().numpy()``.

        Example:
            >>> et.ExTensor([1.0, 2.0]).numpy()
            array([1., 2.], dtype=float32)
        """
        if self.dtype.is_blocked:
            raise TypeError(
                f"numpy(): a {self.dtype.name} tensor is codes and scales; use "
                "x.dequantize().numpy(), or x.codes and x.scales"
            )
        view: np.ndarray[Any, Any] = _to_host(self.data).view()
        view.flags.writeable = False  # a write here would not raise the version counter
        return view

    def item(self) -> Any:
        """The only element, as a Python number.

        Returns:
            An int, float, bool or complex.

        Raises:
            ValueError: if there is not exactly one element.

        Example:
            >>> et.ExTensor([[2.5]]).item()
            2.5
        """
        if self.size != 1:
            raise ValueError(
                f"item(): expected a tensor of one element, got shape {self.shape}; index it first"
            )
        value = self.dequantize() if self.dtype.is_blocked else self
        number = _to_host(value.data).reshape(()).item()
        return float(number) if self.dtype.kind in ("float", "blocked") else number

    def tolist(self) -> Any:
        """The values as nested lists of Python numbers.

        Returns:
            A list; a number for a tensor without axes.

        Raises:
            TypeError: for a blocked tensor; use ``x.dequantize().tolist()``.

        Example:
            >>> et.ExTensor([[1, 2], [3, 4]]).tolist()
            [[1, 2], [3, 4]]
        """
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """One number as Python formats it, as in ``f"{loss:.3f}"``; `repr` without a spec."""
        if not spec:
            return str(self)
        if self.size != 1:
            raise TypeError(
                f"format {spec!r}: expected one element, got shape {self.shape}; use x.tolist()"
            )
        return format(self.item(), spec)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"truth of a tensor of shape {self.shape}: expected one element; use any() or all()"
            )
        return bool(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"index: expected an integer tensor, got {self.dtype.name}")
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        options = {
            "stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        capsule = dlpack.export(self._exported(), **given)
        if not copy:
            share_writes(self)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        data = self.data if not self.dtype.is_blocked else self.codes
        where: tuple[int, int] = data.__dlpack_device__()
        return where

    def _exported(self) -> Any:
        if self.dtype.is_blocked:
            raise BufferError(
                f"DLPack: a {self.dtype.name} tensor is codes and scales; export x.dequantize(), "
                "or x.codes and x.scales"
            )
        if self._requires_grad:
            raise BufferError(
                "DLPack: this tensor requires a gradient, and writes by its new owner would not be "
                "part of it; export x.detach()"
            )
        return self.data

    def __reduce__(self) -> tuple[Any, ...]:
        if self.node is not None:
            raise TypeError("copy or pickle: expected a leaf, got a result; use y.detach() first")
        data = self.data
        if not isinstance(data, QuantArray):
            data = _to_host(data)
        elif self.device != "cpu":
            data = self.to("cpu").data
        return _rebuild, (type(self), data, self.device, self._requires_grad, self.grad)

    # Writes in place.

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into the memory; views see it, and gradients that need the old values refuse.

        Raises:
            RuntimeError: if the tensor is part of a graph being recorded.
            TypeError: for a blocked tensor, or a value of a wider kind of dtype.
            ValueError: for a value that does not broadcast to the selection, or a tensor whose
                values share memory.
        """
        self._check_write()
        shared = any(
            n > 1 and not step for n, step in zip(self.shape, self.data.strides, strict=True)
        )  # numpy marks such arrays read-only, cupy does not
        if shared or not getattr(self.data.flags, "writeable", True):
            why = "broadcast_to made its values share memory" if shared else (
                "so is the array that it was made from"
            )  # fmt: skip
            raise ValueError(f"write: this tensor is read-only: {why}; write to x.clone()")
        source = value.data if isinstance(value, ExTensor) else np.asarray(value)
        if isinstance(source, QuantArray):
            source = value.dequantize().data
        if isinstance(value, (ExTensor, np.ndarray)):
            got = dtype_of(source)
            if _ORDER[got.kind] > _ORDER[self.dtype.kind]:
                raise TypeError(
                    f"write: {got.name} values do not fit a {self.dtype.name} tensor; convert them"
                )
        indices = raw_key(key)
        try:
            check_positions(self.backend, self.shape, indices)
            self.data[indices] = source
        except IndexError as error:
            raise IndexError(f"index of a tensor of shape {self.shape}: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"write: expected values that broadcast to the selection of a tensor of shape "
                f"{self.shape}, got shape {tuple(source.shape)} ({error})"
            ) from error
        self._count_write()

    def copy_(self, source: ExTensor) -> ExTensor:
        """Write the values of another tensor into this tensor's memory.

        Args:
            source: broadcasts to this tensor's shape.

        Returns:
            This tensor.

        Raises:
            RuntimeError: if the tensor is part of a graph being recorded.
            TypeError: for a blocked tensor, or a source of a wider kind of dtype.
            ValueError: for a source that does not broadcast, or a tensor whose values share memory.

        Example:
            >>> et.zeros(3).copy_(et.ExTensor([1.0, 2.0, 3.0])).tolist()
            [1.0, 2.0, 3.0]
        """
        self[...] = source
        return self

    def assign_(self, array: Any) -> ExTensor:
        """Replace the data by ``array``: the update of an optimizer. On the CPU without a copy.

        On a device the values go to the memory that is there: a captured step finds them.

        Args:
            array: a raw array of the device, of this tensor's shape and dtype, that nothing else
                will write to; of a blocked tensor a QuantArray of its spec. On the CPU views keep
                the old values, as ``numpy()`` arrays do.

        Returns:
            This tensor.

        Raises:
            RuntimeError: if the tensor requires a gradient and gradients are being recorded.
            TypeError, ValueError: for another device, dtype, spec or shape.

        Example:
            >>> x = et.zeros(2)
            >>> x.assign_(x.data + 1).tolist()
            [1.0, 1.0]
        """
        self._check_recorded()
        if isinstance(self.data, QuantArray):
            self._assign_blocks(self.data, array)
            return self
        if not isinstance(array, self.backend.xp.ndarray):
            raise TypeError(
                f"assign_: expected an array of device {self.device}, got {type(array).__name__}; "
                "x.copy_(et.ExTensor(values)) takes values from anywhere"
            )
        if array.shape != self.data.shape:
            raise ValueError(f"assign_: expected shape {self.shape}, got {tuple(array.shape)}")
        if array.dtype != self.data.dtype:
            raise TypeError(f"assign_: expected dtype {self.dtype.name}, got {array.dtype.name}")
        if self.backend.xp is np:
            self.data = array
        else:
            self.data[...] = array
        self._count_write()
        return self

    def _assign_blocks(self, old: QuantArray, new: Any) -> None:
        """`assign_` of a blocked tensor."""
        if not isinstance(new, QuantArray) or (new.spec, new.shape) != (old.spec, old.shape):
            got = f"{new.spec}, {new.shape}" if isinstance(new, QuantArray) else type(new).__name__
            raise ValueError(
                f"assign_: expected a QuantArray of {old.spec}, {old.shape}, got {got}; pack the "
                "values with the tensor's spec"
            )
        if self.backend.xp is np:
            self.data = new
        else:
            for name, part in old.parts.items():
                part[...] = new.parts[name]
        self._count_write()

    def _count_write(self) -> None:
        """Raise the version: now and, while a step is recorded, with each repetition."""
        cell = self._version
        cell[0] += 1
        if MODE.recording is not None:
            MODE.recording.refuse("it writes to a tensor in place")
        if (capture := self.backend.capturing) is not None:
            capture.on_replay(lambda: operator.setitem(cell, 0, cell[0] + 1))

    def _check_write(self) -> None:
        if self.dtype.is_blocked:
            raise TypeError(
                f"write in place: a {self.dtype.name} tensor shares scales between values; use "
                "x.dequantize(), write, and quantize again"
            )
        self._check_recorded()

    def _check_recorded(self) -> None:
        if self._requires_grad and MODE.enabled:
            raise RuntimeError(
                "write in place: this tensor requires a gradient, and the write would not be part "
                "of it; write inside `with et.no_grad():`, or compute a new tensor with et.where"
            )


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


def _to_host(array: Any) -> Any:
    """A device array as a numpy array; itself if it is one."""
    if MODE.recording is not None:
        MODE.recording.refuse("it reads a tensor's values")
    return array if isinstance(array, np.ndarray) else array.get()


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
