"""cupy.cuda.nccl on numpy, and the streams and events that it is called with.

A collective runs when all ranks have called it and somebody asks for an event behind it, never
before. So a result that is read without waiting is not there, as on a GPU. Numpy computes at once,
so inside of a lane a collective is waited for. Each call is checked as NCCL would: a stream
that waits for what is computed on the calling thread's stream, arguments that agree on all ranks,
a group around point-to-point messages.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tests.unit.cuda.fake import FakeCupy

KINDS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
Writes = list[Callable[[], None]]
REDUCE = (np.add, np.maximum, np.minimum)


def memory(address: int, count: int, kind: int) -> np.ndarray:
    """The array at an address."""
    dtype = np.dtype(KINDS[kind])
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def write(address: int, kind: int, values: np.ndarray) -> None:
    """Put a result where the rank wants it."""
    memory(address, values.size, kind)[:] = values


class Group:
    """What the ranks of one unique id share: by number, what each called, and what it does."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: dict[int, dict[int, tuple[Any, Any]]] = {}
        self.results: dict[int, list[Callable[[], None]]] = {}


GROUPS: dict[tuple[int, ...], Group] = {}
IDENTITIES = itertools.count()


class Local(threading.local):
    """A thread is a rank: its current stream, its device, and its open group of messages."""

    stream: Any = None
    device = 0
    messages: list[Any] | None = None
    gathers: list[Any]


LOCAL = Local()


class Stream:
    """What is called on it, in order: collectives, or what numpy computes at once (a lane)."""

    numbers = itertools.count(1)

    def __init__(self, non_blocking: bool = False, priority: int = 0) -> None:
        self.ptr = next(self.numbers)
        self.pending: list[Callable[[], bool]] = []
        self.follows = False
        self.before: list[Any] = []
        STREAMS[self.ptr] = self

    def __enter__(self) -> Any:
        assert self.follows, "the lane does not wait for what is computed before"
        self.before.append(LOCAL.stream)
        LOCAL.stream, self.joined = self, -1

    def __exit__(self, *error: Any) -> None:
        self.follows = False
        LOCAL.stream = self.before.pop()

    def wait_event(self, event: Any) -> None:
        """Collectives before the event must be done by now: numpy does not wait."""
        assert event.done, "the current stream would wait for a collective for ever"
        self.follows = True
        if self is DEFAULT:
            event.stream.joined = event.count

    def drive(self, count: int) -> bool:
        """Whether the first ``count`` calls are done."""
        while self.pending and len(self.pending) > self.total - count:
            if not self.pending[0]():
                return False
            self.pending.pop(0)
        return True

    total = joined = 0
    """Calls, and those that the computation has waited for; -1 in a lane that it has not joined."""

    def add(self, call: Callable[[], bool]) -> None:
        assert self.follows, "the stream does not wait for what is computed before"
        self.follows = False  # the next call has to follow anew
        self.pending.append(call)
        self.total += 1


STREAMS: dict[int, Stream] = {}
DEFAULT = Stream()


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.stream: Any = DEFAULT
        self.count = 0

    def record(self, stream: Any = None) -> None:
        self.stream = DEFAULT if stream is None else stream
        self.count = self.stream.total

    @property
    def done(self) -> bool:
        return bool(self.stream.drive(self.count))


