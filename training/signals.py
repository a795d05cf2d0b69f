"""Handle SIGINT (Ctrl-C) and SIGTERM while something runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["on_signals"]


@contextmanager
def on_signals(handler: Callable[[int, Any], Any], once: bool = False) -> Iterator[None]:
    """Call ``handler`` on both signals; with ``once``, a second one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        if once:
            signal.signal(number, usual[signal.Signals(number)])
        handler(number, frame)

    for number in usual:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, before in usual.items():
            signal.signal(number, before)
