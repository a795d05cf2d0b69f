"""State that activation checkpointing restores before a part runs again: layers' uses, buffers.

Random bits are a function of a layer's use in the step, and dropout counts its draws in a buffer.
So a second run with the same uses and buffers draws the same bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["REPLAY", "RunLog"]


class RunLog:
    """What the first run drew: the uses of layers in order, and buffers before a write."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        self.buffers: dict[int, tuple[Any, Any]] = {}

    def before_write(self, buffer: Any) -> None:
        """Note a buffer's values; of several writes, before the first."""
        if id(buffer) not in self.buffers:
            self.buffers[id(buffer)] = buffer, buffer.data.copy()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Fill the log with what runs inside; logs nest."""
        REPLAY.logs = (*REPLAY.logs, self)
        try:
            yield
        finally:
            REPLAY.logs = REPLAY.logs[:-1]

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Run again what was logged; buffers are then as they were before."""
        now = [(buffer, buffer.data.copy()) for buffer, _ in self.buffers.values()]
        before, REPLAY.uses = REPLAY.uses, iter(self.uses)
        logs, REPLAY.logs = REPLAY.logs, ()
        try:
            for buffer, data in self.buffers.values():
                buffer.assign_(data.copy())
            yield
        finally:
            for buffer, data in now:
                buffer.assign_(data)
            REPLAY.uses, REPLAY.logs = before, logs


class _Replay(threading.local):
    """Of this thread: the logs that are being filled, and the uses that are repeated, if any."""

    logs: tuple[RunLog, ...] = ()
    uses: Iterator[int] | None = None


REPLAY = _Replay()
