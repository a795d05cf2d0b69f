"""GPT training steps at nanoGPT's CPU setting: extensor's against torch eager.

    OMP_NUM_THREADS=2 python ci/bench/gpt_step.py

A step is forward, loss, backward, clipping and AdamW on the same 12 windows of 64 random tokens, 4
blocks of width 128. Each contestant has a process of its own and they take turns (contest.py).
Medians are written, with machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, measure, options, write
from ci.bench.torch_models import torch_gpt
from extensor.config import num_threads
from extensor.nn.recipe import apply_recipe
from extensor.optim import AdamW, clip_grad_norm
from models.gpt.configs import GPTConfig
from models.gpt.model import build

LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0


def ours(recipe: str, tokens: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """A step of ours under a recipe."""
    model = build(GPTConfig(), np.random.default_rng(0))
    state = apply_recipe(model, recipe)
    optimizer = AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    x, y = et.from_numpy(tokens), et.from_numpy(labels.reshape(-1))

    def step() -> None:
        state.step += 1
        optimizer.zero_grad()
        scores = model(x)
        et.cross_entropy(scores.reshape(-1, scores.shape[-1]), y).backward()
        clip_grad_norm(optimizer.params, CLIP)
        optimizer.step()

    return step


def theirs(tokens: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """A step of torch's."""
    import torch

    torch.set_num_threads(num_threads())
    model = torch_gpt(GPTConfig(), build(GPTConfig(), np.random.default_rng(0)).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    x, y = torch.from_numpy(tokens), torch.from_numpy(labels.reshape(-1))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def contestant(name: str) -> Callable[[], None]:
    """The step of ``name``, torch or a recipe of ours."""
    config, rng = GPTConfig(), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab, (12, config.context + 1))
    inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    return theirs(inputs, labels) if name == "torch" else ours(name, inputs, labels)


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=9)
    parser.add_argument("--recipes", default="fp32,bf16,mxfp8_nvidia,mxfp4,nvfp4_nvidia")
    parser.add_argument("--burst", type=int, default=10, help="steps of a turn")
    args = arguments(parser)
    names = ["torch", *(name for name in args.recipes.split(",") if name)]
    seconds = measure({name: (contestant, (name,)) for name in names}, args.rounds, args.burst)
    rows: list[dict[str, Any]] = []
    for name, value in seconds.items():
        ratio = seconds["torch"] / value
        rows.append(
            {
                "step": name,
                "ms": round(value * 1e3, 2),
                "tokens_per_s": round(12 * 64 / value),
                "speed_against_torch": round(ratio, 3),
            }
        )
        print(f"{name:<14} {value * 1e3:8.2f} ms  {ratio:5.2f}x torch's speed")
    write("gpt-step", rows, args=args)


if __name__ == "__main__":
    main()
