"""QuantSpec: how a tensor is quantized: its format, blocks, scales and rounding.

A spec is frozen and checked when it is made. `QuantSpec.resolve` fills in what depends on the
array: the axis and the tile.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from extensor.errors import unknown_name
from extensor.formats import DIALECTS, FORMATS, BlockFormat, Dialect, Tile
from extensor.formats.dialects import Ties, ZeroSign
from extensor.quant.scale_rules import E8M0_SEARCHES

__all__ = ["Hadamard", "QuantSpec"]

Rounding = Literal["nearest_even", "stochastic"]
Statistic = Literal["amax", "percentile", "running"]

HADAMARD_SIZES = (16, 32, 64, 128)
REBASE_TILE = 128  # rows and columns of a tile that shares a scale under `QuantSpec.rebased`
MAX_EXTENT = 2**31 - 1  # positions within a tile must fit 64 bits
TRANSFORMER_ENGINE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The sign vector Transformer Engine fixes for its Hadamard-16."""


@dataclass(frozen=True)
class Hadamard:
    """Random Hadamard transform along the axis: x diag(s) H_d / sqrt(d).

    Attributes:
        size: d, one of 16, 32, 64, 128; the axis is zero-padded to a multiple of it.
        signs: ``"none"`` (all +1, deterministic), ``"fixed"`` (Transformer Engine's vector,
            repeated), ``"random"`` (drawn from ``seed``, once for all steps) or ``"per_step"``
            (drawn from ``seed``, ``step`` and ``stream``).
        seed: seed of the random signs. Both operands of a GEMM must use the same.
        step: the optimizer step of ``"per_step"``; a recipe fills it in.
        stream: a number of 32 bits, of the layer and its GEMM, likewise.

    >>> spec = et.QuantSpec("mxfp4", transform=et.Hadamard(size=32, signs="random", seed=7))
    >>> q = et.randn(4, 64, seed=0).quantize(spec)
    >>> q.shape, q.spec.transform.size
    ((4, 64), 32)
    """

    size: int = 16
    signs: Literal["none", "fixed", "random", "per_step"] = "fixed"
    seed: int = 0
    step: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        if not _is_int(self.size) or self.size not in HADAMARD_SIZES:
            raise ValueError(f"Hadamard size: expected one of {HADAMARD_SIZES}, got {self.size!r}")
        if self.signs not in ("none", "fixed", "random", "per_step"):
            raise ValueError(
                f"Hadamard signs: expected none, fixed, random or per_step, got {self.signs!r}"
            )
        for name, bits in (("seed", 64), ("step", 32), ("stream", 32)):
            value = getattr(self, name)
            if not _is_int(value) or not 0 <= value < 1 << bits:
                raise ValueError(
                    f"Hadamard {name}: expected an int in 0..2**{bits} - 1, got {value!r}"
                )
        if (self.step or self.stream) and self.signs != "per_step":
            raise ValueError(
                f"Hadamard step and stream: only for signs='per_step', got signs={self.signs!r}"
            )