class NcclCommunicator:
    """One rank's calls."""

    def __init__(self, size: int, identity: tuple[int, ...], rank: int) -> None:
        assert len(identity) == 128
        self.size_, self.rank, self.number, self.aborted = size, rank, 0, False
        self.group = GROUPS.setdefault(identity, Group())

    def _call(self, what: tuple[Any, ...], mine: Any, stream: int, run: Any) -> None:
        number, self.number = self.number, self.number + 1
        group = self.group

        def ready() -> bool:
            with group.lock:
                called = group.calls[number]
                if len(called) < self.size_:
                    return False
                assert len({each for each, _ in called.values()}) == 1, called
                if number not in group.results:
                    group.results[number] = run([called[rank][1] for rank in range(self.size_)])
            group.results[number][self.rank]()
            return True

        with group.lock:
            group.calls.setdefault(number, {})[self.rank] = what, mine
        STREAMS[stream].add(ready)
        while LOCAL.stream is not None and not STREAMS[stream].drive(STREAMS[stream].total):
            time.sleep(0.0001)

    def allReduce(self, send: int, recv: int, count: int, kind: int, op: int, at: int) -> None:  # noqa: N802
        def run(all_: list[Any]) -> Writes:
            total = REDUCE[op].reduce([memory(s, count, kind) for s, _ in all_])
            return [partial(write, r, kind, total) for _, r in all_]

        self._call(("allReduce", count, kind, op), (send, recv), at, run)

    def reduceScatter(self, send: int, recv: int, count: int, kind: int, op: int, at: int) -> None:  # noqa: N802
        def run(all_: list[Any]) -> Writes:
            total = REDUCE[op].reduce([memory(s, self.size_ * count, kind) for s, _ in all_])
            parts = total.reshape(self.size_, count)
            return [partial(write, r, kind, part) for (_, r), part in zip(all_, parts, strict=True)]

        self._call(("reduceScatter", count, kind, op), (send, recv), at, run)

    def allGather(self, send: int, recv: int, count: int, kind: int, at: int) -> None:  # noqa: N802
        if LOCAL.messages is not None:  # of a group: the others' kernel is the same
            LOCAL.gathers.append((self, (send, recv, count, kind, at)))
            return

        def run(all_: list[Any]) -> Writes:
            whole = np.concatenate([memory(s, count, kind) for s, _ in all_])
            return [partial(write, r, kind, whole) for _, r in all_]

        self._call(("allGather", count, kind), (send, recv), at, run)

    def broadcast(self, send: int, recv: int, count: int, kind: int, root: int, at: int) -> None:
        def run(all_: list[Any]) -> Writes:
            values = memory(all_[root][0], count, kind).copy()
            return [partial(write, r, kind, values) for _, r in all_]

        self._call(("broadcast", count, kind, root), (send, recv), at, run)

    def send(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._message(("send", at, count, kind, peer, stream))

    def recv(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._message(("recv", at, count, kind, peer, stream))

    def _message(self, message: tuple[Any, ...]) -> None:
        assert LOCAL.messages is not None, "a message outside of a group may block for ever"
        LOCAL.messages.append((self, message))

    def flush(self, messages: list[tuple[Any, ...]]) -> None:
        """All messages of a group, as one call."""
        stream = messages[0][-1]

        def run(all_: list[Any]) -> Writes:
            sent = {
                (rank, peer): memory(at, count, kind).copy()
                for rank, each in enumerate(all_)
                for name, at, count, kind, peer, _ in each
                if name == "send"
            }

            def receive(rank: int) -> None:
                for name, at, count, kind, peer, _ in all_[rank]:
                    if name == "recv":
                        assert count == sent[peer, rank].size
                        write(at, kind, sent[peer, rank])

            return [partial(receive, rank) for rank in range(self.size_)]

        self._call(("group", len(messages)), messages, stream, run)

    def check_async_error(self) -> None:
        """None."""

    def abort(self) -> None:
        self.aborted = True

    def destroy(self) -> None:
        assert not self.aborted
        self.aborted = True


def group_start() -> None:
    LOCAL.messages, LOCAL.gathers = [], []


def group_end() -> None:
    messages, LOCAL.messages = LOCAL.messages, None
    assert bool(messages) != bool(LOCAL.gathers)
    if messages:
        messages[0][0].flush([message for _, message in messages])
    for number, (comm, gather) in enumerate(LOCAL.gathers):
        if number:
            STREAMS[gather[-1]].follows = True  # as the first of the group
        comm.allGather(*gather)


def unique_id() -> tuple[int, ...]:
    return (next(IDENTITIES), *(0,) * 127)


BINDING = types.SimpleNamespace(
    available=True,
    get_unique_id=unique_id,
    NcclCommunicator=NcclCommunicator,
    groupStart=group_start,
    groupEnd=group_end,
    NCCL_SUM=0,
    NCCL_MAX=1,
    NCCL_MIN=2,
    **{f"NCCL_{name.upper()}": number for number, name in enumerate(KINDS)},
)


def _handle(address: int) -> bytes:
    return address.to_bytes(8, "little")


class _Memory:
    """Memory of a GPU, which is never given back."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, nbytes: int) -> None:
        self.kept.append(np.full(nbytes, 77, np.uint8))
        self.ptr = self.kept[-1].ctypes.data


class CUDARuntimeError(RuntimeError):
    """What CUDA's runtime says."""


def _unowned(address: int, nbytes: int, owner: Any, device: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


class Gpu(FakeCupy):
    """A machine of several GPUs."""

    def __init__(self, count: int = 8) -> None:
        def device(number: int) -> Any:
            return types.SimpleNamespace(use=lambda: setattr(LOCAL, "device", number))

        self.cuda = types.SimpleNamespace(  # type: ignore[misc]
            Device=device,
            Event=Event,
            Stream=Stream,
            get_current_stream=lambda: LOCAL.stream or DEFAULT,
            Memory=_Memory,
            UnownedMemory=_unowned,
            MemoryPointer=lambda memory, offset: memory,
            alloc_pinned_memory=bytearray,
            runtime=types.SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDevice=lambda: LOCAL.device,
                memset=lambda address, value, nbytes: ctypes.memset(address, value, nbytes),
                deviceSynchronize=lambda: None,
                ipcGetMemHandle=_handle,
                ipcOpenMemHandle=lambda handle, flags: int.from_bytes(handle, "little"),
                ipcCloseMemHandle=lambda address: None,
                getDeviceCount=lambda: count,
                streamIsCapturing=lambda stream: False,
                deviceGetPCIBusId=lambda number: f"0000:{number:02x}:00.0",
            ),
        )
