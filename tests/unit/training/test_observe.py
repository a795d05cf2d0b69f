"""An experiment's queue, its rate, its table with standard errors, and its page."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest

from extensor import models
from extensor.training import loop
from extensor.training.batch import Batch
from extensor.training.checkpoints import read_position, save_run
from extensor.training.comparison import Finished, Job
from extensor.training.config import RunConfig
from extensor.training.loop import Interrupted, Trainer
from extensor.training.observe import cost as costs
from extensor.training.observe import devices
from extensor.training.observe import gather as gathering
from extensor.training.observe import queue as queues
from extensor.training.observe.alone import RATES, alone, at_equal_time, read_rates, times_alone
from extensor.training.observe.command import ObserveArgs, observe
from extensor.training.observe.cost import Cost, Meter
from extensor.training.observe.devices import Place, environment, places, visible
from extensor.training.observe.entry import Entry
from extensor.training.observe.experiments import EXPERIMENTS, Experiment
from extensor.training.observe.forecast import expected_seconds, schedule
from extensor.training.observe.gather import gather
from extensor.training.observe.page import write_page
from extensor.training.observe.peers import PEERS, measure_peer
from extensor.training.observe.queue import Queue, Running
from extensor.training.observe.rates import measure_rates
from extensor.training.rundir import LAST, UsageError, claim, read_epochs
from extensor.training.runs import defaults
from extensor.training.train import train
from tests.unit.training.conftest import QUIET, SMALL

TINY = Experiment(
    "two arms of a perceptron on 96 digits",
    "mlp",
    {**{k: v for k, v in SMALL.items() if k != "lr"}, "epochs": 2, "warmup_epochs": 0.5},
    ("fp32", "mxfp4_all,fp32@50%"),
    (0.02, 1e-6),
    1,
    seeds=2,
    telemetry=5,
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, one a minute."""
    now = [0.0]
    monkeypatch.setattr(
        queues, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None)
    )

    def start(self: Queue, entry: Entry, deadline: float, place: Place) -> SimpleNamespace:
        entry.begin()
        if entry.kind == "trunk":
            train_trunk(entry)
        else:
            train(
                entry.job.config, entry.job.folder, resume=entry.state != "waiting", console=QUIET,
                telemetry=self.experiment.telemetry if entry.kind == "arm" else 0,
            )  # fmt: skip
        now[0] += 60
        return SimpleNamespace(entry=entry, place=place, ended=lambda: True, end=lambda: None)

    monkeypatch.setattr(Queue, "_start", start)


def test_every_experiment_is_a_list_of_valid_runs() -> None:
    for experiment in EXPERIMENTS.values():
        runs = experiment.runs(1e-3)
        assert len(runs) == len(experiment.arms) * experiment.seeds
        assert runs[0].recipe == experiment.baseline in ("bf16", "fp32")
        assert all(trial.recipe == experiment.baseline for trial in experiment.trials())
        switches = [run.recipe_schedule.phases for run in runs]
        share = 100 * experiment.branch / runs[0].epochs  # all arms are the baseline until then
        assert not experiment.branch or all(
            phases[0].recipe.name == experiment.baseline
            and all(phase.percent and phase.start >= share for phase in phases[1:])
            for phases in switches
        )
        assert {arm for pair in experiment.pairs for arm in pair} <= set(experiment.arms)
        rates = experiment.rates
        assert 0 < rates[0] and list(rates) == sorted(set(rates))
        assert runs[0].batch_size % 8 == 0  # whole tiles of a GPU's products
        assert 0 <= runs[0].warmup_epochs <= runs[0].epochs / 6
    tokens = {name: EXPERIMENTS[name].runs(1e-3)[0] for name in ("3m", "10m", "30m", "98m")}
    for name, run in tokens.items():  # at least 25 tokens a weight, to a rounded step
        weights = float(name.removesuffix("m")) * 1e6
        assert run.epochs * run.epoch_steps * run.batch_size * run.context > 24 * weights


