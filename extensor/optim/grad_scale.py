"""MXGradScaler: a power-of-two loss scale, and other scale rules for tensors that saturate.

A power of two multiplies exactly. It changes every E8M0 block scale, and NVFP4's tensor scale, by
the same power, so that codes stay the same. A loss scale can therefore only help float16, casts
without a scale, and values at the ends of E8M0's range. A block-scaled tensor that saturates is
helped by another scale rule. So the scaler does both: it grows and backs off on non-finite
gradients, and where the recipe allows it changes a slot's rule from floor to rceil when too many of
its values saturate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.capture import HostMirror, HostMirrors, StepCapture
from extensor.backends.generic.optim import rescale
from extensor.inspect.health import SlotHealth, slot_health
from extensor.optim.clip import grad_arrays
from extensor.optim.optimizer import Optimizer
from extensor.quant.array import QuantStats
from extensor.quant.recipe import SLOTS
from extensor.quant.recipe_state import RecipeState, counts_from_rows
from extensor.quant.spec import QuantSpec
from extensor.schema import check

__all__ = ["GradScaleReport", "MXGradScaler"]

Array = Any
Key = tuple[str, str]


@dataclass(frozen=True)
class GradScaleReport:
    """What the scaler did so far.

    Attributes:
        scale: the loss scale now.
        good_steps: steps since the scale last changed.
        stepped: steps made.
        skipped: steps not made because of non-finite gradients.
        slots: one row per layer and slot with telemetry, in model order.

    >>> et.optim.MXGradScaler().report()
    GradScaleReport(scale=65536.0, good_steps=0, stepped=0, skipped=0, slots=())
    """

    scale: float
    good_steps: int
    stepped: int
    skipped: int
    slots: tuple[SlotHealth, ...]


class MXGradScaler:
    """Loss scaling in powers of two: ``scale``, backward, ``step``, ``update``, in every step.

    Args:
        recipe_state: the `RecipeState` whose telemetry is reported and whose slots may change
            their scale rule; None: the loss scale only.
        init_scale: the first scale.
        growth_factor: on the scale after ``growth_interval`` good steps in a row.
        backoff_factor: on the scale after a step with non-finite gradients.
        growth_interval: good steps, 1 or more.
        min_scale: the floor. All four scale numbers are powers of two.
        saturation_threshold: a slot with a floor scale switches to rceil when more than this
            share of its values saturated in an interval; in (0, 1). Only where the recipe has
            ``adaptive_scale_rule``. Of normally distributed values 0.8 % saturate under floor in
            mxfp4, 0.6 % in mxfp8_e4m3, 0.2 % in mxfp6_e2m3; under rceil none.
        saturation_interval: updates between two checks of saturation, 1 or more.

    Raises:
        ValueError: for a number out of range or no power of two.

    >>> w = et.nn.Parameter([1.0])
    >>> optimizer, scaler = et.optim.SGD([w], lr=0.5), et.optim.MXGradScaler()
    >>> scaler.scale((3 * w).sum()).backward()
    >>> scaler.step(optimizer)
    True
    >>> scaler.update()
    >>> w.tolist(), scaler.current_scale
    ([-0.5], 65536.0)
    """

    def __init__(
        self,
        recipe_state: RecipeState | None = None,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        saturation_threshold: float = 1e-3,
        saturation_interval: int = 100,
    ) -> None:
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("min_scale", min_scale),
        ):
            if not _is_power_of_two(value):
                raise ValueError(f"{name}: expected a power of two, got {value!r}")
        if growth_factor < 1 or backoff_factor > 1 or init_scale < min_scale:
            raise ValueError(
                "expected growth_factor >= 1, backoff_factor <= 1 and init_scale >= min_scale, got "
                f"{growth_factor}, {backoff_factor} and {init_scale} with floor {min_scale}"
            )
        for name, count in (
            ("growth_interval", growth_interval),
            ("saturation_interval", saturation_interval),
        ):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name}: expected an int, 1 or more, got {count!r}")
        if not 0.0 < saturation_threshold < 1.0:
            raise ValueError(
                f"saturation_threshold: expected a share in (0, 1), got {saturation_threshold!r}"
            )
        self.recipe_state = recipe_state
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.min_scale = float(min_scale)
        self.saturation_threshold = saturation_threshold
        self.saturation_interval = saturation_interval
        # The scale, good steps since it changed, steps made and skipped.
        self._state = np.array([init_scale, 0, 0, 0], np.float64)
        self._mirrors = HostMirrors()
        self._capture: StepCapture | None = None  # and the state in it, while a step is captured
        self._device: Array | None = None
        self._updates = 0
        self._switched: set[Key] = set()
        # Counts of the running interval, and what the telemetry showed at the last update.
        self._counts: dict[Key, QuantStats] = {}
        self._seen: dict[Key, QuantStats] = dict(recipe_state.telemetry) if recipe_state else {}
        # Within one step: whether gradients were not finite, by id of the unscaled optimizer; on
        # the device while the step is captured.
        self._bad: dict[int, bool | Array] = {}
        self._done: set[int] = set()

    @property
    def current_scale(self) -> float:
        """The loss scale in force; waits for a device that replays a captured step."""
        self._mirrors.settle()
        return float(self._state[0])

    @property
    def skipped(self) -> int:
        """Steps left out so far; waits for a device that replays a captured step."""
        self._mirrors.settle()
        return int(self._state[3])

    @property
    def _rule(self) -> tuple[float, float, float, float]:
        interval = float(self.growth_interval)
        return self.growth_factor, self.backoff_factor, interval, self.min_scale

    def scale(self, loss: ExTensor) -> ExTensor:
        """The loss times the scale, differentiable.

        Args:
            loss: of any shape.

        Returns:
            The tensor whose ``backward`` gives scaled gradients.

        Raises:
            TypeError: for what is no tensor.

        >>> et.optim.MXGradScaler(init_scale=8.0).scale(et.ExTensor(0.5)).item()
        4.0
        """
        if not isinstance(loss, ExTensor):
            raise TypeError(f"loss: expected an ExTensor, got {type(loss).__name__}")
        capture = loss.backend.capturing
        if capture is None:
            return loss * self.current_scale
        return loss * wrap(self._captured(capture)[0].astype(np.float32), loss.backend)

    def _captured(self, capture: StepCapture) -> Array:
        """The state on the device, where captured steps change it."""
        if self._device is None:
            capture.in_warm_up(self._mirrors.settle)  # other captures may have made steps
            state = capture.persistent(self._state)
            mirror = HostMirror(
                lambda: capture.write(state, self._state),
                lambda: np.copyto(self._state, capture.read(state)),
            )
            capture.mirror(self._mirrors, mirror)
            capture.on_failure(self._end)
            self._capture, self._device = capture, state
        return self._device

    def _end(self) -> None:
        """Forget the state of one step."""
        self._capture = self._device = None
        self._bad.clear()
        self._done.clear()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place; exact above the subnormals.

        Call it before clipping; otherwise `step` calls it.

        Args:
            optimizer: the owner of the gradients.

        Raises:
            RuntimeError: if it was already called in this step, or there are no gradients.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer, scaler = et.optim.SGD([w], lr=0.5), et.optim.MXGradScaler()
        >>> scaler.scale((3 * w).sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> w.grad.tolist()
        [3.0]
        """
        if id(optimizer) in self._bad:
            raise RuntimeError("unscale_: already called in this step; call update() after step()")
        grads = grad_arrays(optimizer.params)
        if not grads:
            raise RuntimeError(
                "unscale_: expected gradients, got none; call scaler.scale(loss).backward() first"
            )
        backends = {id(backend): backend for _, backend in grads}.values()
        finite = True
        for backend in backends:
            arrays = [grad for grad, where in grads if where is backend]
            if (capture := backend.capturing) is not None:
                scale = self._captured(capture)[0]
                backend.scale_multi_tensor(arrays, (1.0 / scale).astype(np.float32))
                self._bad[id(optimizer)] = capture.nonfinite(arrays, None)
                return
            backend.scale_multi_tensor(arrays, 1.0 / self.current_scale)
            finite = all(backend.all_finite_multi_tensor(arrays)) and finite
        self._bad[id(optimizer)] = not finite

    def step(self, optimizer: Optimizer) -> bool | None:
        """Make the optimizer's step, unless a gradient is NaN or infinite.

        Args:
            optimizer: the optimizer; its gradients are unscaled first where they are not yet.

        Returns:
            Whether the step was made; one that was not is counted in `report`. None while a step is
            captured (`extensor.capture`), since the device decides.

        Raises:
            RuntimeError: if it was already called in this step, or there are no gradients.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer, scaler = et.optim.SGD([w], lr=0.5), et.optim.MXGradScaler()
        >>> scaler.scale((w * float("inf")).sum()).backward()
        >>> scaler.step(optimizer)
        False
        """
        key = id(optimizer)
        if key in self._done:
            raise RuntimeError("step: already called in this step; call update() first")
        if key not in self._bad:
            self.unscale_(optimizer)
        self._done.add(key)
        bad = self._bad[key]
        optimizer.step_unless(bad)
        return not bad if isinstance(bad, bool) else None

    def found_nonfinite(self, optimizer: Optimizer) -> bool | ExTensor:
        """Whether a gradient of this step is NaN or infinite, between `unscale_` and `update`.

        Args:
            optimizer: the owner of the gradients.

        Returns:
            The answer; while a step is captured (`extensor.capture`) a tensor of shape ().

        Raises:
            RuntimeError: before `unscale_` or `step`.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer, scaler = et.optim.SGD([w], lr=0.5), et.optim.MXGradScaler()
        >>> scaler.scale((w * float("inf")).sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> scaler.found_nonfinite(optimizer)
        True
        """
        if id(optimizer) not in self._bad:
            raise RuntimeError("found_nonfinite: expected unscale_() or step() first")
        bad = self._bad[id(optimizer)]
        return bad if isinstance(bad, bool) else wrap(bad != 0, optimizer.params[0].backend)

    def update(self) -> None:
        """See :meth:`extensor.optim.Optimizer.update`.

        End the step: grow or back off, and check saturation if the recipe is adaptive.

        Raises:
            RuntimeError: if neither `unscale_` nor `step` was called since the last update.
            ValueError: while a step is captured, with several optimizers or an adaptive recipe.

        >>> w = et.nn.Parameter([1.0])
        >>> optimizer, scaler = et.optim.SGD([w], lr=0.5), et.optim.MXGradScaler(init_scale=8.0)
        >>> scaler.scale((w * float("inf")).sum()).backward()
        >>> made = scaler.step(optimizer)
        >>> scaler.update()
        >>> made, scaler.current_scale
        (False, 4.0)
        """
        if not self._bad:
            raise RuntimeError("update: expected a step first; call step(optimizer)")
        state = self.recipe_state
        if self._device is not None:
            self._update_captured()
            return
        self._mirrors.settle()
        rescale(self._state, any(self._bad.values()), self._rule)
        self._end()
        if state is not None and state.recipe.adaptive_scale_rule:
            self._count(state)
            self._updates += 1
            if self._updates == self.saturation_interval:
                self._switch_saturating(state)
                self._counts.clear()
                self._updates = 0

    def _update_captured(self) -> None:
        state = self.recipe_state
        if len(self._bad) > 1 or (state is not None and state.recipe.adaptive_scale_rule):
            what = "several optimizers" if len(self._bad) > 1 else "adaptive_scale_rule"
            raise ValueError(
                f"update: a captured step cannot decide about {what} on the device; leave "
                "scaler.update() out of it, or use a recipe without"
            )
        (bad,) = self._bad.values()
        assert self._capture is not None
        self._capture.rescale(self._device, bad, self._rule)
        self._end()  # the next capture makes its own

    def _count(self, state: RecipeState) -> None:
        """Add what the telemetry counted since the last update; it may have been reset."""
        for key, now in state.telemetry.items():
            before = self._seen.get(key)
            if now == before:
                continue
            gained = now
            if before is not None and before.count < now.count:
                gained = QuantStats(
                    now.count - before.count,
                    now.saturated - before.saturated,
                    now.flushed - before.flushed,
                )
            self._counts[key] = self._counts.get(key, QuantStats()) + gained
        self._seen = dict(state.telemetry)

    def _switch_saturating(self, state: RecipeState) -> None:
        for (path, slot), stats in self._counts.items():
            spec = state.layers[path].operand(slot)
            share = stats.saturated / stats.count if stats.count else 0.0
            if share > self.saturation_threshold and _may_switch(spec):
                self._switch(state, (path, slot))

    def _switch(self, state: RecipeState, key: Key) -> None:
        path, slot = key
        context = state.layers[path]
        spec = context.operand(slot)
        assert isinstance(spec, QuantSpec)
        context.layer = context.layer.with_slot(slot, spec.replace(scale_rule="rceil"))
        self._switched.add(key)

    def report(self) -> GradScaleReport:
        """The scale, the steps, and the shares that saturated and flushed by layer and slot.

        Returns:
            A record; `extensor.inspect.health_table` prints its ``slots``.

        >>> et.optim.MXGradScaler(init_scale=8.0).report().scale
        8.0
        """
        state = self.recipe_state
        slots = slot_health(state, self._switched) if state else ()
        self._mirrors.settle()
        good, stepped, skipped = (int(number) for number in self._state[1:])
        return GradScaleReport(float(self._state[0]), good, stepped, skipped, slots)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, taken between two steps (after `update`).

        Returns:
            JSON values for a checkpoint.

        Raises:
            RuntimeError: in the middle of a step.

        >>> et.optim.MXGradScaler().state_dict()["scale"]
        65536.0
        """
        self._mirrors.settle()
        if self._bad:
            raise RuntimeError("state_dict: in the middle of a step; call update() first")
        return {
            "scale": float(self._state[0]),
            "good": int(self._state[1]),
            "stepped": int(self._state[2]),
            "skipped": int(self._state[3]),
            "updates": self._updates,
            "switched": [list(key) for key in sorted(self._switched)],
            "counts": [
                [*key, s.count, s.saturated, s.flushed] for key, s in sorted(self._counts.items())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, switched scale rules included.

        Args:
            state: from a scaler of the same model.

        Raises:
            ValueError: if it is not such a state, or names layers that this model has not;
                nothing is changed then.

        >>> one, other = et.optim.MXGradScaler(init_scale=8.0), et.optim.MXGradScaler()
        >>> other.load_state_dict(one.state_dict())
        >>> other.current_scale
        8.0
        """
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(f"state: expected {sorted(mine)}, got {sorted(state)}")
        for name, value in mine.items():
            if type(state[name]) is not type(value):
                raise ValueError(f"{name}: expected {type(value).__name__}, got {state[name]!r}")
        if not _is_power_of_two(state["scale"]) or state["scale"] < self.min_scale:
            raise ValueError(
                f"scale: expected a power of two, {self.min_scale} or more, got {state['scale']!r}"
            )
        for name in ("good", "stepped", "skipped", "updates"):
            if not 0 <= state[name] < 1 << 53:
                raise ValueError(f"{name}: expected a count, got {state[name]!r}")
        recipe_state = self.recipe_state
        layers = recipe_state.layers if recipe_state else {}
        counts = counts_from_rows(state["counts"], layers, "counts")
        pairs = check(state["switched"], list[list[str]], "switched")
        switched = {(pair[0], pair[1]) for pair in pairs if len(pair) == 2}
        if len(switched) < len(pairs):
            raise ValueError(f"switched: expected pairs of layer and slot, got {pairs!r:.80}")
        for path, slot in switched:
            if path not in layers or slot not in SLOTS:
                raise ValueError(
                    f"state: expected layers of this model, got {path!r}; use its own checkpoint"
                )
            if (path, slot) in switched and not isinstance(layers[path].operand(slot), QuantSpec):
                raise ValueError(f"state: {path} {slot} is not quantized under this recipe")
        for key in sorted(switched):
            assert recipe_state is not None
            self._switch(recipe_state, key)
        self._switched = switched
        self._counts = counts
        self._seen = dict(recipe_state.telemetry) if recipe_state else {}
        self._state[:] = [state[name] for name in ("scale", "good", "stepped", "skipped")]
        self._updates = state["updates"]


def _may_switch(spec: object) -> bool:
    """Whether the spec has a floor rule that its dialect does not require."""
    return (
        isinstance(spec, QuantSpec)
        and spec.is_mx
        and spec.rule == "floor"
        and spec.dialect_row.mx_scale_rule is None
    )


def _is_power_of_two(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 < value < math.inf and math.frexp(value)[0] == 0.5
