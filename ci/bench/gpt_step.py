"""GPT training steps at nanoGPT's CPU setting: extensor's against torch eager.

    OMP_NUM_THREADS=2 python ci/bench/gpt_step.py

A step is forward, loss, backward, clipping and AdamW on the same 12 windows of 64 random tokens, 4
blocks of width 128. Each contestant has a process of its own and they take turns (contest.py).
Medians are written, with machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.bench.contest import arguments, measure, options, write
from ci.bench.torch_models import torch_gpt
from ci.bench.train_step import our_step, torch_step
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build
from extensor.optim import AdamW

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
CLIP = 1.0


def contestant(name: str) -> Callable[[], None]:
    """The step of ``name``, torch or a recipe of ours."""
    config, rng = GPTConfig(), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab, (12, config.context + 1))
    batch = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    model = build(config, np.random.default_rng(0))
    if name != "torch":
        return our_step(model, name, partial(AdamW, **ADAMW), *batch, clip=CLIP)
    import torch

    peer = torch_gpt(config, model.state_dict())
    return torch_step(peer, partial(torch.optim.AdamW, **ADAMW), *batch, clip=CLIP)


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
