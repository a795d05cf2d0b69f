"""Launches the fused quantizers: a spec and a shape -> macros, grid and output arrays.

Covers blocks of 16, 32, 64 or 128 along any axis and square tiles of 16 or 32 in matrices, E8M0
scales under every rule, NVFP4's three and MS-EDEN, and the Hadamard transform; `plan_of` says why
something else is not covered, and the generic method runs instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.errors import CaptureError
from extensor.formats import ELEMENTS, ElementFormat
from extensor.quant.array import QuantArray, block_grid, coded_length, packed_length
from extensor.quant.hadamard import hadamard_signs
from extensor.quant.nvfp4 import EDEN_TOP
from extensor.quant.scale_rules import E8M0_SEARCHES, QUEST_CLIP
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.runtime.capture import current_capture, random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.launch import launch

__all__ = [
    "ACTIVATIONS",
    "MASKED",
    "Outputs",
    "Plan",
    "clip_gap",
    "element_macros",
    "empty_array",
    "encoding_macros",
    "exact_float",
    "fake_quantize",
    "is_whole",
    "plan_of",
    "quantize",
    "quantize_beside",
    "quantize_clipped",
    "quantize_raw",
    "quantize_source",
    "tensor_scales",
]

Array = Any

INPUTS = ("float32", "bfloat16", "float16")
BLOCKS = (16, 32, 64, 128)
THREADS, CHUNK, PANEL, SLOTS = 256, 16, 128, 256  # as in quantize.cu
TILE_SIDES = (16, 32)
_RULES = (
    *("floor", "rceil", "ceil", "even", "one", "amax", "four_over_six", "least_error"),
    *E8M0_SEARCHES,
)
SEARCHES = ("four_over_six", "least_error")  # they try several scales on a block's values
ACTIVATIONS = ("", "relu", "gelu")
"""What bfloat16 values may go through as they are read: kernels of `elementwise`, to the bit."""
_OUT = {"codes": 0, "values": 1, "maximum": 2}
_SCALE = ELEMENTS["e4m3"]
_TIE_WORDS = {"away": "0x7FFFFFFFu", "zero": "0x80000000u"}  # round as a constant random word
_FOLDER = Path(__file__).parent
MASKED = (("CODEC_MASK", 1),)
"""Macros of a quantizer that writes the clip mask, too."""
_FOUR_OVER_SIX_TOP = 256.0  # of block scales: a block may be scaled half again as far


@final
@dataclass(frozen=True)
class Plan:
    """A resolved spec on arrays of one shape.

    The array is (outer, length, inner), blocked along ``length``; ``inner == 1`` is a row block. In
    a tile of several rows these are, for a row block, the axis before ``length`` (the last of
    ``outer``), and otherwise ``inner``. What is quantized is the ``activation`` of the array.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    outer: int
    length: int
    inner: int
    block: int
    scales_shape: tuple[int, ...]
    codes_shape: tuple[int, ...]
    activation: str = ""

    @property
    def rows(self) -> int:
        """Rows of a tile; 1 for blocks along the axis alone."""
        assert isinstance(self.spec.tile, tuple)
        return self.spec.tile[0]

    @property
    def coded(self) -> int:
        """Elements coded along the axis: padded to the Hadamard size, if there is one."""
        return coded_length(self.spec, self.shape)

    @property
    def coded_shape(self) -> tuple[int, ...]:
        """The shape of decoded operands, which stay transformed."""
        axis = self.spec.axis
        return (*self.shape[:axis], self.coded, *self.shape[axis + 1 :])

    @property
    def columns(self) -> bool:
        """Whether blocks run columnwise."""
        return self.inner > 1

    @property
    def needs_tensor(self) -> bool:
        """Whether block scales depend on the whole tensor."""
        return self.spec.row.tensor_scale or self.spec.scale_window is not None

    @property
    def count(self) -> int:
        """Values that are coded."""
        return math.prod(self.coded_shape)


