"""Can every image model learn under every recipe? Each has to know 64 real images by heart.

    python ci/zoo.py                                            every model, five recipes
    python ci/zoo.py --models lenet,resnet --recipes fp32,mxfp8_nvidia --jobs 8

Each (model, recipe) is a process of its own, on one thread unless --threads says otherwise, --jobs
of them side by side. It trains on one batch of 64 images (Adam, constant learning rate, no weight
decay) and counts every few steps how many of them the model knows in evaluation mode, with the
recipe's own forward pass. It stops when it knows them all, or after --steps. The goals: 100% in
float32, 98% under mxfp8_nvidia; other recipes have none. Exits 1 if a goal is missed or a process
failed. A table on the screen, JSON in ci/bench/results/.

The images: CIFAR-10 where it lies on this machine, else Fashion-MNIST, else the package's digits
(--images names one); grey 28x28 images are framed by zeros to 32x32 and repeated in three channels.
Nothing is downloaded.

The JSON is written after every row. With --resume, rows that are in it already, from the same
images, seed and steps, are kept instead of run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import extensor as et
from extensor import models
from extensor.config import use_core
from extensor.nn import Module, apply_recipe
from extensor.optim import Adam
from extensor.training.data import DATASETS, DataError, load_dataset
from extensor.training.data.sources import framed
from extensor.training.result import peak_rss_mb

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci" / "bench" / "results"
MODELS = ("mlp", "lenet", "alexnet", "vgg", "resnet", "mobilenet", "googlenet")
RECIPES = ("fp32", "mxfp8_nvidia", "mxfp4", "nvfp4_nvidia", "mxfp4_all")
GOALS = {"fp32": 1.0, "mxfp8_nvidia": 0.98}
"""Share of the images that a model must know in the end."""
PREFERRED = ("cifar10", "fashion_mnist", "digits")
LEARNING_RATES = {"alexnet": 3e-4}
LEARNING_RATE = 1e-3
COUNT, SIDE, CHECK_EVERY = 64, 32, 5
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "EXTENSOR_NUM_THREADS")


def on_this_machine(name: str) -> bool:
    """Whether a data set needs no download."""
    try:
        load_dataset(name, download=False)
    except DataError:
        return False
    return True


def load_images(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """The first 64 training images, (64, 3, 32, 32) normalised float32; labels; classes."""
    dataset = load_dataset(name, download=False)
    split = dataset.train.first(COUNT)
    x = framed(split.images) / np.float32(255 if split.images.dtype == np.uint8 else 1)
    x = (x - x.mean()) / x.std()
    return x.astype(np.float32), split.labels, len(dataset.classes)


def share_known(model: Module, x: et.ExTensor, labels: np.ndarray) -> float:
    """How many of the images a model knows, in evaluation mode."""
    model.eval()
    with et.no_grad():
        known = (model(x).numpy().argmax(axis=1) == labels).mean()
    model.train()
    return float(known)


def learn(name: str, recipe: str, images: str, steps: int, seed: int) -> dict[str, Any]:
    """Train one model under one recipe; returns its row of the result."""
    pixels, labels, classes = load_images(images)
    x, y = et.from_numpy(pixels), et.from_numpy(labels)
    config = models.config(name, in_channels=3, image_size=SIDE, classes=classes)
    model = models.build(name, config, np.random.default_rng(seed))
    state = apply_recipe(model, recipe, seed)
    lr = LEARNING_RATES.get(name, LEARNING_RATE)
    optimizer = Adam(model.parameters(), lr=lr)
    known, shares, start = 0.0, [], time.perf_counter()
    loss, step = float("nan"), 0
    while step < steps and known < 1.0:
        state.step = step
        optimizer.zero_grad()
        output = et.cross_entropy(model(x), y)
        output.backward()
        optimizer.step()
        loss, step = float(output.item()), step + 1
        if step % CHECK_EVERY == 0:
            known = share_known(model, x, labels)
            shares.append(known)
        if not np.isfinite(loss):
            break
    return {
        "model": name,
        "recipe": recipe,
        "accuracy": known,
        "best_accuracy": max(shares, default=0.0),
        "steps": step,
        "loss": loss if np.isfinite(loss) else None,
        "lr": lr,
        "seconds": round(time.perf_counter() - start, 1),
        "parameters": sum(p.size for p in model.parameters()),
        "peak_rss_mb": round(peak_rss_mb()),
    }


def run_one(name: str, recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    """`learn` in a process of its own; a failure is a row with an ``error``."""
    command = [sys.executable, __file__, "--one", name, recipe, "--images", args.images]
    command += ["--steps", str(args.steps), "--seed", str(args.seed)]
    env = {**os.environ, **dict.fromkeys(THREADS, str(args.threads))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"model": name, "recipe": recipe, "error": lines[-1], "trace": done.stderr[-2000:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def passed(row: dict[str, Any]) -> bool:
    """Whether a row met its goal; without a goal, whether it ended."""
    return "error" not in row and row["accuracy"] >= GOALS.get(row["recipe"], 0.0)


def table_of(rows: Sequence[dict[str, Any]], names: Sequence[str], recipes: Sequence[str]) -> Table:
    """Models down, recipes across: share known, steps, seconds."""
    cells = {(row["model"], row["recipe"]): row for row in rows}
    table = Table(title=f"{COUNT} images known in the end (steps, seconds)")
    table.add_column("model")
    table.add_column("weights", justify="right")
    for recipe in recipes:
        goal = f"\n(goal {GOALS[recipe]:.0%})" if recipe in GOALS else ""
        table.add_column(recipe + goal, justify="right")
    for name in names:
        line, weights = [], "-"
        for recipe in recipes:
            row = cells[name, recipe]
            colour = "green" if passed(row) else "red"
            if "error" in row:
                line.append("[red]failed")
                continue
            weights = f"{row['parameters']:,}"
            line.append(
                f"[{colour}]{row['accuracy']:.1%}[/] ({row['steps']}, {row['seconds']:.0f} s)"
            )
        table.add_row(name, weights, *line)
    return table


def kept_rows(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same images, seed and steps that did not fail."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    if any(before["about"].get(name) != about[name] for name in ("images", "seed", "steps")):
        return []
    return [row for row in before["rows"] if "error" not in row]


def main(argv: Sequence[str] | None = None) -> int:
    """Train all of them, show the table, write the JSON; 0 if every goal was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--images", choices=PREFERRED, help="default: the first that is here")
    parser.add_argument("--steps", type=int, default=400, help="at most (default 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-zoo.json")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "RECIPE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    assert set(PREFERRED) <= set(DATASETS)
    args.images = args.images or next(name for name in PREFERRED if on_this_machine(name))
    if args.one:
        name, recipe = args.one
        print(json.dumps(learn(name, recipe, args.images, args.steps, args.seed)))
        return 0
    console = Console(soft_wrap=True)
    names, recipes = args.models.split(","), args.recipes.split(",")
    pairs = [(name, recipe) for recipe in recipes for name in names]
    about = {
        "command": f"python ci/zoo.py --models {args.models} --recipes {args.recipes}",
        "date": str(date.today()),
        "images": f"first {COUNT} training images of {args.images}, as (3, {SIDE}, {SIDE})",
        "seed": args.seed,
        "steps": args.steps,
        "goals": GOALS,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {args.jobs} processes of "
        f"{args.threads} threads, {'C++ core' if use_core() else 'numpy'}",
        "versions": {name: version(name) for name in ("numpy", "ml_dtypes")},
    }
    rows = kept_rows(args.out, about) if args.resume else []
    done = {(row["model"], row["recipe"]) for row in rows}
    todo = [pair for pair in pairs if pair not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda pair: run_one(pair[0], pair[1], args), todo):
            rows.append(row)
            outcome = row.get("error") or f"{row['accuracy']:.1%} after {row['steps']} steps"
            console.print(f"{row['model']} {row['recipe']}: {outcome}", highlight=False)
            args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    rows = [row for row in rows if (row["model"], row["recipe"]) in pairs]
    console.print(table_of(rows, names, recipes))
    console.print(f"written to {args.out}")
    return 0 if all(map(passed, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
