"""LSTM and GRU, made of `Linear` layers, which a recipe quantizes like any other.

Each layer and direction has two. ``input`` multiplies a whole sequence at once. ``hidden``
multiplies the state in one step after the other, with its own random bits in each step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.nn import init
from extensor.nn.checks import check_probability, check_size
from extensor.nn.container import ModuleList
from extensor.nn.dropout import Dropout
from extensor.nn.linear import Linear
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.elementwise import sigmoid
from extensor.ops.joining import concatenate, split, stack
from extensor.ops.shape import flip
from extensor.ops.trigonometry import tanh

__all__ = ["GRU", "LSTM", "Recurrent", "RecurrentCell"]

State = tuple[ExTensor, ...]
"""The state of one direction of one layer, each tensor (B, H)."""


class RecurrentCell(Module):
    """One direction of one layer: its two matrix products, for all gates side by side.

    Attributes:
        input: Linear of the layer's input; hidden: Linear of the last state.
    """

    def __init__(self, size: int, hidden: int, gates: int, bias: bool, rng: Seed) -> None:
        generator, bound = init.as_rng(rng), 1.0 / math.sqrt(hidden)
        self.input = Linear(size, gates * hidden, bias, generator)
        self.hidden = Linear(hidden, gates * hidden, bias, generator)
        for layer in (self.input, self.hidden):
            layer.weight = Parameter(init.uniform(layer.weight.shape, bound, generator))
            if layer.bias is not None:
                layer.bias = Parameter(init.uniform(layer.bias.shape, bound, generator))


class Recurrent(Module):
    """Base of LSTM and GRU: layers, directions, and the loop over the sequence.

    Attributes:
        cells: a `RecurrentCell` for each layer, forward and backward in turn where there are both.
    """

    gates: ClassVar[int]
    states: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        rng: Seed = None,
    ) -> None:
        self.input_size = check_size("input_size", input_size)
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.num_layers = check_size("num_layers", num_layers)
        self.batch_first, self.directions = batch_first, 2 if bidirectional else 1
        if check_probability("dropout", dropout) and num_layers == 1:
            raise ValueError(
                f"dropout: expected 0 with one layer, got {dropout}: it acts between layers only; "
                "use a Dropout after this layer, or more layers"
            )
        generator = init.as_rng(rng)
        sizes = [input_size] + [hidden_size * self.directions] * (num_layers - 1)
        self.cells = ModuleList(
            [
                RecurrentCell(size, hidden_size, self.gates, bias, generator)
                for size in sizes
                for _ in range(self.directions)
            ]
        )
        self.dropout = Dropout(dropout, generator) if dropout else None

    @abstractmethod
    def _step(self, given: ExTensor, cell: RecurrentCell, state: State) -> State:
        """The state after a step, the output first; ``given`` is the input's product (B, G H)."""

    def _run(self, x: ExTensor, state: State) -> tuple[ExTensor, State]:
        """Run all layers on (T, B, I) from first states, each (layers * directions, B, H).

        Returns:
            The output (T, B, directions * H), and the last states.
        """
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer and self.dropout is not None:
                x = self.dropout(x)
            outputs = []
            for direction in range(self.directions):
                place = layer * self.directions + direction
                first = tuple(s[place] for s in state)
                output, final = self._walk(self.cells[place], x, first, direction == 1)
                outputs.append(output)
                last.append(final)
            x = outputs[0] if self.directions == 1 else concatenate(outputs, axis=-1)
        return x, tuple(stack(each) for each in zip(*last, strict=True))

    def _walk(self, cell: Any, x: ExTensor, state: State, backward: bool) -> tuple[ExTensor, State]:
        given = cell.input(x)
        outputs: list[ExTensor] = []
        for one in unbind(given)[:: -1 if backward else 1]:
            state = self._step(one, cell, state)
            outputs.append(state[0])
        joined = stack(outputs)
        return flip(joined, 0) if backward else joined, state

    def _sequence(self, x: ExTensor, state: Sequence[ExTensor] | None) -> tuple[ExTensor, State]:
        """Check the input and the first states: the input as (T, B, I), and states or zeros."""
        name = type(self).__name__
        tensors_only(name, x)
        order = "(B, T, {0})" if self.batch_first else "(T, B, {0})"
        if x.ndim != 3 or x.shape[-1] != self.input_size:
            raise ValueError(
                f"{name}: expected an input of shape {order.format(self.input_size)}, got "
                f"{x.shape}; a single sequence takes an axis more, by expand_dims"
            )
        x = x.swapaxes(0, 1) if self.batch_first else x
        if not x.shape[0]:
            raise ValueError(f"{name}: expected a sequence of one step or more, got {x.shape}")
        expected = (self.num_layers * self.directions, x.shape[1], self.hidden_size)
        if state is None:
            zeros = ExTensor(np.zeros(expected, np.float32)).to(x.device).astype(x.dtype)
            return x, (zeros,) * self.states
        tensors_only(name, *state)
        if len(state) != self.states or any(s.shape != expected for s in state):
            raise ValueError(
                f"{name}: expected {self.states} first state(s) of shape {expected} (layers times "
                f"directions, batch, hidden_size), got {[s.shape for s in state]}; leave them out "
                "for zeros"
            )
        return x, tuple(state)

    def _ordered(self, output: ExTensor) -> ExTensor:
        """The output with its axes in the order of the input's."""
        return output.swapaxes(0, 1) if self.batch_first else output

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        options = f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        options += ", batch_first=True" if self.batch_first else ""
        options += ", bidirectional=True" if self.directions == 2 else ""
        return f"{self.input_size}, {self.hidden_size}{options}"


