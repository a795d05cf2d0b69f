"""The same model, batches and optimizer in torch: torch.compile in bfloat16, and torchao's float8.

Torch is imported when asked for, and only here. Weights and AdamW's states are float32, as in ours;
products run under autocast. Steps are CUDA graphs (``reduce-overhead``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..batch import Batch
from ..config import RunConfig
from .cost import Meter

__all__ = ["PEERS", "measure_peer"]

FIRST, PART = 12, 16


def _model(shape: Any, torch: Any) -> Any:
    """A decoder of the shape of a `LlamaConfig` whose heads are as many for keys as for queries."""
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            wide, hidden = shape.width, shape.hidden
            self.before, self.after = nn.RMSNorm(wide, shape.eps), nn.RMSNorm(wide, shape.eps)
            self.q, self.k, self.v, self.o = (nn.Linear(wide, wide, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(wide, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, wide, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            batch, tokens, wide = x.shape
            y = self.before(x)
            heads = (batch, tokens, shape.heads, shape.head_size)
            q, k, v = (f(y).view(heads).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, wide))
            y = self.after(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return out.to(x.dtype)

    class Decoder(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab, shape.width)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width, shape.eps)
            half = torch.arange(shape.head_size // 2) / (shape.head_size // 2)
            angles = torch.outer(torch.arange(shape.context), shape.rope.base**-half)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, tokens: Any, labels: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
            scores = functional.linear(self.norm(x), self.embed.weight)
            return functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())

    return Decoder()


def _float8(model: Any) -> Any:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model)


PEERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile bf16": lambda model: model,
    "torchao float8": _float8,
}
"""What is done to the model; by name."""


def measure_peer(
    name: str,
    config: RunConfig,
    shape: Any,
    batches: Iterator[Batch],
    seconds: float,
    compiled: bool = True,
) -> dict[str, Any]:
    """Train for some seconds: as `measure` of our own.

    Args:
        name: a row of `PEERS`.
        config: of the run.
        shape: its `LlamaConfig`.
        batches: without an end.
        seconds: at least.
        compiled: False for torch's eager mode.

    Raises:
        ImportError: without torch, or torchao.
    """
    import torch

    device = torch.device(config.device)
    gpu = device.type == "cuda"
    meter = Meter(os.getpid(), config.device)
    empty = meter.in_use()
    torch.manual_seed(config.seed)
    model = PEERS[name](_model(shape, torch).to(device))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": config.weight_decay},
         {"params": rest, "weight_decay": 0.0}],
        lr=config.lr, betas=(config.beta1, config.beta2), fused=gpu,
    )  # fmt: skip
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model

    def step(batch: Batch) -> Any:
        if gpu:
            torch.compiler.cudagraph_mark_step_begin()
        tokens, labels = (
            torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True)
            for a in (batch.inputs, batch.labels)
        )
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(tokens, labels)
        loss.backward()
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    for _ in range(FIRST if compiled else 1):
        float(step(next(batches)))
    meter.restart()
    done, loss = 0, 0.0
    while meter.seconds < seconds:
        for _ in range(PART if gpu else 1):
            found, done = step(next(batches)), done + 1
        loss = float(found)
    labels = done * config.batch_size * config.context
    return meter.rate(done, labels, empty) | {"loss": loss}
