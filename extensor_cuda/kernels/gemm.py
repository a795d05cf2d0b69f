"""Placing the Hopper GEMM: element types, tile and epilogue -> program, tensor maps, launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda import jit

__all__ = ["Config", "Flags", "configure", "empty_rows", "gemm", "gemm_source"]

TILE_M, ROW_BYTES, THREADS = 128, 128, 384
ACTIVATIONS = ("none", "relu", "silu", "gelu")
_SHARED = 227 * 1024
_WARPS, _PATCH, _SLACK = 8, 16 * 128, 1024
_STEP = {"e4m3": 32, "e5m2": 32, "s8": 32, "bf16": 16}  # elements of K in one wgmma
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """One specialisation of gemm.cu.

    Attributes:
        a, b: element types: e4m3 and e5m2 in any mix, bf16 or s8 with themselves.
        tile_n: columns of a block's tile: 64 to 256, a multiple of 16.
        promote: stages of 128 bytes along K between additions in float32; 0: never.
        cluster: blocks that share a tile of B, 1 or 2.
        stages: of the ring; None: as many as fit.
        out: "float32" or "bfloat16".
        activation: applied to the sum with its bias.
        patches: of 16 rows of 128 bytes, in which a warp's results leave while it goes on.
        group: rows of blocks that are walked together, for the second-level cache.
        skew: stages by which the second warpgroup starts late, so that they promote in turn.
        vectors: exponents of each row or column; else one for all of an operand.
        extras: bias, residual, amax or an activation.
        guard: a barrier that is never reached ends the kernel with an error.
    """

    a: str = "e5m2"
    b: str = "e5m2"
    tile_n: int = 192
    promote: int = 4
    cluster: int = 1
    stages: int | None = None
    out: str = "float32"
    activation: str = "none"
    patches: int = 1
    group: int = 8
    skew: int = 0
    vectors: bool = False
    extras: bool = False
    guard: bool = False

    @property
    def depth(self) -> int:
        """Stages of the ring."""
        fits = (_SHARED - self._beside) // ((TILE_M + self.tile_n) * ROW_BYTES + 16)
        return min(fits, 8) if self.stages is None else self.stages

    @property
    def _beside(self) -> int:
        """Bytes of shared memory beside the ring."""
        tables = 4 * 4 * (64 + self.tile_n) if self.vectors else 0
        return _WARPS * self.patches * _PATCH + tables + _SLACK

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.depth * ((TILE_M + self.tile_n) * ROW_BYTES + 16) + self._beside


def _wgmma(a: str, b: str, n: int) -> str:
    """The wgmma of 64 x n, K of 32 bytes, as a function on n / 2 accumulators."""
    count, kind = n // 2, "s32" if a == "s8" else "f32"
    letter = "r" if a == "s8" else "f"
    tail = {"s8": "", "bf16": ", 1, 1, 0, 0"}.get(a, ", 1, 1")
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return (
        "__device__ __forceinline__ void wgmma(Sum (&d)[kRegisters], u64 a, u64 b, int more) {\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{n}k{_STEP[a]}.{kind}.{a}.{b} "\n'
        f'        "{{{registers}}}, %{count}, %{count + 1}, p{tail};\\n}}"\n'
        f'        : {operands} : "l"(a), "l"(b), "r"(more));\n}}\n'
    )


# (columns of a tile, patches, what a column costs) as measured on an H100; and with no promotion.
_TILES = ((128, 2, 1.08), (176, 3, 1.05), (192, 3, 1.0))
_WIDE_TILES = ((192, 3, 1.05), (256, 1, 1.0))


@lru_cache(maxsize=1024)
def configure(
    kind: str, m: int, n: int, out: str, promote: int | None = None, blocks: int = 132
) -> Config:
    """The program for a product's size: the tile that fills the last round of blocks best.

    Args:
        kind: element type of both operands.
        m: rows of the result.
        n: its columns.
        out: its type.
        promote: as in `Config`; None: every 512 elements for FP8, never for the others.
        blocks: multiprocessors of the GPU.
    """
    if promote is None:
        promote = 4 if kind in ("e4m3", "e5m2") else 0

    def cost(tile: tuple[int, int, float]) -> float:
        tiles = -(-m // TILE_M) * -(-n // tile[0])
        return -(-tiles // blocks) * tile[0] * tile[2]

    tile_n, patches, _ = min(_TILES if promote else _WIDE_TILES, key=cost)
    return Config(kind, kind, tile_n, promote, out=out, patches=patches, group=8)


@lru_cache(maxsize=256)
def gemm_source(config: Config) -> jit.Source:
    """The GEMM's program."""
    text = (_FOLDER / "gemm.cu").read_text(encoding="utf-8")
    macros = {
        "TILE_N": config.tile_n,
        "STAGES": config.depth,
        "CLUSTER": config.cluster,
        "CLUSTER_DIMS": f"__cluster_dims__({config.cluster}, 1, 1)" if config.cluster > 1 else "",
        "PROMOTE": config.promote,
        "KIND": {"s8": 2, "bf16": 1}.get(config.a, 0),
        "OUT_BF16": int(config.out == "bfloat16"),
        "ACTIVATION": ACTIVATIONS.index(config.activation),
        "PATCHES": config.patches,
        "GROUP": config.group,
        "SKEW": config.skew,
        "VECTORS": int(config.vectors),
        "EXTRAS": int(config.extras),
        "GUARD": int(config.guard),
    }
    pairs = tuple((name, str(value)) for name, value in sorted(macros.items()))
    text = text.replace("//WGMMA//", _wgmma(config.a, config.b, config.tile_n))
    return jit.Source("gemm", text, pairs)


