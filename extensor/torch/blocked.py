"""Torch tensors as packed codes and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends import registry
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor.torch import arrays
from extensor.torch.arrays import check_tensor, to_array, to_tensor

__all__ = ["BlockedTensor", "to_blocked"]


@dataclass(frozen=True, eq=False)
class BlockedTensor:
    """A tensor's codes and scales, as torch tensors; `to_blocked` makes it.

    Attributes:
        parts: what is stored, by the field's name in `extensor.quant.array.QuantArray`: ``codes``
            (uint8, packed along ``spec.axis``), ``scales``, and what else the format has.
        spec: the resolved spec.
        shape: the logical shape; padding never shows in it.

    >>> import extensor.torch as ext
    >>> q = ext.to_blocked(torch.ones(4, 64), "mxfp4")
    >>> q
    BlockedTensor(shape=(4, 64), format='mxfp4', tile=(1, 32), device=cpu, nbytes=136)
    >>> q.codes.shape, q.scales.shape
    (torch.Size([4, 32]), torch.Size([4, 2]))
    """

    parts: dict[str, torch.Tensor]
    spec: QuantSpec
    shape: tuple[int, ...]

    @property
    def codes(self) -> torch.Tensor:
        """The packed codes, uint8."""
        return self.parts["codes"]

    @property
    def scales(self) -> torch.Tensor:
        """One scale for each block: bits of E8M0 or E4M3 as uint8, or floats."""
        return self.parts["scales"]

    @property
    def tensor_scale(self) -> torch.Tensor | None:
        """NVFP4's float32 scale of the whole tensor, of shape (); None where there is none."""
        return self.parts.get("tensor_scale")

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def __repr__(self) -> str:
        return (
            f"BlockedTensor(shape={self.shape}, format={self.spec.format!r}, "
            f"tile={self.spec.tile}, device={self.device}, nbytes={self.nbytes})"
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of the codes and scales.

        Args:
            dtype: float32, bfloat16 or float16; the float32 values are rounded to it once.

        Returns:
            A tensor of the logical shape.

        Raises:
            TypeError: for another dtype.

        >>> import extensor.torch as ext
        >>> ext.to_blocked(torch.tensor([[1.0, 2.2, 5.1, 0.1]]), "mxfp4").dequantize()
        tensor([[1., 2., 6., 0.]])
        """
        if dtype not in arrays.DTYPES:
            raise TypeError(f"dequantize: expected float32, bfloat16 or float16, got {dtype}")
        with arrays.on_device(self.codes) as place:
            values = place.backend.dequantize(self._stored(), str(dtype).removeprefix("torch."))
            return to_tensor(values)

    def to_extensor(self) -> ExTensor:
        """The same codes and scales as extensor's own blocked tensor, which shares their memory.

        Returns:
            A blocked `ExTensor`.

        >>> import extensor.torch as ext
        >>> ext.to_blocked(torch.ones(2, 32), "mxfp4").to_extensor().dtype
        extensor.mxfp4
        """
        return wrap(self._stored(), registry.get(self.device.type))

    def to(self, device: torch.device | str) -> BlockedTensor:
        """All parts on a device.

        Args:
            device: as torch names it.

        Returns:
            This tensor itself if it is there.

        >>> import extensor.torch as ext
        >>> ext.to_blocked(torch.ones(2, 32), "mxfp4").to("cpu").device
        device(type='cpu')
        """
        parts = {name: part.to(device) for name, part in self.parts.items()}
        if all(parts[name] is part for name, part in self.parts.items()):
            return self
        return BlockedTensor(parts, self.spec, self.shape)

    def _stored(self) -> QuantArray:
        there: dict[str, Any] = {name: to_array(part) for name, part in self.parts.items()}
        return QuantArray(spec=self.spec, shape=self.shape, **there)


# Checking a spec takes longer than packing a small tensor.
_own_spec = lru_cache(maxsize=64)(QuantSpec)
_resolved = lru_cache(maxsize=256)(QuantSpec.resolve)


def to_blocked(
    tensor: torch.Tensor, spec: QuantSpec | str, seed: int | None = None, **fields: Any
) -> BlockedTensor:
    """A torch tensor as packed codes and scales, without a copy on the way; no gradient.

    On a GPU nothing waits, and `torch.cuda.graph` captures the call, with the seed as a constant.

    Args:
        tensor: float32, bfloat16 or float16, on the CPU or a CUDA device.
        spec: a format's name, or all of `extensor.QuantSpec`.
        seed: names the random bits of stochastic rounding; given exactly then.
        fields: beside a name, further fields of `extensor.QuantSpec`, such as ``axis`` or
            ``scale_rule``.

    Returns:
        Codes and scales as torch tensors on the same device.

    Raises:
        TypeError: for a tensor that cannot be quantized, or an unknown field.
        ValueError: for an unknown format, a field that does not fit it, or a missing seed.
        RuntimeError: in a captured graph, for a format that no kernel makes.

    >>> import extensor.torch as ext
    >>> q = ext.to_blocked(torch.randn(8, 64), "nvfp4")
    >>> q.codes.dtype, q.scales.shape, q.tensor_scale.shape
    (torch.uint8, torch.Size([8, 4]), torch.Size([]))
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_blocked: expected a torch.Tensor, got {type(tensor).__name__}")
    check_tensor("to_blocked", tensor)
    if isinstance(spec, str):
        spec = QuantSpec(spec, **fields) if fields else _own_spec(spec)
    elif fields:
        raise TypeError(f"to_blocked: {', '.join(fields)}: say it in the QuantSpec")
    if (seed is None) == (spec.rounding == "stochastic"):
        needs = "needs" if seed is None else "takes no"
        raise ValueError(f"to_blocked: rounding={spec.rounding!r} {needs} seed")
    resolved, stream = _resolved(spec, tensor.ndim), None if seed is None else Stream(seed)
    with arrays.on_device(tensor) as place:
        backend, array = place.backend, to_array(tensor)
        if place.capturing:
            _check_replayed(backend, array, resolved, stream)
        stored, _ = backend.quantize(array, resolved, stream)
        parts = {name: to_tensor(part) for name, part in stored.parts.items()}
    return BlockedTensor(parts, stored.spec, tuple(stored.shape))


def _check_replayed(backend: Any, array: Any, spec: QuantSpec, stream: Stream | None) -> None:
    """Refuse what a captured graph would not replay."""
    if (path := backend.path("quantize", array, spec, stream)) != "fused kernel":
        raise RuntimeError(
            f"to_blocked: {spec.format} is made on the CPU ({path.removeprefix('host: ')}), which "
            "a captured graph does not replay; call it outside of the graph"
        )
