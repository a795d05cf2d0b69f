"""What the programs for Hopper share on the host: wgmma as functions, tensor maps, launches.

Launches go through the driver, since tensor maps are parameters by value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from extensor_cuda import jit

__all__ = [
    "ITEM",
    "SHARED",
    "capability",
    "check",
    "clusters",
    "driver",
    "launch",
    "load",
    "multiprocessors",
    "tensor_map",
    "wgmma",
]

SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
ITEM = {"UINT8": 1, "BFLOAT16": 2, "FLOAT32": 4}
"""Bytes of an element, by the driver's name of its type."""
_STEP = {"e4m3": 32, "e5m2": 32, "s8": 32, "bf16": 16}  # elements of K in one wgmma


def driver() -> Any:
    """The bindings of the CUDA driver."""
    from cuda.bindings import driver as bindings

    return bindings


def check(result: Any, what: str) -> Any:
    """The values of a driver call.

    Raises:
        RuntimeError: if it failed; names the call and the driver's error.
    """
    error, *values = result
    if int(error):
        raise RuntimeError(f"{what} failed: {error.name}")
    return values[0] if len(values) == 1 else values


@lru_cache(maxsize=64)
def capability(device: int) -> str:
    """Compute capability of a GPU, such as "90"; cupy asks the driver each time."""
    import cupy

    return str(cupy.cuda.Device(device).compute_capability)


@lru_cache(maxsize=256)
def load(source: jit.Source, kernel: str, shared: int, device: int) -> tuple[Any, Any]:
    """A kernel on one device, allowed so many bytes of shared memory, and the module that holds it.

    Raises:
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    if (found := capability(device)) != "90":
        raise RuntimeError(
            f"the wgmma kernel {kernel} runs on compute capability 9.0 (H100, H200), this GPU has "
            f"{found}"
        )
    bindings = driver()
    module = check(bindings.cuModuleLoadData(jit.cubin(source, "sm_90a")), "cuModuleLoadData")
    function = check(bindings.cuModuleGetFunction(module, kernel.encode()), "cuModuleGetFunction")
    attributes = bindings.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),  # up to 16 blocks
    ):
        check(bindings.cuFuncSetAttribute(function, attribute, value), "cuFuncSetAttribute")
    return function, module


@lru_cache(maxsize=64)
def multiprocessors(device: int) -> int:
    """Of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@lru_cache(maxsize=256)
def clusters(function: Any, blocks: int, threads: int, shared: int, device: int) -> int:
    """Clusters of so many blocks that run at a time on a device, as the driver says."""
    bindings = driver()
    attribute, config = bindings.CUlaunchAttribute(), bindings.CUlaunchConfig()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared, [attribute], 1
    return int(check(bindings.cuOccupancyMaxActiveClusters(function, config), "cuOccupancy"))


@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    kind: str = "UINT8",
) -> bytes:
    """The descriptor of an array that is moved in boxes, swizzled if they are 64 or 128 bytes wide.

    Args:
        pointer: of the first element.
        sizes: elements along each axis, the contiguous one first.
        strides: bytes from one to the next along the other axes, multiples of 16.
        box: elements along each axis that are moved together.
        kind: the driver's name of the element type.
    """
    bindings, axes = driver(), len(sizes)
    swizzles = bindings.CUtensorMapSwizzle
    modes = {128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B}
    value = check(
        bindings.cuTensorMapEncodeTiled(
            getattr(bindings.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            axes,
            pointer,
            [bindings.cuuint64_t(n) for n in sizes],
            [bindings.cuuint64_t(n) for n in strides],
            [bindings.cuuint32_t(n) for n in box],
            [bindings.cuuint32_t(1)] * axes,
            bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            modes.get(box[0] * ITEM[kind], swizzles.CU_TENSOR_MAP_SWIZZLE_NONE),
            bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"cuTensorMapEncodeTiled of {sizes} elements, {strides} bytes apart",
    )
    return ctypes.string_at(value.getPtr(), 128)


def launch(
    function: Any,
    grid: int,
    threads: int,
    shared: int,
    maps: Sequence[bytes],
    structure: ctypes.Structure,
    together: bool = False,
    early: bool = False,
) -> None:
    """Run a kernel of tensor maps and one structure on cupy's current stream; does not wait.

    With `together` all its blocks run at a time, whatever else runs, so that they may wait for each
    other; an error if there is not room for them. `early` is that of `extensor_cuda.jit.launch`.
    """
    import cupy

    buffers = [ctypes.create_string_buffer(text, 128) for text in maps]
    addresses = [ctypes.addressof(buffer) for buffer in buffers] + [ctypes.addressof(structure)]
    parameters = (ctypes.c_void_p * len(addresses))(*addresses)
    sizes = (grid, 1, 1, threads, 1, 1, shared)
    stream = cupy.cuda.get_current_stream().ptr
    given, bindings = ctypes.addressof(parameters), driver()
    if together:
        result = bindings.cuLaunchCooperativeKernel(function, *sizes, stream, given)
    elif early and not cupy.cuda.runtime.streamIsCapturing(stream):
        config = jit.early_config(grid, threads, shared, stream)
        result = bindings.cuLaunchKernelEx(config, function, given, 0)
    else:
        result = bindings.cuLaunchKernel(function, *sizes, stream, given, 0)
    check(result, "cuLaunchCooperativeKernel" if together else "cuLaunchKernel or its Ex")


def wgmma(
    a: str,
    b: str,
    n: int,
    *,
    registers: bool = False,
    down: tuple[bool, bool] = (False, False),
) -> str:
    """The wgmma of 64 x n, K of 32 bytes, as a CUDA function on n / 2 accumulators.

    Args:
        a: element type, as in PTX.
        b: likewise.
        n: columns.
        registers: a lies in four registers of each thread, not in shared memory.
        down: whether a and b lie with their rows contiguous, not K (16-bit types). With a in
            registers the function is ``wgmma_down`` where b does.
    """
    count, kind = n // 2, "s32" if a == "s8" else "f32"
    letter = "r" if a == "s8" else "f"
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    if registers:
        left, given, parameter = [f"%{count + i}" for i in range(4)], 4, "const u32 (&a)[4]"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        left, given, parameter, inputs = [f"%{count}"], 1, "u64 a", '"l"(a)'
    place = f"{{{', '.join(left)}}}" if registers else left[0]
    # Signs of both; then, of 16-bit types, which of those in shared memory lie the other way.
    ways = f"{down[1]:d}" if registers else f"{down[0]:d}, {down[1]:d}"
    tail = {"s8": "", "bf16": f", 1, 1, {ways}"}.get(a, ", 1, 1")
    right, more = count + given, count + given + 1
    name = "wgmma_down" if registers and down[1] else "wgmma"
    return (
        f"__device__ __forceinline__ void {name}(Sum (&d)[{count}], {parameter}, u64 b, "
        "int more) {\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{more}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{n}k{_STEP[a]}.{kind}.{a}.{b} "\n'
        f'        "{{{sums}}}, {place}, %{right}, p{tail};\\n}}"\n'
        f'        : {operands} : {inputs}, "l"(b), "r"(more));\n}}\n'
    )
