"""Launches a compiled kernel on cupy's current device and stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source, cubin
from extensor_cuda.runtime.recording import current_recording

__all__ = ["launch"]

_NULL = np.uint64(0)


@cache
def _function(source: Source, kernel: str, device: int, shared: int) -> Any:
    """A kernel loaded on one device and allowed so many bytes of dynamic shared memory.

    It stays loaded: a captured graph may refer to it without keeping it alive.
    """
    import cupy

    capability = driver.capability(device)
    # Hopper's own instructions need the target "sm_90a", which runs on that GPU alone.
    arch = f"sm_{capability}a" if capability == "90" else f"sm_{capability}"
    module = cupy.cuda.function.Module()
    module.load(cubin(source, arch))
    function = module.get_function(kernel)
    if shared:
        attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, shared)
    return function


def launch(
    source: Source,
    kernel: str,
    blocks: int,
    threads: int,
    *arguments: Any,
    shared: int = 0,
    pdl: bool = False,
) -> None:
    """Run a kernel on cupy's current device and stream; compile and load it at the first call.

    The launch goes through cupy's driver wrapper and not cuda.core's, so that device, stream,
    memory pool and graph capture are cupy's own and cannot disagree with it.

    Args:
        source: the program.
        kernel: the kernel's name in the program.
        blocks: number of blocks.
        threads: threads of a block.
        arguments: cupy arrays, None for a null pointer, numpy scalars of the kernel's own widths.
        shared: bytes of dynamic shared memory of a block.
        pdl: programmatic dependent launch, captured too: the kernel starts before the stream's
            previous kernel is done, and waits for that before it reads or writes. What it must
            keep to is in dependent_launch.cuh, and test_instructions.py checks it. Ignored before
            compute capability 9.0.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    function = _function(source, kernel, device, shared)
    stream = cupy.cuda.get_current_stream().ptr
    arguments = tuple([_NULL if a is None else a for a in arguments])
    if (recording := current_recording()) is not None:
        sizes = blocks, threads, shared
        recording.launched(function.ptr, sizes, False, arguments)
    if not pdl or int(driver.capability(device)) < 90:
        function((blocks, 1, 1), (threads, 1, 1), arguments, shared_mem=shared)
        return
    # Numbers and addresses, each in eight bytes of its own, and the addresses of those.
    slots = [
        int.from_bytes(a.tobytes(), "little") if isinstance(a, np.generic) else a.data.ptr
        for a in arguments
    ]
    values = (ctypes.c_uint64 * len(slots))(*slots)
    first = ctypes.addressof(values)
    addresses = (ctypes.c_uint64 * len(slots))(*range(first, first + 8 * len(slots), 8))
    config = driver.pdl_config(blocks, threads, shared, stream)
    given = ctypes.addressof(addresses)
    result = driver.bindings().cuLaunchKernelEx(config, function.ptr, given, 0)
    driver.check(result, f"cuLaunchKernelEx of {kernel}")
