"""The CUDA driver's API: what a GPU is, tensor maps, and launches that take them.

Kernels with tensor maps are launched by the driver itself, since these are parameters by value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from extensor_cuda.runtime.compile import Source, cubin
from extensor_cuda.runtime.recording import TensorMap, current_recording

__all__ = [
    "ELEMENT_BYTES",
    "SHARED_BYTES",
    "active_clusters",
    "bindings",
    "capability",
    "check",
    "launch",
    "load",
    "multiprocessors",
    "pdl_config",
    "tensor_map",
]

SHARED_BYTES = 227 * 1024
"""Bytes of shared memory that a block may have."""
ELEMENT_BYTES = {"UINT8": 1, "BFLOAT16": 2, "FLOAT32": 4}
"""Bytes of an element, by the driver's name of its dtype."""


def bindings() -> Any:
    """cuda.bindings' module of the CUDA driver."""
    from cuda.bindings import driver

    return driver


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
    """Compute capability of a GPU, such as "90"; cached, since cupy asks the driver each time."""
    import cupy

    return str(cupy.cuda.Device(device).compute_capability)


@lru_cache(maxsize=256)
def load(source: Source, kernel: str, shared: int, device: int) -> tuple[Any, Any]:
    """A kernel on one device, allowed so many bytes of shared memory, and the module that holds it.

    Raises:
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    if (found := capability(device)) != "90":
        raise RuntimeError(
            f"the wgmma kernel {kernel} runs on compute capability 9.0 (H100, H200), this GPU has "
            f"{found}"
        )
    api = bindings()
    module = check(api.cuModuleLoadData(cubin(source, "sm_90a")), "cuModuleLoadData")
    function = check(api.cuModuleGetFunction(module, kernel.encode()), "cuModuleGetFunction")
    attributes = api.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),  # up to 16 blocks
    ):
        check(api.cuFuncSetAttribute(function, attribute, value), "cuFuncSetAttribute")
    return function, module


@lru_cache(maxsize=256)
def pdl_config(blocks: int, threads: int, shared: int, stream: int) -> Any:
    """The driver's description of a launch under programmatic dependent launch."""
    attribute = bindings().CUlaunchAttribute()
    kinds = bindings().CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = _config(blocks, threads, shared, attribute)
    config.hStream = stream
    return config


def _config(blocks: int, threads: int, shared: int, attribute: Any) -> Any:
    """A launch with one attribute."""
    config = bindings().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared, [attribute], 1
    return config


@lru_cache(maxsize=64)
def multiprocessors(device: int) -> int:
    """How many multiprocessors a GPU has."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@lru_cache(maxsize=256)
def active_clusters(function: Any, blocks: int, threads: int, shared: int, device: int) -> int:
    """How many clusters of so many blocks run at a time on a device, as the driver says."""
    api = bindings()
    attribute = api.CUlaunchAttribute()
    attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    config = _config(blocks, threads, shared, attribute)
    return int(check(api.cuOccupancyMaxActiveClusters(function, config), "cuOccupancy"))


@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str = "UINT8",
) -> TensorMap:
    """The descriptor of an array that TMA moves in boxes, swizzled if 64 or 128 bytes wide.

    ``sizes`` and ``box`` are elements along each axis, the contiguous one first; ``strides`` are
    bytes from one to the next along the other axes, multiples of 16; the dtype has the driver's
    name.
    """
    api, axes = bindings(), len(sizes)
    swizzles = api.CUtensorMapSwizzle
    modes = {128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B}
    value = check(
        api.cuTensorMapEncodeTiled(
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"),
            axes,
            pointer,
            [api.cuuint64_t(n) for n in sizes],
            [api.cuuint64_t(n) for n in strides],
            [api.cuuint32_t(n) for n in box],
            [api.cuuint32_t(1)] * axes,
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            modes.get(box[0] * ELEMENT_BYTES[dtype], swizzles.CU_TENSOR_MAP_SWIZZLE_NONE),
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"cuTensorMapEncodeTiled of {sizes} elements, {strides} bytes apart",
    )
    return TensorMap(ctypes.string_at(value.getPtr(), 128), pointer)


def launch(
    function: Any,
    grid: int,
    threads: int,
    shared: int,
    maps: Sequence[TensorMap],
    structure: ctypes.Structure,
    cooperative: bool = False,
    pdl: bool = False,
) -> None:
    """Run a kernel of tensor maps and one structure on cupy's current stream; does not wait.

    The maps are the kernel's first parameters, the structure is its last. Of a cooperative launch
    all blocks run at a time, so that they may wait for each other: an error if the GPU has no room
    for them. ``pdl`` is as of `extensor_cuda.runtime.launch.launch`, but ignored in a capture.
    """
    import cupy

    if (recording := current_recording()) is not None:
        parameters = (*maps, structure)
        recording.launched(int(function), (grid, threads, shared), cooperative, parameters)
    buffers = [ctypes.create_string_buffer(text, 128) for text in maps]
    addresses = [ctypes.addressof(buffer) for buffer in buffers] + [ctypes.addressof(structure)]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    sizes = (grid, 1, 1, threads, 1, 1, shared)
    stream = cupy.cuda.get_current_stream().ptr
    given, api = ctypes.addressof(pointers), bindings()
    if cooperative:
        result = api.cuLaunchCooperativeKernel(function, *sizes, stream, given)
    elif pdl and not cupy.cuda.runtime.streamIsCapturing(stream):
        config = pdl_config(grid, threads, shared, stream)
        result = api.cuLaunchKernelEx(config, function, given, 0)
    else:
        result = api.cuLaunchKernel(function, *sizes, stream, given, 0)
    check(result, "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel or its Ex")
