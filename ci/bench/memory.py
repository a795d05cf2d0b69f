"""What a training step keeps for backward, and its peak: recipes beside float32 and torch.

    python ci/bench/memory.py                 # the CPU: bytes by the ledger, exact on any machine
    python ci/bench/memory.py --device cuda   # a block of width 4096: bytes of the GPU, and times

CPU: four transformer blocks of width 1024 (2 x 512 tokens), and ResNet-18 for CIFAR-10 (batch 16).
"saved" is what operations keep when the forward pass ends, "peak" the most of forward and backward,
weights and gradients included (`et.inspect.memory_ledger`). Torch's saved bytes are those of the
storages that its graph packs, parameters left out. "mxfp8 saved" stores what other operations keep
in MXFP8, "recomputed" runs blocks again, "cheap recomputed" what takes no product. CUDA: the
contestants of ``cuda_step.py --only layers``, captured, 16,384 tokens, beside torch.compile in
bfloat16; under 5 minutes on an H100. Needs torch.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any, Literal

import numpy as np

import extensor as et
from ci.bench.contest import arguments, options, shown, write
from ci.bench.torch_models import torch_resnet
from extensor import models, nn
from extensor.optim import SGD
from extensor.quant.recipe import Recipe, SavedRule
from extensor.quant.recipes import get_recipe

WIDTH, BLOCKS, TOKENS, IMAGES = 1024, 4, (2, 512), 16
BLOCKWISE = (SavedRule("*", "mxfp8"),)


Again = bool | Literal["cheap"]


def contestants(recipe: str) -> dict[str, tuple[Recipe, Again]]:
    """By name: a recipe, and whether blocks are run again (`Module.recomputed`)."""
    plain = get_recipe(recipe)
    return {
        "fp32": (get_recipe("fp32"), False),
        f"{recipe}, inputs kept": (replace(plain, saved_input="input"), False),
        recipe: (plain, False),
        f"{recipe}, mxfp8 saved": (replace(plain, saved=BLOCKWISE), False),
        f"{recipe}, cheap recomputed": (plain, "cheap"),
        f"{recipe}, recomputed": (plain, True),
    }


def blocks() -> tuple[nn.Module, np.ndarray[Any, Any]]:
    """Four transformer blocks, and their input."""
    rng = np.random.default_rng(0)
    made = [
        nn.TransformerBlock(
            nn.MultiheadAttention(WIDTH, 16, causal=True, rng=rng),
            nn.FeedForward(WIDTH, 4 * WIDTH, rng=rng),
        )
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*made), rng.standard_normal((*TOKENS, WIDTH)).astype(np.float32)


def resnet() -> tuple[nn.Module, np.ndarray[Any, Any]]:
    """ResNet-18 as it is trained on CIFAR-10, and images."""
    rng = np.random.default_rng(0)
    model: nn.Module = models.build("resnet", models.config("resnet"), rng)
    return model, rng.standard_normal((IMAGES, 3, 32, 32)).astype(np.float32)


def ours(name: str, recipe: Recipe, recomputed: Again) -> dict[str, float]:
    """Megabytes saved, and at the peak, of the second step."""
    model, inputs = blocks() if name == "blocks" else resnet()
    nn.apply_recipe(model, recipe)
    if recomputed:
        for part in model if isinstance(model, nn.Sequential) else _children(model):
            part.recomputed = recomputed
    x, update = et.from_numpy(inputs), SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        update.zero_grad()
        gc.collect()
        with et.inspect.memory_ledger(model) as ledger:
            out = model(x)
            loss = out.square().mean()
            del out
            forward = ledger.report()
            loss.backward()
        update.step()
    saved = sum(one.nbytes for one in forward.at(-1) if one.kind == "saved")
    return {"saved_mb": saved / 1e6, "peak_mb": ledger.report().peak / 1e6}


def _children(model: nn.Module) -> list[nn.Module]:
    """The blocks of a residual network."""
    return [part for _, part in model.named_modules() if type(part).__name__ == "BasicBlock"]


def theirs(name: str) -> dict[str, float]:
    """Megabytes that torch's graph of the same model keeps in float32."""
    import torch

    if name == "blocks":
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 16, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        peer: Any = torch.nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        x = torch.zeros(*TOKENS, WIDTH)
    else:
        peer, x = torch_resnet(), torch.zeros(IMAGES, 3, 32, 32)
    own = {p.untyped_storage().data_ptr() for p in (*peer.parameters(), *peer.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = peer(x).square().mean()
    assert loss.requires_grad
    return {"saved_mb": sum(kept.values()) / 1e6}


def on_cpu(recipe: str) -> list[dict[str, Any]]:
    """Rows of both models."""
    rows = []
    for name in ("blocks", "resnet"):
        found = {"torch fp32": theirs(name)}
        found |= {title: ours(name, *how) for title, how in contestants(recipe).items()}
        whole = found["torch fp32"]["saved_mb"]
        rows += shown(
            {"model": name, "step": title, **{k: round(v, 1) for k, v in one.items()}}
            | {"saved_of_torch": round(one["saved_mb"] / whole, 3)}
            for title, one in found.items()
        )
    return rows


def on_gpu(rounds: int) -> None:
    """Runs ``cuda_step``'s block of width 4096 with inputs packed, and kept as they are."""
    from ci.bench import cuda_step

    kept = replace(get_recipe("mxfp4_all"), name="mxfp4_all, inputs kept", saved_input="input")
    sys.argv[1:] = ["--only", "layers", "--rounds", str(rounds), "--activations", "bfloat16"]
    cuda_step.main(["mxfp4_all", kept, "mxfp8_rebased"])


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=9)
    parser.add_argument("--recipe", default="mxfp4_all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = arguments(parser)
    if args.device == "cuda":
        on_gpu(args.rounds)
        return
    args.max_load = float("inf")  # bytes do not depend on it
    write("memory", on_cpu(args.recipe), args=args)


if __name__ == "__main__":
    main()
