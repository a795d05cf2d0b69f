"""Choose what each part of a model keeps for backward: what fits, and takes the least time.

A part keeps its layers' inputs as they are ("kept"), or their packed operands ("packed"), or these
and not what operations can make again without a product ("cheap"), or its own input alone and runs
again ("recomputed"): see `Recipe.saved_input`, `Module.recomputed` and `extensor.checkpoint`. All
give gradients of the same bits. Parts of one kind, those whose classes and parameters have the
same shapes, are measured together: bytes by the ledger, seconds by whole steps in turn.

With b and t the bytes and seconds of part i under choice c, the plan minimizes sum t(i, c) so that
rest + sum b(i, c) <= limit: a knapsack with several choices for each item, solved by the Pareto
front of (bytes, seconds). A part that runs again holds w bytes then, beside the parts before it,
since backward has let go of those behind: rest + sum over j < i of b(j, c) + w(i) <= limit.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal

from extensor.backends import registry
from extensor.inspect.memory import Holder, MemoryReport, memory_ledger
from extensor.inspect.table import Table
from extensor.nn.module import Module
from extensor.nn.recipe import gemm_layers
from extensor.nn.recompute import outermost
from extensor.optim.optimizer import Optimizer
from extensor.quant.recipe_state import RecipeState
from extensor.quant.weight_cache import WeightCache

__all__ = ["Choice", "MemoryLimitError", "MemoryPlan", "plan_memory"]

Choice = Literal["kept", "packed", "cheap", "recomputed"]

_CHOICES: tuple[Choice, ...] = ("kept", "packed", "cheap", "recomputed")
_TRIES = 5


@dataclass(frozen=True)
class MemoryPlan:
    """What each part keeps for backward.

    Attributes:
        choices: by the part's path.
        peak: bytes at the peak of a step under the plan, by the ledger.
        limit: bytes that were asked for.
        seconds: what a step takes longer than with all inputs kept, or with the first of packed,
            cheap and recomputed that did not run out of memory, as measured beforehand.

    >>> plan = et.inspect.MemoryPlan({"0": "recomputed"}, peak=10, limit=12, seconds=0.0)
    >>> model = et.nn.Sequential(et.nn.Linear(8, 8))
    >>> plan.apply(model)
    >>> model[0].recomputed
    True
    """

    choices: Mapping[str, Choice]
    peak: int
    limit: int
    seconds: float

    def apply(self, model: Module) -> None:
        """Set what the model's parts keep, as in a resumed run.

        Args:
            model: has a part of each path in ``choices``, and its recipe.

        Raises:
            ValueError: for a path that the model has not.

        >>> plan = et.inspect.MemoryPlan({"1": "kept"}, peak=10, limit=12, seconds=0.0)
        >>> plan.apply(et.nn.Sequential(et.nn.Linear(8, 8)))
        Traceback (most recent call last):
        ValueError: plan: no module '1' in the model
        """
        modules = dict(model.named_modules())
        for path in self.choices:
            if path not in modules:
                raise ValueError(f"plan: no module {path!r} in the model")
        for path, choice in self.choices.items():
            _set(modules[path], choice)

    def table(self) -> Table:
        """The choice of each part.

        Returns:
            A table.

        >>> plan = et.inspect.MemoryPlan({"0": "packed"}, peak=10, limit=12, seconds=0.0)
        >>> print(plan.table())
        part   keeps
        0     packed
        """
        return Table(("part", "keeps"), tuple(self.choices.items()))


class MemoryLimitError(MemoryError):
    """No plan fits the limit that `plan_memory` got.

    Args:
        message: what was asked for, what is needed, and the way out.
        report, out_of_memory: the attributes.

    Attributes:
        report: the memory of the step that needs least.
        out_of_memory: whether every step ran out of the device's memory; the report is then of the
            one that got by with least until it did.

    >>> issubclass(et.inspect.MemoryLimitError, MemoryError)
    True
    """

    def __init__(self, message: str, report: MemoryReport, out_of_memory: bool) -> None:
        super().__init__(message)
        self.report = report
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class _Costs:
    """What a part costs by choice: bytes and seconds.

    A choice that ran out of memory has no seconds, and its bytes are those until then.
    """

    nbytes: Mapping[Choice, int]
    seconds: Mapping[Choice, float]

    def most(self, choice: Choice) -> int:
        """Bytes that the part holds in its backward pass; run again, what it made and its input."""
        return max(self.nbytes[choice], self.nbytes["packed"] if choice == "recomputed" else 0)


def plan_memory(
    model: Module,
    step: Callable[[], object],
    limit: int,
    parts: str,
    device: str = "cpu",
    rounds: int = 3,
    optimizer: Optimizer | None = None,
) -> MemoryPlan:
    """Choose what parts of a model keep for backward, so that a step fits and takes least time.

    It runs ``step`` about ``rounds`` times for each kind of part and choice, and leaves the model
    under the plan: gradients, buffers, random bits and counts are as before. Measuring takes more
    than the limit where a choice does. A choice under which a step raises `MemoryError`, as on a
    full GPU, is left out.

    Args:
        model: its recipe is applied, its parts are run by ``step``.
        step: a forward and a backward pass. An update of the weights counts where ``step`` makes
            one; nothing takes it back, so that the model is then a copy to be thrown away.
        limit: bytes that arrays may take at the peak, weights and gradients included.
        parts: a glob on modules' paths, as "blocks.*"; of modules in each other, the outermost.
            Each is called with tensors and gives one.
        device: where the model is.
        rounds: how often each step is timed.
        optimizer: its states count, too.

    Returns:
        The plan, with the peak that was measured under it.

    Raises:
        ValueError: if no part matches.
        MemoryLimitError: if nothing fits; says the least that was found, or where memory ran out.

    Source: Chen, Xu, Zhang, Guestrin, arXiv 1604.06174, for recomputing; Kirisame et al.,
    arXiv 2006.09616, and Beaumont et al., arXiv 1911.13214, for choosing by measured time.

    >>> model = et.nn.Sequential(*(et.nn.Linear(64, 64, rng=i) for i in range(2)))
    >>> x = et.randn((32, 64), seed=0)
    >>> plan = et.inspect.plan_memory(
    ...     model, lambda: model(x).sum().backward(), limit=10**6, parts="*", rounds=1
    ... )
    >>> plan.peak < 10**6
    True
    """
    modules = outermost(model, parts)
    with _as_before(model, modules) as fresh:
        run = _Runner(model, step, device, fresh, optimizer)
        # What is made once, such as cuBLAS' workspace, is no part of a step.
        first = run.trial(modules, dict.fromkeys(modules, "recomputed"))
        ordered = {path: modules[path] for path in first.order} | modules
        costs, trials, rest = _measured(ordered, run, rounds)
        for _ in range(_TRIES):
            choices = _solve(costs, limit - rest)
            if choices is None:
                break
            trials.append(run.trial(modules, choices))
            if trials[-1].fits(limit):
                break
            rest += max(trials[-1].peak - limit, 0)  # what the sum left out
            rest = max(rest, limit - _nbytes(costs, choices) + 1)  # these choices no more
    fitting = [trial for trial in trials if trial.fits(limit)]
    if not fitting:
        done = [trial for trial in trials if trial.done]
        least = min(done or trials, key=lambda trial: trial.peak)
        found = "the least found is" if done else "every step ran out of memory, at"
        raise MemoryLimitError(
            f"plan_memory: expected a peak of at most {limit / 1e6:.2f} MB, {found} "
            f"{least.peak / 1e6:.2f} MB; take smaller batches or more parts, or store what is "
            f"saved in blocks (Recipe.saved). The largest holders:\n{least.report.table(5)}",
            least.report,
            out_of_memory=not done,
        )
    best = min(fitting, key=lambda trial: _seconds(costs, trial.choices))
    seconds = _seconds(costs, best.choices)
    plan = MemoryPlan({path: best.choices[path] for path in modules}, best.peak, limit, seconds)
    plan.apply(model)
    return plan


def _set(module: Module, choice: Choice) -> None:
    module.recomputed = "cheap" if choice == "cheap" else choice == "recomputed"
    for _, layer in gemm_layers(module):
        if layer.quant is not None:
            layer.quant.saved_input = "input" if choice == "kept" else "packed"


@contextmanager
def _as_before(model: Module, modules: Mapping[str, Module]) -> Iterator[Callable[[], None]]:
    """Put back what steps and plans change, at the end; steps also by the function given."""
    layers = [layer.quant for _, layer in gemm_layers(model) if layer.quant is not None]
    states = {id(layer.state): layer.state for layer in layers}
    settings = [(layer, layer.saved_input) for layer in layers]
    recomputed = [(module, module.recomputed) for module in modules.values()]
    counts = [(state, dict(state.telemetry)) for state in states.values()]
    buffers = [(buffer, buffer.data.copy()) for buffer in model.buffers()]
    gradients = [(param, param.grad) for param in model.parameters()]

    def fresh() -> None:
        for param, _ in gradients:
            param.grad = None
        for buffer, data in buffers:
            buffer.assign_(data.copy())
        for state in states.values():
            _begin_again(state)
        gc.collect()

    try:
        yield fresh
    finally:
        fresh()
        for param, gradient in gradients:
            param.grad = gradient
        for state, before in counts:
            state.load_telemetry(before)
        for layer, setting in settings:
            layer.saved_input = setting
        for module, again in recomputed:
            module.recomputed = again


def _begin_again(state: RecipeState) -> None:
    state.step = state.step  # begins at use 0
    state.weight_cache = WeightCache()  # a step of training meets other weights


@dataclass(frozen=True)
class _Trial:
    """A step under choices: its memory, and whether it had enough to be done.

    ``held``: what held memory when the last part had run, before any runs again.
    ``order``: the parts as they ran.
    """

    choices: Mapping[str, Choice]
    report: MemoryReport
    held: Sequence[Holder]
    order: Sequence[str]
    done: bool

    @property
    def peak(self) -> int:
        return self.report.peak

    def fits(self, limit: int) -> bool:
        return self.done and self.peak <= limit


@dataclass(frozen=True)
class _Runner:
    """Runs the step as a step of training would."""

    model: Module
    step: Callable[[], object]
    device: str
    fresh: Callable[[], None]
    optimizer: Optimizer | None

    def trial(self, modules: Mapping[str, Module], choices: Mapping[str, Choice]) -> _Trial:
        """A step under the choices."""
        done, held, order = True, list[Holder](), dict[str, None]()
        paths = {id(module): path for path, module in modules.items()}
        for path, module in modules.items():
            _set(module, choices[path])
        self.fresh()
        with memory_ledger(self.model, self.optimizer, self.device) as ledger:

            def ran(module: Module, output: Any) -> None:
                held[:] = ledger.report().at(-1)
                order[paths[id(module)]] = None

            removes = [module.register_forward_hook(ran) for module in modules.values()]
            try:
                self.step()
            except MemoryError:  # cupy's is one, too
                done = False
            finally:
                for remove in removes:
                    remove()
        return _Trial(choices, ledger.report(), held, list(order), done)

    def seconds(self) -> float:
        """The time of a step; infinite if it runs out of memory."""
        self.fresh()
        one = registry.get(self.device).xp.zeros(1)
        float(one[0])  # waits for the device
        begin = perf_counter()
        try:
            self.step()
        except MemoryError:
            return math.inf
        float(one[0])
        return perf_counter() - begin


def _measured(
    modules: Mapping[str, Module], run: _Runner, rounds: int
) -> tuple[dict[str, _Costs], list[_Trial], int]:
    """Costs of parts, steps in which all choose the same, the least bytes beside parts'."""
    groups: dict[Any, list[str]] = {}
    for path, module in modules.items():
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        groups.setdefault((type(module), shapes), []).append(path)
    trials = {choice: run.trial(modules, dict.fromkeys(modules, choice)) for choice in _CHOICES}
    saved = {choice: _saved(trial.held, modules) for choice, trial in trials.items()}
    done = [choice for choice, trial in trials.items() if trial.done]
    times = (
        _times(list(groups.values()), modules, run, rounds, done) if done else [{}] * len(groups)
    )
    found = dict[str, _Costs]()
    for paths, seconds in zip(groups.values(), times, strict=True):
        nbytes = {choice: max(saved[choice][path] for path in paths) for choice in _CHOICES}
        found |= dict.fromkeys(paths, _Costs(nbytes, seconds))
    costs = {path: found[path] for path in modules}
    rests = [trials[choice].peak - _nbytes(costs, trials[choice].choices) for choice in done]
    return costs, list(trials.values()), min(rests, default=0)


