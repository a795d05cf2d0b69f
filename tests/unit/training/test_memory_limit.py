"""`--memory-limit`: a run that fits, has the same bits, and says what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

import extensor as et
from extensor.training.cli import main
from extensor.training.memory_limit import parse_bytes
from extensor.training.rundir import MEMORY, UsageError
from extensor.training.train import train
from tests.unit.training.conftest import QUIET, Make

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)
GPT = [
    *("gpt", "--variant", "nano", "--epochs", "1", "--epoch-steps", "1", "--batch-size", "8"),
    *("--context", "32", "--test-limit", "1", "--recipe", "mxfp4_all", "--memory"),
]


def bits(out: Path) -> dict[str, bytes]:
    """All tensors of the last checkpoint."""
    with safe_open(next(out.glob("*.safetensors")), "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@needs_core
def test_a_run_fits_its_limit_and_has_the_same_weights(
    tmp_path: Path,
    one_text: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = partial(et.inspect.plan_memory, rounds=1)
    monkeypatch.setattr("extensor.training.memory_limit.plan_parts", once)
    one_text("abcdefgh" * 200)
    peaks, last = {}, {}
    for limit in ("", "17MB"):
        out = tmp_path / f"run{limit}"
        more = ["--memory-limit", limit] if limit else []
        assert main([*GPT, "--out", str(out), *more]) == 0
        peaks[limit] = json.loads((out / MEMORY).read_text())["peak"]
        last[limit] = bits(out)
    assert peaks["17MB"] <= 17e6 < peaks[""]
    assert last["17MB"] == last[""] and last[""]
    said = capsys.readouterr().out
    assert f"memory limit 17.0 MB: the first step's peak is {peaks['17MB'] / 1e6:.1f} MB" in said
    assert "recomputed: blocks." in said or "cheap: blocks." in said
    capsys.readouterr()
    none = tmp_path / "none"
    assert main([*GPT, "--out", str(none), "--memory-limit", "2MB"]) == 2
    said = capsys.readouterr()
    assert "the least that a step was found to take" in said.out and "--weights" in said.out
    assert "--recompute" not in said.out  # the plan has chosen that
    assert "--memory-limit: expected" in said.err and not (none / MEMORY).exists()


def test_limits_that_cannot_be_planned_are_refused(
    tmp_path: Path, small: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_bytes("1.5 GiB") == 3 << 29
    for text in ("8", "0GB", "8TB", "-1MB", "0.0000001MB"):
        assert main(["mlp", "--memory-limit", text]) == 2
        assert "expected a size such as 8GB" in capsys.readouterr().err
    two: Any = SimpleNamespace(size=2, rank=0, all_gather_object=lambda one: [one, one])
    for config, ranks, message in (
        (small(recompute="layers.*"), None, "leave one of the two out"),
        (small(recipe="mxfp4_all,fp32@50%"), None, "expected one recipe, got mxfp4_all,fp32@50%"),
        (small(model="lenet", variant="lenet5"), None, "lenet has none"),
        (small(), two, "each of these ranks"),
    ):
        with pytest.raises(UsageError, match=message):
            train(config, tmp_path, resume=False, console=QUIET, memory_limit=0, ranks=ranks)


@pytest.mark.parametrize("flag", ["--memory", "--memory-limit=8GB"])
def test_settings_that_do_not_fit_end_as_without_the_flag(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*args: object, **more: object) -> None:
        raise RuntimeError("no GPU here")

    wrong = ["--operands", "nolayer/fprop.x=mxfp8"]
    assert main(["mlp", *wrong, "--out", str(tmp_path), flag]) == 2
    assert "error: " in (said := capsys.readouterr().err) and "nolayer" in said
    monkeypatch.setattr("extensor.training.train.get_backend", none)
    monkeypatch.setattr("extensor.training.train.Trainer", none)
    assert main(["mlp", "--out", str(tmp_path), flag]) == 2
    assert "error: --device cpu: no GPU here" in capsys.readouterr().err


@needs_core
def test_where_the_device_is_full_the_error_says_how_much_it_had(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(trainer: Any, batch: Any, smoothing: float) -> Any:
        held = trainer.model(et.ExTensor(batch.inputs))
        raise MemoryError(f"requested 8 bytes after {held.shape}")

    monkeypatch.setattr("extensor.training.loop.Trainer.forward", full)
    with pytest.raises(UsageError, match=r"memory for 8000.0 MB, it ran out at \d+\.\d MB"):
        train(small(), tmp_path, resume=False, console=QUIET, memory_limit=8 * 10**9)
