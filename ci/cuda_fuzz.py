"""Put random shapes, layouts and options through the CUDA kernels and judge what comes out.

    python -m ci.cuda_fuzz --seconds 40
    python -m ci.cuda_fuzz --part quantizers --case 1000123

Tests choose their shapes; this draws them: odd and round sizes, arrays that are reversed, have gaps
or lie down columns, rows of zeros, NaN and infinities (`ci.cuda_cases`), then layers of language
models and arrays of more than 2**31 elements (`ci.cuda_layers`, up to 70 GB of the GPU's memory).
Quantizers are compared with the reference byte for byte, products with float64 within the bounds
that their modules state. Each part is a process of its own. A case is its number: what is off is
printed with it, and --case runs it again alone. Cases that no kernel takes are counted apart; a
part all of whose cases are such has not passed. Needs a GPU with wgmma (H100, H200).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from ci.cuda_cases import Rng, attention, groups, products, quantizers, rowwise_columnwise, weights
from ci.cuda_layers import large, layers
from extensor.backends.registry import get

SHOWN = 5  # cases of a part that are printed


Part = Callable[[Rng, Any], str | None]
"""What is off in a case, nothing, or None: no kernel takes it."""
PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        quantizers,
        rowwise_columnwise,
        products,
        weights,
        groups,
        attention,
        layers,
        large,
    )
}


def run(part: str, first: int, seconds: float) -> tuple[str, int, int, list[str]]:
    """A part, how many of its cases were judged and how many not, and what was off.

    Cases are numbered from ``first`` on, until the time is over.
    """
    backend, end, case, missed = get("cuda"), time.monotonic() + seconds, first, 0
    found: list[str] = []
    while case == first or time.monotonic() < end:
        try:
            wrong = PARTS[part](np.random.default_rng(case), backend)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            found.append(f"--part {part} --case {case}: {wrong}")
        missed += wrong is None
        case += 1
    return part, case - first - missed, missed, found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for; 0 if each judged something and nothing was off."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--seconds", type=float, default=40, help="of each part")
    parser.add_argument("--seed", type=int, default=1, help="millions of the first case's number")
    parser.add_argument("--case", type=int, help="this case alone")
    chosen = parser.parse_args(argv)
    first, seconds = chosen.seed * 1_000_000, chosen.seconds
    if chosen.case is not None:
        first, seconds = chosen.case, 0.0
    parts, bad = chosen.part or list(PARTS), 0
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        for waiting in [pool.submit(run, part, first, seconds) for part in parts]:
            part, cases, missed, found = waiting.result()
            bad += len(found) + (not cases)
            told = f"{part}: {len(found)} of {cases} cases are off; {missed} have no kernel"
            print("\n".join([told, *found[:SHOWN]]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
