"""The base of the creation methods: a tensor around a fresh array."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic

import numpy as np

from extensor.autograd.node import Tensor
from extensor.backends import registry
from extensor.backends.protocol import Backend
from extensor.dtypes import DType

__all__ = ["WrapsArrays"]


class WrapsArrays(Generic[Tensor]):
    """What creation methods need of the tensor class, which stands above them."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def _wrap(data: Any, backend: Backend) -> Tensor:
        """A tensor around a raw array; ExTensor, which stands above this class, says how."""

    @classmethod
    def _from_array(
        cls, data: Any, dtype: DType, device: str | None, requires_grad: bool = False
    ) -> Tensor:
        """A tensor of ``dtype`` around a fresh array that was made in ``compute_dtype(dtype)``."""
        if dtype.numpy is not None and data.dtype != dtype.numpy:
            with np.errstate(over="ignore", invalid="ignore"):  # as of astype
                data = data.astype(dtype.numpy)
        tensor: Any = cls._wrap(data, registry.get(device))
        if dtype.is_blocked:
            tensor = tensor.to(dtype)
        if requires_grad:
            tensor.requires_grad = True
        return tensor
