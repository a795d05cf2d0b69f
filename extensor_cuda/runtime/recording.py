"""Notes what a call launches, so that `extensor_cuda.runtime.launch_list` can make it again.

A kernel's parameters are numbers, addresses and tensor maps. An address in an array that the call
was given, or has made, stands for that array; any other is one of memory that lasts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "RECORDING",
    "Block",
    "Launch",
    "Recording",
    "RepeatError",
    "TensorMap",
    "current_recording",
]


class RepeatError(RuntimeError):
    """Why a call cannot be made again from its launches."""


class TensorMap(bytes):
    """A tensor map, 128 bytes.

    Attributes:
        address: of its array.
    """

    address: int

    def __new__(cls, text: bytes, address: int) -> TensorMap:
        """The map of these bytes."""
        made = super().__new__(cls, text)
        made.address = address
        return made


@dataclass(eq=False)
class Block:
    """Memory of one array.

    Attributes:
        address, size: in bytes.
        born, died: how many launches there were when it was made and when it was freed.
        given: whether the call was given it.
        unread: whether nothing may read it.
    """

    address: int
    size: int
    born: int
    died: int | None = None
    given: bool = False
    unread: bool = False


@dataclass(frozen=True)
class Pointer:
    """Where an address stands: in a parameter, at an offset; so many bytes behind a block's first.

    Of a tensor map the driver knows where.
    """

    parameter: int
    offset: int
    block: Block
    behind: int
    tensor_map: bool = False


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: see `Recording.launched`.

    Attributes:
        numbers: its parameters but for addresses.
    """

    function: int
    sizes: tuple[int, int, int]
    cooperative: bool
    parameters: list[bytes]
    pointers: list[Pointer]
    numbers: tuple[Any, ...] = ()


@dataclass
class Recording:
    """What a call has launched.

    Attributes:
        launches: in order.
        blocks: all arrays, given and made.
        kept: what the launches read beside them.
    """

    launches: list[Launch] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def given(self, address: int, size: int, unread: bool = False) -> Block:
        """Note an array that the call is given."""
        self.blocks.append(Block(address, size, 0, None, True, unread))
        return self.blocks[-1]

    def made(self, address: int, size: int) -> Block:
        """Note an array that the call makes."""
        self.blocks.append(Block(address, size, len(self.launches)))
        return self.blocks[-1]

    def freed(self, block: Block) -> None:
        """Note that nobody will read or write an array any more."""
        block.died = len(self.launches)

    def block_at(self, address: int) -> Block | None:
        """The array in which an address lies, if it is one of the call's that is there."""
        for block in reversed(self.blocks):
            inside = block.address <= address < block.address + max(block.size, 1)
            if inside and block.died is None:
                return block
        return None

    def launched(
        self,
        function: int,
        sizes: tuple[int, int, int],
        cooperative: bool,
        parameters: Sequence[Any],
    ) -> None:
        """Note a launch. Programmatic ones become usual ones, as in a captured graph.

        Args:
            function: the driver's.
            sizes: blocks, threads of a block, bytes of shared memory of a block.
            cooperative: whether all blocks run at a time.
            parameters: arrays, numpy's scalars, ctypes' structures and tensor maps.

        Raises:
            RepeatError: if it reads what is not there.
        """
        held: list[bytes] = []
        numbers: list[Any] = []
        pointers: list[Pointer] = []
        for number, parameter in enumerate(parameters):
            is_map = isinstance(parameter, TensorMap)
            if isinstance(parameter, np.generic):
                places, text = [], parameter.tobytes()
            elif isinstance(parameter, TensorMap):
                places, text = [(0, parameter.address)], bytes(parameter)
            elif isinstance(parameter, ctypes.Structure):
                places, text = list(_addresses(parameter)), bytes(parameter)
            else:
                address = int(parameter.data.ptr)
                places, text = [(0, address)], address.to_bytes(8, "little")
                if self.block_at(address) is None:
                    self.kept.append(parameter)
            held.append(text)
            bare = bytearray(text)
            for offset, _ in places:
                bare[offset : offset + 8] = bytes(8)
            # Where a tensor map has its address, the driver alone knows: that stays.
            numbers.append(parameter if is_map else bytes(bare))
            for offset, address in places:
                block = self.block_at(address)
                if block is not None:
                    behind = address - block.address
                    pointers.append(Pointer(number, offset, block, behind, is_map))
        if any(pointer.block.unread for pointer in pointers):
            raise RepeatError("a kernel reads an input that is not kept")
        self.launches.append(Launch(function, sizes, cooperative, held, pointers, tuple(numbers)))


def _addresses(structure: ctypes.Structure) -> Iterator[tuple[int, int]]:
    """Where a structure of numbers, pointers and arrays of them has an address, and which."""
    for name, kind, *_ in structure._fields_:
        start, value = getattr(type(structure), name).offset, getattr(structure, name)
        if kind is ctypes.c_void_p and value:
            yield start, value
        elif getattr(kind, "_type_", None) is ctypes.c_void_p:
            for i, one in enumerate(value):
                if one:
                    yield start + 8 * i, one


class _Current(threading.local):
    recording: Recording | None = None


RECORDING = _Current()
"""Of this thread: the call that is being recorded."""


def current_recording() -> Recording | None:
    """The recording under way in this thread."""
    return RECORDING.recording
