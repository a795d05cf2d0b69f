"""Ranks with a GPU each, over NCCL: GPU arrays go from GPU to GPU, all else through other ranks.

NCCL has no objects, no barrier and no arrays of the CPU: those are the host communicator's (MPI's),
which also carries NCCL's unique id. Collectives run on a stream of their own, so that the GPU
computes meanwhile; what packs and unpacks for them runs on two more, the lanes, so that one bucket
is packed while another one travels. Each lane has a connection of its own, so that the fixed time
of one collective passes beside another one. cupy's binding calls NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from extensor.backends.registry import get as get_backend
from extensor.backends.unsupported import Unsupported
from extensor.distributed.buffers import check_buffers, closed
from extensor.distributed.communicator import (
    Array,
    CollectiveTimeout,
    Communicator,
    Op,
    Work,
)
from extensor.distributed.local import LocalCommunicator
from extensor.distributed.peer_memory import PeerMemory, open_peer_memory
from extensor.distributed.shared_memory import SharedRows

__all__ = ["NCCLCommunicator"]

SPIN_SECONDS = 0.05
PAUSE_SECONDS = 0.0005
SUMS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
"""What NCCL adds; anything moves, as bytes."""
AHEAD = 2
"""Joins that this process may be ahead of the GPU: as many steps of training."""
LANES = 2
"""While a collective of one lane is under way, the other lane packs, unpacks or sends."""
ROLL_CALL_SECONDS = 5.0
"""After a timeout, at most, for the other ranks to say that they waited, too."""


class _NCCLWork:
    def __init__(self, ranks: NCCLCommunicator, what: str, keep: Any, stream: Any) -> None:
        self._ranks, self._what = ranks, what
        self._keep = keep  # memory must not be used again while NCCL reads or writes it
        self._event = ranks._record(stream)

    def done(self) -> bool:
        """See :meth:`extensor.distributed.Work.done`."""
        return bool(self._event.done)

    def wait(self) -> None:
        """See :meth:`extensor.distributed.Work.wait`.

        In a lane this process does not wait: what follows there does.
        """
        current = self._ranks._xp.cuda.get_current_stream()
        if current.ptr not in self._ranks._wires:
            self._ranks._poll(self._event, self._what)
        current.wait_event(self._event)


class NCCLCommunicator:
    """A rank with a GPU: see `Communicator` for its methods.

    Ranks of one machine take its GPUs in turn, unless their launcher shows each of them one.

    Args:
        host: the same ranks, over MPI.
        xp: the array module; None is cupy.
        binding: NCCL's functions; None are those of ``cupy.cuda.nccl``.
        gpu: whether this process has taken its GPU already.

    Raises:
        RuntimeError: without cupy, a GPU or NCCL, and on all ranks if two of them have one GPU.

    >>> from extensor.distributed import NCCLCommunicator, connect
    >>> ranks = NCCLCommunicator(connect())    # doctest: +SKIP
    """

    def __init__(
        self, host: Communicator, *, xp: Any = None, binding: Any = None, gpu: bool = False
    ) -> None:
        self.host, self.rank, self.size = host, host.rank, host.size
        self._xp = get_backend("cuda").xp if xp is None else xp
        self._nccl = _binding() if binding is None else binding
        if not gpu:
            self._take_gpu()
        self._comms = comms = [self._connected() for _ in range(LANES)]
        # Of high priority: their small kernels need not wait until a large product is done, and
        # what travels need not wait until the next bucket is packed.
        wires, self._lanes = (
            [self._xp.cuda.Stream(non_blocking=True, priority=priority) for _ in range(LANES)]
            for priority in (-2, -1)
        )
        self._comm, self._stream = comms[0], wires[0]
        self._wires = {
            lane.ptr: wire for lane, *wire in zip(self._lanes, comms, wires, strict=True)
        }
        self._closed = False
        self._pending: dict[int, Any] = {}  # streams with work that nothing has joined
        self._joined: deque[Any] = deque()
        self._peers: dict[int, list[PeerMemory]] = {lane: [] for lane in range(LANES)}
        self._ops = {op: getattr(self._nccl, f"NCCL_{op.upper()}") for op in ("sum", "max", "min")}
        self._types = {n: getattr(self._nccl, f"NCCL_{n.upper()}") for n in SUMS}

    bucket_bytes = 32 << 20

    @property
    def timeout(self) -> float:
        """See :attr:`extensor.distributed.Communicator.timeout`."""
        return self.host.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.host.timeout = seconds

    # --- collectives ----------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: Op = "sum", out: Array | None = None) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_reduce`."""
        recv = buffer if out is None else out
        if not self._on_gpu(buffer, recv):
            return self.host.all_reduce(buffer, op, out)
        check_buffers("all_reduce", self.size, buffer, recv, 1)
        kind = self._summed("all_reduce", buffer)

        def call(comm: Any, stream: int) -> None:
            there, here = buffer.data.ptr, recv.data.ptr
            comm.allReduce(there, here, buffer.size, kind, self._ops[op], stream)

        return self._start("all_reduce", call, (buffer, recv))

    def reduce_scatter(self, send: Array, recv: Array, op: Op = "sum") -> Work:
        """See :meth:`extensor.distributed.Communicator.reduce_scatter`."""
        if not self._on_gpu(send, recv):
            return self.host.reduce_scatter(send, recv, op)
        check_buffers("reduce_scatter", self.size, send, recv, self.size)
        kind = self._summed("reduce_scatter", send)

        def call(comm: Any, stream: int) -> None:
            there, here = send.data.ptr, recv.data.ptr
            comm.reduceScatter(there, here, recv.size, kind, self._ops[op], stream)

        return self._start("reduce_scatter", call, (send, recv))

    def all_gather(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather`."""
        if not self._on_gpu(send, recv):
            return self.host.all_gather(send, recv)
        check_buffers("all_gather", self.size, send, recv, -self.size)
        bytes_ = self._types["uint8"]

        def call(comm: Any, stream: int) -> None:
            here, there = send.data.ptr, recv.data.ptr
            if self.size != 2 or here != there + self.rank * send.nbytes:
                comm.allGather(here, there, send.nbytes, bytes_, stream)
                return
            other = 1 - self.rank  # two messages take NCCL less time
            self._nccl.groupStart()
            comm.send(here, send.nbytes, bytes_, other, stream)
            comm.recv(there + other * send.nbytes, send.nbytes, bytes_, other, stream)
            self._nccl.groupEnd()

        return self._start("all_gather", call, (send, recv))

    def all_gather_coalesced(self, sends: Sequence[Array], recvs: Sequence[Array]) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather_coalesced`."""
        if not sends or not self._on_gpu(*sends, *recvs):
            return self.host.all_gather_coalesced(sends, recvs)
        for send, recv in zip(sends, recvs, strict=True):
            check_buffers("all_gather_coalesced", self.size, send, recv, -self.size)
        bytes_ = self._types["uint8"]

        def call(comm: Any, stream: int) -> None:
            self._nccl.groupStart()
            for send, recv in zip(sends, recvs, strict=True):
                comm.allGather(send.data.ptr, recv.data.ptr, send.nbytes, bytes_, stream)
            self._nccl.groupEnd()

        return self._start("all_gather_coalesced", call, (sends, recvs))

    def all_to_all(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_to_all`."""
        if not self._on_gpu(send, recv):
            return self.host.all_to_all(send, recv)
        check_buffers("all_to_all", self.size, send, recv, 1)
        bytes_, part = self._types["uint8"], send.nbytes // self.size

        def call(comm: Any, stream: int) -> None:
            self._nccl.groupStart()
            for rank in range(self.size):
                comm.send(send.data.ptr + rank * part, part, bytes_, rank, stream)
                comm.recv(recv.data.ptr + rank * part, part, bytes_, rank, stream)
            self._nccl.groupEnd()

        return self._start("all_to_all", call, (send, recv))

    def broadcast(self, buffer: Array, root: int = 0) -> Work:
        """See :meth:`extensor.distributed.Communicator.broadcast`."""
        if not self._on_gpu(buffer):
            return self.host.broadcast(buffer, root)
        check_buffers("broadcast", self.size, buffer, buffer, 1)

        def call(comm: Any, stream: int) -> None:
            at, kind = buffer.data.ptr, self._types["uint8"]
            comm.broadcast(at, at, buffer.nbytes, kind, root, stream)

        return self._start("broadcast", call, buffer)

    def barrier(self, timeout: float | None = None) -> None:
        """See :meth:`extensor.distributed.Communicator.barrier`."""
        self.host.barrier(timeout)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See :meth:`extensor.distributed.Communicator.all_gather_object`."""
        return self.host.all_gather_object(obj)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """See :meth:`extensor.distributed.Communicator.broadcast_object`."""
        return self.host.broadcast_object(obj, root)

    def where(self) -> str:
        """This rank in words, for messages.

        Returns:
            Its number, machine and process.

        >>> from extensor.distributed import NCCLCommunicator, connect
        >>> NCCLCommunicator(connect()).where()    # doctest: +SKIP
        'rank 0 of 2 (node1, process 4711)'
        """
        return str(self.host.where())  # type: ignore[attr-defined]

    def abort(self, code: int) -> None:
        """End the whole program, all ranks, now.

        Args:
            code: the exit code.

        >>> from extensor.distributed import NCCLCommunicator, connect
        >>> NCCLCommunicator(connect()).abort(1)    # doctest: +SKIP
        """
        self.host.abort(code)  # type: ignore[attr-defined]

    def split(self, color: int) -> Communicator:
        """See :meth:`extensor.distributed.Communicator.split`; one rank alone needs no NCCL."""
        host = self.host.split(color)
        if host.size == 1:
            return LocalCommunicator()
        return NCCLCommunicator(host, xp=self._xp, binding=self._nccl, gpu=True)

    def shared_rows(self, nbytes: int) -> SharedRows | Unsupported:
        """See :meth:`extensor.distributed.Communicator.shared_rows`."""
        return self.host.shared_rows(nbytes)

    # --- beside the computation -----------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self, lane: int = 0) -> Iterator[bool]:
        """See :meth:`extensor.distributed.Communicator.beside`."""
        stream = self._lanes[lane % LANES]
        self._follow(stream)
        with stream:
            yield True

    def join(self) -> None:
        """See :meth:`extensor.distributed.Communicator.join`."""
        if not self._pending:
            return
        current = self._xp.cuda.get_current_stream()
        events = [self._record(stream) for stream in self._pending.values()]
        self._pending.clear()
        for event in events:
            current.wait_event(event)
        if self._capturing():
            return
        self._joined.append(events)
        if len(self._joined) > AHEAD:
            for event in self._joined.popleft():
                self._poll(event, "a collective beside the computation")

    def synchronize(self) -> None:
        """See :meth:`extensor.distributed.Communicator.synchronize`."""
        if not self._capturing():
            stream = self._xp.cuda.get_current_stream()
            self._poll(self._record(stream), "a step's collectives")

    def queued(self) -> Work:
        """See :meth:`extensor.distributed.Communicator.queued`."""
        return _NCCLWork(self, "what was queued", None, self._xp.cuda.get_current_stream())

    def peer_memory(self, nbytes: int, lane: int = 0) -> PeerMemory | Unsupported:
        """See :meth:`extensor.distributed.Communicator.peer_memory`."""
        self._check_open("peer_memory")
        opened = self._peers[lane % LANES]
        if not opened or opened[-1].nbytes < nbytes:
            memory = open_peer_memory(self.host, self._xp, nbytes)
            if isinstance(memory, Unsupported):
                return memory
            opened.append(memory)  # the one before stays: graphs may read it
        return opened[-1]

    def close(self) -> None:
        """See :meth:`extensor.distributed.Communicator.close`."""
        if self._closed:
            return
        self.join()
        self.synchronize()  # all that this rank queued
        self._closed = True
        self.host.barrier()  # and the others, which read this rank's memory
        for memory in itertools.chain(*self._peers.values()):
            memory.close(self.host)
        self._peers.clear()
        for comm in self._comms:
            comm.destroy()
        self.host.close()

    # --- within ---------------------------------------------------------------------------------

    def _follow(self, stream: Any) -> None:
        """Let a stream of ours wait for what the current one has queued."""
        self._pending[stream.ptr] = stream
        stream.wait_event(self._record(self._xp.cuda.get_current_stream()))

    def _record(self, stream: Any) -> Any:
        event = self._xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _capturing(self) -> bool:
        """Whether what is called now goes into a CUDA graph: nobody can ask for its events."""
        cuda = self._xp.cuda
        return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))

    def _start(self, what: str, call: Callable[[Any, int], None], keep: Any) -> Work:
        """Start a collective; one that a lane starts takes the lane's own connection."""
        self._check_open(what)
        current = self._xp.cuda.get_current_stream().ptr
        comm, stream = self._wires.get(current, (self._comm, self._stream))
        self._follow(stream)
        call(comm, stream.ptr)
        return _NCCLWork(self, what, keep, stream)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(closed(what))

    def _connected(self) -> Any:
        mine = self._nccl.get_unique_id() if self.rank == 0 else None
        identity = self.host.broadcast_object(mine)
        return self._nccl.NcclCommunicator(self.size, identity, self.rank)

    def _on_gpu(self, *arrays: Array) -> bool:
        there = {isinstance(array, self._xp.ndarray) for array in arrays}
        if len(there) > 1:
            raise ValueError("expected send and recv on one device, got the CPU and a GPU")
        return there.pop()

    def _summed(self, what: str, array: Array) -> int:
        name = array.dtype.name
        if name not in self._types:
            raise TypeError(f"{what}: NCCL adds {', '.join(SUMS)}, got {name}; cast it first")
        return int(self._types[name])

    def _poll(self, event: Any, what: str) -> None:
        """Wait for an event, no longer than `timeout`."""
        began = time.monotonic()
        while not event.done:
            waited = time.monotonic() - began
            if waited > self.timeout:
                missing = self._missing()
                for memory in itertools.chain(*self._peers.values()):
                    memory.stop()  # first: NCCL waits for the GPU when it ends
                for comm in self._comms:
                    comm.abort()  # else the process could not end
                self._comms.clear()
                raise CollectiveTimeout(
                    what, rank=self.rank, size=self.size, seconds=waited, missing=missing
                )
            for comm in self._comms:
                comm.check_async_error()
            time.sleep(0 if waited < SPIN_SECONDS else PAUSE_SECONDS)

    def _missing(self) -> list[int]:
        """The ranks that did not wait so long, too."""
        try:
            self.host.barrier(min(ROLL_CALL_SECONDS, self.timeout))
        except CollectiveTimeout as error:
            return error.missing
        return []

    def _take_gpu(self) -> None:
        runtime, machine = self._xp.cuda.runtime, socket.gethostname()
        machines = self.host.all_gather_object(machine)
        before = machines[: self.rank].count(machine)
        device = before % runtime.getDeviceCount()
        self._xp.cuda.Device(device).use()
        gpu = (machine, runtime.deviceGetPCIBusId(device))
        everyone = self.host.all_gather_object(gpu)
        shared = [rank for rank, other in enumerate(everyone) if everyone.count(other) > 1]
        if shared:
            named = ", ".join(map(str, shared))
            raise RuntimeError(
                f"NCCL: expected a GPU for each rank, got ranks {named} that share some; the way "
                f"out: start as many ranks on a machine as it has GPUs ({runtime.getDeviceCount()} "
                f"on {machine})"
            )


def _binding() -> Any:
    from cupy.cuda import nccl

    if not nccl.available:
        raise RuntimeError(
            "several ranks with GPUs need NCCL, which cupy does not find; the way out: pip "
            "install 'extensor[nccl]'"
        )
    return nccl
