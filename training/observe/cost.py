"""What a run costs: seconds, joules and the most bytes it held, watched from outside.

Joules are the GPU's own counter (NVML, nvmlDeviceGetTotalEnergyConsumption), of the whole card;
without NVML there are none. Bytes are the GPU memory in use on the card, or a process's largest
resident set on a CPU (VmHWM).
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .devices import Place, card, nvml

__all__ = ["Cost", "Meter"]


@dataclass(frozen=True)
class Cost:
    """Totals of a run, over all its parts.

    Attributes:
        seconds: of wall-clock time, starting and evaluating included.
        joules: None where no counter is.
        peak_bytes: None where nothing could be read.
    """

    seconds: float = 0.0
    joules: float | None = None
    peak_bytes: int | None = None

    def __add__(self, other: Cost) -> Cost:
        both = [j for j in (self.joules, other.joules) if j is not None]
        peaks = [p for p in (self.peak_bytes, other.peak_bytes) if p is not None]
        return Cost(
            self.seconds + other.seconds, sum(both) if both else None, max(peaks, default=None)
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, path: Path) -> Cost:
        """What a file says; nothing where there is none."""
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()


class Meter:
    """Watches a process.

    Args:
        pid: of the process.
        device: "cpu" or "cuda".
        place: which GPU; None is the first that this process sees.
    """

    def __init__(self, pid: int, device: str, place: Place = None) -> None:
        self._pid = pid
        self._card = card(place) if device != "cpu" else None
        self.restart()

    def restart(self) -> None:
        """Forget what was until now."""
        self._peak: int | None = None
        self._start, self._energy = time.monotonic(), self._millijoules()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def in_use(self) -> int | None:
        """Bytes that the card holds now, or that the process held at most on a CPU."""
        if self._card is None:
            return _resident(self._pid)
        return int(nvml().nvmlDeviceGetMemoryInfo(self._card).used)

    def look(self) -> None:
        """Note what the process holds now."""
        if (found := self.in_use()) is not None:
            self._peak = max(self._peak or 0, found)

    def cost(self) -> Cost:
        """Since the start."""
        used = None if self._energy is None else ((self._millijoules() or 0) - self._energy) / 1000
        return Cost(self.seconds, used, self._peak)

    def rate(self, steps: int, labels: int, empty: int | None) -> dict[str, float | None]:
        """What the steps since the start cost: labels a second, joules a label, bytes.

        Args:
            steps: that were made.
            labels: in all of them.
            empty: what `in_use` said before anything was built; its bytes do not count.
        """
        cost, used = self.cost(), self.in_use()
        return {
            "per_second": labels / cost.seconds,
            "joules": None if cost.joules is None else cost.joules / labels,
            "bytes": None if used is None or empty is None else used - empty,
            "milliseconds": 1000 * cost.seconds / steps,
        }

    def _millijoules(self) -> int | None:
        if self._card is None:
            return None
        return int(nvml().nvmlDeviceGetTotalEnergyConsumption(self._card))


def _resident(pid: int) -> int | None:
    """The largest resident set of a process so far, in bytes; None where /proc does not say."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    row = next((line for line in text.splitlines() if line.startswith("VmHWM")), None)
    return None if row is None else 1024 * int(row.split()[1])
