"""`capture`: record a step, and replay it without Python: on a GPU, or inference on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from extensor.autograd.mode import MODE
from extensor.autograd.program import Program
from extensor.autograd.recording import Recording, recording
from extensor.autograd.tensor import ExTensor, wrap
from extensor.autograd.writes import REPLACED
from extensor.backends.capture import Graph

__all__ = ["CapturedStep", "capture"]

CHECK_EVERY = 64
"""Replays between two checks for errors; a check waits for the device."""


def capture(step: Callable[..., Any]) -> CapturedStep:
    """Make a step that is replayed without its Python.

    Each call makes one step, with the bits that ``step`` itself gives. On a GPU the first two calls
    for inputs of new shapes run Python; the third captures what is launched, and from then on only
    that is replayed, as a CUDA graph.

    On the CPU a call inside ``et.no_grad()`` is captured: the first three calls run Python and the
    calls of kernels are recorded, which later calls make again, those of small arrays (a decoded
    token's) in C++ without Python. They are recorded anew once a tensor there got other memory,
    as by ``load_state_dict``. Other calls on the CPU, such as
    training steps, are calls of ``step``.

    Apart from its arguments the step may depend on the recipe's ``step``, on learning rates, on
    tensors of parameters, optimizers and layers (whose memory stays the same), and on the state of
    an `MXGradScaler`. Everything else keeps the value that it had in the capture. Python inside
    ``step`` does not run again: it may read no value, and its own counters stop. The step must not
    add to gradients from before it: reset them in the step, as below.

    Args:
        step: takes tensors, gives a tensor, a tuple of tensors or None. Its optimizers are SGD,
            Adam or AdamW with float32 parameters and states.

    Returns:
        A callable with the same arguments and results; results are copies.

    Example:
        >>> model = nn.Linear(2, 1, rng=0)
        >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
        >>> def step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = et.mse(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> train = et.capture(step)
        >>> first, second = (train(et.ones((4, 2)), et.ones((4, 1))).item() for _ in range(2))
        >>> second < first
        True
    """
    return CapturedStep(step)


class _RecordedStep:
    """The step on the CPU for inputs of one shape: recorded twice, then repeated."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.calls = 0
        self.before: Recording | None = None
        self.program: Program | None = None
        self.outputs: Any = None
        self.replaced = REPLACED[0]

    @property
    def is_outdated(self) -> bool:
        """Whether a tensor got other memory since, as by `load_state_dict`."""
        return self.replaced != REPLACED[0]

    def __call__(self, tensors: tuple[ExTensor, ...]) -> Any:
        if self.program is not None:
            made = iter(self.program([tensor.data for tensor in tensors]))
            return _each(self.outputs, lambda like: wrap(next(made), like.backend))
        self.calls += 1
        if self.calls == 1:
            results = _each(self.step(*tensors), _copied)
            self.replaced = REPLACED[0]  # what the step itself replaces is refused below
            return results
        mine = tuple(_copied(tensor) for tensor in tensors)
        with recording([tensor.data for tensor in mine]) as found:
            results = _each(self.step(*mine), lambda tensor: tensor)
        if (before := self.before) is not None:
            given = () if results is None else results if isinstance(results, tuple) else (results,)
            arrays = [tensor.data for tensor in given]
            self.outputs = results  # first: another thread may repeat the program at once
            self.program = Program(before, found, arrays, tensors[0].backend)
        self.before = found if self.program is None else None
        found.forget()
        return _each(results, _copied)


class _ShapeGraph:
    """The step for inputs of one shape: its graph, and the memory that inputs are copied to."""

    def __init__(self, step: Callable[..., Any], graph: Graph) -> None:
        self.step, self.graph = step, graph
        self.calls = 0
        self.inputs: list[ExTensor] = []
        self.outputs: Any = None

    def __call__(self, tensors: tuple[ExTensor, ...]) -> Any:
        self.calls += 1
        try:
            return self._call(tensors)
        except BaseException:
            self.calls = 0 if self.outputs is None else self.calls
            raise

    def own(self, tensors: tuple[ExTensor, ...]) -> list[ExTensor]:
        """The memory that the graph reads, filled with these inputs."""
        if not self.inputs:
            self.inputs = self.graph.run(lambda: [_copied(tensor) for tensor in tensors])
        for mine, theirs in zip(self.inputs, tensors, strict=True):
            if mine is not theirs:
                mine.data[...] = theirs.data
                mine._count_write()  # what layers made of the batch before is of no use
        return self.inputs

    def _call(self, tensors: tuple[ExTensor, ...]) -> Any:
        self.own(tensors)
        if self.calls == 1:
            return self.graph.run(self._run)
        if self.calls == 2:
            return self.graph.warm_up(self._run)
        if self.outputs is None:
            self.outputs = (self.graph.capture(self._run),)
        self.graph.replay()
        if self.calls % CHECK_EVERY == 0:
            self.graph.check()
        return _each(self.outputs[0], _copied)

    def _run(self) -> Any:
        return _each(self.step(*self.inputs), lambda tensor: tensor.detach())


class CapturedStep:
    """A step from `capture`; it keeps a graph for each shape of its inputs."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._graphs: dict[Any, _ShapeGraph] = {}
        self._recorded: dict[Any, _RecordedStep] = {}

    def own(self, *inputs: ExTensor) -> tuple[ExTensor, ...]:
        """The memory that the step reads, filled with a batch: write the next batches there.

        A call with these tensors copies nothing, and no second batch takes memory on the GPU.

        Args:
            inputs: a batch, as a call takes it.

        Returns:
            Tensors of the same values, those of the step's graph; on the CPU the batch itself.

        Raises:
            TypeError: as a call does.

        >>> train = et.capture(lambda x: x + 1)
        >>> (x,) = train.own(et.zeros(2, device="cpu"))
        >>> x[...] = 3.0
        >>> train(x).tolist()
        [4.0, 4.0]
        """
        graph = self._graph(inputs)
        return inputs if graph is None else tuple(graph.own(inputs))

    def __call__(self, *inputs: ExTensor) -> Any:
        """One step.

        Raises:
            TypeError: if an argument is not a dense tensor without gradient, or there is none.
            RuntimeError: if the step does what cannot be captured, naming the line; nothing was
                updated then. If something changed that must keep its value of the capture.
            Exception: what an earlier replay found wrong, such as a label that is no class; no
                update was made since.
        """
        graph = self._graph(inputs)
        if graph is not None:
            return graph(inputs)
        if not MODE.enabled:
            key = _key(inputs)
            recorded = self._recorded.setdefault(key, _RecordedStep(self._step))
            if recorded.is_outdated:
                recorded = self._recorded[key] = _RecordedStep(self._step)
            return recorded(inputs)
        return _each(self._step(*inputs), lambda tensor: tensor.detach())

    def _graph(self, inputs: tuple[ExTensor, ...]) -> _ShapeGraph | None:
        """The graph for inputs of these shapes; None on the CPU, which has none."""
        for tensor in inputs:
            if not isinstance(tensor, ExTensor) or tensor.is_blocked or tensor.requires_grad:
                got = f"{tensor!r:.80}" if isinstance(tensor, ExTensor) else type(tensor).__name__
                raise TypeError(f"capture: expected dense tensors without gradients, got {got}")
        if not inputs:
            raise TypeError("capture: expected the step's batch as arguments, got none")
        key = _key(inputs)
        if key not in self._graphs:
            graph = inputs[0].backend.new_graph()
            if graph is None:
                return None
            self._graphs[key] = _ShapeGraph(self._step, graph)
        return self._graphs[key]

    @property
    def nbytes(self) -> int:
        """Memory of the GPU that the step's graphs keep, workspaces included; 0 on the CPU.

        Parameters, optimizers' states and all else from before the step do not count.
        """
        return sum(mine.graph.nbytes for mine in self._graphs.values())

    def check(self) -> None:
        """Raise what replays found wrong since the last check; waits for the device."""
        for mine in self._graphs.values():
            mine.graph.check()

    def close(self) -> None:
        """Let the graphs go, and their memory; the next call runs Python again, as the first did.

        A step with NCCL's collectives must be closed before its communicator goes, which would wait
        for the graph for ever.

        >>> train = et.capture(lambda x: x + 1)
        >>> train.close()
        """
        for mine in self._graphs.values():
            mine.graph.close()
        self._graphs.clear()
        self._recorded.clear()


def _key(inputs: tuple[ExTensor, ...]) -> Any:
    """Shapes, dtypes and devices of inputs: a graph for each."""
    return tuple((tensor.shape, tensor.dtype.name, tensor.device) for tensor in inputs)


def _copied(tensor: ExTensor) -> ExTensor:
    return wrap(tensor.data.copy(), tensor.backend)


def _each(results: Any, change: Callable[[ExTensor], ExTensor]) -> Any:
    """A tensor, a tuple or list of them, or None, each changed."""
    if results is None:
        return None
    if isinstance(results, ExTensor):
        return change(results)
    if isinstance(results, (tuple, list)) and all(isinstance(t, ExTensor) for t in results):
        return tuple(change(tensor) for tensor in results)
    raise TypeError(
        f"capture: expected a step that gives a tensor, a tuple of tensors or None, got "
        f"{type(results).__name__}"
    )
