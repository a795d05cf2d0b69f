"""What every optimizer shares: parameter groups, master weights, state, the walk over memory.

An optimizer says which arrays it keeps for each parameter (`Optimizer.slots`) and how a slice of a
flat parameter moves (`Optimizer.update`). The base class walks each parameter in segments that fit
the cache together with their state, so that an update of a dozen numpy calls reads main memory
once. Where a backend updates many parameters in one call, `extensor.optim.multi_tensor` uses that.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from extensor.autograd.apply import wrap
from extensor.autograd.mode import no_grad, post_accumulate_grad_hook
from extensor.autograd.tensor import ExTensor
from extensor.backends.capture import HostMirrors, StepCapture
from extensor.backends.protocol import FiniteQuery
from extensor.backends.registry import get as get_backend
from extensor.dtypes import bfloat16, float32
from extensor.errors import layout_error, unknown_name
from extensor.notebook import card, table
from extensor.optim.captured import step_captured
from extensor.optim.in_backward import single_updates
from extensor.optim.multi_tensor import step_multi_tensor
from extensor.optim.params import (
    MASTER,
    Option,
    ParamGroup,
    ParamState,
    Segment,
    check_param,
    check_range,
)
from extensor.optim.states import STATES, WEIGHT_SLOT, Stored, state_stream
from extensor.quant.array import QuantArray

__all__ = ["Optimizer"]

Array = Any

SEGMENT = 1 << 15
"""Elements in a segment on the CPU: six float32 arrays of it, 768 KiB, fit a level-2 cache."""

KERNEL_SEGMENT = 1 << 20
"""Elements where a kernel makes the whole update in one pass: enough for its threads."""

Range = tuple[float, float]
FRACTION: Range = (0.0, 1.0)
POSITIVE: Range = (math.ulp(0.0), math.inf)
NOT_NEGATIVE: Range = (0.0, math.inf)


class Optimizer(ABC):
    """Base of the optimizers.

    Args:
        params: tensors that require gradients; or (name, tensor) pairs such as
            ``model.named_parameters()`` gives, whose names then show in state and messages; or
            groups, mappings with ``"params"`` and the options that differ from the others'.
        states: how the state is stored between steps, a name in `extensor.optim.states.STATES`:
            ``"float32"``, ``"bfloat16"`` or ``"mxfp8_e4m3"``. Updates compute in float32 in any
            case.
        masters: whether a bfloat16 or float16 parameter gets a float32 master copy, which takes the
            updates and is rounded into the parameter after each. False: a bfloat16 parameter is its
            own master: an update computes in float32 and is rounded into it stochastically, since
            most updates are smaller than half a step of bfloat16.
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

    squares: ClassVar[tuple[str, ...]] = ("square",)
    """Slots whose values are 0 or more and whose roots divide."""

    ranges: ClassVar[Mapping[str, Range]] = MappingProxyType(
        {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}
    )
    """Options that are numbers: the least value allowed, and the bound below which they stay."""

    multi_tensor: bool = False
    """True if a backend's kernel makes the whole `update`, and `update_multi_tensor` of many."""

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
        xp, data = param.backend.xp, param.data
        wide = _wide(data)
        arrays = {
            slot: STATES[self.states].pack(
                param.backend,
                xp.zeros(data.size, dtype=wide),
                state_stream(0, index, place),
                slot in self.squares,
            )
            for place, slot in enumerate(self.slots(options))
        }
        if data.dtype != wide and not self.masters and param.dtype is not bfloat16:
            raise ValueError(
                f"params: masters=False: expected float32 or bfloat16 parameters, got "
                f"{param.dtype.name}; leave masters out"
            )
        if data.dtype != wide and self.masters:
            arrays[MASTER] = data.reshape(-1).astype(wide)
        return arrays

    @abstractmethod
    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """Names of the arrays kept for each parameter under these options.

        Args:
            options: a group's options.

        Returns:
            The names, in the order of the arrays' random streams.

        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1, momentum=0.9)
        >>> optimizer.slots(optimizer.groups[0].options)
        ('momentum',)
        """

    @abstractmethod
    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """Move one flat segment, in place.

        Args:
            backend: the backend of the arrays.
            part: the arrays, with two of scratch.
            options: the group's options.
            step: how many updates this parameter has had, this one included.

        >>> class SignSGD(et.optim.Optimizer):
        ...     def slots(self, options):
        ...         return ()
        ...     def update(self, backend, part, options, step):
        ...         part.weight[...] -= options["lr"] * backend.xp.sign(part.grad)
        >>> w = et.nn.Parameter([1.0, 2.0])
        >>> w.square().sum().backward()
        >>> SignSGD([w], lr=0.5).step()
        >>> w.tolist()
        [0.5, 1.5]
        """

    def factors(self, options: Mapping[str, Any], step: int) -> Mapping[str, float]:
        """The numbers that a backend's kernel multiplies by in a parameter's numbered update.

        Only optimizers with `multi_tensor` have them; their `update` uses the same ones.

        Args:
            options: a group's options.
            step: how many updates this parameter has had, this one included.

        Returns:
            The numbers by name, as the backend's kernel expects them.

        Raises:
            TypeError: in an optimizer with `multi_tensor` that does not define them.

        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1)
        >>> optimizer.factors(optimizer.groups[0].options, step=1)["lr"]
        0.1
        """
        raise TypeError(f"{type(self).__name__} says multi_tensor: expected factors of its own")

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """Update whole parameters, in place, in one call of the backend.

        Args:
            backend: the backend of the arrays.
            parts: weight, gradient and state by slot of each: C-contiguous arrays of one size,
                whatever their shapes, weight and gradient float32, or both bfloat16; the state as
                it is stored.
            factors: of each, from `factors`.
            how: more for the backend: what `Backend.adam_multi_tensor` takes besides.

        Returns:
            Whether the gradients were finite, known once the backend has checked them.

        Raises:
            TypeError: in an optimizer with `multi_tensor` that does not define it.

        >>> import numpy as np
        >>> from extensor.backends.registry import get
        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.5)
        >>> w, g = np.ones(2, np.float32), np.ones(2, np.float32)
        >>> factors = optimizer.factors(optimizer.groups[0].options, step=1)
        >>> query = optimizer.update_multi_tensor(get("cpu"), [(w, g, {})], [factors])
        >>> w.tolist()
        [0.5, 0.5]
        """
        raise TypeError(
            f"{type(self).__name__} says multi_tensor: expected its update_multi_tensor"
        )

    def prepare(
        self, xp: Any, whole: Segment, options: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        """Compute what needs a whole tensor: the gradient and the options that `update` gets.

        Args:
            xp: the array module.
            whole: the arrays, of the parameter's shape. Of them only the state may be written to.
            options: the group's options.

        Returns:
            The gradient and the options, here as they were given.

        >>> import numpy as np
        >>> from extensor.optim.params import Segment
        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1)
        >>> optimizer.prepare(np, Segment(np.ones(1), np.ones(1), {}), {"lr": 0.1})
        (array([1.]), {'lr': 0.1})
        """
        return whole.grad, options

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
        ready = [
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
        for member, grad in parts:
            _check_gradient(member, grad)
        if (capture := parts[0][0].param.backend.capturing) is not None:
            step_captured(self, ready, bad, capture)
            self._end_step(capture)
            return
        self._mirrors.settle()
        for group, member, grad in step_multi_tensor(self, ready, bad is None):
            self._step_one(member, grad, group.options)
        self._end_step(None)

    @contextlib.contextmanager
    def step_in_backward(self) -> Iterator[None]:
        """Make the step inside ``backward``: each parameter moves once its gradient is complete.

        The gradient is let go then, so that no full set of gradients is ever held. The update has
        the bits of `step` after ``backward``. What needs all gradients at once, such as clipping
        their norm or skipping a step where one is not finite, cannot go with it.

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
                _check_gradient(member, leaf.grad)
                updates.add(number, member, leaf.grad)
                leaf.grad = None

        with post_accumulate_grad_hook(final):
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

    def _step_one(self, member: ParamState, grad: ExTensor, options: Mapping[str, Any]) -> None:
        param, xp, cast = member.param, member.param.backend.xp, member.param.backend.cast
        member.step += 1
        kind, wide = STATES[self.states], _wide(param.data)
        state = {
            slot: kind.unpack(param.backend, stored, slot in self.squares).astype(wide, copy=False)
            for slot, stored in member.arrays.items()
            if slot != MASTER
        }
        master = member.arrays.get(MASTER)
        own = master is None and param.data.dtype != wide  # the parameter is its own master
        flat = cast(_flat_view(param.data), wide) if master is None else master
        whole = Segment(
            flat.reshape(param.shape),
            cast(grad.data, flat.dtype),
            {slot: a.reshape(param.shape) for slot, a in state.items()},
        )
        g, options = self.prepare(xp, whole, options)
        g = g.reshape(-1)
        most = KERNEL_SEGMENT if self.multi_tensor else SEGMENT
        length = min(most, flat.size) if xp is np else flat.size
        one, two = xp.empty(length, flat.dtype), xp.empty(length, flat.dtype)
        for begin in range(0, flat.size, max(length, 1)):
            part = slice(begin, begin + length)
            weight = flat[part]
            segment = Segment(
                weight,
                g[part],
                {slot: a[part] for slot, a in state.items()},
                (one[: weight.size], two[: weight.size]),
            )
            self.update(param.backend, segment, options, member.step)
        for place, (slot, values) in enumerate(state.items()):
            stream = state_stream(member.step, member.index, place)
            member.arrays[slot] = kind.pack(param.backend, values, stream, slot in self.squares)
        if own:
            stream = state_stream(member.step, member.index, WEIGHT_SLOT)
            flat = STATES[bfloat16.name].pack(param.backend, flat, stream, square=False)
        with no_grad():
            param.assign_(cast(flat.reshape(param.shape), param.data.dtype))

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
        state: dict[str, Any] = {"optimizer": type(self).__name__}
        for i, group in enumerate(self.groups):
            state[f"group.{i}.base_lr"] = group.base_lr
            state |= {f"group.{i}.{name}": value for name, value in group.options.items()}
            for member in group.members:
                state[f"step.{member.name}"] = member.step
                for slot, stored in member.arrays.items():
                    host = _moved(stored, member.param.backend, "cpu")
                    whole = isinstance(host, QuantArray)
                    state[f"state.{member.name}.{slot}"] = (
                        host if whole else host.reshape(member.param.shape)
                    )
        return state

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
        mine = self.state_dict()
        stored = (np.ndarray, QuantArray)
        arrays = [{k: v for k, v in s.items() if isinstance(v, stored)} for s in (mine, state)]
        message = layout_error("this optimizer state", *arrays)
        if message:
            raise ValueError(message)
        scalars = {k: v for k, v in state.items() if not isinstance(v, stored)}
        for name in sorted(scalars.keys() | (mine.keys() - arrays[0].keys())):
            got, expected = scalars.get(name), mine.get(name)
            if type(got) is not type(expected) or (name == "optimizer" and got != expected):
                raise ValueError(
                    f"this optimizer state does not fit: {name}: expected "
                    f"{expected if name == 'optimizer' else type(expected).__name__}, got {got!r}; "
                    "use the one this optimizer wrote"
                )
        options = [
            {name: scalars[f"group.{i}.{name}"] for name in group.options}
            for i, group in enumerate(self.groups)
        ]
        for group_options in options:
            self._check_options(group_options)
        for i, group in enumerate(self.groups):
            group.base_lr, group.options = scalars[f"group.{i}.base_lr"], options[i]
            for member in group.members:
                member.step = scalars[f"step.{member.name}"]
                for slot in member.arrays:
                    host = state[f"state.{member.name}.{slot}"]
                    flat = host if isinstance(host, QuantArray) else host.reshape(-1)
                    fresh = _moved(flat, get_backend("cpu"), member.param.device)
                    if member.param.backend.xp is np:
                        member.arrays[slot] = fresh
                        continue
                    old = member.arrays[slot]
                    for array, values in zip(_parts(old), _parts(fresh), strict=True):
                        array[...] = values  # a captured step writes to these arrays

    def _check_options(self, options: Mapping[str, Option]) -> None:
        """Refuse options out of range; subclasses add what `ranges` cannot say."""
        for name, (low, below) in self.ranges.items():
            if name in options:
                check_range(name, options[name], low, below)


def _check_gradient(member: ParamState, grad: ExTensor) -> None:
    """Refuse a gradient of another shape, or of no floats."""
    known = grad.dtype is float32 or grad.dtype.is_float
    if not known or grad.data.shape != member.shape:
        raise ValueError(
            f"step: expected a float gradient of shape {member.shape} for {member.name}, got "
            f"{grad.dtype.name} of shape {grad.shape}"
        )


def l2_gradient(xp: Any, part: Segment, decay: float) -> Array:
    """The segment's gradient plus ``decay`` times the weight, in its last scratch array."""
    if not decay:
        return part.grad
    out = part.scratch[-1]
    xp.multiply(part.weight, decay, out=out)
    out += part.grad
    return out


def _wide(data: Array) -> Any:
    """The precision in which a parameter is updated."""
    return np.float64 if data.dtype == np.float64 else np.float32


def _moved(stored: Stored, backend: Any, device: str) -> Stored:
    """A copy of what is stored on a backend, on a device."""
    return copy.deepcopy(wrap(stored, backend).to(device).data)


def _parts(stored: Stored) -> list[Array]:
    return list(stored.parts.values()) if isinstance(stored, QuantArray) else [stored]


def _flat_view(data: Array) -> Array:
    """The parameter's own memory as a vector where that may be written to, else a copy."""
    ours = data.flags.c_contiguous and getattr(data.flags, "writeable", True)
    return data.reshape(-1) if ours else data.reshape(-1).copy()
