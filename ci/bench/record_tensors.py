"""Record X, W and G of a GPT's linear layers in training, as data for the GPU benchmarks.

    OMP_NUM_THREADS=2 python ci/bench/record_tensors.py FILE.npz [--steps 50] [--width 512] ...

Trains a GPT on Shakespeare under a recipe on the CPU and keeps, at the last step, what quantized
products of the first and the last block read: inputs (M, K), weights (N, K) and gradients (M, N),
as the bits of bfloat16; prints how far each one's MXFP4 scales range. FILE is for `cuda_gemm.py
--data` and `cuda_linear.py --data`; keep it outside the repository.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import extensor as et
from ci.bench.contest import command
from ci.bench.gpt_torch import run_config
from extensor.backends import registry
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build
from extensor.nn.recipe import apply_recipe
from extensor.ops import recipe_operands
from extensor.optim import AdamW, clip_grad_norm
from extensor.quant.spec import QuantSpec
from extensor.training.tasks.language import Causal
from extensor_cuda.matmul.rebase import E5M2_SPAN, INT8_SPAN

KINDS = {"fprop.x": "x", "fprop.w": "w", "dgrad.g": "g"}
"""The slots whose matrices are kept, and what they are called."""

Tensors = dict[str, dict[str, np.ndarray]]


@contextmanager
def recording(into: Tensors) -> Iterator[None]:
    """Within it what quantized products read is kept by layer: "x", "w" and "g"."""
    make_operands = recipe_operands.make_operands

    def recorder(backend: Any, x: Any, context: Any, slots: Any, sizes: Any, *more: Any) -> Any:
        kind = KINDS.get(slots[0][0])
        if kind is not None:
            held = np.asarray(x, dtype=np.float32).astype(ml_dtypes.bfloat16)
            into.setdefault(context.path, {})[kind] = held
        return make_operands(backend, x, context, slots, sizes, *more)

    module: Any = recipe_operands
    module.make_operands = recorder
    try:
        yield
    finally:
        module.make_operands = make_operands


def save(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Layers that have all three, as bfloat16 bits named "layer x", and what made them."""
    whole = {name: kinds for name, kinds in tensors.items() if set(kinds) == set(KINDS.values())}
    arrays: dict[str, Any] = {
        f"{name} {kind}": array.view(np.uint16)
        for name, kinds in whole.items()
        for kind, array in kinds.items()
    }
    np.savez(path, about=np.array(json.dumps(about)), **arrays)


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """What `save` wrote: bfloat16 matrices by layer, and what made them.

    Raises:
        ValueError: if the file is not one of these.
    """
    with np.load(path) as held:
        if "about" not in held:
            raise ValueError(f"{path} is no file of record_tensors.py")
        tensors: Tensors = {}
        for name in held.files:
            if name == "about":
                continue
            layer, _, kind = name.rpartition(" ")
            tensors.setdefault(layer, {})[kind] = held[name].view(ml_dtypes.bfloat16)
        return tensors, json.loads(str(held["about"]))


def spans(x: np.ndarray, axis: int) -> dict[str, Any]:
    """How far the scales of a matrix's MXFP4 blocks range, in binades, and what that allows.

    Blocks of zeros alone do not count.

    Args:
        x: matrix.
        axis: along which it is blocked: 1, its rows, or 0, its columns.

    Returns:
        "tensor_span" and "widest_row" in binades; "int8_rows" and "fp8_rows", shares of rows (or
        columns) that fit; "path": of products that shift each row by itself, and "path_of_one":
        of those, as in training, that shift all of the tensor alike.
    """
    rows = np.ascontiguousarray(x.astype(np.float32) if axis == 1 else x.astype(np.float32).T)
    spec = QuantSpec("mxfp4", axis=1, scale_rule="rceil").resolve(2)
    q, _ = registry.get("cpu").quantize(rows, spec)
    live = (q.codes.reshape(*q.scales.shape, -1) & 0x77).any(axis=-1)
    scales = q.scales.astype(int)
    top, low = np.where(live, scales, -1), np.where(live, scales, 256)
    wide = np.maximum(top.max(axis=1) - low.min(axis=1), 0)
    widest, tensor = int(wide.max()), max(int(top.max() - low.min()), 0)
    return {
        "tensor_span": tensor,
        "widest_row": widest,
        "int8_rows": round(float((wide <= INT8_SPAN).mean()), 4),
        "fp8_rows": round(float((wide <= E5M2_SPAN).mean()), 4),
        "path": "int8" if widest <= INT8_SPAN else "fp8" if widest <= E5M2_SPAN else "bf16",
        "path_of_one": "fp8" if tensor <= E5M2_SPAN else "bf16",
    }


def all_spans(tensors: Tensors) -> Iterator[dict[str, Any]]:
    """A row of `spans` for each matrix, along its rows and along its columns."""
    for name, kinds in tensors.items():
        for kind, x in kinds.items():
            for axis, way in ((1, "rows"), (0, "columns")):
                yield {"size": name, "name": f"{way} of {kind} {x.shape}"} | spans(x, axis)


def train(shape: GPTConfig, recipe: str, steps: int, batch: int, seed: int) -> Tensors:
    """Train for some steps; the matrices of the first and the last block at the last one."""
    config = replace(
        run_config(seed), context=shape.context, batch_size=batch, recipe=recipe, epoch_steps=steps
    )
    task = Causal(config)
    shape = replace(shape, vocab=task.shapes()["vocab"])
    model = build(shape, np.random.default_rng(seed))
    state = apply_recipe(model, recipe, seed=seed)
    optimizer = AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    tensors: Tensors = {}
    for step, data in enumerate(task.training(1, 0), start=1):
        state.step = step
        optimizer.zero_grad()
        with recording(tensors):
            scores = model(et.from_numpy(data.inputs))
            labels = et.from_numpy(data.labels.reshape(-1))
            loss = et.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)
            loss.backward()
        if step == steps:
            print(f"step {step}: loss {float(loss):.4f}")
            break
        clip_grad_norm(optimizer.params, config.clip_norm)
        optimizer.step()
    ends = (".0.", f".{shape.layers - 1}.")
    return {name: kinds for name, kinds in tensors.items() if any(e in name for e in ends)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write, outside the repository")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--recipe", default="mxfp4_all")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    shape = GPTConfig(
        context=chosen.context,
        layers=chosen.layers,
        heads=max(chosen.width // 64, 1),
        width=chosen.width,
    )
    tensors = train(shape, chosen.recipe, chosen.steps, chosen.batch, chosen.seed)
    save(chosen.file, tensors, {"command": command(), **vars(chosen) | {"file": chosen.file.name}})
    for row in all_spans(tensors):
        print(*row.values())
    print(f"written to {chosen.file}")


if __name__ == "__main__":
    main()
