"""Schedules: values by hand, against torch, and as pure functions."""

import math
import warnings
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from extensor.autograd.tensor import ExTensor
from extensor.optim import (
    SGD,
    WSD,
    Cosine,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    ReduceLROnPlateau,
    Step,
    Warmup,
    WarmupCosine,
)

PURE = [
    Step(3, 0.5),
    MultiStep((2, 5), 0.1),
    Exponential(0.9),
    Cosine(8, 0.1),
    Linear(8, 1.0, 0.25),
    Warmup(4),
    Warmup(4, Step(2)),
    WarmupCosine(3, 10),
    OneCycle(12),
    WSD(2, 10, 4),
    WSD(2, 10, 4, shape="sqrt"),
]


def optimizer(*lrs):
    groups = [{"params": [ExTensor([1.0], requires_grad=True)], "lr": lr} for lr in lrs]
    return SGD(groups, lr=0.1)


def factors(schedule, steps):
    return [schedule.factor(step) for step in range(steps)]


def test_values_by_hand():
    assert factors(Step(2, 0.5), 5) == [1, 1, 0.5, 0.5, 0.25]
    assert factors(MultiStep((1, 3), 0.5), 5) == [1, 0.5, 0.5, 0.25, 0.25]
    assert factors(Exponential(0.5), 3) == [1, 0.5, 0.25]
    assert factors(Linear(4, 1.0, 0.0), 6) == [1, 0.75, 0.5, 0.25, 0, 0]
    assert factors(Linear(2, 0.5, 1.0), 3) == [0.5, 0.75, 1]
    assert factors(Warmup(4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Warmup(2, Step(1, 0.5)), 5) == [0.5, 1, 1, 0.5, 0.25]
    assert factors(Warmup(0), 2) == [1, 1]
    assert factors(Cosine(4), 6) == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0], abs=1e-15
    )
    assert factors(WarmupCosine(2, 4, 0.5), 6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.5])
    assert factors(WSD(2, 8, 4), 10) == pytest.approx(
        [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0], abs=1e-15
    )
    assert WSD(0, 8, 4, 0.1, "sqrt").factor(5) == pytest.approx(1 - 0.9 * 0.5)


@pytest.mark.parametrize("total", [4, 10, 37, 100])
def test_against_torch(total):
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    schedulers = torch.optim.lr_scheduler
    cases = [
        (lambda o: schedulers.StepLR(o, 3, 0.5), Step(3, 0.5)),
        (lambda o: schedulers.MultiStepLR(o, [2, 5], 0.1), MultiStep((2, 5), 0.1)),
        (lambda o: schedulers.ExponentialLR(o, 0.9), Exponential(0.9)),
        (lambda o: schedulers.CosineAnnealingLR(o, total, 0.01), Cosine(total, 0.1)),
        (lambda o: schedulers.LinearLR(o, 0.25, 1.0, total), Linear(total, 0.25, 1.0)),
        (lambda o: schedulers.OneCycleLR(o, 0.1, total, cycle_momentum=False), OneCycle(total)),
    ]
    for make, schedule in cases:
        theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        scheduler, mine = make(theirs), optimizer(0.1)
        for step in range(total):
            schedule.apply(mine, step)
            expected = theirs.param_groups[0]["lr"]
            assert mine.groups[0].options["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12), (
                step
            )
            with warnings.catch_warnings():  # torch wants optimizer.step() in between
                warnings.simplefilter("ignore")
                if step < total - 1:
                    scheduler.step()


def test_plateau_against_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    rng = np.random.default_rng(0)
    for mode in ("min", "max"):
        theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            theirs, mode, 0.5, patience=2, threshold=0.01, cooldown=3, min_lr=0.01
        )
        mine = ReduceLROnPlateau(mode, 0.5, 2, 0.01, cooldown=3, minimum=0.01)
        for _ in range(60):
            metric = float(rng.random()) + 1.0
            scheduler.step(metric)
            mine.observe(metric)
            assert mine.factor(0) == theirs.param_groups[0]["lr"]


