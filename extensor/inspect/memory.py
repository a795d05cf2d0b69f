"""A ledger of the memory of arrays: the peak, and what held it, by kind, layer and tensor.

Every array that numpy or the C++ core allocates is logged when it is taken and given back, in the
bytes that were asked for; on a GPU, every block of cupy's pool. So the figures are exact, and need
no reading of the process's size. Not in them: what a kernel of the core takes for itself while it
runs, and arrays of other threads of Python.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.backends import registry
from extensor.inspect.table import Table
from extensor.nn.module import Module
from extensor.optim.optimizer import Optimizer

__all__ = ["KINDS", "Holder", "MemoryLedger", "MemoryReport", "memory_ledger"]

KINDS = ("weights", "gradients", "states", "saved", "workspaces")
"""Parameters and buffers; their gradients; what the optimizer keeps; what operations keep for
backward; the rest: results under way, gradients of activations, kernels' scratch."""

_GIVEN_BACK = -1
_NO_LABEL = -1  # a mark with it means that the block was given back


@dataclass(frozen=True)
class Holder:
    """What holds memory.

    Attributes:
        kind: one of `KINDS`.
        layer: the path of the layer or parameter; "" where there is none.
        what: the operation and the slot of its array (`SAVED_SLOTS`), as in "gelu_exact
            activation"; or the tensor's role.
        nbytes: bytes.

    >>> et.inspect.Holder("saved", "blocks.0.feed_forward", "gelu_exact activation", 4096).nbytes
    4096
    """

    kind: str
    layer: str
    what: str
    nbytes: int


@dataclass(eq=False)
class _Span:
    """The life of a block in the timeline, and what it held."""

    holder: Holder
    begin: int
    end: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """The memory of what ran under a ledger.

    Attributes:
        timeline: int64: bytes after each block that was taken or given back.

    >>> x = et.ones((64, 64), requires_grad=True)
    >>> with et.inspect.memory_ledger() as ledger:
    ...     y = x.exp()
    >>> [(h.what, h.nbytes) for h in ledger.report().holders]
    [('exp output', 16384)]
    """

    timeline: np.ndarray[Any, np.dtype[np.int64]]
    _spans: tuple[_Span, ...]

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return int(self.timeline[self.peak_at])

    @property
    def peak_at(self) -> int:
        """Where in the timeline the peak is."""
        return int(np.argmax(self.timeline))

    @property
    def holders(self) -> tuple[Holder, ...]:
        """What held memory at the peak, largest first."""
        return self.at(self.peak_at)

    def at(self, index: int) -> tuple[Holder, ...]:
        """What held memory at another time, largest first.

        Args:
            index: in the timeline.

        Returns:
            The holders.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     x = et.ones((16, 16))
        >>> [one.nbytes for one in ledger.report().at(-1)]
        [1024]
        """
        index = range(len(self.timeline))[index]
        found = [
            one.holder
            for one in self._spans
            if one.begin <= index and (one.end is None or one.end > index) and one.holder.nbytes
        ]
        return tuple(sorted(found, key=lambda one: -one.nbytes))

    def most(self, kind: str) -> int:
        """Where in the timeline one kind holds most.

        Args:
            kind: one of `KINDS`.

        Returns:
            The first such index.

        >>> x = et.ones((64, 64), requires_grad=True)
        >>> with et.inspect.memory_ledger() as ledger:
        ...     x.exp().sum().backward()
        >>> report = ledger.report()
        >>> sum(one.nbytes for one in report.at(report.most("saved")) if one.kind == "saved")
        16384
        """
        change = np.zeros(len(self.timeline) + 1, np.int64)
        for one in self._spans:
            if one.holder.kind == kind:
                change[one.begin] += one.holder.nbytes
                change[len(self.timeline) if one.end is None else one.end] -= one.holder.nbytes
        return int(np.argmax(np.cumsum(change[:-1])))

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind, in the order of `KINDS`.

        Returns:
            All kinds, also those with 0 bytes.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     pass
        >>> ledger.report().by_kind()["saved"]
        0
        """
        found = Counter[str]()
        for one in self.holders:
            found[one.kind] += one.nbytes
        return {kind: found[kind] for kind in KINDS}

    def table(self, rows: int = 20) -> Table:
        """The largest holders at the peak, those of one kind, layer and role together.

        Args:
            rows: how many.

        Returns:
            A table.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     pass
        >>> ledger.report().table().columns
        ('kind', 'layer', 'what', 'MB')
        """
        return holders_table(self.holders, rows)

    def timelines(self) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The timeline of each kind; together they are `timeline`.

        Returns:
            int64 arrays as long as `timeline`, in the order of `KINDS`.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     x = et.ones((16, 16))
        >>> list(ledger.report().timelines())
        ['weights', 'gradients', 'states', 'saved', 'workspaces']
        """
        changes = {kind: np.zeros(len(self.timeline), np.int64) for kind in KINDS}
        for one in self._spans:
            changes[one.holder.kind][one.begin] += one.holder.nbytes
            if one.end is not None:
                changes[one.holder.kind][one.end] -= one.holder.nbytes
        return {kind: np.cumsum(change) for kind, change in changes.items()}


