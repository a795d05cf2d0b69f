"""``extensor convert``: a checkpoint in another program's layout, with a certificate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, TextColumn
from tyro.conf import Positional, arg

from extensor.cli.sheet import CommandError, Sheet, show
from extensor.errors import unknown_name
from extensor.generation.exchange import convert_tokenizer
from extensor.io.stored import TARGETS, Conversion, TensorCertificate, convert
from extensor.schema import printable

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[Positional[Path], arg(metavar="IN")],
    target: Annotated[Positional[Path], arg(metavar="OUT")],
    layout: str,
    only_lossless: bool = False,
    shard_gb: float = 5.0,
) -> None:
    """Write a checkpoint in another program's layout, with a certificate of every weight.

    IN is a Hugging Face folder, a .safetensors file or a GGUF file; OUT a folder, a .safetensors
    file, or for GGUF layouts a .gguf file. An OUT that exists is replaced at the end. What became
    of each weight, proved by comparing every value, is printed and written to certificate.json.
    `extensor formats --layouts` lists the layouts.

    example: extensor convert SmolLM2.gguf smollm2-nvfp4 --layout compressed-tensors-nvfp4

    Args:
        source: The checkpoint to read.
        target: What to write.
        layout: A name from `extensor formats --layouts`, such as modelopt-nvfp4 or gguf-q4_1.
        only_lossless: Refuse, and write nothing, unless every value stays equal.
        shard_gb: Size at which safetensors files are cut, in units of 1e9 bytes.
    """
    if layout not in TARGETS:
        raise CommandError(unknown_name("layout", layout, TARGETS))
    if not shard_gb > 0:
        raise CommandError(f"--shard-gb: expected a number above 0, got {shard_gb}")
    try:
        to_gguf = TARGETS[layout].container == "gguf"
        files, metadata, notes = convert_tokenizer(source, to_gguf)
        console = Console(stderr=True)
        columns = TextColumn("{task.description}")
        hidden = not console.is_terminal
        with Progress(columns, console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task("")
            done = convert(
                source,
                target,
                layout,
                only_lossless=only_lossless,
                shard_bytes=int(shard_gb * 1e9),
                files=files,
                metadata=metadata,
                progress=lambda name: bar.update(task, description=printable(name)),
            )
    except ValueError as error:
        raise CommandError(str(error)) from None
    show([_sheet(f"{source} -> {target}", done)])
    for note in [*notes, *done.notes]:
        print(f"note: {printable(note)}")
    if done.dropped:
        print(printable(f"note: not in this layout, left out: {', '.join(done.dropped)}"))


def _sheet(title: str, done: Conversion) -> Sheet:
    rows = [_row(c) for c in done.certificates]
    exact = sum(c.lossless for c in done.certificates)
    before = sum(c.nbytes_before for c in done.certificates)
    after = sum(c.nbytes_after for c in done.certificates)
    summary = f"{exact} of {len(rows)} lossless"
    rows.append(("all", "", str(before), "", str(after), summary, "", ""))
    columns = ("tensor", "from", "bytes", "to", "bytes", "SQNR dB", "largest error", "blocks")
    return Sheet(title, columns, tuple(rows))


def _row(c: TensorCertificate) -> tuple[str, ...]:
    sizes = str(c.nbytes_before), str(c.nbytes_after)
    if c.lossless:
        return c.name, c.before, sizes[0], c.after, sizes[1], "lossless", "", ""
    noise = f"{c.sqnr_db:.2f}" if math.isfinite(c.sqnr_db) else "NaN or Inf"
    changed = f"{c.blocks} of {c.of_blocks}"
    return c.name, c.before, sizes[0], c.after, sizes[1], noise, f"{c.max_error:.3g}", changed
