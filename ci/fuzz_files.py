"""Put broken and hostile files through every reader, and judge how each one ends.

    python ci/fuzz_files.py --seconds 60                every format, one process for each CPU
    python ci/fuzz_files.py --inputs 10000000 --jobs 2
    python ci/fuzz_files.py --format gguf --case 1234   one input again, with its traceback
    python ci/fuzz_files.py --seconds 600 --grow        keep inputs that end as none did before

Each format is known by its structure (`ci.fuzz_formats`): whole files are made here, and one or
several of their fields are changed, so that most inputs pass the first checks and reach deeper
ones. Corpora in tests/corpus hold inputs that ended in a way of their own, one for each.

A reader may read the file, or raise its own error, which names the file and holds nothing that a
terminal obeys. Anything else is a failure: another exception, more than 1 GB of memory, more than
5 seconds of the CPU, a crash. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ci.fuzz_formats import FORMATS, Format

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "corpus"
SECONDS_EACH, MEMORY = 5, 1 << 30
LARGEST_KEPT = 3000
SHOWN = 5

Ending = tuple[str, str]
"""read, refused or FAILED; and where: the line that raised, or what was wrong."""


class TooSlowError(BaseException):
    """Raised by the alarm; no reader catches it."""


def corpus(name: str) -> list[bytes]:
    """The kept inputs of a format."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text().split() if path.is_file() else []
    return [base64.b64decode(line) for line in lines]


class Fuzzer:
    """Inputs of one format by their numbers.

    Args:
        form: the format.
        folder: where its files are written.
    """

    def __init__(self, form: Format, folder: Path) -> None:
        self.form, self.folder = form, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.seeds = [*form.seeds(), *corpus(form.name)]
        form.prepare(folder)

    def input(self, case: int) -> bytes:
        """The bytes of a case; those below 0 are the whole files and the corpus as they are."""
        if case < 0:
            return self.seeds[-1 - case]
        draw = random.Random(f"{self.form.name} {case}")
        content = draw.choice(self.seeds)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            try:
                content = self.form.mutate(content, draw)
            except Exception:  # a corpus' input need not have the structure
                content = noise(content, draw)
        return content if draw.random() > 0.05 else noise(content, draw)

    def end(self, content: bytes) -> Ending:
        """How the reader ends."""
        path = self.folder / self.form.file
        path.write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
        try:
            self.form.read(path)
        except self.form.errors as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error)
            if self.form.names_file and self.folder.name not in text:
                return "FAILED", f"the error does not name the file: {text[:200]}"
            if not text.replace("\n", " ").isprintable():
                return "FAILED", f"the error has control characters: {text[:200]!r}"
            return "refused", f"{Path(frame.filename).name}:{frame.lineno}"
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if ".venv" not in f.filename and "/lib/" not in f.filename]
            place = ours[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return "FAILED", f"{where}: {type(error).__name__}: {str(error)[:120]!r}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return "read", ""


def noise(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, cut, removed or repeated without regard to structure."""
    if not content:
        return bytes([draw.randrange(256)])
    at = draw.randrange(len(content))
    end = min(len(content), at + draw.choice((1, 1, 2, 4, 8, 64)))
    new = draw.choice((b"", b"\xff" * (end - at), b"\0" * (end - at), draw.randbytes(end - at),
                       content[at:end] * 2))  # fmt: skip
    return content[:at] if draw.random() < 0.1 else content[:at] + new + content[end:]


def work(
    name: str, first: int, step: int, seconds: float, inputs: int, grow: bool
) -> tuple[str, Counter[str], dict[str, tuple[int, bytes]], Counter[str], set[str]]:
    """Cases of a format from ``first`` on, each ``step``-th, until the budget is spent."""

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlowError(f"more than {SECONDS_EACH} s")

    signal.signal(signal.SIGPROF, too_slow)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=shared_memory()) as temporary:
        fuzzer = Fuzzer(FORMATS[name], Path(temporary) / "fuzzed")
        if "ASAN_OPTIONS" not in os.environ:  # its shadow memory counts, too
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        counts: Counter[str] = Counter()
        failures: dict[str, tuple[int, bytes]] = {}
        times: Counter[str] = Counter()
        known: set[str] = set()
        fresh: dict[str, bytes] = {}
        end = time.monotonic() + seconds
        for case in itertools.chain(range(-len(fuzzer.seeds), 0), itertools.count(first, step)):
            if case >= 0 and (counts.total() >= inputs or time.monotonic() > end):
                break
            content = fuzzer.input(case)
            how, where = fuzzer.end(content)
            counts[how] += 1
            if how == "FAILED":
                failures.setdefault(where, (case, content))
                times[where] += 1
            elif how + where not in known:
                known.add(how + where)
                if grow and case >= 0 and len(content) < LARGEST_KEPT:
                    fresh[how + where] = content
        kept = {base64.b64encode(content).decode() for content in fresh.values()}
        return name, counts, failures, times, kept


def shared_memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def again(name: str, case: int) -> int:
    """Run one case with its traceback."""
    with tempfile.TemporaryDirectory() as temporary:
        fuzzer = Fuzzer(FORMATS[name], Path(temporary) / "fuzzed")
        content = fuzzer.input(case)
        print(content if len(content) < 4000 else content[:4000])
        print(fuzzer.end(content))
        fuzzer.form.read(fuzzer.folder / fuzzer.form.file)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; 1 if a reader ended otherwise than it may."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="of all formats together")
    parser.add_argument("--inputs", type=int, default=1 << 60, help="of all formats together")
    parser.add_argument("--format", action="append", choices=FORMATS, help="may be repeated")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this one case of the format")
    parser.add_argument("--grow", action="store_true", help="add to the corpora")
    chosen = parser.parse_args(argv)
    names = chosen.format or list(FORMATS)
    if chosen.case is not None:
        return again(names[0], chosen.case)
    begun, failed, total = time.monotonic(), 0, 0
    weights = {name: FORMATS[name].weight for name in names}
    whole = sum(weights.values())
    jobs = max(1, chosen.jobs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        futures = [
            pool.submit(
                work, name, chosen.first + job, jobs, chosen.seconds * weights[name] / whole,
                -(-chosen.inputs * weights[name] // (whole * jobs)), chosen.grow,
            )
            for name in names
            for job in range(jobs)
        ]  # fmt: skip
        for future in futures:
            name, counts, failures, times, kept = future.result()
            total += counts.total()
            failed += counts["FAILED"]
            figures = ", ".join(f"{how} {count:,}" for how, count in sorted(counts.items()))
            print(f"{name:<12} {figures}", flush=True)
            for where, (case, _) in list(failures.items())[:SHOWN]:
                print(f"  --format {name} --case {case}: {where} ({times[where]} times)")
            if kept:
                CORPUS.mkdir(exist_ok=True)
                lines = {*(base64.b64encode(c).decode() for c in corpus(name)), *kept}
                (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))
    seconds = time.monotonic() - begun
    print(f"{total:,} inputs, {failed} failures, {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
