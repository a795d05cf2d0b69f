"""Why a backend has no fast path for a call: an object, so that no one mistakes it for a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Unsupported"]


@dataclass(frozen=True)
class Unsupported:
    """What a function that chooses a kernel returns where none fits.

    It is false, so that ``if not plan: return plan`` hands the reason on, and a type checker knows
    that ``plan`` is a plan afterwards.

    Attributes:
        reason: what the kernels lack, as a phrase that can follow "generic: ".
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        return False
