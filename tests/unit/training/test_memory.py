"""`--memory`: the plan and the peak, a run that they do not change, and running out of memory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import extensor as et
from extensor.training import page
from extensor.training.callbacks import Callback, ShowMemory
from extensor.training.callbacks.memory import POINTS
from extensor.training.cli import main
from extensor.training.memory import again, repeated, savings
from extensor.training.rundir import MEMORY, UsageError
from extensor.training.train import plan_memory, train
from tests.unit.training.conftest import Make, fitted, weights

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


def console() -> tuple[Console, io.StringIO]:
    said = io.StringIO()
    return Console(file=said, width=200), said


@needs_core
def test_the_plan_then_the_peak_and_the_same_run(tmp_path: Path, small: Make) -> None:
    show, said = console()
    plan = plan_memory(small(), tmp_path)
    shown = fitted(small(), tmp_path / "a", ShowMemory(show, plan))
    plain = fitted(small(), tmp_path / "b")
    assert weights(shown) == weights(plain)
    found = json.loads((tmp_path / "a" / MEMORY).read_text())
    held = sum(param.nbytes for param in shown.model.parameters())
    assert found["kinds"]["gradients"] <= held <= found["kinds"]["weights"]
    assert sum(found["kinds"].values()) == found["peak"] == max(found["timeline"])
    lengths = {len(line) for line in (found["timeline"], *found["timelines"].values())}
    assert len(lengths) == 1 and 10 < lengths.pop() <= POINTS
    assert found["timelines"]["weights"][0] > 0  # of the step's beginning
    assert found["plan"]["gradients"] == held and found["plan"]["states"] == plain.optimizer.nbytes
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("memory: plan") and "quantized_matmul layer" in said.getvalue()
    assert any(line.startswith("memory: peak of the first step") for line in lines)


@needs_core
def test_the_plan_is_what_the_first_step_keeps(tmp_path: Path, small: Make) -> None:
    """Saved bytes, by layer and slot, when the forward pass of the first step is done."""
    config = small(recipe="mxfp4_all", saved="activation=mxfp8")
    plan = plan_memory(config, tmp_path)
    seen: list[Any] = []

    class AtTheLoss(Callback):
        def on_start(self, run: Any) -> None:
            forward = run.forward

            def measured(*args: Any, **more: Any) -> Any:
                made = forward(*args, **more)
                if not seen:
                    holders = run.callbacks[0]._ledger.report().at(-1)
                    seen.extend(one for one in holders if one.kind == "saved")
                return made

            run.forward = measured

    fitted(config, tmp_path / "run", ShowMemory(console()[0], plan), AtTheLoss())
    assert sorted(map(repr, seen)) == sorted(map(repr, plan.saved)) and seen
    assert sum(one.nbytes for one in plan.saved) == plan.kinds["saved"]


@needs_core
def test_out_of_memory_names_the_holders_and_the_settings(tmp_path: Path, small: Make) -> None:
    class Full(Callback):
        def on_gradients(self, run: Any, batch: Any) -> None:
            raise MemoryError("requested 1 byte, 0 are free")

    show, said = console()
    plan = plan_memory(small(), tmp_path)
    with pytest.raises(MemoryError, match="0 are free"):
        fitted(small(), tmp_path / "a", ShowMemory(show, plan), Full())
    text = said.getvalue()
    assert "out of memory at" in text and ".weight" in text and "half of --batch-size" in text
    timeline = json.loads((tmp_path / "a" / MEMORY).read_text())["timeline"]
    assert max(timeline) > 0  # which the report draws
    show, said = console()
    with pytest.raises(MemoryError, match="0 are free"):
        fitted(small(), tmp_path / "b", ShowMemory(show), Full())
    text = said.getvalue()
    assert "the same command with --memory" in text and "--weights bfloat16" in text
    assert "half of --batch-size: layers keep less" in text and "--saved mxfp8: layers" in text


@needs_core
def test_a_plan_that_does_not_fit_says_so(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(trainer: Any, batch: Any, smoothing: float) -> Any:
        kept = trainer.model(et.ExTensor(batch.inputs))
        raise MemoryError(f"requested 8 bytes after {kept.shape}")

    monkeypatch.setattr("extensor.training.loop.Trainer.forward", full)
    show, said = console()
    with pytest.raises(MemoryError, match="requested 8 bytes"):
        train(small(), tmp_path / "a", resume=False, console=show, memory=True)
    assert "out of memory at" in said.getvalue() and "--batch-size" in said.getvalue()


def test_the_command_ends_with_an_error_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for raised, reason in (
        ("requested 8 bytes", "requested 8 bytes"),
        ("std::bad_alloc", "a kernel got none from the system"),  # as the C++ core raises it
        ("", "Python got none from the system"),
    ):

        def full(*args: Any, text: str = raised, **more: Any) -> Any:
            raise MemoryError(text)

        monkeypatch.setattr("extensor.training.loop.Trainer.forward", full)
        assert main(["train", "mlp", "--epochs", "1", "--out", str(tmp_path / reason)]) == 1
        said = capsys.readouterr()
        assert "settings that make the run smaller" in said.out
        assert f"error: out of memory: {reason}" in said.out + said.err


def blocks() -> Any:
    wide = ((et.nn.Linear(64, 256, rng=i), et.nn.ReLU()) for i in range(4))
    parts = (et.nn.Sequential(*first, et.nn.Linear(256, 64, rng=9)) for first in wide)
    return et.nn.Sequential(et.nn.Sequential(*parts), et.nn.Linear(64, 2, rng=5))


@needs_core
def test_what_running_blocks_again_saves_is_foretold() -> None:
    """All but the part that runs again at the peak, and their inputs."""
    x, kept = et.randn((128, 64), seed=1), {}
    for runs_again in (False, True):
        model = blocks()
        if runs_again:
            et.nn.recompute(model, repeated(model) or "")
        with et.inspect.memory_ledger(model) as ledger:
            model(x).square().mean().backward()
        report = ledger.report()
        held = report.at(report.most("saved"))
        kept[runs_again] = [one for one in held if one.kind == "saved"]
    assert repeated(model) == "0.*" and repeated(et.nn.Linear(2, 2)) is None
    sizes = [sum(one.nbytes for one in held) for held in kept.values()]
    assert 0 < sizes[0] - sizes[1] <= again(blocks(), "0.*", kept[False])


def test_a_run_that_computes_parts_again_has_the_same_weights(tmp_path: Path, small: Make) -> None:
    base = {"recipe": "mxfp4_all"}
    plain = fitted(small(**base), tmp_path / "a")
    again = fitted(small(**base, recompute="layers.1=cheap,layers.2"), tmp_path / "b")
    assert [layer.recomputed for layer in again.model.layers] == [False, "cheap", True]
    first = fitted(small(**base, recompute="layers.1,layers.*=cheap"), tmp_path / "first")
    assert [layer.recomputed for layer in first.model.layers] == ["cheap", True, "cheap"]
    assert weights(again) == weights(plain)
    for text, message in (
        ("conv1", "matches no module; the model's"),
        ("layers.1=x", "GLOB=cheap"),
    ):
        with pytest.raises(ValueError, match=f"--recompute: .*{message}"):
            fitted(small(recompute=text), tmp_path / "c")


@needs_core
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"optimizer_states": "mxfp8_e4m3"}, "states"),
        ({"weights": "bfloat16"}, "weights"),
        ({"weights": "mxint8"}, "weights"),
        ({"update": "in_backward"}, "gradients"),
    ],
)
def test_settings_save_what_is_said(
    change: dict[str, str], kind: str, tmp_path: Path, small: Make
) -> None:
    base: dict[str, Any] = {"optimizer": "adamw", "loss_scale": "off", "weight_decay": 0.0}
    if change == {"weights": "mxint8"}:
        base["weights"] = "bfloat16"
    plan = plan_memory(small(**base), tmp_path)
    model = fitted(small(**base, epochs=1, train_limit=16, warmup_epochs=0.0), tmp_path).model
    ((setting, value),) = change.items()
    said = dict(savings(small(**base), plan.kinds, model))
    (claimed,) = (n for name, n in said.items() if f"--{setting.replace('_', '-')} {value}" in name)
    after = plan_memory(small(**{**base, **change}), tmp_path).kinds
    kinds = (kind, "gradients") if kind == "weights" else (kind,)
    saved = sum(plan.kinds[k] - after[k] for k in kinds)
    assert abs(saved - claimed) <= 0.01 * claimed  # blocks at the ends are not whole


def test_the_most_saved_is_what_layers_keep_beside_eight_bits_and_a_scale() -> None:
    """Of 32 values of 4 bytes 33 remain; a run whose memory is not known yet is told no figure."""
    config = SimpleNamespace(
        optimizer_states="mxfp8_e4m3", weights="float32", update="in_backward", saved="float32",
        recompute=None,
    )  # fmt: skip
    found = dict(savings(config, {"saved": 12800, "workspaces": 0}, blocks()))  # type: ignore[arg-type]
    assert found["half of --batch-size"] == 6400
    assert found["--saved mxfp8, at most"] == 12800 - 33 * 100
    unknown = dict(savings(config, {"workspaces": 0}, blocks()))  # type: ignore[arg-type]
    assert unknown["--saved mxfp8, at most"] is None
    assert [value for name, value in unknown.items() if name.startswith("--recompute")] == [None]


@needs_core
def test_the_report_draws_the_timeline(tmp_path: Path, small: Make) -> None:
    train(small(), tmp_path / "run", resume=False, console=console()[0], memory=True)
    text = page.write_page(page.ReportArgs(run=tmp_path / "run")).read_text()
    assert "memory of the first step, MB" in text
    assert text.count("<td>weights</td>") and "arrays taken and given back so far" in text
    (tmp_path / "run" / MEMORY).write_text('{"peak": "much"}')
    with pytest.raises(UsageError, match="not a run's memory"):
        page.write_page(page.ReportArgs(run=tmp_path / "run"))


def test_the_setting_says_how_what_is_kept_is_stored(tmp_path: Path, small: Make) -> None:
    run = fitted(small(recipe="fp32", saved="mxfp8_e4m3"), tmp_path)
    ((rule, store),) = run.model.storage.rules
    assert store.spec.format == rule.spec.format == run.config.saved
    with pytest.raises(ValueError, match=r"--saved: no saved format named 'mxfp7'"):
        small(saved="norm=mxfp7")
