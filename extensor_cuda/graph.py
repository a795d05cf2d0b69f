"""A step in a CUDA graph, with memory and a stream of its own.

Everything that the step makes lies in a pool that nobody else takes memory from, so that a
repetition finds it where it was. What a graph cannot hold is refused while it is recorded: reading
a value back (CUDA says so), and copies from the host, which would repeat what a buffer of the host
held by then (refused here, by the allocator of such buffers).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from extensor_cuda.memory import allocate
from extensor_cuda.recording import Recording, current

__all__ = ["CudaGraph"]

_RULES = (
    "while a step is recorded, no value may be read back from the GPU (item(), numpy(), float(), a "
    "branch on a value, a result whose shape depends on values) and nothing may be copied from the "
    "host (batches are the step's arguments); move that out of the step"
)


class HostCopyError(RuntimeError):
    """A copy from the host while a step is recorded."""


def _no_copies(xp: Any) -> Callable[[int], Any]:
    """An allocator of page-locked memory for all threads but the one that records."""

    def allocate(size: int) -> Any:
        if current() is not None:
            raise HostCopyError(f"{size} bytes are copied from the host")
        return xp.get_default_pinned_memory_pool().malloc(size)

    return allocate


def _where(error: BaseException) -> str:
    """Where an error came from: a line of the step, the last outside of the library, the last."""
    library = Path(__file__).parents[1]
    inside = tuple(str(library / name) for name in ("extensor", "extensor_cuda"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "cupy" not in f.filename]
    own = dropwhile(lambda f: f.filename.startswith(inside), frames)
    step = list(takewhile(lambda f: not f.filename.startswith(inside), own))
    outside = [f for f in frames if not f.filename.startswith(inside)]
    shown = [*step[-1:], *outside[-1:], *frames[-1:]]
    lines = dict.fromkeys(f"{f.filename}:{f.lineno} `{f.line}`" for f in shown)
    return ", in ".join(lines)


class CudaGraph:
    """Implements `extensor.backends.recording.Graph`.

    Args:
        xp: cupy.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        xp.get_default_memory_pool().free_all_blocks()  # what eager steps left over
        self._pool = xp.cuda.MemoryPool()
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._graph: Any = None
        self._recording: Recording | None = None

    @property
    def nbytes(self) -> int:
        """See the protocol."""
        return int(self._pool.total_bytes())

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """In the graph's own memory and stream, after all that came before."""
        self.xp.cuda.Device().synchronize()
        memory = partial(allocate, self.xp, self._pool)
        with self.xp.cuda.using_allocator(memory), self._stream:
            yield
            self._stream.synchronize()

    def run(self, step: Callable[[], Any]) -> Any:
        """See the protocol."""
        with self._aside():
            return step()

    def rehearse(self, step: Callable[[], Any]) -> Any:
        """See the protocol."""
        with self._aside():
            recording = Recording(self.xp, live=True)
            recording.warm()
            recording.begin()
            try:
                out = step()
            except BaseException:
                recording.end(failed=True)
                raise
            recording.end(failed=False)
            recording.after()
            recording.settle()
            return out

    def record(self, step: Callable[[], Any]) -> Any:
        """See the protocol.

        Raises:
            RuntimeError: if the step does what a graph cannot hold, naming the line.
        """
        xp = self.xp
        with self._aside():
            recording = Recording(xp)
            try:
                xp.cuda.set_pinned_memory_allocator(_no_copies(xp))
                self._stream.begin_capture()
                recording.begin()
                out = step()
                graph = self._stream.end_capture()
            except BaseException as error:
                self._abandon()
                recording.end(failed=True)
                if not isinstance(error, Exception):
                    raise
                raise RuntimeError(
                    f"capture: the step cannot be recorded: at {_where(error)}: "
                    f"{type(error).__name__}: {error}; {_RULES}"
                ) from error
            finally:
                xp.cuda.set_pinned_memory_allocator(xp.get_default_pinned_memory_pool().malloc)
            recording.end(failed=False)
        self._graph, self._recording = graph, recording
        return out

    def _abandon(self) -> None:
        """End a capture that an error has broken off or made invalid."""
        with contextlib.suppress(Exception):  # what an invalid capture ends with
            self._stream.end_capture()
        self._stream = self.xp.cuda.Stream(non_blocking=True)

    def repeat(self) -> None:
        """See the protocol."""
        assert self._recording is not None
        self._recording.before()
        self._graph.launch()
        self._recording.after()

    def check(self) -> None:
        """See the protocol."""
        if self._recording is not None:
            self._recording.check()