class LSTM(Recurrent):
    """Long short-term memory, several layers of it, in one direction or both.

    i, f, o = sigmoid and g = tanh of W x + b + R h + c, for each gate its own; the cell becomes
    c' = f c + i g and the output h' = o tanh(c') (Hochreiter and Schmidhuber, Neural Computation 9
    (1997); with forget gates, Gers et al., Neural Computation 12 (2000)).

    Args:
        input_size: I, length of each step's vector.
        hidden_size: H, length of output and cell.
        num_layers: layers, each on the output of the one before.
        bias: whether the products have biases.
        batch_first: inputs and outputs are (B, T, ...) and not (T, B, ...); states never are.
        dropout: probability of zeroing each output of every layer but the last, in training.
        bidirectional: whether each layer also runs from the end to the beginning; outputs are then
            2 H long, forward first.
        rng: draws the initial weights, uniform in +-1 / sqrt(H); see `init.as_rng`.

    Attributes:
        cells: a `RecurrentCell` for each layer and direction, its gates in the order i, f, g, o.

    Raises:
        ValueError: for sizes below 1, or dropout with one layer; when called, for an input that is
            not (T, B, I) or has no step, or states of other shapes.

    >>> lstm = et.nn.LSTM(8, 16, num_layers=2, batch_first=True, rng=0)
    >>> y, (h, c) = lstm(et.zeros((4, 10, 8)))
    >>> y.shape, h.shape, c.shape
    ((4, 10, 16), (2, 4, 16), (2, 4, 16))
    """

    gates, states = 4, 2

    def forward(
        self, x: ExTensor, state: tuple[ExTensor, ExTensor] | None = None
    ) -> tuple[ExTensor, tuple[ExTensor, ExTensor]]:
        """Run the whole sequence.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``.
            state: the first (h, c), each (layers * directions, B, H); None, zeros.

        Returns:
            The outputs of all steps, (T, B, directions * H) or batch first, and the last (h, c).

        >>> lstm = et.nn.LSTM(8, 16, rng=0)
        >>> y, (h, c) = lstm.forward(et.zeros((10, 4, 8)))
        """
        output, (h, c) = self._run(*self._sequence(x, state))
        return self._ordered(output), (h, c)

    def _step(self, given: ExTensor, cell: RecurrentCell, state: State) -> State:
        """(h, c) after a step."""
        h, c = state
        i, f, g, o = split(given + cell.hidden(h), 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(c), c


class GRU(Recurrent):
    """Gated recurrent unit, several layers of it, in one direction or both.

    r, z = sigmoid of W x + b + R h + c, for each gate its own; n = tanh(W x + b + r (R h + c));
    h' = (1 - z) n + z h (Cho et al., arXiv 1406.1078, with the reset after the product, as in
    cuDNN).

    Args:
        input_size: I, length of each step's vector.
        hidden_size: H, length of the output, which is the only state.
        num_layers, bias, batch_first, dropout, bidirectional, rng: as for `LSTM`.

    Attributes:
        cells: a `RecurrentCell` for each layer and direction, its gates in the order r, z, n.

    Raises:
        ValueError: as `LSTM`.

    >>> gru = et.nn.GRU(8, 16, bidirectional=True, rng=0)
    >>> y, h = gru(et.zeros((10, 4, 8)))
    >>> y.shape, h.shape
    ((10, 4, 32), (2, 4, 16))
    """

    gates, states = 3, 1

    def forward(self, x: ExTensor, state: ExTensor | None = None) -> tuple[ExTensor, ExTensor]:
        """Run the whole sequence.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``.
            state: the first h, (layers * directions, B, H); None, zeros.

        Returns:
            The outputs of all steps, (T, B, directions * H) or batch first, and the last h.

        >>> gru = et.nn.GRU(8, 16, rng=0)
        >>> y, h = gru.forward(et.zeros((10, 4, 8)), et.zeros((1, 4, 16)))
        """
        output, (h,) = self._run(*self._sequence(x, None if state is None else (state,)))
        return self._ordered(output), h

    def _step(self, given: ExTensor, cell: RecurrentCell, state: State) -> State:
        """(h,) after a step."""
        (h,) = state
        r, z, n = split(given, 3, axis=-1)
        r_hidden, z_hidden, n_hidden = split(cell.hidden(h), 3, axis=-1)
        keep = sigmoid(z + z_hidden)
        fresh = tanh(n + sigmoid(r + r_hidden) * n_hidden)
        return (fresh + keep * (h - fresh),)


def unbind(x: ExTensor) -> list[ExTensor]:
    """The T slices of x along its first axis.

    The gradient of a slice is as large as the tensor it was cut from. Cutting halves of halves
    costs T log T; T cuts from the whole would cost T^2.
    """
    length = x.shape[0]
    if length == 1:
        return [x[0]]
    return unbind(x[: length // 2]) + unbind(x[length // 2 :])
