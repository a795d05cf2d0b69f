"""How long `import extensor` takes in a fresh interpreter, beside `import numpy`.

    python ci/bench/import_time.py

Medians over interpreters, in turns; written to ci/bench/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="import extensor beside import numpy")
    parser.add_argument("--rounds", type=int, default=15, help="fresh interpreters for each")
    chosen = parser.parse_args(argv)
    times: dict[str, list[float]] = {"numpy": [], "extensor": []}
    for _ in range(chosen.rounds):
        for name, values in times.items():
            command = [sys.executable, "-c", CODE.format(name)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            values.append(float(done.stdout))
    seconds = {name: round(statistics.median(values), 4) for name, values in times.items()}
    print(f"import numpy {seconds['numpy']:.3f} s, import extensor {seconds['extensor']:.3f} s")
    about = {
        "command": f"python ci/bench/import_time.py --rounds {chosen.rounds}",
        "date": str(date.today()),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    path = RESULTS / f"{date.today()}-import-time.json"
    path.write_text(json.dumps({"about": about, "median_seconds": seconds}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
