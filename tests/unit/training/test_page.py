"""The page about a run: whole, escaped, and there for runs that are not finished."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from extensor.formats import FORMATS
from extensor.quant.recipe import SLOTS
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import QuantSpec
from extensor.training import page
from extensor.training.cli import main
from extensor.training.data import DataError
from extensor.training.histograms import VALUES, histogram_on_grid
from extensor.training.page.charts import MAX_LINES, telemetry
from extensor.training.rundir import LAST, METRICS, TELEMETRY
from extensor.training.svg import Line, bars, lines, number, ticks
from extensor.training.train import train
from tests.unit.training.conftest import QUIET, Make

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checked(HTMLParser):
    """Tags that close in order, nothing loaded from elsewhere; keeps the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe"), tag
        for name, value in attrs:
            inline = tag == "img" and (value or "").startswith("data:image/png;base64,")
            assert inline or name not in ("src", "href"), name
            assert not name.startswith("on"), name
            assert "nan" not in (value or "").split(",") and "inf" not in (value or "").split(",")
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> tuple[Checked, str]:
    text = path.read_text(encoding="utf-8")
    assert not any(word in text for word in ("url(", "http:", "https:", "@import"))
    made = Checked(text)
    return made, " ".join(made.text)


@pytest.mark.parametrize("recipe", ["mxfp4_all", "nvfp4_nvidia", "mxfp4_tseng", "fp32", "int8"])
def test_a_finished_run(
    recipe: str, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(small(recipe=recipe), out, resume=False, console=QUIET, telemetry=3)
    before = {p: p.read_bytes() for p in out.iterdir() if p.is_file()}
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    made, text = read(out / "report.html")
    assert {p: p.read_bytes() for p in before} == before
    assert "finished" in text and "2 epochs" not in text
    for word in (
        "layers.0",
        "weights",
        "activations",
        "gradients",
        "learning rate",
        "seed",
        "numpy",
    ):
        assert word in text, word
    assert RECIPES[recipe].doc in text
    assert made.tags.count("svg") >= 4 + 9 + 2
    assert ("no quantization error" in text) == (recipe == "fp32")
    assert ("below, training gains little" in text) == (recipe != "fp32")


def test_a_run_under_way(small: Make, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small(recipe="mxfp4_all"), out, resume=False, console=QUIET)
    (out / "result.json").unlink()
    lines_ = (out / METRICS).read_text().splitlines()
    (out / METRICS).write_text(lines_[0] + "\n" + lines_[1][:20])  # caught while writing
    path = page.write_page(page.ReportArgs(run=out, out=tmp_path / "page.html"))
    _, text = read(path)
    assert "unfinished, 1 of 2 epochs" in text and "train with --telemetry" in text
    for name in (LAST, METRICS):
        (out / name).unlink()
    _, text = read(page.write_page(page.ReportArgs(run=out)))
    assert "unfinished, 0 of 2 epochs" in text and "no checkpoint yet" in text
    assert "nothing is recorded yet" in text


def test_figures_that_are_not_finite(small: Make, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small(recipe="mxfp4_all"), out, resume=False, console=QUIET, telemetry=6)
    epochs = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    epochs[1] |= {"train_loss": None, "test_loss": None}
    (out / METRICS).write_text("".join(json.dumps(e) + "\n" for e in epochs))
    result = json.loads((out / "result.json").read_text())
    result["diverged"] = "the test loss is not finite <b>"
    (out / "result.json").write_text(json.dumps(result))
    record = json.loads((out / TELEMETRY).read_text().splitlines()[0])
    record["layers"]["<i>x</i>"] = {"gradient_norm": None, "gradient_over_noise": 2.0, "slots": {}}
    record["loss"] = None
    (out / TELEMETRY).write_text(json.dumps(record) + "\n")
    made, text = read(page.write_page(page.ReportArgs(run=out)))
    assert "diverged" in text and "not finite <b>" in text and "<i>x</i>" in text
    assert "i" in made.tags and made.text.count("<i>x</i>") == 1  # in a legend, as text


def test_layers_and_operands_are_marked_by_their_figures(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    train(small(recipe="mxfp4_all"), out, resume=False, console=QUIET)
    result = json.loads((out / "result.json").read_text())
    for row, (flushed, saturated, verdict) in zip(
        result["health"],
        ((0.26, 0.01, "flushes"), (0.24, 0.03, "saturates"), (0.24, 0.01, "ok")),
        strict=False,
    ):
        row |= {"flushed": flushed, "saturated": saturated, "verdict": verdict}
    (out / "result.json").write_text(json.dumps({**result, "health": result["health"][:3]}))
    facts = page.read_facts(out)
    rows = [
        dataclasses.replace(facts.rows[0], layer=name, sqnr_db=level)
        for name, level in (("bad", 9.9), ("poor", 14.9), ("fine", 15.1), ("(output)", 9.0))
    ]
    rows[0] = dataclasses.replace(rows[0], layer=result["health"][0]["layer"])
    monkeypatch.setattr(page, "read_facts", lambda _: dataclasses.replace(facts, rows=rows))
    path = page.write_page(page.ReportArgs(run=out))
    _, text = read(path)
    assert "fprop.x: 26.00% flushed" in text and "fprop.w: 3.00% saturated" in text
    assert "more than 25% were flushed" in text and "24.00%" not in text
    meters = re.findall(r'class="(meter[a-z ]*)"', path.read_text(encoding="utf-8"))
    assert meters == ["meter low", "meter middle", "meter"]


def test_without_its_data(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    train(small(recipe="mxfp4_all"), out, resume=False, console=QUIET)

    def gone(folder: Path) -> None:
        raise DataError("the data set is not there <any more>")

    monkeypatch.setattr(page.facts, "open_run", gone)
    _, text = read(page.write_page(page.ReportArgs(run=out)))
    assert text.count("the data set is not there <any more>") == 3 and "finished" in text


def test_what_it_refuses(small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    train(small(), tmp_path / "run", resume=False, console=QUIET)
    (tmp_path / "run" / METRICS).write_text("{]\n")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "metrics.jsonl:1: not a record" in capsys.readouterr().err


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].outliers])
def test_values_on_their_grid(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 70)).astype(np.float32)
    x[0, :10] = 0.0
    seen = histogram_on_grid(x, QuantSpec(name))
    assert seen.zeros == pytest.approx(10 / 420) and seen.format == name
    assert sum(seen.counts) == 410
    if seen.grid:
        assert sum(share for _, share in seen.grid) == pytest.approx(1.0)
        # Mean of the squares over the grid, by blocks of one scale: tensor tile makes one block.
        spec = QuantSpec(name, tile="tensor")
        one = histogram_on_grid(x, spec)
        q, _ = quantize(x, spec.resolve(2))
        values = dequantize(q)
        scale = float(values.max()) / max(v for v, share in one.grid if share)
        expected = float(((values / scale) ** 2).sum() / 410)
        assert sum(share * v * v for v, share in one.grid) == pytest.approx(expected, rel=1e-4)


