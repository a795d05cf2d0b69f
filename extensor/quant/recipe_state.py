"""The running state of a recipe: each layer's operand specs, random streams and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import add, attrgetter
from typing import Any, Literal

from extensor.quant.array import QuantStats
from extensor.quant.input_cache import InputCache
from extensor.quant.recipe import SLOTS, FloatName, LayerRecipe, OperandSpec, Recipe
from extensor.quant.replay import REPLAY
from extensor.quant.saved import SavedRule
from extensor.quant.spec import Hadamard
from extensor.quant.static_scale import StaticScale
from extensor.quant.weight_cache import WeightCache
from extensor.random import Stream
from extensor.schema import SchemaError, check, record

__all__ = ["COUNTS", "Counts", "LayerContext", "RecipeState", "stats_of"]

Counts = QuantStats | Callable[[], QuantStats]
"""Counts of quantizing, or a function that waits for a GPU and returns them.

A function with a true attribute ``replayed`` belongs to a step that the GPU replays: each call
returns what was counted since the last call.
"""

COUNTS = tuple(field.name for field in dataclasses.fields(QuantStats))
_numbers = attrgetter(*COUNTS)
_MAX_PENDING = 4096


def stats_of(counts: Counts) -> QuantStats:
    """The counts themselves; waits for a GPU.

    >>> from extensor.quant.recipe_state import stats_of
    >>> stats_of(lambda: et.quant.QuantStats(count=64)).count
    64
    """
    return counts if isinstance(counts, QuantStats) else counts()


@lru_cache(maxsize=256)
def _drawn(transform: Hadamard, seed: int, step: int, layer: int, gemm: int) -> Hadamard:
    """See `LayerContext.signs`: both operands of a GEMM ask for the same."""
    seed = (seed + transform.seed) % (1 << 64)
    stream = Stream(seed, step, layer, len(SLOTS) + 1 + gemm).counter_high[1]
    return replace(transform, seed=seed, step=step, stream=stream)


_SAVED = "what operations keep for backward"  # no layer's path
USE_SHIFT = 12
"""Streams number tensors with 24 bits: 4096 layers, and 4096 uses of each in a step."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""What the seed grows by, modulo 2**64, after each 4096 uses of a layer in one step."""
_MICRO_BATCH_STRIDE = 0xD1B54A32D192ED03
"""What it grows by from one micro-batch of a step to the next."""


def counts_from_rows(
    rows: list[list[Any]], layers: Collection[str], at: str
) -> dict[tuple[str, str], QuantStats]:
    """Counts by (layer path, slot), as checkpoints hold them.

    Args:
        rows: layer, slot, and the fields of `QuantStats` in their order.
        layers: the model's.
        at: where the rows stand, for the error.

    Raises:
        SchemaError: for other rows, or a layer or slot that is not the model's.

    >>> from extensor.quant.recipe_state import counts_from_rows
    >>> counts_from_rows([["fc1", "fprop.x", 64, 1]], ["fc1"], "telemetry")["fc1", "fprop.x"].count
    64
    """
    found = {}
    for number, row in enumerate(check(rows, list[list[Any]], at)):
        where = f"{at}[{number}]"
        layer, slot, *values = row if 3 <= len(row) <= 2 + len(COUNTS) else ("", "")
        if not isinstance(layer, str) or layer not in layers or slot not in SLOTS:
            raise SchemaError(
                f"{where}: expected a layer of this model, a slot and counts, got {row!r:.80}"
            )
        counts = record(QuantStats, dict(zip(COUNTS, values, strict=False)), where)
        if min(dataclasses.astuple(counts)) < 0:
            raise SchemaError(f"{where}: expected counts of 0 or more, got {row!r:.80}")
        found[layer, slot] = counts
    return found


