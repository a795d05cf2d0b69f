"""A call's launches as one list, made again in one call of C on other memory.

What Python decides about a call of fixed shapes, which kernels, how many blocks, which tensor maps,
is the same each time. So it is decided once and recorded. A run writes the addresses of its arrays
into the kernels' parameters and launches them. It reads no value, so nothing waits for the GPU.

The call is recorded while the driver captures a stream, so it does nothing. Its arrays lie at
addresses without memory behind them. The captured graph is thrown away; only its length is looked
at. If it holds more than the launches that were recorded, then something else has run, as cupy's
own kernels, and the call cannot be repeated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from extensor.backends import registry
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.placement import Life, placed
from extensor_cuda.runtime.recording import RECORDING, Block, Launch, Recording, RepeatError

__all__ = [
    "LaunchList",
    "Space",
    "first_address",
    "likeness",
    "recorded",
    "split_by",
    "workspace_of",
]

_SPACE = 1 << 40
_ALIGNED = 512
"""What addresses of arrays are multiples of, as torch's and cupy's are."""


class LaunchList:
    """Launches of a call that run as one.

    Args:
        recording: of the call.
        launches: some of its launches.
        given: the arrays that a run is given.
        results: the arrays that it returns.

    Attributes:
        workspace: bytes of memory that a run needs beside these.

    Raises:
        RepeatError: without the C++ core.
    """

    def __init__(
        self,
        recording: Recording,
        launches: Sequence[Launch],
        given: Sequence[Block],
        results: Sequence[Block],
    ) -> None:
        core = getattr(registry.get("cpu"), "core", None)
        if core is None:
            raise RepeatError("there is no C++ core")
        self._kept = recording.kept
        arrays = {id(block): (i, 0) for i, block in enumerate((*given, *results))}
        used = {id(p.block) for launch in launches for p in launch.pointers}
        between = [b for b in recording.blocks if id(b) in used and id(b) not in arrays]
        offsets, self.workspace = workspace_of(between, len(recording.launches))
        arrays |= {id(b): (len(arrays), start) for b, start in zip(between, offsets, strict=True)}
        self._list = core.LaunchList(*_functions())
        for launch in launches:
            pointers = []
            for p in launch.pointers:
                array, start = arrays[id(p.block)]
                pointers.append((p.parameter, p.offset, array, start + p.behind, p.tensor_map))
            self._list.add(
                launch.function, launch.sizes, launch.cooperative, launch.parameters, pointers
            )

    def __len__(self) -> int:
        return len(self._list)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a stream; does not wait.

        Args:
            stream: the driver's.
            addresses: of what is given, of the results, and of the workspace if there is one, each
                aligned as the recorded call's.

        Raises:
            RuntimeError: if the driver refuses.
        """
        self._list(stream, addresses)


def workspace_of(blocks: Sequence[Block], end: int) -> tuple[list[int], int]:
    """Where arrays lie that a call of so many launches makes for itself, and the bytes of all.

    Arrays that live at different times share memory, as they would in a pool.
    """
    lives = [
        Life(
            -(-block.size // _ALIGNED) * _ALIGNED,
            block.born,
            end if block.died is None else block.died,
        )
        for block in blocks
    ]
    return placed(lives, range(len(lives)))


def split_by(
    recording: Recording, array: Block, results: Sequence[Block]
) -> tuple[list[Launch], list[Launch], list[Block]]:
    """The launches that read one array and what was made of it alone, and the others.

    Returns:
        Both in order, and the arrays that the first ones make for the others or as results.
    """
    own, others = {id(array)}, set[int]()
    first: list[Launch] = []
    rest: list[Launch] = []
    for launch in recording.launches:
        its = [p.block for p in launch.pointers]
        new = {id(b) for b in its if not b.given} - others
        if any(id(b) in own for b in its) and all(id(b) in own | new for b in its):
            own |= new
            first.append(launch)
        else:
            others |= {id(b) for b in its} - own
            rest.append(launch)
    read = {id(p.block) for launch in rest for p in launch.pointers} | {id(b) for b in results}
    made = [b for b in recording.blocks if id(b) in own & read and b is not array]
    return first, rest, made


def likeness(launches: Sequence[Launch], made: Sequence[Block]) -> Hashable:
    """Equal of launches that make the same arrays of the same ones, wherever these lie."""
    seen: dict[int, int] = {}
    each = tuple(
        (
            *(launch.function, launch.sizes, launch.cooperative, launch.numbers),
            *(
                (p.parameter, p.offset, p.behind, seen.setdefault(id(p.block), len(seen)))
                for p in launch.pointers
            ),
        )
        for launch in launches
    )
    return each, tuple((seen[id(block)], block.size) for block in made)


@cache
def _functions() -> tuple[int, int]:
    """Addresses of the driver's functions."""
    driver.bindings()
    library = ctypes.CDLL("libcuda.so.1")
    names = "cuLaunchKernelEx", "cuTensorMapReplaceAddress"
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    assert found[0] and found[1]
    return found[0], found[1]


class Space:
    """Addresses that no memory lies at, for the arrays of a recording.

    Args:
        recording: told of each array.
        first: the first address.
    """

    def __init__(self, recording: Recording, first: int) -> None:
        self._recording, self._next = recording, first

    def place(self, size: int) -> int:
        """An address for so many bytes; nothing lies right behind them."""
        address = self._next
        self._next += (-(-size // _ALIGNED) + 1) * _ALIGNED
        return address

    def given(self, size: int, unread: bool = False) -> Block:
        """A block of what the call is given."""
        return self._recording.given(self.place(size), size, unread)

    def make(self, size: int) -> tuple[Block, _Owner]:
        """A new block, and what it lives as long as."""
        block = self._recording.made(self.place(size), size)
        return block, _Owner(self._recording, block)


class _Owner:
    """What holds a block: its end is the block's."""

    def __init__(self, recording: Recording, block: Block) -> None:
        self._of = recording, block

    def __del__(self) -> None:
        recording, block = self._of
        recording.freed(block)


@cache
def first_address(device: int) -> int:
    """Of a range of the device's addresses, which is reserved and never gets memory."""
    api = driver.bindings()
    return int(driver.check(api.cuMemAddressReserve(_SPACE, 0, 0, 0), "cuMemAddressReserve"))


@contextmanager
def recorded(recording: Recording, stream: int) -> Iterator[None]:
    """Record what is launched on a stream meanwhile; nothing runs.

    Raises:
        RepeatError: if more has been put on the stream than was recorded.
        RuntimeError: if the driver refuses, as where the call waited.
    """
    api = driver.bindings()
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.check(api.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
    RECORDING.recording = recording
    try:
        yield
    finally:
        RECORDING.recording = None
        error, graph = api.cuStreamEndCapture(stream)
        if not int(error):
            _, _, count = api.cuGraphGetNodes(graph)
            api.cuGraphDestroy(graph)
    driver.check((error,), "cuStreamEndCapture")
    if count != len(recording.launches):
        raise RepeatError(
            f"{count} operations ran on the GPU, {len(recording.launches)} of them kernels of "
            "this project"
        )
