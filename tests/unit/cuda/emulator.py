"""Kernels without inline assembly on the CPU: their source through the C++ compiler, numpy as cupy.

What an emulator shows: indices, tails, sums across lanes and warps, argument lists, the order of
operations. It does not show what a GPU's memory model or its exp and log do.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from extensor.backends.generic import GenericBackend
from extensor_cuda import conv_pool, multi_tensor, nn, reduction
from extensor_cuda.backend import ROUTES, CudaBackend
from extensor_cuda.dispatch import routed
from extensor_cuda.runtime.compile import Source

COMPILER = shutil.which("c++")
HERE = Path(__file__).parent
HEADER = HERE / "emulator.hpp"
OPTIONS = (
    "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-Wno-psabi", "-fPIC",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another stack for a mistake
    "-fno-gnu-unique",  # copies of a program have statics of their own
)  # fmt: skip
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
KEPT_DAYS = 14
"""A program that no test has used for so long is deleted."""
_DYNAMIC = re.compile(r"extern __shared__ (.+)\[\];")
_BOUNDS = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
_KERNEL = re.compile(rf'extern "C" __global__ void\s*(?:{_BOUNDS})?\s*(\w+)\(')


def program(source: Source) -> str:
    """C++ with a function ``run_NAME`` for each kernel; ``HEADER`` comes before it."""
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    entries = "".join(
        f'#ifdef HAS_{name}\nextern "C" void run_{name}(void** a, int blocks, int threads) '
        f"{{ run(kernels::{name}, a, blocks, threads); }}\n#endif\n"
        for name in dict.fromkeys(_KERNEL.findall(source.text))
    )
    text = _KERNEL.sub(lambda found: f"#define HAS_{found[1]}\n{found[0]}", source.text)
    text = text.replace('extern "C"', "static")
    text = _DYNAMIC.sub(rf"static \1[{SHARED}];", text)
    return f"{macros}namespace kernels {{\n{text}}}\n{entries}"


class Emulator:
    """Stands for `extensor_cuda.runtime.launch.launch`.

    A program is compiled once, whatever process or day needs it: its file's name is a digest of
    its text, of the headers here and of the compiler.
    """

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        self.folder = folder
        self.made: dict[Source, ctypes.CDLL] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process has renamed it since
                if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                    path.unlink()
        version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout
        headers = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.hpp")))
        self.base = hashlib.sha256(version + " ".join(OPTIONS).encode() + headers)

    def library(self, source: Source) -> ctypes.CDLL:
        """The program, compiled once."""
        if source not in self.made:
            self.made[source] = ctypes.CDLL(str(self._compiled(source.name, program(source))))
        return self.made[source]

    def copy(self, source: Source, block: int) -> ctypes.CDLL:
        """Another copy of the program, with memory of its own, that runs one block of a grid."""
        whole = Path(self.library(source)._name)
        path = whole.with_suffix(f".{block}.so")
        self._once(path, lambda unfinished: shutil.copy(whole, unfinished))
        found = ctypes.CDLL(str(path))
        found.run_only(block)
        return found

    def _compiled(self, name: str, text: str) -> Path:
        digest = self.base.copy()
        digest.update(text.encode())
        path = self.folder / f"{name}-{digest.hexdigest()[:32]}.so"

        def compiled(unfinished: Path) -> None:
            # Half of the time would go into reading the standard library's headers.
            header = self.folder / f"emulator-{self.base.hexdigest()[:32]}.hpp"
            self._once(header, lambda to: shutil.copy(HEADER, to))
            self._once(
                header.with_suffix(".hpp.gch"),
                lambda to: _compile("-x", "c++-header", str(header), "-o", str(to)),
            )
            written = unfinished.with_suffix(".cpp")
            written.write_text(text, encoding="utf-8")
            options = ("-include", str(header), f"-I{HERE}", "-shared")
            _compile(*options, str(written), "-o", str(unfinished))
            written.unlink()

        self._once(path, compiled)
        return path

    def _once(self, path: Path, make: Callable[[Path], object]) -> None:
        """Make a file that is not there; other processes see the whole one or none."""
        if path.exists():
            path.touch()
            return
        unfinished = path.with_name(f"{os.getpid()}-{path.name}")
        make(unfinished)
        unfinished.replace(path)

    def __call__(
        self,
        source: Source,
        kernel: str,
        blocks: int,
        threads: int,
        *arguments: Any,
        shared: int = 0,
        pdl: bool = False,
    ) -> None:
        assert shared <= SHARED
        given = [np.uint64(0) if a is None else a for a in arguments]
        held = [
            np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in given
        ]  # an array is its address, a number its bytes
        boxes = [np.array(value) for value in held]
        pointers = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        getattr(self.library(source), f"run_{kernel}")(pointers, blocks, threads)


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, *OPTIONS, *arguments], check=True)


class _Address:
    def __init__(self, array: np.ndarray) -> None:
        self.ptr = array.ctypes.data


class Device(np.ndarray):
    """An array with cupy's words for moving it and for its address."""

    def get(self, stream: Any = None) -> np.ndarray:
        """Itself."""
        return np.asarray(self)

    @property
    def data(self) -> Any:
        """What holds its address, ``ptr``."""
        return _Address(self)