def _saved(held: Sequence[Holder], paths: Mapping[str, Module]) -> Counter[str]:
    """Bytes that each part keeps for backward."""
    found = Counter[str]()
    for one in held:
        for path in paths:
            if one.kind == "saved" and f"{one.layer}.".startswith(f"{path}."):
                found[path] += one.nbytes
    return found


def _times(
    groups: Sequence[Sequence[str]],
    modules: Mapping[str, Module],
    run: _Runner,
    rounds: int,
    choices: Sequence[Choice],
) -> list[dict[Choice, float]]:
    """For each kind, what one part takes longer under each choice than under the first of them.

    All other parts have the first. Steps run in turn, so that a slow minute is everybody's.
    A choice that runs out of memory has no time.
    """
    first = choices[0]
    changes = [(-1, first), *((i, choice) for i in range(len(groups)) for choice in choices[1:])]
    taken: dict[tuple[int, Choice], list[float]] = {change: [] for change in changes}
    for _ in range(rounds):
        for number, choice in changes:
            for i, paths in enumerate(groups):
                for path in paths:
                    _set(modules[path], choice if i == number else first)
            taken[number, choice].append(run.seconds())
    pairs = {
        change: median(a - b for a, b in zip(seconds, taken[-1, first], strict=True))
        for change, seconds in taken.items()
    }
    return [
        {first: 0.0}
        | {c: pairs[i, c] / len(paths) for c in choices[1:] if math.isfinite(pairs[i, c])}
        for i, paths in enumerate(groups)
    ]