def test_dense_operands() -> None:
    x = np.concatenate([np.zeros(50), np.arange(1.0, 101.0)]).astype(np.float32)[None]
    seen = histogram_on_grid(x, "bfloat16")
    assert seen.format == "bfloat16" and seen.zeros == pytest.approx(1 / 3)
    assert seen.edges[0] == 0.0 and 99 <= seen.edges[-1] <= 100 and not seen.grid
    assert histogram_on_grid(np.zeros((2, 2), np.float32), "float32").zeros == 1.0


def test_charts() -> None:
    assert lines("x", [Line("a", [1, 2], [None, math.nan])], "step") == ""
    assert lines("x", [Line("a", [1, 2], [0.0, -1.0])], "step", log=True) == ""
    drawn = lines("a <b>", [Line("l&m", [0, 1, 2, 3], [1.0, None, 2.0, 3.0])], "step")
    Checked(drawn)
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == 3
    assert "a &lt;b&gt;" in drawn and "<b>" not in drawn
    Checked(bars("t", "n", [0.0, 1.0, 2.0], [0, 0], "x", stems=[(1.0, 0.5)], marks=[(1.0, "<")]))


def test_an_axis_of_whole_numbers_has_whole_ones() -> None:
    drawn = lines("x", [Line("a", [1, 2, 3], [1.0, 2.0, 3.0])], "epoch")
    assert re.findall(r'middle">([^<]+)<', drawn) == ["1", "2", "3", "epoch"]


def test_a_logarithmic_axis_has_every_power_of_ten() -> None:
    drawn = lines("x", [Line("a", [0, 1], [1.0, 1000.0])], "step", log=True)
    labels = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert [float(label.replace(",", "")) for label in labels] == [1, 10, 100, 1000]
    drawn = lines("x", [Line("a", [0, 1], [1e-12, 1e12])], "step", log=True)
    assert 4 <= drawn.count('class="grid"') <= 12


def test_as_many_lines_as_the_page_has_colours_differ() -> None:
    css = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    colours = set(re.findall(r"\.(c\d+)\{", css))
    drawn = lines("x", [Line(str(n), [0, 1], [n, n + 1]) for n in range(len(colours))], "step")
    assert set(re.findall(r'<polyline class="(c\d+)"', drawn)) == colours