class _Cuda:
    class Device:  # cupy.cuda.Device
        attributes = MappingProxyType({"MultiProcessorCount": 2})
        compute_capability = "90"

    class Event:  # cupy.cuda.Event
        def __init__(self, disable_timing: bool = False) -> None:
            pass

        def record(self) -> None:
            """What was launched is done."""

    class Stream:  # cupy.cuda.Stream
        def __init__(self, non_blocking: bool = False) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            """It happened."""

    runtime = SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda stream: False)

    @staticmethod
    def get_current_stream() -> Any:
        """cupy.cuda.get_current_stream."""
        return SimpleNamespace(ptr=0)


class Cupy:
    """numpy, as far as the training kernels use cupy; what is not written is NaN."""

    cuda = _Cuda
    ndarray = np.ndarray

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, a: Any, **options: Any) -> Any:
        """On this device."""
        return np.asarray(a, **options).copy().view(Device)

    def ascontiguousarray(self, a: Any) -> Any:
        """As numpy and cupy: with one axis at least."""
        return np.ascontiguousarray(a).view(Device)

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Of NaN, or of something odd."""
        odd = np.nan if np.dtype(dtype).kind == "f" else 77
        return np.full(shape, odd, dtype).view(Device)

    def empty_like(self, a: Any) -> Any:
        """Of NaN."""
        return np.full_like(a, np.nan).view(Device)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Of zeros."""
        return np.zeros(shape, dtype).view(Device)

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Any:
        """Of one value."""
        return np.full(shape, value, dtype).view(Device)

    lib = types.SimpleNamespace(
        stride_tricks=types.SimpleNamespace(
            as_strided=lambda x, shape, strides: np.lib.stride_tricks.as_strided(
                x, shape, strides, subok=True
            )
        )
    )


class Emulated(GenericBackend):
    """The CUDA backend's methods of nn, conv_pool, optim and reduction on the emulator."""

    multi_tensor_states = CudaBackend.multi_tensor_states
    accumulating_vjps = CudaBackend.accumulating_vjps
    bfloat16 = CudaBackend.bfloat16
    path = CudaBackend.path


FAMILIES = (nn, conv_pool, multi_tensor, reduction)
EMULATED = {
    name: route
    for name, route in ROUTES.items()
    if getattr(route.choose, "func", route.choose).__module__ in {m.__name__ for m in FAMILIES}
}
"""Rows of the dispatch table that the emulator runs."""
for _name, _route in EMULATED.items():
    setattr(Emulated, _name, routed(_name, _route))
