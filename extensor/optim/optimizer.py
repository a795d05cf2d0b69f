"""What every optimizer shares: parameter groups, options, state, and steps.

What an optimizer defines of its own is in `extensor.optim.rule`. Parameters are updated in one call
of a backend (`multi_tensor`), in a captured step (`captured`), inside backward (`in_backward`), or
one by one (`one_tensor`), each in a file of `extensor.optim`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from extensor.autograd.mode import post_accumulate_grad_hook
from extensor.autograd.row_gradient import RowGradient
from extensor.autograd.tensor import ExTensor
from extensor.backends.capture import HostMirrors, StepCapture
from extensor.dtypes import bfloat16, float32
from extensor.errors import unknown_name
from extensor.notebook import card, table
from extensor.optim.captured import step_captured
from extensor.optim.in_backward import row_sums, single_updates
from extensor.optim.multi_tensor import Parts, step_multi_tensor
from extensor.optim.one_tensor import step_one, values_of_weight
from extensor.optim.params import MASTER, Option, ParamGroup, ParamState, check_param, wide_dtype
from extensor.optim.rule import UpdateRule
from extensor.optim.state_dict import load_state, state_of
from extensor.optim.states import STATES, Stored, state_stream

__all__ = ["Optimizer"]

Array = Any


class Optimizer(UpdateRule):
    """Base of the optimizers.

    Args:
        params: tensors that require gradients; or (name, tensor) pairs such as
            ``model.named_parameters()`` gives, whose names then show in state and messages; or
            groups, mappings with ``"params"`` and the options that differ from the others'.
        states: how the state is stored between steps, a name in `extensor.optim.states.STATES`:
            ``"float32"``, ``"bfloat16"`` or ``"mxfp8_e4m3"``. Updates compute in float32 in any
            case.
        masters: whether a parameter in bfloat16, float16 or blocks gets a float32 master copy,
            which takes the updates and is rounded into the parameter after each. False: a parameter
            in bfloat16 or blocks is its own master: an update computes in float32 and is rounded
            into it stochastically, since most updates are smaller than half a step of it.
        defaults: the options of groups that do not set them.

    Raises:
        TypeError, ValueError: for no parameters, one given twice, one that requires no gradient or
            is no dense float tensor, and for options that are unknown or out of range.

    >>> layer = et.nn.Linear(4, 2)
    >>> groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias]}]
    >>> optimizer = et.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    >>> [group.options["weight_decay"] for group in optimizer.groups]
    [0.1, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        states: str = "float32",
        masters: bool = True,
        **defaults: Option,
    ) -> None:
        if not isinstance(states, str) or states not in STATES:
            raise ValueError(unknown_name("kind of optimizer state", states, STATES))
        self.states, self.masters = states, masters
        self._mirrors = HostMirrors()
        self._cache: dict[str, Any] = {}  # what the backend derives from multi-tensor updates
        if isinstance(params, ExTensor):
            raise TypeError("params: expected a list of tensors, got one tensor; pass [tensor]")
        if hasattr(params, "parameters"):
            raise TypeError("params: expected tensors, got a module; pass model.parameters()")
        self.groups: list[ParamGroup] = []
        given = list(params)
        if not given:
            raise ValueError(
                "params: expected at least one tensor, got none; was a generator used up?"
            )
        groups = given if isinstance(given[0], Mapping) else [{"params": given}]
        for group in groups:
            self._add_group(group, defaults)

    def __repr__(self) -> str:
        tensors = f"{len(self.params)} tensors of {sum(p.size for p in self.params):,} values"
        options = [
            ", ".join(f"{name}={value}" for name, value in group.options.items())
            for group in self.groups
        ]
        groups = options[0] if len(options) == 1 else f"{len(options)} groups"
        return f"{type(self).__name__}({tensors}, states={self.states!r}, {groups})"

    def _repr_html_(self) -> str:
        rows = [
            (index, len(g.members), f"{sum(p.size for p in g.params):,}", *g.options.values())
            for index, g in enumerate(self.groups)
        ]
        columns = ("group", "tensors", "values", *self.groups[0].options)
        facts = (("states", self.states), ("bytes of state", f"{self.nbytes:,}"))
        return card(type(self).__name__, facts, table(columns, rows))

    def __getstate__(self) -> dict[str, Any]:
        """Without what a backend derived from these arrays: a copy has other arrays."""
        return self.__dict__ | {"_cache": {}}

    def _add_group(self, group: Any, defaults: dict[str, Option]) -> None:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"params: expected tensors only, or mappings with 'params' only, got {group!r:.80}"
            )
        given = {name: value for name, value in group.items() if name != "params"}
        for name in given.keys() - defaults.keys():
            raise ValueError(unknown_name(f"option of {type(self).__name__}", name, defaults))
        options = {**defaults, **given}
        self._check_options(options)
        made = ParamGroup(options, float(options["lr"]))
        names = {m.name for g in self.groups for m in g.members}
        owned = {id(m.param) for g in self.groups for m in g.members}
        params = group["params"]
        for item in [params] if isinstance(params, ExTensor) else params:
            name, param = item if isinstance(item, tuple) else (str(len(names)), item)
            check_param(name, param)
            if id(param) in owned or name in names:
                raise ValueError(f"params: {name} is given twice; leave it out of one group")
            names.add(name)
            owned.add(id(param))
            fresh = self._fresh(param, len(owned) - 1, options)
            made.members.append(ParamState(name, param, param.shape, len(owned) - 1, fresh))
        if not made.members:
            raise ValueError("params: expected at least one tensor in each group, got none")
        self.groups.append(made)

    def _fresh(
        self, param: ExTensor, index: int, options: Mapping[str, Option]
    ) -> dict[str, Stored]:
        """The state a parameter starts with."""
        xp, wide = param.backend.xp, wide_dtype(param)
        arrays = {
            slot: STATES[self.states].pack(
                param.backend,
                xp.zeros(param.size, dtype=wide),
                state_stream(0, index, place),
                slot in self.squares,
            )
            for place, slot in enumerate(self.slots(options))
        }
        if param.dtype.numpy == wide:
            return arrays
        if self.masters:
            arrays[MASTER] = values_of_weight(param, wide).copy()
        elif not (param.is_blocked or param.dtype is bfloat16):
            raise ValueError(
                f"params: masters=False: expected parameters in float32, bfloat16 or blocks, got "
                f"{param.dtype.name}; leave masters out"
            )
        return arrays

    def step(self) -> None:
        """Update every parameter that has a gradient, in place.

        It also ends the step of the recipe that the parameters' layers are under: stochastic
        rounding draws other bits from here on (`RecipeState.step`).

        Raises:
            RuntimeError: if no parameter has a gradient.
            FloatingPointError: if a gradient holds NaN or Inf; `MXGradScaler.step` skips and counts
                such steps instead.
            ValueError: for options that were changed to something out of range, or that need
                state which was not kept; for a gradient of another shape, or of no floats.

        Nothing is updated after an error.

        While a step is captured (`extensor.capture`) nothing can wait for the gradients' check:
        updates stop at the first that is not finite, and the error follows.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer = et.optim.SGD([w], lr=0.5)
        >>> (3 * w).sum().backward()
        >>> optimizer.step()
        >>> w.tolist()
        [-0.5]
        """
        self.step_unless(None)

    def step_unless(self, bad: Array | bool | None) -> None:
        """`step`, where the caller has checked the gradients: nothing is done if ``bad``.

        Args:
            bad: whether a gradient is not finite; while a step is captured, uint32 of shape () on
                the device. None: the gradients are checked here.

        Raises:
            RuntimeError, ValueError, FloatingPointError: as `step`.

        >>> w = et.nn.Parameter([1.0])
        >>> w.sum().backward()
        >>> et.optim.SGD([w], lr=0.5).step_unless(True)
        >>> w.tolist()
        [1.0]
        """
        if bad is True:
            self._end_step(None)  # the next batch rounds with bits of its own, too
            return
        ready: list[tuple[ParamGroup, Parts]] = [
            (group, [(m, m.param.grad) for m in group.members if m.param.grad is not None])
            for group in self.groups
        ]
        parts = [part for _, mine in ready for part in mine]
        if not parts:
            raise RuntimeError(
                "step: expected gradients, got none; call loss.backward() first, with a loss "
                "computed from these parameters"
            )
        self._check_step()
        for member, _ in parts:
            _check_gradient(member)
        if (capture := parts[0][0].param.backend.capturing) is not None:
            step_captured(self, ready, bad, capture)
            self._end_step(capture)
            return
        self._mirrors.settle()
        for group, member, grad in step_multi_tensor(self, ready, bad is None):
            step_one(self, member, grad, group.options)
        self._end_step(None)

    @contextlib.contextmanager
    def step_in_backward(self) -> Iterator[None]:
        """Make the step inside ``backward``: each parameter moves once its gradient is complete.

        The gradient is let go then, so that no full set of gradients is ever held. The update has
        the bits of `step` after ``backward``. What needs all gradients at once, such as clipping
        their norm or skipping a step where one is not finite, cannot go with it.

        Of an embedding the rows that were looked up are summed, and the update reads zeros
        elsewhere: no array as large as the table is made. All rows move, by decay and momentum.

        Returns:
            A context manager for one backward pass; options as `step` finds them.

        Raises:
            RuntimeError: at the end, if no parameter got a gradient.
            FloatingPointError: at the end, if a gradient holds NaN or Inf. Parameters whose
                gradients came before have moved then, and the message says how many.
            ValueError: as `step`.

        It may be captured (`extensor.capture`) with what `step` may.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer = et.optim.SGD([w], lr=0.5)
        >>> with optimizer.step_in_backward():
        ...     (3 * w).sum().backward()
        >>> w.tolist(), w.grad
        ([-0.5], None)
        """
        self._check_step()
        capture = self.params[0].backend.capturing
        updates = single_updates(self, capture)
        members = {
            id(m.param): (n, m) for n, group in enumerate(self.groups) for m in group.members
        }

        def final(leaf: ExTensor) -> None:
            if id(leaf) in members and leaf.grad is not None:
                number, member = members[id(leaf)]
                _check_gradient(member)
                updates.add(number, member, leaf.grad)
                leaf.grad = None

        def rows(leaf: ExTensor, grad: RowGradient) -> bool:
            found = members.get(id(leaf))
            sums = None if found is None else row_sums(self, found[1], grad)
            if found is None or sums is None:
                return False
            updates.add(*found, sums)
            return True

        with post_accumulate_grad_hook(final, rows):
            yield
        if not updates.end():
            raise RuntimeError("step_in_backward: expected a backward pass to these parameters")
        self._end_step(capture)

    def _check_step(self) -> None:
        """Refuse rules and options that this step cannot go with."""
        for state in self._recipe_states():
            state.check_saved()
        for group in self.groups:
            self._check_options(group.options)
            missing = set(self.slots(group.options)) - group.members[0].arrays.keys()
            if missing:
                raise ValueError(
                    f"step: the options now need {sorted(missing)}, which was not kept from the "
                    "start; make a new optimizer with these options"
                )

    def _end_step(self, capture: StepCapture | None) -> None:
        """Begin the next step of every recipe that the parameters were used under."""
        for state in self._recipe_states():
            if capture is None:
                state.next_step()
            else:
                state.next_captured_step(capture)

    def _recipe_states(self) -> list[Any]:
        """The states of the recipes that the parameters were used under."""
        found = [getattr(param, "recipe_state", None) for param in self.params]
        return list({id(state): state for state in found if state is not None}.values())

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None.

        >>> w = et.nn.Parameter([1.0])
        >>> w.sum().backward()
        >>> et.optim.SGD([w], lr=0.5).zero_grad()
        >>> w.grad is None
        True
        """
        for group in self.groups:
            for member in group.members:
                member.param.grad = None

    def replace_params(self, replacement: Callable[[ExTensor], ExTensor]) -> None:
        """Update other tensors in the place of the parameters, from a fresh state.

        Args:
            replacement: gives the tensor that takes a parameter's place, name and options.

        >>> w, other = et.nn.Parameter([1.0]), et.nn.Parameter([2.0, 3.0])
        >>> optimizer = et.optim.SGD([w], lr=0.5)
        >>> optimizer.replace_params(lambda param: other)
        >>> optimizer.params[0].shape
        (2,)
        """
        for group in self.groups:
            for place, old in enumerate(group.members):
                param = replacement(old.param)
                check_param(old.name, param)
                fresh = self._fresh(param, old.index, group.options)
                group.members[place] = ParamState(old.name, param, param.shape, old.index, fresh)
        self._cache.clear()

    @property
    def params(self) -> list[ExTensor]:
        """Every parameter, in the order given."""
        return [param for group in self.groups for param in group.params]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored between steps: state and master weights."""
        members = [member for group in self.groups for member in group.members]
        return sum(int(stored.nbytes) for m in members for stored in m.arrays.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, flat.

        Returns:
            Numpy arrays (`QuantArray`s where the state is stored in blocks) under
            ``state.<param>.<slot>``; ints under ``step.<param>``; the options and ``base_lr`` under
            ``group.<i>.<option>``; the optimizer's name under ``optimizer``. Arrays have the
            parameters' shapes (blocks run along the flat parameter) and are copies.

        >>> optimizer = et.optim.SGD([("w", et.nn.Parameter([1.0]))], lr=0.1, momentum=0.9)
        >>> sorted(optimizer.state_dict())[-2:]
        ['state.w.momentum', 'step.w']
        """
        self._mirrors.settle()
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, for the same parameters and options.

        Args:
            state: from an optimizer of the same class, parameters and kind of state.

        Raises:
            ValueError: if names, shapes, dtypes or kinds of values differ; nothing is changed then.

        >>> one, other = (et.optim.Adam([et.nn.Parameter([1.0])], lr=lr) for lr in (0.1, 0.2))
        >>> other.load_state_dict(one.state_dict())
        >>> other.groups[0].options["lr"]
        0.1
        """
        load_state(self, state)


def _check_gradient(member: ParamState) -> None:
    """Refuse a gradient of another shape, or of no floats."""
    grad = member.param.grad
    assert grad is not None
    known = grad.dtype is float32 or grad.dtype.is_float
    if not known or grad.data.shape != member.shape:
        raise ValueError(
            f"step: expected a float gradient of shape {member.shape} for {member.name}, got "
            f"{grad.dtype.name} of shape {grad.shape}"
        )
