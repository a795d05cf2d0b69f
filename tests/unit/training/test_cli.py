"""The command line: layers of values, messages, exit codes; and a real Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extensor.io import load_checkpoint
from extensor.quant.recipes import RECIPES
from extensor.training import compare as comparing
from extensor.training.cli import main, parse_train
from extensor.training.rundir import UsageError

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["mlp", "--epochs", "2", "--batch-size", "16", "--lr", "0.02"]
SMALL += ["--train-limit", "96", "--test-limit", "60"]


def test_overview_lists_models_data_sets_and_every_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("lenet", "mlp", "digits", "fashion_mnist", *RECIPES):
        assert f"  {name} " in text
    assert "(also: mxfp8)" in text


@pytest.mark.parametrize("command", [["lenet", "--help"], ["compare", "--help"]])
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert "mxfp4_tseng" in text
    assert "Peak learning rate" in text


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*SMALL, "--out", str(tmp_path / "file" / "run")]) == 1
    error = capsys.readouterr().err
    assert "Not a directory" in error and "another --out" in error and error.count("\n") == 1


def test_a_full_disk_is_one_line_and_leaves_a_run_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, tensors: object, metadata: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = [*SMALL, "--out", str(tmp_path / "run")]
    monkeypatch.setattr("extensor.io.checkpoint.write", full)
    assert main(run) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error and "checkpoint.safetensors" in error
    assert "free some space" in error and error.count("\n") == 1
    monkeypatch.undo()
    assert main(run) == 0  # nothing was saved, so it starts anew


def test_flags_override_the_file_and_the_file_the_row(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('lr = 0.5\nepochs = 3\ndataset = "fashion_mnist"\n')
    _, config, folder = parse_train("lenet", ["--config", str(path), "--lr", "0.25"])
    assert (config.lr, config.epochs, config.dataset) == (0.25, 3, "fashion_mnist")
    assert config.batch_size == 64  # the row's value for the data set that the file names
    assert folder == Path("runs/lenet-fashion_mnist-fp32-s0")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lennet"], "no model named 'lennet'; did you mean 'lenet'"),
        (["lenet", "--dataset", "digitz"], "no dataset named 'digitz'; did you mean 'digits'"),
        (["compare", "lenett"], "no model named 'lenett'; did you mean 'lenet'"),
        (["lenet", "--config", "none.toml"], "--config none.toml: cannot be read"),
        (["lenet", "--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["lenet", "--resume", "--seed", "77"], "lenet-digits-fp32-s77 holds no run"),
        (["lenet", "--recipe", "mxpf4"], "no recipe named 'mxpf4'; did you mean"),
        (["lenet", "--epochs", "0"], "expected a whole number, 1 or more, got 0"),
        (["compare", "lenet", "--seeds", "0"], "expected a whole number, 1 or more, got 0"),
        (["compare", "lenet", "--recipes", "fp32,mxpf4"], "did you mean"),
        (["lenet", "--optimizer", "sdg"], "no optimizer named 'sdg'; did you mean 'sgd'"),
        (
            ["lenet", "--optimizer-options", "epss=1"],
            "--optimizer-options: no option of sgd named 'epss'",
        ),
        (["lenet", "--rank-timeout", "0"], "--rank-timeout: expected seconds above 0, got 0"),
        (["lenet", "--optimizer-options", "momentum=0.5"], "no option of sgd named 'momentum'"),
        (["lenet", "--optimizer-options", "nesterov"], "expected NAME=VALUE, got 'nesterov'"),
        (["lenet", "--optimizer-options", "nesterov=1"], "nesterov: expected true or false, got"),
        (["lenet", "--schedule", "step"], "--schedule step needs --schedule-options every=..."),
        (
            ["lenet", "--schedule", "step", "--schedule-options", "every=x"],
            "every: expected a count such as 30 or 3ep, got 'x'",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lenet", "--epochs", "two"], "invalid literal for int"),
        (["lenet", "--epoch", "2"], "Unrecognized options: --epoch"),
    ],
)
def test_bad_flags_are_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_unknown_keys_and_another_model_in_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("epoch = 3\n")
    with pytest.raises(UsageError, match="no setting named 'epoch'; did you mean 'epochs'"):
        parse_train("lenet", ["--config", str(path)])
    path.write_text('model = "mlp"\n')
    with pytest.raises(UsageError, match="is for model 'mlp', not 'lenet'"):
        parse_train("lenet", ["--config", str(path)])
    path.write_text("epochs = 1.5\n")
    with pytest.raises(UsageError, match=r"epochs: expected int, got 1\.5"):
        parse_train("lenet", ["--config", str(path)])


def test_a_run_from_start_to_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main([*SMALL, "--out", out]) == 0
    assert "epoch 2/2" in capsys.readouterr().out
    assert main([*SMALL, "--out", out]) == 2
    assert "holds this very run, finished" in capsys.readouterr().err
    assert main([*SMALL, "--out", out, "--lr", "0.5"]) == 2
    assert "another configuration (lr: 0.02 there, 0.5 here)" in capsys.readouterr().err
    assert main(["mlp", "--out", out, "--resume"]) == 0
    assert "is finished: accuracy" in capsys.readouterr().out
    assert main(["mlp", "--out", out, "--resume", "--lr", "0.5"]) == 2
    assert "lr: 0.02 there, 0.5 here" in capsys.readouterr().err
    assert main(["lenet", "--out", out, "--resume"]) == 2
    assert "holds a run of 'mlp', not of 'lenet'" in capsys.readouterr().err
    # its own config.toml repeats it
    again = str(tmp_path / "again")
    assert main(["mlp", "--config", f"{out}/config.toml", "--out", again]) == 0
    one, two = (load_checkpoint(f"{p}/checkpoint.safetensors").tensors for p in (out, again))
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_saves_and_resumes_bit_identically(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training", "mlp", "--recipe", "mxfp4", "--epochs", "6"]
    command += ["--train-limit", "256", "--test-limit", "60", "--batch-size", "8"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    parts, whole = tmp_path / "parts", tmp_path / "whole"

    def start(*flags: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *map(str, flags)],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    process = start("--out", parts)
    metrics = parts / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert f"--out {parts} --resume" in text
    assert not (parts / "result.json").exists()
    for flags in (("--out", parts, "--resume"), ("--out", whole)):
        process = start(*flags)
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text
    one, two = (load_checkpoint(p / "checkpoint.safetensors").tensors for p in (parts, whole))
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    lines = [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6]


def test_compare_runs_each_once_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compare"
    argv = ["compare", *SMALL, "--recipes", "fp32,mxfp4", "--seeds", "1", "--out", str(out)]
    assert main([*argv, "--plot-only"]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "[2/2]" in text
    for name in ("compare.json", "compare.md", "compare.png"):
        assert (out / name).stat().st_size > 0
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["fp32", "mxfp4"]
    assert rows[1]["flushed"] > 0

    def never(self: comparing.Job) -> None:
        raise AssertionError(f"{self.name} was started again")

    monkeypatch.setattr(comparing.Job, "start", never)
    assert main(argv) == 0
    assert main([*argv, "--plot-only"]) == 0
    assert main([*argv, "--epochs", "3"]) == 2
    assert "holds a run with another configuration" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_comparison_ends_its_runs(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "training", "compare", "mlp", "--recipes", "mxfp4"]
    command += ["--seeds", "1", "--epochs", "500", "--train-limit", "256", "--test-limit", "60"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    checkpoint = tmp_path / "out" / "runs" / "mxfp4-s0" / "checkpoint.safetensors"
    deadline = time.monotonic() + 110
    while not checkpoint.is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "the same command goes on" in text
    log = (tmp_path / "out" / "logs" / "mxfp4-s0.txt").read_text(encoding="utf-8")
    assert "interrupted; the finished steps are in" in log  # ended well, before its parent did


def test_compare_reports_runs_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", *SMALL, "--batch-size", "97", "--recipes", "fp32", "--seeds", "1"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    assert "run fp32-s0 failed (exit code 2)" in text
    assert "expected at most the 96 training images, got 97" in text


def test_finished_runs_are_set_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*SMALL, "--out", str(one)]) == 0
    assert main([*SMALL, "--out", str(two), "--recipe", "mxfp4_all"]) == 0
    capsys.readouterr()
    assert main(["compare", str(one), str(two)]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["run"][1:] == ["one", "two"]
    assert rows["recipe"][1:] == ["fp32", "mxfp4_all"]
    assert "lr" not in rows and "seed" not in rows
    losses = [json.loads((run / "result.json").read_text())["loss"] for run in (one, two)]
    assert rows["test loss"][2:] == [f"{loss:.4f}" for loss in losses]
    assert main(["compare", str(one)]) == 2
    assert "two or more folders of runs" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere"
    for order in ([nowhere, two], [one, nowhere]):
        assert main(["compare", *map(str, order)]) == 2
        assert f"compare: {nowhere} holds no run" in capsys.readouterr().err
    result = json.loads((two / "result.json").read_text())
    told = {**result, "unit": "tokens", "per_second": 1234.0, "diverged": "the loss is not finite"}
    (two / "result.json").write_text(json.dumps(told))
    assert main(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "1,234 tokens" in text and " images" in text and "the loss is not finite" in text
    (two / "result.json").unlink()
    assert main(["compare", str(one), str(two)]) == 2
    assert f"extensor train mlp --out {two} --resume" in capsys.readouterr().err