@pytest.mark.parametrize("schedule", PURE, ids=repr)
def test_pure_and_bounded(schedule):
    with pytest.raises(FrozenInstanceError):
        schedule.total = 9
    forwards = factors(schedule, 40)
    assert forwards == [schedule.factor(step) for step in reversed(range(40))][::-1]
    assert all(0.0 <= factor <= 1.0 + 1e-12 for factor in forwards)
    assert hash(schedule) == hash(schedule)


def test_apply_scales_each_groups_base_rate():
    two = optimizer(0.1, 1.0)
    for _ in range(2):  # applying twice does not compound
        assert Step(1, 0.5).apply(two, 2) == 0.25
    assert [g.options["lr"] for g in two.groups] == [0.025, 0.25]
    assert [g.base_lr for g in two.groups] == [0.1, 1.0]


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_bad_steps(step):
    with pytest.raises(ValueError, match="step: expected an int, 0 or more"):
        Cosine(4).apply(optimizer(0.1), step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step(0), "every: expected an int, 1 or more, got 0"),
        (lambda: Step(1.5), "every"),
        (lambda: Step(1, 1.5), r"gamma: expected a number in \[0.0, 1.0\], got 1.5"),
        (lambda: MultiStep((3, 2)), "increasing"),
        (lambda: MultiStep((2, 2)), "increasing"),
        (lambda: MultiStep((-1,)), "milestones: expected an int"),
        (lambda: MultiStep((1,), -0.1), "gamma"),
        (lambda: Exponential(float("nan")), "gamma"),
        (lambda: Cosine(0), "total"),
        (lambda: Cosine(3, -0.1), "final"),
        (lambda: Linear(True), "total"),
        (lambda: Linear(3, -1.0), "start"),
        (lambda: Linear(3, 1.0, float("inf")), "final"),
        (lambda: Warmup(-1), "steps"),
        (lambda: WarmupCosine(5, 5), "total: expected an int, 6 or more, got 5"),
        (lambda: WarmupCosine(-1, 5), "warmup"),
        (lambda: WarmupCosine(1, 5, 2.0), "final"),
        (lambda: OneCycle(0), "total"),
        (lambda: OneCycle(5, warm=1.5), "warm"),
        (lambda: OneCycle(5, start_divisor=0.5), "start_divisor"),
        (lambda: OneCycle(5, final_divisor=0.5), "final_divisor"),
        (lambda: WSD(4, 7, 4), "total: expected an int, 8 or more, got 7"),
        (lambda: WSD(4, 7, 0), "decay"),
        (lambda: WSD(-1, 7, 1), "warmup"),
        (lambda: WSD(1, 7, 1, 1.5), "final"),
        (lambda: WSD(1, 7, 1, shape="cubic"), "shape: expected 'linear' or 'sqrt'"),
        (lambda: ReduceLROnPlateau("best"), "mode: expected 'min' or 'max'"),
        (lambda: ReduceLROnPlateau(gamma=2.0), "gamma"),
        (lambda: ReduceLROnPlateau(patience=-1), "patience"),
        (lambda: ReduceLROnPlateau(threshold=-1.0), "threshold"),
        (lambda: ReduceLROnPlateau(cooldown=-1), "cooldown"),
        (lambda: ReduceLROnPlateau(minimum=2.0), "minimum"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        *((make, (1, bound)) for make in (Step, Cosine) for bound in (0.0, 1.0)),
        *((Exponential, (bound,)) for bound in (0.0, 1.0)),
        *((MultiStep, ((0, 1), bound)) for bound in (0.0, 1.0)),
        (Linear, (1, 0.0, 0.0)),
        (Warmup, (0,)),
        *((WarmupCosine, (0, 1, bound)) for bound in (0.0, 1.0)),
        *((OneCycle, (1, warm, 1.0, 1.0)) for warm in (0.0, 1.0)),
        *((WSD, (0, 1, 1, bound)) for bound in (0.0, 1.0)),
        *((ReduceLROnPlateau, ("min", bound, 0, 0.0, 0, bound)) for bound in (0.0, 1.0)),
    ],
)
def test_arguments_at_their_bounds(make, arguments):
    make(*arguments)


