"""A GPU made of numpy: cupy's words for arrays, streams and graphs, kernels through the emulator.

A capture lists what is launched and repeats that list later, on the same memory. As on a GPU
nothing of it happens while it is captured: what was written is put back, what was made is filled
with NaN until a repetition writes it. Reading a value back, or copying from the host through
anything but a page-locked buffer, is refused then, as CUDA refuses it.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.unit.cuda.emulator import Emulator

_MAKES = ("arange", "empty", "eye", "full", "ones", "tri", "zeros")
_SYNC = "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"


class CapturingError(Exception):
    """What CUDA says of an operation that a capture does not allow."""


class Tape:
    """What is captured, of all streams: there is one at a time."""

    def __init__(self) -> None:
        self.list: list[Callable[[], None]] | None = None
        self.kept: list[tuple[Any, np.ndarray]] = []
        self.made: list[Any] = []
        self.owners: dict[int, weakref.ref[np.ndarray]] = {}
        self.copies: Callable[[int], Any] | None = None
        self.allocator: Any = None
        self.hooks: list[MemoryHook] = []

    def add(self, call: Callable[[], None]) -> None:
        """What numpy has done just now, for its result's shape."""
        if self.list is not None:
            self.list.append(call)

    def launch(self, call: Callable[[], None]) -> None:
        """A kernel: nothing depends on what it would write while capturing."""
        if self.list is not None:
            self.list.append(call)
            return
        with np.errstate(all="ignore"):
            call()

    def waits(self) -> None:
        """Refuse to wait while capturing."""
        if self.list is not None:
            raise CapturingError(_SYNC)

    def begin(self) -> None:
        self.list, self.made = [], []
        alive = [owner for ref in self.owners.values() if (owner := ref()) is not None]
        self.kept = [(owner, owner.copy()) for owner in alive]

    def end(self) -> list[Callable[[], None]]:
        done, self.list = self.list, None
        for array, before in self.kept:
            array[...] = before
        for array in self.made:
            if array.dtype.kind == "f":
                array[...] = np.nan
        self.kept, self.made = [], []
        assert done is not None
        return done


TAPE = Tape()


class MemoryHook:
    """cupy's: told of each block that the pool hands out and takes back."""

    def __enter__(self) -> None:
        TAPE.hooks.append(self)

    def __exit__(self, *error: object) -> None:
        TAPE.hooks.remove(self)

    def malloc_postprocess(self, **block: Any) -> None:
        """A block was handed out."""

    def free_postprocess(self, **block: Any) -> None:
        """A block was taken back."""