@dataclass(eq=False)
class RecipeState:
    """A recipe applied to one model.

    Attributes:
        recipe: the recipe.
        seed: seed of all stochastic rounding.
        step: the optimizer step; `Optimizer.step` adds one. Random bits are a function of (seed,
            step, layer, use of the layer in the step, slot). Set it where a run resumes: the run
            then repeats an uninterrupted one. Setting it begins the step anew, at use 0. A loop
            that updates weights without an `Optimizer` calls `next_step` itself.
        micro_batch: the number, in the step's whole batch, of the part under way. Its random bits
            are a function of this number, so that it does not matter which process computes it
            after which other parts. Setting it begins at use 0. Weights have those of number 0.
        layers: every layer with GEMMs, by path.
        unmet_saved: rules of `Recipe.saved` that no kept array has matched yet, each with the slots
            that were met in its modules.
        weight_cache: the GEMM operands of their weights.
        input_cache: the operands of the input that was quantized last.

    >>> state = et.nn.apply_recipe(et.nn.Sequential(et.nn.Linear(32, 32)), "mxfp4_all", seed=1)
    >>> state.recipe.name, state.seed, list(state.layers)
    ('mxfp4_all', 1, ['0'])
    """

    recipe: Recipe
    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    layers: dict[str, LayerContext] = field(default_factory=dict)
    _counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _amax_states: dict[tuple[str, int, str], dict[str, Any]] = field(
        default_factory=dict, repr=False
    )
    unmet_saved: dict[SavedRule, set[str]] = field(default_factory=dict, repr=False)
    weight_cache: WeightCache = field(default_factory=WeightCache, repr=False)
    input_cache: InputCache = field(default_factory=InputCache, repr=False)
    _pending: list[tuple[tuple[str, str], Callable[[], QuantStats]]] = field(default_factory=list)
    _standing: list[tuple[tuple[str, str], Callable[[], QuantStats]]] = field(default_factory=list)
    _fallbacks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict, repr=False)
    _uses: dict[str, int] = field(init=False, repr=False)
    _ahead: int = field(init=False, repr=False)
    """Steps that ended in the capture under way; replays add them to ``step``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("step", "micro_batch"):
            object.__setattr__(self, "_uses", {})
        if name == "step":
            object.__setattr__(self, "_ahead", 0)
        object.__setattr__(self, name, value)

    def check_saved(self) -> None:
        """Refuse rules of `Recipe.saved` that decided nothing while their modules ran.

        Raises:
            ValueError: naming the first, and the slots that its modules have.

        >>> et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all").check_saved()
        """
        for rule, slots in self.unmet_saved.items():
            if slots:
                raise ValueError(
                    f"recipe {self.recipe.name!r}: saved rule {rule.match!r} of slot {rule.slot!r} "
                    "decides about nothing that its modules keep for backward, in these slots: "
                    f"{', '.join(sorted(slots))}; the first rule that matches decides"
                )

    def next_step(self) -> None:
        """Begin the next step; optimizers call it when they have updated the model.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.next_step()
        >>> state.step
        1
        """
        self.step += 1

    def next_captured_step(self, capture: Any) -> None:
        """Begin the next step in a captured step; ``step`` follows with each replay.

        Args:
            capture: the backend's capture under way.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.next_captured_step(capture)    # doctest: +SKIP
        """
        self._uses = {}
        self._ahead += 1
        capture.on_replay(self.next_step)
        capture.on_failure(lambda: setattr(self, "step", self.step))

    def __repr__(self) -> str:
        plain = [path for path, context in self.layers.items() if not context.layer.is_quantized]
        named = f": {', '.join(map(repr, plain))}" if 0 < len(plain) <= 4 else ""
        return (
            f"RecipeState(recipe={self.recipe.name!r}, seed={self.seed}, step={self.step}, "
            f"layers={len(self.layers)}, {len(plain)} not quantized{named})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other weights and steps: it takes the counts over, but no cache and no GPU's.

        An amax state decides no value, so it begins anew.
        """
        self._settle()
        fresh: dict[str, Any] = {"weight_cache": WeightCache(), "input_cache": InputCache()}
        fresh |= {"_standing": [], "_fallbacks": {}, "_amax_states": {}}
        return {**self.__dict__, **fresh, "_counts": dict(self._counts), "_pending": []}

    @property
    def telemetry(self) -> Mapping[tuple[str, str], QuantStats]:
        """Counts by (layer path, slot) since the last reset; waits for the GPU.

        A copy at each reading: what is counted later, or written to it, shows in neither.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> before = state.telemetry
        >>> state.load_counts([("", "fprop.x")], [[64, 0, 0, 0, 0]])
        >>> len(before), len(state.telemetry)
        (0, 1)
        """
        self._settle()
        return {key: QuantStats(*row) for key, row in self._counts.items()}

    @property
    def total(self) -> QuantStats:
        """The sum of `telemetry` over all operands."""
        self._settle()
        return QuantStats(*map(sum, zip(*self._counts.values(), strict=True)))

    def counts(self, keys: Collection[tuple[str, str]]) -> list[list[int]]:
        """`telemetry` as rows: the fields of `QuantStats`, for each of these operands.

        Args:
            keys: (layer path, slot) of all operands that may have counts.

        Returns:
            A row for each key, zeros where nothing was counted.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.counts([("", "fprop.x")])
        [[0, 0, 0, 0, 0]]
        """
        self._settle()
        assert self._counts.keys() <= set(keys), sorted(self._counts.keys() - set(keys))
        none = [0] * len(COUNTS)
        return [self._counts.get(key, none) for key in keys]

    def load_counts(self, keys: Collection[tuple[str, str]], rows: Sequence[Sequence[int]]) -> None:
        """Set all counts to rows, as `counts` gives them.

        Args:
            keys: (layer path, slot) of each row.
            rows: the fields of `QuantStats`.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.load_counts([("", "fprop.x")], [[64, 1, 0, 0, 0]])
        >>> state.telemetry["", "fprop.x"].saturated
        1
        """
        self.reset_telemetry()
        self._counts = {k: list(row) for k, row in zip(keys, rows, strict=True) if any(row)}

    def reset_telemetry(self) -> None:
        """Set all counts to zero.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.reset_telemetry()
        >>> dict(state.telemetry)
        {}
        """
        self._pending.clear()
        self._settle()
        self._counts.clear()

    def load_telemetry(self, counts: Mapping[tuple[str, str], QuantStats]) -> None:
        """Set all counts, as a checkpoint or an earlier look at `telemetry` has them.

        Args:
            counts: by (layer path, slot).

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.load_telemetry({("", "fprop.x"): et.quant.QuantStats(count=64)})
        >>> state.telemetry["", "fprop.x"].count
        64
        """
        self.reset_telemetry()
        self._counts = {key: list(_numbers(stats)) for key, stats in counts.items()}

    def saved_stream(self) -> Stream:
        """Random bits for the next array that is kept for backward in blocks, in this step.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> [state.saved_stream().tensor for _ in range(2)]
        [0, 1]
        """
        number = self._uses.get(_SAVED, 0)
        self._uses[_SAVED] = number + 1
        step = self.step + self._ahead
        return Stream(self._seed_of(self.micro_batch), step, number, len(SLOTS), clock=self)

    def _seed_of(self, micro_batch: int, rounds: int = 0) -> int:
        """The seed of a micro-batch, after so many times 4096 uses of a layer in it."""
        strides = micro_batch * _MICRO_BATCH_STRIDE + rounds * _SEED_STRIDE
        return (self.seed + strides) % (1 << 64)

    def record(self, key: tuple[str, str], counts: Counts) -> None:
        """Add to the counts of an operand, without waiting for a GPU.

        Args:
            key: (layer path, slot).
            counts: the counts, or a function that waits for them.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.record(("", "fprop.x"), et.quant.QuantStats(count=64, saturated=1))
        >>> state.telemetry["", "fprop.x"].saturated
        1
        """
        if isinstance(counts, QuantStats):
            self._add(key, counts)
            return
        if getattr(counts, "replayed", False):
            self._standing.append((key, counts))
            return
        self._pending.append((key, counts))
        if len(self._pending) >= _MAX_PENDING:
            self._settle()

    def _settle(self) -> None:
        for key, counts in self._pending:
            self._add(key, counts())
        self._pending.clear()
        for key, counts in self._standing:
            if (gained := counts()).count:
                self._add(key, gained)
        for key, held in self._fallbacks.items():
            if held and (fallbacks := held["gained"]()):
                self._add(key, QuantStats(fallbacks=fallbacks))

    def _add(self, key: tuple[str, str], stats: QuantStats) -> None:
        row = self._counts.get(key)
        gained = _numbers(stats)
        self._counts[key] = list(gained if row is None else map(add, row, gained))