def test_arms_go_on_from_the_baselines_first_epochs(here: None, tmp_path: Path) -> None:
    """To the bits of runs from the start, and with the trunk trained once."""
    arms = ("fp32", "fp32,mxfp4_all@50%")
    whole = replace(TINY, arms=arms, rates=(0.02,), seeds=1)
    apart = Queue(whole, tmp_path / "whole")
    assert apart.run(60, QUIET)
    branched = Queue(replace(whole, branch=1, pairs=(arms[::-1],)), tmp_path / "branched")
    assert branched.plan(60)[-1].startswith("first: trunk-fp32-s0")
    assert branched.run(60, QUIET) and branched.failed == {}
    for a, b in zip(apart.entries(), branched.entries()[1:], strict=True):
        assert b.state == "finished" and b.trunk is not None
        ours, theirs = b.job.finished(), a.job.finished()
        assert ours.curve == theirs.curve and len(ours.curve) == 2
        for key in ("loss", "train_loss", "steps"):
            assert ours.result[key] == theirs.result[key]
    trunk, _, arm = branched.entries()
    for entry, cost in ((trunk, Cost(2.0, 30.0, 7)), (arm, Cost(1.0, 10.0, 5))):
        entry.cost_file.parent.mkdir(parents=True, exist_ok=True)
        entry.cost_file.write_text(json.dumps(cost.as_dict()))
    results = gather(branched)
    costs = [(row["joules"], row["peak_bytes"]) for row in results["arms"]]
    assert costs == [(None, 7), (40.0, 7)]  # of the trunk, too, as seconds are
    assert results["pairs"] == [
        {"arm": arms[1], "other": "fp32", "gaps": [results["arms"][1]["gap"]],
         **{key: results["arms"][1][key] for key in (
             "gap", "gap_standard_error", "train_gap", "train_gap_standard_error")}}
    ]  # fmt: skip
    write_page(results, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert "against" in page and "in b from half of its steps on" in page
    assert "<h2>Curves</h2>" in page and "Curves by time" not in page  # no rates


def test_a_trunk_is_no_beginning_of_an_arm_that_parted_before(tmp_path: Path) -> None:
    base = replace(TINY, arms=("fp32", "mxfp4_all,fp32@50%"), rates=(0.02,), seeds=1, branch=1)
    queue = Queue(base, tmp_path)
    trunk, _, arm = queue.entries()
    train_trunk(trunk)
    arm.begin()
    with pytest.raises(UsageError, match="differs in recipe"):
        train(arm.job.config, arm.job.folder, resume=True, console=QUIET)


def test_a_trunk_is_finished_when_its_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of metrics.jsonl comes first, and the disk is full then."""
    experiment = replace(TINY, arms=("fp32",), rates=(0.02,), seeds=1, branch=2)
    experiment = replace(experiment, settings={**experiment.settings, "epochs": 3})
    queue = Queue(experiment, tmp_path)
    trunk, arm = queue.entries()
    saves = itertools.count(1)

    def full_at_the_second(run: Trainer, path: Path) -> None:
        if next(saves) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_run(run, path)

    monkeypatch.setattr(loop, "save_run", full_at_the_second)
    with pytest.raises(OSError, match="No space"):
        train(trunk.job.config, trunk.job.folder, resume=False, console=QUIET, until_epoch=2)
    assert len(read_epochs(trunk.job.folder)) == 2 and trunk.state == "interrupted"
    assert queue.next() == trunk
    monkeypatch.undo()
    train_trunk(trunk, resume=True)
    assert trunk.state == "finished" and queue.next() == arm
    with pytest.raises(UsageError, match=r"--until-epoch 2: nothing to do.* has done 2 epochs"):
        train(trunk.job.config, trunk.job.folder, resume=True, console=QUIET, until_epoch=2)

    def killed(file: BinaryIO, copy: BinaryIO) -> None:
        copy.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", killed)
    with pytest.raises(KeyboardInterrupt):
        arm.begin()
    assert arm.state == "waiting"
    monkeypatch.undo()
    arm.begin()
    assert read_position(arm.job.folder / LAST).epoch == 3


def train_trunk(entry: Entry, resume: bool = False) -> None:
    """Its process, in this one."""
    with pytest.raises(Interrupted):
        train(
            entry.job.config, entry.job.folder, resume=resume, console=QUIET,
            until_epoch=entry.epochs,
        )  # fmt: skip


def test_a_plan_is_made_of_what_runs_took(here: None, tmp_path: Path) -> None:
    queue = Queue(TINY, tmp_path)
    first = queue.plan(5)
    assert first[:2] == [
        "0 of 2 runs known so far are finished",
        "then 4 runs at the rate that these trials find",
    ]
    assert first[2].startswith("first: rate-0.02-fp32-s0; how long it takes is not known")
    queue.run(2, QUIET)
    for entry in queue.entries()[:2]:  # trials of one epoch; arms have two
        write_json_cost(entry, 60.0)
    assert queue.plan(1)[1] == f"from minute 0.0: {queue.entries()[2].name}, 2.0 minutes" + (
        ", which the time ends"
    )
    queue.run(1, QUIET)
    for entry, seconds in zip(queue.entries()[:3], (60.0, 120.0, 90.0), strict=True):
        write_json_cost(entry, seconds)
    begun = queue.entries()[4]
    claim(begun.job.folder, begun.job.config, resume=False)
    (begun.job.folder / LAST).write_bytes(b"")
    write_json_cost(begun, 45.0)
    assert queue.plan(2) == [
        "3 of 6 runs known so far are finished",
        f"from minute 0.0: {begun.name}, 0.8 minutes",
        f"from minute 0.8: {queue.entries()[3].name}, 1.5 minutes, which the time ends",
    ]


def write_json_cost(entry: Entry, seconds: float) -> None:
    entry.cost_file.parent.mkdir(parents=True, exist_ok=True)
    entry.cost_file.write_text(json.dumps(Cost(seconds).as_dict()))


def test_a_queue_goes_on_where_the_time_ran_out(here: None, tmp_path: Path) -> None:
    queue = Queue(TINY, tmp_path)
    assert queue.next().name == "rate-0.02-fp32-s0" and queue.rate() is None
    assert not queue.run(2, QUIET)
    state = json.loads((tmp_path / "queue.json").read_text())
    assert [row["state"] for row in state["runs"]] == ["finished", "finished"] + ["waiting"] * 4
    assert state["learning_rate"] == 0.02 and state["next"] == "arm-fp32-s0"
    again = Queue(TINY, tmp_path)
    assert again.run(60, QUIET) and again.next() is None
    arms = [entry for entry in again.entries() if entry.kind == "arm"]
    assert [entry.job.config.lr for entry in arms] == [0.02] * 4
    found = gather(again)
    values = {arm["arm"]: arm["values"] for arm in found["arms"]}
    gaps = [b - a for a, b in zip(*values.values(), strict=True)]
    row = found["arms"][1]
    assert row["gap"] == pytest.approx(statistics.fmean(gaps))
    assert row["gap_curve"][-1] == pytest.approx(row["gap"])
    assert row["curve"][-1] == pytest.approx(row["mean"])  # as people read it, in %
    assert row["gap_standard_error"] == pytest.approx(statistics.stdev(gaps) / math.sqrt(2))
    assert found["arms"][0]["gap"] == found["arms"][0]["train_gap"] == 0 and len(row["curve"]) == 2
    trained = [[json.loads((e.job.folder / "result.json").read_text())["train_loss"]
                for e in arms if e.job.config.recipe == arm] for arm in TINY.arms]  # fmt: skip
    expected = [100 * (b - a) / a for a, b in zip(*trained, strict=True)]
    assert row["train_gap"] == pytest.approx(statistics.fmean(expected))
    assert row["health"][0]["gradient_over_noise"] is None  # its last steps are in float32


def test_the_command_writes_a_page_that_loads_nothing(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPERIMENTS, "small", TINY)
    rate = {"per_second": 100.0, "joules": 0.5, "bytes": 1 << 20, "milliseconds": 1.0}
    rates = {"fp32": rate, "mxfp4_all": {**rate, "per_second": 300.0}, "other": {"problem": "no"}}
    (tmp_path / RATES).write_text(json.dumps(rates))
    assert observe(ObserveArgs("small", tmp_path, minutes=60), QUIET) == 0
    text = (tmp_path / "index.html").read_text()
    assert "mxfp4_all,fp32@50%" in text and text.count("<svg") == 3 and "data-sort" in text
    arms = json.loads((tmp_path / "results.json").read_text())["arms"]
    assert arms[1]["alone"]["per_second"] == pytest.approx(150)  # half of the steps each
    labels = arms[0]["times"][-1] * 100
    assert arms[1]["times"] == pytest.approx([labels / 600, labels / 150])
    late, early = arms[0]["curve"]
    assert arms[1]["at_equal_time"] == arms[1]["curve"][-1]
    assert arms[0]["at_equal_time"] == pytest.approx(late + (early - late) / 3)
    assert "http" not in text.replace("http://www.w3.org", "")
    assert json.loads((tmp_path / "results.json").read_text())["arms"][1]["runs"] == 2
    with pytest.raises(ValueError, match="no experiment named 'smal'"):
        ObserveArgs("smal")
    with pytest.raises(ValueError, match="no arm named 'mxfp'"):
        ObserveArgs("small", arms=("mxfp",))
    with pytest.raises(ValueError, match="--jobs: expected a whole number, 1 or more, got 0"):
        ObserveArgs("small", jobs=0)


def test_arms_are_run_side_by_side_as_far_as_they_are_chosen(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time; an arm waits for the learning rate, and one that runs is not begun again."""
    begun: list[str] = []
    start, polls = Queue._start, [0]

    def slow(self: Queue, entry: Entry, deadline: float, place: Place) -> SimpleNamespace:
        begun.append(entry.name)
        one = start(self, entry, deadline, place)
        one.ended = lambda: polls.__setitem__(0, polls[0] + 1) or polls[0] % 3 == 0
        return one

    monkeypatch.setattr(Queue, "_start", slow)
    assert Queue(TINY, tmp_path, only=["fp32"]).run(60, QUIET, [None, None])
    assert begun == ["rate-0.02-fp32-s0", "rate-1e-06-fp32-s0", "arm-fp32-s0", "arm-fp32-s1"]
    assert Queue(TINY, tmp_path, seeds=1, first_seed=1).run(60, QUIET)
    assert begun[4:] == ["arm-mxfp4_all+fp32@50pc-s1"]
    assert Queue(TINY, tmp_path, seeds=1).run(60, QUIET)
    assert begun[5:] == ["arm-mxfp4_all+fp32@50pc-s0"]


def test_no_run_begins_that_the_time_would_interrupt(here: None, tmp_path: Path) -> None:
    queue = Queue(TINY, tmp_path)
    queue.run(3, QUIET)
    for entry in queue.entries()[:3]:
        write_json_cost(entry, 90.0)
    assert not queue.run(1.4, QUIET, whole_runs=True) and queue.entries()[3].state == "waiting"
    assert not queue.run(1.6, QUIET, whole_runs=True) and queue.entries()[3].state == "finished"
    assert queue.entries()[4].state == "waiting"


def test_a_shorter_run_goes_first_where_a_longer_one_does_not_fit(
    here: None, tmp_path: Path
) -> None:
    """By what the same arm took with another seed."""
    queue = Queue(TINY, tmp_path)
    queue.run(4, QUIET)
    for entry, seconds in zip(queue.entries()[2:4], (600.0, 60.0), strict=True):
        write_json_cost(entry, seconds)
    assert not queue.run(5, QUIET, whole_runs=True)
    assert [entry.state for entry in queue.entries()[4:]] == ["waiting", "finished"]
    assert queue.plan(20, 2)[1:] == [f"from minute 0.0: {queue.entries()[4].name}, 10.0 minutes"]


def test_an_arm_takes_its_labels_at_its_rate_and_as_much_longer_as_others_did(
    here: None, tmp_path: Path
) -> None:
    text = replace(EXPERIMENTS["small"], rates=(2e-3,), arms=("bf16", "mxfp4", "quartet"), seeds=1)
    entries = Queue(text, tmp_path).entries()
    rates = {"bf16": {"per_second": 1e3}, "mxfp4": {"per_second": 500.0}, "quartet": {}}
    rates = {k: v | {"joules": None, "bytes": None} if v else v for k, v in rates.items()}
    labels = 8 * 50 * 16 * 64
    assert expected_seconds(entries, rates) == {
        entries[0].name: labels / 1e3,
        entries[1].name: labels / 500,
    }
    done = SimpleNamespace(
        state="finished", kind="arm", trunk=None, job=entries[0].job,
        cost_file=entries[0].cost_file,
    )  # fmt: skip
    write_json_cost(entries[0], 1.5 * labels / 1e3)
    assert expected_seconds([done, *entries[1:]], rates) == {
        entries[1].name: 1.5 * labels / 500,
        entries[2].name: 1.5 * labels / 1e3,
    }


def test_an_arm_needs_no_time_for_its_trunk(tmp_path: Path) -> None:
    arms = ("bf16", "bf16,mxfp4@50%")
    text = replace(EXPERIMENTS["small"], rates=(2e-3,), arms=arms, seeds=1, branch=4)
    rate = {"joules": None, "bytes": None}
    rates = {"bf16": {"per_second": 1e3, **rate}, "mxfp4": {"per_second": 500.0, **rate}}
    half = 4 * 50 * 16 * 64
    needed = expected_seconds(Queue(text, tmp_path).entries(), rates)
    assert list(needed.values()) == pytest.approx([half / 1e3, half / 1e3, half / 500])


def test_fallbacks_are_a_share_of_the_last_epochs_products(tmp_path: Path) -> None:
    entry = Queue(EXPERIMENTS["small"], tmp_path).entries()[0]  # 50 steps an epoch
    health = [
        {"slot": "fprop.x", "fallbacks": 5},
        {"slot": "fprop.w", "fallbacks": 0},
        {"slot": "wgrad.g", "fallbacks": 20},
        {"slot": "wgrad.g"},  # of a result before they were counted
    ]
    run = Finished("mxfp4", 0, {"health": health}, [])
    assert gathering._fallbacks(entry, run) == 25 / (50 * 3)
    assert gathering._fallbacks(entry, replace(run, result={"health": []})) is None


def test_gpus_are_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-x,-1,7")
    assert visible() == ("4", "GPU-x")
    assert places(2, 2, "cuda") == ["4", "GPU-x", "4", "GPU-x"] and places(1, 1, "cuda") == ["4"]
    with pytest.raises(UsageError, match="--gpus: .* got 3; it sees 2"):
        places(3, 1, "cuda")
    with pytest.raises(UsageError, match="trains on the CPU"):
        places(2, 1, "cpu")
    assert places(1, 2, "cpu") == [None, None] and environment(None) == {}


def test_each_run_sees_one_gpu_that_no_other_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs the last gets the place that is free first."""
    left = {"4": 9, "6": 2}  # polls until a run on this GPU ends
    given: list[str] = []

    def start(job: Job, variables: dict[str, str]) -> SimpleNamespace:
        place = variables["CUDA_VISIBLE_DEVICES"]
        given.append(place)
        polls = itertools.count()
        poll = lambda: None if next(polls) < left[place] else 1  # noqa: E731
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_text("no such GPU")
        return SimpleNamespace(pid=os.getpid(), poll=poll, returncode=1)

    monkeypatch.setattr(Job, "start", start)
    monkeypatch.setattr(queues, "POLL_S", 0.0)
    queue = Queue(replace(TINY, rates=(0.02, 0.01, 1e-6)), tmp_path)
    assert not queue.run(1, QUIET, ["4", "6"])
    assert given == ["4", "6", "6"] and len(queue.failed) == 3


def test_a_rate_is_measured_once(tmp_path: Path) -> None:
    queue = Queue(TINY, tmp_path)
    measure_rates(queue, 0.01, math.inf, QUIET)
    rates = read_rates(tmp_path)
    assert set(rates) == {"fp32", "mxfp4_all"} and rates["fp32"]["per_second"] > 0
    (tmp_path / RATES).write_text(json.dumps({"fp32": {"per_second": 1.0}}))
    measure_rates(queue, 0.01, math.inf, QUIET)
    assert read_rates(tmp_path)["fp32"] == {"per_second": 1.0}


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupted_process_is_no_failure(
    tmp_path: Path, request: pytest.FixtureRequest, ignored: bool
) -> None:
    """A real process, stopped at once: it waits or is interrupted, and its cost is kept.

    Also where this process ignores SIGINT, as what a script starts with ``&`` does.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    queue = Queue(TINY, tmp_path)
    entry = queue.next()
    one = Running(entry, deadline=-1.0)
    while not one.ended():
        time.sleep(0.05)
    assert queue._state(one) == "interrupted"
    assert not queue.failed and entry.state in ("waiting", "interrupted")
    assert Cost.read(entry.cost_file).seconds > 0


def test_costs_add_up() -> None:
    assert Cost(1.0, None, 5) + Cost(2.0, 3.0, 4) == Cost(3.0, 3.0, 5)
    assert Cost() + Cost() == Cost()
    meter = Meter(os.getpid(), "cpu")
    meter.look()
    assert meter.cost().peak_bytes > 1 << 20 and meter.cost().joules is None


@pytest.mark.parametrize("name", list(PEERS)[:1])  # the other needs a GPU
def test_torch_trains_the_same_model(name: str) -> None:
    """Its first loss is that of guessing, and falls."""
    pytest.importorskip("torch")
    shape = models.config("llama", "nano", vocab=65, context=32)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, (2, 33))

    def batches() -> Iterator[Batch]:
        while True:
            yield Batch(0, tokens[:, :-1], tokens[:, 1:])

    config = RunConfig(
        **{**defaults("llama"), "batch_size": 2, "context": 32, "lr": 1e-2}, recipe="bf16"
    )
    shape = replace(shape, kv_heads=shape.heads)
    found = measure_peer(name, config, shape, batches(), 1.0, compiled=False)
    assert found["per_second"] > 0 and found["loss"] < math.log(65) - 0.1


