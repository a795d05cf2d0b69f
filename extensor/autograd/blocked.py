"""The blocked side of ExTensor: quantize, dequantize, and what is stored."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Literal, TypedDict, Unpack

from extensor.autograd.node import Tensor, TensorState
from extensor.autograd.primitive import FUNCTIONS
from extensor.errors import unknown_name
from extensor.formats import ELEMENTS, FORMATS, Tile
from extensor.quant.array import QuantArray
from extensor.quant.reference import RunningAmax
from extensor.quant.spec import Hadamard, QuantSpec, Rounding

__all__ = ["BlockOptions", "BlockedMethods"]


class BlockOptions(TypedDict, total=False):
    """What the ``to_*`` methods take beside the block size: fields of `QuantSpec`, and the seed."""

    axis: int
    tile: Tile | None
    scale_rule: str | None
    rounding: Rounding
    seed: int | None
    rbits: int
    transform: Hadamard | None
    dialect: str
    percentile: float
    statistic: Literal["amax", "percentile"]
    scale_window: int | None
    element_scale: float
    scale_dtype: Literal["float32", "float16"] | None
    symmetric: bool


def _tile(block_size: int | None, tile: Tile | None) -> Tile | None:
    """The tile that ``block_size`` or ``tile`` asks for."""
    if block_size is None or tile is not None:
        if block_size is not None:
            raise ValueError("block_size and tile say the same thing; give one of them")
        return tile
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise TypeError(f"block_size: expected an int, got {block_size!r}")
    if block_size < 1:
        raise ValueError(f"block_size: expected 1 or more, got {block_size}")
    return (1, block_size)


def _format_of(family: str, element: str) -> str:
    """The format ``family_element``, with a clear error for another element."""
    known = [n.removeprefix(family + "_") for n in FORMATS if n.startswith(family + "_")]
    if element not in known:
        hint = "" if element in ELEMENTS else "; no such element grid at all"
        raise ValueError(unknown_name(f"{family} element", element, known) + hint)
    return f"{family}_{element}"


class BlockedMethods(TensorState, Generic[Tensor]):
    """Methods of `ExTensor` that make or read blocked tensors."""

    __slots__ = ()

    # --- making ---------------------------------------------------------------------------------

    def quantize(
        self,
        spec: QuantSpec,
        seed: int | None = None,
        running: RunningAmax | None = None,
        clip_gradient: bool = False,
    ) -> Tensor:
        """To blocked storage as ``spec`` says; see `extensor.ops.quantize`."""
        return FUNCTIONS["quantize"](self, spec, seed, running, clip_gradient)

    def dequantize(self) -> Tensor:
        """The values, float32; a dense tensor is returned as it is."""
        return FUNCTIONS["dequantize"](self)

    def _to(self, format: str, size: int | None, options: BlockOptions) -> Tensor:
        fields: dict[str, Any] = dict(options)
        seed = fields.pop("seed", None)
        tile = _tile(size, fields.pop("tile", None))
        try:
            spec = QuantSpec(format, tile=tile, **fields)
        except TypeError as error:
            unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(QuantSpec)})
            if not unknown:
                raise
            known = BlockOptions.__annotations__
            raise TypeError(unknown_name("option", unknown[0], known)) from error
        return self.quantize(spec, seed)

    def to_mxfp4(self, block_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To MXFP4: e2m1 codes, two per byte, and an E8M0 scale per block of 32.

        Args:
            block_size: elements along ``axis`` that share a scale; 32 if neither it nor ``tile``
                is given.
            options: any of `BlockOptions`: ``axis`` (the GEMM's reduction axis, -1), ``scale_rule``
                (floor, rceil, ceil, even, one), ``rounding`` ("nearest_even", or "stochastic" with
                ``seed``), ``tile`` and further fields of `QuantSpec`.
        """
        return self._to("mxfp4", block_size, options)

    def to_mxfp6(
        self,
        element: Literal["e2m3", "e3m2"] = "e2m3",
        block_size: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> Tensor:
        """To MXFP6, four codes in three bytes; arguments as `to_mxfp4`."""
        return self._to(_format_of("mxfp6", element), block_size, options)

    def to_mxfp8(
        self,
        element: Literal["e4m3", "e5m2"] = "e4m3",
        block_size: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> Tensor:
        """To MXFP8; arguments as `to_mxfp4`."""
        return self._to(_format_of("mxfp8", element), block_size, options)

    def to_mxint8(self, block_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To MXINT8; arguments as `to_mxfp4`."""
        return self._to("mxint8", block_size, options)

    def to_nvfp4(self, block_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To NVFP4: e2m1 codes, an e4m3 scale per 16, a float32 scale per tensor.

        ``scale_rule`` is ``"amax"`` (Transformer Engine's) or ``"four_over_six"``; the other
        arguments as `to_mxfp4`.
        """
        return self._to("nvfp4", block_size, options)

    def to_fp8(
        self, element: Literal["e4m3", "e5m2"] = "e4m3", **options: Unpack[BlockOptions]
    ) -> Tensor:
        """To FP8, a float32 scale per tensor or ``tile``: "channel", (1, 128), (128, 128)."""
        return self._to(_format_of("fp8", element), None, options)

    def to_int8(self, group_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To INT8 with float scales: per channel by default, ``tile="tensor"``, or groups.

        ``symmetric=False`` adds a zero point per scale.
        """
        return self._to("int8", group_size, options)

    def to_int4(self, group_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To INT4, two codes per byte, with a float scale per group of 32 by default.

        ``symmetric=False`` adds a zero point per scale.
        """
        return self._to("int4", group_size, options)

    # --- reading --------------------------------------------------------------------------------

    def _stored(self, what: str) -> QuantArray:
        if not isinstance(self.data, QuantArray):
            raise TypeError(
                f".{what}: the tensor is dense and has no blocks; quantize it first, "
                "for instance with x.to_mxfp4()"
            )
        return self.data

    @property
    def codes(self) -> Any:
        """The packed codes: uint8, the block axis holding bytes."""
        return self._stored("codes").codes

    @property
    def scales(self) -> Any:
        """One scale per block: uint8 bits (E8M0, E4M3) or float."""
        return self._stored("scales").scales

    @property
    def tensor_scale(self) -> Any:
        """NVFP4's float32 scale of the whole tensor; None for formats without one."""
        return self._stored("tensor_scale").tensor_scale

    @property
    def zero_points(self) -> Any:
        """Zero points of an asymmetric format (int8); None without."""
        return self._stored("zero_points").zero_points

    @property
    def spec(self) -> QuantSpec:
        """How the tensor was quantized, with axis, tile and rule filled in."""
        return self._stored("spec").spec

    @property
    def axis(self) -> int:
        """The axis the blocks run along."""
        return self._stored("axis").spec.axis

    @property
    def block_size(self) -> int:
        """Elements along the axis that share a scale."""
        q = self._stored("block_size")
        return q.spec.tile[1] if isinstance(q.spec.tile, tuple) else max(q.shape[q.spec.axis], 1)
