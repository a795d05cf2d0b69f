"""Passes of a layer on a GPU that are prepared once and then launched by one call.

Python decides which kernels a pass launches, and how. For the same shapes, dtypes and gradients it
decides the same each time. So the first pass of a kind runs as it is, the second is recorded
(`extensor_cuda.runtime.launch_list`), and from then on a pass allocates its results and runs the
list. Its bits are those of a pass that `torch.cuda.graph` captures: quantizers read the step from
the layer's clock and count in memory that lasts. A pass that launches more than this project's own
kernels is not prepared and runs as it is.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from extensor.random import DeviceClock
from extensor.torch import cuda
from extensor.torch.layer import optimizer_writes
from extensor_cuda.runtime.counters import CAPTURED
from extensor_cuda.runtime.launch_list import (
    LaunchList,
    Space,
    first_address,
    likeness,
    recorded,
    split_by,
)
from extensor_cuda.runtime.memory import ALLOCATORS
from extensor_cuda.runtime.recording import Block, Recording, RepeatError

__all__ = ["PreparedPass", "run"]

Array = Any
Body = Callable[[Any, Any], Sequence[Array | None]]
"""A pass on arrays, of the call and of what `extensor.torch.arrays.on_device` gives."""

_KINDS = 16
"""Kinds of passes that a layer prepares at most: more have shapes that seldom come again."""
_RAN = "ran once"

_empty = torch.empty
_is_capturing = torch._C._cuda_isCurrentStreamCapturing
_current_device = torch._C._cuda_getDevice
_raw_stream = torch._C._cuda_getCurrentRawStream


class PreparedPass:
    """A pass as two lists of launches: what reads the weight alone, and the rest.

    The operands that the first makes are kept until the weight is written, once for all passes of
    a layer that make the same ones.

    Args:
        recording: of the pass.
        given: blocks of what it is given, the weight first.
        results: blocks of its results, with shapes and dtypes; None of those that there are not.
        counts: of its launches.
        device: the GPU.
    """

    def __init__(
        self,
        recording: Recording,
        given: Sequence[Block],
        results: Sequence[tuple[Block, tuple[int, ...], torch.dtype] | None],
        counts: Sequence[_Counts],
        device: torch.device,
    ) -> None:
        returned = [one[0] for one in results if one is not None]
        first, rest, kept = split_by(recording, given[0], returned)
        own = [block for block in returned if block not in kept]
        self._device = device
        self._runs, self._runs_of_weight = _Runs(), _Runs()
        for one in counts:
            of_weight = recording.launches[one.launch] in first
            one.runs = self._runs_of_weight if of_weight else self._runs
        self._sizes = [block.size for block in kept]
        self._results: list[Any] = [
            one if one is None else kept.index(one[0]) if one[0] in kept else one[1:]
            for one in results
        ]
        self._of_weight = LaunchList(recording, first, given[:1], kept) if first else None
        self._rest = LaunchList(recording, rest, [*given, *kept], own)
        self._alike = device, likeness(first, kept)
        self._kept = _Kept()

    def __call__(
        self, tensors: Sequence[Tensor | None], writes: int, keep: bool
    ) -> list[Tensor | None]:
        """Run on the current stream of the device; does not wait.

        Args:
            tensors: as those of the pass that was recorded, the weight first.
            writes: counts what optimizers have written.
            keep: whether the weight's operands may be kept.

        Returns:
            The results, in torch's memory.
        """
        device, weight = self._device, tensors[0]
        assert weight is not None
        stream = _raw_stream(device.index)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        held: Sequence[Tensor] = ()
        if self._of_weight is not None:
            keep = keep and not weight.is_inference()  # torch does not count writes to one
            kept = self._kept.operands if keep else None
            written = (weight._version, addresses[0], writes, stream) if keep else ()
            if kept is not None and kept[0]() is weight and kept[1] == written:
                held = kept[2]
            else:
                held = [_empty(n, dtype=torch.uint8, device=device) for n in self._sizes]
                self._launch(self._of_weight, stream, [addresses[0]], held)
                self._runs_of_weight.count += 1
            if keep:
                self._kept.operands = weakref.ref(weight), written, held
        made: list[Tensor | None] = []
        own: list[Tensor] = []
        for one in self._results:
            if type(one) is tuple:
                own.append(_empty(one[0], dtype=one[1], device=device))
                made.append(own[-1])
            else:
                made.append(None if one is None else held[one])
        addresses += [t.data_ptr() for t in held]
        self._runs.count += 1
        self._launch(self._rest, stream, addresses, own)
        return made

    def _launch(
        self, launches: LaunchList, stream: int, addresses: list[int], results: Sequence[Tensor]
    ) -> None:
        """Run one of the lists, in a workspace of its own."""
        addresses += [t.data_ptr() for t in results]
        if launches.workspace:
            workspace = _empty(launches.workspace, dtype=torch.uint8, device=self._device)
            addresses.append(workspace.data_ptr())
        launches(stream, addresses)

    def share_with(self, other: PreparedPass) -> None:
        """Keep the weight's operands together with another pass that makes the same ones."""
        if self._alike == other._alike:
            self._kept = other._kept

    def forget_weight(self) -> None:
        """Drop what is kept of the weight."""
        self._kept.operands = None