RATE = {"joules": 2.0, "bytes": 10, "per_second": 100.0}


def test_a_schedule_takes_each_recipes_share_of_the_time() -> None:
    other = {"joules": 6.0, "bytes": None, "per_second": 25.0}
    rates: dict[str, dict[str, Any]] = {"bf16": RATE, "mxfp4": other, "int8": {}}
    assert alone("bf16", rates) == RATE
    assert alone("bf16,mxfp4@75%", rates) == {
        "per_second": pytest.approx(1 / (0.75 / 100 + 0.25 / 25)), "joules": 3.0, "bytes": 10,
    }  # fmt: skip
    assert alone("bf16,mxfp4@300", rates) is None  # after steps: its share is not known
    assert alone("bf16,int8@50%", rates) is None and alone("fp32", rates) is None
    assert times_alone("bf16,mxfp4@75%", rates, [100, 300, 400]) == [1.0, 3.0, 7.0]


def test_arms_are_compared_when_the_first_has_ended() -> None:
    rows: list[dict[str, Any]] = [
        {"times": [1.0, 2.0, 3.0], "curve": [9.0, 8.0, 7.0]},
        {"times": [2.0, 4.0, 6.0], "curve": [5.0, 3.0, 1.0]},
        {"times": [2.0, 4.0], "curve": [5.0, None]},
        {"times": [3.0, 4.0], "curve": [6.0, 5.0]},
        {"times": [3.5, 4.0], "curve": [6.0, 5.0]},
        {"times": [], "curve": []},
    ]
    at_equal_time(rows)
    assert [row["at_equal_time"] for row in rows] == [7.0, 4.0, None, 6.0, None, None]