@pytest.mark.parametrize("value", [3.0, -3.0])
def test_a_line_that_never_changes_is_drawn_across_the_middle(value: float) -> None:
    flat = lines("x", [Line("a", [0, 1], [value, value])], "step")
    ends = lines("x", [Line("a", [0, 1], [0.0, 1.0])], "step")
    path = re.compile(r'<polyline[^>]* points="([^"]+)"')
    (_, low), (_, high) = (pair.split(",") for pair in path.findall(ends)[0].split())
    heights = [float(pair.split(",")[1]) for pair in path.findall(flat)[0].split()]
    assert heights == pytest.approx([(float(low) + float(high)) / 2] * 2, abs=0.2)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.3, 9.7, [2.5, 5.0, 7.5]),
        (-6.6, 6.6, [-5.0, 0.0, 5.0]),
        (100.0, 100.0, [100.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e5, "1e5"), (-1e5, "-1e5"), (99999.0, "1e+05"), (250000.0, "2.5e5"),
     (1e-3, "0.001"), (9e-4, "9e-4"), (0.123456, "0.1235")],
)  # fmt: skip
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_an_axis_name_stands_in_the_middle_below_it() -> None:
    drawn = lines("x", [Line("a", [0, 1], [0.0, 1.0])], "seconds")
    (place,) = re.findall(r'x="([-\d.]+)"[^<]*>seconds<', drawn)
    path = re.findall(r'<polyline[^>]* points="([^"]+)"', drawn)[0].split()
    first, last = (float(point.split(",")[0]) for point in path)
    assert float(place) == pytest.approx((first + last) / 2, abs=1.0)


def test_values_above_zero_leave_no_room_below_it() -> None:
    """And blocks lie along the rows: a row of its own scale does not change another's codes."""
    x = np.abs(np.random.default_rng(0).standard_normal((4, 64))).astype(np.float32) + 0.1
    seen = histogram_on_grid(x, QuantSpec("mxfp4"))
    assert -0.7 < seen.edges[0] < 0.0 < seen.edges[-1]
    assert seen.edges[-1] == pytest.approx(1.1 * 6)
    scaled = histogram_on_grid(x * np.float32([[1], [64], [4096], [2**18]]), QuantSpec("mxfp4"))
    assert scaled.counts == seen.counts and scaled.grid == seen.grid


def test_a_histogram_reads_rows_up_to_a_number_of_values() -> None:
    x = np.ones((VALUES // 64 + 100, 64), np.float32)
    assert sum(histogram_on_grid(x, "bfloat16").counts) == VALUES
    wide = np.ones((2, VALUES + 1), np.float32)
    assert sum(histogram_on_grid(wide, "bfloat16").counts) == VALUES + 1  # a row at least


def test_charts_of_many_layers_show_the_ones_that_tell() -> None:
    """The largest norms, and the smallest gradients over their noise, in the model's order."""
    layers = {
        f"layer{i}": {"gradient_norm": 1.0 + i, "gradient_over_noise": 1.0 + i}
        for i in range(MAX_LINES + 3)
    }
    drawn = telemetry([{"step": step, "loss": 1.0, "layers": layers} for step in (1, 2)])
    by_title = {re.findall(r"gradient norm by layer|gradient over its", str(c))[0]: str(c)
                for c in drawn if "gradient" in str(c)}  # fmt: skip
    norms = re.findall(r"layer\d+", by_title["gradient norm by layer"])
    noise = re.findall(r"layer\d+", by_title["gradient over its"])
    assert set(norms) == {f"layer{i}" for i in range(3, MAX_LINES + 3)}
    assert set(noise) == {f"layer{i}" for i in range(MAX_LINES)}


def test_a_logarithmic_axis_within_a_power_of_ten_has_round_values() -> None:
    drawn = lines("x", [Line("a", [0, 1], [2.0, 8.0])], "step", log=True)
    labels = [float(x) for x in re.findall(r'text-anchor="end">([^<]+)<', drawn)]
    assert len(labels) >= 2 and all(2.0 <= label <= 8.0 for label in labels)


def test_slots_of_a_layer_are_one_word_where_all_are_alike() -> None:
    assert page._slots(get_recipe("bf16").layers) == ("bfloat16", [])
    only, rows = page._slots(get_recipe("mxfp4").layers)
    assert only is None and [row[0] for row in rows] == list(SLOTS)
    mixed = get_recipe("bf16").layers.with_slots("fprop.*", get_recipe("fp32").layers)
    only, rows = page._slots(mixed)
    assert only is None and [row[1] for row in rows] == ["float32"] * 2 + ["bfloat16"] * 4
