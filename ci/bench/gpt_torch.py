"""The GPT run of `python -m training gpt`, in torch eager, to be compared curve by curve.

    python ci/bench/gpt_torch.py --check 20          # both in lockstep: do the losses agree?
    python ci/bench/gpt_torch.py --seed 0            # the whole run, into runs/gpt-torch-s0
    python ci/bench/gpt_torch.py --report --seeds 0,1,2

Same initial weights, batches, AdamW, schedule, clipping and test windows; what torch does with
them is torch's own: modules, fused attention, its optimizer. `--report` reads those runs and ours
(runs/gpt-shakespeare-fp32-s0 ...) and writes ci/bench/results/DATE-gpt-shakespeare.json. Needs
torch (extra ``bench``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.contest import write
from ci.bench.torch_models import torch_gpt
from extensor import models
from extensor.config import num_threads
from extensor.training.batch import Batch
from extensor.training.config import RunConfig
from extensor.training.loop import Trainer
from extensor.training.optimizers import make_schedule
from extensor.training.runs import defaults
from extensor.training.tasks.language import Causal

TOLERANCE = 1e-5
"""Of --check: relative, between two losses of float32 sums in different orders."""


def run_config(seed: int) -> RunConfig:
    """What `python -m training gpt --seed SEED` runs."""
    return RunConfig(**{**defaults("gpt"), "seed": seed})


class TorchRun:
    """Steps and evaluations of the run in torch.

    Attributes:
        task: the batches, which are ours.
        model, optimizer: torch's.
    """

    def __init__(self, config: RunConfig) -> None:
        import torch

        torch.set_num_threads(num_threads())
        self.config, self.task = config, Causal(config)
        shape = models.config(config.model, config.variant, **self.task.shapes())
        ours = models.build(config.model, shape, np.random.default_rng(config.seed))
        self.model = torch_gpt(shape, ours.state_dict())
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if p.ndim > 1],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
        )
        self.schedule = make_schedule(config, self.task.batches)
        self.steps = 0

    def loss(self, batch: Batch) -> Any:
        """Mean loss of a batch."""
        import torch

        inputs, labels = (
            torch.from_numpy(np.ascontiguousarray(a)) for a in (batch.inputs, batch.labels)
        )
        scores = self.model(inputs)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss before it."""
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self.schedule.factor(self.steps)
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.steps += 1
        return float(loss.item())

    def test_loss(self) -> float:
        """Mean loss over the test windows."""
        import torch

        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.task.test(self.task.eval_batch):
                total += float(self.loss(batch).item()) * batch.count
                count += batch.count
        return total / count


def train(config: RunConfig, out: Path) -> None:
    """The whole run, into ``out``/torch.json."""
    start = time.perf_counter()
    run, curve, training = TorchRun(config), [], 0.0
    for epoch in range(1, config.epochs + 1):
        clock, losses = time.perf_counter(), []
        for batch in run.task.training(epoch, 0):
            losses.append(run.step(batch))
        training += time.perf_counter() - clock
        curve.append(
            {
                "step": run.steps,
                "train_loss": statistics.fmean(losses),
                "test_loss": run.test_loss(),
                "seconds": training,
            }
        )
        print("step {step:>5}  train {train_loss:.4f}  test {test_loss:.4f}".format(**curve[-1]))
    out.mkdir(parents=True, exist_ok=True)
    wall = time.perf_counter() - start
    result = {
        "config": config.as_dict(),
        "threads": num_threads(),
        "wall_seconds": wall,
        "training_seconds": training,
        "curve": curve,
    }
    (out / "torch.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{training:.1f} s of training, {wall:.1f} s in all; written to {out / 'torch.json'}")


def check(config: RunConfig, steps: int) -> float:
    """The largest relative difference of losses between ours and torch, over some steps."""
    theirs, ours = TorchRun(config), Trainer(config, Path("unused"))
    worst = 0.0
    for batch in _batches(theirs.task, steps):
        expected = theirs.step(batch)
        loss = ours.advance([batch])[0].loss
        assert loss is not None
        worst = max(worst, abs(loss - expected) / expected)
        print(f"step {theirs.steps:>4}  torch {expected:.7f}  extensor {loss:.7f}")
    return worst


def _batches(task: Causal, steps: int) -> Iterator[Batch]:
    for epoch in range(1, 1 + -(-steps // task.batches)):
        for batch in task.training(epoch, 0):
            if steps:
                yield batch
                steps -= 1


def report(seeds: list[int], runs: Path) -> None:
    """Both curves of each seed side by side, and what the gap is worth against the seeds' noise."""
    rows, gaps = [], []
    for seed in seeds:
        torch = json.loads((runs / f"gpt-torch-s{seed}" / "torch.json").read_text())
        folder = runs / f"gpt-shakespeare-fp32-s{seed}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        ours = [json.loads(line) for line in lines]
        seconds = 0.0
        for mine, other in zip(ours, torch["curve"], strict=True):
            seconds += mine["seconds"]
            row = {
                "seed": seed,
                "step": mine["step"],
                "extensor_test_loss": round(mine["test_loss"], 5),
                "torch_test_loss": round(other["test_loss"], 5),
                "extensor_seconds": round(seconds, 2),
                "torch_seconds": round(other["seconds"], 2),
            }
            rows.append(row)
        gaps.append(ours[-1]["test_loss"] - torch["curve"][-1]["test_loss"])
        print(
            f"seed {seed}: test loss {ours[-1]['test_loss']:.4f}, torch's "
            f"{torch['curve'][-1]['test_loss']:.4f}; training {seconds:.1f} s, torch's "
            f"{torch['training_seconds']:.1f} s ({seconds / torch['training_seconds']:.2f}x)"
        )
    last = [r["torch_test_loss"] for r in rows if r["step"] == rows[-1]["step"]]
    spread = f", seeds of torch spread by {max(last) - min(last):.4f}" if len(last) > 1 else ""
    print(f"mean gap {statistics.fmean(gaps):+.4f}{spread}")
    write("gpt-shakespeare", rows, ran="python ci/bench/gpt_torch.py --report")


def main() -> int:
    """Run what is asked for; 1 if --check finds different losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", default="0,1,2", help="of --report")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs lie")
    parser.add_argument("--epochs", type=int, help="fewer rounds of 250 steps, for a try")
    parser.add_argument("--check", type=int, metavar="STEPS", help="ours and torch in lockstep")
    parser.add_argument("--report", action="store_true", help="compare finished runs")
    args = parser.parse_args()
    config = run_config(args.seed)
    if args.epochs:
        config = dataclasses.replace(config, epochs=args.epochs)
    if args.report:
        report([int(seed) for seed in args.seeds.split(",")], args.runs)
    elif args.check:
        worst = check(config, args.check)
        print(f"largest relative difference {worst:.2e}, allowed {TOLERANCE:.0e}")
        return int(worst > TOLERANCE)
    else:
        train(config, args.runs / f"gpt-torch-s{args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
