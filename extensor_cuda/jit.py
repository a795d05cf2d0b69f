"""Header-free CUDA C++ and macros -> a cubin, kept on disk. Knows no kernel.

Cubins, not PTX: PTX of a newer compiler does not load on an older driver. Compiling needs no GPU,
so that a machine without one can check every architecture.

The cache is a folder of files named by a digest of everything that decides the code. A file is
written under a name of its own and then renamed, so that processes that compile at the same time
never see half a file; each file carries its own digest, so that a damaged one is compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Source", "cache_folder", "compile_cubin", "cubin", "launch"]

_DIGEST = 32


@dataclass(frozen=True)
class Source:
    """One program: CUDA C++ text, and macros as (name, value) pairs.

    ``exact`` compiles without fused multiply-add, where the order of operations decides bits.
    """

    name: str
    text: str
    macros: tuple[tuple[str, str], ...] = ()
    exact: bool = True

    @classmethod
    def read(cls, path: Path, macros: Mapping[str, object]) -> Source:
        """The program in a file, with macros from a mapping."""
        pairs = tuple((name, str(value)) for name, value in sorted(macros.items()))
        return cls(path.stem, _text(path), pairs)


_INCLUDE = re.compile(r'^#include "([a-z0-9_]+/[a-z0-9_]+\.cuh)"$', re.MULTILINE)


@cache
def _text(path: Path) -> str:
    """A file with the files that it includes in their places.

    An include names a family's folder and a file, ``"common/barriers.cuh"``; all families stand in
    one folder. One text decides the code, so the cache's digest needs nothing else.
    """
    text = path.read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _text(path.parents[1] / found[1]), text)


def cache_folder() -> Path:
    """Where cubins are kept: extensor/cubin in the user's cache folder (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "extensor" / "cubin"


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """Compile for an architecture such as ``"sm_90a"``; needs NVRTC and no GPU.

    Returns:
        The cubin, and the compiler's log with each kernel's registers, stack frame and spills.

    Raises:
        RuntimeError: if the source does not compile; the message holds the compiler's log.
    """
    import io

    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=source.name,
        arch=arch,
        std="c++17",
        fma=False if source.exact else None,
        define_macro=list(source.macros) or None,
        ptxas_options="-v",
        # One straight path of a source leaves names of the others unused.
        diag_suppress=177,
    )
    log = io.StringIO()
    try:
        code = Program(source.text, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        macros = " ".join(f"-D{name}={value}" for name, value in source.macros)
        raise RuntimeError(
            f"{source.name} for {arch} does not compile ({macros}): {error}"
        ) from error
    return bytes(code), log.getvalue()


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(part) for part in nvrtc.nvrtcVersion())


def _key(source: Source, arch: str) -> str:
    parts = (source.name, source.text, repr(source.macros), str(source.exact), arch, _compiler())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cubin(source: Source, arch: str) -> bytes:
    """The code that `compile_cubin` gives, from the disk cache where it is there.

    A folder that cannot be read or written costs time only.
    """
    path = cache_folder() / f"{source.name}-{arch}-{_key(source, arch)}.cubin"
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    code, _ = compile_cubin(source, arch)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:40])
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    return code


@cache
def _function(source: Source, kernel: str, device: int, shared: int) -> Any:
    """A kernel loaded on one device, for good: a graph may hold it, which does not keep it.

    It is allowed so many bytes of dynamic shared memory.
    """
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    # The "a" set of instructions is where Hopper's own ones are; it runs on exactly that GPU.
    arch = f"sm_{capability}a" if capability == "90" else f"sm_{capability}"
    module = cupy.cuda.function.Module()
    module.load(cubin(source, arch))
    function = module.get_function(kernel)
    if shared:
        attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, shared)
    return function


@lru_cache(maxsize=256)
def early_config(blocks: int, threads: int, shared: int, stream: int) -> Any:
    """The driver's description of a launch that starts before the stream's last kernel is done."""
    from cuda.bindings import driver

    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def launch(
    source: Source,
    kernel: str,
    blocks: int,
    threads: int,
    *arguments: Any,
    shared: int = 0,
    early: bool = False,
) -> None:
    """Run a kernel on cupy's current device and stream; compiled and loaded at the first call.

    Arguments are cupy arrays and numpy scalars of the kernel's own widths. The launch goes through
    cupy's driver wrapper and not cuda.core's, so that device, stream, memory pool and graph capture
    are cupy's own and cannot disagree with it.

    Args:
        source: the program.
        kernel: its name there.
        blocks: so many,
        threads: of so many threads.
        arguments: the kernel's.
        shared: bytes of shared memory that a block is given as it is launched.
        early: start before the stream's last kernel is done, for which the kernel itself waits
            before it reads or writes; needs compute capability 9.0. Not while a graph is captured.
    """
    import cupy

    function = _function(source, kernel, cupy.cuda.runtime.getDevice(), shared)
    stream = cupy.cuda.get_current_stream().ptr
    if not early or cupy.cuda.runtime.streamIsCapturing(stream):
        function((blocks, 1, 1), (threads, 1, 1), arguments, shared_mem=shared)
        return
    from cuda.bindings import driver

    # Numbers and addresses, each in eight bytes of its own, and where these lie.
    slots = [
        int.from_bytes(a.tobytes(), "little") if isinstance(a, np.generic) else a.data.ptr
        for a in arguments
    ]
    values = (ctypes.c_uint64 * len(slots))(*slots)
    first = ctypes.addressof(values)
    addresses = (ctypes.c_uint64 * len(slots))(*range(first, first + 8 * len(slots), 8))
    config = early_config(blocks, threads, shared, stream)
    (error,) = driver.cuLaunchKernelEx(config, function.ptr, ctypes.addressof(addresses), 0)
    if int(error):
        raise RuntimeError(f"cuLaunchKernelEx of {kernel} failed: {error.name}")
