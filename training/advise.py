"""`extensor advise RUN`: what a run's operands lose, and which recipe or rule to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extensor import ExTensor
from extensor.cli.advise import plain
from extensor.cli.sheet import CommandError, Sheet
from extensor.inspect import LayerRow, SlotHealth, compare_layers
from extensor.io import CheckpointError
from extensor.nn import apply_recipe
from extensor.nn.recipe import assign_recipe
from extensor.quant.recipe import SLOTS, LayerRecipe, OperandSpec, Recipe, Rule
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.quant.spec import QuantSpec

from .data import DataError
from .loop import Trainer, open_run
from .reallocate import Reallocation, bits_of, reallocate
from .result import HEALTH_BATCH
from .rundir import CONFIG, UsageError, read_config, read_result, read_telemetry

__all__ = ["RunAdvice", "Trial", "advise_run", "is_run"]

TRIED = ("mxfp4", "nvfp4_nvidia", "nvfp4_4over6", "mxfp6", "mxfp8_nvidia")
"""Recipes whose forward products differ; one for each choice of `docs/choose.md`."""
WORST = 3
"""For so many layers, the output is measured with the layer in bfloat16."""
Change = Callable[[str, QuantSpec], dict[str, Any]]
"""The fields to change in the spec of a slot."""
BFLOAT16 = LayerRecipe.uniform("bfloat16")


@dataclass(frozen=True)
class Trial:
    """The trained weights under a recipe, beside float32, on a batch of test data.

    Attributes:
        name: the recipe's name, or what was changed in it.
        bits: stored for a weight, by the recipe's `fprop.w`.
        output_db: signal over quantization noise at the model's output.
        layers: each layer on the float32 layer's inputs.
    """

    name: str
    bits: float
    output_db: float
    layers: tuple[LayerRow, ...]

    @property
    def worst(self) -> LayerRow | None:
        """The layer with the lowest ratio; None where every layer is exact."""
        known = [row for row in self.layers if math.isfinite(row.sqnr_db)]
        return min(known, key=lambda row: row.sqnr_db, default=None)


@dataclass(frozen=True)
class RunAdvice:
    """What `advise_run` found.

    Attributes:
        run: the folder.
        recipe: the run's recipe.
        least: the budget in dB.
        operands: what each operand lost in the last epoch; empty where nothing is quantized to
            blocks or the run is not finished.
        own: the run's recipe on its trained weights; None where they cannot be used.
        kept: the same with one layer in bfloat16, for the worst layers.
        trials: other recipes.
        changes: what to change, with the reason.
        moves: operands in other formats at equal bits; None where the run kept no telemetry.
        first_overflow: the first step whose values were not finite, and where; None for none.
        missing: why something could not be measured; empty where all was.
    """

    run: Path
    recipe: str
    least: float
    operands: tuple[SlotHealth, ...]
    own: Trial | None
    kept: tuple[Trial, ...]
    trials: tuple[Trial, ...]
    changes: tuple[str, ...]
    moves: Reallocation | None
    first_overflow: str | None
    missing: str

    def as_json(self) -> dict[str, Any]:
        """Everything as plain JSON."""
        content: dict[str, Any] = plain({**dataclasses.asdict(self), "run": str(self.run)})
        for row, operand in zip(content["operands"], self.operands, strict=True):
            row["verdict"] = operand.verdict
        return content

    def sheets(self) -> list[Sheet]:
        """The tables."""
        alarms = [row for row in self.operands if row.verdict != "ok"]
        sheets = [
            Sheet(
                f"Operands beyond the limits, last epoch of {self.recipe}",
                ("layer", "operand", "format", "rule", "saturated", "flushed", "verdict"),
                tuple(
                    (row.layer, row.slot, row.format or "-", row.scale_rule or "-",
                     f"{row.saturated:.2%}", f"{row.flushed:.2%}", row.verdict)
                    for row in alarms
                ),
            )
        ] if alarms else []  # fmt: skip
        if self.own is not None and self.own.worst is not None:
            rows = sorted(self.own.layers, key=lambda row: row.sqnr_db)
            sheets.append(
                Sheet(
                    "Layers beside float32, each on the same inputs",
                    ("layer", "kind", "SQNR", "saturated", "flushed"),
                    tuple(
                        (row.layer, row.kind, _ratio(row.sqnr_db), _share(row.saturated),
                         _share(row.flushed))
                        for row in rows
                    ),
                )
            )  # fmt: skip
        if self.moves is not None and self.moves.moves:
            m = self.moves
            sheets.append(
                Sheet(
                    f"Operands to move: {m.bits:.2f} bits a value before, {m.advised_bits:.2f} "
                    f"after; predicted gradient noise {m.advised_noise / m.noise:.0%} of what it "
                    "is",
                    ("layer", "operand", "now", "to", "bits", "noise", "reach"),
                    tuple(
                        (row.layer, row.slot, row.operand, row.recipe,
                         f"{row.bits:.4g} to {row.advised_bits:.4g}",
                         f"{row.noise:.2g} to {row.advised_noise:.2g}", f"{row.reach:.0%}")
                        for row in m.moves
                    ),
                )
            )  # fmt: skip
        tried = [trial for trial in (self.own, *self.kept, *self.trials) if trial is not None]
        if tried:
            sheets.append(
                Sheet(
                    "The trained weights under recipes, forward only",
                    ("recipe", "bits of a weight", "output", "worst layer", "its SQNR"),
                    tuple(
                        (t.name, f"{t.bits:.4g}", _ratio(t.output_db),
                         t.worst.layer if t.worst else "-",
                         _ratio(t.worst.sqnr_db) if t.worst else "-")
                        for t in tried
                    ),
                )
            )  # fmt: skip
        return sheets

    def lines(self) -> list[str]:
        """What to do, a line each."""
        notes = [f"not measured: {self.missing}"] if self.missing else []
        notes += [self.first_overflow] if self.first_overflow else []
        return [*notes, *(f"- {change}" for change in self.changes)]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / CONFIG).is_file()


def advise_run(folder: Path, least: float) -> RunAdvice:
    """Read a run, try recipes on its trained weights, and say what to change.

    Raises:
        CommandError: if the run's files cannot be read.
    """
    try:
        config, result = read_config(folder), read_result(folder)
    except UsageError as error:
        raise CommandError(str(error)) from error
    recipe = config.resolved_recipe
    missing = "" if result else "the run is not finished, so its operands' last epoch is unknown"
    records = read_telemetry(folder)
    operands = tuple(
        SlotHealth(**{key: value for key, value in row.items() if key != "verdict"})
        for row in (result or {}).get("health", [])
    )
    own: Trial | None = None
    kept: tuple[Trial, ...] = ()
    trials: tuple[Trial, ...] = ()
    moves: Reallocation | None = None
    if result and result["diverged"]:
        missing = f"the run diverged ({result['diverged']}), so its weights say nothing"
    else:
        try:
            trainer = open_run(folder)
            own, kept, trials = _trials(trainer, recipe)
            moves = reallocate(records, assign_recipe(trainer.model, recipe))
        except (UsageError, DataError, CheckpointError) as error:
            missing = str(error)
    changes = _operand_changes(recipe, operands, (result or {}).get("diverged"))
    changes += _recipe_changes(recipe, own, kept, trials, least)
    if moves is not None and moves.moves:
        out = folder.with_name(f"{folder.name}-advised")
        changes.append(
            f"at no more bits, other formats for {len(moves.moves)} operands; try: extensor train "
            f"{config.model} --config {folder / CONFIG} --operands '{moves.operands}' --out {out}"
        )
    overflow = next((r for r in records if "overflow" in r), None)
    if not changes:
        changes = ["nothing to change: no operand is beyond the limits"]
    return RunAdvice(
        folder, recipe.name, least, operands, own, kept, trials, tuple(changes),
        moves, _overflow_text(overflow) if overflow else None, missing,
    )  # fmt: skip


def _trials(trainer: Trainer, recipe: Recipe) -> tuple[Trial, tuple[Trial, ...], tuple[Trial, ...]]:
    """The run's recipe, the same with its worst layers in bfloat16, and other recipes."""
    batch = next(trainer.task.test(min(HEALTH_BATCH, trainer.task.eval_batch)))
    inputs = ExTensor.from_numpy(batch.inputs).to(trainer.config.device)
    weights = trainer.model.state_dict()

    def under(name: str, tried: Recipe) -> Trial:
        model, reference = trainer.fresh_model(), trainer.fresh_model()
        for one, precision in ((model, tried), (reference, get_recipe("fp32"))):
            one.load_state_dict(weights)
            apply_recipe(one, precision, seed=trainer.config.seed)
        *layers, output = compare_layers(model, reference, inputs, isolated=True).rows
        weight = tried.layers.slot("fprop.w")
        return Trial(name, bits_of(weight), output.sqnr_db, tuple(layers))

    own = under(recipe.name, recipe)
    worst = sorted(own.layers, key=lambda row: row.sqnr_db)[:WORST]
    kept = [
        under(
            f"{recipe.name}, {row.layer} in bfloat16",
            dataclasses.replace(recipe, rules=(Rule(row.layer, BFLOAT16), *recipe.rules)),
        )
        for row in worst
        if row.saturated is not None
    ]
    others = [get_recipe(name) for name in TRIED]
    trials = [under(one.name, one) for one in others if _forward(one) != _forward(recipe)]
    return own, tuple(kept), tuple(trials)


