"""``extensor perplexity``: how well a language model predicts a text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from extensor.cli.language import ModelPath, load_language_model
from extensor.cli.sheet import CommandError, read_text
from extensor.generation import Perplexity, token_losses
from extensor.nn.ptq import dequantize_model, packed_layers, quantize_model
from extensor.quant.schemes import get_scheme

__all__ = ["perplexity"]


def perplexity(
    model: ModelPath,
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    context: int | None = None,
    stride: int | None = None,
    limit: int = 0,
    batch: int = 4,
    scheme: str | None = None,
    cache: str | None = None,
) -> None:
    """Measure how well a model predicts a text: its perplexity, and the standard error.

    Each token but the first counts once. The standard error takes tokens for independent draws.

    example: extensor perplexity SmolLM2-135M-Instruct.gguf book.txt --context 1024

    Args:
        model: A folder with config.json, a .gguf file, or a run of `extensor train gpt`.
        file: A text in UTF-8.
        context: How many tokens the model sees at once; 512, or the model's context if smaller.
        stride: How many tokens are counted in each window but the first; half of the context.
        limit: Count the first so many tokens only; 0 counts all.
        batch: Windows that pass through the model at once.
        scheme: Quantize the model first, by a scheme that `extensor ptq --help` lists.
        cache: Round keys and values to this format before attention reads them.
    """
    text = read_text(file)
    if scheme is not None:
        try:
            get_scheme(scheme)
        except ValueError as error:
            raise CommandError(f"--scheme: {error}") from None
    loaded = load_language_model(model)
    most = loaded.context
    context = min(512, most or 512) if context is None else context
    if most is not None and context > most:
        raise CommandError(f"--context: expected at most the {most} of the model, got {context}")
    try:
        tokens = loaded.tokenizer.encode(text)[: limit or None]
        if len(tokens) < 2:
            raise CommandError(f"{file}: expected a text of 2 tokens or more, got {len(tokens)}")
        scored = loaded.model
        if scheme is not None:
            if packed_layers(scored):
                print("its packed weights are decoded, then rounded again", file=sys.stderr)
                scored = dequantize_model(scored)
            scored = quantize_model(scored, scheme)
        batches = token_losses(scored, tokens, context, stride, batch, cache)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    start = time.perf_counter()
    found = Perplexity(np.concatenate(list(_watched(batches, len(tokens) - 1))))
    seconds = time.perf_counter() - start
    Console(highlight=False).print(
        f"perplexity {found.value:.4f} ± {found.standard_error:.4f} on {len(found.losses):,} tokens"
        f" ({len(found.losses) / seconds:,.0f} tokens/s)"
    )


def _watched(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Batches of losses, with a bar on standard error that shows the perplexity so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("perplexity", total=count)
        total, counted = 0.0, 0
        for losses in batches:
            total, counted = total + float(losses.sum()), counted + len(losses)
            bar.update(
                task, completed=counted, description=f"perplexity {math.exp(total / counted):.3f}"
            )
            yield losses