@dataclass(frozen=True)
class Outputs:
    """What one launch wrote, all on the device: nothing here waits for the GPU."""

    q: QuantArray | None
    values: Array | None
    counters: Counters | None
    maximum: Array | None

    def stats(self, count: int) -> OperandCounts:
        """The counts, which wait for the kernel when they are called."""
        assert self.counters is not None
        return OperandCounts(self.counters, (0, 2 * SLOTS), count)


@lru_cache(maxsize=4096)
def plan_of(
    spec: QuantSpec, shape: tuple[int, ...], decoding: bool = False, activation: str = ""
) -> Plan | Unsupported:
    """The plan, or why the kernels do not support it; decoding asks less of the spec.

    ``activation``, one of `ACTIVATIONS`, is of bfloat16 arrays, as they are read.
    """
    if activation not in ACTIVATIONS:
        return Unsupported(f"the activation {activation}; the kernels have {ACTIVATIONS[1:]}")
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return Unsupported(str(error))  # the generic method raises it
    if math.prod(shape) == 0:
        return Unsupported("empty array")
    if spec.has_float_scales:
        return Unsupported(f"{spec.scale_name} scales")
    if spec.rule not in _RULES and not decoding:
        return Unsupported(f"the {spec.rule} scale rule")
    if spec.eden and spec.rbits != 32 and not decoding:
        return Unsupported("block scales rounded by 8 random bits (eden)")
    if spec.rebased and not decoding:
        return Unsupported("a rebased spec")
    if spec.statistic != "amax" and not decoding:
        return Unsupported(f"the {spec.statistic} statistic")
    if spec.transform and decoding:
        return Unsupported("a Hadamard transform to undo")
    if not isinstance(spec.tile, tuple) or not _has_tile(spec, shape):
        return Unsupported(
            f"tile {spec.tile} along axis {spec.axis} of {len(shape)}; the kernels have (1, n), "
            f"n in {BLOCKS}, and (n, n) with n in {TILE_SIDES} along a last axis or in a matrix"
        )
    if decoding and spec.tile[0] > 1:
        return Unsupported("a square tile")
    if spec.tile[0] > 1 and spec.transform:
        return Unsupported("a Hadamard transform in square tiles")
    if spec.rule in SEARCHES and not decoding and (spec.tile[1] != 16 or spec.ties != "even"):
        return Unsupported(f"the {spec.rule} rule with tile {spec.tile} and ties to {spec.ties}")
    if spec.rule in E8M0_SEARCHES and not decoding:
        if spec.tile[0] > 1 or spec.ties != "even" or spec.scale_window is not None:
            return Unsupported(f"the {spec.rule} rule in square tiles, without ties to even, or "
                               "with a scale window")  # fmt: skip
        if spec.rule == "quest" and coded_length(spec, shape) % spec.tile[1]:
            return Unsupported("the quest rule with a block that is not whole")
    grid = block_grid(spec, shape)
    if math.prod(grid) >= 1 << 32:
        return Unsupported("2**32 blocks or more")
    codes = list(shape)
    codes[spec.axis] = packed_length(spec, shape)
    outer, inner = math.prod(shape[: spec.axis]), math.prod(shape[spec.axis + 1 :])
    layout = (outer, shape[spec.axis], inner, spec.tile[1])
    return Plan(spec, shape, *layout, grid, tuple(codes), activation)


