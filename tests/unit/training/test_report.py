"""Tables and plots of comparisons, on made-up results."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from extensor.training import compare as comparing
from extensor.training.compare_report import draw, markdown, summarize, write_report
from extensor.training.comparison import CompareArgs, Finished, Job
from extensor.training.result import diverged_text
from extensor.training.runs import RUNS as LISTED
from extensor.training.runs import defaults
from extensor.training.tasks import TASKS


def args(**changes: Any) -> CompareArgs:
    row = {k: v for k, v in defaults("lenet").items() if k not in ("recipe", "seed")}
    return CompareArgs(**{**row, "recipes": "fp32,mxfp4,mxfp4_one", "seeds": 2, **changes})


def run(recipe: str, seed: int, accuracy: float, diverged: str | None = None) -> Finished:
    quantized = recipe != "fp32"
    result = {
        "accuracy": accuracy,
        "saturated": 0.01 if quantized else None,
        "flushed": 0.04 if quantized else None,
        "seconds_per_epoch": 2.0 + seed,
        "skipped_steps": seed,
        "diverged": diverged,
    }
    return Finished(recipe, seed, result, [accuracy / 2, accuracy - 0.01, accuracy])


RUNS = [
    run("fp32", 0, 0.98),
    run("fp32", 1, 0.99),
    run("mxfp4", 0, 0.97),
    run("mxfp4", 1, 0.98),
    run("mxfp4_one", 0, 0.1, "stuck at chance"),
]


def test_a_short_run_is_not_said_to_diverge() -> None:
    short = diverged_text("stuck at chance: accuracy 12.78%", 10, "mxfp4")
    assert short.startswith("NOTHING LEARNED in 10 steps") and "try more --epochs" in short
    assert "such as mxfp4" not in short
    broken = diverged_text("no finite gradients", 3, "mxfp4_one")
    assert broken.startswith("DIVERGED") and broken.endswith("such as mxfp4")


def test_rows_are_mean_sd_and_gap_in_points() -> None:
    fp32, mxfp4, one = summarize(
        args().metric, RUNS, ["fp32", "mxfp4", "mxfp4_one"], failed=["mxfp4_one"]
    )
    assert fp32.mean == pytest.approx(98.5)
    assert fp32.sd == pytest.approx(math.sqrt(0.5))
    assert fp32.gap == 0.0
    assert fp32.saturated is None
    assert mxfp4.gap == pytest.approx(-1.0)
    assert mxfp4.seconds_per_epoch == 2.5
    assert mxfp4.skipped_steps == 1
    assert (one.sd, one.diverged, one.failed, one.runs) == (None, 1, 1, 1)


def test_the_gap_spreads_seed_by_seed() -> None:
    runs = [run("fp32", 0, 0.9), run("fp32", 1, 0.8), run("mxfp4", 0, 0.89), run("mxfp4", 1, 0.78)]
    fp32, mxfp4 = summarize(args().metric, runs, ["fp32", "mxfp4"])
    assert fp32.gap_sd is None
    assert mxfp4.gap == pytest.approx(-1.5)
    assert mxfp4.gap_sd == pytest.approx(math.sqrt(0.5))  # of -1 and -2, whatever the seeds' own
    _, other = summarize(args().metric, [*runs[:2], runs[3]], ["fp32", "mxfp4"])
    assert other.gap_sd is None, "seeds 0 and 1 against seed 1"


def test_without_fp32_there_is_no_gap() -> None:
    (row,) = summarize(args().metric, RUNS, ["mxfp4"])
    assert row.gap is None


def test_markdown_has_a_line_per_recipe() -> None:
    text = markdown(args(), summarize(args().metric, RUNS, args().names))
    assert "| mxfp4 | 97.50 ± 0.71 | -1.00 ± 0.00 | 1.00% | 4.00% | 2.5 | 1 | 0/2 |" in text
    assert "| mxfp4_one | 10.00 | -88.50 | 1.00% | 4.00% | 2.0 | 0 | 1/1 |" in text
    assert "`mxfp4`: " in text


def test_report_writes_everything(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    write_report(args(out=tmp_path), summarize(args().metric, RUNS, args().names), RUNS, console)
    content = json.loads((tmp_path / "compare.json").read_text())
    assert [row["recipe"] for row in content["rows"]] == ["fp32", "mxfp4", "mxfp4_one"]
    assert len(content["runs"]) == 5
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    # no number is cut off on a narrow terminal
    assert "97.50 ± 0.71" in console.file.getvalue()


@pytest.mark.parametrize("model", ["lenet", "gpt"])
def test_error_bars_and_curves_lie_inside_the_axes(model: str) -> None:
    """Two seeds' standard deviation is longer than their distance to the mean."""
    metric = TASKS[LISTED[model].task].metric
    runs = [
        Finished(recipe, seed, {**RUNS[0].result, metric.key: value}, [1.0, value, value])
        for recipe, values in (("fp32", (0.83, 0.87)), ("mxfp4", (0.80, 0.90)))
        for seed, value in enumerate(values)
    ]
    runs[0].curve[1] = 0.92  # better than every last epoch
    figure = Figure(layout="constrained")
    draw(figure, metric, summarize(metric, runs, ["fp32", "mxfp4"]), runs)
    bars, curves = figure.axes
    low, high = bars.get_xlim()
    ends = [x for bar in bars.collections for path in bar.get_paths() for x in path.vertices[:, 0]]
    assert len(ends) >= 4
    assert low < min(ends) and max(ends) < high
    assert curves.get_ylim()[0] <= 0.80 * metric.scale
    assert curves.get_ylim()[1] >= 0.92 * metric.scale
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in bars.texts]
    assert all(bars.get_window_extent().contains(*corner) for b in boxes for corner in b.corners())
    assert not boxes[0].overlaps(boxes[1])


