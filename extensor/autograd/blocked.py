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
        spec: QuantSpec | str,
        seed: int | None = None,
        running: RunningAmax | None = None,
        clip_gradient: bool = False,
    ) -> Tensor:
        """To blocked storage as a spec says; the ``to_*`` methods are short forms of it.

        float64 and 16-bit floats are cast to float32 first. The gradient is straight-through, or
        clipped; it cannot be differentiated again.

        Args:
            spec: format, axis, tile, scale rule, rounding and the rest; or the name of a format.
            seed: names the random bits of stochastic rounding; given exactly then.
            running: the maxima kept from call to call, with ``statistic="running"``; updated here.
            clip_gradient: let no gradient through where ``|x|`` exceeds its block's largest value
                (needs 4- or 8-bit symmetric codes and no transform).

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError: if the tensor is not of dense floats or ``spec`` is no QuantSpec or name.
            ValueError: if the spec does not fit, or ``seed`` or ``running`` is missing or
                superfluous.

        Example:
            >>> q = et.ones((2, 64)).quantize(et.QuantSpec("mxfp4", scale_rule="rceil"))
            >>> q.scales.shape, q.nbytes
            ((2, 2), 68)
        """
        chosen = QuantSpec(spec) if isinstance(spec, str) else spec
        return FUNCTIONS["quantize"](self, chosen, seed, running, clip_gradient)

    def dequantize(self) -> Tensor:
        """The values of the codes and scales.

        Returns:
            float32, of this tensor's shape; a dense tensor itself.

        Example:
            >>> et.ExTensor([[1.0, 2.2, 5.1, 0.1]]).to_mxfp4(block_size=4).dequantize().tolist()
            [[1.0, 2.0, 6.0, 0.0]]
        """
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

        The default scale rule is OCP's ``"floor"``. It saturates: values from 7 to 8 times their
        block's scale become 6 times the scale. ``scale_rule="rceil"``, which hardware and
        training recipes use, saturates none; it doubles the scale of the blocks concerned.

        Args:
            block_size: elements along ``axis`` that share a scale; 32 if neither it nor ``tile`` is
                given.
            options: any of `BlockOptions`: ``axis`` (the GEMM's reduction axis, -1), ``scale_rule``
                (floor, rceil, ceil, even, one), ``rounding`` ("nearest_even", or "stochastic" with
                ``seed``), ``tile`` and further fields of `QuantSpec`.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: for an unknown option, or a value that does not fit the format.

        Source: OCP MX v1.0, table 1.

        Example:
            >>> q = et.ones((2, 64)).to_mxfp4()
            >>> q.codes.shape, q.scales.shape, q.nbytes
            ((2, 32), (2, 2), 68)

            The share of normal values that saturates:

            >>> import numpy as np
            >>> x = et.randn(1024, 1024, seed=0)
            >>> for rule in ("floor", "rceil"):
            ...     scales = x.to_mxfp4(scale_rule=rule).scales.reshape(-1, 1)
            ...     scaled = np.ldexp(x.numpy().reshape(-1, 32), 127 - scales.astype(int))
            ...     print(f"{rule}: {(np.abs(scaled) >= 7).mean():.2%}")
            floor: 0.87%
            rceil: 0.00%
        """
        return self._to("mxfp4", block_size, options)

    def to_mxfp6(
        self,
        element: Literal["e2m3", "e3m2"] = "e2m3",
        block_size: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> Tensor:
        """To MXFP6: e2m3 or e3m2 codes, four in three bytes, and an E8M0 scale per block of 32.

        The default scale rule, ``"floor"``, saturates values beyond 7.75 (e2m3) or 30 (e3m2)
        times the scale; ``scale_rule="rceil"`` saturates none, as `to_mxfp4` shows.

        Args:
            element: the codes' grid.
            block_size: as of `to_mxfp4`.
            options: as of `to_mxfp4`.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`, and for another element.

        Source: OCP MX v1.0, table 1.

        Example:
            >>> et.ones((2, 64)).to_mxfp6("e3m2").nbytes
            100
        """
        return self._to(_format_of("mxfp6", element), block_size, options)

    def to_mxfp8(
        self,
        element: Literal["e4m3", "e5m2"] = "e4m3",
        block_size: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> Tensor:
        """To MXFP8: e4m3 or e5m2 codes and an E8M0 scale per block of 32.

        The default scale rule, ``"floor"``, saturates values beyond 464 (e4m3) or 61440 (e5m2)
        times the scale; ``scale_rule="rceil"`` saturates none, as `to_mxfp4` shows.

        Args:
            element: the codes' grid.
            block_size: as of `to_mxfp4`.
            options: as of `to_mxfp4`.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`, and for another element.

        Source: OCP MX v1.0, table 1.

        Example:
            >>> et.ones((2, 64)).to_mxfp8("e5m2").dtype
            extensor.mxfp8_e5m2
        """
        return self._to(_format_of("mxfp8", element), block_size, options)

    def to_mxint8(self, block_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To MXINT8: 8-bit integer codes and an E8M0 scale per block of 32.

        The default scale rule, ``"floor"``, saturates values beyond 127.5 / 64 times the scale;
        ``scale_rule="rceil"`` saturates none, as `to_mxfp4` shows.

        Args:
            block_size: as of `to_mxfp4`.
            options: as of `to_mxfp4`.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`.

        Source: OCP MX v1.0, table 1.

        Example:
            >>> et.ones((2, 64)).to_mxint8().nbytes
            132
        """
        return self._to("mxint8", block_size, options)

    def to_nvfp4(self, block_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To NVFP4: e2m1 codes, an e4m3 scale per block of 16, a float32 scale per tensor.

        The scale follows the block's largest value, so that nothing saturates.

        Args:
            block_size: elements along ``axis`` that share a scale; 16 if neither it nor ``tile`` is
                given.
            options: as of `to_mxfp4`; ``scale_rule`` is "amax" (Transformer Engine's) or
                "four_over_six".

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`.

        Source: NVIDIA, arXiv 2509.25149, section 2.

        Example:
            >>> q = et.ones((2, 64)).to_nvfp4()
            >>> q.scales.shape, q.tensor_scale.dtype
            ((2, 4), dtype('float32'))
        """
        return self._to("nvfp4", block_size, options)

    def to_fp8(
        self, element: Literal["e4m3", "e5m2"] = "e4m3", **options: Unpack[BlockOptions]
    ) -> Tensor:
        """To FP8: e4m3 or e5m2 codes and a float32 scale per tensor or tile.

        The scale follows the tile's largest value, so that nothing saturates.

        Args:
            element: the codes' grid.
            options: as of `to_mxfp4`; ``tile`` is "tensor", "channel", (1, 128) or (128, 128), for
                example.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`, and for another element.

        Source: Micikevicius et al., arXiv 2209.05433.

        Example:
            >>> et.ones((4, 256)).to_fp8(tile=(1, 128)).scales.shape
            (4, 2)
        """
        return self._to(_format_of("fp8", element), None, options)

    def to_int8(self, group_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To INT8: 8-bit integer codes with a float scale per channel, tensor or group.

        The scale follows the largest value, so that nothing saturates.

        Args:
            group_size: elements along ``axis`` that share a scale; one channel if it and ``tile``
                are None.
            options: as of `to_mxfp4`; ``tile="tensor"`` has one scale, ``symmetric=False`` adds a
                zero point per scale.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`.

        Example:
            >>> et.ones((2, 64)).to_int8().scales.shape
            (2, 1)
        """
        return self._to("int8", group_size, options)

    def to_int4(self, group_size: int | None = None, **options: Unpack[BlockOptions]) -> Tensor:
        """To INT4: 4-bit integer codes, two per byte, with a float scale per group of 32.

        The scale follows the largest value, so that nothing saturates.

        Args:
            group_size: elements along ``axis`` that share a scale; 32 if neither it nor ``tile`` is
                given.
            options: as of `to_mxfp4`; ``symmetric=False`` adds a zero point per scale.

        Returns:
            A blocked tensor of this tensor's shape.

        Raises:
            TypeError, ValueError: as `to_mxfp4`.

        Example:
            >>> et.ones((2, 64)).to_int4(group_size=16).scales.shape
            (2, 4)
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
