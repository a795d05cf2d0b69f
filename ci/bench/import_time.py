"""How long `import extensor` takes in a fresh interpreter, beside `import numpy`.

    python ci/bench/import_time.py

Medians over interpreters, in turns; written to ci/bench/results/.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys

from ci.bench.contest import arguments, options, write

CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def main() -> None:
    """Measure, print and write."""
    args = arguments(options(__doc__, rounds=15))
    if hasattr(signal, "SIGPIPE"):  # a reader that leaves early, as `head` does, ends this quietly
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    times: dict[str, list[float]] = {"numpy": [], "extensor": []}
    for _ in range(args.rounds):
        for name, values in times.items():
            line = [sys.executable, "-c", CODE.format(name)]
            done = subprocess.run(line, check=True, capture_output=True, text=True)
            values.append(float(done.stdout))
    seconds = {name: round(statistics.median(values), 4) for name, values in times.items()}
    print(f"import numpy {seconds['numpy']:.3f} s, import extensor {seconds['extensor']:.3f} s")
    rows = [{"import": name, "median_seconds": value} for name, value in seconds.items()]
    write("import-time", rows, args=args)


if __name__ == "__main__":
    main()