def _checked_fields(cls: type[QuantSpec]) -> type[QuantSpec]:
    """Refuse unknown fields by name, and take ``block_size=b`` for ``tile=(1, b)``."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: QuantSpec, *args: Any, block_size: int | None = None, **fields: Any) -> None:
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            known = cls.__dataclass_fields__
            raise TypeError(unknown_name("field of QuantSpec", min(unknown), known))
        if block_size is not None:
            if fields.get("tile") is not None or len(args) > 2:
                raise TypeError("give block_size or tile, not both: block_size=b is tile=(1, b)")
            fields["tile"] = (1, block_size)
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_checked_fields
@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized.

    Attributes:
        format: name of a row of `FORMATS`.
        axis: the axis the blocks run along: the reduction axis of the GEMM.
        tile: (rows, columns): columns along ``axis``, rows along the axis before it (cyclically);
            ``"channel"``, one block spans the axis; ``"tensor"``, one block for everything;
            None, the format's own. ``block_size=b`` is short for ``tile=(1, b)``.
        scale_rule: name of a rule the format knows; None, the dialect's or the format's own.
        rounding: ``"nearest_even"`` or ``"stochastic"``.
        rbits: random bits per element under stochastic rounding, 8 or 32.
        transform: a Hadamard transform along ``axis`` before the block maxima are taken.
        dialect: name of a row of `DIALECTS`.
        statistic: the magnitude that a scale is chosen from: ``"amax"``, the block's largest;
            ``"percentile"``, its nearest-rank percentile; ``"running"``, max(amax, decay *
            previous).
        percentile: the percentile, in (0, 100].
        decay: the decay of the running maximum, in [0, 1).
        scale_window: how many binades an E8M0 scale may be below the tensor's largest; None, as in
            OCP MX, any number.
        element_scale: factor on the scaled values just before rounding, after the scale was chosen
            (3/4 in arXiv 2502.20586). Dequantizing does not undo it.
        scale_dtype: for float-scaled formats, ``"float32"`` or ``"float16"``; None elsewhere.
        symmetric: False stores a zero point (int8 and int4 only).
        minimum: True stores a float minimum for each block beside its scale, as GGUF's Q4_1 does:
            value = scale * (code - least code) + minimum. Integer formats only.
        super_block: elements along ``axis`` whose blocks share a float16 super-block scale, as in
            GGUF's Q4_K, Q5_K and Q6_K: a block's scale is a small integer times it; None without.
            See `extensor.quant.affine`.
        outliers: for the outlier codec, how many values of a row are stored exactly; None, an
            eighth of the row and at most the format's number.
        rebased: True gives all blocks in each 128 x 128 values of a matrix the largest of their
            scales, as FP8 tensor cores multiply them. Codes that become subnormal are rounded once
            more, and those that change are counted (`extensor.quant.rebase`). MXFP8 only.
        eden: True rounds codes to nearest and makes the block scales unbiased instead: corrected
            over each Hadamard transform, then rounded stochastically (MS-EDEN, arXiv 2601.22813,
            section 4). NVFP4 under a transform with random signs only.

    >>> spec = et.QuantSpec("mxfp4", axis=-1, scale_rule="rceil")
    >>> q = et.ones((4, 64)).quantize(spec)
    >>> q.codes.shape, q.scales.shape
    ((4, 32), (4, 2))
    """

    format: str
    axis: int = -1
    tile: Tile | None = None
    scale_rule: str | None = None
    rounding: Rounding = "nearest_even"
    rbits: int = 32
    transform: Hadamard | None = None
    dialect: str = "ocp"
    statistic: Statistic = "amax"
    percentile: float = 100.0
    decay: float = 0.9
    scale_window: int | None = None
    element_scale: float = 1.0
    scale_dtype: Literal["float32", "float16"] | None = None
    symmetric: bool = True
    outliers: int | None = None
    rebased: bool = False
    minimum: bool = False
    super_block: int | None = None
    eden: bool = False

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
                raise TypeError(f"{name}: expected {expected}, got {reprlib.repr(value)}")
        if self.format not in FORMATS:
            raise ValueError(unknown_name("format", self.format, FORMATS))
        if self.dialect not in DIALECTS:
            raise ValueError(unknown_name("dialect", self.dialect, DIALECTS))
        _check_tile(self.tile)
        self._check_rule()
        if self.rounding not in ("nearest_even", "stochastic"):
            raise ValueError(
                f"rounding: expected 'nearest_even' or 'stochastic', got {self.rounding!r}"
            )
        if self.rbits not in (8, 32):
            raise ValueError(f"rbits: expected 8 or 32, got {self.rbits!r}")
        if self.statistic not in ("amax", "percentile", "running"):
            raise ValueError(
                f"statistic: expected 'amax', 'percentile' or 'running', got {self.statistic!r}"
            )
        if not 0.0 < self.percentile <= 100.0:
            raise ValueError(f"percentile: expected a number in (0, 100], got {self.percentile!r}")
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay: expected a number in [0, 1), got {self.decay!r}")
        if not 0.0 < self.element_scale <= 1.0:
            raise ValueError(
                f"element_scale: expected a number in (0, 1], got {self.element_scale!r}"
            )
        self._check_format_options()

    drawn_from = None
    """The spec that `with_signs` made this one of: what is derived of it serves all steps."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple([self.__dict__[field] for field in self.__dataclass_fields__]))

    def __hash__(self) -> int:
        """Of all fields, computed once: a training step looks plans up by their specs."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a hash is another one in another process."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def __repr__(self) -> str:
        """The format, and the fields that are not the defaults."""
        values = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        changed = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"QuantSpec({', '.join(changed)})"

    def _check_rule(self) -> None:
        rules = self.row.scale_rules
        if self.scale_rule is not None and self.scale_rule not in rules:
            raise ValueError(
                f"{unknown_name(f'scale rule of {self.format}', self.scale_rule, rules)}"
            )
        theirs = DIALECTS[self.dialect].mx_scale_rule
        if self.is_mx and theirs and self.scale_rule not in (None, theirs):
            raise ValueError(
                f"dialect {self.dialect!r} means scale_rule={theirs!r}, got {self.scale_rule!r}; "
                "leave one of the two out"
            )

    def _check_format_options(self) -> None:
        row = self.row
        if self.scale_window is not None:
            if not self.is_mx:
                raise ValueError(f"scale_window: only for E8M0 scales, not {self.format}")
            if self.scale_window < 0:
                raise ValueError(f"scale_window: expected an int >= 0, got {self.scale_window!r}")
            if self.rule in E8M0_SEARCHES:
                raise ValueError(
                    f"scale_window: expected a rule that follows from the largest magnitude, got "
                    f"{self.rule!r}, which chooses by a block's values; leave one of the two out"
                )
        if self.statistic != "amax" and self.is_mx and self.rule in E8M0_SEARCHES:
            raise ValueError(
                f"statistic: expected 'amax' with scale rule {self.rule!r}, which reads a block's "
                f"values, got {self.statistic!r}"
            )
        if self.scale_dtype is not None and (
            row.scale.name != "float32" or self.scale_dtype not in ("float32", "float16")
        ):
            raise ValueError(
                f"scale_dtype: expected None (or, for a float-scaled format, 'float32' or "
                f"'float16'), got {self.scale_dtype!r} with {self.format}"
            )
        if not self.symmetric and not row.zero_point:
            raise ValueError(f"symmetric=False: {self.format} has no zero point; use int8 or int4")
        if not self.symmetric and self.statistic != "amax":
            raise ValueError(
                f"statistic={self.statistic!r} replaces the largest magnitude; with "
                "symmetric=False the range is [min, max]: use statistic='amax'"
            )
        if self.is_affine:
            self._check_affine()
        if self.outliers is not None and (
            not row.outliers or not 0 <= self.outliers <= row.outliers
        ):
            raise ValueError(
                f"outliers: expected None (or, for the outlier codec, 0..{row.outliers}), "
                f"got {self.outliers!r} with {self.format}"
            )
        if row.outliers and (
            self.transform or self.statistic != "amax" or self.tile not in (None, "channel")
        ):
            raise ValueError(
                f"{self.format} codes whole rows by their largest value: expected transform=None, "
                f"statistic='amax' and the format's tile, got {self.transform!r}, "
                f"{self.statistic!r} and {self.tile!r}"
            )

        if self.eden and not self._can_correct():
            raise ValueError(
                "eden: expected nvfp4 with rounding='stochastic' (of the block scales), rule, "
                "dialect and tile the format's own, statistic='amax', element_scale=1 and a "
                "Hadamard transform with random signs, over which the correction is unbiased, "
                f"got {self}"
            )
        if self.rebased and not self._can_rebase():
            raise ValueError(
                f"rebased: expected MXFP8 in tiles (1, n), n a divisor of {REBASE_TILE}, without a "
                f"transform, got {self.format} in tiles {self.tile} with {self.transform}; other "
                "MX formats are exact in FP8 or bfloat16"
            )

    def _check_affine(self) -> None:
        if self.row.element.is_float or not self.has_float_scales:
            raise ValueError(
                f"minimum and super_block: expected an integer format with float scales (int4, "
                f"int5, int6 or int8), got {self.format}"
            )
        if not self.symmetric or self.statistic != "amax" or self.transform:
            raise ValueError(
                "minimum and super_block: expected symmetric=True (a minimum takes the zero "
                f"point's place), statistic='amax' and no transform, got {self}"
            )
        tile = self.row.tile if self.tile is None else self.tile
        if not isinstance(tile, tuple) or tile[0] != 1:
            raise ValueError(
                f"minimum and super_block: expected tile (1, n), got {tile!r}; "
                "GGUF's blocks are (1, 32) and (1, 16)"
            )
        if self.super_block is None:
            return
        if self.super_block < 1 or self.super_block % tile[1]:
            raise ValueError(
                f"super_block: expected a multiple of the block's {tile[1]} elements, "
                f"got {self.super_block!r}"
            )
        if self.scale_dtype == "float32" or self.scale_rule == "one":
            raise ValueError(
                "super_block: scales are integers times a float16, chosen by rule 'amax'; leave "
                f"scale_dtype and scale_rule out, got {self}"
            )

    def _can_correct(self) -> bool:
        plain = self.statistic == "amax" and self.element_scale == 1.0
        plain = plain and self.tile in (None, self.row.tile) and self.rounding == "stochastic"
        plain = plain and self.row.tensor_scale and self.rule == "amax" and self.dialect == "ocp"
        random = ("random", "per_step")
        return plain and self.transform is not None and self.transform.signs in random

    def _can_rebase(self) -> bool:
        tile = self.row.tile if self.tile is None else self.tile
        blocks = isinstance(tile, tuple) and tile[0] == 1 and REBASE_TILE % tile[1] == 0
        return self.is_mxfp8 and blocks and self.transform is None

    @property
    def row(self) -> BlockFormat:
        """The format's row in `FORMATS`."""
        return FORMATS[self.format]

    @property
    def dialect_row(self) -> Dialect:
        """The dialect's row in `DIALECTS`."""
        return DIALECTS[self.dialect]

    @property
    def ties(self) -> Ties:
        """How rounding to nearest resolves ties between two codes."""
        return self.dialect_row.ties_in(self.format)

    @property
    def zero_sign(self) -> ZeroSign:
        """The sign bit of codes that are zero."""
        return self.dialect_row.zero_sign_in(self.format)

    @property
    def is_mx(self) -> bool:
        """True if blocks carry an E8M0 scale."""
        return self.row.scale.name == "e8m0"

    @property
    def has_float_scales(self) -> bool:
        """True if blocks carry a float32 or float16 scale and the tensor carries none."""
        return self.row.has_float_scales

    @property
    def is_affine(self) -> bool:
        """True if blocks carry a float minimum or lie in super-blocks (`extensor.quant.affine`)."""
        return self.minimum or self.super_block is not None

    @property
    def clips(self) -> bool:
        """True if a value beyond its block's largest one is clipped to it (`clip_gradient`)."""
        plain = self.symmetric and not self.row.outliers
        return plain and not self.is_affine and not self.rebased

    @property
    def kernel_gap(self) -> str:
        """What of the stored form no block kernel reads, in words; empty where kernels may."""
        if self.row.outliers:
            return "the outlier codec"
        if self.super_block is not None:
            return "super-blocks of integer scales"
        if self.minimum:
            return "a float minimum for each block"
        return "" if self.row.element.has_kernels else f"{self.row.element.name} codes"

    @property
    def is_mxfp8(self) -> bool:
        """True for FP8 elements under E8M0 scales."""
        return self.is_mx and self.row.element.is_float and self.row.element.bits == 8

    @property
    def rule(self) -> str:
        """The scale rule in force: the spec's, the dialect's or the format's."""
        theirs = self.dialect_row.mx_scale_rule if self.is_mx else None
        return self.scale_rule or theirs or self.row.scale_rule

    @property
    def scale_name(self) -> str:
        """How a scale is stored: e8m0, ue4m3, float32, float16; int8 or uint8 in super-blocks."""
        if self.super_block is not None:
            return "uint8" if self.minimum else "int8"
        return self.scale_dtype or self.row.scale.name

    def replace(self, **changes: Any) -> QuantSpec:
        """A copy with some fields changed, checked again.

        Args:
            changes: fields by name.

        Returns:
            The new spec.

        Raises:
            TypeError, ValueError: for unknown fields and values out of range.

        >>> et.QuantSpec("mxfp4").replace(scale_rule="rceil").rule
        'rceil'
        """
        return dataclasses.replace(self, **changes)

    def with_signs(self, transform: Hadamard) -> QuantSpec:
        """A copy whose transform has other signs; as nothing else changes, nothing is checked.

        Args:
            transform: of the size of the spec's own.

        Returns:
            The new spec.

        >>> spec = et.QuantSpec("mxfp4", transform=et.Hadamard(32, "per_step"))
        >>> spec.with_signs(et.Hadamard(32, "per_step", step=3)).transform.step
        3
        """
        copy = object.__new__(QuantSpec)
        copy.__dict__.update(self.__dict__, transform=transform, drawn_from=self.drawn_from or self)
        copy.__dict__.pop("_hash", None)
        return copy

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QuantSpec:
        """Make a spec from `dataclasses.asdict` of one, also after a way through JSON.

        Args:
            fields: values by field name; fields left out have their defaults.

        Returns:
            The spec.

        Raises:
            TypeError, ValueError: for unknown fields and values out of range.

        >>> et.QuantSpec.from_dict({"format": "mxfp4", "tile": [1, 16]}).tile
        (1, 16)
        """
        values = dict(fields)
        for field in dataclasses.fields(cls):
            value = values.get(field.name, field.default)
            if type(field.default) is bool and type(value) is not bool:
                raise TypeError(f"{field.name}: expected True or False, got {value!r}")
        if isinstance(values.get("transform"), Mapping):
            values["transform"] = Hadamard(**values["transform"])
        if isinstance(values.get("tile"), list):
            values["tile"] = tuple(values["tile"])
        return cls(**values)

    @property
    def has_per_step_signs(self) -> bool:
        """Whether the signs of the transform are drawn anew in each step."""
        return self.transform is not None and self.transform.signs == "per_step"

    @property
    def is_random(self) -> bool:
        """Whether quantizing draws random bits in each step: to round, or for signs."""
        return self.rounding == "stochastic" or self.has_per_step_signs

    def accepts_stream(self, stream: object) -> bool:
        """Whether a stream of random bits, or None for none, is what quantizing takes.

        Stochastic rounding needs one. Signs drawn in each step may have one: a captured step reads
        its number from the stream's clock.

        Args:
            stream: a `Stream` or None.

        Returns:
            False where a stream is missing, and where nothing would read the one given.

        >>> et.QuantSpec("mxfp4", rounding="stochastic").accepts_stream(None)
        False
        """
        if self.rounding == "stochastic":
            return stream is not None
        return stream is None or self.has_per_step_signs

    def resolve(self, ndim: int) -> QuantSpec:
        """The spec for an array of ``ndim`` axes, with axis, tile and scale rule filled in.

        Args:
            ndim: 1 or more.

        Returns:
            A spec whose axis is not negative and whose tile and scale rule are not None.

        Raises:
            ValueError: if the axis is out of range, or the tile has several rows and the array one
                axis.

        >>> spec = et.QuantSpec("nvfp4").resolve(2)
        >>> spec.axis, spec.tile, spec.scale_rule
        (1, (1, 16), 'amax')
        """
        if ndim == 0:
            raise ValueError("a scalar has no axis to block; reshape it to (1,) first")
        if not -ndim <= self.axis < ndim:
            raise ValueError(
                f"axis: expected {-ndim}..{ndim - 1} for an array of {ndim} axes, got {self.axis}"
            )
        tile = self.row.tile if self.tile is None else self.tile
        if isinstance(tile, tuple) and tile[0] > 1 and ndim == 1:
            raise ValueError(f"tile {tile} needs two axes, got an array of one; use (1, n)")
        if self.axis >= 0 and tile is self.tile and self.scale_rule is not None:
            return self
        return self.replace(axis=self.axis % ndim, tile=tile, scale_rule=self.rule)


