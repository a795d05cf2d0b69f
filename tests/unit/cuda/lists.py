"""Launch lists on the emulator: it stands behind the driver's functions that a list calls."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from extensor_cuda.runtime import driver, launch_list
from extensor_cuda.runtime.counters import CAPTURED
from extensor_cuda.runtime.recording import RECORDING, Recording, TensorMap
from tests.unit.cuda import hopper
from tests.unit.cuda.emulator import Cupy, Device

__all__ = ["Counting", "Driver", "Noting", "recorded"]

_LAUNCHING = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
)
_REPLACING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Driver:
    """cuLaunchKernelEx and cuTensorMapReplaceAddress.

    Args:
        monkeypatch: puts them there.
        emulator: runs the kernels.
        launching: modules whose ``launch`` is runtime.launch's.
        quantizing: the same of modules whose programs hold assembly.

    Attributes:
        launched: what a list has launched: function, blocks, threads.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        emulator: Any,
        launching: Sequence[ModuleType],
        quantizing: Sequence[ModuleType] = (),
    ) -> None:
        self.emulator, self.launched = emulator, []
        self._kernels: list[Callable[[int, int, int], None]] = []
        self._handles: dict[Any, int] = {}
        self._functions = _LAUNCHING(self._launch), _REPLACING(self._replace)
        found = [ctypes.cast(one, ctypes.c_void_p).value for one in self._functions]
        monkeypatch.setattr(launch_list, "_functions", lambda: found)
        for module in launching:
            monkeypatch.setattr(module, "launch", self._of_runtime)
        for module in quantizing:
            monkeypatch.setattr(
                module,
                "launch",
                lambda source, *rest, **options: self._of_runtime(
                    hopper.without_products(source), *rest, **options
                ),
            )
        mapped, usual = driver.tensor_map, driver.launch

        def tensor_map(pointer: int, *rest: Any, **more: Any) -> TensorMap:
            return TensorMap(mapped(pointer, *rest, **more), pointer)

        def launch(function: Any, grid: int, threads: int, *rest: Any, **more: Any) -> None:
            recording, (shared, maps, structure) = RECORDING.recording, rest
            if recording is None:
                return usual(function, grid, threads, *rest, **more)
            _, program, name = function
            sizes = grid, threads, shared
            recording.launched(self._handle(program, name), sizes, False, (*maps, structure))

        monkeypatch.setattr(driver, "tensor_map", tensor_map)
        monkeypatch.setattr(driver, "launch", launch)

    def _handle(self, program: Any, name: str) -> int:
        if (program, name) not in self._handles:
            self._kernels.append(getattr(self.emulator.library(program), name))
            self._handles[program, name] = len(self._kernels)
        return self._handles[program, name]

    def _of_runtime(
        self, source: Any, kernel: str, blocks: int, threads: int, *given: Any, shared: int = 0
    ) -> None:
        recording = RECORDING.recording
        if recording is None:
            return self.emulator(source, kernel, blocks, threads, *given, shared=shared)
        arguments = [np.uint64(0) if a is None else a for a in given]
        handle = self._handle(source, f"run_{kernel}")
        recording.launched(handle, (blocks, threads, shared), False, arguments)

    def _launch(self, config: int, function: int, parameters: int, extra: Any) -> int:
        sizes = (ctypes.c_uint * 7).from_address(config)
        self.launched.append((function, sizes[0], sizes[3]))
        self._kernels[function - 1](ctypes.c_void_p(parameters), sizes[0], sizes[3])
        return 0

    @staticmethod
    def _replace(tensor_map: int, address: int) -> int:
        assert tensor_map % 64 == 0
        ctypes.c_uint64.from_address(tensor_map).value = address
        return 0


class Noting(Cupy):
    """The emulator's array module, which tells a recording of what it makes."""

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Of NaN, or of something odd."""
        made, recording = super().empty(shape, dtype), RECORDING.recording
        if recording is not None:
            block = recording.made(made.data.ptr, made.nbytes)
            weakref.finalize(made.base, recording.freed, block)
        return made


class Counting:
    """Counters that last, of calls that are made again."""

    def __init__(self) -> None:
        self.replays = 0
        self.made: list[Any] = []

    def counters(self, number: int) -> tuple[Any, int, int]:
        """So many zeros."""
        self.made.append(np.zeros(number, np.uint64).view(Device))
        return self.made[-1], len(self.made) - 1, 0

    def read_counters(self, chunk: int) -> np.ndarray:
        """A chunk of them."""
        return np.asarray(self.made[chunk])


@contextmanager
def recorded(given: Sequence[Any], counts: Counting) -> Iterator[Recording]:
    """A recording of a call that is given these arrays."""
    recording = Recording()
    for array in given:
        recording.given(array.data.ptr, array.nbytes)
    RECORDING.recording, CAPTURED.capture = recording, counts
    try:
        yield recording
    finally:
        RECORDING.recording = CAPTURED.capture = None
