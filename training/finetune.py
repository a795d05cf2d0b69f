"""Tune a pretrained language model on a text: adapters on frozen weights, packed or not."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from extensor import ExTensor, cross_entropy
from extensor.cli.language import load_language_model
from extensor.cli.sheet import CommandError, read_text
from extensor.generation import Perplexity, token_losses
from extensor.io import save_checkpoint
from extensor.nn import (
    DoRA,
    LoRA,
    Module,
    add_adapters,
    dequantize_model,
    merge_adapters,
    packed_layers,
    quantize_model,
)
from extensor.optim import AdamW, WarmupCosine, clip_grad_norm
from extensor.quant.schemes import SCHEMES

from .data import DATASETS, load_dataset
from .data.corpora import Corpus
from .rundir import UsageError

__all__ = ["FinetuneArgs", "Tuned", "finetune", "tune_adapters"]

KINDS: dict[str, type[LoRA]] = {"lora": LoRA, "dora": DoRA}
ADAPTERS, RESULT, MERGED = "adapters.safetensors", "finetune.json", "merged"


@dataclass(frozen=True, kw_only=True)
class FinetuneArgs:
    """Flags of `finetune`."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder with config.json, or a .gguf file."""
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|DATASET")]
    """A text in UTF-8, or a data set of text, such as shakespeare; its last tenth is held out to
    measure perplexity."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """A new folder for the adapters, the tuned model and what was measured."""
    scheme: str | None = None
    """Quantize the weights first, by a scheme that `extensor ptq --help` lists; "float32" decodes
    them. Left out, they stay as the file stores them."""
    kind: str = "lora"
    """lora, or dora."""
    rank: int = 8
    """The adapters' rank."""
    steps: int = 100
    """Steps of the optimizer."""
    batch: int = 4
    """Windows of a step."""
    context: int = 128
    """Tokens of a window."""
    lr: float = 1e-3
    """Peak learning rate of AdamW: a tenth of the steps up, then a cosine down."""
    layout: str | None = None
    """How the merged model is written; left out, as its weights are stored. `extensor formats
    --layouts` lists them."""
    rounding: str = "nearest_even"
    """How the merged weights are rounded: nearest_even, or stochastic."""
    test_tokens: int = 2048
    """So many held-out tokens are measured; 0 measures all."""
    seed: int = 0
    """Seed of the adapters, the windows and the rounding."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.scheme not in (None, "float32", *SCHEMES):
            raise UsageError(f"--scheme: expected float32 or a scheme, got {self.scheme!r}")
        for name in ("rank", "steps", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.context < 2 or self.test_tokens < 0 or self.seed < 0 or not self.lr > 0:
            raise UsageError(
                "expected a --context of 2 or more, --test-tokens and --seed of 0 or more and an "
                f"--lr above 0, got {self}"
            )


@dataclass(frozen=True)
class Tuned:
    """What a tuning measured, perplexities on the held-out text with their standard errors."""

    before: tuple[float, float]
    tuned: tuple[float, float]
    merged: tuple[float, float]
    seconds: float
    losses: list[float]


def tune_adapters(
    model: Module, tokens: np.ndarray, args: FinetuneArgs, progress: Any = None
) -> list[float]:
    """Train a model's adapters on random windows of a text.

    Args:
        model: with adapters; what requires gradients is trained.
        tokens: of the text, (N,), more than the context.
        args: steps, batch, context, lr and seed.
        progress: called after each step.

    Returns:
        The loss of each step, nats per token.
    """
    rng = np.random.default_rng(args.seed)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=args.lr, weight_decay=0.0)
    warmup = args.steps // 10
    schedule = WarmupCosine(warmup, max(args.steps, warmup + 1))
    model.train()
    losses = []
    for step in range(args.steps):
        schedule.apply(optimizer, step)
        starts = rng.integers(0, len(tokens) - args.context, args.batch)
        windows = np.stack([tokens[start : start + args.context + 1] for start in starts])
        model.zero_grad()
        scores = model(ExTensor.from_numpy(windows[:, :-1].copy()))
        rows = scores.reshape((-1, scores.shape[-1]))
        loss = cross_entropy(rows, ExTensor.from_numpy(windows[:, 1:].reshape(-1).copy()))
        loss.backward()
        clip_grad_norm([p for _, p in trained], 1.0)
        optimizer.step()
        losses.append(loss.item())
        if progress is not None:
            progress(losses[-1])
    model.eval()
    return losses


def _corpus(name: str) -> Corpus:
    """The text of a file, or a data set of text."""
    if not Path(name).is_file() and name in DATASETS:
        found = load_dataset(name)
        if not isinstance(found, Corpus):
            raise UsageError(f"{name}: expected a text or a data set of text, got images")
        return found
    return Corpus.of(name, [read_text(Path(name))])


def finetune(args: FinetuneArgs, console: Console) -> Tuned:
    """Tune, measure before and after, merge, and write everything.

    Raises:
        UsageError: for a model, text or folder that cannot be used.
    """
    if args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"--out {args.out}: is not empty; the way out: another folder")
    try:
        corpus = _corpus(args.text)
        loaded = load_language_model(args.model)
        tokens, test = (loaded.tokenizer.encode(part) for part in (corpus.train, corpus.test))
    except (CommandError, OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if len(tokens) <= args.context or len(test) < 2:
        raise UsageError(
            f"{args.text}: expected more than {args.context} tokens before the held-out tenth, got "
            f"{len(tokens)}; the way out: a longer text, or a shorter --context"
        )
    model = loaded.model
    if args.scheme is not None and packed_layers(model):
        model = dequantize_model(model)
    if args.scheme not in (None, "float32"):
        model = quantize_model(model, args.scheme)
    test = test[: args.test_tokens or None]

    def measured() -> tuple[float, float]:
        context = min(512, len(test), loaded.context or 512)
        found = Perplexity(np.concatenate(list(token_losses(model, test, context, batch=1))))
        return found.value, found.standard_error

    start = time.perf_counter()
    before = measured()
    console.print(f"perplexity before {before[0]:.3f} ± {before[1]:.3f}")
    paths = add_adapters(model, args.rank, kind=KINDS[args.kind], rng=args.seed)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("tuning", total=args.steps)
        losses = tune_adapters(
            model,
            tokens,
            args,
            lambda loss: bar.update(task, advance=1, description=f"loss {loss:.3f}"),
        )
    tuned = measured()
    console.print(f"perplexity after {tuned[0]:.3f} ± {tuned[1]:.3f}")
    args.out.mkdir(parents=True, exist_ok=True)
    adapters = {name: p.numpy() for name, p in model.named_parameters() if p.requires_grad}
    how = {"kind": args.kind, "rank": args.rank, "paths": paths}
    save_checkpoint(args.out / ADAPTERS, adapters, {"adapters": how})
    report = merge_adapters(model, args.rounding, args.seed)
    merged = measured()
    console.print(f"perplexity after merging {merged[0]:.3f} ± {merged[1]:.3f}")
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(args.out / MERGED, args.layout)
    else:
        save_checkpoint(args.out / f"{MERGED}.safetensors", model.state_dict())
    result = Tuned(before, tuned, merged, time.perf_counter() - start, losses)
    flags = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(args).items()}
    content = {"args": flags, **asdict(result), "weights": [asdict(row) for row in report]}
    (args.out / RESULT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return result