def _has_tile(spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    assert isinstance(spec.tile, tuple)
    rows, length = spec.tile
    if rows == 1:
        return length in BLOCKS
    along_rows = spec.axis == len(shape) - 1
    columns = len(shape) == 2 and shape[1] > 1  # one column lies as a row does
    return rows == length and length in TILE_SIDES and (along_rows or columns)


def element_macros(element: ElementFormat) -> dict[str, object]:
    """What kernels know of an element grid and of NVFP4's scales."""
    return {
        "CODEC_BITS": element.bits,
        "CODEC_MANTISSA": element.mantissa_bits,
        "CODEC_MIN_EXPONENT": element.min_exponent,
        "CODEC_EMAX": element.emax,
        "CODEC_MAX_CODE": f"{element.max_magnitude_code}u",
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_HAS_INFINITY": int(element.specials == "ieee"),
        "CODEC_SCALE_MANTISSA": _SCALE.mantissa_bits,
        "CODEC_SCALE_MIN_EXPONENT": _SCALE.min_exponent,
        "CODEC_SCALE_MAX_CODE": f"{_SCALE.max_magnitude_code}u",
    }


def _takes_words(spec: QuantSpec) -> bool:
    """Whether values are rounded by words: random ones, or one that decides ties."""
    return (spec.rounding == "stochastic" and not spec.eden) or spec.ties != "even"


def encoding_macros(spec: QuantSpec) -> dict[str, object]:
    """How scaled values become codes (`encode.cuh`), for a resolved spec."""
    element, words = spec.row.element, _takes_words(spec)
    return element_macros(element) | {
        "CODEC_STOCHASTIC": int(words),
        "CODEC_RBITS": spec.rbits if spec.rounding == "stochastic" and not spec.eden else 0,
        "CODEC_TIE_WORD": _TIE_WORDS.get(spec.ties, "0u"),
        "CODEC_ELEMENT_SCALE": exact_float(spec.element_scale),
        "CODEC_TOP": exact_float(element.max),
        "CODEC_MIN_POSITIVE": exact_float(element.min_positive),
        "CODEC_CLAMP_BITS": f"{(element.emax + 2 + 127) << 23}u",
        "CODEC_TIE_AT_TOP": exact_float(_tie_at_top(element)),
        "CODEC_HARDWARE_CONVERT": int(element.bits == 8 and element.is_float and not words),
        "CODEC_HARDWARE_TYPE": f'"{element.name}"',
    }


def exact_float(value: float) -> str:
    """A float32 as an exact literal."""
    return f"{np.float32(value).item().hex()}f"


def _tie_at_top(element: ElementFormat) -> float:
    """What a magnitude must exceed to round, to nearest even, beyond the largest code."""
    step = element.max - element.decode(element.max_magnitude_code - 1)
    tie = np.float32(element.max + step / 2)
    even = element.max_magnitude_code % 2 == 0  # then the tie itself goes to the largest code
    return float(tie if even else np.nextafter(tie, np.float32(0)))


@lru_cache(maxsize=4096)
def quantize_source(
    plan: Plan,
    dtype: str,
    out: str,
    whole: bool,
    stats: bool,
    extra: tuple[tuple[str, object], ...] = (),
) -> Source:
    """The quantizer's program for one plan, input dtype and kind of output; ``extra`` macros.

    Raises:
        ValueError: for an activation of what is not bfloat16.
    """
    if plan.activation and dtype != "bfloat16":
        raise ValueError(f"{plan.activation} as it is quantized is of bfloat16 arrays, not {dtype}")
    spec, element, dialect = plan.spec, plan.spec.row.element, plan.spec.dialect_row
    words = _takes_words(spec)
    top = np.float32(element.max)
    macros = encoding_macros(spec) | {
        "CODEC_IN": INPUTS.index(dtype),
        "CODEC_OUT": _OUT[out],
        "QUANT_WHOLE": int(whole),
        "CODEC_STATS": int(stats),
        "CODEC_BLOCK": plan.block,
        "QUANT_COLUMNWISE": int(plan.columns),
        "QUANT_ROWWISE_COLUMNWISE": 0,
        "QUANT_NORM": 0,
        "QUANT_ONLY_ROWWISE": 0,
        "CODEC_ACTIVATE": ACTIVATIONS.index(plan.activation),
        "QUANT_THREAD_CHUNKS": 1 if dtype == "float32" or words or _reads_values(spec) else 2,
        "QUANT_TILE_ROWS": plan.rows,
        "CODEC_HADAMARD": spec.transform.size if spec.transform else 0,
        "CODEC_HADAMARD_FACTOR": exact_float(
            1.0 / math.sqrt(spec.transform.size if spec.transform else 1)
        ),
        "CODEC_SIGNS_PER_STEP": int(spec.has_per_step_signs),
        "CODEC_SEARCH": int(spec.rule in SEARCHES),
        "CODEC_SEARCH_E8M0": int(spec.rule in E8M0_SEARCHES),
        "CODEC_QUEST_FACTOR": exact_float(QUEST_CLIP / 6),
        "CODEC_EDEN": int(spec.eden),
        "CODEC_MASK": 0,
        "QUANT_BESIDE": 0,
        "QUANT_THREAD_COLUMNS": columns_of(plan, dtype),
        "CODEC_RULE": _RULES.index(spec.rule),
        "CODEC_UE4M3": int(not spec.is_mx),
        "CODEC_NEEDS_TENSOR": int(plan.needs_tensor),
        "CODEC_WINDOW": -1 if spec.scale_window is None else spec.scale_window,
        "CODEC_RECIPROCAL_TOP": exact_float(float(np.float32(1) / top)),
        "CODEC_TENSOR_TARGET": exact_float(_tensor_target(spec)),
        "CODEC_RECIPROCAL_SIX": exact_float(1 / (EDEN_TOP if spec.eden else 6)),
        "CODEC_SCALE_TOP": exact_float(_SCALE.max),
        "CODEC_INF_BYTE": f"{dialect.inf_byte_in(element)}u",
        "CODEC_ZERO_BYTE": f"{dialect.nvfp4_zero_scale}u",
        "CODEC_TINY_SATURATES": int(dialect.nvfp4_tiny_saturates),
        "CODEC_BF16X8": int(_in_bf16(plan, dtype, out)),
        "CODEC_BF16X2": int(_in_bf16(plan, dtype, out) and not words),
    }
    return Source.read(_FOLDER / "quantize.cu", macros | dict(extra))


def _tensor_target(spec: QuantSpec) -> float:
    """NVFP4: the largest block scale times what a block's largest value becomes."""
    if spec.eden:
        return 256 * EDEN_TOP
    return (
        _FOUR_OVER_SIX_TOP if spec.rule == "four_over_six" else _SCALE.max
    ) * spec.row.element.max


def _in_bf16(plan: Plan, dtype: str, out: str) -> bool:
    """Whether a kernel may work on two values at a time: bfloat16 to e2m1 by powers of two."""
    spec, element = plan.spec, plan.spec.row.element
    small = element.bits == 4 and element.is_float and spec.is_mx and spec.element_scale == 1.0
    small = small and spec.transform is None and spec.rule not in E8M0_SEARCHES
    small = small and (plan.columns or plan.rows == 1)
    return small and dtype == "bfloat16" and out == "codes"


def columns_of(plan: Plan, dtype: str) -> int:
    """Neighbouring columns of a thread: as many as its registers hold without spilling."""
    words = _takes_words(plan.spec)
    return 2 if dtype == "float32" or words or _reads_values(plan.spec) else 4


def _reads_values(spec: QuantSpec) -> bool:
    """Whether values are needed as float32 before their scale is known."""
    return spec.transform is not None or spec.rule in (*SEARCHES, *E8M0_SEARCHES)


def is_whole(plan: Plan, pointer: int, dtype: str) -> bool:
    """Whether every vector access is in bounds and aligned."""
    if plan.length != plan.coded:
        return False
    if not plan.columns:
        chunk = plan.block if plan.rows == 1 else CHUNK
        return plan.length % chunk == 0 and pointer % 16 == 0
    columns = columns_of(plan, dtype)
    return plan.length % PANEL == 0 and plan.inner % columns == 0 and pointer % 8 == 0


def _grid(plan: Plan, items: int) -> int:
    tiles = plan.scales_shape[plan.spec.axis]
    if not plan.columns and plan.rows > 1:
        strips = -(-tiles * plan.block // (2 * CHUNK))
        warps = math.prod(plan.scales_shape[:-1]) * strips * (plan.rows // 16)
        return -(-warps * 32 // THREADS)
    if not plan.columns:
        return -(-plan.outer * tiles * (plan.block // CHUNK) // (THREADS * items))
    columns = 32 * int(items)
    return plan.outer * -(-plan.inner // columns) * -(-tiles * plan.block // PANEL)


def _run(
    plan: Plan,
    x: Array,
    out: str,
    stats: bool,
    stream: Stream | None,
    arrays: Any,
    extra: tuple[tuple[str, object], ...] = (),
) -> None:
    dtype = x.dtype.name
    whole = is_whole(plan, x.data.ptr, dtype)
    source = quantize_source(plan, dtype, out, whole, stats, extra)
    each = "QUANT_THREAD_COLUMNS" if plan.columns else "QUANT_THREAD_CHUNKS"
    items = int(dict(source.macros)[each])
    signs = _sign_arguments(plan.spec.transform, stream)
    numbers = *random_arguments(stream), *signs, *map(np.int64, _sizes(plan))
    launch(source, kernel_of(plan), _grid(plan, items), THREADS, x, *arrays, *numbers)


def kernel_of(plan: Plan) -> str:
    """The kernel that a plan's layout takes."""
    if plan.columns:
        return "quantize_columns"
    return "quantize_rows" if plan.rows == 1 else "quantize_tiles"


def _sizes(plan: Plan) -> tuple[int, ...]:
    if plan.columns:
        return plan.outer, plan.length, plan.inner
    if plan.rows == 1:
        return plan.outer, plan.length
    return plan.outer // plan.shape[-2], plan.shape[-2], plan.length


def _sign_arguments(transform: Hadamard | None, stream: Stream | None) -> tuple[np.uint32, ...]:
    """What the kernel is told of a transform's signs: themselves, or what it draws them from.

    Raises:
        CaptureError: in a capture, for signs of each step without a stream, whose clock tells the
            step.
    """
    if transform is None:
        return ()
    if transform.signs != "per_step":
        return sign_words(transform)
    if stream is None and current_capture() is not None:
        raise CaptureError(
            "signs='per_step' would be the same in each replay of the step; transform there with "
            "signs='random', or in a layer with a recipe"
        )
    seed = transform.seed
    numbers = seed & 0xFFFFFFFF, seed >> 32, transform.step, transform.stream
    return tuple(map(np.uint32, numbers))


@lru_cache(maxsize=64)
def sign_words(transform: Hadamard) -> tuple[np.uint32, ...]:
    """128 bits, the transform's signs repeated where it is shorter: set where negative."""
    negative = np.resize(hadamard_signs(transform) < 0, 128)
    return tuple(np.packbits(negative, bitorder="little").view(np.uint32))


def tensor_scales(plan: Plan, amax: Array, xp: Any) -> Array:
    """The four words that blocks need of a tensor whose largest magnitude is float32 ``amax``."""
    tensor = xp.empty(4, dtype=xp.float32)
    source = quantize_source(plan, "bfloat16", "codes", False, False)
    launch(source, "tensor_scales", 1, 1, amax, tensor)
    return tensor


def tensor_of(
    plan: Plan, x: Array, amax: Array | None, stream: Stream | None, xp: Any
) -> tuple[Array | None, Array | None]:
    """The four words that blocks need of the whole tensor, and the tensor's maximum.

    The stream's clock tells the step whose signs a transform has.
    """
    if not plan.needs_tensor:
        return None, None
    if amax is None:
        amax = xp.zeros((), dtype=xp.float32)
        _run(plan, x, "maximum", False, stream, (None, None, None, None, amax, None))
    return tensor_scales(plan, amax, xp), amax


def empty_array(plan: Plan, xp: Any, tensor: Array | None = None) -> QuantArray:
    """What a plan's codes and scales are written to; ``tensor`` is from `tensor_scales`."""
    codes, scales = (xp.empty(s, dtype=xp.uint8) for s in (plan.codes_shape, plan.scales_shape))
    of_tensor = tensor[0] if tensor is not None and plan.spec.row.tensor_scale else None
    return QuantArray(codes, scales, plan.spec, plan.shape, tensor_scale=of_tensor)


def quantize_raw(
    x: Array,
    plan: Plan,
    stream: Stream | None,
    xp: Any,
    amax: Array | None = None,
    stats: bool = True,
    values: bool = False,
) -> Outputs:
    """Launch the quantizer and return without waiting.

    x is a C-contiguous float32, bfloat16 or float16 array of the plan's shape. The stream names the
    random bits, given exactly under stochastic rounding. ``amax`` is float32 of shape () on the
    device, the largest finite magnitude (for a scale window: among blocks of finite values);
    without it a pass over x finds it where it is needed. ``stats`` counts saturated and flushed
    values; ``values`` writes decoded float32 values instead of codes and scales.
    """
    tensor, maximum = tensor_of(plan, x, amax, stream, xp)
    counters = Counters(2 * SLOTS, xp) if stats else None
    adds = None if counters is None else counters.array
    if values:
        decoded = xp.empty(plan.coded_shape, dtype=xp.float32)
        _run(plan, x, "values", stats, stream, (None, None, decoded, tensor, None, adds))
        return Outputs(None, decoded, counters, maximum)
    q = empty_array(plan, xp, tensor)
    _run(plan, x, "codes", stats, stream, (q.codes, q.scales, None, tensor, None, adds))
    return Outputs(q, None, counters, maximum)


def quantize_beside(
    x: Array, plan: Plan, stream: Stream | None, xp: Any
) -> tuple[QuantArray, Array]:
    """Packed x, and the plan's activation of it, of one reading; does not wait.

    X is bfloat16, C-contiguous, in whole blocks of rows (`is_whole`); nothing is counted.
    """
    q, out = empty_array(plan, xp), xp.empty(x.shape, dtype=x.dtype)
    arrays = q.codes, q.scales, None, None, None, None, out
    _run(plan, x, "codes", False, stream, arrays, (("QUANT_BESIDE", 1),))
    return q, out


def clip_gap(plan: Plan) -> Unsupported | None:
    """Why no kernel writes the clip mask of a plan; None where one does."""
    if plan.columns or plan.rows > 1:
        where = f"tile {plan.spec.tile} along axis {plan.spec.axis}"
        return Unsupported(f"clip masks for {where}; the kernel has blocks of rows")
    return None


def quantize_clipped(
    x: Array, plan: Plan, stream: Stream | None, xp: Any
) -> tuple[QuantArray, OperandCounts, Array]:
    """Codes, scales, counts and the clip mask in one reading of x, without waiting."""
    tensor, _ = tensor_of(plan, x, None, stream, xp)
    counters = Counters(2 * SLOTS, xp)
    q = empty_array(plan, xp, tensor)
    mask = xp.empty((*plan.shape[:-1], -(-plan.coded // 8)), dtype=xp.uint8)
    arrays = (q.codes, q.scales, None, tensor, None, counters.array, mask)
    _run(plan, x, "codes", True, stream, arrays, MASKED)
    return q, OperandCounts(counters, (0, 2 * SLOTS), plan.count), mask


def quantize(
    x: Array, plan: Plan, stream: Stream | None, xp: Any, amax: Array | None = None
) -> tuple[QuantArray, OperandCounts]:
    """Codes, scales and counts, without waiting; ``amax``: see `quantize_raw`."""
    done = quantize_raw(x, plan, stream, xp, amax)
    assert done.q is not None
    return done.q, done.stats(plan.count)


def fake_quantize(
    x: Array, plan: Plan, stream: Stream | None, xp: Any
) -> tuple[Array, OperandCounts]:
    """The decoded values and counts, without waiting."""
    done = quantize_raw(x, plan, stream, xp, values=True)
    return done.values, done.stats(plan.count)