_TEXT, _INT, _BOOL = (str,), (int, type(None)), (bool,)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "format": _TEXT, "axis": (int,), "scale_rule": (str, type(None)), "rounding": _TEXT,
    "rbits": (int,), "transform": (Hadamard, type(None)), "dialect": _TEXT, "statistic": _TEXT,
    "percentile": (float, int), "decay": (float, int), "scale_window": _INT,
    "element_scale": (float, int), "scale_dtype": (str, type(None)), "symmetric": _BOOL,
    "outliers": _INT, "rebased": _BOOL, "minimum": _BOOL, "super_block": _INT,
}  # fmt: skip
"""The types of the fields; a bool is no number. `_check_tile` checks the tile."""
_KIND_NAMES: Mapping[type, str] = {
    str: "a string", int: "an int", float: "a float", bool: "a bool", Hadamard: "a Hadamard",
    type(None): "None",
}  # fmt: skip


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tile(tile: object) -> None:
    if tile is None or (isinstance(tile, str) and tile in ("tensor", "channel")):
        return
    if not (isinstance(tile, tuple) and len(tile) == 2 and all(_is_int(n) for n in tile)):
        raise TypeError(
            f"tile: expected (rows, columns), 'channel', 'tensor' or None, got {tile!r}"
        )
    if min(tile) < 1:
        raise ValueError(f"tile and block sizes are 1 or more, got {tile!r}")
    if max(tile) > MAX_EXTENT:
        raise ValueError(
            f"tile and block sizes are at most {MAX_EXTENT}, got {tile!r}; 'channel' spans the axis"
        )
