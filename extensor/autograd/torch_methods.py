"""PyTorch's short forms of conversions, whose meaning is the same here."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, Self

from extensor.autograd.node import Tensor, TensorState
from extensor.autograd.primitive import FUNCTIONS
from extensor.dtypes import DTypeLike

__all__ = ["TorchMethods"]


class TorchMethods(TensorState, Generic[Tensor]):
    """Methods of `ExTensor` that others say in more words; `extensor.torch_names` has the rest."""

    __slots__ = ()

    @abstractmethod
    def to(self, target: DTypeLike) -> Tensor:
        """See :meth:`extensor.ExTensor.to`."""

    def view(self, *shape: Any) -> Tensor:
        """See :func:`extensor.reshape`, which shares memory where it can."""
        return FUNCTIONS["reshape"](self, shape[0] if len(shape) == 1 else shape)

    def float(self) -> Tensor:
        """This tensor in float32: ``x.to(et.float32)``.

        Returns:
            The tensor itself if it is float32, else a new one.

        Example:
            >>> et.ones(2, dtype="float64").float().dtype
            extensor.float32
        """
        return self.to("float32")

    def double(self) -> Tensor:
        """This tensor in float64: ``x.to(et.float64)``.

        Returns:
            The tensor itself if it is float64, else a new one.

        Example:
            >>> et.ones(2).double().dtype
            extensor.float64
        """
        return self.to("float64")

    def half(self) -> Tensor:
        """This tensor in float16: ``x.to(et.float16)``.

        Returns:
            The tensor itself if it is float16, else a new one.

        Example:
            >>> et.ones(2).half().dtype
            extensor.float16
        """
        return self.to("float16")

    def bfloat16(self) -> Tensor:
        """This tensor in bfloat16: ``x.to(et.bfloat16)``.

        Returns:
            The tensor itself if it is bfloat16, else a new one.

        Example:
            >>> et.ones(2).bfloat16().dtype
            extensor.bfloat16
        """
        return self.to("bfloat16")

    def cpu(self) -> Tensor:
        """This tensor on the CPU: ``x.to("cpu")``.

        Returns:
            The tensor itself if it is there, else a new one.

        Raises:
            RuntimeError: as `to`.

        Example:
            >>> et.ones(2).cpu().device
            'cpu'
        """
        return self.to("cpu")

    def cuda(self) -> Tensor:
        """This tensor on the GPU: ``x.to("cuda")``.

        Returns:
            The tensor itself if it is there, else a new one.

        Raises:
            RuntimeError: as `to`.

        Example:
            >>> et.ones(2).cuda().device    # doctest: +SKIP
            'cuda'
        """
        return self.to("cuda")

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad``.

        Args:
            requires_grad: whether operations on the tensor are recorded.

        Returns:
            The tensor itself.

        Raises:
            RuntimeError: for the result of an operation.
            TypeError: for a tensor that is not of dense floats.

        Example:
            >>> et.ones(2).requires_grad_().requires_grad
            True
        """
        self.requires_grad = requires_grad
        return self
