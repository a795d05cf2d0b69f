"""The oracle's own tables of formats and dialects, and the state of one quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.blocks import Index, blocks
from tests.oracle.grid import GRIDS, encode
from tests.oracle.philox import word

F = np.float32
FLT_MAX = F(3.4028234663852886e38)
NAN = F(math.nan)

FORMATS = {  # element, kind of scale, default tile
    "mxfp8_e4m3": ("e4m3", "e8m0", (1, 32)),
    "mxfp8_e5m2": ("e5m2", "e8m0", (1, 32)),
    "mxfp6_e2m3": ("e2m3", "e8m0", (1, 32)),
    "mxfp6_e3m2": ("e3m2", "e8m0", (1, 32)),
    "mxfp4": ("e2m1", "e8m0", (1, 32)),
    "mxint8": ("int8_mx", "e8m0", (1, 32)),
    "nvfp4": ("e2m1", "nv", (1, 16)),
    "nvfp4_fp8exact": ("e2m1", "nv", (1, 16)),
    "fp8_e4m3": ("e4m3", "float", "tensor"),
    "fp8_e5m2": ("e5m2", "float", "tensor"),
    "int8": ("int8", "float", "channel"),
    "int4": ("int4", "float", (1, 32)),
    "int5": ("int5", "float", (1, 32)),
    "int6": ("int6", "float", (1, 32)),
    "outlier": ("e4m3", "outlier", "channel"),
}
DEFAULT_RULE = {"nvfp4": "amax", "nvfp4_fp8exact": "least_error"}
DIALECT_RULE = {
    "nvidia": "rceil",
    "torchao": "floor",
    "compressed_tensors": "even",
    "model_optimizer": "rceil",
    "microxcaling": "floor",
    "gguf": "floor",
}
TIES = {("model_optimizer", "mxfp4"): "zero", ("gguf", "mxfp4"): "zero"} | {
    ("microxcaling", name): "away" for name in FORMATS
}
ZEROS = {  # (dialect, format) -> (sign bit of exact zeros, of values that round to zero)
    ("compressed_tensors", name): ("+", "own") for name in FORMATS
} | {
    ("model_optimizer", "mxfp4"): ("-", "own"),
    ("model_optimizer", "nvfp4"): ("+", "own"),
    ("gguf", "mxfp4"): ("+", "+"),
}
ZERO_BLOCK_BYTE = {"torchao": 0x08, "compressed_tensors": 0x20, "model_optimizer": 0x38}
INFINITY_BYTE = {"nvidia": lambda emax: 0xFE, "torchao": lambda emax: 255 - emax}
MIN_DIVISOR = {"torchao": -126}
MIN_SCALE = {"torchao": 0x08, "model_optimizer": 0x01}
ORDER = {"torchao", "model_optimizer"}
TINY_SATURATES = {"nvidia"}


@dataclass
class Result:
    """What is stored, what it stands for, and the two counts."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray
    operand: np.ndarray
    tensor_scale: np.float32 | None = None
    zero_points: np.ndarray | None = None
    row_means: np.ndarray | None = None
    outlier_index: np.ndarray | None = None
    outlier_value: np.ndarray | None = None
    saturated: int = 0
    flushed: int = 0


@dataclass
class Work:
    """One quantization under way: the coded array, its blocks and what is written for them."""

    x: np.ndarray
    axis: int
    tile: object
    spec: object
    stream: object
    previous: np.ndarray | None
    element: str
    codes: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    saturated: int = 0

    def __post_init__(self) -> None:
        self.codes = np.zeros(self.x.shape, np.uint8)
        self.values = np.zeros(self.x.shape, np.float32)
        self.all = list(blocks(self.x.shape, self.axis, self.tile))
        at = (self.spec.dialect, self.spec.format)
        self.ties = TIES.get(at, "even")
        self.zeros = ZEROS.get(at, ("own", "own"))
        self.factor = F(self.spec.element_scale)

    def grid_shape(self) -> tuple[int, ...]:
        if self.all:
            return tuple(1 + max(where[d] for where, _ in self.all) for d in range(self.x.ndim))
        extent = [1] * self.x.ndim
        if isinstance(self.tile, tuple):
            extent[self.axis - 1], extent[self.axis] = self.tile
        elif self.tile == "channel":
            extent[self.axis] = max(self.x.shape[self.axis], 1)
        else:
            extent = [max(n, 1) for n in self.x.shape]
        return tuple(-(-n // e) for n, e in zip(self.x.shape, extent, strict=True))

    def drawn(self, number: int, position: int) -> int | None:
        if self.spec.rounding != "stochastic":
            return None
        return word(self.stream, number, position, self.spec.rbits)

    def scaled(self, v: np.float32) -> np.float32:
        """The element factor, when it is not one."""
        return v if self.factor == 1 else F(v * self.factor)

    def coded(self, v: np.float32, drawn: int | None, element: str = "") -> tuple[int, bool]:
        """Code and saturation of a scaled value, with the dialect's ties and zeros."""
        name = element or self.element
        code, saturated = encode(v, name, drawn, self.ties)
        bit = 2 ** (GRIDS[name].bits - 1)
        if not GRIDS[name].signed_integer and code % bit == 0:
            sign = self.zeros[0 if v == 0 else 1]
            code = {"own": code, "+": 0, "-": bit}[sign]
        return code, saturated

    def put(self, at: Index, code: int, saturated: bool, value: object) -> None:
        self.codes[at] = code
        self.saturated += saturated
        self.values[at] = value

    def statistic(self, where: Index, places: list[Index | None]) -> np.float32:
        """What stands for the largest magnitude of a block of finite values."""
        sizes = sorted(abs(self.x[at]) for at in places if at is not None)
        amax = sizes[-1] if sizes else F(0)
        if self.spec.statistic == "percentile":
            rank = math.ceil(self.spec.percentile * len(sizes) / 100)
            chosen = sizes[max(rank, 1) - 1]
            return chosen if chosen > 0 else amax
        if self.spec.statistic == "running" and self.previous is not None and amax > 0:
            return max(amax, F(F(self.spec.decay) * F(self.previous[where])))
        return amax