class _Epilogue(ctypes.Structure):
    """As in gemm.cu."""

    _fields_ = (
        ("row_exponent", ctypes.c_void_p),
        ("column_exponent", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_pitch", ctypes.c_longlong),
        ("row_flag", ctypes.c_void_p),
        ("column_flag", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("row_step", ctypes.c_int),
        ("column_step", ctypes.c_int),
        ("flag_wanted", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("stages_of_k", ctypes.c_int),
    )


@dataclass(frozen=True)
class Flags:
    """Whether the kernel runs at all, read on the device.

    Attributes:
        row, column: uint32 of shape (), set where an operand is out of window; or None.
        wanted: 0: run if no flag is set; 1: run if one is.
    """

    row: Any = None
    column: Any = None
    wanted: int = 0


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: Any, what: str) -> Any:
    """The values of a driver call.

    Raises:
        RuntimeError: if it failed; names the call and the driver's error.
    """
    error, *values = result
    if int(error):
        raise RuntimeError(f"{what} failed: {error.name}")
    return values[0] if len(values) == 1 else values


@lru_cache(maxsize=256)
def _function(config: Config, device: int) -> tuple[Any, Any]:
    """The kernel on one device, and the module that holds it."""
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    if capability != "90":
        raise RuntimeError(
            f"the wgmma GEMM runs on compute capability 9.0 (H100, H200), this GPU has {capability}"
        )
    driver = _driver()
    code = jit.cubin(gemm_source(config), "sm_90a")
    module = _check(driver.cuModuleLoadData(code), "cuModuleLoadData")
    function = _check(driver.cuModuleGetFunction(module, b"gemm"), "cuModuleGetFunction")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, config.shared), "cuFuncSetAttribute")
    return function, module


