"""Tensors of random values, the same for a seed on every device: ``randn`` and ``rand``."""

from __future__ import annotations

from typing import Any

from extensor.autograd.creation.arguments import Seed, as_sizes, draw_dtype, random_generator
from extensor.autograd.creation.base import WrapsArrays
from extensor.autograd.node import Tensor
from extensor.backends import registry
from extensor.dtypes import DTypeLike, as_dtype, float32

__all__ = ["RandomMethods"]


class RandomMethods(WrapsArrays[Tensor]):
    """Random values, drawn by numpy on the CPU and moved to the device."""

    __slots__ = ()

    @classmethod
    def randn(
        cls,
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Standard normal values, the same for a seed on every device.

        Args:
            shape: a tuple or separate ints.
            seed: an int, a numpy Generator to continue, or None for fresh entropy.
            dtype: of floats, or blocked.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape, seed or dtype.

        Example:
            >>> bool((et.randn(2, 3, seed=0) == et.randn((2, 3), seed=0)).all())
            True
        """
        kind = as_dtype(dtype)
        values = random_generator(seed).standard_normal(as_sizes(shape), draw_dtype(kind))
        data = registry.get(device).xp.asarray(values)
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def rand(
        cls,
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Values uniform in [0, 1), the same for a seed on every device.

        Args:
            shape: a tuple or separate ints.
            seed: an int, a numpy Generator to continue, or None for fresh entropy.
            dtype: of floats, or blocked.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape, seed or dtype.

        Example:
            >>> x = et.rand(100, seed=0)
            >>> bool(((x >= 0) & (x < 1)).all())
            True
        """
        kind = as_dtype(dtype)
        values = random_generator(seed).random(as_sizes(shape), draw_dtype(kind))
        data = registry.get(device).xp.asarray(values)
        return cls._from_array(data, kind, device, requires_grad)
