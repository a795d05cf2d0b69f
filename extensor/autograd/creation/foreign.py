"""Tensors on the memory of another library's array: ``from_numpy`` and ``from_dlpack``."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd import dlpack
from extensor.autograd.creation.base import WrapsArrays
from extensor.autograd.node import Tensor
from extensor.backends import registry
from extensor.dtypes import dtype_of

__all__ = ["ForeignMethods", "share_writes"]


class ForeignMethods(WrapsArrays[Tensor]):
    """Tensors that share memory with an array of another library."""

    __slots__ = ()

    @classmethod
    def from_numpy(
        cls, array: Any, *, device: str | None = None, requires_grad: bool = False
    ) -> Tensor:
        """A tensor on a numpy array's memory (copied to a device other than the CPU).

        Args:
            array: the array; writes to it show in the tensor.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A tensor of the array's shape and dtype.

        Raises:
            TypeError: if it is not an array, or holds no extensor dtype.

        Example:
            >>> import numpy as np
            >>> et.from_numpy(np.arange(3)).tolist()
            [0, 1, 2]
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"from_numpy: expected a numpy array, got {type(array).__name__}; use et.ExTensor"
            )
        backend = registry.get(device)
        dtype_of(array)  # a GPU's copy would change the byte order
        tensor = cls._wrap(backend.xp.asarray(array), backend)
        if tensor.data is array:
            share_writes(tensor)
        if requires_grad:
            tensor.requires_grad = True
        return tensor

    @classmethod
    def from_dlpack(
        cls, x: Any, /, *, device: str | None = None, copy: bool | None = None
    ) -> Tensor:
        """A tensor on the memory of another library's array, through DLPack, bfloat16 included.

        Args:
            x: anything with ``__dlpack__`` and ``__dlpack_device__``.
            device: where the tensor is to be; None is the default device.
            copy: True always copies, False never does, None copies only where it is needed.

        Returns:
            A tensor of the array's shape and dtype.

        Raises:
            TypeError: if the object has no ``__dlpack__`` method, or an unknown dtype.
            BufferError, ValueError: where the exporter refuses, or cannot do without a copy.

        Example:
            >>> import numpy as np
            >>> et.from_dlpack(np.arange(3)).tolist()
            [0, 1, 2]
        """
        if not hasattr(x, "__dlpack__"):
            raise TypeError(
                f"from_dlpack: expected an object with __dlpack__, got {type(x).__name__}"
            )
        backend = registry.get(device)
        options = {} if copy is None else {"copy": copy}
        tensor = cls._wrap(dlpack.from_exporter(x, backend.xp, **options), backend)
        return tensor if copy else share_writes(tensor)


def share_writes(tensor: Tensor) -> Tensor:
    """Mark memory that another library may write to: no result that was made of it is kept."""
    tensor._version[1:] = [1]
    return tensor