@lru_cache(maxsize=64)
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@lru_cache(maxsize=4096)
def _tensor_map(
    pointer: int, rows: int, columns: int, pitch: int, box: int, kind: str = "UINT8"
) -> bytes:
    """The descriptor of a matrix, moved in boxes of ``box`` rows of 128 bytes."""
    driver = _driver()
    width = ROW_BYTES // {"UINT8": 1, "BFLOAT16": 2, "FLOAT32": 4}[kind]
    value = _check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            2,
            pointer,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(pitch)],
            [driver.cuuint32_t(width), driver.cuuint32_t(box)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(value.getPtr(), 128)


def empty_rows(xp: Any, rows: int, columns: int, dtype: Any) -> Any:
    """A matrix whose rows lie a multiple of 16 bytes apart, as TMA wants them."""
    item = np.dtype(dtype).itemsize
    pitch = -(-columns * item // 16) * 16 // item
    array = xp.empty((rows, pitch), dtype=dtype)
    return array if pitch == columns else array[:, :columns]


def _pointer(array: Any) -> int | None:
    return None if array is None else int(array.data.ptr)


def gemm(
    a: Any,
    b: Any,
    out: Any,
    config: Config,
    row_exponent: Any = None,
    column_exponent: Any = None,
    bias: Any = None,
    residual: Any = None,
    flags: Flags | None = None,
    amax: Any = None,
    runs: Any = None,
    blocks: int | None = None,
) -> None:
    """Launch out = activation(a b^T 2^(row + column exponent) + bias) + residual; does not wait.

    Args:
        a: (M, K) codes, one byte an element (bf16: two), rows a multiple of 16 bytes apart.
        b: (N, K) codes, likewise.
        out: (M, N) float32 or bfloat16, rows a multiple of 16 bytes apart.
        config: the program; its types say what the codes mean.
        row_exponent: int32, (M,) or (1,): added to the exponent of a row of the product.
        column_exponent: int32, (N,) or (1,), likewise for columns.
        bias: float32 (N,).
        residual: as out.
        flags: on the device, whether to run; None: always.
        amax: uint32 of shape (): raised to the bits of the largest magnitude written.
        runs: uint32 of shape (): counts the launches that no flag ended.
        blocks: of the grid; None: one per multiprocessor.

    Raises:
        ValueError: if the pitch or alignment of an operand does not fit.
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    import cupy

    (m, k), n, size = a.shape, b.shape[0], a.dtype.itemsize
    for name, operand in (("a", a), ("b", b), ("out", out)):
        item = operand.dtype.itemsize
        if operand.strides[1] != item or operand.strides[0] % 16 or operand.data.ptr % 16:
            raise ValueError(
                f"gemm: wanted {name} with contiguous rows a multiple of 16 bytes apart, got "
                f"strides {operand.strides} at address {operand.data.ptr:#x}; copy it into rows "
                "of a padded pitch"
            )
    if b.shape[1] != k or out.shape != (m, n):
        raise ValueError(f"gemm: a {a.shape}, b {b.shape} and out {out.shape} do not fit")
    exponents = [x for x in (row_exponent, column_exponent) if x is not None]
    vectors = any(x.size > 1 for x in exponents)
    extras = config.activation != "none" or any(x is not None for x in (bias, residual, amax))
    if (vectors, extras) != (config.vectors, config.extras):
        config = replace(config, vectors=vectors, extras=extras)
    device = cupy.cuda.runtime.getDevice()
    function, _ = _function(config, device)
    maps = [
        _tensor_map(x.data.ptr, x.shape[0], k * size, x.strides[0], box)
        for x, box in ((a, TILE_M), (b, config.tile_n // config.cluster))
    ]
    maps.append(_tensor_map(out.data.ptr, m, n, out.strides[0], 16, config.out.upper()))
    flags = flags or Flags(wanted=-1)
    epilogue = _Epilogue(
        _pointer(row_exponent),
        _pointer(column_exponent),
        _pointer(bias),
        _pointer(residual),
        0 if residual is None else residual.strides[0] // out.dtype.itemsize,
        _pointer(flags.row),
        _pointer(flags.column),
        _pointer(amax),
        _pointer(runs),
        int(row_exponent is not None and row_exponent.size > 1),
        int(column_exponent is not None and column_exponent.size > 1),
        flags.wanted,
        m,
        n,
        -(-k * size // ROW_BYTES),
    )
    tiles = -(-m // (TILE_M * config.cluster)) * -(-n // config.tile_n)
    grid = min((blocks or _multiprocessors(device)) // config.cluster, tiles) * config.cluster
    buffers = [ctypes.create_string_buffer(text, 128) for text in maps]
    addresses = [ctypes.addressof(buffer) for buffer in buffers] + [ctypes.addressof(epilogue)]
    parameters = (ctypes.c_void_p * 4)(*addresses)
    sizes = (grid, 1, 1, THREADS, 1, 1, config.shared)
    stream = cupy.cuda.get_current_stream().ptr
    result = _driver().cuLaunchKernel(function, *sizes, stream, ctypes.addressof(parameters), 0)
    _check(result, "cuLaunchKernel")
