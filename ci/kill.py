"""Runs that die, go on, and must end as if nothing had happened.

    python ci/kill.py                 every death, 200 random ones, every full disk
    python ci/kill.py --every 9       a sample: what the tests run
    python ci/kill.py --every 4 --first 2         a fourth of them: for one of several processes
    python ci/kill.py --only full     of the campaigns killed, random, twice, full and limit, one
    python ci/kill.py --every 9 -- --recipe mxfp4 --device cuda --graph         another run

A small run with validation data stops early, its best epoch in the middle. It is killed (SIGKILL)

- killed: before each training step, and before each file of its folder is opened, renamed or
  deleted;
- random: at random times;
- twice: at such a point, and again while it resumes.

It is resumed, or started again if it had saved nothing. Its checkpoints, metrics and result must
equal those of a run that was never killed, clocks apart, and no other file may be left. Where the
disk is full instead (full: from such a point on; limit: at a size of file that cannot be passed),
the command must end with one line of error and exit code 1, and the run must go on later, too.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorboardX  # noqa: F401 - once, before processes are forked
from rich.progress import Progress

from extensor.io import load_checkpoint
from extensor.quant import QuantArray
from extensor.training.cli import main as train
from extensor.training.loop import Trainer
from extensor.training.rundir import BEST, LAST, METRICS, RESULT

RUN = (
    *("mlp", "--recipe", "mxfp4_adaptive", "--epochs", "9", "--patience", "1"),
    *("--val-share", "0.2", "--train-limit", "96", "--test-limit", "60"),
    *("--batch-size", "16", "--lr", "0.1"),
)
OTHER: list[str] = []
"""What comes after ``--`` on the command line."""
CLOCKS = {"seconds", "epoch_seconds", "epoch_waited", "per_second", "waited", "peak_rss_mb"}
CLOCKS |= {"seconds_per_epoch"}
WRITES = {"os.rename", "os.remove", "os.mkdir"}
CAMPAIGNS = ("killed", "random", "twice", "full", "limit")

Act = Callable[[], None]
End = tuple[int, str]
"""An exit code, or minus the signal that killed a process, and what the process said."""


def die() -> None:
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Points:
    """Counts the points of a process at which something may happen; from number ``at`` it does.

    Args:
        folder: the run's folder; what happens elsewhere is no point.
        at: the number of the point, from 1.
        act: what happens.
        steps: whether training steps are points.
    """

    def __init__(self, folder: Path, at: int, act: Act, steps: bool) -> None:
        self.folder, self.at, self.act, self.count = str(folder), at, act, 0
        sys.addaudithook(self.audit)
        if steps:
            step = Trainer.step

            def counted(trainer: Trainer, *args: Any) -> Any:
                self.reach()
                return step(trainer, *args)

            Trainer.step = counted

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's own report of what it is about to do."""
        if event == "open":
            path, mode, flags = args
            if not (set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event in WRITES:
            path = args[0]
        else:
            return
        if str(path).startswith(self.folder):
            self.reach()

    def reach(self) -> None:
        self.count += 1
        if self.count >= self.at:
            self.act()


class Process:
    """The run in a process of its own: started, or resumed if it has a checkpoint.

    Args:
        folder: the run's folder.
        at: the number of the point from which on something happens, from 1; 0 for none.
        act: what happens.
        steps: whether training steps are points.
        limit: the size in bytes that files cannot exceed; 0 for none.
    """

    def __init__(
        self, folder: Path, *, at: int = 0, act: Act = die, steps: bool = True, limit: int = 0
    ) -> None:
        self.out, out = os.pipe()
        self.points_file = folder.with_suffix(".points")
        self.id = os.fork()
        if self.id:
            os.close(out)
            return
        code = 70
        try:
            os.dup2(out, 1)
            os.dup2(out, 2)
            again = ["--resume"] if (folder / LAST).exists() else []
            points = Points(folder, at or sys.maxsize, act, steps)
            if limit:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            code = train([*RUN, *OTHER, "--out", str(folder), *again])
            if not at and not limit:
                self.points_file.write_text(str(points.count))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def end(self) -> tuple[int, str]:
        """Wait for the end: the exit code, or minus the signal that killed it, and what it said."""
        with os.fdopen(self.out, encoding="utf-8") as file:
            text = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.id, 0)[1]), text