def test_a_plan_says_which_run_the_time_ends() -> None:
    names = [SimpleNamespace(name=name) for name in "abc"]
    needed = {"a": 60.0, "b": 120.0, "c": 60.0}
    assert schedule(names, needed, 150.0, 1) == [  # type: ignore[arg-type]
        "from minute 0.0: a, 1.0 minutes", "from minute 1.0: b, 2.0 minutes, which the time ends",
    ]  # fmt: skip
    assert schedule(names, needed, 120.0, 2) == [  # type: ignore[arg-type]
        "from minute 0.0: a, 1.0 minutes", "from minute 0.0: b, 2.0 minutes",
        "from minute 1.0: c, 1.0 minutes",
    ]  # fmt: skip


def test_the_first_visible_card_is_measured_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetHandleByUUID=lambda name: name
    )
    monkeypatch.setattr(devices, "nvml", lambda: library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-x")
    assert devices.card() == 3 and devices.card("GPU-x") == "GPU-x" and devices.card("5") == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.card() is None
    monkeypatch.setattr(devices, "nvml", lambda: None)
    assert devices.card("5") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_largest_memory_of_a_process_is_in_bytes() -> None:
    import resource

    before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert abs(costs._resident(os.getpid()) - before) <= 4096 * 1024 // 8  # type: ignore[operator]
    assert costs._resident(1 << 30) is None
    assert costs._resident(os.getpid()) % 1024 == 0  # type: ignore[operator]
