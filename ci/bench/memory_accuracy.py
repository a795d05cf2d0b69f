"""What settings that save memory cost in loss: small runs, each setting with several seeds.

    python ci/bench/memory_accuracy.py gpt llama resnet --seeds 3 --jobs 4

Runs that the file names already are not made again, so an interrupted command goes on. So many jobs
run at once, each with one thread. ``--only`` takes settings by an expression, ``--steps`` another
number than the usual steps of text (into a file of its own). It writes
docs/results/<day>-memory-accuracy.json and prints mean gaps to the first setting, seed by seed,
with standard errors. "gpt" and "llama" learn Shakespeare letter by letter: the run's own model of
width 128, and Llama's parts (RMS norms, gated units, rotary positions) of width 64.
"resnet" is a residual network of 4 blocks on 8 x 8 digits. Recipe: mxfp4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from extensor.models.resnet.configs import CONFIGS, ResNetConfig
from extensor.training.config import RunConfig
from extensor.training.flags import resolve
from extensor.training.loop import Trainer

OUT = Path("docs/results/2026-11-27-memory-accuracy.json")
TEXT: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0.1, "dataset": "shakespeare"}
STUDIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {**TEXT, "epoch_steps": 240, "test_limit": 128},
    "llama": {
        **TEXT, "variant": "nano", "epoch_steps": 400, "test_limit": 128, "batch_size": 12,
        "context": 64, "tokenizer": "char", "vocab_size": 0,
    },
    "resnet": {
        "variant": "tiny", "dataset": "digits", "epochs": 3, "batch_size": 32, "lr": 0.05,
        "augment": "none",
    },
}  # fmt: skip
SAVED = {
    "gpt": (
        "mxfp8", "mxfp4", "norm=mxfp4", "activation=mxfp4", "qkv=mxfp4,o=mxfp4", "bfloat16",
        "mxfp6", "mxfp4~",
    ),
    "llama": (
        "bfloat16", "mxfp8", "mxfp6", "mxfp4", "mxfp4~", "norm=mxfp4", "gate=mxfp4,up=mxfp4",
        "[qkv]=mxfp4", "o=mxfp4",
    ),
    "resnet": (
        "bfloat16", "mxfp8", "mxfp6", "mxfp4", "mxfp4~", "norm=mxfp4", "activation=mxfp4",
    ),
}  # fmt: skip
NARROW: dict[str, Any] = {"weights": "bfloat16", "optimizer_states": "mxfp8_e4m3"}
OPTIMIZER: Mapping[str, dict[str, Any]] = {
    "weights bfloat16": {"weights": "bfloat16"},
    "weights mxint8": {"weights": "mxint8"},
    "weights mxfp8_e4m3": {"weights": "mxfp8_e4m3"},
    "states mxfp8_e4m3": {"optimizer_states": "mxfp8_e4m3"},
    "both, saved mxfp8": {**NARROW, "saved": "mxfp8"},
    "both, weights mxint8": {**NARROW, "saved": "mxfp8", "weights": "mxint8"},
}


def settings(study: str) -> dict[str, dict[str, Any]]:
    """By name: what differs from the first."""
    saved = {f"saved {text}": {"saved": text} for text in SAVED[study]}
    return {"as it is": {}, **({} if study == "resnet" else OPTIMIZER), **saved}


def loss(study: str, changes: Mapping[str, Any], seed: int) -> float:
    """Test loss at the end of one run."""
    CONFIGS["tiny"] = ResNetConfig(blocks=(1, 1, 1, 1), channels=(16, 32, 64, 64))
    given = {**STUDIES[study], "recipe": "mxfp4", "seed": seed, **changes}
    config = RunConfig(**resolve(study, given, None)[0])
    with tempfile.TemporaryDirectory() as folder:
        return float(Trainer(config, Path(folder)).fit()["loss"])


def shown(study: str, losses: Mapping[str, Mapping[str, float]], first: str) -> None:
    """Print each setting's mean gap to the first, and its standard error, over seeds of both."""
    for name, mine in losses.items():
        gaps = [mine[seed] - losses[first][seed] for seed in mine if seed in losses[first]]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        mean = statistics.mean(mine.values())
        print(
            f"{study:7} {name:24} {mean:.4f}  {statistics.mean(gaps):+.4f} +- {error:.4f}"
            f"  ({len(gaps)} seeds)"
        )


def main() -> None:
    """Run what is missing, seed by seed, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", default="", help="settings beside the first, by an expression")
    parser.add_argument("--steps", type=int, help="of text alone; into a file of its own")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    missing = [
        (study, name, changes, seed)
        for study in args.studies
        for seed in range(args.seeds)
        for name, changes in settings(study).items()
        if not changes or re.search(args.only, name)
        if str(seed) not in found.get(study, {}).get(name, {})
    ]
    if args.steps is not None:
        missing = [(s, n, {**c, "epoch_steps": args.steps}, seed) for s, n, c, seed in missing]
    os.environ["EXTENSOR_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        runs = {pool.submit(loss, study, changes, seed): (study, name, seed)
                for study, name, changes, seed in missing}  # fmt: skip
        for run in as_completed(runs):
            study, name, seed = runs[run]
            found.setdefault(study, {}).setdefault(name, {})[str(seed)] = run.result()
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    for study in args.studies:
        shown(study, found.get(study, {}), "as it is")


if __name__ == "__main__":
    main()
