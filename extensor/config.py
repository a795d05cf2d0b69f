"""The table of EXTENSOR_* environment variables. None of them changes a code or a scale.

Without the core convolutions add their float products in another order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["FLAGS", "Flag", "default_device", "num_threads", "require_core", "use_core"]


@dataclass(frozen=True)
class Flag:
    """One environment variable that extensor reads.

    Attributes:
        name: of the variable.
        default: the value where it is not set.
        doc: what it does.

    Example:
        >>> from extensor.config import FLAGS
        >>> FLAGS["device"].name, FLAGS["device"].default
        ('EXTENSOR_DEVICE', 'cpu')
    """

    name: str
    default: str
    doc: str

    def read(self) -> str:
        """The variable's value, or the default where it is not set.

        Returns:
            The text, not checked.

        Example:
            >>> from extensor.config import FLAGS
            >>> FLAGS["core"].read() in ("0", "1")
            True
        """
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
    """Whether the C++ core may be used: EXTENSOR_CORE.

    Returns:
        True unless the variable is 0.

    Raises:
        ValueError: for a value other than 0 and 1.

    Example:
        >>> from extensor.config import use_core
        >>> isinstance(use_core(), bool)
        True
    """
    return _switch(FLAGS["core"])


def require_core() -> bool:
    """Whether a missing C++ core is an error: EXTENSOR_REQUIRE_CORE.

    Returns:
        True if the variable is 1.

    Raises:
        ValueError: for a value other than 0 and 1.

    Example:
        >>> from extensor.config import require_core
        >>> isinstance(require_core(), bool)
        True
    """
    return _switch(FLAGS["require_core"])


def default_device() -> str:
    """The device of tensors that are made without one: EXTENSOR_DEVICE.

    Returns:
        A name of the backend registry, not checked.

    Example:
        >>> from extensor.config import default_device
        >>> default_device() in ("cpu", "cuda")
        True
    """
    return FLAGS["device"].read()


def num_threads() -> int:
    """How many threads the C++ core uses: EXTENSOR_NUM_THREADS.

    Returns:
        1 or more; as many as CPUs where the variable is 0.

    Raises:
        ValueError: if the variable is not a whole number, 0 or more.

    Example:
        >>> from extensor.config import num_threads
        >>> num_threads() >= 1
        True
    """
    flag = FLAGS["threads"]
    text = flag.read()
    if not text.isdigit():
        raise ValueError(f"{flag.name}: expected a whole number (0: one per CPU), got {text!r}")
    return int(text) or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
