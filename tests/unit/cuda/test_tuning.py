"""The crossover table: from fake timings to the choice, without a GPU; on one, measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from extensor.backends import registry
from extensor.ops import recipe_operands
from extensor.quant.spec import QuantSpec
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul import tuning as tune
from extensor_cuda.matmul.tuning import (
    NEVER,
    Timing,
    crossovers,
    curve,
    measure,
    of_bf16,
    products_per_graph,
)
from tests.unit.cuda.preparing import EXPANDED, gap


def timings(ratios: dict[int, float], path: str = "float scales") -> list[Timing]:
    return [Timing(path, size, 1.0, ratio) for size, ratio in ratios.items()]


def test_a_way_is_taken_from_where_it_wins_at_every_larger_size() -> None:
    assert crossovers(timings({64: 2.0, 128: 0.5, 256: 1.0, 512: 3.0})) == {"float scales": 256**3}
    assert crossovers(timings({64: 2.0, 128: 1.5})) == {"float scales": 64**3}
    assert crossovers(timings({512: 0.9, 64: 2.0})) == {"float scales": NEVER}
    both = crossovers(timings({64: 2.0}) + timings({64: 0.1}, "bf16"))
    assert both == {"float scales": 64**3, "bf16": NEVER}


def test_where_a_way_is_quicker_than_bfloat16_is_found_likewise() -> None:
    held = [
        Timing("float scales", 64, 1.0, 9.0, 0.5),
        Timing("float scales", 128, 1.0, 9.0, 1.5),
        Timing("bf16", 64, 1.0, 0.5),
    ]
    assert crossovers(held) == {"float scales": 64**3, "bf16": NEVER}
    assert [(t.path, t.size, t.ratio) for t in of_bf16(held)] == [
        ("float scales", 64, 0.5),
        ("float scales", 128, 1.5),
    ]
    assert crossovers(of_bf16(held)) == {"float scales": 128**3}


def test_every_way_is_timed_at_every_size() -> None:
    calls: list[str] = []

    def works(path: str, size: int) -> tuple[Any, Any]:
        return lambda: calls.append(f"{path} {size}"), lambda: calls.append("other")

    def clock(*given: Any) -> list[float]:
        for work in given:
            work()
        return [{"other": 3.0}.get(call, 1.5) for call in calls[-2:]]

    found = measure(clock, works, ("bf16", "float scales"), (16, 8192))
    assert [(t.path, t.size, t.ratio) for t in found] == [
        (path, size, 2.0) for path in ("bf16", "float scales") for size in (16, 8192)
    ]
    assert len(calls) == 8
    # Seconds of a graph, of which a product has its share.
    assert [t.ours for t in found[:2]] == [
        1.5 / products_per_graph(16),
        1.5 / products_per_graph(8192),
    ]
    assert products_per_graph(16) > 1 == products_per_graph(8192)


@pytest.mark.parametrize("path", tuned.PATHS)
def test_works_are_products_with_kernels_with_cupy_and_in_bfloat16(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = registry.get("cpu")
    multiply, made = backend.product, []

    def product(a: Any, b: Any, dtype: str) -> Any:
        made.append((list(tuned._asked), np.array(a), np.array(b), dtype))
        return multiply(a, b, dtype)

    works: list[int] = []
    slots_of = recipe_operands.make_operands

    def make_operands(*args: Any) -> Any:
        works.append(args[4][2])
        return slots_of(*args)

    monkeypatch.setattr(backend, "product", product, raising=False)
    monkeypatch.setattr(recipe_operands, "make_operands", make_operands)
    outs = [work() for work in tune._works(backend)(path, 32)]
    count = products_per_graph(32)
    expected = [[1], []] if path == "bf16" else [[1], [], [1]]
    assert [requested for requested, *_ in made] == [
        requested for requested in expected for _ in range(count)
    ]
    assert works == [32 * bool(wide) for wide in expected for _ in range(2 * count)]
    assert {dtype for *_, dtype in made} == {"bfloat16"} == {out.dtype.name for out in outs}
    ours, other, last = (made[i * count][1:3] for i in (0, 1, -1))
    np.testing.assert_array_equal(ours, other)  # the same operands, whoever multiplies them
    plain = np.equal(ours, last).all()
    assert plain == (path == "bf16")
    rows = tune._rows(np, np.random.default_rng(32), 32, 32)
    np.testing.assert_array_equal(last[0], rows.astype(np.float32))


def test_what_is_timed_is_repeated_without_python(gpu: Any) -> None:
    calls, x = [], gpu.xp.zeros(40, dtype=np.float32)

    def work() -> None:
        calls.append(1)
        x[...] = x + 1

    again = tune._repeated(gpu, work)
    before, seen = len(calls), x.get()
    for _ in range(3):
        again()
    assert len(calls) == before
    np.testing.assert_array_equal(x.get(), seen + 3)


@pytest.mark.parametrize("path", ["fused", "expanded", "bf16"])
def test_products_are_recorded_whole(gpu: Any, path: str) -> None:
    works = tune._works(gpu)(path, 32)
    for work in works:
        out: list[Any] = []

        def kept(work: Any = work, out: list[Any] = out) -> None:
            out[:] = [work()]

        expected = work()
        again = tune._repeated(gpu, kept)
        again()
        np.testing.assert_array_equal(out[0].get(), expected.get())


def test_works_take_turns_and_slow_ones_are_repeated_less_often() -> None:
    now, calls = [0.0], [0]

    class Event:
        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

    cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: (b.at - a.at) * 1000)
    for seconds, expected in ((0.001, 2 + 35), (0.5, 2 + 3)):

        def work(seconds: float = seconds) -> None:
            now[0] += seconds
            calls[0] += 1

        calls[0] = 0
        found = tune._clock(SimpleNamespace(cuda=cuda))(work, lambda work=work: work(seconds=0.2))
        assert found == pytest.approx([seconds, 0.2])
        assert calls[0] == expected + 2 + 3


SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder: Path, held: list[Timing], ticks: tuple[float, ...]) -> tuple[set[Any], list[Any]]:
    """The words of a picture, and its curves: colour, whether dashed, and points."""
    curve(folder / "a.svg", held, "A GPU", ticks)
    root = ElementTree.parse(folder / "a.svg")
    words = {element.text for element in root.iter(f"{SVG}text")}
    curves = []
    for path in root.iter(f"{SVG}path"):
        style = dict(part.split(": ") for part in path.get("style", "").rstrip(";").split("; "))
        if path.get("clip-path") and style.get("stroke") in ("#1f77b4", "#ff7f0e"):
            numbers = path.get("d", "").replace("M", " ").replace("L", " ").split()
            points = list(zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True))
            curves.append((style["stroke"], "stroke-dasharray" in style, points))
    return words, curves


def test_the_curve_is_a_picture_with_a_line_a_way(tmp_path: Path) -> None:
    held = timings({64: 0.1, 512: 4.0}) + timings({64: 1.0, 512: 2.0}, "bf16")
    words, curves = drawn(tmp_path, held, (0.5, 1, 2, 9))
    labels = {"float scales (fp8_block)", "bf16 (bf16)"}
    assert {"A GPU", "64", "512", "0.5x", "1x", "2x"} | labels <= words
    assert "9x" not in words
    assert [dashed for _, dashed, _ in curves] == [False, False]


def test_the_curve_of_bfloat16_is_dashed_in_the_colour_of_its_way(tmp_path: Path) -> None:
    held = [Timing("float scales", 64, 1.0, 4.0, 0.25), Timing("float scales", 512, 1.0, 9.0, 4.0)]
    held += timings({64: 1.0, 512: 2.0}, "bf16")
    _, (solid, dashed, dense) = drawn(tmp_path, held, (0.5, 1))
    assert [one[1] for one in (solid, dashed, dense)] == [False, True, False]
    assert solid[0] == dashed[0] != dense[0]
    (_, first), (_, last) = dashed[2]
    assert solid[2][0][1] == pytest.approx(last)
    assert first > last  # slower is lower, and in the picture
    assert 0 < last < first < 400


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"extensor\[train\]"):
        tune.tune(tmp_path / "a.svg")


def test_numbers_lie_beside_the_picture_and_what_was_not_measured_does_not(tmp_path: Path) -> None:
    held = [Timing("float scales", 64, 1.0, 4.0, 0.25), Timing("bf16", 64, 2.0, 4.0)]
    tune.draw(tmp_path / "a.svg", held, {"gpu": "A GPU"}, "what", (0.5, 1))
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["gpu"] == "A GPU" and record["what"] == "what"
    assert record["timings"] == [
        {
            "path": "float scales",
            "size": 64,
            "ours": 1.0,
            "other": 4.0,
            "bf16": 0.25,
            "ratio": 4.0,
            "bf16_ratio": 0.25,
        },
        {"path": "bf16", "size": 64, "ours": 2.0, "other": 4.0, "ratio": 2.0},
    ]


def test_transforms_are_measured_against_the_same_recipe_without_them() -> None:
    backend: Any = registry.get("cpu")
    seen: list[Any] = []

    def clock(*works: Any) -> list[float]:
        for work in works:
            with counting(backend, seen):
                work()
        return [1.0, 1.5]

    found = tune.overheads(backend, clock, (64,), 32)
    assert [(t.path, t.size, t.ratio) for t in found] == [
        (name, 64, 1.5) for name in tune.HADAMARD_RECIPES
    ]
    rotated = [{spec.transform is not None for spec in specs} for specs in seen]
    assert rotated == [{False}, {False, True}, {False}, {True}]


@contextmanager
def counting(backend: Any, into: list[Any]) -> Iterator[None]:
    """The specs of what is quantized within it."""
    specs: list[QuantSpec] = []
    prepare = backend.prepare

    def noted(x: Any, its: Any, *more: Any) -> Any:
        specs.extend(spec for spec in its if isinstance(spec, QuantSpec))
        return prepare(x, its, *more)

    backend.prepare = noted
    try:
        yield
    finally:
        del backend.prepare
    into.append(specs)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cupy that names a GPU, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: {"name": b"NVIDIA H100 80GB"},
        driverGetVersion=lambda: 13000,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    tuned._table.cache_clear()
    yield tuned.path_of("NVIDIA H100 80GB", 13000)
    tuned._table.cache_clear()


def test_a_table_decides_and_is_of_one_gpu_driver_and_source(table: Path) -> None:
    assert table.name.startswith("NVIDIA-H100-80GB-13000-") and tuned.source_digest() in table.name
    assert tuned.path_of("other", 13000) != table != tuned.path_of("NVIDIA H100 80GB", 13010)
    assert tuned.min_work("float scales") == tuned.MIN_WORK
    tuned.save(table, {"float scales": 512**3, "expanded": 0}, {"date": "today"})
    assert tuned.min_work("float scales") == 512**3
    assert tuned.min_work("expanded") == 1  # 0 is a product without the path
    assert tuned.min_work("bf16") == tuned.MIN_WORK
    assert json.loads(table.read_text())["date"] == "today"
    x = np.ones((64, 64), dtype=np.float32)
    spec = QuantSpec("mxfp4", axis=1).resolve(2)
    assert gap(EXPANDED, x, spec, 1, "90") is None
    assert "fewer than 1" in str(gap(EXPANDED, x, spec, 0, "90"))
    tuned.save(table, {"expanded": NEVER}, {})
    assert f"fewer than {NEVER}" in str(gap(EXPANDED, x, spec, 1 << 50, "90"))
    with tuned.always():
        assert gap(EXPANDED, x, spec, 1, "90") is None
        assert "fewer than" in str(gap(EXPANDED, x, spec, 0, "90"))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"min_work": {"float scales": "x"}}', '{"min_work": {"?": 1}}']
)
def test_a_damaged_table_is_warned_of_and_counts_as_none(table: Path, text: str) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(text)
    with pytest.warns(RuntimeWarning, match="extensor tune"):
        assert tuned.min_work("float scales") == tuned.MIN_WORK


def test_without_cupy_or_a_driver_the_default_stands(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.save(table, {"float scales": 7}, {})

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDevice", no_driver)
    assert tuned.min_work("float scales") == tuned.MIN_WORK
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert tuned.min_work("float scales") == tuned.MIN_WORK


def test_tune_on_a_gpu_writes_what_it_measured(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: nothing to choose")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "WIDTHS", (512,))
    plots = tmp_path / "curve.svg", tmp_path / "cost.svg"
    path, held, costs = tune.tune(plots[0], (512, 128), plots[1])
    assert len(held) == 2 * len(tuned.PATHS) and all(t.ours > 0 and t.other > 0 for t in held)
    assert all(t.bf16 is None if t.path == "bf16" else t.bf16 > 0 for t in held)
    assert max(t.ours for t in held) < 4e-4  # the GPU's time; Python's is more
    assert tuned.load(path) == crossovers(held)
    assert len(costs) == len(tune.HADAMARD_RECIPES) and all(
        t.ours > 0 and t.other > 0 for t in costs
    )
    for plot, timings in zip(plots, (held, costs), strict=True):
        ElementTree.parse(plot)
        written = json.loads(plot.with_suffix(".json").read_text())["timings"]
        assert [t["other"] for t in written] == [t.other for t in timings]
    tuned._table.cache_clear()