@dataclass(eq=False)
class LayerContext:
    """One layer under a recipe: its specs, and its share of the recipe's state.

    Attributes:
        path: the layer's path in the model.
        index: the layer's number, which names its random streams.
        layer: the layer's recipe; the gradient scaler may replace it.
        state: the state of the whole model.
        use: which use of the layer in this step, from 0.
        static_scale: the scale of the forward input, where calibration chose one beforehand.
        saved_input: in place of `Recipe.saved_input`, where a plan says it for this layer.
        use_step: the step that this use began in, where signs are drawn in each step: a product's
            operands have the same, also if one is made after the step has ended.

    >>> model = et.nn.Sequential(et.nn.Linear(32, 32))
    >>> state = et.nn.apply_recipe(model, "mxfp4_all")
    >>> model[0].quant is state.layers["0"]
    True
    """

    path: str
    index: int
    layer: LayerRecipe
    state: RecipeState
    use: int = 0
    static_scale: StaticScale | None = None
    saved_input: Literal["packed", "input"] | None = None
    use_step: int | None = None

    @property
    def step(self) -> int:
        """The step that random bits are a function of."""
        return self.state.step + self.state._ahead if self.use_step is None else self.use_step

    @property
    def clock(self) -> Any:
        """What a captured step reads the step from; see `extensor.random.Stream`."""
        return self.state

    @property
    def activations(self) -> FloatName:
        """See `Recipe.activations`."""
        return self.state.recipe.activations

    def keeps_input(self) -> bool:
        """Whether the layer keeps its input for backward as it is.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.layers[""].keeps_input()
        False
        """
        return (self.saved_input or self.state.recipe.saved_input) == "input"

    def next_use(self) -> LayerContext:
        """The layer in its next use of this step, which rounds with random bits of its own.

        Returns:
            A context with the same state.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> [state.layers[""].next_use().use for _ in range(3)]
        [0, 1, 2]
        """
        if REPLAY.uses is not None:
            use = next(REPLAY.uses)
        else:
            uses = self.state._uses
            use = uses.get(self.path, 0)
            uses[self.path] = use + 1
        for log in REPLAY.logs:
            log.uses.append(use)
        if self.layer.has_per_step_signs:
            return replace(self, use=use, use_step=self.step)
        return self if use == self.use else replace(self, use=use)

    def operand(self, slot: str) -> OperandSpec:
        """The operand in a slot.

        Args:
            slot: one of `SLOTS`.

        Returns:
            A spec, ``"float32"`` or ``"bfloat16"``.

        Raises:
            ValueError: for an unknown slot.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.layers[""].operand("dgrad.g").rounding
        'stochastic'
        """
        return self.layer.slot(slot)

    def stream(self, slot: str, column: bool) -> Stream:
        """The random stream of a slot in this use and step; a weight's is that of its first use.

        A weight does not change within a step, so it is quantized once for all uses.

        Args:
            slot: one of `SLOTS`.
            column: whether the operand is quantized columnwise, which has bits of its own.

        Returns:
            The stream, a function of seed, step, layer, use (of weights, 0) and slot.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all", seed=5)
        >>> state.layers[""].stream("dgrad.g", column=False).seed
        5
        """
        weight = slot.endswith(".w")
        rounds, use = divmod(0 if weight else self.use, 1 << USE_SHIFT)
        seed = self.state._seed_of(0 if weight else self.state.micro_batch, rounds)
        tensor = self.index + (use << USE_SHIFT)
        return Stream(seed, self.step, tensor, SLOTS.index(slot), column, self.clock)

    def signs(self, transform: Hadamard, slot: str) -> Hadamard:
        """A transform whose signs are drawn in each step, with those of this step.

        Both operands of a GEMM have the same, whatever the use of the layer and the micro-batch.

        Args:
            transform: of the slot's operand.
            slot: one of `SLOTS`.

        Returns:
            The transform, its signs a function of seed, step, layer and GEMM.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all", seed=5)
        >>> state.step = 3
        >>> layer, signs = state.layers[""], et.Hadamard(32, "per_step")
        >>> [layer.signs(signs, slot).step for slot in ("dgrad.g", "dgrad.w")]
        [3, 3]
        >>> layer.signs(signs, "dgrad.g") == layer.signs(signs, "wgrad.g")
        False
        """
        gemm = SLOTS.index(slot) // 2
        return _drawn(transform, self.state.seed, self.step, self.index, gemm)

    def amax_state(self, slot: str) -> dict[str, Any]:
        """Past largest magnitudes of the slot's tensor, for a backend's delayed scaling.

        They decide which kernel runs first, never a value.

        Args:
            slot: one of `SLOTS`.

        Returns:
            A dict that the backend reads and writes.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.layers[""].amax_state("fprop.x")
        {}
        """
        use = self.use % (1 << USE_SHIFT)  # a model that no optimizer steps has no last use
        return self.state._amax_states.setdefault((self.path, use, slot), {})

    def fallbacks(self, gemm: str) -> dict[str, Any] | None:
        """Where a backend keeps how many of a GEMM's products fell back from FP8 to bfloat16.

        Args:
            gemm: "fprop", "dgrad" or "wgrad".

        Returns:
            A dict for `Backend.product`; None in a second run, which counts nothing.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.layers[""].fallbacks("fprop")
        {}
        """
        if REPLAY.uses is not None:
            return None
        slot = f"{gemm}.x" if gemm == "fprop" else f"{gemm}.g"
        return self.state._fallbacks.setdefault((self.path, slot), {})

    def record(self, slot: str, counts: Counts) -> None:
        """Add to the counts of a slot.

        Args:
            slot: one of `SLOTS`.
            counts: the counts, or a function that waits for them.

        >>> state = et.nn.apply_recipe(et.nn.Linear(32, 32), "mxfp4_all")
        >>> state.layers[""].record("fprop.x", et.quant.QuantStats(count=64))
        >>> state.telemetry["", "fprop.x"].count
        64
        """
        if REPLAY.uses is None:  # a second run of the same products counts nothing
            self.state.record((self.path, slot), counts)