def test_seeds_far_apart_do_not_push_every_mean_off_the_scale() -> None:
    runs = [run("fp32", 0, 0.9), run("fp32", 1, 0.1), run("mxfp4", 0, 0.1), run("mxfp4", 1, 0.1)]
    figure = Figure()
    draw(figure, args().metric, summarize(args().metric, runs, ["fp32", "mxfp4"]), runs)
    labels = [text.get_text().strip() for text in figure.axes[0].texts]
    assert labels == ["50.00 ± 56.57", "10.00 ± 0.00"]  # 10 lies within 50 ± 56.57


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds: expected a whole number, 1 or more, got 0"),
        ({"jobs": -1}, "--jobs: expected a whole number, 0 or more"),
        ({"recipes": " , "}, "--recipes: expected names separated by commas"),
        ({"recipes": "fp32,mxfp44"}, "no recipe named 'mxfp44'; did you mean"),
        ({"recipes": "mxfp8,mxfp8_nvidia"}, "expected each recipe once"),
        ({"epochs": 0}, "--epochs"),
    ],
)
def test_bad_comparisons_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        args(**changes)


def test_runs_are_every_recipe_with_every_seed() -> None:
    runs = args(epochs=3).runs()
    assert [(r.recipe, r.seed) for r in runs] == [
        (recipe, seed) for seed in (0, 1) for recipe in ("fp32", "mxfp4", "mxfp4_one")
    ]
    assert {r.epochs for r in runs} == {3}


def test_only_what_is_not_finished_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {("fp32", 0): run("fp32", 0, 0.9), ("mxfp4", 1): run("mxfp4", 1, 0.8)}
    begun: list[str] = []

    def noted(todo: list[Job], *_: object) -> dict[str, int]:
        begun.extend(job.name for job in todo)
        return {}

    monkeypatch.setattr(
        Job, "finished", lambda job: there.get((job.config.recipe, job.config.seed))
    )
    monkeypatch.setattr(comparing, "_run_all", noted)
    monkeypatch.setattr(comparing, "write_report", lambda *_: None)
    comparing.compare(args(out=tmp_path), Console())
    assert "2 of 6 runs are finished already" in capsys.readouterr().out and len(begun) == 4


def test_rows_below_one_that_is_off_the_scale_are_drawn() -> None:
    runs = [*RUNS[:2], RUNS[4], *RUNS[2:4]]
    figure = Figure()
    draw(
        figure, args().metric, summarize(args().metric, runs, ["fp32", "mxfp4_one", "mxfp4"]), runs
    )
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert len(labels) == 3 and "off the scale" in labels[1] and "97.5" in labels[2]
    dots = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata()) == 2]
    assert any(list(y) == [2, 2] for y in dots)  # each seed at its recipe's place


def test_a_run_is_told_of_by_its_last_epoch() -> None:
    job = SimpleNamespace(curve=lambda: [0.25, 0.5, 0.75])
    assert comparing._outcome(job, 0, args()) == args().metric.show(0.75)  # type: ignore[arg-type]
    assert comparing._outcome(job, 3, args()) == "exit code 3"  # type: ignore[arg-type]
