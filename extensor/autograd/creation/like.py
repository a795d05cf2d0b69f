"""Tensors of another tensor's shape: ``zeros_like`` and its like."""

from __future__ import annotations

from typing import Any

from extensor.autograd.creation.arguments import Seed
from extensor.autograd.creation.filled import FilledMethods
from extensor.autograd.creation.random import RandomMethods
from extensor.autograd.node import Tensor
from extensor.dtypes import DTypeLike

__all__ = ["LikeMethods"]


class LikeMethods(FilledMethods[Tensor], RandomMethods[Tensor]):
    """Creation with the shape, and if not given the dtype and device, of another tensor."""

    __slots__ = ()

    @classmethod
    def zeros_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Zeros of another tensor's shape.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.zeros_like(et.ExTensor([1, 2])).tolist()
            [0, 0]
        """
        return cls.zeros(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def ones_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Ones of another tensor's shape.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.ones_like(et.ExTensor([5, 6])).tolist()
            [1, 1]
        """
        return cls.ones(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def empty_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Uninitialized memory of another tensor's shape; zeros for a blocked dtype.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.empty_like(et.zeros((2, 3))).shape
            (2, 3)
        """
        return cls.empty(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def full_like(
        cls,
        x: Tensor,
        fill_value: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
    ) -> Tensor:
        """One value in another tensor's shape.

        Args:
            x: the tensor to follow.
            fill_value: a number, or a tensor without axes.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: as `full`.

        Example:
            >>> et.full_like(et.zeros(2), 7).tolist()
            [7.0, 7.0]
        """
        return cls.full(x.shape, fill_value, dtype or x.dtype, device=device or x.device)

    @classmethod
    def randn_like(cls, x: Tensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> Tensor:
        """Standard normal values in another tensor's shape, on its device.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            seed: as of `randn`.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad seed, or a dtype that is not of floats.

        Example:
            >>> et.randn_like(et.zeros((2, 3)), seed=0).shape
            (2, 3)
        """
        return cls.randn(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)

    @classmethod
    def rand_like(cls, x: Tensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> Tensor:
        """Values uniform in [0, 1) in another tensor's shape, on its device.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            seed: as of `rand`.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad seed, or a dtype that is not of floats.

        Example:
            >>> et.rand_like(et.zeros((2, 3)), seed=0).shape
            (2, 3)
        """
        return cls.rand(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)
