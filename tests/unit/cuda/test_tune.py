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
from extensor.ops import operands
from extensor.quant.spec import QuantSpec
from extensor_cuda import expanded, tune, tuned
from extensor_cuda.tune import NEVER, Timing, crossovers, curve, measure


def timings(ratios: dict[int, float], way: str = "scaled") -> list[Timing]:
    return [Timing(way, size, 1.0, ratio) for size, ratio in ratios.items()]


def test_a_way_is_taken_from_where_it_wins_at_every_larger_size() -> None:
    assert crossovers(timings({64: 2.0, 128: 0.5, 256: 1.0, 512: 3.0})) == {"scaled": 256**3}
    assert crossovers(timings({64: 2.0, 128: 1.5})) == {"scaled": 64**3}
    assert crossovers(timings({512: 0.9, 64: 2.0})) == {"scaled": NEVER}
    both = crossovers(timings({64: 2.0}) + timings({64: 0.1}, "dense"))
    assert both == {"scaled": 64**3, "dense": NEVER}


def test_every_way_is_timed_at_every_size() -> None:
    calls: list[str] = []

    def works(way: str, size: int) -> tuple[Any, Any]:
        return lambda: calls.append(f"{way} {size}"), lambda: calls.append("other")

    def clock(*given: Any) -> list[float]:
        for work in given:
            work()
        return [{"other": 3.0}.get(call, 1.5) for call in calls[-2:]]

    found = measure(clock, works, ("dense", "scaled"), (16, 32))
    assert [(t.way, t.size, t.ratio) for t in found] == [
        (way, size, 2.0) for way in ("dense", "scaled") for size in (16, 32)
    ]
    assert len(calls) == 8


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


def test_the_curve_is_a_picture_with_a_line_a_way() -> None:
    held = timings({64: 0.1, 512: 4.0}) + timings({64: 1.0, 512: 2.0}, "dense")
    root = ElementTree.fromstring(curve(held, "A GPU", (0.5, 1, 2, 9)))
    names = [element.tag.rpartition("}")[2] for element in root]
    assert names.count("polyline") == 2
    words = {element.text for element in root if element.tag.endswith("text")}
    assert {"A GPU", "scaled", "dense", "64", "512", "0.5x", "1x", "2x"} <= words
    assert "9x" not in words


def test_transforms_are_measured_against_the_same_recipe_without_them() -> None:
    backend: Any = registry.get("cpu")
    seen: list[Any] = []

    def clock(*works: Any) -> list[float]:
        for work in works:
            with counting(seen):
                work()
        return [1.0, 1.5]

    found = tune.overheads(backend, clock, (64,), 32)
    assert [(t.way, t.size, t.ratio) for t in found] == [(name, 64, 1.5) for name in tune.TURNED]
    turned = [{spec.transform is not None for spec in specs} for specs in seen]
    assert turned == [{False}, {False, True}, {False}, {True}]


@contextmanager
def counting(into: list[Any]) -> Iterator[None]:
    """The specs of what is quantized within it."""
    specs: list[QuantSpec] = []
    placed = operands.placed

    def noted(*args: Any) -> Any:
        specs.append(args[2])
        return placed(*args)

    operands.placed = noted
    try:
        yield
    finally:
        operands.placed = placed
    into.append(specs)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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


def test_a_table_decides_and_is_of_one_gpu_driver_and_source(gpu: Path) -> None:
    assert gpu.name.startswith("NVIDIA-H100-80GB-13000-") and tuned.source_digest() in gpu.name
    assert tuned.path_of("other", 13000) != gpu != tuned.path_of("NVIDIA H100 80GB", 13010)
    assert tuned.least_work("scaled", 77) == 77
    tuned.save(gpu, {"scaled": 512**3, "expanded": 0}, {"date": "today"})
    assert tuned.least_work("scaled", 77) == 512**3
    assert tuned.least_work("expanded", 77) == 1  # 0 is a product without the way
    assert tuned.least_work("dense", 77) == 77
    assert json.loads(gpu.read_text())["date"] == "today"
    x = np.ones((64, 64), dtype=np.float32)
    spec = QuantSpec("mxfp4", axis=1).resolve(2)
    assert expanded.reason(x, spec, 1, "90") is None
    assert "fewer than 1" in str(expanded.reason(x, spec, 0, "90"))
    tuned.save(gpu, {"expanded": NEVER}, {})
    assert f"fewer than {NEVER}" in str(expanded.reason(x, spec, 1 << 50, "90"))
    with tuned.always():
        assert expanded.reason(x, spec, 1, "90") is None
        assert "fewer than" in str(expanded.reason(x, spec, 0, "90"))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"least_work": {"scaled": "x"}}', '{"least_work": {"?": 1}}']
)
def test_a_damaged_table_is_warned_of_and_counts_as_none(gpu: Path, text: str) -> None:
    gpu.parent.mkdir(parents=True, exist_ok=True)
    gpu.write_text(text)
    with pytest.warns(RuntimeWarning, match="extensor tune"):
        assert tuned.least_work("scaled", 5) == 5


def test_without_cupy_or_a_driver_the_default_stands(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.save(gpu, {"scaled": 7}, {})

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDevice", no_driver)
    assert tuned.least_work("scaled", 5) == 5
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert tuned.least_work("scaled", 5) == 5


def test_tune_on_a_gpu_writes_what_it_measured(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: nothing to choose")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "WIDTHS", (512,))
    plots = tmp_path / "curve.svg", tmp_path / "cost.svg"
    path, held, costs = tune.tune(plots[0], (128, 512), plots[1])
    assert len(held) == 2 * len(tuned.WAYS) and all(t.ours > 0 and t.other > 0 for t in held)
    assert tuned.load(path) == crossovers(held)
    assert len(costs) == len(tune.TURNED) and all(t.ours > 0 and t.other > 0 for t in costs)
    for plot, timings in zip(plots, (held, costs), strict=True):
        ElementTree.parse(plot)
        written = json.loads(plot.with_suffix(".json").read_text())["timings"]
        assert [t["other"] for t in written] == [t.other for t in timings]
    tuned._table.cache_clear()