def _nbytes(costs: Mapping[str, _Costs], choices: Mapping[str, Choice]) -> int:
    """The most bytes of all parts, in the order in which they run.

    When a part runs again in the backward pass, what later parts kept has been let go.
    """
    before = most = 0
    for path, choice in choices.items():
        most = max(most, before + costs[path].most(choice))
        before += costs[path].nbytes[choice]
    return most


def _seconds(costs: Mapping[str, _Costs], choices: Mapping[str, Choice]) -> float:
    """What a step takes longer under the choices."""
    return sum(costs[path].seconds.get(choice, math.inf) for path, choice in choices.items())


Point = tuple[int, float, tuple[tuple[str, Choice], ...]]
"""Bytes, seconds, and the choices that take them."""


def _solve(costs: Mapping[str, _Costs], budget: int) -> dict[str, Choice] | None:
    """The choices of least time within a budget of bytes; None where nothing fits."""
    front: list[Point] = [(0, 0.0, ())]
    for path, part in costs.items():
        front = _pareto(
            (n + part.nbytes[c], t + seconds, (*done, (path, c)))
            for n, t, done in front
            for c, seconds in part.seconds.items()
            if n + part.most(c) <= budget
        )
    return dict(min(front, key=lambda point: point[1])[2]) if front else None


def _pareto(points: Iterator[Point]) -> list[Point]:
    """The points that no other beats in both bytes and seconds."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: one[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