def _tell_of(owner: np.ndarray) -> None:
    """Tell the hooks of a new array, in the pool's multiples of 512 bytes, and of its end."""
    address, size = owner.ctypes.data, -(-owner.nbytes // 512) * 512
    for hook in TAPE.hooks:
        hook.malloc_postprocess(mem_ptr=address, mem_size=size)
        weakref.finalize(owner, hook.free_postprocess, mem_ptr=address).atexit = False


def plain(a: Any) -> Any:
    """The same memory as a numpy array; inside of tuples and lists too."""
    if isinstance(a, Device):
        return a.view(np.ndarray)
    if isinstance(a, (tuple, list)):
        return type(a)(plain(item) for item in a)
    return {k: plain(v) for k, v in a.items()} if isinstance(a, dict) else a


def _leaves(a: Any) -> list[np.ndarray]:
    if isinstance(a, np.ndarray):
        return [a]
    return [leaf for item in a for leaf in _leaves(item)] if isinstance(a, (tuple, list)) else []


def made(result: Any) -> Device:
    """A new array of the device."""
    owner = np.array(plain(result))
    key = id(owner)
    TAPE.owners[key] = weakref.ref(owner, lambda _: TAPE.owners.pop(key, None))
    if TAPE.hooks:
        _tell_of(owner)
    if TAPE.list is not None:
        TAPE.made.append(owner)
    device = owner.view(Device)
    device.home = TAPE.allocator
    return device


def run(call: Callable[..., Any], args: Any, kwargs: Any, out: Any = None) -> Any:
    """Call numpy on a device's arrays, and put that on the tape."""
    given = [*_leaves(args), *_leaves(list(kwargs.values()))]
    args, kwargs = plain(args), plain(kwargs)
    with np.errstate(all="ignore"):
        result = call(*args, **kwargs)
    if out is not None:
        TAPE.add(lambda: call(*args, **kwargs))
        return out
    if isinstance(result, (tuple, list)):
        each = range(len(result))
        return type(result)(run(lambda *a, i=i, **k: call(*a, **k)[i], args, kwargs) for i in each)
    if result is None or isinstance(result, (str, np.dtype, type)):
        TAPE.add(lambda: call(*args, **kwargs))
        return result
    if isinstance(result, np.ndarray):
        sources = [*_leaves(args), *_leaves(list(kwargs.values()))]
        if any(np.may_share_memory(result, source) for source in sources):
            view = result.view(Device)  # of memory that is there
            view.keeps = given  # as cupy's views do
            return view
    elif not isinstance(result, np.generic):
        return result  # a number of Python, such as an array's ndim
    array = made(result)
    memory = plain(array)
    TAPE.add(lambda: np.copyto(memory, call(*args, **kwargs)))
    return array


class _Address:
    def __init__(self, array: np.ndarray) -> None:
        self.ptr = array.ctypes.data


class Device(np.ndarray):
    """An array on the fake device; ``home`` is the allocator that it was made with."""

    home: Any
    keeps: Any

    @property
    def base(self) -> Any:
        """What owns the memory, whatever views lie between."""
        owner = super().base
        while owner is not None and owner.base is not None:
            owner = owner.base
        return owner

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        call = getattr(ufunc, method)
        if out is not None:
            return run(call, inputs, kwargs, out[0])
        if method == "at":
            return run(call, inputs, kwargs, inputs[0])
        return run(call, inputs, kwargs)

    def __array_function__(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        return run(func, args, kwargs, kwargs.get("out", args[0] if func is np.copyto else None))

    def __getitem__(self, key: Any) -> Any:
        key = plain(key)
        return run(lambda a: a[key], (self,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        key = plain(key)
        run(lambda a, v: a.__setitem__(key, v), (self, value), {}, self)

    def astype(self, dtype: Any, copy: bool = True, **more: Any) -> Any:
        if not copy and self.dtype == dtype:
            return self
        return run(lambda a: a.astype(dtype), (self,), {})

    def copy(self, order: Any = "C") -> Any:
        return run(lambda a: a.copy(), (self,), {})

    def reshape(self, *shape: Any, **more: Any) -> Any:
        return run(lambda a: a.reshape(*shape), (self,), {})

    def take(self, index: Any, axis: Any = None, **more: Any) -> Any:
        return run(lambda a, i: a.take(i, axis), (self, index), {})

    def fill(self, value: Any) -> None:
        self[...] = value

    def get(self, stream: Any = None) -> np.ndarray:
        TAPE.waits()
        return plain(self).copy()

    def _value(self, kind: Any) -> Any:
        TAPE.waits()
        return kind(plain(self))

    def __bool__(self) -> bool:
        return bool(self._value(bool))

    def __int__(self) -> int:
        return int(self._value(int))

    def __float__(self) -> float:
        return float(self._value(float))

    def item(self, *args: Any) -> Any:
        TAPE.waits()
        return plain(self).item(*args)

    def tolist(self) -> Any:
        TAPE.waits()
        return plain(self).tolist()

    @property
    def data(self) -> Any:
        return _Address(self)


class _Stream:
    ptr = 1

    def __init__(self, non_blocking: bool = False) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def synchronize(self) -> None:
        TAPE.waits()

    def wait_event(self, event: Any) -> None:
        pass  # what was launched is done

    def is_capturing(self) -> bool:
        return TAPE.list is not None

    def begin_capture(self) -> None:
        TAPE.begin()

    def end_capture(self) -> Any:
        calls = TAPE.end()

        def launch() -> None:
            with np.errstate(all="ignore"):
                for call in calls:
                    call()

        return types.SimpleNamespace(launch=launch)


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass


class _Pool:
    def malloc(self, size: int) -> Any:
        return None

    def total_bytes(self) -> int:
        return 1 << 20

    def free_all_blocks(self) -> None:
        pass


@contextlib.contextmanager
def _allocating(allocator: Any) -> Iterator[None]:
    before, TAPE.allocator = TAPE.allocator, allocator
    yield
    TAPE.allocator = before


class FakeCupy:
    """numpy as cupy; what is not written is NaN."""

    ndarray = Device
    cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(synchronize=TAPE.waits, compute_capability="80"),
        Event=_Event,
        Stream=_Stream,
        MemoryHook=MemoryHook,
        MemoryPool=_Pool,
        using_allocator=_allocating,
        set_pinned_memory_allocator=lambda allocate: setattr(TAPE, "copies", allocate),
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
        runtime=types.SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda stream: False),
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    )
    lib = types.SimpleNamespace(
        stride_tricks=types.SimpleNamespace(
            as_strided=lambda x, shape, strides: np.lib.stride_tricks.as_strided(
                plain(x), shape, strides
            ).view(Device)
        )
    )

    @staticmethod
    def get_default_memory_pool() -> Any:
        return types.SimpleNamespace(free_all_blocks=lambda: None)

    @staticmethod
    def get_default_pinned_memory_pool() -> Any:
        return types.SimpleNamespace(malloc=lambda size: None)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if name not in _MAKES:
            return found

        def make(*args: Any, **kwargs: Any) -> Any:
            value = found(*args, **kwargs)
            if name == "empty" and value.dtype.kind == "f":
                value.fill(np.nan)
            array = made(value)
            memory = plain(array)
            if name != "empty":
                TAPE.add(lambda: np.copyto(memory, value))
            return array

        return make

    def asarray(self, a: Any, dtype: Any = None) -> Any:
        """On this device."""
        if isinstance(a, Device):
            return a if dtype is None else a.astype(dtype, copy=False)
        value = np.asarray(a, dtype=dtype)
        if not value.ndim:  # cupy fills such an array
            return self.full((), value, value.dtype)
        if TAPE.copies is not None:
            TAPE.copies(value.nbytes)
        return made(value.copy())

    def ascontiguousarray(self, a: Any) -> Any:
        """As numpy and cupy: with one axis at least."""
        return run(np.ascontiguousarray, (a,), {})

    def empty_like(self, a: Any) -> Any:
        """Of NaN."""
        return self.empty(a.shape, a.dtype)


class FakeLaunch(Emulator):
    """`extensor_cuda.runtime.launch.launch`, which a capture lists."""

    def __call__(
        self, source: Any, kernel: str, blocks: int, threads: int, *arguments: Any, **options: Any
    ) -> None:
        arguments = plain(arguments)
        launch = super().__call__

        def again() -> None:
            launch(source, kernel, blocks, threads, *arguments, **options)

        TAPE.launch(again)
