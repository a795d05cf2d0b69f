"""A small GPT in PyTorch, trained on Shakespeare in FP4.

    python docs/how-to/torch_gpt.py [--recipe mxfp4] [--steps 300] [--text FILE]

Everything but two lines is PyTorch. It takes about half a minute on two CPU cores and ends with the
loss on text that it has not seen, and a line that it writes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import extensor.torch as ext

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 128, 4, 3, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    scores = model(windows[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mxfp4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, help="instead of Shakespeare's plays")
    chosen = parser.parse_args()
    if chosen.text is None:
        from extensor.training.data.corpora import shakespeare  # downloaded once

        text = shakespeare().train[:400_000]
    else:
        text = chosen.text.read_text("utf-8")
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    train, test = data[: -len(data) // 10], data[-len(data) // 10 :]

    torch.manual_seed(0)
    model = GPT(len(letters))
    ext.quantize_(model, recipe=chosen.recipe, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(chosen.steps):
        optimizer.zero_grad()
        loss = loss_of(model, train, torch.randint(len(train) - CONTEXT - 1, (BATCH,)))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)

    with torch.no_grad():
        windows = torch.arange(0, len(test) - CONTEXT - 1, CONTEXT)[:256]
        print(f"test loss {loss_of(model, test, windows).item():.3f}")
        tokens = test[None, :8]
        for _ in range(56):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        print("".join(letters[i] for i in tokens[0]))
    for (path, slot), counts in list(ext.telemetry(model).items())[:3]:
        print(f"{path} {slot}: {counts.flushed / counts.count:.1%} flushed to zero")

    with tempfile.TemporaryDirectory() as folder:  # weights and clocks: a run resumes with its bits
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        again = ext.quantize_(GPT(len(letters)), recipe=chosen.recipe, seed=0)
        again.load_state_dict(torch.load(Path(folder) / "model.pt"))


if __name__ == "__main__":
    main()
