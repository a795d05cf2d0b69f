"""The table of EXTENSOR_* environment variables. None of them changes a bit of any result."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["FLAGS", "Flag", "default_device", "num_threads", "require_core", "use_core"]


@dataclass(frozen=True)
class Flag:
    """One environment variable that extensor reads."""

    name: str
    default: str
    doc: str

    def read(self) -> str:
        """The variable's value, or the default where it is not set."""
        return os.environ.get(self.name, self.default)


FLAGS = {
    "core": Flag("EXTENSOR_CORE", "1", "0 uses the numpy path even where the C++ core is built"),
    "require_core": Flag(
        "EXTENSOR_REQUIRE_CORE", "0", "1 makes a missing C++ core an error instead of a slower path"
    ),
    "device": Flag("EXTENSOR_DEVICE", "cpu", "the default device of new tensors: cpu or cuda"),
    "threads": Flag("EXTENSOR_NUM_THREADS", "0", "threads of the C++ core; 0 is one per CPU"),
}
"""The flags, by short name."""


def _switch(flag: Flag) -> bool:
    """A flag that is 0 or 1.

    Raises:
        ValueError: if it is anything else.
    """
    text = flag.read()
    if text not in ("0", "1"):
        raise ValueError(f"{flag.name}: expected 0 or 1, got {text!r}")
    return text == "1"


def use_core() -> bool:
    """Whether the C++ core may be used."""
    return _switch(FLAGS["core"])


def require_core() -> bool:
    """Whether a missing C++ core is an error."""
    return _switch(FLAGS["require_core"])


def default_device() -> str:
    """The device of tensors that are made without one, a name of the backend registry."""
    return FLAGS["device"].read()


def num_threads() -> int:
    """Threads that the C++ core should use, at least 1.

    Raises:
        ValueError: if EXTENSOR_NUM_THREADS is not a whole number, 0 or more.
    """
    flag = FLAGS["threads"]
    text = flag.read()
    if not text.isdigit():
        raise ValueError(f"{flag.name}: expected a whole number (0: one per CPU), got {text!r}")
    return int(text) or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
