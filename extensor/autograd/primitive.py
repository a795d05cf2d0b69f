"""The declaration of an operation, and the registry of all operations.

A *primitive* computes on raw arrays and has a rule for its gradient. A *composite*
is written in other operations and needs no rule. A decorator on the public function
declares either; the function checks its arguments and calls `apply`. A declaration
holds sample inputs and bad inputs: tests enumerate the registry, and no list of
operations is written by hand.

    @primitive(
        forward=lambda backend, x: backend.xp.exp(x),
        vjps=(lambda g, out, x: g * out,),
        reads="output",
        samples=lambda rng: [Sample((rng.normal(size=(3, 4)),))],
    )
    def exp(x: ExTensor) -> ExTensor:
        return apply("exp", x)

The vector-Jacobian products are written in public operations on ExTensors, so a
gradient can be differentiated again. ``fused_vjp`` may do the same on raw arrays
for speed, when no graph of the gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from extensor.dtypes import LEVEL_BLOCKED, LEVEL_FLOAT, LEVEL_HALF, LEVEL_OTHER

__all__ = [
    "BLOCKED_RULES",
    "FUNCTIONS",
    "OPS",
    "PRIMITIVES",
    "BadInput",
    "Declaration",
    "Op",
    "Primitive",
    "Sample",
    "blocked_rule",
    "composite",
    "primitive",
]

Check = Literal["gradgrad", "forward"]
Reads = Literal["both", "inputs", "output", "nothing"]
Vjp = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


class Declaration(Protocol):
    """A decorator that registers a function and gives it back."""

    def __call__(self, function: Function, /) -> Function:
        """Register the function; gives it back."""


@dataclass(frozen=True)
class Sample:
    """Arguments that an op accepts.

    Attributes:
        args: the function's arguments. float64 arrays become tensors and are differentiated;
            other arrays become tensors; lists of arrays are taken the same way; the rest is passed
            on.
        kwargs: keyword arguments, passed on as they are.
        expected: what the function gives, in numpy, where that is cheap to say.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: Any = None


@dataclass(frozen=True)
class BadInput:
    """Arguments that an op refuses, with the error and a fragment of its message."""

    args: tuple[Any, ...]
    error: type[Exception]
    match: str
    kwargs: dict[str, Any] = field(default_factory=dict)


Samples = Callable[["np.random.Generator"], Iterable[Sample]]


@dataclass(frozen=True, eq=False)
class Primitive:
    """One operation of the engine.

    Attributes:
        name: its name in the registry.
        forward: ``forward(backend, *arrays, **params)`` -> array, or (array, saved) if ``saves``.
        vjps: one per input: ``vjp(g, out, *inputs, **params)`` on ExTensors, giving the gradient
            of that input; None for an input without one (indices, conditions). An op of any number
            of inputs declares a single function that takes ``index`` first, in ``vjp_at``.
        vjp_at: ``vjp_at(index, g, out, *inputs, **params)``, instead of ``vjps``.
        fused_vjp: ``fused_vjp(backend, g, out, inputs, needs, **params)`` on raw arrays, giving a
            sequence with the gradient of each input that ``needs`` names, None elsewhere. Must not
            write to what it is given, but may return ``g`` itself. With ``overwrites``, which the
            backend's `overwriting_vjps` alone are given, it may write over ``g``. The first
            gradient may be a `RowGradient`.
        new_gradients: the first gradient of ``fused_vjp`` is a new array that nothing else holds.
        no_vjp: why there is no gradient.
        once: why the gradient cannot be differentiated again; then ``fused_vjp`` alone suffices.
            ``vjp_at`` may give the gradient of single inputs that can, and None for the others.
        broadcasts: the inputs broadcast against each other, so gradients are summed to the
            inputs' shapes by the engine.
        reads: what the gradient reads of the inputs' and the output's *values*; the rest is not
            kept alive (an input that is not read still shows its shape and dtype).
        saves: forward gives (out, saved); ``saved`` reaches the gradient as a keyword.
        released: ``released(saved)`` gives the numbers of inputs whose values the gradient does not
            read, because of what forward saved; None: of no input.
        own_input: how the first input is kept is for `Recipe.saved_input` alone to say.
        saved_again: ``saved_again(backend, *inputs)`` makes what forward saved, as large as an
            input; it is not kept where inputs are stored in blocks, or a module recomputes what is
            cheap. None: always kept.
        slots: what the inputs are called by rules of how they are stored (`SAVED_SLOTS`); the last
            name is that of all further inputs.
        out_slot: likewise the output.
        smaller_output: ``smaller_output(backend, out)`` makes of the output what the gradient
            reads, in fewer bytes, an `extensor.autograd.storage.Kept`. It is kept instead where a
            layer that reads the output lets it go. None: the output is kept.
        to_float: integers are converted to float32 first.
        mixed: inputs may have several float dtypes; forward decides the result's dtype.
        totals: 16-bit floats give float32, which is not rounded.
        moves: only moves data, so all dense dtypes are taken as they are; blocked tensors are
            refused unless there is a `blocked_rule`.
        view: the output may share memory with the first input.
        takes_blocked: forward reads QuantArrays.
        replay: ``replay(backend, arrays, params)`` gives a shorter way to the forward's result for
            arrays of the same shapes, ``run(*arrays)``, or None; for captured steps on the CPU.
    """

    name: str
    forward: Callable[..., Any]
    vjps: tuple[Vjp | None, ...] = ()
    vjp_at: Callable[..., Any] | None = None
    fused_vjp: Callable[..., Sequence[Any]] | None = None
    no_vjp: str = ""
    once: str = ""
    broadcasts: bool = False
    reads: Reads = "both"
    saves: bool = False
    released: Callable[[Any], Collection[int]] | None = None
    own_input: bool = False
    new_gradients: bool = False
    saved_again: Callable[..., Any] | None = None
    slots: tuple[str, ...] = ("input",)
    out_slot: str = "output"
    smaller_output: Callable[[Any, Any], Any] | None = None
    to_float: bool = False
    mixed: bool = False
    totals: bool = False
    moves: bool = False
    view: bool = False
    takes_blocked: bool = False
    replay: Callable[..., Any] | None = None
    # Derived, so that the hot path reads attributes only.
    direct: int = field(init=False)
    reads_inputs: bool = field(init=False)
    reads_output: bool = field(init=False)
    differentiable: bool = field(init=False)
    every_vjp: bool = field(init=False)
    as_given: bool = field(init=False)

    def __post_init__(self) -> None:
        rule = bool(self.vjps or self.vjp_at or (self.fused_vjp and self.once))
        if rule == bool(self.no_vjp):
            raise ValueError(
                f"primitive {self.name!r}: expected either VJPs or no_vjp='why there are none', "
                f"got {'both' if rule else 'neither'}"
            )
        level = (
            LEVEL_BLOCKED if self.takes_blocked
            else LEVEL_HALF if self.moves
            else LEVEL_FLOAT if self.to_float
            else LEVEL_OTHER
        )  # fmt: skip
        for name, value in (
            ("direct", level),
            ("reads_inputs", self.reads in ("both", "inputs")),
            ("reads_output", self.reads in ("both", "output")),
            ("differentiable", rule),
            ("every_vjp", None not in self.vjps),
            ("as_given", self.mixed and self.takes_blocked),
        ):
            object.__setattr__(self, name, value)

    def slot(self, index: int) -> str:
        """The name of input ``index`` in rules of how it is stored."""
        return self.slots[min(index, len(self.slots) - 1)]

    def has_vjp(self, index: int) -> bool:
        """Whether input ``index`` gets a gradient, and so takes part in promotion."""
        return not self.vjps or self.vjps[index] is not None


