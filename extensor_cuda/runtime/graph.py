"""A training step as a CUDA graph, with memory and a stream of its own.

Everything that the step makes lies in memory that nothing else takes from, so that a replay finds
it where it was; large arrays are placed beforehand (`extensor_cuda.runtime.placement`). What a
graph cannot hold is refused during the capture: reading a value back (CUDA raises an error), and
copies from the host, which each replay would repeat from a host buffer that has changed since
(refused here, by the allocator of such buffers).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from extensor.errors import CaptureError
from extensor_cuda.runtime.capture import FindNonfinite, StepCapture, current_capture
from extensor_cuda.runtime.placement import LifeLog, PlacedMemory, StepAllocator

__all__ = ["CudaGraph"]

_RULES = (
    "while a step is captured, no value may be read back from the GPU (item(), numpy(), float(), a "
    "branch on a value, a result whose shape depends on values) and nothing may be copied from the "
    "host (batches are the step's arguments); move that out of the step"
)


class HostCopyError(RuntimeError):
    """A copy from the host while a step is captured."""


def _no_copies(xp: Any) -> Callable[[int], Any]:
    """An allocator of page-locked memory that refuses the thread that captures."""

    def allocate(size: int) -> Any:
        if current_capture() is not None:
            raise HostCopyError(f"{size} bytes are copied from the host")
        return xp.get_default_pinned_memory_pool().malloc(size)

    return allocate


def _where(error: BaseException) -> str:
    """Where an error came from: a line of the step, the last outside of the library, the last."""
    library = Path(__file__).parents[2]
    inside = tuple(str(library / name) for name in ("extensor", "extensor_cuda"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "cupy" not in f.filename]
    own = dropwhile(lambda f: f.filename.startswith(inside), frames)
    step = list(takewhile(lambda f: not f.filename.startswith(inside), own))
    outside = [f for f in frames if not f.filename.startswith(inside)]
    shown = [*step[-1:], *outside[-1:], *frames[-1:]]
    lines = dict.fromkeys(f"{f.filename}:{f.lineno} `{f.line}`" for f in shown)
    return ", in ".join(lines)


class CudaGraph:
    """Implements `extensor.backends.capture.Graph`; arguments are `StepCapture`'s."""

    def __init__(self, xp: Any, find_nonfinite: FindNonfinite) -> None:
        self.xp, self._find_nonfinite = xp, find_nonfinite
        xp.get_default_memory_pool().free_all_blocks()  # what eager steps left over
        # Small arrays; large ones of Python's steps; those of the captured one.
        self._small, self._pool, self._captured = (xp.cuda.MemoryPool() for _ in range(3))
        self._log: LifeLog | None = None
        self._placed: PlacedMemory | None = None
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._graph: Any = None
        self._capture: StepCapture | None = None

    @property
    def nbytes(self) -> int:
        """See the protocol."""
        pools = self._small, self._pool, self._captured
        return sum(int(pool.total_bytes()) for pool in pools)

    @property
    def _memory(self) -> tuple[Any, Any, Any, Any]:
        """A `StepAllocator`'s arguments."""
        return self.xp, self._small, self._pool, self._stream

    @contextlib.contextmanager
    def _own_stream(self, memory: StepAllocator) -> Iterator[None]:
        """Run in the graph's own memory and stream, after all that was launched before."""
        self.xp.cuda.Device().synchronize()
        with self.xp.cuda.using_allocator(memory), self._stream:
            yield
            self._stream.synchronize()

    def run(self, step: Callable[[], Any]) -> Any:
        """See the protocol."""
        with self._own_stream(StepAllocator(*self._memory)):
            return step()

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """See the protocol."""
        self._log = LifeLog(*self._memory)
        with self._own_stream(self._log):
            capture = StepCapture(self.xp, self._find_nonfinite, warm_up=True)
            capture.load()
            capture.begin()
            try:
                out = step()
            except BaseException:
                capture.end(failed=True)
                raise
            capture.end(failed=False)
            capture.after()
            capture.settle()
            return out

    def capture(self, step: Callable[[], Any]) -> Any:
        """See the protocol.

        Raises:
            RuntimeError: if the step does what a graph cannot hold, naming the line.
        """
        assert self._log is not None
        xp = self.xp
        xp.cuda.Device().synchronize()
        self._pool.free_all_blocks()  # all but the inputs and what outlived the warm-up
        self._captured = xp.cuda.MemoryPool()
        self._placed = PlacedMemory(self._log, self._captured)
        with self._own_stream(self._placed):
            capture = StepCapture(xp, self._find_nonfinite)
            try:
                xp.cuda.set_pinned_memory_allocator(_no_copies(xp))
                self._stream.begin_capture()
                capture.begin()
                out = step()
                graph = self._stream.end_capture()
            except BaseException as error:
                self._abandon()
                capture.end(failed=True)
                if not isinstance(error, Exception):
                    raise
                raise CaptureError(
                    f"capture: the step cannot be captured: at {_where(error)}: "
                    f"{type(error).__name__}: {error}; {_RULES}"
                ) from error
            finally:
                xp.cuda.set_pinned_memory_allocator(xp.get_default_pinned_memory_pool().malloc)
            capture.end(failed=False)
        self._graph, self._capture, self._log = graph, capture, None
        self._pool.free_all_blocks()
        return out

    def _abandon(self) -> None:
        """End a capture that an error has broken off or made invalid."""
        with contextlib.suppress(Exception):  # what an invalid capture ends with
            self._stream.end_capture()
        self._stream = self.xp.cuda.Stream(non_blocking=True)

    def replay(self) -> None:
        """See the protocol."""
        assert self._capture is not None
        self._capture.before()
        self._graph.launch()
        self._capture.after()

    def check(self) -> None:
        """See the protocol."""
        if self._capture is not None:
            self._capture.check()

    def close(self) -> None:
        """See the protocol."""
        self._graph = None