def _overflow_text(record: dict[str, Any]) -> str:
    layer = record["overflow"]["layer"]
    place = record["overflow"]["where"] + (f" of {layer}" if layer else "")
    return f"the first values that were not finite: {place}, in step {record['step']}"


def _forward(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.layers.fprop, [(rule.match, rule.use.fprop) for rule in recipe.rules]


def _recipe_changes(
    recipe: Recipe,
    own: Trial | None,
    kept: Sequence[Trial],
    trials: Sequence[Trial],
    least: float,
) -> list[str]:
    """Which recipe keeps the budget with the fewest bits, and what one layer in bfloat16 gains."""
    if own is None:
        return []
    fit = [trial for trial in (own, *trials) if trial.output_db >= least]
    best = min(fit, key=lambda trial: (trial.bits, -trial.output_db), default=None)
    text = f"under {recipe.name} the output keeps {_ratio(own.output_db)}, of {least:g} dB wanted"
    changes = []
    if best is None:
        top = max((own, *trials), key=lambda trial: trial.output_db)
        changes.append(f"{text}; no recipe tried keeps as much: {top.name} has the most, "
                       f"{_ratio(top.output_db)}")  # fmt: skip
    elif best is own:
        changes.append(f"{text}: no recipe tried keeps it with fewer bits")
    else:
        changes.append(f"{text}; try --recipe {best.name}: {_ratio(best.output_db)} with "
                       f"{best.bits:.4g} bits a weight instead of {own.bits:.4g}")  # fmt: skip
    gain = max(kept, key=lambda trial: trial.output_db, default=None)
    if own.output_db < least and gain is not None and gain.output_db > own.output_db:
        name = gain.name.rpartition(",")[2].strip()
        changes.append(
            f"{name} brings the output from {_ratio(own.output_db)} to {_ratio(gain.output_db)}: "
            f"add Rule({name.split(' ')[0]!r}, LayerRecipe.uniform('bfloat16')) to its rules"
        )
    return changes


def _operand_changes(
    recipe: Recipe, operands: Sequence[SlotHealth], diverged: str | None
) -> list[str]:
    """A change for each kind of alarm, with the operands that it is about."""
    changes = [f"the run diverged: {diverged}; try a smaller --lr"] if diverged else []
    kinds: tuple[tuple[str, Callable[[SlotHealth], bool], str, str, Change], ...] = (
        (
            "saturate",
            lambda row: "saturates" in row.verdict,
            "rceil scales put the largest value of a block on the grid",
            'scale_rule="rceil"',
            lambda slot, spec: {"scale_rule": "rceil"} if spec.is_mx else {},
        ),
        (
            "change when rebased",
            lambda row: "rebased" in row.verdict,
            "without rebasing every block keeps its own scale",
            "rebased=False",
            lambda slot, spec: {"rebased": False},
        ),
        (
            "flush gradients rounded to nearest",
            lambda row: "flushes" in row.verdict and _is_nearest_gradient(recipe, row),
            "stochastic rounding keeps their mean",
            'rounding="stochastic"',
            lambda slot, spec: {"rounding": "stochastic"} if slot.endswith(".g") else {},
        ),
    )
    explained: set[tuple[str, str]] = set()
    for title, alarms, reason, field, change in kinds:
        found = [row for row in operands if alarms(row)]
        if not found:
            continue
        explained |= {(row.layer, row.slot) for row in found if row.verdict == "flushes"}
        other = _counterpart(recipe, change)
        way = f"--recipe {other}" if other else f"a recipe of your own with {field} there"
        changes.append(f"{_names(found)} {title}: {reason}; try {way}")
    rest = [
        row
        for row in operands
        if "flushes" in row.verdict and (row.layer, row.slot) not in explained
    ]
    if rest:
        layers = list(dict.fromkeys(row.layer for row in rest))
        changes.append(
            f"{_names(rest)} flush: smaller blocks or more exponent bits keep small values; "
            f"keep {', '.join(layers[:4])} in bfloat16 by a rule, or take a recipe of more bits"
        )
    return changes


def _is_nearest_gradient(recipe: Recipe, row: SlotHealth) -> bool:
    operand = recipe.layers.slot(row.slot)
    nearest = isinstance(operand, QuantSpec) and operand.rounding == "nearest_even"
    return row.slot.endswith(".g") and nearest


def _counterpart(recipe: Recipe, change: Change) -> str | None:
    """The recipe of the table that differs from this one in the changed fields alone."""

    def changed(layer: LayerRecipe) -> LayerRecipe:
        operands: list[OperandSpec] = []
        for slot in SLOTS:
            one = layer.slot(slot)
            operands.append(one.replace(**change(slot, one)) if isinstance(one, QuantSpec) else one)
        a, b, c = (
            dataclasses.replace(gemm, a=operands[2 * place], b=operands[2 * place + 1])
            for place, gemm in enumerate((layer.fprop, layer.dgrad, layer.wgrad))
        )
        return LayerRecipe(a, b, c)

    expected = changed(recipe.layers)
    rules = tuple(Rule(rule.match, changed(rule.use)) for rule in recipe.rules)
    if (expected, rules) == (recipe.layers, recipe.rules):
        return None
    for name, row in RECIPES.items():
        if (row.layers, row.rules) == (expected, rules):
            return name
    return None


def _names(rows: Sequence[SlotHealth]) -> str:
    shown = [f"{row.layer} {row.slot}" for row in rows[:4]]
    return ", ".join(shown) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _ratio(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