@dataclass(frozen=True, eq=False)
class Op:
    """One public operation: the function, its primitive if it is one, and what tests it.

    Attributes:
        name: its name in the registry.
        function: the public function.
        primitive: the primitive it applies; None for a composite.
        samples: gives arguments that it accepts.
        errors: arguments that it refuses.
    """

    name: str
    function: Callable[..., Any]
    primitive: Primitive | None
    samples: Samples
    errors: tuple[BadInput, ...]

    @property
    def check(self) -> Check:
        """Its test: ``"gradgrad"`` (first and second derivatives) or ``"forward"``.

        ``"forward"`` where there is no gradient, where the gradient has none, and for codes, which
        finite differences cannot move. The declaration decides; a test cannot be left out.
        """
        rule = self.primitive
        if rule is None or (rule.differentiable and not rule.once and not rule.takes_blocked):
            return "gradgrad"
        return "forward"


OPS: dict[str, Op] = {}
"""Every operation, primitive or composite, by name."""

PRIMITIVES: dict[str, Primitive] = {}
"""Every primitive, by name."""

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What ExTensor's methods call: the public function of every operation, and ``backward``."""

BLOCKED_RULES: dict[str, Callable[..., Any]] = {}
"""What a primitive means on blocked tensors, where it is not dequantize-and-compute."""


def _add(op: Op) -> None:
    if op.name in OPS:
        raise ValueError(f"there is already an operation named {op.name!r}")
    OPS[op.name] = op
    FUNCTIONS[op.name] = op.function
    if op.primitive is not None:
        PRIMITIVES[op.name] = op.primitive


def primitive(
    *,
    forward: Callable[..., Any],
    samples: Samples,
    errors: tuple[BadInput, ...] = (),
    name: str | None = None,
    **declared: Any,
) -> Declaration:
    """Declare the decorated public function as a primitive; the arguments are `Primitive`'s.

    Raises:
        ValueError: if there is neither a VJP nor a reason for having none, or the name is taken.
    """

    def register(function: Function) -> Function:
        title = name or function.__name__.strip("_")
        made = Primitive(title, forward, **declared)
        _add(Op(title, function, made, samples, errors))
        return function

    return register


def composite(
    *,
    samples: Samples,
    errors: tuple[BadInput, ...] = (),
    name: str | None = None,
) -> Declaration:
    """Declare the decorated public function as an operation written in other operations."""

    def register(function: Function) -> Function:
        title = name or function.__name__.strip("_")
        _add(Op(title, function, None, samples, errors))
        return function

    return register


def blocked_rule(name: str) -> Declaration:
    """Declare what primitive ``name`` does where an input is blocked.

    The function is called with the inputs and params of `apply` and returns an ExTensor.
    Without a rule a computing primitive dequantizes and a data-moving one refuses.
    """

    def register(function: Function) -> Function:
        if name in BLOCKED_RULES:
            raise ValueError(f"there is already a blocked rule for {name!r}")
        BLOCKED_RULES[name] = function
        return function

    return register
