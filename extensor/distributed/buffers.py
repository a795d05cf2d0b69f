"""What a collective takes: arrays that fit, of a communicator that is open."""

from __future__ import annotations

from typing import Any

__all__ = ["check_buffers", "closed"]


def check_buffers(what: str, size: int, send: Any, recv: Any, send_parts: int) -> None:
    """Refuse arrays that a collective cannot take.

    Args:
        what: the collective, for the message.
        size: how many ranks there are.
        send: the array that is sent.
        recv: the array that receives; ``send`` again for a collective in place.
        send_parts: how many times as many values as ``recv`` the array ``send`` must have: 1,
            ``size``, or -``size`` where it must have ``size`` times fewer.

    Raises:
        ValueError: if they are not contiguous, differ in dtype or do not fit.

    >>> import numpy as np
    >>> from extensor.distributed.buffers import check_buffers
    >>> check_buffers("all_gather", 2, np.zeros(3), np.zeros(6), -2)
    """
    for name, array in (("send", send), ("recv", recv)):
        strides = getattr(array, "flags", None)
        if strides is not None and not strides.c_contiguous:
            raise ValueError(f"{what}: {name}: expected a C-contiguous array, got strides")
    if send.dtype != recv.dtype:
        raise ValueError(f"{what}: expected one dtype, got {send.dtype} and {recv.dtype}")
    fits = (
        send.size * -send_parts == recv.size
        if send_parts < 0
        else (send.size == recv.size * send_parts)
    )
    if not fits:
        relation = f"{abs(send_parts)} times {'fewer' if send_parts < 0 else 'as many'} values"
        raise ValueError(
            f"{what}: on {size} ranks send must have {relation} as recv, got {send.size} and "
            f"{recv.size}"
        )
    if send_parts == 1 and what == "all_to_all" and send.size % size:
        raise ValueError(f"{what}: expected a multiple of {size} values, got {send.size}")


def closed(what: str) -> str:
    """What is said of a collective after its communicator's close.

    >>> from extensor.distributed.buffers import closed
    >>> closed("barrier")[:40]
    'barrier: expected a communicator that is'
    """
    return (
        f"{what}: expected a communicator that is open, got one after its close; the way out: "
        "split anew"
    )
