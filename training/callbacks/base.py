"""What a callback is, and what it sees of the run it watches.

Callbacks hold no state that a resumed run would miss: what they need of the past they read from
`RunView.history`, which the checkpoint carries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from extensor.distributed import Communicator
from extensor.inspect import SlotHealth
from extensor.optim import MXGradScaler
from extensor.quant.recipe_state import RecipeState

from ..batch import Batch
from ..config import RunConfig
from ..metrics import Scores
from ..micro_batches import MicroBatches
from ..parallel import RankGrid
from ..records import EpochReport, Position, StepReport

__all__ = ["Callback", "RunView"]


class RunView(Protocol):
    """What `training.loop.Trainer` shows of a run: to callbacks, and to what writes its result."""

    config: RunConfig
    out: Path
    ranks: Communicator
    grid: RankGrid
    parameter_count: int
    task: Any
    model: Any
    quant: RecipeState
    optimizer: Any
    scaler: MXGradScaler
    micro_batches: MicroBatches
    batches: int
    position: Position
    history: list[EpochReport]
    scores: Scores | None
    stop_reason: str | None
    diverged: str | None
    told_to_stop: bool
    graph: bool

    @property
    def last(self) -> Path:
        """Where its last checkpoint lies."""

    @property
    def health(self) -> tuple[SlotHealth, ...]:
        """What quantizing did to each operand of each layer in the epoch so far."""

    def stop(self, reason: str) -> None:
        """End the run after this epoch."""

    def save(self, path: Path) -> None:
        """Write a checkpoint; all ranks call this."""

    def fresh_model(self) -> Any:
        """The model as it is before the first step."""

    def forward(self, batch: Batch, smoothing: float = 0.0) -> tuple[Any, Any, Any]:
        """Scores, labels in a row, and the mean loss of a batch."""

    def whole(self) -> AbstractContextManager[None]:
        """Keep the weights whole inside, where each rank has a part; all ranks call it."""


class Callback:
    """Watches a run. Override what is needed; `RunView.stop` ends the run after the epoch.

    Attributes:
        whole_batches: whether it needs all rows of batches, not those alone that its rank computes.
    """

    whole_batches = False

    def on_start(self, run: RunView) -> None:
        """Before the first step; `RunView.history` is not empty if the run is resumed."""

    def sees_step(self, step: int) -> bool:
        """Whether `on_step` must come before the next step begins; captured steps may be ahead."""
        return False

    def sees_gradients(self, step: int) -> bool:
        """Whether a captured run makes this step in Python, so that `on_gradients` is called."""
        return False

    def on_gradients(self, run: RunView, batch: Batch) -> None:
        """In every step that Python makes, before clipping and the update."""

    def on_step(self, run: RunView, report: StepReport) -> None:
        """After every step; with captured steps some steps later, see `sees_step`."""

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        """After every epoch and its evaluation; ``report`` is the last of `RunView.history`."""

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        """At the end, come what may; ``result`` is None after an interrupt or an error."""