class _Kept:
    """A weight, when it was read, and its operands; one attribute, as threads may share it."""

    operands: tuple[weakref.ref[Tensor], tuple[int, ...], Sequence[Tensor]] | None = None


def run(
    kind: tuple[Any, ...], call: Any, tensors: Sequence[Tensor | None], body: Body
) -> list[Tensor | None] | None:
    """A pass by its list; None: it has none, and the body is to be run.

    Args:
        kind: what the pass depends on beside its tensors.
        call: see `extensor.torch.products.Pass`.
        tensors: what the body reads, the weight first.
        body: the pass.
    """
    assert tensors[0] is not None
    device = tensors[0].device
    if _is_capturing() or _current_device() != device.index:
        return None
    shapes: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            shapes.append(None)
        elif tensor.data_ptr() % 16 or not tensor.is_contiguous() or tensor.is_neg():
            return None
        else:
            shapes += tensor.shape, tensor.dtype
    key, known = (kind, device.index, *shapes), call.layer.prepared
    found = known.get(key)
    if type(found) is PreparedPass:
        _ready_thread(device.index)
        return found(tensors, optimizer_writes(), call.keep)
    if found is None and len(known) < _KINDS:
        known[key] = _RAN
    elif found is _RAN and _differ(tensors):
        # What lasts is there by now, such as amax states and loaded kernels.
        made = _prepare(call, tensors, body, device)
        if isinstance(made, PreparedPass):
            for other in list(known.values()):
                if isinstance(other, PreparedPass):
                    made.share_with(other)
        known[key] = made
        return (
            made(tensors, optimizer_writes(), call.keep) if isinstance(made, PreparedPass) else None
        )
    return None


def _differ(tensors: Sequence[Tensor | None]) -> bool:
    """Whether none comes twice: a list tells tensors apart, as those of the next pass may be."""
    there = [id(tensor) for tensor in tensors if tensor is not None]
    return len(set(there)) == len(there)


class _Ready(threading.local):
    devices: frozenset[int] = frozenset()


_ready = _Ready()


def _ready_thread(device: int) -> None:
    """Make the GPU's context this thread's, which the driver asks for and torch may not have."""
    if device not in _ready.devices:
        cupy.cuda.runtime.free(0)
        _ready.devices |= {device}


# --- recording ------------------------------------------------------------------------------------


def _prepare(
    call: Any, tensors: Sequence[Tensor | None], body: Body, device: torch.device
) -> PreparedPass | str:
    """The pass as a list, or why there is none."""
    _refill(device)
    try:
        return _recorded(call, tensors, body, device)
    except RuntimeError as error:  # of CUDA's too, of what a capture does not allow
        return str(error)
    finally:
        _refill(device)  # a capture may come before another pass runs as it is


def _refill(device: torch.device) -> None:
    """Have counters enough."""
    with cuda.OnStream(device):
        pass