def test_the_state_of_a_plateau_is_no_argument():
    for name in ("best", "bad", "cooling", "current"):
        with pytest.raises(TypeError, match=name):
            ReduceLROnPlateau(**{name: 1})


def test_plateau_resumes():
    metrics = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 2.0, 2.0, 2.0]
    through, first = (ReduceLROnPlateau(patience=1, cooldown=1) for _ in range(2))
    expected = [through.observe(m) for m in metrics]
    assert len(set(expected)) > 2
    got = [first.observe(m) for m in metrics[:5]]
    second = ReduceLROnPlateau(patience=1, cooldown=1)
    second.load_state_dict(first.state_dict())
    got += [second.observe(m) for m in metrics[5:]]
    assert got == expected


def test_plateau_refuses_what_is_no_reading():
    schedule = ReduceLROnPlateau()
    for metric in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the run has diverged"):
            schedule.observe(metric)
    with pytest.raises(ValueError, match="state: expected"):
        schedule.load_state_dict({"best": 1.0})
    assert schedule.state_dict() == {"best": None, "bad": 0, "cooling": 0, "current": 1.0}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("cooldown", [0, 1, 3])
@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_by_its_definition(mode, cooldown, patience):
    """A reading that is not better counts, unless one of the `cooldown` after a change."""
    options = {"gamma": 0.5, "patience": patience, "threshold": 0.01, "minimum": 0.01}
    schedule = ReduceLROnPlateau(mode, cooldown=cooldown, **options)
    rate, best, bad, resting = 1.0, None, 0, 0
    for metric in np.random.default_rng(0).random(80) + 1.0:
        change = -1 if mode == "min" else 1
        if best is None or change * (metric - best) > 0.01 * best:
            best, bad = metric, 0
        else:
            bad += 1
        if resting:
            resting, bad = resting - 1, 0
        if bad > patience:
            rate, bad, resting = max(0.5 * rate, 0.01), 0, cooldown
        assert schedule.observe(float(metric)) == schedule.factor(0) == rate
    assert rate < 0.1


@pytest.mark.parametrize(("total", "warm"), [(10, 0.3), (10, 0.0), (10, 1.0), (7, 0.5), (1, 0.5)])
def test_one_cycle_by_its_definition(total, warm):
    """Cosines: from 1/25 up to 1 at step warm * total - 1, then down to 1/2500 at the last step."""
    schedule, top = OneCycle(total, warm, 25.0, 100.0), max(warm * total - 1, 0.0)
    for step in range(total):
        if step <= warm * total - 1:
            low, share = 1 / 25, step / top if top else 1.0
        else:
            low, share = 1 / 2500, 1 - (step - top) / (total - 1 - top) if total - 1 > top else 0.0
        expected = low + (1 - low) * (1 - math.cos(math.pi * share)) / 2
        assert schedule.factor(step) == pytest.approx(expected, rel=1e-12), step


@pytest.mark.parametrize("schedule", [WarmupCosine(3, 10, 0.1), Cosine(10, 0.1), OneCycle(10)])
def test_from_its_end_on_a_schedule_stays_where_it_ends(schedule):
    ends = {"WarmupCosine": 0.1, "Cosine": 0.1, "OneCycle": 1 / 25 / 1e4}
    after = [schedule.factor(step) for step in (10, 11, 15, 1000)]
    assert after == pytest.approx([ends[type(schedule).__name__]] * 4, rel=1e-9)
    rising = [schedule.factor(step) for step in range(3, 11)]
    assert rising == sorted(rising, reverse=True) and schedule.factor(6) > 2 * after[0]


def test_a_plateau_improves_by_a_share_of_its_best():
    """Whatever the size of the metric; and its least factor is one."""
    for scale in (1e-3, 1.0, 1e3):
        plateau = ReduceLROnPlateau(gamma=0.5, patience=0, threshold=0.1)
        assert [plateau.observe(scale * m) for m in (1.0, 0.89, 0.85, 0.7)] == [1, 1, 0.5, 0.5]
    with pytest.raises(ValueError, match="minimum"):
        ReduceLROnPlateau(minimum=-0.5)
