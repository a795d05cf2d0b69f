"""Training steps on the CPU: extensor against torch eager, and recipes against float32.

    python ci/bench/cpu_step.py                                       # LeNet-5, the C++ core
    EXTENSOR_CORE=0 python ci/bench/cpu_step.py                       # numpy only
    python ci/bench/cpu_step.py --model resnet --batches 16 --recipes mxfp8_nvidia --rounds 5
    OMP_NUM_THREADS=2 python ci/bench/cpu_step.py --model gpt --batches 12
    EXTENSOR_NUM_THREADS=1 OMP_NUM_THREADS=1 python ci/bench/cpu_step.py --recipes all --cpu-time

A step is forward, loss, backward and update: of image models on random images by SGD with momentum,
of a GPT (nanoGPT's CPU setting: 4 blocks of width 128, windows of 64 random tokens) by AdamW after
clipping. All take as many threads (see contest.py for how they take turns). Medians are reported
and written, with machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).

``--cpu-time`` takes the process' CPU time in place of the clock's: with one thread its ratios
depend little on what else the machine does. ``--recipes all`` takes every recipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, measure, options, shown, write
from ci.bench.torch_models import torch_gpt, torch_lenet, torch_resnet
from extensor import models
from extensor.config import num_threads, use_core
from extensor.models.gpt.configs import GPTConfig
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, AdamW, clip_grad_norm
from extensor.quant.recipes import RECIPES

SHAPES = {"lenet": (1, 28, 28), "resnet": (3, 32, 32), "gpt": (GPTConfig().context,)}
"""The inputs of each model: LeNet-5, ResNet-18 as it is trained on CIFAR-10, and a GPT."""
MOMENTUM: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
CLIP = 1.0


def data(model: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs, and a label for each row of scores."""
    rng, shape = np.random.default_rng(0), (batch, *SHAPES[model])
    if model == "gpt":
        tokens = rng.integers(0, GPTConfig().vocab, (batch, shape[1] + 1))
        return tokens[:, :-1].copy(), tokens[:, 1:].reshape(-1).copy()
    return rng.standard_normal(shape).astype(np.float32), rng.integers(0, 10, batch)


def contestant(model: str, name: str, batch: int) -> Callable[[], None]:
    """The step of ``name``: torch, or a recipe of ours."""
    config = GPTConfig() if model == "gpt" else models.config(model)
    ours = models.build(model, config, np.random.default_rng(0))
    step = torch_step if name == "torch" else partial(our_step, recipe=name)
    return step(model, ours, *data(model, batch))


def our_step(
    name: str, model: Any, inputs: np.ndarray, labels: np.ndarray, recipe: str
) -> Callable[[], None]:
    """The step of our model of that name under a recipe."""
    state = apply_recipe(model, recipe)
    adam = name == "gpt"
    update: Any = (
        AdamW(model.parameters(), **ADAMW) if adam else SGD(model.parameters(), **MOMENTUM)
    )
    x, y = et.from_numpy(inputs), et.from_numpy(labels)

    def step() -> None:
        state.step += 1
        update.zero_grad()
        scores = model(x)
        et.cross_entropy(scores.reshape(-1, scores.shape[-1]), y).backward()
        if adam:
            clip_grad_norm(update.params, CLIP)
        update.step()

    return step


def torch_step(name: str, model: Any, inputs: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """The same of torch's model, on as many threads."""
    import torch

    torch.set_num_threads(num_threads())
    adam = name == "gpt"
    peer = torch_gpt(GPTConfig(), model.state_dict()) if adam else PEERS[name]()
    update: Any = torch.optim.SGD(peer.parameters(), **MOMENTUM)
    if adam:
        update = torch.optim.AdamW(peer.parameters(), **ADAMW)
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)

    def step() -> None:
        update.zero_grad()
        torch.nn.functional.cross_entropy(peer(x).flatten(0, -2), y).backward()
        if adam:
            torch.nn.utils.clip_grad_norm_(peer.parameters(), CLIP)
        update.step()

    return step


PEERS = {"lenet": torch_lenet, "resnet": torch_resnet}


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=15)
    parser.add_argument("--model", choices=SHAPES, default="lenet")
    parser.add_argument("--recipes", default="mxfp4,mxfp8_nvidia,nvfp4_nvidia")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: on busy machines")
    args = arguments(parser)
    recipes = [name for name in RECIPES if name != "fp32"]
    if args.recipes != "all":
        recipes = [name for name in args.recipes.split(",") if name]
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows: list[dict[str, Any]] = []
    for batch in (int(n) for n in args.batches.split(",")):
        names = ["torch", "fp32", *recipes]
        contestants = {name: (contestant, (args.model, name, batch)) for name in names}
        burst = {"lenet": max(1, 640 // batch), "resnet": 1, "gpt": 10}[args.model]
        seconds = measure(contestants, args.rounds, burst, clock)
        rows += shown(
            {
                "batch": batch,
                "step": name,
                "ms": round(value * 1e3, 3),
                "inputs_per_s": round(batch / value),
                "speed_against_torch": round(seconds["torch"] / value, 3),
                "time_against_fp32": round(value / seconds["fp32"], 3),
            }
            for name, value in seconds.items()
        )
    core = "core" if use_core() else "numpy"
    name = f"{args.model}-step-{core}" + "-cpu-time" * args.cpu_time
    write(name, rows, args=args)


if __name__ == "__main__":
    main()