def _recorded(
    call: Any, tensors: Sequence[Tensor | None], body: Body, device: torch.device
) -> PreparedPass:
    recording, stream = Recording(), cupy.cuda.Stream(non_blocking=True)
    place = _Recorder(recording, tensors, device.index)
    with stream, place, recorded(recording, stream.ptr):
        arrays = body(replace(call, made=None, array=None), place)
    results: list[Any] = []
    blocks: list[Block] = []
    for array in arrays:
        if array is None:
            results.append(None)
            continue
        block = recording.block_at(array.data.ptr)
        whole = block is not None and not block.given and block.address == array.data.ptr
        whole = whole and bool(array.flags.c_contiguous)
        if block is None or not whole or block in blocks or block.size != array.nbytes:
            raise RepeatError("a result that is no array of its own")
        results.append((block, array.shape, cuda.TENSOR_DTYPES[array.dtype]))
        blocks.append(block)
    return PreparedPass(recording, place.given, results, place.counts, device)


class _Runs:
    """How often launches have run."""

    count = 0


class _Counts:
    """One launch's counters: `extensor_cuda.runtime.counters.CountingCapture`.

    Args:
        place: where the pass is recorded.

    Attributes:
        launch: the launch's number.
        runs: how often it has run; the pass says so once it is recorded.
    """

    def __init__(self, place: _Recorder) -> None:
        self._place, self.launch, self.runs = place, -1, _Runs()
        self._made: Array = None

    @property
    def replays(self) -> int:
        """How often it has run."""
        return self.runs.count

    def counters(self, number: int) -> tuple[Array, int, int]:
        """See `StepCapture.counters`; the next launch has counters of its own."""
        self._made, self.launch = self._place.take(number), self._place.launches
        self._place.counts.append(self)
        CAPTURED.capture = _Counts(self._place)
        return self._made, 0, 0

    def read_counters(self, chunk: int) -> np.ndarray[Any, Any]:
        """See `StepCapture.read_counters`."""
        return np.asarray(self._made.get())


class _Recorder:
    """What `extensor.torch.arrays.on_device` gives, while a pass is recorded.

    Attributes:
        backend: that of GPUs.
        capturing: true: no operand is kept, and steps are read from clocks.
        counts: what quantizers count with.
        given: blocks of the pass's tensors.
    """

    capturing = True
    counts: list[_Counts]

    def __init__(self, recording: Recording, tensors: Sequence[Tensor | None], device: int) -> None:
        self.backend, self.counts = cuda.backend(), []
        self._device, self._recording = device, recording
        self._space = Space(recording, first_address(device))
        self.given = [self._space.given(0 if t is None else t.nbytes) for t in tensors]
        self._arrays = {
            id(tensor): self._array(block, tensor.shape, tensor.dtype)
            for tensor, block in zip(tensors, self.given, strict=True)
            if tensor is not None
        }

    @property
    def launches(self) -> int:
        """How many there were."""
        return len(self._recording.launches)

    def take(self, number: int) -> Array:
        """Counters that last.

        Raises:
            RepeatError: if none are left.
        """
        if (made := cuda.counts_of(self._device).take(number)) is None:
            raise RepeatError("no counters are left")
        return made

    def to_array(self, tensor: Tensor) -> Array:
        """The array that stands for a tensor of the pass."""
        return self._arrays[id(tensor)]

    def unread(self, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        """An array for a tensor that is gone, which no kernel may read."""
        size = math.prod(shape) * dtype.itemsize
        return self._array(self._space.given(size, unread=True), shape, dtype)

    def clock(self, tensor: Tensor) -> DeviceClock:
        """See `extensor.torch.cuda.OnStream.clock`."""
        return DeviceClock(self.to_array(tensor))

    def __enter__(self) -> _Recorder:
        self._others = ALLOCATORS.fallback, cupy.cuda.using_allocator(self._allocate)
        self._others[1].__enter__()
        ALLOCATORS.fallback, CAPTURED.capture = cuda.FALLBACK, _Counts(self)
        return self

    def __exit__(self, *error: Any) -> None:
        CAPTURED.capture = None
        ALLOCATORS.fallback, allocator = self._others
        allocator.__exit__(*error)

    def _allocate(self, size: int) -> Any:
        block, owner = self._space.make(size)
        return self._pointer(block, owner)

    def _pointer(self, block: Block, owner: Any) -> Any:
        memory = cupy.cuda.UnownedMemory(block.address, block.size, owner, self._device)
        return cupy.cuda.MemoryPointer(memory, 0)

    def _array(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> Array:
        return cupy.ndarray(tuple(shape), cuda.DTYPES[dtype], self._pointer(block, None))
