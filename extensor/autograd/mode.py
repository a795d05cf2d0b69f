"""Switches of a thread: whether operations are recorded (`no_grad`), and who observes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

__all__ = [
    "MODE", "Observer", "Storage", "enable_grad", "is_grad_enabled", "no_grad",
    "post_accumulate_grad_hook",
]  # fmt: skip


class Observer(Protocol):
    """What is told of each recorded operation and of gradients: a ledger of memory."""

    def recorded(self, node: Any) -> None:
        """A node was recorded."""

    def replaced(self, array: Any, kept: Any) -> None:
        """Something smaller is kept in place of an array."""

    def accumulated(self, leaves: Sequence[Any]) -> None:
        """Leaves have got their gradients."""


class Storage(Protocol):
    """How what operations keep for backward is stored."""

    def pack(self, node: Any) -> None:
        """Store what a recorded node keeps."""

    def of(self, slot: str) -> Any:
        """What stores arrays of a slot in fewer bits; None: they are kept as they are."""


RowHook = Callable[[Any, Any], bool]


class _Mode(threading.local):
    enabled: bool = True  # the class attribute is where each new thread starts
    recording: Any = None  # the `extensor.autograd.recording.Recording` under way
    observer: Observer | None = None
    storage: Storage | None = None
    saves_again: bool = False  # what `Primitive.saved_again` makes is made again, not kept
    grad_hook: Callable[[Any], None] | None = None
    row_hook: RowHook | None = None  # what a leaf's gradient is offered to, where it is only rows


MODE = _Mode()


def is_grad_enabled() -> bool:
    """Whether operations of this thread are recorded for `backward`.

    Returns:
        True unless inside ``with et.no_grad():``.

    Example:
        >>> et.is_grad_enabled()
        True
    """
    return MODE.enabled


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing inside ``with et.no_grad():``, in this thread. Also a decorator.

    Returns:
        A context manager.

    Example:
        >>> x = et.ones(2, requires_grad=True)
        >>> with et.no_grad():
        ...     y = x * 2
        >>> y.requires_grad
        False
    """
    before, MODE.enabled = MODE.enabled, False
    try:
        yield
    finally:
        MODE.enabled = before


@contextlib.contextmanager
def enable_grad() -> Iterator[None]:
    """Record again inside ``with et.enable_grad():``, in this thread. Also a decorator.

    Returns:
        A context manager.

    Example:
        >>> with et.no_grad(), et.enable_grad():
        ...     et.is_grad_enabled()
        True
    """
    before, MODE.enabled = MODE.enabled, True
    try:
        yield
    finally:
        MODE.enabled = before


@contextlib.contextmanager
def post_accumulate_grad_hook(
    hook: Callable[[Any], None], rows: RowHook | None = None
) -> Iterator[None]:
    """Call ``hook(leaf)`` in `backward`, in this thread, as soon as a leaf's ``.grad`` is final.

    The rest of the backward pass runs on afterwards, so what the hook starts overlaps with it. The
    gradient's memory may be shared until backward ends: the hook writes nothing to it, and copies
    what it keeps. It may set ``.grad`` to None.

    Args:
        hook: takes the leaf, once in each backward pass that reaches it.
        rows: offered the leaf and the `RowGradient`, where that is all of the gradient; True: it
            has used it, and there is no ``.grad``. False, or without it: ``hook`` is called.

    Returns:
        A context manager.

    Example:
        >>> from extensor.autograd.mode import post_accumulate_grad_hook
        >>> first, last = et.ones(1, requires_grad=True), et.ones(1, requires_grad=True)
        >>> order = []
        >>> with post_accumulate_grad_hook(order.append):
        ...     (first.exp() * last).sum().backward()
        >>> [leaf is last for leaf in order]
        [True, False]
    """
    before = MODE.grad_hook, MODE.row_hook
    MODE.grad_hook, MODE.row_hook = hook, rows
    try:
        yield
    finally:
        MODE.grad_hook, MODE.row_hook = before