def untimed(value: Any) -> Any:
    """JSON without clocks."""
    if isinstance(value, dict):
        return {key: untimed(v) for key, v in value.items() if key not in CLOCKS}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def state(folder: Path) -> dict[str, Any]:
    """All that a run leaves, clocks apart."""
    found: dict[str, Any] = {"files": sorted(path.name for path in folder.iterdir())}
    for name in (LAST, BEST):
        checkpoint = load_checkpoint(folder / name)
        for tensor, value in checkpoint.tensors.items():
            parts = value.parts if isinstance(value, QuantArray) else {"": value}
            found[f"{name}: {tensor}"] = {part: array.tobytes() for part, array in parts.items()}
        for key, content in checkpoint.metadata.items():
            found[f"{name}: {key}"] = untimed(content)
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    found[METRICS] = [untimed(json.loads(line)) for line in lines]
    found[RESULT] = untimed(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    return found


def differences(folder: Path, whole: dict[str, Any]) -> list[str]:
    """Finish a run that died, and compare it with one that did not."""
    code, text = Process(folder).end()
    if code:
        return [f"did not go on: exit code {code}: {text[-400:]}"]
    mine = state(folder)
    return [
        f"other {name}" for name in mine.keys() | whole.keys() if mine.get(name) != whole.get(name)
    ]


def killed(
    folder: Path, points: int, which: slice, seconds: float
) -> Iterator[tuple[str, list[End]]]:
    """Deaths before each point."""
    for at in range(1, points + 1)[which]:
        yield f"killed before point {at}", [Process(folder, at=at).end()]


def killed_at_random(
    folder: Path, points: int, which: slice, seconds: float
) -> Iterator[tuple[str, list[End]]]:
    """Deaths at random times."""
    chance = random.Random(0)
    for wait in [chance.uniform(0, seconds) for _ in range(200)][which]:
        process = Process(folder)
        time.sleep(wait)
        os.kill(process.id, signal.SIGKILL)
        yield f"killed after {wait:.3f} s", [process.end()]


def killed_twice(
    folder: Path, points: int, which: slice, seconds: float
) -> Iterator[tuple[str, list[End]]]:
    """Deaths of the run, and of what resumes it."""
    for at, later in [*itertools.product(range(3, points, 7), range(1, 12, 2))][which]:
        ends = [Process(folder, at=at).end(), Process(folder, at=later).end()]
        yield f"killed before point {at}, and before {later} of what resumes", ends


def disk_full(
    folder: Path, points: int, which: slice, seconds: float
) -> Iterator[tuple[str, list[End]]]:
    """A disk that is full from each point on; training steps need no disk."""
    for at in range(1, points + 1)[which]:
        yield f"disk full from point {at}", [Process(folder, at=at, act=full, steps=False).end()]


def file_limit(
    folder: Path, points: int, which: slice, seconds: float
) -> Iterator[tuple[str, list[End]]]:
    """Files that cannot grow beyond a size: what is written is cut."""
    for limit in [1, 7, 64, 300, 1 << 10, 3 << 10, 1 << 16, 1 << 20, 1942016][which]:
        yield f"files up to {limit} bytes", [Process(folder, limit=limit).end()]


WORK = {"killed": killed, "random": killed_at_random, "twice": killed_twice, "full": disk_full,
        "limit": file_limit}  # fmt: skip


def wrong_end(name: str, ends: list[End]) -> list[str]:
    """What is wrong with how the processes ended."""
    codes = [code for code, _ in ends]
    if name not in ("full", "limit") or codes == [0]:
        return [] if set(codes) <= {0, -signal.SIGKILL} else [f"exit codes {codes}"]
    text = ends[0][1]
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if codes != [1] or len(errors) != 1 or "Traceback" in text:
        return [f"exit codes {codes}, expected one line of error: {text[-600:]}"]
    return []


def main() -> int:
    """Run the campaigns; the exit code is 1 if any run ended otherwise."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="take each N-th case")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=CAMPAIGNS)
    parser.add_argument("run", nargs="*", help="after --: more arguments of the run")
    chosen = parser.parse_args()
    OTHER.extend(chosen.run)
    which = slice(chosen.first, None, chosen.every)
    failures, cases = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        begun = time.perf_counter()
        code, text = Process(folder).end()
        if code:
            raise SystemExit(f"the run itself: exit code {code}: {text}")
        seconds = time.perf_counter() - begun
        whole, points = state(folder), int(folder.with_suffix(".points").read_text())
        result = whole[RESULT]
        assert result["stopped_early"] and result["best_epoch"] < result["epochs"], result
        for name in chosen.only:
            shutil.rmtree(folder)
            work = WORK[name](folder, points, which, seconds)
            with Progress(auto_refresh=False) as progress:  # a thread of its own would be forked
                for what, ends in progress.track(work, description=f"{name:<8}"):
                    wrong = wrong_end(name, ends) + differences(folder, whole)
                    cases += 1
                    failures += [f"{what}: {text}" for text in wrong]
                    shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
    for text in failures:
        print(text)
    print(f"{cases} cases, {points} points, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