def holders_table(holders: Sequence[Holder], rows: int = 20) -> Table:
    """The largest holders, those of one kind, layer and role together."""
    found = Counter[tuple[str, str, str]]()
    for one in holders:
        found[one.kind, one.layer, one.what] += one.nbytes
    lines = [(*key, f"{n / 1e6:.2f}") for key, n in found.most_common(rows)]
    return Table(("kind", "layer", "what", "MB"), tuple(lines))


def alike_table(holders: Sequence[Holder], rows: int = 20) -> Table:
    """The largest holders, those of one kind and role in numbered layers together."""
    found, layers = Counter[tuple[str, str, str]](), defaultdict[Any, set[str]](set)
    for one in holders:
        parts = ("*" if part.isdecimal() else part for part in one.layer.split("."))
        key = one.kind, ".".join(parts), one.what
        found[key] += one.nbytes
        layers[key].add(one.layer)
    lines = [
        (kind, layer, str(len(layers[kind, layer, what])), what, f"{n / 1e6:.2f}")
        for (kind, layer, what), n in found.most_common(rows)
    ]
    return Table(("kind", "layer", "layers", "what", "MB"), tuple(lines))


class MemoryLedger:
    """Logs blocks and what they are for; made by `memory_ledger`.

    Args:
        log: the device's log of blocks.

    >>> with et.inspect.memory_ledger() as ledger:
    ...     type(ledger).__name__
    'MemoryLedger'
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._labels: dict[tuple[str, str, str], int] = {}
        self._label_of: dict[int, tuple[str, str, str]] = {}
        self._before: dict[int, int] = {}  # sizes of blocks that were there at the start
        self._owners: list[weakref.ref[Any]] = []
        self._layers: list[str] = []
        self._names: dict[int, str] = {}

    def hold(self, array: Any, kind: str, layer: str, what: str) -> None:
        """Say what an array is for; views and arrays without memory of their own are fine.

        Args:
            array: an array, a `QuantArray`, or a tuple or list of them; others are ignored.
            kind: one of `KINDS`.
            layer: a path.
            what: the tensor's role.

        >>> x = et.ones(8)
        >>> with et.inspect.memory_ledger() as ledger:
        ...     ledger.hold(x.data, "weights", "", "x")
        >>> ledger.report().by_kind()["weights"]
        32
        """
        for one in _arrays(array):
            block, owner = _block(one)
            label = self._labels.setdefault((kind, layer, what), len(self._labels))
            if block not in self._before:
                self._before[block] = int(getattr(owner, "nbytes", 0) or owner.size)
                if isinstance(owner, np.ndarray):  # one from before the log ends without a word
                    gone = partial(self._gone, block)
                    self._owners.append(weakref.ref(owner, gone))
            self._label_of[block] = kind, layer, what
            self._log.mark(block, label)

    def _gone(self, block: int, owner: object) -> None:
        self._log.mark(block, _NO_LABEL)

    def watch(self, model: Module | None = None, optimizer: Optimizer | None = None) -> None:
        """Say what parameters, gradients and states are for, as they are now.

        Args:
            model: its parameters and buffers.
            optimizer: its states.

        >>> layer = et.nn.Linear(8, 8)
        >>> with et.inspect.memory_ledger() as ledger:
        ...     ledger.watch(layer)
        >>> ledger.report().by_kind()["weights"]
        288
        """
        if model is not None:
            for path, tensor in (*model.named_parameters(), *model.named_buffers()):
                self._names[id(tensor)] = path
                self.hold(tensor.data, "weights", path, "weight")
                if tensor.grad is not None:
                    self.hold(tensor.grad.data, "gradients", path, "gradient")
        for group in () if optimizer is None else optimizer.groups:
            for member in group.members:
                for slot, stored in member.arrays.items():
                    self.hold(stored, "states", member.name, slot)

    def recorded(self, node: Any) -> None:
        """See `extensor.autograd.mode.Observer`: what the operation keeps.

        Args:
            node: the recorded node.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     y = et.ones(4, requires_grad=True).exp()
        ...     ledger.recorded(y.node)    # as `apply` has done already
        """
        layer, name = self._layers[-1] if self._layers else "", node.primitive.name
        for i, (array, edge) in enumerate(zip(node.arrays, node.edges, strict=True)):
            if id(edge) not in self._names:  # a parameter is a weight
                self.hold(array, "saved", layer, f"{name} {node.primitive.slot(i)}")
        self.hold(node.out, "saved", layer, f"{name} {node.primitive.out_slot}")
        self.hold(node.saved, "saved", layer, f"{name} saved")

    def replaced(self, array: Any, kept: Any) -> None:
        """See `extensor.autograd.mode.Observer`: what is kept in place of an array is for the same.

        Args:
            array: the array.
            kept: what has ``arrays``.

        >>> x = et.ones((8, 8), requires_grad=True)
        >>> with et.inspect.memory_ledger() as ledger:
        ...     y = x.relu()
        ...     ledger.replaced(y.data, et.zeros(4).data)    # as a layer that lets y go does
        """
        for one in _arrays(array):
            if (label := self._label_of.get(_block(one)[0])) is not None:
                self.hold(kept, *label)

    def accumulated(self, leaves: Sequence[Any]) -> None:
        """See `extensor.autograd.mode.Observer`: the leaves' gradients.

        Args:
            leaves: tensors that have gradients.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     ledger.accumulated([])    # as ``backward`` does
        """
        for leaf in leaves:
            path = self._names.get(id(leaf), "")
            self.hold(leaf.grad.data, "gradients", path, "gradient")

    def report(self) -> MemoryReport:
        """What was held at the peak. A block has the label that it got last.

        Returns:
            The report.

        >>> with et.inspect.memory_ledger() as ledger:
        ...     x = et.zeros((256, 256))
        >>> ledger.report().peak // 1024
        256
        """
        return _replay(self._log.events(), list(self._labels), self._before)

    @contextlib.contextmanager
    def _layers_of(self, model: Module | None) -> Iterator[None]:
        """Know in which layer operations run."""
        removes: list[Callable[[], None]] = []

        def enter(path: str) -> Callable[[Module, Any], None]:
            return lambda module, args: self._layers.append(path)

        def leave(module: Module, output: Any) -> None:
            if self._layers:
                self._layers.pop()

        try:
            for path, module in () if model is None else model.named_modules():
                removes += [
                    module.register_forward_pre_hook(enter(path)),
                    module.register_forward_hook(leave),
                ]
            yield
        finally:
            for remove in removes:
                remove()
            self._layers.clear()


@contextlib.contextmanager
def memory_ledger(
    model: Module | None = None, optimizer: Optimizer | None = None, device: str = "cpu"
) -> Iterator[MemoryLedger]:
    """Log the memory of arrays in ``with et.inspect.memory_ledger(model) as ledger:``.

    Args:
        model: its parameters are weights, and what operations keep is told by its layers' paths.
        optimizer: its states are states.
        device: whose memory: "cpu" or "cuda".

    Returns:
        A context manager that gives a `MemoryLedger`; ask its ``report()`` after the block.

    Raises:
        RuntimeError: without the C++ core, or inside another ledger.

    >>> model = et.nn.Linear(32, 32, rng=0)
    >>> with et.inspect.memory_ledger(model) as ledger:
    ...     model(et.ones((8, 32))).sum().backward()
    >>> ledger.report().by_kind()["weights"]
    4224
    """
    log = registry.get(device).memory_log()
    ledger = MemoryLedger(log)
    with log:
        ledger.watch(model, optimizer)
        before, MODE.observer = MODE.observer, ledger
        try:
            with ledger._layers_of(model):
                yield ledger
        finally:
            MODE.observer = before
            ledger.watch(model, optimizer)


def _arrays(held: Any) -> Iterator[Any]:
    """The arrays in what an operation keeps."""
    if isinstance(held, (tuple, list)):
        for one in held:
            yield from _arrays(one)
    elif isinstance(held, Mapping):
        yield from _arrays(list(held.values()))
    elif isinstance(parts := getattr(held, "parts", None), dict):
        yield from parts.values()
    elif (arrays := getattr(held, "arrays", None)) is not None:
        yield from _arrays(arrays)
    elif hasattr(held, "nbytes") and hasattr(held, "shape") and held.nbytes:
        yield held


def _block(array: Any) -> tuple[int, Any]:
    """Where the memory of an array begins, and what owns it; of a view, that of its owner."""
    if isinstance(array, np.ndarray):
        while isinstance(base := array.base, np.ndarray):
            array = base
        return int(array.__array_interface__["data"][0]), array
    memory = array.data.mem  # of cupy
    return int(memory.ptr), memory


def _replay(
    events: np.ndarray[Any, Any], labels: Sequence[tuple[str, str, str]], before: Mapping[int, int]
) -> MemoryReport:
    rows = events.tolist()
    first = dict(reversed([(block, what) for block, what in rows]))
    # What is marked before it is taken was there at the start.
    live = {
        block: _Span(Holder("workspaces", "", "", before[block]), 0)
        for block, what in first.items()
        if what < _GIVEN_BACK
    }
    spans = list(live.values())
    timeline = [sum(span.holder.nbytes for span in spans)]
    for block, what in rows:
        if what < _GIVEN_BACK:
            if block in live:
                live[block].holder = Holder(*labels[int(-2 - what)], live[block].holder.nbytes)
            continue
        change = 0
        if (old := live.pop(block, None)) is not None:
            old.end, change = len(timeline), -old.holder.nbytes
        if what >= 0:
            live[block] = _Span(Holder("workspaces", "", "", what), len(timeline))
            spans.append(live[block])
            change += what
        timeline.append(timeline[-1] + change)
    return MemoryReport(np.array(timeline, np.int64), tuple(spans))
